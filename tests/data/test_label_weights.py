"""Protects that labels may have sample weights of their own, in every place that reads or writes samples."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import hotbed as hb
from hotbed.data import SparseColumn
from hotbed.data.columns import Label, LabelWeight
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.data.preparation.stored_rows import columns_of
from hotbed.data.readers import merge_batches
from hotbed.errors import DataError, SpecError

N = 60
SCHEMA = {
    "labels": [
        "click",
        {"column": "buy", "weight": "click"},
        {"column": "stars", "positive": ">= 4", "weight": "seen"},
    ],
    "weight": "w",
    "sparse": [{"name": "user", "rows": 16}],
}


def log(path: Path, **changed: Any) -> Path:
    rng = np.random.default_rng(0)
    columns = {
        "click": rng.integers(0, 2, N),
        "buy": rng.integers(0, 2, N),
        "stars": rng.integers(1, 6, N),
        "w": rng.random(N).astype(np.float32),
        "seen": rng.random(N).astype(np.float32),
        "user": rng.integers(0, 9, N),
    }
    pq.write_table(pa.table({**columns, **changed}), path / "log.parquet", row_group_size=25)
    return path / "log.parquet"


def test_a_label_s_own_weights_take_the_place_of_those_of_all(tmp_path: Path) -> None:
    source = hb.ParquetSource(log(tmp_path), SCHEMA)
    table = pq.read_table(tmp_path / "log.parquet")
    batch = merge_batches([(source.read("train", i), 0, n) for i, n in enumerate(source.chunks("train"))])
    expected = np.stack([table[name].to_numpy().astype(np.float32) for name in ("w", "click", "seen")], axis=1)
    assert batch.weights is not None
    assert np.array_equal(batch.weights.numpy(), expected)
    shown = columns_of(batch, source.schema)
    assert shown.column_names == ["click", "buy", "stars", "user", "w", "seen"]
    assert shown["seen"].to_pylist() == table["seen"].to_pylist()
    unweighted = {**SCHEMA, "weight": None}
    found = hb.ParquetSource(tmp_path / "log.parquet", unweighted).read("train", 0).weights
    assert found is not None
    assert found[:, 0].tolist() == [1.0] * 25


def test_a_schema_says_them_beside_their_label() -> None:
    schema = hb.Schema.from_dict(SCHEMA)
    assert schema.positives == (Label("stars", ">= 4"),)
    assert schema.label_weights == (LabelWeight("buy", "click"), LabelWeight("stars", "seen"))
    assert (schema.weights, schema.weight_columns) == (("w", "click", "seen"), ("w", "click", "seen"))
    assert hb.Schema.from_dict(schema.to_dict()) == schema
    assert schema.inputs.weight_columns == ()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label_weights": (LabelWeight("bui", "w"),)}, "label_weights: got 'bui'"),
        ({"label_weights": (LabelWeight("buy", "w"),) * 2}, "label_weights: got 'buy' 2 times"),
        ({"label_weights": (LabelWeight("buy", "user"),)}, "columns of the schema: got 'user' 2 times"),
        ({"label_weights": (LabelWeight("buy", "v"), LabelWeight("click", "v")), "weight": "w"}, "weight: got 'w'"),
        ({"weight": "buy"}, "columns of the schema: got 'buy' 2 times"),
    ],
)
def test_weights_that_cannot_be(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        hb.Schema(sparse=(SparseColumn(name="user", rows=9),), labels=("click", "buy"), **changed)


def test_a_column_s_entry_is_checked() -> None:
    with pytest.raises(SpecError, match=r"labels\[0\]\.weight: got 10"):
        hb.Schema.from_dict({**SCHEMA, "labels": [{"column": "click", "weight": 10}]})
    with pytest.raises(SpecError, match=r"labels\[0\]: key: got 'weigth'"):
        hb.Schema.from_dict({**SCHEMA, "labels": [{"column": "click", "weigth": "w"}]})


def test_bad_weights_of_a_label_are_refused(tmp_path: Path) -> None:
    path = log(tmp_path, seen=np.where(np.arange(N) == 30, -1.0, 1.0))
    message = r"log\.parquet, row group 1, column 'seen': weight -1\.0 at row 5 \(row 30 of the file\)"
    with pytest.raises(DataError, match=message):
        hb.ParquetSource(path, SCHEMA).read("train", 1)
    with pytest.raises(SpecError, match=r"log\.parquet: column 'seen': got string"):
        hb.ParquetSource(log(tmp_path, seen=["a"] * N), SCHEMA)


def test_prepared_data_keep_them(tmp_path: Path) -> None:
    given = hb.ParquetSource(log(tmp_path), {**SCHEMA, "labels": SCHEMA["labels"][:2]})
    for raw, out in ((tmp_path / "log.parquet", "of_file"), (given, "of_source")):
        options = {"schema": given.schema} if isinstance(raw, Path) else {}
        prepare(raw, tmp_path / out, threshold=1, **options)
        whole = pa.concat_tables(pq.read_table(file) for file in sorted((tmp_path / out).glob("*/part-*.parquet")))
        weights = sorted(zip(*(whole[name].to_pylist() for name in ("w", "click")), strict=True))
        table = pq.read_table(tmp_path / "log.parquet")
        assert weights == sorted(zip(*(table[name].to_pylist() for name in ("w", "click")), strict=True))
