"""Write, read and find manifests, which make directories checkpoints and say what is in their files.

A manifest is the last file that is written, so a directory without a valid one is no checkpoint, and neither a killed
run nor a power failure leaves half of one. On several ranks the first one writes it, when it knows what the others
wrote (`hotbed.checkpoint.save`). ``docs/checkpoint-format.md`` describes every entry.

It holds the states of models, optimizers and so on as plain values. JSON has no tensors, tuples or integer keys, which
torch's states use: they are written as ``{"$kind": …}``, and tensors go into a safetensors file.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from hotbed.checkpoint.blocks import Entry
from hotbed.checkpoint.storage import Directory, directory
from hotbed.errors import CheckpointError, DamagedError, PlanError
from hotbed.plan import Plan, Tile
from hotbed.specs import Table


class Stateful(Protocol):
    """Anything whose state a checkpoint can hold: a model, an optimizer, a loader."""

    def state_dict(self) -> Mapping[str, Any]:
        """Tensors and plain values, nested in mappings and sequences."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Take over what `state_dict` gave."""
        ...


class RandomState:
    """Hold the state of torch's default random generators, on all ranks, in a checkpoint.

    Parameters
    ----------
    gather
        Rows of all ranks from those of each, in rank order; default: there is one rank.
    rank
        This one.
    """

    def __init__(self, gather: Callable[[Tensor], Tensor] = lambda rows: rows, rank: int = 0) -> None:
        self._gather, self._rank = gather, rank

    def state_dict(self) -> dict[str, Any]:
        """Generator states by rank ``[W, n]`` uint8; of CUDA that of the present device, or none ``[W, 0]``."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else torch.empty(0, dtype=torch.uint8)
        return {"cpu": self._gather(torch.get_rng_state()[None]), "cuda": self._gather(cuda[None])}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the generators. Ranks beyond those that were saved take the states in turn."""
        cpu, cuda = state_dict["cpu"], state_dict["cuda"]
        torch.set_rng_state(cpu[self._rank % len(cpu)].clone())  # torch reads a view of a tensor from its start
        if cuda.shape[1] and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda[self._rank % len(cuda)].clone())


Tensors = dict[tuple[object, ...], tuple[str, Tensor]]
"""Key and tensor by what the tensor's memory is: tied weights have several places in a state and are saved once."""


def plain(value: object, tensors: Tensors, where: str) -> object:
    """Turn a value into what JSON has; its tensors are put into ``tensors``."""
    if isinstance(value, Tensor):
        memory = (value.device, value.data_ptr(), value.shape, value.stride(), value.dtype)
        return {"$tensor": tensors.setdefault(memory, (where, value))[0]}
    if isinstance(value, Mapping):
        items = [
            (k, plain(v, tensors, f"{where}.{k}".lstrip("."))) for k, v in cast("Mapping[Any, Any]", value).items()
        ]
        if all(isinstance(k, str) and not k.startswith("$") for k, _ in items):
            return dict(items)
        if all(isinstance(k, str | int) for k, _ in items):
            return {"$items": [[k, v] for k, v in items]}
    elif isinstance(value, list | tuple):
        found = [plain(v, tensors, f"{where}.{i}".lstrip(".")) for i, v in enumerate(cast("list[Any]", value))]
        return {"$tuple": found} if isinstance(value, tuple) else found
    elif value is None or isinstance(value, str | int | float):
        return value
    raise CheckpointError(f"a state holds {type(value).__name__} at '{where}', which a checkpoint cannot hold")


def restored(value: object, tensors: Mapping[str, Tensor]) -> Any:
    """Inverse of `plain`, of what `hotbed.checkpoint.schema.check_state` has checked; KeyError for a missing tensor."""
    if isinstance(value, list):
        return [restored(v, tensors) for v in cast("list[object]", value)]
    if not isinstance(value, dict):
        return value
    entries = cast("dict[str, Any]", value)
    if "$tensor" in entries:
        return tensors[entries["$tensor"]]
    if "$items" in entries:
        return {k: restored(v, tensors) for k, v in entries["$items"]}
    if "$tuple" in entries:
        return tuple(restored(v, tensors) for v in entries["$tuple"])
    return {k: restored(v, tensors) for k, v in entries.items()}


