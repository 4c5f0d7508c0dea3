"""Let the tables of several collections share arenas, so that one step updates them together.

A model with one module per table has one collection per module (`hotbed.swap_embeddings`). `share_arenas` stores their
tables of one dim and dtype in one `Arena`. An optimizer of several collections then has one `TableUpdater` for the
arena, which applies all gradients in one launch. Why: docs/decisions/pytorch-integration.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch

from hotbed.embed.arena import Arena, Shard
from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.local_tables import LocalTables


def share_arenas(devices: Mapping[EmbeddingCollection, torch.device]) -> None:
    """Create the tables of collections on ``meta``, in arenas that all collections of one device share.

    ``devices`` has the new device of each collection. Collections that stay on ``meta`` are skipped. All collections
    must have equal seeds and backends, and their tables different names.
    """
    members: dict[tuple[object, ...], list[tuple[LocalTables, Shard]]] = {}
    for collection, device in devices.items():
        if device.type == "meta":
            continue
        for group in collection._groups:
            for table in group.tables.values():
                key = device, group.dim, table.dtype
                members.setdefault(key, []).append((cast("LocalTables", group), Shard.whole(table)))
        for name, handle in collection.handles.items():
            on_device = torch.zeros((), dtype=torch.float32, device=device)
            collection.handles[name] = on_device.requires_grad_(handle.requires_grad)
    collections = list(devices)
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
