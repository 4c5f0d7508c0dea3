"""Read arrays in files of other libraries by rows, and write the models that importers find as checkpoints.

Arrays are raw float32, ``.npy``, safetensors or ``.pt``. The last are pickles: torch reads them with
``weights_only=True``, so nothing in them is run.
"""

from __future__ import annotations

import math
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotbed.checkpoint.contents import Tensors, to_plain_value
from hotbed.checkpoint.manifest import Manifest, SavedTable, write_manifest
from hotbed.checkpoint.storage import Directory
from hotbed.checkpoint.tensor_files import Array, Chunk, rows_per_chunk, write_directory
from hotbed.checks import is_int
from hotbed.errors import CheckpointError, SpecError
from hotbed.parsing import TextError, map_npy
from hotbed.specs import Table


class PeerArray(NamedTuple):
    """An array in a file: ``rows`` returns rows ``start … stop − 1`` as a copy in memory.

    ``where`` is its file and key, for errors.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    where: str
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(tensor: Tensor, where: str) -> PeerArray:
        """A tensor, which may be mapped from a file."""
        flat = torch.atleast_1d(tensor.detach())

        def rows(start: int, stop: int) -> Tensor:
            return flat[start:stop].clone()

        return PeerArray(tuple(tensor.shape), rows, where, tensor.dtype)

    def whole(self) -> Tensor:
        """All of it in memory."""
        return self.rows(0, self.shape[0]) if self.shape else self.rows(0, 1)[0]

    def matrix(self) -> PeerArray:
        """Itself; a `CheckpointError` if it is not a matrix with at least one row and column."""
        if len(self.shape) != 2 or not all(self.shape):
            raise CheckpointError(f"{self.where} has shape {list(self.shape)}; a table must be [rows, dim], not empty")
        if not self.dtype.is_floating_point:
            raise CheckpointError(
                f"{self.where} holds {self.dtype}; a table must be floating point, save it as float32"
            )
        return self


def existing(path: Path) -> Path:
    """The path; a `CheckpointError` if there is no such file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; copy the whole checkpoint")
    return path


def raw_array(path: Path, shape: tuple[object, ...]) -> PeerArray:
    """Little-endian float32 without a header; a `CheckpointError` if the file has another size."""
    if len(shape) != 2 or not all(is_int(length) and length > 0 for length in shape):
        raise CheckpointError(f"{path} is said to have shape {list(shape)}, must be [rows, dim]; copy it again")
    count, dim = cast("tuple[int, int]", shape)
    expected, size = 4 * count * dim, existing(path).stat().st_size
    if size != expected:
        raise CheckpointError(
            f"{path} has {size:,} bytes, but {count:,} rows × {dim} float32 are {expected:,}; copy it again"
        )

    def rows(start: int, stop: int) -> Tensor:
        values = np.fromfile(path, dtype="<f4", count=(stop - start) * dim, offset=4 * start * dim)
        return torch.from_numpy(values).view(-1, dim)

    return PeerArray((count, dim), rows, f"{path}")


def npy_array(path: Path) -> PeerArray:
    """An array of a ``.npy`` file."""
    try:
        array = map_npy(existing(path))
    except TextError as error:
        raise CheckpointError(f"{path} {error}; copy it again") from None
    if array.dtype.name not in ("float32", "float16", "float64"):
        raise CheckpointError(f"{path} holds {array.dtype}, must be float32, float16 or float64")
    return _numpy_array(array, f"{path}")


def load_pt(path: Path, allowed: list[Any] | None = None) -> Any:
    """Load a ``.pt`` file, with tensors mapped into memory where its form lets them be.

    ``allowed`` are further types that it may hold, as `torch.serialization.safe_globals` takes them.
    """
    try:
        _refuse_packed(existing(path))
        with torch.serialization.safe_globals(allowed or []):
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise any
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read: {reason}; only tensors and plain values are taken from .pt files, so save "
            "model.state_dict()"
        ) from None
    largest, found = 8 * path.stat().st_size, 0
    for key, tensor in _tensors(value, ""):
        _refuse_unstored(tensor, f"{path}: '{key}'")
        found += tensor.nbytes
        if found > largest:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes, but its tensors are over {largest:,}, as several are views "
                "of the same numbers; save clones of them"
            )
    return value


def _refuse_packed(path: Path) -> None:
    """Raise `CheckpointError` for a compressed zip file, of which a few bytes may be very many; torch writes none."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
                    raise CheckpointError(
                        f"{path}: '{entry.filename}' is compressed, {entry.file_size:,} bytes in a file of "
                        f"{path.stat().st_size:,}; save it with torch.save, which does not compress"
                    )


def _tensors(value: object, key: str) -> Iterator[tuple[str, Tensor]]:
    """All tensors within plain values, by keys with dots."""
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in cast("Mapping[object, object]", value).items():
            yield from _tensors(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(cast("Sequence[object]", value)):
            yield from _tensors(inner, f"{key}.{i}".lstrip("."))


def _refuse_unstored(tensor: Tensor, where: str) -> None:
    """Raise `CheckpointError` unless a tensor is an array whose elements are all in the file."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_complex():
        raise CheckpointError(f"{where} is no plain tensor, but {tensor.type()}; save real numbers, dense, on the CPU")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{where} has shape {list(tensor.shape)}, {tensor.nbytes:,} bytes, but the file has "
            f"{tensor.untyped_storage().nbytes():,} of it; save a clone of what was expanded"
        )


