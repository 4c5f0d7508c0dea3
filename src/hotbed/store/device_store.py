"""Keep all rows in plain tensors, in the memory of the device or of the host."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from hotbed import ops
from hotbed.ops import BackendName, BagLayout, Occurrences, Rows, RuleStep
from hotbed.ops.rows import MIN_EXPONENT, block_count, locate_rows, write_narrow, write_rows
from hotbed.optim import Moment
from hotbed.specs import RowDtype, Tier, row_bytes
from hotbed.store import memory
from hotbed.store.base import Extent, RowStore, Span, Values
from hotbed.store.records import Use
from hotbed.store.slot_lists import UpdatedMask, UpdatedSlots

TORCH_DTYPES: dict[RowDtype, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}
MOMENT = "moment."
"""Prefix of the names of moments among a store's arrays."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

INITIAL_CHUNK = 1 << 20
"""Number of float32 values that are drawn before they are rounded to a low-precision dtype."""


class DenseStore(RowStore):
    """Keep rows and moments as plain tensors on one device."""

    def __init__(
        self,
        spans: Sequence[Span],  # tables in the order of their slots
        dim: int,
        *,
        dtype: RowDtype = "fp32",  # dtype of the rows after `Span.fp32_rows`
        device: torch.device | str = "cpu",  # device of looked-up vectors: cpu (huge pages on Linux) or cuda
        backend: BackendName = "auto",
        # "host": host memory that a CUDA device reads and writes in place (`hotbed.store.memory.host_zeros`)
        tier: Literal["device", "host"] = "device",
    ) -> None:
        self.spans = [s._replace(fp32_rows=s.rows) for s in spans] if dtype == "fp32" else list(spans)
        self.slots = sum(s.rows for s in spans)
        self.dim = dim
        self.backend_name: BackendName = backend
        self._zeros = memory.host_zeros if tier == "host" else memory.allocate_zeros
        device = torch.device(device)
        wide = sum(s.fp32_rows for s in self.spans)
        narrow = self.slots - wide
        exponents = (narrow, block_count(dim)) if dtype == "int8" else (0, 0)
        first_slot = [0, *accumulate(s.rows for s in self.spans)]
        first_wide = [0, *accumulate(s.fp32_rows for s in self.spans)]
        memory.refuse_too_many(wide * row_bytes("fp32", dim) + narrow * row_bytes(dtype, dim), device)
        self.rows = Rows(
            wide=self._zeros((wide, dim), torch.float32, device),
            narrow=self._zeros((narrow, dim), TORCH_DTYPES[dtype], device),
            exponents=self._zeros(exponents, torch.int8, device).fill_(MIN_EXPONENT),
            tables=torch.tensor(
                [
                    [slot, span.fp32_rows, at, slot - at, span.first_row, span.row_step, span.first_col]
                    for slot, at, span in zip(first_slot, first_wide, self.spans, strict=False)
                ],
                dtype=torch.int64,
                device=device,
            ).view(-1, 7),
        )
        self.moments: dict[str, Tensor] = {}
        self._firsts = list(zip(first_slot, first_wide, strict=True))
        """First slot and first wide row of each span. The last entry has the totals."""

    @property
    def ops(self) -> ops.Backend:
        """The kernels that serve this store."""
        return ops.select(self.device, self.backend_name)

    @property
    @override
    def device(self) -> torch.device:
        return self.rows.wide.device

    @property
    @override
    def tier(self) -> Tier:
        return "host" if self.device.type == "cpu" or self._zeros is memory.host_zeros else "device"

    @property
    @override
    def nbytes(self) -> int:
        tensors = (self.rows.wide, self.rows.narrow, self.rows.exponents, *self.moments.values())
        return sum(t.numel() * t.element_size() for t in tensors)

    @override
    def initialize(self, slot: int, *, seed: int, rows: range, cols: range, bound: float) -> None:
        self.replaced()
        for array, at, count in self._split_by_array(slot, len(rows)):
            some, rows = rows[:count], rows[count:]
            if array == "wide":
                out = self.rows.wide[at : at + count]
                self.ops.initial_values_(out, seed=seed, rows=some, cols=cols, bound=bound)
                continue
            chunk = max(INITIAL_CHUNK // self.dim, 1)
            values = torch.empty(min(chunk, count), self.dim, dtype=torch.float32, device=self.device)
            for start in range(0, count, chunk):
                drawn = values[: count - start]
                self.ops.initial_values_(drawn, seed=seed, rows=some[start : start + chunk], cols=cols, bound=bound)
                write_narrow(self.rows, slice(at + start, at + start + len(drawn)), drawn)

    def _split_by_array(self, slot: int, count: int) -> Iterator[tuple[Literal["wide", "narrow"], int, int]]:
        """Yield the parts of ``slot … slot + count − 1`` as (array, first position in the array, number of slots)."""
        stop = slot + count
        number = self._span_of(slot)
        while slot < stop:
            (first, wide), span = self._firsts[number], self.spans[number]
            end_wide, end = first + span.fp32_rows, first + span.rows
            if slot < min(end_wide, stop):
                yield "wide", wide + slot - first, min(end_wide, stop) - slot
                slot = min(end_wide, stop)
            if slot < min(end, stop):
                yield "narrow", slot - wide - span.fp32_rows, min(end, stop) - slot
                slot = min(end, stop)
            number += 1

    def _span_of(self, slot: int) -> int:
        """Return the number of the span that contains a slot."""
        return bisect_right(self._firsts, slot, key=lambda first: first[0]) - 1

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return memory.allocate(shape, dtype, self.device)

    @override
    def occurrences(self, bags: BagLayout) -> Occurrences:
        found = self.ops.occurrences(replace(bags, limit=self.slots))
        return found if bags.groups is None else replace(found, groups=bags.groups)

    @override
    def lookup(self, bags: BagLayout, out: Tensor) -> None:
        self.ops.lookup(self.rows, bags, out)

    @override
    def weight_gradient(self, bags: BagLayout, grad: Tensor, out: Tensor) -> None:
        self.ops.weight_gradient(self.rows, bags, grad, out)

    @override
    def _update_collector(self) -> UpdatedSlots:
        return UpdatedMask(self.slots, self.device)

    @override
    def update(self, step: RuleStep, occurrences: Occurrences, grad: Tensor) -> None:
        if self.changes is not None or self.on_change is not None:
            self.changing(occurrences.slots[occurrences.slots < self.slots])  # larger slots are padding
        groups = occurrences.groups or self.ops.group(replace(occurrences, limit=self.slots))
        self.ops.update(step, self.rows, self.moments, occurrences, groups, grad)

    @override
    def add_moment(self, moment: Moment) -> None:
        if moment.name not in self.moments:
            self.replaced()
            shape = (self.slots,) if moment.per == "row" else (self.slots, self.dim)
            self.moments[moment.name] = self._zeros(shape, torch.float32, self.device)

    @property
    @override
    def moment_names(self) -> list[str]:
        return list(self.moments)

    @override
    def moment_is_per_row(self, moment: str) -> bool:
        return self.moments[moment].dim() == 1

    @override
    def read(
        self, slots: Tensor, moment: str | None = None, *, out: Tensor | None = None, use: Use = "lookup"
    ) -> Tensor:
        if moment is not None:
            values = self.moments[moment][slots]
            return values if out is None else out.copy_(values)
        if out is None:
            out = self.empty((len(slots), self.dim), torch.float32)
        self.ops.gather(self.rows, slots.contiguous(), out)
        return out

    @override
    def write(self, slots: Tensor, values: Tensor, moment: str | None = None, *, random: Tensor | None = None) -> None:
        self.changing(slots)
        if moment is None:
            write_rows(self.rows, slots, values, random)
        else:
            self.moments[moment][slots] = values

    @override
    def values(self, slots: Tensor) -> Values:
        scales = None
        if self.rows.narrow.dtype == torch.int8:
            wide, at = locate_rows(self.rows, slots)
            shape = len(slots), block_count(self.dim)
            scales = torch.full(shape, MIN_EXPONENT, dtype=torch.int8, device=self.device)
            scales[~wide] = self.rows.exponents[at[~wide]]
        return Values(self.read(slots), {name: m[slots] for name, m in self.moments.items()}, scales)

    @override
    def put(self, slots: Tensor, values: Values, *, random: Tensor | None = None) -> None:
        assert values.moments.keys() == set(self.moment_names)
        self.changing(slots)
        if values.scales is not None:
            wide, at = locate_rows(self.rows, slots)
            self.rows.exponents[at[~wide]] = values.scales[~wide]
        write_rows(self.rows, slots, values.rows, random)
        for name, moment in values.moments.items():
            self.moments[name][slots] = moment

    @override
    def fill(self, span: int, moment: str, value: float) -> None:
        self.replaced()
        self.moment(span, moment).fill_(value)

    @override
    def moment(self, span: int, name: str) -> Tensor:
        first, _ = self._firsts[span]
        return self.moments[name][first : first + self.spans[span].rows]

    @override
    def load_moment(self, span: int, name: str, values: Tensor) -> None:
        self.replaced()
        self.moment(span, name).copy_(values)

    @override
    def raw(self, span: int) -> dict[str, Tensor]:
        arrays = self.arrays()
        return {
            name: arrays[e.array][e.start : e.stop]
            for name, e in self.extents(span).items()
            if not name.startswith(MOMENT)
        }

    @override
    def load_raw(self, span: int, raw: Mapping[str, Tensor]) -> None:
        self.replaced()
        for name, tensor in self.raw(span).items():
            tensor.copy_(raw[name])

    def arrays(self) -> dict[str, Tensor]:
        """Return the tensors of rows and moments by name. They share the store's memory."""
        rows = {"wide": self.rows.wide, "narrow": self.rows.narrow, "exponents": self.rows.exponents}
        return {**rows, **{f"{MOMENT}{name}": t for name, t in self.moments.items()}}

    def extents(self, span: int) -> dict[str, Extent]:
        """Return the extents of a span in `arrays`, by the names of `raw`, and ``moment.NAME``."""
        rows, fp32_rows = self.spans[span][:2]
        first_slot, first_wide = self._firsts[span]
        wide = Extent("wide", first_wide, first_wide + fp32_rows)
        narrow = first_slot - first_wide, first_slot - first_wide + rows - fp32_rows
        if fp32_rows == rows:
            found = {"weight": wide}
        else:
            found = {"weight": Extent("narrow", *narrow)}
            if self.rows.narrow.dtype == torch.int8:
                found["exponents"] = Extent("exponents", *narrow)
            if fp32_rows:
                found["fp32_weight"] = wide
        moments = (f"{MOMENT}{name}" for name in self.moments)
        return {**found, **{name: Extent(name, first_slot, first_slot + rows) for name in moments}}

    def stored_names(self, span: int) -> list[str]:
        """Return the names of the arrays of a span: the names of `raw`, and ``moment.NAME``."""
        return list(self.extents(span))

    def stored_array(self, name: str, slots: Tensor) -> Tensor:
        """Return one array at slots ``[n]`` of one span, on the CPU. All these slots must have a value in it."""
        array = self.extents(self._span_of(int(slots[0])))[name].array
        values = self.arrays()[array]
        bits = values.view(_BITS[values.element_size()])  # torch cannot index all narrow dtypes
        return bits[self.positions(slots.to(self.device))[array]].cpu().view(values.dtype)

    def positions(self, slots: Tensor) -> dict[str, Tensor]:
        """Return the positions of slots ``[n]`` in each array that holds them. An array may hold fewer than n."""
        found = {f"{MOMENT}{name}": slots for name in self.moments}
        if not len(self.rows.narrow):  # then slots are positions in `wide`
            return {"wide": slots, **found}
        wide, at = locate_rows(self.rows, slots)
        found |= {"wide": at[wide], "narrow": at[~wide]}
        if self.rows.narrow.dtype == torch.int8:
            found["exponents"] = at[~wide]
        return found

    def part(self, spans: Sequence[int], device: torch.device) -> DenseStore:
        """Return a store on ``device`` with copies of the spans with these numbers, and their moments."""
        dtypes: dict[torch.dtype, RowDtype] = {stored: name for name, stored in TORCH_DTYPES.items()}
        dtype, own = dtypes[self.rows.narrow.dtype], [self.spans[i] for i in spans]
        tier = "host" if self._zeros is memory.host_zeros else "device"
        made = DenseStore(own, self.dim, dtype=dtype, device=device, backend=self.backend_name, tier=tier)
        for name in self.moments:
            made.add_moment(Moment(name, "row" if self.moment_is_per_row(name) else "element"))
        for new, old in enumerate(spans):
            made.load_raw(new, self.raw(old))
            for name in self.moments:
                made.load_moment(new, name, self.moment(old, name))
        return made

    @override
    def to(self, device: torch.device) -> Self:
        if device == self.device:
            return self

        def copied(t: Tensor) -> Tensor:
            return self._zeros(t.shape, t.dtype, device).copy_(t)

        moved = type(self)([], self.dim, device=device, backend=self.backend_name)
        moved.spans, moved.slots, moved._zeros = self.spans, self.slots, self._zeros
        moved._firsts = self._firsts
        rows = self.rows
        wide, narrow, exponents = copied(rows.wide), copied(rows.narrow), copied(rows.exponents)
        moved.rows = Rows(wide, narrow, exponents, rows.tables.to(device))
        moved.moments = {name: copied(t) for name, t in self.moments.items()}
        return moved
