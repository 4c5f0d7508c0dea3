"""A layer and its ReLU with one pass over the gradient give what torch's two modules give."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from hotbed.nn.fused_relu import can_fuse, linear_relu
from hotbed.nn.linear import Linear
from hotbed.ops import launches

pytest.importorskip("triton")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def made(outputs: int = 9) -> tuple[Linear, Tensor]:
    torch.manual_seed(3)
    return Linear(5, outputs).to(DEVICE), torch.randn(4, 6, 5, device=DEVICE, requires_grad=True)


def test_values_and_gradients_are_those_of_two_modules() -> None:
    layer, x = made()
    of_out = torch.randn(4, 6, 9, device=DEVICE)
    expected = torch.relu(layer(x))
    of_expected = torch.autograd.grad(expected, [x, layer.weight, layer.bias], of_out)
    launches.clear()
    out = linear_relu(x, layer)
    found = torch.autograd.grad(out, [x, layer.weight, layer.bias], of_out)
    assert launches["triton.relu_backward"] == 1
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(found, of_expected, strict=True):
        torch.testing.assert_close(mine, theirs)


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


def test_gradients_have_gradients() -> None:
    layer, x = made()
    both: list[Tensor] = []
    for out in (torch.relu(layer(x)), linear_relu(x, layer)):
        (of_x,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        both.append(torch.autograd.grad(of_x.square().sum(), layer.weight)[0])
    torch.testing.assert_close(*both)


def test_only_gpus_layers_that_nobody_watches_are_fused() -> None:
    layer, x = made()
    on_gpu = DEVICE.type == "cuda"
    assert can_fuse(x, layer, nn.ReLU()) == on_gpu
    assert not can_fuse(x, layer, nn.GELU()) and not can_fuse(x[..., :4], layer, nn.ReLU())
    watched = nn.ReLU()
    watched.register_forward_hook(lambda *_: None)
    assert not can_fuse(x, layer, watched)
