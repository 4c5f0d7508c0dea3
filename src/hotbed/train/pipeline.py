"""Prefetch while a batch is computed: ids of the next batch, and rows of the next part of a divided one.

`BatchPrefetcher` moves the next batch to the device and exchanges its ids; `RowPrefetcher` fetches the rows of a part.
Each has one thread over a process group of its own, so its exchanges overlap with those of the step; it takes batches
in their order, so all ranks exchange in the same order. Results are those of a run without prefetching: rows of a batch
are fetched in its own step, after the update before it.

Of batches b0, b1, b2, `BatchPrefetcher` yields ``(b0, False)`` once b1 was submitted, ``(b1, False)`` once b2 was, and
``(b2, True)``: one batch is prepared while another is computed, and the last is known as such.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import nn

from hotbed.batch import Batch
from hotbed.embed import Distributed, collections_of

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

    Parameters
    ----------
    device
        The step's.
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


class BatchPrefetcher:
    """Prepare each batch while the one before is computed: exchange its ids, and move its columns to the device.

    Where ids are exchanged ahead, a thread does both, in the step's stream; else the copies have a stream of their own.

    Parameters
    ----------
    model
        Whose ids to exchange; of a model that is not distributed there is nothing to exchange.
    move
        Brings a batch to the device, ids checked.
    device
        Where that is.
    overlap
        Whether to prefetch ids, and read rows ahead that are in files; else each step does it itself, as it does where
        exchanges may not overlap (`Link.overlaps`).
    divide
        Called with each batch.

    Attributes
    ----------
    exchange_s
        Seconds that it took to check, move and exchange prefetched ids, on this rank.
    waited_s
        Seconds of it that steps waited for.
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
        overlap = overlap and isinstance(model, Distributed) and model.wire.link.overlaps
        self._side, self._device = SideStream(device), device
        self._link = model.wire.link.clone() if isinstance(model, Distributed) and overlap else None
        self._move, self._divide = move, divide
        self.exchange_s = self.waited_s = 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the seconds of `exchange_s` that no step waited for."""
        return max(1 - self.waited_s / self.exchange_s, 0) if self.exchange_s else 0.0

    def __call__(self, batches: Iterable[tuple[Batch, T]]) -> Iterator[tuple[list[Batch], T, bool]]:
        """Yield the parts of each batch when it is ready, what came with the batch, and whether it is the last."""
        if self._link is None:
            yield from self._move_next(batches)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="hotbed-prefetch") as thread:
            pending: tuple[Future[list[Batch]], T] | None = None
            for batch, beside in batches:
                following = thread.submit(in_stream, stream_of(self._device), partial(self._prepare, batch))
                if pending is not None:
                    yield self._wait(pending[0]), pending[1], False
                pending = following, beside
            if pending is not None:
                yield self._wait(pending[0]), pending[1], True

    def _move_next(self, batches: Iterable[tuple[Batch, T]]) -> Iterator[tuple[list[Batch], T, bool]]:
        """Move each batch to the device before the one before it is yielded; ids are exchanged by the step."""
        pending: tuple[list[Batch], torch.cuda.Event | None, T] | None = None
        for batch, beside in batches:
            following = *self._side.run(partial(self._moved, batch)), beside
            if pending is not None:
                yield self._joined(*pending[:2]), pending[2], False
            pending = following
        if pending is not None:
            yield self._joined(*pending[:2]), pending[2], True

    def _moved(self, batch: Batch) -> list[Batch]:
        return [self._move(part) for part in self._divide(batch)]

    def _joined(self, parts: list[Batch], copied: torch.cuda.Event | None) -> list[Batch]:
        self._side.join(copied)
        return parts

    def _wait(self, future: Future[list[Batch]]) -> list[Batch]:
        start = time.perf_counter()
        parts = future.result()
        self.waited_s += time.perf_counter() - start
        return parts

    def _prepare(self, batch: Batch) -> list[Batch]:
        assert self._link is not None
        start = time.perf_counter()
        parts = self._moved(batch)
        for part in parts:
            for collection in self._collections:
                collection.prefetch_ids(part.sparse, self._link)
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

    Parameters
    ----------
    model
        Whose rows.
    device
        Where they are computed with.
    """

    def __init__(self, model: Distributed, device: torch.device) -> None:
        self._collections = collections_of(model).values()
        self._link, self._device, self._side = model.wire.link.clone(), device, SideStream(device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-fetch")

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
