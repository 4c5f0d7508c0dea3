"""`Bags`: the ids of one feature, and what they can be made from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from hotbed.errors import BatchError
from hotbed.specs import is_int

INDEX_DTYPES = (torch.int32, torch.int64)


class Bags(NamedTuple):
    """One feature of a `Jagged`: ``values [N]``, ``fixed`` ids per sample or ``offsets [B + 1]``, ``weights [N]``."""

    values: Tensor
    batch_size: int
    fixed: int | None
    offsets: Tensor | None
    weights: Tensor | None

    def lengths(self) -> Tensor:
        """Number of ids of each sample ``[B]``, int64."""
        if self.offsets is not None:
            return self.offsets.diff()
        return torch.full((self.batch_size,), self.fixed or 0, dtype=torch.int64, device=self.values.device)


def bags_of(name: str, entry: Tensor | tuple[Tensor, Tensor] | Sequence[Sequence[int]]) -> Bags:
    """Bags of an entry of `Jagged.from_dict`; a `BatchError` names the feature."""
    if isinstance(entry, Tensor):
        if entry.is_nested:
            return _bags_of_nested(name, entry)
        _check_ids(name, entry)
        if entry.dim() == 1:
            return Bags(entry, len(entry), 1, None, None)
        if entry.dim() == 2:
            return Bags(entry.reshape(-1), entry.shape[0], entry.shape[1], None, None)
        raise BatchError(f"feature '{name}': ids must be [B] or [B, k], got {describe(entry)}")
    if isinstance(entry, tuple):
        values, offsets = cast("tuple[Tensor, Tensor]", entry)
        _check_ids(name, values)
        if offsets.dim() != 1 or len(offsets) < 1 or offsets.dtype not in INDEX_DTYPES:
            raise BatchError(f"feature '{name}': offsets must be [B + 1] of int32 or int64, got {describe(offsets)}")
        return Bags(values, len(offsets) - 1, None, offsets.long(), None)
    ids = [i for bag in entry for i in bag]
    for i in ids:
        if not is_int(i):
            raise BatchError(f"feature '{name}': ids must be integers, got {i!r}")
    lengths = torch.tensor([len(bag) for bag in entry], dtype=torch.int64)
    return Bags(torch.tensor(ids, dtype=torch.int64), len(entry), None, offsets_of(lengths), None)


def _bags_of_nested(name: str, entry: Tensor) -> Bags:
    if entry.layout != torch.jagged:
        raise BatchError(f"feature '{name}': nested tensors need layout=torch.jagged, got {entry.layout}")
    if entry.lengths() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise BatchError(f"feature '{name}': the nested tensor has holes (from narrow?); pass its .contiguous()")
    _check_ids(name, entry.values())
    offsets = cast(Tensor, entry.offsets())  # pyright: ignore[reportAttributeAccessIssue]
    return Bags(entry.values(), entry.shape[0], None, offsets.long(), None)


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.dtype not in INDEX_DTYPES:
        raise BatchError(f"feature '{name}': ids must be int32 or int64, got {describe(ids)}; convert with ids.long()")


def take_bags(bags: Bags, samples: Tensor) -> Bags:
    """The bags of these samples ``[b]``, in this order."""
    if bags.fixed is not None:
        column = torch.arange(bags.fixed, device=samples.device)
        position, offsets = (samples[:, None] * bags.fixed + column).reshape(-1), None
    else:
        assert bags.offsets is not None
        lengths = bags.lengths()[samples]
        offsets = offsets_of(lengths)
        position = torch.arange(int(offsets[-1]), device=samples.device)
        position += torch.repeat_interleave(bags.offsets[samples] - offsets[:-1], lengths)
    weights = None if bags.weights is None else bags.weights[position]
    return Bags(bags.values[position], len(samples), bags.fixed, offsets, weights)


def weights_of(bags: Bags) -> Tensor:
    """Per-id weights, 1 where there are none."""
    if bags.weights is not None:
        return bags.weights
    return torch.ones(len(bags.values), dtype=torch.float32, device=bags.values.device)


def offsets_of(lengths: Tensor) -> Tensor:
    """Running totals along the last dim with a leading 0, int64."""
    return torch.nn.functional.pad(lengths.cumsum(-1, dtype=torch.int64), (1, 0))


def describe(t: Tensor) -> str:
    """Dtype and shape, as error messages show them."""
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


def version(t: Tensor) -> int:
    """Count of in-place changes of a tensor; −1 in inference mode, where torch keeps none."""
    return -1 if t.is_inference() else t._version
