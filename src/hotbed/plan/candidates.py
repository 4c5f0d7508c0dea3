"""List the forms of a table in a plan: whole, cut by rows or columns or both, copied, or with copied hot rows.

A *form* is a cut with its parts and their costs. `form_for` chooses the cheapest form with small enough tiles. A table
that is not cut by rows may send pooled vectors instead of rows (`may_pool`), which does not change results.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import numpy as np

from hotbed.plan.cost import CostModel
from hotbed.plan.parts import Part, PartCost, part_cost, parts_of
from hotbed.plan.schemes import Cut
from hotbed.plan.tiling import WireFormat, column_unit
from hotbed.plan.workload import TableUse

OFTEN = 2.3
"""Expected lookups in a rank's batch above which copies of a row are tried: it occurs with 90 % probability."""
MOST_COPIED = 0.01
"""Largest share of a rank's row memory for copies of one table."""


@dataclass(frozen=True)
class Form:
    """A table with one cut, and the costs of its parts. The search chooses one form for each table."""

    use: TableUse
    cut: Cut
    parts: tuple[Part, ...]
    costs: tuple[PartCost, ...]
    """Costs of a tile of each part."""
    size: int
    """Number of ranks."""
    wire: WireFormat = "rows"

    @cached_property
    def everyone(self) -> float:
        """Load of each rank, independent of owners."""
        return sum(c.everyone * len(p.rows) for p, c in self._both)

    @cached_property
    def total(self) -> float:
        """Load summed over ranks."""
        return self.size * self.everyone + sum(
            len(p.rows) * (c.owner + (self.size - 1) * c.reader) for p, c in self._both
        )

    @cached_property
    def largest(self) -> float:
        """Largest load of a tile's owner."""
        return max(c.owner for c in self.costs)

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of the largest tile."""
        return max(c.nbytes for c in self.costs)

    @cached_property
    def nbytes(self) -> int:
        """Bytes summed over ranks."""
        return sum(len(p.rows) * (c.nbytes + (self.size - 1) * c.copy_bytes) for p, c in self._both)

    @property
    def is_even(self) -> bool:
        """Whether all ranks can own the same number of tiles of similar load."""
        return self.tiles % self.size == 0 and not self.cut.hot_rows

    def fits(self, most_load: float, most_bytes: float) -> bool:
        """Return whether all tiles are within the limits, or spread evenly over ranks."""
        return self.is_even or (self.largest <= most_load and self.tile_bytes <= most_bytes)

    @property
    def has_copies(self) -> bool:
        """Whether ranks have copies of rows, which are sent after each update."""
        return self.size > 1 and any(part.replicated for part in self.parts)

    @property
    def has_sums(self) -> bool:
        """Whether sums over columns are exchanged: the table has column parts, and its rule uses such sums."""
        return self.use.row_sums > 0 and any(len(part.cols) < self.use.table.dim for part in self.parts)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return sum(len(p.rows) for p in self.parts)

    @property
    def _both(self) -> Iterator[tuple[Part, PartCost]]:
        return zip(self.parts, self.costs, strict=True)


def form_of(use: TableUse, cut: Cut, model: CostModel, wire: WireFormat | None = None) -> Form:
    """Return the form of a table for a cut and a wire format (default: that of the workload)."""
    wire = wire or model.workload.wire.get(use.table.name, "rows")
    key = (use.table.name, cut, wire)
    if key not in model.memo:
        parts = tuple(replace(part, wire=wire) for part in parts_of(use.table, cut, model.world_size))
        costs = tuple(part_cost(part, model) for part in parts)
        model.memo[key] = Form(use, cut, parts, costs, model.world_size, wire)
    return model.memo[key]


def may_pool(use: TableUse, model: CostModel) -> bool:
    """Return whether the search may choose pooled vectors for a table: no wire format is given, and no codec rounds."""
    work = model.workload
    exact = work.forward_codec == work.backward_codec == "fp32"
    return exact and use.table.name not in work.wire and model.world_size > 1 and model.hardware is not None


def pooled_forms(use: TableUse, model: CostModel) -> list[Form]:
    """Return the forms that send pooled vectors: whole, and cut by columns. Row cuts would add bags in parts."""
    return [form_of(use, Cut(cols=parts), model, "pooled") for parts in column_parts(use)]


def column_parts(use: TableUse) -> list[int]:
    """Return the possible numbers of column parts: 1, 2, 4, … and the number of blocks."""
    units = -(-use.table.dim // column_unit(use.table))
    return [*(2**i for i in range(units.bit_length()) if 2**i < units), units]


def form_for(
    use: TableUse,
    most_load: float,
    most_bytes: float,
    room: float,  # bytes per rank for rows; copies may use a hundredth
    model: CostModel,
    *,
    copies: bool,  # whether copies are allowed; never with the wire format "pooled"
    columns: bool,
    even: bool = True,  # whether numbers above half the ranks become one per rank
) -> Form:
    """Return the cheapest form within the limits, or the form with the smallest tiles."""
    copies = copies and model.workload.wire.get(use.table.name) != "pooled"
    whole = form_of(use, Cut(), model)
    needed = math.ceil(max(whole.largest / most_load, whole.tile_bytes / most_bytes) * (1 - 1e-9))
    needed = min(max(needed, 1), model.world_size)
    rows = _rows(use, needed, model, even=even)
    forms = [whole, *(form_of(use, cut, model) for cut in _cuts(use, needed, rows, columns=columns))]
    if copies:
        forms += [form_of(use, cut, model) for cut in hot_prefix(use, rows, model)]
    if copies and model.world_size > 1 and whole.tile_bytes <= MOST_COPIED * room:
        forms += [form_of(use, Cut(rows=parts, replicated=True), model) for parts in {1, rows}]
    fitting = [form for form in forms if form.fits(most_load, most_bytes)]
    if fitting:
        return min(fitting, key=lambda f: (f.total, f.tiles))
    return min(forms, key=lambda f: (max(f.largest / most_load, f.tile_bytes / most_bytes), f.total))


def _cuts(use: TableUse, needed: int, rows: int, *, columns: bool) -> Iterator[Cut]:
    """Yield cuts into at least ``needed`` tiles: by rows, or by columns and then rows."""
    if rows > 1:
        yield Cut(rows=rows)
    if columns and needed > 1:
        for parts in column_parts(use)[1:]:
            yield Cut(rows=min(-(-needed // parts), use.table.rows), cols=parts)


def hot_prefix(use: TableUse, rows: int, model: CostModel) -> Iterator[Cut]:
    """Yield the cut by rows with copies of rows that occur in nearly every rank's batch, if such rows exist."""
    if model.hardware is not None and model.world_size > 1:
        hot = use.per_sample.rows_above(OFTEN / model.local_batch)
        if 0 < hot < use.table.rows:
            yield Cut(rows=rows, hot_rows=hot)


