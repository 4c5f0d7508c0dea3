"""Records: bytes of one size, found by slot; most slots have none yet. The contract, and what is counted.

A record holds a row as it is stored and its moments (see `hotbed.store.lazy`); what lies below knows only bytes. So a
record has the same bits wherever it is kept, and a cache or a file cannot change what is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Literal

import torch
from torch import Tensor
from typing_extensions import override

Use = Literal["lookup", "update", "once", "ahead"]
"""What a record is read for: a lookup, which counts as a hit or a miss; to change it, mostly after a lookup; once, as
all of a table is for a checkpoint, so that no cache should keep it; or ahead of a lookup, so that nobody waits."""


@dataclass
class Traffic:
    """What was done so far; `Records.traffic` counts.

    Attributes
    ----------
    hits, misses
        Records that lookups asked of a cache and were there, or were not; those that do not exist yet are misses. What
        several ranks, or several features' lookups, ask for in one step counts for each.
    read_bytes, written_bytes
        What came from files, and went to them.
    ahead
        Records that were read before they were needed, from files or for a device.
    to_device_bytes, from_device_bytes
        Records that came to a cache on a device from the host's memory or a file, and went back.
    waited_s
        Seconds that reading and writing of files held up the caller.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    ahead: int = 0
    to_device_bytes: int = 0
    from_device_bytes: int = 0
    waited_s: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) - getattr(other, f.name) for f in fields(self)))

    @property
    def hit_rate(self) -> float:
        """Share of hits, 0 where nothing was asked of a cache."""
        return self.hits / max(self.hits + self.misses, 1)


class Records(ABC):
    """Records by slot.

    Attributes
    ----------
    record_bytes
        Size of each, a multiple of 4.
    device
        Where the tensors are that are given and taken.
    """

    record_bytes: int
    device = torch.device("cpu")

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory in use."""

    @property
    def disk_bytes(self) -> int:
        """Bytes of files in use."""
        return 0

    @property
    def traffic(self) -> Traffic:
        """What was done so far."""
        return Traffic()

    @abstractmethod
    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        """Copy records.

        Parameters
        ----------
        slots
            ``[n]`` int64.
        out
            ``[n, record_bytes]`` uint8; rows of slots without a record stay as they are.
        use
            What for, see `Use`.

        Returns
        -------
        Tensor
            ``[n]`` bool: which slots have a record.
        """

    @abstractmethod
    def write(self, slots: Tensor, records: Tensor) -> None:
        """Overwrite or add the records ``[n, record_bytes]`` uint8 of distinct slots ``[n]``, which may be kept."""

    @abstractmethod
    def keys(self) -> Tensor:
        """All slots that have a record, rising ``[n]``, on the CPU."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all records."""

    def prefetch(self, slots: Tensor) -> None:
        """Read records that the next `read` will ask for, if that takes time; may be called by another thread."""
        return

    def to(self, device: torch.device) -> None:
        """Let what is meant to be on the device that computes be on this one."""
        return

    def close(self) -> None:
        """Give up what is not memory."""
        return


class Over(Records):
    """Records that are kept by others."""

    def __init__(self, below: Records) -> None:
        self.below, self.record_bytes, self.device = below, below.record_bytes, below.device

    @property
    @override
    def nbytes(self) -> int:
        return self.below.nbytes

    @property
    @override
    def disk_bytes(self) -> int:
        return self.below.disk_bytes

    @property
    @override
    def traffic(self) -> Traffic:
        return self.below.traffic

    @override
    def keys(self) -> Tensor:
        return self.below.keys()

    @override
    def clear(self) -> None:
        self.below.clear()

    @override
    def prefetch(self, slots: Tensor) -> None:
        self.below.prefetch(slots)

    @override
    def to(self, device: torch.device) -> None:
        self.below.to(device)
        self.device = self.below.device

    @override
    def close(self) -> None:
        self.below.close()


def positions(of: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Position of each wanted value ``[n]`` among rising ones, and whether it is there."""
    if not len(of):
        return torch.zeros_like(wanted), torch.zeros(len(wanted), dtype=torch.bool)
    at = torch.searchsorted(of, wanted).clamp_(max=len(of) - 1)
    return at, of[at] == wanted


def distinct(slots: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct slots, rising, and where each first stands."""
    ordered, order = slots.sort(stable=True)
    new = torch.ones(len(slots), dtype=torch.bool, device=slots.device)
    new[1:] = ordered[1:] != ordered[:-1]
    return ordered[new], order[new]
