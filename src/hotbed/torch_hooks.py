"""Exclude tables from ``state_dict``; number objects, so that graphs of ``torch.compile`` can name them; load programs.

A checkpoint stores tables by tile, as each rank has them; ``state_dict()`` would gather them whole on every rank, so
checkpoints take states `without_tables`. Batches of ids and collections have numbers, see `hotbed.embed.compile_ops`.
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
    """Leave tables and moments out of ``state_dict()`` inside; ``load_state_dict()`` then does not expect them."""
    token = _without_tables.set(True)
    try:
        yield
    finally:
        _without_tables.reset(token)


def are_tables_left_out() -> bool:
    """Say whether the caller is inside `without_tables`."""
    return _without_tables.get()


_MOST_CALLERS = 50
_numbers = count(1)
_numbered: WeakValueDictionary[int, object] = WeakValueDictionary()


def number(thing: object) -> int:
    """Number an object, so that custom operators, which take tensors and numbers, find it as long as it lives."""
    found = next(_numbers)
    _numbered[found] = thing
    return found


def find_by_number(found: int) -> object | None:
    """Return the object that has this number in this process; None if there is none any more."""
    return _numbered.get(found)


class _Memory(np.ndarray[Any, np.dtype[np.int64]]):
    """Memory that keeps an object alive."""

    kept: object = None


def number_tensor(thing: object, *, keep: bool = False) -> Tensor:
    """Number an object by a tensor ``[1]`` int64 on the CPU; no graph is compiled for its value.

    ``keep`` lets the memory of the tensor keep the object alive, also through tensors that share this memory.
    """
    memory = np.array([number(thing)], dtype=np.int64)
    if keep:
        kept = memory.view(_Memory)
        kept.kept = thing
        return torch.from_numpy(kept)
    return torch.from_numpy(memory)  # neither it nor what is kept costs a call of an operator


class Numbered:
    """Have a number as a tensor, `number_tensor`, made when first asked for: where a graph is traced, or called.

    None for what is made while a graph is traced, which knows no such. A copy, and what another process gets, has a
    number of its own.
    """

    __slots__ = ("__weakref__", "number")
    number: Tensor | None

    def __init__(self) -> None:
        if torch.compiler.is_dynamo_compiling():
            self.number = None

    def __getattr__(self, name: str) -> Tensor:
        """Make the number, which is the one attribute that may not be there yet."""
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
    """Return the number of an object to a graph that is being traced, which can read a number, but make none."""
    make_number_while_tracing(thing)
    return thing.number


def refuse_transforms() -> None:
    """Raise `SpecError` if the caller is traced by ``torch.jit.trace`` or transformed by ``torch.func``."""
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        raise SpecError(
            "torch.jit.trace cannot record lookups in tables: it would keep the ids of one batch. Use torch.export"
        )
    if is_in_functorch():
        raise SpecError(
            "torch.func (vmap, grad, jacrev, …) cannot transform lookups in tables: gradients of tables are no "
            "tensors. Look up outside of the transformed function"
        )


_warned_of: set[str] = set()


def warn_of_clipping(handles: Mapping[str, Tensor]) -> None:
    """Warn once if ``torch.nn.utils.clip_grad_norm_`` or ``clip_grad_value_`` asks for the parameters of a model.

    Torch has no hook for that, so the callers of this function are searched for it. Frozen tables have no gradient.
    """
    frame, depth = sys._getframe(1), 1
    while frame is not None and depth < _MOST_CALLERS and not _warned_of:
        if frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad":
            if not any(handle.requires_grad for handle in handles.values()):
                return
            name = frame.f_code.co_name
            _warned_of.add(name)
            warnings.warn(
                f"torch.nn.utils.{name} leaves the gradients of tables as they are, because tables are not in "
                "model.parameters(); use hotbed.clip_grad_norm_(model, max_norm), which clips all gradients together",
                stacklevel=depth + 3,
            )
        frame, depth = frame.f_back, depth + 1


def load_program(file: Path | IO[bytes]) -> ExportedProgram:
    """Load what ``torch.export.save`` wrote, without what torch 2.11 warns of that its own loader does."""
    logger = logging.getLogger(EXPORT_LOGGER)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
            return torch.export.load(file)
    finally:
        logger.setLevel(level)
