"""Know the samples that are prepared as pieces of stored files, in order, and in which split each row is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data import arrow_columns as arrow
from hotbed.data.files.parquet_files import RowGroup
from hotbed.data.files.row_split import SPLITS, Position, RowSplit
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError, SpecError, did_you_mean

_TEST_FRACTION = 0.1
_GROUP_ROWS = 1 << 19
_GROUP_BYTES = 256 << 20
_FEWEST_ROWS = 1 << 8
_PROBED_ROWS = 1 << 10
_NOT_PROBED = 64


_NOWHERE = Position(0, 0)


@dataclass(frozen=True)
class Piece:
    """A row group, its place among all samples, and its split where all of its rows are in one."""

    rows: RowGroup
    split: str | None = None
    at: Position = _NOWHERE

    @property
    def bytes(self) -> int:
        """Bytes of its columns when they are not compressed."""
        return self.rows.file.nbytes(self.rows.index)


class HeldOut(NamedTuple):
    """Which rows are not for training, where files or folders do not say it; the last tenth is, where nothing does."""

    valid_fraction: float = 0.0
    test_fraction: float | None = None
    valid_rows: int = 0
    test_rows: int = 0
    by: RowSplit | None = None


@dataclass(frozen=True)
class Splits:
    """In which split a row is."""

    names: tuple[str, ...]
    ends: tuple[int, int] = (0, 0)  # positions among all samples where train and valid end, for pieces without a split
    by: RowSplit | None = None  # rule that replaces positions

    def codes(self, piece: Piece) -> NDArray[np.int64]:
        """Number in `SPLITS` of the split of each row of a piece ``[n]``."""
        n = piece.rows.samples
        if piece.split is not None:
            return np.full(n, SPLITS.index(piece.split))
        if self.by is None:
            return np.searchsorted(self.ends, np.arange(piece.at.before, piece.at.before + n), side="right")
        table = None if self.by.column is None else piece.rows.read([self.by.column])
        return np.asarray(self.by.codes(piece.rows, piece.at, table), dtype=np.int64)


def splits_of_files(files: Sequence[tuple[str, str]], valid: Sequence[str], test: Sequence[str]) -> dict[str, str]:
    """Return the split of each file that was chosen for one, by path.

    ``files`` has each path with the name below the input; ``valid`` and ``test`` have names, ends of paths, or paths.
    """
    paths = dict(files)
    wanted: dict[str, str] = {}
    for split, of_split in (("valid", valid), ("test", test)):
        for name in of_split:
            whole = [path for path in (name, str(Path(name).absolute())) if path in paths][:1]
            found = whole or [p for p, below in paths.items() if name == below or p.endswith(f"/{name}")]
            if not found:
                hint = did_you_mean(name, paths.values())
                raise SpecError(f"{split}_files names {name}, which is no file of the data{hint}")
            if len(found) > 1:
                raise SpecError(
                    f"{split}_files names {name}, which is each of {', '.join(found)}; give more of the path"
                )
            if wanted.setdefault(found[0], split) != split:
                raise SpecError(f"{name} is in valid_files and in test_files; leave it in one of them")
    return wanted


def with_splits(pieces: Sequence[Piece], of_files: Mapping[str, str]) -> list[Piece]:
    """The same pieces, those of some files with their split, all others with that of train."""
    if not of_files:
        return list(pieces)
    paths = [piece.rows.file.shown for piece in pieces]
    for file, split in of_files.items():
        if file not in paths:
            raise DataError(f"{file} has no rows; leave it out of {split}_files")
    return [replace(p, split=of_files.get(path, p.split or "train")) for p, path in zip(pieces, paths, strict=True)]


def in_order(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces, each with its place among those that have no split of their own."""
    free = [piece.rows.samples if piece.split is None else 0 for piece in pieces]
    ends = np.cumsum([0, *free]).tolist()
    return [replace(p, at=Position(before, ends[-1])) for p, before in zip(pieces, ends, strict=False)]


def divided(pieces: Sequence[Piece], rest: HeldOut) -> Splits:
    """Splits of pieces in order."""
    free = [piece for piece in pieces if piece.split is None]
    named = {piece.split for piece in pieces if piece.split is not None}
    asked = rest.valid_fraction or rest.test_fraction or rest.valid_rows or rest.test_rows or rest.by is not None
    if not free:
        if asked:
            raise SpecError(f"the files have the splits {', '.join(_ordered(named))}; ask for no others")
        return Splits(_ordered(named))
    if rest.by is not None:
        for piece in free:
            rest.by.check(piece.rows.file.schema, piece.rows.file.shown)
        return Splits(_ordered({*named, *rest.by.names}), by=rest.by)
    total = free[0].at.total
    test_fraction = rest.test_fraction
    if test_fraction is None:
        test_fraction = 0.0 if rest.valid_rows or rest.test_rows else _TEST_FRACTION
    valid = rest.valid_rows or round(total * rest.valid_fraction)
    test = rest.test_rows or round(total * test_fraction)
    sizes = {"train": total - valid - test}
    sizes |= {"valid": valid} if rest.valid_fraction or rest.valid_rows else {}
    sizes |= {"test": test} if test_fraction or rest.test_rows else {}
    for split, size in sizes.items():
        if size < 1:
            said = (
                f"valid_rows {valid:,} and test_rows {test:,}"
                if rest.valid_rows or rest.test_rows
                else f"valid_fraction {rest.valid_fraction} and test_fraction {test_fraction}"
            )
            raise DataError(
                f"the log has {total:,} good lines, too few for a {split} split with {said}; change them, or set one "
                "to 0"
            )
    return Splits(_ordered({*named, *sizes}), ends=(total - valid - test, total - test))


