"""Define, write, read and find manifests. The manifest makes a directory a checkpoint and lists its content.

A manifest is the last file that is written. A directory without a valid manifest is not a checkpoint, so neither a
killed run nor a power failure leaves an incomplete checkpoint. With several ranks, the first rank writes the manifest
when it has the other ranks' lists of files (`hotbed.checkpoint.save`). ``docs/checkpoint-format.md`` describes every
entry.

The manifest is defined by the pydantic models of this module. Reading validates a file against them, and other modules
use the models directly. A checkpoint may be untrusted, and its hashes prove only that it is unchanged. Therefore,
`read_manifest` also compares the entries with each other. A manifest that passes can be used without further checks.

States of models, optimizers and other parts are plain values (`hotbed.checkpoint.contents`). A differential checkpoint
has only the rows that have changed since its base, a full checkpoint in the same directory. `read_manifest` reads both.
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
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetPydanticSchema,
    InstanceOf,
    model_serializer,
)

from hotbed.checkpoint.storage import Directory, directory
from hotbed.errors import CheckpointError, DamagedError, PlanError
from hotbed.parsing import TextError, parse_json, validate_model
from hotbed.plan import Plan, Tile
from hotbed.specs import MAX_DIM, RowDtype, Table, row_bytes

FORMAT = 1
_REQUIRED = ("base", "step", "recipe", "plan", "tables", "files", "parts")
_FULL = f'{{\n "format": {FORMAT},\n "base": null,'.encode()
"""First bytes of the manifest of a full checkpoint."""
MANIFEST = "manifest.json"
MOST_BYTES = 256 << 20
"""Upper limit of the bytes of a manifest. Tables of 50 TB need about 220 MiB."""
MOST_BLOCK_BYTES = 1 << 30
"""Upper limit of the bytes of a block, because several blocks are in memory together."""
NAME = re.compile(r"(last|best)-\d{8,}")
"""Names of checkpoints in a run's directory. Files with other names are ignored."""
_RUN = re.compile(r"(\d{8}-\d{6})(?:-(\d+))?")
"""Names of runs: the start time, and a number if several runs started in the same second."""
_LARGEST = 3.4028234663852886e38  # of float32

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Step = Annotated[int, Field(ge=1, le=2**63 - 1)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*\.safetensors$", max_length=255)]
"""A file in the checkpoint's own directory, not in another directory."""
PartName = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=255)]


def _range(bounds: Any) -> Any:
    """Annotate a range that is stored as the list of its bounds."""
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
    """A file: its size, and the SHA-256 of every block of ``block_bytes``. The last block may be shorter."""

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
    """A moment of a table. ``initial`` is its value before the first update, and ``optimizer`` the part's name."""

    per: Literal["row", "element"]
    initial: Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
    optimizer: Text
    rule: Text