FORMAT = 3
MANIFEST = "manifest.json"
MOST_BYTES = 256 << 20
"""Of a manifest: one of 50 TB of tables has some 220 MiB."""
NAME = re.compile(r"(last|best)-\d{8,}")
"""Names of checkpoints in a run's directory; whatever else lies there is left alone."""
_RUN = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")
"""Names of runs in the directory of a name: when they began, and a number where several did in one second."""


@dataclass(frozen=True)
class SavedMoment:
    """A moment of a table: ``per`` row or element, what untouched rows have, the name and rule of its optimizer."""

    per: Literal["row", "element"]
    initial: float
    optimizer: str
    rule: str


@dataclass(frozen=True)
class SavedTile:
    """A rectangle of a table and the arrays ``KEY/…`` of a file that hold it.

    Where it is ``keyed``, the array ``KEY/keys`` names the rows that the others hold, rising; all other rows of the
    rectangle have their initial values.
    """

    rows: range
    cols: range
    file: str
    key: str
    keyed: bool = False

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        values: dict[str, Any] = {
            "rows": [self.rows.start, self.rows.stop, self.rows.step],
            "cols": [self.cols.start, self.cols.stop],
            "file": self.file,
            "key": self.key,
        }
        return {**values, "keyed": True} if self.keyed else values

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> SavedTile:
        """What `to_dict` gave."""
        rows, cols = range(*values["rows"]), range(*values["cols"])
        return SavedTile(rows, cols, values["file"], values["key"], values.get("keyed", False))


@dataclass(frozen=True)
class SavedTable:
    """A table: what it is, and the tiles that it is in.

    ``spec.init_seed`` is the seed of the initial values, whatever the collection's was.
    """

    spec: Table
    moments: Mapping[str, SavedMoment] = field(default_factory=dict)
    tiles: tuple[SavedTile, ...] = ()

    def check(self, name: str, where: str) -> None:
        """Raise `CheckpointError` unless each cell of the table is in one of its tiles."""
        try:
            tiles = tuple(Tile(name, tile.rows, tile.cols, owner=0) for tile in self.tiles)
            Plan(1, tiles).check([replace(self.spec, name=name)])
        except PlanError as error:
            raise CheckpointError(f"{where}: the tiles of table '{name}' are not the table: {error}") from None


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint's manifest says.

    Attributes
    ----------
    step
        Optimizer steps taken.
    recipe, plan
        Plain values of both, where there are any.
    parts
        By name, the plain values of each state; tensors are named by ``{"$tensor": KEY}`` in ``NAME.safetensors``.
    tables
        By the path of the collection in the model and the table's name.
    files
        By name: size, and the SHA-256 of every block.
    """

    step: int = 0
    recipe: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, SavedTable] = field(default_factory=dict)
    files: Mapping[str, Entry] = field(default_factory=dict)

    def to_json(self) -> str:
        """JSON with its own SHA-256."""
        values: dict[str, Any] = {
            "format": FORMAT,
            "step": self.step,
            "recipe": self.recipe,
            "plan": self.plan,
            "tables": {name: _table_to_dict(table) for name, table in self.tables.items()},
            "files": self.files,
            "parts": self.parts,
        }
        return _json({**values, "sha256": _sha256_of(values)})

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(entry["bytes"] for entry in self.files.values())


def write_manifest(place: Directory, manifest: Manifest) -> None:
    """Write a checkpoint's manifest: the last of its files, which makes it one."""
    text = manifest.to_json()
    if len(text) > MOST_BYTES:
        raise CheckpointError(
            f"{place} was not saved: its manifest would have {len(text):,} bytes, must have at most {MOST_BYTES:,}; "
            "save fewer tables in one checkpoint, or smaller states"
        )
    place.write(MANIFEST, text)


