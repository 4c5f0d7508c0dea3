"""Compute scores for ``hotbed predict`` and ``hotbed serve``, so that the bits of a score depend only on the row.

A library's matrix product may sum in a different order if the number of rows or threads changes. So the dense part runs
on blocks of `BLOCK_ROWS` rows, and one thread computes each block. The last block is padded. In products of this size,
the order of the sums is the same for every row (docs/decisions/serving.md;
``tests/serve/test_scorer.py`` checks this).

Larger blocks cost less per row. They are used if they return the same bits as the smallest block on this processor.
A test with random vectors decides this before the first larger batch. hotbed's lookup kernels need no blocks, because
they sum each bag separately. Scores have equal bits only on equal libraries, processors and devices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hotbed.batch import Batch, Embeddings
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.machine import single_threads
from hotbed.nn.dense_program import DensePart, Vectors
from hotbed.specs import Feature

LOG = logging.getLogger("hotbed")

BLOCK_ROWS = 16  # rows of the smallest block on a CPU; smaller products sum in other orders
LARGER_BLOCKS = (32, 64, 128, 256, 512)  # rows of blocks that are tested; even larger blocks are not faster
DEVICE_BLOCK_ROWS = 1024  # rows of a block on an accelerator, where a launch costs more than a row

Lookup = Callable[[Jagged], Embeddings]
"""Function that looks up the features of a collection without gradients, as `hotbed.EmbeddingCollection` does."""


class _BatchVectors(NamedTuple):
    """Looked-up vectors of a batch, by the names of the inputs of the dense program."""

    pooled: list[tuple[list[str], Tensor]]  # for each dim D: names of F features, and their vectors ``[B, F, D]``
    sequences: dict[str, tuple[Tensor, Tensor]]  # by name: padded vectors ``[B, L, D]``, and lengths ``[B]``

    def rows(self, at: slice | Tensor) -> dict[str, Vectors]:
        """Return the vectors of the samples ``at`` by name."""
        found: dict[str, Vectors] = {
            name: (padded[at], lengths[at]) for name, (padded, lengths) in self.sequences.items()
        }
        for names, vectors in self.pooled:
            found.update(zip(names, vectors[at].unbind(1), strict=True))
        return found

    def random(self, at: Tensor, draw: torch.Generator) -> _BatchVectors:
        """Return random vectors and lengths. Each feature has the scale of its vectors of the samples ``at``."""
        pooled = [(names, _noise(vectors[at], draw)) for names, vectors in self.pooled]
        sequences: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (padded, lengths) in self.sequences.items():
            most = padded.shape[1]
            lengths = torch.randint(0, most + 1, (len(at),), dtype=lengths.dtype, generator=draw)
            lengths[0], lengths[1] = most, 0  # so that a full and an empty sequence are tested
            live = torch.arange(most) < lengths[:, None]
            sequences[name] = _noise(padded[at][:, None], draw)[:, 0] * live[..., None], lengths
        return _BatchVectors(pooled, sequences)


def _noise(vectors: Tensor, draw: torch.Generator) -> Tensor:
    """Return normal random numbers in the shape of ``vectors [B, F, …, D]``.

    The root mean square of each of the F features stays the same, but a root mean square of 0 becomes 1.
    """
    others = tuple(i for i in range(vectors.ndim) if i != 1)
    spread = vectors.square().mean(others, keepdim=True).sqrt()
    return torch.randn(vectors.shape, generator=draw) * torch.where(spread == 0, 1, spread)


class Scorer:
    """Look up the vectors of a batch, and compute the dense part. Only one thread at a time may call a scorer."""

    def __init__(
        self,
        # a `DensePart` or its exported program, which maps (dense [B, I], vectors) to logits [B, T]; it is put into
        # evaluation mode
        dense: nn.Module,
        lookups: Mapping[str, Lookup],  # lookup of each collection, by the path of the collection
        features: Mapping[str, tuple[str, Feature]],  # collection path and feature by name, as `DensePart.features`
        *,
        device: torch.device | str = "cpu",  # device of `dense`
        threads: int | None = None,  # number of threads that compute blocks on a CPU (default: torch's number)
    ) -> None:
        self._lookups = lookups
        self._pooled = {(path, f.name): name for name, (path, f) in features.items() if f.is_pooled}
        self._sequences = {name: of for name, of in features.items() if not of[1].is_pooled}
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
        """Return a scorer of a model that is not exported. `DensePart` replaces modules of the model."""
        part = DensePart(model)
        return cls(part, dict(part.collections), part.features, device=device)

    def replace_dense(self, dense: nn.Module, *, same_program: bool = False) -> None:
        """Replace the dense part for later batches. With ``same_program``, ``dense`` has only new parameters."""
        if not same_program:
            self._sizes = None if self._device.type == "cpu" else [self._smallest]
        if isinstance(dense, DensePart):  # programs were traced in evaluation mode
            for collection in dense.collections.values():
                collection.eval()
            dense.eval()
        self._dense = dense

    def __call__(self, batch: Batch) -> NDArray[np.float64]:
        """Return probabilities ``[B, T]`` of B rows and T labels. A probability is NaN if its logit is not finite.

        Probabilities are float64. In float32, all logits above 17 would have the probability 1, which creates ties.
        Raise `BatchError` if the dense part does not return logits ``[B, T]``.
        """
        with torch.no_grad():
            size = len(batch)
            vectors = self._look_up(batch.sparse)
            blocks = self._blocks(size, self._block_sizes(batch, vectors))
            block = partial(self._block, batch, vectors)
            # A single block is computed in the calling thread, which saves two context switches.
            if self._pool is None or (len(blocks) == 1 and torch.get_num_threads() == 1):
                found = [block(rows) for rows in blocks]
            else:
                found = list(self._pool.map(block, blocks))
            return torch.cat(found)[:size].cpu().numpy()

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look_up(self, ids: Jagged) -> _BatchVectors:
        found = {path: lookup(ids) for path, lookup in self._lookups.items()}
        pooled = [
            ([self._pooled[path, feature] for feature in names], vectors)
            for path, of_path in found.items()
            for names, vectors in of_path.looked_up()
            if (path, names[0]) in self._pooled
        ]
        sequences: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (path, feature) in self._sequences.items():
            padded, mask = found[path].padded(feature.name)
            sequences[name] = padded, mask.sum(1)
        return _BatchVectors(pooled, sequences)

    def _blocks(self, rows: int, sizes: Sequence[int]) -> list[range]:
        """Divide ``rows`` rows into about one block per thread. Each block has one of the ascending ``sizes``.

        If the last block is larger than the remaining rows, it ends after the batch.
        """
        share = max(-(-rows // self._threads), sizes[0])
        blocks: list[range] = []
        first = 0
        while first < rows:
            size = max((s for s in sizes if s <= min(share, rows - first)), default=sizes[0])
            blocks.append(range(first, first + size))
            first += size
        return blocks

    def _block(self, batch: Batch, vectors: _BatchVectors, rows: range) -> Tensor:
        """Return the probabilities of a block. A block that ends after the batch repeats the last row of the batch."""
        with torch.no_grad():  # again, because the setting of the caller's thread does not apply to other threads
            at: slice | Tensor = slice(rows.start, rows.stop)
            if rows.stop > len(batch):
                at = torch.arange(rows.start, rows.stop, device=self._device).clamp(max=len(batch) - 1)
            dense = None if batch.dense is None else batch.dense[at]
            logits = self._logits(
                dense, vectors.rows(at), lambda: batch.take(torch.arange(len(batch), device=self._device)[at])
            ).double()
            return torch.where(logits.isfinite(), logits.sigmoid(), torch.nan)

    def _logits(self, dense: Tensor | None, vectors: Mapping[str, Vectors], rest: Callable[[], Batch]) -> Tensor:
        """Return logits ``[n, T]`` of a block. ``rest`` returns the block as a batch.

        A `DensePart` calls ``rest`` if its model reads more than vectors and dense inputs.
        """
        # `forward` is called without the module's hooks, which repeat checks of `Encoder` and tables.
        if isinstance(self._dense, DensePart):
            logits = self._dense.forward(dense, vectors, rest)
        else:
            logits = self._dense.forward(dense, vectors)
        rows = len(next(v if isinstance(v, Tensor) else v[0] for v in vectors.values()))
        if logits.ndim != 2 or len(logits) != rows:
            raise BatchError(f"the model returned logits {list(logits.shape)} for {rows} rows, expected [rows, labels]")
        return logits

    def _block_sizes(self, batch: Batch, vectors: _BatchVectors) -> Sequence[int]:
        """Return the block sizes that give the same bits, in ascending order. The first large batch tests the sizes."""
        if self._sizes is None and len(batch) > self._smallest:
            assert self._pool is not None
            self._sizes = self._pool.submit(self._equal_sizes, batch, vectors).result()
        return self._sizes or [self._smallest]

    def _equal_sizes(self, batch: Batch, vectors: _BatchVectors) -> list[int]:
        """Return the block sizes that give random rows the same logits as the smallest size.

        A different order of sums would change some of these logits.

        Only the smallest size is returned if the model fails on the random rows, if most of its logits are equal, or if
        a sequence has no ``max_len``.
        """
        draw = torch.Generator().manual_seed(0)
        at = torch.arange(LARGER_BLOCKS[-1]) % len(batch)
        sizes = [self._smallest]
        if any(feature.max_len is None for _, feature in self._sequences.values()):
            return sizes
        with torch.no_grad():
            dense = None if batch.dense is None else batch.dense[at].exponential_(generator=draw)
            drawn = vectors.random(at, draw)

            def logits(size: int) -> Tensor:
                found: list[Tensor] = []
                for rows in torch.arange(len(at)).split(size):
                    own = partial(batch.take, at[rows])
                    found.append(self._logits(None if dense is None else dense[rows], drawn.rows(rows), own))
                return torch.cat(found)

            try:
                expected = logits(self._smallest)
                distinct = len(expected.unique()) > expected.numel() // 2
                if distinct and bool(expected.isfinite().all()):
                    sizes += [size for size in LARGER_BLOCKS if torch.equal(logits(size), expected)]
            except Exception:  # a model may fail on random numbers
                LOG.debug("larger blocks are not used, because the test with random numbers failed", exc_info=True)
        return sizes
