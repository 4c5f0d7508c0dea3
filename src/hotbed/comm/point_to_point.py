"""Exchange CPU tensors between pairs of ranks, through shared memory on one machine, and through Gloo otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import default_pg_timeout

from hotbed.comm.shared_memory import ADDRESS_BYTES, OwnMemory, PeerMemory

TAGS = 1 << 16
"""Number of tags for Gloo's exchanges. More concurrent exchanges would need equal tags. Larger tags are free."""
_HANDSHAKE = TAGS + 1
"""Tag of the handshake, in which two ranks agree on whether they share memory."""


class Work(Protocol):
    """A running operation with one rank, e.g. a `torch.distributed.Work`."""

    def wait(self) -> object:
        """Wait for the end. Raise RuntimeError after a failure."""
        ...


class Pairs:
    """Exchanges in one process group. All its ranks must start them in the same order, from one thread."""

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self._group, self._rank, self._size = group, rank, size
        self._exchanges = 0
        self._own: OwnMemory | None = None
        self._peers: dict[int, PeerMemory | None] = {}
        """Shared memory by rank, after the first exchange with the rank. None means Gloo."""

    @property
    def sharing(self) -> list[int]:
        """Ranks that exchange tensors with this rank through shared memory."""
        return sorted(rank for rank, memory in self._peers.items() if memory is not None)

    def start(
        self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], others: Sequence[int]
    ) -> list[tuple[int, Work]]:
        """Start an all-to-all, with all receives before the first send. Return pairs of peer rank and work.

        Gloo's own all-to-all sends first. Then a connection carries data in one direction at a time.
        """
        self._exchanges += 1
        tag = self._exchanges % TAGS
        sources = [r for r in others if incoming[r].numel()]
        targets = [r for r in others if outgoing[r].numel()]
        self._agree([r for r in others if r not in self._peers and (r in sources or r in targets)])
        works: list[tuple[int, Work]] = []
        for r in sources:
            memory = self._peers[r]
            arriving = (
                dist.irecv(incoming[r], group=self._group, group_src=r, tag=tag)
                if memory is None
                else _Receipt(memory, incoming[r])
            )
            works.append((r, cast(Work, arriving)))
        shared = {r: memory for r in targets if (memory := self._peers[r]) is not None}
        if shared:
            cast(OwnMemory, self._own).send({r: outgoing[r] for r in shared}, shared)
        by_sockets = [r for r in targets if r not in shared]
        sent = [dist.isend(outgoing[r], group=self._group, group_dst=r, tag=tag) for r in by_sockets]
        return works + [(r, cast(Work, work)) for r, work in zip(by_sockets, sent, strict=True)]

    def _agree(self, ranks: Sequence[int]) -> None:
        """Agree with these ranks, which call this too, on whether memory is shared: both must open the other's memory.

        Each rank posts its messages to all ranks before it waits for one, so this cannot deadlock.
        """
        if not ranks:
            return
        if self._own is None:
            self._own = _create_memory(self._size)
        address = torch.zeros(ADDRESS_BYTES, dtype=torch.uint8) if self._own is None else self._own.address
        addresses = self._swap(ranks, address)
        timeout = _timeout(self._group)
        opened = {r: None if self._own is None else _open(t, self._rank, timeout) for r, t in addresses.items()}
        of_this = torch.zeros(self._size, dtype=torch.uint8)
        of_this[[r for r, memory in opened.items() if memory is not None]] = 1
        for r, of_other in self._swap(ranks, of_this).items():
            self._peers[r] = opened[r] if of_other[self._rank] else None

    def _swap(self, ranks: Sequence[int], value: Tensor) -> dict[int, Tensor]:
        """Send a tensor to each of these ranks, and receive a tensor of equal size from each."""
        found = {r: torch.empty_like(value) for r in ranks}
        works = [(r, dist.irecv(t, group=self._group, group_src=r, tag=_HANDSHAKE)) for r, t in found.items()]
        works += [(r, dist.isend(value, group=self._group, group_dst=r, tag=_HANDSHAKE)) for r in ranks]
        for r, work in works:
            assert work is not None  # because this process belongs to the group
            try:
                work.wait()
            except RuntimeError as error:
                raise HandshakeError(r, str(error)) from error
        return found


class HandshakeError(RuntimeError):
    """A rank did not answer the question of whether it shares memory."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


class _Receipt:
    """The receipt of a tensor through shared memory."""

    def __init__(self, memory: PeerMemory, out: Tensor) -> None:
        self._memory, self._out = memory, out
        self._number = memory.expect()

    def wait(self) -> None:
        self._memory.receive(self._number, self._out)


def _create_memory(ranks: int) -> OwnMemory | None:
    try:
        return OwnMemory(ranks)
    except OSError:  # the system has no memfd, or forbids to map it; Gloo works everywhere
        return None


def _open(address: Tensor, rank: int, timeout: timedelta) -> PeerMemory | None:
    try:
        return PeerMemory(address, rank, timeout)
    except OSError:  # the peer is on another machine
        return None


def _timeout(group: dist.ProcessGroup | None) -> timedelta:
    """Return the timeout of a Gloo process group, or the default if this torch does not expose it."""
    backend = (group or dist.group.WORLD)._get_backend(torch.device("cpu"))  # pyright: ignore[reportOptionalMemberAccess]
    return getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)
