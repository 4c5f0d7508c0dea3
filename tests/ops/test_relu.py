"""The kernels that pass a gradient through ReLU give what torch defines, and its sum by column."""

from __future__ import annotations

import math

import pytest
import torch

triton_relu = pytest.importorskip("hotbed.ops.triton_relu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def found(of_out: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    gradient, total = triton_relu.relu_backward(of_out.to(DEVICE), out.to(DEVICE))
    return gradient.cpu(), total.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (300, 40), (131, 200), (9000, 3)], ids=str)
def test_gradient_and_sum(shape, dtype):
    draw = torch.Generator().manual_seed(5)
    of_out = torch.randn(*shape, generator=draw).to(dtype)
    out = torch.randn(*shape, generator=draw).relu().to(dtype)
    gradient, total = found(of_out, out)
    expected = torch.ops.aten.threshold_backward(of_out, out, 0)
    assert torch.equal(gradient, expected)
    assert total.dtype == dtype and total.shape == shape[1:]
    exact = expected.double().sum(0)
    room = {torch.float32: 1e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    assert ((total.double() - exact).abs() <= room * exact.abs() + 1e-6 * expected.double().abs().sum(0)).all()


def test_what_is_not_a_number_goes_on():
    out = torch.tensor([[math.nan, 0.0, -0.0, 1.0, math.inf]])
    of_out = torch.tensor([[2.0, math.nan, 3.0, math.nan, 4.0]])
    gradient, total = found(of_out, out)
    expected = torch.ops.aten.threshold_backward(of_out, out, 0)
    assert torch.equal(gradient.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(total.nan_to_num(7.0), expected[0].nan_to_num(7.0))


def test_no_rows_have_no_gradient():
    gradient, total = found(torch.zeros(0, 3), torch.zeros(0, 3))
    assert gradient.shape == (0, 3) and total.tolist() == [0.0, 0.0, 0.0]


def test_other_strides_change_nothing():
    draw = torch.Generator().manual_seed(6)
    of_out, out = torch.randn(40, 30, generator=draw), torch.randn(40, 30, generator=draw).relu()
    expected = found(of_out, out)
    other = found(of_out.t().contiguous().t(), out.t().contiguous().t())
    assert all(map(torch.equal, expected, other))
    wider = torch.cat([of_out, torch.full((40, 7), math.nan)], 1)[:, :30]
    assert all(map(torch.equal, expected, found(wider, out)))
