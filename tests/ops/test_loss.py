"""The kernels of the binary cross-entropy give what torch defines, and its gradient."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

triton_dense = pytest.importorskip("hotbed.ops.triton_dense")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def found_and_expected(logits, labels, weights=None):
    """Sum and gradient, of the kernels and in float64."""
    given = (None if t is None else t.to(DEVICE) for t in (logits, labels, weights))
    total, gradient = triton_dense.cross_entropy(*given)
    leaf = logits.double().requires_grad_()
    by_logit = None if weights is None else weights.double()
    expected = F.binary_cross_entropy_with_logits(leaf, labels.double(), by_logit, reduction="sum")
    return total.cpu(), gradient.cpu(), expected.detach(), torch.autograd.grad(expected, leaf)[0]


@pytest.mark.parametrize("weighted", ["all 1", "by sample", "by label"])
@pytest.mark.parametrize("shape", [(5, 1), (700, 3), (1024, 1), (2100, 1)])
def test_sum_and_gradient(shape, weighted):
    draw = torch.Generator().manual_seed(3)
    logits, labels = 8 * torch.randn(*shape, generator=draw), torch.rand(*shape, generator=draw).round()
    weights = None
    if weighted != "all 1":
        weights = torch.rand(shape[0], 1 if weighted == "by sample" else shape[1], generator=draw)
    total, gradient, expected, of_logits = found_and_expected(logits, labels, weights)
    assert total.dtype == gradient.dtype == torch.float32 and total.shape == ()
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), of_logits, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("logit", [-200.0, -40.0, -1e-3, 0.0, 17.0, 90.0])
def test_losses_that_are_nearly_nothing_keep_their_digits(logit):
    total, gradient, expected, of_logits = found_and_expected(torch.full((1, 1), logit), torch.zeros(1, 1))
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-38)
    torch.testing.assert_close(gradient.double(), of_logits, rtol=1e-5, atol=1e-38)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of NumPy, in the interpreter
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_sum_is_not_finite_if_a_logit_is_not(bad):
    logits = torch.zeros(1500, 1)
    logits[1200] = bad
    for label in (0.0, 1.0):
        total, _, expected, _ = found_and_expected(logits, torch.full_like(logits, label))
        assert torch.isfinite(total) == torch.isfinite(expected)


def test_no_sample_has_no_loss():
    total, gradient, _, _ = found_and_expected(torch.zeros(0, 1), torch.zeros(0, 1))
    assert total == 0 and gradient.shape == (0, 1)


def test_sums_repeat_to_the_bit():
    logits, labels = torch.randn(3000, 1), torch.rand(3000, 1).round()
    one, other = (found_and_expected(logits, labels)[:2] for _ in range(2))
    assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
