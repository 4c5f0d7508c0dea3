"""Replace the embedding modules of any model by hotbed's tables.

`swap_embeddings` builds modules with the interface of ``nn.Embedding`` and ``nn.EmbeddingBag``. For valid ids, the new
modules return the vectors that torch's modules return. A sparse optimizer of hotbed, built for the model, trains the
rows. ``torch.export`` records plain torch operators, with the rows as constants.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hotbed.embed import EmbeddingCollection, collections_of
from hotbed.embed.shared_arenas import share_arenas
from hotbed.embed.single_lookup import look_up, remove_id
from hotbed.errors import BatchError, SpecError, did_you_mean
from hotbed.jagged import INDEX_DTYPES, Bags, describe_tensor
from hotbed.ops import BackendName
from hotbed.specs import MAX_DIM, Feature, Pooling, RowDtype, Table
from hotbed.store import DenseStore
from hotbed.torch_private import NoSubclasses, hooks_of, is_exporting

Mode = Literal["sum", "mean", "max"]
_NARROW = (torch.int8, torch.uint8, torch.int16)
"""Dtypes of ids and offsets that are converted to int64."""
_DTYPES: dict[torch.dtype, RowDtype] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_Torch = nn.Embedding | nn.EmbeddingBag
_SET_TRAINED = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # pyright: ignore[reportAttributeAccessIssue]
_SET_DATA = Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]


class TableRows(Tensor):
    """Rows ``[R, D]`` of a table, in the memory of the table or as a copy.

    Setting ``requires_grad`` freezes or unfreezes the table. Setting ``data`` replaces its rows. Operations return
    plain tensors, except views of a copy. A view of a copy is also `TableRows`, so that writes to it are refused.
    """

    _rows: EmbeddingCollection
    _table: str
    _is_copy: bool
    _is_part: bool  # whether this is a view of a copy

    @classmethod
    def of(cls, rows: EmbeddingCollection, table: str) -> Tensor:
        """Return the memory of an unsharded table with a floating-point dtype, or a copy of any other table."""
        store, values = rows.local_tiles(table)[0].arena.store, None
        if not rows.is_distributed and isinstance(store, DenseStore):
            raw = rows._group_of(table).raw(table)
            values = raw["weight"] if len(raw) == 1 and "weight" in raw and raw["weight"].dtype in _DTYPES else None
        is_copy = values is None
        values = rows.weight(table) if values is None else values
        handle = rows.handles[table]
        if handle.requires_grad and torch.is_grad_enabled():
            why = (
                f"table '{table}': got a backward pass through its rows (e.g. as the weight of an output layer), "
                f"expected only gradients of lookups. Keep torch's module with swap_embeddings(..., skip=['{table}'])"
            )
            values = Refused.apply(handle, values, SpecError, why)
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
        """Pass writes of ``data`` and ``requires_grad`` to the table. All other operations get a plain tensor."""
        own = args[0] if args else None
        if isinstance(own, TableRows) and hasattr(own, "_rows"):
            if func in _SET_TRAINED and not own._is_part:
                own._rows._set_trained((own._table,), args[1] if len(args) > 1 else True)
                return own
            if func == _SET_DATA and not own._is_part:
                return own._rows.set_weight(own._table, args[1])
            if own._is_copy and func not in _SET_TRAINED:
                return own._of_copy(func, args, kwargs or {})
        with NoSubclasses():
            return func(*args, **(kwargs or {}))

    def _of_copy(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Raise `SpecError` for writes to a copy, and return views of the copy as `TableRows`."""
        name = getattr(func, "__name__", "")
        if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            raise SpecError(
                f"table '{self._table}': got {name} on a copy of its rows, expected an unsharded table, because writes "
                "to a copy are lost. Set `module.weight.data = values` on all ranks, or write to a `.clone()`"
            )
        with NoSubclasses():
            result = func(*args, **kwargs)
            if func is Tensor.as_subclass:
                return result
            if isinstance(result, tuple | list):
                return type(result)(map(self._marked, result)) if type(result) in (tuple, list) else result
            return self._marked(result)

    def _marked(self, result: Any) -> Any:
        """Return a result as `TableRows` if it is a view of this copy, otherwise unchanged."""
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


