"""Read and write files in a local directory or under a prefix of an object store (``s3://bucket/path``, ``gs://…``).

Checkpoints, leases, exports and published changes are written through `Directory`. It uses neither renames nor
directories, because object stores have none. Files are written one by one, and text files are written atomically.

Object stores are opened by obstore (`ObjectDirectory`). Local directories have a separate class (`LocalDirectory`),
because obstore's ``LocalStore`` has no conditional overwrite and does not sync files to the disk
(docs/decisions/dependencies.md).

The functions at the end read and write single files at any path or URI, e.g. recipes, reports and predictions.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol, cast

from typing_extensions import Buffer, override

from hotbed import files, parsing
from hotbed.errors import CheckpointError, DamagedError
from hotbed.files import name_file_errors, sync, write_text
from hotbed.locations import CONDITIONAL_S, explain_storage_errors, is_storage, location, object_store

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ObjectStore

PART_BYTES = 16 << 20
"""Bytes per part of a multipart upload. S3 allows 10,000 parts, i.e. files of 160 GB."""
PARTS_UNDER_WAY = 2
"""Number of parts that are uploaded concurrently and held in memory."""


class Writer(Protocol):
    """A file that is written sequentially."""

    def write(self, data: memoryview) -> None:
        """Append bytes."""

    def finish(self) -> None:
        """Close the file. When this returns, the file survives a power failure."""

    def abandon(self) -> None:
        """Close the incomplete file."""


class Reader(Protocol):
    """A file that several threads may read concurrently. If it is local, repeated reads of a part are cheap."""

    size: int
    is_local: bool

    def read_into(self, buffer: memoryview, start: int) -> None:
        """Fill a buffer with the bytes from ``start`` on."""

    def close(self) -> None:
        """Close the file."""


class Tagged(NamedTuple):
    """A version of a small file: its content, and a tag that identifies this version, e.g. an ETag."""

    content: bytes
    tag: str


class Directory(ABC):
    """A directory with files and folders, on a local file system or in an object store.

    Processes coordinate with `create` and `replace`, which succeed in only one of several concurrent processes. The
    content of such a file must identify its writer and version, e.g. by a name and a counter, for two reasons. An ETag
    may be a hash of the content, so equal contents are the same version. And if a response is lost, the request is
    retried and finds its own file, which the caller must recognize by reading it.
    """

    path: str

    @override
    def __str__(self) -> str:
        return self.path

    @property
    def name(self) -> str:
        """Last part of the path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    def __truediv__(self, name: str) -> Directory:
        return self.folder(name)

    @abstractmethod
    def folder(self, name: str) -> Directory:
        """Return a folder in this directory, which need not exist."""

    @abstractmethod
    def sibling(self, name: str) -> Directory:
        """Return a folder in the parent directory, which need not exist."""

    @abstractmethod
    def names(self) -> list[str]:
        """Return the sorted names of files and folders. Return an empty list if the directory does not exist."""

    @abstractmethod
    def make(self) -> None:
        """Create the directory. Object stores do not need this."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Return whether a file exists."""

    @abstractmethod
    def reader(self, name: str) -> Reader:
        """Open a file for reading.

        Raise `FileNotFoundError` if it does not exist. Raise `CheckpointError` if it is not a file, or is a link out of
        the directory.
        """

    @abstractmethod
    def writer(self, name: str) -> Writer:
        """Open a file for writing. An existing file is replaced."""

    @abstractmethod
    def write(self, name: str, text: str) -> None:
        """Write a text file atomically, so that it survives a power failure."""

    @abstractmethod
    def create(self, name: str, content: bytes) -> str | None:
        """Write a new file and return its tag. If the file exists already, change nothing and return None."""

    @abstractmethod
    def read_tagged(self, name: str) -> Tagged | None:
        """Return a small file with its tag, or None if it does not exist."""

    @abstractmethod
    def replace(self, name: str, content: bytes, tag: str) -> str | None:
        """Overwrite a file if it still has this tag, and return the new tag. Otherwise, return None."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a file if it exists."""

    @abstractmethod
    def remove_all(self) -> None:
        """Remove the directory with its content."""

    def read(self, name: str, most: int | None = None) -> bytes:
        """Return the content of a file. Raise `CheckpointError` if it has more than ``most`` bytes."""
        reader = self.reader(name)
        try:
            if most is not None and reader.size > most:
                raise CheckpointError(f"{self}/{name}: got {reader.size:,} bytes, expected at most {most:,}")
            data = bytearray(reader.size)
            reader.read_into(memoryview(data), 0)
        finally:
            reader.close()
        return bytes(data)


def directory(path: str | Path | Directory) -> Directory:
    """Return the directory at a local path or a URI like ``s3://bucket/path``.

    Raise `CheckpointError` if the URI is not valid or not supported.
    """
    if isinstance(path, Directory):
        return path
    uri = location(str(path))
    if isinstance(uri, Path):
        return LocalDirectory(uri)
    if not is_storage(uri):
        raise CheckpointError(
            f"{uri} cannot be opened: hotbed writes checkpoints and other files only to local directories and object "
            "stores. Use a local path, s3://, gs:// or abfs://"
        )

    @cache
    def brief(seconds: float) -> ObjectStore:
        return object_store(uri, seconds)[0]

    try:
        return ObjectDirectory(*object_store(uri), uri, brief)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


