"""Pad the ids of ragged features, so that batches ask the same of a GPU, one after the other.

A batch whose bags have different lengths has another number of ids than the one before it; so all that is made of
them has other sizes: memory is cut anew, and a CUDA graph of the step would fit one batch only. Here each ragged
feature gets room for as many ids as the largest batch had until then, rounded up to a *size class*: sizes change ever
more seldom.

What is padded is of no bag, so it is looked up by nobody, and no rule is applied to it: results are the same, to the
bit.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor, nn

from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.model_parallel_input import ModelParallelInput

STEPS = 8
"""Size classes between a power of two and the next: padding is at most an eighth."""


def size_class(count: int) -> int:
    """Round a number up to a size class: STEPS of them from each power of two to the next."""
    step = 1 << max((count - 1).bit_length() - STEPS.bit_length(), 0) if count > STEPS else 1
    return max(-(-count // step) * step, STEPS)


class SizeClasses:
    """Pad batch after batch to sizes that never fall."""

    def __init__(self, model: nn.Module) -> None:
        collections = [m for m in model.modules() if isinstance(m, EmbeddingCollection)]
        self._pads = bool(collections) and all(t.dynamic is None for c in collections for t in c.tables.values())
        self._jagged = {f.name for c in collections for f in c.features if not f.is_pooled and f.padding is None}
        self._capacity: dict[str, int] = {}

    def __call__(self, ids: Jagged) -> Jagged:
        """Return ids with room behind those of ragged features; they must be on the host."""
        if not self._pads or ids.offsets is None or isinstance(ids, ModelParallelInput):
            return ids
        sizes = tuple(stop - start for start, stop in zip(ids.starts, ids.starts[1:], strict=False))
        room = tuple(map(self._room, ids.names, ids.fixed, sizes))
        if room == sizes:
            return ids
        starts = tuple(accumulate(room, initial=0))
        padded = Jagged(
            ids.names,
            _spread(ids.values, ids.starts, starts),
            batch_size=ids.batch_size,
            fixed=ids.fixed,
            offsets=ids.offsets,
            weights=None if ids.weights is None else _spread(ids.weights, ids.starts, starts),
            starts=starts,
            sizes=sizes,
        )
        padded.mark_verified(ids.verified)  # id 0 is a row of every table
        return padded

    def _room(self, name: str, fixed: int | None, size: int) -> int:
        if fixed is not None or name in self._jagged:
            return size
        self._capacity[name] = room = max(self._capacity.get(name, 0), size_class(size))
        return room


def _spread(values: Tensor, starts: tuple[int, ...], to: tuple[int, ...]) -> Tensor:
    """Copy runs of values that follow each other to where they have room behind them, filled with zeros."""
    out = torch.zeros(to[-1], dtype=values.dtype, pin_memory=values.is_pinned())
    for start, stop, first in zip(starts, starts[1:], to, strict=False):
        out[first : first + stop - start] = values[start:stop]
    return out
