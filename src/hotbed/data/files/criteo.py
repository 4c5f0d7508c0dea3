"""Read the raw Criteo log: find its files, and parse them block by block.

A line is 40 tab-separated fields and has no header: label (0 or 1), I1 … I13 (integers), C1 … C26 (up to 8 hexadecimal
digits); an empty field is a missing value. Files are read in blocks of whole lines, so memory does not grow with the
log, and each block is checked field by field before anything is kept of it.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, NamedTuple, TypeVar, cast

import numpy as np

from hotbed.errors import DataError
from hotbed.locations import RemoteFile, location, remote_files

if TYPE_CHECKING:  # polars is only needed to prepare, so it is imported in the functions that use it
    import polars as pl

LABEL = "label"
DENSE = tuple(f"I{i}" for i in range(1, 14))
SPARSE = tuple(f"C{i}" for i in range(1, 27))
COLUMNS = (LABEL, *DENSE, *SPARSE)

OnBadLine = Literal["error", "skip"]
Negatives = Literal["keep", "zero"]
"""``"keep"``: numericals x become ln(x + 3), where -3 is taken as -2; ``"zero"``: negative ones become 0 before."""
F = TypeVar("F", Path, RemoteFile)

BLOCK_BYTES = 16 << 20
MAX_LINE_BYTES = 1 << 20


class Block(NamedTuple):
    """Whole lines of one file; the first is number ``line``, counted from 1."""

    file: Path | RemoteFile
    line: int
    text: bytes


@dataclass
class LineChecker:
    """Turns blocks into frames of typed columns; raises `DataError` at a bad line, or skips and counts bad lines."""

    on_bad_line: OnBadLine
    skipped: Counter[str] = field(default_factory=Counter)  # lines by fault: fields, label, numerical or categorical
    negatives: Negatives = "keep"
    # by column, the values of good lines that the rule for negative numericals replaced
    replaced: Counter[str] = field(default_factory=Counter)

    def parse(self, block: Block) -> pl.DataFrame:
        """Columns of a block: label UInt8, I* Float32 (ln(x + 3)), C* UInt32; missing values are null."""
        import polars as pl

        line_numbers, text = self._check_fields(block)
        if not text:
            return pl.DataFrame(schema=_empty_schema())
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
        """Drop or report lines that do not have 40 fields; return the numbers of the lines kept, and their text."""
        buffer = np.frombuffer(block.text, dtype=np.uint8)
        at = np.flatnonzero((buffer == ord("\t")) | (buffer == ord("\n")))
        lines, rest = divmod(len(at), len(COLUMNS))
        newline = (buffer[at] == ord("\n")) if rest == 0 else np.zeros(0, dtype=bool)
        if rest == 0 and np.count_nonzero(newline) == lines and newline[len(COLUMNS) - 1 :: len(COLUMNS)].all():
            return range(block.line, block.line + lines), block.text
        numbers: list[int] = []
        kept: list[bytes] = []
        for number, line in enumerate(block.text.split(b"\n")[:-1], block.line):
            fields = line.count(b"\t") + 1
            if fields == len(COLUMNS):
                numbers.append(number)
                kept.append(line)
                continue
            self._bad("fields", f"{block.file}, line {number:,}: {fields} fields, expected {len(COLUMNS)}")
        return numbers, b"".join(line + b"\n" for line in kept)

    def _good(self, block: Block, numbers: Sequence[int], raw: pl.DataFrame, parsed: pl.DataFrame) -> pl.Series:
        """Mask of the lines whose every value was understood; the others are reported or counted."""
        import polars as pl

        given = raw.with_columns(pl.lit("").alias(LABEL))  # a missing label is bad too
        wrong = pl.DataFrame([given[c].is_not_null() & parsed[c].is_null() for c in COLUMNS])
        good = ~pl.Series(wrong.select(pl.any_horizontal(pl.all())).to_series())
        for i in (~good).arg_true().to_list():
            column = next(c for c in COLUMNS if wrong[c][i])
            kind = "label" if column == LABEL else "numerical" if column in DENSE else "categorical"
            value = cast("str | None", raw[column][i])
            self._bad(kind, f"{block.file}, line {numbers[i]:,}, column {column}: {complaint(kind, value)}")
        return good

    def _bad(self, kind: str, message: str) -> None:
        if self.on_bad_line == "error":
            if kind == "numerical" and "out of range" in message:
                message += " (negatives='zero' sets all negative values to 0)"
            raise DataError(f"{message}; mend the line, or pass on_bad_line='skip' to leave out and count such lines")
        self.skipped[kind] += 1


def is_replaced(integers: pl.Expr, negatives: Negatives) -> pl.Expr:
    """Whether `logarithm` takes another value for an integer by the rule for negative ones."""
    return integers < 0 if negatives == "zero" else integers == -3


def logarithm(integers: pl.Expr, negatives: Negatives) -> pl.Expr:
    """Compute ln(x + 3) of integers, as Float32; null where it is not defined."""
    import polars as pl

    substitute = 0 if negatives == "zero" else -2
    integers = pl.when(is_replaced(integers, negatives)).then(substitute).otherwise(integers)
    # + 3 as floats: the largest integers would wrap around to negative ones.
    return (pl.when(integers > -3).then(integers).cast(pl.Float64) + 3).log().cast(pl.Float32)


def hexadecimal(text: pl.Expr) -> pl.Expr:
    """Parse text of up to 8 hexadecimal digits as UInt32; null where it is something else."""
    import polars as pl

    return (
        pl.when((text.str.len_bytes() <= 8) & ~text.str.starts_with("+"))
        .then(text)
        .str.to_integer(base=16, strict=False)
        .cast(pl.UInt32, strict=False)
    )


def find_files(raw: str | Path | Sequence[str | Path]) -> list[Path | RemoteFile]:
    """List the log's files in time order: as given, or ``day_*``, ``*.tsv[.gz|.zst]`` of a directory by number.

    Paths may be URIs.
    """
    files: list[Path | RemoteFile] = []
    for path in [raw] if isinstance(raw, str | Path) else raw:
        place = location(str(path))
        files += _local_files(place) if isinstance(place, Path) else _remote_files(place)
    if not files:
        raise DataError("no raw log file was given")
    for file in files:
        if size_of(file) == 0:
            raise DataError(f"{file} is empty, expected lines of {len(COLUMNS)} tab-separated fields")
    return files


def size_of(file: Path | RemoteFile) -> int:
    """Bytes of a file."""
    return file.stat().st_size if isinstance(file, Path) else file.size


def _local_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path} does not exist; give a Criteo log, plain, gzip or zstd, or a directory of them")
    return _in_time_order(str(path), [p for p in path.iterdir() if p.is_file()])


def _remote_files(uri: str) -> list[RemoteFile]:
    try:
        found = remote_files(uri)
    except ValueError as error:
        raise DataError(str(error)) from None
    if found is None:
        raise DataError(f"{uri} does not exist; give a Criteo log, plain, gzip or zstd, or a directory of them")
    return [found] if isinstance(found, RemoteFile) else _in_time_order(uri, found)


def _in_time_order(path: str, there: Sequence[F]) -> list[F]:
    found = [file for file in there if re.fullmatch(r"day_.*|.*\.tsv(\.gz|\.zst)?", file.name)]
    if not found:
        raise DataError(f"{path} has no day_*, *.tsv, *.tsv.gz or *.tsv.zst file; give the log's files by name")
    # day_2 comes before day_10
    return sorted(found, key=lambda f: [int(s) if s.isdigit() else s for s in re.split(r"(\d+)", f.name)])


def read_blocks(
    file: Path | RemoteFile, block_bytes: int = BLOCK_BYTES, *, start: int = 0, stop: int | None = None, line: int = 1
) -> Iterator[Block]:
    """Read a file (plain, gzip or zstd) as blocks of whole lines.

    ``start`` and ``stop`` select the lines of a plain file that begin between these bytes; ``line`` is the number of
    the first one. A longer line than `MAX_LINE_BYTES` is an error: the file is no log, and would be read into memory
    whole.
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
                    f"{file}: the {codec} stream is damaged or truncated after line {line - 1:,} ({error}); "
                    f"fetch the file again"
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
                    f"{file}, line {line:,}: longer than {MAX_LINE_BYTES:,} bytes, expected {len(COLUMNS)} "
                    f"tab-separated fields and a newline; give a Criteo log"
                )
    if rest:
        yield Block(file, line, _unix_lines(rest + b"\n"))
    elif line == first and start == 0:
        raise DataError(f"{file} holds no line, expected lines of {len(COLUMNS)} tab-separated fields")


