"""List the forms that a table can have in a plan: whole, cut by rows, columns or both, copied, with copied hot rows.

A *form* is a cut with its parts and what they cost in all; `form_for` chooses the cheapest whose tiles are small
enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import numpy as np

from hotbed.plan.cost import CostModel
from hotbed.plan.parts import Part, PartCost, part_cost, parts_of
from hotbed.plan.schemes import Cut
from hotbed.plan.tiling import column_unit
from hotbed.plan.workload import TableUse

OFTEN = 2.3
"""Expected lookups of a row in a rank's batch from which on it is worth a copy, perhaps: it is there with 90 %."""
MOST_COPIED = 0.01
"""Of a rank's room for rows that copies of one table may take."""


@dataclass(frozen=True)
class Form:
    """A table, cut in one way."""

    use: TableUse
    cut: Cut
    parts: tuple[Part, ...]
    costs: tuple[PartCost, ...]
    """Of a tile of each part."""
    size: int
    """Ranks of the plan."""

    @cached_property
    def everyone(self) -> float:
        """Load that each rank has of it, whoever owns what."""
        return sum(c.everyone * len(p.rows) for p, c in self._both)

    @cached_property
    def total(self) -> float:
        """Load of all ranks together."""
        return self.size * self.everyone + sum(
            len(p.rows) * (c.owner + (self.size - 1) * c.reader) for p, c in self._both
        )

    @cached_property
    def largest(self) -> float:
        """Load that the owner of one tile has at least."""
        return max(c.owner for c in self.costs)

    @cached_property
    def tile_bytes(self) -> int:
        """Bytes of the largest tile."""
        return max(c.nbytes for c in self.costs)

    @cached_property
    def nbytes(self) -> int:
        """Bytes on all ranks."""
        return sum(len(p.rows) * (c.nbytes + (self.size - 1) * c.copy_bytes) for p, c in self._both)

    @property
    def is_even(self) -> bool:
        """Whether all ranks can have as many of its tiles, of which none has much more than the others."""
        return self.tiles % self.size == 0 and not self.cut.hot_rows

    @property
    def has_copies(self) -> bool:
        """Whether ranks have copies of rows, which are exchanged after the update."""
        return self.size > 1 and any(part.replicated for part in self.parts)

    @property
    def has_sums(self) -> bool:
        """Whether sums over the columns of a row are exchanged: it is cut by columns, and its rule has such sums."""
        return self.use.row_sums > 0 and any(len(part.cols) < self.use.table.dim for part in self.parts)

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return sum(len(p.rows) for p in self.parts)

    @property
    def _both(self) -> Iterator[tuple[Part, PartCost]]:
        return zip(self.parts, self.costs, strict=True)


def form_of(use: TableUse, cut: Cut, model: CostModel) -> Form:
    """Cut a table, and count what that costs."""
    key = (use.table.name, cut)
    if key not in model.memo:
        parts = tuple(parts_of(use.table, cut, model.world_size))
        model.memo[key] = Form(use, cut, parts, tuple(part_cost(part, model) for part in parts), model.world_size)
    return model.memo[key]


def column_parts(use: TableUse) -> list[int]:
    """Numbers of parts that its columns can be cut into: 1, 2, 4, … and as many as there are blocks."""
    units = -(-use.table.dim // column_unit(use.table))
    return [*(2**i for i in range(units.bit_length()) if 2**i < units), units]


def form_for(
    use: TableUse,
    most_load: float,
    most_bytes: float,
    room: float,  # bytes that a rank has for rows, of which copies may take a hundredth
    model: CostModel,
    *,
    copies: bool,  # whether ranks may have copies of rows, which the wire format "pooled" does not know
    columns: bool,
    even: bool = True,  # whether more parts than half the ranks become one for each rank
) -> Form:
    """Choose the cheapest form of a table whose tiles are no larger; or that with the smallest tiles."""
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
    fitting = [f for f in forms if f.is_even or (f.largest <= most_load and f.tile_bytes <= most_bytes)]
    if fitting:
        return min(fitting, key=lambda f: (f.total, f.tiles))
    return min(forms, key=lambda f: (max(f.largest / most_load, f.tile_bytes / most_bytes), f.total))


def _cuts(use: TableUse, needed: int, rows: int, *, columns: bool) -> Iterator[Cut]:
    """Cuts into at least so many tiles, if that is possible: by rows; by columns, and by rows as far as needed."""
    if rows > 1:
        yield Cut(rows=rows)
    if columns and needed > 1:
        for parts in column_parts(use)[1:]:
            yield Cut(rows=min(-(-needed // parts), use.table.rows), cols=parts)


def hot_prefix(use: TableUse, rows: int, model: CostModel) -> Iterator[Cut]:
    """Cut a table by rows, with copies of those that nearly every rank's batch looks up; of which there may be none."""
    if model.hardware is not None and model.world_size > 1:
        hot = use.per_sample.rows_above(OFTEN / model.local_batch)
        if 0 < hot < use.table.rows:
            yield Cut(rows=rows, hot_rows=hot)


def _rows(use: TableUse, needed: int, model: CostModel, *, even: bool) -> int:
    """Row parts: as many as needed; if ``even``, as many as ranks, which makes all equal, from half of that on."""
    parts = min(needed, use.table.rows)
    return model.world_size if even and 2 * parts > model.world_size and use.table.rows >= model.world_size else parts


LEVELS = (np.inf, 1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32)
"""Largest tile, as a share of a rank's mean load."""
BYTES = 1 / 16
"""The same of a rank's mean memory, that this may become even."""


@dataclass(frozen=True)
class Grain:
    """How fine tables are cut, beside what `LEVELS` say."""

    even: bool
    """Whether parts that are nearly as many as ranks become one for each."""
    even_bytes: bool
    """Whether no tile has more than `BYTES`."""


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
    mean_load = max(mean_load - sum(form.everyone for form in whole), 1e-300)
    if grain.even_bytes:
        most_bytes = min(max(sum(form.nbytes for form in whole) / model.world_size, 1.0) * BYTES, most_bytes)
    seen: set[tuple[Cut, ...]] = set()
    for copies, columns, level in product((False, True), (False, True), LEVELS):
        chosen = {
            use.table.name: given[use.table.name]
            if use.table.name in given
            else form_for(
                use, mean_load * level, most_bytes, room, model, copies=copies, columns=columns, even=grain.even
            )
            for use in uses
        }
        cuts = tuple(form.cut for form in chosen.values())
        if cuts not in seen:
            seen.add(cuts)
            yield chosen
