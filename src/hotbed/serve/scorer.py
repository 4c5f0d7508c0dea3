"""Compute scores whose bits depend on nothing but the row: the way of ``hotbed predict`` and of ``hotbed serve``.

A library's matrix product may sum in another order when it has another number of rows, or another number of threads.
So the dense part is computed in blocks of `BLOCK_ROWS` rows, the last one filled up, and each on one thread; several
blocks are computed on several threads. Within a product of that size all rows are summed alike, wherever they are
(docs/decisions/0034 has the measurement, ``tests/serve/test_scorer.py`` keeps it). Larger blocks cost less per row;
they are computed where this processor's library gives each row the very bits that blocks of `BLOCK_ROWS` give it, which
is tried on random vectors before the first batch that is larger. Vectors are looked up by hotbed's kernels, whose sums
do not depend on other bags.

Equal bits need equal libraries, processors and devices, too: a GPU, or another processor, rounds otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
from hotbed.machine import single_threads
from hotbed.nn.dense_part import DensePart, Vectors
from hotbed.specs import Feature

LOG = logging.getLogger("hotbed")

BLOCK_ROWS = 32
"""Rows of the smallest block on a CPU, where one row costs as much as all (docs/decisions/0034)."""
LARGER_BLOCKS = (64, 128, 256, 512)
"""Rows of blocks that are computed where they give the same bits; more gain nothing."""
DEVICE_BLOCK_ROWS = 1024
"""On an accelerator, where a launch costs more than a row."""

Lookup = Callable[[Jagged], Embeddings]
"""Looks the features of a collection up, as `hotbed.EmbeddingCollection` does; under ``no_grad``."""


class Scorer:
    """Scores of batches: looked-up vectors, then the dense part. Only one thread at a time may call it.

    ``dense`` is put into evaluation mode; `replace_dense` replaces it.
    """

    def __init__(
        self,
        dense: nn.Module,  # maps (dense [B, I], vectors) to logits [B, T]: a `DensePart`, or its program
        lookups: Mapping[str, Lookup],  # by path of a collection
        # collection path and feature by name of a vector, as `DensePart.features`
        features: Mapping[str, tuple[str, Feature]],
        *,
        device: torch.device | str = "cpu",  # of `dense`
        threads: int | None = None,  # threads for blocks on a CPU; default: torch's current number
    ) -> None:
        self._lookups, self._features = lookups, features
        self._device = torch.device(device)
        is_cpu = self._device.type == "cpu"
        self._smallest = BLOCK_ROWS if is_cpu else DEVICE_BLOCK_ROWS
        self._sizes: list[int] | None = None
        self._threads = threads or torch.get_num_threads()
        self._pool = single_threads(self._threads, "scorer") if is_cpu else None
        self._dense = dense
        self.replace_dense(dense)

    @classmethod
    def of_model(cls, model: nn.Module, device: torch.device) -> Self:
        """The scorer of a model with its tables; the model is changed, see `DensePart`."""
        part = DensePart(model)
        return cls(part, dict(part.collections), part.features, device=device)

    def replace_dense(self, dense: nn.Module, *, same_program: bool = False) -> None:
        """Let another dense part compute the batches from now on; ``same_program``: only its parameters are others."""
        if not same_program:
            self._sizes = None if self._device.type == "cpu" else [self._smallest]
        if isinstance(dense, DensePart):  # programs have no modes: they were traced in that of evaluation
            for collection in dense.collections.values():
                collection.eval()
            dense.eval()
        self._dense = dense

    def __call__(self, batch: Batch) -> NDArray[np.float64]:
        """Return probabilities ``[B, T]`` of at least one row; NaN where a logit is not finite.

        They are float64, because a float32 probability is 1 from a logit of 17 on, which would create ties. Raise
        `BatchError` if the dense part does not return logits ``[B, T]``.
        """
        with torch.no_grad():
            size = len(batch)
            vectors = self._vectors(batch.sparse)
            scores = self._pool.map if self._pool is not None else map
            blocks = self._blocks(size, self._sizes_for(batch, vectors))
            found = list(scores(partial(self._block, batch, vectors), blocks))
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

    def _blocks(self, rows: int, sizes: Sequence[int]) -> list[range]:
        """Cut a batch into blocks of these sizes, rising, the largest first, one for each thread if there are enough.

        The last one may end behind the batch.
        """
        share = max(-(-rows // self._threads), sizes[0])
        blocks: list[range] = []
        first = 0
        while first < rows:
            size = max((s for s in sizes if s <= min(share, rows - first)), default=sizes[0])
            blocks.append(range(first, first + size))
            first += size
        return blocks

    def _block(self, batch: Batch, vectors: Mapping[str, Vectors], rows: range) -> Tensor:
        """Probabilities of rows of a batch; where there are too few, the last one is there several times."""
        with torch.no_grad():  # which is a thread's own
            at = torch.arange(rows.start, rows.stop, device=self._device).clamp(max=len(batch) - 1)
            dense = None if batch.dense is None else batch.dense[at]
            logits = self._logits(
                dense, {n: _rows(of, at) for n, of in vectors.items()}, lambda: batch.take(at)
            ).double()
            return torch.where(logits.isfinite(), logits.sigmoid(), torch.nan)

    def _logits(self, dense: Tensor | None, vectors: Mapping[str, Vectors], rest: Callable[[], Batch]) -> Tensor:
        """Logits ``[n, T]`` of these numbers and vectors; ``rest`` makes the batch, for models that ask for it."""
        # `forward` without the module's call, whose hooks check what `Encoder` and tables have checked
        if isinstance(self._dense, DensePart):
            logits = self._dense.forward(dense, vectors, rest)
        else:
            logits = self._dense.forward(dense, vectors)
        rows = len(next(v if isinstance(v, Tensor) else v[0] for v in vectors.values()))
        if logits.ndim != 2 or len(logits) != rows:
            raise BatchError(f"the model gave logits {list(logits.shape)} for {rows} rows, must be [rows, labels]")
        return logits

    def _sizes_for(self, batch: Batch, vectors: Mapping[str, Vectors]) -> Sequence[int]:
        """Sizes of blocks that all give a row the same bits, rising; one is enough for a batch that fits into it."""
        if self._sizes is not None:
            return self._sizes
        if len(batch) <= self._smallest:
            return [self._smallest]
        assert self._pool is not None
        self._sizes = self._pool.submit(self._equal_sizes, batch, vectors).result()
        return self._sizes

    def _equal_sizes(self, batch: Batch, vectors: Mapping[str, Vectors]) -> list[int]:
        """Compare blocks of all sizes on random numbers: a sum in another order differs in some of so many rows.

        The smallest is all that is left where the model refuses such numbers, gives the same for most of them, or has
        sequences of any length.
        """
        draw = torch.Generator().manual_seed(0)
        at = torch.arange(LARGER_BLOCKS[-1]) % len(batch)
        sizes = [self._smallest]
        if any(not feature.is_pooled and feature.max_len is None for _, feature in self._features.values()):
            return sizes
        with torch.no_grad():
            dense = None if batch.dense is None else batch.dense[at].exponential_(generator=draw)
            given = {n: _random(_rows(of, at), draw) for n, of in vectors.items()}

            def logits(size: int) -> Tensor:
                found: list[Tensor] = []
                for rows in torch.arange(len(at)).split(size):
                    of_rows = {n: _rows(of, rows) for n, of in given.items()}
                    own = partial(batch.take, at[rows])
                    found.append(self._logits(None if dense is None else dense[rows], of_rows, own))
                return torch.cat(found)

            try:
                expected = logits(self._smallest)
                distinct = len(expected.unique()) > expected.numel() // 2
                if distinct and bool(expected.isfinite().all()):
                    sizes += [size for size in LARGER_BLOCKS if torch.equal(logits(size), expected)]
            except Exception:  # whatever a model does with numbers that are none of its own
                LOG.debug("blocks of other sizes are not tried", exc_info=True)
        return sizes


def _rows(vectors: Vectors, at: Tensor) -> Vectors:
    """Copy some samples' vectors."""
    return vectors[at] if isinstance(vectors, Tensor) else (vectors[0][at], vectors[1][at])


def _random(vectors: Vectors, draw: torch.Generator) -> Vectors:
    """Put random numbers for vectors, as wide as they spread, and for lengths; a full sequence and an empty one."""
    if isinstance(vectors, Tensor):
        spread = _spread(vectors)
        return vectors.normal_(generator=draw) * spread
    padded, lengths = vectors
    spread, most = _spread(padded), padded.shape[1]
    lengths = torch.randint(0, most + 1, lengths.shape, dtype=lengths.dtype, generator=draw)
    lengths[0], lengths[1] = most, 0
    live = torch.arange(most) < lengths[:, None]
    return padded.normal_(generator=draw) * spread * live[..., None], lengths


def _spread(values: Tensor) -> float:
    """Root mean square of values, 1 where all are 0."""
    return float(values.float().square().mean().sqrt()) or 1.0
