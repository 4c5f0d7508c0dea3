"""`without_tables`: states of modules and optimizers without embedding tables and their moments.

A checkpoint holds tables by tile, as each rank has them; ``state_dict()`` would gather them whole on every rank.

`untraced`: a decorator for what ``torch.compile`` is to leave alone, because Numba or Triton compile it already.
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
    """Let ``state_dict()`` leave out tables and moments inside, and ``load_state_dict()`` not expect them."""
    token = _without_tables.set(True)
    try:
        yield
    finally:
        _without_tables.reset(token)


def are_tables_left_out() -> bool:
    """Whether the caller is inside `without_tables`."""
    return _without_tables.get()


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
