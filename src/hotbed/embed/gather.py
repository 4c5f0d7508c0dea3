"""Copy rows from their owners to other ranks: whole tables for states and tests, updated rows for their readers.

Whole tables are gathered tile by tile (`gathered_raw`, `gathered_moment`) and scattered without any exchange
(`scatter_raw`, `scatter_moment`). In training only `push_rows` is called, where a plan has readers: after an update,
the owners of rows send them to the ranks that have copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.arena import Arena, Shard, raw_shapes
from hotbed.embed.shard_routing import Locator
from hotbed.ops.layout import SCALE_BLOCK
from hotbed.specs import Table
from hotbed.store.device_selection import padded_positions
from hotbed.store.memory import to_host


class PlacedTile:
    """A tile of a table, its owner, and its shard of this rank's arenas.

    ``owned`` and ``copied`` are the arena and the number of the shard in it, where this rank owns or reads the tile.
    """

    def __init__(
        self, shard: Shard, owner: int, owned: tuple[Arena, int] | None, copied: tuple[Arena, int] | None
    ) -> None:
        self.shard, self.owner, self.owned, self.copied = shard, owner, owned, copied


def gathered_raw(table: Table, tiles: Sequence[PlacedTile], link: Link, device: torch.device) -> dict[str, Tensor]:
    """Gather what the rows of a table are stored as, on every rank; see `RowStore.raw`."""
    whole = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in raw_shapes(table).items()}
    for tile in tiles:
        own = None if tile.owned is None else _raw(*tile.owned, tile.shard)
        for name, region in _regions(whole, tile.shard).items():
            values = region if own is None else own[name]
            region.copy_(_broadcast(f"table '{table.name}'", values, tile.owner, link))
    return whole


def scatter_raw(whole: Mapping[str, Tensor], tiles: Sequence[PlacedTile]) -> None:
    """Overwrite the tiles of a table that are on this rank."""
    for tile in tiles:
        regions = _regions(whole, tile.shard)
        for place in (tile.owned, tile.copied):
            if place is not None:
                arena, number = place
                arena.store.load_raw(number, _own_names(tile.shard, regions))


def gathered_moment(name: str, whole: Tensor, tiles: Sequence[PlacedTile], link: Link) -> Tensor:
    """Gather a moment of a table ``[R]`` or ``[R, D]`` on every rank, into ``whole``.

    Of a moment per row whose row is cut into columns, each owner has its own; they are equal, unless
    `per_shard_statistics` lets them differ, and then the last one's is taken.
    """
    for tile in tiles:
        region = _cells(whole, tile.shard)
        own = region if tile.owned is None else tile.owned[0].store.moment(tile.owned[1], name)
        region.copy_(_broadcast(f"moment '{name}'", own, tile.owner, link))
    return whole


def scatter_moment(name: str, whole: Tensor, tiles: Sequence[PlacedTile]) -> None:
    """Overwrite a moment of the tiles of a table that this rank owns."""
    for tile in tiles:
        if tile.owned is not None:
            arena, number = tile.owned
            arena.store.load_moment(number, name, _cells(whole, tile.shard))


def _cells(whole: Tensor, shard: Shard) -> Tensor:
    """Select the values of a shard from those of its table ``[R]`` or ``[R, D]``; a view."""
    rows = whole[shard.rows.start : shard.rows.stop : shard.rows.step]
    return rows if whole.dim() == 1 else rows[:, shard.cols.start : shard.cols.stop]


def _raw(arena: Arena, number: int, shard: Shard) -> dict[str, Tensor]:
    """Return `RowStore.raw` of a shard, with the names that its table has."""
    raw = arena.store.raw(number)
    return {"fp32_weight": raw["weight"]} if _is_prefix(shard) else raw


def _own_names(shard: Shard, raw: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return raw arrays of a table with the names that the shard's store has."""
    return {"weight": raw["fp32_weight"]} if _is_prefix(shard) else raw


def _is_prefix(shard: Shard) -> bool:
    """Say whether all rows of a shard are among the float32 rows of a table that has others."""
    return shard.fp32_rows == len(shard.rows) and set(raw_shapes(shard.table)) != {"weight"}


