"""Hold values of samples as TorchRec's ``JaggedTensor`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Self, cast

import torch
from torch import Tensor
from torch.fx._pytree import register_pytree_flatten_spec
from torch.utils._pytree import GetAttrKey, register_pytree_node
from typing_extensions import override

from hotbed.bags import check_integers, describe, offsets_of, padding_mask
from hotbed.errors import BatchError


class JaggedBase:
    """Hold values, their weights, and lengths or offsets of bags. The other one is computed when it is first read."""

    _no_keys: tuple[Any, ...] = ()
    """First arguments of the constructor for an object without keys."""

    def __init__(self, values: Tensor, weights: Tensor | None, lengths: Tensor | None, offsets: Tensor | None) -> None:
        if lengths is None and offsets is None:
            raise BatchError("neither lengths nor offsets are given. Pass one of them.")
        for name, given in (("lengths", lengths), ("offsets", offsets)):
            if given is not None:
                check_integers(name, given)
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
        """Build one without samples, and without keys."""
        values = torch.empty(0, dtype=values_dtype, device=device)
        weights = torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None
        lengths = torch.empty(0, dtype=lengths_dtype, device=device)
        offsets = None if cls._no_keys else torch.empty_like(lengths)  # as in TorchRec
        return cast("Any", cls)(*cls._no_keys, values, weights, lengths, offsets)

    def values(self) -> Tensor:
        """Return all values ``[N, …]``."""
        return self._values

    def weights(self) -> Tensor:
        """Return one weight per value. A `BatchError` is raised if there are none."""
        if self._weights is None:
            raise BatchError("this (Keyed)JaggedTensor has no weights. Pass weights to its constructor.")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        """Return one weight per value, or None."""
        return self._weights

    def lengths(self) -> Tensor:
        """Return the number of values of each bag: ``[B]``, or ``[F · B]`` for several keys."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets.diff()
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Return the lengths if they were given or computed, else None."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Return the position where each bag starts, and the end. The dtype is that of int32 or int64 lengths."""
        if self._offsets is None:
            self._offsets = offsets_like(self.lengths().reshape(-1))
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Return the offsets if they were given or computed, else None."""
        return self._offsets

    def device(self) -> torch.device:
        """Return the device of the values."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Return the number of bytes of all tensors."""
        return sum(t.element_size() * t.numel() for t in self._tensors())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the stream has finished the work that uses it."""
        for t in self._tensors():
            t.record_stream(stream)  # pyright: ignore[reportArgumentType]

    def _tensors(self) -> list[Tensor]:
        given = (self._values, self._weights, self._lengths, self._offsets)
        return [t for t in given if t is not None]

    def _changed(
        self, change: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Change values, weights, lengths and offsets, as far as they are present."""
        others = (None if t is None else change(t) for t in (self._weights, self._lengths, self._offsets))
        return change(self._values), *others  # pyright: ignore[reportReturnType]

    def _copy_tensors(self, source: JaggedBase, non_blocking: bool) -> None:
        for name in ("_values", "_weights", "_lengths", "_offsets"):
            mine, given = getattr(self, name), getattr(source, name)
            if mine is not None and given is not None:
                mine.copy_(given, non_blocking=non_blocking)


