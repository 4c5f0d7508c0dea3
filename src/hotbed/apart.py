"""`tables_apart`: states of modules and optimizers without embedding tables and their moments.

A checkpoint holds tables by tile, as each rank has them; ``state_dict()`` would gather them whole on every rank.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar

_apart = ContextVar("tables_apart", default=False)


@contextmanager
def tables_apart() -> Generator[None]:
    """Let ``state_dict()`` leave out tables and moments inside, and ``load_state_dict()`` not expect them."""
    token = _apart.set(True)
    try:
        yield
    finally:
        _apart.reset(token)


def are_tables_apart() -> bool:
    """Whether the caller is inside `tables_apart`."""
    return _apart.get()
