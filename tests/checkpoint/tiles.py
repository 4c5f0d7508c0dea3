"""Tables in tiles without processes: what a checkpoint saves and loads of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.contents import ModelTable, owned_tiles
from hotbed.checkpoint.differential import open_with_bases
from hotbed.checkpoint.manifest import Base, Manifest, SavedMoment, SavedTable, read_manifest
from hotbed.checkpoint.save import Saving
from hotbed.checkpoint.saved_tables import check_tables, load_tile
from hotbed.checkpoint.storage import directory
from hotbed.checkpoint.tensor_files import make_directory
from hotbed.embed import LocalTile
from hotbed.embed.arena import Arena, Shard
from hotbed.optim import Moment
from hotbed.specs import Table

Rectangles = Sequence[tuple[range, range]]
MOMENTS = (Moment("sum", "row"), Moment("m", "element"))
SAVED_MOMENTS = {
    "sum": SavedMoment(per="row", initial=0.5, optimizer="sparse", rule="any"),
    "m": SavedMoment(per="element", initial=-0.25, optimizer="sparse", rule="any"),
}


class Rank(NamedTuple):
    """Stands for a rank in what a checkpoint asks of a link."""

    rank: int
    size: int


class Tiles:
    """A table in tiles, each in an arena of its own; stands for a collection."""

    def __init__(self, table: Table, rectangles: Rectangles, *, seed: int = 0) -> None:
        self.table, self.seed = table, seed
        self.tiles: list[LocalTile] = []
        for rows, cols in rectangles:
            piece = Shard(table, rows, cols)
            arena = Arena([piece], len(cols), seed=seed, device=torch.device("cpu"), backend="auto")
            for moment in MOMENTS:
                arena.store.add_moment(moment)
                arena.store.fill(0, moment.name, SAVED_MOMENTS[moment.name].initial)
            self.tiles.append(LocalTile(piece, arena, 0, True))

    is_first_replica = True

    def local_tiles(self, _: str) -> list[LocalTile]:
        return self.tiles

    @property
    def part(self) -> ModelTable:
        spec = replace(self.table, init_seed=self.table.seed(self.seed), init_bound=self.table.bound)
        return ModelTable(self, self.table, SavedTable.of(spec, SAVED_MOMENTS))  # type: ignore[arg-type]

    def fill(self, seed: int, rows: Sequence[int] | None = None) -> None:
        """Give rows (all by default) random values and moments that do not depend on the tiles."""
        draw = torch.Generator().manual_seed(seed)
        shape = self.table.rows, self.table.dim
        values, moment = torch.randn(shape, generator=draw), torch.randn(shape, generator=draw)
        sums = torch.rand(self.table.rows, generator=draw)
        for held in self.tiles:
            store, own, cols = held.arena.store, held.shard.rows, held.shard.cols
            at = torch.tensor([i for i, row in enumerate(own) if rows is None or row in rows], dtype=torch.int64)
            picked = torch.tensor(list(own), dtype=torch.int64)[at]
            if len(at):
                store.write(at, values[picked, cols.start : cols.stop].contiguous())
                store.write(at, sums[picked], "sum")
                store.write(at, moment[picked, cols.start : cols.stop].contiguous(), "m")

    def values(self) -> dict[str, Tensor]:
        """Rows and moments of the whole table, as float32."""
        whole = torch.full((self.table.rows, self.table.dim), torch.nan)
        found = {"rows": whole, "m": whole.clone(), "sum": torch.full((self.table.rows,), torch.nan)}
        for held in self.tiles:
            rows, cols = held.shard.rows, held.shard.cols
            at = slice(rows.start, rows[-1] + 1, rows.step)
            slots = held.arena.slots(0)
            found["rows"][at, cols.start : cols.stop] = held.arena.store.read(slots)
            found["m"][at, cols.start : cols.stop] = held.arena.store.read(slots, "m")
            found["sum"][at] = held.arena.store.read(slots, "sum")
        return found

    def bits(self) -> dict[str, bytes]:
        """Everything in the tiles as it is stored."""
        found: dict[str, bytes] = {}
        for i, held in enumerate(self.tiles):
            arrays = held.arena.store.arrays()
            for name, extent in held.extents().items():
                part = arrays[extent.array][extent.start : extent.stop]
                found[f"{i}.{name}"] = part.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return found


def save(path: Path, tiles: Tiles, *, ranks: int = 1, base: str | None = None) -> Manifest:
    """Save the tiles, given to some ranks in turn; as a difference to a base beside it, if they are tracked since."""
    place = directory(path)
    of_base = None if base is None else Base(name=base, sha256=read_manifest(place.sibling(base)).sha256)
    token = make_directory(place)
    for rank in reversed(range(ranks)):
        own = Tiles(tiles.table, [], seed=tiles.seed)
        own.tiles = tiles.tiles[rank::ranks]
        owned = owned_tiles({"t": own.part})
        manifest = Manifest(tables={"t": own.part.saved}, base=of_base)
        stores = [tile.arena.store for tile in own.tiles]
        changed = None if base is None else {s: s.changes.slots() for s in stores if s.changes is not None}
        link: Any = Rank(rank, ranks)
        saving = Saving(place, token, manifest, owned, {}, link, None, None, changed)
        saving.run()
        if saving._error is not None:
            raise saving._error
    return read_manifest(path)


def load(path: Path, tiles: Tiles) -> None:
    """Load into the tiles."""
    manifest = read_manifest(path)
    with open_with_bases(directory(path), manifest) as files:
        check_tables(manifest.tables.values(), files)
        for held in tiles.tiles:
            load_tile(held, manifest.tables["t"], [m.name for m in MOMENTS], files)
