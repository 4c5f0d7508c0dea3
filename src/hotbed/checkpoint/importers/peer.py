"""Read arrays from files of other libraries by rows, and write imported models as checkpoints.

Arrays are in raw float32, ``.npy``, safetensors or ``.pt`` files. ``.pt`` files are pickles, which torch reads with
``weights_only=True``, so that no code in them is executed.
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
    """An array in a file. ``rows(start, stop)`` returns a copy of the rows ``start … stop − 1``.

    ``where`` is the array's file and key, for messages.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    where: str
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(tensor: Tensor, where: str) -> PeerArray:
        """Return the array of a tensor, which may be mapped from a file."""
        flat = torch.atleast_1d(tensor.detach())

        def rows(start: int, stop: int) -> Tensor:
            return flat[start:stop].clone()

        return PeerArray(tuple(tensor.shape), rows, where, tensor.dtype)

    def whole(self) -> Tensor:
        """Read the whole array into memory."""
        return self.rows(0, self.shape[0]) if self.shape else self.rows(0, 1)[0]

    def matrix(self) -> PeerArray:
        """Return itself. Raise `CheckpointError` if it is not a nonempty matrix of floating-point numbers."""
        if len(self.shape) != 2 or not all(self.shape):
            raise CheckpointError(f"{self.where}: shape: got {list(self.shape)}, expected a nonempty [rows, dim]")
        if not self.dtype.is_floating_point:
            raise CheckpointError(f"{self.where}: got {self.dtype}, expected floating point. Save it as float32")
        return self


def require_file(path: Path) -> Path:
    """Return the path. Raise `CheckpointError` if the file does not exist."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing. Copy the whole checkpoint")
    return path


def raw_array(path: Path, shape: tuple[object, ...]) -> PeerArray:
    """Return an array of little-endian float32 without a header. Raise `CheckpointError` if the size is wrong."""
    if len(shape) != 2 or not all(is_int(length) and length > 0 for length in shape):
        raise CheckpointError(f"{path}: shape: got {list(shape)}, expected [rows, dim]. Copy it again")
    count, dim = cast("tuple[int, int]", shape)
    expected, size = 4 * count * dim, require_file(path).stat().st_size
    if size != expected:
        raise CheckpointError(
            f"{path}: got {size:,} bytes, expected {expected:,} for {count:,} rows × {dim} float32. Copy it again"
        )

    def rows(start: int, stop: int) -> Tensor:
        values = np.fromfile(path, dtype="<f4", count=(stop - start) * dim, offset=4 * start * dim)
        return torch.from_numpy(values).view(-1, dim)

    return PeerArray((count, dim), rows, f"{path}")


def npy_array(path: Path) -> PeerArray:
    """Return the array of a ``.npy`` file."""
    try:
        array = map_npy(require_file(path))
    except TextError as error:
        raise CheckpointError(f"{path} {error}. Copy it again") from None
    if array.dtype.name not in ("float32", "float16", "float64"):
        raise CheckpointError(f"{path}: got {array.dtype}, expected float32, float16 or float64")
    return _numpy_array(array, f"{path}")


def load_pt(path: Path, allowed: list[Any] | None = None) -> Any:
    """Load a ``.pt`` file. Tensors are mapped into memory if the file is a zip file.

    ``allowed`` are additional types in the file, in the form of `torch.serialization.safe_globals`.
    """
    try:
        _refuse_compressed(require_file(path))
        with torch.serialization.safe_globals(allowed or []):
            value = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle may raise any error
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read: {reason}. Only tensors and plain values are read from .pt files, so save "
            "model.state_dict()"
        ) from None
    largest, found = 8 * path.stat().st_size, 0
    for key, tensor in _tensors(value, ""):
        _refuse_unstored(tensor, f"{path}: '{key}'")
        found += tensor.nbytes
        if found > largest:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes: got tensors of over {largest:,} bytes, because several are "
                "views of the same numbers. Save clones of them"
            )
    return value


def _refuse_compressed(path: Path) -> None:
    """Raise `CheckpointError` for a compressed zip file, which may be a zip bomb. torch does not compress."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
                    raise CheckpointError(
                        f"{path}: '{entry.filename}' is compressed: got {entry.file_size:,} bytes in a file of "
                        f"{path.stat().st_size:,}. Save it with torch.save, which does not compress"
                    )


