"""Check what a sparse optimizer is to load: a saved state may come from another model, or from anywhere."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from hotbed.errors import OptimizerError


def check_form(state: Any) -> None:
    """Raise `OptimizerError` unless a state has parameter groups, and tensors by parameter and name."""

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
            "the saved optimizer has no param_groups that are a list of mappings with a list of params and names of "
            "tables; give what state_dict() returned"
        )
    if not isinstance(tensors, Mapping) or not all(is_state(of) for of in tensors.values()):
        raise OptimizerError(
            "the saved optimizer has no state that is tensors by number and name; give what state_dict() returned"
        )


def check_step(step: Any) -> None:
    """Raise `OptimizerError` unless a saved step is one."""
    if not isinstance(step, Tensor) or step.numel() != 1 or not 0 <= float(step) <= 2**53:
        raise OptimizerError(f"the saved step is {reprlib.repr(step)}, must be a tensor of one number from 0 to 2^53")


def are_same_groups(here: Sequence[Sequence[str]], there: Sequence[Sequence[str] | None]) -> bool:
    """Whether groups have the same tables, which one side may name without the path of its collections."""

    def same(a: str, b: str) -> bool:
        return a == b or a.endswith(f".{b}") or b.endswith(f".{a}")

    return len(here) == len(there) and all(
        saved is not None and len(own) == len(saved) and all(map(same, own, saved))
        for own, saved in zip(here, there, strict=True)
    )
