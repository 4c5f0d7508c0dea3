"""Exchange tensors between ranks. Every exchange returns a handle to wait for, and its errors name the exchange.

All ranks must start the same exchanges in the same order, from one thread. Exchanges that overlap with others need
their own process group (`Link.clone`). This package neither initializes nor destroys ``torch.distributed``.

For example, with `Link.all_to_all` over two ranks, rank 0 sends rows ``a b c`` with ``send_counts [1, 2]``, and rank 1
sends ``d`` with ``[1, 0]``. Rank 0 receives ``a d`` (``recv_counts [1, 1]``), and rank 1 receives ``b c`` (``[2, 0]``).

Exchanges over NCCL never overlap. If two communicators receive their operations in different orders on different ranks,
they can deadlock, even during their creation. Therefore one thread starts all exchanges (`Link.overlaps`), and clones
share one communicator. An exchange over a second communicator (of a node, or of replicas) waits on the device for the
previous exchange. So exchanges run in the order in which they were started, which is equal on all ranks. This
order does not include the communicators of FSDP or of the user.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Generic, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hotbed.comm.point_to_point import TAGS, HandshakeError, Pairs, Work
from hotbed.errors import CommError

T = TypeVar("T")
Tensors = Sequence[Tensor]
Sizes = Callable[[int, int], int] | None
"""Returns the bytes that a sender has for a receiver. All ranks must know these sizes. None if they do not."""

_WAITS: set[int] = set()
"""IDs of threads that are waiting for another rank."""


def waits() -> bool:
    """Return whether any thread of this process is waiting for another rank."""
    return bool(_WAITS)


@contextmanager
def _waiting() -> Generator[None]:
    """Inside the context, this thread counts as waiting for another rank."""
    _WAITS.add(thread := threading.get_ident())
    try:
        yield
    finally:
        _WAITS.discard(thread)


class Handle(Generic[T]):
    """The result of a running exchange."""

    def __init__(
        self,
        result: Callable[[], T],  # returns the result after all work
        work: Sequence[tuple[int | None, Work]] = (),  # pairs of peer rank and work
        # converts the error of the work with a peer rank
        explained: Callable[[Exception, int | None], Exception] = lambda error, _: error,
    ) -> None:
        self._result, self._work, self._explain = result, list(work), explained
        self._error: Exception | None = None

    def wait(self) -> T:
        """Wait for the result and return it. After a failure, every call raises the same error."""
        with _waiting():
            while self._work and self._error is None:
                peer, work = self._work[-1]
                try:
                    work.wait()
                except RuntimeError as error:
                    self._error = self._explain(error, peer)
                else:
                    self._work.pop()
        if self._error is not None:
            raise self._error
        return self._result()


class Link:
    """The ranks that share a plan, connected by one process group."""

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,  # default: all ranks
        timeout: timedelta | None = None,  # timeout of a clone's exchanges; default: the one of torch.distributed
        *,
        # process group of the same ranks for tensors on GPUs; default: ``group``
        gpu_group: dist.ProcessGroup | None = None,
        parent: Link | None = None,  # link that this one is a clone or a part of; both share the step number
        names: Sequence[int] | None = None,  # these ranks' numbers in the parent, for messages; default: all
        # global ranks of all groups that are created together, because every process must create all of them
        all_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise CommError(
                "torch.distributed is not initialized. Start the program with `torchrun`, and call "
                "torch.distributed.init_process_group() first"
            )
        self.group = group
        self.gpu_group = gpu_group or group or dist.group.WORLD
        self.timeout = timeout
        self.rank = dist.get_rank(self.group)
        self.size = dist.get_world_size(self.group)
        self._names = range(self.size) if names is None else names
        self._total_ranks: int = self.size if parent is None else parent._total_ranks
        own = dist.get_process_group_ranks(self.group)
        self._all_groups = [own] if all_groups is None else [list(r) for r in all_groups]
        self._step: list[int] = [0] if parent is None else parent._step
        self._last_on_gpu: list[tuple[object, dist.Work]] = [] if parent is None else parent._last_on_gpu
        self.failure: Exception | None = None
        """Error of an exchange that a hook of torch started. torch would not propagate the error."""
        self.sent_bytes: Counter[str] = Counter()
        """Bytes that this rank sent to other ranks in exchanges of pairs, by the name of the exchange."""
        self._pairs = Pairs(self.group, self.rank, self.size)

    def __deepcopy__(self, memo: object) -> Self:
        """Return the link itself, because copies of a model share process groups."""
        return self

    @property
    def device(self) -> torch.device:
        """Device for exchanges of tensors from any device: the CPU, or this GPU if NCCL is the only backend."""
        if "cpu:" not in dist.get_backend_config(self.group):
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")

    @property
    def sharing(self) -> list[int]:
        """Ranks on this machine that exchange CPU tensors with this rank through shared memory."""
        return self._pairs.sharing

    @property
    def overlaps(self) -> bool:
        """Whether exchanges of several threads may overlap. False for NCCL.

        An NCCL exchange waits for all earlier work in its stream. Threads that share a stream would deadlock if their
        order differed between ranks. Callers with a thread for exchanges must then start the exchanges in the thread of
        the step, or wait for their thread before the step continues.
        """
        return "nccl" not in dist.get_backend_config(self.group)

    @property
    def step(self) -> int:
        """Number of the training step, for error messages of this link and its clones. 0 if unknown."""
        return self._step[0]

    @step.setter
    def step(self, step: int) -> None:
        self._step[0] = step

    @property
    def here(self) -> str:
        """The rank, and the step if it is known. Error messages begin with this text."""
        return f"rank {self._names[self.rank]} of {self._total_ranks}" + (f", step {self.step:,}" if self.step else "")

    def clone(self) -> Link:
        """Connect the same ranks with a new process group, for overlapping exchanges. NCCL keeps its only group.

        All processes of torch.distributed must call this method, as for ``torch.distributed.new_group``. The option
        ``use_local_synchronization`` is not used, because processes in different numbers of groups would deadlock.
        """
        groups = [self._new_group(ranks) for ranks in self._all_groups]
        group = groups[self._all_groups.index(dist.get_process_group_ranks(self.group))]
        assert isinstance(group, dist.ProcessGroup)  # because this rank belongs to it
        shared = None if self.overlaps else self.gpu_group
        return Link(group, self.timeout, gpu_group=shared, parent=self, names=self._names, all_groups=self._all_groups)

    def _new_group(self, ranks: Sequence[int]) -> object:
        """Create a process group of global ranks. Return a placeholder on ranks outside of the group."""
        try:
            return dist.new_group(list(ranks), timeout=self.timeout)
        except RuntimeError as error:
            raise CommError(
                f"{self.here}: cannot create a process group: another rank has ended, or did not join in time "
                f"({reason(error)}). See the output of that rank"
            ) from error

    def all_to_all(
        self,
        what: str,
        send: Tensor,  # ``[Σ send_counts, …]``
        send_counts: Sequence[int],  # rows to each rank
        recv_counts: Sequence[int],  # rows from each rank
        out: Tensor | None = None,  # contiguous ``[Σ recv_counts, …]`` to receive into; default: a new one
    ) -> Handle[Tensor]:
        """Send consecutive rows to all ranks, in rank order, and receive rows from all ranks."""
        if len(send_counts) != self.size or len(recv_counts) != self.size or sum(send_counts) != len(send):
            raise CommError(
                f"exchange of {what}: got {len(send)} rows, send_counts {list(send_counts)} and recv_counts "
                f"{list(recv_counts)}, expected counts for {self.size} ranks, and send_counts that add up to the rows"
            )
        received = send.new_empty(sum(recv_counts), *send.shape[1:]) if out is None else out
        outgoing, incoming = send.contiguous().split(list(send_counts)), received.split(list(recv_counts))
        handle = self.exchange(what, outgoing, incoming)
        return Handle(lambda: (handle.wait(), received)[1])

    def exchange(self, what: str, outgoing: Tensors, incoming: Tensors, nbytes: Sizes = None) -> Handle[None]:
        """Send one tensor to each rank and receive one from it, into contiguous memory of the sent size.

        Without ``nbytes``, a `hotbed.comm.hierarchical.NodeLink` exchanges the sizes first.
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
        """Gather tensors of equal shape from all ranks: ``[…] → [W, …]``."""
        received = values.new_empty(self.size, *values.shape)
        values = values.contiguous()
        nbytes = values.nbytes
        handle = self.exchange(what, [values] * self.size, list(received.unbind()), lambda _sender, _receiver: nbytes)
        return Handle(lambda: (handle.wait(), received)[1])

    def broadcast(self, what: str, values: Tensor, source: int) -> Handle[Tensor]:
        """Copy the tensor of rank ``source`` into ``values`` on all other ranks. All shapes must be equal."""
        on_host = values.device.type == "cpu"
        group = self.group if on_host else self.gpu_group
        # The source does not know which of several receivers has failed.
        peer = source if self.rank != source or self.size == 1 else None

        def start() -> dist.Work | None:
            return dist.broadcast(values, group=group, group_src=source, async_op=True)

        return self._start(
            what,
            lambda: [(peer, cast(dist.Work, start()) if on_host else self._after_the_last(start))],
            lambda: values,
        )

    @_waiting()  # sends to a stopped rank may block until the timeout
    def unreachable(self, wait_s: float = 5) -> list[int]:
        """Return the ranks that have ended, or that do not call this method within ``wait_s`` seconds.

        Call this after an error that does not name the failed rank. Do not use the link afterwards.
        """
        own, tag = torch.zeros(1, dtype=torch.uint8), TAGS
        others = [r for r in range(self.size) if r != self.rank]
        gone: list[int] = []
        calls: list[tuple[int, dist.Work]] = []
        sent: list[object] = []  # references, because Gloo drops a send without one
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
        """Start an exchange between GPUs. With NCCL, wait for the last exchange over a different communicator first.

        Exchanges over the same communicator run in order. Waiting for NCCL's work blocks the stream, not this thread.
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
        try:
            with _waiting():  # the first exchange of two ranks blocks until both call it
                work = start()
        except RuntimeError as error:
            peer = error.rank if isinstance(error, HandshakeError) else None
            raise self._explain(what, error, peer) from error
        return Handle(result, work, lambda error, peer: self._explain(what, error, peer))

    def _explain(self, what: str, error: Exception, peer: int | None = None) -> CommError:
        peer = 1 - self.rank if peer is None and self.size == 2 else peer  # there is only one other rank
        who = "another rank" if peer is None else f"rank {self._names[peer]}"
        explained = CommError(
            f"{self.here}: the exchange of {what} failed: {who} has ended, or did not answer in time "
            f"({reason(error)}). See the output of that rank"
        )
        explained.__cause__ = error
        return explained


class OneRank(Link):
    """The link of a single process, without torch.distributed. Exchanges are copies."""

    def __init__(self) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.group = self.gpu_group = None
        self.timeout = None
        self.rank, self.size = 0, 1
        self._names = range(1)
        self._total_ranks = 1
        self._step = [0]
        self.failure = None
        self.sent_bytes = Counter()

    @property
    def device(self) -> torch.device:
        """The CPU, although any device would do."""
        return torch.device("cpu")

    @property
    def overlaps(self) -> bool:
        """True, because exchanges end at once."""
        return True

    def clone(self) -> Link:
        """Return the link itself, because its exchanges end at once."""
        return self

    def exchange(self, what: str, outgoing: Tensors, incoming: Tensors, nbytes: Sizes = None) -> Handle[None]:
        """Copy the tensor that this process sends to itself."""
        incoming[0].copy_(outgoing[0])
        return Handle(lambda: None)

    def broadcast(self, what: str, values: Tensor, source: int) -> Handle[Tensor]:
        """Return the values."""
        return Handle(lambda: values)

    def unreachable(self, wait_s: float = 5) -> list[int]:
        """Return an empty list."""
        return []


def share_sizes(count: int, ranks: int) -> list[int]:
    """Return the size of each rank's share of ``count`` values. The last shares may be smaller or empty."""
    share = -(-count // ranks)
    return [max(min(share, count - r * share), 0) for r in range(ranks)]


def reason(error: Exception) -> str:
    """Return the message of a collective's error without its source position and torch's advice."""
    text = str(error).split(". This is typically")[0]
    return text.split("] ", 1)[1] if text.startswith("[/") and "] " in text else text
