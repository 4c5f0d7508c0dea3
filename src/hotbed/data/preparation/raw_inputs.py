"""Find what is to be prepared: Criteo logs, which are parsed first, or what can be read as tables where it is.

Logs are parsed part by part into Parquet files, which the later passes of a preparation read column by column. A part
is a compressed file, or a range of bytes of a plain one, so that several workers can read one file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from hotbed.data import arrow_columns as arrow
from hotbed.data.columns import SparseColumn
from hotbed.data.drafting.draft import draft
from hotbed.data.encoding.encoder import Encoder
from hotbed.data.encoding.vocabulary import value_type
from hotbed.data.executors import Tasks
from hotbed.data.files.criteo import (
    DENSE,
    LABEL,
    SPARSE,
    LineChecker,
    Negatives,
    OnBadLine,
    codec_of,
    count_lines,
    find_log_files,
    read_blocks,
    size_of,
)
from hotbed.data.files.delimited import has_header, is_delimited
from hotbed.data.files.parquet_files import ParquetFile, TableFile, find_parquet, is_table, with_rows
from hotbed.data.preparation.pieces import Piece
from hotbed.data.preparation.stored_rows import is_source, source_files
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError
from hotbed.files import new_file
from hotbed.locations import RemoteFile, location, opened

PART_BYTES = 64 << 20
_SKIPPED, _REPLACED = b"hotbed.skipped", b"hotbed.replaced"
_SCHEMA = pa.schema(
    [(LABEL, pa.uint8()), *((name, pa.float32()) for name in DENSE), *((name, pa.uint32()) for name in SPARSE)]
)


class LogPart(NamedTuple):
    """What one task parses, and where what it finds goes."""

    file: Path | RemoteFile
    start: int
    stop: int | None
    on_bad_line: OnBadLine
    negatives: Negatives
    spool: Path

    @property
    def bytes(self) -> int:
        """Bytes of the file that it reads."""
        return (size_of(self.file) if self.stop is None else self.stop) - self.start


def parts_of(
    files: Sequence[Path | RemoteFile], on_bad_line: OnBadLine, negatives: Negatives, spool: Path
) -> list[LogPart]:
    """Cut files into parts, in order."""
    parts: list[LogPart] = []
    for file in files:
        with file.open("rb") as stored:
            is_plain = codec_of(stored) is None
        size = size_of(file)
        for start in range(0, size, PART_BYTES) if is_plain else (0,):
            stop = min(start + PART_BYTES, size) if is_plain else None
            parts.append(LogPart(file, start, stop, on_bad_line, negatives, spool / f"{len(parts):06d}.parquet"))
    return parts


def parse_part(part: LogPart) -> None:
    """Parse a part, unless that was done."""
    if part.spool.is_file():
        return
    try:
        _parse(part, line=1)
    except DataError:
        if not part.start:
            raise
        _parse(part, line=2 + count_lines(part.file, part.start - 1))  # the same error, with the line's number
        raise


def _parse(part: LogPart, line: int) -> None:
    checker = LineChecker(part.on_bad_line, negatives=part.negatives)
    # The writer is Arrow's, because it reports a full disk as an OSError with its errno.
    with new_file(part.spool) as unfinished, pq.ParquetWriter(unfinished, _SCHEMA, compression="lz4") as writer:
        for block in read_blocks(part.file, start=part.start, stop=part.stop, line=line):
            frame = checker.parse(block)
            if len(frame):
                writer.write_table(frame.to_arrow().cast(_SCHEMA))
        for key, counts in ((_SKIPPED, checker.skipped), (_REPLACED, checker.replaced)):
            writer.add_key_value_metadata({key: json.dumps(counts).encode()})


def parsed_pieces(parts: Sequence[LogPart]) -> tuple[list[Piece], Counter[str], Counter[str]]:
    """Return the parsed parts in order, the skipped lines by reason, and the replaced values by column."""
    pieces: list[Piece] = []
    skipped, replaced = Counter[str](), Counter[str]()
    for part in parts:
        file = ParquetFile(
            filesystem=fs.LocalFileSystem(), path=str(part.spool), name=part.file.name, shown=str(part.file)
        )
        for counts, key in ((skipped, _SKIPPED), (replaced, _REPLACED)):
            counts.update(json.loads((file.metadata.metadata or {}).get(key, b"{}")))
        pieces += [Piece(rows) for rows in file.row_groups()]
    if not pieces:
        raise DataError(f"{parts[0].file} has no good line ({sum(skipped.values()):,} were skipped)")
    return pieces, skipped, replaced


Progress = Callable[[str, int, int], None]
"""Called with a stage, what is done of it, and what there is to do."""

_LOG_SCHEMA = Schema(labels=(LABEL,), dense=DENSE, sparse=tuple(SparseColumn(name=name, rows=2) for name in SPARSE))


def find_input(
    raw: Sequence[str | Path | Source],
    schema: Schema | Mapping[str, object] | None,
    on_bad_line: OnBadLine,
    negatives: Negatives = "keep",
) -> Logs | Tables:
    """Find logs; or tables, where there is a schema, or names or the first line say so; or what a source reads."""
    if any(map(is_source, raw)):
        if len(raw) > 1:
            raise SpecError(f"{len(raw)} inputs were given, one of which is a whole dataset; prepare it by itself")
        place = raw[0] if isinstance(raw[0], Source) else location(str(raw[0]))
        assert not isinstance(place, str)
        return _tables(*source_files(place, schema))
    paths = [path for path in raw if not isinstance(path, Source)]
    if schema is None and not any(map(_has_tables, paths)):
        files = find_log_files(paths)
        if not has_header(files[0]):
            return Logs(files, on_bad_line, negatives)
    if schema is None and len(paths) > 1:
        raise SpecError(f"{len(paths)} paths of tables were given without a schema; give one, or one folder of files")
    files = _files(paths)
    if schema is not None:
        return _tables(schema, files)
    everything = with_rows(file for of_split in files.values() for file in of_split)
    names = dict.fromkeys(name for file in everything for name in file.schema.names)
    _check_types(everything, list(names), "write one of them anew, or give a schema without this column")
    drafted = draft(paths[0])
    return replace(
        _tables(drafted.schema, files),
        left_out={column.name: f"{column.type}; {column.reason}" for column in drafted.left_out},
    )


def _has_tables(path: str | Path) -> bool:
    place = location(str(path))
    if isinstance(place, Path):
        names = (file.relative_to(place).as_posix() for file in place.rglob("*")) if place.is_dir() else [place.name]
    else:
        names = _remote_names(place)
    return any(map(_is_no_log, names))


def _remote_names(uri: str) -> list[str]:
    """Names of the file at a URI, or of those in its folder and below; none where it cannot be opened."""
    try:
        store, root = opened(uri)
    except ValueError:  # said when logs are looked for
        return []
    if store.get_file_info(root).type != fs.FileType.Directory:
        return [root.rsplit("/", 1)[-1]]
    found = store.get_file_info(fs.FileSelector(root, recursive=True))
    return [file.path[len(root) :].strip("/") for file in found if file.is_file]


def _is_no_log(name: str) -> bool:
    """Whether a file of this name, below what was given, is a table and no log."""
    return is_table(name) and (".csv" in name.lower() or not is_delimited(name))


@dataclass
class Logs:
    """Criteo logs."""

    files: Sequence[Path | RemoteFile]
    on_bad_line: OnBadLine
    negatives: Negatives = "keep"
    schema: Schema = _LOG_SCHEMA
    # By fault, the skipped lines, and by column, the numericals that the rule replaced; known when pieces are.
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    replaced: Mapping[str, int] = field(default_factory=dict[str, int])
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def state(self) -> object:
        """Paths, sizes and times of change, which change when a file does."""
        return [(str(f), size_of(f), f.stat().st_mtime_ns if isinstance(f, Path) else f.mtime_ns) for f in self.files]

    def names(self) -> list[tuple[str, str]]:
        """Paths as pieces have them, with the name of each file."""
        return [(str(f.absolute() if isinstance(f, Path) else f), f.name) for f in self.files]

    def pieces(self, spool: Path, tasks: Tasks, report: Progress) -> list[Piece]:
        """Parse the logs into Parquet files."""
        files = [f.absolute() if isinstance(f, Path) else f for f in self.files]
        parts = parts_of(files, self.on_bad_line, self.negatives, spool)
        done, total = 0, sum(part.bytes for part in parts)
        report("read", 0, total)
        for part, _ in zip(parts, tasks.map(parse_part, parts), strict=True):
            done += part.bytes
            report("read", done, total)
        pieces, self.skipped, self.replaced = parsed_pieces(parts)
        return pieces

    def kinds(self) -> dict[str, pa.DataType]:
        """By table, the type in which its values are counted: integers, because hexadecimal digits are numbers."""
        return dict.fromkeys(SPARSE, pa.int64())

    def types(self) -> dict[str, pa.DataType]:
        """By column without ids, the type as it is spooled."""
        return {LABEL: pa.uint8(), **dict.fromkeys(DENSE, pa.float32())}

    def lists(self) -> frozenset[str]:
        """Inputs of ids that are lists: none."""
        return frozenset()


@dataclass(frozen=True)
class Tables:
    """Files that can be read as tables, by split where folders or names say one."""

    files: Mapping[str, Sequence[TableFile]]
    schema: Schema
    skipped: Mapping[str, int] = field(default_factory=dict[str, int])
    replaced: Mapping[str, int] = field(default_factory=dict[str, int])
    # By column that a drafted schema left out, its type and the reason.
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def state(self) -> object:
        """Paths, sizes and times of change, which change when a file does."""
        return [(split, *file.state) for split, of_split in self.files.items() for file in of_split]

    def names(self) -> list[tuple[str, str]]:
        """Paths as messages have them, with names below the input."""
        return [(file.shown, file.name) for of_split in self.files.values() for file in of_split]

    @property
    def checked(self) -> list[TableFile]:
        """Files with rows, or all files if none has; columns and types of empty files mean nothing."""
        every = [file for of_split in self.files.values() for file in of_split]
        return [file for file in every if file.row_groups()] or every

    def pieces(self, spool: Path, tasks: Tasks, report: Progress) -> list[Piece]:
        """Row groups, which are read where they are."""
        return [
            Piece(rows, split=split or None)
            for split, of_split in self.files.items()
            for file in of_split
            for rows in file.row_groups()
        ]

    def kinds(self) -> dict[str, pa.DataType]:
        """By table, the type in which the values of all its files and columns are counted."""
        found: dict[str, tuple[pa.DataType, str]] = {}
        for file in self.checked:
            for column in self.schema.sparse:
                stored = file.schema.field(column.name).type
                if not arrow.type_of_ids(stored):  # all values are missing
                    continue
                kind, where = value_type(stored), f"{file}, column '{column.name}'"
                other, first = found.setdefault(column.table_name, (kind, where))
                if arrow.is_text(kind) != arrow.is_text(other):
                    raise DataError(
                        f"{where} is {stored}, and {first} is {other}: the values of table '{column.table_name}' must "
                        "be all text or all integers, as 5 and '5' are other ids; write one of them anew"
                    )
                if kind in (pa.uint64(), pa.large_binary()):
                    found[column.table_name] = (kind, first)
        return {table: found[table][0] if table in found else pa.int64() for table in self.schema.rows}

    def types(self) -> dict[str, pa.DataType]:
        """By column without ids, a type that holds the values of all files."""
        s = self.schema
        names = [*s.labels, *s.dense, *s.weight_columns, *s.id_weights, *([s.group] if s.group is not None else [])]
        return {name: arrow.common_type([file.schema.field(name).type for file in self.checked]) for name in names}

    def lists(self) -> frozenset[str]:
        """Inputs of ids that are lists in any file, or by the schema if all values of all files are missing."""
        files, sparse = self.checked, self.schema.sparse
        of_column = {c: {arrow.type_family(f.schema.field(c.name).type) for f in files} for c in sparse}
        return frozenset(
            c.name for c, kinds in of_column.items() if "lists" in kinds or (not any(kinds) and c.ids != 1)
        )


def _tables(schema: Schema | Mapping[str, object], files: Mapping[str, Sequence[TableFile]]) -> Tables:
    schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
    if schema.derived:
        raise SpecError(
            f"'{schema.derived[0].name}' is made of other columns when they are read, which are ids in a prepared "
            "dataset; prepare the columns without `features`, or train on the files as they are"
        )
    # What is said of rows is not used.
    schema = replace(schema, sparse=tuple(replace(column, rows=1 << 30) for column in schema.sparse))
    encoder = Encoder(schema, ids="hash")
    tables = Tables(files, schema)
    everything = tables.checked
    for file in everything:
        encoder.check(file.schema, file.shown)
    tables.kinds()
    _check_types(everything, encoder.names, "write one of them anew")
    if not any(file.row_groups() for file in everything):
        raise DataError(f"{everything[0].shown} has no rows")
    return tables


def _files(raw: Sequence[str | Path]) -> dict[str, list[ParquetFile]]:
    files: dict[str, list[ParquetFile]] = {}
    for path in raw:
        for split, of_split in find_parquet(path).items():
            files.setdefault(split, []).extend(of_split)
    return files


def _check_types(files: Sequence[TableFile], names: Sequence[str], fix: str) -> None:
    """Raise unless values of one column are of one kind in all files that have it."""
    for name in names:
        seen: dict[pa.DataType, TableFile] = {}
        for file in files:
            at = file.schema.get_field_index(name)
            if at < 0:
                continue
            stored = file.schema.types[at]
            other = next((kind for kind in seen if not arrow.are_compatible(kind, stored)), None)
            if other is not None:
                raise DataError(
                    f"{file}, column '{name}' is {stored}, and {seen[other]} has {other}: rows of both cannot stand in "
                    f"one dataset; {fix}"
                )
            seen.setdefault(stored, file)
