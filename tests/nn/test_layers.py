import re
from functools import partial

import pytest
import torch

from hotbed import ops
from hotbed.errors import BackendError, BatchError, SpecError
from hotbed.nn import MLP, DotInteraction
from hotbed.nn.layers import recompute_activations


def test_mlp_has_the_published_initialisation():
    torch.manual_seed(0)
    mlp = MLP(400, (600, 300), last_relu=False)
    assert [type(layer).__name__ for layer in mlp] == ["Linear", "ReLU", "Linear"]
    assert mlp[0].weight.std().item() == pytest.approx((2 / 1000) ** 0.5, rel=0.02)
    assert mlp[0].bias.std().item() == pytest.approx((1 / 600) ** 0.5, rel=0.1)
    assert isinstance(MLP(4, (2,))[-1], torch.nn.ReLU)


@pytest.mark.parametrize("widths", [(), (0,), (4, -1)])
def test_mlp_refuses_widths_that_cannot_be(widths):
    with pytest.raises(SpecError, match=re.escape(f"got inputs 4 and widths {list(widths)}, expected")):
        MLP(4, widths)


def test_mlp_is_made_on_the_default_device_and_drawn_on_the_cpu():
    with torch.device("meta"):
        assert {p.device.type for p in MLP(4, (3, 2)).parameters()} == {"meta"}
    torch.manual_seed(1)
    first = MLP(4, (3,))[0].weight
    torch.manual_seed(1)
    assert torch.equal(first, torch.empty(3, 4).normal_(0.0, (2 / 7) ** 0.5))


@pytest.mark.parametrize("shape", [(3, 3, 5), (3, 2, 4), (3, 4, 4), (3, 12), (3, 4)])
def test_interaction_refuses_other_shapes(shape):
    with pytest.raises(BatchError, match=re.escape(f"(3, 4): vectors: got {list(shape)}, expected [B, 3, 4]")):
        DotInteraction(3, 4)(torch.rand(shape))


def by_hand(vectors, width):
    columns = [vectors[:, 0]]
    for i in range(vectors.shape[1]):
        columns += [(vectors[:, i] * vectors[:, j]).sum(1, keepdim=True) for j in range(i)]
    out = torch.cat(columns, 1)
    return torch.cat([out, out.new_zeros(len(out), width - out.shape[1])], 1)


@pytest.mark.parametrize(("vectors", "dim"), [(27, 128), (4, 10), (2, 1), (1, 3)])
def test_interaction_is_the_padded_lower_triangle(vectors, dim):
    torch.manual_seed(0)
    layer = DotInteraction(vectors, dim)
    x = torch.randn(5, vectors, dim, requires_grad=True)
    ops.launches.clear()
    out = layer(x)
    assert out.shape == (5, layer.width) and layer.width % 8 == 0
    expected = by_hand(x, layer.width)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, x, upstream)
    torch.testing.assert_close(got, torch.autograd.grad(expected, x, upstream))
    assert dict(ops.launches) == {"cpu.interaction": 1, "cpu.interaction_backward": 1}


def test_criteo_width_is_padded_from_479_to_480():
    assert DotInteraction(27, 128).width == 480
    assert DotInteraction(27, 128, multiple_of=1).width == 479


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_interaction_computes_in_the_dtype_of_autocast(backend, given):
    layer = DotInteraction(3, 16, backend=backend)
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0)).to(given).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    rounded = x.detach().bfloat16().float().requires_grad_()
    expected = by_hand(rounded, layer.width)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(out[:, :16], x[:, 0].bfloat16())
    upstream = torch.rand(out.shape).bfloat16()
    (got,) = torch.autograd.grad(out, x, upstream)
    assert got.dtype == given
    (of_rounded,) = torch.autograd.grad(expected, rounded, upstream.float())
    torch.testing.assert_close(got.float(), of_rounded, rtol=2e-2, atol=3e-2)


def test_interaction_keeps_the_dtype_of_its_vectors_outside_autocast():
    for dtype in (torch.float32, torch.bfloat16):
        assert DotInteraction(3, 16)(torch.rand(2, 3, 16, dtype=dtype)).dtype == dtype


def test_interaction_needs_an_existing_backend():
    with pytest.raises(BackendError, match="did you mean 'cpu'"):
        DotInteraction(2, 4, backend="cp")(torch.zeros(1, 2, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_interaction_refuses_dtypes_that_kernels_do_not_know(dtype):
    with pytest.raises(BatchError, match=f"DotInteraction: vectors: got {dtype}, expected float32"):
        DotInteraction(3, 4)(torch.zeros(2, 3, 4, dtype=dtype))


def noted(kept, tensor):
    kept.append(tensor.shape)
    return tensor


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_activations_that_are_computed_again_give_the_same_gradients_to_the_bit(dropout):
    found = []
    for recompute in (False, True):
        torch.manual_seed(1)
        mlp = MLP(5, [8, 6, 1], last_relu=False, dropout=dropout)
        mlp.recompute = recompute
        kept: list[torch.Size] = []
        inputs = torch.randn(7, 5, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(partial(noted, kept), lambda t: t):
            out = mlp(inputs)
        assert ((7, 8) in kept) != recompute, "what is computed again is not kept"
        out.sum().backward()
        found.append([out.detach(), inputs.grad, *(p.grad for p in mlp.parameters())])
    assert all(map(torch.equal, *found))


def test_only_mlps_can_compute_activations_again():
    with pytest.raises(SpecError, match=re.escape("got Linear, expected one with a hotbed.nn.MLP")):
        recompute_activations(torch.nn.Linear(1, 1))


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan")])
def test_mlp_refuses_dropout_that_cannot_be(dropout):
    with pytest.raises(SpecError, match=f"dropout: got {dropout}, expected a finite number at least 0 and below 1"):
        MLP(4, [2], dropout=dropout)
