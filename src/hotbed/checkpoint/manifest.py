"""Write, read and find manifests, which make directories checkpoints and say what is in their files.

A manifest is the last file that is written, so a directory without a valid one is no checkpoint, and neither a killed
run nor a power failure leaves half of one. On several ranks the first one writes it, when it knows what the others
wrote (`hotbed.checkpoint.save`). ``docs/checkpoint-format.md`` describes every entry.

It holds the states of models, optimizers and so on as plain values (`hotbed.checkpoint.states`). A differential
checkpoint has only the rows that changed since a full one beside it, its base; `read_manifest` reads both.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from hotbed.checkpoint.blocks import Entry
from hotbed.checkpoint.storage import Directory, directory
from hotbed.errors import CheckpointError, DamagedError, PlanError
from hotbed.plan import Plan, Tile
from hotbed.specs import Table

FORMAT = 1
_FULL = f'{{\n "format": {FORMAT},\n "base": null,'.encode()
"""What the manifest of a full checkpoint begins with."""
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

    ``spec.init_seed`` is the seed of the initial values, whatever the collection's was. ``base`` is the same table in
    the base of a differential checkpoint, which has the rows that the keys of these tiles do not name.
    """

    spec: Table
    moments: Mapping[str, SavedMoment] = field(default_factory=dict)
    tiles: tuple[SavedTile, ...] = ()
    base: SavedTable | None = None

    def check(self, name: str, where: str) -> None:
        """Raise `CheckpointError` unless each cell of the table is in one of its tiles."""
        try:
            tiles = tuple(Tile(name, tile.rows, tile.cols, owner=0) for tile in self.tiles)
            Plan(1, tiles).check([replace(self.spec, name=name)])
        except PlanError as error:
            raise CheckpointError(f"{where}: the tiles of table '{name}' are not the table: {error}") from None


@dataclass(frozen=True)
class Base:
    """The full checkpoint, beside a differential one, that has all other rows: its directory, and its manifest's hash.

    ``files`` are the entries of its files, once they are read.
    """

    name: str
    sha256: str
    files: Mapping[str, Entry] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """All that a checkpoint's manifest says.

    Attributes
    ----------
    step
        Optimizer steps taken.
    base
        What a differential checkpoint is a difference to; None of a full one.
    recipe, plan
        Plain values of both, where there are any.
    parts
        By name, the plain values of each state; tensors are named by ``{"$tensor": KEY}`` in ``NAME.safetensors``.
    tables
        By the path of the collection in the model and the table's name.
    files
        By name: size, and the SHA-256 of every block.
    attempt
        What names of its files end in, where several runs may have tried to save it; else empty.
    sha256
        Of the manifest that was read.
    """

    step: int = 0
    base: Base | None = None
    recipe: Mapping[str, Any] | None = None
    plan: Mapping[str, Any] | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, SavedTable] = field(default_factory=dict)
    files: Mapping[str, Entry] = field(default_factory=dict)
    attempt: str = ""
    sha256: str = field(default="", compare=False)

    def file_of(self, part: str) -> str:
        """Name the file with the tensors of a part; there is none in `files` if it has none."""
        return file_name(part, self.attempt)

    def to_json(self) -> str:
        """JSON with its own SHA-256."""
        base = self.base
        values: dict[str, Any] = {
            "format": FORMAT,
            "base": None if base is None else {"name": base.name, "sha256": base.sha256},
            "step": self.step,
            **({"attempt": self.attempt} if self.attempt else {}),
            "recipe": self.recipe,
            "plan": self.plan,
            "tables": {name: _table_to_dict(table) for name, table in self.tables.items()},
            "files": self.files,
            "parts": self.parts,
        }
        return _json({**values, "sha256": _sha256_of(values)})

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest; not of the base's."""
        return sum(entry["bytes"] for entry in self.files.values())


def file_name(name: str, attempt: str) -> str:
    """Name a file of tensors; its name ends in the attempt that it is of, if it is of one."""
    return f"{name}-{attempt}.safetensors" if attempt else f"{name}.safetensors"


def write_manifest(place: Directory, manifest: Manifest) -> str:
    """Write a checkpoint's manifest, the last of its files, and return its SHA-256.

    One that is there already is left as it is, and raises `CheckpointError`.
    """
    text = manifest.to_json()
    if len(text) > MOST_BYTES:
        raise CheckpointError(
            f"{place} was not saved: its manifest would have {len(text):,} bytes, must have at most {MOST_BYTES:,}; "
            "save fewer tables in one checkpoint, or smaller states"
        )
    content = text.encode()
    if place.create(MANIFEST, content) is None and place.read(MANIFEST, MOST_BYTES) != content:
        # The same content is this process's own: the answer to its first request was lost on the way.
        raise CheckpointError(f"{place} was not saved: another process has saved it since; see which run is to go on")
    return str(json.loads(text)["sha256"])