class SavedTile(Entry):
    """A rectangle of a table, which is stored in the arrays ``KEY/…`` of a file.

    If the tile is ``keyed``, its arrays hold only the rows that are listed in the array ``KEY/keys``, in ascending
    order. All other rows of the rectangle have their initial values.
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

    ``init.seed`` is the seed of this table's initial values. In a differential checkpoint, ``base`` is the same table
    in the base, which has all rows without a key in these tiles. ``base`` is not stored in the manifest.
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
        """Create an entry of a table. Its ``init_seed`` must be set."""
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
        """The table, cached because each chunk of its rows uses it."""
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
        """Raise `CheckpointError` unless each element of the table is in exactly one tile."""
        try:
            tiles = tuple(Tile(name, tile.rows, tile.cols, owner=0) for tile in self.tiles)
            Plan(1, tiles).check([replace(self.spec, name=name)])
        except PlanError as error:
            raise CheckpointError(f"{where}: the tiles of table '{name}' do not cover it: {error}") from None


class Base(Entry):
    """The full checkpoint that a differential one refers to: its name, and the SHA-256 of its manifest."""

    name: PartName
    sha256: Digest


class PlanEntry(Entry):
    """A saved plan. Only its number of ranks is read."""

    model_config = ConfigDict(extra="allow")

    world_size: Step


class Manifest(Entry):
    """The manifest of a checkpoint.

    Attributes
    ----------
    base
        The base of a differential checkpoint, or None for a full checkpoint.
    step
        Number of optimizer steps.
    attempt
        Suffix of file names if several runs may have tried to save this checkpoint, otherwise empty.
    recipe, plan
        Plain values of the recipe and the plan, or None.
    tables
        Tables by the path of the collection in the model and the table's name.
    files
        Files by name.
    parts
        Plain values of each part's state, by name. Tensors are ``{"$tensor": KEY}``, and their values are in
        ``NAME.safetensors``.
    sha256
        SHA-256 of the manifest that was read.
    base_files
        The files of the base after its manifest is read. They are not stored in the manifest.
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
        """Return the name of the file with a part's tensors. If there are no tensors, `files` lacks the name."""
        return file_name(part, self.attempt)

    def to_json(self) -> str:
        """Return the manifest as JSON, including its SHA-256."""
        values = self.model_dump()
        if not self.attempt:
            del values["attempt"]
        text = _json(values)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return text.removesuffix("\n}") + f',\n "sha256": "{digest}"\n}}'

    @property
    def nbytes(self) -> int:
        """Bytes of all files without the manifest and without the base."""
        return sum(entry.bytes for entry in self.files.values())


class Report(Entry):
    """A report of a rank to the first rank: its files and tiles, or its error."""

    token: Text
    error: str | None = None
    files: dict[FileName, FileEntry] = {}
    tiles: dict[Text, list[SavedTile]] = {}


def file_name(name: str, attempt: str) -> str:
    """Return the name of a file of tensors. It includes the attempt, if that is not empty."""
    return f"{name}-{attempt}.safetensors" if attempt else f"{name}.safetensors"


def write_manifest(place: Directory, manifest: Manifest) -> Manifest:
    """Write a checkpoint's manifest, which is the last file, and return it with its SHA-256.

    Raise `CheckpointError` if there is a manifest already, which is not changed.
    """
    text = manifest.to_json()
    if len(text) > MOST_BYTES:
        raise CheckpointError(
            f"{place} was not saved: manifest: got {len(text):,} bytes, expected at most {MOST_BYTES:,}. Save fewer "
            "tables in one checkpoint, or smaller states"
        )
    content = text.encode()
    if place.create(MANIFEST, content) is None and place.read(MANIFEST, MOST_BYTES) != content:
        # Equal content was written by this process, which did not receive the response to its first request.
        raise CheckpointError(
            f"{place} was not saved: another process has saved it. Check which of the two runs should continue"
        )
    return manifest.model_copy(update={"sha256": json.loads(text)["sha256"]})


def read_manifest(path: str | Path | Directory) -> Manifest:
    """Read the manifest of a checkpoint. If it is differential, also read the manifest of its base.

    Raises
    ------
    CheckpointError
        If there is no manifest, it has another format, or the base is missing or differs from the recorded base.
    DamagedError
        If the manifest is damaged.
    """
    place = directory(path)
    manifest = _read(place)
    return manifest if manifest.base is None else _read_base(place, manifest, manifest.base)


