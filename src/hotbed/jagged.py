"""Define `Jagged`, which holds the ids of several features for a batch of samples in one tensor.

The layout is feature-major: all ids of the first feature in sample order, then all ids of the second. A feature is
*fixed* (k ids in every sample and no offsets; one-hot is k = 1) or *ragged* (a row of ``offsets``). The values have the
layout of TorchRec's ``KeyedJaggedTensor``, so conversions in both directions do not copy ids. For example, two samples
of a one-hot and a ragged feature, ``Jagged.from_dict({"user": [7, 8], "history": [[4, 1], [3]]})``::

    values  7 8 │ 4 1 3     fixed (1, None)     starts (0, 2, 5)     offsets [[0, 2, 3]], of "history"

`Bags` are the ids of one feature. Three samples ``[[4, 1], [], [3]]`` have values ``[4, 1, 3]`` and offsets
``[0, 2, 2, 3]``. A tensor ``[[4, 1], [3, 2]]`` has two ids per sample: values ``[4, 1, 3, 2]``, ``fixed`` 2, and no
offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, NoReturn, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.checks import check_known
from hotbed.errors import BatchError, did_you_mean
from hotbed.specs import Padding
from hotbed.torch_hooks import Numbered
from hotbed.torch_private import version

INDEX_DTYPES = (torch.int32, torch.int64)
_LARGEST = (1 << 63) - 1

Array: TypeAlias = NDArray[Any]
Entry: TypeAlias = (
    Tensor | Array | tuple[Tensor, Tensor] | tuple[Array, Array] | Sequence[int] | Sequence[Sequence[int] | Array]
)
"""Types of a feature's ids in `Jagged.from_dict`."""


class Bags(NamedTuple):
    """One feature of a `Jagged`: ``values [N]``, ``fixed`` ids per sample or ``offsets [B + 1]``, ``weights [N]``."""

    values: Tensor
    batch_size: int
    fixed: int | None
    offsets: Tensor | None
    weights: Tensor | None

    def lengths(self) -> Tensor:
        """Return the number of ids of each sample, ``[B]`` int64."""
        if self.offsets is not None:
            return self.offsets.diff()
        return torch.full((self.batch_size,), self.fixed or 0, dtype=torch.int64, device=self.values.device)

    def part(self, samples: slice) -> Bags:
        """Return the bags of consecutive samples."""
        offsets, first, last = None, samples.start * (self.fixed or 0), samples.stop * (self.fixed or 0)
        if self.offsets is not None:
            first, last = self.offsets[[samples.start, samples.stop]].tolist()
            offsets = self.offsets[samples.start : samples.stop + 1] - first
        weights = None if self.weights is None else self.weights[first:last]
        return Bags(self.values[first:last], samples.stop - samples.start, self.fixed, offsets, weights)


_WHOLE_OFFSETS = (
    "Offsets are [B + 1]. The offsets [B] of nn.EmbeddingBag lack the end, so append it: torch.cat([offsets, "
    "offsets.new_tensor([len(ids)])])"
)
FROM_KEYED = "Jagged.from_keyed(ids.keys(), ids.values(), ids.lengths(), ids.weights_or_none())"


def is_keyed(ids: object) -> bool:
    """Return whether ``ids`` has the methods of TorchRec's ``KeyedJaggedTensor``."""
    return all(callable(getattr(ids, name, None)) for name in ("keys", "values", "lengths"))


