"""Exchange the ids of a batch in two parts: how many ids the ranks need of each other, and then which.

A GPU does not tell the host how many ids there are unless the host asks, and then the host waits. So all that looks ids
up adds its numbers to one exchange: they cross the wire together and come to the host in one copy, which it waits for
once. Where batches are prepared ahead (`hotbed.train.prefetch`) a step lies between `start` and `finish`, and the
numbers have arrived long before they are read.

Find where rows are: which tile of a plan holds a row, on which rank, in which arena, at which slot.

Tiles with as many columns, one dtype and one kind of memory share an *arena kind*; every rank has an arena of each kind
for the tiles that it owns and one for those that it reads copies of. Slots number the rows of a rank's tiles, in the
order of the plan; so every rank knows every slot of every other.

A *lane* is a range of columns that tiles have. Units narrower than a row are moved in *cells*: a matrix of whole rows
is the same memory as one of narrower rows, its cells.

Route ids to the ranks that own their rows.

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

Model-parallel input needs no exchange of ids: `hotbed.embed.model_parallel`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.embed.arena import Shard
from hotbed.ops import Backend, BagLayout, Groups
from hotbed.ops.layout import renamed
from hotbed.plan import Plan, Tile
from hotbed.plan.tiling import Tier
from hotbed.specs import RowDtype, Table
from hotbed.store.memory import staging

T = TypeVar("T")
Counts = list[list[int]]
"""By rank, the numbers of a request."""


class IdExchange:
    """The ids of batches, or of parts of one, that are exchanged together; all ranks must make the same calls."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._counts: list[Tensor] = []
        self._work: list[Callable[[Counts, Counts], None]] = []
        self._widths: list[int] = []
        self._arrived: tuple[Tensor, torch.cuda.Event | None] | None = None

    def add(self, counts: Tensor, work: Callable[[Counts, Counts], T]) -> Future[T]:
        """Add a request, before `start`; done is what is returned when `finish` has been called.

        ``counts`` are numbers for each rank ``[W, k]`` int64, on the device. `finish` calls ``work``, in the order of
        requests, with the own numbers and those of the ranks for this one.
        """
        future: Future[T] = Future()
        self._work.append(lambda own, received: future.set_result(work(own, received)))
        self._widths.append(counts.shape[1])
        self._counts.append(counts)
        return future

    def then(self, work: Callable[[], T]) -> Future[T]:
        """Let something be done when what was added before is; it needs no numbers."""
        future: Future[T] = Future()
        self._work.append(lambda own, received: future.set_result(work()))
        self._widths.append(0)
        return future

    def start(self) -> None:
        """Exchange the numbers; they are on their way to the host when this returns."""
        if not self._counts:
            return
        first = self._counts[0]
        both = first.new_empty(2, self.link.size, sum(self._widths))
        torch.cat(self._counts, dim=1, out=both[0])
        if self.link.size == 1:
            both[1] = both[0]
        else:
            ones = [1] * self.link.size
            self.link.all_to_all("numbers of ids", both[0], ones, ones, out=both[1]).wait()
        if both.device.type == "cpu":
            self._arrived = both, None
        else:
            host, copied = staging(both.shape, both.dtype, both.device), torch.cuda.Event()
            host.copy_(both, non_blocking=True)
            copied.record()
            self._arrived = host, copied

    def finish(self) -> None:
        """Wait for the numbers, and do what was added; `start` is called if it was not."""
        if self._arrived is None:
            self.start()
        own: Counts = [[] for _ in range(self.link.size)]
        received = own
        if self._arrived is not None:
            both, copied = self._arrived
            if copied is not None:
                copied.synchronize()
            own, received = both.tolist()
        first = 0
        for work, width in zip(self._work, self._widths, strict=True):
            here = partial(_columns, first, first + width)
            work(here(own), here(received))
            first += width


def _columns(first: int, stop: int, of_ranks: Counts) -> Counts:
    return [numbers[first:stop] for numbers in of_ranks]


