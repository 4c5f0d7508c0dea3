"""Directories of checkpoints in object stores, through obstore."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

from typing_extensions import override

from hotbed.checkpoint.storage import Directory, Reader, Tagged, Writer
from hotbed.errors import DamagedError
from hotbed.locations import CONDITIONAL_S, explained, is_storage, object_store

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutResult, UpdateVersion
    from obstore.store import ObjectStore

PART_BYTES = 16 << 20
"""Bytes of a part of a file that is written; of 10,000 parts, as many as S3 takes, that is 160 GB."""
PARTS_UNDER_WAY = 2
"""Parts of a file that are sent at once, and are in memory."""


def remote_directory(uri: str) -> Directory:
    """Return the directory at a URI that is no ``file://``; `ValueError` if nothing here can open it."""
    if not is_storage(uri):
        raise ValueError(
            f"{uri} cannot be opened: checkpoints, and other files that hotbed writes, are kept in local directories "
            "and in object stores (s3://, gs://, abfs://); choose one of these"
        )

    @cache
    def brief(seconds: float) -> ObjectStore:
        return object_store(uri, seconds)[0]

    return ObjectDirectory(*object_store(uri), uri, brief)


class ObjectDirectory(Directory):
    """A prefix of an object store, of which ``uri``, perhaps with a query, is what users call it.

    ``brief`` returns the store with requests that are tried for so many seconds, for conditional writes.
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
