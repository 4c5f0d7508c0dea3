"""Present each table of a collection as a parameter, and update tables in backward, like TorchRec.

The parameter of an unsharded float32 table is ``[R, D]``, and shares the memory of the table. If no sparse optimizer of
hotbed trains the table, lookups have a dense gradient, so any torch optimizer can train it. The parameter of all other
tables has no elements, and only represents the table, e.g. in ``param_groups``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed import embed, optim
from hotbed.checks import check_known
from hotbed.compat.torch_nn import Refused, TableRows
from hotbed.errors import OptimizerError, SpecError


@dataclass
class TableRef:
    """The table that a parameter represents."""

    rows: embed.EmbeddingCollection
    table: str
    # class and options of the optimizer that `apply_optimizer_in_backward` chose
    applied: tuple[type[optim.SparseOptimizer], dict[str, Any]] | None = None
    is_used: bool = False  # whether this optimizer was built


def referenced_table(parameter: object) -> TableRef | None:
    """Return the table that a parameter represents, or None if it represents no table."""
    return cast("TableRef | None", getattr(parameter, "hotbed_table", None))


class TableView(nn.Module):
    """Present a table of a collection under the path that TorchRec uses for the table."""

    def __init__(self, rows: embed.EmbeddingCollection, table: str) -> None:
        super().__init__()
        self.ref = TableRef(rows, table)
        self._is_frozen = not rows.handles[table].requires_grad
        self._show()

    @property
    def parameter(self) -> nn.Parameter:
        """The parameter that represents the table."""
        found = self._parameters["weight"]
        if referenced_table(found) is not self.ref or found is None:
            raise SpecError(
                f"weight of table '{self.ref.table}': got a new {type(found).__name__}, expected the parameter that "
                "shares the table's memory. Change the values in place: `weight.data.copy_(values)`"
            )
        return found

    @property
    def weight(self) -> Tensor:
        """Rows ``[R, D]`` of the table. For a distributed table, all ranks must read this property, and get a copy."""
        is_sparse = self.ref.applied is not None or self.ref.table not in self.ref.rows.idle_tables()
        if self.has_rows and not (is_sparse and self.parameter.requires_grad):
            return self.parameter
        return TableRows.of(self.ref.rows, self.ref.table)

    @property
    def has_rows(self) -> bool:
        """Whether the parameter holds the rows of the table, so that torch optimizers can train it."""
        rows, spec = self.ref.rows, self.ref.rows.tables[self.ref.table]
        return spec.dtype == "fp32" and not rows.is_distributed

    def follow(self) -> None:
        """Freeze or unfreeze the table according to ``requires_grad`` of the parameter."""
        is_frozen = not self.parameter.requires_grad
        if is_frozen != self._is_frozen and not self.ref.rows.is_distributed:
            self._is_frozen = is_frozen
            (self.ref.rows.freeze if is_frozen else self.ref.rows.unfreeze)(self.ref.table)

    def _show(self) -> None:
        """Point the parameter at the current memory of the rows."""
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
        # If the table is distributed, the parameter needs no gradient, or DistributedDataParallel would wait for one.
        made = nn.Parameter(values, not (rows.is_distributed or self._is_frozen))
        made.hotbed_table = self.ref  # pyright: ignore[reportAttributeAccessIssue]
        self._parameters["weight"] = made

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._show()  # the collection has already moved its rows
        return self

    def reset_parameters(self) -> None:
        """Do nothing, because tables on ``meta`` are initialized when the model is distributed."""

    @override
    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        pass  # the collection saves the table

    @override
    def _load_from_state_dict(self, *_: Any) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        pass  # the collection loads the table

    def __getstate__(self) -> dict[str, Any]:
        ref = TableRef(self.ref.rows, self.ref.table, self.ref.applied)
        return {**self.__dict__, "ref": ref, "_parameters": {}, "_is_frozen": not self.parameter.requires_grad}

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._show()


def untrained(vectors: Tensor, view: TableView) -> Tensor:
    """Return the vectors of a table without an optimizer. A backward pass through them raises `OptimizerError`."""
    rows, table = view.ref.rows, view.ref.table
    kind = "distributed" if rows.is_distributed else rows.tables[table].dtype
    why = (
        f"no optimizer trains table '{table}': got a {kind} table, but torch's optimizers train only float32 tables "
        "that are not distributed. Before the first step, call:\n"
        "    from hotbed.compat.torchrec import RowWiseAdagrad, apply_optimizer_in_backward\n"
        "    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {'lr': 0.01})"
    )
    if rows.is_distributed:
        why = (
            f"no optimizer trains table '{table}', which is distributed. After hotbed.distribute, call:\n"
            "    optimizer = hotbed.optim.RowWiseAdagrad(model, lr=0.01)\n"
            "    optimizer.in_backward()  # or call its step() and zero_grad()"
        )
    return Refused.apply(rows.handles[table], vectors, OptimizerError, why)


_BY_NAME: dict[str, type[optim.SparseOptimizer]] = {
    name: getattr(optim, name)
    for name in ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "AdamW", "PartialRowWiseAdam", "LAMB")
}


def apply_optimizer_in_backward(
    optimizer_class: type, params: Iterable[nn.Parameter], optimizer_kwargs: Mapping[str, Any]
) -> None:
    """Update tables at the end of each backward pass. Call this function before you distribute the model.

    Parameters
    ----------
    optimizer_class, optimizer_kwargs
        Optimizer class of hotbed, torch or TorchRec, and its options. hotbed's optimizer with the same name is used. As
        in FBGEMM, the defaults are lr 0.01 and eps 1e-8.
    params
        Parameters of tables, e.g. ``collection.parameters()``.
    """
    name = optimizer_class.__name__
    check_known("optimizer of tables", name, _BY_NAME, SpecError)
    defaults = {"lr": 0.01} if name == "SGD" else {"lr": 0.01, "eps": 1e-8}
    for param in params:
        ref = referenced_table(param)
        if ref is None:
            raise SpecError(
                f"params: got a parameter {list(param.shape)}, expected parameters of embedding collections. Pass "
                "all other parameters to torch.optim."
            )
        if ref.is_used:
            raise OptimizerError(
                f"table '{ref.table}': got an optimizer after the first step, expected it before. Call "
                "apply_optimizer_in_backward before you train or distribute the model."
            )
        ref.applied = _BY_NAME[name], defaults | dict(optimizer_kwargs)


_FUSED = {
    "sgd": optim.SGD,
    "exact_sgd": optim.SGD,
    "exact_adagrad": optim.Adagrad,
    "exact_row_wise_adagrad": optim.RowWiseAdagrad,
    "adam": optim.Adam,
    "partial_row_wise_adam": optim.PartialRowWiseAdam,
    "lamb": optim.LAMB,
}
"""Optimizers by value of FBGEMM's enum ``EmbOptimType``."""


