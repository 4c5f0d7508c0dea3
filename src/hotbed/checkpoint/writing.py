"""Tables and states into files, for all that makes checkpoints: saving, converting, importing.

New directories: marked as unfinished until all is there, and never in the place of anything else.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hotbed.checkpoint.blocks import BlockWriters, Entry
from hotbed.checkpoint.manifest import MANIFEST, SavedTile
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tensors import Array, write_arrays
from hotbed.errors import CheckpointError

FILE_BYTES = 1 << 30
"""Most bytes of a file of tables."""


class Chunk(NamedTuple):
    """A rectangle of a table as a group of arrays of a file; `SavedTile` says what the arrays are called.

    Attributes
    ----------
    table
        Its name in the manifest.
    rows, cols
        The rectangle.
    arrays
        By name. Where there is an array ``keys``, the others hold only the rows that it names.
    """

    table: str
    rows: range
    cols: range
    arrays: Mapping[str, Array]


class FileWriter:
    """Writes the files of a checkpoint, one after the other; use it as a context.

    Parameters
    ----------
    place
        The directory.
    """

    def __init__(self, place: Directory) -> None:
        self._place = place
        self._threads = BlockWriters()
        self._entries: dict[str, Future[Entry]] = {}

    def write(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write a file of arrays."""
        self._entries[name] = write_arrays(self._place, name, arrays, self._threads)

    def write_chunks(
        self, pieces: Iterable[Chunk], prefix: str, limit: int | None = None
    ) -> dict[str, list[SavedTile]]:
        """Write pieces of tables into files ``PREFIX-NUMBER.safetensors``; by table, where each piece is.

        A file is written as soon as the next piece would be too much for it: by more than ``limit`` bytes, or
        `FILE_BYTES`.
        """
        keyed = ((f"{piece.table}/{i}", piece) for i, piece in enumerate(pieces))
        tiles: dict[str, list[SavedTile]] = {}
        for number, group in enumerate(_fill_files(keyed, FILE_BYTES if limit is None else limit)):
            file = f"{prefix}-{number:05d}.safetensors"
            for key, piece in group.items():
                tile = SavedTile(piece.rows, piece.cols, file, key, "keys" in piece.arrays)
                tiles.setdefault(piece.table, []).append(tile)
            self.write(file, {f"{key}/{name}": a for key, piece in group.items() for name, a in piece.arrays.items()})
        return tiles

    def entries(self) -> dict[str, Entry]:
        """What the manifest says of the files, once all of them are safe."""
        return {name: entry.result() for name, entry in self._entries.items()}

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()


def rows_per_chunk(row_bytes: int) -> int:
    """How many rows of so many bytes fit into a file."""
    return max(FILE_BYTES // max(row_bytes, 1), 1)


def _fill_files(pieces: Iterable[tuple[str, Chunk]], most: int) -> Iterator[dict[str, Chunk]]:
    """Which named pieces go into one file of at most so many bytes, in their order."""
    group: dict[str, Chunk] = {}
    room = most
    for key, piece in pieces:
        size = sum(array.nbytes for array in piece.arrays.values())
        if group and size > room:
            yield group
            group, room = {}, most
        group[key] = piece
        room -= size
    if group:
        yield group


UNFINISHED = "unfinished.json"
"""File that says that what else is there belongs to a checkpoint that was never finished, until it is."""


@contextmanager
def making(path: str | Path | Directory) -> Generator[tuple[Directory, FileWriter]]:
    """A new directory, and what writes its files; until the end it is marked as unfinished, and on errors it goes.

    Raises
    ------
    CheckpointError
        If there is anything at the path but what an unfinished checkpoint left.
    """
    place = directory(path)
    make_directory(place)
    try:
        with FileWriter(place) as writer:
            yield place, writer
        place.remove(UNFINISHED)
    except BaseException:
        place.remove_all()
        raise


def make_directory(place: Directory) -> str:
    """Make the directory; only what an unfinished checkpoint left there is removed. Returns a token."""
    names = place.names()
    if MANIFEST in names:
        raise CheckpointError(f"{place} exists already; checkpoints are never overwritten, choose another directory")
    if names and UNFINISHED not in names:
        raise CheckpointError(f"{place} exists already and holds {names[0]}; choose another directory")
    for name in sorted(names, key=lambda name: name == UNFINISHED):  # the mark last
        place.remove(name)
    place.make()
    token = uuid.uuid4().hex
    place.write(UNFINISHED, json.dumps({"token": token}))
    return token
