"""Define, write, read and find manifests: the file that makes a directory a checkpoint and lists its content.

A manifest is the last file that is written. A directory without a valid manifest is no checkpoint, so neither a killed
run nor a power failure leaves half of one. With several ranks, the first rank writes the manifest once it knows which
files the other ranks wrote (`hotbed.checkpoint.save`). ``docs/checkpoint-format.md`` describes every entry.

The pydantic models of this file are the manifest: reading validates a file against them, and the other modules use
them as they are. A checkpoint may come from anywhere, and its hashes prove only that it is unchanged. Therefore
`read_manifest` also compares the entries with each other; a manifest that passes can be used without further checks.

States of models, optimizers and so on are plain values (`hotbed.checkpoint.contents`). A differential checkpoint has
only the rows that changed since a full checkpoint next to it, its base; `read_manifest` reads both.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    InstanceOf,
    ValidationError,
    model_serializer,
)

from hotbed.checkpoint.storage import Directory, directory
from hotbed.errors import CheckpointError, DamagedError, PlanError
from hotbed.parsing import TextError, fault_of, parse_json
from hotbed.plan import Plan, Tile
from hotbed.specs import MAX_DIM, RowDtype, Table, row_bytes

FORMAT = 1
_REQUIRED = ("base", "step", "recipe", "plan", "tables", "files", "parts")
_FULL = f'{{\n "format": {FORMAT},\n "base": null,'.encode()
"""First bytes of the manifest of a full checkpoint."""
MANIFEST = "manifest.json"
MOST_BYTES = 256 << 20
"""Largest manifest: tables of 50 TB need about 220 MiB."""
MOST_BLOCK_BYTES = 1 << 30
"""Largest block of a file; several blocks are in memory at once."""
NAME = re.compile(r"(last|best)-\d{8,}")
"""Names of checkpoints in a run's directory; other names there are left alone."""
_RUN = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")
"""Names of runs: the start time, and a number if several runs started in one second."""
_LARGEST = 3.4028234663852886e38  # of float32

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Step = Annotated[int, Field(ge=1, le=2**63 - 1)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*\.safetensors$", max_length=255)]
"""A file in the checkpoint's own directory, never above or below it."""
PartName = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=255)]


def _range(bounds: Any) -> Any:
    """Annotate a range that a file has as the list of its bounds."""
    stored = Annotated[
        bounds,
        Field(strict=False),
        BeforeValidator(lambda value: (value.start, value.stop, value.step)[:n] if isinstance(value, range) else value),
        AfterValidator(lambda value: range(*value)),
    ]
    n = len(bounds.__args__)
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(stored))


class Entry(BaseModel):
    """An object of a manifest."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class FileEntry(Entry):
    """A file: its size, and the SHA-256 of every block of ``block_bytes``; the last block may be shorter."""

    bytes: Count
    block_bytes: Annotated[int, Field(ge=1, le=MOST_BLOCK_BYTES)]
    sha256: list[Digest]


class InitEntry(Entry):
    """The initial values of a table."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    bound: Annotated[float, Field(ge=0, le=_LARGEST)]
    version: Literal[1]

    def table(self, name: str, rows: int, dim: int, dtype: RowDtype, fp32_rows: int) -> Table:
        """Return a table with these initial values."""
        return Table(
            name,
            rows,
            dim,
            init_bound=self.bound,
            init_seed=self.seed,
            init_version=self.version,
            dtype=dtype,
            fp32_rows=fp32_rows,
        )


class SavedMoment(Entry):
    """A moment of a table: ``initial`` is its value in untouched rows, ``optimizer`` the part that updates it."""

    per: Literal["row", "element"]
    initial: Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
    optimizer: Text
    rule: Text


class SavedTile(Entry):
    """A rectangle of a table and the arrays ``KEY/…`` of a file that hold it.

    Of a ``keyed`` tile, the array ``KEY/keys`` has the rows that the other arrays hold, in rising order; all other rows
    of the rectangle have their initial values.
    """

    rows: Annotated[range, _range(tuple[Count, Count, Step])]
    cols: Annotated[range, _range(tuple[Count, Count])]
    file: FileName
    key: Text
    keyed: bool = False

    @model_serializer
    def _to_dict(self) -> dict[str, Any]:
        rows, cols = [self.rows.start, self.rows.stop, self.rows.step], [self.cols.start, self.cols.stop]
        values: dict[str, Any] = {"rows": rows, "cols": cols, "file": self.file, "key": self.key}
        return {**values, "keyed": True} if self.keyed else values


