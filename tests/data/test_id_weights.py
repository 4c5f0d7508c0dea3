"""Protects that ids may have weights, a column beside theirs, in every place that reads or writes samples."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
import torch
from data_cases import MIXED_SCHEMA, mixed_batch

import hotbed as hb
from hotbed.data import NpySource, SparseColumn
from hotbed.data.columns import SparseColumn as Column
from hotbed.data.derived_features import Cross
from hotbed.data.formats.split_binary import check_split_binary
from hotbed.data.inspection import SchemaChecks
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.data.preparation.stored_rows import columns_of, open_described, open_rows
from hotbed.data.readers import merge_batches
from hotbed.errors import DataError, SpecError
from hotbed.serve.requests import record_batch
from hotbed.testing.source_contract import SourceContract, assert_same

SCHEMA: dict[str, Any] = {
    "labels": ["click"],
    "sparse": [
        {"name": "Tag's IDs %", "rows": 64, "ids": None, "weights": "wie oft (β)"},
        {"name": "user", "rows": 64},
        {"name": "item", "rows": 64, "weights": "share"},
        {"name": "pair", "rows": 64, "table": "item", "ids": 2, "weights": "of pair"},
    ],
}
TAGS, TIMES = [["a", "b"], [], ["c"], None, ["a", "a", "d"]], [[1.5, -2], [], [0.0], None, [1e-3, 7, 3]]
SHARES, PAIRS = [0.5, 1.0, 2.0, -1.0, 0.0], [[1.0, 2.0], [3.0, 4.0], [0.5, 0.25], [-1.0, 1.0], [9.0, 8.0]]


def log(folder: Path, **changed: Any) -> Path:
    """Five rows as polars writes them; names are any text, and numbers of any type."""
    columns: dict[str, Any] = {
        "Tag's IDs %": TAGS,
        "wie oft (β)": pl.Series(TIMES, dtype=pl.List(pl.Float64)),
        "user": [4, 5, 6, 7, 8],
        "item": ["x", "y", "x", "z", None],
        "share": pl.Series(SHARES, dtype=pl.Decimal(10, 2)),
        "pair": [["x", "z"]] * 5,
        "of pair": pl.Series(PAIRS, dtype=pl.Array(pl.Float32, 2)),
        "click": [True, False, True, False, True],
    }
    pl.DataFrame({**columns, **changed}, strict=False).write_parquet(folder / "log.parquet")
    return folder / "log.parquet"


def weights(batch: hb.Batch, name: str) -> list[float]:
    found = batch.sparse[name].weights
    assert found is not None
    return found.tolist()


def check(batch: hb.Batch) -> None:
    """Weights of all columns are those of `log`."""
    assert weights(batch, "Tag's IDs %") == np.float32([w for row in TIMES for w in row or ()]).tolist()
    assert weights(batch, "user") == [1.0] * 5
    assert weights(batch, "item") == SHARES
    assert weights(batch, "pair") == [w for row in PAIRS for w in row]


def test_they_are_read_beside_their_ids_and_travel_with_them(tmp_path: Path) -> None:
    source = hb.ParquetSource(log(tmp_path), SCHEMA)
    batch = source.read("train", 0)
    check(batch)
    check(merge_batches([(batch.take(torch.arange(2)), 0, 2), (batch.take(torch.arange(2, 5)), 0, 3)]))
    assert weights(batch.take(torch.tensor([4, 0])), "Tag's IDs %") == np.float32([1e-3, 7, 3, 1.5, -2]).tolist()
    shown = columns_of(batch, source.schema)
    assert shown["wie oft (β)"].to_pylist()[4] == np.float32(TIMES[4]).tolist()
    assert (shown["share"].to_pylist(), shown["of pair"].to_pylist()) == (SHARES, PAIRS)
    assert source.only(["user"]).read("train", 0).sparse.weights is None
    assert hb.Schema.from_dict(source.schema.to_dict()) == source.schema
    assert "weights" not in str(hb.Schema(sparse=(SparseColumn(name="user", rows=9),)).to_dict())


def test_plain_values_have_the_bits_of_stored_ones(tmp_path: Path) -> None:
    """As a server gets them in JSON, where numbers may be written as integers."""
    source = hb.ParquetSource(log(tmp_path), SCHEMA)
    encoder = source.encoder.inputs
    rows: dict[str, Any] = {c: pq.read_table(tmp_path / "log.parquet")[c].to_pylist() for c in encoder.names}
    rows["share"] = [float(value) for value in rows["share"]]
    table = encoder.table(rows)
    check(encoder.batch(table))
    rows["wie oft (β)"] = [[1, -2], [], [0], None, [1, 7, 3]]
    whole = record_batch(encoder.table(rows))
    assert whole.schema == record_batch(table).schema
    assert weights(encoder.batch(whole), "Tag's IDs %") == [1, -2, 0, 1, 7, 3]


def test_prepared_data_keep_them(tmp_path: Path) -> None:
    given = hb.ParquetSource(log(tmp_path), SCHEMA)
    for raw, out in ((tmp_path / "log.parquet", "of_file"), (given, "of_source")):
        options = {"schema": given.schema} if isinstance(raw, Path) else {}
        prepare(raw, tmp_path / out, threshold=1, test_fraction=0, **options)
        described = open_described(tmp_path / out)
        assert described is not None
        batch = described.source.read("train", 0)
        check(batch)
        if isinstance(raw, Path):  # raw rows become what was prepared
            encoder = described.source.encoder
            assert encoder is not None
            assert_same(encoder.batch(pq.read_table(raw)), batch)


class TestSource(SourceContract):
    def make(self, path: Path) -> tuple[hb.Source, dict[str, hb.Batch]]:
        batch = mixed_batch(60)
        schema = hb.Schema(
            sparse=(*MIXED_SCHEMA.sparse[:2], Column(**{**vars(MIXED_SCHEMA.sparse[2]), "weights": "times"})),
            dense=MIXED_SCHEMA.dense,
            labels=MIXED_SCHEMA.labels,
            weight="weight",
            group="session",
        )
        pq.write_table(columns_of(batch, schema), path / "all.parquet", row_group_size=13)
        return hb.ParquetSource(path / "all.parquet", schema, ids="raw"), {"train": batch}


NAN, HIGH = float("nan"), 1e300
BAD_VALUES: dict[str, tuple[str, Any, str]] = {
    "too few": ("wie oft (β)", [[1.5], [], [0.0], None, [1.0, 7, 3]], "1 weights at row 0.*; .* the 2 ids of column"),
    "none at all": ("wie oft (β)", [None] * 5, "0 weights at row 0"),
    "null": ("wie oft (β)", [[1.5, 2], [], [0.0], None, [1, None, 3]], "weight null at row 4.*; expected a finite"),
    "NaN": ("share", [1, 2, NAN, 3, 4], "weight nan at row 2"),
    "too large": ("share", [1, 2, 3, HIGH, 4], r"weight 1e\+300 at row 3"),
    "a null alone": ("share", [None, 2, 3, 1, 4], "weight null at row 0"),
    "of two": ("of pair", [[1.0, 2], [3.0], [1.0, 2], [1.0, 2], [1.0, 2]], "1 weights at row 1"),
}


@pytest.mark.parametrize("case", BAD_VALUES)
def test_weights_that_cannot_be_are_refused_by_all_who_read(case: str, tmp_path: Path) -> None:
    column, values, message = BAD_VALUES[case]
    message = rf"log\.parquet, row group 0, column '{re.escape(column)}': {message}"
    path = log(tmp_path, **{column: values})
    source = hb.ParquetSource(path, SCHEMA)
    with pytest.raises(DataError, match=message):
        source.read("train", 0)
    with pytest.raises(DataError, match=message):
        prepare(path, tmp_path / "out", schema=SCHEMA, threshold=1, test_fraction=0)
    rows = open_rows(path)
    checks = SchemaChecks(rows, source.schema, "hash")
    for found in rows.read():
        checks.check(found)
    assert {fault.column for fault in checks.faults} == {column}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"share": ["a", "b", "c", "d", "e"]}, r"log\.parquet: column 'share': got large_string"),
        ({"share": [[1.0]] * 5}, r"log\.parquet: column 'share': got large_list<element: double>"),
        ({"of pair": [1.0] * 5}, r"log\.parquet: column 'of pair': got double"),
        ({"share": [{"of": 1.0}] * 5}, r"log\.parquet: column 'share': got struct<of: double>"),
    ],
)
def test_types_that_cannot_be(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = log(tmp_path, **changed)
    with pytest.raises(SpecError, match=message):
        hb.ParquetSource(path, SCHEMA)
    (fault,) = SchemaChecks(open_rows(path), hb.Schema.from_dict(SCHEMA), "hash").faults
    assert (fault.column, fault.problem) == (next(iter(changed)), "wrong type")


def test_schemas_that_cannot_be(tmp_path: Path) -> None:
    for given in ("", "user"):
        with pytest.raises(SpecError, match=f"'user': weights: got '{given}'"):
            SparseColumn(name="user", rows=9, weights=given)
    with pytest.raises(SpecError, match=r"sparse\[0\]: sparse column 'user': weights: got 10"):
        hb.Schema.from_dict({"sparse": [{"name": "user", "rows": 9, "weights": 10}]})
    user = SparseColumn(name="user", rows=9, weights="w")
    with pytest.raises(SpecError, match="columns of the schema: got 'w' 2 times"):
        hb.Schema(sparse=(user,), dense=("w",))
    cross = Cross(name="both", columns=("user", "item"))
    with pytest.raises(SpecError, match="feature 'both': weights: got 'w'"):
        hb.Schema(sparse=(SparseColumn(name="both", rows=9, weights="w"),), derived=(cross,))
    shared = hb.Schema(sparse=(user, SparseColumn(name="shop", rows=9, weights="w")))
    assert shared.id_weights == ("w",)
    with pytest.raises(SpecError, match="split-binary format: got weights of ids 'w'"):
        check_split_binary(shared)
    day = {"labels": (4, 1), "dense": (4, 1), "sparse": (4, 2)}
    for what, shape in day.items():
        np.save(tmp_path / f"day_0_{what}.npy", np.zeros(shape, np.float32 if what != "sparse" else np.int32))
    with pytest.raises(SpecError, match=r"NumPy arrays do not support weights of ids \('w'\)"):
        NpySource(tmp_path, hb.Schema(sparse=shared.sparse, dense=("x",), labels=("y",)))
