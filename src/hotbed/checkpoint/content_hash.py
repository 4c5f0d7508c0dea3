"""Hash what a checkpoint holds, so that two runs can be compared whatever their plans, tiers and ranks.

The hash of a table is of the rows that training has changed, with their numbers and moments. Untouched rows are left
out, because some plans store them and others compute them again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from hotbed.checkpoint.convert import Rectangle, changed_rows, read_rectangle, rows_in_memory
from hotbed.checkpoint.differential import opened
from hotbed.checkpoint.load import read_states
from hotbed.checkpoint.manifest import SavedTable, read_manifest
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tables import check_tables, layers
from hotbed.checkpoint.tensor_files import TensorFiles, bytes_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def content_hashes(
    path: str | Path | Directory, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, str]:
    """Return the SHA-256 of each table and of the parameters of a checkpoint, with bounded memory.

    Parameters
    ----------
    path
        A checkpoint.
    progress
        Called with rows done and all rows.

    Returns
    -------
    dict
        By name of the table, and ``parameters`` for all tensors of the part ``model``.

    Raises
    ------
    CheckpointError
        If it is no checkpoint or damaged.
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
    """Hash numbers, stored bits and moments of the changed rows, each by itself so that windows do not matter."""
    digests = {"keys": hashlib.sha256()}
    for rows in _windows(table, files):
        tile, arrays = read_rectangle(Rectangle(rows, range(table.spec.dim), table), table.spec, files)
        changed = changed_rows(tile, arrays, table)
        digests["keys"].update(bytes_of((changed.nonzero()[:, 0] + rows.start).contiguous()))
        for name, array in arrays.items():
            of = slice(0, len(array)) if name == "fp32_weight" else slice(len(changed) - len(array), None)
            bits = array.view(_BITS[array.element_size()])[changed[of]]
            digests.setdefault(name, hashlib.sha256()).update(bytes_of(bits.contiguous()))
        progress(rows.stop)
    whole = {name: digest.hexdigest() for name, digest in sorted(digests.items())}
    return hashlib.sha256(json.dumps([table.spec.rows, table.spec.dim, whole]).encode()).hexdigest()


def _windows(table: SavedTable, files: TensorFiles) -> Iterator[range]:
    """Yield ranges of rows that fit into memory, without those in which no row can have changed."""
    step, rows = rows_in_memory(table, table.spec.dim), table.spec.rows
    tiles = [(tile, of_files) for of, of_files in layers(table, files) for tile in of.tiles]
    is_keyed = all(tile.keyed for tile, _ in tiles)
    first = 0
    while first < rows:
        if is_keyed:
            following: list[int] = []
            for tile, of_files in tiles:
                key = f"{tile.key}/keys"
                at = of_files.count_below(tile.file, key, first)
                if at < of_files.find(tile.file, key).shape[0]:
                    following.append(int(of_files.read_rows(tile.file, key, range(at, at + 1))))
            if not following:
                return
            first = min(following)
        yield range(first, min(first + step, rows))
        first += step
