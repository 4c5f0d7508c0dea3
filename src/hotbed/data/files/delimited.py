"""Convert CSV and TSV files to Parquet once, so that no epoch parses text and all other code reads one format.

`convert_to_parquet` parses a text file twice in blocks: first to find column types that fit all rows, then to write the
Parquet file. It is cached in a folder of the user. Its name depends on path, size and modification time of the text.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
from pyarrow import fs
from typing_extensions import override

from hotbed.checks import check_unique
from hotbed.data.files.criteo import COLUMNS, DENSE, SPARSE
from hotbed.errors import DataError
from hotbed.files import new_file
from hotbed.locations import RemoteFile

if TYPE_CHECKING:  # imported on first use, because the import is slow
    import polars as pl

MISSING = ("NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N", "-nan", "#N/A")
"""Texts that mean a missing value in columns of numbers, times and booleans. In columns of text, they are values.

Increment `_VERSION` when this list changes, because converted files are cached. docs/tables.md quotes the list.
"""

_log = logging.getLogger("hotbed")

_NAME = re.compile(r"(\.(csv|tsv)|(^|/)day_\d+)(\.gz|\.zst)?$", re.IGNORECASE)
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_VERSION = 6  # part of the names of cached files; incremented when conversions change
_HEAD_BYTES = 1 << 20
_HEAD_ROWS = 20
_BLANK_BYTES = 1 << 10  # larger files are assumed to have rows
_BLOCK_BYTES = 16 << 20
_ROW_GROUP = 65_536
_KEPT_SECONDS = 7 * 24 * 3600
_HEX = re.compile(r"[0-9a-fA-F]{0,8}")
_INTEGER = re.compile(r"(-?\d+)?")
_MOST_COLUMNS = 20_000
_DIRECTIVE = re.compile(r'"?sep=([\t !#-~])"?\r?(?:\n|$)', re.IGNORECASE)
"""A line before the header that sets the separator, e.g. ``sep=;``. Spreadsheets write such lines."""
_PLUS = r"^\+[0-9]+$"
_MEASURE = r"^-|^[+0-9][0-9]*[.,eE]"


# -- types of text ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _TextType:
    """A type that a column of text may be converted to. Text that does not match the pattern becomes null."""

    type: pa.DataType
    pattern: str
    convert: Callable[[pl.Series], pl.Series]
    note: str = ""  # for the log, if the text could also mean a different value

    def parse(self, text: pl.Series) -> pl.Series:
        return self.convert(_keep(text, self.pattern))

    def fits(self, text: pl.Series) -> bool:
        return self.parse(text).null_count() == text.null_count()


def _keep(text: pl.Series, pattern: str) -> pl.Series:
    return text.set(~text.str.contains(pattern).fill_null(value=True), None)


def _cast(dtype: str, text: pl.Series) -> pl.Series:
    import polars as pl

    return text.cast(getattr(pl, dtype), strict=False)


def _to_floats(text: pl.Series) -> pl.Series:
    long = text.str.contains(r"^[+-]?[0-9]{16,}$")  # float64 has fewer digits
    return _cast("Float64", text.set(long.fill_null(value=False), None))


def _to_truth(text: pl.Series) -> pl.Series:
    import polars as pl

    return text.str.to_lowercase().replace_strict({"true": True, "false": False}, default=None, return_dtype=pl.Boolean)


def _to_times(text: pl.Series) -> pl.Series:
    text = text.str.replace("T", " ", literal=True).str.replace_all("/", "-", literal=True)
    text = text.str.replace("( [0-9]+:[0-9]+)$", "$1:00")
    return text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False)


def _to_zoned_times(text: pl.Series) -> pl.Series:
    import polars as pl

    text = text.str.replace("T", " ", literal=True).str.replace("Z$", "+0000")
    text = text.str.replace(r"([+-][0-9]{2}):([0-9]{2})$", "$1$2")
    found = text.str.to_datetime("%Y-%m-%d %H:%M:%S%.f%z", time_unit="us", strict=False)
    return found.cast(pl.Datetime("us", "UTC"))


def _to_slashed_times(order: str, text: pl.Series) -> pl.Series:
    """Parse dates like ``31/12/2024 9:05``, also with points or dashes."""
    clock = text.str.extract(" (.*)$").fill_null("0:00").str.replace("^([0-9]+:[0-9]+)$", "$1:00")
    days = text.str.replace(" .*", "").str.replace(_SLASHED, order)
    return (days + " " + clock).str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="us", strict=False)


_SLASHED = r"^([0-9]{1,2})[/.-]([0-9]{1,2})[/.-]([0-9]{4})(?: [0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?)?$"
_TIMES = r"^[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}[T ][0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?$"
_TEXT_TYPES = {
    "integer": _TextType(pa.int64(), r"^(?:\+?0|[+-]?[1-9][0-9]*)$", partial(_cast, "Int64")),  # 007 is a code
    "float": _TextType(
        pa.float64(),
        r"^[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$|^[+-]?[iI]nf(?:inity)?$",
        _to_floats,
    ),
    "truth": _TextType(pa.bool_(), "^(?i:true|false)$", _to_truth),
    "date": _TextType(
        pa.date32(),
        r"^[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}$",
        lambda text: text.str.replace_all("/", "-", literal=True).str.to_date("%Y-%m-%d", strict=False),
    ),
    "time": _TextType(pa.timestamp("us"), _TIMES, _to_times),
    "zoned": _TextType(
        pa.timestamp("us", "UTC"),
        r"^[0-9-]{10}[T ][0-9:]{8}(?:\.[0-9]+)?(?:Z|[+-][0-9]{2}:?[0-9]{2})$",
        _to_zoned_times,
    ),
    "day first": _TextType(
        pa.timestamp("us"),
        _SLASHED,
        partial(_to_slashed_times, "$3-$2-$1"),
        "read dates as day/month/year, because some first numbers are above 12",
    ),
    "month first": _TextType(
        pa.timestamp("us"),
        _SLASHED,
        partial(_to_slashed_times, "$3-$1-$2"),
        "read dates as month/day/year, because some second numbers are above 12",
    ),
    "thousands": _TextType(
        pa.float64(),
        r"^[+-]?(?:0|[1-9][0-9]{0,2})(?:,[0-9]{3})*(?:\.[0-9]+)?$",
        lambda text: _cast("Float64", text.str.replace_all(",", "", literal=True)),
        "read commas as thousands separators (1,234.5)",
    ),
    "comma": _TextType(
        pa.float64(),
        r"^[+-]?(?:0|[1-9][0-9]{0,14})(?:,[0-9]+)?$",
        lambda text: _cast("Float64", text.str.replace(",", ".", literal=True)),
        "read commas as decimal commas (1,5)",
    ),
}


class TypesOfText:
    """The possible types of columns. Each batch removes types that do not fit.

    A column without a remaining type is text. The columns named in ``text`` always remain text.
    """

    def __init__(self, names: Sequence[str], text: Collection[str] = ()) -> None:
        self._names = tuple(names)
        self._types = {name: [] if name in text else list(_TEXT_TYPES) for name in names}
        self._empty = set(names)  # columns without values
        self._with_plus, self._measures = set[str](), set[str]()  # columns with a value like +49, or like -1, 1.5, 1e3
        self._spaced = set(names)  # columns with a leading space in each row

    def look_at(self, batch: pa.Table) -> None:
        """Remove, from the possible types of each column, the types that do not fit all rows of a batch of text."""
        for name in self._names:
            if name in self._spaced and pc.all(pc.starts_with(batch[name], " ")).as_py() is False:
                self._spaced.discard(name)
            if self._types[name]:
                text = _series(batch, name)
                if text.null_count() < len(text):
                    self._empty.discard(name)
                    few = text.head(1000)  # rules out most types quickly
                    self._types[name] = [
                        t for t in self._types[name] if _TEXT_TYPES[t].fits(few) and _TEXT_TYPES[t].fits(text)
                    ]
                    for pattern, names in ((_PLUS, self._with_plus), (_MEASURE, self._measures)):
                        if name not in names and text.str.contains(pattern).any():
                            names.add(name)

    def schema(self) -> pa.Schema:
        """Return the names and types of columns after the batches so far. Columns without values have type null."""
        return pa.schema([(name, self._type(name)) for name in self._names])

    def notes(self) -> list[str]:
        """Return a note for each column with ambiguous text that is converted, e.g. with decimal commas."""
        return [f"column '{name}': {found.note}" for name in self._names if (found := self._found(name)) and found.note]

    def convert(self, batch: pa.Table) -> pa.Table:
        """Convert a batch of text to the types of `schema`."""
        columns: list[pa.ChunkedArray] = []
        for name, field in zip(self._names, self.schema(), strict=True):
            found = self._found(name)
            if self._is_empty(name):
                columns.append(pa.chunked_array([pa.nulls(len(batch))]))
            elif found is None:
                columns.append(_strip_left(batch[name]) if name in self._spaced else batch[name])
            else:
                columns.append(pa.chunked_array([found.parse(_series(batch, name)).to_arrow()]).cast(field.type))
        return pa.Table.from_arrays(columns, schema=self.schema())

    def _found(self, name: str) -> _TextType | None:
        found = self._types[name]
        if not found or name in self._empty or {"day first", "month first"} <= {*found}:  # 1/2/2024 is ambiguous
            return None
        if name in self._with_plus - self._measures:  # +49 and 12 may be telephone numbers
            return None
        return _TEXT_TYPES[found[0]]

    def _type(self, name: str) -> pa.DataType:
        if self._is_empty(name):
            return pa.null()
        return pa.string() if (found := self._found(name)) is None else found.type

    def _is_empty(self, name: str) -> bool:
        return bool(self._types[name]) and name in self._empty


def _strip_left(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """Remove leading spaces of text ``[n]``. Empty text becomes null."""
    text = pc.utf8_ltrim(text, " ")
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, text.type), text)


def _series(batch: pa.Table, name: str) -> pl.Series:
    """Return a column's text ``[n]`` without surrounding spaces. Empty text and texts in `MISSING` become null."""
    import polars as pl

    text = pl.Series("", pl.from_arrow(batch[name]), dtype=pl.String)  # unnamed, because Arrow rejects some names
    text = text.str.strip_chars()
    return text.set(text.is_in(("", *MISSING)), None)


