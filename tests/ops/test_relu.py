"""The kernels that pass a gradient through ReLU give what torch defines, and its sum by column."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch

from hotbed.ops import cpu_dense, launches

Found = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["cpu", "triton"])
def found(request: pytest.FixtureRequest) -> Iterator[Found]:
    kernels = pytest.importorskip(f"hotbed.ops.{request.param}_dense")
    device = torch.device("cuda" if request.param == "triton" and torch.cuda.is_available() else "cpu")

    def relu_backward(of_out: torch.Tensor, out: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gradient, total = kernels.relu_backward(of_out.to(device), out.to(device))
        return gradient.cpu(), total.cpu()

    launches.clear()
    yield relu_backward
    assert set(launches) == {f"{request.param}.relu_backward"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (300, 40), (131, 200), (9000, 3)], ids=str)
def test_gradient_and_sum(found, shape, dtype):
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


def test_what_is_not_a_number_goes_on(found):
    out = torch.tensor([[math.nan, 0.0, -0.0, 1.0, math.inf]])
    of_out = torch.tensor([[2.0, math.nan, 3.0, math.nan, 4.0]])
    gradient, total = found(of_out, out)
    expected = torch.ops.aten.threshold_backward(of_out, out, 0)
    assert torch.equal(gradient.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(total.nan_to_num(7.0), expected[0].nan_to_num(7.0))


def test_no_rows_have_no_gradient(found):
    gradient, total = found(torch.zeros(0, 3), torch.zeros(0, 3))
    assert gradient.shape == (0, 3) and total.tolist() == [0.0, 0.0, 0.0]


def test_other_strides_change_nothing(found):
    draw = torch.Generator().manual_seed(6)
    of_out, out = torch.randn(40, 30, generator=draw), torch.randn(40, 30, generator=draw).relu()
    expected = found(of_out, out)
    other = found(of_out.t().contiguous().t(), out.t().contiguous().t())
    assert all(map(torch.equal, expected, other))
    wider = torch.cat([of_out, torch.full((40, 7), math.nan)], 1)[:, :30]
    assert all(map(torch.equal, expected, found(wider, out)))


def test_bits_of_the_cpu_do_not_depend_on_threads():
    draw = torch.Generator().manual_seed(7)
    of_out = torch.randn(4096, 96, generator=draw).bfloat16()
    out = torch.randn(4096, 96, generator=draw).relu().bfloat16()
    before, results = torch.get_num_threads(), list[torch.Tensor]()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(cpu_dense.relu_backward(of_out, out)[1])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
