"""Carry data through a model. A `Batch` is the input, and `Embeddings` are the looked-up vectors of its ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, count, pairwise, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.errors import BatchError, did_you_mean
from hotbed.jagged import Bags, Jagged, describe_tensor, offsets_of, padding_mask
from hotbed.specs import Feature, Padding
from hotbed.torch_private import version
from hotbed.virtual_ranks import VirtualRanks


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
        ``[B, T]`` float, or None if only predictions are needed.
    weights
        Weights of samples ``[B]`` or of labels ``[B, T]``, float, or None.
    extra
        Further columns ``[B, …]`` by name, e.g. a group ID for GAUC, or a timestamp.
    slices
        Number of samples of each virtual rank in this batch (`hotbed.virtual_ranks`), or None if there
        is one.

    Raises
    ------
    BatchError
        If a part has a wrong number of samples, shape or dtype.
    """

    sparse: Jagged
    dense: Tensor | None = None
    labels: Tensor | None = None
    weights: Tensor | None = None
    extra: Mapping[str, Tensor] = field(default_factory=dict)
    slices: tuple[int, ...] | None = None

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
                f"weights: got {list(weights.shape)}, expected [{size}] (one per sample) or {list(labels.shape)} (one "
                "per sample and label)"
            )
        for name, t in self.extra.items():
            if len(t) != size:
                raise BatchError(f"extra column '{name}': got {len(t):,} samples, expected the batch's {size:,}")

    def __len__(self) -> int:
        return len(self.sparse)

    @property
    def weights_by_label(self) -> Tensor | None:
        """Weights ``[B, T]``, or ``[B, 1]`` if the weights of all labels are equal."""
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
        """Select the samples at these positions ``[b]`` (int64), in this order. The result has no `slices`."""
        return replace(self.map_columns(self.sparse.take(samples), lambda t: t[samples]), slices=None)

    def divide(self, virtual: VirtualRanks) -> list[Batch]:
        """Return copies of the samples of each virtual rank, because bits of products may depend on the alignment.

        Raises
        ------
        BatchError
            If there are no `slices` for the virtual ranks of the process.
        """
        sizes = self.slices
        if sizes is None or len(sizes) != len(virtual.own):
            raise BatchError(
                f"Batch.slices: got {sizes}, expected the numbers of samples of {len(virtual.own)} virtual ranks. Use "
                f"hotbed.data.Loader(…, virtual_ranks={virtual.total})"
            )
        bounds = pairwise(accumulate(sizes, initial=0))
        return [
            replace(self.map_columns(ids, lambda t, a=a, b=b: t[a:b].clone()), slices=None)
            for ids, (a, b) in zip(self.sparse.divide(sizes), bounds, strict=True)
        ]

    @staticmethod
    def concatenate(parts: Sequence[Batch]) -> Batch:
        """Concatenate the samples of several batches, in order. All batches must have the same columns."""
        if len(parts) == 1:
            return parts[0]

        def concatenate_column(column: Callable[[Batch], Tensor | None]) -> Tensor | None:
            tensors = [t for t in map(column, parts) if t is not None]
            if len(tensors) not in (0, len(parts)) or any(p.extra.keys() != parts[0].extra.keys() for p in parts):
                raise BatchError("concatenate: got batches with different columns, expected the same columns in all")
            return torch.cat(tensors) if tensors else None

        return Batch(
            sparse=Jagged.concatenate([p.sparse for p in parts]),
            dense=concatenate_column(lambda b: b.dense),
            labels=concatenate_column(lambda b: b.labels),
            weights=concatenate_column(lambda b: b.weights),
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

    The vectors of a pooled feature, e.g. ``e["user"]``, are ``[B, D]``. For a feature with ``pooling="none"``,
    ``e["history"]`` is a nested tensor ``[B, j, D]`` of jagged layout with one row per id, or ``[B, L, D]`` if the
    feature has a padding. If you also need `stack`, call it before you get vectors by name. Otherwise `stack` copies
    all vectors, because the vectors by name may be changed in place. Vectors that you get by name after `stack` are
    views of its result. torch refuses to change these views in place if they have a gradient.

    Parameters
    ----------
    names
        Feature names in the order of the collection.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._pooled: list[_Pooled] = []
        self._position: dict[str, tuple[int, int]] = {}
        self._sequences: dict[str, _Sequence] = {}

    def add_pooled(self, names: Sequence[str], vectors: Tensor, buffer: Tensor | None) -> None:
        """Add pooled features ``[B, features, D]``, a view of ``buffer [B, 1 + features, D]`` if that is passed."""
        self._position.update(zip(names, zip(repeat(len(self._pooled)), count()), strict=False))
        self._pooled.append(_Pooled(vectors, buffer))

    def add_sequence(self, feature: Feature, vectors: Tensor, bags: Bags) -> None:
        """Add an unpooled feature with vectors ``[N, D]``, one per id of its bags, or ``[B · L, D]`` if padded."""
        if feature.padding is not None:
            vectors = vectors.view(bags.batch_size, feature.max_len or 0, vectors.shape[1])
        self._sequences[feature.name] = _Sequence(vectors, bags, feature.max_len, feature.padding)

    def looked_up(self) -> Iterator[tuple[list[str], Tensor]]:
        """Yield names of features, and their vectors as they were looked up.

        All pooled features of one dim are yielded together as ``[B, features, D]``. Each unpooled feature is
        ``[N, D]``, or ``[B, L, D]`` if padded.
        """
        for number, of_dim in enumerate(self._pooled):
            yield [name for name, (at, _) in self._position.items() if at == number], of_dim.vectors
        for name, (values, *_) in self._sequences.items():
            yield [name], values

    def outputs(self) -> list[Tensor]:
        """Return the vectors as they were looked up, by dim and then by unpooled feature (see `looked_up`)."""
        return [vectors for _, vectors in self.looked_up()]

    def cuts(self, sizes: Sequence[int]) -> list[list[slice]]:
        """Return the rows of consecutive groups of samples in each of the `outputs`."""
        ends = list(accumulate(sizes, initial=0))
        found = [ends] * len(self._pooled)
        for values, bags, _, padding in self._sequences.values():
            if padding is not None or bags.offsets is None:
                rows = len(values) // max(bags.batch_size, 1)  # per sample
                found.append([end * rows for end in ends])
            else:
                found.append(bags.offsets[ends].tolist())
        return [[slice(a, b) for a, b in pairwise(of_output)] for of_output in found]

    def part(self, samples: slice, outputs: Sequence[Tensor]) -> Embeddings:
        """Return the vectors ``outputs`` of some samples."""
        found = Embeddings(self.names)
        found._position = self._position
        for vectors, of_dim in zip(outputs, self._pooled, strict=False):
            found._pooled.append(_Pooled(vectors, None if of_dim.buffer is None else of_dim.buffer[samples]))
        for vectors, (name, sequence) in zip(outputs[len(self._pooled) :], self._sequences.items(), strict=True):
            found._sequences[name] = sequence._replace(values=vectors, bags=sequence.bags.part(samples))
        return found

    def __getitem__(self, name: str) -> Tensor:
        if name in self._position:
            number, column = self._position[name]
            return self._pooled[number].column(column)
        values, _, _, padding = self._sequence(name)
        return values if padding is not None else torch.nested.nested_tensor_from_jagged(*self.jagged(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def jagged(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the vectors ``[N, D]`` of an unpooled feature, and the offsets ``[B + 1]`` of the samples in them.

        Raises
        ------
        BatchError
            If the feature is pooled or padded.
        """
        values, bags, _, padding = self._sequence(name)
        if padding is not None:
            raise BatchError(
                f"feature '{name}': got padding={padding!r}, expected no padding. Use e['{name}'], which is "
                "[B, max_len, D]"
            )
        return values, offsets_of(bags.lengths()) if bags.offsets is None else bags.offsets

    def padded(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the vectors of an unpooled feature, padded with zeros.

        Returns
        -------
        tuple[Tensor, Tensor]
            ``[B, L, D]``, and a mask ``[B, L]`` bool that is true for ids and false for padding. ``L`` is the feature's
            ``max_len``, or the length of the longest bag.
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
        """Stack all features to ``[B, F, D]``, in the order of the collection. All must be pooled and of one dim.

        Parameters
        ----------
        lead
            An additional first vector per sample, ``[B, D]``. The result is then ``[B, 1 + F, D]``. No vector is copied
            if the collection was called with ``room=1``.
        """
        pooled = self._only_dim()
        if lead is None:
            return pooled.shared()
        wanted = (pooled.vectors.shape[0], pooled.dim)  # len() would make the number of samples constant in an export
        if lead.shape != wanted:
            raise BatchError(f"lead must be {list(wanted)}, got {list(lead.shape)}")
        compiling = torch.compiler.is_dynamo_compiling()
        # Vectors that are inputs of a graph may have a buffer without a gradient.
        buffer = pooled.buffer
        if compiling and buffer is not None and pooled.vectors.requires_grad and not buffer.requires_grad:
            buffer = None
        if buffer is None or pooled.columns is not None:
            return torch.cat([lead[:, None].to(pooled.vectors.dtype), pooled.stacked()], dim=1)
        pooled.buffer, pooled.is_shared = None, True  # the room can be used only once
        return _Lead.apply(lead, None if compiling else pooled.vectors, buffer)

    def concatenate(self) -> Tensor:
        """Concatenate all features to ``[B, ΣD]``, in the order of the collection. All must be pooled."""
        self._refuse_sequences("concatenate")
        if len(self._pooled) == 1:
            return self._pooled[0].shared().flatten(1)
        order: list[int] = []
        runs: list[list[int]] = [[] for _ in self._pooled]
        for name in self.names:  # adjacent features of one dim are copied together
            at, _ = self._position[name]
            if order and order[-1] == at:
                runs[at][-1] += 1
            else:
                order.append(at)
                runs[at].append(1)
        # One split per dim has one gradient tensor. Each slice would have a mostly zero gradient of the whole size.
        slices = [
            iter(of_dim.stacked().flatten(1).split([n * of_dim.dim for n in lengths], dim=1))
            for of_dim, lengths in zip(self._pooled, runs, strict=True)
        ]
        return torch.cat([next(slices[at]) for at in order], dim=1)

    def _sequence(self, name: str) -> _Sequence:
        if name in self._sequences:
            return self._sequences[name]
        if name in self._position:
            raise BatchError(f"feature '{name}': got a pooled feature, expected pooling='none' in its Feature")
        raise BatchError(
            f"feature: got '{name}', expected one of {', '.join(self.names)}{did_you_mean(name, self.names)}"
        )

    def _only_dim(self) -> _Pooled:
        self._refuse_sequences("stack")
        if len(self._pooled) == 1:
            return self._pooled[0]
        dims = ", ".join(f"{n}: {self._pooled[self._position[n][0]].dim}" for n in self.names)
        raise BatchError(f"stack(): got dims {dims}, expected one dim. Use concatenate(), or select features by name")

    def _refuse_sequences(self, method: str) -> None:
        if self._sequences:
            raise BatchError(
                f"{method}(): got pooling='none' of {', '.join(self._sequences)}, expected only pooled features. "
                "Select features by name"
            )


@dataclass
class _Pooled:
    """Pooled features of one dim, ``vectors [B, features, D]``.

    If features were separate slices of ``vectors``, each gradient would have the size of all vectors, and the time of a
    backward pass would grow with the square of their number. Here the gradients of all features are stacked once.
    """

    vectors: Tensor
    buffer: Tensor | None
    is_shared: bool = False
    """Whether a caller has a reference to ``vectors``."""
    views: tuple[int, tuple[Tensor, ...]] | None = None
    """Version of ``vectors``, and views of them by feature."""
    columns: tuple[Tensor, ...] | None = None
    """Vectors by feature, which callers may change in place. If they exist, ``vectors`` itself is never returned."""

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
        now = -1 if compiling else version(self.vectors)  # compiled code cannot branch on the version
        if self.views is None or self.views[0] != now:
            self.views = now, self.vectors.unbind(1)
        return self.views[1][i]

    def stacked(self) -> Tensor:
        """Return all vectors, for a caller that copies them."""
        return self.vectors if self.columns is None else torch.stack(self.columns, dim=1)

    def shared(self) -> Tensor:
        """Return all vectors, for a caller that keeps a reference to them."""
        self.is_shared = self.is_shared or self.columns is None
        return self.stacked()


class _Sequence(NamedTuple):
    values: Tensor
    bags: Bags
    max_len: int | None
    padding: Padding | None
    """Side of the zeros if values are ``[B, max_len, D]``, otherwise None."""


class _Columns(torch.autograd.Function):
    """Split vectors ``[B, features, D]`` by feature. To autograd the results are no views, so they may be changed."""

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
    """Write the lead into the free first column of the buffer, without a copy of the vectors, which are views of it.

    The gradient goes to the vectors. In a graph of ``torch.compile`` it goes to the buffer, which has a gradient there.
    """

    @staticmethod
    def forward(ctx: Any, lead: Tensor, vectors: Tensor | None, buffer: Tensor) -> Tensor:
        ctx.dtype = lead.dtype
        if vectors is None:
            return buffer.select_scatter(lead.to(buffer.dtype), 1, 0)  # the compiler may do this in place
        # Some backward may have saved the vectors. `.data` keeps their version, because they do not change. The result
        # shares their version, so torch notices later changes in place.
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
