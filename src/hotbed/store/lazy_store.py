"""Keep rows that are materialized on their first update, in the host's memory or in a file.

A materialized row is a record: the stored bytes of the row, then its moments. The initial values of all other rows are
computed when these rows are read. The records of a batch are copied to one tensor, computed in float32 by the same
kernels as in every store, and written back. So the bits do not depend on where the records are. For example::

    update of slots [7, 9, 7]   read the records of 7 and 9; if 9 has none, create one from its initial values
                                unpack rows [2, D] and moments [2]; the kernel updates them in place
                                round the rows to their stored dtype, pack them into records, and write these

Tables may have more rows than any memory. A checkpoint therefore saves only the materialized rows
(`hotbed.store.selected_rows`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from hotbed import ops
from hotbed.errors import StoreError
from hotbed.ops import BackendName, BagLayout, Occurrences, Rows, RuleStep
from hotbed.ops.layout import ACTIVE, Groups, replace_bag_ids
from hotbed.ops.rows import random_bits, rows_of
from hotbed.optim import Moment
from hotbed.specs import RowDtype, Tier
from hotbed.store import memory
from hotbed.store.base import RowStore, Span, Values
from hotbed.store.device_selection import Selection
from hotbed.store.device_store import MOMENT, TORCH_DTYPES
from hotbed.store.format import RecordFormat, Stored
from hotbed.store.records import Records, Traffic, Use
from hotbed.store.row_cache import CachedRecords
from hotbed.store.slot_lists import SlotRange, SortedSlots, UpdatedSlots

BYTES_AT_ONCE = 1 << 20
"""Bytes of records per chunk when a whole table is read or written."""

MOST_MADE = 8
"""An update in place creates missing records only if at most one in ``MOST_MADE`` rows lacks its record."""


class Initial(NamedTuple):
    """Parameters of the initial values of a span."""

    seed: int = 0
    bound: float = 0.0  # 0: all values are zero


class LazyStore(RowStore):
    """Keep rows in records, which are materialized on the first update of a row."""

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
        self._copy_bounds()

    def _copy_bounds(self) -> None:
        entries = torch.tensor(self.spans or [[0] * 5], dtype=torch.int64, device="cpu")
        self._on_host = torch.tensor(self._firsts, dtype=torch.int64, device="cpu"), entries
        self._bounds, self._entries = (t.to(self.records.device) for t in self._on_host)
        self._record_backend = self.backend_name
        if self.records.device.type == "cpu":
            self._record_backend = ops.host_backend(self.backend_name, self.device)

    def _at_records(self, t: Tensor) -> Tensor:
        """Copy a tensor to the device of the records. This may synchronize with the compute device."""
        return (memory.to_host(t) if self._is_apart else t.to(self.records.device)).contiguous()

    def _at_device(self, values: Tensor) -> Tensor:
        """Copy values to the compute device, without synchronization."""
        return (memory.to_device(values, self.device) if values.device.type == "cpu" else values).contiguous()

    # -- properties ------------------------------------------------------------------------------------------------

    @property
    def ops(self) -> ops.Backend:
        """The kernels for the compute device."""
        return ops.select(self.device, self.backend_name)

    @property
    def _record_ops(self) -> ops.Backend:
        """The kernels for the device of the records."""
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
        self._copy_bounds()
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
        """Return the rows of a batch, and its bags with positions of these rows as ids."""
        groups = self._groups_of(bags)
        slots, _ = self._distinct(groups)
        rows = rows_of(self.read(slots))
        return rows, replace_bag_ids(bags, self.ops.spread(groups, torch.arange(len(slots), device=self.device)))

    @property
    def _is_apart(self) -> bool:
        """Whether records live on a different device than the computation."""
        return self.records.device.type != self.device.type

    def _distinct(self, groups: Groups, *more: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Copy distinct slots to the records' device, and ``more`` int64 to the host, with one synchronization."""
        rows = [groups.rows] if self._is_apart else []
        found = torch.cat([groups.counts[:1], *more, *rows])
        count, *known = memory.to_host(found).split([1, *map(len, more), *map(len, rows)])
        slots = known.pop() if rows else groups.rows
        return self._at_records(slots[: int(count)]), known

    @override
    def update(self, step: RuleStep, occurrences: Occurrences, grad: Tensor) -> None:
        groups = occurrences.groups or self.ops.group(replace(occurrences, limit=self.slots))
        active = step.hyper[:, ACTIVE] != 0
        flags = torch.stack([(step.gate != 0).view(()), active.all()]).long()
        slots, (flags, *seeds) = self._distinct(groups, flags, *[step.seeds] * self._is_apart)
        is_open, are_all_active = flags.tolist()
        if not is_open:
            return
        if not are_all_active:  # rows of inactive tables must not be materialized
            if step.mean_squares is not None:
                kept = self._are_of(groups.rows[: int(groups.counts[0])], active)
                step = replace(step, mean_squares=step.mean_squares[: len(kept)][kept])
            occurrences = occurrences.take(self._are_of(occurrences.slots, active))
            groups = self.ops.group(replace(occurrences, limit=self.slots))
            slots, _ = self._distinct(groups)
        if not len(slots):
            return
        self.changing(slots)
        if self._update_in_place(step, slots, occurrences, groups, grad):
            return
        records, wide = self._read(slots, use="update")
        span, rows = self._table_rows(slots)
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
        """Update float32 rows and moments inside the records, and return whether that was possible.

        The records must be in the host's memory, the kernels must support strided rows, and all tables must have equal
        hyperparameters, because the rows are not sorted by table. A few missing records are created first.
        """
        if self.device.type != "cpu" or self._format.has_narrow or not self.ops.TAKES_STRIDED_ROWS:
            return False
        if not bool((step.hyper == step.hyper[0]).all()):
            return False
        for may_make in (True, False):
            with self.records.changed_in_place(slots) as in_place:
                if in_place is None:
                    return False
                missing = (in_place.positions < 0).nonzero()[:, 0]
                if not len(missing):
                    fields = in_place.slab.view(torch.float32)
                    moments = {m.name: self._format.moment(in_place.slab, m.name) for m in step.rule.moments}
                    one = replace(step, hyper=step.hyper[:1], seeds=step.seeds[:1])
                    rows, groups = rows_of(fields[:, : self.dim]), replace(groups, rows=in_place.positions)
                    self.ops.update(one, rows, moments, occurrences, groups, grad)
                    return True
            if not may_make or MOST_MADE * len(missing) > len(slots):
                return False
            self.records.write(slots[missing], self._read(slots[missing], use="update")[0])
        return False

    def _back_at_records(self, *changed: Tensor) -> list[Tensor]:
        """Copy updated float32 rows and moments to the device of the records, with one synchronization."""
        if not self._is_apart:
            return list(changed)
        flat = memory.to_host(torch.cat([t.reshape(-1) for t in changed]))
        return [part.view(t.shape) for part, t in zip(flat.split([t.numel() for t in changed]), changed, strict=True)]

    def _are_of(self, slots: Tensor, tables: Tensor) -> Tensor:
        """Return ``[n]`` bool: whether the table of each slot is selected by ``tables [T]`` bool."""
        return tables[torch.searchsorted(self._bounds.to(slots.device), slots, right=True) - 1]

    def _as_tables(self, values: Tensor, slots: Tensor) -> Rows:
        """Return float32 rows of ascending slots as `Rows`, divided by table."""
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
            first = out.as_strided(out.shape, (self.dim, 1)).view(torch.uint8)  # a record begins with its row
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
        """Return the records of slots, new ones included, and which rows are wide (float32)."""
        records = memory.allocate((len(slots), self._format.record_bytes), torch.uint8, self.records.device)
        self._complete(records, self.records.read_or_list(slots, records, use=use))
        return records, self._is_wide(slots)

    def _complete(self, records: Tensor, absent: Selection) -> None:
        """Fill the rows of slots without a record with initial records."""
        if len(absent.at):
            records[absent.at] = self._initialized(absent.slots)[:, : records.shape[1]]

    def _is_wide(self, slots: Tensor) -> Tensor:
        """Return ``[n]`` bool: which slots have float32 rows."""
        if not self._format.has_narrow:
            return torch.ones(len(slots), dtype=torch.bool, device=slots.device)
        span = torch.searchsorted(self._bounds, slots, right=True) - 1
        return slots - self._bounds[span] < self._entries[span, 1]

    def _table_rows(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return the span of each slot, and the row of the table that the slot holds."""
        bounds, entries = (self._bounds, self._entries) if slots.device.type != "cpu" else self._on_host
        span = torch.searchsorted(bounds, slots, right=True) - 1
        entry = entries[span]
        return span, entry[:, 2] + (slots - bounds[span]) * entry[:, 3]

    def _initialized(self, slots: Tensor) -> Tensor:
        """Return records with initial values, on the device of the records, for slots on the host."""
        device = self.records.device
        span, rows = self._table_rows(slots)
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

    # -- initial values and moments --------------------------------------------------------------------------------

    @override
    def initialize(self, slot: int, *, seed: int, rows: range, cols: range, bound: float) -> None:
        self.replaced()
        whole = slot in self._firsts[:-1] and len(rows) == self.spans[self._firsts.index(slot)].rows
        if whole:
            span = self._firsts.index(slot)
            entry = self.spans[span]
            if (rows.start, rows.step, cols.start) == (entry.first_row, entry.row_step, entry.first_col):
                self._forget(span)
                self._initial[span] = Initial(seed, bound)
                return
        for first in range(0, len(rows), self._rows_at_once):
            chunk = rows[first : first + self._rows_at_once]
            values = torch.empty(len(chunk), self.dim, device=self.device)
            self.ops.initial_values_(values, seed=seed, rows=chunk, cols=cols, bound=bound)
            self.write(torch.arange(slot + first, slot + first + len(chunk)), values)

    @override
    def add_moment(self, moment: Moment) -> None:
        if any(m.name == moment.name for m in self._format.moments):
            return
        self.replaced()
        self._format = self._format.with_moment(moment)
        for initial in self._initial_moments:
            initial[moment.name] = 0.0
        existing = self.existing()
        self._keep_only([existing.part(0, len(existing))])

    @override
    def fill(self, span: int, moment: str, value: float) -> None:
        self.replaced()
        self._initial_moments[span][moment] = value
        shape = () if self.moment_is_per_row(moment) else (self.dim,)
        for slots in self.keys(span).chunks(self._rows_at_once):
            self.write(slots, torch.full((len(slots), *shape), value), moment)

    def _forget(self, span: int) -> None:
        existing = self.existing()
        own = self._of_span(existing, span)
        if not len(own):
            return
        if len(own) == len(existing):
            self.records.clear()
            return
        first = existing.below(self._firsts[span])
        self._keep_only([existing.part(0, first), existing.part(first + len(own), len(existing))])

    def _keep_only(self, kept: Sequence[SlotRange]) -> None:
        """Convert the records of these slots to the current format, which may be longer, and drop all other records."""
        old, self.records = self.records, self._make_records(self._format.record_bytes, self.slots, self.device)
        more = self._format.record_bytes - old.record_bytes
        for slots in (chunk for of in kept for chunk in of.chunks(self._rows_at_once)):
            chunk = self._at_records(slots)
            before = torch.empty(len(chunk), old.record_bytes, dtype=torch.uint8, device=chunk.device)
            old.read(chunk, before, use="once")
            self.records.write(chunk, torch.nn.functional.pad(before, (0, more)))
        for layer in old.layers():
            layer.close()

    @property
    def _rows_at_once(self) -> int:
        return max(BYTES_AT_ONCE // self._format.record_bytes, 1)

    # -- materialized rows -----------------------------------------------------------------------------------------

    def existing(self) -> SortedSlots:
        """Return the slots of the materialized rows. The list takes little memory."""
        return self.records.slots()

    @override
    def _update_collector(self) -> UpdatedSlots:
        return self.records.update_collector()

    @override
    def changed(self) -> SortedSlots:
        self.records.settle()
        return super().changed()

    def keys(self, span: int) -> SlotRange:
        """Return the slots of the materialized rows of a span."""
        return self._of_span(self.existing(), span)

    def _of_span(self, slots: SortedSlots, span: int) -> SlotRange:
        return slots.part(slots.below(self._firsts[span]), slots.below(self._firsts[span + 1]))

    def count_wide(self, slots: Tensor) -> int:
        """Return how many of these slots, all of one span, have float32 rows."""
        return int(self._is_wide(self._at_records(slots)).sum())

    def stored_names(self, span: int) -> list[str]:
        """Return the names of the arrays of a span: the names of `raw`, and ``moment.NAME``."""
        names = ["weight"]
        if self.spans[span].fp32_rows < self.spans[span].rows:
            names += ["exponents"] if self._format.dtype == torch.int8 else []
            names += ["fp32_weight"] if self.spans[span].fp32_rows else []
        return names + [f"{MOMENT}{m.name}" for m in self._format.moments]

    def stored(self, slots: Tensor) -> Stored:
        """Return the stored arrays of ascending slots of one span, on the CPU, by the names of `stored_names`."""
        records, wide = self._read(self._at_records(slots), use="once")
        found = self._format.stored(records, wide)
        return {name: found[own].cpu() for name, own in self._names(slots).items() if own in found}

    def stored_array(self, name: str, slots: Tensor) -> Tensor:
        """Return one array of `stored` for rows that all have a value in this array."""
        parts = [self.stored(part)[name] for part in slots.split(self._rows_at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put_stored(self, slots: Tensor, stored: Mapping[str, Tensor]) -> None:
        """Overwrite rows of ascending slots of one span with all or some arrays of `stored`.

        A row without a record gets none if its new values are its initial values.
        """
        slots = self._at_records(slots)
        records, wide = self._read(slots, use="once")
        before = records.clone()
        names = self._names(slots)
        self._format.put_stored(records, wide, {names[name]: self._at_records(t) for name, t in stored.items()})
        self._write_changed(slots, records, before)

    def put_values(self, slots: Tensor, values: Tensor) -> None:
        """Overwrite rows with float32 values ``[n, D]``, rounded to nearest. Old scales of int8 rows are ignored."""
        slots = self._at_records(slots)
        before, wide = self._read(slots, use="once")
        records = self._format.blank(len(slots), slots.device)
        for moment in self._format.moments:
            self._format.moment(records, moment.name).copy_(self._format.moment(before, moment.name))
        self._format.put_rows(records, wide, self._at_records(values))
        self._write_changed(slots, records, before)

    def _write_changed(self, slots: Tensor, records: Tensor, before: Tensor) -> None:
        changed = (records.view(torch.int32) != before.view(torch.int32)).any(1)
        self.changing(slots[changed])
        self.records.write(slots[changed], records[changed])

    def _names(self, slots: Tensor) -> dict[str, str]:
        """Map the names of `stored_names` to the names of `RecordFormat.stored`."""
        span = self.spans[bisect_right(self._firsts, int(slots[0])) - 1]
        names = {f"{MOMENT}{m.name}": m.name for m in self._format.moments}
        if span.fp32_rows == span.rows:
            return {**names, "weight": "wide"}
        return {**names, "weight": "narrow", "exponents": "exponents", "fp32_weight": "wide"}

    # -- whole spans -----------------------------------------------------------------------------------------------

    @override
    def moment(self, span: int, name: str) -> Tensor:
        return self._all(span)[f"{MOMENT}{name}"]

    @override
    def load_moment(self, span: int, name: str, values: Tensor) -> None:
        self._load(span, {f"{MOMENT}{name}": values})

    @override
    def raw(self, span: int) -> dict[str, Tensor]:
        return {name: t for name, t in self._all(span).items() if not name.startswith(MOMENT)}

    @override
    def load_raw(self, span: int, raw: Mapping[str, Tensor]) -> None:
        self._load(span, raw)

    def _slots_of(self, span: int) -> Tensor:
        return torch.arange(self._firsts[span], self._firsts[span + 1])

    def _all(self, span: int) -> Stored:
        rows, size = self.spans[span].rows, self._format.record_bytes
        if rows * size > 1 << 36:
            raise StoreError(
                f"table of {rows:,} lazily materialized rows: got {rows * size:,} bytes, expected at most {1 << 36:,} "
                "to copy it whole. Use save_checkpoint, which saves the materialized rows"
            )
        chunks = [self.stored(slots) for slots in self._slots_of(span).split(self._rows_at_once)]
        found = {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}
        if self.spans[span].fp32_rows == 0:
            found.pop("fp32_weight", None)
        return {name: t.to(self.device) for name, t in found.items()}

    def _load(self, span: int, values: Mapping[str, Tensor]) -> None:
        wide = self.spans[span].fp32_rows
        for slots in self._slots_of(span).split(self._rows_at_once):
            first, last = int(slots[0]) - self._firsts[span], int(slots[-1]) + 1 - self._firsts[span]
            chunk: Stored = {}
            for name, t in values.items():
                before = wide if name in ("weight", "exponents") and wide < self.spans[span].rows else 0
                end = wide if name == "fp32_weight" else self.spans[span].rows - before
                low, high = (min(max(at - before, 0), end) for at in (first, last))
                chunk[name] = t[low:high].cpu()
            self.put_stored(slots, chunk)
