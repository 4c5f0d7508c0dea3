"""Prefetch ids of the next batch, and rows of the next part of a divided batch, while a batch is computed.

`BatchPrefetcher` copies the next batch to the device and exchanges its ids. `RowPrefetcher` fetches the rows of a part.
Both have a thread with its own process group, so exchanges overlap with the step. Threads keep the order of batches, so
all ranks exchange in the same order. Results equal a run without prefetching, because rows are not fetched before the
previous step has updated them.

Over NCCL only the step's thread may start exchanges. That thread prepares batches between two steps, on a side stream
and in three stages: (1) copy and group ids, (2) exchange counts, (3) exchange ids. Before step s, stage 1 runs for
batch s + 3, stage 2 for batch s + 2, and stage 3 for batch s + 1. So no exchange waits until ids are grouped, and the
host does not wait for counts. If rows are combined inside nodes, a fourth stage exchanges ids between nodes.

For batches b0, b1, b2, `BatchPrefetcher` yields ``(b0, False)`` after b1 was submitted, ``(b1, False)`` after b2 was
submitted, and ``(b2, True)``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from hotbed.batch import Batch
from hotbed.comm.hierarchical import hops_of_rows
from hotbed.embed import Distributed, collections_of
from hotbed.embed.shard_routing import IdExchange
from hotbed.machine import single_threads

T = TypeVar("T")
Divide = Callable[[Batch], Sequence[Batch]]
"""Divides a batch into parts. Training computes one part after another and adds their gradients."""


def whole(batch: Batch) -> Sequence[Batch]:
    """Return a list with the batch, which is not divided into parts."""
    return [batch]


def stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """Return the calling thread's current stream of a CUDA device; return None for other devices."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else None


def in_stream(stream: torch.cuda.Stream | None, work: Callable[[], T]) -> T:
    """Call ``work`` in a stream, or directly if the stream is None."""
    with torch.cuda.stream(stream):
        return work()


