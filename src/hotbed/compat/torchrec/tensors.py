"""Hold ids and vectors as TorchRec does: ``JaggedTensor``, ``KeyedJaggedTensor``, ``KeyedTensor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from hotbed.bags import offsets_of, padding_mask
from hotbed.errors import BatchError


class _Bags:
    """Hold values, their weights, and which of them each bag has: lengths or offsets, the other made when asked for."""

    def __init__(self, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None) -> None:
        if lengths is None and offsets is None:
            raise BatchError("neither lengths nor offsets are given; one of them says which values are a sample's")
        self._values, self._weights, self._lengths, self._offsets = values, weights, lengths, offsets

    def values(self) -> Tensor:
        """All values ``[N, …]``."""
        return self._values

    def weights(self) -> Tensor:
        """One weight per value; `BatchError` if there are none."""
        if self._weights is None:
            raise BatchError("this (Keyed)JaggedTensor has no weights; give them when it is made")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """One weight per value, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """How many values each bag has: ``[B]``, of several keys ``[F · B]``."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets.diff()
        return self._lengths

    def offsets(self) -> Tensor:
        """Where the values of each bag start, and the end."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = offsets_of(self._lengths)
        return self._offsets

    def _changed(
        self, change: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Change values, weights, lengths and offsets, where they are there."""
        others = (None if t is None else change(t) for t in (self._weights, self._lengths, self._offsets))
        return change(self._values), *others  # pyright: ignore[reportReturnType]


class JaggedTensor(_Bags):
    """Values of samples, any number each.

    Parameters
    ----------
    values
        ``[N, …]``, sample by sample.
    weights
        One per value, or None.
    lengths, offsets
        How many values each sample has ``[B]``, or where those of each start, and the end ``[B + 1]``; one of them.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        super().__init__(values, weights, lengths, offsets)

    @classmethod
    def from_dense(cls, values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Self:
        """Build from a tensor of values per sample."""
        joined = torch.cat(list(values))
        lengths = torch.tensor([len(v) for v in values], device=joined.device)
        return cls(joined, None if weights is None else torch.cat(list(weights)), lengths)

    @classmethod
    def from_dense_lengths(cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Self:
        """Build from padded values ``[B, L]``, the first ``lengths [B]`` of which are a sample's."""
        mask = padding_mask(lengths, values.shape[1], None)
        return cls(values[mask], None if weights is None else weights[mask], lengths)

    def to_dense(self) -> list[Tensor]:
        """Values of each sample."""
        return list(self._values.split(self.lengths().tolist()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Values ``[B, L, …]``, those beyond ``desired_length`` cut off; default: the longest sample's."""
        lengths = self.lengths()
        longest = int(lengths.max()) if len(lengths) else 0
        length = longest if desired_length is None else desired_length
        padded = self._values.new_full((len(lengths), max(length, longest), *self._values.shape[1:]), padding_value)
        padded[padding_mask(lengths, padded.shape[1], None)] = self._values
        return padded[:, :length]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """Copy to a device."""
        return JaggedTensor(*self._changed(lambda t: t.to(device, non_blocking=non_blocking)))


class KeyedJaggedTensor(_Bags):
    """Ids of several keys, any number per sample; key after key, sample by sample.

    Parameters
    ----------
    keys, values
        Names, and all ids ``[N]``.
    weights
        One per id, or None.
    lengths, offsets
        How many ids each bag has ``[F · B]``, or where each starts, and the end ``[F · B + 1]``; one of them.
    stride
        Samples B; default: as many as lengths and keys say.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        **cached: object,
    ) -> None:
        if unknown := set(cached) - {"length_per_key", "offset_per_key", "index_per_key", "lengths_offset_per_key"}:
            raise BatchError(
                f"KeyedJaggedTensor has no {sorted(unknown)[0]} here; batch sizes that differ by key and deduplicated "
                "features are not supported, give every key the same number of samples"
            )
        super().__init__(values, weights, lengths, offsets)
        self._keys = list(keys)
        bags = len(lengths) if lengths is not None else len(self.offsets()) - 1
        self._stride = bags // max(1, len(self._keys)) if stride is None else stride
        if bags != self._stride * len(self._keys):
            raise BatchError(
                f"{bags:,} bags for {len(self._keys)} keys and {self._stride:,} samples; every key needs a length per "
                "sample"
            )

    @classmethod
    def from_offsets_sync(
        cls, keys: Sequence[str], values: Tensor, offsets: Tensor, weights: Tensor | None = None
    ) -> Self:
        """Build from offsets ``[F · B + 1]``."""
        return cls(keys, values, weights, offsets=offsets)

    @classmethod
    def from_lengths_sync(
        cls, keys: Sequence[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
    ) -> Self:
        """Build from lengths ``[F · B]``."""
        return cls(keys, values, weights, lengths=lengths)

    @classmethod
    def from_jt_dict(cls, jt_dict: Mapping[str, JaggedTensor]) -> Self:
        """Build from a jagged tensor per key; where only some have weights, ids of the others have the weight 1."""
        parts = list(jt_dict.values())
        weights = [part.weights_or_none() for part in parts]
        weighted = any(w is not None for w in weights)
        ones = [torch.ones(len(p.values()), device=p.values().device) for p in parts] if weighted else []
        return cls(
            list(jt_dict),
            torch.cat([part.values() for part in parts]),
            torch.cat([one if w is None else w for w, one in zip(weights, ones, strict=True)]) if weighted else None,
            torch.cat([part.lengths() for part in parts]),
        )

    @staticmethod
    def concat(kjt_list: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """Put the keys of several, of the same samples, together; `BatchError` if one has a key of another."""
        keys = list(chain.from_iterable(part.keys() for part in kjt_list))
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise BatchError(f"key '{twice[0]}' is in several of the KeyedJaggedTensors; names must be unique")
        return KeyedJaggedTensor.from_jt_dict({key: jt for part in kjt_list for key, jt in part.to_dict().items()})

    def keys(self) -> list[str]:
        """Names."""
        return self._keys

    def stride(self) -> int:
        """Samples B."""
        return self._stride

    def length_per_key(self) -> list[int]:
        """How many ids each key has."""
        return self.lengths().view(len(self._keys), -1).sum(1).tolist()

    def offset_per_key(self) -> list[int]:
        """Where the ids of each key start, and the end."""
        return list(accumulate(self.length_per_key(), initial=0))

    def device(self) -> torch.device:
        """Where the ids are."""
        return self._values.device

    def __getitem__(self, key: str) -> JaggedTensor:
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Ids by key."""
        sizes = self.length_per_key()
        weights = [None] * len(sizes) if self._weights is None else self._weights.split(sizes)
        lengths = self.lengths().view(len(sizes), -1)
        of_keys = zip(self._keys, self._values.split(sizes), weights, lengths, strict=True)
        return {key: JaggedTensor(values, of_key, bags) for key, values, of_key, bags in of_keys}

    def permute(self, indices: Sequence[int]) -> KeyedJaggedTensor:
        """Take these keys, in this order; a key may come twice."""
        parts, names = self.to_dict(), [self._keys[i] for i in indices]
        picked = [parts[name] for name in names]
        weights = None if self._weights is None else torch.cat([part.weights() for part in picked])
        values = torch.cat([part.values() for part in picked])
        return KeyedJaggedTensor(names, values, weights, torch.cat([part.lengths() for part in picked]))

    def split(self, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
        """Cut into parts of so many keys each."""
        starts = list(accumulate(segments, initial=0))
        return [self.permute(range(a, b)) for a, b in pairwise(starts)]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Copy to a device."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> KeyedJaggedTensor:
        """Copy to page-locked memory."""
        return self._map(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work of a stream that uses it is done."""
        for t in (self._values, self._weights, self._lengths, self._offsets):
            if t is not None:
                t.record_stream(stream)  # pyright: ignore[reportArgumentType]

    def _map(self, change: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(self._keys, *self._changed(change), stride=self._stride)

    @override
    def __repr__(self) -> str:
        return f"KeyedJaggedTensor(keys={self._keys}, samples={self._stride}, ids={len(self._values)})"


class KeyedTensor:
    """Vectors of several keys, side by side.

    Parameters
    ----------
    keys
        Names.
    length_per_key
        Columns of each.
    values
        ``[B, Σ columns]``, or a function that makes it where it is wanted.
    parts
        Vectors by key ``[B, columns]``, where they are at hand.
    """

    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor | Callable[[], Tensor],
        parts: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._keys, self._sizes, self._values, self._parts = list(keys), list(length_per_key), values, parts

    @classmethod
    def from_tensor_list(cls, keys: Sequence[str], tensors: Sequence[Tensor]) -> Self:
        """Build from a tensor per key."""
        parts = dict(zip(keys, tensors, strict=True))
        return cls(keys, [t.shape[1] for t in tensors], lambda: torch.cat(list(tensors), dim=1), parts)

    @staticmethod
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Put the vectors of each group of keys side by side."""
        parts = {key: t for keyed in keyed_tensors for key, t in keyed.to_dict().items()}
        return [torch.cat([parts[key] for key in group], dim=1) for group in groups]

    def keys(self) -> list[str]:
        """Names."""
        return self._keys

    def values(self) -> Tensor:
        """All vectors ``[B, Σ columns]``."""
        if not isinstance(self._values, Tensor):
            self._values = self._values()
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each key."""
        return self._sizes

    def offset_per_key(self) -> list[int]:
        """Where the columns of each key start, and the end."""
        return list(accumulate(self._sizes, initial=0))

    def key_dim(self) -> int:
        """Dimension along which keys are put together."""
        return 1

    def device(self) -> torch.device:
        """Where the vectors are."""
        return self.values().device

    def __getitem__(self, key: str) -> Tensor:
        return self.to_dict()[key]

    def to_dict(self) -> dict[str, Tensor]:
        """Vectors by key ``[B, columns]``."""
        if self._parts is None:
            self._parts = dict(zip(self._keys, self.values().split(self._sizes, dim=1), strict=True))
        return dict(self._parts)
