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
from typing import TypeVar

from torch import nn

from hotbed.batch import Batch
from hotbed.embed import Distributed, collections_of

T = TypeVar("T")
Divide = Callable[[Batch], Sequence[Batch]]
"""Divides a batch into parts that are computed one after the other; their gradients add up."""


def whole(batch: Batch) -> Sequence[Batch]:
    """Return a batch as its only part."""
    return [batch]


class BatchPrefetcher:
    """Prepare each batch while the one before is computed: exchange its ids, and move its columns to the device.

    Parameters
    ----------
    model
        Whose ids to exchange; of a model that is not distributed there is nothing to exchange.
    move
        Brings a batch to the device, ids checked.
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
        self, model: nn.Module, move: Callable[[Batch], Batch], *, overlap: bool = True, divide: Divide = whole
    ) -> None:
        self._collections = collections_of(model).values() if isinstance(model, Distributed) else ()
        overlap = overlap and isinstance(model, Distributed) and model.wire.link.overlaps
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
                following = thread.submit(self._prepare, batch)
                if pending is not None:
                    yield self._wait(pending[0]), pending[1], False
                pending = following, beside
            if pending is not None:
                yield self._wait(pending[0]), pending[1], True

    def _move_next(self, batches: Iterable[tuple[Batch, T]]) -> Iterator[tuple[list[Batch], T, bool]]:
        """Move each batch to the device before the one before it is yielded; ids are exchanged by the step."""
        pending: tuple[list[Batch], T] | None = None
        for batch, beside in batches:
            moved = [self._move(part) for part in self._divide(batch)]
            if pending is not None:
                yield *pending, False
            pending = moved, beside
        if pending is not None:
            yield *pending, True

    def _wait(self, future: Future[list[Batch]]) -> list[Batch]:
        start = time.perf_counter()
        parts = future.result()
        self.waited_s += time.perf_counter() - start
        return parts

    def _prepare(self, batch: Batch) -> list[Batch]:
        assert self._link is not None
        start = time.perf_counter()
        parts = [self._move(part) for part in self._divide(batch)]
        for part in parts:
            for collection in self._collections:
                collection.prefetch_ids(part.sparse, self._link)
        self.exchange_s += time.perf_counter() - start
        return parts


class RowPrefetcher:
    """Fetch the rows of one part of a batch while another part is computed.

    Parameters
    ----------
    model
        Whose rows.
    """

    def __init__(self, model: Distributed) -> None:
        self._collections = collections_of(model).values()
        self._link = model.wire.link.clone()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-fetch")

    def start(self, batch: Batch) -> Future[None]:
        """Fetch the rows of a batch whose ids were prefetched; no row may be updated until it has been computed."""
        for collection in self._collections:
            collection.settle()
        under_way = self._thread.submit(self._fetch, batch)
        if not self._link.overlaps:
            under_way.result()
        return under_way

    def _fetch(self, batch: Batch) -> None:
        for collection in self._collections:
            collection.prefetch_rows(batch.sparse, self._link)