def _tensors(value: object, key: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested plain values, with dotted keys."""
    if isinstance(value, Tensor):
        yield key, value
    elif isinstance(value, Mapping):
        for name, inner in cast("Mapping[object, object]", value).items():
            yield from _tensors(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(cast("Sequence[object]", value)):
            yield from _tensors(inner, f"{key}.{i}".lstrip("."))


def _refuse_unstored(tensor: Tensor, where: str) -> None:
    """Raise `CheckpointError` if a tensor is not a plain array with all elements in the file."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_complex():
        raise CheckpointError(f"{where}: got {tensor.type()}, expected a dense tensor of real numbers on the CPU")
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        raise CheckpointError(
            f"{where}: got {tensor.untyped_storage().nbytes():,} bytes, expected {tensor.nbytes:,} for the shape "
            f"{list(tensor.shape)}. Save a clone of the expanded tensor"
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
        raise CheckpointError(f"{path}: got {type(value).__name__}, expected a tensor or a state_dict")
    found = cast("Mapping[str, object]", value)
    return {str(k): PeerArray.of(t, f"{path}: '{k}'") for k, t in found.items() if isinstance(t, Tensor)}


def _safetensors(path: Path) -> dict[str, PeerArray]:
    try:
        file: Any = safe_open(require_file(path), framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from None

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
        raise CheckpointError(
            f"file type: got {path}, expected one of {', '.join(READERS)}. Save the state_dict as one"
        )
    return READERS[path.suffix](path)


Peer = Literal["nvidia_dlrm", "torchrec", "facebook_dlrm", "embedding_bag", "dcp"]
Names = Sequence[str] | Mapping[str, str] | None
"""Names of tables, or names of weights by table."""


class PeerModel(NamedTuple):
    """A model of another library: tables ``[R, D]`` by name, and other tensors by their names in hotbed's model."""

    tables: Mapping[str, PeerArray]
    dense: Mapping[str, Tensor]


def name_tables(arrays: Sequence[PeerArray], names: Sequence[str] | None) -> dict[str, PeerArray]:
    """Return tables by unique names. Default: ``cat_0``, ``cat_1``, …."""
    given = [f"cat_{i}" for i in range(len(arrays))] if names is None else list(names)
    if len(given) != len(arrays):
        raise CheckpointError(f"names: got {len(given)} names, expected {len(arrays)}, one for each table")
    for name in given:
        if not name or given.count(name) > 1:
            raise CheckpointError(f"names: got '{name}' {given.count(name)} times, expected unique nonempty names")
    return dict(zip(given, arrays, strict=True))


def write_peer(
    model: PeerModel, target: str | Path | Directory, collection: str, progress: Callable[[int, int], None]
) -> Manifest:
    """Write a model as a checkpoint. See `hotbed.checkpoint.importers.import_checkpoint`."""
    if not model.tables:
        raise CheckpointError("tables: got none, expected at least one. Pass the source's format and tables")
    tensors: Tensors = {}
    states = {"model": to_plain_value(model.dense, tensors, "")}
    saved: dict[str, SavedTable] = {}
    for name, rows in model.tables.items():
        try:
            table = Table(name, rows.shape[0], rows.shape[1])
        except SpecError as error:
            raise CheckpointError(f"{rows.where} is not valid as a table: {error}") from None
        saved[f"{collection}.{name}"] = SavedTable.of(replace(table, init_seed=table.seed(0), init_bound=table.bound))
    with write_directory(target) as (place, writer):
        if tensors:
            writer.write("model.safetensors", {key: Array.of(tensor) for key, tensor in tensors.values()})
        tiles = writer.write_chunks(_chunks(model, collection, progress), "tables")
        tables = {name: table.model_copy(update={"tiles": tuple(tiles[name])}) for name, table in saved.items()}
        return write_manifest(place, Manifest(parts=states, tables=tables, files=writer.entries()))


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
