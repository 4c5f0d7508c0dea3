"""Protects: float32 layers compute the same function by every library, chosen by CPU and shape, and bits repeat."""

import re

import pytest
import torch

from hotbed.errors import SpecError
from hotbed.machine import Cpu
from hotbed.nn import MLP
from hotbed.nn import linear as linear_module
from hotbed.nn.linear import MIN_PRODUCTS, NARROW_INPUTS, WIDE_INPUTS, ZEN_5, Linear
from hotbed.torch_private import has_onednn_linear

needs_onednn = pytest.mark.skipif(not has_onednn_linear(), reason="this build of torch has no oneDNN")


@pytest.fixture
def products(monkeypatch):
    """Shapes of the products that oneDNN computes."""
    seen = []
    compute = linear_module.onednn_product

    def noted(a, b, bias=None):
        seen.append((len(a), len(b), a.shape[1]))
        return compute(a, b, bias)

    monkeypatch.setattr(linear_module, "onednn_product", noted)
    return seen


def gradients(layer, x):
    x = x.detach().requires_grad_()
    y = layer(x)
    return [y, *torch.autograd.grad(y.pow(2).mean(), [x, *layer.parameters()])]


def pair(inputs, outputs):
    torch.manual_seed(0)
    by_onednn = Linear(inputs, outputs, library="onednn")
    by_torch = Linear(inputs, outputs, library="torch")
    by_torch.load_state_dict(by_onednn.state_dict())
    return by_onednn, by_torch


@needs_onednn
@pytest.mark.parametrize("family", [25, 26])
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(4096, 13, 512), (1024, 256, 128), (4096, 64, 128)])
def test_onednn_computes_what_torch_does(monkeypatch, products, family, rows, inputs, outputs):
    monkeypatch.setattr(linear_module, "cpu", lambda: Cpu("a CPU", "some", True, family, frozenset()))
    layer, plain = pair(inputs, outputs)
    x = torch.randn(rows, inputs)
    found, expected = gradients(layer, x), gradients(plain, x)
    assert (rows, outputs, inputs) in products
    by_onednn = inputs < NARROW_INPUTS or (inputs >= WIDE_INPUTS and family == ZEN_5)
    assert len(products) == 2 + by_onednn  # forward, gradients of the input and of the weight
    for a, b in zip(found, expected, strict=True):
        assert a.is_contiguous()
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_bits_repeat(products):
    layer, _ = pair(256, 256)
    x = torch.randn(1024, 256)
    first, second = gradients(layer, x), gradients(layer, x)
    assert products
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_onednn
def test_inputs_of_more_dimensions_and_strides_and_a_constant_gradient(products):
    layer, plain = pair(256, 256)
    wide = torch.randn(4, 300, 512)
    for x in (wide[..., ::2], wide[..., :256], wide[0, :, :256].expand(4, 300, 256)):
        found, expected = (torch.autograd.grad(m(x).sum(), list(m.parameters())) for m in (layer, plain))
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)
        assert layer(x).shape == (4, 300, 256)
    assert products


@needs_onednn
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(MIN_PRODUCTS // 256 // 64 - 1, 256, 64), (MIN_PRODUCTS // 512, 512, 1), (0, 8, 8)]
)
def test_small_products_and_narrow_layers_are_left_to_torch(products, rows, inputs, outputs):
    layer, plain = pair(inputs, outputs)
    x = torch.randn(rows, inputs)
    assert torch.equal(layer(x), plain(x))
    assert not products


@needs_onednn
def test_other_dtypes_are_left_to_torch(products):
    layer, _ = pair(256, 256)
    x = torch.randn(1024, 256)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
    assert not products


@needs_onednn
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # of torch itself
def test_transforms_of_torch_see_its_own_layer(products):
    layer, _ = pair(256, 256)
    x = torch.randn(1024, 256)
    parameters = dict(layer.named_parameters())

    def loss(p, x):
        return torch.func.functional_call(layer, p, (x,)).pow(2).sum()

    assert torch.func.grad(loss)(parameters, x)["weight"].shape == (256, 256)
    assert torch.func.vmap(loss, in_dims=(None, 0))(parameters, x.expand(2, 1024, 256)).shape == (2,)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.autograd.forward_ad.unpack_dual(layer(dual)).tangent is not None
    targets = [str(node.target) for node in torch.export.export(layer, (x,)).graph.nodes if node.op == "call_function"]
    assert targets == ["aten.linear.default"]
    assert not products


@needs_onednn
def test_gradients_of_gradients(products):
    found = []
    for layer in pair(256, 256):
        x = torch.ones(1024, 256, requires_grad=True)
        (first,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
        first.pow(2).sum().backward()
        found.append(layer.weight.grad)
    assert products
    assert (found[0] - found[1]).abs().max() < 1e-5 * found[1].abs().max()


@needs_onednn
def test_frozen_parameters_get_no_gradient():
    layer, _ = pair(256, 256)
    layer.weight.requires_grad_(False)
    x = torch.randn(1024, 256)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


@pytest.mark.parametrize(
    ("is_amd", "flags", "library"),
    [(True, {"avx512f", "avx2"}, "onednn"), (True, {"avx2"}, "torch"), (False, {"avx512f"}, "torch")],
)
def test_the_kind_of_cpu_decides(monkeypatch, is_amd, flags, library):
    monkeypatch.setattr(linear_module, "cpu", lambda: Cpu("a CPU", "some", is_amd, 25, frozenset(flags)))
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(linear_module, "has_onednn_linear", lambda: True)
    assert MLP(4, (3,))[0].uses == library
    assert MLP(4, (3,), library="torch")[0].uses == "torch"
    monkeypatch.setattr(linear_module, "has_onednn_linear", lambda: False)
    assert Linear(4, 3).uses == "torch"
    with pytest.raises(SpecError, match=r"library: got 'onednn', expected 'auto' or 'torch'"):
        Linear(4, 3, library="onednn")


@needs_onednn
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_traced_layer_has_the_product_of_torch():
    layer, plain = pair(64, 512)
    x = torch.randn(4096, 64)
    traced = torch.jit.trace(layer, x)
    assert "aten::linear" in str(traced.inlined_graph)
    torch.testing.assert_close(traced(x), plain(x))


def test_there_is_no_other_library():
    with pytest.raises(SpecError, match=re.escape("library: got 'mkl', expected one of auto, torch, onednn")):
        MLP(4, (3,), library="mkl")
