"""Batches ahead: while one is computed, the ids of the next are exchanged and its columns move to the device.

The work is done by one thread over a process group of its own, so its exchanges overlap with those of the step; it
takes batches in their order, so all ranks exchange in the same order. What a step computes is what it would compute
without: rows are fetched in the step itself, after the update before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from torch import nn

from hotbed.batch import Batch
from hotbed.embed import Distributed, collections_of

T = TypeVar("T")


class Ahead:
    """Prepares batches one ahead of the step.

    Parameters
    ----------
    model
        Whose ids to exchange; of a model that is not distributed there is nothing to exchange.
    move
        Brings a batch to the device, ids checked.
    overlap
        Whether to exchange ids ahead; else each step does it when it comes to it.

    Attributes
    ----------
    exchange_s
        Seconds that it took to check, move and exchange ids ahead, on this rank.
    waited_s
        Seconds of it that steps waited for.
    """

    def __init__(self, model: nn.Module, move: Callable[[Batch], Batch], *, overlap: bool = True) -> None:
        self._collections = collections_of(model).values() if isinstance(model, Distributed) else ()
        self._link = model.wire.link.clone() if isinstance(model, Distributed) and overlap else None
        self._move = move
        self.exchange_s = self.waited_s = 0.0

    @property
    def hidden_share(self) -> float:
        """Share of the seconds of `exchange_s` that no step waited for."""
        return max(1 - self.waited_s / self.exchange_s, 0) if self.exchange_s else 0.0

    def __call__(self, batches: Iterable[tuple[Batch, T]]) -> Iterator[tuple[Batch, T, bool]]:
        """Batches that are ready, what came with each, and whether it is the last."""
        if self._link is None:
            yield from self._one_ahead(batches)
            return
        with ThreadPoolExecutor(1, thread_name_prefix="hotbed-ahead") as thread:
            coming: tuple[Future[Batch], T] | None = None
            for batch, beside in batches:
                following = thread.submit(self._prepared, batch)
                if coming is not None:
                    yield self._ready(coming[0]), coming[1], False
                coming = following, beside
            if coming is not None:
                yield self._ready(coming[0]), coming[1], True

    def _one_ahead(self, batches: Iterable[tuple[Batch, T]]) -> Iterator[tuple[Batch, T, bool]]:
        coming: tuple[Batch, T] | None = None
        for batch, beside in batches:
            moved = self._move(batch)
            if coming is not None:
                yield *coming, False
            coming = moved, beside
        if coming is not None:
            yield *coming, True

    def _ready(self, future: Future[Batch]) -> Batch:
        start = time.perf_counter()
        batch = future.result()
        self.waited_s += time.perf_counter() - start
        return batch

    def _prepared(self, batch: Batch) -> Batch:
        assert self._link is not None
        start = time.perf_counter()
        batch = self._move(batch)
        for collection in self._collections:
            collection.exchange_ahead(batch.sparse, self._link)
        self.exchange_s += time.perf_counter() - start
        return batch
