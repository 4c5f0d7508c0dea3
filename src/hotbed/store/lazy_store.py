"""Read, load and list whole tables of a store whose rows are materialized on their first update; for checkpoints.

`LazyStore` is the store. Its tables may have more rows than any memory, so a checkpoint takes the rows that exist
(`hotbed.store.picked`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.errors import StoreError
from hotbed.optim import Moment
from hotbed.store.dense import MOMENT
from hotbed.store.format import Stored
from hotbed.store.lazy_rows import Initial, LazyRows
from hotbed.store.rising import RisingSlots, SlotRange
from hotbed.store.touched import Touched

BYTES_AT_ONCE = 1 << 20
"""Bytes of records that are read or written together where all of a table is."""


class LazyStore(LazyRows):
    """Keep rows that are materialized on their first update, in records; made with what `LazyRows` is made with."""

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
        """Copy the records of these slots into new ones of the present format, which may be longer; drop others."""
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

    # -- rows that exist -------------------------------------------------------------------------------------------

    def existing(self) -> RisingSlots:
        """List the slots that exist now, with little memory."""
        return self.records.slots()

    @override
    def _touched(self) -> Touched:
        return self.records.touched()

    @override
    def changed(self) -> RisingSlots:
        self.records.settle()
        return super().changed()

    def keys(self, span: int) -> SlotRange:
        """List the slots of a span that exist, rising."""
        return self._of_span(self.existing(), span)

    def _of_span(self, slots: RisingSlots, span: int) -> SlotRange:
        return slots.part(slots.below(self._firsts[span]), slots.below(self._firsts[span + 1]))

    def count_wide(self, slots: Tensor) -> int:
        """Count how many of these slots, all of one span, have float32 rows."""
        return int(self._is_wide(self._at_records(slots)).sum())

    def stored_names(self, span: int) -> list[str]:
        """Name what the rows of a span are stored as, and its moments."""
        names = ["weight"]
        if self.spans[span].fp32_rows < self.spans[span].rows:
            names += ["exponents"] if self._format.dtype == torch.int8 else []
            names += ["fp32_weight"] if self.spans[span].fp32_rows else []
        return names + [f"{MOMENT}{m.name}" for m in self._format.moments]

    def stored(self, slots: Tensor) -> Stored:
        """Read what rows of these rising slots, all of one span, are stored as, and their moments, to the CPU.

        Names as in `raw`.
        """
        records, wide = self._read(self._at_records(slots), use="once")
        found = self._format.stored(records, wide)
        return {name: found[own].cpu() for name, own in self._names(slots).items() if own in found}

    def stored_array(self, name: str, slots: Tensor) -> Tensor:
        """Read one array of what `stored` gives of these rows, which all have it."""
        parts = [self.stored(part)[name] for part in slots.split(self._rows_at_once)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def put_stored(self, slots: Tensor, stored: Mapping[str, Tensor]) -> None:
        """Overwrite rows of these rising slots, all of one span, by what `stored` gave, or some of it.

        A row without a record that has its initial values and moments afterwards still has none.
        """
        slots = self._at_records(slots)
        records, wide = self._read(slots, use="once")
        before = records.clone()
        names = self._names(slots)
        self._format.put_stored(records, wide, {names[name]: self._at_records(t) for name, t in stored.items()})
        self._write_changed(slots, records, before)

    def put_values(self, slots: Tensor, values: Tensor) -> None:
        """Overwrite rows by float32 values ``[n, D]``, rounded to the nearest as if nothing had been there before."""
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
        """Map names of `raw`, and of moments, to those of `RecordFormat.stored`."""
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
                f"a whole table whose rows are materialized one by one would be {rows * size:,} bytes; use "
                "save_checkpoint, which saves the rows that exist"
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
