"""Route ids to the ranks that own their rows.

A rank sends each owner the slots of the distinct rows that its batch needs. What comes back
(`hotbed.embed.row_exchange`) is laid out as a small table, one row per distinct row, and the batch's ids are renamed to
positions in it. So everything that follows, pooling as well as summing gradients, is what one rank does that has all
rows.

Five ids of rank 0 of three; the table has rows 0 … 8 and is cut by row, so rank r has rows r, r + 3, r + 6 in its slots
0, 1, 2::

    bags of rank 0        [4 1] [3 4 2]                      two samples, five ids
    distinct rows          1  2  3  4
      owner                1  2  0  1                        row mod 3
      slot there           0  0  1  1                        row div 3
    by owner              rank 0 │ rank 1 │ rank 2
      rows                   3   │  1  4  │   2
      slots sent             1   │  0  1  │   0              send_counts [1, 2, 1]
                             ▼       ▼        ▼              all-to-all of counts, then of slots
    rank 1 received       from rank 0: 0 1 │ from rank 1: 0 │ from rank 2: none     (rank 1's own bags are [1] [8])
                             ▼       ▼        ▼              owners read these slots and send the rows
    rows that arrive      position  0  1  2  3
                          row       3  1  4  2
    renamed bags          [2 1] [0 2 3]                      pooled like bags of a table of four rows

Gradients go the same way back: rank 0 adds up what its two bags owe row 4, sends rank 1 one sum per row, and rank 1
adds the sums of slot 0 in rank order, that of rank 0 before its own.

A *unit* is a vector that crosses the wire: a whole row, or the columns of it that one tile has. Units of one arena kind
(`Locator.kinds`) form a *stream*: per stream there is one exchange of slots, one of rows and one of gradients. Rows
of which this rank holds a copy form streams of their own: their rows do not cross the wire, their gradients do.

Model-parallel input needs no exchange of ids: owners have the ids of all samples, and every rank works out from the
plan which pooled vectors it gets (`make_model_parallel_route`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.embed.locate import COPY, KIND, LANE, OWNER, SLOT, Cells, Locator, RowTiles
from hotbed.embed.pooled_exchange import PooledRoute, PooledStream, UnitRequest, within_group
from hotbed.errors import BatchError
from hotbed.jagged import Jagged, ModelParallelInput
from hotbed.ops import Backend, BagLayout, Groups
from hotbed.ops.layout import OUT, renamed
from hotbed.pooling import POOLING_CODE, divisors
from hotbed.specs import Feature
from hotbed.store.memory import to_device


@dataclass
class Stream:
    """Units of one arena kind, as this rank requests them of their owners, and as the ranks request them of this one.

    Attributes
    ----------
    kind
        Number of the arena kind.
    copied
        Whether this rank holds copies of these rows.
    slots
        Slot of each requested unit in the arena of its owner ``[n]``, by owner.
    copies
        Slot of each unit among this rank's copies ``[n]``, where it holds them.
    send_counts
        Requested units by owner.
    first
        Position of the first unit, the others follow it; −1 where units are some columns of rows only.
    cells
        Where units are some columns of rows: which columns of which positions.
    received
        Slots that the ranks request of this one ``[m]``, by rank.
    recv_counts
        How many each rank requests.
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
        """Return first and past the last of the units that this rank requests of itself."""
        return sum(self.send_counts[:rank]), sum(self.send_counts[: rank + 1])

    def own_received(self, rank: int) -> tuple[int, int]:
        """Return the same of `received`."""
        return sum(self.recv_counts[:rank]), sum(self.recv_counts[: rank + 1])


@dataclass
class Route:
    """The bags of one output after the exchange of their ids.

    Attributes
    ----------
    bags
        The bags, with positions in the place of ids.
    groups
        Occurrences of each distinct row.
    places
        Position of each distinct row ``[U]``, rows rising.
    rows
        Number of positions.
    streams
        What is exchanged, by arena kind.
    trained
        Whether gradients will be exchanged, too.
    """

    bags: BagLayout
    groups: Groups
    places: Tensor
    rows: int
    streams: list[Stream]
    trained: bool