@dataclass(frozen=True)
class Cells:
    """Some columns of some rows of a matrix ``[…, D]``; a unit has ``cols`` columns, in whole cells of ``width``.

    Columns 16 … 47 of row 1 of a matrix of 64 columns, in cells of 16, are cells 4 · 1 + 1 and 6: ``at = [5, 6]``.
    """

    at: Tensor
    width: int
    cols: int

    def take(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy the units ``[n, cols]`` out of a matrix; ``out`` is contiguous memory to copy to."""
        cells = matrix.reshape(-1, self.width)
        if out is None:
            return torch.index_select(cells, 0, self.at).view(-1, self.cols)
        torch.index_select(cells, 0, self.at, out=out.view(-1, self.width))
        return out

    def put(self, units: Tensor, matrix: Tensor) -> None:
        """Write units ``[n, cols]`` to their places in a contiguous matrix."""
        matrix.view(-1, self.width).index_copy_(0, self.at, units.view(-1, self.width))


TABLE, OWNER, FIRST, STOP, STEP, KIND, LANE, SLOT, COPY = range(9)
"""Rows of `Locator.entries`."""


class Kind(NamedTuple):
    """What tiles of one arena have in common: number of columns, dtype, memory, and whether a cache is before it."""

    cols: int
    dtype: RowDtype
    tier: Tier = "device"
    cached: bool = False


class RowTiles(NamedTuple):
    """Pairs of a row ``[n]`` and a tile that holds it: a row has one in every lane that its table is cut into."""

    row: Tensor
    tile: Tensor


class Locator:
    """Locate the rows of the tables of one dim.

    Example: table "t" of 9 rows is cut by row over 3 ranks; tile r has rows r, r + 3, r + 6 of owner r. Its column of
    `entries` is: table 0, owner r, first row r, stop r + 7, step 3, kind 0, lane 0, slot 0, no copy (−1). Row 4 is in
    tile 1, at slot (4 − 1) / 3 = 1. A second table in the plan has keys from 9 on (``first_keys = [0, 9, …]``), and its
    tile on rank r has slots from 3 on.
    """

    def __init__(self, tables: Sequence[Table], plan: Plan, rank: int, device: torch.device) -> None:
        self.tables = list(tables)
        self.rank = rank
        number = {t.name: i for i, t in enumerate(tables)}
        self.tiles = [tile for tile in plan.tiles if tile.table in number]
        dtypes: dict[str, RowDtype] = {t.name: t.dtype for t in tables}
        kinds = [Kind(len(t.cols), dtypes[t.table], t.tier, t.cache_rows > 0) for t in self.tiles]
        self.kinds = list(dict.fromkeys(kinds))  # the same on all ranks
        self._owned: dict[Kind, list[int]] = defaultdict(list)
        self._copied: dict[Kind, list[int]] = defaultdict(list)
        # distinct ranges of columns, by first column
        self.lanes = sorted({(t.cols.start, t.cols.stop) for t in self.tiles})
        self.has_readers = any(tile.readers for tile in self.tiles)  # whether any rank holds a copy of any rows
        self.dim = tables[0].dim
        owned: dict[tuple[int, Kind], int] = defaultdict(int)
        copied: dict[tuple[int, Kind], int] = defaultdict(int)
        copies = torch.full((plan.world_size, len(self.tiles)), -1, dtype=torch.int64)
        rows: list[list[int]] = []
        for i, (tile, kind) in enumerate(zip(self.tiles, kinds, strict=True)):
            if rank == tile.owner:
                self._owned[kind].append(i)
            if rank in tile.readers:
                self._copied[kind].append(i)
            for reader in tile.readers:
                copies[reader, i] = copied[reader, kind]
                copied[reader, kind] += len(tile.rows)
            place = [number[tile.table], tile.owner, tile.rows.start, tile.rows[-1] + 1, tile.rows.step]
            lane = self.lanes.index((tile.cols.start, tile.cols.stop))
            slot = owned[tile.owner, kind]
            rows.append([*place, self.kinds.index(kind), lane, slot, int(copies[rank, i])])
            owned[tile.owner, kind] += len(tile.rows)
        self._lane_starts = torch.tensor([start for start, _ in self.lanes], dtype=torch.int64, device=device)
        self._cell = [
            math.gcd(self.dim, kind.cols, *(a for a, b in self.lanes if b - a == kind.cols)) for kind in self.kinds
        ]
        self.copies = copies.to(device)  # [W, tiles] int64: first slot of the copies on every rank
        # by kind, [W, owned tiles], in the order of their slots
        self.copies_of_owned = [copies[:, self._owned[kind]].to(device) for kind in self.kinds]
        lines = [
            0 if _overlap(plan.by_table[tile.table]) else row[LANE] for tile, row in zip(self.tiles, rows, strict=True)
        ]
        # [tiles]: units of one bag and one line get positions of their own (`hotbed.embed.pooled_exchange`). The line
        # of a tile is its lane, or 0 if lanes of its table overlap, because its rows are not all cut at the same
        # columns.
        self.lines = torch.tensor(lines, dtype=torch.int64, device=device)
        self.keys = sum(t.rows for t in tables)  # number of keys, which number the rows of all tables
        # [T + 1] int64: key of row 0 of each table
        self.first_keys = torch.tensor([0, *accumulate(t.rows for t in tables)], device=device)
        # [9, tiles] int64: table; owner; first row, stop row, row step; kind; lane; first slot in the owner's arena;
        # first slot in this rank's arena of copies, or −1 without a copy
        self.entries = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 9).T.contiguous()
        stream = self.entries[KIND]
        if self.has_readers:
            stream = 2 * stream + (self.entries[COPY] >= 0)
        self.streams = len(self.kinds) * (2 if self.has_readers else 1)  # number of streams (`hotbed.embed.route`)
        few = self.streams * plan.world_size < 256  # with one more, for what is in none; radix sorts like few bits
        # message of a tile's units: stream · W + owner
        self.messages = (stream * plan.world_size + self.entries[OWNER]).to(torch.uint8 if few else torch.int32)
        self._row_keys = self.first_keys[self.entries[TABLE]] + self.entries[FIRST]
        self._strided = bool((self.entries[STEP] > 1).any())
        self._layers = _layers(self.tiles, number, [t.rows for t in tables], device)

    def owned(self, kind: Kind) -> list[int]:
        """List the tiles of this kind that this rank owns, in the order of their slots."""
        return self._owned[kind]

    def copied(self, kind: Kind) -> list[int]:
        """List the tiles of this kind that this rank reads a copy of, in the order of their slots."""
        return self._copied[kind]

    def shards(self, tiles: Sequence[int]) -> list[Shard]:
        """Return these tiles as shards of an arena."""
        by_name = {t.name: t for t in self.tables}
        return [Shard(by_name[t.table], t.rows, t.cols) for t in (self.tiles[i] for i in tiles)]

    def cells(self, kind: int, rows: Tensor, lane: Tensor) -> Cells:
        """Find where units of a kind are in a matrix of whole rows, by row ``[n]`` and lane ``[n]``."""
        cols, width = self.kinds[kind].cols, self._cell[kind]
        first = rows * (self.dim // width) + torch.div(self._lane_starts[lane], width, rounding_mode="floor")
        if width < cols:
            first = (first[:, None] + torch.arange(cols // width, device=rows.device)).flatten()
        return Cells(first, width, cols)

    def find(self, keys: Tensor) -> RowTiles:
        """Find the tiles that hold these rows ``[n]``, given by key; layer by layer, inside a layer in their order."""
        found = [layer.find(keys, self.first_keys, self.entries) for layer in self._layers]
        if len(found) == 1:
            return found[0]
        return RowTiles(torch.cat([f.row for f in found]), torch.cat([f.tile for f in found]))

    def find_without_waiting(self, keys: Tensor) -> tuple[RowTiles, Tensor | None]:
        """Like `find`, but with ``n`` pairs per layer, so that the host need not synchronize.

        The second result tells which of them are there ``[n · layers]`` bool; None: all.
        """
        found = [layer.pairs(keys, self.first_keys, self.entries) for layer in self._layers]
        rows, tiles = [row for row, _, _ in found], [tile for _, tile, _ in found]
        whole = RowTiles(*(of[0] if len(of) == 1 else torch.cat(of) for of in (rows, tiles)))
        if all(inside is None for *_, inside in found):
            return whole, None
        everywhere = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        return whole, torch.cat([everywhere if inside is None else inside for *_, inside in found])

    def slots(self, keys: Tensor, found: RowTiles, column: int = SLOT) -> Tensor:
        """Number the slot of each row found, in its owner's arena, or with ``COPY`` among this rank's copies."""
        within = keys[found.row] - self._row_keys[found.tile]
        if self._strided:
            within = torch.div(within, self.entries[STEP][found.tile], rounding_mode="floor")
        return self.entries[column][found.tile] + within


def _overlap(tiles: Sequence[Tile]) -> bool:
    """Say whether any two of the distinct ranges of columns of these tiles have a column in common."""
    lanes = sorted({(t.cols.start, t.cols.stop) for t in tiles})
    return any(stop > start for (_, stop), (start, _) in pairwise(lanes))


class _Layer(NamedTuple):
    """Tiles of which no two of a table have a row in common, all those of a table with one row step.

    A row's tile is found by one binary search. ``step [T]`` (0: the layer has no tile of the table), ``base [T]`` and
    ``span [T]`` order the tiles by (table, residue of the row by the step, first row), so that ``keys`` of the tiles
    rise: of 9 rows with step 3 they are ``base + residue · span + first row`` = 0, 10, 20, and row 4 has 0 + 1 · 9 + 4,
    between 10 and 20. ``plain``: every step is 1, and keys of tiles are those of their first rows. ``complete``:
    every row is in some tile.
    """

    step: Tensor
    base: Tensor
    span: Tensor
    keys: Tensor
    tiles: Tensor
    plain: bool
    complete: bool

    def find(self, keys: Tensor, first_keys: Tensor, entries: Tensor) -> RowTiles:
        row, tile, inside = self.pairs(keys, first_keys, entries)
        if inside is None:
            return RowTiles(row, tile)
        which = inside.nonzero()[:, 0]
        return RowTiles(which, tile[which])

    def pairs(self, keys: Tensor, first_keys: Tensor, entries: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """List each row and what would be its tile, and whether it is in it (None: all are)."""
        rows = torch.arange(len(keys), device=keys.device)
        if self.plain and self.complete:
            at = torch.searchsorted(self.keys, keys, right=True) - 1
            return rows, self.tiles[at], None
        table = torch.searchsorted(first_keys, keys, right=True) - 1
        row = keys - first_keys[table]
        step = self.step[table]
        residue = row % step.clamp(min=1)
        at = torch.searchsorted(self.keys, self.base[table] + residue * self.span[table] + row, right=True) - 1
        tile = self.tiles[at.clamp(min=0)]
        if self.complete:
            return rows, tile, None
        first = entries[FIRST][tile]
        inside = (at >= 0) & (step > 0) & (entries[TABLE][tile] == table) & (row >= first) & (row < entries[STOP][tile])
        return rows, tile, inside & ((row - first) % entries[STEP][tile] == 0)


def _layers(
    tiles: Sequence[Tile], number: Mapping[str, int], rows: Sequence[int], device: torch.device
) -> list[_Layer]:
    """Sort tiles into as few layers as a table has pairs (columns, row step): grids of two columns have two."""

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    combs: dict[int, dict[tuple[range, int], list[int]]] = defaultdict(lambda: defaultdict(list))
    for i, tile in enumerate(tiles):
        combs[number[tile.table]][tile.cols, tile.rows.step].append(i)
    layers: list[_Layer] = []
    for depth in range(max(len(found) for found in combs.values())):
        step, base, span = ([0] * len(rows) for _ in range(3))
        entries: list[tuple[int, int]] = []
        covered = 0
        total = 0
        for t, found in sorted(combs.items()):
            base[t], span[t] = total, rows[t]
            if depth >= len(found):
                continue
            (_, step[t]), members = list(found.items())[depth]
            for i in members:
                start = tiles[i].rows.start
                entries.append((base[t] + start % step[t] * span[t] + start, i))
                covered += len(tiles[i].rows)
            total += step[t] * span[t]
        entries.sort()
        layers.append(
            _Layer(
                step=numbers(step),
                base=numbers(base),
                span=numbers(span),
                keys=numbers([key for key, _ in entries]),
                tiles=numbers([i for _, i in entries]),
                plain=set(step) == {1},
                complete=covered == sum(rows),
            )
        )
    return layers


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
        route = Route(renamed(bags, ops.spread(groups, places)), groups, places, rows, streams, trained)
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
