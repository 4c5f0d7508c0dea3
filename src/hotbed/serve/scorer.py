"""Compute scores with bits that depend only on the row, for ``hotbed predict`` and ``hotbed serve``.

A library's matrix product may change its order of sums with the number of rows or threads. So the dense part runs on
padded blocks of `BLOCK_ROWS` rows, each on one thread. Within a product of this size, every row is summed in the same
order (docs/decisions/0034; ``tests/serve/test_scorer.py`` checks this). Larger blocks cost less per row. They are used
if they return the same bits as the smallest block on this processor. Before the first larger batch, this is tested with
random vectors. hotbed's lookup kernels need no blocks, because they sum each bag separately.

Equal bits need equal libraries, processors and devices, because e.g. a GPU rounds differently.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
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

BLOCK_ROWS = 16
"""Rows of the smallest block on a CPU. Smaller products sum rows in different orders (docs/decisions/0034)."""
LARGER_BLOCKS = (32, 64, 128, 256, 512)
"""Rows of blocks that are used if they return the same bits. Even larger blocks are not faster."""
DEVICE_BLOCK_ROWS = 1024
"""Rows of a block on an accelerator, where a launch costs more than a row."""

Lookup = Callable[[Jagged], Embeddings]
"""Looks up the features of a collection under ``no_grad``, as `hotbed.EmbeddingCollection` does."""


class _BatchVectors(NamedTuple):
    """Vectors of a batch, by the names of the program's inputs."""

    pooled: list[tuple[list[str], Tensor]]  # for each dim D, ``[B, F, D]`` and the names of the F features
    sequences: dict[str, tuple[Tensor, Tensor]]  # ``[B, L, D]`` padded, and lengths ``[B]``

    def rows(self, at: slice | Tensor) -> dict[str, Vectors]:
        """Return the vectors of the samples ``at``, by the names of the program's inputs."""
        found: dict[str, Vectors] = {
            name: (padded[at], lengths[at]) for name, (padded, lengths) in self.sequences.items()
        }
        for names, vectors in self.pooled:
            found.update(zip(names, vectors[at].unbind(1), strict=True))
        return found

    def random(self, at: Tensor, draw: torch.Generator) -> _BatchVectors:
        """Return random vectors with each feature's scale, and random lengths; the first is full, the second empty."""
        pooled = [(names, _noise(vectors[at], draw)) for names, vectors in self.pooled]
        sequences: dict[str, tuple[Tensor, Tensor]] = {}
        for name, (padded, lengths) in self.sequences.items():
            most = padded.shape[1]
            lengths = torch.randint(0, most + 1, (len(at),), dtype=lengths.dtype, generator=draw)
            lengths[0], lengths[1] = most, 0
            live = torch.arange(most) < lengths[:, None]
            sequences[name] = _noise(padded[at][:, None], draw)[:, 0] * live[..., None], lengths
        return _BatchVectors(pooled, sequences)


def _noise(vectors: Tensor, draw: torch.Generator) -> Tensor:
    """Return random numbers with the root mean square of each feature of ``[B, F, …, D]``, or 1 for zero features."""
    others = tuple(i for i in range(vectors.ndim) if i != 1)
    spread = vectors.square().mean(others, keepdim=True).sqrt()
    return torch.randn(vectors.shape, generator=draw) * torch.where(spread == 0, 1, spread)


