"""Protects that slices of a row group are its rows, in whatever order and by however many threads they are read."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data import ParquetSource, Schema, SparseColumn
from hotbed.data.files.parquet_files import RowGroup, RowSlice, divide_into_slices, find_parquet
from hotbed.data.formats import parquet as parquet_source
from hotbed.errors import DataError

N = 1000
ROWS = {"size": 96, "last": N - 96 * (N // 96)}


def group_of(folder: Path) -> RowGroup:
    table = pa.table({"row": np.arange(N), "text": [f"{i}" * (i % 9) for i in range(N)], "click": np.arange(N) % 2})
    pq.write_table(table, folder / "log.parquet", data_page_size=512)
    return find_parquet(folder / "log.parquet")[""][0].row_groups()[0]


def rows_of(part: RowGroup | RowSlice, *columns: str) -> list[int]:
    return part.read(columns or ("row",))["row"].to_pylist()


def test_slices_are_the_rows_in_order(tmp_path: Path) -> None:
    parts = divide_into_slices(group_of(tmp_path), ROWS["size"])
    assert [part.samples for part in parts] == [ROWS["size"]] * (N // ROWS["size"]) + [ROWS["last"]]
    assert [row for part in parts for row in rows_of(part)] == list(range(N))
    assert parts[2].name_row(5) == f"row {2 * 96 + 5} (row {2 * 96 + 5} of the file)"
    assert divide_into_slices(group_of(tmp_path), N) == [group_of(tmp_path)]


def test_slices_are_the_same_in_any_order(tmp_path: Path) -> None:
    parts = divide_into_slices(group_of(tmp_path), ROWS["size"])
    expected = [list(range(at, min(at + 96, N))) for at in range(0, N, 96)]
    for seed in range(5):
        for i in np.random.default_rng(seed).permutation(len(parts)).tolist():
            assert rows_of(parts[i]) == expected[i]
            assert rows_of(parts[i], "text", "row") == expected[i]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rows_of, parts * 3)) == expected * 3


def test_a_source_streams_large_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group_of(tmp_path)
    monkeypatch.setattr(parquet_source, "_FEWEST_STREAMED", 96)
    monkeypatch.setattr(parquet_source, "_STREAMED_CELLS", 96 * 2)
    schema = Schema(sparse=(SparseColumn(name="row", rows=5000),), labels=("click",))
    source = ParquetSource(tmp_path / "log.parquet", schema, ids="raw")
    streamed = source.streamed()
    assert (len(source.chunks("train")), len(streamed.chunks("train"))) == (1, 11)
    ids = [i for chunk in range(11) for i in streamed.read("train", chunk).sparse.values.tolist()]
    assert ids == list(range(N))
    assert streamed.check_labels("train") == {"click": (0, 1)}


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    group_of(tmp_path)
    file = tmp_path / "log.parquet"
    data = file.read_bytes()
    file.write_bytes(data[:200] + bytes(400) + data[600:])
    part = divide_into_slices(find_parquet(file)[""][0].row_groups()[0], 96)[-1]
    with pytest.raises(
        DataError,
        match=r"log\.parquet, row group 0, column 'row': the file is damaged or truncated",
    ):
        part.read(["row", "text"])
