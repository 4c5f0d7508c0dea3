"""A new tier of storage is a class of records and one row in the registry; every registered tier keeps the contract."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from hotbed.config.parallel_memory import MemoryRecipe
from hotbed.specs import RowDtype, Tier
from hotbed.store import LazyStore, Span, Storage
from hotbed.store.records import Records, Use
from hotbed.store.slot_lists import SlotTensor, SortedSlots
from hotbed.store.tiers import RECORDS, TierRecords
from hotbed.testing.store_contract import Format, StoreContract


def test_every_tier_that_a_recipe_or_plan_may_name_is_registered() -> None:
    assert {"device", *RECORDS} == set(get_args(Tier))
    assert MemoryRecipe(tier="disk").cached_tiers == tuple(RECORDS)
    assert MemoryRecipe(tier="disk", host="uva").cached_tiers == tuple(tier for tier in RECORDS if tier != "host")


class DictRecords(Records):
    """The least that a tier must do."""

    nbytes = 0

    def __init__(self, record_bytes: int) -> None:
        super().__init__(record_bytes)
        self._records: dict[int, Tensor] = {}

    def read(self, slots: Tensor, out: Tensor, *, use: Use = "lookup") -> Tensor:
        for i, slot in enumerate(slots.tolist()):
            if slot in self._records:
                out[i] = self._records[slot][: out.shape[1]]
        return torch.tensor([slot in self._records for slot in slots.tolist()], dtype=torch.bool)

    def write(self, slots: Tensor, records: Tensor) -> None:
        self._records |= {slot: record.clone() for slot, record in zip(slots.tolist(), records, strict=True)}

    def slots(self) -> SortedSlots:
        return SlotTensor(torch.tensor(sorted(self._records), dtype=torch.int64))

    def clear(self) -> None:
        self._records.clear()


@pytest.mark.parametrize("cache_rows", [0, 7])
class TestNewTier(StoreContract):
    @pytest.fixture(params=[Format("int8", (5, 8))], ids=lambda f: f.dtype)
    def format(self, request: pytest.FixtureRequest) -> Format:
        return request.param

    @pytest.fixture(autouse=True)
    def _registered(self, monkeypatch: pytest.MonkeyPatch, cache_rows: int) -> None:
        row = TierRecords(lambda record_bytes, _, __: DictRecords(record_bytes), is_slow=True)
        monkeypatch.setitem(RECORDS, "dict", row)
        self.cache_rows = cache_rows

    def make(self, spans: Any, dim: int, dtype: RowDtype) -> LazyStore:
        tier: Any = "dict"
        cpu = torch.device("cpu")
        store = Storage(tier, self.cache_rows).make(spans, dim, dtype=dtype, device=cpu, backend="auto")
        assert isinstance(store, LazyStore) and store.tier == "dict"
        assert isinstance(store.records.layers()[-1], DictRecords)
        return store


def test_a_store_without_rows_needs_no_records() -> None:
    store = Storage("disk").make([], 16, dtype="fp32", device=torch.device("cpu"), backend="auto")
    assert store.slots == 0 and not isinstance(store, LazyStore)
    assert isinstance(
        Storage("disk").make([Span(1)], 16, dtype="fp32", device=torch.device("cpu"), backend="auto"), LazyStore
    )
