"""One test matrix, run by every backend: tests take the ``backend`` fixture and never name one.

Triton's interpreter is slow. With it the quick tests take the diagonal of a matrix, which has every value of every
parameter (a case, a dtype, a rule, a width). The other cells are marked ``full``::

    name a, b, c × dim 1, 17   →   quick: a-1, b-17, c-1; full: a-17, b-1, c-17
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from typing import Any

import pytest
import torch

from hotbed.ops import launches, select

from .cases import Kernels

if not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
    from tests.interpreter import speed_up

    speed_up()

NAMES = ("reference", "cpu", "triton")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    by_test: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        params = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if params.get("backend") == "triton":
            by_test[item.nodeid.split("[")[0]].append(item)
    for found in by_test.values():
        axes = [[_value(item, mark) for item in found] for mark in found[0].iter_markers("parametrize")]
        seen = [list(dict.fromkeys(values)) for values in axes]
        diagonal = {tuple(of[i % len(of)] for of in seen) for i in range(max(map(len, seen), default=1))}
        for i, item in enumerate(found):
            if tuple(values[i] for values in axes) not in diagonal:
                item.add_marker(pytest.mark.full)


def _value(item: pytest.Function, mark: pytest.Mark) -> tuple[int, ...]:
    """Which value of a mark ``parametrize`` a test has."""
    names = [name.strip() for name in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
    return tuple(id(item.callspec.params[name]) for name in names)


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
