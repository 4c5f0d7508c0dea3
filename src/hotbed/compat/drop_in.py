"""Define modules that are called like ``nn.Embedding`` and ``nn.EmbeddingBag`` and look up in hotbed's tables.

`hotbed.swap_embeddings` makes them. What they return for ids that are in range is what torch's modules return; a row's
gradient goes to the optimizer of hotbed that has been made for the model.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed.bags import Bags, describe
from hotbed.embed import EmbeddingCollection
from hotbed.embed.single_lookup import look_up
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged

Mode = Literal["sum", "mean", "max"]


class _DropIn(nn.Module):
    """Look up one feature of a collection of one table; modules that shared a weight share the collection.

    Parameters
    ----------
    rows
        The collection.
    feature
        Which of its features this module looks up.
    padding_idx, max_norm
        As torch's; ``max_norm`` is kept by the optimizers' updates, so rows must be within it from the start.
    """

    def __init__(
        self, rows: EmbeddingCollection, feature: str, padding_idx: int | None, max_norm: float | None
    ) -> None:
        super().__init__()
        self.rows = rows
        self.feature = feature
        (table,) = rows.tables.values()
        self.table = table.name
        self.num_embeddings, self.embedding_dim = table.rows, table.dim
        self.padding_idx, self.max_norm = padding_idx, max_norm
        self.register_state_dict_post_hook(_rename_saved)
        self.register_load_state_dict_pre_hook(_rename_loaded)
        self.register_load_state_dict_post_hook(_limit_loaded)

    @property
    def weight(self) -> Tensor:
        """Rows ``[R, D]``: the memory of the table where it is float32 and all on this rank.

        They have no gradient: a backward pass that reaches them, as those of an output layer, raises `SpecError`.
        """
        return weight_of(self.rows, self.table)

    @torch.no_grad()
    def limit_norms(self) -> None:
        """Scale rows down to ``max_norm``, as torch does with rows when they are looked up."""
        if self.max_norm is not None:
            rows = self.rows.weight(self.table)
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            scaled = torch.where(norms > self.max_norm, rows * (self.max_norm / (norms + 1e-7)), rows)
            self.rows.set_weight(self.table, scaled)

    @override
    def extra_repr(self) -> str:
        """Say what torch's module would."""
        said = f"{self.num_embeddings}, {self.embedding_dim}"
        for name in ("padding_idx", "max_norm"):
            if (value := getattr(self, name)) is not None:
                said += f", {name}={value}"
        return said


class _Rows(torch.autograd.Function):
    """Give the rows of a table, and refuse a gradient of them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, rows: Tensor, table: str) -> Tensor:
        ctx.table = table
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise SpecError(
            f"the rows of table '{ctx.table}' are used where they need a gradient, as the weight of an output layer "
            f"does, and a table has none but from lookups; leave the module as it is with skip=['{ctx.table}']"
        )


def weight_of(rows: EmbeddingCollection, table: str) -> Tensor:
    """Return the rows of a table ``[R, D]``; where it is trained, a backward pass that reaches them is refused."""
    found = rows.weight(table)
    handle = rows.handles[table]
    return _Rows.apply(handle, found, table) if handle.requires_grad and torch.is_grad_enabled() else found


def _rename_saved(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Save the table under the name of the weight that it was."""
    assert isinstance(module, _DropIn)
    inner = f"{prefix}rows.{module.table}."
    for key in [key for key in state if key.startswith(inner)]:
        state[prefix + key.removeprefix(inner)] = state.pop(key)


def _rename_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take ``weight``, of torch's module or of this one, to the table."""
    assert isinstance(module, _DropIn)
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(f"{prefix}rows.")]:
        state[f"{prefix}rows.{module.table}.{key.removeprefix(prefix)}"] = state.pop(key)


def _limit_loaded(module: nn.Module, _: Any) -> None:
    assert isinstance(module, _DropIn)
    module.limit_norms()


class Embedding(_DropIn):
    """Look ids of any shape up, as ``nn.Embedding`` does.

    Parameters
    ----------
    rows, feature, padding_idx, max_norm
        As for all drop-ins; the row of ``padding_idx`` is looked up, but gets no gradient.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Look up ``[…]`` int32 or int64: ``[…, D]``.

        Raises
        ------
        BatchError
            If ids are no integers, or out of range.
        """
        found = look_up(self.rows, self.feature, Bags(input.reshape(-1), input.numel(), 1, None, None))
        found = found.view(*input.shape, self.embedding_dim)
        if self.padding_idx is None or not found.requires_grad:
            return found
        return torch.where((input == self.padding_idx)[..., None], found.detach(), found)


