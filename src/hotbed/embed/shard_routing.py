"""Route the ids of a batch to the ranks that own their rows.

`Locator` finds the tile, rank, arena and slot of a row. Tiles with equal numbers of columns, dtypes and tiers have one
*arena type*. Every rank has two arenas of each type: one for the tiles that it owns, and one for its copies of other
tiles. Slots number the rows of a rank's tiles in the order of the plan, so every rank can compute the slots of all
ranks. A *column shard* is a range of columns that some tile has.

`make_route` sends each owner the slots of the distinct rows that a batch needs. The rows that come back
(`hotbed.embed.row_exchange`) form a small table with one row per distinct row. The ids of the batch are replaced by
positions in that table. So pooling and summing gradients are the same operations as on one rank with all rows.

For example, three ranks share a table of rows 0 … 8, cut by row: rank r has rows r, r + 3, r + 6 in its slots 0, 1, 2.
Rank 0 looks up five ids::

    bags of rank 0        [4 1] [3 4 2]                      two samples, five ids
    distinct rows          1  2  3  4
      owner                1  2  0  1                        row mod 3
      slot there           0  0  1  1                        row div 3
    sorted by owner       rank 0 │ rank 1 │ rank 2
      rows                   3   │  1  4  │   2
      slots sent             1   │  0  1  │   0              send_counts [1, 2, 1]
                             ▼       ▼        ▼              all-to-all of counts, then of slots
    rank 1 received       from rank 0: 0 1 │ from rank 1: 0 │ from rank 2: none     (rank 1's own bags are [1] [8])
                             ▼       ▼        ▼              owners read these slots and send the rows
    rows that arrive      position  0  1  2  3
                          row       3  1  4  2
    bags of positions     [2 1] [0 2 3]                      pooled like bags of a table of four rows

Gradients return the same way. Rank 0 sums the local gradients of row 4 from its two bags and sends rank 1 one sum per
row. Rank 1 adds the sums of slot 0, its own and rank 0's, along the tree over virtual ranks (`hotbed.virtual_ranks`).

A *row block* is a whole row, or the columns of it that one tile has. The row blocks of one arena type form one
`RowTransfer`, with one exchange of slots, one of rows and one of gradients. Rows that this rank has copies of form
separate transfers: only their gradients are exchanged, not the rows.

`IdExchange` collects the numbers of ids of all lookups in a batch. They cross the network in one exchange and are
copied to the host with one synchronization. With prefetching (`hotbed.train.prefetch`), a training step runs between
`IdExchange.start` and `IdExchange.finish`, so the host does not wait. If rows are combined inside nodes, there are two
such exchanges, and another step runs between them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.comm.hierarchical import hops_of_rows
from hotbed.embed.arena import Shard
from hotbed.embed.tile_layers import (
    ARENA_TYPE,
    COLUMN_SHARD,
    COPY,
    FIRST,
    OWNER,
    SLOT,
    STEP,
    TABLE,
    RowTiles,
    make_layers,
)
from hotbed.ops import Backend, BagLayout, Groups
from hotbed.ops.layout import replace_bag_ids
from hotbed.plan import Plan, Tile
from hotbed.plan.tiling import Tier
from hotbed.specs import RowDtype, Table
from hotbed.store.memory import staging

T = TypeVar("T")
Counts = list[list[int]]
"""Numbers of a request, by rank."""


class IdExchange:
    """One exchange of the ids of several lookups or batches. All ranks must make the same calls."""

    def __init__(self, link: Link) -> None:
        self.link = link
        first, *others = hops_of_rows(link)
        self.first_hop = first
        """Link of the counts: the ranks of the node if rows are combined inside nodes, otherwise all ranks."""
        self.second = IdExchange(*others) if others else None
        """Exchange between nodes if rows are combined inside nodes. It finishes after the own one."""
        self._counts: list[Callable[[], Tensor] | None] = []
        self._work: list[Callable[[Counts, Counts], None]] = []
        self._widths: list[int] = []
        self._arrived: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._is_done = False

    def add(self, counts: Callable[[], Tensor], work: Callable[[Counts, Counts], T]) -> Future[T]:
        """Add a request before `start`. Return a future that `finish` completes.

        ``counts`` returns ``k`` numbers for each of the ``W`` ranks of `first_hop`, ``[W, k]`` int64 on the device.
        `start` calls it. `finish` calls the ``work`` of all requests in order, with this rank's counts and the counts
        that the ranks sent to it.
        """
        future: Future[T] = Future()
        self._work.append(lambda own, received: future.set_result(work(own, received)))
        self._counts.append(counts)
        return future

    def add_local(self, work: Callable[[], T]) -> Future[T]:
        """Add work without counts, which `finish` runs after all earlier work."""
        if self.second is not None:
            return self.second.add_local(work)
        future: Future[T] = Future()
        self._work.append(lambda own, received: future.set_result(work()))
        self._counts.append(None)
        return future

    def start(self) -> None:
        """Exchange the counts and start copying them to the host."""
        found = [None if counts is None else counts() for counts in self._counts]
        self._widths = [0 if counts is None else counts.shape[1] for counts in found]
        present = [counts for counts in found if counts is not None]
        if not present:
            return
        link = self.first_hop
        both = present[0].new_empty(2, link.size, sum(self._widths))
        torch.cat(present, dim=1, out=both[0])
        if link.size == 1:
            both[1] = both[0]
        else:
            ones = [1] * link.size
            link.all_to_all("numbers of ids", both[0], ones, ones, out=both[1]).wait()
        if both.device.type == "cpu":
            self._arrived = both, None
        else:
            host, copied = staging(both.shape, both.dtype, both.device), torch.cuda.Event()
            host.copy_(both, non_blocking=True)
            copied.record()
            self._arrived = host, copied

    def finish(self) -> None:
        """Wait for the counts and run all added work. If `start` was not called, call it first."""
        self.finish_first_hop()
        if self.second is not None:
            self.second.finish()

    def finish_first_hop(self) -> None:
        """Run the added work and start `second`, once."""
        if self._is_done:
            return
        self._is_done = True
        if self._arrived is None:
            self.start()
        own: Counts = [[] for _ in range(self.first_hop.size)]
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
        if self.second is not None:
            self.second.start()


def _columns(first: int, stop: int, of_ranks: Counts) -> Counts:
    return [numbers[first:stop] for numbers in of_ranks]


@dataclass(frozen=True)
class ColumnBlocks:
    """Positions of row blocks in a matrix ``[…, D]``, which is viewed as a matrix with rows of ``width`` columns.

    A row block has ``cols`` columns, a multiple of ``width``. For example, columns 16 … 47 of row 1 of a matrix with 64
    columns and ``width`` 16 are rows 4 · 1 + 1 and 4 · 1 + 2 of the view: ``at = [5, 6]``.
    """

    at: Tensor
    width: int
    cols: int

    def gather(self, matrix: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy the row blocks ``[n, cols]`` out of a matrix, into the contiguous tensor ``out`` if given."""
        column_blocks = matrix.reshape(-1, self.width)
        if out is None:
            return torch.index_select(column_blocks, 0, self.at).view(-1, self.cols)
        torch.index_select(column_blocks, 0, self.at, out=out.view(-1, self.width))
        return out

    def scatter(self, blocks: Tensor, matrix: Tensor) -> None:
        """Write row blocks ``[n, cols]`` to their positions in a contiguous matrix."""
        matrix.view(-1, self.width).index_copy_(0, self.at, blocks.view(-1, self.width))


