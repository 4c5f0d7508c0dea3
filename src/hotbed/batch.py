"""What flows through a model: a `Batch` goes in, `Embeddings` come out of its sparse part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hotbed.bags import describe
from hotbed.errors import BatchError, did_you_mean
from hotbed.jagged import Jagged


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
        Sample weights ``[B]`` float, or None.
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
        for name, t, dim in (("dense", self.dense, 2), ("labels", self.labels, 2), ("weights", self.weights, 1)):
            if t is not None and (t.dim() != dim or len(t) != size or not t.dtype.is_floating_point):
                shape = f"[{size}, …]" if dim == 2 else f"[{size}]"
                raise BatchError(f"{name} must be floating point {shape}, got {describe(t)}")
        for name, t in self.extra.items():
            if len(t) != size:
                raise BatchError(f"extra column '{name}' has {len(t):,} samples, the batch has {size:,}")

    def __len__(self) -> int:
        return len(self.sparse)

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch on another device."""
        return self._map(
            self.sparse.to(device, non_blocking=non_blocking), lambda t: t.to(device, non_blocking=non_blocking)
        )

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._map(self.sparse.pin_memory(), lambda t: t.pin_memory())

    def take(self, samples: Tensor) -> Batch:
        """The samples at these positions ``[b]`` (int64), in this order."""
        return self._map(self.sparse.take(samples), lambda t: t[samples])

    @staticmethod
    def concatenate(parts: Sequence[Batch]) -> Batch:
        """One batch with the samples of all parts, in order. Parts must have the same columns."""
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

    def _map(self, sparse: Jagged, change: Callable[[Tensor], Tensor]) -> Batch:
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
    """Pooled vectors of one batch, by feature: ``e["user"]`` is ``[B, D]``.

    Parameters
    ----------
    names
        Feature names in the order of the collection.
    parts
        Per arena: the positions (in ``names``) of its features, and their vectors ``[B, features, D]``.
    """

    def __init__(self, names: Sequence[str], parts: Sequence[tuple[Sequence[int], Tensor]]) -> None:
        self.names = tuple(names)
        self._parts = parts
        self._place = {self.names[i]: (p, column) for p, (of, _) in enumerate(parts) for column, i in enumerate(of)}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._place:
            raise BatchError(f"no feature '{name}'; there are {', '.join(self.names)}{did_you_mean(name, self.names)}")
        part, column = self._place[name]
        return self._parts[part][1][:, column]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def stack(self) -> Tensor:
        """All features as ``[B, F, D]``, in the order of the collection; all must have the same dim."""
        if len(self._parts) == 1:
            return self._parts[0][1]
        dims = ", ".join(f"{n}: {self[n].shape[1]}" for n in self.names)
        raise BatchError(f"stack() needs features of one dim, got {dims}; use concatenate() or pick features by name")

    def concatenate(self) -> Tensor:
        """All features side by side as ``[B, ΣD]``, in the order of the collection."""
        if len(self._parts) == 1:
            return self._parts[0][1].flatten(1)
        return torch.cat([self[name] for name in self.names], dim=1)