def _read_base(place: Directory, manifest: Manifest, base: Base) -> Manifest:
    """Read the manifest of a base, and return the differential manifest with the base's tables and files."""
    where = place.sibling(base.name)
    file = f"{place}/{MANIFEST}"
    if base.name == place.name:
        raise CheckpointError(f"{file}: 'base.name' is '{base.name}', the checkpoint itself. Use another checkpoint")
    if not where.has(MANIFEST):  # not a DamagedError, because restoring the base makes the checkpoint usable
        raise CheckpointError(
            f"{place} is a differential checkpoint, but its base {where} does not exist. Copy the base to this "
            "location, or use another checkpoint"
        )
    under = _read(where)
    if under.sha256 != base.sha256:
        raise CheckpointError(
            f"{place}: base {where}: got SHA-256 {under.sha256[:12]}…, expected {base.sha256[:12]}…. Copy both "
            "checkpoints again, or use another"
        )
    if under.base is not None:
        raise CheckpointError(f"{file}: 'base.name': got differential checkpoint '{base.name}', expected a full one")
    if {n: t.bare for n, t in manifest.tables.items()} != {n: t.bare for n, t in under.tables.items()}:
        raise CheckpointError(f"{file}: 'tables' differ from the tables of its base {where}. Use another checkpoint")
    tables = {name: table.model_copy(update={"base": under.tables[name]}) for name, table in manifest.tables.items()}
    return manifest.model_copy(update={"base_files": under.files, "tables": tables})


def base_of(place: Directory) -> str | None:
    """Return the name of a checkpoint's base. Return None for a full checkpoint, or if it does not exist any more."""
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
    """Read and check a manifest without its base."""
    if not place.has(MANIFEST):
        raise CheckpointError(f"{place} has no {MANIFEST}, so it is not a checkpoint, or it was not finished")
    file = f"{place}/{MANIFEST}"
    values = parse_object(place.read(MANIFEST, MOST_BYTES), file)
    version = values.get("format")
    if version is None:
        raise DamagedError(f"{file} is damaged ('format' is missing). Use another checkpoint")
    if version != FORMAT:
        raise CheckpointError(
            f"{place}: checkpoint format: got {reprlib.repr(version)}, expected {FORMAT}. Use the release that wrote it"
        )
    if values.pop("sha256", None) != (sha256 := _sha256_of(values)):
        raise DamagedError(f"{file} is damaged (its content has changed). Use another checkpoint")
    if missing := [key for key in _REQUIRED if key not in values]:
        raise CheckpointError(f"{file}: '{missing[0]}' is missing")
    manifest = validate_model(Manifest, {**values, "sha256": sha256}, CheckpointError, file)
    if fault := next(_faults(manifest), None):
        raise CheckpointError(f"{file}: {fault}")
    for name, table in manifest.tables.items():
        table.check(name, file)
    return manifest


def step_of(checkpoint: Directory) -> int:
    """Return the step in a checkpoint's name."""
    return int(checkpoint.name.split("-")[1])


def checkpoints_in(path: str | Path | Directory, kind: str | None = None) -> list[Directory]:
    """List the checkpoints ``last-STEP`` and ``best-STEP`` in a directory, from the oldest to the newest."""
    place = directory(path)
    names = [m[0] for name in place.names() if (m := NAME.fullmatch(name)) and kind in (None, m[1])]
    return sorted((folder for name in names if (folder := place / name).has(MANIFEST)), key=step_of)


def runs_in(path: str | Path | Directory) -> list[Directory]:
    """List the directories of runs, ``runs/NAME/TIME``, in ``runs/NAME``, from the oldest to the newest."""
    place = directory(path)
    found = [m for name in place.names() if (m := _RUN.fullmatch(name))]
    return [place / m[0] for m in sorted(found, key=lambda m: (m[1], int(m[2] or 1)))]


