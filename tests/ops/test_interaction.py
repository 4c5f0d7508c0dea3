"""Dot interaction, forward and backward."""

from __future__ import annotations

import pytest
import torch

SHAPES = {  # samples, embeddings, columns, columns of the output beyond what is needed
    "dlrm": (3, 26, 128, 1),
    "one_embedding": (4, 1, 16, 0),
    "narrow": (5, 3, 1, 2),
    "odd": (2, 6, 40, 9),
    "wide": (2, 2, 200, 0),
    "many": (2, 40, 17, 100),
    "no_samples": (0, 3, 16, 0),
}


def _inputs(name, dtype=torch.float32):
    samples, embeddings, dim, extra = SHAPES[name]
    gen = torch.Generator().manual_seed(4)
    n = embeddings + 1
    width = dim + n * (n - 1) // 2 + extra
    return (
        torch.randn(samples, width, generator=gen).to(dtype),
        torch.randn(samples, dim, generator=gen).to(dtype),
        torch.randn(samples, embeddings, dim, generator=gen).to(dtype),
    )


def _naive(dense, embeddings, width):
    rows = []
    for b in range(len(dense)):
        v = [dense[b], *embeddings[b]]
        dots = [torch.dot(v[i], v[j]) for i in range(len(v)) for j in range(i)]
        rows.append(torch.cat([dense[b], torch.stack(dots), dense.new_zeros(width - len(dense[b]) - len(dots))]))
    return torch.stack(rows) if rows else dense.new_zeros(0, width)


@pytest.mark.parametrize("name", SHAPES)
def test_forward(backend, name):
    grad, dense, embeddings = _inputs(name)
    out = backend.ops.interaction(backend.put(dense), backend.put(embeddings), grad.shape[1])
    again = backend.ops.interaction(backend.put(dense), backend.put(embeddings), grad.shape[1])
    assert out.dtype == torch.float32 and torch.equal(out, again)
    expected = _naive(dense.double(), embeddings.double(), grad.shape[1]).float()
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-4)
    dim = dense.shape[1]
    used = dim + (embeddings.shape[1] + 1) * embeddings.shape[1] // 2
    assert torch.equal(out[:, :dim].cpu(), dense), "dense is copied"
    assert not out[:, used:].any(), "padding is zero"


@pytest.mark.parametrize("name", SHAPES)
def test_backward(backend, name):
    grad, dense, embeddings = _inputs(name)
    args = backend.put(grad), backend.put(dense), backend.put(embeddings)
    out = backend.ops.interaction_backward(*args)
    for x, y in zip(out, backend.ops.interaction_backward(*args), strict=True):
        assert torch.equal(x, y)
    inputs = [dense.double().requires_grad_(), embeddings.double().requires_grad_()]
    if len(dense):
        _naive(*inputs, grad.shape[1]).backward(grad.double())
    for x, leaf in zip(out, inputs, strict=True):
        assert x.shape == leaf.shape
        if len(dense):
            torch.testing.assert_close(x.cpu(), leaf.grad.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "triton"], indirect=True)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_bfloat16(backend, dtypes):
    """As under autocast (the CPU kernel is float32 only). ‖error‖ / ‖result‖; bfloat16 keeps 8 bits."""
    grad, dense, embeddings = _inputs("dlrm")
    dense, embeddings = dense.to(dtypes[0]), embeddings.to(dtypes[1])
    common = torch.promote_types(*dtypes)
    out = backend.ops.interaction(backend.put(dense), backend.put(embeddings), grad.shape[1])
    back = backend.ops.interaction_backward(backend.put(grad.to(common)), backend.put(dense), backend.put(embeddings))
    inputs = [dense.double().requires_grad_(), embeddings.double().requires_grad_()]
    expected = _naive(*inputs, grad.shape[1])
    expected.backward(grad.to(common).double())
    for x, y in ((out, expected), (back[0], inputs[0].grad), (back[1], inputs[1].grad)):
        assert x.dtype == common
        assert (x.cpu().double() - y).norm() / y.norm() < 1e-2
