"""Adapt objects to torch: exclude tables from ``state_dict``, number objects for ``torch.compile``, and load programs.

A checkpoint stores the tiles of each rank, but ``state_dict()`` would gather whole tables on every rank. Therefore
checkpoints get states inside `without_tables`. Graphs of ``torch.compile`` refer to batches of ids and to collections
by number (`hotbed.embed.compile_ops`).
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from pathlib import Path
from typing import IO, Any, cast
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor
from torch.export import ExportedProgram

from hotbed.errors import SpecError
from hotbed.torch_private import EXPORT_LOGGER, is_in_functorch, make_number_while_tracing

_without_tables = ContextVar("without_tables", default=False)


@contextmanager
def without_tables() -> Generator[None]:
    """In the body, ``state_dict()`` excludes tables and moments, and ``load_state_dict()`` does not expect them."""
    token = _without_tables.set(True)
    try:
        yield
    finally:
        _without_tables.reset(token)


def are_tables_left_out() -> bool:
    """Return whether the caller is inside `without_tables`."""
    return _without_tables.get()


_MOST_CALLERS = 50
_numbers = count(1)
_numbered: WeakValueDictionary[int, object] = WeakValueDictionary()


def number(thing: object) -> int:
    """Number an object, so that custom operators, which accept only tensors and numbers, can find it."""
    found = next(_numbers)
    _numbered[found] = thing
    return found


def find_by_number(found: int) -> object | None:
    """Return the object with a number in this process. None if the object no longer exists."""
    return _numbered.get(found)


class _Memory(np.ndarray[Any, np.dtype[np.int64]]):
    """An array that keeps an object alive."""

    kept: object = None


def number_tensor(thing: object, *, keep: bool = False) -> Tensor:
    """Return a new number of an object as a CPU tensor ``[1]`` int64, so that no graph is specialized for its value.

    With ``keep``, the tensor's memory keeps the object alive, also through other tensors that share this memory.
    """
    memory = np.array([number(thing)], dtype=np.int64)
    if keep:
        kept = memory.view(_Memory)
        kept.kept = thing
        return torch.from_numpy(kept)
    return torch.from_numpy(memory)  # `from_numpy` is faster than an operator of torch


class Numbered:
    """Base class of objects with a number (`number_tensor`), which is created on first use.

    The number is None for objects that are created while a graph is traced. Copies and unpickled objects get new
    numbers.
    """

    __slots__ = ("__weakref__", "number")
    number: Tensor | None

    def __init__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.number = None

    def __getattr__(self, name: str) -> Tensor:
        """Create the number, which is the only attribute that may not exist yet."""
        if name != "number":
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        self.number = found = number_tensor(self)
        return found

    def __getstate__(self) -> dict[str, object]:
        _, slots = cast("tuple[None, dict[str, object]]", super().__getstate__())
        return {name: value for name, value in slots.items() if name != "number"}

    def __setstate__(self, state: dict[str, object]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


def traced_number(thing: Numbered) -> Tensor | None:
    """Return the number of an object while a graph is traced. A graph can read a number, but cannot create one."""
    make_number_while_tracing(thing)
    return thing.number


def refuse_transforms() -> None:
    """Raise `SpecError` if the caller is traced by ``torch.jit.trace`` or transformed by ``torch.func``."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise SpecError(
            "torch.jit.trace cannot record lookups in tables, because it would keep the ids of one batch. Use "
            "torch.export"
        )
    if is_in_functorch():
        raise SpecError(
            "torch.func (vmap, grad, jacrev, …) cannot transform lookups in tables, because their gradients are not "
            "tensors. Look up outside of the transformed function"
        )


_warned_of: set[str] = set()


def warn_of_clipping(handles: Mapping[str, Tensor]) -> None:
    """Warn once if ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` requests the parameters of a model.

    torch has no hook for this, so this function searches its call stack. Frozen tables have no gradient.
    """
    frame, depth = sys._getframe(1), 1
    while frame is not None and depth < _MOST_CALLERS and not _warned_of:
        if frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            if not any(handle.requires_grad for handle in handles.values()):
                return
            name = frame.f_code.co_name
            _warned_of.add(name)
            warnings.warn(
                f"torch.nn.utils.{name} does not clip the gradients of tables, because tables are not in "
                "model.parameters(). Use hotbed.clip_grad_norm_(model, max_norm), which clips all gradients together",
                stacklevel=depth + 3,
            )
        frame, depth = frame.f_back, depth + 1


def load_program(file: Path | IO[bytes]) -> ExportedProgram:
    """Load a file of ``torch.export.save``, without the warnings of torch 2.11 about its own loader."""
    logger = logging.getLogger(EXPORT_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.export.load(file)
    finally:
        logger.setLevel(level)
