"""Routes of model-parallel input: owners have the ids of all samples, so only vectors cross the wire.

Every bag is one unit of every tile of its table, also an empty one, because the rank that needs its vector does not
know how long it is. So nobody has to tell anybody anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.placement import KIND, LANE, SLOT, Placement
from hotbed.embed.pooled import PooledRoute, PooledStream, renamed
from hotbed.embed.pooling import Asked
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.ops import BagLayout
from hotbed.ops.layout import OUT
from hotbed.specs import Feature
from hotbed.spread import Spread


def make_spread_route(
    features: Sequence[Feature], ids: Spread, placement: Placement, link: Link, *, trained: bool
) -> PooledRoute:
    """What vectors go where; nothing is exchanged.

    Parameters
    ----------
    features
        Pooled features of the placement's tables, in the order of their vectors.
    ids
        The batch.
    placement
        Of their tables.
    link
        The ranks.
    trained
        Whether gradients will be sent.

    Raises
    ------
    BatchError
        If a table is cut into rows, or copied, or the batch is for another number of ranks.
    """
    if len(ids.sizes) != link.size:
        raise BatchError(
            f"the batch is spread over {len(ids.sizes)} ranks, the model over {link.size}; make them equal"
        )
    whole = {t.name: range(t.rows) for t in placement.tables}
    for tile in placement.tiles:
        if tile.rows != whole[tile.table] or tile.readers:
            raise BatchError(
                f"table '{tile.table}' is cut into rows or copied, so ids must be exchanged; give every rank all "
                "features of its samples, or plan the table whole or cut into columns"
            )
    size, device = len(ids), ids.values.device
    streams = [_stream(kind, features, ids, placement, link) for kind in range(len(placement.kinds))]
    rows = len(features) * size
    order = torch.zeros(len(features), 7, dtype=torch.int64, device=device)
    order[:, OUT] = torch.arange(len(features), device=device)
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    bags = BagLayout(nothing, order, nothing.view(0, 1)[:, :0], None, size, rows, False, len(features))
    return PooledRoute(renamed(bags, torch.arange(rows + 1, device=device), rows), rows, streams, trained)


def _stream(kind: int, features: Sequence[Feature], ids: Spread, placement: Placement, link: Link) -> PooledStream:
    """Units of one kind: by owner, then tile, then feature, then sample."""
    size, device = len(ids), ids.values.device
    entries = placement.entries.tolist()
    lanes: list[Tensor] = []
    bags: list[Tensor] = []
    to = [0] * link.size
    held: list[tuple[Feature, int]] = []
    for owner in range(link.size):
        for i, tile in enumerate(placement.tiles):
            if tile.owner != owner or entries[KIND][i] != kind:
                continue
            for f, feature in enumerate(features):
                if feature.table != tile.table:
                    continue
                if owner == link.rank:
                    held.append((feature, entries[SLOT][i]))
                lanes.append(torch.full((size,), entries[LANE][i], device=device))
                bags.append(torch.arange(f * size, (f + 1) * size, device=device))
                to[owner] += size
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    of_unit = torch.cat([nothing, *bags])
    return PooledStream(
        kind,
        of_unit,
        torch.cat([nothing, *lanes]),
        of_unit,
        to,
        _asked(held, ids),
    )


def _asked(held: Sequence[tuple[Feature, int]], ids: Spread) -> Asked:
    """What every rank would ask this one for: bags of these features, whose tables start at these slots."""
    whole, device = ids.whole, ids.values.device
    none = torch.empty(0, dtype=torch.int64, device=device)
    slots, lengths, weights, divisors = [none], [none], [none.float()], [none.float()]
    counts = [0] * len(ids.sizes)
    any_mean = any(feature.pooling == "mean" for feature, _ in held)
    for rank, (start, stop) in enumerate(pairwise(accumulate(ids.sizes, initial=0))):
        for feature, first_slot in held:
            bags = whole[feature.name]
            a, b = _span(whole, feature.name, start, stop)
            of_rank = bags.lengths()[start:stop]
            slots.append(bags.values[a:b].long() + first_slot)
            lengths.append(of_rank)
            counts[rank] += b - a
            if bags.weights is not None:
                weights.append(bags.weights[a:b].detach().float())
            divisors.append((of_rank.clamp(min=1) if feature.pooling == "mean" else torch.ones_like(of_rank)).float())
    return Asked(
        torch.cat(slots),
        torch.cat(lengths),
        torch.cat(weights) if whole.weights is not None else None,
        torch.cat(divisors) if any_mean else None,
        counts,
        [len(held) * size for size in ids.sizes],
    )


def _span(whole: Jagged, name: str, start: int, stop: int) -> tuple[int, int]:
    """Where the ids of these samples lie among those of a feature."""
    bags = whole[name]
    if bags.offsets is None:
        return start * (bags.fixed or 0), stop * (bags.fixed or 0)
    return int(bags.offsets[start]), int(bags.offsets[stop])
