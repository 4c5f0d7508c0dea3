"""Compute a lower bound of the busiest rank's load over all plans, in the unit of `CostModel`.

The bound is the largest of:

- the *average* over ranks of the cheapest form of every table, without regard to memory;
- this average with the overflow of device memory in slower memory, namely the rows with the least cost per byte;
- the largest *piece* plus the load that every rank has. A piece of a table is its smallest possible tile (a row of one
  block of columns, or the rows of one part per rank). For a table with a given cut, it is the largest tile.

Exchanges of copies, of sums and of pooled vectors are optional. The bound includes them if a given cut needs them, or
if they pay off. A table that sends pooled vectors is not cut by rows, so its tiles may be large. For a load ``z`` of
the busiest rank, the average counts a form with pooled vectors only if its largest tile has at most the load ``z``. The
bound is the least ``z`` that is not below its average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from hotbed.plan.candidates import Form, column_parts, form_of, hot_prefix, may_pool, pooled_forms
from hotbed.plan.cost import DISK, HOST, CostModel, tile_bytes
from hotbed.plan.parts import Array, cost_class, part_cost
from hotbed.plan.schemes import Cut
from hotbed.plan.tiling import Tier, Tile
from hotbed.plan.workload import TableUse

Pooled = Literal["none", "some tables", "whole dims"]
"""Tables that send pooled vectors because the search chose them: none, some tables of a dim, or all tables of dims."""


@dataclass(frozen=True)
class Bound:
    """Lower bound of the busiest rank's load, in the unit of the cost model."""

    average: float
    memory: float
    """Addition to the average of rows in slower memory."""
    piece: float
    """Largest piece plus the load that every rank has."""
    piece_of: str
    """Table of the largest piece."""
    exchanges: float = 0.0
    """Load of each rank for exchanges of copies, sums and pooled vectors."""

    @property
    def load(self) -> float:
        """Value of the bound."""
        return max(self.average + self.memory, self.piece)

    @property
    def binds(self) -> str:
        """Name of the largest term."""
        if self.piece > self.average + self.memory:
            return f"a piece of table '{self.piece_of}'"
        return "the average over ranks" if self.memory == 0 else "the average, with rows in slower memory"


def lower_bound(
    model: CostModel,
    fixed: Mapping[str, Cut],
    overflow: int = 0,
    tiers: Sequence[Tier] = ("host",),
    staying: Collection[str] = (),
) -> Bound:
    """Return the least bound of plans with and without copies, and with and without sums over columns.

    Both need exchanges of their own. If a given cut needs one of them, all plans include it.
    """
    extra = _overflow_load(model, overflow, tiers, staying) if overflow > 0 else 0.0
    given = {name: form_of(model.workload.by_table[name], cut, model) for name, cut in fixed.items()}
    copies = [True] if any(form.has_copies for form in given.values()) else [False, True]
    sums = [True] if any(form.has_sums for form in given.values()) else [False, True]
    free = any(may_pool(use, model) for use in model.workload.uses)
    pooled: list[Pooled] = ["none", "some tables", "whole dims"] if free else ["none"]
    bounds = [_bound(model, given, extra, copies=c, sums=s, pooled=p) for c, s, p in product(copies, sums, pooled)]
    return min(bounds, key=lambda bound: bound.load)


def _bound(
    model: CostModel, given: Mapping[str, Form], extra: float, *, copies: bool, sums: bool, pooled: Pooled
) -> Bound:
    """Bound the plans with, or without, the exchanges of copies, of sums, and of chosen pooled vectors."""
    size, options = model.world_size, {"copies": copies, "sums": sums, "pooled": pooled != "none"}
    exchanges = model.copies_s * copies + model.sums_s * sums
    if pooled != "none" or "pooled" in model.workload.wire.values():
        exchanges += model.least_pooled_s(some=pooled == "some tables")
    totals, everywhere = 0.0, exchanges
    pieces: list[tuple[float, str]] = []
    least: dict[str, float] = {}  # total loads by table, without chosen pooled vectors
    vectors: dict[str, list[Form]] = {}  # forms with chosen pooled vectors
    for use in model.workload.uses:
        name = use.table.name
        if name in given:
            shares = _load_of(given[name], model)
            totals += shares.total
            everywhere += shares.everywhere
            pieces += [(load, name) for load in shares.tiles]
            continue
        forms = _forms(use, 1, model, **options)
        vectors[name] = [form for form in forms if form.wire == "pooled"] if may_pool(use, model) else []
        least[name] = min(form.total for form in forms[: len(forms) - len(vectors[name])])
        everywhere += min(form.everyone for form in forms)
        pieces.append((min(form.largest for form in forms), name))

    totals += sum(least.values())
    choices = [_Choice(f.largest + exchanges, name, f.total) for name, forms in vectors.items() for f in forms]
    if pooled == "whole dims":
        choices, least = _whole_dims(model, vectors, least, exchanges)
    average = _average(totals / size + exchanges + extra / size, size, choices, least)
    totals = size * (average - exchanges - extra / size)

    def smallest(piece: tuple[float, str]) -> tuple[float, str]:
        """Return the largest tile of the finest cut of the piece's table."""
        load, name = piece
        if name in given:
            return piece
        cut = _forms(model.workload.by_table[name], 0, model, **options)
        return min(load, *(form.largest for form in cut)), name

    def of_two() -> tuple[float, str]:
        """Return the least sum of two pieces that share a rank, because there are more pieces than ranks."""
        (a, _), (b, name) = pieces[size - 1 : size + 1]
        return a + b, name

    room = totals / size - everywhere  # of a rank; only larger pieces can bind
    pieces = sorted((smallest(piece) if piece[0] > room else piece for piece in pieces), reverse=True)
    if len(pieces) > size and of_two()[0] > room:
        pieces = sorted(map(smallest, pieces), reverse=True)
    largest = [*pieces[:1], (0.0, ""), *([of_two()] if len(pieces) > size else [])]
    piece, last = max(largest, key=lambda piece: piece[0])
    return Bound(average - extra / size, extra / size, piece + everywhere, last, exchanges)


