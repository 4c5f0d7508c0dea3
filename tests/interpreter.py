"""Make Triton's interpreter faster without changing its results.

The interpreter replaces the functions of ``triton.language`` by its own when a kernel is launched. It searches all
their names again at each call of a ``@triton.jit`` function inside the kernel, although none is left to replace.
"""

from __future__ import annotations

from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def speed_up() -> None:
    """Let the interpreter replace the functions of ``triton.language`` once per launch.

    Nothing changes if this version of Triton has no such function, or if it is already replaced.
    """
    patch: Any = getattr(interpreter, "_patch_lang", None)
    if isinstance(patch, FunctionType) and patch.__module__ == interpreter.__name__:
        interpreter._patch_lang = lambda function: patch(function) if _is_unpatched(function) else None


def _is_unpatched(function: FunctionType) -> bool:
    """Return whether a function uses a module of ``triton.language`` that still has Triton's own functions."""
    return any(tl.core.is_builtin(module.load) for module in _modules_of(function))


@cache
def _modules_of(function: FunctionType) -> list[ModuleType]:
    return [value for value in function.__globals__.values() if value is tl or value is tl.core]
