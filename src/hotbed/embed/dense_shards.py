"""Gather what FSDP2 has sharded for a state, and shard a state that is loaded.

Under ``fully_shard`` parameters and the moments of their optimizers are ``DTensor``s, of which each rank has some first
rows. Checkpoints and ``state_dict`` have them whole, so that any number of ranks loads them, with FSDP2 or without: of
a weight ``[5, 8]`` rank 0 of 2 has the rows 0 … 2 and rank 1 the others; the file has all 5, and of 3 ranks that load
it the last has row 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def is_sharded(value: object) -> bool:
    """Say whether this is a ``DTensor``, without importing what makes them."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def local_values(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has."""
    return cast("Any", tensor).to_local() if is_sharded(tensor) else tensor


def gather_shards(value: object, *, keep: bool = True) -> Any:
    """Replace the sharded tensors of a state by whole ones; all ranks must call this.

    A rank that does not ``keep`` them gets its own shards in their place, so that it has no more than one whole tensor
    at a time. What is not sharded is not copied.
    """
    if is_sharded(value):
        whole = cast("Any", value).full_tensor().detach()
        return whole if keep else local_values(cast("Tensor", value))
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, object]", value)
        if not _has_sharded(entries):
            return entries
        return {key: gather_shards(entry, keep=keep) for key, entry in entries.items()}
    if isinstance(value, list | tuple) and _has_sharded(cast("list[object]", value)):
        return type(value)(gather_shards(entry, keep=keep) for entry in cast("list[object]", value))
    return value


def _has_sharded(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_sharded, cast("Mapping[Any, object]", value).values()))
    if isinstance(value, list | tuple):
        return any(map(_has_sharded, cast("list[object]", value)))
    return is_sharded(value)


def sharded_as(value: Any, like: object) -> Any:
    """Shard a whole tensor as another of its shape is; whatever else it is, return it as it is."""
    shape: torch.Size | None = getattr(value, "shape", None)
    if not is_sharded(like) or is_sharded(value) or shape != cast("Tensor", like).shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    place: Any = like
    value = value.to(place.device)
    # Every rank has all of it, so that none is sent.
    return distribute_tensor(value, place.device_mesh, place.placements, src_data_rank=None)


def sharded_parameters(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the entries of a model's whole state whose parameters are sharded."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return {name: sharded_as(value, own.get(name)) for name, value in state.items()}


def sharded_moments(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the moments of an optimizer's whole state whose parameters are sharded."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in state["param_groups"] for index in group["params"]]
    like = dict(zip(order, parameters, strict=True))
    moments = {
        index: {name: sharded_as(value, like.get(index)) for name, value in of.items()}
        for index, of in cast("Mapping[int, Mapping[str, Any]]", state["state"]).items()
    }
    return {**state, "state": moments}
