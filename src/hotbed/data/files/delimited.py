"""Convert CSV and TSV files to Parquet, once, so that everything else reads one format: `parquet_of`.

A file is parsed twice, block by block: to find the types of its columns over all rows, and to write them. What is
written is kept in a folder of the user's, under a name made of the file's path, size and time of change.
"""

from __future__ import annotations

import csv
import hashlib
import io
import logging
import os
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
from pyarrow import fs
from typing_extensions import override

from hotbed.data.files.criteo import COLUMNS, DENSE, SPARSE
from hotbed.errors import DataError
from hotbed.locations import RemoteFile

if TYPE_CHECKING:  # imported where it is used: it takes a while
    import polars as pl

MISSING = ("NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N", "-nan", "#N/A")
"""Texts that stand for a missing value among numbers, times and truth values; among other text they are text."""

_LONG = 16  # digits that a float64 does not hold
_PLUS = r"^\+[0-9]+$"
_MEASURE = r"^-|^[+0-9][0-9]*[.,eE]"


@dataclass(frozen=True)
class _Kind:
    """A type that text may be of: what it becomes, and null where it cannot."""

    type: pa.DataType
    parse: Callable[[pl.Series], pl.Series]
    note: str = ""


def _integers(text: pl.Series) -> pl.Series:
    import polars as pl

    return _only(text, r"^(?:\+?0|[+-]?[1-9][0-9]*)$").cast(pl.Int64, strict=False)  # 007 is a code


def _floats(text: pl.Series) -> pl.Series:
    import polars as pl

    written = r"^[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$|^[+-]?[iI]nf(?:inity)?$"
    long = text.str.contains(rf"^[+-]?[0-9]{{{_LONG},}}$")
    kept = _only(text, written).set(long.fill_null(value=False), None)
    return kept.cast(pl.Float64, strict=False)


def _with_comma(text: pl.Series) -> pl.Series:
    import polars as pl

    return (
        _only(text, r"^[+-]?(?:0|[1-9][0-9]{0,14})(?:,[0-9]+)?$")
        .str.replace(",", ".", literal=True)
        .cast(pl.Float64, strict=False)
    )


def _with_thousands(text: pl.Series) -> pl.Series:
    import polars as pl

    kept = _only(text, r"^[+-]?(?:0|[1-9][0-9]{0,2})(?:,[0-9]{3})*(?:\.[0-9]+)?$")
    return kept.str.replace_all(",", "", literal=True).cast(pl.Float64, strict=False)


def _truth(text: pl.Series) -> pl.Series:
    import polars as pl

    return text.str.to_lowercase().replace_strict({"true": True, "false": False}, default=None, return_dtype=pl.Boolean)


def _dates(text: pl.Series) -> pl.Series:
    kept = _only(text, r"^[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}$").str.replace_all("/", "-", literal=True)
    return kept.str.to_date("%Y-%m-%d", strict=False)


def _times(text: pl.Series) -> pl.Series:
    clock = r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?"
    kept = _only(text, rf"^[0-9]{{4}}[-/][0-9]{{1,2}}[-/][0-9]{{1,2}}[T ]{clock}$")
    kept = kept.str.replace("T", " ", literal=True).str.replace_all("/", "-", literal=True)
    kept = kept.str.replace("( [0-9]+:[0-9]+)$", "$1:00")
    return kept.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False)


def _zoned_times(text: pl.Series) -> pl.Series:
    import polars as pl

    kept = _only(text, r"^[0-9-]{10}[T ][0-9:]{8}(?:\.[0-9]+)?(?:Z|[+-][0-9]{2}:?[0-9]{2})$")
    kept = kept.str.replace("T", " ", literal=True).str.replace("Z$", "+0000")
    kept = kept.str.replace(r"([+-][0-9]{2}):([0-9]{2})$", "$1$2")
    found = kept.str.to_datetime("%Y-%m-%d %H:%M:%S%.f%z", time_unit="us", strict=False)
    return found.cast(pl.Datetime("us", "UTC"))


def _day_first(text: pl.Series) -> pl.Series:
    return _slashed(text, "$3-$2-$1")


def _month_first(text: pl.Series) -> pl.Series:
    return _slashed(text, "$3-$1-$2")


