"""Promise: momentum-scaled row-wise AdaGrad is what its options say it is equal to."""

import copy

import pytest
import torch

from hotbed.optim import RowWiseAdagrad
from tests.optim_cases import Tower, batch, loss, state, train

BATCHES = [batch(i) for i in range(6)]


def trained(**options: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and moments."""
    model = Tower()
    optimizer = RowWiseAdagrad(model, **options)
    train(model, optimizer, BATCHES)
    return model.values(), torch.cat([of_table["sum_of_squares"] for of_table in state(optimizer)])


@pytest.mark.parametrize("options", [{"moment_scale": 1}, {"moment_scale": 1.0, "weight_decay": 0.1}])
def test_a_scale_of_1_changes_no_bit(options):
    plain = {key: value for key, value in options.items() if key != "moment_scale"}
    for found, expected in zip(trained(lr=0.3, **options), trained(lr=0.3, **plain), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("scale", [2.0, 8.0])
def test_a_scale_is_a_longer_step_with_a_larger_eps(scale):
    found = trained(lr=0.1, moment_scale=scale, eps=1e-3, eps_inside=True)
    expected = trained(lr=0.1 * scale**0.5, eps=scale * 1e-3, eps_inside=True)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(found[0], trained(lr=0.1, eps=1e-3, eps_inside=True)[0], atol=1e-3)


@pytest.mark.parametrize("delayed", [True, False])
def test_only_with_a_delayed_moment_the_average_of_replicas_is_a_step_with_their_mean_gradient(delayed):
    options = {"lr": 0.3, "delayed_moment": delayed, "initial_accumulator": 0.1, "eps_inside": True}
    together = Tower()
    apart = [copy.deepcopy(together) for _ in range(4)]
    optimizer = RowWiseAdagrad(together, **options)
    torch.stack([loss(together, ids) for ids in BATCHES[:4]]).mean().backward()
    optimizer.step()
    for model, ids in zip(apart, BATCHES[:4], strict=True):
        train(model, RowWiseAdagrad(model, **options), [ids])
    average = torch.stack([model.values() for model in apart]).mean(0)
    assert torch.allclose(average, together.values(), rtol=1e-5, atol=1e-6) == delayed
