"""Check the files of a checkpoint that are parsed, the manifest and headers of safetensors, before anything reads them.

A checkpoint may come from anywhere, and its hashes say only that it is what its author wrote. So a parsed file is
compared with a typed schema (pydantic's; imported when a checkpoint is read), then with the sizes that it states
itself: what passes can be read without looking again, and allocates no more than the files hold.
"""

from __future__ import annotations

import math
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from hotbed.errors import CheckpointError, DamagedError
from hotbed.parsing import TextError, parse_json
from hotbed.specs import MAX_DIM, RowDtype, row_bytes

MOST_BLOCK_BYTES = 1 << 30
"""Bytes of a block, of which several are in memory at once."""
MOST_DIMENSIONS = 64
"""Of an array; torch has no more."""
MOST_VALUES = 2**59
"""Of an array, counting empty dimensions as 1; beyond, bytes are no 64-bit number."""

_LARGEST = 3.4028234663852886e38  # of float32

Count = Annotated[int, Field(ge=0, le=2**63 - 1)]
Step = Annotated[int, Field(ge=1, le=2**63 - 1)]
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Attempt = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FileName = Annotated[str, Field(pattern=r"^\w[\w.-]*\.safetensors$", max_length=255)]
"""In the checkpoint's own directory, never above it or below."""
PartName = Annotated[str, Field(pattern=r"^\w[\w.-]*$", max_length=255)]
Bounds = Annotated[tuple[Count, Count], Field(strict=False)]
SteppedBounds = Annotated[tuple[Count, Count, Step], Field(strict=False)]
Dtype = Literal["F64", "F32", "BF16", "F16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL"]


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class FileEntry(_Entry):
    """What a manifest says of a file."""

    bytes: Count
    block_bytes: Annotated[int, Field(ge=1, le=MOST_BLOCK_BYTES)]
    sha256: list[Digest]


class InitEntry(_Entry):
    """The initial values of a table."""

    seed: Annotated[int, Field(ge=0, lt=2**32)]
    bound: Annotated[float, Field(ge=0, le=_LARGEST)]
    version: Literal[1]


class MomentEntry(_Entry):
    """A moment of a table."""

    per: Literal["row", "element"]
    initial: Annotated[float, Field(ge=-_LARGEST, le=_LARGEST)]
    optimizer: Text
    rule: Text


class TileEntry(_Entry):
    """A rectangle of a table, and where it is."""

    rows: SteppedBounds
    cols: Bounds
    file: FileName
    key: Text
    keyed: bool = False


class TableEntry(_Entry):
    """A table and its tiles."""

    name: Text
    rows: Step
    dim: Annotated[int, Field(ge=1, le=MAX_DIM)]
    dtype: RowDtype
    fp32_rows: Count
    init: InitEntry
    moments: dict[Text, MomentEntry]
    tiles: list[TileEntry]


class PlanEntry(_Entry):
    """What is read of a saved plan: on how many ranks it was."""

    model_config = ConfigDict(strict=True, extra="allow")

    world_size: Step


class BaseEntry(_Entry):
    """The directory beside a differential checkpoint that has all other rows, and the hash of its manifest."""

    name: PartName
    sha256: Digest


class ManifestEntry(_Entry):
    """A manifest, less the version and the hash, which come first; `check_state` looks into parts."""

    base: BaseEntry | None
    step: Count
    attempt: Attempt | None = None
    recipe: dict[str, Any] | None
    plan: PlanEntry | None
    tables: dict[Text, TableEntry]
    files: dict[FileName, FileEntry]
    parts: dict[PartName, Any]


class ReportEntry(_Entry):
    """What a rank reports to the first one: its files and tiles, or what went wrong."""

    token: Text
    error: str | None = None
    files: dict[FileName, FileEntry] = {}
    tiles: dict[Text, list[TileEntry]] = {}


class ArrayEntry(_Entry):
    """An array in the header of a safetensors file."""

    dtype: Dtype
    shape: Annotated[list[Count], Field(max_length=MOST_DIMENSIONS)]
    data_offsets: Bounds


_HEADER = TypeAdapter(dict[str, ArrayEntry])


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


