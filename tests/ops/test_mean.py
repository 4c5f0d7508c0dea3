"""Means over ranks add rows along the tree over virtual ranks, and divide: the bits of these additions in torch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hotbed.embed.dense_parallel import average_ranks
from hotbed.ops import launches
from hotbed.virtual_ranks import tree_additions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAVES = {
    "one": [0],
    "two": [0, 1],
    "three": [0, 1, 2],
    "some of eight": [1, 2, 3, 6],
    "from the middle": [5, 6, 7, 8],
    "17": range(17),
    "40 of 64": [*range(3), *range(20, 57)],
}


def random_values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(dtype)


def mean(values: Tensor, leaves: Sequence[int], divisor: int) -> Tensor:
    rows = list(values)
    for i, j in tree_additions(leaves):
        rows[i] = rows[i] + rows[j]
    return rows[0] / divisor


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("leaves", LEAVES.values(), ids=list(LEAVES))
def test_a_host_adds_along_the_tree(leaves: Sequence[int], dtype: torch.dtype):
    values = random_values(len(leaves), 129, dtype)
    expected = mean(values, leaves, 7)
    found = average_ranks(values, leaves, 7)
    assert torch.equal(found, expected)
    assert found.data_ptr() == values.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [0, 129, 300])
@pytest.mark.parametrize("leaves", LEAVES.values(), ids=list(LEAVES))
def test_a_kernel_adds_along_the_tree(leaves: Sequence[int], columns: int, dtype: torch.dtype):
    triton_dense = pytest.importorskip("hotbed.ops.triton_dense")
    values = random_values(len(leaves), columns, dtype)
    values[:, ::7] = -0.0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    launches.clear()
    found = triton_dense.reduce_mean(values.to(device), leaves, 7).cpu()
    assert set(launches) == {"triton.mean_of_rows"}
    expected = mean(values, leaves, 7)
    assert torch.equal(found, expected) and torch.equal(found.signbit(), expected.signbit())


def test_means_of_two_rows_are_those_of_plain_additions():
    values = random_values(2, 300, torch.float32)
    expected = (values[0] + values[1]) / 2
    assert torch.equal(average_ranks(values, range(2), 2), expected)


def test_the_order_of_additions_matters():
    values = random_values(40, 300, torch.float32)
    in_order = values[0]
    for row in values[1:]:
        in_order = in_order + row
    assert not torch.equal(average_ranks(values, range(40), 40), in_order / 40)