def _ordered(names: set[str]) -> tuple[str, ...]:
    return tuple(split for split in SPLITS if split in names)


def groups_of(pieces: Sequence[Piece]) -> list[tuple[Piece, ...]]:
    """Pieces that one task reads, in order: the same whoever works, as what is written depends on it."""
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


@dataclass(frozen=True)
class Part:
    """Some consecutive rows."""

    tables: Sequence[pa.Table]  # by piece
    places: Sequence[str]  # by piece, for messages
    rows: Sequence[NDArray[np.int64]]  # by piece, positions of its rows
    codes: NDArray[np.int64]  # number in `SPLITS` of the split of each row ``[n]``

    def column(self, name: str, kind: pa.DataType) -> pa.ChunkedArray:
        """A column as a type that holds the values of all pieces; a `DataError` says where one does not fit."""
        chunks: list[pa.Array] = []
        for table, place in zip(self.tables, self.places, strict=True):
            try:
                chunks += table[name].cast(kind).chunks
            except pa.ArrowInvalid as error:
                raise DataError(f"{place}, column '{name}': {error}; write it as {kind}, as in other files") from None
        return pa.chunked_array(chunks, kind)

    def lists(self, name: str) -> tuple[pa.Array, pa.Array]:
        """Of a column of lists, where they begin and end ``[n + 1]``, and which are missing ``[n]``."""
        arrays = [table[name].combine_chunks() for table in self.tables]
        lengths = [arrow.list_lengths(a) if arrow.is_list(a.type) else np.zeros(len(a), np.int64) for a in arrays]
        return pa.array(np.cumsum(np.concatenate([[0], *lengths]))), pa.concat_arrays([a.is_null() for a in arrays])

    def only(self, mask: NDArray[np.bool_]) -> Part:
        """The rows where a mask ``[n]`` is true."""
        ends = np.cumsum([len(table) for table in self.tables])[:-1]
        masks = np.split(mask, ends)
        tables = [table.filter(pa.array(kept)) for table, kept in zip(self.tables, masks, strict=True)]
        rows = [of[kept] for of, kept in zip(self.rows, masks, strict=True)]
        return Part(tables, self.places, rows, self.codes[mask])

    def placed(self) -> list[tuple[pa.Table, RowLocation]]:
        """The tables, each with its place for messages."""
        return [
            (table, RowLocation(name, lambda at, rows=rows: f"row {rows[at]:,}"))
            for table, name, rows in zip(self.tables, self.places, self.rows, strict=True)
        ]

    def values(self, column: str, kind: pa.DataType, *, is_list: bool = False) -> pa.Array:
        """All values of a column, those of lists one after the other, as the type in which they are counted.

        A file that has only missing values does not say whether they are lists: ``is_list`` does.
        """
        found = [_values(table[column], column, kind, place, is_list=is_list) for table, place in self.placed()]
        return pa.concat_arrays(found)


def read_parts(group: Sequence[Piece], columns: Sequence[str], splits: Splits) -> Iterator[Part]:
    """Read the rows of a group in order, as many at once as memory should hold."""
    sizes = [_bytes_read(piece, columns) for piece in group]
    if sum(piece.rows.samples for piece in group) <= _GROUP_ROWS and sum(sizes) <= _GROUP_BYTES:
        tables = [piece.rows.read(columns) for piece in group]
        codes = np.concatenate([splits.codes(piece) for piece in group])
        yield Part(tables, [str(piece.rows) for piece in group], [np.arange(len(table)) for table in tables], codes)
        return
    for piece, nbytes in zip(group, sizes, strict=True):
        codes, start = splits.codes(piece), 0
        rows = max(_FEWEST_ROWS, min(_GROUP_ROWS, _GROUP_BYTES * piece.rows.samples // max(1, nbytes)))
        for table in piece.rows.batches(columns, rows):
            rows_of_table = np.arange(start, start + len(table))
            yield Part([table], [str(piece.rows)], [rows_of_table], codes[start : start + len(table)])
            start += len(table)


def _bytes_read(piece: Piece, columns: Sequence[str]) -> int:
    """Bytes that columns of a piece take when they are read, about.

    Texts that repeat are stored once, and read as often as they are met: what the footer says may be a thousandth of
    that. So where a column is stored so, its first rows are read, and all are taken to be like them.
    """
    rows = piece.rows
    texts = rows.file.repeated_texts(rows.index, columns)
    most = sum(texts.values())
    if most <= _GROUP_BYTES // _NOT_PROBED:
        return piece.bytes + most
    first = next(rows.batches(list(texts), _PROBED_ROWS))
    return piece.bytes + first.nbytes * rows.samples // max(1, len(first))


def _values(column: pa.ChunkedArray, name: str, kind: pa.DataType, place: RowLocation, *, is_list: bool) -> pa.Array:
    array = column.combine_chunks()
    if pa.types.is_null(array.type):
        return pa.nulls(0 if is_list else len(array), kind)
    if arrow.is_list(array.type):
        array, place = array.flatten(), place.of_lists(arrow.list_lengths(array))
    values = arrow.to_hashable(array, name, place)
    try:
        return arrow.decode_dictionary(values).cast(kind)
    except pa.ArrowInvalid as error:
        raise DataError(
            f"{place.name}, column '{name}': {error}; its values must be {kind}, as in the other files"
        ) from None
