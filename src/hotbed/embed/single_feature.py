"""Look one feature up by itself, with little between a module's call and the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.embed.ids import id_weights
from hotbed.embed.local_gradients import LocalSource
from hotbed.embed.table_group import Request
from hotbed.jagged import INDEX_DTYPES, Bags
from hotbed.ops import BagLayout
from hotbed.specs import POOLING_CODE, Feature

RAGGED = -1


class SingleFeature:
    """The bags of one feature in call after call.

    ``slot`` is that of its table's row 0 in ``source``, ``number`` the table's in `Rows.tables`.
    """

    def __init__(self, source: LocalSource, feature: Feature, slot: int, number: int) -> None:
        self._source, self._is_pooled = source, feature.is_pooled
        code = POOLING_CODE[feature.pooling]
        self._rest, self._has_divisors = [0, slot, code, 0, number], bool(code)
        self._last: tuple[tuple[int, torch.device], Tensor] | None = None

    @property
    def entries(self) -> list[Tensor]:
        """What kernels were told of the last call's bags."""
        return [] if self._last is None else [self._last[1]]

    def request(self, bags: Bags, trained: bool) -> Request:
        """Lay bags out; where the feature is not pooled, each id is one."""
        ids = bags.values.contiguous()
        device, count = ids.device, len(ids)
        fixed, batch_size, offsets = bags.fixed, bags.batch_size, bags.offsets
        if not self._is_pooled:
            fixed, batch_size, offsets = 1, count, None
        key = RAGGED if fixed is None else fixed, device
        last = self._last  # another thread may look up, too
        if last is None or last[0] != key:
            features = torch.tensor([[0, key[0], *self._rest]], dtype=torch.int64, device=device)
            self._last = last = key, features
        rows = torch.empty(0, batch_size + 1, dtype=torch.int64, device=device) if offsets is None else offsets[None]
        layout = BagLayout(
            ids,
            last[1],
            rows.contiguous(),
            None if bags.weights is None else id_weights(bags.weights.contiguous()),
            batch_size,
            count,
            self._has_divisors,
            1,
            ids_per_bag=fixed or None,
            spans=((0, count),),
        )
        return Request(self._source, layout, 0, trained)


def are_valid(bags: Bags, rows: int, device: torch.device) -> bool:
    """Say whether ids are on this device and all of them rows of a table, in bags that lie one after the other."""
    ids, offsets = bags.values, bags.offsets
    if ids.dtype not in INDEX_DTYPES or ids.device != device or ids.is_meta:
        return False
    if len(ids) and (ids.amin().item() < 0 or ids.amax().item() >= rows):
        return False
    if offsets is None:
        return True
    ends = offsets[:: max(len(offsets) - 1, 1)].tolist()
    return ends[0] == 0 and ends[-1] == len(ids) and bool((offsets[1:] >= offsets[:-1]).all())
