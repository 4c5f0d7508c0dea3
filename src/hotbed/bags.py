"""Convert what users give as the ids of one feature into `Bags`.

Bags of three samples, ``[[4, 1], [], [3]]``, are values ``[4, 1, 3]`` and offsets ``[0, 2, 2, 3]``; a tensor ``[[4, 1],
[3, 2]]`` has a fixed number of ids per sample: values ``[4, 1, 3, 2]``, ``fixed`` 2, and no offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.errors import BatchError
from hotbed.specs import Padding

INDEX_DTYPES = (torch.int32, torch.int64)
_LARGEST = (1 << 63) - 1

Array: TypeAlias = NDArray[Any]
Entry: TypeAlias = (
    Tensor | Array | tuple[Tensor, Tensor] | tuple[Array, Array] | Sequence[int] | Sequence[Sequence[int] | Array]
)
"""What `Jagged.from_dict` takes for a feature."""


class Bags(NamedTuple):
    """One feature of a `Jagged`: ``values [N]``, ``fixed`` ids per sample or ``offsets [B + 1]``, ``weights [N]``."""

    values: Tensor
    batch_size: int
    fixed: int | None
    offsets: Tensor | None
    weights: Tensor | None

    def lengths(self) -> Tensor:
        """Count the ids of each sample ``[B]``, int64."""
        if self.offsets is not None:
            return self.offsets.diff()
        return torch.full((self.batch_size,), self.fixed or 0, dtype=torch.int64, device=self.values.device)


_WHOLE_OFFSETS = (
    "offsets are [B + 1]; those of nn.EmbeddingBag [B] lack the end: torch.cat([offsets, "
    "offsets.new_tensor([len(ids)])])"
)
FROM_KEYED = "Jagged.from_keyed(ids.keys(), ids.values(), ids.lengths(), ids.weights_or_none())"


def is_keyed(ids: object) -> bool:
    """Say whether this is TorchRec's ``KeyedJaggedTensor``, or has what it has."""
    return all(callable(getattr(ids, name, None)) for name in ("keys", "values", "lengths"))


def bags_of_features(features: Mapping[str, Entry]) -> dict[str, Bags]:
    """Convert what `Jagged.from_dict` takes; all features must have the same number of samples."""
    if not isinstance(features, Mapping):
        how = FROM_KEYED if is_keyed(features) else "Jagged.from_dict({'FEATURE': …, …})"
        raise BatchError(f"the features are {type(features).__name__}, must be a dict of ids by name; use {how}")
    bags = {name: bags_of(name, entry) for name, entry in features.items()}
    if not bags:
        raise BatchError("a Jagged needs at least one feature")
    first, batch_size = next((name, b.batch_size) for name, b in bags.items())
    for name, b in bags.items():
        if b.batch_size != batch_size:
            fewer = b if b.batch_size < batch_size else bags[first]
            hint = "" if fewer.offsets is None or abs(b.batch_size - batch_size) != 1 else f"; {_WHOLE_OFFSETS}"
            raise BatchError(f"feature '{name}' has {b.batch_size:,} samples but '{first}' has {batch_size:,}{hint}")
    return bags


def bags_of(name: str, entry: Entry) -> Bags:
    """Convert an entry of `Jagged.from_dict`; a `BatchError` names the feature."""
    if isinstance(entry, tuple) and len(entry) == 2 and all(isinstance(part, (Tensor, np.ndarray)) for part in entry):
        values, offsets = (_tensor_of(name, part) for part in cast("tuple[Tensor | Array, Tensor | Array]", entry))
        _check_ids(name, values)
        if offsets.dim() != 1 or len(offsets) < 1 or offsets.dtype not in INDEX_DTYPES:
            raise BatchError(
                f"feature '{name}': offsets must be [B + 1] of int32 or int64, got {describe_tensor(offsets)}"
            )
        if 0 <= int(offsets[-1]) < len(values):
            raise BatchError(
                f"feature '{name}': offsets end at {int(offsets[-1]):,} but there are {len(values):,} ids; "
                f"{_WHOLE_OFFSETS}"
            )
        return Bags(values, len(offsets) - 1, None, offsets.long(), None)
    if isinstance(entry, Tensor) or (isinstance(entry, np.ndarray) and entry.dtype != object):
        ids = _tensor_of(name, entry)
        if ids.is_nested:
            return _bags_of_nested(name, ids)
        _check_ids(name, ids)
        if ids.dim() == 1:
            return Bags(ids, len(ids), 1, None, None)
        if ids.dim() == 2:
            return Bags(ids.reshape(-1), ids.shape[0], ids.shape[1], None, None)
        raise BatchError(f"feature '{name}': ids must be [B] or [B, k], got {describe_tensor(ids)}")
    return _bags_of_lists(name, cast("Sequence[Sequence[int]]", entry))


