# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Convert CSV and TSV files to Parquet, once, so that everything else reads one format: `parquet_of`.

A file is parsed twice, block by block: to find the types of its columns over all rows, and to write them. What is
written is kept in a folder of the user's, under a name made of the file's path, size and time of change.
"""

# pyarrow ships no types.

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
from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
from pyarrow import fs
from typing_extensions import override

from hotbed.data.criteo import COLUMNS, DENSE, SPARSE
from hotbed.data.text_types import TypesOfText
from hotbed.errors import DataError
from hotbed.locations import RemoteFile

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