def _rows(use: TableUse, needed: int, model: CostModel, *, even: bool) -> int:
    """Return the number of row parts: ``needed``, or if ``even`` one per rank from half of that number."""
    parts = min(needed, use.table.rows)
    return model.world_size if even and 2 * parts > model.world_size and use.table.rows >= model.world_size else parts


LEVELS = (np.inf, 1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Limits of a tile's load as shares of a rank's mean load."""
POOLED_LEVELS = (np.inf, 1.0, 1 / 4)
"""Those levels at which pooled vectors are tried, with three limits for their tiles, which cannot be cut by rows."""
BYTES = 1 / 16
"""Limit of a tile's bytes as a share of a rank's mean memory."""


@dataclass(frozen=True)
class Grain:
    """Further options of the fineness of cuts."""

    even: bool
    """Whether numbers of parts close to the number of ranks become one per rank."""
    even_bytes: bool
    """Whether tiles are limited by `BYTES`."""


GRAINS = (Grain(True, True), Grain(False, True), Grain(False, False))
"""What is tried; those after the first one, where that is far from the bound: ranks with a piece that cannot be cut get
less of the other tables."""


def combinations(
    model: CostModel, fixed: Mapping[str, Cut], grain: Grain, mean_load: float, room: float, most_bytes: float
) -> Iterator[dict[str, Form]]:
    """Forms of all tables, by how large tiles may be; each combination once."""
    uses = model.workload.uses
    given = {use.table.name: form_of(use, fixed[use.table.name], model) for use in uses if use.table.name in fixed}
    whole = [form_of(use, Cut(), model) for use in uses]
    free = [use for use in uses if use.table.name not in given and may_pool(use, model)]
    by_rows = sum(form.total for form in whole) / model.world_size  # a larger tile is slower than rows
    limits = [mean_load, math.sqrt(mean_load * max(by_rows, mean_load)), max(by_rows, mean_load)] if free else []
    everyone = sum(form.everyone for form in whole)
    if everyone >= mean_load:  # only plans with pooled vectors have less
        everyone = sum(pooled_forms(use, model)[0].everyone for use in free)
    mean_load = max(mean_load - everyone, 1e-300)
    if grain.even_bytes:
        most_bytes = min(max(sum(form.nbytes for form in whole) / model.world_size, 1.0) * BYTES, most_bytes)
    seen: set[tuple[tuple[Cut, WireFormat], ...]] = set()
    for copies, columns, level in product((False, True), (False, True), LEVELS):
        most_load = mean_load * level
        options = {"copies": copies, "columns": columns, "even": grain.even}
        chosen = {
            use.table.name: given[use.table.name]
            if use.table.name in given
            else form_for(use, most_load, most_bytes, room, model, **options)
            for use in uses
        }
        for limit in limits if level in POOLED_LEVELS else ():
            vectors: dict[str, Form] = {}
            for use in free:
                forms = [f for f in pooled_forms(use, model)[: None if columns else 1] if f.fits(limit, most_bytes)]
                if forms:
                    vectors[use.table.name] = min(forms, key=lambda f: (f.total, f.tiles))
            if found := _worthwhile(chosen, vectors, model):
                yield from _new({**chosen, **found}, seen)
        yield from _new(chosen, seen)


def _new(chosen: dict[str, Form], seen: set[tuple[tuple[Cut, WireFormat], ...]]) -> Iterator[dict[str, Form]]:
    """Yield a combination unless it was seen before."""
    key: tuple[tuple[Cut, WireFormat], ...] = tuple((form.cut, form.wire) for form in chosen.values())
    if key not in seen:
        seen.add(key)
        yield chosen


def _worthwhile(by_rows: Mapping[str, Form], vectors: Mapping[str, Form], model: CostModel) -> dict[str, Form]:
    """Return the forms with pooled vectors that replace forms by rows: in each dim all, some or none.

    Some are the tables that save load. The saved load must exceed the fixed cost of the exchange, which is less if all
    tables of a dim send pooled vectors.
    """
    by_dim: dict[int, list[str]] = defaultdict(list)
    for name, form in by_rows.items():
        by_dim[form.use.table.dim].append(name)
    found: dict[str, Form] = {}
    for names in by_dim.values():
        both = {name: (by_rows[name], vectors[name]) for name in names if name in vectors}
        saved = {name: (rows.total - pooled.total) / model.world_size for name, (rows, pooled) in both.items()}
        saving = {name for name, load in saved.items() if load > 0}
        best = 0.0
        for pooled in (saving, saved.keys()):
            load = sum(saved[name] for name in pooled) - sum(model.pooled_s(pooled))
            if load > best:
                best, replaced = load, {name: vectors[name] for name in pooled}
                found |= replaced
    return found