def _slashed(text: pl.Series, order: str) -> pl.Series:
    """Dates such as ``31/12/2024 9:05``, also with points or dashes, whose parts are in this order."""
    pattern = r"^([0-9]{1,2})[/.-]([0-9]{1,2})[/.-]([0-9]{4})(?: [0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?)?$"
    kept = _only(text, pattern)
    clock = kept.str.extract(" (.*)$").fill_null("0:00").str.replace("^([0-9]+:[0-9]+)$", "$1:00")
    days = kept.str.replace(" .*", "").str.replace(pattern, order)
    return (days + " " + clock).str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="us", strict=False)


def _only(text: pl.Series, pattern: str) -> pl.Series:
    """Text that a pattern matches; null where it does not."""
    return text.set(~text.str.contains(pattern).fill_null(value=True), None)


_KINDS = {
    "integer": _Kind(pa.int64(), _integers),
    "float": _Kind(pa.float64(), _floats),
    "truth": _Kind(pa.bool_(), _truth),
    "date": _Kind(pa.date32(), _dates),
    "time": _Kind(pa.timestamp("us"), _times),
    "zoned": _Kind(pa.timestamp("us", "UTC"), _zoned_times),
    "day first": _Kind(pa.timestamp("us"), _day_first, "dates are day/month/year, for some days are above 12"),
    "month first": _Kind(pa.timestamp("us"), _month_first, "dates are month/day/year, for some days are above 12"),
    "thousands": _Kind(pa.float64(), _with_thousands, "commas are taken to group digits by thousands (1,234.5)"),
    "comma": _Kind(pa.float64(), _with_comma, "commas are taken for decimal commas (1,5)"),
}


class TypesOfText:
    """Types of columns, narrowed down batch by batch; what no type fits is text, and so are the columns ``text``."""

    def __init__(self, names: Sequence[str], text: Collection[str] = ()) -> None:
        self._names = tuple(names)
        self._kinds = {name: [] if name in text else list(_KINDS) for name in names}
        self._empty = set(names)
        self._with_plus: set[str] = set()
        self._measures: set[str] = set()
        self._spaced = set(names)

    def look_at(self, batch: pa.Table) -> None:
        """Drop the types that do not fit all of these rows ``[n]`` of text."""
        for name in self._names:
            if name in self._spaced and pc.all(pc.starts_with(batch[name], " ")).as_py() is False:
                self._spaced.discard(name)
            if self._kinds[name]:
                text = _series(batch, name)
                if text.null_count() < len(text):
                    self._empty.discard(name)
                    few = text.head(1000)  # says most, quickly
                    fit = [k for k in self._kinds[name] if _fits(_KINDS[k], few) and _fits(_KINDS[k], text)]
                    self._kinds[name] = fit
                    self._look_at_signs(name, text)

    def _look_at_signs(self, name: str, text: pl.Series) -> None:
        """Note whether integers begin with "+", and whether other values show that it is the sign of a number."""
        if name not in self._with_plus and text.str.contains("+", literal=True).any():
            self._with_plus |= {name} if text.str.contains(_PLUS).any() else set()
        if name not in self._measures and text.str.contains(_MEASURE).any():
            self._measures.add(name)

    def schema(self) -> pa.Schema:
        """Names and types as far as they are known now; that of a column without values is null."""
        return pa.schema([(name, self._type(name)) for name in self._names])

    def notes(self) -> list[str]:
        """Say which columns were read in a way that is not plain."""
        return [f"column '{name}': {kind.note}" for name in self._names if (kind := self._kind(name)) and kind.note]

    def convert(self, batch: pa.Table) -> pa.Table:
        """Convert rows of text ``[n]`` to the types."""
        columns: list[pa.ChunkedArray] = []
        for name, field in zip(self._names, self.schema(), strict=True):
            kind = self._kind(name)
            if self._is_empty(name):
                columns.append(pa.chunked_array([pa.nulls(len(batch))]))
            elif kind is None:
                columns.append(_without_space(batch[name]) if name in self._spaced else batch[name])
            else:
                columns.append(pa.chunked_array([kind.parse(_series(batch, name)).to_arrow()]).cast(field.type))
        return pa.Table.from_arrays(columns, schema=self.schema())

    def _kind(self, name: str) -> _Kind | None:
        found = self._kinds[name]
        if not found or name in self._empty or {"day first", "month first"} <= {*found}:  # 1/2/2024 may be either
            return None
        if name in self._with_plus - self._measures:  # +49 and 12 alone may be telephone numbers
            return None
        return _KINDS[found[0]]

    def _type(self, name: str) -> pa.DataType:
        if self._is_empty(name):
            return pa.null()
        return pa.string() if (kind := self._kind(name)) is None else kind.type

    def _is_empty(self, name: str) -> bool:
        return bool(self._kinds[name]) and name in self._empty


