"""Where the bags of some features lie in a batch, as kernels take it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hotbed.jagged import Jagged
from hotbed.ops import BagLayout
from hotbed.ops.layout import FIXED, RAGGED_ROW, START
from hotbed.specs import Feature


class BagPlaces:
    """Makes the `BagLayout` of some features for batch after batch.

    Parameters
    ----------
    features
        The features, and the position of each one's vector among those of a sample.
    slots
        By table, the slot of its row 0, and its number in `Rows.tables`.
    single
        Whether every id is a bag of its own; then there is one feature.
    """

    def __init__(
        self, features: Mapping[Feature, int], slots: Mapping[str, tuple[int, int]], *, single: bool = False
    ) -> None:
        self.features = dict(features)
        self.single = single
        self._last: tuple[object, Tensor] | None = None
        self._at: tuple[tuple[str, ...], list[int]] | None = None
        self._has_mean = not single and any(f.pooling == "mean" for f in features)
        # `BagLayout.features`, with zeros where the batch decides.
        self._fixed = torch.tensor(
            [
                [0, 0, 0, slots[f.table][0], f.pooling == "mean", position, slots[f.table][1]]
                for f, position in features.items()
            ],
            dtype=torch.int64,
            device="cpu",
        )

    @property
    def tables(self) -> set[str]:
        """Tables of the features."""
        return {f.table for f in self.features}

    def layout(self, ids: Jagged, width: int, room: int) -> BagLayout:
        """Where the bags lie in a batch; features are found by name.

        Parameters
        ----------
        ids
            The batch.
        width, room
            As in `BagLayout`; of no effect where every id is a bag.
        """
        at = self._found(ids)
        starts = ids.starts
        total = sum([starts[i + 1] - starts[i] for i in at])
        batch_size = total if self.single else len(ids)
        offsets = None if self.single else ids.offsets
        if offsets is None:
            offsets = torch.empty(0, batch_size + 1, dtype=torch.int64, device=ids.values.device)
        return BagLayout(
            ids.values,
            self._entries(ids, at),
            offsets,
            None if ids.weights is None else _values(ids.weights),
            batch_size,
            total,
            self._has_mean,
            1 if self.single else width,
            0 if self.single else room,
        )

    def _found(self, ids: Jagged) -> list[int]:
        """Which features of a batch these are; batches have the same names, so the last answer is kept."""
        last = self._at  # another thread may make a layout, too
        if last is None or last[0] != ids.names:
            self._at = last = ids.names, [ids.index(f.name) for f in self.features]
        return last[1]

    def _entries(self, ids: Jagged, at: list[int]) -> Tensor:
        """`BagLayout.features`; fixed features keep their places from batch to batch, so the last one is kept."""
        places = (ids.names, ids.fixed, ids.starts, ids.values.device)
        last = self._last  # another thread may make a layout, too
        if last is None or last[0] != places:
            entries = self._fixed.clone()
            fixed = [1 if self.single else -1 if k is None else k for k in ids.fixed]
            for column, values in ((START, ids.starts), (FIXED, fixed), (RAGGED_ROW, ids.ragged_rows)):
                entries[:, column] = torch.tensor(values, dtype=torch.int64, device="cpu")[at]
            self._last = last = places, entries.to(ids.values.device)
        return last[1]


def _values(weights: Tensor) -> Tensor:
    """Per-id weights as float32; those that are trained are copied, for they may change before the tables' step."""
    values = weights.detach().to(torch.float32)
    return values.clone() if weights.requires_grad and values.data_ptr() == weights.data_ptr() else values