class EmbeddingBag(_DropIn):
    """Look bags up and pool them, as ``nn.EmbeddingBag`` does.

    Parameters
    ----------
    rows, feature, padding_idx, max_norm
        As for all drop-ins; ids that are ``padding_idx`` are left out of their bags.
    mode
        ``"sum"``, ``"mean"`` or ``"max"``.
    include_last_offset
        Whether offsets are ``[B + 1]``, with the number of ids as the last one.
    """

    def __init__(
        self,
        rows: EmbeddingCollection,
        feature: str,
        padding_idx: int | None,
        max_norm: float | None,
        *,
        mode: Mode,
        include_last_offset: bool,
    ) -> None:
        super().__init__(rows, feature, padding_idx, max_norm)
        self.mode, self.include_last_offset = mode, include_last_offset

    @override
    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Look up and pool ``[B, k]``, or ``[N]`` with offsets, int32 or int64: ``[B, D]``.

        Parameters
        ----------
        input
            Ids.
        offsets
            Of ids ``[N]``, where each bag starts: ``[B]``, or ``[B + 1]`` with ``include_last_offset``.
        per_sample_weights
            Of the shape of the ids, only with mode ``"sum"``.

        Raises
        ------
        BatchError
            If ids are no integers or out of range, or offsets or weights do not fit to them.
        """
        weights = self._checked_weights(input, per_sample_weights)
        bags = self._bags(input, offsets, weights)
        if self.padding_idx is not None:
            bags = _without(_checked(bags), self.padding_idx)
        found = look_up(self.rows, self.feature, bags)
        return found if self.mode != "max" else _largest(found, bags.lengths())

    def _checked_weights(self, ids: Tensor, weights: Tensor | None) -> Tensor | None:
        if weights is None:
            return None
        if self.mode != "sum":
            raise BatchError(f"per_sample_weights are for mode 'sum' only, mode is {self.mode!r}; leave them out")
        if weights.shape != ids.shape:
            raise BatchError(
                f"per_sample_weights are {list(weights.shape)}, must be of the ids' shape {list(ids.shape)}"
            )
        return weights.reshape(-1)

    def _bags(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Bags:
        if ids.dim() == 2:
            if offsets is not None:
                raise BatchError(f"ids are {list(ids.shape)}, which is bags of {ids.shape[1]}; leave offsets out")
            return Bags(ids.reshape(-1), len(ids), ids.shape[1], None, weights)
        if ids.dim() != 1 or offsets is None:
            given = "no offsets" if offsets is None else f"offsets {describe(offsets)}"
            raise BatchError(f"ids are {describe(ids)}, with {given}; give [B, k], or [N] with offsets of the bags")
        offsets = offsets.long()
        if not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        return Bags(ids, len(offsets) - 1, None, offsets, weights)


def _checked(bags: Bags) -> Bags:
    """Raise `BatchError` unless offsets begin at 0, never fall, and end at the number of ids."""
    if bags.offsets is None:
        return bags
    return Jagged(
        ["ids"], bags.values, batch_size=bags.batch_size, fixed=[None], offsets=bags.offsets[None], weights=bags.weights
    )["ids"]


def _without(bags: Bags, padding_idx: int) -> Bags:
    """Leave an id out of its bags."""
    kept = bags.values != padding_idx
    before = torch.nn.functional.pad(kept.cumsum(0), (1, 0))
    offsets = bags.offsets
    if offsets is None:
        offsets = torch.arange(bags.batch_size + 1, device=kept.device) * (bags.fixed or 0)
    weights = None if bags.weights is None else bags.weights[kept]
    return Bags(bags.values[kept], bags.batch_size, None, before[offsets], weights)


def _largest(vectors: Tensor, lengths: Tensor) -> Tensor:
    """Take the maximum of each column over the vectors of a bag: ``[N, D]`` to ``[B, D]``; of an empty bag, zeros."""
    bag = torch.arange(len(lengths), device=vectors.device).repeat_interleave(lengths)
    # Not torch.segment_reduce, whose gradient is wrong where rows of a bag are equal (2.13).
    empty = vectors.new_zeros(len(lengths), vectors.shape[1])
    return empty.scatter_reduce(0, bag[:, None].expand_as(vectors), vectors, "amax", include_self=False)