def _without_space(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """Remove spaces at the beginning of text ``[n]``; empty text becomes null."""
    text = pc.utf8_ltrim(text, " ")
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, text.type), text)


def _series(batch: pa.Table, name: str) -> pl.Series:
    """Return text ``[n]`` without spaces around it, and with null for what stands for a missing value."""
    import polars as pl

    text = pl.Series("", pl.from_arrow(batch[name]), dtype=pl.String)  # some names cannot go back to Arrow
    text = text.str.strip_chars()
    return text.set(text.is_in(("", *MISSING)), None)


def _fits(kind: _Kind, text: pl.Series) -> bool:
    return kind.parse(text).null_count() == text.null_count()


_log = logging.getLogger("hotbed")

_NAME = re.compile(r"(\.(csv|tsv)|(^|/)day_\d+)(\.gz|\.zst)?$", re.IGNORECASE)
_CODECS = {".gz": "gzip", ".zst": "zstd"}
_VERSION = 6  # part of the names of what is kept: raised where a file would be converted to something else
_HEAD_BYTES = 1 << 20
_HEAD_ROWS = 20
_BLANK_BYTES = 1 << 10  # larger files are not looked at: they have more than blank lines
_BLOCK_BYTES = 16 << 20
_ROW_GROUP = 65_536
_KEPT_SECONDS = 7 * 24 * 3600
_HEX = re.compile(r"[0-9a-fA-F]{0,8}")
_INTEGER = re.compile(r"(-?\d+)?")
_MOST_COLUMNS = 20_000
_DIRECTIVE = re.compile(r'"?sep=([\t !#-~])"?\r?(?:\n|$)', re.IGNORECASE)
"""The line before the header by which spreadsheets learn the separator."""


@dataclass(frozen=True)
class Layout:
    """How the text of a file is to be read."""

    names: tuple[str, ...]
    separator: str
    has_header: bool
    text: frozenset[str] = frozenset()
    """Columns that are text whatever is in them."""
    skipped: int = 0
    """Lines before the header."""


def is_delimited(name: str) -> bool:
    """Whether a file of this name is one of CSV or TSV, or a day of Criteo's log, plain or compressed."""
    return _NAME.search(name) is not None


def is_blank(store: fs.FileSystem, info: fs.FileInfo) -> bool:
    """Whether a file has no text but blank lines, as empty partitions of some tools have.

    A compressed file of 0 bytes is not blank but cut short.
    """
    if info.size > _BLANK_BYTES:
        return False
    if not info.size:
        return info.path.lower().endswith((".csv", ".tsv"))
    with _explained(info.path), _stream(store, info.path) as stream:
        return not stream.read(_HEAD_BYTES).decode("utf-8-sig", errors="replace").strip()


def has_header(file: Path | RemoteFile) -> bool:
    """Whether a file of tab-separated fields begins with a line of names, as no log of Criteo's does.

    Names are at least two, different, and no numbers, and the next line has as many fields.
    """
    remote = isinstance(file, RemoteFile)
    store, path = (file.filesystem, file.path) if remote else (fs.LocalFileSystem(), str(file))
    try:
        rows = _rows(path, *_head(store, path))
    except DataError:
        return False
    names = rows[0] if rows else []
    alike = len(rows) < 2 or len(rows[1]) == len(names)
    return len({*names}) == len(names) > 1 and alike and all(names) and not any(map(_is_number, names))


def cache_folder() -> Path:
    """Where converted files are kept: ``$HOTBED_TABLES``, or ``hotbed/tables`` in the user's folder for caches."""
    given = os.environ.get("HOTBED_TABLES")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hotbed" / "tables"


