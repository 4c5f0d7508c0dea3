"""Raise an error in the step of an optimizer if backward has reached tables without an optimizer.

``torch.optim.Adam(model.parameters())`` does not train tables, because tables are not parameters. Their gradients would
be lost in every batch, and the model would look trained. So backward records the collections that lose a gradient. A
hook before the ``step`` of every torch optimizer (``register_optimizer_step_pre_hook``) raises an error if the
optimizer has parameters of the same model. If ``step`` has a closure, backward runs inside the step and raises the
error there. Models with an optimizer for their tables, or with frozen tables, are not affected.

A loop that updates parameters without an optimizer is not detected. `TableModule` warns after some batches.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotbed.errors import OptimizerError
from hotbed.optim import SparseOptimizer

_reached: list[IdleTables] = []
_stepping: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
_SAME_NAME = ("SGD", "Adagrad", "Adam", "AdamW")
"""Optimizers of torch that `hotbed.optim` has by the same name."""


class IdleTables:
    """Tables of one collection without an optimizer, and a record of whether backward has lost a gradient."""

    def __init__(self, tables: nn.Module, idle: Callable[[], list[str]]) -> None:
        self._tables, self._list = weakref.ref(tables), weakref.WeakMethod(idle)
        self.is_noted = False
        self.may_be_idle = False
        """Whether tables without an optimizer are allowed, because a trainer has all optimizers of the model."""
        self._refused: weakref.ref[Optimizer] | None = None
        """The optimizer that raised the error since the last backward, if any."""
        self._others = weakref.WeakSet[Optimizer]()
        """Optimizers that train other models."""
        _watch_optimizers()

    def reach(self) -> None:
        """Record that backward loses gradients of tables without an optimizer. Raise the error inside of a step."""
        if not (idle := self._idle()):
            return
        for optimizer in list(_stepping.values()):
            if self._is_trained_by(optimizer, _Parents()):
                raise OptimizerError(_message(optimizer, idle))
        self._refused = None
        if not self.is_noted:
            self.is_noted = True
            _reached.append(self)

    def lost(self) -> list[str]:
        """List the tables without an optimizer if backward has reached their collection since the last step."""
        return self._idle() if self.is_noted else []

    def step(self, optimizer: Optimizer, parents: _Parents) -> list[str]:
        """Return the tables that would stay untrained in the optimizer's model. If none, reset the record."""
        if optimizer in self._others:
            return []
        if not (idle := self._idle()):
            self.is_noted = False
            return []
        # After a refusal, only the refused optimizer is refused again. Other optimizers may train a corrected model.
        if self._refused is not None and self._refused() is not optimizer:
            return []
        if not self._is_trained_by(optimizer, parents):
            return []
        self._refused = weakref.ref(optimizer)
        return idle

    def _idle(self) -> list[str]:
        """List the collection's tables that are trained and have no optimizer."""
        idle = self._list()
        return [] if idle is None or self.may_be_idle else idle()

    def _is_trained_by(self, optimizer: Optimizer, parents: _Parents) -> bool:
        """Return whether an optimizer trains the model of these tables; remember it if it does not."""
        tables = self._tables()
        if tables is None or optimizer in self._others:
            return False
        if may := _may_train(optimizer, tables, parents):
            return may
        self._others.add(optimizer)
        return False


class _Parents:
    """Finds the parent modules of a module. The first search scans all objects of the process.

    Modules have no references to their parents, so the garbage collector's objects are searched.
    """

    @cached_property
    def _found(self) -> dict[int, list[nn.Module]]:
        found: dict[int, list[nn.Module]] = defaultdict(list)
        for module in [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]:  # isinstance() calls properties
            for child in module.__dict__.get("_modules", {}).values():  # missing before nn.Module.__init__
                found[id(child)].append(module)
        return found

    def of(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules that contain a module as a direct child."""
        return self._found.get(id(module), [])


def _may_train(optimizer: Optimizer, tables: nn.Module, parents: _Parents) -> bool:
    """Return False if the tables' models have parameters and the optimizer has none of them."""
    found, unseen = {id(tables): tables}, [tables]
    while unseen:
        new = {id(m): m for m in parents.of(unseen.pop()) if id(m) not in found}
        found |= new
        unseen += new.values()
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = {id(p) for module in found.values() for p in module.parameters()}
    return not others or not own.isdisjoint(others)


def _message(optimizer: Optimizer, idle: Sequence[str]) -> str:
    name, lr = type(optimizer).__name__, optimizer.param_groups[0].get("lr", 0.01)
    return lost_message(idle, f"{name}, which has none of them", name if name in _SAME_NAME else "RowWiseAdagrad", lr)


def lost_message(idle: Sequence[str], got: str, known: str, lr: float) -> str:
    """Return the error message for gradients that no optimizer would use."""
    shown = ", ".join(f"'{table}'" for table in idle[:3]) + ", …" * (len(idle) > 3)
    return (
        f"the gradient of {len(idle)} embedding table{'s' * (len(idle) > 1)} ({shown}) would be lost: got {got}, "
        "expected an optimizer of hotbed, because tables are not in model.parameters(). Add the first of these two "
        "lines to the creation of optimizers and the second after backward, or freeze the tables: "
        "requires_grad_(False)\n"
        f"    tables = hotbed.optim.{known}(model, lr={float(lr):g})\n"
        "    tables.step(); tables.zero_grad()"
    )


@cache
def _watch_optimizers() -> None:
    """Register the hooks when the first tables are created."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    # A SparseOptimizer may step for another model, so its step proves nothing about these tables.
    if torch.compiler.is_compiling() or isinstance(optimizer, SparseOptimizer):
        return
    parents = _Parents()
    idle = [table for note in _reached for table in note.step(optimizer, parents)]
    _reached[:] = [note for note in _reached if note.is_noted]
    if idle:
        raise OptimizerError(_message(optimizer, idle))
    _stepping[id(optimizer)] = optimizer


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    if not torch.compiler.is_compiling():
        _stepping.pop(id(optimizer), None)
