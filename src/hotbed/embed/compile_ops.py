"""Implement lookups in graphs of ``torch.compile`` with custom operators.

A graph has tensors and numbers, but no batches, tables or optimizers. So the operator ``hotbed::look_up`` gets the
number of the collection as a constant, and the number of the batch in a tensor, so that one graph serves all batches.
It finds the objects by their numbers and calls `PooledLookup`. A `_Call` replaces the autograd context of that
function. The lookup returns the number of the call in a tensor, which keeps the call alive. Autograd saves the tensor
for backward. There, the operator ``hotbed::receive`` finds the call and passes the gradients to the optimizers.

Three properties keep compilers from changing the result. Neither operator changes a tensor in place, so
functionalization reorders nothing. Backward returns the result of ``hotbed::receive`` (the gradient of the collection's
anchor), so it is not removed as dead code. Each lookup gets a new tensor ``call``, so equal lookups are not merged.

For the reasons, and lookups that are not traced, see docs/decisions/pytorch-integration.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hotbed.batch import Embeddings
from hotbed.embed import single_lookup
from hotbed.embed.lookup_gradients import PooledLookup, Updaters
from hotbed.embed.single_lookup import Collection
from hotbed.embed.table_group import Request, TableGroup
from hotbed.errors import BatchError, OptimizerError
from hotbed.jagged import Bags, Jagged
from hotbed.torch_hooks import find_by_number, number_tensor, traced_number
from hotbed.torch_private import is_exporting

REASON = (
    "hotbed looks up these features outside of graphs. With fullgraph=True, tables must be on one rank and not "
    "dynamic, features must be pooled, and the ids a hotbed.Jagged that was created before the call of the compiled "
    "function (docs/frameworks.md)"
)
"""Reason of a graph break, or of the error with ``fullgraph=True``."""


class TracedCollection(Collection, Protocol):
    """Attributes of `EmbeddingCollection` that lookups in graphs use."""

    number: int
    _is_distributed: bool
    _has_dynamic: bool
    _names: tuple[str, ...]
    _pooled_names: tuple[tuple[str, ...], ...]

    @property
    def is_traceable(self) -> bool:
        """Whether a graph can contain lookups in these tables."""
        ...

    def forward(self, ids: Jagged, *, room: int = 0) -> Embeddings:
        """Look up and pool."""
        ...

    def check(self, ids: Jagged) -> Jagged:
        """Return a batch in which all ids are valid rows."""
        ...

    def _dtype_on(self, device_type: str) -> torch.dtype: ...

    def _requests(
        self, group: TableGroup, ids: Jagged, room: int, dtype: torch.dtype
    ) -> tuple[list[Request], list[Tensor]]: ...


def trace_lookup(collection: TracedCollection, ids: Jagged, room: int) -> Embeddings:
    """Trace `EmbeddingCollection.forward`, or break the graph if the lookup cannot be traced."""
    number = traced_number(ids) if type(ids) is Jagged else None
    if number is None or is_exporting() or room not in (0, 1) or not collection.is_traceable:
        return _look_up_outside(collection, ids, room)
    values, offsets, weights = ids.values, ids.offsets, ids.weights
    # Compute the number of samples from a shape, which may be symbolic. `ids.batch_size` would be a constant.
    ids_per_sample = sum([k or 0 for k in ids.fixed])
    if offsets is None and not ids_per_sample:
        return _look_up_outside(collection, ids, room)
    batch_size = values.shape[0] // ids_per_sample if offsets is None else offsets.shape[1] - 1
    trains = torch.is_grad_enabled() and collection._is_trained(collection.tables)
    trains_weights = torch.is_grad_enabled() and weights is not None and weights.requires_grad
    anchor = collection.anchor if trains else collection.anchor.detach()
    call = torch.empty(0, device="cpu")  # a new tensor for each lookup, so that compilers do not merge lookups
    dtype = collection._dtype_on(values.device.type)
    vectors, _ = torch.ops.hotbed.look_up(
        number,
        values,
        offsets,
        weights,
        anchor,
        call,
        collection.number,
        room,
        batch_size,
        dtype,
        trains,
        trains_weights,
    )
    found = Embeddings(collection._names)
    for names, of_dim in zip(collection._pooled_names, vectors, strict=True):
        found.add_pooled(names, of_dim[:, 1:] if room else of_dim, of_dim if room else None)
    return found


@torch.compiler.disable(reason=REASON)  # pyright: ignore[reportUntypedFunctionDecorator]
def _look_up_outside(collection: TracedCollection, ids: Jagged, room: int) -> Embeddings:
    return collection.forward(ids, room=room)


class _Call:
    """The ``ctx`` of a call of `PooledLookup`."""

    requests: Sequence[Request]
    updaters: Updaters
    weights: Tensor | None

    def __init__(self, needs_input_grad: tuple[bool, bool]) -> None:
        self.needs_input_grad = needs_input_grad

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing, because unused outputs already have the gradient None."""