def _tensor_of(name: str, values: Tensor | Array) -> Tensor:
    """Convert values to a tensor; integers of dtypes that torch has no arithmetic for become int64."""
    if isinstance(values, Tensor):
        return values
    if values.dtype.kind not in "iu":
        raise BatchError(
            f"feature '{name}': ids must be integers, got an array of {values.dtype} {list(values.shape)}; convert "
            "with ids.astype('int64')"
        )
    if values.dtype == np.uint64 and values.size and values.max() > _LARGEST:
        _refuse_large(name, int(values.max()), f"at position {np.unravel_index(values.argmax(), values.shape)[0]}")
    return torch.from_numpy(values.astype(np.int32 if values.dtype == np.int32 else np.int64))


def _bags_of_lists(name: str, entry: Sequence[Sequence[int]] | Sequence[int]) -> Bags:
    """Convert one list of ids per sample, or one id per sample; whole lists at a time, not id by id."""
    wanted = "a tensor, an array, or a list of one id or one list of ids per sample"
    if isinstance(entry, (str, bytes, Mapping)) or not isinstance(entry, Iterable):
        raise BatchError(f"feature '{name}': ids must be {wanted}, got {_shown(entry)}")
    # Iterating over an array makes a NumPy integer per id; `tolist` makes plain ones at once.
    bags = [bag.tolist() if isinstance(bag, (Tensor, np.ndarray)) else bag for bag in cast("Iterable[Any]", entry)]
    if bags and all(map(_is_integer, set(map(type, bags)))):
        return Bags(_int64(name, bags, lambda i: f"at sample {i}"), len(bags), 1, None, None)
    for sample, bag in enumerate(bags):
        if isinstance(bag, (str, bytes, Mapping)) or not isinstance(bag, Collection):
            raise BatchError(
                f"feature '{name}': ids must be {wanted}, got {_shown(bag)} at sample {sample}; a sample without ids "
                "has an empty list"
            )
    lengths = torch.tensor(list(map(len, bags)), dtype=torch.int64)
    offsets = offsets_of(lengths)

    def place(i: int) -> str:
        sample = int(torch.searchsorted(offsets, i, right=True)) - 1
        return f"at sample {sample}, position {i - int(offsets[sample])}"

    return Bags(_int64(name, list(chain.from_iterable(bags)), place), len(bags), None, offsets, None)


def _int64(name: str, ids: list[Any], place: Callable[[int], str]) -> Tensor:
    """Convert ids of a list to ``[N]``; ``place`` describes where the i-th is."""
    for kind in set(map(type, ids)):
        if not _is_integer(kind):
            at = next(i for i, value in enumerate(ids) if type(value) is kind)
            raise BatchError(
                f"feature '{name}': ids must be integers, got {_shown(ids[at])} {place(at)}; convert ids with int(), "
                "number words first, and leave out what is missing"
            )
    try:
        return torch.from_numpy(np.fromiter(map(int, ids), dtype=np.int64, count=len(ids)))
    except OverflowError:
        at = next(i for i, value in enumerate(ids) if not -_LARGEST - 1 <= int(value) <= _LARGEST)
        _refuse_large(name, int(ids[at]), place(at))


def _is_integer(kind: type) -> bool:
    """Say whether values of this type are integers; True and False are not."""
    return issubclass(kind, (int, np.integer)) and kind is not bool


def _refuse_large(name: str, value: int, place: str) -> NoReturn:
    raise BatchError(
        f"feature '{name}': id {value} {place} does not fit into 64 bits with a sign (−2⁶³ … 2⁶³ − 1); take the "
        "remainder, or hash ids before"
    )


