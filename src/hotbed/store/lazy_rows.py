"""`LazyRows`: rows in records, which exist once they were written; all others have their initial values."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from hotbed import ops
from hotbed.errors import StoreError
from hotbed.ops import BackendName
from hotbed.optim import Moment
from hotbed.specs import RowDtype
from hotbed.store import memory
from hotbed.store.base import RowStore, Span, Tier, Values
from hotbed.store.dense import MOMENT, TORCH_DTYPES
from hotbed.store.format import RecordFormat, Stored
from hotbed.store.records import Records, Traffic, Use

ROWS_AT_ONCE = 1 << 16
"""Rows that are brought together at once where all of a table is read or written."""


class _Initial(NamedTuple):
    """What the cells of a span begin with; bound 0: zeros."""

    seed: int = 0
    bound: float = 0.0


class LazyRows(RowStore):
    """Rows that exist once they have been written: reading and writing of single rows and of all; see `LazyStore`.

    Parameters
    ----------
    spans, dim, dtype
        As in `DenseStore`.
    make_records
        Makes the place of records of so many bytes, of at most so many slots, for a device.
    tier
        Where that is.
    device
        Where lookups deliver.
    backend
        Kernels to use.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        dim: int,
        make_records: Callable[[int, int, torch.device], Records],
        *,
        tier: Literal["host", "disk"],
        dtype: RowDtype = "fp32",
        device: torch.device | str = "cpu",
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
        self._initial = [_Initial() for _ in spans]
        self._initial_moments: list[dict[str, float]] = [{} for _ in spans]
        self.records = make_records(self._format.record_bytes, self.slots, self.device)
        self._placed()

    def _placed(self) -> None:
        self._bounds = torch.tensor(self._firsts, dtype=torch.int64, device=self.records.device)
        self._entries = torch.tensor(self.spans or [[0] * 5], dtype=torch.int64, device=self.records.device)

    def _at_records(self, t: Tensor) -> Tensor:
        """A tensor where the records are given and taken."""
        return t.to(self.records.device).contiguous()

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def ops(self) -> ops.Backend:
        """The kernels that serve this store."""
        return ops.select(self.device, self.backend_name)

    @property
    def _record_ops(self) -> ops.Backend:
        """The kernels for what is where the records are given and taken."""
        if self.records.device.type != "cpu":
            return self.ops
        return ops.select("cpu", ops.host_backend(self.backend_name, self.device))

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
        return self.records.nbytes

    @property
    @override
    def disk_bytes(self) -> int:
        return self.records.disk_bytes

    @property
    @override
    def traffic(self) -> Traffic:
        return self.records.traffic

    @override
    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return memory.empty(shape, dtype, self.device)

    @override
    def to(self, device: torch.device) -> Self:
        self._device = device
        self.records.to(device)
        self._placed()
        return self

    # -- single rows -----------------------------------------------------------------------------------------------

    @override
    def read(
        self, slots: Tensor, moment: str | None = None, *, out: Tensor | None = None, use: Use = "lookup"
    ) -> Tensor:
        records, wide = self._read(self._at_records(slots), use=use)
        values = self._format.rows(records, wide) if moment is None else self._format.moment(records, moment)
        if out is None:
            return values.to(self.device).contiguous()
        return out.copy_(values)

    @override
    def write(self, slots: Tensor, values: Tensor, moment: str | None = None, *, random: Tensor | None = None) -> None:
        slots = self._at_records(slots)
        if self.on_change is not None:
            self.on_change(slots)
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
        if self.on_change is not None:
            self.on_change(slots)
        records, wide = self._format.blank(len(slots), slots.device), self._is_wide(slots)
        if values.scales is not None:
            self._format.put_scales(records, wide, self._at_records(values.scales))
        random = None if random is None else self._at_records(random)
        self._format.put_rows(records, wide, self._at_records(values.rows), random)
        for name, moment in values.moments.items():
            self._format.moment(records, name).copy_(moment)
        self.records.write(slots, records)

    def _read(self, slots: Tensor, *, use: Use = "lookup") -> tuple[Tensor, Tensor]:
        """Records of slots, new ones where there are none, and which of their rows are wide."""
        records = memory.empty((len(slots), self._format.record_bytes), torch.uint8, self.records.device)
        there = self.records.read(slots, records, use=use)
        if not bool(there.all()):
            new = (~there).nonzero()[:, 0]
            records[new] = self._made(slots[new])
        return records, self._is_wide(slots)

    def _is_wide(self, slots: Tensor) -> Tensor:
        """Which slots ``[n]`` have float32 rows."""
        if not self._format.has_narrow:
            return torch.ones(len(slots), dtype=torch.bool, device=slots.device)
        span = torch.searchsorted(self._bounds, slots, right=True) - 1
        return slots - self._bounds[span] < self._entries[span, 1]

    def _cells(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Span of each slot, and which row of its table it holds."""
        span = torch.searchsorted(self._bounds, slots, right=True) - 1
        entry = self._entries[span]
        return span, entry[:, 2] + (slots - self._bounds[span]) * entry[:, 3]

    def _made(self, slots: Tensor) -> Tensor:
        """Records of rows with their initial values."""
        records = self._format.blank(len(slots), slots.device)
        span, rows = self._cells(slots)
        values = torch.zeros(len(slots), self.dim, device=slots.device)
        for i in span.unique().tolist():
            at = (span == i).nonzero()[:, 0]
            seed, bound = self._initial[i]
            if bound:
                part = torch.empty(len(at), self.dim, device=slots.device)
                first = self.spans[i].first_col
                cols = range(first, first + self.dim)
                self._record_ops.initial_values_(part, seed=seed, rows=rows[at], cols=cols, bound=bound)
                values[at] = part
            for moment, value in self._initial_moments[i].items():
                self._format.moment(records, moment)[at] = value
        self._format.put_rows(records, self._is_wide(slots), values)
        return records

    # -- whole spans -----------------------------------------------------------------------------------------------

    @override
    def initialize(self, slot: int, *, seed: int, rows: range, cols: range, bound: float) -> None:
        whole = slot in self._firsts[:-1] and len(rows) == self.spans[self._firsts.index(slot)].rows
        if whole:
            span = self._firsts.index(slot)
            entry = self.spans[span]
            if (rows.start, rows.step, cols.start) == (entry.first_row, entry.row_step, entry.first_col):
                self._forget(span)
                self._initial[span] = _Initial(seed, bound)
                return
        for first in range(0, len(rows), ROWS_AT_ONCE):
            part = rows[first : first + ROWS_AT_ONCE]
            values = torch.empty(len(part), self.dim, device=self.device)
            self.ops.initial_values_(values, seed=seed, rows=part, cols=cols, bound=bound)
            self.write(torch.arange(slot + first, slot + first + len(part)), values)

    @override
    def add_moment(self, moment: Moment) -> None:
        if any(m.name == moment.name for m in self._format.moments):
            return
        self._format = self._format.with_moment(moment)
        for initial in self._initial_moments:
            initial[moment.name] = 0.0
        self._keep_only(self.records.keys())

    @override
    def fill(self, span: int, moment: str, value: float) -> None:
        self._initial_moments[span][moment] = value
        shape = () if self.moment_is_per_row(moment) else (self.dim,)
        for slots in self.keys(span).split(ROWS_AT_ONCE):
            self.write(slots, torch.full((len(slots), *shape), value), moment)

    @property
    @override
    def moment_names(self) -> list[str]:
        return [m.name for m in self._format.moments]

    @override
    def moment_is_per_row(self, moment: str) -> bool:
        return self._format.is_per_row(moment)

    def keys(self, span: int) -> Tensor:
        """Slots of a span that exist, rising."""
        return self.keys_by_span()[span]

    def keys_by_span(self) -> list[Tensor]:
        """The same for all spans."""
        keys = self.records.keys()
        cuts = torch.searchsorted(keys, torch.tensor(self._firsts, dtype=torch.int64)).tolist()
        return [keys[first:last] for first, last in pairwise(cuts)]

    def has_narrow(self, span: int) -> bool:
        """Whether not all rows of a span are float32."""
        return self.spans[span].fp32_rows < self.spans[span].rows

    def count_wide(self, slots: Tensor) -> int:
        """How many of these slots, all of one span, are of rows that are float32."""
        return int(self._is_wide(self._at_records(slots)).sum())

    def stored_names(self, span: int) -> list[str]:
        """What the rows of a span are stored as, and its moments, by name."""
        names = ["weight"]
        if self.has_narrow(span):
            names += ["exponents"] if self._format.dtype == torch.int8 else []
            names += ["fp32_weight"] if self.spans[span].fp32_rows else []
        return names + [f"{MOMENT}{m.name}" for m in self._format.moments]

    def stored(self, slots: Tensor) -> Stored:
        """What rows of these rising slots, all of one span, are stored as, and their moments; names as in `raw`.

        On the CPU.
        """
        records, wide = self._read(self._at_records(slots), use="once")
        found = self._format.stored(records, wide)
        return {name: found[own].cpu() for name, own in self._names(slots).items() if own in found}

    def put_stored(self, slots: Tensor, stored: Mapping[str, Tensor]) -> None:
        """Overwrite rows of these rising slots, all of one span, by what `stored` gave, or some of it.

        Rows that have their initial values and moments afterwards need not exist, and those that did not still do not.
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
        if self.on_change is not None:
            self.on_change(slots[changed])
        self.records.write(slots[changed], records[changed])

    def _names(self, slots: Tensor) -> dict[str, str]:
        """What `raw` calls what a `RecordFormat` stores, and moments."""
        span = self.spans[bisect_right(self._firsts, int(slots[0])) - 1]
        names = {f"{MOMENT}{m.name}": m.name for m in self._format.moments}
        if span.fp32_rows == span.rows:
            return {**names, "weight": "wide"}
        return {**names, "weight": "narrow", "exponents": "exponents", "fp32_weight": "wide"}

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
                f"all of a table that is made row by row would be {rows * size:,} bytes; use save_checkpoint, which "
                "saves the rows that exist"
            )
        parts = [self.stored(slots) for slots in self._slots_of(span).split(ROWS_AT_ONCE)]
        found = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if self.spans[span].fp32_rows == 0:
            found.pop("fp32_weight", None)
        return {name: t.to(self.device) for name, t in found.items()}

    def _load(self, span: int, values: Mapping[str, Tensor]) -> None:
        wide = self.spans[span].fp32_rows
        for slots in self._slots_of(span).split(ROWS_AT_ONCE):
            first, last = int(slots[0]) - self._firsts[span], int(slots[-1]) + 1 - self._firsts[span]
            part: Stored = {}
            for name, t in values.items():
                before = wide if name in ("weight", "exponents") and wide < self.spans[span].rows else 0
                end = wide if name == "fp32_weight" else self.spans[span].rows - before
                low, high = (min(max(at - before, 0), end) for at in (first, last))
                part[name] = t[low:high].cpu()
            self.put_stored(slots, part)

    def _forget(self, span: int) -> None:
        keys, own = self.records.keys(), self.keys(span)
        if not len(own):
            return
        if len(own) == len(keys):
            self.records.clear()
            return
        self._keep_only(keys[torch.isin(keys, own, invert=True)])

    def _keep_only(self, slots: Tensor) -> None:
        """Move the records of these slots to others, in the present format, which may have more at its end."""
        old, self.records = self.records, self._make_records(self._format.record_bytes, self.slots, self.device)
        more = self._format.record_bytes - old.record_bytes
        for part in self._at_records(slots).split(ROWS_AT_ONCE):
            before = torch.empty(len(part), old.record_bytes, dtype=torch.uint8, device=part.device)
            old.read(part, before, use="once")
            self.records.write(part, torch.nn.functional.pad(before, (0, more)))
        old.close()
