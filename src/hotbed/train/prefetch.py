"""Prefetch while a batch is computed: ids of the next batch, and rows of the next part of a divided one.

`BatchPrefetcher` moves the next batch to the device and exchanges its ids; `RowPrefetcher` fetches the rows of a part.
Each has one thread over a process group of its own, so its exchanges overlap with those of the step; it takes batches
in their order, so all ranks exchange in the same order. Results are those of a run without prefetching: rows of a batch
are fetched in its own step, after the update before it.

Over NCCL only the step's thread may start exchanges. It prepares batches between two steps, in a stream of its own, and
each in three stages: moved, and its ids grouped; how many ids ranks need of each other; which. Before step s these are
for batches s + 3, s + 2 and s + 1, so no exchange waits on the device for grouping, nor the host for numbers.

Of batches b0, b1, b2, `BatchPrefetcher` yields ``(b0, False)`` once b1 was submitted, ``(b1, False)`` once b2 was, and
``(b2, True)``: one batch is prepared while another is computed, and the last is known as such.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from hotbed.batch import Batch
from hotbed.embed import Distributed, collections_of
from hotbed.embed.id_exchange import IdExchange
from hotbed.machine import single_threads

T = TypeVar("T")
Divide = Callable[[Batch], Sequence[Batch]]
"""Divides a batch into parts that are computed one after the other; their gradients add up."""


def whole(batch: Batch) -> Sequence[Batch]:
    """Return a batch as its only part."""
    return [batch]


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return the calling thread's stream of a CUDA device, for a thread that works for it; None for other devices."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def in_stream(stream: torch.cuda.Stream | None, work: Callable[[], T]) -> T:
    """Do work in a stream."""
    with torch.cuda.stream(stream):  # none for None
        return work()


class SideStream:
    """A CUDA stream for work beside the step, ordered with it by events; without such a device, work is done in place.

    What is made in it is used and dropped by the step, whose kernels may still read it when the host drops it. Its
    memory is given out again to this stream only, and all work here begins after what the step was given until then:
    so nothing is overwritten too early, as long as the step is given nothing while work is begun here, by one thread.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], T]) -> tuple[T, torch.cuda.Event | None]:
        """Do work after what the calling thread's stream has been given; return its result and the event of its end."""
        if self._stream is None:
            return work(), None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            result = work()
            done.record()
        return result, done

    def join(self, done: torch.cuda.Event | None) -> None:
        """Let what the calling thread's stream is given from now on begin after an event."""
        if self._stream is not None and done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(done)


@dataclass
class _Staged(Generic[T]):
    """A batch in preparation: what its last stage returned, and when that ends; what came with it; stages passed."""

    value: Any
    beside: T
    passed: int = 0
    done: torch.cuda.Event | None = None


