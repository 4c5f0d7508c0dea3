"""Give records places in a file in which nothing is overwritten that is still needed.

A record that changes gets a new place, beside those that change with it. So a batch of changes is a few long runs of
bytes, not a part of a page here and there that the system reads, changes and writes back whole. Places lie in segments;
one whose records have all moved on is written again. Where segments that are half empty make the file too long, what is
left of the emptiest is moved as well. (A log-structured file: Rosenblum and Ousterhout, ACM TOCS 10(1), 1992.)

Records 0 to 5 in segments of four, then 1, 2 and 3 are written again::

    places     0 1 2 3 | 4 5 6 7 | 8
    records    0 . . . | 4 5 1 2 | 3        when 0 is moved, too, the first segment is free
"""

from __future__ import annotations

import math
from collections import Counter, deque

import torch
from torch import Tensor

PER_SEGMENT = 1024
"""Places of a segment: whole pages, whatever a record's size, if that is a multiple of 4 bytes."""
SPACE = 1.5
"""Places of a file per record, beyond which records are moved; `_SLACK`, and what is read meanwhile, come on top."""
_SLACK = 8
"""Segments that a file may have beyond that."""
_AT_ONCE = 16
"""Segments whose records are moved at once, by default."""


class Segments:
    """Track the places of records, by number; callers hold a lock around each call.

    One thread writes a file: `take` places, write there, `put`. Others read: `begin_read`, `places`, read, `end_read`.
    Records are not overwritten until `end_read`.
    """

    def __init__(self, per_segment: int = PER_SEGMENT, at_once: int = _AT_ONCE) -> None:
        self._per, self._at_once = per_segment, at_once
        self._places = torch.full((1,), -1)
        self._numbers = torch.empty(0, dtype=torch.int64)
        """Record that was put at each place; it may have moved on."""
        self._live = torch.empty(0, dtype=torch.int64)
        """Records of each segment; of those that are free one more than there can be."""
        self._segments = self._count = 0
        self._next = self._end = 0
        """Places that are left of the segment which was taken last."""
        self._free = list[int]()
        self._freed = deque[tuple[int, int]]()
        self._puts = 0
        self._reads = Counter[int]()

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        return self._places.nbytes + self._numbers.nbytes + self._live.nbytes

    @property
    def end(self) -> int:
        """Places of the file: up to the last that was taken."""
        length = self._segments * self._per
        return self._next if self._end == length else length

    # -- who reads -------------------------------------------------------------------------------------------------

    def begin_read(self) -> int:
        """Keep all that is in the file now as it is; return what `end_read` needs."""
        self._reads[self._puts] += 1
        return self._puts

    def end_read(self, begun: int) -> None:
        """Have places written again that only this read needed."""
        self._reads[begun] -= 1
        if not self._reads[begun]:
            del self._reads[begun]

    def places(self, numbers: Tensor) -> Tensor:
        """Find the places of records ``[n]``; −1 for those that have none, as number −1 has."""
        known = (numbers >= 0) & (numbers < len(self._places))
        return torch.where(known, self._places[numbers * known], -1)

    # -- who writes ------------------------------------------------------------------------------------------------

    def take(self, count: int) -> Tensor:
        """Choose places ``[count]`` to write to, which nobody reads; neighbours as far as possible."""
        here = min(count, self._end - self._next)
        found = [torch.arange(self._next, self._next + here)]
        self._next += here
        wanted = -(-(count - here) // self._per)
        if wanted:
            oldest = min(self._reads, default=math.inf)
            while self._freed and self._freed[0][0] < oldest:
                self._free.append(self._freed.popleft()[1])
            cut = max(len(self._free) - wanted, 0)  # the last ones: they may still be in the system's memory
            segments = sorted(self._free[cut:])
            del self._free[cut:]
            new = wanted - len(segments)
            segments += range(self._segments, self._segments + new)
            self._segments += new
            self._live = _grown(self._live, self._segments, 0)
            self._numbers = _grown(self._numbers, self._segments * self._per, -1)
            self._live[segments] = 0
            firsts = torch.tensor(segments)[:, None] * self._per
            all_places = (firsts + torch.arange(self._per)).view(-1)
            found.append(all_places[: count - here])
            self._end = (segments[-1] + 1) * self._per
            self._next = self._end - (wanted * self._per - (count - here))
        return torch.cat(found)

    def put(self, numbers: Tensor, places: Tensor) -> None:
        """Note that these distinct records ``[n]`` are at these places now, which were taken."""
        if not len(numbers):
            return
        self._places = _grown(self._places, int(numbers.max()) + 1, -1)
        before = self._places[numbers]
        before = before[before >= 0]
        self._places[numbers] = places
        self._numbers[places] = numbers
        self._count += len(numbers) - len(before)
        self._live.index_add_(0, places // self._per, torch.ones_like(places))
        left = before // self._per
        self._live.index_add_(0, left, torch.full_like(left, -1))
        left = left.unique()
        filling = self._next // self._per if self._next < self._end else -1
        for segment in left[(self._live[left] == 0) & (left != filling)].tolist():
            self._live[segment] = self._per + 1
            self._freed.append((self._puts, segment))
        self._puts += 1

    def emptiest(self) -> Tensor:
        """List records that are to be moved, for their segments are mostly empty and the file is too long."""
        used = self._segments - len(self._free) - len(self._freed)
        excess = used - math.ceil(SPACE * self._count / self._per) - _SLACK
        if excess <= 0:
            return torch.empty(0, dtype=torch.int64)
        live = self._live[: self._segments].clone()
        if self._next < self._end:
            live[self._next // self._per] = self._per + 1
        segments = live.topk(min(max(excess, 2), self._at_once, len(live)), largest=False).indices.sort().values
        places = (segments[:, None] * self._per + torch.arange(self._per)).view(-1)
        numbers = self._numbers[places]
        return numbers[self.places(numbers) == places]


def _grown(values: Tensor, count: int, value: int) -> Tensor:
    """Return values that begin with these, with room for ``count``; what is new has this value."""
    if count <= len(values):
        return values
    grown = torch.full((max(count, 2 * len(values)),), value, dtype=torch.int64)
    grown[: len(values)] = values
    return grown
