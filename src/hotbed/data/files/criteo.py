"""Find the files of a raw Criteo log, and parse them block by block.

A line has 40 tab-separated fields without a header: label (0 or 1), I1 … I13 (integers), C1 … C26 (up to 8 hexadecimal
digits). An empty field is a missing value. Files are read in blocks of whole lines, so memory does not depend on the
size of the log, and every field is checked.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, cast

import numpy as np

from hotbed.errors import DataError
from hotbed.locations import RemoteFile, location, remote_files

if TYPE_CHECKING:  # imported on first use, because the import is slow
    import polars as pl

LABEL = "label"
DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = (LABEL, *DENSE, *SPARSE)

OnBadLine = Literal["error", "skip"]
Negatives = Literal["keep", "zero"]
"""Rule for negative numericals x before x becomes ln(x + 3).

``"keep"`` replaces only -3, by -2. ``"zero"`` replaces all negative values by 0.
"""

BLOCK_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 20


class Block(NamedTuple):
    """Consecutive whole lines of one file."""

    file: Path | RemoteFile
    line: int  # number of the first line, from 1
    text: bytes


@dataclass
class LineChecker:
    """Converts blocks to frames of typed columns. A bad line raises `DataError`, or is skipped and counted."""

    on_bad_line: OnBadLine
    # Number of skipped lines by fault: fields, label, numerical or categorical
    skipped: Counter[str] = field(default_factory=Counter)
    negatives: Negatives = "keep"
    # Number of values of good lines that were replaced because of `negatives`, by column
    replaced: Counter[str] = field(default_factory=Counter)

    def parse(self, block: Block) -> pl.DataFrame:
        """Return the columns of a block: label UInt8, I* Float32 (ln(x + 3)), C* UInt32. Missing values are null."""
        import polars as pl

        line_numbers, text = self._check_fields(block)
        if not text:
            types = {LABEL: pl.UInt8(), **dict.fromkeys(DENSE, pl.Float32()), **dict.fromkeys(SPARSE, pl.UInt32())}
            return pl.DataFrame(schema=types)
        raw = pl.read_csv(
            text,
            separator="\t",
            has_header=False,
            schema=dict.fromkeys(COLUMNS, pl.String),
            quote_char=None,
            encoding="utf8-lossy",
        )
        integers = raw.select(pl.col(DENSE).cast(pl.Int64, strict=False))
        parsed = raw.select(
            pl.when(pl.col(LABEL).is_in(["0", "1"])).then(pl.col(LABEL)).cast(pl.UInt8),
            *(logarithm(pl.lit(integers[c]), self.negatives).alias(c) for c in DENSE),
            *(hexadecimal(pl.col(c)) for c in SPARSE),
        )
        if parsed[LABEL].null_count() or any(parsed[c].null_count() != raw[c].null_count() for c in COLUMNS):
            good = self._good(block, line_numbers, raw, parsed)
            parsed, integers = parsed.filter(good), integers.filter(good)
        counts = integers.select(is_replaced(pl.col(DENSE), self.negatives).sum()).row(0, named=True)
        self.replaced.update({name: count for name, count in counts.items() if count})
        return parsed

    def _check_fields(self, block: Block) -> tuple[Sequence[int], bytes]:
        """Raise `DataError` for a line without 40 fields, or skip it. Return numbers and text of all other lines."""
        buffer = np.frombuffer(block.text, dtype=np.uint8)
        at = np.flatnonzero((buffer == ord("\t")) | (buffer == ord("\n")))
        lines, rest = divmod(len(at), len(COLUMNS))
        newline = (buffer[at] == ord("\n")) if rest == 0 else np.zeros(0, dtype=bool)
        if rest == 0 and np.count_nonzero(newline) == lines and newline[len(COLUMNS) - 1 :: len(COLUMNS)].all():
            return range(block.line, block.line + lines), block.text
        numbers: list[int] = []
        kept: list[bytes] = []
        for number, line in enumerate(block.text.split(b"\n")[:-1], block.line):
            if (fields := line.count(b"\t") + 1) == len(COLUMNS):
                numbers.append(number)
                kept.append(line)
            else:
                self._report("fields", f"{block.file}, line {number:,}: got {fields} fields, expected {len(COLUMNS)}")
        return numbers, b"".join(line + b"\n" for line in kept)

    def _good(self, block: Block, numbers: Sequence[int], raw: pl.DataFrame, parsed: pl.DataFrame) -> pl.Series:
        """Raise `DataError` for a line with a bad value, or count it. Return the mask of lines without bad values."""
        import polars as pl

        given = raw.with_columns(pl.lit("").alias(LABEL))  # a missing label is bad too
        wrong = pl.DataFrame([given[c].is_not_null() & parsed[c].is_null() for c in COLUMNS])
        good = ~pl.Series(wrong.select(pl.any_horizontal(pl.all())).to_series())
        for i in (~good).arg_true().to_list():
            column = next(c for c in COLUMNS if wrong[c][i])
            kind = "label" if column == LABEL else "numerical" if column in DENSE else "categorical"
            value = cast("str | None", raw[column][i])
            self._report(kind, f"{block.file}, line {numbers[i]:,}, column {column}: {describe_fault(kind, value)}")
        return good

    def _report(self, fault: str, message: str) -> None:
        if self.on_bad_line == "error":
            if fault == "numerical" and "at least" in message:
                message += " (negatives='zero' replaces all negative values by 0)"
            raise DataError(f"{message}. Correct the line, or pass on_bad_line='skip' to skip and count bad lines")
        self.skipped[fault] += 1


def is_replaced(integers: pl.Expr, negatives: Negatives) -> pl.Expr:
    """Return whether `logarithm` first replaces an integer because of the rule for negative values."""
    return integers < 0 if negatives == "zero" else integers == -3


def logarithm(integers: pl.Expr, negatives: Negatives) -> pl.Expr:
    """Return ln(x + 3) of integers x as Float32, or null if the logarithm is undefined."""
    import polars as pl

    substitute = 0 if negatives == "zero" else -2
    integers = pl.when(is_replaced(integers, negatives)).then(substitute).otherwise(integers)
    # 3 is added as a float, because the largest integers would overflow.
    return (pl.when(integers > -3).then(integers).cast(pl.Float64) + 3).log().cast(pl.Float32)


def hexadecimal(text: pl.Expr) -> pl.Expr:
    """Parse text of up to 8 hexadecimal digits as UInt32. Other text becomes null."""
    import polars as pl

    return (
        pl.when((text.str.len_bytes() <= 8) & ~text.str.starts_with("+"))
        .then(text)
        .str.to_integer(base=16, strict=False)
        .cast(pl.UInt32, strict=False)
    )


def find_log_files(raw: str | Path | Sequence[str | Path]) -> list[Path | RemoteFile]:
    """Return the files of a log in time order.

    Paths may be URIs. A directory is replaced by its files ``day_*`` and ``*.tsv[.gz|.zst]``.
    """
    files: list[Path | RemoteFile] = []
    for path in [raw] if isinstance(raw, str | Path) else raw:
        files += _find_files(location(str(path)))
    if not files:
        raise DataError("raw: got [], expected at least one log file or directory of logs")
    for file in files:
        if size_of(file) == 0:
            raise DataError(f"{file} is empty, expected lines of {len(COLUMNS)} tab-separated fields")
    return files


def size_of(file: Path | RemoteFile) -> int:
    """Return the size of a file in bytes."""
    return file.stat().st_size if isinstance(file, Path) else file.size


def _find_files(path: Path | str) -> Sequence[Path | RemoteFile]:
    found: Path | RemoteFile | Sequence[Path | RemoteFile] | None = None
    if not isinstance(path, Path):
        try:
            found = remote_files(path)
        except ValueError as error:
            raise DataError(str(error)) from None
    elif path.exists():
        found = [file for file in path.iterdir() if file.is_file()] if path.is_dir() else path
    if found is None:
        raise DataError(f"{path} does not exist, expected a Criteo log (plain, gzip or zstd), or a directory of logs")
    if isinstance(found, Path | RemoteFile):
        return [found]
    logs = [file for file in found if re.fullmatch(r"day_.*|.*\.tsv(\.gz|\.zst)?", file.name)]
    if not logs:
        raise DataError(f"{path}: got no day_*, *.tsv, *.tsv.gz or *.tsv.zst file. Pass the paths of the log's files")
    return sorted(logs, key=lambda file: natural_order(file.name))


def natural_order(name: str) -> list[int | str]:
    """Return a key that sorts names by their numbers, e.g. ``day_2`` before ``day_10``."""
    return [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", name)]


def read_blocks(
    file: Path | RemoteFile, block_bytes: int = BLOCK_BYTES, *, start: int = 0, stop: int | None = None, line: int = 1
) -> Iterator[Block]:
    """Read a file (plain, gzip or zstd) as blocks of whole lines.

    ``start`` and ``stop`` select the lines of a plain file that begin at byte ``start`` or later, and before byte
    ``stop``. ``line`` is the number of the first selected line. A line longer than `MAX_LINE_BYTES` raises an error,
    because logs do not have such long lines.
    """
    rest, first = b"", line
    with file.open("rb") as stored:
        codec = codec_of(stored)
        if codec is None:
            pieces = _between(stored, block_bytes, start, size_of(file) if stop is None else stop)
        else:
            pieces = _unzipped(stored, block_bytes) if codec == "gzip" else _unzstd(stored, block_bytes)
        while True:
            try:
                text = next(pieces, None)
            except (EOFError, OSError, zlib.error) as error:
                if codec is None or (isinstance(error, OSError) and error.errno is not None):
                    raise
                raise DataError(
                    f"{file}: the {codec} stream is damaged or truncated after line {line - 1:,} ({error}). Download "
                    "the file again"
                ) from None
            if text is None:
                break
            whole, newline, tail = text.rpartition(b"\n")
            if newline:
                block = _unix_lines(rest + whole + newline)
                rest = b""
                yield Block(file, line, block)
                line += block.count(b"\n")
            rest += tail
            if len(rest) > MAX_LINE_BYTES:
                raise DataError(
                    f"{file}, line {line:,}: got more than {MAX_LINE_BYTES:,} bytes, expected {len(COLUMNS)} "
                    "tab-separated fields and a newline"
                )
    if rest:
        yield Block(file, line, _unix_lines(rest + b"\n"))
    elif line == first and start == 0:
        raise DataError(f"{file} has no lines, expected lines of {len(COLUMNS)} tab-separated fields")


def codec_of(stored: BinaryIO) -> Literal["gzip", "zstd"] | None:
    """Return the compression that the first bytes of a file indicate (None: plain), and rewind the file."""
    head = stored.read(4)
    stored.seek(0)
    return "gzip" if head[:2] == b"\x1f\x8b" else "zstd" if head == b"\x28\xb5\x2f\xfd" else None


def count_lines(file: Path | RemoteFile, stop: int) -> int:
    """Return the number of newlines in the first ``stop`` bytes of a plain file."""
    with file.open("rb") as stored:
        return sum(text.count(b"\n") for text in _bytes(stored, BLOCK_BYTES, stop))


def _between(stored: BinaryIO, block_bytes: int, start: int, stop: int) -> Iterator[bytes]:
    """Yield the text of lines that begin at byte ``start`` or later, and before byte ``stop``."""
    at = start
    if start:  # a line begins at ``start`` if the byte before is a newline
        at = start - 1
        stored.seek(at)
        at += _rest_of_line(stored)
    if at >= stop:
        return
    stored.seek(at)
    last = b""
    for text in _bytes(stored, block_bytes, stop - at):
        last = text[-1:]
        yield text
    if last != b"\n":
        end = stored.tell()
        rest = _rest_of_line(stored)
        stored.seek(end)
        yield from _bytes(stored, block_bytes, rest)


def _rest_of_line(stored: BinaryIO) -> int:
    """Return the number of bytes to the end of the current line. Stop at more than `MAX_LINE_BYTES`."""
    seen = 0
    while seen <= MAX_LINE_BYTES and (text := stored.read(1 << 16)):
        if (newline := text.find(b"\n")) >= 0:
            return seen + newline + 1
        seen += len(text)
    return seen


def _bytes(stored: BinaryIO, block_bytes: int, count: int) -> Iterator[bytes]:
    while count > 0 and (text := stored.read(min(block_bytes, count))):
        count -= len(text)
        yield text


def _unzstd(stored: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    import pyarrow as pa

    with pa.CompressedInputStream(pa.PythonFile(stored, "r"), "zstd") as stream:
        while text := stream.read(block_bytes):
            yield text


def _unzipped(stored: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    """Yield the text of a gzip file with one or several members.

    The module `gzip` is not used, because it does not return all text before a damaged part.
    """
    unzip, member, piece = zlib.decompressobj(wbits=31), False, b""
    while piece or (piece := stored.read(block_bytes // 4)):
        member = True
        yield unzip.decompress(piece, block_bytes)
        piece = unzip.unconsumed_tail
        if unzip.eof:
            piece = unzip.unused_data.lstrip(b"\0")
            unzip, member = zlib.decompressobj(wbits=31), False
    if member:
        yield unzip.flush()
        if not unzip.eof:
            raise EOFError("the stream has no end")


def _unix_lines(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n") if b"\r" in text else text


def describe_fault(kind: str, value: str | None) -> str:
    """Return the message about a bad value. ``kind`` is ``"label"``, ``"numerical"`` or ``"categorical"``."""
    if kind == "label":
        return f"got {value or ''!r}, expected 0 or 1"
    if kind == "categorical":
        return f"got {value!r}, expected a hexadecimal number of at most 8 digits"
    if value is not None and re.fullmatch(r"[+-]?\d+", value):
        return f"got {value}, expected {'at least −3, because of ln(x + 3)' if value[0] == '-' else 'below 2^63'}"
    return f"got {value!r}, expected an integer"
