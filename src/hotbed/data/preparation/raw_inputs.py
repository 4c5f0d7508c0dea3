"""Find the input, parse logs, assign rows to splits, and read rows in blocks (stage 1 of a preparation).

Criteo logs are parsed into Parquet files: one file for each compressed log, or for each 64 MiB of an uncompressed log.
All other inputs are read without a copy. In both cases, the row groups of the files are `Piece`s, which also know their
splits. One task reads a group of consecutive pieces.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
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
from hotbed.data.files.parquet_files import ParquetFile, RowGroup, TableFile, find_parquet, is_table, with_rows
from hotbed.data.files.row_split import SPLITS, Position, RowSplit
from hotbed.data.preparation.prepare_options import PrepareOptions
from hotbed.data.preparation.stored_rows import is_source, source_files
from hotbed.data.row_location import RowLocation
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.files import new_file
from hotbed.locations import RemoteFile, location, resolve_uri

PART_BYTES = 64 << 20
_GROUP_ROWS = 1 << 19
_GROUP_BYTES = 256 << 20
_FEWEST_ROWS = 1 << 8
_PROBED_ROWS = 1 << 10
_NOT_PROBED = 64
_NOWHERE = Position(0, 0)
_SKIPPED, _REPLACED = b"hotbed.skipped", b"hotbed.replaced"
_PARSED = pa.schema(
    [(LABEL, pa.uint8()), *((name, pa.float32()) for name in DENSE), *((name, pa.uint32()) for name in SPARSE)]
)
_LOG_SCHEMA = Schema(labels=(LABEL,), dense=DENSE, sparse=tuple(SparseColumn(name=name, rows=2) for name in SPARSE))

Progress = Callable[[str, int, int], None]
"""Function that is called with a stage, the work done, and the total work."""


# -- inputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RawInput:
    """Files to prepare: either Criteo logs or tables."""

    schema: Schema
    logs: Sequence[Path | RemoteFile] = ()
    # by split, or with the key "" if neither folders nor names show the splits
    tables: Mapping[str, Sequence[TableFile]] = field(default_factory=dict[str, Sequence[TableFile]])
    kinds: Mapping[str, pa.DataType]  # type of counted values by table
    types: Mapping[str, pa.DataType]  # for each column without ids, a type that fits the values of all files
    lists: frozenset[str] = frozenset()  # sparse columns of lists
    left_out: Mapping[str, str] = field(default_factory=dict[str, str])  # type and reason by column without a role

    @property
    def state(self) -> object:
        """Paths, sizes and modification times of all files."""
        times = ((f, f.stat().st_mtime_ns if isinstance(f, Path) else f.mtime_ns) for f in self.logs)
        return (
            [(str(f), size_of(f), time) for f, time in times],
            [(split, *file.state) for split, of_split in self.tables.items() for file in of_split],
        )

    def names(self) -> list[tuple[str, str]]:
        """Return two paths of each file: as shown in messages, and relative to the input."""
        return [(str(f), f.name) for f in self.logs] + [(f.shown, f.name) for f in chain(*self.tables.values())]


def find_input(raw: Sequence[str | Path | Source], schema: Schema | Mapping[str, object] | None) -> RawInput:
    """Find out whether the input is a dataset, tables or Criteo logs, and return its files.

    The input is tables if there is a schema, if a file is Parquet or CSV, or if the first file begins with a header.
    """
    if any(map(is_source, raw)):
        if len(raw) > 1:
            raise SpecError(f"raw: got a dataset among {len(raw)} inputs, expected no other input. Prepare it alone")
        source = raw[0] if isinstance(raw[0], Source) else Path(location(str(raw[0])))
        return _check_tables(*source_files(source, schema))
    paths = [path for path in raw if not isinstance(path, Source)]
    if schema is None and not any(map(_has_tables, paths)):
        logs = [file.absolute() if isinstance(file, Path) else file for file in find_log_files(paths)]
        if not has_header(logs[0]):
            kinds = dict.fromkeys(SPARSE, pa.int64())  # hexadecimal digits are numbers
            types = {name: _PARSED.field(name).type for name in (LABEL, *DENSE)}
            return RawInput(schema=_LOG_SCHEMA, logs=logs, kinds=kinds, types=types)
    if schema is None and len(paths) > 1:
        fix = "Pass a schema, or put the tables into one folder"
        raise SpecError(f"schema: got none for {len(paths)} paths of tables, expected one. {fix}")
    files: dict[str, list[ParquetFile]] = {}
    for path in paths:
        for split, of_split in find_parquet(path).items():
            files.setdefault(split, []).extend(of_split)
    if schema is not None:
        return _check_tables(schema, files)
    every = with_rows(chain(*files.values()))
    names = dict.fromkeys(name for file in every for name in file.schema.names)
    _check_types(every, list(names), "Write one of the files with the other type, or pass a schema without this column")
    drafted = draft(paths[0])
    left_out = {column.name: f"{column.type}; {column.reason}" for column in drafted.left_out}
    return replace(_check_tables(drafted.schema, files), left_out=left_out)


def _has_tables(path: str | Path) -> bool:
    place = location(str(path))
    if not isinstance(place, Path):
        names = _remote_names(place)
    elif place.is_dir():
        names = [file.relative_to(place).as_posix() for file in place.rglob("*")]
    else:
        names = [place.name]
    return any(is_table(name) and (".csv" in name.lower() or not is_delimited(name)) for name in names)


def _remote_names(uri: str) -> list[str]:
    try:
        store, root = resolve_uri(uri)
    except ValueError:  # `find_log_files` raises the error later
        return []
    if store.get_file_info(root).type != fs.FileType.Directory:
        return [root.rsplit("/", 1)[-1]]
    found = store.get_file_info(fs.FileSelector(root, recursive=True))
    return [file.path[len(root) :].strip("/") for file in found if file.is_file]


def plain_columns(schema: Schema) -> list[str]:
    """Return the columns that are stored unchanged."""
    group = [schema.group] if schema.group is not None else []
    return list(dict.fromkeys([*schema.labels, *schema.dense, *schema.weight_columns, *schema.id_weights, *group]))


# -- tables --------------------------------------------------------------------------------------------------------


def _check_tables(schema: Schema | Mapping[str, object], tables: Mapping[str, Sequence[TableFile]]) -> RawInput:
    schema = schema if isinstance(schema, Schema) else Schema.from_dict(schema)
    if schema.derived:
        raise SpecError(
            f"schema.features: got '{schema.derived[0].name}', expected none, because features are derived from "
            "values, and a prepared dataset has only ids. Remove `features`, or train on the files as they are"
        )
    # The vocabularies determine the numbers of rows.
    schema = replace(schema, sparse=tuple(replace(column, rows=1 << 30) for column in schema.sparse))
    encoder = Encoder(schema, ids="hash")
    every = list(chain(*tables.values()))
    # Files without rows may have any types.
    files = [file for file in every if file.row_groups()]
    for file in files or every:
        encoder.check(file.schema, file.shown)
    kinds = _kinds(schema, files)
    _check_types(files, encoder.names, "Write one of the files with the other type")
    if not files:
        raise DataError(f"{every[0].shown} has no rows")
    stored = {name: [file.schema.field(name).type for file in files] for name in encoder.names}
    lists: set[str] = set()
    for column in schema.sparse:
        of_files = set(map(arrow.type_family, stored[column.name]))
        if "lists" in of_files or (not any(of_files) and column.ids != 1):  # all values may be missing
            lists.add(column.name)
    types = {name: arrow.common_type(stored[name]) for name in plain_columns(schema)}
    return RawInput(schema=schema, tables=tables, kinds=kinds, types=types, lists=frozenset(lists))


def _kinds(schema: Schema, files: Sequence[TableFile]) -> dict[str, pa.DataType]:
    """Return the type of counted values by table. Raise `DataError` if a table gets both text and integers."""
    found: dict[str, tuple[pa.DataType, str]] = {}
    for file in files:
        for column in schema.sparse:
            stored = file.schema.field(column.name).type
            if not arrow.type_of_ids(stored):  # all values are missing
                continue
            kind, where = value_type(stored), f"{file}, column '{column.name}'"
            other, first = found.setdefault(column.table_name, (kind, where))
            if arrow.is_text(kind) != arrow.is_text(other):
                raise DataError(
                    f"{where}: got {stored}, expected {other} as in {first}, because 5 and '5' are different ids of "
                    f"table '{column.table_name}'. Write all values as text, or all as integers"
                )
            if kind in (pa.uint64(), pa.large_binary()):
                found[column.table_name] = (kind, first)
    return {table: found[table][0] if table in found else pa.int64() for table in schema.rows}


def _check_types(files: Sequence[TableFile], names: Sequence[str], fix: str) -> None:
    """Raise `DataError` if a column has incompatible types in two files."""
    for name in names:
        seen: dict[pa.DataType, TableFile] = {}
        for file in files:
            if (at := file.schema.get_field_index(name)) < 0:
                continue
            stored = file.schema.types[at]
            other = next((kind for kind in seen if not arrow.are_compatible(kind, stored)), None)
            if other is not None:
                raise DataError(
                    f"{file}, column '{name}': got {stored}, expected a type compatible with {other} in {seen[other]}. "
                    f"{fix}"
                )
            seen.setdefault(stored, file)


# -- logs ----------------------------------------------------------------------------------------------------------


class LogPart(NamedTuple):
    """A part of a log, which one task parses into a Parquet file."""

    file: Path | RemoteFile
    start: int
    stop: int | None
    on_bad_line: OnBadLine
    negatives: Negatives
    spool: Path

    @property
    def bytes(self) -> int:
        """Size of the part in bytes."""
        return (size_of(self.file) if self.stop is None else self.stop) - self.start


def parse_logs(
    logs: Sequence[Path | RemoteFile], options: PrepareOptions, spool: Path, tasks: Tasks, report: Progress
) -> tuple[list[Piece], Counter[str], Counter[str]]:
    """Parse logs into Parquet files.

    Return the pieces, the number of skipped lines by fault, and the number of replaced values by column.
    """
    parts: list[LogPart] = []
    for log in logs:
        with log.open("rb") as stored:
            is_plain = codec_of(stored) is None
        size = size_of(log)
        for start in range(0, size, PART_BYTES) if is_plain else (0,):
            stop = min(start + PART_BYTES, size) if is_plain else None
            out = spool / f"{len(parts):06d}.parquet"
            parts.append(LogPart(log, start, stop, options.on_bad_line, options.negatives, out))
    done, total = 0, sum(part.bytes for part in parts)
    report("read", 0, total)
    for part, _ in zip(parts, tasks.map(parse_part, parts), strict=True):
        done += part.bytes
        report("read", done, total)
    pieces: list[Piece] = []
    counts = {_SKIPPED: Counter[str](), _REPLACED: Counter[str]()}
    local = fs.LocalFileSystem()
    for part in parts:
        file = ParquetFile(filesystem=local, path=str(part.spool), name=part.file.name, shown=str(part.file))
        for key, counter in counts.items():
            counter.update(json.loads((file.metadata.metadata or {}).get(key, b"{}")))
        pieces += [Piece(rows) for rows in file.row_groups()]
    skipped, replaced = counts.values()
    if not pieces:
        raise DataError(f"{logs[0]}: got no good line ({sum(skipped.values()):,} skipped), expected at least one")
    return pieces, skipped, replaced


def parse_part(part: LogPart) -> None:
    """Parse a part of a log unless its Parquet file exists."""
    if part.spool.is_file():
        return
    try:
        _parse(part, line=1)
    except DataError:
        if not part.start:
            raise
        # Parse again with the right number of the first line, which raises the same error with the right line.
        _parse(part, line=2 + count_lines(part.file, part.start - 1))
        raise


def _parse(part: LogPart, line: int) -> None:
    checker = LineChecker(part.on_bad_line, negatives=part.negatives)
    # Arrow's writer reports a full disk as an OSError with its errno.
    with new_file(part.spool) as unfinished, pq.ParquetWriter(unfinished, _PARSED, compression="lz4") as writer:
        for block in read_blocks(part.file, start=part.start, stop=part.stop, line=line):
            frame = checker.parse(block)
            if len(frame):
                writer.write_table(frame.to_arrow().cast(_PARSED))
        for key, counts in ((_SKIPPED, checker.skipped), (_REPLACED, checker.replaced)):
            writer.add_key_value_metadata({key: json.dumps(counts).encode()})


# -- splits and groups ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A row group of the input."""

    rows: RowGroup
    split: str | None = None  # split of all of the rows; None if `Splits` assigns each row
    at: Position = _NOWHERE  # among the rows that `Splits` assigns

    @property
    def bytes(self) -> int:
        """Uncompressed bytes of all columns."""
        return self.rows.file.nbytes(self.rows.index)