def _shown(value: object) -> str:
    """Shorten a value for messages."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:57]}…"


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
        raise BatchError(
            f"feature '{name}': ids must be int32 or int64, got {describe_tensor(ids)}; convert with ids.long()"
        )


def bags_of_padded(name: str, ids: Tensor, padding_id: int | None, lengths: Tensor | None) -> Bags:
    """Leave padding out of ids ``[B, L]``: every ``padding_id``, or what is beyond ``lengths [B]``."""
    _check_ids(name, ids)
    if ids.dim() != 2 or (lengths is not None and lengths.shape != ids.shape[:1]):
        given = "" if lengths is None else f", with lengths {describe_tensor(lengths)}"
        raise BatchError(
            f"feature '{name}': padded ids are [samples, length], with lengths [samples], got "
            f"{describe_tensor(ids)}{given}"
        )
    if lengths is None:
        kept = ids != padding_id
    else:
        check_integers(f"feature '{name}': lengths", lengths)
        if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= ids.shape[1]:
            raise BatchError(
                f"feature '{name}': lengths are {int(lengths.min())} to {int(lengths.max())}, must be between 0 and "
                f"{ids.shape[1]}, the padded length"
            )
        kept = padding_mask(lengths, ids.shape[1], None)
    return Bags(ids[kept], len(ids), None, offsets_of(kept.sum(1)), None)


def take_bags(bags: Bags, samples: Tensor) -> Bags:
    """Select the bags of these samples ``[b]``, in this order."""
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
    """Return per-id weights, 1 where there are none."""
    if bags.weights is not None:
        return bags.weights
    return torch.ones(len(bags.values), dtype=torch.float32, device=bags.values.device)


def checked_totals(names: list[str], offsets: Tensor) -> list[int]:
    """Count the ids of each ragged feature; raise unless every row of offsets starts at 0 and never falls."""
    falls = offsets[:, 1:] < offsets[:, :-1]
    if bool((offsets[:, 0] != 0).any() | falls.any()):
        i = int(((offsets[:, 0] != 0) | falls.any(dim=1)).nonzero()[0])
        name, row = names[i], offsets[i]
        if int(row[0]) != 0:
            raise BatchError(f"feature '{name}': offsets start at {int(row[0])}, must start at 0")
        at = int(falls[i].nonzero()[0])
        raise BatchError(
            f"feature '{name}': offsets fall from {int(row[at])} to {int(row[at + 1])} at sample {at}; "
            f"offsets are running totals of the ids per sample"
        )
    return offsets[:, -1].tolist()


def check_integers(name: str, given: Tensor) -> None:
    """Raise unless lengths or offsets are integers, or there are none."""
    if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise BatchError(
            f"{name} have a wrong dtype: got {describe_tensor(given)}, expected integers. Convert them with .long()."
        )


def lengths_by_key(keys: Sequence[str], lengths: Tensor) -> tuple[Tensor, list[int | None], int]:
    """Return lengths ``[F, B]``, the one length that all samples of each key have or None, and the sum of lengths.

    Lengths may be ``[F · B]`` or ``[F, B]``. They are copied to the host with a single synchronization.
    """
    check_integers("lengths", lengths)
    count = len(keys)
    if not keys or lengths.dim() == 0 or lengths.numel() % count or lengths.shape[:-1] not in ((), (count,)):
        raise BatchError(f"lengths must be [{count} keys × batch size], got {describe_tensor(lengths)}")
    by_key = lengths.reshape(count, -1) if lengths.numel() else lengths.new_empty(count, 0)
    if not by_key.numel():
        return by_key, [None] * count, 0
    per_key = by_key.amin(1), by_key.amax(1), by_key.sum(1)
    least, most, sums = torch.stack([t.to(torch.int64) for t in per_key]).tolist()
    if min(least) < 0:
        key, sample = divmod(int(by_key.argmin()), by_key.shape[1])
        raise BatchError(f"feature '{keys[key]}': length {min(least)} at sample {sample}")
    return by_key, [k if k == longest else None for k, longest in zip(least, most, strict=True)], sum(sums)


def offsets_of(lengths: Tensor) -> Tensor:
    """Sum lengths up along the last dim, with a leading 0, int64."""
    return torch.nn.functional.pad(lengths.cumsum(-1, dtype=torch.int64), (1, 0))


def padding_mask(lengths: Tensor, length: int, padding: Padding | None) -> Tensor:
    """Say which places of bags with these lengths ``[B]``, padded to ``length``, have an id: ``[B, length]`` bool.

    They come first, unless the padding is ``"left"``.
    """
    place = torch.arange(length, device=lengths.device)
    return place >= length - lengths[:, None] if padding == "left" else place < lengths[:, None]


def describe_tensor(t: Tensor) -> str:
    """Format dtype and shape for error messages."""
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
