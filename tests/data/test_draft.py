from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hotbed.data import Loader, ParquetSource, Schema, SparseColumn, draft_schema
from hotbed.errors import DataError


def write(path: Path, **columns: object) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=500)
    return path


def test_proposes_roles_by_name_and_type(tmp_path: Path) -> None:
    n = 1000
    rng = np.random.default_rng(0)
    path = write(
        tmp_path / "log.parquet",
        Click=rng.integers(0, 2, n).astype(np.int8),
        time=pa.array(np.arange(n), pa.timestamp("s")),
        sample_weight=rng.random(n),
        price=rng.random(n).astype(np.float32),
        user=np.arange(n),
        country=pa.array(rng.choice(["de", "fr", "it"], n)).dictionary_encode(),
        tags=pa.array([["a", "b"], []] * (n // 2)),
        pair=pa.array([[1, 2]] * n, pa.list_(pa.int32(), 2)),
        mobile=rng.random(n) < 0.5,
        nested=pa.array([{"x": 1}] * n),
    )
    schema = draft_schema(path)
    assert schema == Schema(
        labels=("Click",),
        weight="sample_weight",
        dense=("price",),
        sparse=(
            SparseColumn(name="user", rows=4096),  # 4 × 1,000, up to a power of 2
            SparseColumn(name="country", rows=64),
            SparseColumn(name="tags", rows=64, ids=None),
            SparseColumn(name="pair", rows=64, ids=2),
            SparseColumn(name="mobile", rows=64),
        ),
    )
    assert sum(len(b) for b in Loader(ParquetSource(path, schema), "train", 100)) == n


def test_rows_grow_with_the_data_where_values_do_not_repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.draft._SAMPLE_ROWS", 1000)
    n = 10_000
    path = write(tmp_path / "log.parquet", label=np.zeros(n, bool), new=np.arange(n), old=np.arange(n) % 100)
    rows = draft_schema(path).rows
    assert rows == {"new": 65_536, "old": 512}


def test_label_by_argument(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", bought=[0, 1], c=[1, 2])
    assert draft_schema(path, label="bought").labels == ("bought",)
    with pytest.raises(DataError, match="has no column 'bougt'; it has bought, c; did you mean 'bought'"):
        draft_schema(path, label="bougt")
    with pytest.raises(DataError, match=r"no column of 0 and 1 named like a label .* it has bought, c. Name one"):
        draft_schema(path)


def test_a_column_called_label_that_is_not_0_or_1_is_no_label(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", label=[0, 5], click=[True, False], c=[1, 2])
    schema = draft_schema(path)
    assert schema.labels == ("click",)
    assert [c.name for c in schema.sparse] == ["label", "c"]


def test_nothing_to_embed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no column of integers, strings or lists of them"):
        draft_schema(write(tmp_path / "log.parquet", label=[0, 1], x=[0.5, 0.6]))
    pq.write_table(pa.table({"label": pa.array([], pa.bool_())}), tmp_path / "empty.parquet")
    with pytest.raises(DataError, match=r"empty.parquet has no rows"):
        draft_schema(tmp_path / "empty.parquet")


def test_large_integers_in_a_column_named_like_a_label_are_no_labels(tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", click=np.arange(100) % 2, target=np.arange(100) + 2**24 + 1)
    assert draft_schema(path).labels == ("click",)