def find_checkpoint(path: str | Path | Directory, *, best: bool = False) -> Directory:
    """Return the path itself if it is a checkpoint, otherwise the newest checkpoint in it.

    The path may be a directory of checkpoints, a run's directory, or a directory of runs, ``runs/NAME``, where the
    newest run with a checkpoint is used. ``best`` prefers a run's best checkpoint, if the run kept it. Raise
    `CheckpointError` if there is no checkpoint.
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
    how = ". It is a torch.distributed.checkpoint: use hotbed checkpoint convert … --from dcp" if is_dcp else ""
    raise CheckpointError(
        f"{place} is not a checkpoint (it has no {MANIFEST}), nor a run or a directory of runs with a checkpoint{how}"
    )


def find_earlier(checkpoint: Directory, since: str | Path | Directory) -> Directory:
    """Return the checkpoint of ``--since``: a path, or the step of a checkpoint in the same directory."""
    if not isinstance(since, str) or not since.isdecimal():
        return find_checkpoint(since)
    found = [checkpoint.sibling(f"{kind}-{int(since):08d}") for kind in ("last", "best")]
    there = [place for place in found if place.has(MANIFEST)]
    if not there:
        raise CheckpointError(f"--since is {since}, but neither {found[0]} nor {found[1]} exists. Pass a path")
    return there[0]


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raise `DamagedError` if keys are repeated or values are nested deeply."""
    try:
        values = parse_json(data)
        if not isinstance(values, dict):
            raise TextError(f"is {type(values).__name__}, expected an object")
    except TextError as error:
        raise DamagedError(f"{where} is damaged: it {error}. Use another checkpoint") from None
    return cast("dict[str, Any]", values)


def _faults(manifest: Manifest) -> Iterator[str]:
    """Yield messages about entries of a manifest that contradict each other."""
    if "base_files" in manifest.model_fields_set:
        yield f"base_files: got {reprlib.repr(manifest.base_files)}, expected no such key"
    for name, file in manifest.files.items():
        if len(file.sha256) != -(-file.bytes // file.block_bytes):
            yield (
                f"'files.{name}.sha256': got {len(file.sha256):,} hashes, expected "
                f"{-(-file.bytes // file.block_bytes):,}, one for each block of {file.bytes:,} bytes. Use another "
                "checkpoint"
            )
    seen: set[tuple[str, str]] = set()
    needed: Counter[str] = Counter()
    for name, table in manifest.tables.items():
        if "base" in table.model_fields_set:
            yield f"tables.{name}.base: got {reprlib.repr(table.base)}, expected no such key"
        if table.fp32_rows > table.rows:
            yield f"'tables.{name}.fp32_rows': got {table.fp32_rows:,}, expected at most {table.rows:,}, its rows"
        for i, tile in enumerate(table.tiles):
            key = f"'tables.{name}.tiles.{i}"
            if manifest.base is not None and not tile.keyed:
                yield f"{key}.keyed': got False, expected True, because there is a 'base'"
            if tile.file not in manifest.files:
                yield f"{key}.file': got {tile.file}, expected a file of the manifest"
            if (tile.file, tile.key) in seen:
                yield f"{key}': got '{tile.key}' of {tile.file}, which is another tile's, expected unique arrays"
            seen.add((tile.file, tile.key))
            if not tile.keyed:
                needed[tile.file] += len(tile.rows) * row_bytes(table.dtype, len(tile.cols))
    for file, nbytes in needed.items():
        if nbytes > (there := manifest.files[file].bytes):
            yield f"'files.{file}.bytes': got {there:,}, expected at least {nbytes:,} for its tiles"
    for name, state in manifest.parts.items():
        yield from _faults_of_state(state, f"parts.{name}")


def _faults_of_state(value: object, key: str) -> Iterator[str]:
    """Yield messages about a stored state that is not valid (see `hotbed.checkpoint.contents.to_plain_value`)."""
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
        yield f"'{key}': got key '{kind}', expected one of {', '.join(_STATES)} as the only key"
    elif not _STATES[kind][0](of := entries[kind]):
        yield f"'{key}.{kind}': got {reprlib.repr(of)}, expected {_STATES[kind][1]}"
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
    "$items": (_is_items, "a list of pairs of unique keys (text or integers) and values"),
}
"""Replacements of values that JSON does not have: a check of the replacement, and its description."""


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=1)


def _sha256_of(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own hash. It is the same after reading and writing JSON."""
    return hashlib.sha256(_json(values).encode()).hexdigest()