class Refused(torch.autograd.Function):
    """Return rows or vectors of a table unchanged. A backward pass through them raises an error."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, vectors: Tensor, kind: type[Exception], why: str) -> Tensor:
        """Return a view of ``vectors``. The view requires a gradient, because ``anchor`` does."""
        ctx.kind, ctx.why = kind, why
        return vectors.view_as(vectors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raise the error of class ``kind`` with the message ``why`` that `forward` got."""
        raise ctx.kind(ctx.why)


class _DropIn(nn.Module):
    """Base class of `Embedding` and `EmbeddingBag`. It looks up one feature of a collection with a single table.

    Modules that shared a weight before `swap_embeddings` share the collection afterwards.

    ``padding_idx`` and ``max_norm`` are as in torch. Optimizers limit the norms of the rows that they update, and
    `limit_norms` limits initial and loaded rows.
    """

    def __init__(
        self, rows: EmbeddingCollection, feature: str, padding_idx: int | None, max_norm: float | None
    ) -> None:
        super().__init__()
        self.rows = rows
        self.feature = feature
        (table,) = rows.tables.values()
        self.table = table.name
        self.num_embeddings, self.embedding_dim = table.rows, table.dim
        self.padding_idx, self.max_norm = padding_idx, max_norm
        self.loaded_from = ""
        self.register_load_state_dict_post_hook(_limit_loaded)
        rename_states(self, f"rows.{self.table}.", "")

    def _look_up(self, bags: Bags, padding_idx: int | None = None) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            from hotbed.embed.compile_ops import look_up_feature  # only here, because it imports the compiler

            return look_up_feature(self.rows, self.feature, bags, padding_idx)
        return look_up(self.rows, self.feature, bags, padding_idx)

    @property
    def weight(self) -> Tensor:
        """Rows ``[R, D]`` in the memory of the table. If the table is sharded, they are a copy that refuses writes.

        Setting ``requires_grad`` of the rows freezes or unfreezes the table. A backward pass through these rows, e.g.
        as the weight of an output layer, raises `SpecError`.
        """
        return TableRows.of(self.rows, self.table)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise SpecError(
                f"the weight of '{self.feature}' is a table: got a new {type(value).__name__}, but the table cannot be "
                "replaced. Use `with torch.no_grad(): module.weight.copy_(values)`. Do not pass tables to "
                "functional_call"
            )
        super().__setattr__(name, value)

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Freeze or unfreeze the table."""
        self.rows.requires_grad_(requires_grad)
        return self

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the table's gradient if no optimizer step has applied the gradient yet."""
        self.rows.zero_grad(set_to_none)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all rows from N(0, 1) with torch's generator, and set the row of ``padding_idx`` to 0, as torch does."""
        if self.rows.is_distributed:
            raise SpecError(
                f"table '{self.table}': got reset_parameters() after hotbed.distribute, expected it before. Call "
                "reset_parameters() before you distribute the model"
            )
        if self.rows.device.type == "meta":
            return
        values = torch.empty_like(self.weight.detach()).normal_()
        if self.padding_idx is not None:
            values[self.padding_idx] = 0
        self.rows.set_weight(self.table, values)
        self.limit_norms()

    @torch.no_grad()
    def limit_norms(self) -> None:
        """Scale rows with a larger norm down to ``max_norm``, as torch does at each lookup."""
        if self.max_norm is not None:
            rows = self.rows.weight(self.table)
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            scaled = torch.where(norms > self.max_norm, rows * (self.max_norm / (norms + 1e-7)), rows)
            self.rows.set_weight(self.table, scaled)

    def _integers(self, what: str, integers: Tensor) -> Tensor:
        """Return ids or offsets as int32 or int64. Raise `BatchError` if they are not integers with values."""
        if isinstance(integers, Tensor) and integers.dtype in INDEX_DTYPES and not integers.is_meta:
            return integers
        if type(integers).__module__.startswith("torch.fx"):
            raise SpecError(
                f"{what} of '{self.feature}': got a Proxy, expected a tensor, because torch.fx.symbolic_trace cannot "
                "record lookups. Use torch.export, or a Tracer with an is_leaf_module() that is true for this module"
            )
        if integers.dtype in _NARROW:
            return integers.long()
        if integers.dtype not in INDEX_DTYPES:
            raise BatchError(
                f"{what} of '{self.feature}' are not integers: got {describe_tensor(integers)}, expected int32 or "
                f"int64. Convert the {what} with .long()"
            )
        raise BatchError(
            f"{what} of '{self.feature}' have no values: got {describe_tensor(integers)} on meta, expected a device "
            "with memory. Move the tables and ids to a device before you call the model"
        )

    def _constant(self) -> Tensor:
        """Return the rows that ``torch.export`` records as a constant. Raise `SpecError` for a distributed table."""
        if self.rows.is_distributed:
            raise SpecError(
                f"torch.export: got the distributed table '{self.table}', expected a table on one rank. Load the state "
                "dict into an undistributed model, and export this model"
            )
        with torch.no_grad():
            return self.weight.detach()

    @override
    def extra_repr(self) -> str:
        """Return the constructor's arguments for ``repr``, as torch's module shows them."""
        text = f"{self.num_embeddings}, {self.embedding_dim}"
        for name in ("padding_idx", "max_norm"):
            if (value := getattr(self, name)) is not None:
                text += f", {name}={value}"
        return text


