"""Compare batches to the bit."""

import torch
from torch import Tensor

from hotbed.batch import Batch


def bits(t: Tensor | None) -> object:
    """Everything about a tensor; NaNs count."""
    if t is None:
        return None
    return t.dtype, tuple(t.shape), t.contiguous().view(-1).view(torch.uint8).tolist() if t.numel() else []


def content(batch: Batch) -> dict[str, object]:
    """Everything about a batch, to compare."""
    sparse = batch.sparse
    return {
        "names": sparse.names,
        "fixed": sparse.fixed,
        "starts": sparse.starts,
        "size": len(batch),
        "ids": bits(sparse.values),
        "offsets": bits(sparse.offsets),
        "id weights": bits(sparse.weights),
        "dense": bits(batch.dense),
        "labels": bits(batch.labels),
        "weights": bits(batch.weights),
        "extra": {name: bits(t) for name, t in batch.extra.items()},
    }
