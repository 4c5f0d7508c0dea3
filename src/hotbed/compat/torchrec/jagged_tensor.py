"""Hold ids and their lengths, like TorchRec's ``JaggedTensor`` and ``KeyedJaggedTensor``.

Values after the last bag are ignored. The keys of a `KeyedJaggedTensor` may have different numbers of samples, but the
collections of this package refuse such a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from itertools import accumulate, chain, pairwise
from typing import Any, Self, cast

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.checks import check_unique
from hotbed.compat.torchrec.keyed_tensor import HasTensors
from hotbed.errors import BatchError
from hotbed.jagged import check_integers, describe_tensor, offsets_of, padding_mask
from hotbed.torch_private import GetAttrKey, register_pytree_flatten_spec, register_pytree_node

_TENSORS = ("_values", "_weights", "_lengths", "_offsets")


class JaggedBase(HasTensors):
    """Base of `JaggedTensor` and `KeyedJaggedTensor`: values, weights, and the lengths and offsets of bags.

    Either lengths or offsets may be missing. They are computed from each other on first use.
    """

    _no_keys: tuple[Any, ...] = ()
    """First arguments of the constructor for an empty object."""
    _moved = _TENSORS
    """Names of the attributes that hold a tensor on the device of the values, or None."""

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        if lengths is None and offsets is None:
            raise BatchError("lengths and offsets: got None for both, expected one of them. Pass lengths or offsets.")
        for name, integers in (("lengths", lengths), ("offsets", offsets)):
            if integers is not None:
                check_integers(name, integers)
        self._values, self._weights, self._lengths, self._offsets = values, weights, lengths, offsets

    @classmethod
    def empty(
        cls,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> Self:
        """Build an object without samples and keys."""
        values = torch.empty(0, dtype=values_dtype, device=device)
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        offsets = None if cls._no_keys else torch.empty_like(lengths)  # as in TorchRec
        return cast("Any", cls)(*cls._no_keys, values, weights, lengths, offsets)

    def values(self) -> Tensor:
        """Return all values ``[N, …]``."""
        return self._values

    def weights(self) -> Tensor:
        """Return one weight per value. Raise `BatchError` if there are no weights."""
        if self._weights is None:
            raise BatchError(f"this {type(self).__name__} has no weights. Pass weights to its constructor.")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return one weight per value, or None if there are no weights."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of values of each bag: ``[B]``, or ``[F · B]`` for several keys."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets.diff()
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they were passed or have been computed, otherwise None."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the position where each bag starts, and the end of the last bag. int32 lengths have int32 offsets."""
        if self._offsets is None:
            self._offsets = _offsets_like(self.lengths().reshape(-1))
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they were passed or have been computed, otherwise None."""
        return self._offsets

    def copy_(self, jt: Self, non_blocking: bool = False) -> Self:
        """Copy the tensors of ``jt``, which must have the same shapes, into the tensors of this object."""
        for name in self._moved:
            target, source = getattr(self, name), getattr(jt, name)
            if target is not None and source is not None:
                target.copy_(source, non_blocking=non_blocking)
        return self

    @override
    def _tensors(self) -> list[Tensor]:
        return [t for name in _TENSORS if (t := getattr(self, name)) is not None]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        changed = copy(self)
        for name in self._moved:
            if (tensor := getattr(self, name)) is not None:
                setattr(changed, name, change(tensor))
        return changed

    def _without_samples(self) -> Self:
        """Return an empty object with the same dtypes."""
        none = None if self._weights is None else self._weights.new_empty(0)
        return cast("Any", type(self))(*self._no_keys, self._values.new_empty(0), none, self.lengths().new_empty(0))


class JaggedTensor(JaggedBase):
    """Hold any number of values per sample.

    Parameters
    ----------
    values, weights
        Values ``[N, …]``, ordered by sample, and one weight per value or None.
    lengths, offsets
        Number of values of each sample ``[B]``, or the position where each sample starts and the end of the last sample
        ``[B + 1]``. Pass lengths or offsets.
    """

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | str | None = None) -> JaggedTensor:
        """Return an empty object with the dtypes of ``jt``.

        With ``device``, return an uninitialized copy with the shapes of ``jt`` on this device instead.
        """
        return jt._without_samples() if device is None else jt._map(lambda t: torch.empty_like(t, device=device))

    @classmethod
    def from_dense(cls, values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Self:
        """Build from a list with one tensor of values per sample. The lengths of the result are int32."""
        merged = torch.cat(list(values))
        lengths = torch.tensor([len(v) for v in values], dtype=torch.int32, device=merged.device)
        return cls(merged, None if weights is None else torch.cat(list(weights)), lengths)

    @classmethod
    def from_dense_lengths(cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Self:
        """Build from padded values ``[B, L]``. The first ``lengths[i]`` entries of row i are the values of sample i."""
        check_integers("lengths", lengths)
        if len(lengths) and int(lengths.max()) > values.shape[1]:
            raise BatchError(
                f"lengths: got {int(lengths.max())}, expected at most {values.shape[1]}, the number of columns of the "
                "values. Correct the lengths."
            )
        mask = padding_mask(lengths, values.shape[1], None)
        return cls(values[mask], None if weights is None else weights[mask], lengths)

    def to_dense(self) -> list[Tensor]:
        """Return the values of each sample."""
        return [self._values[start:end] for start, end in pairwise(self.offsets().tolist())]

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return the weights of each sample, or None if there are no weights."""
        weights = self._weights
        return None if weights is None else [weights[a:b] for a, b in pairwise(self.offsets().tolist())]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return values ``[B, L, …]``. L is ``desired_length`` (default: length of the longest sample).

        Shorter samples are padded, and longer samples are truncated.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """Return weights ``[B, L]``, padded like `to_padded_dense`, or None if there are no weights."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, data: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths = self.lengths()
        longest = desired_length if desired_length is not None else int(lengths.max()) if len(lengths) else 0
        padded = data.new_full((len(lengths), longest, *data.shape[1:]), padding_value)
        mask = padding_mask(lengths, longest, None)
        positions = self.offsets()[: len(lengths), None] + torch.arange(longest, device=lengths.device)
        padded[mask] = data[positions[mask]]
        return padded

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """Return a copy on a device."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    @override
    def __str__(self) -> str:
        offsets = self.offsets().tolist()
        values = _format_bags(self._values, offsets)
        if self._weights is None:
            return f"JaggedTensor({{\n    {values}\n}})\n"
        return f'JaggedTensor({{\n    "values": {values},\n    "weights": {_format_bags(self._weights, offsets)}\n}})\n'