def rename_states(module: nn.Module, inner: str, outer: str) -> None:
    """Rename the prefix ``inner`` of a module's keys in ``state_dict`` to ``outer``, and rename it back on load."""
    module.register_state_dict_post_hook(partial(_rename_saved, inner, outer))
    module.register_load_state_dict_pre_hook(partial(_rename_loaded, inner, outer))
    module.register_load_state_dict_post_hook(partial(_rename_reported, inner, outer))


def _rename_saved(inner: str, outer: str, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(prefix + inner)]:
        state[prefix + outer + key.removeprefix(prefix + inner)] = state.pop(key)


def _rename_loaded(inner: str, outer: str, module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    module.loaded_from = prefix
    for key in [key for key in state if key.startswith(prefix + outer) and not key.startswith(f"{prefix}rows.")]:
        state[prefix + inner + key.removeprefix(prefix + outer)] = state.pop(key)


def _rename_reported(inner: str, outer: str, module: Any, found: Any) -> None:
    start: str = module.loaded_from
    for keys in (found.missing_keys, found.unexpected_keys):
        keys[:] = [start + outer + k.removeprefix(start + inner) if k.startswith(start + inner) else k for k in keys]


def _limit_loaded(module: nn.Module, _: Any) -> None:
    assert isinstance(module, _DropIn)
    module.limit_norms()


class Embedding(_DropIn):
    """Look up ids of any shape, like ``nn.Embedding``. The row of ``padding_idx`` gets no gradient."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Look up ids ``[…]`` of a signed integer dtype or uint8, and return vectors ``[…, D]``."""
        input = self._integers("ids", input)
        if is_exporting():
            return functional.embedding(input, self._constant(), self.padding_idx).to(self.rows.dtype)
        found = self._look_up(Bags(input.reshape(-1), input.numel(), 1, None, None))
        found = found.view(*input.shape, self.embedding_dim)
        if self.padding_idx is None or not found.requires_grad:
            return found
        return torch.where((input == self.padding_idx)[..., None], found.detach(), found)


class EmbeddingBag(_DropIn):
    """Look up bags and pool them, like ``nn.EmbeddingBag``.

    Ids equal to ``padding_idx`` are removed from their bags. With ``include_last_offset``, offsets are ``[B + 1]``, and
    the last offset is the number of ids.
    """

    def __init__(
        self,
        rows: EmbeddingCollection,
        feature: str,
        padding_idx: int | None,
        max_norm: float | None,
        mode: Mode,
        include_last_offset: bool,
    ) -> None:
        super().__init__(rows, feature, padding_idx, max_norm)
        self.mode, self.include_last_offset = mode, include_last_offset

    @override
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool ids ``[B, k]``, or ``[N]`` with offsets. Return vectors ``[B, D]``.

        Ids have a signed integer dtype or uint8. Offsets are the positions where the bags of ids ``[N]`` start:
        ``[B]``, or ``[B + 1]`` with ``include_last_offset``. ``per_sample_weights`` have the shape of the ids, and
        require mode ``"sum"``.
        """
        input = self._integers("ids", input)
        weights = self._checked_weights(input, per_sample_weights)
        if is_exporting():
            return self._exported(input, offsets, per_sample_weights)
        bags = self._bags(input, offsets, weights)
        if self.mode != "max":
            return self._look_up(bags, self.padding_idx)
        # In a compiled graph, padding is not removed, because the number of remaining ids depends on the data.
        if self.padding_idx is not None and not torch.compiler.is_compiling():
            bags, _ = remove_id(bags, self.padding_idx)
        return _largest(self._look_up(bags), bags, self.padding_idx)

    def _exported(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        return functional.embedding_bag(
            ids,
            self._constant(),
            None if offsets is None else self._integers("offsets", offsets),
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        ).to(self.rows.dtype)

    def _checked_weights(self, ids: Tensor, weights: Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        if self.mode != "sum":
            raise BatchError(f"per_sample_weights: got mode {self.mode!r}, expected 'sum'. Remove the weights.")
        if weights.shape != ids.shape:
            raise BatchError(
                f"per_sample_weights: got shape {list(weights.shape)}, expected the ids' shape {list(ids.shape)}"
            )
        return weights.reshape(-1)

    def _bags(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Bags:
        if ids.dim() == 2:
            if offsets is not None:
                raise BatchError(
                    f"offsets: got offsets for ids {list(ids.shape)}, expected None, because each row of 2-D ids is a "
                    "bag. Remove the offsets."
                )
            return Bags(ids.reshape(-1), len(ids), ids.shape[1], None, weights)
        if ids.dim() != 1 or offsets is None:
            other = "no offsets" if offsets is None else f"offsets {describe_tensor(offsets)}"
            raise BatchError(f"ids: got {describe_tensor(ids)} with {other}, expected [B, k], or [N] with offsets")
        offsets = self._integers("offsets", offsets).long()
        if self.include_last_offset and not len(offsets):
            raise BatchError(
                "offsets: got 0, expected at least 1 with include_last_offset=True. Pass the number of ids as the last "
                "offset, e.g. torch.tensor([0]) for no bags"
            )
        if not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        return Bags(ids, len(offsets) - 1, None, offsets, weights)


def _largest(vectors: Tensor, bags: Bags, padding_idx: int | None) -> Tensor:
    """Pool the vectors ``[N, D]`` of each bag by their maximum per column. Return ``[B, D]``, with 0 for empty bags.

    Ids equal to ``padding_idx`` do not count.
    """
    # As in torch, the first of several equal maxima gets the whole gradient. torch.scatter_reduce would divide the
    # gradient, and the gradient of torch.segment_reduce is wrong for equal rows (torch 2.13).
    count, columns = vectors.shape
    bag = torch.arange(bags.batch_size, device=vectors.device).repeat_interleave(bags.lengths(), output_size=count)
    own = bag[:, None].expand_as(vectors)
    is_left_out = (bags.values == (-1 if padding_idx is None else padding_idx))[:, None]
    values = vectors.detach().masked_fill(is_left_out, -torch.inf)
    largest = values.new_zeros(bags.batch_size, columns).scatter_reduce(0, own, values, "amax", include_self=False)
    is_largest = ((values == largest.gather(0, own)) | values.isnan()) & ~is_left_out
    position = torch.arange(count, device=vectors.device)[:, None].expand_as(vectors).where(is_largest, count)
    first = position.new_full((bags.batch_size, columns), count).scatter_reduce(0, own, position, "amin")
    return functional.pad(vectors, (0, 0, 0, 1)).gather(0, first)


def swap_embeddings(
    model: nn.Module, *, skip: Sequence[str] = (), seed: int | None = None, backend: BackendName = "auto"
) -> nn.Module:
    """Replace every ``nn.Embedding`` and ``nn.EmbeddingBag`` of a model by a table of hotbed, in place.

    Calls, values, names in ``state_dict`` and frozen modules stay the same. Call this function before you build
    optimizers, because tables are not parameters. ``hb.optim.RowWiseAdagrad(model, lr=0.1)`` trains the tables, and
    ``torch.optim`` trains all parameters. `hotbed.distribute` shards the tables, which have the names of their modules.

    Tables with equal dim and dtype share an arena, which an optimizer updates in one launch. A module that is copied,
    or moved to a different device later, gets a separate arena and a separate launch. So swap a model on the device
    that trains it.

    Parameters
    ----------
    model
        Any module. Embeddings that share a weight share a table. Tables keep the values of torch's modules. Tables on
        ``meta`` are initialized with torch's standard deviation, 1, when the model is distributed.
    skip
        Names of modules to keep, as in ``model.named_modules()``. ``*`` matches any characters.
    seed
        Seed of the initial values of tables on ``meta``, as for `EmbeddingCollection` (default: drawn from torch's
        generator, so ``torch.manual_seed`` determines the seed). All ranks use the seed of rank 0.
    backend
        Backend of the kernels, as for `EmbeddingCollection`.

    Returns
    -------
    nn.Module
        The model, or the new module if the model itself is an embedding.

    Raises
    ------
    SpecError
        If the model has no embedding, or if a table cannot replace an embedding. A table cannot replace an embedding
        that shares its weight with a different layer, scales gradients by frequency, limits a norm that is not
        Euclidean, has a dtype or width that tables do not support, or does more than a lookup in its class, hooks or
        parametrizations.

    Examples
    --------
    >>> model = nn.ModuleDict({"item": nn.EmbeddingBag(1000, 16, mode="sum"), "top": nn.Linear(16, 1)})
    >>> model = swap_embeddings(model)
    >>> model["item"](torch.tensor([3, 5, 8]), torch.tensor([0, 2])).shape
    torch.Size([2, 16])
    """
    found = {name: module for name, module in model.named_modules() if isinstance(module, _Torch)}
    names = dict(model.named_modules(remove_duplicate=False))
    for pattern in skip:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise SpecError(f"skip: got '{pattern}', expected the name of a module{did_you_mean(pattern, found)}")
    chosen = {n: m for n, m in found.items() if not any(fnmatchcase(n, pattern) for pattern in skip)}
    if not chosen:
        raise SpecError(
            f"{type(model).__name__} has no nn.Embedding or nn.EmbeddingBag to replace"
            + (f" except the skipped modules: {', '.join(found)}" if found else "")
        )
    for name, module in chosen.items():
        _check(name, module)
    _refuse_shared(model, chosen)
    draws = seed is None and any(module.weight.is_meta for module in chosen.values())
    if seed is None:
        seed = int(torch.randint(1 << 62, (), device="cpu")) if draws else 0
    groups: dict[int, dict[str, _Torch]] = {}  # modules that share a weight share a table
    for name, module in chosen.items():
        groups.setdefault(id(module.weight), {})[name] = module
    tables = [(_table(named, seed, backend), named) for named in groups.values()]
    for rows, _ in tables:
        rows.is_swapped = True
    share_arenas({rows: next(iter(named.values())).weight.device for rows, named in tables})
    made: dict[int, nn.Module] = {}
    for rows, named in tables:
        made |= _replacements(rows, named)
    for name, module in names.items():  # a module may have several names
        if id(module) in made and name:
            parent, _, own = name.rpartition(".")
            setattr(names[parent], own, made[id(module)])
    swapped = made.get(id(model), model)
    for module in swapped.modules():
        if not isinstance(module, Embedding | EmbeddingBag | EmbeddingCollection) and collections_of(module):
            for name in ("requires_grad_", "zero_grad"):
                setattr(module, name, _WithTables(module, name))
    return swapped


class _WithTables:
    """A method of a module that also calls the same method of its tables, because tables are not parameters."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name  # weak, because the module refers to this object

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._live()
        result = getattr(type(module), self._name)(module, *args, **kwargs)
        for tables in collections_of(module).values():
            getattr(tables, self._name)(*args, **kwargs)
        return result

    def _live(self) -> nn.Module:
        if (module := self._module()) is None:
            raise SpecError(
                f"{self._name}: got a shallow copy of a deleted module, expected the module or a deep copy. Copy the "
                "module with copy.deepcopy"
            )
        return module

    @override
    def __reduce__(self) -> Any:
        return _WithTables, (self._live(), self._name)


def _check(name: str, module: _Torch) -> None:
    """Raise `SpecError` if a table cannot replace the embedding."""
    kind = nn.Embedding if isinstance(module, nn.Embedding) else nn.EmbeddingBag
    label = f"{type(module).__name__} '{name}'"
    weight = dict(module.named_parameters(recurse=False)).get("weight")
    if weight is None:
        wrong = "has a parametrization or no weight, which tables do not support"
    elif own := _own(type(module), kind) + _children(module)[1:]:
        wrong = f"has its own {own[0]}, which a table would not have"
    elif hooks_of(module) or hooks_of(weight):
        wrong = "has hooks, which would be lost"
    elif module.scale_grad_by_freq:
        wrong = "has scale_grad_by_freq, which sparse optimizers do not support"
    elif module.max_norm is not None and module.norm_type != 2:
        wrong = f"has norm_type {module.norm_type}, expected 2"
    elif weight.dtype not in _DTYPES:
        wrong = f"has dtype {str(weight.dtype).removeprefix('torch.')}, expected float32, bfloat16 or float16"
    elif weight.shape[1] > MAX_DIM:
        wrong = f"has {weight.shape[1]:,} columns, expected at most {MAX_DIM:,}"
    else:
        return
    raise SpecError(f"{label} {wrong}. Keep this module with swap_embeddings(..., skip=['{name}'])")


def _children(module: nn.Module) -> list[str]:
    """List the names of a module's parameters, buffers and child modules."""
    tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return [name for name, _ in (*tensors, *module.named_children())]


def _own(derived: type, kind: type) -> list[str]:
    """List the methods that a class adds to torch's, except its constructor and ``reset_parameters``."""
    made = {"__init__", "reset_parameters"}
    classes = derived.__mro__[: derived.__mro__.index(kind)]
    return [name for of in classes for name, value in vars(of).items() if callable(value) and name not in made]


def _refuse_shared(model: nn.Module, chosen: dict[str, _Torch]) -> None:
    """Raise `SpecError` if a module that is not replaced shares the weight of an embedding."""
    of_weight = {id(module.weight): name for name, module in chosen.items()}
    for name, module in model.named_modules():
        for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) in of_weight and name not in chosen:
                theirs, here = of_weight[id(parameter)], f"{name}.{own}".lstrip(".")
                raise SpecError(
                    f"the weight of '{theirs}' is also '{here}', which cannot use a table. Keep this module with "
                    f"swap_embeddings(..., skip=['{theirs}'])"
                )


