# pyright: reportUnknownParameterType=false, reportUnknownLambdaType=false
"""Directories of checkpoints in object stores, through obstore, and in other file systems, through pyarrow's."""

# pyarrow ships no types.

from __future__ import annotations

import hashlib
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from hotbed.checkpoint.storage import Directory, Reader, Tagged, Writer
from hotbed.errors import CheckpointError, DamagedError
from hotbed.locations import CONDITIONAL_S, OBJECT_STORES, explained, object_store, opened

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ObjectStore

PART_BYTES = 16 << 20
"""Bytes of a part of a file that is written; of 10,000 parts, as many as S3 takes, that is 160 GB."""
PARTS_UNDER_WAY = 2
"""Parts of a file that are sent at once, and are in memory."""


def remote_directory(uri: str) -> Directory:
    """The directory at a URI that is no ``file://``.

    Raises
    ------
    ValueError
        If nothing here can open it.
    """
    if uri.partition("://")[0] in OBJECT_STORES:
        brief = cache(lambda seconds: object_store(uri, seconds)[0])
        return ObjectDirectory(*object_store(uri), uri, brief)
    return FileSystemDirectory(*opened(uri), uri)


class _Remote(Directory):
    """What has a URI, perhaps with a query, and a path in its store."""

    def __init__(self, root: str, uri: str) -> None:
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

    def _beside(self, name: str) -> tuple[str, str]:
        """Path and URI of another name in the same place."""
        parent, address = self._root.rpartition("/")[0], self._address.rpartition("/")[0]
        return f"{parent}/{name}" if parent else name, f"{address}/{name}{self._query}"


class ObjectDirectory(_Remote):
    """A prefix of an object store.

    Parameters
    ----------
    store
        Of obstore.
    root
        Path in it.
    uri
        What users call it.
    brief
        Gives the store with requests that are tried for so many seconds, for conditional writes.
    """

    def __init__(self, store: ObjectStore, root: str, uri: str, brief: Callable[[float], ObjectStore]) -> None:
        super().__init__(root, uri)
        self._store, self._brief = store, brief

    @override
    def folder(self, name: str) -> Directory:
        return ObjectDirectory(self._store, self._at(name), self._uri(name), self._brief)

    @override
    def sibling(self, name: str) -> Directory:
        return ObjectDirectory(self._store, *self._beside(name), self._brief)

    @override
    def names(self) -> list[str]:
        with explained(self.path):
            found = self._store.list_with_delimiter(self._root or None)
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        return sorted({path.rsplit("/", 1)[-1] for path in paths if path != self._root})

    @override
    def make(self) -> None:
        pass

    @override
    def has(self, name: str) -> bool:
        try:
            with explained(self._uri(name)):
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
        with explained(self._uri(name)):
            self._store.put(self._at(name), text.encode())

    @override
    def create(self, name: str, content: bytes) -> str | None:
        from obstore.exceptions import AlreadyExistsError

        with explained(self._uri(name)):
            try:
                return _tag(self._brief(_conditional_s(content)).put(self._at(name), content, mode="create"))
            except AlreadyExistsError:
                return None

    @override
    def read_tagged(self, name: str) -> Tagged | None:
        try:
            with explained(self._uri(name)):
                found = self._store.get(self._at(name))
                return Tagged(bytes(found.bytes()), _tag(found.meta))
        except FileNotFoundError:
            return None

    @override
    def replace(self, name: str, content: bytes, tag: str) -> str | None:
        from obstore.exceptions import PreconditionError

        with explained(self._uri(name)):
            try:
                return _tag(self._brief(_conditional_s(content)).put(self._at(name), content, mode=_version(tag)))
            except (PreconditionError, FileNotFoundError):
                return None

    @override
    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError), explained(self._uri(name)):
            self._store.delete(self._at(name))

    @override
    def remove_all(self) -> None:
        with explained(self.path):
            for entries in self._store.list(self._root or None, chunk_size=1000):
                self._store.delete([entry["path"] for entry in entries])


def _conditional_s(content: bytes) -> float:
    """Seconds for which a conditional write is tried: a request, which has half of them, can send 1 MiB a second.

    Leases are small. A manifest that takes longer than one holds is created all the same only if there is none.
    """
    return CONDITIONAL_S + 2 * (len(content) >> 20)


def _tag(version: PutResult | ObjectMeta) -> str:
    """A file's version as text: the ETag, and the number that some stores count versions by."""
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
    """A file that appears when it is finished; more than a part of it is sent in several."""

    def __init__(self, store: ObjectStore, path: str, uri: str) -> None:
        import obstore

        self._uri = uri
        self._file = obstore.open_writer(store, path, buffer_size=PART_BYTES, max_concurrency=PARTS_UNDER_WAY)

    def write(self, data: memoryview) -> None:
        with explained(self._uri):
            self._file.write(bytes(data))  # a copy: obstore reads it when it sends the part, and buffers are used again

    def finish(self) -> None:
        with explained(self._uri):
            self._file.close()

    def abandon(self) -> None:
        error = OSError("given up")
        with suppress(OSError), explained(self._uri):
            self._file.__exit__(type(error), error, None)  # ends an upload in parts, which a store would keep


