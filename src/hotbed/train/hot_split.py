"""`HotSplit`: the samples of a batch that need hot rows only, apart from its others, whose rows take longer to come.

Hotline's idea (Adnan et al. 2022, arXiv 2204.05436): the hot part of a mini-batch is computed while the rows of the
cold part are fetched. Both parts' gradients are added before the one update, so what is trained is the same model on
the same batches; sums over samples are taken in another order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hotbed.batch import Batch
from hotbed.data import Schema
from hotbed.data.pack import by_feature, hot_inputs
from hotbed.train.hot_file import read_hot_rows


class HotSplit:
    """Divides batches.

    Parameters
    ----------
    hot_rows
        By feature, how many of the first rows are hot.
    ranks
        Number of processes. Several exchange rows for each part, so that all have both, empty or not; one alone leaves
        out a part without samples.
    """

    def __init__(self, hot_rows: Mapping[str, int], ranks: int = 1) -> None:
        self._hot_rows, self._ranks = hot_rows, ranks

    @staticmethod
    def of_file(file: Path, schema: Schema, ranks: int) -> HotSplit:
        """By the hot rows that hotbed pack has written."""
        return HotSplit(by_feature(schema, read_hot_rows(file, schema.rows)), ranks)

    def __call__(self, batch: Batch) -> Sequence[Batch]:
        """The hot part, then the cold one; samples in the order they had."""
        hot = torch.from_numpy(hot_inputs(batch.sparse, self._hot_rows))
        if self._ranks == 1 and bool(hot.all() | ~hot.any()):
            return [batch]
        parts = [batch.take(which.nonzero()[:, 0]) for which in (hot, ~hot)]
        # As the batch was, so that they move to the device while others are computed.
        return [part.pin_memory() for part in parts] if batch.sparse.values.is_pinned() else parts
