# pyright: reportUnknownParameterType=false
"""Parse raw Criteo logs part by part into Parquet files, which the later passes of a preparation read column by column.

A part is a compressed file, or a range of bytes of a plain one, so that several workers can read one file.
"""

# pyarrow ships no types.

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from hotbed.data.criteo import (
    DENSE,
    LABEL,
    SPARSE,
    LineChecker,
    Negatives,
    OnBadLine,
    codec_of,
    count_lines,
    read_blocks,
    size_of,
)
from hotbed.data.parquet_files import ParquetFile
from hotbed.data.pieces import Piece
from hotbed.errors import DataError
from hotbed.files import new_file
from hotbed.locations import RemoteFile

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
        file = ParquetFile(fs.LocalFileSystem(), str(part.spool), part.file.name, str(part.file))
        for counts, key in ((skipped, _SKIPPED), (replaced, _REPLACED)):
            counts.update(json.loads((file.metadata.metadata or {}).get(key, b"{}")))
        pieces += [Piece(rows) for rows in file.row_groups()]
    if not pieces:
        raise DataError(f"{parts[0].file} has no good line ({sum(skipped.values()):,} were skipped)")
    return pieces, skipped, replaced
