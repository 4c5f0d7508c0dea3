"""Records: bytes of one size, found by slot; most slots have none yet. The contract, and what is counted.

A record holds a row as it is stored and its moments (see `hotbed.store.lazy`); what lies below knows only bytes. So a
record has the same bits wherever it is kept, and a cache or a file cannot change what is trained.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass
class Traffic:
    """What was done so far; `Records.traffic` counts.

    Attributes
    ----------
    hits, misses
        Records that were asked of a cache and were there, or were not; those that do not exist yet are misses.
    read_bytes, written_bytes
        What came from files, and went to them.
    ahead
        Records that were read from files before they were needed.
    waited_s
        Seconds that reading and writing of files held up the caller.
    """

    hits: int = 0
    misses: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    ahead: int = 0
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
    """

    record_bytes: int

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
    def read(self, slots: Tensor, out: Tensor, *, keep: bool = True) -> Tensor:
        """Copy records.

        Parameters
        ----------
        slots
            ``[n]`` int64.
        out
            ``[n, record_bytes]`` uint8; rows of slots without a record stay as they are.
        keep
            Whether they may be wanted again soon, so that a cache should keep them.

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
        """All slots that have a record, rising ``[n]``."""

    @abstractmethod
    def clear(self) -> None:
        """Forget all records."""

    def prefetch(self, slots: Tensor) -> None:
        """Read records that the next `read` will ask for, if that takes time; may be called by another thread."""
        return

    def close(self) -> None:
        """Give up what is not memory."""
        return


def positions(of: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Position of each wanted value ``[n]`` among rising ones, and whether it is there."""
    if not len(of):
        return torch.zeros_like(wanted), torch.zeros(len(wanted), dtype=torch.bool)
    at = torch.searchsorted(of, wanted).clamp_(max=len(of) - 1)
    return at, of[at] == wanted
