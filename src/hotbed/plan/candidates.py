"""List the forms that a table can have in a plan: whole, cut by rows, columns or both, copied, with copied hot rows.

A *form* is a cut with its parts and what they cost in all; `form_for` chooses the cheapest whose tiles are small
enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hotbed.plan.cost import CostModel
from hotbed.plan.parts import Part, PartCost, part_cost, parts_of
from hotbed.plan.placement import Cut
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

    @cached_property
    def evenness(self) -> float:
        """Rows of all tiles ÷ what they would be if each had as many as the first one of its part, as costs have it."""
        counted = sum(len(part.rows) * len(part.rows[0]) for part in self.parts)
        return sum(len(rows) for part in self.parts for rows in part.rows) / counted if counted else 1.0

    @property
    def is_even(self) -> bool:
        """Whether all ranks have one tile of each part, and these are alike."""
        return self.cut.rows == self.size <= self.use.table.rows and not self.cut.hot_rows

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
    use: TableUse, most_load: float, most_bytes: float, room: float, model: CostModel, *, copies: bool, columns: bool
) -> Form:
    """Choose the cheapest form of a table whose tiles are no larger; or that with the smallest tiles.

    Parameters
    ----------
    use
        The table.
    most_load, most_bytes
        Of a tile.
    room
        Bytes that a rank has for rows, of which copies may take a hundredth.
    model
        What tiles cost.
    copies
        Whether ranks may have copies of rows, which the wire format ``"pooled"`` does not know.
    columns
        Whether columns may be cut.
    """
    copies = copies and model.workload.wire.get(use.table.name) != "pooled"
    whole = form_of(use, Cut(), model)
    needed = math.ceil(max(whole.largest / most_load, whole.tile_bytes / most_bytes) * (1 - 1e-9))
    needed = min(max(needed, 1), model.world_size)
    forms = [whole, *(form_of(use, cut, model) for cut in _cuts(use, needed, model) if columns or cut.cols == 1)]
    if copies:
        forms += [form_of(use, cut, model) for cut in hot_prefix(use, _rows(use, needed, model), model)]
    if copies and model.world_size > 1 and whole.tile_bytes <= MOST_COPIED * room:
        forms += [form_of(use, Cut(rows=rows, replicated=True), model) for rows in {1, _rows(use, needed, model)}]
    fitting = [f for f in forms if f.is_even or (f.largest <= most_load and f.tile_bytes <= most_bytes)]
    if fitting:
        return min(fitting, key=lambda f: (f.total, f.tiles))
    return min(forms, key=lambda f: (max(f.largest / most_load, f.tile_bytes / most_bytes), f.total))


def _cuts(use: TableUse, needed: int, model: CostModel) -> Iterator[Cut]:
    """Cuts into at least so many tiles, if that is possible."""
    rows, columns = _rows(use, needed, model), column_parts(use)[-1]
    if rows > 1:
        yield Cut(rows=rows)
    if needed > rows and columns > 1:
        yield Cut(rows=rows, cols=min(columns, -(-needed // rows)))
    if needed > 1 and columns > 1:
        yield Cut(cols=min(columns, needed))


def hot_prefix(use: TableUse, rows: int, model: CostModel) -> Iterator[Cut]:
    """Cut a table by rows, with copies of those that nearly every rank's batch looks up; of which there may be none."""
    if model.hardware is not None and model.world_size > 1:
        hot = use.per_sample.rows_above(OFTEN / model.local_batch)
        if 0 < hot < use.table.rows:
            yield Cut(rows=rows, hot_rows=hot)


def _rows(use: TableUse, needed: int, model: CostModel) -> int:
    """Row parts: as many as needed; as many as ranks, which makes all equal, from half of that on."""
    parts = min(needed, use.table.rows)
    return model.world_size if 2 * parts > model.world_size and use.table.rows >= model.world_size else parts
