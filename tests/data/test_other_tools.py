"""Protects that Parquet files which other tools write are read as what those tools meant."""

import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_cases import read_whole
from derived_cases import row_of

from hotbed.data import ParquetSource, Schema
from hotbed.data.drafting.draft import draft
from hotbed.data.hashing import hash_integers, hashes_to_rows
from hotbed.data.preparation.prepare_dataset import prepare

FILES = Path(__file__).parent / "tables"
"""Files of 60 rows that other tools wrote, with columns of `rows`; tests/data/tables/write.py says how."""
N = 60
START = datetime.datetime(2024, 3, 1, tzinfo=datetime.UTC)


def rows(i: int) -> dict[str, Any]:
    """What row ``i`` has in all of these files."""
    return {
        "label": i % 2,
        "user": None if i == 3 else i % 7 + 1,
        "city": None if i == 4 else f"city {i % 5}",
        "price": None if i == 5 else i / 4,
        "member": i % 3 == 0,
        "when": START + datetime.timedelta(hours=i),
    }


def check(path: Path) -> None:
    """The draft has the columns by their roles, and the values are those of `rows`, at their rows of tables."""
    found = draft(path)
    left = {column.name for column in found.left_out}
    assert {"when"} <= left <= {"when", "__index_level_0__", "index", "discount"}
    assert {c.name for c in found.schema.sparse} == {"user", "city", "member"}
    assert found.schema.dense == ("price",)
    batch, given = read_whole(ParquetSource(path, found.schema)), [rows(i) for i in range(N)]
    size = found.schema.rows
    users = np.array([row["user"] or 0 for row in given])
    expected = np.where(users > 0, hashes_to_rows(hash_integers(users), size["user"]), 0)
    assert batch.sparse["user"].values.tolist() == expected.tolist()
    expected = [0 if row["city"] is None else row_of(row["city"], size["city"]) for row in given]
    assert batch.sparse["city"].values.tolist() == expected
    assert batch.dense is not None
    prices = torch.tensor([[float("nan") if row["price"] is None else row["price"]] for row in given])
    assert torch.equal(batch.dense.nan_to_num(-1), prices.double().nan_to_num(-1))


@pytest.mark.parametrize("file", sorted(path.name for path in FILES.glob("*.parquet")))
def test_files_that_tools_wrote(file: str, tmp_path: Path) -> None:
    check(FILES / file)
    report = prepare(FILES / file, tmp_path / "out", threshold=1, test_fraction=0)
    assert report.rows["city"] == 6 and report.rows["user"] == 8


def frame() -> pl.DataFrame:
    return pl.DataFrame([rows(i) for i in range(N)])


@pytest.mark.parametrize("city", [pl.String, pl.Categorical, pl.Enum([f"city {i}" for i in range(5)])])
def test_polars(tmp_path: Path, city: Any) -> None:
    frame().with_columns(pl.col("city").cast(city)).write_parquet(tmp_path / "p.parquet")
    check(tmp_path / "p.parquet")


def test_lists_of_polars(tmp_path: Path) -> None:
    lists = pl.Series("items", [None if i == 2 else [f"item {j}" for j in range(i % 3)] for i in range(N)])
    frame().with_columns(lists).write_parquet(tmp_path / "p.parquet")
    table = pq.read_table(tmp_path / "p.parquet")
    assert pa.types.is_large_list(table.schema.field("items").type)
    found = draft(tmp_path / "p.parquet")
    items = next(c for c in found.schema.sparse if c.name == "items")
    bags = read_whole(ParquetSource(tmp_path / "p.parquet", found.schema)).sparse["items"]
    assert bags.lengths().tolist() == [0 if i == 2 else i % 3 for i in range(N)]
    assert bags.values.tolist()[:1] == [row_of("item 0", items.rows)]


def test_a_folder_as_spark_writes_it(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    given = [rows(i) | {"discount": Decimal(i) / 100} for i in range(N)]
    fields = [("label", pa.int32()), ("user", pa.int64()), ("city", pa.string()), ("price", pa.float64())]
    fields += [("member", pa.bool_()), ("when", pa.timestamp("ns")), ("discount", pa.decimal128(10, 2))]
    for part in range(3):
        mine = given[20 * part : 20 * part + 20]
        columns = {name: [row[name] for row in mine] for name in given[0]}
        columns["when"] = [t.replace(tzinfo=None) for t in columns["when"]]
        file = folder / f"part-{part:05d}-7ab3e0c4-c000.snappy.parquet"
        pq.write_table(
            pa.table(columns, schema=pa.schema(fields)),
            file,
            flavor="spark",
            use_deprecated_int96_timestamps=True,
            compression="snappy",
            store_schema=False,
        )
        (folder / f".{file.name}.crc").write_bytes(b"crc\0")
    (folder / "_SUCCESS").touch()
    assert pq.read_metadata(next(folder.glob("part-00000*"))).schema.column(5).physical_type == "INT96"
    found = draft(folder)
    assert found.schema.dense == ("price", "discount")
    source = ParquetSource(folder, found.schema)
    batch = read_whole(source)
    assert batch.dense is not None and batch.dense[:, 1].tolist() == pytest.approx([i / 100 for i in range(N)])
    # the times of INT96 divide rows
    split = {"by": "time", "column": "when", "test_from": "2024-03-02"}
    assert ParquetSource(folder, found.schema, split=split).samples("test") == N - 24


def test_columns_by_role_are_said_as_a_schema(tmp_path: Path) -> None:
    frame().write_parquet(tmp_path / "p.parquet")
    schema = Schema.from_dict({"labels": ["label"], "sparse": [{"name": "user", "rows": 9}], "weight": "member"})
    weights = ParquetSource(tmp_path / "p.parquet", schema).read("train", 0).weights
    assert weights is not None and weights.tolist() == [float(i % 3 == 0) for i in range(N)]