class ArenaType(NamedTuple):
    """Common properties of the tiles of an arena: number of columns, dtype, tier, and whether rows are cached."""

    cols: int
    dtype: RowDtype
    tier: Tier = "device"
    cached: bool = False


class Locator:
    """Find the tiles and slots of the rows of all tables of one dim.

    For example, table "t" of 9 rows is cut by row over 3 ranks. Tile r has rows r, r + 3, r + 6 and owner r. Its column
    of `entries` is: table 0, owner r, first row r, stop r + 7, step 3, arena type 0, column shard 0, slot 0, no copy
    (−1). Row 4 is in tile 1, at slot (4 − 1) / 3 = 1. The keys of a second table start at 9
    (``first_keys = [0, 9, …]``), and the slots of its tile on rank r start at 3.

    ``ranks_per_node`` is the number of ranks of a node if rows are combined inside nodes.
    """

    def __init__(
        self, tables: Sequence[Table], plan: Plan, rank: int, device: torch.device, ranks_per_node: int | None = None
    ) -> None:
        self.tables = list(tables)
        self.rank = rank
        number = {t.name: i for i, t in enumerate(tables)}
        self.tiles = [tile for tile in plan.tiles if tile.table in number]
        dtypes: dict[str, RowDtype] = {t.name: t.dtype for t in tables}
        arena_types = [ArenaType(len(t.cols), dtypes[t.table], t.tier, t.cache_rows > 0) for t in self.tiles]
        self.arena_types = list(dict.fromkeys(arena_types))  # the same on all ranks
        self._owned: dict[ArenaType, list[int]] = defaultdict(list)
        self._copied: dict[ArenaType, list[int]] = defaultdict(list)
        # distinct ranges of columns, by first column
        self.column_shards = sorted({(t.cols.start, t.cols.stop) for t in self.tiles})
        self.has_readers = any(tile.readers for tile in self.tiles)  # whether any rank has copies of rows
        self.dim = tables[0].dim
        owned: dict[tuple[int, ArenaType], int] = defaultdict(int)
        copied: dict[tuple[int, ArenaType], int] = defaultdict(int)
        copies = torch.full((plan.world_size, len(self.tiles)), -1, dtype=torch.int64)
        rows: list[list[int]] = []
        for i, (tile, arena_type) in enumerate(zip(self.tiles, arena_types, strict=True)):
            if rank == tile.owner:
                self._owned[arena_type].append(i)
            if rank in tile.readers:
                self._copied[arena_type].append(i)
            for reader in tile.readers:
                copies[reader, i] = copied[reader, arena_type]
                copied[reader, arena_type] += len(tile.rows)
            position = [number[tile.table], tile.owner, tile.rows.start, tile.rows[-1] + 1, tile.rows.step]
            column_shard = self.column_shards.index((tile.cols.start, tile.cols.stop))
            slot = owned[tile.owner, arena_type]
            rows.append([*position, self.arena_types.index(arena_type), column_shard, slot, int(copies[rank, i])])
            owned[tile.owner, arena_type] += len(tile.rows)
        self._column_starts = torch.tensor([start for start, _ in self.column_shards], dtype=torch.int64, device=device)
        self._block_width = [
            math.gcd(self.dim, arena_type.cols, *(a for a, b in self.column_shards if b - a == arena_type.cols))
            for arena_type in self.arena_types
        ]
        self.copies = copies.to(device)  # [W, tiles] int64: first slot of the copies on every rank
        # by arena type, [W, owned tiles + 1], in the order of their slots; the last column is −1
        without = torch.full((plan.world_size, 1), -1, dtype=torch.int64)
        self.copies_of_owned = [
            torch.cat([copies[:, self._owned[arena_type]], without], dim=1).to(device)
            for arena_type in self.arena_types
        ]
        column_groups = [
            0 if _overlap(plan.by_table[tile.table]) else row[COLUMN_SHARD]
            for tile, row in zip(self.tiles, rows, strict=True)
        ]
        # [tiles], number of the column group. Partial bags of one bag and one column group get different positions
        # (`hotbed.embed.pooled_exchange`). The group of a tile is its column shard. It is 0 if column shards of the
        # table overlap, because some of its rows are cut at other columns than the rest.
        self.column_groups = torch.tensor(column_groups, dtype=torch.int64, device=device)
        self.keys = sum(t.rows for t in tables)  # number of keys, which number the rows of all tables
        # [T + 1] int64: key of row 0 of each table
        self.first_keys = torch.tensor([0, *accumulate(t.rows for t in tables)], device=device)
        # [9, tiles] int64: table; owner; first row, stop row, row step; arena type; column shard; first slot in the
        # owner's arena; first slot in this rank's arena of copies, or −1 without a copy
        self.entries = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 9).T.contiguous()
        transfer = self.entries[ARENA_TYPE]
        if self.has_readers:
            transfer = 2 * transfer + (self.entries[COPY] >= 0)
        self.transfers = len(self.arena_types) * (2 if self.has_readers else 1)  # number of transfers
        few = self.transfers * plan.world_size < 256  # with one more for padding; a radix sort of few bits is faster
        self.ranks = plan.world_size
        # by arena type, the largest number of slots of a rank
        self.most_slots = [max((owned[r, t] for r in range(plan.world_size)), default=0) for t in self.arena_types]
        # [tiles] int64, what `node_slots` adds to slots; None if rows are not combined inside nodes
        self._first_node_slots: Tensor | None = None
        owners = self.entries[OWNER]
        if ranks_per_node is not None:  # sort owners by local rank, then by node
            nodes = torch.div(owners, ranks_per_node, rounding_mode="floor")
            owners = owners % ranks_per_node * (plan.world_size // ranks_per_node) + nodes
            most = torch.tensor(self.most_slots, dtype=torch.int64, device=device)
            self._first_node_slots = nodes * most[self.entries[ARENA_TYPE]]
        # destination of a tile's row blocks: transfer · W + owner
        self.destinations = (transfer * plan.world_size + owners).to(torch.uint8 if few else torch.int32)
        self._row_keys = self.first_keys[self.entries[TABLE]] + self.entries[FIRST]
        self._strided = bool((self.entries[STEP] > 1).any())
        self._layers = make_layers(self.tiles, number, [t.rows for t in tables], device)

    def owned(self, arena_type: ArenaType) -> list[int]:
        """List the tiles of an arena type that this rank owns, in the order of their slots."""
        return self._owned[arena_type]

    def copied(self, arena_type: ArenaType) -> list[int]:
        """List the tiles of an arena type that this rank has copies of, in the order of their slots."""
        return self._copied[arena_type]

    def shards(self, tiles: Sequence[int]) -> list[Shard]:
        """Return these tiles as shards of an arena."""
        by_name = {t.name: t for t in self.tables}
        return [Shard(by_name[t.table], t.rows, t.cols) for t in (self.tiles[i] for i in tiles)]

    def column_blocks(self, arena_type: int, rows: Tensor, column_shard: Tensor) -> ColumnBlocks:
        """Find row blocks of an arena type in a matrix of whole rows, by row ``[n]`` and column shard ``[n]``."""
        cols, width = self.arena_types[arena_type].cols, self._block_width[arena_type]
        first = rows * (self.dim // width) + torch.div(self._column_starts[column_shard], width, rounding_mode="floor")
        if width < cols:
            first = (first[:, None] + torch.arange(cols // width, device=rows.device)).flatten()
        return ColumnBlocks(first, width, cols)

    def find(self, keys: Tensor) -> RowTiles:
        """Find the tiles of rows ``[n]``, given by key. Pairs are sorted by layer, then by position in ``keys``."""
        found = [layer.find(keys, self.first_keys, self.entries) for layer in self._layers]
        if len(found) == 1:
            return found[0]
        return RowTiles(torch.cat([f.row for f in found]), torch.cat([f.tile for f in found]))

    def find_without_waiting(self, keys: Tensor) -> tuple[RowTiles, Tensor | None]:
        """Like `find`, but with a fixed output size of ``n`` pairs per layer, so that the host need not synchronize.

        The second result is a mask of valid pairs ``[n · layers]``, or None if all are valid.
        """
        found = [layer.pairs(keys, self.first_keys, self.entries) for layer in self._layers]
        rows, tiles = [row for row, _, _ in found], [tile for _, tile, _ in found]
        whole = RowTiles(*(of[0] if len(of) == 1 else torch.cat(of) for of in (rows, tiles)))
        if all(inside is None for *_, inside in found):
            return whole, None
        everywhere = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        return whole, torch.cat([everywhere if inside is None else inside for *_, inside in found])

    def slots(self, keys: Tensor, found: RowTiles, column: int = SLOT) -> Tensor:
        """Return the slot of each row in its owner's arena, or with ``column=COPY`` in this rank's arena of copies."""
        within = keys[found.row] - self._row_keys[found.tile]
        if self._strided:
            within = torch.div(within, self.entries[STEP][found.tile], rounding_mode="floor")
        return self.entries[column][found.tile] + within

    def node_slots(self, keys: Tensor, found: RowTiles) -> Tensor:
        """Return numbers of rows that are unique among all owners of one local rank: ``node · most_slots + slot``.

        If rows are not combined inside nodes, these are the `slots`.
        """
        slots = self.slots(keys, found)
        return slots if self._first_node_slots is None else slots + self._first_node_slots[found.tile]


def _overlap(tiles: Sequence[Tile]) -> bool:
    """Return whether two different column ranges of these tiles overlap."""
    column_shards = sorted({(t.cols.start, t.cols.stop) for t in tiles})
    return any(stop > start for (_, stop), (start, _) in pairwise(column_shards))


@dataclass
class RowTransfer:
    """Row blocks of one arena type that this rank requests from owners, and that ranks request from this one."""

    arena_type: int  # index in `Locator.arena_types`
    copied: bool  # whether this rank holds copies of these rows
    slots: Tensor  # [n], slot of each requested row block in the arena of its owner, sorted by owner
    copies: Tensor | None  # [n], slot of each row block in this rank's arena of copies, if it has copies
    send_counts: list[int]  # number of requested row blocks by owner
    first: int  # position of the first row, which the others follow; −1 if row blocks have only some columns
    column_blocks: ColumnBlocks | None  # columns and positions, if row blocks have only some columns
    # [m], slots that the ranks request from this one, sorted by rank
    received: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    recv_counts: list[int] = field(default_factory=list)  # number of requests by rank
    subtree: int = 0  # number of the senders' node of the tree, if a rank has several

    def own(self, rank: int) -> tuple[int, int]:
        """Return the start and end of the row blocks that this rank requests from itself."""
        return sum(self.send_counts[:rank]), sum(self.send_counts[: rank + 1])

    def own_received(self, rank: int) -> tuple[int, int]:
        """Return the start and end in `received` of this rank's requests to itself."""
        return sum(self.recv_counts[:rank]), sum(self.recv_counts[: rank + 1])


@dataclass
class Route:
    """The bags of one output after the exchange of their ids."""

    bags: BagLayout  # with positions instead of ids
    groups: Groups  # occurrences of each distinct row
    positions: Tensor  # [U], position of each distinct row, rows ascending
    rows: int  # number of positions
    transfers: list[RowTransfer]
    trained: bool  # whether gradients will be exchanged, too
    # exchanges between nodes, if rows are combined inside nodes; `transfers` are then exchanges inside the node
    node_transfers: list[RowTransfer] = field(default_factory=list)

    @property
    def at_owners(self) -> list[RowTransfer]:
        """The transfers in which ranks request slots of this rank."""
        return self.node_transfers or self.transfers


def make_route(
    bags: BagLayout, locator: Locator, ops: Backend, exchange: IdExchange, *, trained: bool
) -> Future[Route]:
    """Find the owners of a batch's distinct rows, and exchange their slots. All ranks must call this.

    The host does not wait for the device here, because `IdExchange.finish` reads the number of rows. ``bags`` belong to
    one output, and their tables start at `Locator.first_keys`. Unless ``trained``, slots of rows that this rank has
    copies of are not sent. If rows are combined inside nodes, `hotbed.embed.node_routing` continues.
    """
    groups = ops.group(ops.occurrences(replace(bags, limit=locator.keys)))
    link = exchange.first_hop
    blocks = _find_row_blocks(locator, groups, link.size)

    def finish(own: Counts, received: Counts) -> Route:
        transfers, positions, rows = _make_transfers(locator, blocks, own)
        route = Route(replace_bag_ids(bags, ops.spread(groups, positions)), groups, positions, rows, transfers, trained)
        exchange_slots(transfers, received, link, trained=trained)
        return route

    return exchange.add(lambda: blocks.counts, finish)


class _RowBlocks(NamedTuple):
    """Row blocks that a batch needs, sorted by transfer, then owner, and followed by padding.

    ``keys [≥ U]`` are the distinct rows. ``counts [W, transfers + 1]`` has the numbers of row blocks by owner and
    transfer, and in the last column the number of distinct rows.
    """

    keys: Tensor
    found: RowTiles
    counts: Tensor


def _find_row_blocks(locator: Locator, groups: Groups, size: int) -> _RowBlocks:
    """Sort distinct rows by destination. In the example, rows 1 2 3 4 of owners 1, 2, 0, 1 become 3 │ 1 4 │ 2.

    There are ``size`` destinations: all ranks, or the ranks of a node. A rank of a node stands for the owners with its
    local rank, e.g. of 4 ranks in nodes of 2, rank 0 for owners 0 and 2, and rank 1 for owners 1 and 3.
    """
    keys, count = groups.rows, groups.counts[:1]
    device, destinations = keys.device, locator.transfers * locator.ranks
    if device.type == "cpu":
        keys = keys[: int(count)]
        found, inside = locator.find(keys), None
    else:  # the host does not know the count, so padding is sorted to an additional, last destination
        live = torch.arange(len(keys), device=device) < count
        keys = torch.where(live, keys, 0)
        found, inside = locator.find_without_waiting(keys)
        inside = live[found.row] if inside is None else inside & live[found.row]
    destination = locator.destinations[found.tile]
    if inside is not None:
        destination = torch.where(inside, destination, destinations)
    destination, order = torch.sort(destination, stable=True)
    bounds = torch.searchsorted(destination, torch.arange(destinations + 1, dtype=destination.dtype, device=device))
    by_rank = bounds.diff().view(locator.transfers, locator.ranks)
    if size < locator.ranks:
        by_rank = by_rank.view(locator.transfers, size, -1).sum(2)  # of all owners with a local rank
    counts = torch.cat([by_rank, count.expand(1, size)]).T
    return _RowBlocks(keys, RowTiles(found.row[order], found.tile[order]), counts)


def _make_transfers(locator: Locator, blocks: _RowBlocks, counts: Counts) -> tuple[list[RowTransfer], Tensor, int]:
    """Split row blocks into transfers. Return these, the position of each row, and the number of positions.

    Rows 1, 2, 3, 4 of owners 1, 2, 0, 1 become one transfer with slots ``[1, 0, 1, 0]`` and counts ``[1, 2, 1]``. Their
    positions are ``[1, 3, 0, 2]`` (see the example at the top of this file).
    """
    *by_transfer, (count, *_) = map(list, zip(*counts, strict=True))
    keys, device = blocks.keys[:count], blocks.keys.device
    total = sum(map(sum, by_transfer))
    found = RowTiles(blocks.found.row[:total], blocks.found.tile[:total])
    slots = locator.node_slots(keys, found)
    positions = torch.full((count,), -1, dtype=torch.int64, device=device)
    transfers: list[RowTransfer] = []
    cut: list[tuple[RowTransfer, RowTiles]] = []
    rows = start = 0
    for number, send_counts in enumerate(by_transfer):
        stop = start + sum(send_counts)
        arena_type, is_copy = (number // 2, number % 2 == 1) if locator.has_readers else (number, False)
        here = RowTiles(found.row[start:stop], found.tile[start:stop])
        copies = locator.slots(keys, here, COPY) if is_copy else None
        whole = locator.arena_types[arena_type].cols == locator.dim
        transfers.append(
            RowTransfer(arena_type, is_copy, slots[start:stop], copies, send_counts, rows if whole else -1, None)
        )
        if whole:
            positions[here.row] = torch.arange(rows, rows + stop - start, device=device)
            rows += stop - start
        else:
            cut.append((transfers[-1], here))
        start = stop
    if rows < count:  # rows that are cut into columns follow in ascending order
        is_cut = positions < 0
        positions = torch.where(is_cut, is_cut.cumsum(0) + (rows - 1), positions)
    for s, here in cut:
        s.column_blocks = locator.column_blocks(
            s.arena_type, positions[here.row], locator.entries[COLUMN_SHARD][here.tile]
        )
    return transfers, positions, count


def exchange_slots(transfers: Sequence[RowTransfer], received: Counts, link: Link, *, trained: bool) -> None:
    """Exchange the slots of transfers. Unless ``trained``, slots of copied rows are not exchanged.

    ``received`` has the number of requests of each rank to this one, by transfer.
    """
    handles: list[tuple[RowTransfer, Handle[Tensor]]] = []
    for number, transfer in enumerate(transfers):
        if transfer.copied and not trained:
            continue
        transfer.recv_counts = [of_rank[number] for of_rank in received]
        if link.size == 1:
            transfer.received = transfer.slots
        else:
            handles.append(
                (transfer, link.all_to_all("ids", transfer.slots, transfer.send_counts, transfer.recv_counts))
            )
    for transfer, handle in handles:
        transfer.received = handle.wait()
