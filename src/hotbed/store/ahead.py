"""`ReadAhead`: records that are slow to read, some of them before they are needed."""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.store.records import Over, Records, Traffic, Use, distinct, positions

_MOST_AHEAD = 32
"""Reads ahead that may wait to be used."""


class _Ahead:
    """Records that were read before they were needed: those that exist, by rising slot."""

    def __init__(self, slots: Tensor, records: Tensor) -> None:
        self.slots, order = slots.sort()
        self.records = records[order]
        self.fresh = torch.ones(len(slots), dtype=torch.bool)
        """Which were neither looked up nor written since."""


class ReadAhead(Over):
    """Records that are slow to read, some of them before they are needed.

    One thread may read ahead while another, the only one that writes, looks up and updates.

    Parameters
    ----------
    below
        Where they are.
    """

    def __init__(self, below: Records) -> None:
        super().__init__(below)
        self._lock = threading.Lock()
        self._ahead: list[_Ahead] = []
        self._written: list[Tensor] | None = None
        self._count = 0

    @property
    @override
    def nbytes(self) -> int:
        return self.below.nbytes + sum(ahead.records.nbytes for ahead in list(self._ahead))

    @property
    @override
    def traffic(self) -> Traffic:
        return replace(self.below.traffic, ahead=self._count)

    @override
    def prefetch(self, slots: Tensor) -> None:
        slots, _ = distinct(slots)
        with self._lock:
            self._written = []
        records = torch.empty(len(slots), self.record_bytes, dtype=torch.uint8)
        there = self.below.read(slots, records, use="ahead")
        with self._lock:
            ahead = _Ahead(slots[there], records[there])
            for written in self._written or ():
                _mark(ahead, written)
            self._written = None
            self._ahead = [*self._ahead, ahead][-_MOST_AHEAD:]

    @override
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        there = torch.zeros(len(slots), dtype=torch.bool)
        rest = torch.arange(len(slots))
        with self._lock:
            for ahead in self._ahead:
                at, found = positions(ahead.slots, slots[rest])
                found &= ahead.fresh[at] if len(ahead.slots) else False
                out[rest[found]] = ahead.records[at[found]]
                there[rest[found]] = True
                self._count += int(found.sum())
                rest = rest[~found]
                if use == "lookup":
                    ahead.fresh[at[found]] = False
            self._ahead = [ahead for ahead in self._ahead if bool(ahead.fresh.any())]
        if len(rest):
            found_below = torch.empty(len(rest), self.record_bytes, dtype=torch.uint8)
            below = self.below.read(slots[rest], found_below, use=use)
            out[rest[below]] = found_below[below]
            there[rest[below]] = True
        return there

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        # First, so that what is read ahead from now on is what was written; what was read before is marked then.
        self.below.write(slots, records)
        with self._lock:
            for ahead in self._ahead:
                _mark(ahead, slots)
            if self._written is not None:
                self._written.append(slots)

    @override
    def clear(self) -> None:
        with self._lock:
            self._ahead.clear()
        self.below.clear()


def _mark(ahead: _Ahead, written: Tensor) -> None:
    """Note which were written after they were read, or while."""
    at, found = positions(ahead.slots, written)
    ahead.fresh[at[found]] = False