class LocalDirectory(Directory):
    """A directory in a local file system."""

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
            raise CheckpointError(f"{path} is a link out of its directory, to {real}. Copy the file to {self.root}")
        if path.exists() and not path.is_file():
            raise CheckpointError(f"{path} is not a file. Copy the checkpoint again")
        return _LocalReader(path)

    @override
    def writer(self, name: str) -> Writer:
        return _LocalWriter(self.root / name)

    @override
    def write(self, name: str, text: str) -> None:
        self._refuse_gone()
        write_text(self.root / name, text)
        sync(self.root)

    @override
    def create(self, name: str, content: bytes) -> str | None:
        path = self.root / name
        self._refuse_gone()
        with self._complete(name, content) as (complete, tag):
            try:
                os.link(complete, path)  # fails if the file exists, also on file systems without locks
            except FileExistsError:
                return None
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                with self._lock(name):
                    if path.exists():
                        return None
                    complete.rename(path)
            sync(self.root)
        return tag

    def _refuse_gone(self) -> None:
        if not self.root.is_dir():
            raise FileNotFoundError(f"{self.root} does not exist any more. Check whether another run writes there")

    @override
    def read_tagged(self, name: str) -> Tagged | None:
        try:
            with (self.root / name).open("rb") as stream:
                content = stream.read()
                return Tagged(content, _tag(os.fstat(stream.fileno()), content))
        except FileNotFoundError:
            return None

    @override
    def replace(self, name: str, content: bytes, tag: str) -> str | None:
        with self._lock(name):
            there = self.read_tagged(name)
            if there is None or there.tag != tag:
                return None
            with self._complete(name, content) as (complete, new):
                complete.replace(self.root / name)
                sync(self.root)
        return new

    @contextmanager
    def _complete(self, name: str, content: bytes) -> Generator[tuple[Path, str]]:
        """Write a hidden file that the caller renames to ``name``. Yield its path and its tag."""
        path = self.root / f".{name}.unfinished-{uuid.uuid4().hex[:8]}"
        try:
            with name_file_errors(self.root / name), path.open("xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
                tag = _tag(os.fstat(stream.fileno()), content)
            yield path, tag
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _lock(self, name: str) -> Generator[None]:
        """Lock a file that may not exist, with a hidden lock file that is not removed."""
        descriptor = os.open(self.root / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    @override
    def remove(self, name: str) -> None:
        (self.root / name).unlink(missing_ok=True)

    @override
    def remove_all(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


def _tag(stat: os.stat_result, content: bytes) -> str:
    """Return the tag of a version of a file. Each version is a new file, with its own inode and time."""
    return hashlib.sha256(f"{stat.st_ino} {stat.st_mtime_ns} ".encode() + content).hexdigest()


class _LocalWriter:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._stream = path.open("wb", buffering=0)

    def write(self, data: memoryview) -> None:
        with name_file_errors(self._path):
            while data:
                data = data[self._stream.write(data) :]

    def finish(self) -> None:
        try:
            with name_file_errors(self._path):
                os.fsync(self._stream.fileno())
        finally:
            self._stream.close()

    def abandon(self) -> None:
        self._stream.close()


class _LocalReader:
    is_local = True

    def __init__(self, path: Path) -> None:
        self._stream = path.open("rb", buffering=0)
        self._path = path
        self.size = path.stat().st_size

    def read_into(self, buffer: memoryview, start: int) -> None:
        while buffer:
            if hasattr(os, "preadv"):
                count = os.preadv(self._stream.fileno(), [buffer], start)
            else:
                with self._path.open("rb", buffering=0) as stream:  # macOS and Windows: each read has its own position
                    stream.seek(start)
                    count = stream.readinto(buffer) or 0
            if not count:
                raise DamagedError(f"{self._path} ends at byte {start:,}, before the end of the requested bytes")
            buffer, start = buffer[count:], start + count

    def close(self) -> None:
        self._stream.close()


class ObjectDirectory(Directory):
    """A prefix of an object store. ``uri`` is its URI, which may have a query.

    ``brief`` returns the same store with a time limit of retries in seconds, for conditional writes.
    """

    def __init__(self, store: ObjectStore, root: str, uri: str, brief: Callable[[float], ObjectStore]) -> None:
        self._store, self._brief = store, brief
        self._root = root.rstrip("/")
        address, _, query = uri.partition("?")
        self._address, self._query = address.rstrip("/"), f"?{query}" if query else ""
        self.path = uri

    @property
    @override
    def name(self) -> str:
        return self._root.rsplit("/", 1)[-1]

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}" if self._root else name

    def _uri(self, name: str) -> str:
        return f"{self._address}/{name}{self._query}"

    @override
    def folder(self, name: str) -> Directory:
        return ObjectDirectory(self._store, self._at(name), self._uri(name), self._brief)

    @override
    def sibling(self, name: str) -> Directory:
        parent, address = self._root.rpartition("/")[0], self._address.rpartition("/")[0]
        root = f"{parent}/{name}" if parent else name
        return ObjectDirectory(self._store, root, f"{address}/{name}{self._query}", self._brief)

    @override
    def names(self) -> list[str]:
        with explain_storage_errors(self.path):
            found = self._store.list_with_delimiter(self._root or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return sorted({path.rsplit("/", 1)[-1] for path in paths if path != self._root})

    @override
    def make(self) -> None:
        pass

    @override
    def has(self, name: str) -> bool:
        try:
            with explain_storage_errors(self._uri(name)):
                self._store.head(self._at(name))
        except FileNotFoundError:
            return False
        return True

    @override
    def reader(self, name: str) -> Reader:
        return _ObjectReader(self._store, self._at(name), self._uri(name))

    @override
    def writer(self, name: str) -> Writer:
        return _ObjectWriter(self._store, self._at(name), self._uri(name))

    @override
    def write(self, name: str, text: str) -> None:
        with explain_storage_errors(self._uri(name)):
            self._store.put(self._at(name), text.encode())

    @override
    def create(self, name: str, content: bytes) -> str | None:
        from obstore.exceptions import AlreadyExistsError

        with explain_storage_errors(self._uri(name)):
            try:
                return _version_tag(self._brief(_conditional_s(content)).put(self._at(name), content, mode="create"))
            except AlreadyExistsError:
                return None

    @override
    def read_tagged(self, name: str) -> Tagged | None:
        try:
            with explain_storage_errors(self._uri(name)):
                found = self._store.get(self._at(name))
                return Tagged(bytes(found.bytes()), _version_tag(found.meta))
        except FileNotFoundError:
            return None

    @override
    def replace(self, name: str, content: bytes, tag: str) -> str | None:
        from obstore.exceptions import PreconditionError

        with explain_storage_errors(self._uri(name)):
            try:
                return _version_tag(
                    self._brief(_conditional_s(content)).put(self._at(name), content, mode=_version(tag))
                )
            except (PreconditionError, FileNotFoundError):
                return None

    @override
    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError), explain_storage_errors(self._uri(name)):
            self._store.delete(self._at(name))

    @override
    def remove_all(self) -> None:
        with explain_storage_errors(self.path):
            for entries in self._store.list(self._root or None, chunk_size=1000):
                self._store.delete([entry["path"] for entry in entries])


def _conditional_s(content: bytes) -> float:
    """Return the time limit of retries of a conditional write in seconds. A single request has half of this time.

    The limit assumes an upload of 1 MiB per second. For small leases, it is shorter than the TTL of a lease. A large
    manifest may exceed the TTL, but it is still created only if there is no other manifest.
    """
    return CONDITIONAL_S + 2 * (len(content) >> 20)


def _version_tag(version: PutResult | ObjectMeta) -> str:
    """Return a file's version as text: the ETag, and the version number that some stores have."""
    return f"{version['e_tag'] or ''} {version['version'] or ''}"


def _version(tag: str) -> UpdateVersion:
    e_tag, _, version = tag.partition(" ")
    found: UpdateVersion = {}
    if e_tag:
        found["e_tag"] = e_tag
    if version:
        found["version"] = version
    return found


class _ObjectWriter:
    """A file that appears when it is finished. Files larger than one part are uploaded in parts."""

    def __init__(self, store: ObjectStore, path: str, uri: str) -> None:
        import obstore

        self._uri = uri
        self._file = obstore.open_writer(store, path, buffer_size=PART_BYTES, max_concurrency=PARTS_UNDER_WAY)

    def write(self, data: memoryview) -> None:
        with explain_storage_errors(self._uri):
            self._file.write(bytes(data))  # a copy, because obstore reads it later, and callers reuse their buffers

    def finish(self) -> None:
        with explain_storage_errors(self._uri):
            self._file.close()

    def abandon(self) -> None:
        error = OSError("abandoned")
        with suppress(OSError), explain_storage_errors(self._uri):
            self._file.__exit__(type(error), error, None)  # aborts a multipart upload, which the store would keep


class _ObjectReader:
    is_local = False

    def __init__(self, store: ObjectStore, path: str, uri: str) -> None:
        self._store, self._path, self._uri = store, path, uri
        with explain_storage_errors(uri):
            self.size = int(store.head(path)["size"])

    def read_into(self, buffer: memoryview, start: int) -> None:
        if start + len(buffer) > self.size:
            raise DamagedError(f"{self._uri} ends at byte {self.size:,}, before the end of the requested bytes")
        if buffer:
            with explain_storage_errors(self._uri):
                data = self._store.get_range(self._path, start=start, length=len(buffer))
            if len(data) != len(buffer):
                raise DamagedError(
                    f"{self._uri} ends at byte {start + len(data):,}, before the end of the requested bytes"
                )
            buffer[:] = memoryview(data)

    def close(self) -> None:
        pass


# -- single files -----------------------------------------------------------------------------------------------------


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