class _ObjectReader:
    is_local = False

    def __init__(self, store: ObjectStore, path: str, uri: str) -> None:
        self._store, self._path, self._uri = store, path, uri
        with explained(uri):
            self.size = int(store.head(path)["size"])

    def read_into(self, buffer: memoryview, start: int) -> None:
        if start + len(buffer) > self.size:
            raise DamagedError(f"{self._uri} ends at byte {self.size:,}, before what was to be read")
        if buffer:
            with explained(self._uri):
                data = self._store.get_range(self._path, start=start, length=len(buffer))
            if len(data) != len(buffer):
                raise DamagedError(f"{self._uri} ends at byte {start + len(data):,}, before what was to be read")
            buffer[:] = memoryview(data)

    def close(self) -> None:
        pass


class FileSystemDirectory(_Remote):
    """A directory of another file system: HDFS, or what fsspec has (``memory://``).

    Parameters
    ----------
    filesystem
        Of pyarrow, or any of fsspec's in its wrapper.
    root
        Path in it.
    uri
        What users call it.
    """

    _in_memory = threading.Lock()  # one for all, as the memory is one

    def __init__(self, filesystem: Any, root: str, uri: str) -> None:
        super().__init__(root, uri)
        self._filesystem = filesystem

    @override
    def folder(self, name: str) -> Directory:
        return FileSystemDirectory(self._filesystem, self._at(name), self._uri(name))

    @override
    def sibling(self, name: str) -> Directory:
        return FileSystemDirectory(self._filesystem, *self._beside(name))

    @override
    def names(self) -> list[str]:
        from pyarrow import fs

        selector = fs.FileSelector(self._root, allow_not_found=True)
        try:
            return sorted(info.base_name for info in self._filesystem.get_file_info(selector))
        except NotADirectoryError:
            return []

    @override
    def make(self) -> None:
        self._filesystem.create_dir(self._root)

    @override
    def has(self, name: str) -> bool:
        return bool(self._filesystem.get_file_info(self._at(name)).is_file)

    @override
    def reader(self, name: str) -> Reader:
        return _FileSystemReader(self._filesystem.open_input_file(self._at(name)), self._uri(name))

    @override
    def writer(self, name: str) -> Writer:
        return _FileSystemWriter(self._filesystem, self._at(name))

    @override
    def write(self, name: str, text: str) -> None:
        writer = self.writer(name)
        try:
            writer.write(memoryview(text.encode()))
            writer.finish()
        except BaseException:
            writer.abandon()
            raise

    @override
    def create(self, name: str, content: bytes) -> str | None:
        self._check_conditional(name)
        with self._in_memory:
            if self.has(name):
                return None
            return self._overwrite(name, content)

    @override
    def read_tagged(self, name: str) -> Tagged | None:
        try:
            content = self.read(name)
        except FileNotFoundError:
            return None
        return Tagged(content, hashlib.sha256(content).hexdigest())

    @override
    def replace(self, name: str, content: bytes, tag: str) -> str | None:
        self._check_conditional(name)
        with self._in_memory:
            there = self.read_tagged(name)
            if there is None or there.tag != tag:
                return None
            return self._overwrite(name, content)

    def _overwrite(self, name: str, content: bytes) -> str:
        self.write(name, content.decode())
        return hashlib.sha256(content).hexdigest()

    @property
    @override
    def has_conditional_writes(self) -> bool:
        """Whether there are `create` and `replace`: in this process's own memory."""
        return self.path.startswith("memory://")

    def _check_conditional(self, name: str) -> None:
        scheme = self.path.partition("://")[0]
        if not self.has_conditional_writes:
            raise CheckpointError(
                f"{self._uri(name)} cannot be written by one process alone: {scheme}:// has no conditional writes; use "
                "a local directory or an object store"
            )

    @override
    def remove(self, name: str) -> None:
        if self.has(name):
            self._filesystem.delete_file(self._at(name))

    @override
    def remove_all(self) -> None:
        with suppress(FileNotFoundError):
            self._filesystem.delete_dir(self._root)


class _FileSystemWriter:
    """A file that is written under a hidden name, and gets its own when it is finished."""

    def __init__(self, filesystem: Any, path: str) -> None:
        folder, slash, name = path.rpartition("/")
        self._filesystem, self._path = filesystem, path
        self._unfinished = f"{folder}{slash}.{name}.unfinished-{uuid.uuid4().hex[:8]}"
        self._stream = filesystem.open_output_stream(self._unfinished)

    def write(self, data: memoryview) -> None:
        self._stream.write(data)

    def finish(self) -> None:
        self._stream.close()
        self._filesystem.move(self._unfinished, self._path)

    def abandon(self) -> None:
        with suppress(OSError):
            self._stream.close()
            self._filesystem.delete_file(self._unfinished)


class _FileSystemReader:
    is_local = False

    def __init__(self, file: Any, uri: str) -> None:
        self._file, self._uri = file, uri
        self.size = int(file.size())

    def read_into(self, buffer: memoryview, start: int) -> None:
        data = self._file.read_at(len(buffer), start)
        if len(data) != len(buffer):
            raise DamagedError(f"{self._uri} ends at byte {start + len(data):,}, before what was to be read")
        buffer[:] = data

    def close(self) -> None:
        self._file.close()
