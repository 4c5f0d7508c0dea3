"""Read tensors from directories of ``torch.distributed.checkpoint`` by rows, with any sharding.

``.metadata`` is a pickle. For each tensor it has the dtype, the shape, and chunks with ``offsets`` and ``sizes``. For
each chunk it has the file, the offset and the length. The bytes of a chunk are the output of ``torch.save``: an
uncompressed zip file with ``data.pkl`` (the layout of a tensor in its storage) and ``data/0`` (the storage). The
pickles are not executed. Known classes become plain records, and all other classes raise an error. Rows are read
directly from the file, so a chunk may be larger than memory.

Plain tensors have one chunk. ``ShardedTensor``s (TorchRec) and ``DTensor``s (FSDP2, tensor parallelism) have one chunk
per shard. The module was written for torch 2.13. The format has not changed since torch 2.2.
"""

from __future__ import annotations

import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.checkpoint.importers.peer import PeerArray, require_file
from hotbed.checks import is_int
from hotbed.errors import CheckpointError
from hotbed.parsing import TextError, read_limited

METADATA = ".metadata"
MOST_METADATA_BYTES = 1 << 30
MOST_LAYOUT_BYTES = 1 << 16
_LOCAL_HEADER = 30
_DTYPES = {
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "DoubleStorage": torch.float64,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


class _Chunk(NamedTuple):
    """A rectangle of a tensor: its position, its shape, and its bytes ``start … start + length − 1`` of a file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: Path
    start: int
    length: int


class _Stored(NamedTuple):
    """The storage of a chunk: the ``start`` of its numbers in the file, and their layout."""

    start: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numbers: int


def is_dcp(path: Path) -> bool:
    """Return whether a path is a directory of ``torch.distributed.checkpoint``."""
    return (path / METADATA).is_file()


def dcp_arrays(path: Path) -> dict[str, PeerArray]:
    """Return the tensors of a directory by their keys. Other values are ignored."""
    metadata = _unpickle(path / METADATA)
    try:
        storage = {
            (index.get("fqn"), _numbers(index.get("offset") or (), path)): info
            for index, info in _items(metadata, "storage_data", path)
        }
        entries = [(str(k), e) for k, e in _items(metadata, "state_dict_metadata", path) if "size" in e.state]
        return {key: _array(path, key, entry, storage) for key, entry in entries}
    except (AttributeError, TypeError) as error:  # a value has the wrong type
        raise CheckpointError(f"{path / METADATA} is damaged: {error}. Copy the whole checkpoint") from None


def _array(path: Path, key: str, entry: _Record, storage: Mapping[Any, _Record]) -> PeerArray:
    """Return the array of a tensor. Its chunks are read later."""
    where, size = f"{path}: '{key}'", _numbers(entry.get("size"), path)
    properties = entry.get("properties")
    dtype = properties.first() if isinstance(properties, _Record) else None
    if not isinstance(dtype, torch.dtype) or dtype not in _DTYPES.values():
        raise CheckpointError(f"{where}: dtype: got {dtype}, expected one of {', '.join(map(str, _DTYPES.values()))}")
    chunks: list[_Chunk] = []
    for chunk in entry.get("chunks") or ():
        offsets, sizes = _numbers(chunk.get("offsets"), path), _numbers(chunk.get("sizes"), path)
        info = storage.get((key, offsets))
        if info is None:
            raise CheckpointError(f"{where} has a chunk at {list(offsets)} without a file. Save it again")
        if transforms := info.get("transform_descriptors"):
            raise CheckpointError(f"{where} is transformed ({transforms}). Save it without extensions")
        start, length = info.get("offset"), info.get("length")
        name = PurePosixPath(str(info.get("relative_path")))
        if name.is_absolute() or ".." in name.parts or not (is_int(start) and is_int(length)) or start < 0:
            raise CheckpointError(
                f"{where}: got file {str(name)!r} at byte {start}, expected a file in the directory. Save it again"
            )
        if math.prod(sizes) * dtype.itemsize > length:
            raise CheckpointError(
                f"{where}: chunk {list(sizes)} in {name}: got {length:,} bytes, expected at least "
                f"{math.prod(sizes) * dtype.itemsize:,}. Copy the whole checkpoint"
            )
        chunks.append(_Chunk(offsets, sizes, path / name, start, length))
    if fault := next(_faults(size, chunks), None):
        raise CheckpointError(f"{where} {fault}")

    def rows(first: int, last: int) -> Tensor:
        out = torch.empty((last - first, *size[1:]) if size else (1,), dtype=dtype)
        for chunk in chunks:
            begin, end = (chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]) if size else (0, 1)
            low, high = max(first, begin), min(last, end)
            if low < high and all(chunk.sizes):
                place = tuple(slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True))
                out[(slice(low - first, high - first), *place)] = _rows(chunk, low - begin, high - begin, dtype, where)
        return out

    return PeerArray(size, rows, where, dtype)


def _faults(size: tuple[int, ...], chunks: Sequence[_Chunk]) -> Iterator[str]:
    """Yield messages if chunks are outside of a tensor, overlap, or do not cover it."""
    for chunk in chunks:
        fits = len(chunk.offsets) == len(chunk.sizes) == len(size)
        if not fits or any(o + s > n for o, s, n in zip(chunk.offsets, chunk.sizes, size, strict=True)):
            yield f"is {list(size)}, but has a chunk {list(chunk.sizes)} at {list(chunk.offsets)}. Save it again"
    full = [chunk for chunk in chunks if all(chunk.sizes)]
    cells, wanted = sum(math.prod(chunk.sizes) for chunk in full), math.prod(size)
    if cells != wanted:
        yield f"is {list(size)}: got {cells:,} numbers in its chunks, expected {wanted:,}. Copy the whole checkpoint"
    if len(full) < 2:
        return
    first = np.array([chunk.offsets for chunk in full])
    last = first + np.array([chunk.sizes for chunk in full])
    order = np.argsort(first[:, 0], kind="stable")
    first, last = first[order], last[order]
    for i in range(len(full) - 1):
        stop = int(np.searchsorted(first[:, 0], last[i, 0]))  # later chunks start below this chunk
        other = slice(i + 1, max(stop, i + 1))
        if ((first[other] < last[i]) & (last[other] > first[i])).all(1).any():
            yield f"has chunks that overlap at {first[i].tolist()}. Save it again"


def _rows(chunk: _Chunk, first: int, last: int, dtype: torch.dtype, where: str) -> Tensor:
    """Read rows of a chunk. If its rows are not contiguous, read the whole chunk."""
    stored = _find_storage(chunk, where)
    if stored.dtype != dtype or stored.size != chunk.sizes:
        raise CheckpointError(
            f"{chunk.file}: chunk of {where}: got {stored.dtype} {list(stored.size)}, expected {dtype} "
            f"{list(chunk.sizes)}. Copy the whole checkpoint"
        )
    expected = tuple(torch.empty(stored.size, device="meta").stride())
    width = math.prod(stored.size[1:])
    if stored.stride == expected and stored.size:
        start, count = stored.offset + first * width, (last - first) * width
        return _read(chunk.file, stored, start, count).view(last - first, *stored.size[1:])
    whole = _read(chunk.file, stored, 0, stored.numbers).as_strided(stored.size, stored.stride, stored.offset)
    return whole[first:last] if stored.size else whole[None]


def _read(file: Path, stored: _Stored, start: int, count: int) -> Tensor:
    """Read ``count`` numbers of a storage, from number ``start`` on."""
    size = stored.dtype.itemsize
    raw = np.fromfile(file, dtype=np.uint8, count=count * size, offset=stored.start + start * size)
    return torch.from_numpy(raw).view(stored.dtype)


def _find_storage(chunk: _Chunk, where: str) -> _Stored:
    """Find a chunk's numbers in the output of ``torch.save``."""
    try:
        with require_file(chunk.file).open("rb") as stream:
            region = _Region(stream, chunk.start, chunk.length)
            with zipfile.ZipFile(region) as archive:
                entries = {entry.filename.split("/", 1)[-1]: entry for entry in archive.infolist()}
                layout, data = entries["data.pkl"], entries["data/0"]
                if layout.file_size > MOST_LAYOUT_BYTES or data.compress_type != zipfile.ZIP_STORED:
                    raise ValueError("is compressed, or not a tensor")
                if archive.read(entries["byteorder"]) != b"little":
                    raise ValueError("is big-endian")
                (dtype, count), offset, size, stride = _Layout(io.BytesIO(archive.read(layout))).load()
            region.seek(data.header_offset)
            header = region.read(_LOCAL_HEADER)
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            start = data.header_offset + _LOCAL_HEADER + lengths
        numbers = (count, offset, *size, *stride)
        if dtype not in _DTYPES.values() or not all(is_int(n) and n >= 0 for n in numbers):
            raise ValueError("is not a plain tensor")
        furthest = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + 1
        in_chunk = start + count * dtype.itemsize <= chunk.length
        if furthest > count or count * dtype.itemsize != data.file_size or not in_chunk:
            raise ValueError("has fewer numbers than its shape")
        return _Stored(chunk.start + start, dtype, tuple(size), tuple(stride), offset, count)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged archive or pickle may raise any error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{chunk.file}: bytes {chunk.start:,} to {chunk.start + chunk.length:,} of {where} cannot be read: "
            f"{reason}. Copy the whole checkpoint"
        ) from None