class _Calls:
    """Calls of all table groups. ``positions [n]`` has the batch positions of ids if some ids were repaired."""

    def __init__(self, calls: list[_Call], positions: Tensor | None) -> None:
        self.calls, self.positions = calls, positions


@torch.library.custom_op("hotbed::look_up", mutates_args=())
def _look_up(
    number: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    call: Tensor,
    collection: int,
    room: int,
    batch_size: int,
    dtype: torch.dtype,
    trains: bool,
    trains_weights: bool,
) -> tuple[list[Tensor], Tensor]:
    """Return the vectors of each dim ``[B, room + features, D]``, and the number of the calls for `_receive`."""
    tables = cast("TracedCollection | None", find_by_number(collection))
    ids = cast("Jagged | None", find_by_number(int(number)))
    if tables is None or ids is None:
        raise BatchError(
            "the batch of a compiled lookup was deleted before its recomputation. Keep the batch until the end of "
            "backward"
        )
    tables._check_call(ids, room, trains)
    ids = _restore_batch(ids, values, offsets, weights)
    checked, positions = (tables.check(ids), None) if not trains_weights else _check_with_positions(tables, ids)
    outputs: list[Tensor] = []
    calls: list[_Call] = []
    for group in tables._groups:
        calls.append(_Call((trains, trains_weights)))
        requests, of_group = tables._requests(group, checked, room, dtype)
        PooledLookup.forward(calls[-1], anchor, checked.weights, requests, of_group, tables._updaters)
        outputs += of_group
    if not (trains or trains_weights):
        return outputs, torch.empty(0, dtype=torch.int64, device="cpu")
    return outputs, number_tensor(_Calls(calls, positions), keep=True)


@_look_up.register_fake
def _(
    number: Tensor,
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    call: Tensor,
    collection: int,
    room: int,
    batch_size: int,
    dtype: torch.dtype,
    trains: bool,
    trains_weights: bool,
) -> tuple[list[Tensor], Tensor]:
    tables = cast("TracedCollection", find_by_number(collection))
    shapes = [(batch_size, room + len(group.pooled), group.dim) for group in tables._groups]
    calls = torch.empty(int(trains or trains_weights), dtype=torch.int64, device="cpu")
    return [values.new_empty(shape, dtype=dtype) for shape in shapes], calls