# -- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """How to parse a text file: its column names, separator and header."""

    names: tuple[str, ...]
    separator: str
    has_header: bool
    skipped: int  # lines before the header
    text: frozenset[str] = frozenset()  # columns that are always text


def is_delimited(name: str) -> bool:
    """Return whether a file is a CSV or TSV file, or a day of a Criteo log, by its name."""
    return _NAME.search(name) is not None


def is_blank(store: fs.FileSystem, info: fs.FileInfo) -> bool:
    """Return whether a file has only blank lines, like the empty partitions that some tools write.

    A compressed file of 0 bytes is not blank but truncated.
    """
    if info.size > _BLANK_BYTES:
        return False
    if not info.size:
        return info.path.lower().endswith((".csv", ".tsv"))
    with _explained(info.path), _stream(store, info.path) as stream:
        return not stream.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").strip()


def has_header(file: Path | RemoteFile) -> bool:
    """Return whether a file of tab-separated fields begins with a header, unlike a Criteo log.

    A header has at least two names, which are unique and not numbers. The next line has the same number of fields.
    """
    remote = isinstance(file, RemoteFile)
    store, path = (file.filesystem, file.path) if remote else (fs.LocalFileSystem(), str(file))
    try:
        rows = _read_head(store, path).rows
    except DataError:
        return False
    names = rows[0] if rows else []
    is_regular = len(rows) < 2 or len(rows[1]) == len(names)
    return len({*names}) == len(names) > 1 and is_regular and all(names) and not any(map(_is_number, names))