class SavedTable(Entry):
    """A table and its tiles.

    ``init.seed`` is the seed of the table's own initial values. ``base`` is the same table in the base of a
    differential checkpoint, which has the rows that no key of these tiles names; it is not in the file.
    """

    name: Text
    rows: Step
    dim: Annotated[int, Field(ge=1, le=MAX_DIM)]
    dtype: RowDtype
    fp32_rows: Count
    init: InitEntry
    moments: dict[Text, SavedMoment]
    tiles: Annotated[tuple[SavedTile, ...], Field(strict=False)]
    base: InstanceOf[SavedTable] | None = Field(default=None, exclude=True)

    @classmethod
    def of(
        cls, spec: Table, moments: Mapping[str, SavedMoment] | None = None, tiles: Sequence[SavedTile] = ()
    ) -> SavedTable:
        """Describe a table that has its own seed of initial values."""
        assert spec.init_seed is not None
        return cls(
            name=spec.name,
            rows=spec.rows,
            dim=spec.dim,
            dtype=spec.dtype,
            fp32_rows=spec.fp32_rows,
            init=InitEntry(seed=spec.init_seed, bound=spec.bound, version=1),
            moments=dict(moments or {}),
            tiles=tuple(tiles),
        )

    @cached_property
    def spec(self) -> Table:
        """The table, which is built once because each chunk of its rows asks for it."""
        return self.init.table(self.name, self.rows, self.dim, self.dtype, self.fp32_rows)

    @property
    def without_moments(self) -> SavedTable:
        """The table, and its base, without moments."""
        base = None if self.base is None else self.base.without_moments
        return self.model_copy(update={"moments": {}, "base": base})

    @property
    def bare(self) -> SavedTable:
        """The table without tiles and base."""
        return self.model_copy(update={"tiles": (), "base": None})

    def check(self, name: str, where: str) -> None:
        """Raise `CheckpointError` unless each cell of the table is in one of its tiles."""
        try:
            tiles = tuple(Tile(name, tile.rows, tile.cols, owner=0) for tile in self.tiles)
            Plan(1, tiles).check([replace(self.spec, name=name)])
        except PlanError as error:
            raise CheckpointError(f"{where}: the tiles of table '{name}' are not the table: {error}") from None


class Base(Entry):
    """The full checkpoint next to a differential one that has all other rows, and the SHA-256 of its manifest."""

    name: PartName
    sha256: Digest


class PlanEntry(Entry):
    """A saved plan; only its number of ranks is read."""

    model_config = ConfigDict(extra="allow")

    world_size: Step


class Manifest(Entry):
    """The manifest of a checkpoint.

    Attributes
    ----------
    base
        The base of a differential checkpoint; None for a full one.
    step
        Optimizer steps taken.
    attempt
        End of the names of the checkpoint's files if several runs may have tried to save it; else empty.
    recipe, plan
        Plain values of both, or None.
    tables
        Tables by the path of the collection in the model and the table's name.
    files
        Files by name.
    parts
        Plain values of each state by name; tensors are ``{"$tensor": KEY}``, with values in ``NAME.safetensors``.
    sha256
        SHA-256 of the manifest that was read.
    base_files
        The files of the base, once its manifest is read; not in the file.
    """

    format: Literal[1] = FORMAT
    base: Base | None = None
    step: Count = 0
    attempt: Annotated[str, Field(pattern=r"^([0-9a-f]{8})?$")] = ""
    recipe: dict[str, Any] | None = None
    plan: PlanEntry | None = None
    tables: dict[Text, SavedTable] = {}
    files: dict[FileName, FileEntry] = {}
    parts: dict[PartName, Any] = {}
    sha256: str = Field(default="", exclude=True)
    base_files: dict[str, InstanceOf[FileEntry]] = Field(default={}, exclude=True)

    def file_of(self, part: str) -> str:
        """Name the file with the tensors of a part; a part without tensors has no such entry in `files`."""
        return file_name(part, self.attempt)

    def to_json(self) -> str:
        """JSON with its own SHA-256."""
        values = self.model_dump()
        if not self.attempt:
            del values["attempt"]
        text = _json(values)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return text.removesuffix("\n}") + f',\n "sha256": "{digest}"\n}}'

    @property
    def nbytes(self) -> int:
        """Bytes of all files but the manifest; not of the base's."""
        return sum(entry.bytes for entry in self.files.values())


class Report(Entry):
    """A rank's report to the first rank: its files and tiles, or its error."""

    token: Text
    error: str | None = None
    files: dict[FileName, FileEntry] = {}
    tiles: dict[Text, list[SavedTile]] = {}


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
    if {n: t.bare for n, t in manifest.tables.items()} != {n: t.bare for n, t in under.tables.items()}:
        raise CheckpointError(f"{file}: 'tables' are others than those of its base {where}; use another checkpoint")
    tables = {name: table.model_copy(update={"base": under.tables[name]}) for name, table in manifest.tables.items()}
    return manifest.model_copy(update={"base_files": under.files, "tables": tables})


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
    """Read a manifest, but not that of its base."""
    if not place.has(MANIFEST):
        raise CheckpointError(f"{place} holds no {MANIFEST}, so it is not a checkpoint, or one that was never finished")
    file = f"{place}/{MANIFEST}"
    values = parsed(place.read(MANIFEST, MOST_BYTES), file)
    version = values.get("format")
    if version is None:
        raise DamagedError(f"{file} is damaged ('format' is missing); use another checkpoint")
    if version != FORMAT:
        raise CheckpointError(
            f"{place} has checkpoint format {reprlib.repr(version)}, this release reads {FORMAT}; use the release that "
            "wrote it"
        )
    if values.pop("sha256", None) != (sha256 := _sha256_of(values)):
        raise DamagedError(f"{file} is damaged (its content has changed); use another checkpoint")
    if missing := [key for key in _REQUIRED if key not in values]:
        raise CheckpointError(f"{file}: '{missing[0]}' is missing")
    manifest = validate(Manifest, {**values, "sha256": sha256}, file)
    if fault := next(_faults(manifest), None):
        raise CheckpointError(f"{file}: {fault}")
    for name, table in manifest.tables.items():
        table.check(name, file)
    return manifest


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


