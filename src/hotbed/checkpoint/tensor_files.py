"""Write and read the files of a checkpoint: safetensors files, which are written and read by rows.

`FileWriter` writes chunks of tables and states into files. `TensorFiles` reads them by rows. Saving, converting and
importing use these classes. A directory is marked as unfinished until all of its files are written.

The layout of a file (https://huggingface.co/docs/safetensors) is: 8 bytes with the length of the header, little-endian;
the header as JSON, padded with spaces; the arrays, contiguous, row-major and little-endian.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, RootModel
from torch import Tensor

from hotbed.checkpoint.blocks import BlockReader, BlockWriter, BlockWriters, VerifiedFiles
from hotbed.checkpoint.manifest import MANIFEST, Count, FileEntry, SavedTile, file_name, parse_object
from hotbed.checkpoint.storage import Directory, directory
from hotbed.errors import CheckpointError
from hotbed.parsing import validate_model

FILE_BYTES = 1 << 30
"""Upper limit of the bytes of a file of tables."""
UNFINISHED = "unfinished.json"
"""File that marks a directory as an unfinished checkpoint. It is removed when the checkpoint is complete."""
CHUNK_BYTES = 4 << 20
"""Bytes of rows that are created or read together."""
KEYS_AT_ONCE = 1 << 19
"""Number of keys of a keyed tile that are in memory together."""

MOST_HEADER_BYTES = 100_000_000
"""Upper limit of the bytes of a safetensors header, by its specification."""
_OF_AN_ATTEMPT = re.compile(r"\w.*-[0-9a-f]{8}\.(safetensors|json)")
_ALIGNMENT = 64
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
MOST_DIMENSIONS = 64
"""Upper limit of an array's dimensions, the same as in torch."""
MOST_VALUES = 2**59
"""Upper limit of an array's values, so that its bytes are a 64-bit number. Empty dimensions count as 1."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _ArrayEntry(BaseModel):
    """An array in the header of a file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: Literal["F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"]
    shape: Annotated[list[Count], Field(max_length=MOST_DIMENSIONS)]
    data_offsets: Annotated[tuple[Count, Count], Field(strict=False)]


_Header = RootModel[dict[str, _ArrayEntry]]


class Array(NamedTuple):
    """An array to write. ``rows(start, stop)`` returns rows ``start … stop − 1`` in the CPU's memory.

    ``rows`` is called in ascending order, once for each row. Returned rows must not change until the file is finished.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]

    @staticmethod
    def of(tensor: Tensor) -> Array:
        """Return the array of a tensor. The tensor must not change until the file is finished."""
        flat = tensor.detach().contiguous()
        flat = flat.view(1, *flat.shape) if flat.dim() == 0 else flat

        def rows(start: int, stop: int) -> Tensor:
            return flat[start:stop].cpu()

        return Array(tensor.dtype, tuple(tensor.shape), rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class Stored(NamedTuple):
    """An array in a file: its dtype, its shape, and the position of its first byte."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row. An array without dimensions is one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize


def write_arrays(place: Directory, name: str, arrays: Mapping[str, Array], threads: BlockWriters) -> Future[FileEntry]:
    """Write a file. Return a future of its manifest entry, which completes when it survives a power failure."""
    header: dict[str, object] = {}
    at = 0
    for key, array in arrays.items():
        if array.dtype not in _NAMES:
            raise CheckpointError(
                f"'{key}': got {array.dtype}, expected a dtype of safetensors. Save it in another dtype"
            )
        header[key] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + array.nbytes],
        }
        at += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    file = BlockWriter(place, name, threads)
    try:
        file.write(memoryview(len(text).to_bytes(8, "little") + text))
        for array in arrays.values():
            count = array.shape[0] if array.shape else 1
            step = max(CHUNK_BYTES * max(count, 1) // max(array.nbytes, 1), 1)
            for start in range(0, count if array.nbytes else 0, step):
                file.write(bytes_of(array.rows(start, min(start + step, count)).contiguous()))
        return file.finish()
    except BaseException:
        file.abandon()
        raise


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # dimensions of 1 may have any stride
    values: Any = flat.view(torch.uint8).numpy()
    return memoryview(values)


def as_bits(values: Tensor) -> Tensor:
    """Return a view as integers, because torch cannot index and compare values of some dtypes."""
    return values.view(_BITS[values.element_size()])


class Chunk(NamedTuple):
    """A rectangle of a table that is written into one file. `SavedTile` documents the names of the arrays.

    If there is an array ``keys``, the other arrays hold only the rows in ``keys``.
    """

    table: str
    rows: range
    cols: range
    arrays: Mapping[str, Array]


class FileWriter:
    """Write the files of a checkpoint, one by one. Use it as a context manager."""

    def __init__(self, place: Directory) -> None:
        self._place = place
        self._threads = BlockWriters()
        self._entries: dict[str, Future[FileEntry]] = {}

    def write(self, name: str, arrays: Mapping[str, Array]) -> None:
        """Write a file of arrays."""
        self._entries[name] = write_arrays(self._place, name, arrays, self._threads)

    def write_chunks(
        self, chunks: Iterable[Chunk], prefix: str, limit: int | None = None, *, attempt: str = ""
    ) -> dict[str, list[SavedTile]]:
        """Write chunks of tables into files ``PREFIX-NUMBER.safetensors``. Return the chunks' tiles by table.

        If ``attempt`` is not empty, the names are ``PREFIX-NUMBER-ATTEMPT.safetensors``.

        A file is written when the next chunk would exceed the ``limit`` of its bytes (default: `FILE_BYTES`). For
        example, with a limit of 10 bytes, chunks of 6, 3 and 4 bytes are written to the files ``PREFIX-00000`` (6 and
        3) and ``PREFIX-00001`` (4).
        """
        keyed = ((f"{chunk.table}/{i}", chunk) for i, chunk in enumerate(chunks))
        tiles: dict[str, list[SavedTile]] = {}
        for number, group in enumerate(_fill_files(keyed, FILE_BYTES if limit is None else limit)):
            file = file_name(f"{prefix}-{number:05d}", attempt)
            for key, chunk in group.items():
                tile = SavedTile(rows=chunk.rows, cols=chunk.cols, file=file, key=key, keyed="keys" in chunk.arrays)
                tiles.setdefault(chunk.table, []).append(tile)
            self.write(file, {f"{key}/{name}": a for key, chunk in group.items() for name, a in chunk.arrays.items()})
        return tiles

    def entries(self) -> dict[str, FileEntry]:
        """Wait until all files survive a power failure, and return their manifest entries."""
        return {name: entry.result() for name, entry in self._entries.items()}

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.close()


def rows_per_chunk(row_bytes: int) -> int:
    """Return the number of rows of ``row_bytes`` that fit into a file."""
    return max(FILE_BYTES // max(row_bytes, 1), 1)


def _fill_files(chunks: Iterable[tuple[str, Chunk]], most: int) -> Iterator[dict[str, Chunk]]:
    """Group named chunks, in their order, into files of at most ``most`` bytes."""
    group: dict[str, Chunk] = {}
    room = most
    for key, chunk in chunks:
        size = sum(array.nbytes for array in chunk.arrays.values())
        if group and size > room:
            yield group
            group, room = {}, most
        group[key] = chunk
        room -= size
    if group:
        yield group


@contextmanager
def write_directory(path: str | Path | Directory) -> Generator[tuple[Directory, FileWriter]]:
    """Create a directory, and yield it with a writer of its files.

    The directory is marked as unfinished until the end, and removed on errors. Raise `CheckpointError` if the path
    exists already and is not an unfinished checkpoint.
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


def make_directory(place: Directory, *, shared: bool = False) -> str:
    """Create the directory and return a token. If it is an unfinished checkpoint, remove its files.

    If the directory is ``shared`` with attempts of other runs, their files have other names and are not removed.
    """
    names = [name for name in place.names() if not (shared and is_left_by_attempts(name))]
    if MANIFEST in names:
        raise CheckpointError(f"{place} exists already, and checkpoints are never overwritten. Use another directory")
    if names and UNFINISHED not in names:
        raise CheckpointError(f"{place} exists already and contains {names[0]}. Use another directory")
    for name in [] if shared else sorted(names, key=lambda name: name == UNFINISHED):  # remove the mark last
        place.remove(name)
    place.make()
    token = uuid.uuid4().hex
    place.write(UNFINISHED, json.dumps({"token": token}))
    return token


def is_left_by_attempts(name: str) -> bool:
    """Return whether a file name has the suffix of an attempt to save a checkpoint."""
    return _OF_AN_ATTEMPT.fullmatch(name) is not None


class TensorFiles:
    """The arrays of a checkpoint's verified files. For a differential checkpoint, ``base`` has its base's arrays."""

    def __init__(self, files: VerifiedFiles, base: TensorFiles | None = None) -> None:
        self._files, self.base = files, base
        self.place = files.place
        self._headers: dict[str, dict[str, Stored]] = {}
        self._some_keys: dict[tuple[str, str], Tensor] = {}
        """The first key of each piece of an array of keys, and the array's last key."""
        self._last_keys: tuple[tuple[str, str, int], Tensor] | None = None

    def verify(self) -> Iterator[int]:
        """Verify all files, including the base's. Yield the number of bytes of each block."""
        if self.base is not None:
            yield from self.base.verify()
        yield from self._files.verify()

    def arrays(self, file: str) -> dict[str, Stored]:
        """Return the arrays of a file."""
        if file not in self._headers:
            self._headers[file] = _header(self._files[file], f"{self._files.place}/{file}")
        return self._headers[file]

    def find(self, file: str, key: str) -> Stored:
        """Return an array of a file. Raise `CheckpointError` if it does not exist."""
        arrays = self.arrays(file)
        if key not in arrays:
            raise CheckpointError(f"{self._files.place}/{file} has no array '{key}', but the manifest refers to it")
        return arrays[key]

    def read(self, file: str, key: str) -> Tensor:
        """Read a whole array."""
        stored = self.find(file, key)
        out = torch.empty(stored.shape, dtype=stored.dtype)
        if out.numel():
            self._files[file].read_into(stored.start, bytes_of(out))
        return out

    def keys(self, file: str, key: str, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Tensor]]:
        """Yield an array of ascending keys in pieces of at most `KEYS_AT_ONCE`, with the position of the first key.

        ``start`` and ``stop`` are positions. Default: all keys.
        """
        stop = self.find(file, key).shape[0] if stop is None else stop
        for number in range(start // KEYS_AT_ONCE, -(-stop // KEYS_AT_ONCE)):
            first = number * KEYS_AT_ONCE
            yield max(first, start), self._keys(file, key, number)[max(start - first, 0) : stop - first]

    def count_below(self, file: str, key: str, limit: int) -> int:
        """Return the number of keys below a limit in an array of ascending keys."""
        count = self.find(file, key).shape[0]
        if (file, key) not in self._some_keys:
            some = [*range(0, count, KEYS_AT_ONCE), count - 1] if count else []
            found = [self.read_rows(file, key, range(at, at + 1)) for at in some]
            self._some_keys[file, key] = torch.cat([torch.empty(0, dtype=torch.int64), *found])
        some_keys = self._some_keys[file, key]
        if not count or limit > int(some_keys[-1]):
            return count
        number = int(torch.searchsorted(some_keys[:-1], limit)) - 1
        if number < 0:
            return 0
        return number * KEYS_AT_ONCE + int(torch.searchsorted(self._keys(file, key, number), limit))

    def _keys(self, file: str, key: str, number: int) -> Tensor:
        """Read a piece of an array of keys. The last piece is cached."""
        if self._last_keys is None or self._last_keys[0] != (file, key, number):
            self._last_keys = None  # free its memory before the next piece is read
            first = number * KEYS_AT_ONCE
            last = min(first + KEYS_AT_ONCE, self.find(file, key).shape[0])
            self._last_keys = (file, key, number), self.read_rows(file, key, range(first, last))
        return self._last_keys[1]

    def read_rows(self, file: str, key: str, rows: range) -> Tensor:
        """Read some rows of an array. ``rows`` is ascending, with any step."""
        stored = self.find(file, key)
        out = torch.empty((len(rows), *stored.shape[1:]), dtype=stored.dtype)
        self.copy_rows(file, key, rows, range(stored.shape[1]) if len(stored.shape) > 1 else range(1), out)
        return out

    def copy_rows(self, file: str, key: str, rows: range, cols: range, out: Tensor) -> None:
        """Copy rows and columns of an array into a tensor of the same dtype, on any device, with bounded memory.

        The array is ``[R, D]``, or ``[R]``, in which case columns are ignored. ``out`` may be a view.
        """
        stored = self.find(file, key)
        if not len(rows) or not out.numel():
            return
        reader = self._files[file]
        whole = len(stored.shape) == 1 or len(cols) == stored.shape[1]
        size = stored.row_bytes
        end = stored.start + (rows[-1] + 1) * size
        if whole and rows.step == 1 and out.is_contiguous() and out.device.type == "cpu":
            reader.read_into(stored.start + rows.start * size, bytes_of(out), end)
            return
        step = max(CHUNK_BYTES // (size * rows.step), 1)
        buffer = torch.empty(((min(step, len(rows)) - 1) * rows.step + 1, *stored.shape[1:]), dtype=stored.dtype)
        for at in range(0, len(rows), step):
            some = rows[at : at + step]
            chunk = buffer[: some[-1] + 1 - some.start]
            reader.read_into(stored.start + some.start * size, bytes_of(chunk), end)
            selected = chunk[:: rows.step]
            out[at : at + len(some)] = selected if whole else selected[:, cols.start : cols.stop]


def _header(reader: BlockReader, where: str) -> dict[str, Stored]:
    length = bytearray(8)
    reader.read_into(0, memoryview(length))
    size = int.from_bytes(length, "little")
    if not 2 <= size <= min(reader.size - 8, MOST_HEADER_BYTES):
        raise CheckpointError(f"{where} is not a safetensors file: its header would be {size:,} bytes long")
    text = bytearray(size)
    reader.read_into(8, memoryview(text))
    return header_of(bytes(text), 8 + size, reader.size, where)


def header_of(text: bytes, first: int, size: int, where: str) -> dict[str, Stored]:
    """Return the arrays of a header. The data start at byte ``first`` of a file of ``size`` bytes."""
    values = parse_object(text, f"the header of {where}")
    values.pop("__metadata__", None)
    wrong = f"{where} is not a supported safetensors file"
    entries = validate_model(_Header, values, CheckpointError, wrong).root
    if fault := next(_faults(entries, size - first), None):
        raise CheckpointError(f"{wrong}: {fault}")
    return {
        key: Stored(_DTYPES[entry.dtype], tuple(entry.shape), first + entry.data_offsets[0])
        for key, entry in entries.items()
    }


def _faults(arrays: Mapping[str, _ArrayEntry], size: int) -> Iterator[str]:
    """Yield messages if the arrays of a header do not cover each of the ``size`` bytes after it exactly once."""
    for key, array in arrays.items():
        start, stop = array.data_offsets
        if stop > size or stop - start != math.prod(array.shape) * _DTYPES[array.dtype].itemsize:
            yield (
                f"array '{key}' does not match the file: {array.dtype} {reprlib.repr(array.shape)} at bytes {start:,} "
                f"… {stop:,} of {size:,}"
            )
        if math.prod(max(n, 1) for n in array.shape) > MOST_VALUES:
            yield f"array '{key}' has the shape {reprlib.repr(array.shape)}, which is too large"
    at = 0
    for key, array in sorted(arrays.items(), key=lambda item: item[1].data_offsets):
        start, stop = array.data_offsets
        if start != at:
            yield f"array '{key}': got start byte {start:,}, expected {at:,}, the end of the previous array"
        at = stop
    if at != size:
        yield f"got {size - at:,} bytes after its arrays, expected none"