def cache_folder() -> Path:
    """Return the folder of converted files: ``$HOTBED_TABLES``, or ``hotbed/tables`` in the user's cache folder."""
    if folder := os.environ.get("HOTBED_TABLES"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotbed" / "tables"


def convert_to_parquet(store: fs.FileSystem, path: str, text: Collection[str] = ()) -> Path:
    """Return the path of the Parquet copy of a CSV or TSV file. Create the copy if it does not exist.

    If several processes call this at once, one process converts the file and the rest wait. The columns ``text`` are
    always text.
    """
    info = store.get_file_info(path)
    key = hashlib.sha256(f"{store.type_name} {path}".encode()).hexdigest()[:16]
    state = hashlib.sha256(repr((info.size, info.mtime_ns, _VERSION, *sorted(text))).encode()).hexdigest()[:16]
    folder = cache_folder()
    kept = folder / f"{key}-{state}.parquet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{key}.lock"):
            if not kept.is_file():
                _remove_old(folder, key)
                _convert(store, path, kept, text)
            os.utime(kept)
    except OSError as error:
        raise DataError(
            f"{path} could not be converted to Parquet in {folder}: {error}. Set HOTBED_TABLES to a folder with space"
        ) from error
    return kept


@contextmanager
def _locked(file: Path) -> Generator[None]:
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        # On a file system without locks, each process converts the file, and renames its copy to the same name.
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_old(folder: Path, key: str) -> None:
    """Remove a file's Parquet copies that were last used over a week ago. A run may still read the newer copies."""
    for file in folder.glob(f"{key}-*.parquet"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > _KEPT_SECONDS:
                file.unlink()


def _convert(store: fs.FileSystem, path: str, kept: Path, text: Collection[str]) -> None:
    layout = _find_layout(store, path)
    _log.warning("converting %s to Parquet once, in %s (set HOTBED_TABLES to change the folder)", path, kept)
    if not layout.has_header:
        _log.warning("%s has no header; using Criteo's columns %s … C26", path, ", ".join(layout.names[:2]))
    types = TypesOfText(layout.names, {*layout.text, *text})
    for batch in _batches(store, path, layout):
        types.look_at(batch)
    for note in types.notes():
        _log.warning("%s: %s", path, note)
    options = {"compression": "zstd", "compression_level": 1}
    with new_file(kept) as unfinished, pq.ParquetWriter(unfinished, types.schema(), **options) as writer:
        for batch in _batches(store, path, layout):
            writer.write_table(types.convert(batch), row_group_size=_ROW_GROUP)


@contextmanager
def _stream(store: fs.FileSystem, path: str) -> Generator[Any]:
    codec = _CODECS.get(Path(path).suffix.lower())
    with store.open_input_stream(path, compression=None) as raw:
        if codec is None:
            yield raw
        else:
            with pa.CompressedInputStream(raw, codec) as stream:
                yield stream


class _WholeLineEnds(io.RawIOBase):
    """A stream that returns no text ending in CR, because Arrow loses the LF if a quoted CRLF spans two blocks.

    See https://github.com/apache/arrow/issues/51368.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._held = stream, b""

    @override
    def readable(self) -> bool:
        return True

    @override
    def read(self, size: int = -1, /) -> bytes:
        """Read at most ``size`` bytes. CRs at their end are returned by the next read."""
        text: bytes = self._stream.read(size - len(self._held) if size >= 0 else None)
        found = self._held + text
        kept = found.rstrip(b"\r") if text else found
        kept = kept or found
        self._held = found[len(kept) :]
        return kept


@contextmanager
def _explained(path: str) -> Generator[None]:
    """Convert errors of reading the file to a `DataError` with advice to fix the file."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise _not_utf8(path, f"byte {error.start:,} is {error.object[error.start]:#x}") from None
    except pa.ArrowInvalid as error:
        reason = str(error)
        if "invalid UTF8" in reason:
            raise _not_utf8(path, reason) from None
        raise DataError(
            f"{path} cannot be parsed: {reason}. Write one field per column in each line, and quote fields that "
            "contain a separator or a quote"
        ) from None
    except (OSError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read: the file is damaged or truncated ({error}). Copy the file again"
        ) from None


def _not_utf8(path: str, reason: str) -> DataError:
    return DataError(
        f"{path} is not UTF-8 ({reason}). Convert it, e.g. from Latin-1: iconv -f LATIN1 -t UTF-8 OLD > NEW (on "
        "Windows: -f WINDOWS-1252)"
    )


def _batches(store: fs.FileSystem, path: str, layout: Layout) -> Iterator[pa.Table]:
    """Yield rows as text, with null for empty fields."""
    with _explained(path), _stream(store, path) as stream:
        reader = pc_csv.open_csv(
            pa.PythonFile(_WholeLineEnds(stream), "r"),
            read_options=pc_csv.ReadOptions(
                block_size=_BLOCK_BYTES,
                column_names=list(layout.names),
                skip_rows=layout.skipped,
                skip_rows_after_names=int(layout.has_header),
                use_threads=False,
            ),
            parse_options=pc_csv.ParseOptions(delimiter=layout.separator, newlines_in_values=True),
            convert_options=pc_csv.ConvertOptions(
                column_types=dict.fromkeys(layout.names, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=True,
            ),
        )
        for batch in reader:
            if batch.num_rows:
                yield pa.Table.from_batches([batch])


class _Head(NamedTuple):
    """The first lines of a file."""

    rows: list[list[str]]  # fields of the lines, except blank lines
    separator: str
    skipped: int  # lines before the header


def _read_head(store: fs.FileSystem, path: str) -> _Head:
    with _explained(path), _stream(store, path) as stream:
        head: bytes = stream.read(_HEAD_BYTES)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16, expected UTF-8. Convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW")
    whole = len(head) < _HEAD_BYTES
    try:
        with _explained(path):
            text = head.decode("utf-8-sig")
    except DataError:
        if whole or not (cut := head.decode("utf-8-sig", errors="ignore")) or len(cut.encode()) < len(head) - 7:
            raise
        text = cut  # the last character is incomplete
    if "\0" in text:
        raise DataError(f"{path} has bytes with value 0, so it is not text or is incomplete. Write the file again")
    if directive := _DIRECTIVE.match(text):
        text = text[directive.end() :]
    if not text.strip():
        raise DataError(f"{path} is empty, expected a line of column names, and lines of values")
    separator = directive[1] if directive else _find_separator(path, text)
    rows: list[list[str]] = []
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True):
            if row:
                rows.append(row)
            if len(rows) > _HEAD_ROWS:
                break
    except csv.Error as error:
        if not rows:
            raise DataError(f"{path}: the line of column names cannot be parsed ({error})") from None
    if not whole and len(rows) > 1:
        del rows[-1]  # may be incomplete
    return _Head(rows, separator, int(directive is not None))


def _find_separator(path: str, text: str) -> str:
    first = re.sub(r'"[^"]*"', "", text.split("\n", 1)[0])
    counts = {separator: first.count(separator) for separator in "\t,;|"}
    usual = "\t" if ".tsv" in path.lower() else ","
    return usual if counts[usual] else max(counts, key=lambda s: counts[s])


def _find_layout(store: fs.FileSystem, path: str) -> Layout:
    rows, separator, skipped = _read_head(store, path)
    if all(map(_is_criteo, rows)) and len({*map(len, rows)}) == 1:
        return Layout(COLUMNS[-len(rows[0]) :], separator, False, skipped, text=frozenset(SPARSE))
    rows[0] = [name.strip() for name in rows[0]]
    _check_header(path, rows)
    return Layout(tuple(rows[0]), separator, True, skipped)


def _is_criteo(row: Sequence[str]) -> bool:
    """Return whether a row has the layout of a Criteo log. The label may be empty or absent."""
    label, numbers, ids = row[: -len(COLUMNS) + 1], row[-len(COLUMNS) + 1 : -len(SPARSE)], row[-len(SPARSE) :]
    return (
        label in ([], [""], ["0"], ["1"])
        and len(numbers) == len(DENSE)
        and all(map(_INTEGER.fullmatch, numbers))
        and all(map(_HEX.fullmatch, ids))
    )


def _check_header(path: str, rows: Sequence[Sequence[str]]) -> None:
    """Raise `DataError` unless the first line can be a header."""
    names = list(rows[0])
    if len(names) > _MOST_COLUMNS:
        raise DataError(f"{path}: got {len(names):,} columns, expected at most {_MOST_COLUMNS:,}. Use Parquet")
    below = [[row[i] for row in rows[1:] if i < len(row) and row[i]] for i in range(len(names))]
    numeric = [all(map(_is_number, column)) and bool(column) for column in below]
    if any(map(_is_number, names)) and all(
        _is_number(n) or not n for n, is_ in zip(names, numeric, strict=True) if is_
    ):
        raise DataError(
            f"{path} has no header: its first line is {', '.join(names[:8])}{' …' * (len(names) > 8)}. Insert a line "
            "of column names. Only Criteo logs (40 tab-separated fields, or 39 without labels) need no header"
        )
    check_unique(f"columns of {path}", names, DataError, "Rename all but one.")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