def parquet_of(store: fs.FileSystem, path: str, text: Collection[str] = ()) -> Path:
    """Return the Parquet copy of a file of CSV or TSV, which is made if it does not exist.

    If several processes ask at once, one converts, and the others wait for it. The columns ``text`` are always text.
    """
    info = store.get_file_info(path)
    place = hashlib.sha256(f"{store.type_name} {path}".encode()).hexdigest()[:16]
    state = hashlib.sha256(repr((info.size, info.mtime_ns, _VERSION, *sorted(text))).encode()).hexdigest()[:16]
    folder = cache_folder()
    kept = folder / f"{place}-{state}.parquet"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{place}.lock"):
            if not kept.is_file():
                _remove_old(folder, place)
                _convert(store, path, kept, text)
            os.utime(kept)
    except OSError as error:
        raise DataError(
            f"{path} could not be converted to Parquet in {folder}: {error}; set HOTBED_TABLES to a folder with room"
        ) from error
    return kept


@contextmanager
def _locked(file: Path) -> Generator[None]:
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        with suppress(ImportError, OSError):  # without locks each process converts for itself, and renames the same
            import fcntl

            fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _remove_old(folder: Path, place: str) -> None:
    """Remove what was made of earlier states of a file, unless a run may still read it."""
    for file in folder.glob(f"{place}-*.parquet"):
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > _KEPT_SECONDS:
                file.unlink()


def _convert(store: fs.FileSystem, path: str, kept: Path, text: Collection[str]) -> None:
    layout = _layout(store, path)
    _log.warning("converting %s to Parquet, once; it is kept in %s (set HOTBED_TABLES for another place)", path, kept)
    if not layout.has_header:
        _log.warning("%s has no header, but the layout of Criteo's logs: %s … C26", path, ", ".join(layout.names[:2]))
    types = TypesOfText(layout.names, {*layout.text, *text})
    for batch in _batches(store, path, layout):
        types.look_at(batch)
    for note in types.notes():
        _log.warning("%s: %s", path, note)
    unfinished = kept.with_name(f".{kept.name}.unfinished-{uuid.uuid4().hex[:8]}")
    try:
        with pq.ParquetWriter(unfinished, types.schema(), compression="zstd", compression_level=1) as writer:
            for batch in _batches(store, path, layout):
                writer.write_table(types.convert(batch), row_group_size=_ROW_GROUP)
        unfinished.replace(kept)
    finally:
        unfinished.unlink(missing_ok=True)


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
    """A stream of which no read ends with CR, because Arrow loses the LF of a quoted CRLF between two blocks.

    See https://github.com/apache/arrow/issues/51368.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._held = stream, b""

    @override
    def readable(self) -> bool:
        return True

    @override
    def read(self, size: int = -1, /) -> bytes:
        """Read at most so many bytes; those at the end that are CR come with the next read."""
        text: bytes = self._stream.read(size - len(self._held) if size >= 0 else None)
        found = self._held + text
        kept = found.rstrip(b"\r") if text else found
        kept = kept or found
        self._held = found[len(kept) :]
        return kept


@contextmanager
def _explained(path: str) -> Generator[None]:
    """Errors of reading as `DataError`, with what to do."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise _not_utf8(path, f"byte {error.start:,} is {error.object[error.start]:#x}") from None
    except pa.ArrowInvalid as error:
        reason = str(error)
        if "invalid UTF8" in reason:
            raise _not_utf8(path, reason) from None
        raise DataError(
            f"{path} cannot be read: {reason}; each line needs as many fields as the header, and a field that has a "
            "separator or a quote in it needs quotes"
        ) from None
    except (OSError, EOFError) as error:
        raise DataError(f"{path} cannot be read, the file is damaged or cut short ({error})") from None


def _not_utf8(path: str, reason: str) -> DataError:
    return DataError(
        f"{path} is not UTF-8 ({reason}); if it is Latin-1, convert it: iconv -f LATIN1 -t UTF-8 OLD > NEW (of "
        "Windows: -f WINDOWS-1252)"
    )


def _batches(store: fs.FileSystem, path: str, layout: Layout) -> Iterator[pa.Table]:
    """Rows as text, with null where a field is empty."""
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


def _head(store: fs.FileSystem, path: str) -> tuple[str, str, bool]:
    """Return the first lines, the separator of their fields, and whether the file has no more lines."""
    with _explained(path), _stream(store, path) as stream:
        head: bytes = stream.read(_HEAD_BYTES)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise DataError(f"{path} is UTF-16; convert it: iconv -f UTF-16 -t UTF-8 OLD > NEW")
    whole = len(head) < _HEAD_BYTES
    try:
        with _explained(path):
            text = head.decode("utf-8-sig")
    except DataError:
        if whole or not (cut := head.decode("utf-8-sig", errors="ignore")) or len(cut.encode()) < len(head) - 7:
            raise
        text = cut  # a character at the end that is cut into halves
    if "\0" in text:
        raise DataError(f"{path} has bytes that are zero, so it is no text, or was not written whole; write it again")
    if not _without_directive(text).strip():
        raise DataError(f"{path} is empty; it needs a line of column names, and lines of values")
    return text, _separator(path, text), whole


def _without_directive(text: str) -> str:
    """Return the first lines without ``sep=;``."""
    return text[found.end() :] if (found := _DIRECTIVE.match(text)) else text


def _layout(store: fs.FileSystem, path: str) -> Layout:
    """Find separator and names in the first lines."""
    text, separator, whole = _head(store, path)
    rows, skipped = _rows(path, text, separator, whole), int(_DIRECTIVE.match(text) is not None)
    if all(map(_is_criteo, rows)) and len({*map(len, rows)}) == 1:
        return Layout(COLUMNS[-len(rows[0]) :], separator, has_header=False, text=frozenset(SPARSE), skipped=skipped)
    rows[0] = [name.strip() for name in rows[0]]
    _check_header(path, rows)
    return Layout(tuple(rows[0]), separator, has_header=True, skipped=skipped)


def _separator(path: str, text: str) -> str:
    if found := _DIRECTIVE.match(text):
        return found[1]
    first = re.sub(r'"[^"]*"', "", text.split("\n", 1)[0])
    counts = {separator: first.count(separator) for separator in "\t,;|"}
    usual = "\t" if ".tsv" in path.lower() else ","
    return usual if counts[usual] else max(counts, key=lambda s: counts[s])


def _rows(path: str, text: str, separator: str, whole: bool) -> list[list[str]]:
    rows: list[list[str]] = []
    text = _without_directive(text)
    try:
        for row in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True):
            if row:
                rows.append(row)
            if len(rows) > _HEAD_ROWS:
                break
    except csv.Error as error:
        if not rows:
            raise DataError(f"{path}: the line of column names cannot be read ({error})") from None
    # The last one may be cut off.
    return rows if whole or len(rows) == 1 else rows[:-1]


