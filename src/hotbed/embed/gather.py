"""Copy rows from owners to other ranks: whole tables for states, and updated rows for ranks with copies.

`gather_raw` and `gather_moment` gather whole tables tile by tile. `scatter_raw` and `scatter_moment` write them back
without an exchange. Training calls only `push_rows`, if the plan has copies of rows: after an update, owners send the
updated rows to the ranks with copies.
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


class ShardedTile:
    """A tile of a table, its owner, and its shards in arenas of this rank.

    ``owned`` and ``copied`` are an arena and the number of the shard in it, if this rank owns the tile or has a copy.
    """

    def __init__(
        self, shard: Shard, owner: int, owned: tuple[Arena, int] | None, copied: tuple[Arena, int] | None
    ) -> None:
        self.shard, self.owner, self.owned, self.copied = shard, owner, owned, copied


def gather_raw(table: Table, tiles: Sequence[ShardedTile], link: Link, device: torch.device) -> dict[str, Tensor]:
    """Gather the stored arrays of a table on every rank, see `RowStore.raw`."""
    whole = {name: torch.empty(t.shape, dtype=t.dtype, device=device) for name, t in raw_shapes(table).items()}
    for tile in tiles:
        own = None if tile.owned is None else _read_raw(*tile.owned, tile.shard)
        for name, region in _select_regions(whole, tile.shard).items():
            values = region if own is None else own[name]
            region.copy_(_broadcast(f"table '{table.name}'", values, tile.owner, link))
    return whole


def scatter_raw(whole: Mapping[str, Tensor], tiles: Sequence[ShardedTile]) -> None:
    """Overwrite the tiles of a table on this rank."""
    for tile in tiles:
        regions = _select_regions(whole, tile.shard)
        for position in (tile.owned, tile.copied):
            if position is not None:
                arena, number = position
                arena.store.load_raw(number, _own_names(tile.shard, regions))


def gather_moment(name: str, whole: Tensor, tiles: Sequence[ShardedTile], link: Link) -> Tensor:
    """Gather a moment of a table ``[R]`` or ``[R, D]`` on every rank, into ``whole``.

    If a row is cut into column shards, each owner has a copy of its per-row moment. These copies are equal, except with
    ``per_shard_statistics``. Then the result is the copy of the last owner.
    """
    for tile in tiles:
        region = _select_values(whole, tile.shard)
        own = region if tile.owned is None else tile.owned[0].store.moment(tile.owned[1], name)
        region.copy_(_broadcast(f"moment '{name}'", own, tile.owner, link))
    return whole


def scatter_moment(name: str, whole: Tensor, tiles: Sequence[ShardedTile]) -> None:
    """Overwrite a moment in the tiles of a table that this rank owns."""
    for tile in tiles:
        if tile.owned is not None:
            arena, number = tile.owned
            arena.store.load_moment(number, name, _select_values(whole, tile.shard))


def _select_values(whole: Tensor, shard: Shard) -> Tensor:
    """Return a view of the shard's part of a tensor of the whole table ``[R]`` or ``[R, D]``."""
    rows = whole[shard.rows.start : shard.rows.stop : shard.rows.step]
    return rows if whole.dim() == 1 else rows[:, shard.cols.start : shard.cols.stop]


def _read_raw(arena: Arena, number: int, shard: Shard) -> dict[str, Tensor]:
    """Return `RowStore.raw` of a shard with the array names of its table."""
    raw = arena.store.raw(number)
    return {"fp32_weight": raw["weight"]} if _is_prefix(shard) else raw


def _own_names(shard: Shard, raw: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return arrays of a table with the array names of the shard's store."""
    return {"weight": raw["fp32_weight"]} if _is_prefix(shard) else raw


def _is_prefix(shard: Shard) -> bool:
    """Return whether a shard has only the float32 rows of a table that also has low-precision rows."""
    return shard.fp32_rows == len(shard.rows) and set(raw_shapes(shard.table)) != {"weight"}


def _select_regions(whole: Mapping[str, Tensor], shard: Shard) -> dict[str, Tensor]:
    """Return views of the shard's regions in the arrays of the whole table. Empty regions are omitted."""
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
    """Broadcast the owner's values as bytes, because Gloo does not support fp8. ``values`` sets the shape."""
    sent = torch.empty(values.shape, dtype=values.dtype, device=values.device).copy_(values)
    link.broadcast(what, sent.view(torch.uint8), owner).wait()
    return sent


def push_rows(
    locator: Locator, arenas: Sequence[Arena], copies: Sequence[Arena], updated: Mapping[Arena, Tensor], link: Link
) -> None:
    """Send updated rows to the ranks that have copies of them. All ranks must call this.

    ``updated`` has the updated slots by arena, possibly with duplicates and padding. For example, rank 0 owns rows
    0 … 4, and ranks 1 and 2 have copies. After an update of slots 3, 1 and 3, rank 0 sends both ranks the rows of slots
    1 and 3 and their slots in the arena of copies.
    """
    pushes = [_Push(locator, arena_type, arena, updated.get(arena)) for arena_type, arena in enumerate(arenas)]
    to = torch.stack([push.of_readers for push in pushes], dim=1)
    ones = [1] * link.size
    received = link.all_to_all("numbers of updated rows", to, ones, ones).wait()
    send_counts, recv_counts = (
        to_host(torch.stack([to, received])).transpose(1, 2).tolist()
    )  # one synchronization for both
    for arena_type, push in enumerate(pushes):
        counts = send_counts[arena_type]
        here, there = push.slots(sum(counts))
        slots = link.all_to_all("updated rows' places", there, counts, recv_counts[arena_type])
        rows = link.all_to_all(
            "updated rows", arenas[arena_type].store.read(here, use="update"), counts, recv_counts[arena_type]
        )
        copies[arena_type].store.write(slots.wait(), rows.wait())


class _Push:
    """Updated rows of an arena, and the number of rows for each rank ``[W]``, computed without synchronization."""

    def __init__(self, locator: Locator, arena_type: int, arena: Arena, updated: Tensor | None) -> None:
        copies = locator.copies_of_owned[arena_type]  # [W, shards + 1]
        none = torch.empty(0, dtype=torch.int64, device=copies.device)
        self._slots = self._within = self._at = none
        self._first_there = none.view(len(copies), 0)
        self.of_readers = torch.zeros(len(copies), dtype=torch.int64, device=copies.device)
        if updated is None or copies.shape[1] == 1 or not len(updated):
            return
        self._slots = updated.sort().values
        is_first = torch.ones_like(self._slots, dtype=torch.bool)
        torch.ne(self._slots[1:], self._slots[:-1], out=is_first[1:])
        shard = torch.searchsorted(arena.bounds, self._slots, right=True) - 1  # padding is behind the last shard
        self._within = self._slots - arena.bounds[shard]
        self._first_there = copies[:, shard]  # [W, n]
        sent = (self._first_there >= 0) & is_first
        on_host = sent.device.type == "cpu"
        self._at = sent.flatten().nonzero()[:, 0] if on_host else padded_positions(sent.flatten())[0]
        self.of_readers = sent.sum(1)

    def slots(self, count: int) -> tuple[Tensor, Tensor]:
        """Return own and remote slots of the ``count`` rows to send, sorted by receiving rank."""
        at = self._at[:count]
        which = at % max(len(self._slots), 1)
        return self._slots[which], self._first_there.flatten()[at] + self._within[which]
