"""Put the tables of several collections into arenas that they share, so that one step updates all of them together.

A model that was written with a module per table has a collection per module (`hotbed.swap_embeddings`), each with its
own names, values and options. What they can share is memory: tables of one dim and dtype lie in one `Arena`, each
collection looks its own up there, and an optimizer that trains several of them has one `TableUpdater` for the arena,
which groups what their lookups left and applies the rule in one launch. Why: docs/decisions/0068.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from hotbed.embed.arena import Arena, Shard
from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.local_tables import LocalTables


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
