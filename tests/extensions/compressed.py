"""Records of your own pass the contract of stores."""

from collections.abc import Sequence

import pytest
import torch
from compressed import CompressedRecords

from hotbed.specs import RowDtype
from hotbed.store import LazyStore, Span
from hotbed.testing.store_contract import Format, StoreContract


class TestCompressed(StoreContract):
    @pytest.fixture(params=[Format("int8", (5, 8))], ids=["int8"])  # leave it out to test all formats
    def format(self, request: pytest.FixtureRequest) -> Format:
        return request.param

    def make(self, spans: Sequence[Span], dim: int, dtype: RowDtype) -> LazyStore:
        def records(record_bytes: int, slots: int, device: torch.device) -> CompressedRecords:
            return CompressedRecords(record_bytes)

        cpu = torch.device("cpu")
        return LazyStore(spans, dim, records, tier="host", dtype=dtype, device=cpu, backend="auto")
