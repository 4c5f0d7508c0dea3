"""Look up, read and update rows that are materialized on their first update.

All other rows have their initial values, which are computed when they are read. A materialized row is a record: its
bytes as it is stored, then its moments. What a batch needs is read into one place, computed in float32 by the kernels
that serve every store, and written back; so where records are kept changes no bit::

    update of slots [7, 9, 7]   read the records of 7 and 9; 9 has none: make one of its initial values
                                rows [2, D] and moments [2] of both, the kernel updates them in place
                                put them into the records, rounded as they are stored, and write these
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from hotbed import ops
from hotbed.ops import BackendName, BagLayout, Occurrences, Rows, RuleStep
from hotbed.ops.layout import ACTIVE, Groups, renamed
from hotbed.ops.rows import random_bits, rows_of
from hotbed.specs import RowDtype, Tier
from hotbed.store import memory
from hotbed.store.base import RowStore, Span, Values
from hotbed.store.cached import CachedRecords
from hotbed.store.dense import TORCH_DTYPES
from hotbed.store.format import RecordFormat
from hotbed.store.listing import Listed
from hotbed.store.records import Records, Traffic, Use

MOST_MADE = 8
"""One row of so many at most is made before an update in place; of more, all are copied."""


class Initial(NamedTuple):
    """Say which values the cells of a span have before their first update; bound 0: zeros."""

    seed: int = 0
    bound: float = 0.0


class LazyRows(RowStore):
    """Serve batches from rows in records; `hotbed.store.lazy_store.LazyStore` adds the access to whole tables."""

    def __init__(
        self,
        spans: Sequence[Span],
        dim: int,
        make_records: Callable[[int, int, torch.device], Records],  # arguments: record bytes, most slots, device
        *,
        tier: Tier,  # tier of the records
        dtype: RowDtype = "fp32",
        device: torch.device | str = "cpu",  # of the looked-up vectors
        backend: BackendName = "auto",
    ) -> None:
        self.spans = [s._replace(fp32_rows=s.rows) for s in spans] if dtype == "fp32" else list(spans)
        self.slots, self.dim = sum(s.rows for s in spans), dim
        self.backend_name: BackendName = backend
        self._tier: Tier = tier
        self._device = torch.device(device)
        self._make_records = make_records
        narrow = any(s.fp32_rows < s.rows for s in self.spans)
        wide = not narrow or any(s.fp32_rows for s in self.spans)
        self._format = RecordFormat(dim, TORCH_DTYPES[dtype], has_wide=wide, has_narrow=narrow)
        self._firsts = [0, *accumulate(s.rows for s in spans)]
        self._initial = [Initial() for _ in spans]
        self._initial_moments: list[dict[str, float]] = [{} for _ in spans]
        self.records = make_records(self._format.record_bytes, self.slots, self.device)
        self._placed()

    def _placed(self) -> None:
        entries = torch.tensor(self.spans or [[0] * 5], dtype=torch.int64, device="cpu")
        self._on_host = torch.tensor(self._firsts, dtype=torch.int64, device="cpu"), entries
        self._bounds, self._entries = (t.to(self.records.device) for t in self._on_host)
        self._record_backend = self.backend_name
        if self.records.device.type == "cpu":
            self._record_backend = ops.host_backend(self.backend_name, self.device)

    def _at_records(self, t: Tensor) -> Tensor:
        """Bring a tensor to where the records are given and taken, which may wait for a device."""
        return (memory.to_host(t) if self._is_apart else t.to(self.records.device)).contiguous()

    def _at_device(self, values: Tensor) -> Tensor:
        """Bring what records hold to the device that computes, which the host does not wait for."""
        return (memory.to_device(values, self.device) if values.device.type == "cpu" else values).contiguous()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def ops(self) -> ops.Backend:
        """The kernels that serve this store."""
        return ops.select(self.device, self.backend_name)

    @property
    def _record_ops(self) -> ops.Backend:
        """The kernels for tensors where the records are given and taken."""
        return ops.select(self.records.device, self._record_backend)

    @property
    @override
    def device(self) -> torch.device:
        return self._device

    @property
    @override
    def tier(self) -> Tier:
        return self._tier

    @property
    @override
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.records.layers())

    @property
    @override
    def disk_bytes(self) -> int:
        return sum(layer.disk_bytes for layer in self.records.layers())

    @property
    @override
    def traffic(self) -> Traffic:
        return sum((layer.counted for layer in self.records.layers()), Traffic())

    @property
    @override
    def served(self) -> list[list[int]]:
        layers = self.records.layers()
        return next((layer.served.tolist() for layer in layers if isinstance(layer, CachedRecords)), [])

    @property
    @override
    def moment_names(self) -> list[str]:
        return [m.name for m in self._format.moments]

    @override
    def moment_is_per_row(self, moment: str) -> bool:
        return self._format.is_per_row(moment)

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return memory.allocate(shape, dtype, self.device)

    @override
    def to(self, device: torch.device) -> Self:
        self._device = device
        for layer in self.records.layers():
            layer.to(device)
        self._placed()
        return self

    # -- a batch ---------------------------------------------------------------------------------------------------

    @override
    def prefetch(self, slots: Tensor) -> None:
        if self.records.reads_ahead:
            self.records.prefetch(self._at_records(slots))

    @override
    def grouped(self, bags: BagLayout) -> BagLayout:
        return replace(bags, groups=self._groups_of(bags))

    def _groups_of(self, bags: BagLayout) -> Groups:
        return bags.groups or self.ops.group(self.ops.occurrences(replace(bags, limit=self.slots)))

    @override
    def occurrences(self, bags: BagLayout) -> Occurrences:
        return replace(self.ops.occurrences(bags), groups=bags.groups)

    @override
    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        self.ops.lookup(*self._looked_up(bags), out)

    @override
    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        self.ops.weight_gradient(*self._looked_up(bags), grad, out)

    def _looked_up(self, bags: BagLayout) -> tuple[Rows, BagLayout]:
        """Read the rows of a batch, and replace the ids of its bags by positions of these rows."""
        groups = self._groups_of(bags)
        slots, _ = self._distinct(groups)
        rows = rows_of(self.read(slots))
        return rows, renamed(bags, self.ops.spread(groups, torch.arange(len(slots), device=self.device)))

    @property
    def _is_apart(self) -> bool:
        """Whether the records are given and taken elsewhere than where batches are computed."""
        return self.records.device.type != self.device.type

    def _distinct(self, groups: Groups, *more: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Bring distinct slots to where the records are, and ``more`` int64 to the host: one wait for a device."""
        rows = [groups.rows] if self._is_apart else []
        found = torch.cat([groups.counts[:1], *more, *rows])
        count, *known = memory.to_host(found).split([1, *map(len, more), *map(len, rows)])
        slots = known.pop() if rows else groups.rows
        return self._at_records(slots[: int(count)]), known

    @override
    def update(self, step: RuleStep, occurrences: Occurrences, grad: Tensor) -> None:
        groups = occurrences.groups or self.ops.group(replace(occurrences, limit=self.slots))
        active = step.hyper[:, ACTIVE] != 0
        told = torch.stack([(step.gate != 0).view(()), active.all()]).long()
        slots, (told, *seeds) = self._distinct(groups, told, *[step.seeds] * self._is_apart)
        is_open, are_all_active = told.tolist()
        if not is_open:
            return
        if not are_all_active:  # rows of other tables must not be materialized
            if step.mean_squares is not None:
                kept = self._are_of(groups.rows[: int(groups.counts[0])], active)
                step = replace(step, mean_squares=step.mean_squares[: len(kept)][kept])
            occurrences = self._of_tables(occurrences, active)
            groups = self.ops.group(replace(occurrences, limit=self.slots))
            slots, _ = self._distinct(groups)
        if not len(slots):
            return
        self.changing(slots)
        if self._update_in_place(step, slots, occurrences, groups, grad):
            return
        records, wide = self._read(slots, use="update")
        span, rows = self._cells(slots)
        values = self._at_device(self._format.rows(records, wide))
        moments = {m.name: self._at_device(self._format.moment(records, m.name)) for m in step.rule.moments}
        here = torch.arange(len(slots), device=self.device)
        occurrences, groups = replace(occurrences, slots=self.ops.spread(groups, here)), replace(groups, rows=here)
        self.ops.update(step, self._as_tables(values, slots), moments, occurrences, groups, grad)
        random = None
        if self._format.has_narrow:
            cols = self._entries[span, 4, None] + torch.arange(self.dim, device=span.device)
            random = random_bits((seeds[0] if seeds else step.seeds)[span], rows, cols)
        values, *others = self._back_at_records(values, *moments.values())
        self._format.put_rows(records, wide, values, random)
        for name, moment in zip(moments, others, strict=True):
            self._format.moment(records, name).copy_(moment)
        self.records.write(slots, records)

    def _update_in_place(
        self, step: RuleStep, slots: Tensor, occurrences: Occurrences, groups: Groups, grad: Tensor
    ) -> bool:
        """Update float32 rows and moments in the records themselves, and return whether that was possible.

        It is if all of them are in the host's memory, the kernels take strided rows, and all tables have one line of
        hyperparameters, so that rows need not lie by table. A few rows that have no record yet are made first.
        """
        if self.device.type != "cpu" or self._format.has_narrow or not self.ops.TAKES_STRIDED_ROWS:
            return False
        if not bool((step.hyper == step.hyper[0]).all()):
            return False
        for may_make in (True, False):
            with self.records.changed_in_place(slots) as lent:
                if lent is None:
                    return False
                missing = (lent.places < 0).nonzero()[:, 0]
                if not len(missing):
                    fields = lent.slab.view(torch.float32)
                    moments = {m.name: self._format.moment(lent.slab, m.name) for m in step.rule.moments}
                    one = replace(step, hyper=step.hyper[:1], seeds=step.seeds[:1])
                    rows, groups = rows_of(fields[:, : self.dim]), replace(groups, rows=lent.places)
                    self.ops.update(one, rows, moments, occurrences, groups, grad)
                    return True
            if not may_make or MOST_MADE * len(missing) > len(slots):
                return False
            self.records.write(slots[missing], self._read(slots[missing], use="update")[0])
        return False

    def _back_at_records(self, *changed: Tensor) -> list[Tensor]:
        """Bring what an update has changed, all float32 and by row, to where the records are: one wait for a device."""
        if not self._is_apart:
            return list(changed)
        flat = memory.to_host(torch.cat([t.reshape(-1) for t in changed]))
        return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in changed]), changed, strict=True)]

    def _of_tables(self, occurrences: Occurrences, active: Tensor) -> Occurrences:
        """Keep the occurrences of active tables."""
        keep = self._are_of(occurrences.slots, active)
        scale = None if occurrences.scale is None else occurrences.scale[keep]
        return Occurrences(occurrences.slots[keep], occurrences.bags[keep], scale)

    def _are_of(self, slots: Tensor, tables: Tensor) -> Tensor:
        """Whether each slot ``[n]`` is of one of some tables, given as ``[T]`` bool."""
        return tables[torch.searchsorted(self._bounds.to(slots.device), slots, right=True) - 1]

    def _as_tables(self, values: Tensor, slots: Tensor) -> Rows:
        """Float32 rows of rising slots as `Rows` of the tables that they belong to."""
        tables = torch.zeros(len(self.spans), 7, dtype=torch.int64, device=slots.device)
        cuts = torch.searchsorted(slots, self._bounds)
        tables[:, 0] = tables[:, 2] = tables[:, 3] = cuts[:-1]
        tables[:, 1], tables[:, 5] = cuts.diff(), 1
        return replace(rows_of(values), tables=self._at_device(tables))

    # -- single rows -----------------------------------------------------------------------------------------------

    @override
    def read(
        self, slots: Tensor, moment: str | None = None, *, out: Tensor | None = None, use: Use = "lookup"
    ) -> Tensor:
        slots = self._at_records(slots)
        if moment is None and not self._format.has_narrow and not self._is_apart:
            out = self.empty((len(slots), self.dim), torch.float32) if out is None else out
            first = out.as_strided(out.shape, (self.dim, 1)).view(torch.uint8)  # of records: the rows
            self._complete(first, self.records.read_or_list(slots, first, use=use))
            return out
        records, wide = self._read(slots, use=use)
        values = self._format.rows(records, wide) if moment is None else self._format.moment(records, moment)
        if out is None:
            return self._at_device(values)
        return out.copy_(values if out.device == values.device else self._at_device(values))

    @override
    def write(self, slots: Tensor, values: Tensor, moment: str | None = None, *, random: Tensor | None = None) -> None:
        slots = self._at_records(slots)
        self.changing(slots)
        records, wide = self._read(slots, use="update")
        if moment is None:
            random = None if random is None else self._at_records(random)
            self._format.put_rows(records, wide, self._at_records(values), random)
        else:
            self._format.moment(records, moment).copy_(values)
        self.records.write(slots, records)

    @override
    def values(self, slots: Tensor) -> Values:
        records, wide = self._read(self._at_records(slots), use="update")
        scales = self._format.scales(records, wide)
        moments = {m.name: self._format.moment(records, m.name).to(self.device) for m in self._format.moments}
        scales = None if scales is None else scales.to(self.device)
        return Values(self._format.rows(records, wide).to(self.device), moments, scales)

    @override
    def put(self, slots: Tensor, values: Values, *, random: Tensor | None = None) -> None:
        assert values.moments.keys() == set(self.moment_names)
        slots = self._at_records(slots)
        self.changing(slots)
        records, wide = self._format.blank(len(slots), slots.device), self._is_wide(slots)
        if values.scales is not None:
            self._format.put_scales(records, wide, self._at_records(values.scales))
        random = None if random is None else self._at_records(random)
        self._format.put_rows(records, wide, self._at_records(values.rows), random)
        for name, moment in values.moments.items():
            self._format.moment(records, name).copy_(moment)
        self.records.write(slots, records)

    def _read(self, slots: Tensor, *, use: Use) -> tuple[Tensor, Tensor]:
        """Read records of slots, with new ones where there are none, and find which of their rows are wide."""
        records = memory.allocate((len(slots), self._format.record_bytes), torch.uint8, self.records.device)
        self._complete(records, self.records.read_or_list(slots, records, use=use))
        return records, self._is_wide(slots)

    def _complete(self, records: Tensor, absent: Listed) -> None:
        """Fill in new records where there are none."""
        if len(absent.at):
            records[absent.at] = self._initialized(absent.slots)[:, : records.shape[1]]

    def _is_wide(self, slots: Tensor) -> Tensor:
        """Find which slots ``[n]`` have float32 rows."""
        if not self._format.has_narrow:
            return torch.ones(len(slots), dtype=torch.bool, device=slots.device)
        span = torch.searchsorted(self._bounds, slots, right=True) - 1
        return slots - self._bounds[span] < self._entries[span, 1]

    def _cells(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Find the span of each slot, and which row of its table it holds."""
        bounds, entries = (self._bounds, self._entries) if slots.device.type != "cpu" else self._on_host
        span = torch.searchsorted(bounds, slots, right=True) - 1
        entry = entries[span]
        return span, entry[:, 2] + (slots - bounds[span]) * entry[:, 3]

    def _initialized(self, slots: Tensor) -> Tensor:
        """Make records, where they are given and taken, of slots on the host, with the initial values of their rows."""
        device = self.records.device
        span, rows = self._cells(slots)
        order, counts = span.argsort(stable=True), span.bincount(minlength=len(self.spans)).tolist()
        here, at, rows = (memory.to_device(t, device) for t in (slots, order, rows[order]))
        records, values = self._format.blank(len(slots), device), torch.zeros(len(slots), self.dim, device=device)
        for i, (part, of_rows) in enumerate(zip(at.split(counts), rows.split(counts), strict=True)):
            if not len(part):
                continue
            seed, bound = self._initial[i]
            if bound:
                of_span = torch.empty(len(part), self.dim, device=device)
                first = self.spans[i].first_col
                cols = range(first, first + self.dim)
                self._record_ops.initial_values_(of_span, seed=seed, rows=of_rows, cols=cols, bound=bound)
                values[part] = of_span
            for moment, value in self._initial_moments[i].items():
                self._format.moment(records, moment)[part] = value
        self._format.put_rows(records, self._is_wide(here), values)
        return records
