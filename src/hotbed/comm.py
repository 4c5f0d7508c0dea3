"""Exchange tensors between ranks: every exchange returns a handle to wait for, and names itself where it fails.

All ranks must start the same exchanges in the same order, from one thread; exchanges that overlap with others use a
process group of their own (`Link.clone`). Nothing here starts or stops ``torch.distributed``.

`Link.all_to_all` over two ranks: rank 0 sends rows ``a b c`` with ``send_counts [1, 2]``, rank 1 sends ``d`` with
``[1, 0]``; rank 0 receives ``a d`` (``recv_counts [1, 1]``), rank 1 ``b c`` (``[2, 0]``).

Exchanges over NCCL never overlap with each other: two communicators whose operations are not submitted in one order on
all ranks can wait for each other for ever, already while they are made. So one thread starts them (`Link.overlaps`),
clones share one communicator, and an exchange over another one (of a node, of replicas) waits on the device for the one
before: they run in the order in which they were started, which is that of all ranks. What FSDP, or a user, sends over
communicators of their own is not in that order.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Generic, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hotbed.errors import CommError
from hotbed.pairwise import TAGS, MeetingError, Pairs, Work

T = TypeVar("T")
Tensors = Sequence[Tensor]
Sizes = Callable[[int, int], int] | None
"""Bytes by sender and receiver, where every rank knows them of all."""

_WAITS: set[int] = set()
"""Threads that wait for another rank."""


def waits() -> bool:
    """Tell whether any thread of this process waits for another rank."""
    return bool(_WAITS)


class Handle(Generic[T]):
    """The result of an exchange that is under way."""

    def __init__(
        self,
        result: Callable[[], T],  # returns the result once everything has arrived
        work: Sequence[tuple[int | None, Work]] = (),  # each with the rank at its other end
        # makes the error to raise from that of an exchange with a rank
        explained: Callable[[Exception, int | None], Exception] = lambda error, _: error,
    ) -> None:
        self._result, self._work, self._explained = result, list(work), explained
        self._error: Exception | None = None

    def wait(self) -> T:
        """Wait for the result; after a failure every call raises the same error."""
        _WAITS.add(thread := threading.get_ident())
        while self._work and self._error is None:
            peer, work = self._work[-1]
            try:
                work.wait()
            except RuntimeError as error:
                self._error = self._explained(error, peer)
            else:
                self._work.pop()
        _WAITS.discard(thread)
        if self._error is not None:
            raise self._error
        return self._result()


class Link:
    """The ranks that share a plan, as one process group connects them."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,  # default: all ranks
        timeout: timedelta | None = None,  # of exchanges of a `clone`; default: that of torch.distributed
        *,
        # process group of the same ranks for tensors on GPUs; default: ``group``
        gpu_group: dist.ProcessGroup | None = None,
        of: Link | None = None,  # link that this one is a clone or a part of; they share the number of the step
        names: Sequence[int] | None = None,  # numbers of these ranks in that link, for messages; default: all
        # ranks of torch.distributed of all groups that are made together, because every process must make all of them
        beside: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise CommError(
                "torch.distributed is not initialised; start with `torchrun` and call "
                "torch.distributed.init_process_group() first"
            )
        self.group = group
        self.gpu_group = gpu_group or group or dist.group.WORLD
        self.timeout = timeout
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._names = range(self.size) if names is None else names
        self._of_ranks: int = self.size if of is None else of._of_ranks
        self._beside = [dist.get_process_group_ranks(self.group)] if beside is None else [list(r) for r in beside]
        self._step: list[int] = [0] if of is None else of._step
        self._last_on_gpu: list[tuple[object, dist.Work]] = [] if of is None else of._last_on_gpu
        self.failure: Exception | None = None
        """The error of an exchange that a hook of torch started, which would not pass it on."""
        self.sent_bytes: Counter[str] = Counter()
        """Bytes that this rank sent to others in pairwise exchanges, by the exchange's name."""
        self._pairs = Pairs(self.group, self.rank, self.size)

    def __deepcopy__(self, memo: object) -> Self:
        """Return the link itself: copies of a model share process groups."""
        return self

    @property
    def device(self) -> torch.device:
        """Where tensors of any device may be put to be exchanged: on the host, or on this GPU if there is only NCCL."""
        if "cpu:" not in dist.get_backend_config(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def sharing(self) -> list[int]:
        """Ranks of this machine with which CPU tensors are exchanged through memory; see `hotbed.pairwise`."""
        return self._pairs.sharing

    @property
    def overlaps(self) -> bool:
        """Whether exchanges of several threads may overlap.

        Not those of NCCL: each waits for all that was put into its stream before, so threads that share a stream, in
        another order on another rank, would wait for each other for ever. Callers with a thread for exchanges start
        them in the thread of the step then, or wait for their thread before the step goes on.
        """
        return "nccl" not in dist.get_backend_config(self.group)

    @property
    def step(self) -> int:
        """Number of the training step, for the error messages of this link and of all its clones; 0: not known."""
        return self._step[0]

    @step.setter
    def step(self, step: int) -> None:
        self._step[0] = step

    @property
    def here(self) -> str:
        """Rank, and step if it is known, as error messages begin."""
        return f"rank {self._names[self.rank]} of {self._of_ranks}" + (f", step {self.step:,}" if self.step else "")

    def clone(self) -> Link:
        """Connect the same ranks by another process group, for exchanges that overlap; NCCL's stay in one.

        All processes of torch.distributed must call this, as for ``torch.distributed.new_group``. (With its
        ``use_local_synchronization`` processes that are in different numbers of groups wait for each other for ever.)
        """
        groups = [self._new_group(ranks) for ranks in self._beside]
        group = groups[self._beside.index(dist.get_process_group_ranks(self.group))]
        assert isinstance(group, dist.ProcessGroup)  # this rank is one of them
        shared = None if self.overlaps else self.gpu_group
        return Link(group, self.timeout, gpu_group=shared, of=self, names=self._names, beside=self._beside)

    def _new_group(self, ranks: Sequence[int]) -> object:
        """Make a process group of these ranks of torch.distributed; other ranks get what is no group."""
        try:
            return dist.new_group(list(ranks), timeout=self.timeout)
        except RuntimeError as error:
            raise CommError(
                f"{self.here}: no process group could be started; another rank has ended or not come as far in time, "
                f"its own output says why ({reason(error)})"
            ) from error

    def all_to_all(
        self,
        what: str,
        send: Tensor,  # ``[Σ send_counts, …]``
        send_counts: Sequence[int],  # rows to each rank
        recv_counts: Sequence[int],  # rows from each rank
        out: Tensor | None = None,  # contiguous ``[Σ recv_counts, …]`` to receive into; default: a new one
    ) -> Handle[Tensor]:
        """Send consecutive rows to the ranks, in rank order, and receive theirs."""
        if len(send_counts) != self.size or len(recv_counts) != self.size or sum(send_counts) != len(send):
            raise CommError(
                f"exchange of {what}: {len(send)} rows, counts {list(send_counts)} to and {list(recv_counts)} from "
                f"{self.size} ranks do not fit together"
            )
        received = send.new_empty(sum(recv_counts), *send.shape[1:]) if out is None else out
        outgoing, incoming = send.contiguous().split(list(send_counts)), received.split(list(recv_counts))
        handle = self.exchange(what, outgoing, incoming)
        return Handle(lambda: (handle.wait(), received)[1])

    def exchange(self, what: str, outgoing: Tensors, incoming: Tensors, nbytes: Sizes = None) -> Handle[None]:
        """Send each rank a tensor and receive one from it, into contiguous memory of the size that it sends.

        ``nbytes`` has the bytes from each rank to each; without it a `hotbed.hops.NodeLink` exchanges sizes first.
        """
        others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self.sent_bytes[what] += sum(outgoing[r].nbytes for r in others)
        incoming[self.rank].copy_(outgoing[self.rank])
        if outgoing[0].device.type == "cpu":
            return self._start(what, lambda: self._pairs.start(outgoing, incoming, others), lambda: None)
        empty = outgoing[0][:0]
        sent, received = ([t if r != self.rank else empty for r, t in enumerate(ts)] for ts in (outgoing, incoming))

        def start() -> dist.Work | None:
            return dist.all_to_all(received, sent, group=self.gpu_group, async_op=True)

        return self._start(what, lambda: [(None, self._after_the_last(start))], lambda: None)

    def all_gather(self, what: str, values: Tensor) -> Handle[Tensor]:
        """Gather every rank's tensor, all of one shape: ``[…] → [W, …]``."""
        received = values.new_empty(self.size, *values.shape)
        values = values.contiguous()
        nbytes = values.nbytes
        handle = self.exchange(what, [values] * self.size, list(received.unbind()), lambda _sender, _receiver: nbytes)
        return Handle(lambda: (handle.wait(), received)[1])

    def broadcast(self, what: str, values: Tensor, source: int) -> Handle[Tensor]:
        """Write one rank's tensor into those of the others, which have its shape."""
        on_host = values.device.type == "cpu"
        group = self.group if on_host else self.gpu_group
        # The source cannot tell which of several others has failed.
        peer = source if self.rank != source or self.size == 1 else None

        def start() -> dist.Work | None:
            return dist.broadcast(values, group=group, group_src=source, async_op=True)

        return self._start(
            what,
            lambda: [(peer, cast(dist.Work, start()) if on_host else self._after_the_last(start))],
            lambda: values,
        )

    def unreachable(self, wait_s: float = 5) -> list[int]:
        """List ranks that have ended, or do not call this within some seconds of each other.

        To be called after an error that does not name the rank which failed; the link cannot be used afterwards.
        """
        own, tag = torch.zeros(1, dtype=torch.uint8), TAGS
        others = [r for r in range(self.size) if r != self.rank]
        gone: list[int] = []
        calls: list[tuple[int, dist.Work]] = []
        sent: list[object] = []  # kept until the end: Gloo never sends what has no reference left
        for r in others:
            try:
                received = dist.irecv(torch.empty(1, dtype=torch.uint8), group=self.group, group_src=r, tag=tag)
                sent.append(dist.isend(own, group=self.group, group_dst=r, tag=tag))
                assert received is not None
                calls.append((r, received))
            except RuntimeError:
                gone.append(r)
        end = time.monotonic() + wait_s
        for r, call in calls:
            try:
                call.wait(timedelta(seconds=max(end - time.monotonic(), 0.1)))
            except RuntimeError:
                gone.append(r)
        return sorted(gone)

    def _after_the_last(self, start: Callable[[], dist.Work | None]) -> dist.Work:
        """Start an exchange between GPUs; over NCCL, after the last one that was over another communicator.

        What is over the same communicator is in its order anyway. Waiting for NCCL's work holds up the stream, not this
        thread.
        """
        if self.overlaps:
            return cast(dist.Work, start())
        for group, last in self._last_on_gpu:
            if group is not self.gpu_group:
                last.wait()
        work = cast(dist.Work, start())
        self._last_on_gpu[:] = [(self.gpu_group, work)]
        return work

    def _start(
        self, what: str, start: Callable[[], Sequence[tuple[int | None, Work]]], result: Callable[[], T]
    ) -> Handle[T]:
        _WAITS.add(thread := threading.get_ident())  # the first exchange of two ranks waits until both are there
        try:
            work = start()
        except RuntimeError as error:
            peer = error.rank if isinstance(error, MeetingError) else None
            raise self._explained(what, error, peer) from error
        finally:
            _WAITS.discard(thread)
        return Handle(result, work, lambda error, peer: self._explained(what, error, peer))

    def _explained(self, what: str, error: Exception, peer: int | None = None) -> CommError:
        peer = 1 - self.rank if peer is None and self.size == 2 else peer  # there is only one other
        who = "another rank" if peer is None else f"rank {self._names[peer]}"
        explained = CommError(
            f"{self.here}: the exchange of {what} failed; {who} has ended or not answered in time, its own output "
            f"says why ({reason(error)})"
        )
        explained.__cause__ = error
        return explained


class OneRank(Link):
    """The link of a single process, without torch.distributed: what it sends itself is copied."""

    def __init__(self) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.group = self.gpu_group = None
        self.timeout = None
        self.rank, self.size = 0, 1
        self._names = range(1)
        self._of_ranks = 1
        self._step = [0]
        self.failure = None
        self.sent_bytes = Counter()

    @property
    def device(self) -> torch.device:
        """The CPU; any device serves."""
        return torch.device("cpu")

    @property
    def overlaps(self) -> bool:
        """True: nothing waits."""
        return True

    def clone(self) -> Link:
        """Return the link itself: its exchanges end at once."""
        return self

    def exchange(self, what: str, outgoing: Tensors, incoming: Tensors, nbytes: Sizes = None) -> Handle[None]:
        """Copy what this process sends itself."""
        incoming[0].copy_(outgoing[0])
        return Handle(lambda: None)

    def broadcast(self, what: str, values: Tensor, source: int) -> Handle[Tensor]:
        """Return the values."""
        return Handle(lambda: values)

    def unreachable(self, wait_s: float = 5) -> list[int]:
        """Return no rank."""
        return []


def reason(error: Exception) -> str:
    """Shorten the message of a collective: without the place in its source and the advice of torch."""
    text = str(error).split(". This is typically")[0]
    return text.split("] ", 1)[1] if text.startswith("[/") and "] " in text else text
