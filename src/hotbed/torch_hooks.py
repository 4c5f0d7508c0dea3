"""Exclude tables from ``state_dict`` and kernels from ``torch.compile``.

A checkpoint stores tables by tile, as each rank has them; ``state_dict()`` would gather them whole on every rank, so
checkpoints take states `without_tables`. Functions that call Numba or Triton kernels are `untraced`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ParamSpec, TypeVar, cast

import torch

_without_tables = ContextVar("without_tables", default=False)


@contextmanager
def without_tables() -> Generator[None]:
    """Leave tables and moments out of ``state_dict()`` inside; ``load_state_dict()`` then does not expect them."""
    token = _without_tables.set(True)
    try:
        yield
    finally:
        _without_tables.reset(token)


def are_tables_left_out() -> bool:
    """Say whether the caller is inside `without_tables`."""
    return _without_tables.get()


P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Keep a function from being traced by ``torch.compile``.

    ``torch.compiler.disable`` does that, too, but imports the whole compiler, two seconds of every ``import hotbed``.
    The form that torch's own optimizers use imports it at the first call; where torch has it no more, the public one
    serves.
    """
    disable = getattr(torch, "_disable_dynamo", torch.compiler.disable)
    return cast("Callable[P, R]", disable(function))
