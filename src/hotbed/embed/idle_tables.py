"""Refuse the step of an optimizer while tables that backward has reached have no optimizer.

``torch.optim.Adam(model.parameters())`` trains everything but the tables, because tables are no parameters. Their
gradients would be lost in every batch, and the model would look trained. So backward notes which collections lose a
gradient, and a hook that torch calls before the ``step`` of every optimizer (``register_optimizer_step_pre_hook``)
raises if the optimizer has parameters of the same model. If ``step`` is given a closure, backward runs inside the step
and raises there. Neither changes anything in a model whose tables have an optimizer or are frozen.

A loop that updates parameters without an optimizer is not noticed; `TableModule` warns after some batches.
"""

from __future__ import annotations

import gc
import weakref
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hotbed.errors import OptimizerError
from hotbed.optim import SparseOptimizer

if TYPE_CHECKING:
    from hotbed.embed.gradients import TableUpdater
    from hotbed.embed.tables import TableModule

_reached: list[Updaters] = []
_stepping: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
_SAME_NAME = ("SGD", "Adagrad", "Adam", "AdamW")
"""Optimizers of torch that `hotbed.optim` has by the same name."""


class Updaters(weakref.WeakSet["TableUpdater"]):
    """The updaters of one collection's optimizers.

    Parameters
    ----------
    tables
        The collection.
    """

    def __init__(self, tables: TableModule) -> None:
        super().__init__()
        self._tables = weakref.ref(tables)
        self._is_noted = False
        self._others = weakref.WeakSet[Optimizer]()
        """Optimizers that train other models."""
        _watch_optimizers()

    def reach(self) -> None:
        """Note that backward loses the gradient of tables without an optimizer; raise if that happens inside a step."""
        tables = self._tables()
        if self._is_noted or tables is None or tables.have_parameters or not tables.idle_tables():
            return
        for optimizer in list(_stepping.values()):
            self.refuse_idle(optimizer)
        self._is_noted = True
        _reached.append(self)

    def step(self, optimizer: Optimizer) -> None:
        """Forget that a gradient was lost; raise if the optimizer is to train the rest of the model."""
        self.refuse_idle(optimizer)
        self._is_noted = False

    def refuse_idle(self, optimizer: Optimizer) -> None:
        """Raise `OptimizerError` if any of these tables is trained and has no optimizer."""
        tables = self._tables()
        if tables is None or tables.have_parameters or optimizer in self._others:
            return
        if not (idle := tables.idle_tables()):
            return
        if not _may_train(optimizer, tables):
            self._others.add(optimizer)
            return
        raise OptimizerError(_message(optimizer, idle))


def _may_train(optimizer: Optimizer, tables: nn.Module) -> bool:
    """Return False if the tables' models have parameters and the optimizer has none of them.

    No module knows what contains it, so the containing modules are found among all objects; once per optimizer.
    """
    parents: dict[int, list[nn.Module]] = defaultdict(list)
    for module in [o for o in gc.get_objects() if issubclass(type(o), nn.Module)]:  # isinstance() would call properties
        for child in module._modules.values():
            parents[id(child)].append(module)
    found, unseen = {id(tables): tables}, [tables]
    while unseen:
        new = {id(m): m for m in parents[id(unseen.pop())] if id(m) not in found}
        found |= new
        unseen += new.values()
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    others = {id(p) for module in found.values() for p in module.parameters()}
    return not others or not own.isdisjoint(others)


def _message(optimizer: Optimizer, idle: Sequence[str]) -> str:
    name, lr = type(optimizer).__name__, optimizer.param_groups[0].get("lr", 0.01)
    known = name if name in _SAME_NAME else "RowWiseAdagrad"
    shown = ", ".join(f"'{table}'" for table in idle[:3]) + ", …" * (len(idle) > 3)
    return (
        f"the gradient of {len(idle)} embedding tables ({shown}) would be lost: got {name}, which has none of them, "
        "expected an optimizer of hotbed, because tables are not in model.parameters(). Add these two lines, the first "
        "where optimizers are made and the second after backward; or freeze the tables: requires_grad_(False)\n"
        f"    tables = hotbed.optim.{known}(model, lr={float(lr):g})\n"
        "    tables.step(); tables.zero_grad()"
    )


@cache
def _watch_optimizers() -> None:
    """Register the hooks, when the first tables are made."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    if torch.compiler.is_compiling() or isinstance(
        optimizer, SparseOptimizer
    ):  # steps of tables may be of other models
        return
    while _reached:
        _reached[-1].step(optimizer)  # if it raises, the next step does, too
        _reached.pop()
    _stepping[id(optimizer)] = optimizer


def _after_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    if not torch.compiler.is_compiling():
        _stepping.pop(id(optimizer), None)
