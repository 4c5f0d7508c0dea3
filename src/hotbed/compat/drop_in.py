"""Define modules that are called like ``nn.Embedding`` and ``nn.EmbeddingBag`` and look up in hotbed's tables.

`hotbed.swap_embeddings` makes them. For ids that are in range they return what torch's modules return. The gradient of
a row goes to the optimizer of hotbed that was made for the model. ``torch.export`` records plain operators of torch,
with the rows as constants.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hotbed.bags import INDEX_DTYPES, Bags, describe
from hotbed.compat.table_rows import TableRows
from hotbed.embed import EmbeddingCollection
from hotbed.embed.single_lookup import look_up, without
from hotbed.errors import BatchError, SpecError
from hotbed.torch_hooks import is_exporting

Mode = Literal["sum", "mean", "max"]
_NARROW = (torch.int8, torch.uint8, torch.int16)
"""Dtypes of ids and offsets that are converted to int64."""


class _DropIn(nn.Module):
    """Look up one feature of a collection of one table; modules that shared a weight share the collection.

    ``padding_idx`` and ``max_norm`` are torch's. Updates of the optimizers keep ``max_norm``, so rows must be within it
    from the start.
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
        self.loaded_from = ""
        self.register_load_state_dict_post_hook(_limit_loaded)
        rename_states(self, f"rows.{self.table}.", "")

    @property
    def weight(self) -> Tensor:
        """Rows ``[R, D]`` in the memory of the table; if ranks share the table, a copy that refuses writes.

        Its ``requires_grad`` freezes and trains the table. Backward through these rows, e.g. as the weight of an output
        layer, raises `SpecError`.
        """
        return weight_of(self.rows, self.table)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            raise SpecError(
                f"the weight of '{self.feature}' is a table: got {type(value).__name__} in its place, expected values. "
                "Write them, `with torch.no_grad(): module.weight.copy_(values)`; leave tables out of functional_call"
            )
        super().__setattr__(name, value)

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train the table, or freeze it."""
        self.rows.requires_grad_(requires_grad)
        return self

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradient of the table that waits for an optimizer's step."""
        self.rows.zero_grad(set_to_none)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all rows from N(0, 1) with torch's generator, and set the row of ``padding_idx`` to 0, as torch does."""
        if self.rows.is_distributed:
            raise SpecError(
                f"table '{self.table}' is distributed: got reset_parameters(), expected it before hotbed.distribute. "
                "Reset the model before it is distributed"
            )
        if self.rows.device.type == "meta":
            return
        values = torch.empty_like(self.weight.detach()).normal_()
        if self.padding_idx is not None:
            values[self.padding_idx] = 0
        self.rows.set_weight(self.table, values)
        self.limit_norms()

    @torch.no_grad()
    def limit_norms(self) -> None:
        """Scale rows down to ``max_norm``, as torch does with rows when they are looked up."""
        if self.max_norm is not None:
            rows = self.rows.weight(self.table)
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            scaled = torch.where(norms > self.max_norm, rows * (self.max_norm / (norms + 1e-7)), rows)
            self.rows.set_weight(self.table, scaled)

    def _integers(self, what: str, given: Tensor) -> Tensor:
        """Return ids or offsets as int32 or int64; raise for what is no tensor of integers."""
        if isinstance(given, Tensor) and given.dtype in INDEX_DTYPES and not given.is_meta:
            return given
        if type(given).__module__.startswith("torch.fx"):
            raise SpecError(
                f"torch.fx.symbolic_trace cannot record lookups of '{self.feature}': got a Proxy, expected a tensor. "
                "Use torch.export, or a Tracer whose is_leaf_module() is true for this module"
            )
        if given.dtype in _NARROW:
            return given.long()
        if given.dtype not in INDEX_DTYPES:
            raise BatchError(
                f"{what} of '{self.feature}' are no integers that index rows: got {describe(given)}, expected int32 or "
                "int64. Convert them with .long()"
            )
        raise BatchError(
            f"{what} of '{self.feature}' have no values: got {describe(given)} on meta, expected ids on a device. Call "
            "the model when its tables are on a device"
        )

    def _constant(self) -> Tensor:
        """Return the rows as ``torch.export`` records them."""
        if self.rows.is_distributed:
            raise SpecError(
                f"table '{self.table}' is distributed: got torch.export, expected a table on one rank. Load the "
                "state into a model that is not distributed, and export that"
            )
        with torch.no_grad():
            return self.weight.detach()

    @override
    def extra_repr(self) -> str:
        """Return what torch's module would."""
        said = f"{self.num_embeddings}, {self.embedding_dim}"
        for name in ("padding_idx", "max_norm"):
            if (value := getattr(self, name)) is not None:
                said += f", {name}={value}"
        return said


def weight_of(rows: EmbeddingCollection, table: str) -> Tensor:
    """Return the rows of a table ``[R, D]``; where it is trained, a backward pass that reaches them is refused."""
    return TableRows.of(rows, table)


def rename_states(module: nn.Module, inner: str, outer: str) -> None:
    """Save, load and report what a module's state has under ``inner`` as if it were under ``outer``."""
    module.register_state_dict_post_hook(partial(_rename_saved, inner, outer))
    module.register_load_state_dict_pre_hook(partial(_rename_loaded, inner, outer))
    module.register_load_state_dict_post_hook(partial(_rename_reported, inner, outer))