@torch.library.custom_op("hotbed::receive", mutates_args=())
def _receive(number: Tensor, gradients: Sequence[Tensor | None], room: int, weights: int) -> tuple[Tensor, Tensor]:
    """Pass gradients of each dim to the optimizers. Return gradients of the anchor and the per-id weights."""
    found = cast("_Calls | None", find_by_number(int(number)))
    if found is None:
        raise OptimizerError(
            "backward got a copy of the tensor that a compiled lookup saved, and the lookup was deleted. Remove hooks "
            "that copy saved tensors (save_on_cpu(pin_memory=True)), or do not compile the model"
        )
    of_weights: Tensor | None = None
    for call, gradient in zip(found.calls, gradients, strict=True):
        if gradient is None:
            continue
        _, own, *_ = PooledLookup.backward(call, gradient[:, room:])
        if own is not None:
            of_weights = own if of_weights is None else of_weights + own
    anchor = torch.zeros((), dtype=torch.float32, device="cpu")
    if of_weights is None:
        return anchor, torch.empty(0, device=_device_of(gradients))
    of_weights = of_weights.to(torch.float32)
    if found.positions is not None:
        of_weights = of_weights.new_zeros(weights).index_copy_(0, found.positions, of_weights)
    return anchor, of_weights


@_receive.register_fake
def _(number: Tensor, gradients: Sequence[Tensor | None], room: int, weights: int) -> tuple[Tensor, Tensor]:
    return torch.empty((), device="cpu"), torch.empty(weights, device=_device_of(gradients))


def _device_of(gradients: Sequence[Tensor | None]) -> torch.device:
    return next(gradient.device for gradient in gradients if gradient is not None)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[list[Tensor], Tensor]) -> None:
    ctx.save_for_backward(output[1])
    ctx.set_materialize_grads(False)
    weights, ctx.room, ctx.trains_weights = inputs[3], inputs[7], inputs[11]
    ctx.weights, ctx.dtype = (weights.shape[0], weights.dtype) if ctx.trains_weights else (0, torch.float32)


def _backward(ctx: Any, gradients: list[Tensor | None], _: Tensor | None) -> tuple[Tensor | None, ...]:
    (number,) = ctx.saved_tensors
    of_anchor, of_weights = torch.ops.hotbed.receive(number, gradients, ctx.room, ctx.weights)
    own = of_weights.to(ctx.dtype) if ctx.trains_weights else None
    return None, None, None, own, of_anchor, None, None, None, None, None, None, None


_look_up.register_autograd(_backward, setup_context=_keep)


# -- lookups of one feature ------------------------------------------------------------------------------------------


def look_up_feature(collection: TracedCollection, feature: str, bags: Bags, padding_idx: int | None) -> Tensor:
    """Trace `hotbed.embed.single_lookup.look_up`."""
    if collection._is_distributed or collection._has_dynamic:
        return _look_feature_up_outside(collection, feature, bags, padding_idx)
    index = [f.name for f in collection.features].index(feature)
    weights, trains = bags.weights, torch.is_grad_enabled() and collection._is_trained(collection.tables)
    vectors, _ = torch.ops.hotbed.look_up_feature(
        bags.values,
        bags.offsets,
        weights,
        collection.anchor if trains else collection.anchor.detach(),
        torch.empty(0, device="cpu"),
        collection.number,
        index,
        bags.batch_size,
        bags.fixed,
        padding_idx,
        collection.dtype,
        trains,
        torch.is_grad_enabled() and weights is not None and weights.requires_grad,
    )
    return vectors[:, 0]


@torch.compiler.disable(reason=REASON)  # pyright: ignore[reportUntypedFunctionDecorator]
def _look_feature_up_outside(collection: TracedCollection, feature: str, bags: Bags, padding_idx: int | None) -> Tensor:
    return single_lookup.look_up(collection, feature, bags, padding_idx)


