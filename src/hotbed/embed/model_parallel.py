"""Route model-parallel input, which needs no exchange of ids.

Owners have the ids of all samples. Each rank computes from the plan which pooled vectors it receives.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hotbed.batch import ModelParallelInput
from hotbed.comm import Link
from hotbed.embed.pooled_exchange import PartialBags, PooledRoute, PooledTransfer, layout_of_positions
from hotbed.embed.shard_routing import ARENA_TYPE, COLUMN_SHARD, SLOT, Locator
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.ops import BagLayout
from hotbed.ops.layout import OUT
from hotbed.specs import POOLING_CODE, Feature, divisors


def make_model_parallel_route(
    features: Sequence[Feature], ids: ModelParallelInput, locator: Locator, link: Link, *, trained: bool
) -> PooledRoute:
    """Compute the pooled vectors that each rank receives, without an exchange.

    Every bag is one partial bag for every tile of its table. This includes empty bags, because the receiving rank does
    not have the ids. For example, rank 0 has table "a", rank 1 has table "b", and three ranks have two samples each.
    Every rank receives bags 0 and 1 (of "a") from rank 0 and bags 2 and 3 (of "b") from rank 1. ``features`` are in the
    order of their vectors. A table that is cut by rows or copied raises `BatchError`.
    """
    whole = {t.name: range(t.rows) for t in locator.tables}
    for tile in locator.tiles:
        if tile.rows != whole[tile.table] or tile.readers:
            raise BatchError(
                f"table '{tile.table}' is cut by rows or copied, so model-parallel input cannot be used. Pass all "
                "features of its samples to every rank, or plan the table whole or in column shards"
            )
    size, device = len(ids), ids.values.device
    transfers = [
        _make_transfer(arena_type, features, ids, locator, link) for arena_type in range(len(locator.arena_types))
    ]
    rows = len(features) * size
    order = torch.zeros(len(features), 7, dtype=torch.int64, device=device)
    order[:, OUT] = torch.arange(len(features), device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    bags = BagLayout(nothing, order, nothing.view(0, 1)[:, :0], None, size, rows, False, len(features))
    return PooledRoute(layout_of_positions(bags, torch.arange(rows + 1, device=device), rows), rows, transfers, trained)


def _make_transfer(
    arena_type: int, features: Sequence[Feature], ids: ModelParallelInput, locator: Locator, link: Link
) -> PooledTransfer:
    """Return the partial bags of one arena type, sorted by owner, tile, feature and sample."""
    size, device = len(ids), ids.values.device
    entries = locator.entries.tolist()
    column_shards: list[Tensor] = []
    bags: list[Tensor] = []
    send_counts = [0] * link.size
    own: list[tuple[Feature, int]] = []
    for owner in range(link.size):
        for i, tile in enumerate(locator.tiles):
            if tile.owner != owner or entries[ARENA_TYPE][i] != arena_type:
                continue
            for f, feature in enumerate(features):
                if feature.table != tile.table:
                    continue
                if owner == link.rank:
                    own.append((feature, entries[SLOT][i]))
                column_shards.append(torch.full((size,), entries[COLUMN_SHARD][i], device=device))
                bags.append(torch.arange(f * size, (f + 1) * size, device=device))
                send_counts[owner] += size
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    bag_of_partial = torch.cat([nothing, *bags])
    return PooledTransfer(
        arena_type,
        bag_of_partial,
        torch.cat([nothing, *column_shards]),
        bag_of_partial,
        send_counts,
        _requests_to_owner(own, ids),
    )


def _requests_to_owner(own: Sequence[tuple[Feature, int]], ids: ModelParallelInput) -> PartialBags:
    """Return the requests of all ranks to this one. ``own`` has features and the first slots of their tables."""
    whole, device = ids.whole, ids.values.device
    none = torch.empty(0, dtype=torch.int64, device=device)
    slots, lengths, weights, bag_divisors = [none], [none], [none.float()], [none.float()]
    counts = [0] * len(ids.sizes)
    any_divisor = any(POOLING_CODE[feature.pooling] for feature, _ in own)
    for rank, (start, stop) in enumerate(pairwise(accumulate(ids.sizes, initial=0))):
        for feature, first_slot in own:
            bags = whole[feature.name]
            a, b = _find_span(whole, feature.name, start, stop)
            of_rank = bags.lengths()[start:stop]
            slots.append(bags.values[a:b].long() + first_slot)
            lengths.append(of_rank)
            counts[rank] += b - a
            if bags.weights is not None:
                weights.append(bags.weights[a:b].detach().float())
            bag_divisors.append(divisors(POOLING_CODE[feature.pooling], of_rank))
    return PartialBags(
        torch.cat(slots),
        torch.cat(lengths),
        torch.cat(weights) if whole.weights is not None else None,
        torch.cat(bag_divisors) if any_divisor else None,
        counts,
        [len(own) * size for size in ids.sizes],
    )


def _find_span(whole: Jagged, name: str, start: int, stop: int) -> tuple[int, int]:
    """Return start and end of the ids of samples ``start`` to ``stop`` among the ids of a feature."""
    bags = whole[name]
    if bags.offsets is None:
        return start * (bags.fixed or 0), stop * (bags.fixed or 0)
    return int(bags.offsets[start]), int(bags.offsets[stop])