def codec_of(stored: BinaryIO) -> Literal["gzip", "zstd"] | None:
    """How a file is compressed, by its first bytes; it stands at its beginning then."""
    head = stored.read(4)
    stored.seek(0)
    return "gzip" if head[:2] == b"\x1f\x8b" else "zstd" if head == b"\x28\xb5\x2f\xfd" else None


def count_lines(file: Path | RemoteFile, stop: int) -> int:
    """Count the lines that begin before a byte of a plain file, other than the first."""
    with file.open("rb") as stored:
        return sum(text.count(b"\n") for text in _bytes(stored, BLOCK_BYTES, stop))


def _between(stored: BinaryIO, block_bytes: int, start: int, stop: int) -> Iterator[bytes]:
    """Text of the lines that begin from ``start`` on and before ``stop``."""
    at = start
    if start:  # whether a line begins there, the byte before it says
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
    """Bytes up to the end of the line that a file stands in; up to one too many for a line, where none ends."""
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
    """Text of a gzip file of one or several members; unlike `gzip`, all that precedes a damage comes out first."""
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
            raise EOFError("the end of the stream is missing")


def _unix_lines(text: bytes) -> bytes:
    return text.replace(b"\r\n", b"\n") if b"\r" in text else text


def complaint(kind: str, value: str | None) -> str:
    """Say what is wrong with a value of a ``"label"``, ``"numerical"`` or ``"categorical"`` column."""
    if kind == "label":
        return f"label is {value or ''!r}, must be 0 or 1"
    if kind == "categorical":
        return f"{value!r} is not a hexadecimal number of at most 8 digits"
    if value is not None and re.fullmatch(r"[+-]?\d+", value):
        return f"{value} is out of range: ln(x + 3) needs x ≥ −3" if value.startswith("-") else f"{value} is too large"
    return f"{value!r} is not an integer"


def _empty_schema() -> dict[str, pl.DataType]:
    import polars as pl

    return {LABEL: pl.UInt8(), **dict.fromkeys(DENSE, pl.Float32()), **dict.fromkeys(SPARSE, pl.UInt32())}
