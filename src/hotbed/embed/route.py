"""Route ids to the ranks that own their rows.

A rank sends each owner the slots of the distinct rows that its batch needs. What comes back
(`hotbed.embed.row_exchange`) is laid out as a small table, one row per distinct row, and the batch's ids are mapped to
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
    replace_bag_ids bags          [2 1] [0 2 3]                      pooled like bags of a table of four rows

Gradients go the same way back: rank 0 adds up what its two bags owe row 4, sends rank 1 one sum per row, and rank 1
adds the sums of slot 0 in rank order, that of rank 0 before its own.

A *unit* is a vector that crosses the wire: a whole row, or the columns of it that one tile has. Units of one arena kind
(`Locator.kinds`) form a *stream*: per stream there is one exchange of slots, one of rows and one of gradients. Rows
of which this rank holds a copy form streams of their own: their rows do not cross the wire, their gradients do.

Model-parallel input needs no exchange of ids: `hotbed.embed.model_parallel`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.embed.id_exchange import Counts, IdExchange
from hotbed.embed.locate import COPY, LANE, Cells, Locator, RowTiles
from hotbed.ops import Backend, BagLayout, Groups
from hotbed.ops.layout import replace_bag_ids


@dataclass
class Stream:
    """Units of one arena kind: those that this rank requests of their owners, and those requested of this rank."""

    kind: int  # number of the arena kind
    copied: bool  # whether this rank holds copies of these rows
    slots: Tensor  # [n], slot of each requested unit in the arena of its owner, by owner
    copies: Tensor | None  # [n], slot of each unit among this rank's copies, if it holds them
    send_counts: list[int]  # requested units by owner
    first: int  # position of the first unit, which the others follow; −1 if units are only some columns of rows
    cells: Cells | None  # columns and positions, if units are only some columns of rows
    # [m], slots that the ranks request of this one, by rank
    received: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    recv_counts: list[int] = field(default_factory=list)  # number of requests by rank

    def own(self, rank: int) -> tuple[int, int]:
        """Return first and past the last of the units that this rank requests of itself."""
        return sum(self.send_counts[:rank]), sum(self.send_counts[: rank + 1])

    def own_received(self, rank: int) -> tuple[int, int]:
        """Return the same of `received`."""
        return sum(self.recv_counts[:rank]), sum(self.recv_counts[: rank + 1])


@dataclass
class Route:
    """The bags of one output after the exchange of their ids."""

    bags: BagLayout  # with positions in place of ids
    groups: Groups  # occurrences of each distinct row
    places: Tensor  # [U], position of each distinct row, rows ascending
    rows: int  # number of positions
    streams: list[Stream]  # exchanges, by arena kind
    trained: bool  # whether gradients will be exchanged, too


def make_route(
    bags: BagLayout, locator: Locator, ops: Backend, exchange: IdExchange, *, trained: bool
) -> Future[Route]:
    """Find the owners of a batch's distinct rows, and exchange their slots; all ranks must call this.

    Nothing here waits for a GPU: how many rows there are is read when the exchange is finished. ``bags`` are of one
    output, whose tables start at `Locator.first_keys`. Unless ``trained``, slots of rows of which this rank has copies
    are not sent.
    """
    groups = ops.group(ops.occurrences(replace(bags, limit=locator.keys)))
    units = _units(locator, groups, exchange.link.size)

    def finish(own: Counts, received: Counts) -> Route:
        streams, places, rows = _streams(locator, units, own)
        route = Route(replace_bag_ids(bags, ops.spread(groups, places)), groups, places, rows, streams, trained)
        wanted = [trained or not s.copied for s in streams]
        _exchange_slots(streams, wanted, received, exchange.link)
        return route

    return exchange.add(units.counts, finish)


class _Units(NamedTuple):
    """Units that a batch needs, by stream, then owner: keys of the distinct rows ``[≥ U]``, row and tile of each unit.

    What follows the units is none. ``counts [W, streams + 1]`` are how many for each owner, and the number of rows.
    """

    keys: Tensor
    found: RowTiles
    counts: Tensor


def _units(locator: Locator, groups: Groups, size: int) -> _Units:
    """Sort distinct rows by message; those of the picture, of owners 1, 2, 0, 1, become 3 │ 1 4 │ 2."""
    keys, count = groups.rows, groups.counts[:1]
    device, messages = keys.device, locator.streams * size
    if device.type == "cpu":
        keys = keys[: int(count)]
        found, inside = locator.find(keys), None
    else:  # how many there are, the host is not told: what is behind them goes into a message of its own, the last
        live = torch.arange(len(keys), device=device) < count
        keys = torch.where(live, keys, 0)
        found, inside = locator.find_without_waiting(keys)
        inside = live[found.row] if inside is None else inside & live[found.row]
    message = locator.messages[found.tile]
    if inside is not None:
        message = torch.where(inside, message, messages)
    message, order = torch.sort(message, stable=True)
    bounds = torch.searchsorted(message, torch.arange(messages + 1, dtype=message.dtype, device=device))
    counts = torch.cat([bounds.diff().view(locator.streams, size), count.expand(1, size)]).T
    return _Units(keys, RowTiles(found.row[order], found.tile[order]), counts)


def _streams(locator: Locator, units: _Units, counts: Counts) -> tuple[list[Stream], Tensor, int]:
    """Cut units into streams; returns these, the position of each row, and the number of positions.

    Rows 1, 2, 3, 4 of owners 1, 2, 0, 1 make one stream of slots ``[1, 0, 1, 0]`` with counts ``[1, 2, 1]``; their
    positions are ``[1, 3, 0, 2]`` (see the top of this file).
    """
    *by_stream, (count, *_) = map(list, zip(*counts, strict=True))
    keys, device = units.keys[:count], units.keys.device
    total = sum(map(sum, by_stream))
    found = RowTiles(units.found.row[:total], units.found.tile[:total])
    slots = locator.slots(keys, found)
    places = torch.full((count,), -1, dtype=torch.int64, device=device)
    streams: list[Stream] = []
    cut: list[tuple[Stream, RowTiles]] = []
    rows = start = 0
    for number, send_counts in enumerate(by_stream):
        stop = start + sum(send_counts)
        kind, is_copy = (number // 2, number % 2 == 1) if locator.has_readers else (number, False)
        here = RowTiles(found.row[start:stop], found.tile[start:stop])
        copies = locator.slots(keys, here, COPY) if is_copy else None
        whole = locator.kinds[kind].cols == locator.dim
        streams.append(Stream(kind, is_copy, slots[start:stop], copies, send_counts, rows if whole else -1, None))
        if whole:
            places[here.row] = torch.arange(rows, rows + stop - start, device=device)
            rows += stop - start
        else:
            cut.append((streams[-1], here))
        start = stop
    if rows < count:  # rows that are cut into columns follow, in their own order
        is_cut = places < 0
        places = torch.where(is_cut, is_cut.cumsum(0) + (rows - 1), places)
    for s, here in cut:
        s.cells = locator.cells(s.kind, places[here.row], locator.entries[LANE][here.tile])
    return streams, places, count


def _exchange_slots(streams: Sequence[Stream], wanted: Sequence[bool], received: Counts, link: Link) -> None:
    """Exchange the slots of streams whose owners are to know them, given how many the ranks request of this one."""
    handles: list[tuple[Stream, Handle[Tensor]]] = []
    for number, (stream, is_wanted) in enumerate(zip(streams, wanted, strict=True)):
        if not is_wanted:
            continue
        stream.recv_counts = [of_rank[number] for of_rank in received]
        if link.size == 1:
            stream.received = stream.slots
        else:
            handles.append((stream, link.all_to_all("ids", stream.slots, stream.send_counts, stream.recv_counts)))
    for stream, handle in handles:
        stream.received = handle.wait()
