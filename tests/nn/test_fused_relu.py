"""A layer and its ReLU with one pass over the gradient give what torch's two modules give."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from hotbed.nn import MLP, layers
from hotbed.nn.layers import MIN_FUSED_PRODUCTS, can_fuse, linear_relu
from hotbed.nn.linear import Linear
from hotbed.ops import launches
from hotbed.torch_private import has_onednn_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNELS = "triton" if DEVICE.type == "cuda" else "cpu"
has_bf16_products = pytest.mark.skipif(
    not has_onednn_linear() or not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="oneDNN has no products of bfloat16 on this CPU",
)
has_kernels = pytest.mark.skipif(
    DEVICE.type == "cpu" and not has_onednn_linear(), reason="this build of torch has no oneDNN"
)


def made(outputs: int = 9) -> tuple[Linear, Tensor]:
    torch.manual_seed(3)
    return Linear(5, outputs).to(DEVICE), torch.randn(4, 6, 5, device=DEVICE, requires_grad=True)


@has_kernels
def test_values_and_gradients_are_those_of_two_modules() -> None:
    layer, x = made()
    of_out = torch.randn(4, 6, 9, device=DEVICE)
    expected = torch.relu(layer(x))
    of_expected = torch.autograd.grad(expected, [x, layer.weight, layer.bias], of_out)
    launches.clear()
    out = linear_relu(x, layer)
    found = torch.autograd.grad(out, [x, layer.weight, layer.bias], of_out)
    assert launches[f"{KERNELS}.relu_backward"] == 1
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(found, of_expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@has_kernels
def test_a_batch_with_a_nan_has_it_in_its_output() -> None:
    """So that a loss is not finite; a ReLU that takes a maximum would make it 0."""
    layer, x = made()
    spoiled = x.detach().clone()
    spoiled[1, 2, 3] = math.nan
    out = linear_relu(spoiled, layer)
    assert out[1, 2].isnan().all() and int(out.isnan().sum()) == 9
    with torch.no_grad():
        layer.weight[4, 0] = math.nan
    assert linear_relu(x, layer)[..., 4].isnan().all()


@has_kernels
def test_gradients_have_gradients() -> None:
    layer, x = made()
    both: list[Tensor] = []
    for out in (torch.relu(layer(x)), linear_relu(x, layer)):
        (of_x,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        both.append(torch.autograd.grad(of_x.square().sum(), layer.weight)[0])
    torch.testing.assert_close(*both)


@has_bf16_products
@pytest.mark.parametrize("recompute", [False, True])
def test_an_mlp_under_autocast_on_a_cpu_is_what_its_modules_are(recompute: bool) -> None:
    torch.manual_seed(4)
    mlp, x = MLP(40, (1024, 32, 1024), last_relu=False), torch.randn(2048, 40)
    mlp.recompute = recompute
    of_out = torch.randn(2048, 1024)

    def passed(given: Tensor) -> tuple[Tensor, list[Tensor]]:
        given = given.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            out = mlp(given)
        return out, list(torch.autograd.grad(out.float(), [given, *mlp.parameters()], of_out))

    launches.clear()
    out, found = passed(x)
    assert launches["cpu.relu_backward"] == 2
    for module in mlp:
        module.register_forward_hook(lambda *_: None)  # so that each is called
    expected, of_expected = passed(x)
    assert launches["cpu.relu_backward"] == 2
    assert torch.equal(out, expected)
    for mine, theirs, of in zip(found, of_expected, ["x", *dict(mlp.named_parameters())], strict=True):
        if of.endswith("bias"):
            torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7)
        else:
            assert torch.equal(mine, theirs), of


@has_bf16_products
def test_on_a_cpu_large_layers_of_bfloat16_are_fused() -> None:
    layer, relu = Linear(256, 128), nn.ReLU()
    x = torch.randn(MIN_FUSED_PRODUCTS // layer.weight.numel(), 256)
    assert not can_fuse(x, layer, relu)
    with torch.autocast("cpu", torch.bfloat16):
        assert can_fuse(x, layer, relu)
        assert not can_fuse(x[1:], layer, relu)
    with torch.autocast("cpu", torch.float16):
        assert not can_fuse(x, layer, relu)
    assert can_fuse(x.bfloat16(), layer.bfloat16(), relu)
    with torch.no_grad():
        assert not can_fuse(x.bfloat16(), layer, relu)
    spoiled = torch.full((4, 256), math.nan, dtype=torch.bfloat16)
    assert linear_relu(spoiled, layer).isnan().all()


def not_called(*_: Tensor) -> None:
    raise AssertionError("was called")


@has_bf16_products
def test_what_is_odd_goes_through_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the layer says what is wrong, or torch does what it does."""
    monkeypatch.setattr(layers, "MIN_FUSED_PRODUCTS", 0)
    layer, relu = Linear(256, 128), nn.ReLU()
    with torch.autocast("cpu", torch.bfloat16):
        assert can_fuse(torch.randn(4, 256), layer, relu)
        assert not can_fuse(torch.randn(4, 256).double(), layer, relu)
        assert not can_fuse(torch.ones(4, 256, dtype=torch.int64), layer, relu)
        assert not can_fuse(torch.randn(4, 256), Linear(256, 128).double(), relu)
        assert not can_fuse(torch.randn(4, 256), Linear(256, 128, device="meta"), relu)
        assert not can_fuse(torch.empty(4, 256, device="meta"), Linear(256, 128, device="meta"), relu)
        replaced = Linear(256, 128)
        replaced.forward = not_called
        assert not can_fuse(torch.randn(4, 256), replaced, relu)
        without = Linear(256, 128)
        without.register_parameter("bias", None)
        assert not can_fuse(torch.randn(4, 256), without, relu)
    assert MLP(256, (256, 128)).to("meta")(torch.empty(3, 256, device="meta")).shape == (3, 128)


@has_bf16_products
def test_many_gradients_at_once_and_graphs_of_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a kernel would not see: to it a gradient that stands for many is one, and it is in no graph."""
    monkeypatch.setattr(layers, "MIN_FUSED_PRODUCTS", 0)
    torch.manual_seed(5)
    mlp, x = MLP(256, (128, 3)), torch.randn(2, 256)

    def of(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mlp(x).float()

    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(of(x).sum(), x)[0]

    one_by_one = torch.autograd.functional.jacobian(of, x)
    torch.testing.assert_close(torch.autograd.functional.jacobian(of, x, vectorize=True), one_by_one)
    x.requires_grad_()
    graph = make_fx(gradient)(x)
    other = torch.randn(2, 256, requires_grad=True)
    torch.testing.assert_close(graph(other), gradient(other))


def test_only_layers_that_nobody_watches_are_fused() -> None:
    layer, x = made()
    on_gpu = DEVICE.type == "cuda"
    assert can_fuse(x, layer, nn.ReLU()) == on_gpu
    assert not can_fuse(x, layer, nn.GELU()) and not can_fuse(x[..., :4], layer, nn.ReLU())
    watched = nn.ReLU()
    watched.register_forward_hook(lambda *_: None)
    assert not can_fuse(x, layer, watched)
