"""Which rows of which ranks a batch needs: its ids as messages to the ranks that own them.

A *unit* is a vector that crosses the wire, all or some columns of one distinct row of the batch. Units of one arena
kind form a *stream*: per stream there is one exchange of slots, one of rows and one of gradients. Rows that this rank
holds a copy of form streams of their own: their rows do not cross the wire, their gradients do.

What arrives is laid out as a small table, one row per distinct row of the batch, and the batch's ids are renamed to
positions in it. So everything that follows, pooling as well as summing gradients, is what a rank does that has all
rows.

Routes of model-parallel input: owners have the ids of all samples, so only vectors cross the wire.

Every bag is one unit of every tile of its table, also an empty one, because the rank that needs its vector does not
know how long it is. So nobody has to tell anybody anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.embed.placement import COPY, KIND, LANE, OWNER, SLOT, Cells, Placement, RowTiles
from hotbed.embed.pooled_exchange import PooledRoute, PooledStream, UnitRequest, within_group
from hotbed.errors import BatchError
from hotbed.jagged import Jagged, ModelParallelInput
from hotbed.ops import Backend, BagLayout, Groups
from hotbed.ops.layout import OUT, renamed
from hotbed.ops.reference import divisors
from hotbed.specs import POOLING_CODE, Feature


@dataclass
class Stream:
    """Units of one arena kind.

    Attributes
    ----------
    kind
        Number of the kind.
    copied
        Whether this rank holds copies of these rows.
    slots
        Slot of each unit in the arena of its owner ``[n]``, by owner.
    copies
        Slot of each unit among this rank's copies ``[n]``, where it holds them.
    send_counts
        Units by owner.
    first
        First row of whole units, which lie here in order; −1 where units are parts of rows.
    cells
        Where units are parts of rows: which parts of which rows.
    received
        Slots that were asked for here ``[m]``, by rank.
    recv_counts
        How many each rank asked for.
    """

    kind: int
    copied: bool
    slots: Tensor
    copies: Tensor | None
    send_counts: list[int]
    first: int
    cells: Cells | None
    received: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    recv_counts: list[int] = field(default_factory=list)

    def own(self, rank: int) -> tuple[int, int]:
        """First and past the last of the units that this rank asks of itself."""
        return sum(self.send_counts[:rank]), sum(self.send_counts[: rank + 1])

    def own_received(self, rank: int) -> tuple[int, int]:
        """The same among what was asked for here."""
        return sum(self.recv_counts[:rank]), sum(self.recv_counts[: rank + 1])


@dataclass
class Route:
    """A batch's ids of one output, exchanged.

    Attributes
    ----------
    bags
        The bags, with positions of rows here in the place of ids.
    groups
        Ids of equal rows.
    places
        Position here of each group's row ``[U]``.
    rows
        How many rows there are here.
    streams
        What is exchanged.
    trained
        Whether gradients will be exchanged, too.
    """

    bags: BagLayout
    groups: Groups
    places: Tensor
    rows: int
    streams: list[Stream]
    trained: bool


def make_route(bags: BagLayout, placement: Placement, ops: Backend, link: Link, *, trained: bool) -> Route:
    """Find the owners of a batch's ids and tell them; all ranks must call this.

    Parameters
    ----------
    bags
        Of one output; tables start at `Placement.first_keys`.
    placement
        Of their tables.
    ops
        Kernels.
    link
        The ranks.
    trained
        Whether gradients will be sent.
    """
    groups = ops.group(ops.occurrences(bags))
    keys = groups.rows[: int(groups.counts[0])]
    found = placement.find(keys)
    streams, places, rows = _streams(placement, keys, found, link)
    route = Route(renamed(bags, ops.spread(groups, places)), groups, places, rows, streams, trained)
    _exchange_slots([s for s in streams if trained or not s.copied], placement.entries.device, link)
    return route


def _streams(placement: Placement, keys: Tensor, found: RowTiles, link: Link) -> tuple[list[Stream], Tensor, int]:
    """Streams, place of each distinct row, and number of places."""
    has_copies = placement.has_readers
    stream = placement.entries[KIND]
    if has_copies:
        stream = 2 * stream + (placement.entries[COPY] >= 0)
    key = (stream * link.size + placement.entries[OWNER])[found.tile]
    count = len(placement.kinds) * (2 if has_copies else 1)
    order = torch.argsort(key.to(torch.int32), stable=True)
    to = torch.bincount(key, minlength=count * link.size).view(count, link.size).tolist()
    found = RowTiles(found.row[order], found.tile[order])
    slots = placement.slots(keys, found)
    places = torch.full((len(keys),), -1, dtype=torch.int64, device=keys.device)
    streams: list[Stream] = []
    parts: list[tuple[Stream, RowTiles]] = []
    rows = start = 0
    for number, sent in enumerate(to):
        stop = start + sum(sent)
        kind, is_copy = (number // 2, number % 2 == 1) if has_copies else (number, False)
        part = RowTiles(found.row[start:stop], found.tile[start:stop])
        copies = placement.slots(keys, part, COPY) if is_copy else None
        whole = placement.kinds[kind].cols == placement.dim
        streams.append(Stream(kind, is_copy, slots[start:stop], copies, sent, rows if whole else -1, None))
        if whole:
            places[part.row] = torch.arange(rows, rows + stop - start, device=keys.device)
            rows += stop - start
        else:
            parts.append((streams[-1], part))
        start = stop
    cut = (places < 0).nonzero()[:, 0]
    places[cut] = torch.arange(rows, rows + len(cut), device=keys.device)
    for s, part in parts:
        s.cells = placement.cells(s.kind, places[part.row], placement.entries[LANE][part.tile])
    return streams, places, rows + len(cut)


def _exchange_slots(streams: Sequence[Stream], device: torch.device, link: Link) -> None:
    """Exchange how many rows of each stream are asked for, and then which."""
    if not streams:
        return
    counts = torch.tensor([s.send_counts for s in streams], dtype=torch.int64, device=device).T.contiguous()
    ones = [1] * link.size
    came = link.all_to_all("numbers of ids", counts, ones, ones).wait().T.tolist()
    on_their_way: list[Handle[Tensor]] = []
    for stream, numbers in zip(streams, came, strict=True):
        stream.recv_counts = numbers
        on_their_way.append(link.all_to_all("ids", stream.slots, stream.send_counts, numbers))
    for stream, handle in zip(streams, on_their_way, strict=True):
        stream.received = handle.wait()


def make_model_parallel_route(
    features: Sequence[Feature], ids: ModelParallelInput, placement: Placement, link: Link, *, trained: bool
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
    return PooledRoute(within_group(bags, torch.arange(rows + 1, device=device), rows), rows, streams, trained)


def _stream(
    kind: int, features: Sequence[Feature], ids: ModelParallelInput, placement: Placement, link: Link
) -> PooledStream:
    """Units of one kind: by owner, then tile, then feature, then sample."""
    size, device = len(ids), ids.values.device
    entries = placement.entries.tolist()
    lanes: list[Tensor] = []
    bags: list[Tensor] = []
    to = [0] * link.size
    own: list[tuple[Feature, int]] = []
    for owner in range(link.size):
        for i, tile in enumerate(placement.tiles):
            if tile.owner != owner or entries[KIND][i] != kind:
                continue
            for f, feature in enumerate(features):
                if feature.table != tile.table:
                    continue
                if owner == link.rank:
                    own.append((feature, entries[SLOT][i]))
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
        _requests_to_owner(own, ids),
    )


def _requests_to_owner(own: Sequence[tuple[Feature, int]], ids: ModelParallelInput) -> UnitRequest:
    """What every rank would ask this one for: bags of these features, whose tables start at these slots."""
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
    """Where the ids of these samples lie among those of a feature."""
    bags = whole[name]
    if bags.offsets is None:
        return start * (bags.fixed or 0), stop * (bags.fixed or 0)
    return int(bags.offsets[start]), int(bags.offsets[stop])
