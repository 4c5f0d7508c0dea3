"""Bound from below what the busiest rank of any plan has to do, as `CostModel` counts it.

The largest of: the *average* over ranks of the cheapest form of every table, whatever fits; the same with the rows in a
slower memory that the devices cannot hold, those that cost least there for their bytes; and the smallest *piece* into
which a table can be cut, for the table that has the largest: a row of one block of columns, or as many rows as are left
when there is one part per rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hotbed.plan.candidates import Form, column_parts, form_of, hot_prefix
from hotbed.plan.cost import DISK, HOST, CostModel, tile_bytes
from hotbed.plan.parts import Array
from hotbed.plan.placement import Cut
from hotbed.plan.tiling import Tier, Tile
from hotbed.plan.workload import TableUse


@dataclass(frozen=True)
class Bound:
    """Least load of the busiest rank, in the unit of the cost model."""

    average: float
    memory: float
    """What rows in a slower memory add to the average."""
    piece: float
    piece_of: str
    """The table whose smallest piece is largest."""

    @property
    def load(self) -> float:
        """The bound."""
        return max(self.average + self.memory, self.piece)

    @property
    def binds(self) -> str:
        """What the bound is."""
        if self.piece > self.average + self.memory:
            return f"the smallest piece of table '{self.piece_of}'"
        return "the average over ranks" if self.memory == 0 else "the average, with rows in slower memory"


def lower_bound(
    model: CostModel,
    fixed: Mapping[str, Cut],
    overflow: int = 0,
    tiers: Sequence[Tier] = ("host",),
    staying: Collection[str] = (),
) -> Bound:
    """Bound the busiest rank's load, without copies of rows or with them and what their exchanges take.

    Parameters
    ----------
    model
        What tiles cost.
    fixed
        By table, the cut that it must have.
    overflow
        Bytes of rows and moments that the devices cannot hold.
    tiers
        Where they may go.
    staying
        Tables of which no row goes there.
    """
    extra = min(_overflow_load(model, overflow, tier, staying) for tier in tiers) if overflow > 0 else 0.0
    without = _bound(model, fixed, extra, copies=False)
    with_copies = _bound(model, fixed, extra, copies=True)
    with_copies = replace(with_copies, average=with_copies.average + model.copies_s)
    return min(without, with_copies, key=lambda bound: bound.load)


def _bound(model: CostModel, fixed: Mapping[str, Cut], extra: float, *, copies: bool) -> Bound:
    size = model.world_size
    totals, everyone = 0.0, 0.0
    smallest: dict[str, Form] = {}
    for use in model.workload.uses:
        name = use.table.name
        forms = [form_of(use, fixed[name], model)] if name in fixed else _forms(use, 1, model, copies)
        totals += min(form.total * form.evenness for form in forms)
        everyone += min(form.everyone * form.evenness for form in forms)
        smallest[name] = min(forms, key=lambda form: form.largest)
    for name, form in smallest.items():  # which are smaller where rows are cut; only large ones can bind
        if name not in fixed and form.largest + everyone > totals / size:
            smallest[name] = min([form, *_forms(form.use, 0, model, copies)], key=lambda form: form.largest)
    last = max(smallest, key=lambda name: smallest[name].largest, default="")
    piece = smallest[last].largest if smallest else 0.0
    return Bound(totals / size, extra / size, piece + everyone, last)


def _forms(use: TableUse, rows: int, model: CostModel, copies: bool) -> list[Form]:
    """A table with so many row parts, cut by columns or not, with copies or without."""
    copied = [False, True] if model.world_size > 1 and copies else [False]
    cuts = [Cut(rows, cols, copy) for cols in column_parts(use) for copy in copied]
    return [form_of(use, cut, model) for cut in (*cuts, *(hot_prefix(use, rows, model) if copies else ()))]


def _overflow_load(model: CostModel, overflow: int, tier: Tier, staying: Collection[str]) -> float:
    """Least load, of all ranks together, of so many bytes in a slower memory."""
    loads, sizes = [np.zeros(0)], [np.zeros(0)]
    for use in model.workload.uses:
        if use.table.name in staying:
            continue
        load, nbytes = _by_popularity(use, model, tier)
        loads.append(load)
        sizes.append(nbytes)
    load, nbytes = np.concatenate(loads), np.concatenate(sizes)
    order = np.argsort(load / nbytes, kind="stable")
    taken = np.minimum(nbytes[order].cumsum(), overflow)
    return float((np.diff(taken, prepend=0) / nbytes[order] * load[order]).sum())


def _by_popularity(use: TableUse, model: CostModel, tier: Tier) -> tuple[Array, Array]:
    """Load of rows in a slower memory, and their bytes; of stretches of rows that are alike."""
    whole = Tile(use.table.name, range(use.table.rows), range(use.table.dim), 0, tier=tier)
    price = model.tile(whole).prices[DISK if tier == "disk" else HOST]
    record = tile_bytes(use.table, whole, use.moments) / use.table.rows
    rows = np.diff(use.expected.edges)
    lookups = use.ids * model.local_batch * model.world_size
    touched = rows * -np.expm1(-use.expected.rates * lookups)
    return 2 * touched * record * price, rows * tile_bytes(use.table, replace(whole, tier="device"), use.moments) / len(
        whole.rows
    )
