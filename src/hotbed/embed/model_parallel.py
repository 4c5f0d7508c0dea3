"""Route model-parallel input, which needs no exchange of ids.

Owners have the ids of all samples, and every rank works out from the plan which pooled vectors it gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hotbed.batch import ModelParallelInput
from hotbed.comm import Link
from hotbed.embed.pooled_exchange import PooledRoute, PooledStream, UnitRequest, within_group
from hotbed.embed.shard_routing import KIND, LANE, SLOT, Locator
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.ops import BagLayout
from hotbed.ops.layout import OUT
from hotbed.specs import POOLING_CODE, Feature, divisors


def make_model_parallel_route(
    features: Sequence[Feature], ids: ModelParallelInput, locator: Locator, link: Link, *, trained: bool
) -> PooledRoute:
    """Work out which pooled vectors each rank gets of a batch whose ids the owners have; nothing is exchanged.

    Every bag is one unit of every tile of its table, also an empty one: the rank that needs its vector does not have
    its ids, so it does not know. Two tables of one column range, "a" on rank 0 and "b" on rank 1, three ranks of two
    samples each: every rank gets bags 0, 1 (of "a") from rank 0 and bags 2, 3 (of "b") from rank 1. ``features`` are in
    the order of their vectors. A table that is cut into rows, or copied, raises `BatchError`.
    """
    whole = {t.name: range(t.rows) for t in locator.tables}
    for tile in locator.tiles:
        if tile.rows != whole[tile.table] or tile.readers:
            raise BatchError(
                f"table '{tile.table}' is cut into rows or copied, so ids must be exchanged; give every rank all "
                "features of its samples, or plan the table whole or cut into columns"
            )
    size, device = len(ids), ids.values.device
    streams = [_stream(kind, features, ids, locator, link) for kind in range(len(locator.kinds))]
    rows = len(features) * size
    order = torch.zeros(len(features), 7, dtype=torch.int64, device=device)
    order[:, OUT] = torch.arange(len(features), device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    bags = BagLayout(nothing, order, nothing.view(0, 1)[:, :0], None, size, rows, False, len(features))
    return PooledRoute(within_group(bags, torch.arange(rows + 1, device=device), rows), rows, streams, trained)


def _stream(
    kind: int, features: Sequence[Feature], ids: ModelParallelInput, locator: Locator, link: Link
) -> PooledStream:
    """List the units of one arena kind: by owner, then tile, then feature, then sample."""
    size, device = len(ids), ids.values.device
    entries = locator.entries.tolist()
    lanes: list[Tensor] = []
    bags: list[Tensor] = []
    send_counts = [0] * link.size
    own: list[tuple[Feature, int]] = []
    for owner in range(link.size):
        for i, tile in enumerate(locator.tiles):
            if tile.owner != owner or entries[KIND][i] != kind:
                continue
            for f, feature in enumerate(features):
                if feature.table != tile.table:
                    continue
                if owner == link.rank:
                    own.append((feature, entries[SLOT][i]))
                lanes.append(torch.full((size,), entries[LANE][i], device=device))
                bags.append(torch.arange(f * size, (f + 1) * size, device=device))
                send_counts[owner] += size
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    of_unit = torch.cat([nothing, *bags])
    return PooledStream(
        kind,
        of_unit,
        torch.cat([nothing, *lanes]),
        of_unit,
        send_counts,
        _requests_to_owner(own, ids),
    )


def _requests_to_owner(own: Sequence[tuple[Feature, int]], ids: ModelParallelInput) -> UnitRequest:
    """Make the requests of all ranks to this one: bags of its own features, whose tables start at these slots."""
    whole, device = ids.whole, ids.values.device
    none = torch.empty(0, dtype=torch.int64, device=device)
    slots, lengths, weights, divided_by = [none], [none], [none.float()], [none.float()]
    counts = [0] * len(ids.sizes)
    any_divisor = any(POOLING_CODE[feature.pooling] for feature, _ in own)
    for rank, (start, stop) in enumerate(pairwise(accumulate(ids.sizes, initial=0))):
        for feature, first_slot in own:
            bags = whole[feature.name]
            a, b = _span(whole, feature.name, start, stop)
            of_rank = bags.lengths()[start:stop]
            slots.append(bags.values[a:b].long() + first_slot)
            lengths.append(of_rank)
            counts[rank] += b - a
            if bags.weights is not None:
                weights.append(bags.weights[a:b].detach().float())
            divided_by.append(divisors(POOLING_CODE[feature.pooling], of_rank))
    return UnitRequest(
        torch.cat(slots),
        torch.cat(lengths),
        torch.cat(weights) if whole.weights is not None else None,
        torch.cat(divided_by) if any_divisor else None,
        counts,
        [len(own) * size for size in ids.sizes],
    )


def _span(whole: Jagged, name: str, start: int, stop: int) -> tuple[int, int]:
    """Find where the ids of these samples lie among those of a feature."""
    bags = whole[name]
    if bags.offsets is None:
        return start * (bags.fixed or 0), stop * (bags.fixed or 0)
    return int(bags.offsets[start]), int(bags.offsets[stop])