class _Region(io.RawIOBase):
    """Bytes ``start … start + length − 1`` of a file, as a file."""

    def __init__(self, stream: Any, start: int, length: int) -> None:
        super().__init__()
        self._stream, self._start, self._length, self._at = stream, start, length, 0

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def tell(self) -> int:
        return self._at

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = max(offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence], 0)
        return self._at

    @override
    def readinto(self, buffer: Any) -> int:
        count = max(min(len(buffer), self._length - self._at), 0)
        self._stream.seek(self._start + self._at)
        found = self._stream.read(count)
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)


class _Record:
    """The pickled state of an instance of a known class."""

    args: tuple[object, ...] = ()
    state: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, *args: object) -> None:  # pickles of newer protocols do not call this
        self.args = args

    def __setstate__(self, state: object) -> None:
        self.args, self.state = (state,), {}
        if isinstance(state, Mapping):
            self.state = {str(k): v for k, v in cast("Mapping[object, Any]", state).items()}

    def get(self, name: str) -> Any:
        """Return an attribute, or None if it does not exist."""
        return self.state.get(name)

    def first(self) -> Any:
        """Return the first element of a pickled tuple, or else the attribute ``dtype``."""
        value = self.args[0] if self.args else None
        return cast("tuple[Any, ...]", value)[0] if isinstance(value, tuple) and value else self.get("dtype")