def check_manifest(values: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` unless a manifest is one of this format, and agrees with itself.

    Whether tiles cover their tables is left to `SavedTable.check`, which needs no more than this.
    """
    try:
        manifest = ManifestEntry.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(fault_of(error, where)) from None
    for name, file in manifest.files.items():
        if len(file.sha256) != -(-file.bytes // file.block_bytes):
            raise CheckpointError(
                f"{where}: the manifest has {len(file.sha256):,} hashes of its blocks for '{name}', but its "
                f"{file.bytes:,} bytes are {-(-file.bytes // file.block_bytes):,} blocks; use another checkpoint"
            )
    for name, table in manifest.tables.items():
        if table.fp32_rows > table.rows:
            raise CheckpointError(
                f"{where}: 'tables.{name}.fp32_rows' is {table.fp32_rows:,}, must be at most rows {table.rows:,}"
            )
        for i, tile in enumerate(table.tiles):
            if manifest.base is not None and not tile.keyed:
                raise CheckpointError(
                    f"{where}: 'tables.{name}.tiles.{i}.keyed' is False, must be True, for there is a 'base'"
                )
    _check_places(manifest, where)
    for name, state in manifest.parts.items():
        check_state(state, f"parts.{name}", where)


def check_report(values: Mapping[str, Any], where: str) -> None:
    """Raise `CheckpointError` unless a rank's report is one."""
    try:
        ReportEntry.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(fault_of(error, where)) from None


def check_state(value: object, key: str, where: str) -> None:
    """Raise `CheckpointError` unless a state is what `hotbed.checkpoint.manifest.plain` gives."""
    if isinstance(value, list):
        for i, entry in enumerate(cast("list[object]", value)):
            check_state(entry, f"{key}.{i}", where)
    if not isinstance(value, dict):
        return
    entries = cast("dict[str, object]", value)
    kind = next((name for name in entries if name.startswith("$")), None)
    if kind is None:
        for name, entry in entries.items():
            check_state(entry, f"{key}.{name}", where)
        return
    of = entries[kind]
    if len(entries) > 1 or kind not in ("$tensor", "$tuple", "$items"):
        raise CheckpointError(
            f"{where}: '{key}' has '{kind}', must be one of $tensor, $tuple, $items, and the only key"
        )
    if kind == "$tensor" and not isinstance(of, str):
        raise CheckpointError(f"{where}: '{key}.$tensor' is {reprlib.repr(of)}, must be a name")
    if kind == "$tuple" and not isinstance(of, list):
        raise CheckpointError(f"{where}: '{key}.$tuple' is {reprlib.repr(of)}, must be a list")
    if kind == "$items" and not _is_items(of):
        raise CheckpointError(
            f"{where}: '{key}.$items' is {reprlib.repr(of)}, must be a list of pairs of different keys, text or "
            "integers, and values"
        )
    if kind != "$tensor":
        check_state([pair[1] for pair in cast("list[Any]", of)] if kind == "$items" else of, key, where)


def check_header(values: Mapping[str, Any], size: int, where: str) -> None:
    """Raise `CheckpointError` unless a header's arrays fill the ``size`` bytes after it, each once.

    ``values`` is the header without ``__metadata__``.
    """
    try:
        arrays = _HEADER.validate_python(values)
    except ValidationError as error:
        raise CheckpointError(fault_of(error, f"{where} is no safetensors file that can be read here")) from None
    wrong = f"{where} is no safetensors file that can be read here"
    for key, array in arrays.items():
        start, stop = array.data_offsets
        if stop > size or stop - start != math.prod(array.shape) * ITEM_BYTES[array.dtype]:
            raise CheckpointError(
                f"{wrong}: array '{key}' does not fit the file: {array.dtype} {reprlib.repr(array.shape)} at bytes "
                f"{start:,} … {stop:,} of {size:,}"
            )
        if math.prod(max(n, 1) for n in array.shape) > MOST_VALUES:
            raise CheckpointError(f"{wrong}: array '{key}' has the shape {reprlib.repr(array.shape)}, too large")
    at = 0
    for key, array in sorted(arrays.items(), key=lambda item: item[1].data_offsets):
        if array.data_offsets[0] != at:
            raise CheckpointError(
                f"{wrong}: array '{key}' begins at byte {array.data_offsets[0]:,}, the one before ends at {at:,}"
            )
        at = array.data_offsets[1]
    if at != size:
        raise CheckpointError(f"{wrong}: {size - at:,} bytes follow its arrays")


ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("F64", "I64"), 8),
    **dict.fromkeys(("F32", "I32"), 4),
    **dict.fromkeys(("BF16", "F16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Bytes of a value by the name of its dtype."""


def _check_places(manifest: ManifestEntry, where: str) -> None:
    """Raise `CheckpointError` for tiles that are in no file, in one place, or larger than their file."""
    seen: set[tuple[str, str]] = set()
    needed: Counter[str] = Counter()
    for name, table in manifest.tables.items():
        for i, tile in enumerate(table.tiles):
            key = f"'tables.{name}.tiles.{i}'"
            if tile.file not in manifest.files:
                raise CheckpointError(f"{where}: {key} speaks of a file {tile.file}, which its manifest does not list")
            if (tile.file, tile.key) in seen:
                raise CheckpointError(f"{where}: {key} is '{tile.key}' of {tile.file}, and so is another tile")
            seen.add((tile.file, tile.key))
            if not tile.keyed:
                needed[tile.file] += len(range(*tile.rows)) * row_bytes(table.dtype, len(range(*tile.cols)))
    for file, nbytes in needed.items():
        if nbytes > manifest.files[file].bytes:
            raise CheckpointError(
                f"{where}: the tiles in {file} need {nbytes:,} bytes, but 'files.{file}.bytes' is "
                f"{manifest.files[file].bytes:,}"
            )


def _is_items(value: object) -> bool:
    if not isinstance(value, list):
        return False
    pairs = cast("list[object]", value)
    if not all(isinstance(p, list) and len(p) == 2 and isinstance(p[0], str | int) for p in pairs):
        return False
    return len({pair[0] for pair in cast("list[list[Any]]", pairs)}) == len(pairs)


def fault_of(error: ValidationError, where: str) -> str:
    """Say what is wrong first: key, value and what it must be."""
    errors = error.errors(include_url=False, include_context=False)
    return f"{where}: {_fault(errors[0])}" + (f" ({len(errors) - 1} more)" if len(errors) > 1 else "")


def _fault(error: ErrorDetails) -> str:
    key = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"'{key}' is missing"
    message = error["msg"][:1].lower() + error["msg"][1:]
    return f"'{key}' is {reprlib.repr(error['input'])}: {message}"
