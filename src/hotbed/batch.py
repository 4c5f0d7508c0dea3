"""Carry data through a model: a `Batch` goes in, `Embeddings` come out of its sparse part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.bags import Bags, describe_tensor, offsets_of, padding_mask
from hotbed.errors import BatchError, did_you_mean
from hotbed.jagged import Jagged
from hotbed.specs import Feature, Padding
from hotbed.torch_private import version


@dataclass(frozen=True, kw_only=True)
class Batch:
    """One batch of samples.

    Attributes
    ----------
    sparse
        Ids by feature.
    dense
        Numerical inputs ``[B, I]`` float, or None.
    labels
        ``[B, T]`` float, or None where only predictions are wanted.
    weights
        Sample weights ``[B]`` float, or of each label ``[B, T]``, or None.
    extra
        Further columns ``[B, …]`` by name (a group id for GAUC, a timestamp).

    Raises
    ------
    BatchError
        If a part has another number of samples, shape or kind of dtype.
    """

    sparse: Jagged
    dense: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        size = len(self.sparse)
        for name, t in (("dense", self.dense), ("labels", self.labels), ("weights", self.weights)):
            dims = (1, 2) if name == "weights" else (2,)
            if t is not None and (t.dim() not in dims or len(t) != size or not t.dtype.is_floating_point):
                shape = f"[{size}]" if 1 in dims else f"[{size}, …]"
                raise BatchError(f"{name} must be floating point {shape}, got {describe_tensor(t)}")
        labels, weights = self.labels, self.weights
        if weights is not None and weights.dim() == 2 and labels is not None and weights.shape != labels.shape:
            raise BatchError(
                f"weights are {list(weights.shape)}, but the labels are {list(labels.shape)}; give one weight per "
                f"sample [{size}], or one per sample and label"
            )
        for name, t in self.extra.items():
            if len(t) != size:
                raise BatchError(f"extra column '{name}' has {len(t):,} samples, the batch has {size:,}")

    def __len__(self) -> int:
        return len(self.sparse)

    @property
    def weights_by_label(self) -> Tensor | None:
        """Sample weights ``[B, T]``, or ``[B, 1]`` where those of all labels are the same."""
        weights = self.weights
        return weights[:, None] if weights is not None and weights.dim() == 1 else weights

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """Copy the batch to a device."""
        return self.map_columns(
            self.sparse.to(device, non_blocking=non_blocking), lambda t: t.to(device, non_blocking=non_blocking)
        )

    def pin_memory(self) -> Batch:
        """Copy the batch to page-locked memory."""
        return self.map_columns(self.sparse.pin_memory(), lambda t: t.pin_memory())

    def take(self, samples: Tensor) -> Batch:
        """Select the samples at these positions ``[b]`` (int64), in this order."""
        return self.map_columns(self.sparse.take(samples), lambda t: t[samples])

    @staticmethod
    def concatenate(parts: Sequence[Batch]) -> Batch:
        """Join the samples of several batches, in order; these must have the same columns."""
        if len(parts) == 1:
            return parts[0]

        def join(column: Callable[[Batch], Tensor | None]) -> Tensor | None:
            tensors = [t for t in map(column, parts) if t is not None]
            if len(tensors) not in (0, len(parts)) or any(p.extra.keys() != parts[0].extra.keys() for p in parts):
                raise BatchError("batches to concatenate must have the same columns; some lack one that others have")
            return torch.cat(tensors) if tensors else None

        return Batch(
            sparse=Jagged.concatenate([p.sparse for p in parts]),
            dense=join(lambda b: b.dense),
            labels=join(lambda b: b.labels),
            weights=join(lambda b: b.weights),
            extra={name: torch.cat([p.extra[name] for p in parts]) for name in parts[0].extra},
        )

    def map_columns(self, sparse: Jagged, change: Callable[[Tensor], Tensor]) -> Batch:
        """Return a batch with these ids, in which all other columns are replaced by ``change(column)``."""

        def maybe(t: Tensor | None) -> Tensor | None:
            return None if t is None else change(t)

        return replace(
            self,
            sparse=sparse,
            dense=maybe(self.dense),
            labels=maybe(self.labels),
            weights=maybe(self.weights),
            extra={name: change(t) for name, t in self.extra.items()},
        )


class Embeddings(Mapping[str, Tensor]):
    """Vectors of one batch, by feature.

    ``e["user"]`` is ``[B, D]``; of a feature that is not pooled (``pooling="none"``), ``e["history"]`` is a torch
    nested tensor ``[B, j, D]`` of jagged layout, one row per id, or ``[B, L, D]`` if the feature has a padding. Where
    `stack` is wanted, too, call it before taking vectors by name: it copies them otherwise, for vectors that were taken
    by name may be changed in place. Those taken after it are views of what it returned, which torch refuses to change
    in place where they have a gradient.

    Parameters
    ----------
    names
        Feature names in the order of the collection.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._pooled: list[_Pooled] = []
        self._place: dict[str, tuple[int, int]] = {}
        self._sequences: dict[str, _Sequence] = {}

    def add_pooled(self, names: Sequence[str], vectors: Tensor, buffer: Tensor | None) -> None:
        """Add pooled features ``[B, features, D]``; ``buffer [B, 1 + features, D]`` is their memory, room included."""
        self._place.update(zip(names, zip(repeat(len(self._pooled)), count()), strict=False))
        self._pooled.append(_Pooled(vectors, buffer))

    def add_sequence(self, feature: Feature, vectors: Tensor, bags: Bags) -> None:
        """Add a feature that is not pooled: ``vectors [N, D]``, one per id of its bags, or padded ``[B · L, D]``."""
        if feature.padding is not None:
            vectors = vectors.view(bags.batch_size, feature.max_len or 0, vectors.shape[1])
        self._sequences[feature.name] = _Sequence(vectors, bags, feature.max_len, feature.padding)

    def looked_up(self) -> Iterator[tuple[list[str], Tensor]]:
        """Yield the vectors as they were looked up, with the names of their features.

        Pooled features of one dim come together ``[B, features, D]``, others ``[N, D]`` or, padded, ``[B, L, D]``.
        """
        for number, of_dim in enumerate(self._pooled):
            yield [name for name, (at, _) in self._place.items() if at == number], of_dim.vectors
        for name, (values, *_) in self._sequences.items():
            yield [name], values

    def __getitem__(self, name: str) -> Tensor:
        if name in self._place:
            number, column = self._place[name]
            return self._pooled[number].column(column)
        values, _, _, padding = self._sequence(name)
        return values if padding is not None else torch.nested.nested_tensor_from_jagged(*self.jagged(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def jagged(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the vectors ``[N, D]`` of a feature that is not pooled, and where each sample's start ``[B + 1]``.

        Raises
        ------
        BatchError
            If the feature is pooled or padded.
        """
        values, bags, _, padding = self._sequence(name)
        if padding is not None:
            raise BatchError(f"feature '{name}' has padding={padding!r}; take e['{name}'], which is [B, max_len, D]")
        return values, offsets_of(bags.lengths()) if bags.offsets is None else bags.offsets

    def padded(self, name: str) -> tuple[Tensor, Tensor]:
        """Pad a feature that is not pooled with zeros, where it was not looked up so (`Feature.padding`).

        Returns
        -------
        tuple[Tensor, Tensor]
            ``[B, L, D]`` and a mask ``[B, L]`` bool, true where there is an id. ``L`` is the feature's ``max_len``, or
            the length of the longest bag.
        """
        values, bags, max_len, padding = self._sequence(name)
        lengths = bags.lengths()
        if padding is not None:
            return values, padding_mask(lengths, values.shape[1], padding)
        longest = max_len if max_len is not None else int(lengths.max()) if len(lengths) else 0
        mask = padding_mask(lengths, longest, None)
        out = values.new_zeros(len(lengths) * longest, values.shape[1])
        out = out.index_copy(0, mask.flatten().nonzero()[:, 0], values)
        return out.view(len(lengths), longest, values.shape[1]), mask

    def stack(self, lead: Tensor | None = None) -> Tensor:
        """Stack all features to ``[B, F, D]``, in the order of the collection; all must be pooled, of one dim.

        Parameters
        ----------
        lead
            One more vector per sample ``[B, D]``, to come first: ``[B, 1 + F, D]``. No vector is copied if the
            collection was called with ``room=1``.
        """
        pooled = self._only_dim()
        if lead is None:
            return pooled.shared()
        wanted = (pooled.vectors.shape[0], pooled.dim)  # len() would fix the number of samples where torch exports
        if lead.shape != wanted:
            raise BatchError(f"lead must be {list(wanted)}, got {list(lead.shape)}")
        compiling = torch.compiler.is_dynamo_compiling()
        # A graph may get vectors from outside, whose buffer has no gradient.
        buffer = pooled.buffer
        if compiling and buffer is not None and pooled.vectors.requires_grad and not buffer.requires_grad:
            buffer = None
        if buffer is None or pooled.columns is not None:
            return torch.cat([lead[:, None].to(pooled.vectors.dtype), pooled.joined()], dim=1)
        pooled.buffer, pooled.is_shared = None, True  # the room is used once
        return _Lead.apply(lead, None if compiling else pooled.vectors, buffer)

    def concatenate(self) -> Tensor:
        """Concatenate all features to ``[B, ΣD]``, in the order of the collection; all must be pooled."""
        self._refuse_sequences("concatenate")
        if len(self._pooled) == 1:
            return self._pooled[0].shared().flatten(1)
        order: list[int] = []
        runs: list[list[int]] = [[] for _ in self._pooled]
        for name in self.names:  # neighbours of one dim are copied together
            at, _ = self._place[name]
            if order and order[-1] == at:
                runs[at][-1] += 1
            else:
                order.append(at)
                runs[at].append(1)
        # One split per dim: its gradient is one tensor, that of a slice would be zeros of the whole each time.
        slices = [
            iter(of_dim.joined().flatten(1).split([n * of_dim.dim for n in lengths], dim=1))
            for of_dim, lengths in zip(self._pooled, runs, strict=True)
        ]
        return torch.cat([next(slices[at]) for at in order], dim=1)

    def _sequence(self, name: str) -> _Sequence:
        if name in self._sequences:
            return self._sequences[name]
        if name in self._place:
            raise BatchError(f"feature '{name}' is pooled, so there is nothing to pad; give it pooling='none'")
        raise BatchError(f"no feature '{name}'; there are {', '.join(self.names)}{did_you_mean(name, self.names)}")

    def _only_dim(self) -> _Pooled:
        self._refuse_sequences("stack")
        if len(self._pooled) == 1:
            return self._pooled[0]
        dims = ", ".join(f"{n}: {self._pooled[self._place[n][0]].dim}" for n in self.names)
        raise BatchError(f"stack() needs features of one dim, got {dims}; use concatenate() or pick features by name")

    def _refuse_sequences(self, method: str) -> None:
        if self._sequences:
            raise BatchError(
                f"{method}() needs pooled features, and {', '.join(self._sequences)} has pooling='none'; pick features "
                "by name"
            )


@dataclass
class _Pooled:
    """Features of one dim, ``vectors [B, features, D]``.

    Slices of them taken one by one would each have a gradient of the size of all vectors, so the time of a backward
    would grow with the square of their number. Here the gradients of all features are joined once.
    """

    vectors: Tensor
    buffer: Tensor | None
    is_shared: bool = False
    """Whether a caller has the vectors themselves."""
    views: tuple[int, tuple[Tensor, ...]] | None = None
    """Vectors by feature as views of what a caller has, and the version that they are of."""
    columns: tuple[Tensor, ...] | None = None
    """Vectors by feature, which may be changed in place; once they exist, the vectors themselves are not returned."""

    @property
    def dim(self) -> int:
        return self.vectors.shape[2]

    def column(self, i: int) -> Tensor:
        """Return the vectors of a feature ``[B, D]``."""
        if self.vectors.shape[1] == 1 or not (self.vectors.requires_grad and torch.is_grad_enabled()):
            return self.vectors[:, i]
        compiling = torch.compiler.is_compiling()
        if self.columns is None and not (self.is_shared or compiling):
            self.columns = _Columns.apply(self.vectors)
        if self.columns is not None:
            return self.columns[i]
        now = -1 if compiling else version(self.vectors)  # which compiled code cannot branch on
        if self.views is None or self.views[0] != now:
            self.views = now, self.vectors.unbind(1)
        return self.views[1][i]

    def joined(self) -> Tensor:
        """Return all vectors, to be copied by the caller."""
        return self.vectors if self.columns is None else torch.stack(self.columns, dim=1)

    def shared(self) -> Tensor:
        """Return all vectors, which the caller keeps."""
        self.is_shared = self.is_shared or self.columns is None
        return self.joined()


class _Sequence(NamedTuple):
    values: Tensor
    bags: Bags
    max_len: int | None
    padding: Padding | None
    """Where zeros are, if values are ``[B, max_len, D]``."""


class _Columns(torch.autograd.Function):
    """Split vectors ``[B, features, D]`` by feature; none is a view to autograd, so each can be changed in place."""

    @staticmethod
    def forward(ctx: Any, vectors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(column.detach() for column in vectors.unbind(1))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor | None
    ) -> Tensor | None:
        some = next((grad for grad in grad_outputs if grad is not None), None)
        if some is None:
            return None
        nothing = torch.zeros_like(some)
        return torch.stack([nothing if grad is None else grad for grad in grad_outputs], dim=1)


class _Lead(torch.autograd.Function):
    """Write the lead into the room of the buffer, before the vectors, which are views of it and stay where they are.

    The gradient goes to the vectors; in a graph of ``torch.compile`` to the buffer, which has one there, and whose
    room's nobody reads.
    """

    @staticmethod
    def forward(ctx: Any, lead: Tensor, vectors: Tensor | None, buffer: Tensor) -> Tensor:
        ctx.dtype = lead.dtype
        if vectors is None:
            return buffer.select_scatter(lead.to(buffer.dtype), 1, 0)  # in place, where the compiler finds that it can
        # .data: vectors, which may be saved for some backward, are not changed, so their version must not be either.
        # What is returned shares their version, so that changing it in place is noticed.
        whole = buffer.detach()
        whole.data[:, 0] = lead
        return whole

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        (grad,) = grad_outputs
        of_lead = grad[:, 0].to(ctx.dtype)
        return (of_lead, None, grad) if ctx.needs_input_grad[2] else (of_lead, grad[:, 1:], None)
