"""Weights that are cast at once have the values, and the gradients, that autocast gives."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from hotbed.nn.layers import MLP
from hotbed.nn.linear import CastWeights


def gradients(model: nn.Module, x: Tensor, cast: AbstractContextManager[None]) -> list[Tensor | None]:
    """Output and gradients of a pass under autocast."""
    model.zero_grad()
    with cast, torch.autocast("cpu", torch.bfloat16):
        out = model(x)
    out.float().square().sum().backward()
    return [out.detach(), *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


def test_values_and_gradients_are_those_of_autocast() -> None:
    torch.manual_seed(0)
    model, x = MLP(5, [32, 16, 1], last_relu=False), torch.randn(64, 5)
    cast = CastWeights(model, torch.bfloat16)
    for _ in range(2):
        expected = gradients(model, x, nullcontext())
        found = gradients(model, x, cast.used())
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True) if a is not None and b is not None)
        assert [t is None for t in found] == [t is None for t in expected]
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        with torch.no_grad():  # as an optimizer does: the next pass sees it
            for parameter in model.parameters():
                parameter += 0.5


def test_a_frozen_layer_and_one_that_is_not_used_have_no_gradient() -> None:
    torch.manual_seed(0)
    model, unused = MLP(5, [8, 8]), MLP(5, [8])
    model[0].weight.requires_grad_(False)
    both = nn.ModuleList([model, unused])
    with CastWeights(both, torch.bfloat16).used(), torch.autocast("cpu", torch.bfloat16):
        out = model(torch.randn(4, 5))
    out.float().sum().backward()
    assert model[0].weight.grad is None
    assert model[0].bias.grad is not None
    assert all(parameter.grad is None for parameter in unused.parameters())


def test_outside_of_autocast_and_afterwards_weights_are_as_they_were() -> None:
    model, x = MLP(5, [8]), torch.randn(4, 5)
    expected = model(x)
    with CastWeights(model, torch.bfloat16).used():
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)


def test_layers_that_share_parameters_are_left_to_autocast() -> None:
    layer = MLP(5, [5])
    model = nn.Sequential(layer, nn.Sequential(MLP(5, [5])))
    model[1][0][0].weight = layer[0].weight
    with CastWeights(model, torch.bfloat16).used():
        assert layer[0].narrow is None
        assert model[1][0][0].narrow is None
