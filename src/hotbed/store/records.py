"""Define what records must do: bytes of one size, found by slot; most slots have none yet.

A record holds a row as it is stored and its moments (see `hotbed.store.format`), but whoever keeps records knows only
bytes. So a record has the same bits wherever it is kept, and a cache or a file cannot change what is trained. Records
may be layers: a cache over a file::

    LazyStore.read([7, 9]) ─ CachedRecords.read: 7 is here, 9 is not ─ FileRecords.read([9])

Each layer counts its own bytes and its own `Traffic`; the store adds them up when it is asked.
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

from hotbed.store.listing import Listed
from hotbed.store.rising import RisingSlots
from hotbed.store.touched import Touched, TouchedSlots

Use = Literal["lookup", "update", "once", "ahead"]
"""What a record is read for.

``lookup``: counts as a hit or a miss; ``update``: to be changed, mostly after a lookup; ``once``: as all of a table is
for a checkpoint, so no cache keeps it; ``ahead``: before a lookup needs it, so nobody waits.
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
        """Share of hits, 0 where nothing was asked of a cache."""
        return self.hits / max(self.hits + self.misses, 1)


class InPlace(NamedTuple):
    """The location of records in memory of the host."""

    slab: Tensor  # [m, record_bytes] uint8
    places: Tensor  # [n] int64: row of the slab for each slot, −1 if it has no record


class Records(ABC):
    """Keep records by slot.

    Parameters
    ----------
    record_bytes
        Size of each, a multiple of 4.

    Attributes
    ----------
    device
        Where the tensors are that are given and taken.
    reads_ahead
        Whether `prefetch` has anything to do.
    counted
        What was done here; not what was done below.
    """

    device = torch.device("cpu")
    reads_ahead = False

    def __init__(self, record_bytes: int) -> None:
        self.record_bytes = record_bytes
        self.counted = Traffic()

    def layers(self) -> list[Records]:
        """List these records and those below them, the fastest first."""
        return [self]

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory in use here; not below."""

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
            ``[n, bytes]`` uint8; of records that are longer the first bytes are wanted. Rows of slots without a record
            stay as they are.
        use
            What for, see `Use`.

        Returns
        -------
        Tensor
            ``[n]`` bool: which slots have a record.
        """

    def read_or_list(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Listed:
        """Copy records as `read` does, and list the slots that have none."""
        at = (~self.read(slots, out, use=use)).nonzero()[:, 0]
        return Listed(at, slots[at])

    @abstractmethod
    def write(self, slots: Tensor, records: Tensor) -> None:
        """Overwrite or add the records ``[n, record_bytes]`` uint8 of distinct slots ``[n]``, which may be kept."""

    @contextmanager
    def changed_in_place(self, slots: Tensor) -> Generator[InPlace | None]:
        """Lend the memory that has the records of these distinct slots ``[n]``, whose records the caller changes there.

        None where they are not kept in the host's memory, which is to be so unless a class says otherwise.
        """
        yield None

    def settle(self) -> None:
        """Make the slowest layer know every slot that has a record; a cache writes its new records there."""
        return

    @abstractmethod
    def slots(self) -> RisingSlots:
        """List all slots that have a record here or below now; settles first.

        `hotbed.store.rising.ListedSlots` lists those of a tensor, `hotbed.store.hash_index.NumberedSlots` takes less
        memory.
        """

    def touched(self) -> Touched:
        """Return a collector of the slots whose records change from now on; settles first."""
        return TouchedSlots()

    def has(self, slots: Tensor) -> Tensor:
        """Return which of these slots ``[n]`` have a record here or below, as ``[n]`` bool."""
        return torch.isin(slots, self.slots()[:])

    @abstractmethod
    def clear(self) -> None:
        """Forget all records, also those below."""

    def prefetch(self, slots: Tensor) -> None:
        """Read records that the next `read` will ask for, if that takes time; may be called by another thread."""
        return

    def to(self, device: torch.device) -> None:
        """Move what is meant to be on the device that computes to this one."""
        return

    def close(self) -> None:
        """Close files; memory is freed with the object."""
        return


class RecordsAbove(Records):
    """Stand before other records; what is not said otherwise is theirs."""

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
    def slots(self) -> RisingSlots:
        return self.below.slots()

    @override
    def touched(self) -> Touched:
        return self.below.touched()

    @override
    def has(self, slots: Tensor) -> Tensor:
        return self.below.has(slots)

    @override
    def clear(self) -> None:
        self.below.clear()
