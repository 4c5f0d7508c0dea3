"""Hash what a checkpoint holds, so that two runs can be compared whatever their plans, tiers and ranks.

The hash of a table is of the rows that training has changed, with their numbers and moments. Untouched rows are left
out, because some plans store them and others compute them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from hotbed.checkpoint.convert import rows_in_memory
from hotbed.checkpoint.differential import opened
from hotbed.checkpoint.load import read_states
from hotbed.checkpoint.manifest import SavedTable, read_manifest
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tables import check_tables, layers, load_tile
from hotbed.checkpoint.tensor_files import TensorFiles, bytes_of
from hotbed.embed import LocalTile
from hotbed.embed.arena import Arena, Shard, form
from hotbed.optim import Moment
from hotbed.store import LazyStore, Storage

_ROWS_AT_ONCE = 4096


def content_hashes(
    path: str | Path | Directory, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, str]:
    """Return the SHA-256 of each table and of the parameters of a checkpoint, with bounded memory.

    The key ``parameters`` is for all tensors of the part ``model``; states of dense optimizers and random numbers are
    not hashed. ``progress`` is called with rows done and all rows.
    """
    place = directory(path)
    manifest = read_manifest(place)
    found: dict[str, str] = {}
    total, before = sum(table.spec.rows for table in manifest.tables.values()), 0
    with opened(place, manifest) as files:
        check_tables(manifest.tables.values(), files)
        for name, table in sorted(manifest.tables.items()):
            start = before
            found[name] = _of_table(table, files, lambda done, start=start: progress(start + done, total))
            before += table.spec.rows
        if "model" in manifest.parts:
            state = cast("dict[str, object]", read_states(manifest, ["model"], files)["model"])
            digest = hashlib.sha256()
            for key, value in sorted(state.items()):
                if isinstance(value, Tensor):
                    digest.update(json.dumps([key, str(value.dtype), list(value.shape)]).encode())
                    digest.update(bytes_of(value.contiguous()))
            found["parameters"] = digest.hexdigest()
    return found


def _of_table(table: SavedTable, files: TensorFiles, progress: Callable[[int], None]) -> str:
    """Hash what a table is, and numbers, stored bits and moments of its changed rows, each kind by itself."""
    spec = table.spec
    digests: dict[str, Any] = {}
    for rows in _windows(table, files):
        # A store that keeps only rows that differ from their initial values.
        shard = Shard(spec, rows, range(spec.dim))
        arena = Arena([shard], spec.dim, seed=0, device=torch.device("cpu"), backend="auto", storage=Storage("host"))
        store = arena.store
        assert isinstance(store, LazyStore)
        for name, moment in table.moments.items():
            store.add_moment(Moment(name, moment.per))
        tile = LocalTile(shard, arena, 0, True)
        load_tile(tile, table, table.moments, files)
        for slots in store.keys(0).chunks(_ROWS_AT_ONCE):
            found = {"keys": rows.start + slots, **tile.named(store.stored(slots))}
            for name, array in found.items():
                if len(array):
                    digests.setdefault(name, hashlib.sha256()).update(bytes_of(array.contiguous()))
        progress(rows.stop)
    whole = {name: digest.hexdigest() for name, digest in sorted(digests.items())}
    moments = {name: [moment.per, moment.initial] for name, moment in sorted(table.moments.items())}
    described = [spec.rows, spec.dim, *form(spec), spec.init_seed, spec.init_version, spec.bound, moments, whole]
    return hashlib.sha256(json.dumps(described).encode()).hexdigest()


def _windows(table: SavedTable, files: TensorFiles) -> Iterator[range]:
    """Yield ranges of rows whose stored rows fit into memory; no range without stored rows."""
    most, rows = rows_in_memory(table, table.spec.dim), table.spec.rows
    tiles = [(tile, of_files) for of, of_files in layers(table, files) for tile in of.tiles]
    if not all(tile.keyed for tile, _ in tiles):
        yield from (range(first, min(first + most, rows)) for first in range(0, rows, most))
        return
    first = 0
    while first < rows:
        begin, end = rows, rows
        for tile, of_files in tiles:
            key = f"{tile.key}/keys"
            at, count = of_files.count_below(tile.file, key, first), of_files.find(tile.file, key).shape[0]
            if at < count:
                begin = min(begin, int(of_files.read_rows(tile.file, key, range(at, at + 1))))
            if at + most < count:
                end = min(end, int(of_files.read_rows(tile.file, key, range(at + most, at + most + 1))))
        if begin < rows:
            yield range(begin, end)
        first = end
