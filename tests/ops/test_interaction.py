"""Dot interaction, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

SHAPES = {  # samples, vectors, columns, columns of the output beyond what is needed
    "dlrm": (3, 27, 128, 1),
    "two_vectors": (4, 2, 16, 0),
    "one_vector": (3, 1, 8, 2),
    "narrow": (5, 4, 1, 2),
    "odd": (2, 7, 40, 9),
    "wide": (2, 3, 200, 0),
    "many": (2, 41, 17, 100),
    "no_samples": (0, 4, 16, 0),
}
LIMITS = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
"""Of ‖error‖ / ‖result‖; bfloat16 keeps 8 bits."""

every_shape = pytest.mark.parametrize("name", SHAPES)
every_dtype = pytest.mark.parametrize("dtype", LIMITS, ids=["fp32", "bf16"])


def inputs(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gradient ``[B, width]``, vectors ``[B, n, D]``."""
    samples, n, dim, extra = SHAPES[name]
    gen = torch.Generator().manual_seed(4)
    width = dim + n * (n - 1) // 2 + extra
    grad = torch.randn(samples, width, generator=gen)
    return grad.to(dtype), torch.randn(samples, n, dim, generator=gen).to(dtype)


def naive(vectors: Tensor, width: int) -> Tensor:
    rows = []
    for v in vectors:
        dots = [torch.dot(v[i], v[j]) for i in range(len(v)) for j in range(i)]
        row = torch.cat([v[0], torch.stack(dots)]) if dots else v[0]
        rows.append(torch.nn.functional.pad(row, (0, width - len(row))))
    return torch.stack(rows) if rows else vectors.sum() * vectors.new_zeros(0, width)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    assert (found.cpu().double() - expected).norm() <= LIMITS[dtype] * expected.norm()


@every_shape
@every_dtype
def test_forward(backend, name, dtype):
    grad, vectors = inputs(name, dtype)
    out, again = (backend.ops.interaction(backend.put(vectors), grad.shape[1]) for _ in range(2))
    assert torch.equal(out, again)
    assert_close(out, naive(vectors.double(), grad.shape[1]), dtype)
    _, n, dim = vectors.shape
    assert torch.equal(out[:, :dim].cpu(), vectors[:, 0]), "the first vector is copied"
    assert not out[:, dim + n * (n - 1) // 2 :].any(), "padding is zero"


@every_shape
@every_dtype
def test_backward(backend, name, dtype):
    grad, vectors = inputs(name, dtype)
    out, again = (backend.ops.interaction_backward(backend.put(grad), backend.put(vectors)) for _ in range(2))
    assert torch.equal(out, again)
    leaf = vectors.double().requires_grad_()
    naive(leaf, grad.shape[1]).backward(grad.double())
    assert_close(out, leaf.grad, dtype)


def test_vectors_and_gradients_may_be_views(backend):
    """Embeddings are looked up into a tensor with room for others; gradients come out of a matrix product."""
    grad, vectors = inputs("odd", torch.float32)
    whole = torch.randn(2, 9, 40)
    whole[:, 1:8] = vectors
    columns = torch.randn(grad.shape[1], 2)
    columns.copy_(grad.T)
    view, turned = backend.put(whole)[:, 1:8], backend.put(columns).T
    out = backend.ops.interaction(view, grad.shape[1])
    assert torch.equal(out, backend.ops.interaction(backend.put(vectors), grad.shape[1]))
    back = backend.ops.interaction_backward(turned, view)
    assert torch.equal(back, backend.ops.interaction_backward(backend.put(grad), backend.put(vectors)))