def read_manifest(path: str | Path | Directory) -> Manifest:
    """Read the manifest of a checkpoint, and that of its base if it is a differential one.

    Raise `CheckpointError` if there is none, it is damaged or of another format, or its base is gone or another one.
    """
    place = directory(path)
    manifest = _read(place)
    return manifest if manifest.base is None else _with_base(place, manifest, manifest.base)


def _with_base(place: Directory, manifest: Manifest, base: Base) -> Manifest:
    """Read the manifest of a base, and put its tables under those of the difference."""
    where = place.sibling(base.name)
    file = f"{place}/{MANIFEST}"
    if base.name == place.name:
        raise CheckpointError(f"{file}: 'base.name' is '{base.name}', the checkpoint itself; use another checkpoint")
    if not where.has(MANIFEST):  # no damage: with its base, the difference is whole
        raise CheckpointError(
            f"{place} is a difference to {where}, which is gone; copy it to that place, or use another checkpoint"
        )
    under = _read(where)
    if under.sha256 != base.sha256:
        raise CheckpointError(
            f"{place} is a difference to {where} with SHA-256 {base.sha256[:12]}…, but what is there has "
            f"{under.sha256[:12]}…; copy the checkpoints again, or use another"
        )
    if under.base is not None:
        raise CheckpointError(f"{file}: 'base.name' is '{base.name}', which is itself a difference, must be a full one")
    if {n: replace(t, tiles=()) for n, t in manifest.tables.items()} != {
        n: replace(t, tiles=()) for n, t in under.tables.items()
    }:
        raise CheckpointError(f"{file}: 'tables' are others than those of its base {where}; use another checkpoint")
    tables = {name: replace(table, base=under.tables[name]) for name, table in manifest.tables.items()}
    return replace(manifest, base=replace(base, files=under.files), tables=tables)


def base_of(place: Directory) -> str | None:
    """Name the base of a checkpoint; None if it is a full one, or none any more."""
    try:
        reader = place.reader(MANIFEST)
    except FileNotFoundError:
        return None
    try:
        head = bytearray(min(reader.size, len(_FULL)))
        reader.read_into(memoryview(head), 0)
    finally:
        reader.close()
    if bytes(head) == _FULL:  # manifests may be large
        return None
    base = json.loads(place.read(MANIFEST, MOST_BYTES)).get("base")
    return None if base is None else str(base["name"])


def _read(place: Directory) -> Manifest:
    """Read a manifest by itself."""
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
    sha256 = values.pop("sha256", None)
    if sha256 != _sha256_of({"format": version, **values}):
        raise DamagedError(f"{file} is damaged (its content has changed); use another checkpoint")
    schema.check_manifest(values, file)
    base = values["base"]
    tables = {name: _table_from_dict(entry) for name, entry in values["tables"].items()}
    for name, table in tables.items():
        table.check(name, file)
    keys = ("step", "recipe", "plan", "parts")
    found = {key: values[key] for key in keys}
    return Manifest(
        **found,
        tables=tables,
        files=values["files"],
        base=base and Base(**base),
        attempt=values.get("attempt", ""),
        sha256=sha256,
    )


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
    run that kept it. `CheckpointError` if there is none.
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
    is_dcp = place.has(".metadata")
    how = "; it is one of torch.distributed.checkpoint: hotbed checkpoint convert … --from dcp" if is_dcp else ""
    raise CheckpointError(
        f"{place} is neither a checkpoint ({MANIFEST}), nor a run's directory or a directory of runs with one{how}"
    )


def find_earlier(checkpoint: Directory, since: str | Path | Directory) -> Directory:
    """The checkpoint that ``--since`` means: a path, or the step of one beside another."""
    if not isinstance(since, str) or not since.isdecimal():
        return find_checkpoint(since)
    found = [checkpoint.sibling(f"{kind}-{int(since):08d}") for kind in ("last", "best")]
    there = [place for place in found if place.has(MANIFEST)]
    if not there:
        raise CheckpointError(f"--since is {since}, but there is neither {found[0]} nor {found[1]}; give a path")
    return there[0]


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
    moments = {
        name: SavedMoment(m["per"], float(m["initial"]), m["optimizer"], m["rule"])
        for name, m in values["moments"].items()
    }
    return SavedTable(spec, moments, tiles)


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1)


def _sha256_of(values: Mapping[str, Any]) -> str:
    """Of a manifest without its own; reading JSON and writing it again leaves it as it was."""
    return hashlib.sha256(_json(values).encode()).hexdigest()
