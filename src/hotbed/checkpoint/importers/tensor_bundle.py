"""Read float tensors of a TensorFlow checkpoint, without TensorFlow.

``NAME.index`` is a sorted table like LevelDB's (tensorflow/core/lib/io/table_format.txt): blocks, each followed by a
type byte and a checksum, of entries ``shared, unshared, length`` (varints; the key begins with ``shared`` bytes of the
one before), the rest of the key and the value; then restart points, and how many there are. The last 48 bytes say where
the index block is, whose values say where the others are. Values are ``BundleEntryProto``
(tensorflow/core/protobuf/tensor_bundle.proto): dtype, shape, and place in ``NAME.data-00000-of-00001``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.checkpoint.importers.peer import existing
from hotbed.errors import CheckpointError

_MAGIC = (0xDB4775248B80FB57).to_bytes(8, "little")
_FOOTER = 48
_PLAIN = 0
_FLOAT = 1
_MOST_KEY_BYTES = 4096  # a key repeats the one before, so that few bytes can be very long ones


class _Entry(NamedTuple):
    dtype: int
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int


def read_bundle(path: Path) -> dict[str, Tensor]:
    """All float32 tensors by key, in memory.

    Parameters
    ----------
    path
        Of its files, up to ``.index``.

    Raises
    ------
    CheckpointError
        If a file is missing or is not what the format says.
    """
    index = existing(path.with_name(f"{path.name}.index")).read_bytes()
    data = existing(path.with_name(f"{path.name}.data-00000-of-00001")).read_bytes()
    if len(index) < _FOOTER or index[-8:] != _MAGIC:
        raise CheckpointError(f"{path}.index is no index of a TensorFlow checkpoint; copy it again")
    try:
        entries = {key: _entry(value) for key, value in _table(index) if key}
        floats = {key: entry for key, entry in entries.items() if entry.dtype == _FLOAT}
        if (total := sum(entry.size for entry in floats.values())) > len(data):
            raise ValueError(f"its tensors take {total:,} bytes, the file has {len(data):,}")
        return {key.decode(): _tensor(data, entry) for key, entry in floats.items()}
    except (IndexError, ValueError, RuntimeError, TypeError, OverflowError) as error:
        raise CheckpointError(f"{path} cannot be read as a TensorFlow checkpoint: {error}; copy it again") from None


def _tensor(data: bytes, entry: _Entry) -> Tensor:
    if entry.shard or entry.offset + entry.size > len(data):
        raise ValueError(f"a tensor lies at bytes {entry.offset:,} … of file {entry.shard}, beyond the only one")
    part = bytearray(data[entry.offset : entry.offset + entry.size])
    return torch.frombuffer(part, dtype=torch.float32).view(entry.shape)


def _table(index: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of all blocks."""
    footer, left = index[-_FOOTER:], len(index)
    _, at = _varint(footer, 0)
    _, at = _varint(footer, at)
    for _, handle in _block(index, footer[at:]):
        if (left := left - _varint(handle, _varint(handle, 0)[1])[0]) < 0:
            raise ValueError("its blocks overlap")
        yield from _block(index, handle)


def _block(index: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the block at a place: offset and size, as varints."""
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    block = index[offset : offset + size]
    if len(block) != size or index[offset + size] != _PLAIN:
        raise ValueError("its index is compressed or cut short")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")
    key, at = b"", 0
    while at < end:
        shared, at = _varint(block, at)
        unshared, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + unshared]
        at += unshared
        if len(key) > _MOST_KEY_BYTES:
            raise ValueError(f"a key has {len(key):,} bytes, at most {_MOST_KEY_BYTES:,}")
        yield key, block[at : at + length]
        at += length


def _entry(message: bytes) -> _Entry:
    dtype, shard, offset, size = (0, 0, 0, 0)
    shape: list[int] = []
    for field, value in _fields(message):
        if field == 2 and isinstance(value, bytes):
            dims = [dict(_fields(dim)) for number, dim in _fields(value) if number == 2 and isinstance(dim, bytes)]
            shape = [int(dim.get(1, 0)) for dim in dims]
        elif isinstance(value, int):
            dtype = value if field == 1 else dtype
            shard = value if field == 3 else shard
            offset = value if field == 4 else offset
            size = value if field == 5 else size
    return _Entry(dtype, tuple(shape), shard, offset, size)


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Numbers and values of a protobuf message's fields."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        kind = tag & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            yield tag >> 3, int.from_bytes(message[at : at + size], "little")
            at += size
        elif kind == 2:
            size, at = _varint(message, at)
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            raise ValueError(f"an entry has a field of kind {kind}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number in groups of 7 bits, and where it ends."""
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, at
