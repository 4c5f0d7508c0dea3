"""Show each table of a collection as a parameter, as TorchRec does.

A table that is float32 and whole on this rank is a parameter ``[R, D]`` that shares its memory. While no optimizer of
hotbed trains it, it is looked up with a dense gradient, so any optimizer of torch trains it as it trains TorchRec's.
Any other table is a parameter without elements, which only stands for it, for example in ``param_groups``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed import embed, optim
from hotbed.compat.drop_in import weight_of
from hotbed.errors import OptimizerError, SpecError


@dataclass
class TableRef:
    """The table that a parameter stands for.

    ``applied`` are class and options of the optimizer that `apply_optimizer_in_backward` chose, ``is_used`` whether it
    has been made.
    """

    rows: embed.EmbeddingCollection
    table: str
    applied: tuple[type[optim.SparseOptimizer], dict[str, Any]] | None = None
    is_used: bool = False


def table_of(parameter: object) -> TableRef | None:
    """Return the table that a parameter stands for; None for other parameters."""
    return cast("TableRef | None", getattr(parameter, "hotbed_table", None))


class TableView(nn.Module):
    """Show a table of a collection under the path that TorchRec has for it."""

    def __init__(self, rows: embed.EmbeddingCollection, table: str) -> None:
        super().__init__()
        self.ref = TableRef(rows, table)
        self._is_frozen = not rows.handles[table].requires_grad
        self._show()

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that stands for the table."""
        found = self._parameters["weight"]
        if table_of(found) is not self.ref or found is None:
            raise SpecError(
                f"table '{self.ref.table}': its weight was replaced by {type(found).__name__}, expected the parameter "
                "that shares its memory. Change the values in place: `weight.data.copy_(values)`"
            )
        return found

    @property
    def weight(self) -> Tensor:
        """Rows ``[R, D]``: the parameter where it has them, else a copy without a gradient, which all ranks gather."""
        is_sparse = self.ref.applied is not None or self.ref.table not in self.ref.rows.idle_tables()
        if self.has_rows and not (is_sparse and self.parameter.requires_grad):
            return self.parameter
        return weight_of(self.ref.rows, self.ref.table)

    @property
    def has_rows(self) -> bool:
        """Whether the parameter has the rows of the table, so that optimizers of torch can train it."""
        rows, spec = self.ref.rows, self.ref.rows.tables[self.ref.table]
        return spec.dtype == "fp32" and not rows.is_distributed

    def follow(self) -> None:
        """Freeze the table if ``requires_grad`` of the parameter was set to False, and train it again otherwise."""
        is_frozen = not self.parameter.requires_grad
        if is_frozen != self._is_frozen and not self.ref.rows.is_distributed:
            self._is_frozen = is_frozen
            (self.ref.rows.freeze if is_frozen else self.ref.rows.unfreeze)(self.ref.table)

    def _show(self) -> None:
        """Let the parameter have the rows where they are now."""
        old = self._parameters.get("weight")
        rows, spec = self.ref.rows, self.ref.rows.tables[self.ref.table]
        if not self.has_rows:
            values = torch.empty(0, device=None if rows.is_distributed else rows.device)
        elif rows.device.type == "meta":
            values = torch.empty(spec.rows, spec.dim, device="meta")
        else:
            values = rows.weight(self.ref.table)
        if old is not None and not rows.is_distributed and values.is_meta == old.is_meta:
            old.data = values
            return
        # DistributedDataParallel would wait for a gradient of it.
        made = nn.Parameter(values, not (rows.is_distributed or self._is_frozen))
        made.hotbed_table = self.ref  # pyright: ignore[reportAttributeAccessIssue]
        self._parameters["weight"] = made

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._show()  # the collection has moved its rows before
        return self

    def reset_parameters(self) -> None:
        """Do nothing: tables on ``meta`` get their initial values when the model is distributed."""

    @override
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        pass  # the collection saves it

    @override
    def _load_from_state_dict(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass  # the collection loads it

    def __getstate__(self) -> dict[str, Any]:
        ref = TableRef(self.ref.rows, self.ref.table, self.ref.applied)
        return {**self.__dict__, "ref": ref, "_parameters": {}, "_is_frozen": not self.parameter.requires_grad}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show()


class Untrained(torch.autograd.Function):
    """Return vectors of a table that no optimizer trains, and refuse a gradient of them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, vectors: Tensor, why: str) -> Tensor:
        """Return the vectors."""
        ctx.why = why
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise `OptimizerError`."""
        raise OptimizerError(ctx.why)


def untrained(vectors: Tensor, view: TableView) -> Tensor:
    """Let a backward pass that reaches vectors of a table without an optimizer raise `OptimizerError`."""
    rows, table = view.ref.rows, view.ref.table
    kind = "distributed" if rows.is_distributed else rows.tables[table].dtype
    why = (
        f"no optimizer trains table '{table}': got a {kind} table, torch's optimizers train only float32 tables that "
        "are not distributed. Before the first step, call:\n"
        "    from hotbed.compat.torchrec import RowWiseAdagrad, apply_optimizer_in_backward\n"
        "    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {'lr': 0.01})"
    )
    if rows.is_distributed:
        why = (
            f"no optimizer trains table '{table}', which is distributed. After hotbed.distribute, call:\n"
            "    optimizer = hotbed.optim.RowWiseAdagrad(model, lr=0.01)\n"
            "    optimizer.in_backward()  # or call its step() and zero_grad()"
        )
    return Untrained.apply(rows.handles[table], vectors, why)