def _of_fused_params(params: Mapping[str, Any]) -> tuple[type[optim.SparseOptimizer], dict[str, Any]]:
    """Return the optimizer class and options that ``fused_params`` select (default: SGD, as in FBGEMM)."""
    rest = dict(params)
    chosen = rest.pop("optimizer", "exact_sgd")
    name = str(getattr(chosen, "value", chosen)).lower().replace("rowwise", "row_wise")
    check_known("optimizer in fused_params", name, _FUSED, SpecError, "Or call apply_optimizer_in_backward.")
    options: dict[str, Any] = {"lr": rest.pop("learning_rate", 0.01)}
    if "beta1" in rest or "beta2" in rest:
        options["betas"] = rest.pop("beta1", 0.9), rest.pop("beta2", 0.999)
    options |= {key: rest.pop(key) for key in ("eps", "weight_decay") if key in rest}
    if _FUSED[name] is optim.SGD:
        options.pop("eps", None)  # FBGEMM ignores eps
    if rest:
        raise SpecError(
            f"fused_params: got '{next(iter(rest))}', expected optimizer, learning_rate, eps, weight_decay, beta1, "
            "beta2. Set caches and tiers by options of DistributedModelParallel(…, plan=…, memory=…)."
        )
    return _FUSED[name], options


