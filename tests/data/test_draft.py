from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from hotbed.data import Loader, ParquetSource, Scaling, Schema, SparseColumn, draft_schema
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
        price=(np.arange(n) / n).astype(np.float32),
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
        scaling=(Scaling(name="price", center=0.5, scale=0.37),),
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
    with pytest.raises(
        DataError, match=r"no column of numbers named like a label .* it has bought, c. Name one with --label"
    ):
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


def test_two_columns_of_one_name_are_refused_and_one_without_is_left_out(tmp_path: Path) -> None:
    columns = [pa.array([0, 1]), pa.array([1, 2]), pa.array([3, 4])]
    pq.write_table(pa.Table.from_arrays(columns, ["click", "a", "a"]), tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice.parquet has several columns named 'a'; rename all but one"):
        draft_schema(tmp_path / "twice.parquet")
    pq.write_table(pa.Table.from_arrays(columns, ["click", "a", ""]), tmp_path / "nameless.parquet")
    assert [c.name for c in draft_schema(tmp_path / "nameless.parquet").sparse] == ["a"]


# -- scaling of numericals -----------------------------------------------------------------------------------------


NORMAL = np.random.default_rng(0).normal(0, 1, 4000)
KINDS = {
    "normal": NORMAL,
    "price": np.exp(3 + NORMAL),
    "heavy tail": np.exp(3 * NORMAL),
    "tiny": 1e-300 * NORMAL,
    "huge": 1e307 * NORMAL,
    "negative and skewed": -np.exp(3 + 2 * NORMAL),
    "epoch seconds": 1.7e9 + 1e6 * NORMAL,
    "far from 0": 1e12 + NORMAL,
    "counts": np.floor(np.exp(1 + NORMAL)),
    "seldom 1": (NORMAL > 3).astype(float),
    "mostly missing": np.where(np.arange(4000) % 50, np.nan, 5 + NORMAL),
    "infinite": np.where(np.arange(4000) % 50, NORMAL, np.inf),
    "an outlier": np.where(np.arange(4000) == 7, 1e9, NORMAL),
    "a constant": np.full(4000, 7.5),
    "nothing": np.full(4000, np.nan),
}


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_numericals_are_of_about_the_size_of_1(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / "log.parquet", label=np.arange(4000) % 2, c=np.arange(4000) % 5, x=KINDS[kind])
    schema = draft_schema(path)
    assert schema.scaling[0].name == "x"
    dense = torch.cat([ParquetSource(path, schema).read("train", i).dense for i in range(8)])[:, 0].numpy()
    given = KINDS[kind]
    assert np.isfinite(dense).all()
    assert (dense[~np.isfinite(given)] == 0).all()
    kept = np.isfinite(given)
    assert np.quantile(np.abs(dense), 0.99) < 6
    assert np.abs(dense).max() < 25
    if kind not in ("a constant", "nothing"):
        assert dense[kept].std() > 0.05
        low = given[kept].argmin(), dense[kept].argmin()
        assert given[kept][low[0]] == given[kept][low[1]]  # the order is kept
    else:
        assert (dense == 0).all()


def test_the_sample_is_spread_over_large_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.draft._SAMPLE_ROWS", 100)
    n = 10_000
    table = pa.table({"label": np.arange(n) % 2, "c": np.arange(n) % 5, "time": np.arange(n, dtype=float)})
    pq.write_table(table, tmp_path / "log.parquet")
    (scaling,) = draft_schema(tmp_path / "log.parquet").scaling
    assert scaling.center == pytest.approx(n / 2, rel=0.02)


def test_the_train_split_alone_is_sampled(tmp_path: Path) -> None:
    for split, x in (("train", 1.0), ("test", 100.0)):
        write(tmp_path / f"{split}.parquet", label=[0, 1], c=[1, 2], x=[x, x])
    assert draft_schema(tmp_path).scaling == (Scaling(name="x", center=1.0),)
    (tmp_path / "train.parquet").rename(tmp_path / "valid.parquet")
    with pytest.raises(DataError, match="has no train split, only valid, test; add one, or give one of these"):
        draft_schema(tmp_path)
