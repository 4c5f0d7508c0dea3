"""Bound from below what the busiest rank of any plan has to do, as `CostModel` counts it.

The largest of: the *average* over ranks of the cheapest form of every table, whatever fits; the same with the rows in a
slower memory that the devices cannot hold, those that cost least there for their bytes; and the largest *piece*, with
what every rank has beside it: of a table that may be cut the smallest that there is (a row of one block of columns, or
as many rows as are left when there is one part per rank), of one whose cut is given its largest tile. Exchanges of
copies and of sums, which not every plan has, are in it where they cannot be done without, or pay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from hotbed.plan.candidates import Form, column_parts, form_of, hot_prefix
from hotbed.plan.cost import DISK, HOST, CostModel, tile_bytes
from hotbed.plan.parts import Array, kind_of, part_cost
from hotbed.plan.schemes import Cut
from hotbed.plan.tiling import Tier, Tile
from hotbed.plan.workload import TableUse


@dataclass(frozen=True)
class Bound:
    """Least load of the busiest rank, in the unit of the cost model."""

    average: float
    memory: float
    """What rows in a slower memory add to the average."""
    piece: float
    """The largest piece, with what every rank has."""
    piece_of: str
    """The table that it is of."""
    exchanges: float = 0.0
    """Of each of them, what exchanges of copies and sums take, whoever owns what."""

    @property
    def load(self) -> float:
        """The bound."""
        return max(self.average + self.memory, self.piece)

    @property
    def binds(self) -> str:
        """What the bound is."""
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
    """Bound the busiest rank's load: the least of plans with and without copies, and with and without sums.

    Copies of rows have exchanges of their own, and so have sums over the columns of rows that are cut. Where a table's
    own cut needs one of them, all plans have it.
    """
    extra = _overflow_load(model, overflow, tiers, staying) if overflow > 0 else 0.0
    given = {name: form_of(model.workload.by_table[name], cut, model) for name, cut in fixed.items()}
    copies = [True] if any(form.has_copies for form in given.values()) else [False, True]
    sums = [True] if any(form.has_sums for form in given.values()) else [False, True]
    bounds = [_bound(model, given, extra, copies=c, sums=s) for c in copies for s in sums]
    return min(bounds, key=lambda bound: bound.load)


def _bound(model: CostModel, given: Mapping[str, Form], extra: float, *, copies: bool, sums: bool) -> Bound:
    """Bound plans that have the exchanges of copies and of sums, or have not, and so no forms that need them."""
    size = model.world_size
    exchanges = model.copies_s * copies + model.sums_s * sums
    totals, everywhere = 0.0, exchanges
    pieces: list[tuple[float, str]] = []
    for use in model.workload.uses:
        name = use.table.name
        if name in given:
            shares = _shares(given[name], model)
            totals += shares.total
            everywhere += shares.everywhere
            pieces += [(load, name) for load in shares.tiles]
            continue
        forms = _forms(use, 1, model, copies=copies, sums=sums)
        totals += min(form.total for form in forms)
        everywhere += min(form.everyone for form in forms)
        pieces.append((min(form.largest for form in forms), name))

    def smallest(piece: tuple[float, str]) -> tuple[float, str]:
        """The largest tile of its table where that is cut as far as it may be."""
        load, name = piece
        if name in given:
            return piece
        cut = _forms(model.workload.by_table[name], 0, model, copies=copies, sums=sums)
        return min(load, *(form.largest for form in cut)), name

    def of_two() -> tuple[float, str]:
        """The least that two of more pieces than ranks have together: they share a rank."""
        (a, _), (b, name) = pieces[size - 1 : size + 1]
        return a + b, name

    room = totals / size - everywhere  # of a rank; only more than that can bind
    pieces = sorted((smallest(piece) if piece[0] > room else piece for piece in pieces), reverse=True)
    if len(pieces) > size and of_two()[0] > room:
        pieces = sorted(map(smallest, pieces), reverse=True)
    largest = [*pieces[:1], (0.0, ""), *([of_two()] if len(pieces) > size else [])]
    piece, last = max(largest, key=lambda piece: piece[0])
    return Bound(totals / size + exchanges, extra / size, piece + everywhere, last, exchanges)


class _Shares(NamedTuple):
    """Load of a table that is cut in a given way: of all ranks together, of each at least, of single tiles beside."""

    total: float
    everywhere: float
    tiles: list[float]


def _shares(form: Form, model: CostModel) -> _Shares:
    size, total, everywhere = model.world_size, 0.0, 0.0
    tiles: list[float] = []
    for part in form.parts:
        alike = Counter(kind_of(rows) for rows in part.rows)
        first = {kind_of(rows): rows for rows in part.rows}
        costs = [(part_cost(replace(part, rows=(first[kind],)), model), count) for kind, count in alike.items()]
        total += sum(n * (size * c.everyone + c.owner + (size - 1) * c.reader) for c, n in costs)
        everywhere += sum(n * (c.everyone + c.reader) for c, n in costs)
        owners = [c.owner - c.reader for c, n in costs for _ in range(n)]
        least = min(owners) if len(owners) == size else 0.0  # each rank has one
        everywhere += least
        tiles += [load - least for load in owners if load > least]
    return _Shares(total, everywhere, tiles)


def _forms(use: TableUse, rows: int, model: CostModel, *, copies: bool, sums: bool) -> list[Form]:
    """A table with so many row parts, cut by columns or not, with copies or without."""
    copied = [False, True] if model.world_size > 1 and copies else [False]
    cuts = [Cut(rows, cols, copy) for cols in column_parts(use) for copy in copied]
    forms = [form_of(use, cut, model) for cut in (*cuts, *(hot_prefix(use, rows, model) if copies else ()))]
    return [form for form in forms if sums or not form.has_sums]


def _overflow_load(model: CostModel, overflow: int, tiers: Sequence[Tier], staying: Collection[str]) -> float:
    """Least load, of all ranks together, of so many bytes in slower memories."""
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
    """Load of rows in the cheapest of slower memories, and their bytes; of stretches of rows that are alike."""
    whole = Tile(use.table.name, range(use.table.rows), range(use.table.dim), 0)
    prices = (model.tile(replace(whole, tier=tier)).prices[DISK if tier == "disk" else HOST] for tier in tiers)
    record = tile_bytes(use.table, whole, use.moments) / use.table.rows
    rows = np.diff(use.expected.edges)
    lookups = use.ids * model.local_batch * model.world_size
    touched = rows * -np.expm1(-use.expected.rates * lookups)
    return 2 * touched * record * min(prices), rows * record  # floats: bytes of rows × rows are beyond 64 bits
