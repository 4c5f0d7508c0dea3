"""Look one feature up by itself, as modules of one table do: by little more than a launch of the kernel.

Put the tables of several collections into arenas that they share, so that one step updates all of them together.

A model that was written with a module per table has a collection per module (`hotbed.swap_embeddings`), each with its
own names, values and options. What they can share is memory: tables of one dim and dtype lie in one `Arena`, each
collection looks its own up there, and an optimizer that trains several of them has one `TableUpdater` for the arena,
which groups what their lookups left and applies the rule in one launch. Why: docs/decisions/0068.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from hotbed.batch import Embeddings
from hotbed.embed.arena import Arena, Shard
from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.local_tables import LocalTables
from hotbed.embed.lookup_gradients import VECTOR_DTYPES, PooledLookup, Updaters
from hotbed.embed.table_group import Request, TableGroup
from hotbed.errors import BatchError
from hotbed.jagged import INDEX_DTYPES, Bags, Jagged
from hotbed.specs import Feature, Table
from hotbed.torch_hooks import refuse_transforms


class Collection(Protocol):
    """The part of `EmbeddingCollection` that lookups of one feature use."""

    tables: dict[str, Table]
    features: tuple[Feature, ...]
    dtype: torch.dtype
    _anchor: Tensor
    _groups: list[TableGroup]
    _updaters: Updaters

    def __call__(self, ids: Jagged) -> Embeddings:
        """Look up and pool."""
        ...

    def _is_trained(self, tables: Iterable[str]) -> bool: ...

    def _check_call(self, ids: Jagged | None, room: int, trained: bool) -> None: ...


def look_up(rows: Collection, feature: str, bags: Bags, padding_idx: int | None = None) -> Tensor:
    """Look up a feature of a collection that has one table.

    Ids are checked as those of a batch are, and ``padding_idx`` is left out of the bags. Return ``[B, D]``; or ``[N,
    D]``, a vector per id, where the feature is not pooled. Autocast does not change its dtype.
    """
    refuse_transforms()
    if padding_idx is not None:
        bags, _ = without(bags, padding_idx)
    if not is_single(rows, bags):
        return _look_up_in_batch(rows, feature, bags)
    trained = rows._is_trained(rows.tables)
    rows._check_call(None, 0, trained and torch.is_grad_enabled())
    request, found = request_of(rows, feature, bags, trained)
    anchor = rows._anchor if trained else rows._anchor.detach()
    (vectors,) = PooledLookup.apply(anchor, bags.weights, [request], [found], rows._updaters)
    return vectors.view(len(found), found.shape[2])


def is_single(rows: Collection, bags: Bags) -> bool:
    """Return whether a feature can be looked up by itself: its ids are valid, and the table is whole on this rank."""
    (group,), (table,) = rows._groups, rows.tables.values()
    return (
        isinstance(group, LocalTables)
        and table.dynamic is None
        and rows.dtype in VECTOR_DTYPES
        and are_valid(bags, table.rows, group.device)
    )


def are_valid(bags: Bags, rows: int, device: torch.device) -> bool:
    """Say whether ids are on this device and all of them rows of a table, in bags that lie one after the other."""
    ids, offsets = bags.values, bags.offsets
    if ids.dtype not in INDEX_DTYPES or ids.device != device or ids.is_meta:
        return False
    if len(ids) and (ids.amin().item() < 0 or ids.amax().item() >= rows):
        return False
    if offsets is None:
        return True
    ends = offsets[:: max(len(offsets) - 1, 1)].tolist()
    return ends[0] == 0 and ends[-1] == len(ids) and bool((offsets[1:] >= offsets[:-1]).all())


def request_of(rows: Collection, feature: str, bags: Bags, trained: bool) -> tuple[Request, Tensor]:
    """Return what to look up, and an uninitialized output ``[B, 1, D]``."""
    group = cast("LocalTables", rows._groups[0])
    request = group.request(feature, bags, trained)
    return request, group.empty((request.bags.batch_size, 1, group.dim), rows.dtype)


def without(bags: Bags, padding_idx: int) -> tuple[Bags, Tensor]:
    """Leave an id out of its bags; also return which ids were kept ``[N]`` bool."""
    bags = _checked(bags)
    keep = bags.values != padding_idx
    before = pad(keep.cumsum(0), (1, 0))
    offsets = bags.offsets
    if offsets is None:
        offsets = torch.arange(bags.batch_size + 1, device=keep.device) * (bags.fixed or 0)
    weights = None if bags.weights is None else bags.weights[keep]
    return Bags(bags.values[keep], bags.batch_size, None, before[offsets], weights), keep


def _checked(bags: Bags) -> Bags:
    """Raise `BatchError` unless offsets begin at 0, never fall, and end at the number of ids."""
    if bags.offsets is None:
        return bags
    return Jagged(
        ["ids"], bags.values, batch_size=bags.batch_size, fixed=[None], offsets=bags.offsets[None], weights=bags.weights
    )["ids"]


def _refuse_out_of_range(rows: Collection, feature: str, ids: Tensor) -> None:
    """Raise `BatchError` for an id that is no row, with what can be done about it in a module of one table."""
    (table,) = rows.tables.values()
    if table.dynamic is not None or ids.dtype not in INDEX_DTYPES:
        return
    wrong = ((ids < 0) | (ids.long() >= table.rows)).nonzero()
    if not len(wrong):
        return
    first = int(wrong[0])
    raise BatchError(
        f"an id of '{feature}' is out of range: got {ids[first].item():,} at position {first:,}, expected 0 to "
        f"{table.rows - 1:,}, the rows of table '{table.name}'. Make the module with more rows (num_embeddings), or "
        "map such ids before the call (ids % num_embeddings); a module of one table has no on_bad_id"
    ) from None


def _look_up_in_batch(rows: Collection, feature: str, bags: Bags) -> Tensor:
    """Look one feature up as a batch in which the others have no ids."""
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


def share_arenas(places: Mapping[EmbeddingCollection, torch.device]) -> None:
    """Make the tables of collections that are on ``meta``, in arenas that collections of one device share.

    The collections have one seed and backend, and no two tables of one name; they come with the device that each is to
    be on. Those that are to stay on ``meta`` share nothing.
    """
    members: dict[tuple[object, ...], list[tuple[LocalTables, Shard]]] = {}
    for collection, device in places.items():
        if device.type == "meta":
            continue
        for group in collection._groups:
            for table in group.tables.values():
                key = device, group.dim, table.dtype
                members.setdefault(key, []).append((cast("LocalTables", group), Shard.whole(table)))
        for name, handle in collection.handles.items():
            on_device = torch.zeros((), dtype=torch.float32, device=device)
            collection.handles[name] = on_device.requires_grad_(handle.requires_grad)
    collections = list(places)
    for (device, *_), found in members.items():
        first = collections[0]
        arena = Arena(
            [shard for _, shard in found],
            found[0][0].dim,
            seed=first.seed,
            device=cast("torch.device", device),
            backend=first._backend,
        )
        numbers: dict[LocalTables, dict[str, int]] = {}
        for number, (group, shard) in enumerate(found):
            numbers.setdefault(group, {})[shard.table.name] = number
        for group, own in numbers.items():
            group.serve([(arena, own)], shared=len(numbers) > 1)
