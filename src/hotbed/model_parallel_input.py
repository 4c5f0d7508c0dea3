"""Define `ModelParallelInput`: some features for the samples of all ranks, not all features for those of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.errors import BatchError
from hotbed.jagged import Jagged


class ModelParallelInput(Jagged):
    """Ids of the features whose tables a rank owns, for the samples of all ranks.

    A distributed collection takes it in the place of ids of all features for this rank's samples: owners have the ids
    already, so none are exchanged, and each rank need read only some of the data. Tables must not be cut into rows, and
    their features be pooled.

    Parameters
    ----------
    whole
        Ids of the global batch, of at least the features whose tables this rank owns in whole or in part.
    sizes
        Samples of each rank, which follow each other in ``whole``.
    rank
        This rank; its samples are those of the rest of the batch (`Batch.dense` and so on).

    Raises
    ------
    BatchError
        If the sizes do not add up to the batch.
    """

    __slots__ = ("rank", "sizes", "whole")

    def __init__(self, whole: Jagged, sizes: Sequence[int], rank: int) -> None:
        if sum(sizes) != len(whole) or not 0 <= rank < len(sizes):
            raise BatchError(
                f"a batch of {len(whole):,} samples cannot be {list(sizes)} samples of {len(sizes)} ranks, of which "
                f"this is rank {rank}; sizes must add up to the batch"
            )
        none = torch.empty(0, dtype=whole.values.dtype, device=whole.values.device)
        super().__init__((), none, batch_size=sizes[rank], fixed=())
        self.whole = whole
        self.sizes = tuple(sizes)
        self.rank = rank

    @override
    def _map(self, change: Callable[[Tensor], Tensor]) -> ModelParallelInput:
        return ModelParallelInput(self.whole._map(change), self.sizes, self.rank)