@dataclass(frozen=True)
class Splits:
    """Splits of a dataset, and the rule that assigns a split to each row of a piece that has no split."""

    names: tuple[str, ...]
    ends: tuple[int, int] = (0, 0)  # positions among these rows at which the train and valid splits end
    by: RowSplit | None = None  # rule that is used instead of `ends`

    def codes(self, piece: Piece) -> NDArray[np.int64]:
        """Return the index in `SPLITS` of each row ``[n]`` of a piece."""
        n = piece.rows.samples
        if piece.split is not None:
            return np.full(n, SPLITS.index(piece.split))
        if self.by is None:
            return np.searchsorted(self.ends, np.arange(piece.at.before, piece.at.before + n), side="right")
        table = None if self.by.column is None else piece.rows.read([self.by.column])
        return np.asarray(self.by.codes(piece.rows, piece.at, table), dtype=np.int64)


def splits_of_files(files: Sequence[tuple[str, str]], options: PrepareOptions) -> dict[str, str]:
    """Return, by path, the split of each file that the options name. ``files`` are `RawInput.names`."""
    paths = dict(files)
    chosen: dict[str, str] = {}
    for split, of_split in (("valid", options.valid_files), ("test", options.test_files)):
        for name in of_split:
            # An option may be a path, the end of a path, or a path relative to the input.
            whole = [path for path in (name, str(Path(name).absolute())) if path in paths][:1]
            found = whole or [p for p, below in paths.items() if name == below or p.endswith(f"/{name}")]
            if len(found) != 1:
                hint = "" if found else did_you_mean(name, paths.values())
                matches = f"{', '.join(found)}. Pass a longer part of the path" if found else f"none{hint}"
                raise SpecError(f"{split}_files, {name}: expected the path of one file of the data, got {matches}")
            if chosen.setdefault(found[0], split) != split:
                raise SpecError(f"{name}: got this file in valid_files and in test_files. Remove it from one of them")
    return chosen


