"""Train tables in backward, and combine optimizers, as TorchRec does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn

from hotbed import embed, optim
from hotbed.errors import OptimizerError, SpecError, did_you_mean

_BY_NAME: dict[str, type[optim.SparseOptimizer]] = {
    name: getattr(optim, name)
    for name in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "PartialRowWiseAdam", "LAMB")
}


class TableHandle(nn.Parameter):
    """Stand for a table among ``parameters()``: no values, no gradient, and the optimizer that was applied to it.

    Parameters
    ----------
    rows, table
        The collection, and the table's name there.
    """

    rows: embed.EmbeddingCollection
    table: str
    applied: tuple[type[optim.SparseOptimizer], dict[str, Any]] | None
    is_used: bool
    """Whether the optimizer has been made."""

    @classmethod
    def of(cls, rows: embed.EmbeddingCollection, table: str) -> Self:
        """Make the handle of a table."""
        handle = torch.Tensor._make_subclass(cls, torch.empty(0, device="cpu"), False)
        handle.rows, handle.table, handle.applied, handle.is_used = rows, table, None, False
        return handle

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _handle, (self.rows, self.table, self.applied)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableHandle:
        from copy import deepcopy

        memo[id(self)] = made = _handle(deepcopy(self.rows, memo), self.table, self.applied)
        return made


def _handle(
    rows: embed.EmbeddingCollection, table: str, applied: tuple[type[optim.SparseOptimizer], dict[str, Any]] | None
) -> TableHandle:
    handle = TableHandle.of(rows, table)
    handle.applied = applied
    return handle


def apply_optimizer_in_backward(
    optimizer_class: type, params: Iterable[nn.Parameter], optimizer_kwargs: Mapping[str, Any]
) -> None:
    """Have tables trained at the end of each backward; call it before the model is distributed.

    Parameters
    ----------
    optimizer_class
        One of hotbed, torch or TorchRec; hotbed's of the same name is taken.
    params
        ``collection.parameters()``: parameters of tables only.
    optimizer_kwargs
        Its options. Those that are left out are what FBGEMM takes then: lr 0.01, eps 1e-8.

    Raises
    ------
    SpecError
        If hotbed has no optimizer of that name, or a parameter is no table's.
    OptimizerError
        If the tables are trained already.
    """
    name = optimizer_class.__name__
    if name not in _BY_NAME:
        raise SpecError(
            f"no optimizer of tables is called '{name}'{did_you_mean(name, _BY_NAME)}; there are {', '.join(_BY_NAME)}"
        )
    defaults = {"lr": 0.01} if name == "SGD" else {"lr": 0.01, "eps": 1e-8}
    for param in params:
        if not isinstance(param, TableHandle):
            raise SpecError(
                f"a parameter {list(param.shape)} is no table's; give apply_optimizer_in_backward the parameters of "
                "embedding collections, and torch.optim the rest"
            )
        if param.is_used:
            raise OptimizerError(
                f"table '{param.table}' is trained already; apply an optimizer before the first training step, and "
                "before the model is distributed"
            )
        param.applied = _BY_NAME[name], defaults | dict(optimizer_kwargs)


def optimizers_in_backward(
    rows: embed.EmbeddingCollection, handles: Sequence[nn.Parameter]
) -> list[optim.SparseOptimizer]:
    """Make the optimizers that were applied to the tables of a collection, one for those of equal options."""
    made: list[optim.SparseOptimizer] = []
    of_options: dict[str, list[TableHandle]] = {}
    for handle in handles:
        if isinstance(handle, TableHandle) and handle.applied is not None:
            kind, options = handle.applied
            of_options.setdefault(f"{kind.__name__} {sorted(options.items())}", []).append(handle)
    for same in of_options.values():
        assert same[0].applied is not None
        kind, options = same[0].applied
        selected = optim.TableSelection(rows, [handle.table for handle in same])
        made.append(kind(selected, **options).in_backward())
        for handle in same:
            handle.is_used = True
    return made


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are no tables', which backward trains; or, with ``include``, those of tables."""
    for name, param in named_parameters:
        if isinstance(param, TableHandle) == include:
            yield name, param


class KeyedOptimizerWrapper(torch.optim.Optimizer):
    """Wrap an optimizer of named parameters.

    Parameters
    ----------
    params
        By name.
    optim_factory
        Makes the optimizer of a list of them.
    """

    def __init__(
        self, params: Mapping[str, nn.Parameter], optim_factory: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    ) -> None:
        self.params = dict(params)
        self.optimizer = optim_factory(list(self.params.values()))
        self.defaults = self.optimizer.defaults

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of the optimizer."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyright: ignore[reportIncompatibleVariableOverride]
        """That of the optimizer."""
        return self.optimizer.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Update the parameters."""
        self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.optimizer.load_state_dict(state_dict)


class CombinedOptimizer(torch.optim.Optimizer):
    """Combine several optimizers into one.

    Parameters
    ----------
    optims
        The optimizers, or pairs of name and optimizer.
    """

    def __init__(self, optims: Sequence[Any]) -> None:
        named = [of if isinstance(of, tuple) else (str(i), of) for i, of in enumerate(optims)]
        self.optimizers: dict[str, Any] = dict(named)
        if len(self.optimizers) != len(named):
            raise OptimizerError(f"names of optimizers must be unique, got {[name for name, _ in named]}")
        self.defaults: dict[str, Any] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of all optimizers."""
        return [group for of in self.optimizers.values() for group in of.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Those of all optimizers."""
        return {key: value for of in self.optimizers.values() for key, value in of.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        for of in self.optimizers.values():
            of.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        """Update everything that backward has not."""
        for of in self.optimizers.values():
            of.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return all states by name."""
        return {name: of.state_dict() for name, of in self.optimizers.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        for name, of in self.optimizers.items():
            of.load_state_dict(state_dict[name])


class FusedOptimizer(CombinedOptimizer):
    """Stand for the optimizers that train tables in backward; their options can be changed, e.g. by a schedule."""

    def step(self, closure: Any = None) -> Any:
        """Do nothing: backward has."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: backward's step has."""