def bags_of_features(features: Mapping[str, Entry]) -> dict[str, Bags]:
    """Convert the features of `Jagged.from_dict`. All features must have the same number of samples."""
    if not isinstance(features, Mapping):
        how = FROM_KEYED if is_keyed(features) else "Jagged.from_dict({'FEATURE': …, …})"
        raise BatchError(f"features: got {type(features).__name__}, expected a dict of ids by name. Use {how}")
    bags = {name: bags_of(name, entry) for name, entry in features.items()}
    if not bags:
        raise BatchError("features: got none, expected at least one feature")
    first, batch_size = next((name, b.batch_size) for name, b in bags.items())
    for name, b in bags.items():
        if b.batch_size != batch_size:
            fewer = b if b.batch_size < batch_size else bags[first]
            hint = "" if fewer.offsets is None or abs(b.batch_size - batch_size) != 1 else f". {_WHOLE_OFFSETS}"
            raise BatchError(
                f"feature '{name}': got {b.batch_size:,} samples, expected {batch_size:,} as in '{first}'{hint}"
            )
    return bags


def bags_of(name: str, entry: Entry) -> Bags:
    """Convert the ids of one feature. Raise `BatchError` with the name of the feature."""
    if isinstance(entry, tuple) and len(entry) == 2 and all(isinstance(part, (Tensor, np.ndarray)) for part in entry):
        values, offsets = (_tensor_of(name, part) for part in cast("tuple[Tensor | Array, Tensor | Array]", entry))
        _check_ids(name, values)
        if offsets.dim() != 1 or len(offsets) < 1 or offsets.dtype not in INDEX_DTYPES:
            raise BatchError(
                f"feature '{name}': offsets: got {describe_tensor(offsets)}, expected [B + 1] of int32 or int64"
            )
        if 0 <= int(offsets[-1]) < len(values):
            raise BatchError(
                f"feature '{name}': last offset: got {int(offsets[-1]):,}, expected the number of ids {len(values):,}. "
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
        raise BatchError(f"feature '{name}': ids: got {describe_tensor(ids)}, expected [B] or [B, k]")
    return _bags_of_lists(name, cast("Sequence[Sequence[int]]", entry))


def _tensor_of(name: str, values: Tensor | Array) -> Tensor:
    """Convert values to a tensor. Integer dtypes without arithmetic in torch become int64."""
    if isinstance(values, Tensor):
        return values
    if values.dtype.kind not in "iu":
        raise BatchError(
            f"feature '{name}': ids: got an array of {values.dtype} {list(values.shape)}, expected integers. Convert "
            "it with ids.astype('int64')"
        )
    if values.dtype == np.uint64 and values.size and values.max() > _LARGEST:
        _refuse_large(name, int(values.max()), f"at position {np.unravel_index(values.argmax(), values.shape)[0]}")
    return torch.from_numpy(values.astype(np.int32 if values.dtype == np.int32 else np.int64))


def _bags_of_lists(name: str, entry: Sequence[Sequence[int]] | Sequence[int]) -> Bags:
    """Convert one list of ids per sample, or one id per sample."""
    wanted = "a tensor, an array, or a list of one id or one list of ids per sample"
    if isinstance(entry, (str, bytes, Mapping)) or not isinstance(entry, Iterable):
        raise BatchError(f"feature '{name}': ids: got {_shorten(entry)}, expected {wanted}")
    # Iterating over an array would create a NumPy integer per id, which is slower than `tolist`.
    bags = [bag.tolist() if isinstance(bag, (Tensor, np.ndarray)) else bag for bag in cast("Iterable[Any]", entry)]
    if bags and all(map(_is_integer, set(map(type, bags)))):
        return Bags(_int64(name, bags, lambda i: f"at sample {i}"), len(bags), 1, None, None)
    for sample, bag in enumerate(bags):
        if isinstance(bag, (str, bytes, Mapping)) or not isinstance(bag, Collection):
            raise BatchError(
                f"feature '{name}': ids: got {_shorten(bag)} at sample {sample}, expected {wanted}. Use an empty list "
                "for a sample without ids"
            )
    lengths = torch.tensor(list(map(len, bags)), dtype=torch.int64)
    offsets = offsets_of(lengths)

    def locate(i: int) -> str:
        sample = int(torch.searchsorted(offsets, i, right=True)) - 1
        return f"at sample {sample}, position {i - int(offsets[sample])}"

    return Bags(_int64(name, list(chain.from_iterable(bags)), locate), len(bags), None, offsets, None)


def _int64(name: str, ids: list[Any], locate: Callable[[int], str]) -> Tensor:
    """Convert a list of ids to ``[N]``. ``locate(i)`` describes the location of the i-th id for messages."""
    for kind in set(map(type, ids)):
        if not _is_integer(kind):
            at = next(i for i, value in enumerate(ids) if type(value) is kind)
            raise BatchError(
                f"feature '{name}': ids: got {_shorten(ids[at])} {locate(at)}, expected integers. Convert ids with "
                "int(), encode words as numbers, and remove missing values"
            )
    try:
        return torch.from_numpy(np.fromiter(map(int, ids), dtype=np.int64, count=len(ids)))
    except OverflowError:
        at = next(i for i, value in enumerate(ids) if not -_LARGEST - 1 <= int(value) <= _LARGEST)
        _refuse_large(name, int(ids[at]), locate(at))


def _is_integer(kind: type) -> bool:
    """Return whether a type is an integer type. bool is not."""
    return issubclass(kind, (int, np.integer)) and kind is not bool


def _refuse_large(name: str, value: int, where: str) -> NoReturn:
    raise BatchError(
        f"feature '{name}': id: got {value} {where}, expected a signed 64-bit integer (−2⁶³ … 2⁶³ − 1). Hash the ids, "
        "or use their remainder"
    )


def _shorten(value: object) -> str:
    """Return a short text of a value, for messages."""
    text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _bags_of_nested(name: str, entry: Tensor) -> Bags:
    if entry.layout != torch.jagged:
        raise BatchError(f"feature '{name}': nested tensor: got layout {entry.layout}, expected torch.jagged")
    if entry.lengths() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        raise BatchError(
            f"feature '{name}': got a nested tensor with gaps, e.g. from narrow, expected a contiguous one. Pass its "
            ".contiguous()"
        )
    _check_ids(name, entry.values())
    offsets = cast(Tensor, entry.offsets())  # pyright: ignore[reportAttributeAccessIssue]
    return Bags(entry.values(), entry.shape[0], None, offsets.long(), None)


def _check_ids(name: str, ids: Tensor) -> None:
    if ids.dtype not in INDEX_DTYPES:
        raise BatchError(
            f"feature '{name}': ids: got {describe_tensor(ids)}, expected int32 or int64. Convert them with ids.long()"
        )


def bags_of_padded(name: str, ids: Tensor, padding_id: int | None, lengths: Tensor | None) -> Bags:
    """Remove the padding from ids ``[B, L]``: every ``padding_id``, or ids beyond ``lengths [B]``."""
    _check_ids(name, ids)
    if ids.dim() != 2 or (lengths is not None and lengths.shape != ids.shape[:1]):
        given = "" if lengths is None else f", with lengths {describe_tensor(lengths)}"
        raise BatchError(
            f"feature '{name}': padded ids: got {describe_tensor(ids)}{given}, expected [samples, length], and lengths "
            "[samples]"
        )
    if lengths is None:
        kept = ids != padding_id
    else:
        check_integers(f"feature '{name}': lengths", lengths)
        if len(lengths) and not 0 <= int(lengths.min()) <= int(lengths.max()) <= ids.shape[1]:
            raise BatchError(
                f"feature '{name}': lengths: got {int(lengths.min())} to {int(lengths.max())}, expected 0 to "
                f"{ids.shape[1]}, the padded length"
            )
        kept = padding_mask(lengths, ids.shape[1], None)
    return Bags(ids[kept], len(ids), None, offsets_of(kept.sum(1)), None)


def take_bags(bags: Bags, samples: Tensor) -> Bags:
    """Return the bags of the samples ``[b]``, in this order."""
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
    """Return the per-id weights, or ones if there are none."""
    if bags.weights is not None:
        return bags.weights
    return torch.ones(len(bags.values), dtype=torch.float32, device=bags.values.device)


def checked_totals(names: list[str], offsets: Tensor) -> list[int]:
    """Return the number of ids of each ragged feature.

    Raise `BatchError` if a row of offsets does not start at 0, or decreases.
    """
    falls = offsets[:, 1:] < offsets[:, :-1]
    if bool((offsets[:, 0] != 0).any() | falls.any()):
        i = int(((offsets[:, 0] != 0) | falls.any(dim=1)).nonzero()[0])
        name, row = names[i], offsets[i]
        if int(row[0]) != 0:
            raise BatchError(f"feature '{name}': first offset: got {int(row[0])}, expected 0")
        at = int(falls[i].nonzero()[0])
        raise BatchError(
            f"feature '{name}': offsets: got {int(row[at + 1])} after {int(row[at])} at sample {at}, expected running "
            "totals of the ids per sample, which never decrease"
        )
    return offsets[:, -1].tolist()


def check_integers(name: str, given: Tensor) -> None:
    """Raise `BatchError` if lengths or offsets are not integers. Empty tensors may have any dtype."""
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
        raise BatchError(f"lengths: got {describe_tensor(lengths)}, expected [{count} keys × batch size]")
    by_key = lengths.reshape(count, -1) if lengths.numel() else lengths.new_empty(count, 0)
    if not by_key.numel():
        return by_key, [None] * count, 0
    per_key = by_key.amin(1), by_key.amax(1), by_key.sum(1)
    least, most, sums = torch.stack([t.to(torch.int64) for t in per_key]).tolist()
    if min(least) < 0:
        key, sample = divmod(int(by_key.argmin()), by_key.shape[1])
        raise BatchError(f"feature '{keys[key]}': length: got {min(least)} at sample {sample}, expected at least 0")
    return by_key, [k if k == longest else None for k, longest in zip(least, most, strict=True)], sum(sums)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the running totals of lengths along the last dim, with a leading 0, int64."""
    return torch.nn.functional.pad(lengths.cumsum(-1, dtype=torch.int64), (1, 0))


def padding_mask(lengths: Tensor, length: int, padding: Padding | None) -> Tensor:
    """Return ``[B, length]`` bool: which positions of padded bags with lengths ``[B]`` have an id.

    The ids come first, unless ``padding`` is ``"left"``.
    """
    position = torch.arange(length, device=lengths.device)
    return position >= length - lengths[:, None] if padding == "left" else position < lengths[:, None]


def describe_tensor(t: Tensor) -> str:
    """Format dtype and shape for error messages."""
    return f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"


class Jagged(Numbered):
    """Ids of ``F`` features × ``B`` samples, feature-major.

    Parameters
    ----------
    names
        Feature names, one per feature, in the order of ``values``.
    values
        All ids ``[N]``, int32 or int64.
    batch_size
        Number of samples ``B``.
    fixed
        Number of ids per sample of each feature, or None for a ragged feature. Default: one id for all features.
    offsets
        ``[ragged features, B + 1]`` int64, one row per ragged feature in order. Each row starts at 0, never decreases,
        and ends at the number of ids of that feature.
    weights
        Per-id weights ``[N]``, floating point.
    starts
        Position of each feature in ``values``, plus the end (``F + 1`` ints). If it is passed, nothing is validated.
        Otherwise it is computed, and all parts are validated.
    sizes
        Number of ids of each feature, if ``values`` has free room after ragged features. Only with ``starts``.

    Raises
    ------
    BatchError
        If the shapes or values of the parts contradict each other. The message names the feature and the sample.

    Examples
    --------
    >>> ids = Jagged.from_dict({"user": [7, 8], "history": [[4, 1], [3]]})
    >>> ids.values.tolist(), ids.fixed, ids["history"].offsets.tolist()
    ([7, 8, 4, 1, 3], (1, None), [0, 2, 3])
    """

    __slots__ = (
        "_index",
        "_prefetched",
        "_ragged_rows",
        "_sizes",
        "_verified",
        "batch_size",
        "fixed",
        "names",
        "offsets",
        "starts",
        "values",
        "weights",
    )

    def __init__(
        self,
        names: Sequence[str],
        values: Tensor,
        *,
        batch_size: int,
        fixed: Sequence[int | None] | None = None,
        offsets: Tensor | None = None,
        weights: Tensor | None = None,
        starts: tuple[int, ...] | None = None,
        sizes: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        # Kernels need contiguous memory.
        self.values = values.contiguous()
        self.batch_size = batch_size
        self.fixed: tuple[int | None, ...] = (1,) * len(self.names) if fixed is None else tuple(fixed)
        self.offsets = None if offsets is None else offsets.contiguous()
        self.weights = None if weights is None else weights.contiguous()
        self.starts: tuple[int, ...] = self._validated_starts() if starts is None else starts
        self._sizes = sizes
        self._index = {name: i for i, name in enumerate(self.names)}
        self._verified: tuple[Tensor, tuple[int, int], frozenset[tuple[str, int]]] | None = None
        self._prefetched: dict[object, object] = {}
        self._ragged_rows: tuple[int, ...] | None = None

    def _validated_starts(self) -> tuple[int, ...]:
        values, names, batch_size = self.values, self.names, self.batch_size
        if len(set(names)) != len(names):
            raise BatchError(f"names: got {list(names)}, expected distinct names of features")
        if len(self.fixed) != len(names):
            raise BatchError(f"fixed: got {len(self.fixed)} entries, expected one for each of {len(names)} features")
        if values.dim() != 1 or values.dtype not in INDEX_DTYPES:
            raise BatchError(
                f"values: got {describe_tensor(values)}, expected [N] of int32 or int64. Convert them with .long()"
            )
        ragged = [name for name, k in zip(names, self.fixed, strict=True) if k is None]
        totals: list[int] = []
        if ragged:
            if self.offsets is None or self.offsets.shape != (len(ragged), batch_size + 1):
                raise BatchError(
                    f"offsets: got {'none' if self.offsets is None else describe_tensor(self.offsets)}, expected "
                    f"[{len(ragged)}, {batch_size + 1}] (ragged features × batch size + 1)"
                )
            if self.offsets.dtype != torch.int64:
                raise BatchError(
                    f"offsets: got {describe_tensor(self.offsets)}, expected int64. Convert them with offsets.long()"
                )
            totals = checked_totals(ragged, self.offsets)
        elif self.offsets is not None:
            raise BatchError(
                "offsets: expected none, because all features are fixed. Set ragged features to None in `fixed`"
            )
        starts, ragged_totals = [0], iter(totals)
        for k in self.fixed:
            starts.append(starts[-1] + (next(ragged_totals) if k is None else batch_size * k))
        if starts[-1] != len(values):
            sizes = ", ".join(f"{n}: {b - a}" for n, a, b in zip(names, starts, starts[1:], strict=False))
            raise BatchError(f"values: got {len(values):,} ids, expected {starts[-1]:,} for all features ({sizes})")
        if self.weights is not None and (
            self.weights.shape != values.shape or not self.weights.dtype.is_floating_point
        ):
            raise BatchError(f"weights: got {describe_tensor(self.weights)}, expected floating point [{len(values)}]")
        return tuple(starts)

    # -- reading ---------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return self.batch_size

    def __contains__(self, name: str) -> bool:
        return name in self._index

    def __repr__(self) -> str:
        features = ", ".join(
            f"{n}: {'ragged' if k is None else k}" for n, k in zip(self.names, self.fixed, strict=True)
        )
        return f"Jagged(batch_size={self.batch_size}, ids={len(self.values)}, {{{features}}})"

    def index(self, name: str) -> int:
        """Return the position of a feature. Raise `BatchError` if the batch lacks the feature."""
        try:
            return self._index[name]
        except KeyError:
            raise BatchError(
                f"feature of the batch: got '{name}', expected one of {', '.join(self.names) or 'none'}"
                f"{did_you_mean(name, self.names)}"
            ) from None

    @property
    def verified(self) -> frozenset[tuple[str, int]]:
        """Verified facts about the ids, which are forgotten when the ids change.

        ``(feature, n)``: all ids are in ``0 … n − 1``. ``(feature, −n)``: no bag has more than n ids.
        """
        if self._verified is None or self._verified[0] is not self.values or self._verified[1] != self._versions():
            return frozenset()
        return self._verified[2]

    def mark_verified(self, pairs: Iterable[tuple[str, int]]) -> None:
        """Add verified facts. See `verified`."""
        if not self.values.is_inference():  # torch does not count changes of inference tensors
            self._verified = (self.values, self._versions(), self.verified.union(pairs))

    def put_prefetched(self, key: object, value: object) -> None:
        """Attach prefetched data for a collection. See `EmbeddingCollection.prefetch_ids`."""
        self._prefetched[key] = value

    def take_prefetched(self, key: object) -> object | None:
        """Detach and return the data of `put_prefetched`, or None."""
        return self._prefetched.pop(key, None)

    def _versions(self) -> tuple[int, int]:
        """Return the number of in-place changes of ids and of offsets."""
        return version(self.values), 0 if self.offsets is None else version(self.offsets)

    @property
    def has_room(self) -> bool:
        """Whether ``values`` may have free room after ragged features."""
        return self._sizes is not None

    @property
    def ids_by_feature(self) -> dict[str, int]:
        """Number of ids of each feature, known without reading tensors."""
        lengths = self._sizes or [end - start for start, end in pairwise(self.starts)]
        return dict(zip(self.names, lengths, strict=True))

    @property
    def ragged_rows(self) -> tuple[int, ...]:
        """Row of ``offsets`` of each ragged feature. The entries of fixed features have no meaning."""
        if self._ragged_rows is None:
            self._ragged_rows = tuple(accumulate((k is None for k in self.fixed), initial=0))
        return self._ragged_rows

    def __getitem__(self, name: str) -> Bags:
        """Return the ids of one feature as views."""
        return self.bags_of(name)

    def bags_of(self, name: str) -> Bags:
        """Return ``ids[name]``, for callers that need the number of ids per sample, but not the ids.

        A subclass for captured steps, where each batch has a different number of ids, overrides ``ids[name]``.
        """
        i = self.index(name)
        part = slice(self.starts[i], self.starts[i + 1] if self._sizes is None else self.starts[i] + self._sizes[i])
        offsets = None if self.fixed[i] is not None or self.offsets is None else self.offsets[self.ragged_rows[i]]
        weights = None if self.weights is None else self.weights[part]
        return Bags(self.values[part], self.batch_size, self.fixed[i], offsets, weights)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Jagged:
        """Copy the ids to a device."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Jagged:
        """Copy the ids to page-locked memory."""
        return self._map(lambda t: t.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> Jagged:
        moved = Jagged(
            self.names,
            change(self.values),
            batch_size=self.batch_size,
            fixed=self.fixed,
            offsets=None if self.offsets is None else change(self.offsets),
            weights=None if self.weights is None else change(self.weights),
            starts=self.starts,
            sizes=self._sizes,
        )
        moved.mark_verified(self.verified)
        return moved

    def take(self, samples: Tensor) -> Jagged:
        """Select the samples at these positions ``[b]`` (int64, not negative), in this order."""
        return _from_bags({name: take_bags(self[name], samples) for name in self.names})

    def divide(self, sizes: Sequence[int]) -> list[Jagged]:
        """Divide the samples into consecutive batches of these sizes, with one copy to the host of ragged offsets."""
        ends = list(accumulate(sizes, initial=0))
        ragged = [] if self.offsets is None else self.offsets[:, ends].tolist()
        rows = self.ragged_rows
        parts: list[Jagged] = []
        for k, size in enumerate(sizes):
            spans: list[tuple[int, int]] = []
            for i, fixed in enumerate(self.fixed):
                first, last = ragged[rows[i]][k : k + 2] if fixed is None else (ends[k] * fixed, ends[k + 1] * fixed)
                spans.append((self.starts[i] + first, self.starts[i] + last))

            def ids_of(t: Tensor, spans: Sequence[tuple[int, int]] = spans) -> Tensor:
                return torch.cat([t[first:last] for first, last in spans]) if spans else t[:0]

            offsets = None
            if self.offsets is not None:
                offsets = self.offsets[:, ends[k] : ends[k + 1] + 1]
                offsets = offsets - offsets[:, :1]
            part = Jagged(
                self.names,
                ids_of(self.values),
                batch_size=size,
                fixed=self.fixed,
                offsets=offsets,
                weights=None if self.weights is None else ids_of(self.weights),
                starts=tuple(accumulate((last - first for first, last in spans), initial=0)),
            )
            part.mark_verified(self.verified)
            parts.append(part)
        return parts

    def with_features(self, changed: Mapping[str, Bags]) -> Jagged:
        """Return a copy in which the ids of some features are replaced."""
        for name in changed:
            self.index(name)
        return _from_bags({name: changed[name] if name in changed else self[name] for name in self.names})

    @staticmethod
    def concatenate(parts: Sequence[Jagged]) -> Jagged:
        """Concatenate the samples of several batches, in order. All must have the same features."""
        first = parts[0]
        if len(parts) == 1:
            return first
        merged: dict[str, Bags] = {}
        for name in first.names:
            bags = [part[name] for part in parts]
            values = torch.cat([b.values for b in bags])
            same_k = len({b.fixed for b in bags}) == 1 and bags[0].fixed is not None
            offsets = None if same_k else offsets_of(torch.cat([b.lengths() for b in bags]))
            weighted = any(part.weights is not None for part in parts)
            weights = torch.cat([weights_of(b) for b in bags]) if weighted else None
            merged[name] = Bags(
                values, sum(b.batch_size for b in bags), bags[0].fixed if same_k else None, offsets, weights
            )
        return _from_bags(merged)

    # -- conversions -----------------------------------------------------------------------------------------------

    @staticmethod
    def from_dict(
        features: Mapping[str, Entry],
        weights: Mapping[str, Tensor] | None = None,
    ) -> Jagged:
        """Build from one entry per feature.

        Parameters
        ----------
        features
            An entry is one of: a tensor or NumPy array ``[B]`` (one id per sample) or ``[B, k]``; a nested tensor of
            jagged layout; a pair of tensors or arrays ``(values [N], offsets [B + 1])``; a list with one id per sample;
            a list with one list or array of ids per sample. Ids in lists are Python or NumPy integers.
        weights
            Per-id weights of some features, in the shape of their ids (``[N]`` for ragged features). Default: 1.

        Raises
        ------
        BatchError
            If ``features`` is no mapping, an entry has a different type, an id is no 64-bit integer, offsets are
            ``[B]``, or features have different numbers of samples. The message names feature, value and position.
        """
        bags = bags_of_features(features)
        if weights:
            for name in weights:
                check_known("feature in weights", name, bags, BatchError)
            for name, b in bags.items():
                given = weights.get(name)
                w = weights_of(b) if given is None else (given.values() if given.is_nested else given.reshape(-1))
                if len(w) != len(b.values):
                    raise BatchError(
                        f"feature '{name}': got {len(w):,} weights, expected one per id ({len(b.values):,})"
                    )
                bags[name] = b._replace(weights=w)
        return _from_bags(bags)

    @staticmethod
    def from_padded(
        features: Mapping[str, Tensor], padding_id: int | None = None, lengths: Mapping[str, Tensor] | None = None
    ) -> Jagged:
        """Build from padded ids ``[B, L]`` per feature, without the padding.

        Padding is either every ``padding_id``, at any position, or all ids beyond the ``lengths [B]`` of a feature.

        Raises
        ------
        BatchError
            If neither or both of ``padding_id`` and ``lengths`` are passed, a feature has no lengths, or shapes differ.
        """
        if (padding_id is None) == (lengths is None):
            raise BatchError("from_padded: expected either padding_id (the id of padding) or lengths by feature")
        if lengths is not None and (without := [name for name in features if name not in lengths]):
            raise BatchError(f"lengths: got {', '.join(lengths) or 'none'}, expected also feature '{without[0]}'")
        of_name = lengths or {}
        return _from_bags({n: bags_of_padded(n, ids, padding_id, of_name.get(n)) for n, ids in features.items()})

    def to_dict(self) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
        """Return views by feature: ``[B, k]`` if it is fixed, ``(values, offsets)`` if it is ragged."""
        out: dict[str, Tensor | tuple[Tensor, Tensor]] = {}
        for name in self.names:
            b = self[name]
            out[name] = b.values.view(self.batch_size, b.fixed or 0) if b.offsets is None else (b.values, b.offsets)
        return out

    def to_nested(self) -> dict[str, Tensor]:
        """Return a nested tensor of jagged layout for each feature."""
        out: dict[str, Tensor] = {}
        for name in self.names:
            b = self[name]
            offsets = offsets_of(b.lengths()) if b.offsets is None else b.offsets
            out[name] = torch.nested.nested_tensor_from_jagged(b.values, offsets)
        return out

    @staticmethod
    def from_keyed(keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Jagged:
        """Build from parts of a ``KeyedJaggedTensor``: F keys, values ``[N]``, lengths ``[F · B]``, weights ``[N]``.

        As in TorchRec, values and weights beyond the sum of the lengths are ignored.

        Raises
        ------
        BatchError
            If lengths are not integers, are negative, or cannot be divided among the keys, or if their sum is more than
            the values or weights.
        """
        by_key, fixed, total = lengths_by_key(keys, lengths)
        ragged = [i for i, k in enumerate(fixed) if k is None]
        offsets = offsets_of(by_key[ragged] if len(ragged) < len(keys) else by_key) if ragged else None
        values, weights = values[:total], None if weights is None else weights[:total]
        return Jagged(keys, values, batch_size=by_key.shape[1], fixed=fixed, offsets=offsets, weights=weights)

    def to_keyed(self) -> tuple[list[str], Tensor, Tensor, Tensor | None]:
        """Return ``KeyedJaggedTensor`` parts: keys, values ``[N]``, lengths ``[F · B]``, weights ``[N]`` or None."""
        lengths = [
            torch.full((self.batch_size,), k, dtype=torch.int64, device=self.values.device)
            if k is not None
            else self[name].lengths()
            for name, k in zip(self.names, self.fixed, strict=True)
        ]
        dense = self if self._sizes is None else _from_bags({name: self[name] for name in self.names})
        return list(self.names), dense.values, torch.cat(lengths), dense.weights


def _from_bags(bags: Mapping[str, Bags]) -> Jagged:
    ragged = [b.offsets for b in bags.values() if b.offsets is not None]
    weights = [b.weights for b in bags.values() if b.weights is not None]
    return Jagged(
        list(bags),
        torch.cat([b.values for b in bags.values()]),
        batch_size=next(iter(bags.values())).batch_size,
        fixed=[b.fixed for b in bags.values()],
        offsets=torch.stack(ragged) if ragged else None,
        weights=torch.cat(weights) if weights else None,
    )
