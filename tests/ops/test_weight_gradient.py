"""The gradient of per-id weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from hotbed.ops import BagLayout, Rows

from .cases import CASES, Kernels, embedding_bag, naive_bags, naive_block_sum, places_of, values_of
from .formats import NARROW

SENTINEL = 7.25


def gradient(bags: BagLayout, dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Of the whole tensor that the bags are pooled into, NaN where it is that of others ``[B · width, D]``."""
    gen = torch.Generator().manual_seed(9)
    grad = torch.full((bags.batch_size, bags.width, dim), torch.nan)
    places = places_of(bags)
    grad[:, places] = torch.randn(bags.batch_size, len(places), dim, generator=gen)
    return grad.flatten(0, 1).to(dtype)


def weight_gradient(backend: Kernels, rows: Rows, bags: BagLayout, grad: Tensor) -> Tensor:
    out = torch.full((len(bags.ids),), SENTINEL, device=backend.device)
    assert backend.ops.weight_gradient(backend.put(rows), backend.put(bags), backend.put(grad), out) is None
    return out.cpu()


def by_autograd(rows: Rows, bags: BagLayout, grad: Tensor) -> Tensor:
    weights = torch.ones(len(bags.ids), dtype=torch.float64, requires_grad=True)
    out = embedding_bag(torch.from_numpy(values_of(rows)).double(), bags, weights)
    out.backward(grad.double().view(bags.batch_size, bags.width, -1)[:, places_of(bags)])
    return weights.grad


def ours(bags: BagLayout) -> Tensor:
    """Which ids are those of this arena."""
    mine = torch.zeros(len(bags.ids), dtype=torch.bool)
    for feature, of_feature in zip(bags.features.tolist(), naive_bags(bags), strict=True):
        mine[feature[0] : feature[0] + sum(len(slots) for slots, _, _ in of_feature)] = True
    return mine


def check(backend: Kernels, rows: Rows, bags: BagLayout, grad: Tensor) -> None:
    found = weight_gradient(backend, rows, bags, grad)
    mine = ours(bags)
    assert (found[~mine] == SENTINEL).all(), "weights of other arenas"
    torch.testing.assert_close(found[mine], by_autograd(rows, bags, grad)[mine].float(), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("dim", [3, 40])
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.batch])
def test_it_is_what_autograd_finds_for_embedding_bag(backend, name, dim):
    case = CASES[name]
    bags = case.layout()
    check(backend, case.rows(dim), bags, gradient(bags, dim))


@pytest.mark.parametrize("dim", [1, 16, 17, 200, 1024])
def test_rows_of_other_widths(backend, dim):
    case = CASES["multi_hot"]
    bags = case.layout()
    check(backend, case.rows(dim), bags, gradient(bags, dim))


@pytest.mark.parametrize(
    ("dtype", "grad_dtype"),
    [
        *((dtype, torch.float32) for dtype in NARROW.values()),
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.int8, torch.bfloat16),
    ],
    ids=str,
)
def test_rows_and_gradients_of_every_dtype(backend, dtype, grad_dtype):
    case = CASES["weighted"]
    bags = case.layout()
    check(backend, case.rows(40, dtype), bags, gradient(bags, 40, grad_dtype))


def test_no_samples(backend):
    bags = CASES["no_samples"].layout()
    found = weight_gradient(backend, CASES["no_samples"].rows(4), bags, torch.empty(0, 4))
    assert (found == SENTINEL).all()


@pytest.mark.parametrize("dim", [3, 40, 200])
def test_columns_are_added_as_blocks(backend, dim):
    """In halving trees of 16 columns, then the blocks in column order: the same bits on every backend."""
    case = CASES["one_hot"]
    bags = case.layout()
    rows, grad = case.rows(dim), gradient(bags, dim)
    values = values_of(rows)
    at = grad.view(case.batch, bags.width, dim)[:, places_of(bags)].numpy()
    expected = [
        float(naive_block_sum(values[slot] * at[b, f]))
        for f, of_feature in enumerate(naive_bags(bags))
        for b, ((slot,), _, _) in enumerate(of_feature)
    ]
    found = weight_gradient(backend, rows, bags, grad)[ours(bags)]
    assert np.array_equal(found.numpy(), np.array(expected, np.float32))
    assert torch.equal(found, weight_gradient(backend, rows, bags, grad)[ours(bags)])