def _table(named: dict[str, _Torch], seed: int, backend: BackendName) -> EmbeddingCollection:
    """Build a collection on ``meta``, with one table for the modules ``named``, which share a weight."""
    first, module = next(iter(named.items()))
    weight: Tensor = module.weight
    limits = {m.max_norm for m in named.values()}
    if len(limits) > 1:
        raise SpecError(
            f"max_norm of {', '.join(map(repr, named))}: got {sorted(map(str, limits))}, expected one value, because "
            "they share a weight"
        )
    table = Table(
        first or "weight",
        rows=weight.shape[0],
        dim=weight.shape[1],
        dtype=_DTYPES[weight.dtype],
        init_bound=_bound(module) if weight.is_meta else None,
        frozen=not weight.requires_grad,
    )
    features = [Feature(name or "weight", table.name, pooling=_pooling(m)) for name, m in named.items()]
    rows = EmbeddingCollection([table], features, seed=seed, device="meta", backend=backend)
    rows.to(weight.dtype)
    if limits != {None}:
        rows.max_norms[table.name] = cast(float, module.max_norm)
    return rows


def _replacements(rows: EmbeddingCollection, named: dict[str, _Torch]) -> dict[int, nn.Module]:
    """Build the modules that replace ``named``, and copy their shared weight to the table.

    The keys of the result are ``id(old_module)``.
    """
    weight: Tensor = next(iter(named.values())).weight
    if not weight.is_meta:
        (table,) = rows.tables
        rows.set_weight(table, weight.detach())
    made: dict[int, nn.Module] = {}
    for feature, old in zip(rows.features, named.values(), strict=True):
        if isinstance(old, nn.Embedding):
            new = Embedding(rows, feature.name, old.padding_idx, old.max_norm)
        else:
            mode = cast(Mode, old.mode)
            new = EmbeddingBag(rows, feature.name, old.padding_idx, old.max_norm, mode, old.include_last_offset)
        new.train(old.training)
        if not weight.is_meta:
            new.limit_norms()
        made[id(old)] = new
    return made


def _bound(module: _Torch) -> float:
    """Return the bound of uniform initial values. Their standard deviation is 1, as in torch, or less for ``max_norm``.

    The norm of a row then never exceeds ``max_norm``.
    """
    longest = math.inf if module.max_norm is None else float(module.max_norm)
    return min(math.sqrt(3.0), longest / math.sqrt(module.embedding_dim))


def _pooling(module: _Torch) -> Pooling:
    """Return the pooling of a module's feature: "sum" for an ``nn.Embedding``, and "none" for the mode "max".

    An ``nn.Embedding`` looks up bags of one id, so the sum is the vector of the id. Tables cannot pool by maximum.
    """
    if isinstance(module, nn.Embedding):
        return "sum"
    return "none" if module.mode == "max" else cast(Pooling, module.mode)
