"""Give the rows of a table as a tensor that behaves like the weight of ``nn.Embedding`` where code writes to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.embed import EmbeddingCollection
from hotbed.errors import SpecError
from hotbed.store import DenseStore

_SET_TRAINED = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # pyright: ignore[reportAttributeAccessIssue]
_SET_DATA = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class TableRows(Tensor):
    """Rows ``[R, D]`` of a table.

    To set ``requires_grad`` freezes or trains the table, and to set ``data`` replaces its rows. Results of operations
    are plain tensors, except views of a copy, because writes to them must be refused, too.
    """

    _rows: EmbeddingCollection
    _table: str
    _is_copy: bool
    _is_part: bool

    @classmethod
    def of(cls, rows: EmbeddingCollection, table: str) -> Tensor:
        """Return the memory of a table that is all on this rank in a floating-point dtype, else a copy."""
        values, is_copy = _values(rows, table)
        handle = rows.handles[table]
        if handle.requires_grad and torch.is_grad_enabled():
            values = _Rows.apply(handle, values, table)
        if torch.compiler.is_compiling():
            return values
        found = values.as_subclass(cls)
        found._rows, found._table, found._is_copy, found._is_part = rows, table, is_copy, False
        return found

    @classmethod
    @override
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Redirect writes; compute everything else as for plain tensors."""
        own = args[0] if args else None
        if isinstance(own, TableRows) and hasattr(own, "_rows"):
            if func in _SET_TRAINED and not own._is_part:
                own._rows._set_trained((own._table,), args[1] if len(args) > 1 else True)
                return own
            if func == _SET_DATA and not own._is_part:
                return own._rows.set_weight(own._table, args[1])
            if own._is_copy and func not in _SET_TRAINED:
                return own._of_copy(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def _of_copy(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Refuse writes to a copy, and mark views of it, so that writes to them are refused, too."""
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise SpecError(
                f"the rows of table '{self._table}' are a copy, to which a write would be lost: got {name}, "
                "expected a table that is all on this rank. Set `module.weight.data = values` on all ranks, or write "
                "to a `.clone()`"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            if func is Tensor.as_subclass:
                return result
            if isinstance(result, tuple | list):
                return type(result)(map(self._marked, result)) if type(result) in (tuple, list) else result
            return self._marked(result)

    def _marked(self, result: Any) -> Any:
        """Return a view of this copy as `TableRows`, and anything else as it is."""
        if not isinstance(result, Tensor) or result.untyped_storage().data_ptr() != self.untyped_storage().data_ptr():
            return result
        view = result.as_subclass(TableRows)
        view._rows, view._table, view._is_copy, view._is_part = self._rows, self._table, True, True
        return view

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return deepcopy(self.as_subclass(Tensor), memo)

    @override
    def __reduce_ex__(self, proto: Any) -> Any:
        return self.detach().as_subclass(Tensor).__reduce_ex__(proto)


class _Rows(torch.autograd.Function):
    """Return the rows of a table, and refuse a gradient of them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, table: str) -> Tensor:
        ctx.table = table
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise SpecError(
            f"the rows of table '{ctx.table}' are used where they need a gradient, as the weight of an output layer "
            f"does, and a table has none but from lookups; leave the module as it is with skip=['{ctx.table}']"
        )


def _values(rows: EmbeddingCollection, table: str) -> tuple[Tensor, bool]:
    """Return the rows of a table, and whether they are a copy."""
    tiles = rows.local_tiles(table)
    if not rows.is_distributed and isinstance(tiles[0].arena.store, DenseStore):
        raw = rows._group_of(table).raw(table)
        memory = raw.get("weight")
        if len(raw) == 1 and memory is not None and memory.dtype in _FLOATS:
            return memory, False
    return rows.weight(table), True