class BatchPrefetcher:
    """Prepare each batch during the one before: exchange its ids, and move its columns to the device.

    If exchanges may overlap (`Link.overlaps`), a thread does both, in the step's stream. Otherwise this thread does
    both, in a stream of its own. The columns of a model without exchanges are copied in such a stream, too.
    """

    def __init__(
        self,
        model: nn.Module,
        move: Callable[[Batch], Batch],
        device: torch.device,
        *,
        overlap: bool = True,
        divide: Divide = whole,
    ) -> None:
        self._collections = collections_of(model).values() if isinstance(model, Distributed) else ()
        self._side, self._device = SideStream(device), device
        self._link = model.wire.link.clone() if isinstance(model, Distributed) and overlap else None
        self._move, self._divide = move, divide
        # Seconds in which a thread checked, moved and exchanged ids on this rank; those for which steps waited
        self.exchange_s = self.waited_s = 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the seconds of `exchange_s` that no step waited for."""
        return max(1 - self.waited_s / self.exchange_s, 0) if self.exchange_s else 0.0

    def __call__(self, batches: Iterable[tuple[Batch, T]]) -> Iterator[tuple[list[Batch], T, bool]]:
        """Yield the parts of each batch when it is ready, what came with the batch, and whether it is the last."""
        if self._link is None:
            yield from self._in_stages(batches, [self._moved])
            return
        if not self._link.overlaps:
            yield from self._in_stages(batches, [self._began, self._counted, self._exchanged])
            return
        with single_threads(1, "hotbed-prefetch") as thread:
            pending: tuple[Future[list[Batch]], T] | None = None
            for batch, beside in batches:
                following = thread.submit(in_stream, stream_of(self._device), partial(self._prepare, batch))
                if pending is not None:
                    yield self._wait(pending[0]), pending[1], False
                pending = following, beside
            if pending is not None:
                yield self._wait(pending[0]), pending[1], True

    def _in_stages(
        self, batches: Iterable[tuple[Batch, T]], stages: Sequence[Callable[[Any], Any]]
    ) -> Iterator[tuple[list[Batch], T, bool]]:
        """Yield batches that have passed all stages, each stage between two other steps, in the side stream.

        A stage gets what the one before it returned, the first the batch; the last returns its parts.
        """
        waiting: deque[_Staged[T]] = deque()
        for batch, beside in batches:
            waiting.append(_Staged(batch, beside))
            self._go_on(waiting, stages)
            if len(waiting) > len(stages):
                yield *self._taken(waiting), False
        while waiting:
            self._go_on(waiting, stages)
            if waiting[0].passed == len(stages):
                yield *self._taken(waiting), not waiting

    def _go_on(self, waiting: Iterable[_Staged[T]], stages: Sequence[Callable[[Any], Any]]) -> None:
        """Let each batch pass one more stage, the first of them first, as on all ranks."""
        for staged in waiting:
            if staged.passed < len(stages):
                staged.value, staged.done = self._side.run(partial(stages[staged.passed], staged.value))
                staged.passed += 1

    def _taken(self, waiting: deque[_Staged[T]]) -> tuple[list[Batch], T]:
        staged = waiting.popleft()
        self._side.join(staged.done)
        return staged.value, staged.beside

    def _moved(self, batch: Batch) -> list[Batch]:
        return [self._move(part) for part in self._divide(batch)]

    def _began(self, batch: Batch) -> tuple[list[Batch], IdExchange]:
        assert self._link is not None
        parts, exchange = self._moved(batch), IdExchange(self._link)
        for part in parts:
            for collection in self._collections:
                collection.prefetch_ids(part.sparse, exchange)
        return parts, exchange

    def _counted(self, begun: tuple[list[Batch], IdExchange]) -> tuple[list[Batch], IdExchange]:
        begun[1].start()
        return begun

    def _exchanged(self, begun: tuple[list[Batch], IdExchange]) -> list[Batch]:
        begun[1].finish()
        return begun[0]

    def _wait(self, future: Future[list[Batch]]) -> list[Batch]:
        start = time.perf_counter()
        parts = future.result()
        self.waited_s += time.perf_counter() - start
        return parts

    def _prepare(self, batch: Batch) -> list[Batch]:
        start = time.perf_counter()
        parts, exchange = self._began(batch)
        exchange.finish()
        self.exchange_s += time.perf_counter() - start
        return parts


class Fetching(NamedTuple):
    """Rows that are on their way."""

    ended: Future[tuple[None, torch.cuda.Event | None]]
    side: SideStream

    def result(self) -> None:
        """Wait for the rows: for the thread that fetches them, or on the device."""
        _, fetched = self.ended.result()
        self.side.join(fetched)


class RowPrefetcher:
    """Fetch the rows of one part of a batch while another part is computed.

    A thread does it in the step's stream; where exchanges may not overlap, this thread does in a stream of its own.
    """

    def __init__(self, model: Distributed, device: torch.device) -> None:
        self._collections = collections_of(model).values()
        self._link, self._device, self._side = model.wire.link.clone(), device, SideStream(device)
        self._thread = single_threads(1, "hotbed-fetch")

    def start(self, batch: Batch) -> Fetching:
        """Fetch the rows of a batch whose ids were prefetched; no row may be updated until it has been computed."""
        for collection in self._collections:
            collection.settle()
        fetch = partial(self._fetch, batch)
        if self._link.overlaps:
            return Fetching(
                self._thread.submit(in_stream, stream_of(self._device), lambda: (fetch(), None)), self._side
            )
        ended: Future[tuple[None, torch.cuda.Event | None]] = Future()
        ended.set_result(self._side.run(fetch))
        return Fetching(ended, self._side)

    def _fetch(self, batch: Batch) -> None:
        for collection in self._collections:
            collection.prefetch_rows(batch.sparse, self._link)