@torch.library.custom_op("hotbed::look_up_feature", mutates_args=())
def _look_up_feature(
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    call: Tensor,
    collection: int,
    feature: int,
    batch_size: int,
    fixed: int | None,
    padding_idx: int | None,
    dtype: torch.dtype,
    trains: bool,
    trains_weights: bool,
) -> tuple[Tensor, Tensor]:
    """Return the vectors ``[B, 1, D]``, and the number of the call for `_receive`."""
    tables = cast("TracedCollection", find_by_number(collection))
    name = tables.features[feature].name
    bags, positions = Bags(values, batch_size, fixed, offsets, weights), None
    if padding_idx is not None:
        bags, keep = single_lookup.remove_id(bags, padding_idx)
        positions = keep.nonzero()[:, 0]
    if not single_lookup.is_single(tables, bags):
        found = single_lookup.look_up(tables, name, bags)  # raises the same error as outside of graphs
        raise BatchError(f"feature '{name}': got {list(found.shape)} in a compiled graph, expected an error")
    tables._check_call(None, 0, trains)
    request, out = single_lookup.make_request(tables, name, bags, trains)
    own = _Call((trains, trains_weights))
    PooledLookup.forward(own, anchor, bags.weights, [request], [out], tables._updaters)
    if not (trains or trains_weights):
        return out, torch.empty(0, dtype=torch.int64, device="cpu")
    return out, number_tensor(_Calls([own], positions), keep=True)


@_look_up_feature.register_fake
def _(
    values: Tensor,
    offsets: Tensor | None,
    weights: Tensor | None,
    anchor: Tensor,
    call: Tensor,
    collection: int,
    feature: int,
    batch_size: int,
    fixed: int | None,
    padding_idx: int | None,
    dtype: torch.dtype,
    trains: bool,
    trains_weights: bool,
) -> tuple[Tensor, Tensor]:
    tables = cast("TracedCollection", find_by_number(collection))
    count = batch_size if tables.features[feature].is_pooled else values.shape[0]
    calls = torch.empty(int(trains or trains_weights), dtype=torch.int64, device="cpu")
    return values.new_empty((count, 1, tables._groups[0].dim), dtype=dtype), calls


def _keep_feature(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])
    weights, trains_weights = inputs[2], inputs[12]
    ctx.weights, ctx.dtype = (weights.shape[0], weights.dtype) if trains_weights else (0, None)


def _backward_feature(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    (number,) = ctx.saved_tensors
    of_anchor, of_weights = torch.ops.hotbed.receive(number, [gradient], 0, ctx.weights)
    own = None if ctx.dtype is None else of_weights.to(ctx.dtype)
    return None, None, own, of_anchor, *[None] * 9


_look_up_feature.register_autograd(_backward_feature, setup_context=_keep_feature)


def _restore_batch(ids: Jagged, values: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Jagged:
    """Return the batch, or a copy with new tensors if the graph has replaced in-place changes with new tensors."""

    def is_same(t: Tensor | None, own: Tensor | None) -> bool:
        return t is own or (t is not None and own is not None and t.data_ptr() == own.data_ptr())

    if is_same(values, ids.values) and is_same(offsets, ids.offsets) and is_same(weights, ids.weights):
        return ids
    starts, sizes = (ids.starts, ids._sizes) if is_same(offsets, ids.offsets) else (None, None)
    return Jagged(
        ids.names,
        values,
        batch_size=ids.batch_size,
        fixed=ids.fixed,
        offsets=offsets,
        weights=weights,
        starts=starts,
        sizes=sizes,
    )


def _check_with_positions(tables: TracedCollection, ids: Jagged) -> tuple[Jagged, Tensor | None]:
    """Check ids with trained weights. If some were repaired, also return the batch positions of the result's ids."""
    assert ids.weights is not None
    positions = torch.arange(len(ids.weights), dtype=torch.float64, device=ids.weights.device)
    numbered = _restore_batch(ids, ids.values, ids.offsets, positions)
    numbered.mark_verified(ids.verified)
    checked = tables.check(numbered)
    assert checked.weights is not None
    at = None if checked is numbered else checked.weights.long()
    # Copy the weights, because they may change before the tables' step.
    checked.weights = ids.weights.detach().clone() if at is None else ids.weights.detach()[at]
    if at is None:
        ids.mark_verified(checked.verified)
    return checked, at