class _Choice(NamedTuple):
    """Pooled vectors of tables: the least load of a rank that allows them, the tables, and the total load."""

    load: float
    tables: str
    total: float


def _average(by_rows: float, size: int, choices: Sequence[_Choice], least: Mapping[str, float]) -> float:
    """Return the least load of a rank that is not below the average of the choices that it allows.

    ``by_rows`` is the average without choices, and ``least`` has the total loads of tables in it.
    """
    average, totals = by_rows, dict(least)
    for load, tables, total in sorted(choices):
        if average <= load:
            break
        saved = max(totals[tables] - total, 0.0)
        totals[tables] -= saved
        average = max(average - saved / size, load)
    return average


def _whole_dims(
    model: CostModel, vectors: Mapping[str, Sequence[Form]], least: Mapping[str, float], exchanges: float
) -> tuple[list[_Choice], dict[str, float]]:
    """Return a choice for each dim if all its tables may send pooled vectors, and the total loads of these dims."""
    by_dim: dict[int, list[str]] = {}
    for use in model.workload.uses:
        by_dim.setdefault(use.table.dim, []).append(use.table.name)
    found: list[_Choice] = []
    totals: dict[str, float] = {}
    given = {name for name, form in model.workload.wire.items() if form == "pooled"}
    for dim, names in by_dim.items():
        free = [name for name in names if vectors.get(name)]
        if free and all(name in given for name in names if name not in free):
            load = max(min(form.largest for form in vectors[name]) for name in free)
            total = sum(min(form.total for form in vectors[name]) for name in free)
            found.append(_Choice(load + exchanges, str(dim), total))
            totals[str(dim)] = sum(least[name] for name in free)
    return found, totals


class _TableLoad(NamedTuple):
    """Load of a table with a given cut: sum over ranks, minimum of each rank, and rest of single tiles."""

    total: float
    everywhere: float
    tiles: list[float]


def _load_of(form: Form, model: CostModel) -> _TableLoad:
    size, total, everywhere = model.world_size, 0.0, 0.0
    tiles: list[float] = []
    for part in form.parts:
        sizes = Counter(cost_class(rows) for rows in part.rows)
        first = {cost_class(rows): rows for rows in part.rows}
        costs = [(part_cost(replace(part, rows=(first[key],)), model), count) for key, count in sizes.items()]
        total += sum(n * (size * c.everyone + c.owner + (size - 1) * c.reader) for c, n in costs)
        everywhere += sum(n * (c.everyone + c.reader) for c, n in costs)
        owners = [c.owner - c.reader for c, n in costs for _ in range(n)]
        least = min(owners) if len(owners) == size else 0.0  # each rank owns one
        everywhere += least
        tiles += [load - least for load in owners if load > least]
    return _TableLoad(total, everywhere, tiles)


def _forms(use: TableUse, rows: int, model: CostModel, *, copies: bool, sums: bool, pooled: bool) -> list[Form]:
    """Return the forms of a table with a number of row parts, with and without column cuts, copies, pooled vectors."""
    copied = [False, True] if model.world_size > 1 and copies else [False]
    cuts = [Cut(rows, cols, copy) for cols in column_parts(use) for copy in copied]
    forms = [form_of(use, cut, model) for cut in (*cuts, *(hot_prefix(use, rows, model) if copies else ()))]
    if pooled and may_pool(use, model):
        forms += pooled_forms(use, model)
    return [form for form in forms if sums or not form.has_sums]


def _overflow_load(model: CostModel, overflow: int, tiers: Sequence[Tier], staying: Collection[str]) -> float:
    """Return the least load, summed over ranks, of ``overflow`` bytes in slower memory."""
    loads, sizes = [np.zeros(0)], [np.zeros(0)]
    for use in model.workload.uses:
        if use.table.name in staying:
            continue
        load, nbytes = _by_popularity(use, model, tiers)
        loads.append(load)
        sizes.append(nbytes)
    load, nbytes = np.concatenate(loads), np.concatenate(sizes)
    order = np.argsort(load / nbytes, kind="stable")
    taken = np.minimum(nbytes[order].cumsum(), overflow)
    return float((np.diff(taken, prepend=0) / nbytes[order] * load[order]).sum())


def _by_popularity(use: TableUse, model: CostModel, tiers: Sequence[Tier]) -> tuple[Array, Array]:
    """Return load and bytes of stretches of equally popular rows in the cheapest slower memory."""
    whole = Tile(use.table.name, range(use.table.rows), range(use.table.dim), 0)
    prices = (model.tile(replace(whole, tier=tier)).prices[DISK if tier == "disk" else HOST] for tier in tiers)
    record = tile_bytes(use.table, whole, use.moments) / use.table.rows
    rows = np.diff(use.expected.edges)
    lookups = use.ids * model.local_batch * model.world_size
    touched = rows * -np.expm1(-use.expected.rates * lookups)
    return 2 * touched * record * min(prices), rows * record  # floats, because bytes of rows × rows exceed 64 bits