def _numpy_array(array: Any, where: str) -> PeerArray:
    def rows(start: int, stop: int) -> Tensor:
        return torch.from_numpy(np.array(np.atleast_1d(array)[start:stop], np.float32))

    return PeerArray(tuple(array.shape), rows, where)


def _npy(path: Path) -> dict[str, PeerArray]:
    return {f"{path.stem}.weight": npy_array(path)}


def _pt(path: Path) -> dict[str, PeerArray]:
    value = load_pt(path)
    if isinstance(value, Tensor):
        return {f"{path.stem}.weight": PeerArray.of(value, f"{path}")}
    if isinstance(value, Mapping) and isinstance(value.get("state_dict"), Mapping):
        value = value["state_dict"]
    if not isinstance(value, Mapping):
        raise CheckpointError(f"{path} holds {type(value).__name__}, must be a tensor or a state_dict")
    found = cast("Mapping[str, object]", value)
    return {str(k): PeerArray.of(t, f"{path}: '{k}'") for k, t in found.items() if isinstance(t, Tensor)}


def _safetensors(path: Path) -> dict[str, PeerArray]:
    try:
        file: Any = safe_open(existing(path), framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no safetensors file: {error}") from None

    def array(key: str) -> PeerArray:
        part: Any = file.get_slice(key)
        shape = tuple(part.get_shape())

        def rows(start: int, stop: int) -> Tensor:
            return part[start:stop] if shape else file.get_tensor(key)[None]

        dtype = part[0:0].dtype if shape else file.get_tensor(key).dtype
        return PeerArray(shape, rows, f"{path}: '{key}'", dtype)

    return {key: array(key) for key in file.keys()}  # noqa: SIM118


READERS: Mapping[str, Callable[[Path], dict[str, PeerArray]]] = {
    ".safetensors": _safetensors,
    ".npy": _npy,
    ".pt": _pt,
}


def arrays_of_file(path: Path) -> dict[str, PeerArray]:
    """Return the arrays of a file by name."""
    if path.suffix not in READERS:
        raise CheckpointError(f"{path} is none of {', '.join(READERS)}; save the state_dict as one of these")
    return READERS[path.suffix](path)


Peer = Literal["nvidia_dlrm", "torchrec", "facebook_dlrm", "embedding_bag", "dcp"]
Names = Sequence[str] | Mapping[str, str] | None
"""Names of tables; or by table the name of its weight."""


class PeerModel(NamedTuple):
    """A model of another library: rows ``[R, D]`` by table, and the rest by the names of hotbed's model."""

    tables: Mapping[str, PeerArray]
    dense: Mapping[str, Tensor]


def named(arrays: Sequence[PeerArray], names: Sequence[str] | None) -> dict[str, PeerArray]:
    """Return tables by their names, each of which must occur once; by default ``cat_0``, ``cat_1``, …."""
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
    states = {"model": to_plain_value(model.dense, tensors, "")}
    saved: dict[str, SavedTable] = {}
    for name, rows in model.tables.items():
        try:
            table = Table(name, rows.shape[0], rows.shape[1])
        except SpecError as error:
            raise CheckpointError(f"{rows.where} can be no table of hotbed's: {error}") from None
        saved[f"{collection}.{name}"] = SavedTable.of(replace(table, init_seed=table.seed(0), init_bound=table.bound))
    with write_directory(target) as (place, writer):
        if tensors:
            writer.write("model.safetensors", {key: Array.of(tensor) for key, tensor in tensors.values()})
        tiles = writer.write_chunks(_chunks(model, collection, progress), "tables")
        tables = {name: table.model_copy(update={"tiles": tuple(tiles[name])}) for name, table in saved.items()}
        manifest = Manifest(parts=states, tables=tables, files=writer.entries())
        write_manifest(place, manifest)
    return manifest


def _chunks(model: PeerModel, collection: str, progress: Callable[[int, int], None]) -> Iterator[Chunk]:
    total = sum(math.prod(array.shape) for array in model.tables.values())
    done = 0

    def chunk(array: PeerArray, first: int, last: int) -> Array:
        def rows(start: int, stop: int) -> Tensor:
            nonlocal done
            done += (stop - start) * array.shape[1]
            progress(done, total)
            return array.rows(first + start, first + stop).to(torch.float32)

        return Array(torch.float32, (last - first, array.shape[1]), rows)

    for name, array in model.tables.items():
        count, dim = array.shape
        step = rows_per_chunk(4 * dim)
        for first in range(0, count, step):
            rows = range(first, min(first + step, count))
            weight = chunk(array, rows.start, rows.stop)
            yield Chunk(f"{collection}.{name}", rows, range(dim), {"weight": weight})
