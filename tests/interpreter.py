"""Make Triton's interpreter faster: it repeats work at every call, which changes no result.

Each call of a ``@triton.jit`` function inside a kernel looks through all names of ``triton.language`` and replaces
those that are not replaced yet, although the launch has replaced all of them.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Let the interpreter replace the names of ``triton.language`` once per launch."""
    replace: Any = interpreter._patch_lang
    if isinstance(replace, FunctionType) and replace.__module__ == interpreter.__name__:
        interpreter._patch_lang = lambda function: replace(function) if _is_missing(function) else None


def _is_missing(function: FunctionType) -> bool:
    """Return whether a module of ``triton.language`` that a function uses has its own functions."""
    return any(tl.core.is_builtin(module.load) for module in _modules_of(function))


@cache
def _modules_of(function: FunctionType) -> list[ModuleType]:
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]
