"""Which tensors a kernel writes is read from its source, helpers included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hotbed.ops import triton_dense, triton_group, triton_rules, triton_update
from hotbed.ops.triton_group import RunList
from hotbed.ops.triton_rows import RowPointers
from hotbed.ops.triton_rules import Target
from hotbed.optim import COMMON
from tests.census.kernel_writes import written


def names(given: dict[str, Any], kernel: Any, args: list[Any], **options: Any) -> set[str]:
    """Names of the tensors that a launch writes."""
    found = written(kernel, args, options)
    return {name for name, tensor in given.items() if any(tensor is t for t in found)}


def tensors(*wanted: str) -> dict[str, Tensor]:
    return {name: torch.zeros(4) for name in wanted}


def test_a_store_by_an_address_that_was_loaded_writes_what_it_begins_at() -> None:
    given = tensors("out", "order", "number", "values")
    assert names(given, triton_group._spread_kernel, [*given.values(), 4], BLOCK=64) == {"out"}


@pytest.mark.parametrize("scaled", [False, True])
def test_branches_that_constants_decide_are_followed_alone(scaled: bool) -> None:
    given, others = tensors(*RunList._fields), tensors("rows", "order", "bags", "scale", "entries")
    args = [RunList(**given), *others.values(), 1, 0, 4, -1]
    found = names(given, triton_group._list_kernel, args, RUN=32, BLOCK=64, SCALED=scaled)
    assert found == {"slots", "tables", "partials", "first_bags", "bags", "bounds"} | ({"scale"} if scaled else set())
    assert names(others, triton_group._list_kernel, args, RUN=32, BLOCK=64, SCALED=scaled) == set()


@pytest.mark.parametrize(
    ("rule", "kinds", "moments"),
    [("sgd", (0, 0), set[str]()), ("rowwise_adagrad", (1, 0), {"moment0"}), ("adam", (2, 2), {"moment0", "moment1"})],
)
@pytest.mark.parametrize("single", [True, False])
def test_what_helpers_store_is_seen(rule: str, kinds: tuple[int, int], moments: set[str], single: bool) -> None:
    rows, given = tensors(*RowPointers._fields), tensors(*Target._fields[1:])
    given = {**given, **{f"moment{i}": given["hyper"] for i, kind in enumerate(kinds) if not kind}}  # as without any
    runs, partials = RunList(**tensors(*RunList._fields)), torch.zeros(4)
    args = [Target(RowPointers(**rows), **given), runs, torch.zeros(4), partials]
    options = {
        "RULE": triton_rules.RULES[rule],
        "USES": (False,) * (1 + len(COMMON)),
        "HYPER": 8,
        "KINDS": kinds,
        "HAS_WIDE": True,
    }
    options |= {"D": 4, "BLOCK_D": 16, "R": 8, "RUN": 32, "SCALED": False, "SINGLE": single}
    kernel = triton_update._runs_kernel
    assert names(given, kernel, args, **options) == moments
    assert "wide" in names(rows, kernel, args, **options)
    assert "tables" not in names(rows, kernel, args, **options)
    assert names({"partials": partials}, kernel, args, **options) == (set() if single else {"partials"})


def test_counts_in_place_are_read_and_written() -> None:
    given = tensors("counts", "trained", "gate")
    assert names(given, triton_dense._count_steps_kernel, [*given.values(), 4], BLOCK=64) == {"counts"}