def make_route(bags: BagLayout, locator: Locator, ops: Backend, link: Link, *, trained: bool) -> Route:
    """Find the owners of a batch's distinct rows and exchange their slots; all ranks must call this.

    Parameters
    ----------
    bags
        Of one output; tables start at `Locator.first_keys`.
    locator
        Of their tables.
    ops
        Kernels.
    link
        The ranks.
    trained
        Whether gradients will be sent; else slots of rows are not, of which this rank has copies.
    """
    groups = ops.group(ops.occurrences(replace(bags, limit=locator.keys)))
    keys = groups.rows[: int(groups.counts[0])]
    found = locator.find(keys)
    streams, places, rows = _streams(locator, keys, found, link)
    route = Route(renamed(bags, ops.spread(groups, places)), groups, places, rows, streams, trained)
    _exchange_slots([s for s in streams if trained or not s.copied], locator.entries.device, link)
    return route


def _streams(locator: Locator, keys: Tensor, found: RowTiles, link: Link) -> tuple[list[Stream], Tensor, int]:
    """Sort distinct rows into streams; returns these, the position of each row, and the number of positions.

    Rows 1, 2, 3, 4 of owners 1, 2, 0, 1 make one stream of slots ``[1, 0, 1, 0]`` with counts ``[1, 2, 1]``; their
    positions are ``[1, 3, 0, 2]`` (see the top of this file).
    """
    has_copies = locator.has_readers
    stream = locator.entries[KIND]
    if has_copies:
        stream = 2 * stream + (locator.entries[COPY] >= 0)
    key = (stream * link.size + locator.entries[OWNER])[found.tile]
    stream_count = len(locator.kinds) * (2 if has_copies else 1)
    order = torch.argsort(key.to(torch.int32), stable=True)
    counts = torch.bincount(key, minlength=stream_count * link.size).view(stream_count, link.size).tolist()
    found = RowTiles(found.row[order], found.tile[order])
    slots = locator.slots(keys, found)
    places = torch.full((len(keys),), -1, dtype=torch.int64, device=keys.device)
    streams: list[Stream] = []
    cut: list[tuple[Stream, RowTiles]] = []
    rows = start = 0
    for number, send_counts in enumerate(counts):
        stop = start + sum(send_counts)
        kind, is_copy = (number // 2, number % 2 == 1) if has_copies else (number, False)
        units = RowTiles(found.row[start:stop], found.tile[start:stop])
        copies = locator.slots(keys, units, COPY) if is_copy else None
        whole = locator.kinds[kind].cols == locator.dim
        streams.append(Stream(kind, is_copy, slots[start:stop], copies, send_counts, rows if whole else -1, None))
        if whole:
            places[units.row] = torch.arange(rows, rows + stop - start, device=keys.device)
            rows += stop - start
        else:
            cut.append((streams[-1], units))
        start = stop
    cut_rows = (places < 0).nonzero()[:, 0]
    places[cut_rows] = torch.arange(rows, rows + len(cut_rows), device=keys.device)
    for s, units in cut:
        s.cells = locator.cells(s.kind, places[units.row], locator.entries[LANE][units.tile])
    return streams, places, rows + len(cut_rows)


def _exchange_slots(streams: Sequence[Stream], device: torch.device, link: Link) -> None:
    """Exchange how many slots of each stream the ranks request of each other, and then which."""
    if link.size == 1:
        for stream in streams:
            stream.recv_counts, stream.received = stream.send_counts, stream.slots
        return
    if not streams:
        return
    counts = torch.tensor([s.send_counts for s in streams], dtype=torch.int64, device="cpu").T.contiguous()
    counts = to_device(counts, device)
    ones = [1] * link.size
    received = link.all_to_all("numbers of ids", counts, ones, ones).wait().T.tolist()
    handles: list[Handle[Tensor]] = []
    for stream, recv_counts in zip(streams, received, strict=True):
        stream.recv_counts = recv_counts
        handles.append(link.all_to_all("ids", stream.slots, stream.send_counts, recv_counts))
    for stream, handle in zip(streams, handles, strict=True):
        stream.received = handle.wait()


def make_model_parallel_route(
    features: Sequence[Feature], ids: ModelParallelInput, locator: Locator, link: Link, *, trained: bool
) -> PooledRoute:
    """Work out which pooled vectors each rank gets of a batch whose ids the owners have; nothing is exchanged.

    Every bag is one unit of every tile of its table, also an empty one: the rank that needs its vector does not have
    its ids, so it does not know. Two tables of one column range, "a" on rank 0 and "b" on rank 1, three ranks of two
    samples each: every rank gets bags 0, 1 (of "a") from rank 0 and bags 2, 3 (of "b") from rank 1.

    Parameters
    ----------
    features
        Pooled features of the locator's tables, in the order of their vectors.
    ids
        The batch.
    locator
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
            f"the model-parallel input is of {len(ids.sizes)} ranks, the model of {link.size}; make them equal"
        )
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