class SideStream:
    """A CUDA stream that works while the step computes in its own stream. On CPUs, work runs directly.

    Events make one stream wait for the other stream. The step may still read tensors of this stream when the host frees
    them. Only this stream reuses the memory of such tensors, and `run` waits for the step's queued work. So no tensor
    is overwritten too early. This requires that one thread queues the work of both streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, work: Callable[[], T]) -> tuple[T, torch.cuda.Event | None]:
        """Run ``work`` after the queued work of the current stream; return its result and its completion event."""
        if self._stream is None:
            return work(), None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        done = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            result = work()
            done.record()
        return result, done

    def join(self, done: torch.cuda.Event | None) -> None:
        """Make the current stream wait for an event."""
        if self._stream is not None and done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(done)


@dataclass
class _Staged(Generic[T]):
    """A batch that is being prepared in stages."""

    value: Any  # output of the last finished stage
    payload: T  # the caller's value for the batch
    finished: int = 0  # number of finished stages
    done: torch.cuda.Event | None = None  # completion event of the last finished stage


class BatchPrefetcher:
    """Copy each batch to the device and exchange its ids, while the previous batch is computed.

    If exchanges may overlap (`Link.overlaps`), a second thread does this work in the step's stream. Otherwise, and for
    models without exchanges, the calling thread does this work in a side stream.
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
        # Seconds that the thread worked, and seconds that steps waited for the thread
        self.exchange_s = self.waited_s = 0.0

    @property
    def hidden_share(self) -> float:
        """Share of `exchange_s` that overlapped with steps."""
        return max(1 - self.waited_s / self.exchange_s, 0) if self.exchange_s else 0.0

    def __call__(self, batches: Iterable[tuple[Batch, T]]) -> Iterator[tuple[list[Batch], T, bool]]:
        """For each batch with its payload, yield the prepared parts, the payload, and whether the batch is the last."""
        if self._link is None:
            yield from self._in_stages(batches, [self._move_parts])
            return
        if not self._link.overlaps:
            inside = [self._exchange_ids_inside] * (len(hops_of_rows(self._link)) > 1)
            yield from self._in_stages(batches, [self._begin, self._exchange_counts, *inside, self._exchange_ids])
            return
        with single_threads(1, "hotbed-prefetch") as thread:
            pending: tuple[Future[list[Batch]], T] | None = None
            for batch, payload in batches:
                following = thread.submit(in_stream, stream_of(self._device), partial(self._prepare, batch))
                if pending is not None:
                    yield self._wait(pending[0]), pending[1], False
                pending = following, payload
            if pending is not None:
                yield self._wait(pending[0]), pending[1], True

    def _in_stages(
        self, batches: Iterable[tuple[Batch, T]], stages: Sequence[Callable[[Any], Any]]
    ) -> Iterator[tuple[list[Batch], T, bool]]:
        """Yield prepared batches like `__call__`; the last stage returns the parts of a batch.

        Between two steps, each waiting batch goes through one stage.
        """
        waiting: deque[_Staged[T]] = deque()
        for batch, payload in batches:
            waiting.append(_Staged(batch, payload))
            self._advance(waiting, stages)
            if len(waiting) > len(stages):
                yield *self._take(waiting), False
        while waiting:
            self._advance(waiting, stages)
            if waiting[0].finished == len(stages):
                yield *self._take(waiting), not waiting

    def _advance(self, waiting: Iterable[_Staged[T]], stages: Sequence[Callable[[Any], Any]]) -> None:
        """Run the next stage of each waiting batch. The order of batches is equal on all ranks."""
        for staged in waiting:
            if staged.finished < len(stages):
                staged.value, staged.done = self._side.run(partial(stages[staged.finished], staged.value))
                staged.finished += 1

    def _take(self, waiting: deque[_Staged[T]]) -> tuple[list[Batch], T]:
        staged = waiting.popleft()
        self._side.join(staged.done)
        return staged.value, staged.payload

    def _move_parts(self, batch: Batch) -> list[Batch]:
        return [self._move(part) for part in self._divide(batch)]

    def _begin(self, batch: Batch) -> tuple[list[Batch], IdExchange]:
        assert self._link is not None
        parts, exchange = self._move_parts(batch), IdExchange(self._link)
        for part in parts:
            for collection in self._collections:
                collection.prefetch_ids(part.sparse, exchange)
        return parts, exchange

    def _exchange_counts(self, begun: tuple[list[Batch], IdExchange]) -> tuple[list[Batch], IdExchange]:
        begun[1].start()
        return begun

    def _exchange_ids_inside(self, begun: tuple[list[Batch], IdExchange]) -> tuple[list[Batch], IdExchange]:
        begun[1].finish_first_hop()
        return begun

    def _exchange_ids(self, begun: tuple[list[Batch], IdExchange]) -> list[Batch]:
        begun[1].finish()
        return begun[0]

    def _wait(self, future: Future[list[Batch]]) -> list[Batch]:
        start = time.perf_counter()
        parts = future.result()
        self.waited_s += time.perf_counter() - start
        return parts

    def _prepare(self, batch: Batch) -> list[Batch]:
        start = time.perf_counter()
        parts, exchange = self._begin(batch)
        exchange.finish()
        self.exchange_s += time.perf_counter() - start
        return parts


class RowPrefetcher:
    """Fetch the rows of a part of a batch while the previous part is computed.

    A second thread fetches in the step's stream. If exchanges may not overlap, the calling thread uses a side stream.
    """

    def __init__(self, model: Distributed, device: torch.device) -> None:
        self._collections = collections_of(model).values()
        self._link, self._device, self._side = model.wire.link.clone(), device, SideStream(device)
        self._thread = single_threads(1, "hotbed-fetch")

    def start(self, batch: Batch) -> Callable[[], None]:
        """Start to fetch the rows of a part with prefetched ids; return a function that waits for the rows.

        The caller must not update rows before the part is computed.
        """
        for collection in self._collections:
            collection.settle()
        fetch = partial(self._fetch, batch)
        if self._link.overlaps:
            return self._thread.submit(in_stream, stream_of(self._device), fetch).result
        _, fetched = self._side.run(fetch)
        return partial(self._side.join, fetched)

    def _fetch(self, batch: Batch) -> None:
        for collection in self._collections:
            collection.prefetch_rows(batch.sparse, self._link)