_RECORDS = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {("torch.distributed.checkpoint.filesystem", "_StorageInfo"), ("torch.serialization", "_get_layout")}


class _Plain(pickle.Unpickler):
    """Create records for known classes, and raise an error for all other classes."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _RECORDS:
            return _Record
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout):
            return getattr(torch, name)
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"):
            return PurePosixPath
        raise pickle.UnpicklingError(f"got class {module}.{name}, expected classes of torch.distributed.checkpoint")


def _layout(storage: Any, offset: Any, size: Any, stride: Any, *_: object) -> tuple[Any, ...]:
    """Return the layout instead of the tensor that torch would create from these arguments."""
    return storage, offset, size, stride


class _Layout(_Plain):
    """Read the layout of a tensor in its storage: ``((dtype, numbers), offset, size, stride)``."""

    @override
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _layout
        if module == "torch" and name in _DTYPES:
            return _DTYPES[name]
        return super().find_class(module, name)

    @override
    def persistent_load(self, pid: Any) -> Any:
        _, dtype, key, _, count = pid
        if key != "0":
            raise pickle.UnpicklingError(f"its numbers: got data/{key}, expected data/0")
        return dtype, count


def _unpickle(path: Path) -> _Record:
    try:
        found = _Plain(io.BytesIO(read_limited(require_file(path), MOST_METADATA_BYTES))).load()
    except CheckpointError:
        raise
    except TextError as error:
        raise CheckpointError(f"{path} {error}. Copy it again") from None
    except Exception as error:  # a damaged pickle may raise any error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{path} cannot be read: {reason}. Copy the whole checkpoint") from None
    if not isinstance(found, _Record):
        raise CheckpointError(f"{path}: got {type(found).__name__}, expected metadata. Copy the whole checkpoint")
    return found


def _items(metadata: _Record, name: str, path: Path) -> list[tuple[Any, Any]]:
    found = metadata.get(name)
    if not isinstance(found, Mapping):
        raise CheckpointError(f"{path / METADATA} has no {name}. Copy the whole checkpoint")
    return list(cast("Mapping[Any, Any]", found).items())


def _numbers(value: object, path: Path) -> tuple[int, ...]:
    numbers = cast("Sequence[object]", value) if isinstance(value, Sequence) else None
    if numbers is None or not all(is_int(n) and n >= 0 for n in numbers):
        raise CheckpointError(f"{path / METADATA}: got {str(value)[:80]}, expected a shape. Copy it again")
    return tuple(cast("Sequence[int]", numbers))