def _rename_saved(inner: str, outer: str, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(prefix + inner)]:
        state[prefix + outer + key.removeprefix(prefix + inner)] = state.pop(key)


def _rename_loaded(inner: str, outer: str, module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    module.loaded_from = prefix
    for key in [key for key in state if key.startswith(prefix + outer) and not key.startswith(f"{prefix}rows.")]:
        state[prefix + inner + key.removeprefix(prefix + outer)] = state.pop(key)


def _rename_reported(inner: str, outer: str, module: Any, found: Any) -> None:
    start: str = module.loaded_from
    for keys in (found.missing_keys, found.unexpected_keys):
        keys[:] = [start + outer + k.removeprefix(start + inner) if k.startswith(start + inner) else k for k in keys]


def _limit_loaded(module: nn.Module, _: Any) -> None:
    assert isinstance(module, _DropIn)
    module.limit_norms()


class Embedding(_DropIn):
    """Look ids of any shape up, as ``nn.Embedding`` does.

    The row of ``padding_idx`` is looked up, but gets no gradient.
    """

    @override
    def forward(self, input: Tensor) -> Tensor:
        """Look up ids ``[…]`` of any integer dtype of at most 64 bits with a sign, or uint8: ``[…, D]``."""
        input = self._integers("ids", input)
        if is_exporting():
            return functional.embedding(input, self._constant(), self.padding_idx).to(self.rows.dtype)
        found = look_up(self.rows, self.feature, Bags(input.reshape(-1), input.numel(), 1, None, None))
        found = found.view(*input.shape, self.embedding_dim)
        if self.padding_idx is None or not found.requires_grad:
            return found
        return torch.where((input == self.padding_idx)[..., None], found.detach(), found)


class EmbeddingBag(_DropIn):
    """Look bags up and pool them, as ``nn.EmbeddingBag`` does.

    Ids that are ``padding_idx`` are left out of their bags. With ``include_last_offset``, offsets are ``[B + 1]``, with
    the number of ids as the last one.
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
        """Look up and pool ``[B, k]``, or ``[N]`` with offsets: ``[B, D]``.

        Ids may have any integer dtype of at most 64 bits with a sign, or uint8. Offsets tell where each bag of ids
        ``[N]`` starts, ``[B]``, or ``[B + 1]`` with ``include_last_offset``. ``per_sample_weights`` have the shape of
        the ids, and are for mode ``"sum"`` only.
        """
        input = self._integers("ids", input)
        weights = self._checked_weights(input, per_sample_weights)
        if is_exporting():
            return self._exported(input, offsets, per_sample_weights)
        bags = self._bags(input, offsets, weights)
        if self.mode != "max":
            return look_up(self.rows, self.feature, bags, self.padding_idx)
        if self.padding_idx is not None and not torch.compiler.is_compiling():  # a graph cannot hold what this leaves
            bags, _ = without(bags, self.padding_idx)
        return _largest(look_up(self.rows, self.feature, bags), bags, self.padding_idx)

    def _exported(self, ids: Tensor, offsets: Tensor | None, weights: Tensor | None) -> Tensor:
        return functional.embedding_bag(
            ids,
            self._constant(),
            None if offsets is None else self._integers("offsets", offsets),
            mode=self.mode,
            per_sample_weights=weights,
            include_last_offset=self.include_last_offset,
            padding_idx=self.padding_idx,
        ).to(self.rows.dtype)

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
        offsets = self._integers("offsets", offsets).long()
        if self.include_last_offset and not len(offsets):
            raise BatchError(
                "offsets are empty: got 0, expected at least 1 with include_last_offset=True. Give the number of ids "
                "as the last offset; for no bags, torch.tensor([0])"
            )
        if not self.include_last_offset:
            offsets = torch.cat([offsets, offsets.new_tensor([len(ids)])])
        return Bags(ids, len(offsets) - 1, None, offsets, weights)


def _largest(vectors: Tensor, bags: Bags, padding_idx: int | None) -> Tensor:
    """Take the maximum of each column over the vectors of a bag: ``[N, D]`` to ``[B, D]``; of an empty bag, zeros.

    As in torch, the first of several equal maxima has all of the gradient. `torch.scatter_reduce` would divide it, also
    among the zeros that it begins with, and the gradient of `torch.segment_reduce` is wrong for equal rows (2.13).
    """
    count, columns = vectors.shape
    bag = torch.arange(bags.batch_size, device=vectors.device).repeat_interleave(bags.lengths(), output_size=count)
    own = bag[:, None].expand_as(vectors)
    is_left_out = (bags.values == (-1 if padding_idx is None else padding_idx))[:, None]
    values = vectors.detach().masked_fill(is_left_out, -torch.inf)
    largest = values.new_zeros(bags.batch_size, columns).scatter_reduce(0, own, values, "amax", include_self=False)
    is_largest = ((values == largest.gather(0, own)) | values.isnan()) & ~is_left_out
    place = torch.arange(count, device=vectors.device)[:, None].expand_as(vectors).where(is_largest, count)
    first = place.new_full((bags.batch_size, columns), count).scatter_reduce(0, own, place, "amin")
    return functional.pad(vectors, (0, 0, 0, 1)).gather(0, first)
