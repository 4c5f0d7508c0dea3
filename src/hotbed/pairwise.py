"""Exchange CPU tensors between pairs of ranks: through shared memory on one machine, else through Gloo's sockets."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

from hotbed.shared_memory import ADDRESS_BYTES, OwnMemory, PeerMemory

TAGS = 1 << 16
"""Exchanges of Gloo that may be under way at once, before two would have one tag; later tags are no exchange's."""
_MEETING = TAGS + 1
"""Tag of the messages in which two ranks find out whether they share memory."""


class Work(Protocol):
    """What must be waited for until an exchange with a rank has ended; `torch.distributed.Work` is one."""

    def wait(self) -> object:
        """Wait; RuntimeError after a failure."""
        ...


class Pairs:
    """Exchanges of one process group, which all its ranks start in the same order, from one thread."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        self._exchanges = 0
        self._own: OwnMemory | None = None
        self._peers: dict[int, PeerMemory | None] = {}
        """By rank, once a tensor was exchanged with it; None: sockets."""

    @property
    def sharing(self) -> list[int]:
        """Ranks with which tensors are exchanged through shared memory."""
        return sorted(rank for rank, memory in self._peers.items() if memory is not None)

    def start(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], others: Sequence[int]
    ) -> list[tuple[int, Work]]:
        """Start an all-to-all, every receive before any send; return what to wait for, with the rank at the other end.

        Gloo's own sends first; then a link carries data in one direction at a time (docs/log.md).
        """
        self._exchanges += 1
        tag = self._exchanges % TAGS
        sources = [r for r in others if incoming[r].numel()]
        targets = [r for r in others if outgoing[r].numel()]
        self._meet([r for r in others if r not in self._peers and (r in sources or r in targets)])
        works: list[tuple[int, Work]] = []
        for r in sources:
            memory = self._peers[r]
            arriving = (
                dist.irecv(incoming[r], group=self._group, group_src=r, tag=tag)
                if memory is None
                else _Expected(memory, incoming[r])
            )
            works.append((r, cast(Work, arriving)))
        shared = {r: memory for r in targets if (memory := self._peers[r]) is not None}
        if shared:
            cast(OwnMemory, self._own).send({r: outgoing[r] for r in shared}, shared)
        by_sockets = [r for r in targets if r not in shared]
        sent = [dist.isend(outgoing[r], group=self._group, group_dst=r, tag=tag) for r in by_sockets]
        return works + [(r, cast(Work, work)) for r, work in zip(by_sockets, sent, strict=True)]

    def _meet(self, ranks: Sequence[int]) -> None:
        """Find out which of these ranks, which do the same now, share memory with this one: both must open the other's.

        Every rank has posted its messages to all before it waits for one.
        """
        if not ranks:
            return
        if self._own is None:
            self._own = _own_memory(self._size)
        address = torch.zeros(ADDRESS_BYTES, dtype=torch.uint8) if self._own is None else self._own.address
        told = self._swap(ranks, address)
        timeout = _timeout(self._group)
        opened = {r: None if self._own is None else _opened(t, self._rank, timeout) for r, t in told.items()}
        of_this = torch.zeros(self._size, dtype=torch.uint8)
        of_this[[r for r, memory in opened.items() if memory is not None]] = 1
        for r, of_other in self._swap(ranks, of_this).items():
            self._peers[r] = opened[r] if of_other[self._rank] else None

    def _swap(self, ranks: Sequence[int], value: Tensor) -> dict[int, Tensor]:
        """Send a tensor to each of these ranks, and receive one as large from it."""
        found = {r: torch.empty_like(value) for r in ranks}
        works = [(r, dist.irecv(t, group=self._group, group_src=r, tag=_MEETING)) for r, t in found.items()]
        works += [(r, dist.isend(value, group=self._group, group_dst=r, tag=_MEETING)) for r in ranks]
        for r, work in works:
            assert work is not None  # this process is of the group
            try:
                work.wait()
            except RuntimeError as error:
                raise MeetingError(r, str(error)) from error
        return found


class MeetingError(RuntimeError):
    """A rank did not say whether it shares memory."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class _Expected:
    """A tensor that comes through shared memory."""

    def __init__(self, memory: PeerMemory, out: Tensor) -> None:
        self._memory, self._out = memory, out
        self._number = memory.expect()

    def wait(self) -> None:
        self._memory.receive(self._number, self._out)


def _own_memory(ranks: int) -> OwnMemory | None:
    try:
        return OwnMemory(ranks)
    except OSError:  # the system gives none, or it may not be mapped: sockets serve everywhere
        return None


def _opened(address: Tensor, rank: int, timeout: timedelta) -> PeerMemory | None:
    try:
        return PeerMemory(address, rank, timeout)
    except OSError:  # another machine
        return None


def _timeout(group: dist.ProcessGroup | None) -> timedelta:
    """How long a process group of Gloo waits; the default where this torch does not say."""
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # pyright: ignore[reportOptionalMemberAccess]
    return getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)