def jt_is_equal(jt_1: object, jt_2: object) -> bool:
    """Return whether both arguments are `JaggedTensor` with close values and weights, and equal lengths."""
    return isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor) and _are_close(jt_1, jt_2)


def _are_close(first: JaggedBase, second: JaggedBase) -> bool:
    """Return whether values and weights are close, and lengths and offsets equal."""
    parts = (JaggedBase.values, JaggedBase.weights_or_none, JaggedBase.lengths, JaggedBase.offsets)
    return all(
        a is b if a is None or b is None else a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b)
        for a, b in ((part(first), part(second)) for part in parts)
    )


def _offsets_like(lengths: Tensor) -> Tensor:
    """Return cumulative lengths along the last dim, with a leading 0. int32 lengths have int32 offsets."""
    offsets = offsets_of(lengths)
    return offsets.to(torch.int32) if lengths.dtype == torch.int32 else offsets


def _format_bags(values: Tensor, offsets: Sequence[int]) -> str:
    """Format the values of each bag as a list."""
    if values.dim() > 2:
        raise BatchError(
            f"values to print: got {describe_tensor(values)}, expected at most 2 dims. Print values() instead."
        )
    return str([values[start:end].tolist() for start, end in pairwise(offsets)])


class KeyedJaggedTensor(JaggedBase):
    """Hold any number of ids per key and sample. Ids are ordered by key, then by sample.

    Parameters
    ----------
    keys, values, weights
        Names, all ids ``[N]``, and one weight per id or None.
    lengths, offsets
        Number of ids of each bag ``[F · B]`` for F keys and B samples, or the position where each bag starts and the
        end of the last bag ``[F · B + 1]``. Pass lengths or offsets, unless there are no keys.
    stride
        Number of samples B (default: number of lengths divided by the number of keys).
    stride_per_key_per_rank
        Number of samples of each key on each rank ``[F, ranks]``, if keys have different numbers of samples.
        Collections refuse such a batch.
    length_per_key
        Number of ids of each key (default: computed on first use).
    inverse_indices
        Keys, and for each key the index of each sample's bag ``[F, B]``. Collections refuse such a batch.
    stride_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict
        Ignored, because they are computed from the arguments above.
    """

    _no_keys = ((),)
    _moved = (*_TENSORS, "_inverse_indices")

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
        jt_dict: Mapping[str, JaggedTensor] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> None:
        del stride_per_key, lengths_offset_per_key, offset_per_key, index_per_key, jt_dict
        if lengths is None and offsets is None and not keys:
            lengths = values.new_empty(0, dtype=torch.int32)
        super().__init__(values, weights, lengths, offsets)
        self._keys = list(keys)
        if stride_per_key_per_rank is not None and not isinstance(stride_per_key_per_rank, Tensor):
            stride_per_key_per_rank = torch.tensor(stride_per_key_per_rank, dtype=torch.int32, device="cpu")
        self._stride_per_key_per_rank = stride_per_key_per_rank
        self._inverse_keys, self._inverse_indices = inverse_indices or (None, None)
        self._length_per_key = None if length_per_key is None else list(length_per_key)
        self._stride = stride
        bags = self._count_bags()
        if stride_per_key_per_rank is None and bags != self.stride() * len(self._keys):
            raise BatchError(
                f"lengths: got {bags:,} for {len(self._keys)} keys and {self.stride():,} samples, expected one length "
                "per key and sample. Correct the lengths or the stride."
            )

    @classmethod
    def from_offsets_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> Self:
        """Build from offsets ``[F · B + 1]``."""
        return cls(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @classmethod
    def from_lengths_sync(
        cls,
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Tensor | Sequence[Sequence[int]] | None = None,
        inverse_indices: tuple[list[str], Tensor] | None = None,
    ) -> Self:
        """Build from lengths ``[F · B]``."""
        return cls(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, inverse_indices=inverse_indices
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """Build from a jagged tensor per key. If only some tensors have weights, the missing weights are 1."""
        if not jt_dict:
            return KeyedJaggedTensor.empty()
        bags = [jt.lengths() for jt in jt_dict.values()]
        varies = len({len(lengths) for lengths in bags}) > 1
        counts = _sums(bags) if not bags[0].is_meta else [len(jt.values()) for jt in jt_dict.values()]
        of_keys = [jt.weights_or_none() for jt in jt_dict.values()]
        weighted = any(weights is not None for weights in of_keys)
        parts = [
            KeyedJaggedTensor(
                [key],
                jt.values(),
                torch.ones(len(jt.values()), device=jt.device()) if weighted and weights is None else weights,
                lengths,
                stride_per_key_per_rank=[[len(lengths)]] if varies else None,
                length_per_key=[count],
            )
            for (key, jt), weights, lengths, count in zip(jt_dict.items(), of_keys, bags, counts, strict=True)
        ]
        return _concatenate(parts)

    @staticmethod
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | str | None = None) -> KeyedJaggedTensor:
        """Return an object without keys and ids, but with the number of samples and the dtypes of ``kjt``.

        With ``device``, return an uninitialized copy with the same keys and shapes on this device instead.
        """
        if device is not None:
            return kjt._map(lambda t: torch.empty_like(t, device=device))
        made, strides = kjt._without_samples(), kjt._stride_per_key_per_rank
        made._stride, made._stride_per_key_per_rank = kjt.stride() if strides is None else 0, strides
        return made

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Concatenate the keys of several batches of the same samples."""
        if not kjt_list:
            raise BatchError("kjt_list: got an empty list. Pass at least one KeyedJaggedTensor.")
        keys = list(chain.from_iterable(part.keys() for part in kjt_list))
        check_unique("key of the KeyedJaggedTensors", keys, BatchError)
        for name, kinds in (
            ("weights", {part.weights_or_none() is None for part in kjt_list}),
            ("inverse_indices", {part.inverse_indices_or_none() is None for part in kjt_list}),
            ("stride_per_key_per_rank", {part.variable_stride_per_key() for part in kjt_list}),
        ):
            if len(kinds) > 1:
                raise BatchError(
                    f"only some of the KeyedJaggedTensors have {name}. Pass {name} to all of them or to none."
                )
        strides = [part.stride() for part in kjt_list]
        if not kjt_list[0].variable_stride_per_key() and len(set(strides)) > 1:
            raise BatchError(f"numbers of samples differ: got {strides}. Concatenate batches of the same samples.")
        return _concatenate(kjt_list)

    def keys(self) -> list[str]:
        """Return the keys."""
        return self._keys

    def stride(self) -> int:
        """Return the number of samples B.

        If keys have different numbers of samples, return the width of the inverse indices. Without inverse indices,
        return the largest number of samples.
        """
        if self._stride is None:
            strides, inverse = self._stride_per_key_per_rank, self._inverse_indices
            if not self._keys:
                self._stride = 0
            elif strides is None:
                self._stride = self._count_bags() // len(self._keys)
            elif inverse is not None and inverse.numel():
                self._stride = inverse.shape[-1]
            else:
                self._stride = int(strides.sum(1).max())
        return self._stride

    def stride_per_key(self) -> list[int]:
        """Return the number of samples of each key."""
        strides = self._stride_per_key_per_rank
        return [self.stride()] * len(self._keys) if strides is None else strides.sum(1).tolist()

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Return the number of samples of each key on each rank, or an empty list if all keys have B samples."""
        return [] if self._stride_per_key_per_rank is None else self._stride_per_key_per_rank.tolist()

    def variable_stride_per_key(self) -> bool:
        """Return whether keys may have different numbers of samples."""
        return self._stride_per_key_per_rank is not None

    def inverse_indices(self) -> tuple[list[str], Tensor]:
        """Return the inverse indices. Raise `BatchError` if there are none."""
        if (inverse := self.inverse_indices_or_none()) is None:
            raise BatchError("this KeyedJaggedTensor has no inverse indices. Pass them to its constructor.")
        return inverse

    def inverse_indices_or_none(self) -> tuple[list[str], Tensor] | None:
        """Return the inverse indices, or None if there are none."""
        keys, indices = self._inverse_keys, self._inverse_indices
        return None if keys is None or indices is None else (keys, indices)

    def length_per_key(self) -> list[int]:
        """Return the number of ids of each key.

        On ``meta``, lengths have no values. The result then assumes that all keys have about equally many ids.
        """
        if self._length_per_key is None:
            if not self._keys:
                self._length_per_key = []
            elif self._values.is_meta:
                each, rest = divmod(len(self._values), len(self._keys))
                self._length_per_key = [each + rest] + [each] * (len(self._keys) - 1)
            elif self.variable_stride_per_key():
                self._length_per_key = _sums(self._lengths_by_key())
            else:
                by_key = self.lengths().reshape(len(self._keys), self.stride())
                self._length_per_key = by_key.sum(1, dtype=torch.int64).tolist()
        return self._length_per_key

    def length_per_key_or_none(self) -> list[int] | None:
        """Return the number of ids of each key if it was passed or has been computed, otherwise None."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Return the position where the ids of each key start, and the end of the last key."""
        return list(accumulate(self.length_per_key(), initial=0))

    def offset_per_key_or_none(self) -> list[int] | None:
        """Return `offset_per_key` if `length_per_key_or_none` is not None, otherwise None."""
        return None if self._length_per_key is None else self.offset_per_key()

    def lengths_offset_per_key(self) -> list[int]:
        """Return the position where the lengths of each key start, and the end of the last key."""
        return list(accumulate(self.stride_per_key(), initial=0))

    def index_per_key(self) -> dict[str, int]:
        """Return the position of each key."""
        return {key: i for i, key in enumerate(self._keys)}

    def sync(self) -> Self:
        """Copy the number of ids of each key to the host, so that later calls need no synchronization."""
        self.length_per_key()
        return self

    def unsync(self) -> Self:
        """Discard the numbers that `sync` copied."""
        self._length_per_key = None
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        at = self.index_per_key()[key]
        part = self._part(at, at + 1)
        return JaggedTensor(part._values, part._weights, part._lengths)

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """Return the ids of each key. With ``compute_offsets=False``, offsets are computed on first use."""
        if not self._keys:
            return {}
        values, weights, lengths = self._split_by_key()
        offsets: Sequence[Tensor | None] = [None] * len(lengths)
        if compute_offsets and not self.variable_stride_per_key():
            by_key = self.lengths().reshape(len(lengths), -1)
            offsets = (_offsets_like(by_key) if by_key.numel() else by_key).unbind()
        elif compute_offsets:
            offsets = [_offsets_like(bags) for bags in lengths]
        parts = zip(values, weights, lengths, offsets, strict=True)
        return {key: JaggedTensor(*tensors) for key, tensors in zip(self._keys, parts, strict=True)}

    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """Return the keys at the positions ``indices``, which may repeat. ``indices_tensor`` is ignored."""
        del indices_tensor
        if not indices:
            return self._part(0, 0)
        values, weights, lengths = self._split_by_key()
        strides, sizes = self._stride_per_key_per_rank, self.length_per_key()
        return KeyedJaggedTensor(
            [self._keys[i] for i in indices],
            torch.cat([values[i] for i in indices]),
            torch.cat([w for i in indices if (w := weights[i]) is not None]) if self._weights is not None else None,
            torch.cat([lengths[i] for i in indices]),
            stride=self.stride(),
            stride_per_key_per_rank=None if strides is None else strides[list(indices)],
            length_per_key=[sizes[i] for i in indices],
        )

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Split the keys into parts. ``segments`` has the number of keys of each part, which may be 0."""
        starts = list(accumulate(segments, initial=0))
        if starts[-1] > len(self._keys):
            raise BatchError(
                f"segments: got {list(segments)}, expected a sum of at most {len(self._keys)}, the number of keys. "
                "Reduce the segments."
            )
        return [self if b - a == len(self._keys) else self._part(a, b) for a, b in pairwise(starts)]

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """Return a shallow copy with lengths ``[F · B]``, even if they were ``[F, B]``."""
        flat = copy(self)
        flat._lengths = self.lengths().reshape(-1)
        return flat.sync()

    def to(
        self,
        device: torch.device | str | None = None,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> KeyedJaggedTensor:
        """Return a copy on a device. As in TorchRec, ``dtype`` is the dtype of the copy's weights."""
        target = self.device() if device is None else device
        moved = self._map(lambda t: t.to(target, non_blocking=non_blocking))
        moved._weights = None if moved._weights is None else moved._weights.to(dtype or moved._weights.dtype)
        return moved

    def pin_memory(self) -> KeyedJaggedTensor:
        """Return a copy in page-locked memory."""
        return self._map(lambda t: t.pin_memory())

    @override
    def copy_(self, kjt: Self, non_blocking: bool = False) -> Self:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().copy_(kjt, non_blocking)
        self._inverse_keys = kjt._inverse_keys or self._inverse_keys
        self._length_per_key, self._stride_per_key_per_rank = kjt._length_per_key, kjt._stride_per_key_per_rank
        return self

    @override
    def size_in_bytes(self) -> int:
        strides = self._stride_per_key_per_rank
        return super().size_in_bytes() + (0 if strides is None else strides.element_size() * strides.numel())

    def _count_bags(self) -> int:
        """Return the number of bags without computing lengths."""
        return self._lengths.numel() if self._lengths is not None else max(0, self.offsets().numel() - 1)

    def _lengths_by_key(self) -> Sequence[Tensor]:
        """Divide the lengths by key."""
        lengths, strides = self.lengths().reshape(-1), self.stride_per_key()
        if len(strides) != len(self._keys) or sum(strides) != len(lengths):
            raise BatchError(
                f"stride_per_key_per_rank: got {strides} samples by key, expected {len(self._keys)} keys with "
                f"{len(lengths)} samples in total, one per length. Pass a row per key."
            )
        return lengths.split(strides) if strides else []

    def _split_by_key(self) -> tuple[Sequence[Tensor], Sequence[Tensor | None], Sequence[Tensor]]:
        """Divide values, weights and lengths by key."""
        sizes = self.length_per_key()
        values, weights = _first(self, sum(sizes))
        by_key = [None] * len(sizes) if weights is None else weights.split(sizes)
        return values.split(sizes), by_key, self._lengths_by_key()

    def _part(self, start: int, end: int) -> KeyedJaggedTensor:
        """Return the keys from ``start`` to ``end`` as views."""
        ids, bags, strides = self.offset_per_key(), self.lengths_offset_per_key(), self._stride_per_key_per_rank
        values, weights = _first(self, ids[end])
        return KeyedJaggedTensor(
            self._keys[start:end],
            values[ids[start] :],
            None if weights is None else weights[ids[start] :],
            self.lengths().reshape(-1)[bags[start] : bags[end]],
            stride=self.stride(),
            stride_per_key_per_rank=None if strides is None else strides[start:end],
            length_per_key=self.length_per_key()[start:end],
        )

    @override
    def __repr__(self) -> str:
        return f"KeyedJaggedTensor(keys={self._keys}, samples={self.stride()}, ids={len(self._values)})"

    @override
    def __str__(self) -> str:
        if not self._keys:
            return "KeyedJaggedTensor()\n"
        offsets, lines = self.offsets().tolist(), list[str]()
        for key, (start, end) in zip(self._keys, pairwise(self.lengths_offset_per_key()), strict=True):
            own = offsets[start : end + 1]
            text = _format_bags(self._values, own)
            if self._weights is not None:
                weights = _format_bags(self._weights, own)
                text = f'{{\n        "values": {text},\n        "weights": {weights}\n    }}'
            lines.append(f'    "{key}": {text}')
        return "KeyedJaggedTensor({\n" + ",\n".join(lines) + "\n})\n"


def kjt_is_equal(kjt_1: object, kjt_2: object) -> bool:
    """Return whether both are `KeyedJaggedTensor` with equal keys and lengths, and close values and weights."""
    if not isinstance(kjt_1, KeyedJaggedTensor) or not isinstance(kjt_2, KeyedJaggedTensor):
        return False
    same_shape = kjt_1.keys() == kjt_2.keys() and kjt_1.stride() == kjt_2.stride()
    return same_shape and kjt_1.length_per_key() == kjt_2.length_per_key() and _are_close(kjt_1, kjt_2)


def _sums(parts: Sequence[Tensor]) -> list[int]:
    return torch.stack([part.sum(dtype=torch.int64) for part in parts]).tolist() if parts else []


def _first(bags: JaggedBase, count: int) -> tuple[Tensor, Tensor | None]:
    """Return the first ``count`` values and weights. Later values belong to no sample."""
    values, weights = bags.values(), bags.weights_or_none()
    for name, tensor in (("values", values), ("weights", weights)):
        if tensor is not None and len(tensor) < count:
            raise BatchError(
                f"{name}: got {len(tensor):,}, expected at least the sum of the lengths {count:,}. Correct the lengths."
            )
    return values[:count], None if weights is None else weights[:count]


def _concatenate(parts: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """Concatenate keys. All parts or none must have weights, and all or none must have inverse indices."""
    used = [_first(part, sum(part.length_per_key())) for part in parts]
    strides = [s for part in parts if (s := part._stride_per_key_per_rank) is not None]
    inverse = [i for part in parts if (i := part.inverse_indices_or_none()) is not None]
    inverse_keys = list(chain.from_iterable(keys for keys, _ in inverse))
    weights = [w for _, w in used if w is not None]
    return KeyedJaggedTensor(
        list(chain.from_iterable(part.keys() for part in parts)),
        torch.cat([values for values, _ in used]),
        torch.cat(weights) if weights else None,
        torch.cat([part.lengths().reshape(-1) for part in parts]),
        stride=None if strides else parts[0].stride(),
        stride_per_key_per_rank=torch.cat(strides) if strides else None,
        length_per_key=list(chain.from_iterable(part.length_per_key() for part in parts)),
        inverse_indices=(inverse_keys, torch.cat([i for _, i in inverse])) if inverse else None,
    )


def _build_jt(tensors: Iterable[Any], _: None) -> JaggedTensor:
    return JaggedTensor(*tensors)


def _build_kjt(tensors: Iterable[Any], keys: list[str]) -> KeyedJaggedTensor:
    *own, strides, inverse = tensors
    of_samples = None if inverse is None else (keys, inverse)
    return KeyedJaggedTensor(keys, *own, stride_per_key_per_rank=strides, inverse_indices=of_samples)


def _register_tree(kind: type[Any], unflatten: Callable[..., Any], names: tuple[str, ...]) -> None:
    """Register a class with torch's pytrees, with the attributes ``names`` as leaves."""

    def flatten(tree: Any) -> tuple[list[Tensor | None], Any]:
        return [getattr(tree, name) for name in names], getattr(tree, "_keys", None)

    def with_keys(tree: Any) -> tuple[list[tuple[Any, Tensor | None]], Any]:
        tensors, context = flatten(tree)
        return [(GetAttrKey(name), t) for name, t in zip(names, tensors, strict=True)], context

    name = f"hotbed.compat.torchrec.{kind.__name__}"
    register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys, serialized_type_name=name)
    register_pytree_flatten_spec(kind, lambda tree, _: flatten(tree)[0])


_register_tree(JaggedTensor, _build_jt, _TENSORS)
_register_tree(KeyedJaggedTensor, _build_kjt, (*_TENSORS, "_stride_per_key_per_rank", "_inverse_indices"))