def adopt_optimizers(views: Iterable[TableView], fused_params: Mapping[str, Any]) -> None:
    """Apply the optimizers that `torch.distributed.optim._apply_optimizer_in_backward` chose for tables.

    Tables without a chosen optimizer get the optimizer of ``fused_params`` (default: SGD with lr 0.01, as in TorchRec).
    """
    for view in views:
        chosen: list[type] = getattr(view.parameter, "_optimizer_classes", [])
        if len(chosen) > 1:
            raise SpecError(
                f"table '{view.ref.table}': got {len(chosen)} optimizers in backward "
                f"({', '.join(kind.__name__ for kind in chosen)}), expected one. Apply one optimizer to the table."
            )
        if view.ref.applied is None:
            kind, options = _of_fused_params(fused_params)
            if chosen:
                kind, options = chosen[0], getattr(view.parameter, "_optimizer_kwargs")[0]  # noqa: B009
            apply_optimizer_in_backward(kind, [view.parameter], options)


def optimizers_in_backward(refs: Iterable[TableRef]) -> list[optim.SparseOptimizer]:
    """Build the optimizers that were applied to tables. Tables with equal options share an optimizer."""
    made: list[optim.SparseOptimizer] = []
    of_options: dict[str, list[TableRef]] = {}
    for ref in refs:
        if ref.applied is not None:
            kind, options = ref.applied
            of_options.setdefault(f"{kind.__name__} {sorted(options.items())}", []).append(ref)
    for same in of_options.values():
        assert same[0].applied is not None
        kind, options = same[0].applied
        selected = optim.TableSelection(same[0].rows, [ref.table for ref in same])
        made.append(kind(selected, **options).in_backward())
        for ref in same:
            ref.is_used = True
    return made


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are not updated in backward. With ``include``, yield the updated parameters instead.

    Tables of a distributed model are always updated in backward. Tables of an undistributed model are updated in
    backward if `apply_optimizer_in_backward`, or torch's function with this name, was called for them.
    """
    for name, param in named_parameters:
        ref = referenced_table(param)
        by_hotbed = ref is not None and (ref.applied is not None or ref.rows.is_distributed)
        if (by_hotbed or hasattr(param, "_in_backward_optimizers")) == include:
            yield name, param


class RowWiseAdagrad(torch.optim.Optimizer):
    """Train matrices with row-wise AdaGrad, which has one learning rate per row.

    An instance of this class needs dense gradients, like TorchRec's class. Functions that take an optimizer class, e.g.
    `apply_optimizer_in_backward`, use `hotbed.optim.RowWiseAdagrad` instead of this class.

    Parameters
    ----------
    params
        Parameters ``[R, D]``, or parameter groups. If ``params`` is a module, the constructor returns a
        `hotbed.optim.RowWiseAdagrad` for the tables of the module.
    lr, lr_decay, weight_decay, initial_accumulator_value, eps, maximize
        As for ``torch.optim.Adagrad``.
    """

    def __new__(cls, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Return `hotbed.optim.RowWiseAdagrad` if ``params`` is a module."""
        if isinstance(params, nn.Module):
            return optim.RowWiseAdagrad(params, *args, **kwargs)
        return super().__new__(cls)

    def __init__(  # pyright: ignore[reportInconsistentConstructor]
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        options = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        super().__init__(params, {**options, "initial_accumulator_value": initial_accumulator_value})
        for param, group in self._each():
            if referenced_table(param) is not None and not param.numel():
                continue  # without rows in the parameter, the table has an optimizer of hotbed or is not trained
            if param.dim() != 2:
                raise OptimizerError(
                    f"params of RowWiseAdagrad: got shape {list(param.shape)}, expected [rows, columns]. Pass "
                    "parameters of embedding collections here, and all other parameters to torch.optim.Adagrad."
                )
            start = float(group["initial_accumulator_value"])
            self.state[param] = {"step": 0, "sum": param.new_full((len(param), 1), start, requires_grad=False)}

    def _each(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        return ((param, group) for group in self.param_groups for param in group["params"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update the parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for param, group in self._each():
            if param.grad is None:
                continue
            state, grad = self.state[param], -param.grad if group["maximize"] else param.grad
            if group["weight_decay"]:
                grad = grad.add(param, alpha=group["weight_decay"])
            state["sum"] += grad.square().mean(dim=1, keepdim=True)
            lr = group["lr"] / (1 + state["step"] * group["lr_decay"])
            param.addcdiv_(grad, (state["sum"].sqrt() + group["eps"]).expand_as(grad), value=-lr)
            state["step"] += 1
        return loss