class JaggedTensor(JaggedBase):
    """Hold the values of samples, any number per sample.

    Parameters
    ----------
    values
        ``[N, …]``, sample by sample.
    weights
        One per value, or None.
    lengths, offsets
        Number of values of each sample ``[B]``, or the position where each sample starts, and the end ``[B + 1]``.
        One of them is needed.
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
    def empty_like(cls, jt: JaggedTensor, device: torch.device | str | None = None) -> Self:
        """Build one without samples of the same dtypes, or, on a device, one of the same shapes without content."""
        if device is not None:
            return cls(*jt._changed(lambda t: torch.empty_like(t, device=device)))
        weights = jt.weights_or_none()
        none = None if weights is None else weights.new_empty(0)
        return cls(jt.values().new_empty(0), none, jt.lengths().new_empty(0))

    @classmethod
    def from_dense(cls, values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> Self:
        """Build from one tensor of values per sample. Lengths are int32."""
        joined = torch.cat(list(values))
        lengths = torch.tensor([len(v) for v in values], dtype=torch.int32, device=joined.device)
        return cls(joined, None if weights is None else torch.cat(list(weights)), lengths)

    @classmethod
    def from_dense_lengths(cls, values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> Self:
        """Build from padded values ``[B, L]``: the first ``lengths [B]`` of each row are the values of a sample."""
        check_integers("lengths", lengths)
        if len(lengths) and int(lengths.max()) > values.shape[1]:
            raise BatchError(
                f"a length is larger than the padded length: got {int(lengths.max())}, expected at most "
                f"{values.shape[1]}. Correct the lengths."
            )
        mask = padding_mask(lengths, values.shape[1], None)
        return cls(values[mask], None if weights is None else weights[mask], lengths)

    def to_dense(self) -> list[Tensor]:
        """Return the values of each sample."""
        return [self._values[start:end] for start, end in pairwise(self.offsets().tolist())]

    def to_dense_weights(self) -> list[Tensor] | None:
        """Return the weights of each sample, or None if there are none."""
        weights = self._weights
        return None if weights is None else [weights[a:b] for a, b in pairwise(self.offsets().tolist())]

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Return values ``[B, L, …]``, cut or padded to ``desired_length`` (default: that of the longest sample)."""
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """Return weights ``[B, L, …]`` like `to_padded_dense`, or None if there are none."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, data: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        lengths = self.lengths()
        longest = desired_length if desired_length is not None else int(lengths.max()) if len(lengths) else 0
        padded = data.new_full((len(lengths), longest, *data.shape[1:]), padding_value)
        mask = padding_mask(lengths, longest, None)
        places = self.offsets()[: len(lengths), None] + torch.arange(longest, device=lengths.device)
        padded[mask] = data[places[mask]]
        return padded

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """Copy to a device."""
        return JaggedTensor(*self._changed(lambda t: t.to(device, non_blocking=non_blocking)))

    def copy_(self, jt: JaggedTensor, non_blocking: bool = False) -> Self:
        """Copy the content of another one of the same shapes into these tensors."""
        self._copy_tensors(jt, non_blocking)
        return self

    @override
    def __str__(self) -> str:
        offsets = self.offsets().tolist()
        values = format_bags(self._values, offsets)
        if self._weights is None:
            return f"JaggedTensor({{\n    {values}\n}})\n"
        return f'JaggedTensor({{\n    "values": {values},\n    "weights": {format_bags(self._weights, offsets)}\n}})\n'


def jt_is_equal(jt_1: object, jt_2: object) -> bool:
    """Return whether both are `JaggedTensor` with close values and weights, and equal lengths."""
    return isinstance(jt_1, JaggedTensor) and isinstance(jt_2, JaggedTensor) and are_close(jt_1, jt_2)


def are_close(first: JaggedBase, second: JaggedBase) -> bool:
    """Return whether values and weights are close, and lengths and offsets equal."""
    pairs = (
        (first.values(), second.values()),
        (first.weights_or_none(), second.weights_or_none()),
        (first.lengths(), second.lengths()),
        (first.offsets(), second.offsets()),
    )
    return all(
        a is b if a is None or b is None else a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a, b)
        for a, b in pairs
    )


def offsets_like(lengths: Tensor) -> Tensor:
    """Sum lengths up along the last dim, with a leading 0. Offsets of int32 lengths are int32, as in TorchRec."""
    offsets = offsets_of(lengths)
    return offsets.to(torch.int32) if lengths.dtype == torch.int32 else offsets


def format_bags(values: Tensor, offsets: Sequence[int]) -> str:
    """Format the values of each bag as a list."""
    if values.dim() > 2:
        raise BatchError(f"values have too many dims to print: got {describe(values)}, expected 2. Print values().")
    return str([values[start:end].tolist() for start, end in pairwise(offsets)])


def register_tree(
    kind: type[Any], flatten: Callable[[Any], Any], unflatten: Callable[..., Any], names: tuple[str, ...]
) -> None:
    """Register a class whose instances are trees of tensors."""

    def with_keys(tree: Any) -> tuple[list[tuple[Any, Tensor | None]], Any]:
        tensors, context = flatten(tree)
        return [(GetAttrKey(name), t) for name, t in zip(names, tensors, strict=True)], context

    name = f"hotbed.compat.torchrec.{kind.__name__}"
    register_pytree_node(kind, flatten, unflatten, flatten_with_keys_fn=with_keys, serialized_type_name=name)
    register_pytree_flatten_spec(kind, lambda tree, _: flatten(tree)[0])


TENSORS = ("_values", "_weights", "_lengths", "_offsets")


def _flatten_jt(jt: JaggedTensor) -> tuple[list[Tensor | None], None]:
    return [getattr(jt, name) for name in TENSORS], None


def _unflatten_jt(tensors: Iterable[Any], _: object) -> JaggedTensor:
    return JaggedTensor(*tensors)


register_tree(JaggedTensor, _flatten_jt, _unflatten_jt, TENSORS)
