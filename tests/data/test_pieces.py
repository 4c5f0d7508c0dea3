"""Protects that what a task of a preparation reads at once is bounded by what it takes in memory, not in the file."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from hotbed.data.files.parquet_files import ParquetFile
from hotbed.data.preparation.pieces import Part, Piece, Splits, in_order, read_parts
from hotbed.errors import DataError

LIMIT, ROWS = 1 << 20, 6_000


def pieces_of(file: Path, table: pa.Table, row_group: int) -> list[Piece]:
    pq.write_table(table, file, row_group_size=row_group)
    groups = ParquetFile(filesystem=fs.LocalFileSystem(), path=str(file), name=file.name, shown=str(file)).row_groups()
    return in_order([Piece(group) for group in groups])


@pytest.mark.parametrize("row_group", [500, ROWS])
@pytest.mark.parametrize("is_list", [False, True], ids=["texts", "lists"])
def test_texts_that_repeat_are_read_in_small_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group: int, is_list: bool
) -> None:
    monkeypatch.setattr("hotbed.data.preparation.pieces._GROUP_BYTES", LIMIT)
    texts = [f"{i % 10}" * 2_000 for i in range(ROWS)]
    table = pa.table({"text": [[t] for t in texts] if is_list else texts, "label": [i % 2 for i in range(ROWS)]})
    pieces = pieces_of(tmp_path / "texts.parquet", table, row_group)
    assert sum(piece.bytes for piece in pieces) < LIMIT < table.nbytes / 10
    parts = list(read_parts(pieces, ["text", "label"], Splits(("train",), ends=(ROWS, ROWS))))
    assert max(part.tables[0].nbytes for part in parts) < 1.5 * LIMIT
    assert sum(len(part.codes) for part in parts) == ROWS
    assert pa.concat_tables([part.tables[0] for part in parts]).to_pydict() == table.to_pydict()


def test_small_row_groups_are_read_at_once(tmp_path: Path) -> None:
    table = pa.table({"text": [f"{i % 10}" for i in range(ROWS)]})
    pieces = pieces_of(tmp_path / "texts.parquet", table, 100)
    (part,) = read_parts(pieces, ["text"], Splits(("train",), ends=(ROWS, ROWS)))
    assert (len(part.tables), len(part.codes)) == (60, ROWS)


@pytest.mark.parametrize("is_list", [False, True])
def test_bad_ids_are_named_by_their_row(is_list: bool) -> None:
    values = [[1.0, 2.0], None, [], [3.0], [4.0, 0.5]] if is_list else [1.0, 2.0, None, 3.0, 0.5]
    part = Part([pa.table({"x": values})], ["log.parquet"], [np.arange(100, 105)], np.array([0, 1, 0, 0, 0]))
    for of in (part, part.only(part.codes == 0)):
        with pytest.raises(DataError, match=r"^log.parquet, column 'x': id 0.5 at row 104;"):
            of.values("x", pa.int64())
