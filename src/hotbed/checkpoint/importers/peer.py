"""Read arrays in files of other libraries by rows, and write the models that importers find as checkpoints.

Arrays are raw float32, ``.npy``, safetensors or ``.pt``. The last are pickles: torch reads them with
``weights_only=True``, so nothing in them is run.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hotbed.checkpoint.manifest import Manifest, SavedTable, write_manifest
from hotbed.checkpoint.states import Tensors, plain
from hotbed.checkpoint.storage import Directory
from hotbed.checkpoint.tensor_files import Array, Chunk, new_directory, rows_per_chunk
from hotbed.errors import CheckpointError
from hotbed.specs import Table


class PeerArray(NamedTuple):
    """An array in a file.

    Attributes
    ----------
    shape
        Of all of it.
    rows
        Gives rows ``start … stop − 1`` as a copy in memory.
    where
        File and key, for errors.
    """

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    where: str

    @staticmethod
    def of(tensor: Tensor, where: str) -> PeerArray:
        """A tensor, which may be mapped from a file."""
        flat = torch.atleast_1d(tensor.detach())

        def rows(start: int, stop: int) -> Tensor:
            return flat[start:stop].clone()

        return PeerArray(tuple(tensor.shape), rows, where)

    def whole(self) -> Tensor:
        """All of it in memory."""
        return self.rows(0, self.shape[0]) if self.shape else self.rows(0, 1)[0]

    def matrix(self) -> PeerArray:
        """Itself; a `CheckpointError` if it is not a matrix with at least one row and column."""
        if len(self.shape) != 2 or not all(self.shape):
            raise CheckpointError(f"{self.where} has shape {list(self.shape)}; a table must be [rows, dim], not empty")
        return self


def raw_array(path: Path, shape: tuple[int, int]) -> PeerArray:
    """Little-endian float32 without a header; a `CheckpointError` if the file has another size."""
    expected, size = 4 * shape[0] * shape[1], existing(path).stat().st_size
    if size != expected:
        raise CheckpointError(
            f"{path} has {size:,} bytes, but {shape[0]:,} rows × {shape[1]} float32 are {expected:,}; copy it again"
        )

    def rows(start: int, stop: int) -> Tensor:
        count = (stop - start) * shape[1]
        values = np.fromfile(path, dtype="<f4", count=count, offset=4 * start * shape[1])
        return torch.from_numpy(values).view(-1, shape[1])

    return PeerArray(shape, rows, f"{path}")


def npy_array(path: Path) -> PeerArray:
    """An array of a ``.npy`` file."""
    try:
        array = np.load(existing(path), mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise CheckpointError(f"{path} is no .npy file that can be read: {error}") from None
    if array.dtype not in (np.float32, np.float16, np.float64):
        raise CheckpointError(f"{path} holds {array.dtype}, must be float32, float16 or float64")
    return _numpy_array(array, f"{path}")


def arrays_of(path: Path) -> dict[str, PeerArray]:
    """Arrays of a file, or of all files of a directory, by name.

    An array that has no name, in ``NAME.npy`` or ``NAME.pt``, is ``NAME.weight``.

    Raises
    ------
    CheckpointError
        If there are none, or two have one name.
    """
    if not path.is_dir():
        return _arrays_of_file(path)
    found: dict[str, PeerArray] = {}
    for file in sorted(f for f in path.iterdir() if f.suffix in _READERS):
        for name, array in _arrays_of_file(file).items():
            if name in found:
                raise CheckpointError(f"'{name}' is in {found[name].where} and in {file}; keep one of them")
            found[name] = array
    if not found:
        raise CheckpointError(f"{path} holds no {', '.join(_READERS)} file")
    return found


def load_pt(path: Path, allowed: list[Any] | None = None) -> Any:
    """What a ``.pt`` file holds, tensors mapped into memory where its form lets them be.

    Parameters
    ----------
    path
        The file.
    allowed
        Further types that it may hold, as `torch.serialization.safe_globals` takes them.
    """
    try:
        with torch.serialization.safe_globals(allowed or []):
            return torch.load(existing(path), map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # a damaged pickle may raise any
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{path} cannot be read: {reason}; only tensors and plain values are taken from .pt files, so save "
            "model.state_dict()"
        ) from None


def existing(path: Path) -> Path:
    """The path; a `CheckpointError` if there is no such file."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; copy the whole checkpoint")
    return path


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
    return {k: PeerArray.of(t, f"{path}: '{k}'") for k, t in found.items() if isinstance(t, Tensor)}


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

        return PeerArray(shape, rows, f"{path}: '{key}'")

    return {key: array(key) for key in file.keys()}  # noqa: SIM118


_READERS: Mapping[str, Callable[[Path], dict[str, PeerArray]]] = {
    ".safetensors": _safetensors,
    ".npy": _npy,
    ".pt": _pt,
}


def _arrays_of_file(path: Path) -> dict[str, PeerArray]:
    if path.suffix not in _READERS:
        raise CheckpointError(f"{path} is none of {', '.join(_READERS)}; save the state_dict as one of these")
    return _READERS[path.suffix](path)


Peer = Literal["nvidia_dlrm", "tf2", "torchrec", "facebook_dlrm", "embedding_bag"]


class PeerModel(NamedTuple):
    """A model of another library.

    Attributes
    ----------
    tables
        Rows ``[R, D]`` by table.
    dense
        All else, by the names of hotbed's model.
    """

    tables: Mapping[str, PeerArray]
    dense: Mapping[str, Tensor]


def named(arrays: Sequence[PeerArray], names: Sequence[str] | None) -> dict[str, PeerArray]:
    """Tables by their names; by default they are called ``cat_0``, ``cat_1``, ….

    Raises
    ------
    CheckpointError
        If there are as many names as tables, or a name comes twice.
    """
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
    states = {"model": plain(model.dense, tensors, "")}
    saved: dict[str, SavedTable] = {}
    for name, rows in model.tables.items():
        table = Table(name, rows.shape[0], rows.shape[1])
        saved[f"{collection}.{name}"] = SavedTable(replace(table, init_seed=table.seed(0), init_bound=table.bound))
    with new_directory(target) as (place, writer):
        if tensors:
            writer.write("model.safetensors", {key: Array.of(tensor) for key, tensor in tensors.values()})
        tiles = writer.write_chunks(_chunks(model, collection, progress), "tables")
        tables = {name: replace(table, tiles=tuple(tiles[name])) for name, table in saved.items()}
        manifest = Manifest(parts=states, tables=tables, files=writer.entries())
        write_manifest(place, manifest)
    return manifest


def _chunks(model: PeerModel, collection: str, progress: Callable[[int, int], None]) -> Iterator[Chunk]:
    total = sum(rows.shape[0] * rows.shape[1] for rows in model.tables.values())
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
            last = min(first + step, count)
            yield Chunk(f"{collection}.{name}", range(first, last), range(dim), {"weight": chunk(array, first, last)})
