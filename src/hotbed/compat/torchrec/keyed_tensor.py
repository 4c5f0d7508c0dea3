"""Hold and regroup vectors, like TorchRec's ``KeyedTensor``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.errors import BatchError, SpecError
from hotbed.torch_private import TreeSpec, register_pytree_flatten_spec, register_pytree_node


class HasTensors(ABC):
    """Base of all batches of this package."""

    @abstractmethod
    def _tensors(self) -> list[Tensor]:
        """Return all tensors, with the values first."""

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._tensors()[0].device

    def size_in_bytes(self) -> int:
        """Return the number of bytes of all tensors."""
        return sum(t.element_size() * t.numel() for t in self._tensors())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the tensors until the stream has finished its current work."""
        for t in self._tensors():
            t.record_stream(stream)  # pyright: ignore[reportArgumentType]


class KeyedTensor(HasTensors):
    """Hold the vectors of several keys, concatenated.

    Parameters
    ----------
    keys, length_per_key
        Names of the keys, and the size of each key along ``key_dim``.
    values
        Vectors of all keys ``[B, sum of length_per_key]``, or a function that computes them on first use.
    key_dim
        Dimension of concatenation. Instead of the dimension, collections pass a mapping from keys to vectors. The
        dimension is then 1, and vectors are returned without a copy until `values` is first called.
    offset_per_key, index_per_key
        Ignored, because they are computed from the arguments above.
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor | Callable[[], Tensor],
        key_dim: int | Mapping[str, Tensor] = 1,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
    ) -> None:
        del offset_per_key, index_per_key
        self._keys, self._length_per_key, self._values = list(keys), list(length_per_key), values
        self._index = {key: i for i, key in enumerate(self._keys)}
        self._key_dim = key_dim if isinstance(key_dim, int) else 1
        self._parts = None if isinstance(key_dim, int) else key_dim

    @staticmethod
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> KeyedTensor:
        """Build a `KeyedTensor` from one tensor per key. The tensors are concatenated along ``cat_dim``."""
        sizes = [t.shape[key_dim] for t in tensors]
        return KeyedTensor(keys, sizes, torch.cat(list(tensors), dim=cat_dim), key_dim)

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Concatenate the vectors of each group of keys. A key may be in several groups, or in none."""
        parts = [keyed.to_dict() for keyed in keyed_tensors]
        named = {key: vectors for of_keys in parts for key, vectors in of_keys.items()}
        for key in chain.from_iterable(groups):
            if (found := sum(key in of_keys for of_keys in parts)) != 1:
                raise BatchError(
                    f"key '{key}': got {found} KeyedTensors with this key, expected one. The keys are {list(named)}. "
                    "Correct the groups, or use unique keys."
                )
        dim = keyed_tensors[0].key_dim()
        return [torch.cat([named[key] for key in group], dim=dim) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """Return the result of `regroup` by name. ``keys`` are the names of the groups."""
        check_names(groups, keys)
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def keys(self) -> list[str]:
        """Return the keys."""
        return self._keys

    def values(self) -> Tensor:
        """Return the vectors of all keys ``[B, sum of length_per_key]``."""
        if not isinstance(self._values, Tensor):
            self._values = self._values()
        return self._values

    def length_per_key(self) -> list[int]:
        """Return the size of each key along `key_dim`."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the position where each key starts along `key_dim`, and the end of the last key."""
        return list(accumulate(self._length_per_key, initial=0))

    def key_dim(self) -> int:
        """Return the dimension of concatenation."""
        return self._key_dim

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """Return a copy on a device."""
        moved = self.values().to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, moved, self._key_dim)

    @override
    def _tensors(self) -> list[Tensor]:
        return [self.values()]

    def __getitem__(self, key: str) -> Tensor:
        at = self._index[key]
        if self._parts is not None and not isinstance(self._values, Tensor):
            return self._parts[key]
        return self.values().narrow(self._key_dim, sum(self._length_per_key[:at]), self._length_per_key[at])

    def to_dict(self) -> dict[str, Tensor]:
        """Return the vectors by key."""
        if self._parts is not None and not isinstance(self._values, Tensor):
            return dict(self._parts)
        return dict(zip(self._keys, self.values().split(self._length_per_key, self._key_dim), strict=True))

    @override
    def __str__(self) -> str:
        if not self._keys:
            return "KeyedTensor()\n"
        lines = [f'    "{key}": {vectors.tolist()}' for key, vectors in self.to_dict().items()]
        return "KeyedTensor({\n" + ",\n".join(lines) + "\n})\n"


def check_names(groups: Sequence[Sequence[str]], keys: Sequence[str]) -> None:
    """Raise `SpecError` unless there is one key per group."""
    if len(groups) != len(keys):
        raise SpecError(
            f"keys: got {len(keys)} keys for {len(groups)} groups, expected one key per group. Pass a key per group."
        )


Context = tuple[list[str], list[int], int]


def _flatten(keyed: KeyedTensor) -> tuple[list[Tensor], Context]:
    return [keyed.values()], (keyed.keys(), keyed.length_per_key(), keyed.key_dim())


def _unflatten(tensors: Iterable[Any], context: Context) -> KeyedTensor:
    keys, sizes, dim = context
    (values,) = tensors
    return KeyedTensor(keys, sizes, values, dim)


def _flatten_as(keyed: KeyedTensor, spec: TreeSpec) -> list[Tensor]:
    """Return the leaves for torch's pytrees: one tensor with all vectors, with keys in the order of ``spec``."""
    return KeyedTensor.regroup([keyed], [spec.context[0]])


register_pytree_node(KeyedTensor, _flatten, _unflatten, serialized_type_name="hotbed.compat.torchrec.KeyedTensor")
register_pytree_flatten_spec(KeyedTensor, _flatten_as)