def _is_criteo(row: Sequence[str]) -> bool:
    """Whether a row is one of Criteo's log; new ones have no label, or an empty one."""
    label, numbers, ids = row[: -len(COLUMNS) + 1], row[-len(COLUMNS) + 1 : -len(SPARSE)], row[-len(SPARSE) :]
    return (
        label in ([], [""], ["0"], ["1"])
        and len(numbers) == len(DENSE)
        and all(map(_INTEGER.fullmatch, numbers))
        and all(map(_HEX.fullmatch, ids))
    )


def _check_header(path: str, rows: Sequence[Sequence[str]]) -> None:
    """Raise unless the first line can be one of names."""
    names = list(rows[0])
    if len(names) > _MOST_COLUMNS:
        raise DataError(f"{path} has {len(names):,} columns, at most {_MOST_COLUMNS:,}; split it, or use Parquet")
    below = [[row[i] for row in rows[1:] if i < len(row) and row[i]] for i in range(len(names))]
    numeric = [all(map(_is_number, column)) and bool(column) for column in below]
    if any(map(_is_number, names)) and all(
        _is_number(n) or not n for n, is_ in zip(names, numeric, strict=True) if is_
    ):
        raise DataError(
            f"{path} has no header, its first line is {', '.join(names[:8])}{' …' * (len(names) > 8)}; put a line of "
            "column names before it (a log in Criteo's layout, 40 fields with tabs between them, or 39 without labels, "
            "needs none)"
        )
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise DataError(f"{path} has several columns named '{twice}'; rename all but one")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
