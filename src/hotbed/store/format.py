"""Define the byte layout of a record: the stored row, then its moments.

For example, the record of an int8 row with 130 columns and one moment per row has 136 bytes::

    130 values | 2 exponents of blocks of 128 columns | moment, float32
    0 … 129      130 … 131                               132 … 135
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hotbed.ops.rows import MIN_EXPONENT, block_count, exponents_of, round_nearest, round_stochastic, widen
from hotbed.optim import Moment

Stored = dict[str, Tensor]
"""Arrays of ``n`` records by name: ``wide [w, D]`` (the float32 rows), ``narrow [n − w, D]`` (the low-precision rows),
``exponents`` (the scales of int8 rows), and moments ``[n]`` or ``[n, D]``."""


class RecordFormat:
    """Pack rows and moments into records, and unpack them.

    A row is *wide* (float32) or *narrow* (in the low-precision ``dtype``). If a store has both, a record has the size
    of the longer one. Moments are float32 and follow the row.
    """

    def __init__(
        self, dim: int, dtype: torch.dtype, *, has_wide: bool, has_narrow: bool, moments: Sequence[Moment] = ()
    ) -> None:
        self.dim, self.dtype, self.has_wide, self.has_narrow = dim, dtype, has_wide, has_narrow
        self.moments = tuple(moments)
        self._narrow_bytes = dim * dtype.itemsize
        self._blocks = block_count(dim) if dtype == torch.int8 else 0
        narrow = -(-(self._narrow_bytes + self._blocks) // 4) * 4
        at = max(4 * dim * has_wide, narrow * has_narrow)
        self._columns: dict[str, slice] = {}
        for moment in moments:
            end = at + moment.nbytes(dim)
            self._columns[moment.name] = slice(at // 4, end // 4)
            at = end
        self.record_bytes = at

    def with_moment(self, moment: Moment) -> RecordFormat:
        """Return this format with one more moment."""
        kinds = {"has_wide": self.has_wide, "has_narrow": self.has_narrow}
        return RecordFormat(self.dim, self.dtype, **kinds, moments=(*self.moments, moment))

    def is_per_row(self, name: str) -> bool:
        """Return whether a moment has one value per row."""
        return next(m.per for m in self.moments if m.name == name) == "row"

    def rows(self, records: Tensor, wide: Tensor) -> Tensor:
        """Return the rows of records ``[n, record_bytes]`` as float32 ``[n, D]``. ``wide [n]`` selects float32 rows."""
        if not self.has_narrow:
            return records.view(torch.float32)[:, : self.dim]
        if self.has_wide and bool(wide.any()):
            values = torch.empty(len(records), self.dim, dtype=torch.float32, device=records.device)
            values[wide] = records[wide].view(torch.float32)[:, : self.dim]
            values[~wide] = widen(self._narrow(records[~wide]), self._exponents(records[~wide]))
            return values
        return widen(self._narrow(records), self._exponents(records))

    def put_rows(self, records: Tensor, wide: Tensor, values: Tensor, random: Tensor | None = None) -> None:
        """Write float32 values ``[n, D]`` into records, rounded as in `hotbed.ops.rows.write_rows`."""
        if not self.has_narrow:
            records.view(torch.float32)[:, : self.dim] = values
            return
        if self.has_wide and bool(wide.any()):
            records.view(torch.float32)[wide, : self.dim] = values[wide]
            at = (~wide).nonzero()[:, 0]
            part = records[at]
            self._put_narrow(part, values[at], None if random is None else random[at])
            records[at] = part
        else:
            self._put_narrow(records, values, random)

    def scales(self, records: Tensor, wide: Tensor) -> Tensor | None:
        """Return the exponents ``[n, blocks]`` of int8 rows, or None for a different dtype.

        Float32 rows have the least exponent.
        """
        if not self._blocks:
            return None
        return self._exponents(records).masked_fill(wide[:, None], MIN_EXPONENT)

    def put_scales(self, records: Tensor, wide: Tensor, scales: Tensor) -> None:
        """Write exponents ``[n, blocks]`` into records, before `put_rows`."""
        own = self._exponents(records)
        own.copy_(torch.where(wide[:, None], own, scales))

    def moment(self, records: Tensor, name: str) -> Tensor:
        """Return a moment, ``[n]`` or ``[n, D]``, which shares the memory of the records."""
        values = records.view(torch.float32)[:, self._columns[name]]
        return values[:, 0] if self.is_per_row(name) else values

    def blank(self, count: int, device: torch.device) -> Tensor:
        """Return zero-filled records with the least exponents, so that scales will fit the first values."""
        records = torch.zeros(count, self.record_bytes, dtype=torch.uint8, device=device)
        self._exponents(records).fill_(MIN_EXPONENT)
        return records

    def stored(self, records: Tensor, wide: Tensor) -> Stored:
        """Return the stored arrays of records, bit for bit."""
        found: Stored = {m.name: self.moment(records, m.name).clone() for m in self.moments}
        if self.has_wide:
            found["wide"] = records[wide].view(torch.float32)[:, : self.dim].clone()
        if self.has_narrow:
            narrow = records[~wide]
            found["narrow"] = self._narrow(narrow)
            if self._blocks:
                found["exponents"] = self._exponents(narrow).clone()
        return found

    def put_stored(self, records: Tensor, wide: Tensor, stored: Stored) -> None:
        """Overwrite records with arrays of `stored`. Parts without an array are not changed."""
        for moment in self.moments:
            if moment.name in stored:
                self.moment(records, moment.name).copy_(stored[moment.name])
        if "wide" in stored:
            records.view(torch.float32)[wide, : self.dim] = stored["wide"]
        if "narrow" in stored:
            narrow = records[~wide]
            narrow[:, : self._narrow_bytes] = _bytes_of(stored["narrow"])
            if self._blocks:
                self._exponents(narrow).copy_(stored["exponents"])
            records[~wide] = narrow

    def _narrow(self, records: Tensor) -> Tensor:
        return records[:, : self._narrow_bytes].contiguous().view(self.dtype)

    def _exponents(self, records: Tensor) -> Tensor:
        return records[:, self._narrow_bytes : self._narrow_bytes + self._blocks].view(torch.int8)

    def _put_narrow(self, records: Tensor, values: Tensor, random: Tensor | None) -> None:
        exponents = self._exponents(records)
        if self._blocks:
            exponents.copy_(torch.maximum(exponents, exponents_of(values)))
        if random is None:
            narrow = round_nearest(values, self.dtype, exponents)
        else:
            narrow = round_stochastic(values, self.dtype, exponents, random)
        records[:, : self._narrow_bytes] = _bytes_of(narrow)


def _bytes_of(rows: Tensor) -> Tensor:
    """Return the bytes ``[n, D · itemsize]`` of rows ``[n, D]``."""
    # If D is 1, the stride of the columns of contiguous rows is arbitrary, but torch requires 1 to view bytes.
    return rows.contiguous().as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)
