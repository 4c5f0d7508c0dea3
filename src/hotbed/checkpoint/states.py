"""Turn the states of models, optimizers and so on into plain values and tensors, and back.

JSON has no tensors, tuples or integer keys, which torch's states use: they are written as ``{"$kind": …}``, and tensors
go into a safetensors file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from hotbed.embed.dense_shards import gathered
from hotbed.errors import CheckpointError
from hotbed.torch_hooks import without_tables


class Stateful(Protocol):
    """Anything whose state a checkpoint can hold: a model, an optimizer, a loader."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors and plain values, nested in mappings and sequences."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over what `state_dict` gave."""
        ...


class RandomState:
    """Hold the state of torch's default random generators, on all ranks, in a checkpoint.

    ``gather`` makes rows of all ranks, in rank order, from those of each; default: there is one rank.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor] = lambda rows: rows, rank: int = 0) -> None:
        self._gather, self._rank = gather, rank

    def state_dict(self) -> dict[str, Any]:
        """Generator states by rank ``[W, n]`` uint8; of CUDA that of the present device, or none ``[W, 0]``."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0, dtype=torch.uint8)
        return {"cpu": self._gather(torch.get_rng_state()[None]), "cuda": self._gather(cuda[None])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the generators. Ranks beyond those that were saved take the states in turn."""
        cpu, cuda = state_dict["cpu"], state_dict["cuda"]
        torch.set_rng_state(cpu[self._rank % len(cpu)].clone())  # torch reads a view of a tensor from its start
        if cuda.shape[1] and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda[self._rank % len(cuda)].clone())


Tensors = dict[tuple[object, ...], tuple[str, Tensor]]
"""Key and tensor by what the tensor's memory is: tied weights have several places in a state and are saved once."""


def plain(value: object, tensors: Tensors, where: str) -> object:
    """Turn a value into what JSON has; its tensors are put into ``tensors``."""
    if isinstance(value, Tensor):
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        return {"$tensor": tensors.setdefault(memory, (where, value))[0]}
    if isinstance(value, Mapping):
        items = [
            (k, plain(v, tensors, f"{where}.{k}".lstrip("."))) for k, v in cast("Mapping[Any, Any]", value).items()
        ]
        if all(isinstance(k, str) and not k.startswith("$") for k, _ in items):
            return dict(items)
        if all(isinstance(k, str | int) for k, _ in items):
            return {"$items": [[k, v] for k, v in items]}
    elif isinstance(value, list | tuple):
        found = [plain(v, tensors, f"{where}.{i}".lstrip(".")) for i, v in enumerate(cast("list[Any]", value))]
        return {"$tuple": found} if isinstance(value, tuple) else found
    elif value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(f"a state holds {type(value).__name__} at '{where}', which a checkpoint cannot hold")


def restored(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `plain`, of what `hotbed.checkpoint.schema.check_state` has checked; KeyError for a missing tensor."""
    if isinstance(value, list):
        return [restored(v, tensors) for v in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, Any]", value)
    if "$tensor" in entries:
        return tensors[entries["$tensor"]]
    if "$items" in entries:
        return {k: restored(v, tensors) for k, v in entries["$items"]}
    if "$tuple" in entries:
        return tuple(restored(v, tensors) for v in entries["$tuple"])
    return {k: restored(v, tensors) for k, v in entries.items()}


def states_of(parts: Mapping[str, Stateful], *, is_first: bool) -> tuple[dict[str, Any], dict[str, dict[str, Tensor]]]:
    """Return the states of parts, without tables, as plain values and as tensors by name.

    The state ``{"lr": 0.1, "m": t}`` of the part ``dense`` is ``{"lr": 0.1, "m": {"$tensor": "m"}}`` and ``{"m": t}``.
    """
    with without_tables():
        # What FSDP2 has sharded is written whole, by the first rank.
        states = {name: gathered(part.state_dict(), keep=is_first) for name, part in parts.items()}
    plains: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, state in states.items():
        found: Tensors = {}
        plains[name] = plain(state, found, "")
        tensors[name] = {key: t.detach() for key, t in found.values()}
        if len(tensors[name]) < len(found):
            raise CheckpointError(f"two tensors of part '{name}' would have one name in {name}.safetensors; rename one")
    return plains, tensors
