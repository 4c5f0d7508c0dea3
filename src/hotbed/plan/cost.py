"""Estimate the cost of a plan: bytes of each memory, and the load of each rank in a training step.

`CostModel` has two units. *With hardware* it counts the bytes of each of the `PARTS` of a step and divides them by
rates, which gives seconds. *Without hardware* the unit is ids × columns per sample of the global batch, and every id
counts as a distinct row. A lookup is one third of it, an update two thirds (Mudigere et al. 2021, arXiv 2104.05158).
All formulas with units and sources: docs/planning.md.

Notation, per step: ``N`` ranks of a group; ``u`` distinct rows of a tile in one rank's batch, ``U`` in all ranks'
batches; ``n`` ids of one rank's batch; ``c`` columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import numpy as np

from hotbed.ops.layout import BLOCK
from hotbed.ops.rows import Codec, encoded_bytes
from hotbed.optim import Moment
from hotbed.plan.hardware import Hardware, interpolated
from hotbed.plan.links import Links
from hotbed.plan.tiling import Plan, Tier, Tile, WireFormat
from hotbed.plan.workload import TableUse, Workload
from hotbed.specs import Table, row_bytes

Array = np.ndarray[Any, Any]

LOOKUP_SHARE = 1 / 3
"""Share of the lookup in the load of an id. The rest is the update."""

PARTS = (
    "lookup",  # rows read by owners and readers
    "pooling",  # of received rows and of gradients; equal on all ranks
    "ids",
    "rows",
    "gradients",
    "update",
    "copies",  # updated rows, to readers
    "sums",  # over columns, between owners of a row
    "host",  # rows to and from the host's memory
    "disk",
    "replicas",  # averages of replicas
    "grouping",  # grouping and other fixed costs of ids; equal on all ranks
)
"""Parts of a step that handle tables."""
LOOKUP, POOLING, IDS, ROWS, GRADIENTS, UPDATE, COPIES, SUMS, HOST, DISK, REPLICAS, GROUPING = range(len(PARTS))

LAUNCHES = 12
"""Default number of kernels of an arena in a step: grouping, lookup, sums per row, update."""
EXCHANGES_OF_COPIES = 3
"""Exchanges of numbers, slots and values of updated rows (`hotbed.embed.gather`)."""
POOLED_EXCHANGES, POOLED_LAUNCHES = 5, 245 + 24
"""Additional exchanges and kernel launches per step if some tables of a dim send pooled vectors, and others rows.

The exchanges are numbers of ids, ids, lengths of bags, pooled vectors and gradients (`hotbed.embed.pooled_exchange`).
The second summand is the number of host synchronizations. Each counts as a launch, because the device is idle until the
next launch. `tests/census` counts both."""
ALL_POOLED_EXCHANGES, ALL_POOLED_LAUNCHES = 2, 132 + 24
"""The same if all tables of a dim send pooled vectors, so that ids, rows and gradients are exchanged only once."""
COMBINED_LAUNCHES = 62
"""Additional kernel launches of a dim per step if rows are combined inside nodes (`tests/census`)."""

TIERS: tuple[Tier, ...] = get_args(Tier)

SLOT_BYTES = 8
"""Bytes of an exchanged id."""


class TileTraffic(NamedTuple):
    """Bytes between the owner of a tile and another rank."""

    ids: float  # to the owner
    rows: float  # from the owner, before the step; readers need none
    gradients: float  # to the owner
    copies: float  # from the owner, after the update, to readers


def tile_traffic(
    cols: int, requested: float, updated: float, *, vectors: float | None = None, forward: Codec, backward: Codec
) -> TileTraffic:
    """Estimate the bytes between an owner and a rank that requests ``requested`` ids; ``updated`` rows change."""
    count = requested if vectors is None else vectors
    return TileTraffic(
        requested * SLOT_BYTES,
        count * encoded_bytes(forward, cols),
        count * encoded_bytes(backward, cols),
        updated * (SLOT_BYTES + 4 * cols),
    )


def sums_bytes(cols: int, updated: float) -> float:
    """Return the bytes of one sum over columns of each updated row, sent to the owner of other columns."""
    return updated * 4 * -(-cols // BLOCK)


class Cost(NamedTuple):
    """Memory and load of a rank."""

    nbytes: int
    load: float


def tile_bytes(table: Table, tile: Tile, moments: Sequence[Moment] = ()) -> int:
    """Return the bytes of a tile's rows and moments. A reader has no moments."""
    wide = len(range(tile.rows.start, min(tile.rows.stop, table.fp32_rows), tile.rows.step))
    cols = len(tile.cols)
    moment_bytes = sum(m.nbytes(cols) for m in moments)
    return (
        wide * row_bytes("fp32", cols)
        + (len(tile.rows) - wide) * row_bytes(table.dtype, cols)
        + len(tile.rows) * moment_bytes
    )