def divide_pieces(
    pieces: Sequence[Piece], of_files: Mapping[str, str], options: PrepareOptions
) -> tuple[list[Piece], Splits]:
    """Return the pieces with their splits and positions, and the splits of the dataset."""
    if of_files:
        paths = [piece.rows.file.shown for piece in pieces]
        for file, split in of_files.items():
            if file not in paths:
                raise DataError(f"{file} has no rows. Remove it from {split}_files")
        pieces = [
            replace(p, split=of_files.get(path, p.split or "train")) for p, path in zip(pieces, paths, strict=True)
        ]
    ends = np.cumsum([0, *(piece.rows.samples if piece.split is None else 0 for piece in pieces)]).tolist()
    pieces = [replace(p, at=Position(before, ends[-1])) for p, before in zip(pieces, ends, strict=False)]
    return pieces, _choose_splits(pieces, ends[-1], options)


def _choose_splits(pieces: Sequence[Piece], total: int, options: PrepareOptions) -> Splits:
    named = {piece.split for piece in pieces if piece.split is not None}

    def in_order(more: Sequence[str] = ()) -> tuple[str, ...]:
        return tuple(split for split in SPLITS if split in {*named, *more})

    if not total:
        if options.has_splits:
            raise SpecError(
                f"splits: got {', '.join(in_order())} from the files, so options of splits have no effect. Remove these"
            )
        return Splits(in_order())
    if options.by is not None:
        for piece in pieces:
            if piece.split is None:
                options.by.check(piece.rows.file.schema, piece.rows.file.shown)
        return Splits(in_order(options.by.names), by=options.by)
    share = options.test_share()
    valid = options.valid_rows or round(total * (options.valid_fraction or 0.0))
    test = options.test_rows or round(total * share)
    sizes = {"train": total - valid - test}
    sizes |= {"valid": valid} if options.valid_fraction or options.valid_rows else {}
    sizes |= {"test": test} if share or options.test_rows else {}
    for split, size in sizes.items():
        if size < 1:
            raise DataError(
                f"{split} split: got {size:,} of {total:,} samples (valid {valid:,}, test {test:,}), expected at least "
                "1. Change the fractions or rows of the splits, or set one to 0"
            )
    return Splits(in_order(list(sizes)), ends=(total - valid - test, total - test))


