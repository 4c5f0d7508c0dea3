"""Check a saved state before a sparse optimizer loads it, because it may belong to another model or be malformed."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hotbed.errors import OptimizerError


def check_form(state: Any) -> None:
    """Raise `OptimizerError` unless a state has parameter groups, and tensors by parameter number and name."""

    def is_group(value: Any) -> bool:
        if not isinstance(value, Mapping) or not isinstance(value.get("params"), list):
            return False
        tables = value.get("tables")
        return tables is None or (isinstance(tables, list | tuple) and all(isinstance(t, str) for t in tables))

    def is_state(value: Any) -> bool:
        return isinstance(value, Mapping) and all(isinstance(t, Tensor) for t in value.values())

    groups, tensors = (state.get(key) if isinstance(state, Mapping) else None for key in ("param_groups", "state"))
    if not isinstance(groups, list) or not all(is_group(group) for group in groups):
        raise OptimizerError(
            "saved optimizer: got no valid param_groups, expected a list of mappings with a list of params and names "
            "of tables. Pass the return value of state_dict()"
        )
    if not isinstance(tensors, Mapping) or not all(is_state(of) for of in tensors.values()):
        raise OptimizerError(
            "saved optimizer: got no valid state, expected tensors by number and name. Pass the return value of "
            "state_dict()"
        )


def check_step(step: Any) -> None:
    """Raise `OptimizerError` unless a saved step is a tensor of one number in range."""
    if not isinstance(step, Tensor) or step.numel() != 1 or not 0 <= float(step) <= 2**53:
        raise OptimizerError(f"saved step: got {reprlib.repr(step)}, expected a tensor of one number from 0 to 2^53")


def are_same_groups(here: Sequence[Sequence[str]], there: Sequence[Sequence[str] | None]) -> bool:
    """Return whether groups have the same tables. One side may name tables without the path of their collection."""

    def same(a: str, b: str) -> bool:
        return a == b or a.endswith(f".{b}") or b.endswith(f".{a}")

    return len(here) == len(there) and all(
        saved is not None and len(own) == len(saved) and all(map(same, own, saved))
        for own, saved in zip(here, there, strict=True)
    )
