"""`untraced`: a decorator for what ``torch.compile`` is to leave alone, because Numba or Triton compile it already."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function as it is, also under ``torch.compile``.

    What ``torch.compiler.disable`` does; but that imports the whole compiler, two seconds of every ``import hotbed``.
    The form that torch's own optimizers use imports it at the first call; where torch has it no more, the public one
    serves.
    """
    disable = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    return cast("Callable[P, R]", disable(function))