def group_pieces(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """Divide pieces into groups, one per task. With any workers, a resumed preparation must make the same groups."""
    found: list[tuple[Piece, ...]] = []
    group: list[Piece] = []
    rows = size = 0
    for piece in pieces:
        n, nbytes = piece.rows.samples, piece.bytes
        if group and (rows + n > _GROUP_ROWS or size + nbytes > _GROUP_BYTES):
            found.append(tuple(group))
            group, rows, size = [], 0, 0
        group.append(piece)
        rows, size = rows + n, size + nbytes
    return [*found, tuple(group)] if group else found


# -- reading -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowBlock:
    """Consecutive rows of one or several pieces."""

    tables: Sequence[pa.Table]  # one per piece
    names: Sequence[str]  # file and row group of each piece, for messages
    rows: Sequence[NDArray[np.int64]]  # positions of the rows in each piece
    codes: NDArray[np.int64]  # index in `SPLITS` of each row ``[n]``

    def column(self, name: str, kind: pa.DataType) -> pa.ChunkedArray:
        """Return a column, cast to a type. Raise `DataError` with the file's name if a value does not fit the type."""
        chunks: list[pa.Array] = []
        for table, where in zip(self.tables, self.names, strict=True):
            try:
                chunks += table[name].cast(kind).chunks
            except pa.ArrowInvalid as error:
                raise _misfit(where, name, kind, error) from None
        return pa.chunked_array(chunks, kind)

    def lists(self, name: str) -> tuple[pa.Array, pa.Array]:
        """Return the offsets ``[n + 1]`` of a column of lists, and a mask ``[n]`` of missing lists."""
        arrays = [table[name].combine_chunks() for table in self.tables]
        lengths = [arrow.list_lengths(a) if arrow.is_list(a.type) else np.zeros(len(a), np.int64) for a in arrays]
        return pa.array(np.cumsum(np.concatenate([[0], *lengths]))), pa.concat_arrays([a.is_null() for a in arrays])

    def filter(self, mask: NDArray[np.bool_]) -> RowBlock:
        """Return the rows where a mask ``[n]`` is true."""
        ends = np.cumsum([len(table) for table in self.tables])[:-1]
        masks = np.split(mask, ends)
        tables = [table.filter(pa.array(kept)) for table, kept in zip(self.tables, masks, strict=True)]
        rows = [of[kept] for of, kept in zip(self.rows, masks, strict=True)]
        return RowBlock(tables, self.names, rows, self.codes[mask])

    def places(self) -> list[tuple[pa.Table, RowLocation]]:
        """Return the tables with the locations of their rows, for messages."""
        return [
            (table, RowLocation(name, lambda at, rows=rows: f"row {rows[at]:,}"))
            for table, name, rows in zip(self.tables, self.names, self.rows, strict=True)
        ]

    def values(self, column: str, kind: pa.DataType, *, is_list: bool = False) -> pa.Array:
        """Return all values of a column as one array. Lists are concatenated.

        ``is_list`` is only used for a file without values in this column, because the file's type does not show lists.
        """
        found: list[pa.Array] = []
        for table, place in self.places():
            array = table[column].combine_chunks()
            if pa.types.is_null(array.type):
                found.append(pa.nulls(0 if is_list else len(array), kind))
                continue
            if arrow.is_list(array.type):
                array, place = array.flatten(), place.of_lists(arrow.list_lengths(array))
            values = arrow.to_hashable(array, column, place)
            try:
                found.append(arrow.decode_dictionary(values).cast(kind))
            except pa.ArrowInvalid as error:
                raise _misfit(place.name, column, kind, error) from None
        return pa.concat_arrays(found)


def _misfit(where: str, column: str, kind: pa.DataType, error: Exception) -> DataError:
    return DataError(
        f"{where}, column '{column}': {error}, expected {kind} as in the other files. Write the file with this type"
    )


def read_blocks_of(group: Sequence[Piece], columns: Sequence[str], splits: Splits) -> Iterator[RowBlock]:
    """Yield the rows of a group in order: in one block, or in several blocks if the group is large."""
    sizes = [_bytes_read(piece, columns) for piece in group]
    if sum(piece.rows.samples for piece in group) <= _GROUP_ROWS and sum(sizes) <= _GROUP_BYTES:
        tables = [piece.rows.read(columns) for piece in group]
        codes = np.concatenate([splits.codes(piece) for piece in group])
        yield RowBlock(tables, [str(piece.rows) for piece in group], [np.arange(len(t)) for t in tables], codes)
        return
    for piece, nbytes in zip(group, sizes, strict=True):
        codes, start = splits.codes(piece), 0
        rows = max(_FEWEST_ROWS, min(_GROUP_ROWS, _GROUP_BYTES * piece.rows.samples // max(1, nbytes)))
        for table in piece.rows.batches(columns, rows):
            stop = start + len(table)
            yield RowBlock([table], [str(piece.rows)], [np.arange(start, stop)], codes[start:stop])
            start = stop


def _bytes_read(piece: Piece, columns: Sequence[str]) -> int:
    """Return the estimated bytes of a piece's columns in memory."""
    rows = piece.rows
    # A file stores repeated texts once, so its footer may show far too few bytes. Then the first rows are measured.
    texts = rows.file.repeated_texts(rows.index, columns)
    most = sum(texts.values())
    if most <= _GROUP_BYTES // _NOT_PROBED:
        return piece.bytes + most
    first = next(rows.batches(list(texts), _PROBED_ROWS))
    return piece.bytes + first.nbytes * rows.samples // max(1, len(first))
