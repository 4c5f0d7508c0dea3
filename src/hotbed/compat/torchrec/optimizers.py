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
    """What ``parameters()`` gives for a table: no values, no gradient, and the optimizer that was applied to it.

    Parameters
    ----------
    rows, table
        The collection, and the table's name there.
    """

    rows: embed.EmbeddingCollection
    table: str
    applied: tuple[type[optim.SparseOptimizer], dict[str, Any]] | None

    @classmethod
    def of(cls, rows: embed.EmbeddingCollection, table: str) -> Self:
        """Make the handle of a table."""
        handle = torch.Tensor._make_subclass(cls, torch.empty(0, device="cpu"), False)
        handle.rows, handle.table, handle.applied = rows, table, None
        return handle

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        from copy import deepcopy

        made = type(self).of(deepcopy(self.rows, memo), self.table)
        made.applied = self.applied
        memo[id(self)] = made
        return made


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
    return made


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that no optimizer in backward trains; or, with ``include``, the others."""
    for name, param in named_parameters:
        if isinstance(param, TableHandle) == include:
            yield name, param


class KeyedOptimizerWrapper:
    """An optimizer of named parameters.

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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the optimizer."""
        return self.optimizer.param_groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        """Update the parameters."""
        self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.optimizer.load_state_dict(state_dict)


class CombinedOptimizer:
    """Several optimizers as one.

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

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of all optimizers."""
        return [group for of in self.optimizers.values() for group in of.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients."""
        for of in self.optimizers.values():
            of.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
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
    """The optimizers that train tables in backward; their options can be changed, e.g. by a schedule."""

    def step(self, closure: Any = None) -> None:
        """Do nothing: backward has."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: backward's step has."""
