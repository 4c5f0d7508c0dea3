"""Define the contract of records: byte strings of equal size, found by slot.

A record holds the stored bytes of a row, and its moments (`hotbed.store.format`). Most slots may have no record yet.
The classes that keep records see only bytes. So the bits of a record do not depend on where it is kept. Records may be
stacked in layers, e.g. a cache above a file::

    LazyStore.read([7, 9]) ─ CachedRecords.read: finds 7 ─ FileRecords.read([9])

Each layer counts its own bytes and its own `Traffic`, and the store sums them on request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.store.device_selection import Selection
from hotbed.store.slot_lists import SortedSlots, UpdatedSlotList, UpdatedSlots

Use = Literal["lookup", "update", "once", "ahead"]
"""Purpose of a read.

``lookup`` counts as a hit or a miss. ``update`` reads a record that will be changed, usually after a lookup. ``once``
reads a whole table, e.g. for a checkpoint, so no cache keeps the record. ``ahead`` prefetches a record for a lookup.
"""


@dataclass
class Traffic:
    """Counts of caches, staging and files so far."""

    # Records that lookups requested of a cache, found or not; records that are not materialized yet are misses.
    # Requests of several ranks, or of several features, for one record in one step count separately.
    hits: int = 0
    misses: int = 0
    read_bytes: int = 0  # from files
    written_bytes: int = 0  # to files
    ahead: int = 0  # records that were prefetched, from files or for a device
    to_device_bytes: int = 0  # records copied to a cache on a device from the host's memory or a file
    from_device_bytes: int = 0  # records evicted from a cache on a device
    waited_s: float = 0.0  # seconds for which file access blocked the caller

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def hit_rate(self) -> float:
        """Share of hits among the lookups in caches. 0 without lookups."""
        return self.hits / max(self.hits + self.misses, 1)


class InPlace(NamedTuple):
    """Records in the host's memory that may be changed in place."""

    slab: Tensor  # [m, record_bytes] uint8
    positions: Tensor  # [n] int64: row of the slab for each slot, −1 if the slot has no record


class Records(ABC):
    """Keep records by slot. A *record* is the stored bytes of a row and its moments.

    Parameters
    ----------
    record_bytes
        Size of a record, a multiple of 4.

    Attributes
    ----------
    device
        Device of the tensors that methods receive and return.
    reads_ahead
        Whether `prefetch` has an effect.
    counted
        Counts of this layer, without the layers below.
    """

    device = torch.device("cpu")
    reads_ahead = False

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.counted = Traffic()

    def layers(self) -> list[Records]:
        """Return this layer and the layers below, the fastest first."""
        return [self]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory that this layer uses, without the layers below."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of files in use."""
        return 0

    @abstractmethod
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        """Copy records.

        Parameters
        ----------
        slots
            ``[n]`` int64.
        out
            ``[n, bytes]`` uint8. If records are longer, only their first bytes are copied. Rows of slots without a
            record are not changed.
        use
            Purpose of the read.

        Returns
        -------
        Tensor
            ``[n]`` bool: whether each slot has a record.
        """

    def read_or_list(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Selection:
        """Copy records as `read` does, and return the slots that have no record."""
        at = (~self.read(slots, out, use=use)).nonzero()[:, 0]
        return Selection(at, slots[at])

    @abstractmethod
    def write(self, slots: Tensor, records: Tensor) -> None:
        """Overwrite or add the records ``[n, record_bytes]`` uint8 of distinct slots ``[n]``.

        The layer may keep references to both tensors, so callers must not change them afterwards.
        """

    @contextmanager
    def changed_in_place(self, slots: Tensor) -> Generator[InPlace | None]:
        """Yield the memory of the records of distinct slots ``[n]``, which the caller changes in place.

        Yield None if the records are not in the host's memory, which is the default.
        """
        yield None

    def settle(self) -> None:
        """Write new records of caches to the lowest layer, so that it lists every slot with a record."""
        return

    @abstractmethod
    def slots(self) -> SortedSlots:
        """Return all slots that have a record in this layer or below. Calls `settle` first.

        `hotbed.store.hash_index.RecordSlots` takes less memory than `hotbed.store.slot_lists.SlotTensor`.
        """

    def update_collector(self) -> UpdatedSlots:
        """Return a collector for the slots of records that will be updated. Calls `settle` first."""
        return UpdatedSlotList()

    def has(self, slots: Tensor) -> Tensor:
        """Return ``[n]`` bool: whether each slot has a record in this layer or below."""
        return torch.isin(slots, self.slots()[:])

    @abstractmethod
    def clear(self) -> None:
        """Delete all records, in this layer and below."""

    def prefetch(self, slots: Tensor) -> None:
        """Prefetch records for the next `read`, if reading is slow. Any thread may call this method."""
        return

    def to(self, device: torch.device) -> None:
        """Move data that belongs on the compute device to ``device``."""
        return

    def close(self) -> None:
        """Close files. Memory is freed with the object."""
        return


class RecordsAbove(Records):
    """A layer above other records, to which methods are delegated by default."""

    def __init__(self, below: Records) -> None:
        super().__init__(below.record_bytes)
        self.below = below

    @override
    def layers(self) -> list[Records]:
        return [self, *self.below.layers()]

    @override
    def write(self, slots: Tensor, records: Tensor) -> None:
        self.below.write(slots, records)

    @override
    def settle(self) -> None:
        self.below.settle()

    @override
    def slots(self) -> SortedSlots:
        return self.below.slots()

    @override
    def update_collector(self) -> UpdatedSlots:
        return self.below.update_collector()

    @override
    def has(self, slots: Tensor) -> Tensor:
        return self.below.has(slots)

    @override
    def clear(self) -> None:
        self.below.clear()
