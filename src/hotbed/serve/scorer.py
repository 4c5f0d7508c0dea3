"""Compute scores whose bits depend on nothing but the row: the way of ``hotbed predict`` and of ``hotbed serve``.

A library's matrix product may sum in another order when it has another number of rows, or another number of threads.
So the dense part is computed in blocks of `BLOCK_ROWS` rows, always, the last one filled up, and each on one thread;
several blocks are computed on several threads. Within a product of that size all rows are summed alike, wherever they
are (docs/decisions/0034 has the measurement, ``tests/serve/test_scorer.py`` keeps it). Vectors are looked up by
hotbed's kernels, whose sums do not depend on other bags.

Equal bits need equal libraries, processors and devices, too: a GPU, or another processor, rounds otherwise.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotbed.batch import Batch, Embeddings
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.nn.dense_part import DensePart, Vectors
from hotbed.specs import Feature

BLOCK_ROWS = 32
"""Rows of a block on a CPU: one row costs as much as all, and larger blocks gain little (docs/decisions/0034)."""
DEVICE_BLOCK_ROWS = 1024
"""On an accelerator, where a launch costs more than a row."""

Lookup = Callable[[Jagged], Embeddings]
"""Looks the features of a collection up, as `hotbed.EmbeddingCollection` does; under ``no_grad``."""


class Scorer:
    """Scores of batches: looked-up vectors, then the dense part; called by one thread at a time.

    Parameters
    ----------
    dense
        Takes ``(dense [B, I], vectors)`` and gives logits ``[B, T]``: a `DensePart`, or the program that was made of
        one. It is put into evaluation mode, and replaced by `replace_dense`.
    lookups
        By path of a collection.
    features
        By name of the vectors that ``dense`` takes, the collection's path and the feature, as `DensePart.features`.
    device
        Where ``dense`` is.
    threads
        On how many threads blocks are computed, on a CPU; default: those that torch has now.
    """

    def __init__(
        self,
        dense: nn.Module,
        lookups: Mapping[str, Lookup],
        features: Mapping[str, tuple[str, Feature]],
        *,
        device: torch.device | str = "cpu",
        threads: int | None = None,
    ) -> None:
        self._lookups, self._features = lookups, features
        self._device = torch.device(device)
        self._dense = dense
        self.replace_dense(dense)
        is_cpu = self._device.type == "cpu"
        self.block_rows = BLOCK_ROWS if is_cpu else DEVICE_BLOCK_ROWS
        self._pool = _single_threads(threads or torch.get_num_threads()) if is_cpu else None

    @classmethod
    def of_model(cls, model: nn.Module, device: torch.device) -> Self:
        """The scorer of a model with its tables; the model is changed, see `DensePart`."""
        part = DensePart(model)
        return cls(part, dict(part.collections), part.features, device=device)

    def replace_dense(self, dense: nn.Module) -> None:
        """Let another dense part compute the batches from now on."""
        if isinstance(dense, DensePart):  # programs have no modes: they were traced in that of evaluation
            for collection in dense.collections.values():
                collection.eval()
            dense.eval()
        self._dense = dense

    def __call__(self, batch: Batch) -> NDArray[np.float64]:
        """Probabilities ``[B, T]`` of at least one row; NaN where a logit is not finite.

        In float64: a float32 probability is 1 from a logit of 17 on, which makes ties that the model did not.

        Raises
        ------
        BatchError
            If the dense part gives something else than logits ``[B, T]``.
        """
        with torch.no_grad():
            size = len(batch)
            vectors = self._vectors(batch.sparse)
            scores = self._pool.map if self._pool is not None else map
            found = list(scores(partial(self._block, batch, vectors), range(0, size, self.block_rows)))
            return torch.cat(found)[:size].cpu().numpy()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _vectors(self, ids: Jagged) -> dict[str, Vectors]:
        """Look all features up: by name, vectors of the batch."""
        found = {path: lookup(ids) for path, lookup in self._lookups.items()}
        vectors: dict[str, Vectors] = {}
        for name, (path, feature) in self._features.items():
            if feature.is_pooled:
                vectors[name] = found[path][feature.name]
            else:
                padded, mask = found[path].padded(feature.name)
                vectors[name] = padded, mask.sum(1)
        return vectors

    def _block(self, batch: Batch, vectors: Mapping[str, Vectors], first: int) -> Tensor:
        """Probabilities of the rows from ``first`` on; where there are too few, the last one is there several times."""
        with torch.no_grad():  # which is a thread's own
            at = torch.arange(first, first + self.block_rows, device=self._device).clamp(max=len(batch) - 1)
            dense = None if batch.dense is None else batch.dense[at]
            given = {n: of[at] if isinstance(of, Tensor) else (of[0][at], of[1][at]) for n, of in vectors.items()}
            if isinstance(self._dense, DensePart):
                logits = self._dense(dense, given, lambda: batch.take(at))
            else:
                logits = self._dense(dense, given)
            if logits.ndim != 2 or len(logits) != self.block_rows:
                raise BatchError(
                    f"the model gave logits {list(logits.shape)} for {self.block_rows} rows, must be [rows, labels]"
                )
            logits = logits.double()
            return torch.where(logits.isfinite(), logits.sigmoid(), torch.nan)


def _single_threads(count: int) -> ThreadPoolExecutor:
    """Threads each of which computes alone, whatever number of threads torch uses elsewhere."""
    before = torch.get_num_threads()
    barrier = threading.Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(1)
        barrier.wait()

    pool = ThreadPoolExecutor(count, "scorer", initializer=start)
    for _ in range(count):
        pool.submit(int)
    barrier.wait()
    torch.set_num_threads(before)  # threads that begin later take the number that was set last
    return pool
