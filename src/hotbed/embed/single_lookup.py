"""Look up one feature for modules with one table, with little overhead before the kernel launch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from hotbed.batch import Embeddings
from hotbed.embed.local_tables import LocalTables
from hotbed.embed.lookup_gradients import VECTOR_DTYPES, PooledLookup, Updaters
from hotbed.embed.table_group import Request, TableGroup
from hotbed.errors import BatchError
from hotbed.jagged import INDEX_DTYPES, Bags, Jagged
from hotbed.specs import Feature, Table
from hotbed.torch_hooks import refuse_transforms


class Collection(Protocol):
    """Attributes of `EmbeddingCollection` that lookups of one feature use."""

    tables: dict[str, Table]
    features: tuple[Feature, ...]
    dtype: torch.dtype
    anchor: Tensor
    _groups: list[TableGroup]
    _updaters: Updaters

    def __call__(self, ids: Jagged) -> Embeddings:
        """Look up and pool."""
        ...

    def _is_trained(self, tables: Iterable[str]) -> bool: ...

    def _check_call(self, ids: Jagged | None, room: int, trained: bool) -> None: ...


def look_up(rows: Collection, feature: str, bags: Bags, padding_idx: int | None = None) -> Tensor:
    """Look up a feature of a collection with one table.

    Ids are checked like the ids of a batch. ``padding_idx`` is removed from the bags. Return ``[B, D]`` for a pooled
    feature, else one vector per id ``[N, D]``. Autocast does not change their dtype.
    """
    refuse_transforms()
    if padding_idx is not None:
        bags, _ = remove_id(bags, padding_idx)
    if not is_single(rows, bags):
        return _look_up_in_batch(rows, feature, bags)
    trained = rows._is_trained(rows.tables)
    rows._check_call(None, 0, trained and torch.is_grad_enabled())
    request, found = make_request(rows, feature, bags, trained)
    anchor = rows.anchor if trained else rows.anchor.detach()
    (vectors,) = PooledLookup.apply(anchor, bags.weights, [request], [found], rows._updaters)
    return vectors.view(len(found), found.shape[2])


def is_single(rows: Collection, bags: Bags) -> bool:
    """Return whether the fast path serves a lookup: all ids are valid, and the table is local and not dynamic."""
    (group,), (table,) = rows._groups, rows.tables.values()
    return (
        isinstance(group, LocalTables)
        and table.dynamic is None
        and rows.dtype in VECTOR_DTYPES
        and are_valid(bags, table.rows, group.device)
    )


def are_valid(bags: Bags, rows: int, device: torch.device) -> bool:
    """Return whether all ids are on the device and valid rows, and offsets are ascending from 0 to their number."""
    ids, offsets = bags.values, bags.offsets
    if ids.dtype not in INDEX_DTYPES or ids.device != device or ids.is_meta:
        return False
    if len(ids) and (ids.amin().item() < 0 or ids.amax().item() >= rows):
        return False
    if offsets is None:
        return True
    ends = offsets[:: max(len(offsets) - 1, 1)].tolist()
    return ends[0] == 0 and ends[-1] == len(ids) and bool((offsets[1:] >= offsets[:-1]).all())


def make_request(rows: Collection, feature: str, bags: Bags, trained: bool) -> tuple[Request, Tensor]:
    """Return the request and an uninitialized output ``[B, 1, D]``."""
    group = cast("LocalTables", rows._groups[0])
    request = group.request(feature, bags, trained)
    return request, group.empty((request.bags.batch_size, 1, group.dim), rows.dtype)


def remove_id(bags: Bags, padding_idx: int) -> tuple[Bags, Tensor]:
    """Remove an id from its bags. Also return the mask of kept ids ``[N]``."""
    bags = _check_offsets(bags)
    keep = bags.values != padding_idx
    before = pad(keep.cumsum(0), (1, 0))
    offsets = bags.offsets
    if offsets is None:
        offsets = torch.arange(bags.batch_size + 1, device=keep.device) * (bags.fixed or 0)
    weights = None if bags.weights is None else bags.weights[keep]
    return Bags(bags.values[keep], bags.batch_size, None, before[offsets], weights), keep


def _check_offsets(bags: Bags) -> Bags:
    """Raise `BatchError` unless offsets are ascending from 0 to the number of ids."""
    if bags.offsets is None:
        return bags
    return Jagged(
        ["ids"], bags.values, batch_size=bags.batch_size, fixed=[None], offsets=bags.offsets[None], weights=bags.weights
    )["ids"]


def _refuse_out_of_range(rows: Collection, feature: str, ids: Tensor) -> None:
    """Raise `BatchError` for an invalid id, with a fix for modules of one table."""
    (table,) = rows.tables.values()
    if table.dynamic is not None or ids.dtype not in INDEX_DTYPES:
        return
    wrong = ((ids < 0) | (ids.long() >= table.rows)).nonzero()
    if not len(wrong):
        return
    first = int(wrong[0])
    raise BatchError(
        f"feature '{feature}': got id {ids[first].item():,} at position {first:,}, expected 0 to {table.rows - 1:,}, "
        f"the rows of table '{table.name}'. Create the module with more rows (num_embeddings), or map such ids before "
        "the call (ids % num_embeddings). A module of one table has no on_bad_id"
    ) from None


def _look_up_in_batch(rows: Collection, feature: str, bags: Bags) -> Tensor:
    """Look up one feature with a batch in which other features have no ids."""
    others = [f.name for f in rows.features if f.name != feature]
    ids = Jagged(
        [feature, *others],
        bags.values,
        batch_size=bags.batch_size,
        fixed=[bags.fixed, *(0 for _ in others)],
        offsets=None if bags.offsets is None else bags.offsets[None],
        weights=bags.weights,
    )
    with torch.autocast(bags.values.device.type, enabled=False):
        try:
            found = rows(ids)
        except BatchError:
            _refuse_out_of_range(rows, feature, bags.values)
            raise
    is_pooled = next(f.is_pooled for f in rows.features if f.name == feature)
    return found[feature] if is_pooled else found.jagged(feature)[0]
