"""One test matrix, run by every backend: tests take the ``backend`` fixture and never name one."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from hotbed.ops import launches, select

from .cases import Kernels

NAMES = ("reference", "cpu", "triton")


@pytest.fixture(scope="module", params=NAMES)
def backend(request: pytest.FixtureRequest) -> Kernels:
    name: Any = request.param
    if name == "triton" and importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed")
    device = torch.device("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")
    return Kernels(name, device, select(device, name))


@pytest.fixture(autouse=True)
def _asked_backend_ran(request: pytest.FixtureRequest):
    """Every test of the matrix must have launched operations of its backend, and of the oracle at most beside it."""
    before = launches.copy()
    yield
    if "backend" in request.fixturenames:
        ran = {key.split(".")[0] for key in launches - before}
        name = request.getfixturevalue("backend").name
        assert name in ran and ran <= {name, "reference"}, f"asked for {name}, ran {ran}"
