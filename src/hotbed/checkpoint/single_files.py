"""Read and write single files at any path or URI, e.g. recipes, reports and predictions."""

from __future__ import annotations

import io
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from typing_extensions import Buffer, override

from hotbed import files, parsing
from hotbed.checkpoint.storage import Directory, Writer, directory
from hotbed.errors import CheckpointError
from hotbed.locations import location


def file_at(uri: str) -> tuple[Directory, str]:
    """Return the directory of the file at a URI, and its name there."""
    address, mark, query = uri.partition("?")
    folder, _, name = address.rpartition("/")
    if not name or folder.endswith(":/"):
        raise CheckpointError(f"{uri} has no file name. Add it")
    return directory(f"{folder}{mark}{query}"), name


def exists(path: str | Path) -> bool:
    """Return whether a path, or the file of a URI, exists."""
    place = location(str(path))
    if isinstance(place, Path):
        return place.exists()
    folder, name = file_at(place)
    return folder.has(name)


def suffix(path: str | Path) -> str:
    """Return the extension of a file's name, e.g. ``.parquet``."""
    return PurePosixPath(str(path).partition("?")[0] if "://" in str(path) else path).suffix


def read_text_uri(path: str | Path) -> str:
    """Read the text of a file of at most `hotbed.files.MOST_TEXT_BYTES`."""
    place = location(str(path))
    if isinstance(place, Path):
        return files.read_text(place)
    folder, name = file_at(place)
    return folder.read(name, files.MOST_TEXT_BYTES).decode("utf-8")


def read_limited_uri(path: str | Path, most: int = parsing.MOST_BYTES) -> bytes:
    """Read a file of at most ``most`` bytes."""
    place = location(str(path))
    if isinstance(place, Path):
        return parsing.read_limited(place, most)
    folder, name = file_at(place)
    return folder.read(name, most)


def read_yaml_uri(path: str | Path) -> Any:
    """Return the plain values of a recipe's file. See `hotbed.files.read_yaml`."""
    return files.yaml_of(lambda: read_text_uri(path), str(location(str(path))))


def write_text_uri(path: str | Path, text: str) -> None:
    """Write a file atomically."""
    place = location(str(path))
    if isinstance(place, Path):  # a `LocalDirectory` would require permission to open the directory
        files.write_text(place, text)
        return
    folder, name = file_at(place)
    folder.make()
    folder.write(name, text)


@contextmanager
def new_output(path: str | Path) -> Generator[BinaryIO]:
    """Yield a binary stream for writing a file. The file appears when the body succeeds, and not if it fails."""
    place = location(str(path))
    if isinstance(place, Path):
        with files.new_file(place) as unfinished, unfinished.open("wb") as stream:
            yield stream
        return
    folder, name = file_at(place)
    folder.make()
    writer = folder.writer(name)
    try:
        yield cast("BinaryIO", _Stream(writer))
    except BaseException:
        writer.abandon()
        raise
    writer.finish()


class _Stream(io.RawIOBase):
    """A `Writer` with the interface of Python's streams. Closing it does not finish the file."""

    def __init__(self, writer: Writer) -> None:
        self._writer, self._at = writer, 0

    @override
    def writable(self) -> bool:
        return True

    @override
    def write(self, data: Buffer) -> int:
        view = memoryview(data).cast("B")
        self._writer.write(view)
        self._at += len(view)
        return len(view)

    @override
    def tell(self) -> int:
        return self._at
