"""A preparation finds its input, refuses files that do not fit together, and bounds the memory of the rows read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_cases import read_whole
from prepare_cases import SMALL, dataset, open_prepared
from pyarrow import fs

from hotbed.cli.main import main
from hotbed.data.files.parquet_files import ParquetFile
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.data.preparation.prepare_options import PrepareOptions
from hotbed.data.preparation.raw_inputs import Piece, Splits, divide_pieces, read_blocks_of
from hotbed.errors import DataError, SpecError


@pytest.mark.parametrize(
    "given", ["./day_0.parquet", "../_raw/day_0.parquet", "{folder}/day_0.parquet", "memory://raw/parquet/"]
)
def test_tables_by_any_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """Hidden is what is below the path that was given."""
    folder = tmp_path / "_raw"
    folder.mkdir()
    dataset(folder, files=1)
    monkeypatch.chdir(folder)
    if "://" in given:
        fsspec = pytest.importorskip("fsspec")
        store = fsspec.filesystem("memory")
        store.pipe_file("/raw/parquet/day_0.parquet", (folder / "day_0.parquet").read_bytes())
    report = prepare(given.format(folder=folder), tmp_path / "out", threshold=2, test_fraction=0)
    assert report.samples == {"train": 400}
    assert (tmp_path / "out/source.yaml").is_file()


def test_files_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that several files have chooses none of them; more of the path does."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        dataset(tmp_path / name, files=2)
    raw = [tmp_path / "a", tmp_path / "b"]
    message = rf"test_files, day_1.parquet: .* got {raw[0]}/day_1.parquet, {raw[1]}/day_1.parquet"
    with pytest.raises(SpecError, match=message):
        prepare(raw, tmp_path / "out", **SMALL, test_files=["day_1.parquet"])
    monkeypatch.chdir(tmp_path / "b")
    for i, name in enumerate(("b/day_1.parquet", str(raw[1] / "day_1.parquet"), "./day_1.parquet")):
        prepare(raw, tmp_path / f"out{i}", **SMALL, test_files=[name])
        prices = pq.read_table(tmp_path / f"out{i}/test")["price"]
        assert prices == pq.read_table(raw[1] / "day_1.parquet")["price"]


def test_a_file_without_rows_is_no_split(tmp_path: Path) -> None:
    first = dataset(tmp_path, files=2) / "day_0.parquet"
    pq.write_table(pq.read_table(first)[:0], first)
    with pytest.raises(DataError, match=r"day_0.parquet has no rows.* test_files"):
        prepare(tmp_path, tmp_path / "made/out", **SMALL, test_files=["day_0.parquet"])


def changed(path: Path, name: str, values: Any) -> None:
    """Replace a column of a file."""
    table = pq.read_table(path)
    pq.write_table(table.set_column(table.schema.get_field_index(name), name, values), path)


@pytest.mark.parametrize(
    ("name", "values", "kinds"),
    [
        ("tags", pa.array([3] * 400), r"int64, expected .* list<element: int64> in .*day_0.parquet"),
        ("session", pa.array([3] * 400), r"int64, expected .* string in .*day_0.parquet"),
    ],
    ids=["lists", "group"],
)
def test_types_that_differ_between_files(tmp_path: Path, name: str, values: Any, kinds: str) -> None:
    dataset(tmp_path, files=2)
    for i in range(2):
        path = tmp_path / f"day_{i}.parquet"
        table = pq.read_table(path)
        pq.write_table(table.append_column("session", table["user"]), path)
    changed(tmp_path / "day_1.parquet", name, values)
    sparse = tuple(replace(column, ids=1) for column in SMALL["schema"].sparse)
    options = {**SMALL, "schema": replace(SMALL["schema"], sparse=sparse, group="session")}
    with pytest.raises(DataError, match=rf"day_1.parquet, column '{name}': got {kinds}"):
        prepare(tmp_path, tmp_path / "made/out", **options)
    assert not (tmp_path / "made/out").exists()


@pytest.mark.parametrize("group_rows", [100, 10_000])
@pytest.mark.parametrize("missing", [1, 2])
def test_lists_that_are_all_missing_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int, group_rows: int
) -> None:
    """All files of a dataset have the same types, whatever was read at once."""
    monkeypatch.setattr("hotbed.data.preparation.raw_inputs._GROUP_ROWS", group_rows)
    dataset(tmp_path, files=2)
    for i in range(missing):
        changed(tmp_path / f"day_{1 - i}.parquet", "tags", pa.nulls(400))
    out = tmp_path / "made/out"
    prepare(tmp_path, out, **SMALL, test_fraction=0)
    types = {pq.read_schema(file).field("tags").type for file in (out / "train").iterdir()}
    assert types == {pa.large_list(pa.field("element", pa.int32()))}
    tags = pq.read_table(out / "train")["tags"].to_pylist()
    assert [x is None for x in tags] == [i >= 400 or missing == 2 for i in range(800)]
    assert len(read_whole(open_prepared(out)).sparse["tags"].values) == sum(len(x or []) for x in tags)


LIMIT, ROWS = 1 << 20, 6_000


def pieces_of(file: Path, table: pa.Table, row_group: int) -> list[Piece]:
    pq.write_table(table, file, row_group_size=row_group)
    groups = ParquetFile(filesystem=fs.LocalFileSystem(), path=str(file), name=file.name, shown=str(file)).row_groups()
    return divide_pieces([Piece(group) for group in groups], {}, PrepareOptions())[0]


@pytest.mark.parametrize("row_group", [500, ROWS])
@pytest.mark.parametrize("is_list", [False, True], ids=["texts", "lists"])
def test_texts_that_repeat_are_read_in_small_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group: int, is_list: bool
) -> None:
    monkeypatch.setattr("hotbed.data.preparation.raw_inputs._GROUP_BYTES", LIMIT)
    texts = [f"{i % 10}" * 2_000 for i in range(ROWS)]
    table = pa.table({"text": [[t] for t in texts] if is_list else texts, "label": [i % 2 for i in range(ROWS)]})
    pieces = pieces_of(tmp_path / "texts.parquet", table, row_group)
    assert sum(piece.bytes for piece in pieces) < LIMIT < table.nbytes / 10
    parts = list(read_blocks_of(pieces, ["text", "label"], Splits(("train",), ends=(ROWS, ROWS))))
    assert max(part.tables[0].nbytes for part in parts) < 1.5 * LIMIT
    assert sum(len(part.codes) for part in parts) == ROWS
    assert pa.concat_tables([part.tables[0] for part in parts]).to_pydict() == table.to_pydict()


N = 600
RNG = np.random.default_rng(0)
CLICK = RNG.integers(0, 2, N)
IDS = RNG.integers(0, 40, N)
TEXT = [f"i{i}" for i in IDS]


def write_items(file: Path, **columns: Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"click": CLICK, "item": TEXT, **columns}), file)
    return file


def test_empty_lists_hide_no_change(tmp_path: Path) -> None:
    """Lists that are all empty stand beside lists of any values; these are compared all the same."""
    for i, values in enumerate(([[]] * N, [[1]] * N, [["a"]] * N)):
        kind = pa.list_(pa.null()) if i == 0 else None
        write_items(tmp_path / "data" / f"{i}.parquet", user=pa.array(values, kind))
    with pytest.raises(
        DataError, match=r"2\.parquet, column 'user': got list<.*string>, expected .* list<.*int64>.* in .*1\.parquet"
    ):
        prepare(tmp_path / "data", tmp_path / "out")


def test_columns_that_are_left_out_are_reported_with_their_reasons(tmp_path: Path) -> None:
    columns = {
        "user id": IDS,
        "shape": pa.array([{"x": 1}] * N),
        "version": [7] * N,
        "when": np.arange(N).astype("datetime64[ms]"),
        "price": RNG.random(N),
    }
    write_items(tmp_path / "data" / "a.parquet", **columns)
    write_items(tmp_path / "data" / "b.parquet", **columns, later=IDS)
    report = prepare(tmp_path / "data", tmp_path / "out", threshold=1)
    assert report.left_out == {
        "shape": "struct<x: int64>; columns of type struct<x: int64> cannot be inputs yet. "
        "Write its fields x as separate columns",
        "version": "int64; all rows have the same value ('7')",
        "when": "timestamp[ms]; a time (timestamp[ms]): later rows have values that training has not seen",
        "later": "int64; a.parquet has no such column",
    }
    kept = {name for file in (tmp_path / "out" / "train").glob("*.parquet") for name in pq.read_schema(file).names}
    assert kept == {"click", "item", "user id", "price"}
    assert kept | {*report.left_out} == {"click", "item", "later", *columns}


def test_the_command_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = write_items(tmp_path / "a.parquet", shape=pa.array([{"[x]": 1}] * N))
    assert main(["prepare", str(raw), str(tmp_path / "out")]) == 0
    assert "- 'shape': struct<[x]: int64>; columns of type struct<[x]: int64> " in capsys.readouterr().out