def table_bytes(table: Table, moments: Sequence[Moment] = ()) -> int:
    """Return the bytes of all rows of a table and their moments."""
    return tile_bytes(table, Tile(table.name, range(table.rows), range(table.dim), 0), moments)


def gib(nbytes: float) -> str:
    """Format bytes for a traffic."""
    return f"{nbytes / 2**30:,.3g} GiB"


class Fixed(NamedTuple):
    """Fixed seconds of a step."""

    messages: float
    launches: float


@dataclass(frozen=True)
class TileCost:
    """Cost of a tile by `PARTS` for its owner, each reader and every rank, in bytes and in the model's unit."""

    owner_bytes: Array
    reader_bytes: Array
    everyone_bytes: Array
    prices: Array  # of a byte, by `PARTS`

    @property
    def owner(self) -> Array:  # noqa: D102
        return self.owner_bytes * self.prices

    @property
    def reader(self) -> Array:  # noqa: D102
        return self.reader_bytes * self.prices

    @property
    def everyone(self) -> Array:  # noqa: D102
        return self.everyone_bytes * self.prices


@dataclass(frozen=True)
class RankCosts:
    """Costs of a plan for each of ``N`` ranks."""

    memory: Mapping[Tier, Array]  # bytes of rows and moments by tier ``[N]``
    parts_bytes: Array  # bytes by `PARTS` ``[N, parts]``
    parts: Array  # the same in seconds, or in ids × columns

    @property
    def load(self) -> Array:
        """Sum over parts ``[N]``."""
        return self.parts.sum(1)

    @property
    def nbytes(self) -> Array:
        """Sum over tiers ``[N]``."""
        return np.sum(list(self.memory.values()), axis=0)

    @property
    def imbalance(self) -> float:
        """Load of the busiest rank ÷ the mean."""
        mean = float(self.load.mean())
        return float(self.load.max()) / mean if mean else 1.0

    @property
    def costs(self) -> list[Cost]:
        """Memory and load by rank."""
        return [Cost(int(nbytes), float(load)) for nbytes, load in zip(self.nbytes, self.load, strict=True)]