def read_manifest(path: str | Path | Directory) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises
    ------
    CheckpointError
        If there is none, or it is damaged or of another format.
    """
    place = directory(path)
    if not place.has(MANIFEST):
        raise CheckpointError(f"{place} holds no {MANIFEST}, so it is not a checkpoint, or one that was never finished")
    file = f"{place}/{MANIFEST}"
    from hotbed.checkpoint import schema  # with pydantic, which only reading needs

    values = schema.parsed(place.read(MANIFEST, MOST_BYTES), file)
    version = values.pop("format", None)
    if version is None:
        raise DamagedError(f"{file} is damaged ('format' is missing); use another checkpoint")
    if version != FORMAT:
        raise CheckpointError(
            f"{place} has checkpoint format {reprlib.repr(version)}, this release reads {FORMAT}; use the release that "
            "wrote it"
        )
    if values.pop("sha256", None) != _sha256_of({"format": version, **values}):
        raise DamagedError(f"{file} is damaged (its content has changed); use another checkpoint")
    schema.check_manifest(values, file)
    tables = {name: _table_from_dict(entry) for name, entry in values["tables"].items()}
    for name, table in tables.items():
        table.check(name, file)
    keys = ("step", "recipe", "plan", "parts")
    return Manifest(**{key: values[key] for key in keys}, tables=tables, files=values["files"])


def step_of(checkpoint: Directory) -> int:
    """Read the step from a checkpoint's name."""
    return int(checkpoint.name.split("-")[1])


def checkpoints_in(path: str | Path | Directory, kind: str | None = None) -> list[Directory]:
    """List checkpoints in a directory, named ``last-STEP`` and ``best-STEP``, by step; the newest is the last."""
    place = directory(path)
    names = [m[0] for name in place.names() if (m := NAME.fullmatch(name)) and kind in (None, m[1])]
    return sorted((folder for name in names if (folder := place / name).has(MANIFEST)), key=step_of)


def runs_in(path: str | Path | Directory) -> list[Directory]:
    """List directories of runs in the directory of a name, ``runs/NAME/TIME``; the newest is the last."""
    place = directory(path)
    found = [m for name in place.names() if (m := _RUN.fullmatch(name))]
    return [place / m[0] for m in sorted(found, key=lambda m: (m[1], int(m[2] or 1)))]


def find_checkpoint(path: str | Path | Directory, *, best: bool = False) -> Directory:
    """Return the path itself if it is a checkpoint; else the newest of a run's, or of a directory of checkpoints.

    Of a directory of runs, ``runs/NAME``, it is that of the newest run that has one. ``best`` prefers the best one of a
    run that kept it.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    place = directory(path)
    if place.has(MANIFEST):
        return place
    runs = (run / "checkpoints" for run in reversed(runs_in(place)))
    for folder in (place / "checkpoints", place, *runs):
        found = checkpoints_in(folder, "best") if best else []
        found = found or checkpoints_in(folder)
        if found:
            return found[-1]
    raise CheckpointError(
        f"{place} is neither a checkpoint ({MANIFEST}), nor a run's directory or a directory of runs with one"
    )


def _table_to_dict(table: SavedTable) -> dict[str, Any]:
    spec = table.spec
    return {
        "name": spec.name,
        "rows": spec.rows,
        "dim": spec.dim,
        "dtype": spec.dtype,
        "fp32_rows": spec.fp32_rows,
        "init": {"seed": spec.init_seed, "bound": spec.bound, "version": spec.init_version},
        "moments": {name: vars(moment) for name, moment in table.moments.items()},
        "tiles": [tile.to_dict() for tile in table.tiles],
    }


def _table_from_dict(values: Mapping[str, Any]) -> SavedTable:
    init = values["init"]
    spec = Table(
        values["name"],
        values["rows"],
        values["dim"],
        init_bound=init["bound"],
        init_seed=init["seed"],
        init_version=init["version"],
        dtype=values["dtype"],
        fp32_rows=values["fp32_rows"],
    )
    tiles = tuple(SavedTile.from_dict(tile) for tile in values["tiles"])
    return SavedTable(spec, {name: SavedMoment(**m) for name, m in values["moments"].items()}, tiles)


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1)


def _sha256_of(values: Mapping[str, Any]) -> str:
    """Of a manifest without its own; reading JSON and writing it again leaves it as it was."""
    return hashlib.sha256(_json(values).encode()).hexdigest()
