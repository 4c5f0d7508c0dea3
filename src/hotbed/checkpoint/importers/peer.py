"""What an importer finds, `PeerModel`, and a checkpoint made of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.importers.arrays import PeerArray
from hotbed.checkpoint.making import making
from hotbed.checkpoint.manifest import MANIFEST, Manifest, SavedTable
from hotbed.checkpoint.state import Tensors, plain
from hotbed.checkpoint.storage import Directory
from hotbed.checkpoint.tensors import Array
from hotbed.checkpoint.writing import Piece, rows_per_piece
from hotbed.errors import CheckpointError
from hotbed.specs import Table

Peer = Literal["nvidia_dlrm", "tf2", "torchrec", "facebook_dlrm", "embedding_bag"]


class PeerModel(NamedTuple):
    """A model of another library.

    Attributes
    ----------
    tables
        Rows ``[R, D]`` by table.
    dense
        All else, by the names of hotbed's model.
    """

    tables: Mapping[str, PeerArray]
    dense: Mapping[str, Tensor]


def named(arrays: Sequence[PeerArray], names: Sequence[str] | None) -> dict[str, PeerArray]:
    """Tables by their names; by default they are called ``cat_0``, ``cat_1``, ….

    Raises
    ------
    CheckpointError
        If there are as many names as tables, or a name comes twice.
    """
    given = [f"cat_{i}" for i in range(len(arrays))] if names is None else list(names)
    if len(given) != len(arrays):
        raise CheckpointError(f"names has {len(given)} entries, but there are {len(arrays)} tables; name each once")
    for name in given:
        if not name or given.count(name) > 1:
            raise CheckpointError(f"names has '{name}' {given.count(name)} times; every table needs its own name")
    return dict(zip(given, arrays, strict=True))


def write_peer(
    model: PeerModel, target: str | Path | Directory, collection: str, progress: Callable[[int, int], None]
) -> Manifest:
    """Make a checkpoint of a model; see `hotbed.checkpoint.importers.import_checkpoint`."""
    if not model.tables:
        raise CheckpointError("there are no tables to import; say what wrote it, and which weights are tables")
    tensors: Tensors = {}
    states = {"model": plain(model.dense, tensors, "")}
    saved: dict[str, SavedTable] = {}
    for name, rows in model.tables.items():
        table = Table(name, rows.shape[0], rows.shape[1])
        saved[f"{collection}.{name}"] = SavedTable(replace(table, init_seed=table.seed(0), init_bound=table.bound))
    with making(target) as (place, writer):
        if tensors:
            writer.write("model.safetensors", {key: Array.of(tensor) for key, tensor in tensors.values()})
        tiles = writer.write_pieces(_pieces(model, collection, progress), "tables")
        tables = {name: replace(table, tiles=tuple(tiles[name])) for name, table in saved.items()}
        manifest = Manifest(parts=states, tables=tables, files=writer.entries())
        place.write(MANIFEST, manifest.to_json())
    return manifest


def _pieces(model: PeerModel, collection: str, progress: Callable[[int, int], None]) -> Iterator[Piece]:
    total = sum(rows.shape[0] * rows.shape[1] for rows in model.tables.values())
    done = 0

    def part(array: PeerArray, first: int, last: int) -> Array:
        def rows(start: int, stop: int) -> Tensor:
            nonlocal done
            done += (stop - start) * array.shape[1]
            progress(done, total)
            return array.rows(first + start, first + stop).to(torch.float32)

        return Array(torch.float32, (last - first, array.shape[1]), rows)

    for name, array in model.tables.items():
        count, dim = array.shape
        step = rows_per_piece(4 * dim)
        for first in range(0, count, step):
            last = min(first + step, count)
            yield Piece(f"{collection}.{name}", range(first, last), range(dim), {"weight": part(array, first, last)})