class CostModel:
    """Estimate the cost of tiles under a workload: seconds on hardware, otherwise ids × columns per sample."""

    def __init__(self, workload: Workload, world_size: int, hardware: Hardware | None = None) -> None:
        self.workload, self.world_size, self.hardware = workload, world_size, hardware
        ranks = world_size * workload.replicas
        self.local_batch = workload.batch_size / ranks
        """Samples of a rank."""
        self.ranks_on_node = 1 if hardware is None else min(hardware.ranks_per_node, ranks)
        self.cores_share = self.ranks_on_node if hardware is not None and hardware.cores_shared else 1
        """Ranks that compute on the same cores."""
        self.links = None
        """Links between ranks; None without hardware."""
        if hardware is not None:
            self.links = Links(
                hardware=hardware,
                size=world_size,
                replicas=workload.replicas,
                layout=workload.layout,
                ranks_per_node=workload.ranks_per_node,
                is_lossless=(workload.forward_codec, workload.backward_codec) == ("fp32", "fp32"),
            )
        self.wire_s, self.replica_s = (0.0, 0.0) if self.links is None else self._wire_seconds(self.links)
        """Seconds per byte exchanged between ranks of a group, and between replicas."""
        self._known: dict[tuple[object, ...], TileCost] = {}
        self.memo: dict[object, Any] = {}
        """Results that other modules computed with this model."""

    def tile(
        self, tile: Tile, col_parts: int = 1, readers: int | None = None, wire: WireFormat | None = None
    ) -> TileCost:
        """Return the cost of a tile in a wire format (default: that of the workload).

        Strided tiles of all residues have equal costs, because rows within a stride count as equal.
        """
        rows, copies = tile.rows, len(tile.readers) if readers is None else readers
        use = self.workload.by_table[tile.table]
        is_pooled = (wire or self.workload.wire.get(tile.table)) == "pooled" and self.hardware is not None
        # One row per stride, independent of the residue and of the form of the range.
        first, last = rows.start - rows.start % rows.step, rows[-1] - rows[-1] % rows.step
        stop = use.table.rows if rows[-1] + rows.step >= use.table.rows else last + rows.step
        among = range(first, stop, rows.step)
        key = (tile.table, among, len(rows), len(tile.cols), copies, tile.tier, tile.cache_rows, col_parts)
        key = (*key, is_pooled)
        if key not in self._known:
            counted = self._owner_and_others(use, tile, among, col_parts, copies, is_pooled=is_pooled)
            wire_s = self.wire_s if is_pooled else self._row_wire_s(use, among, len(rows))
            self._known[key] = TileCost(*counted, self._prices(use, tile, wire_s))
        return self._known[key]

    @property
    def copies_s(self) -> float:
        """Fixed seconds of a step with copies: their exchanges, with a message to each rank."""
        return self._fixed_s("copies", EXCHANGES_OF_COPIES)

    @property
    def sums_s(self) -> float:
        """Fixed seconds of a step with exchanged sums over columns."""
        return self._fixed_s("sums", 1)

    def pooled_s(self, pooled: Collection[str]) -> Fixed:
        """Return the fixed seconds of a step because these tables send pooled vectors instead of rows."""
        if not pooled:
            return Fixed(0.0, 0.0)
        exchanges = launches = 0
        by_dim: dict[int, list[str]] = {}
        for use in self.workload.uses:
            by_dim.setdefault(use.table.dim, []).append(use.table.name)
        for names in by_dim.values():
            count = sum(name in pooled for name in names)
            exchanges += ALL_POOLED_EXCHANGES if count == len(names) else POOLED_EXCHANGES * bool(count)
            launches += ALL_POOLED_LAUNCHES if count == len(names) else POOLED_LAUNCHES * bool(count)
        return self._pooled_fixed(exchanges, launches)

    def least_pooled_s(self, *, some: bool = False) -> float:
        """Return the least fixed seconds of pooled vectors of a dim, or with ``some`` of a part of its tables."""
        if some:
            return sum(self._pooled_fixed(POOLED_EXCHANGES, POOLED_LAUNCHES))
        return sum(self._pooled_fixed(ALL_POOLED_EXCHANGES, ALL_POOLED_LAUNCHES))

    def _pooled_fixed(self, exchanges: int, launches: int) -> Fixed:
        if self.hardware is None or self.links is None or self.world_size == 1 or self.workload.fused_pooling:
            return Fixed(0.0, 0.0)
        launches += exchanges * self.links.launches
        return Fixed(exchanges * self.links.messages * self.hardware.message_s, launches * self.hardware.launch_s)

    def wire_of(self, plan: Plan | Iterable[Tile]) -> dict[str, WireFormat]:
        """Return the wire formats of a plan by table. Tables without one have that of the workload."""
        return {**self.workload.wire, **(plan.wire if isinstance(plan, Plan) else {})}

    def pooled_in(self, plan: Plan | Iterable[Tile]) -> set[str]:
        """Return the tables of a plan that send pooled vectors."""
        return {name for name, form in self.wire_of(plan).items() if form == "pooled"}

    @property
    def arena_s(self) -> float:
        """Fixed seconds of an arena on the device in a step: measured, or the launches of its kernels."""
        if self.hardware is None:
            return 0.0
        if "step" in self.hardware.overheads:
            return self.hardware.overhead("arena", self.ranks_on_node)
        return self.workload.arena_launches.get("device", LAUNCHES) * self.hardware.launch_s

    def _fixed_s(self, what: str, exchanges: int) -> float:
        """Return measured fixed seconds of optional exchanges, or the seconds of their messages."""
        if self.hardware is None or self.links is None:
            return 0.0
        if what in self.hardware.overheads:
            return self.hardware.overhead(what, self.ranks_on_node) if self.world_size > 1 else 0.0
        return exchanges * self.links.messages * self.hardware.message_s

    def ranks(self, plan: Plan | Iterable[Tile]) -> RankCosts:
        """Return the cost of each rank, for a plan or for all tiles of some of its tables."""
        tiles, wire = list(plan.tiles if isinstance(plan, Plan) else plan), self.wire_of(plan)
        col_parts: dict[str, set[range]] = {}
        for tile in tiles:
            col_parts.setdefault(tile.table, set()).add(tile.cols)
        memory: dict[Tier, Array] = {tier: np.zeros(self.world_size, dtype=np.int64) for tier in TIERS}
        counted, parts = np.zeros((2, self.world_size, len(PARTS)))
        everyone = np.zeros((2, len(PARTS)))
        for tile in tiles:
            use = self.workload.by_table[tile.table]
            cost = self.tile(tile, len(col_parts[tile.table]), wire=wire.get(tile.table))
            counted[tile.owner] += cost.owner_bytes
            parts[tile.owner] += cost.owner
            everyone += cost.everyone_bytes, cost.everyone
            memory[tile.tier][tile.owner] += tile_bytes(use.table, tile, use.moments)
            if tile.readers:
                readers = list(tile.readers)
                counted[readers] += cost.reader_bytes
                parts[readers] += cost.reader
                memory[tile.tier][readers] += tile_bytes(use.table, tile)
        return RankCosts(memory, counted + everyone[0], parts + everyone[1])

    # -- bytes -----------------------------------------------------------------------------------------------------

    def _owner_and_others(
        self, use: TableUse, tile: Tile, rows: range, col_parts: int, readers: int, *, is_pooled: bool
    ) -> tuple[Array, Array, Array]:
        """Return the bytes of a tile by `PARTS` for its owner, a reader, and every rank.

        Its rows are among ``rows``.
        """
        work, size, cols = self.workload, self.world_size, len(tile.cols)
        count = len(tile.rows)
        share = use.expected.share(rows, count) if self.hardware else count / use.table.rows
        lookups = use.ids * self.local_batch * share
        requested, updated = lookups, size * lookups
        if self.hardware:
            requested, updated = self._distinct(use, rows, 1, count), self._distinct(use, rows, size, count)
        vectors, distinct = None, requested
        if is_pooled:
            requested = lookups  # every id goes to the owner, which pools bags
            of_bag = use.ids / use.bags if use.bags else 0.0
            vectors = self.local_batch * use.bags * -np.expm1(of_bag * np.log1p(-min(share, 1 - 1e-12)))
        traffic = tile_traffic(
            cols, requested, updated, vectors=vectors, forward=work.forward_codec, backward=work.backward_codec
        )
        one = tile_bytes(use.table, tile) / len(tile.rows)
        record = tile_bytes(use.table, tile, use.moments) / len(tile.rows)
        others = size - 1 - readers
        owner, reader, everyone = np.zeros((3, len(PARTS)))
        owner[LOOKUP] = (others + 1) * requested * (one + 4 * cols)
        reader[LOOKUP] = requested * (one + 4 * cols)
        everyone[POOLING] = 2 * (lookups + requested) * 4 * cols
        if vectors is not None:  # the owner pools, and who asks adds the vectors of a bag
            reader[LOOKUP] = lookups * one + vectors * 4 * cols
            owner[LOOKUP] = (others + 1) * reader[LOOKUP]
            everyone[POOLING] = 2 * (vectors + self.local_batch * use.bags * share) * 4 * cols
            if not work.fused_pooling:  # rows are copied before they are pooled
                reader[LOOKUP] += 2 * lookups * 4 * cols
                owner[LOOKUP] = (others + 1) * reader[LOOKUP]
        if size == 1:  # bags are pooled from the table, and the update sums gradients of occurrences
            owner[LOOKUP], everyone[POOLING] = requested * one + lookups * 4 * cols, 0.0
        everyone[GROUPING] = lookups * SLOT_BYTES
        if vectors is None and self.links is not None and self.links.combines_rows:
            everyone[GROUPING] += requested * SLOT_BYTES  # grouped again by the ranks that combine them
        owner[IDS] = (size - 1) * traffic.ids
        owner[ROWS] = others * traffic.rows
        owner[GRADIENTS] = (size - 1) * traffic.gradients
        arriving = lookups if vectors is not None or size == 1 else requested
        owner[UPDATE] = size * arriving * 4 * cols + 2 * updated * record
        if vectors is not None and not work.fused_pooling:  # the owner groups the ids, and sums gradients by rank
            owner[IDS] += (size - 1) * vectors * SLOT_BYTES  # lengths of bags
            owner[GROUPING] = size * lookups * SLOT_BYTES
            owner[UPDATE] += 2 * size * distinct * 4 * cols
        owner[COPIES] = readers * traffic.copies
        reader[COPIES] = traffic.copies
        owner[SUMS] = (col_parts - 1) * use.row_sums * sums_bytes(cols, updated)
        if tile.tier != "device" and self.hardware:
            cached = rows[: tile.cache_rows]
            missed = updated - (self._distinct(use, cached, size) if cached else 0.0)
            owner[DISK if tile.tier == "disk" else HOST] = 2 * missed * record
        if work.replicas > 1 and self.hardware:
            changed = self._distinct(use, rows, size * work.replicas * work.sync_every, count)
            values = 4 * cols + record - one
            owner[REPLICAS] = 2 * (work.replicas - 1) / work.replicas * changed * values / work.sync_every
        return owner, reader, everyone

    def _distinct(self, use: TableUse, rows: range, batches: int, count: int | None = None) -> float:
        """Return the expected distinct rows in the batches of a number of ranks."""
        return use.expected.distinct(rows, use.ids * self.local_batch * batches, count)

    # -- prices ----------------------------------------------------------------------------------------------------

    def _row_wire_s(self, use: TableUse, rows: range, count: int) -> float:
        """Return the seconds per byte of ids, rows and gradients of ``count`` of these rows."""
        links = self.links
        if links is None or not links.combines_rows:
            return self.wire_s
        of_ranks, of_node = self._rows_of_node(use, rows, count)
        return links.byte_s("shards", of_node / of_ranks if of_ranks else 1.0)

    def _rows_of_node(self, use: TableUse, rows: range, count: int | None = None) -> tuple[float, float]:
        """Return the sum of the distinct rows of each rank of a node, and the distinct rows of the node."""
        node = self.workload.ranks_per_node or 1
        return node * self._distinct(use, rows, 1, count), self._distinct(use, rows, node, count)

    def combined_share(self, pooled: Collection[str]) -> float | None:
        """Return the share of exchanged bytes that remains if nodes combine rows, or None if they do not.

        For example, it is 1/8 if the 8 ranks of a node need the same rows. Tables that send ``pooled`` vectors have
        share 1.
        """
        if self.links is None or not self.links.combines_rows:
            return None
        sums = np.zeros(2)
        for use in self.workload.uses:
            of_ranks, of_node = self._rows_of_node(use, range(use.table.rows))
            sums += np.array([of_ranks, of_ranks if use.table.name in pooled else of_node]) * use.table.dim
        return float(sums[1] / sums[0]) if sums[0] else 1.0

    def dims_of_rows(self, pooled: Collection[str]) -> int:
        """Return the number of dims with tables that send rows instead of ``pooled`` vectors."""
        return len({use.table.dim for use in self.workload.uses if use.table.name not in pooled})

    def _prices(self, use: TableUse, tile: Tile, wire_s: float) -> Array:
        """Return the seconds, or ids × columns, per byte of each of `PARTS`.

        ``wire_s`` are the seconds per byte of ids, rows and gradients.
        """
        cols = len(tile.cols)
        one = tile_bytes(use.table, tile) / len(tile.rows)
        record = tile_bytes(use.table, tile, use.moments) / len(tile.rows)
        found = np.zeros(len(PARTS))
        if self.hardware is None:
            found[LOOKUP] = LOOKUP_SHARE * cols / (one + 4 * cols)
            found[UPDATE] = (1 - LOOKUP_SHARE) * cols / (4 * cols + 2 * record)
            return found
        here, ranks = self.hardware, self.ranks_on_node
        slower = self.cores_share / (interpolated(here.efficiency, ranks) if here.efficiency else 1.0)
        found[LOOKUP] = slower / here.gather_rate(one)
        found[POOLING] = slower / here.gather_rate(4 * cols)
        found[UPDATE] = slower / here.scatter_rate(record)
        found[GROUPING] = here.overhead("id", ranks) / SLOT_BYTES
        found[[COPIES, SUMS]] = self.wire_s
        found[[IDS, ROWS, GRADIENTS]] = wire_s
        forward, backward = self.workload.forward_codec, self.workload.backward_codec
        found[ROWS] += here.overhead(forward, ranks) * cols / encoded_bytes(forward, cols)
        found[GRADIENTS] += here.overhead(backward, ranks) * cols / encoded_bytes(backward, cols)
        found[HOST] = max(1 / here.host_link, ranks / here.host_stream)
        if not here.cores_shared:  # cores copy rows to page-locked memory, which the device copies
            found[HOST] = 1 / here.host_link + 2 * ranks / here.host_stream
        found[DISK] = ranks / here.disk_read if here.disk_read else 0.0
        if here.cores_shared and tile.tier == "host" and not tile.cache_rows and use.table.dtype == "fp32":
            found[HOST] = 0.0  # read and updated in place, like device memory
        for part, row in ((HOST, "host_row"), (DISK, "disk_row")):
            if row in here.overheads:  # per byte that is counted for a row
                found[part] = here.overhead(row, ranks) / (2 * record)
        found[REPLICAS] = self.replica_s + here.overhead("average_row", ranks) / (4 * cols + record - one)
        return found

    def _wire_seconds(self, links: Links) -> tuple[float, float]:
        """Return the seconds per byte of an all-to-all in a group, and of an exchange between replicas."""
        here, of_replicas = links.hardware, links.byte_s("replicas")
        if self.world_size == 1:
            return 0.0, of_replicas
        seconds = links.byte_s("shards")
        curve = here.curve_of(here.all_to_all, self.world_size, beyond=links.near_share("shards") < 1)
        if curve and not links.in_two_hops:
            rows = sum(self._distinct(use, range(use.table.rows), 1) * 4 * use.table.dim for use in self.workload.uses)
            size = max(rows / self.world_size, 1.0)
            seconds = 1 / interpolated(curve, size)
            if "step" in here.overheads:  # these include the fixed part of every exchange
                seconds = max(seconds - here.message_s / size, 1 / max(curve.values()))
        return seconds, of_replicas