class Scorer:
    """Look up a batch's vectors and compute the dense part. Only one thread at a time may call it.

    ``dense`` is put into evaluation mode. `replace_dense` replaces it.
    """

    def __init__(
        self,
        dense: nn.Module,  # maps (dense [B, I], vectors) to logits [B, T]: a `DensePart`, or its program
        lookups: Mapping[str, Lookup],  # lookups by collection path
        # collection path and feature by name of a vector, as `DensePart.features`
        features: Mapping[str, tuple[str, Feature]],
        *,
        device: torch.device | str = "cpu",  # device of `dense`
        threads: int | None = None,  # threads for blocks on a CPU; default: torch's current number
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
        """Return the scorer of a model with its tables. The model is changed, see `DensePart`."""
        part = DensePart(model)
        return cls(part, dict(part.collections), part.features, device=device)

    def replace_dense(self, dense: nn.Module, *, same_program: bool = False) -> None:
        """Replace the dense part for later batches. With ``same_program`` only parameters differ."""
        if not same_program:
            self._sizes = None if self._device.type == "cpu" else [self._smallest]
        if isinstance(dense, DensePart):  # programs were traced in evaluation mode
            for collection in dense.collections.values():
                collection.eval()
            dense.eval()
        self._dense = dense

    def __call__(self, batch: Batch) -> NDArray[np.float64]:
        """Return probabilities ``[B, T]`` of one or more rows; a probability is NaN if its logit is not finite.

        Probabilities are float64, because a float32 probability is 1 from a logit of 17 on, which would create ties.
        Raise `BatchError` if the dense part does not return logits ``[B, T]``.
        """
        with torch.no_grad():
            size = len(batch)
            vectors = self._look_up(batch.sparse)
            blocks = self._blocks(size, self._block_sizes(batch, vectors))
            block = partial(self._block, batch, vectors)
            # A single thread computes a single block itself, which saves two context switches.
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
        """Divide a batch into about one block per thread, with ascending ``sizes``; the last may exceed the batch."""
        share = max(-(-rows // self._threads), sizes[0])
        blocks: list[range] = []
        first = 0
        while first < rows:
            size = max((s for s in sizes if s <= min(share, rows - first)), default=sizes[0])
            blocks.append(range(first, first + size))
            first += size
        return blocks

    def _block(self, batch: Batch, vectors: _BatchVectors, rows: range) -> Tensor:
        """Return probabilities of a block. Beyond the batch, its last row is repeated."""
        with torch.no_grad():  # each thread has its own setting
            at: slice | Tensor = slice(rows.start, rows.stop)
            if rows.stop > len(batch):
                at = torch.arange(rows.start, rows.stop, device=self._device).clamp(max=len(batch) - 1)
            dense = None if batch.dense is None else batch.dense[at]
            logits = self._logits(
                dense, vectors.rows(at), lambda: batch.take(torch.arange(len(batch), device=self._device)[at])
            ).double()
            return torch.where(logits.isfinite(), logits.sigmoid(), torch.nan)

    def _logits(self, dense: Tensor | None, vectors: Mapping[str, Vectors], rest: Callable[[], Batch]) -> Tensor:
        """Return logits ``[n, T]``. ``rest`` returns the block's batch, for models that read more of the batch."""
        # `forward` instead of the module's call, because its hooks repeat checks of `Encoder` and tables
        if isinstance(self._dense, DensePart):
            logits = self._dense.forward(dense, vectors, rest)
        else:
            logits = self._dense.forward(dense, vectors)
        rows = len(next(v if isinstance(v, Tensor) else v[0] for v in vectors.values()))
        if logits.ndim != 2 or len(logits) != rows:
            raise BatchError(f"the model returned logits {list(logits.shape)} for {rows} rows, expected [rows, labels]")
        return logits

    def _block_sizes(self, batch: Batch, vectors: _BatchVectors) -> Sequence[int]:
        """Return block sizes with bit-identical results, smallest first. Larger sizes are tested on first use."""
        if self._sizes is None and len(batch) > self._smallest:
            assert self._pool is not None
            self._sizes = self._pool.submit(self._equal_sizes, batch, vectors).result()
        return self._sizes or [self._smallest]

    def _equal_sizes(self, batch: Batch, vectors: _BatchVectors) -> list[int]:
        """Return the block sizes that give equal logits on random rows; a different order of sums would change some.

        Only the smallest size remains if the model refuses the rows, its results are mostly equal, or a sequence has no
        ``max_len``.
        """
        draw = torch.Generator().manual_seed(0)
        at = torch.arange(LARGER_BLOCKS[-1]) % len(batch)
        sizes = [self._smallest]
        if any(feature.max_len is None for _, feature in self._sequences.values()):
            return sizes
        with torch.no_grad():
            dense = None if batch.dense is None else batch.dense[at].exponential_(generator=draw)
            given = vectors.random(at, draw)

            def logits(size: int) -> Tensor:
                found: list[Tensor] = []
                for rows in torch.arange(len(at)).split(size):
                    own = partial(batch.take, at[rows])
                    found.append(self._logits(None if dense is None else dense[rows], given.rows(rows), own))
                return torch.cat(found)

            try:
                expected = logits(self._smallest)
                distinct = len(expected.unique()) > expected.numel() // 2
                if distinct and bool(expected.isfinite().all()):
                    sizes += [size for size in LARGER_BLOCKS if torch.equal(logits(size), expected)]
            except Exception:  # a model may fail on random numbers
                LOG.debug("larger blocks are not used", exc_info=True)
        return sizes