def parsed(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object whose keys are all different and whose values are not nested deeply.

    Anything else raises `DamagedError`.
    """
    try:
        values = parse_json(data)
        if not isinstance(values, dict):
            raise TextError(f"holds {type(values).__name__}, must be an object")
    except TextError as error:
        raise DamagedError(f"{where} is damaged: it {error}; use another checkpoint") from None
    return cast("dict[str, Any]", values)


Model = TypeVar("Model", bound=BaseModel)


def validate(kind: type[Model], values: object, where: str) -> Model:
    """Make a model of parsed values; raise `CheckpointError` with the key, its value and its limit."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {fault_of(error)}") from None


def _faults(manifest: Manifest) -> Iterator[str]:
    """Yield what is wrong where the entries of a manifest do not agree with each other."""
    if "base_files" in manifest.model_fields_set:
        yield f"base_files: got {reprlib.repr(manifest.base_files)}, expected no such key"
    for name, file in manifest.files.items():
        if len(file.sha256) != -(-file.bytes // file.block_bytes):
            yield (
                f"the manifest has {len(file.sha256):,} hashes of its blocks for '{name}', but its {file.bytes:,} "
                f"bytes are {-(-file.bytes // file.block_bytes):,} blocks; use another checkpoint"
            )
    seen: set[tuple[str, str]] = set()
    needed: Counter[str] = Counter()
    for name, table in manifest.tables.items():
        if "base" in table.model_fields_set:
            yield f"tables.{name}.base: got {reprlib.repr(table.base)}, expected no such key"
        if table.fp32_rows > table.rows:
            yield f"'tables.{name}.fp32_rows' is {table.fp32_rows:,}, must be at most rows {table.rows:,}"
        for i, tile in enumerate(table.tiles):
            key = f"'tables.{name}.tiles.{i}"
            if manifest.base is not None and not tile.keyed:
                yield f"{key}.keyed' is False, must be True, for there is a 'base'"
            if tile.file not in manifest.files:
                yield f"{key}' speaks of a file {tile.file}, which its manifest does not list"
            if (tile.file, tile.key) in seen:
                yield f"{key}' is '{tile.key}' of {tile.file}, and so is another tile"
            seen.add((tile.file, tile.key))
            if not tile.keyed:
                needed[tile.file] += len(tile.rows) * row_bytes(table.dtype, len(tile.cols))
    for file, nbytes in needed.items():
        if nbytes > (there := manifest.files[file].bytes):
            yield f"the tiles in {file} need {nbytes:,} bytes, but 'files.{file}.bytes' is {there:,}"
    for name, state in manifest.parts.items():
        yield from _faults_of_state(state, f"parts.{name}")


def _faults_of_state(value: object, key: str) -> Iterator[str]:
    """Yield faults of a stored state (see `hotbed.checkpoint.contents.to_plain_value`)."""
    if isinstance(value, list):
        for i, entry in enumerate(cast("list[object]", value)):
            yield from _faults_of_state(entry, f"{key}.{i}")
    if not isinstance(value, dict):
        return
    entries = cast("dict[str, object]", value)
    kind = next((name for name in entries if name.startswith("$")), None)
    if kind is None:
        for name, entry in entries.items():
            yield from _faults_of_state(entry, f"{key}.{name}")
    elif len(entries) > 1 or kind not in _STATES:
        yield f"'{key}' has '{kind}', must be one of {', '.join(_STATES)}, and the only key"
    elif not _STATES[kind][0](of := entries[kind]):
        yield f"'{key}.{kind}' is {reprlib.repr(of)}, must be {_STATES[kind][1]}"
    elif kind != "$tensor":
        yield from _faults_of_state([pair[1] for pair in cast("list[Any]", of)] if kind == "$items" else of, key)


def _is_items(value: object) -> bool:
    if not isinstance(value, list):
        return False
    pairs = cast("list[object]", value)
    if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str | int) for p in pairs):
        return False
    return len({pair[0] for pair in cast("list[list[Any]]", pairs)}) == len(pairs)


_STATES: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "$tensor": (lambda of: isinstance(of, str), "a name"),
    "$tuple": (lambda of: isinstance(of, list), "a list"),
    "$items": (_is_items, "a list of pairs of different keys, text or integers, and values"),
}
"""Kinds of values that JSON lacks, and what JSON has in their place."""


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1)


def _sha256_of(values: Mapping[str, Any]) -> str:
    """Of a manifest without its own; reading JSON and writing it again leaves it as it was."""
    return hashlib.sha256(_json(values).encode()).hexdigest()
