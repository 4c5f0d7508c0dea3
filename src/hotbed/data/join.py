"""Join parts of batches into a new one, in order or shuffled: `join`, the inner loop of reading.

NumPy does the copying: it lets other threads run and, unlike torch, starts no threads of its own, so those that read do
not take cores from the training step. Every column is written once, where it ends up: fresh memory is what costs here,
in page faults (3 × the time of the copies where whole windows were copied twice).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.batch import Batch
from hotbed.jagged import Jagged

Array: TypeAlias = NDArray[Any]
Order: TypeAlias = NDArray[np.int64]
BatchSlice: TypeAlias = tuple[Batch, int, int]
"""Samples ``start … stop − 1`` of a batch."""


def join(parts: Sequence[BatchSlice], order: Order | None = None) -> Batch:
    """Make a new batch of the samples of all parts, which have the same columns and are in CPU memory.

    ``order`` lists positions ``[b]`` of the joined samples; default: all of them in order. The batch has memory of its
    own, except that all samples of a single part, in their order, are that part itself.
    """
    first = parts[0][0]
    if order is None and len(parts) == 1 and parts[0][1:] == (0, len(first)):
        return first

    def column(of: Callable[[Batch], Tensor | None]) -> Tensor | None:
        pieces = [t.numpy()[start:stop] for batch, start, stop in parts if (t := of(batch)) is not None]
        return torch.from_numpy(_joined(pieces, order)) if pieces else None

    extra = {name: column(lambda batch, name=name: batch.extra[name]) for name in first.extra}
    return Batch(
        sparse=_join_sparse(parts, order),
        dense=column(lambda batch: batch.dense),
        labels=column(lambda batch: batch.labels),
        weights=column(lambda batch: batch.weights),
        extra={name: t for name, t in extra.items() if t is not None},
    )


def _join_sparse(parts: Sequence[BatchSlice], order: Order | None) -> Jagged:
    first = parts[0][0].sparse
    size = sum(stop - start for _, start, stop in parts) if order is None else len(order)
    ids = set(first.fixed)
    if order is None and len(ids) == 1 and (k := ids.pop()) is not None:
        return _join_alike(parts, size, k)
    spans = [_id_spans(parts, i) for i in range(len(first.names))]
    lengths = {i: _lengths(parts, i) for i, k in enumerate(first.fixed) if k is None}
    moved = lengths if order is None else {i: of[order] for i, of in lengths.items()}
    counts = [int(moved[i].sum()) if k is None else size * k for i, k in enumerate(first.fixed)]
    starts = (0, *np.cumsum(counts).tolist())
    values = np.empty(starts[-1], dtype=first.values.numpy().dtype)
    weights = None if first.weights is None else np.empty(starts[-1], dtype=first.weights.numpy().dtype)
    for i, (k, span) in enumerate(zip(first.fixed, spans, strict=True)):
        ids_order = order if k is not None or order is None else _order_of_ids(lengths[i], order)
        for out, of in ((values, _values), (weights, _weights)):
            if out is not None:
                pieces = [of(b.sparse)[a:z] for (b, _, _), (a, z) in zip(parts, span, strict=True)]
                _joined(pieces, ids_order, out[starts[i] : starts[i + 1]], k or 1)
    offsets = [np.concatenate([[0], np.cumsum(of)]) for of in moved.values()]
    return Jagged(
        first.names,
        torch.from_numpy(values),
        batch_size=size,
        fixed=first.fixed,
        offsets=torch.from_numpy(np.stack(offsets)) if offsets else None,
        weights=None if weights is None else torch.from_numpy(weights),
        starts=starts,
    )


def _join_alike(parts: Sequence[BatchSlice], size: int, k: int) -> Jagged:
    """Join features that all have ``k`` ids per sample, as they are: one copy for all features."""
    first, features = parts[0][0].sparse, len(parts[0][0].sparse.names)

    def of(values: Callable[[Jagged], Array]) -> Tensor:
        pieces = [values(b.sparse).reshape(features, -1)[:, start * k : stop * k] for b, start, stop in parts]
        return torch.from_numpy(np.concatenate(pieces, axis=1).reshape(-1))

    return Jagged(
        first.names,
        of(_values),
        batch_size=size,
        fixed=first.fixed,
        weights=None if first.weights is None else of(_weights),
        starts=tuple(range(0, (features + 1) * size * k, size * k)) if size * k else (0,) * (features + 1),
    )


def _joined(pieces: Sequence[Array], order: Order | None, out: Array | None = None, width: int = 1) -> Array:
    """Concatenate and pick into ``out``; ``width`` consecutive elements move as one."""
    if out is None:
        size = sum(map(len, pieces)) if order is None else len(order)
        out = np.empty((size, *pieces[0].shape[1:]), dtype=pieces[0].dtype)
    if order is None:
        return np.concatenate(pieces, out=out)
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if width > 1:
        whole, target = whole.reshape(-1, width), out.reshape(-1, width)
    else:
        target = out
    # mode="clip" lets NumPy write into `out` without a buffer; positions of samples leave nothing to clip.
    np.take(whole, order, axis=0, out=target, mode="clip")
    return out


def _lengths(parts: Sequence[BatchSlice], i: int) -> Array:
    """Ids per sample of feature ``i``, which is ragged."""
    return np.concatenate([np.diff(_offsets(b.sparse, i)[start : stop + 1]) for b, start, stop in parts])


def _order_of_ids(lengths: Array, order: Order) -> Order:
    """Order of the ids of bags of these lengths ``[B]``, when bags ``[b]`` of them are taken."""
    moved = lengths[order]
    first = (np.cumsum(lengths) - lengths)[order]
    return np.arange(int(moved.sum())) + np.repeat(first - (np.cumsum(moved) - moved), moved)


def _id_spans(parts: Sequence[BatchSlice], i: int) -> list[tuple[int, int]]:
    """Per part, where the ids of feature ``i`` are in the values of its batch."""
    spans: list[tuple[int, int]] = []
    for batch, start, stop in parts:
        base, k = batch.sparse.starts[i], batch.sparse.fixed[i]
        if k is None:
            offsets = _offsets(batch.sparse, i)
            spans.append((base + int(offsets[start]), base + int(offsets[stop])))
        else:
            spans.append((base + start * k, base + stop * k))
    return spans


def _offsets(sparse: Jagged, i: int) -> Array:
    assert sparse.offsets is not None  # feature i is ragged
    return sparse.offsets[sparse.ragged_rows[i]].numpy()


def _values(sparse: Jagged) -> Array:
    return sparse.values.numpy()


def _weights(sparse: Jagged) -> Array:
    assert sparse.weights is not None  # all parts have the same columns
    return sparse.weights.numpy()