def _regions(whole: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """Select the regions of a whole table's raw tensors that a shard holds, those without rows left out; views."""
    table, rows, cols = shard.table, shard.rows, shard.cols
    fp32_rows = table.rows if "fp32_weight" not in whole and whole["weight"].dtype == torch.float32 else table.fp32_rows
    wide = range(rows.start, min(rows.stop, fp32_rows), rows.step)
    narrow = rows[len(wide) :]
    found: dict[str, Tensor] = {}
    for name, tensor in whole.items():
        region = wide if name == "fp32_weight" or fp32_rows == table.rows else narrow
        if not len(region):
            continue
        first = 0 if region is wide else table.fp32_rows
        columns = slice(cols.start, cols.stop)
        if name == "exponents":
            columns = slice(cols.start // SCALE_BLOCK, -(-cols.stop // SCALE_BLOCK))
        found[name] = tensor[region.start - first : region[-1] + 1 - first : region.step, columns]
    return found


def _broadcast(what: str, values: Tensor, owner: int, link: Link) -> Tensor:
    """Broadcast one rank's values, whose shape the others have; as bytes, because Gloo knows no fp8."""
    sent = torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)
    link.broadcast(what, sent.view(torch.uint8), owner).wait()
    return sent


def push_rows(
    locator: Locator, arenas: Sequence[Arena], copies: Sequence[Arena], touched: Mapping[Arena, Tensor], link: Link
) -> None:
    """Send updated rows to the ranks that have copies of them; all ranks must call this.

    Of a table whose rows 0 … 4 rank 0 owns and ranks 1 and 2 read, a step updates slots 3, 1 and 3: rank 0 sends both
    the rows of slots 1 and 3, and where these are among the reader's copies. ``touched`` has the updated slots by
    arena; a slot may occur more than once.
    """
    messages = [_Message(locator, kind, arena, touched.get(arena)) for kind, arena in enumerate(arenas)]
    to = torch.stack([message.of_readers for message in messages], dim=1)
    ones = [1] * link.size
    received = link.all_to_all("numbers of updated rows", to, ones, ones).wait()
    send_counts, recv_counts = to_host(torch.stack([to, received])).transpose(1, 2).tolist()  # one wait for both
    for kind, message in enumerate(messages):
        counts = send_counts[kind]
        here, there = message.slots(sum(counts))
        slots = link.all_to_all("updated rows' places", there, counts, recv_counts[kind])
        rows = link.all_to_all("updated rows", arenas[kind].store.read(here, use="update"), counts, recv_counts[kind])
        copies[kind].store.write(slots.wait(), rows.wait())


class _Message:
    """Updated rows of an arena, and the number that each rank reads ``[W]``, found without waiting for a device."""

    def __init__(self, locator: Locator, kind: int, arena: Arena, touched: Tensor | None) -> None:
        copies = locator.copies_of_owned[kind]  # [W, shards]
        none = torch.empty(0, dtype=torch.int64, device=copies.device)
        self._slots = self._within = self._at = none
        self._first_there = none.view(len(copies), 0)
        self.of_readers = torch.zeros(len(copies), dtype=torch.int64, device=copies.device)
        if touched is None or not copies.shape[1] or not len(touched):
            return
        self._slots = touched.sort().values
        is_first = torch.ones_like(self._slots, dtype=torch.bool)
        torch.ne(self._slots[1:], self._slots[:-1], out=is_first[1:])
        shard, self._within = arena.locate(self._slots)
        self._first_there = copies[:, shard]  # [W, n]
        sent = (self._first_there >= 0) & is_first
        on_host = sent.device.type == "cpu"
        self._at = sent.flatten().nonzero()[:, 0] if on_host else padded_positions(sent.flatten())[0]
        self.of_readers = sent.sum(1)

    def slots(self, count: int) -> tuple[Tensor, Tensor]:
        """List the slots here and there of the rows that are sent, ``count`` in all, by rising reader."""
        at = self._at[:count]
        which = at % max(len(self._slots), 1)
        return self._slots[which], self._first_there.flatten()[at] + self._within[which]
