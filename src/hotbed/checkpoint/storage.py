"""Access checkpoints in a local directory, or a prefix of an object store (``s3://bucket/path``, ``gs://…``).

Object stores have no rename and no directories, so nothing here needs them: files are written one by one, and a file
of text appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from hotbed.errors import CheckpointError, DamagedError
from hotbed.files import location, opened, sync, write_text


class Writer(Protocol):
    """A file that is being written, from its start to its end."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""
        ...

    def finish(self) -> None:
        """Close it; returns when it survives a power failure."""
        ...

    def abandon(self) -> None:
        """Close it, whatever is in it."""
        ...


class Reader(Protocol):
    """A file whose parts are read, by several threads at once."""

    size: int

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer from byte ``start`` on."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class Directory(ABC):
    """Files under one path, and folders of the same kind."""

    path: str

    @override
    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    def __truediv__(self, name: str) -> Directory:
        return self.folder(name)

    @abstractmethod
    def folder(self, name: str) -> Directory:
        """A folder in it, which need not exist."""

    @abstractmethod
    def sibling(self, name: str) -> Directory:
        """A folder beside it, which need not exist."""

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the files and folders in it, sorted; none if it does not exist."""

    @abstractmethod
    def make(self) -> None:
        """Make it, where directories are things that are made."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a file."""

    @abstractmethod
    def reader(self, name: str) -> Reader:
        """Open a file; `FileNotFoundError` if there is none, `CheckpointError` if it is none or leads out of here."""

    @abstractmethod
    def writer(self, name: str) -> Writer:
        """Begin a file, in the place of any of this name."""

    @abstractmethod
    def write(self, name: str, text: str) -> None:
        """Write a file that appears whole or not at all, and survives a power failure."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""

    @abstractmethod
    def remove_all(self) -> None:
        """Remove it with all that is in it."""

    def read(self, name: str, most: int | None = None) -> bytes:
        """A whole file, of at most so many bytes; `CheckpointError` if it is larger."""
        reader = self.reader(name)
        try:
            if most is not None and reader.size > most:
                raise CheckpointError(f"{self}/{name} has {reader.size:,} bytes, must have at most {most:,}")
            data = bytearray(reader.size)
            reader.read_into(memoryview(data), 0)
        finally:
            reader.close()
        return bytes(data)


def directory(path: str | Path | Directory) -> Directory:
    """The directory at a local path, or at a URI like ``s3://bucket/path``.

    Raises
    ------
    CheckpointError
        If nothing here can open such a URI.
    """
    if isinstance(path, Directory):
        return path
    place = location(str(path))
    if isinstance(place, Path):
        return LocalDirectory(place)
    try:
        return RemoteDirectory(*opened(place), place)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


class LocalDirectory(Directory):
    """A directory of the machine's file systems."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.path = str(root)

    @override
    def folder(self, name: str) -> Directory:
        return LocalDirectory(self.root / name)

    @override
    def sibling(self, name: str) -> Directory:
        return LocalDirectory(self.root.resolve().parent / name)

    @override
    def names(self) -> list[str]:
        return sorted(entry.name for entry in self.root.iterdir()) if self.root.is_dir() else []

    @override
    def make(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        sync(self.root.parent)

    @override
    def has(self, name: str) -> bool:
        return (self.root / name).is_file()

    @override
    def reader(self, name: str) -> Reader:
        path = self.root / name
        real = path.resolve()
        if real.parent != self.root.resolve():
            raise CheckpointError(f"{path} leads to {real}, out of its directory; copy the file itself to {self.root}")
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is no file; copy the checkpoint again")
        return _LocalReader(path)

    @override
    def writer(self, name: str) -> Writer:
        return _LocalWriter(self.root / name)

    @override
    def write(self, name: str, text: str) -> None:
        if not self.root.is_dir():
            raise FileNotFoundError(f"{self.root} is gone; does another run write there?")
        write_text(self.root / name, text)
        sync(self.root)

    @override
    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    @override
    def remove_all(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class _LocalWriter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("wb", buffering=0)

    def write(self, data: memoryview) -> None:
        while data:
            data = data[self._stream.write(data) :]

    def finish(self) -> None:
        try:
            os.fsync(self._stream.fileno())
        finally:
            self._stream.close()

    def abandon(self) -> None:
        self._stream.close()


class _LocalReader:
    def __init__(self, path: Path) -> None:
        self._stream = path.open("rb", buffering=0)
        self._path = path
        self.size = path.stat().st_size

    def read_into(self, buffer: memoryview, start: int) -> None:
        while buffer:
            if hasattr(os, "preadv"):
                count = os.preadv(self._stream.fileno(), [buffer], start)
            else:
                with self._path.open("rb", buffering=0) as stream:  # macOS and Windows: threads share no position
                    stream.seek(start)
                    count = stream.readinto(buffer) or 0
            if not count:
                raise DamagedError(f"{self._path} ends at byte {start:,}, before what was to be read")
            buffer, start = buffer[count:], start + count

    def close(self) -> None:
        self._stream.close()


class RemoteDirectory(Directory):
    """A prefix of an object store.

    Parameters
    ----------
    filesystem
        Of pyarrow, or any of fsspec's in its wrapper.
    root
        Path in it.
    uri
        What users call it.
    """

    def __init__(self, filesystem: Any, root: str, uri: str) -> None:
        self._filesystem, self._root = filesystem, root.rstrip("/")
        address, _, query = uri.partition("?")
        self._address, self._query = address.rstrip("/"), query
        self.path = uri

    @property
    @override
    def name(self) -> str:
        return self._root.rsplit("/", 1)[-1]

    @override
    def folder(self, name: str) -> Directory:
        query = f"?{self._query}" if self._query else ""
        return RemoteDirectory(self._filesystem, f"{self._root}/{name}", f"{self._address}/{name}{query}")

    @override
    def sibling(self, name: str) -> Directory:
        query = f"?{self._query}" if self._query else ""
        root, address = (path.rpartition("/")[0] for path in (self._root, self._address))
        return RemoteDirectory(self._filesystem, f"{root}/{name}", f"{address}/{name}{query}")

    @override
    def names(self) -> list[str]:
        from pyarrow import fs

        selector = fs.FileSelector(self._root, allow_not_found=True)
        return sorted(info.base_name for info in self._filesystem.get_file_info(selector))

    @override
    def make(self) -> None:
        if self._filesystem.type_name == "local":
            self._filesystem.create_dir(self._root)

    @override
    def has(self, name: str) -> bool:
        return bool(self._filesystem.get_file_info(f"{self._root}/{name}").is_file)

    @override
    def reader(self, name: str) -> Reader:
        return _RemoteReader(self._filesystem.open_input_file(f"{self._root}/{name}"))

    @override
    def writer(self, name: str) -> Writer:
        return _RemoteWriter(self._filesystem.open_output_stream(f"{self._root}/{name}"))

    @override
    def write(self, name: str, text: str) -> None:
        stream = self._filesystem.open_output_stream(f"{self._root}/{name}")
        stream.write(text.encode())
        stream.close()

    @override
    def remove(self, name: str) -> None:
        if self.has(name):
            self._filesystem.delete_file(f"{self._root}/{name}")

    @override
    def remove_all(self) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.delete_dir(self._root)


class _RemoteWriter:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: memoryview) -> None:
        self._stream.write(data)

    def finish(self) -> None:
        self._stream.close()

    def abandon(self) -> None:
        self._stream.close()


class _RemoteReader:
    def __init__(self, file: Any) -> None:
        self._file = file
        self.size = int(file.size())

    def read_into(self, buffer: memoryview, start: int) -> None:
        data = self._file.read_at(len(buffer), start)
        if len(data) != len(buffer):
            raise DamagedError(f"a file ends at byte {start + len(data):,}, before what was to be read")
        buffer[:] = data

    def close(self) -> None:
        self._file.close()
