"""`LazyStore`: rows that exist once they have been trained, in records that may lie anywhere.

All other rows have their initial values, which are computed when they are asked for. What a batch needs is brought
together, computed in float32 by the kernels that serve every store, and put back; so where records lie changes no bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.ops import BagLayout, Occurrences, Rows, RuleStep
from hotbed.ops.layout import ACTIVE, renamed
from hotbed.ops.rows import random_bits, rows_of
from hotbed.store.lazy_rows import LazyRows


class LazyStore(LazyRows):
    """Rows that exist once they have been trained; made with what `LazyRows` is made with."""

    @override
    def occurrences(self, bags: BagLayout) -> Occurrences:
        return self.ops.occurrences(bags)

    @override
    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        self.ops.lookup(*self._looked_up(bags), out)

    @override
    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        self.ops.weight_gradient(*self._looked_up(bags), grad, out)

    def _looked_up(self, bags: BagLayout) -> tuple[Rows, BagLayout]:
        """The rows of a batch, and its bags with positions of these in the place of ids."""
        groups = self.ops.group(self.ops.occurrences(bags))
        count = int(groups.counts[0])
        rows = rows_of(self.read(groups.rows[:count]))
        return rows, renamed(bags, self.ops.spread(groups, torch.arange(count, device=self.device)))

    @override
    def prefetch(self, slots: Tensor) -> None:
        self.records.prefetch(self._at_records(slots))

    @override
    def update(self, step: RuleStep, occurrences: Occurrences, grad: Tensor) -> None:
        if not bool(step.gate):
            return
        occurrences = self._trained(occurrences, step)
        groups = self.ops.group(occurrences)
        count = int(groups.counts[0])
        slots = self._at_records(groups.rows[:count])
        if not count:
            return
        if self.on_change is not None:
            self.on_change(slots)
        records, wide = self._read(slots, use="update")
        span, rows = self._cells(slots)
        values = self._format.rows(records, wide).to(self.device).contiguous()
        moments = {m.name: self._format.moment(records, m.name).to(self.device).contiguous() for m in step.rule.moments}
        here = torch.arange(count, device=self.device)
        occurrences, groups = replace(occurrences, slots=self.ops.spread(groups, here)), replace(groups, rows=here)
        self.ops.update(step, self._as_tables(values, slots), moments, occurrences, groups, grad)
        random = None
        if self._format.has_narrow:
            cols = self._entries[span, 4, None] + torch.arange(self.dim, device=span.device)
            random = random_bits(step.seeds.to(span.device)[span], rows, cols)
        self._format.put_rows(records, wide, values.to(records.device), random)
        for name, moment in moments.items():
            self._format.moment(records, name).copy_(moment)
        self.records.write(slots, records)

    def _trained(self, occurrences: Occurrences, step: RuleStep) -> Occurrences:
        """Those of tables that the step is of; the others' rows shall not come to be."""
        active = step.hyper[:, ACTIVE] != 0
        if bool(active.all()):
            return occurrences
        span = torch.searchsorted(self._bounds.to(occurrences.slots.device), occurrences.slots, right=True) - 1
        keep = active[span]
        scale = None if occurrences.scale is None else occurrences.scale[keep]
        return Occurrences(occurrences.slots[keep], occurrences.bags[keep], scale)

    def _as_tables(self, values: Tensor, slots: Tensor) -> Rows:
        """Float32 rows of rising slots as parts of the tables that they are of."""
        tables = torch.zeros(len(self.spans), 7, dtype=torch.int64, device=slots.device)
        cuts = torch.searchsorted(slots, self._bounds)
        tables[:, 0] = tables[:, 2] = tables[:, 3] = cuts[:-1]
        tables[:, 1], tables[:, 5] = cuts.diff(), 1
        return replace(rows_of(values), tables=tables.to(values.device))
