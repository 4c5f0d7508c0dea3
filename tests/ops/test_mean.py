"""The kernel that averages rows adds them one after the other: the bits of that loop in torch."""

from __future__ import annotations

import pytest
import torch

from hotbed.embed.dense_parallel import average_ranks
from hotbed.ops import launches

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 5), (2, 0), (3, 128), (17, 300), (40, 129)], ids=str)
def test_rows_are_added_in_order(shape: tuple[int, int], dtype: torch.dtype):
    triton_dense = pytest.importorskip("hotbed.ops.triton_dense")
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    launches.clear()
    found = triton_dense.reduce_mean(values.to(device)).cpu()
    assert set(launches) == {"triton.mean_of_rows"}
    assert torch.equal(found, average_ranks(values))
    if shape[0] > 16 and dtype == torch.float32:
        assert not torch.equal(found, values.mean(0))  # which adds in another order
