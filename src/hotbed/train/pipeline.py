"""Prefetch while a batch is computed: the next batch (`Ahead`), and the rows of the rest of a batch (`RowPrefetcher`).

Each has one thread over a process group of its own, so its exchanges overlap with those of the step; it takes batches
in their order, so all ranks exchange in the same order. What a step computes is what it would compute without: rows
are fetched in the step itself, after the update before it.
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
    """A batch as its only part."""
    return [batch]


class Ahead:
    """Prepares batches one ahead of the step: ids are exchanged, and columns move to the device.

    Parameters
    ----------
    model
        Whose ids to exchange; of a model that is not distributed there is nothing to exchange.
    move
        Brings a batch to the device, ids checked.
    overlap
        Whether to exchange ids ahead, and to have rows in files read ahead; else each step does it when it comes to
        it, as it does where exchanges may not overlap (`Link.overlaps`).
    divide
        Called with each batch as it comes.

    Attributes
    ----------
    exchange_s
        Seconds that it took to check, move and exchange ids ahead, on this rank.
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
        """The parts of batches that are ready, what came with each batch, and whether it is the last."""
        if self._link is None:
            yield from self._one_ahead(batches)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="hotbed-ahead") as thread:
            coming: tuple[Future[list[Batch]], T] | None = None
            for batch, beside in batches:
                following = thread.submit(self._prepared, batch)
                if coming is not None:
                    yield self._ready(coming[0]), coming[1], False
                coming = following, beside
            if coming is not None:
                yield self._ready(coming[0]), coming[1], True

    def _one_ahead(self, batches: Iterable[tuple[Batch, T]]) -> Iterator[tuple[list[Batch], T, bool]]:
        coming: tuple[list[Batch], T] | None = None
        for batch, beside in batches:
            moved = [self._move(part) for part in self._divide(batch)]
            if coming is not None:
                yield *coming, False
            coming = moved, beside
        if coming is not None:
            yield *coming, True

    def _ready(self, future: Future[list[Batch]]) -> list[Batch]:
        start = time.perf_counter()
        parts = future.result()
        self.waited_s += time.perf_counter() - start
        return parts

    def _prepared(self, batch: Batch) -> list[Batch]:
        assert self._link is not None
        start = time.perf_counter()
        parts = [self._move(part) for part in self._divide(batch)]
        for part in parts:
            for collection in self._collections:
                collection.prefetch_ids(part.sparse, self._link)
        self.exchange_s += time.perf_counter() - start
        return parts


class RowPrefetcher:
    """Brings the rows of one part of a batch here while another part is computed.

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
        """Begin with a batch whose ids were exchanged ahead; no row may be updated until it has been computed."""
        for collection in self._collections:
            collection.settle()
        under_way = self._thread.submit(self._fetch, batch)
        if not self._link.overlaps:
            under_way.result()
        return under_way

    def _fetch(self, batch: Batch) -> None:
        for collection in self._collections:
            collection.prefetch_rows(batch.sparse, self._link)
