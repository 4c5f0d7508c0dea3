"""Protects that integers which were written as floats or decimals are drafted and encoded as the same ids."""

import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from test_draft import N, drafted, role, write

from hotbed.data import ParquetSource, Schema, SparseColumn
from hotbed.data.drafting.draft import draft
from hotbed.data.encoding.encoder import Encoder
from hotbed.errors import DataError, SpecError

RNG = np.random.default_rng(0)
BELOW_2_53 = RNG.integers(2**40, 2**53, 500)[RNG.integers(0, 500, N)]
BEYOND_2_53 = RNG.integers(2**60, 2**62, 500)[RNG.integers(0, 500, N)]


def with_one_missing(ids: Any, kind: Any = np.float64) -> Any:
    """Write integers as pandas does where one is missing."""
    floats = ids.astype(kind)
    floats[3] = np.nan
    return floats


def encoded(path: Path, schema: Schema) -> list[int]:
    source = ParquetSource(path, schema)
    rows = [source.read("train", i).sparse["x"].values.tolist() for i in range(len(source.chunks("train")))]
    return [row for of_chunk in rows for row in of_chunk]


@pytest.mark.parametrize("name", ["x", "user_id"])
def test_large_whole_doubles_are_the_ids_that_they_were_as_integers(tmp_path: Path, name: str) -> None:
    assert role(drafted(tmp_path, with_one_missing(BELOW_2_53), name), name) == "ids"
    schema = Schema(sparse=(SparseColumn(name="x", rows=1 << 20),), labels=())
    as_floats = encoded(write(tmp_path / "floats.parquet", x=with_one_missing(BELOW_2_53)), schema)
    as_integers = encoded(write(tmp_path / "integers.parquet", x=BELOW_2_53), schema)
    assert as_floats.pop(3) == 0  # null
    as_integers.pop(3)
    assert as_floats == as_integers
    # What a server gets as JSON.
    encoder = Encoder(schema, id_kinds={"x": "integers"})
    plain = [float(i) for i in BELOW_2_53[4:9]]
    assert encoder.batch(encoder.table({"x": plain})).sparse.values.tolist() == as_integers[3:8]


def test_a_few_large_values_among_small_ids_make_no_count(tmp_path: Path) -> None:
    ids = RNG.integers(1, 2000, N)
    ids[::2000] = 10**12
    assert role(drafted(tmp_path, ids)) == "ids"
    assert role(drafted(tmp_path, ids.astype(np.float64))) == "ids"


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        (with_one_missing(BEYOND_2_53), str(int(float(BEYOND_2_53.max())))),
        (np.where(np.arange(N) % 2000 == 7, 2.0**60, RNG.integers(1, 2000, N)), str(2**60)),
        (np.where(np.arange(N) % 2 == 1, 2.0**60, RNG.integers(1, 2000, N)), str(2**60)),
        (np.where(np.arange(N) % 9 == 7, -(2.0**60), RNG.integers(1, 20, N)), str(-(2**60))),
        (with_one_missing(RNG.integers(1 << 25, 1 << 26, N), np.float32), r"6\d{7} .* expected at most 16,777,216"),
    ],
)
def test_ids_that_lost_digits_as_floats_are_refused(tmp_path: Path, ids: Any, named: str) -> None:
    ids = np.where(np.arange(N) % 4 == 0, ids[1::4].repeat(4), ids)  # some are met several times
    with pytest.raises(DataError, match=rf"column 'x': got the id {named}.*--drop 'x'"):
        drafted(tmp_path, ids)
    assert role(drafted(tmp_path, ids, drop=["x"])) == "--drop"


def test_large_measures_are_still_numbers(tmp_path: Path) -> None:
    total = np.floor(RNG.random(N) * 1e14) * 2**10
    assert role(drafted(tmp_path, total, "total_bytes"), "total_bytes") == "standard"
    assert role(drafted(tmp_path, np.exp(RNG.normal(60, 1, N)))) in ("log", "asinh")  # beyond 64 bits
    assert role(drafted(tmp_path, np.floor(np.exp(RNG.normal(12, 3, N))))) == "log"


@pytest.mark.parametrize(("kind", "limit"), [(np.float32, 2**24), (np.float64, 2**53)])
def test_readers_name_the_id_that_lost_digits(tmp_path: Path, kind: Any, limit: int) -> None:
    schema = Schema(sparse=(SparseColumn(name="x", rows=1 << 20),), labels=())
    path = write(tmp_path / "log.parquet", x=np.array([1, limit], kind))
    assert len(encoded(path, schema)) == 2
    path = write(tmp_path / "log.parquet", x=np.array([1, 2 * limit], kind))
    with pytest.raises(DataError, match=rf"column 'x': id {re.escape(str(2.0 * limit))} at row .* up to {limit:,}"):
        encoded(path, schema)


# -- decimals --------------------------------------------------------------------------------------------------------


def decimals(values: Any, precision: int = 20, scale: int = 0) -> Any:
    array = pa.array([None if v is None else Decimal(int(v)) for v in values], pa.decimal256(76, 0))
    return array.cast(pa.decimal128(precision, scale))


@pytest.mark.parametrize(
    "values",
    [[1, 2, None, 2**53 + 1], [5, 2**63, 2**64 - 1], [-1, None, 2**62], [-5, -(2**63)]],
)
def test_whole_decimals_are_the_integers_that_they_hold(tmp_path: Path, values: list[Any]) -> None:
    schema = Schema(sparse=(SparseColumn(name="x", rows=1 << 20),), labels=())
    kind = pa.uint64() if max(v or 0 for v in values) >= 2**63 else pa.int64()
    expected = encoded(write(tmp_path / "integers.parquet", x=pa.array(values, kind)), schema)
    assert encoded(write(tmp_path / "decimals.parquet", x=decimals(values)), schema) == expected
    ragged = Schema(sparse=(SparseColumn(name="x", rows=1 << 20, ids=None),), labels=())
    lists = pa.ListArray.from_arrays([0, len(values)], decimals(values))
    assert encoded(write(tmp_path / "lists.parquet", x=lists), ragged) == expected
    encoder = Encoder(schema, id_kinds={"x": "integers"})
    assert encoder.batch(pa.table({"x": decimals(values)})).sparse.values.tolist() == expected


def test_decimals_are_ids_or_numbers_by_their_scale(tmp_path: Path) -> None:
    keys = RNG.integers(2**40, 2**60, 500)[RNG.integers(0, 500, N)]
    assert role(drafted(tmp_path, decimals(keys))) == "ids"
    assert role(drafted(tmp_path, pa.array([[Decimal(int(k))] for k in keys], pa.list_(pa.decimal128(38, 0))))) == "ids"
    assert role(drafted(tmp_path, decimals(RNG.integers(18, 90, N), 3), "age"), "age") == "standard"
    assert role(drafted(tmp_path, decimals(RNG.integers(18, 90, N), 10, 2))) == "standard"
    found = draft(write(tmp_path / "log.parquet", label=decimals(RNG.integers(0, 2, N), 1), user=decimals(keys)))
    assert (found.schema.labels, found.schema.positives, found.schema.dense) == (("label",), (), ())


def test_decimals_of_more_than_64_bits_are_refused(tmp_path: Path) -> None:
    values = pa.array([Decimal(1), Decimal(10**30)], pa.decimal128(38, 0))
    schema = Schema(sparse=(SparseColumn(name="x", rows=1 << 20),), labels=())
    message = rf"log.parquet, column 'x' is decimal128.*: got values from 1 to {10**30}, expected at most 64 bits"
    with pytest.raises(DataError, match=message):
        encoded(write(tmp_path / "log.parquet", x=values), schema)


def test_columns_of_decimals_beyond_64_bits_are_left_out(tmp_path: Path) -> None:
    wide = pa.array([Decimal(10**25 + i % 50) for i in range(N)], pa.decimal128(38, 0))
    rng = np.random.default_rng(0)
    columns = {"click": rng.integers(0, 2, N), "user": rng.integers(0, 300, N), "x": wide, "more": wide}
    found = draft(write(tmp_path / "log.parquet", **columns))
    for name in ("x", "more"):
        assert re.search(rf"decimal128.*got values from {10**25} to .*expected at most 64 bits", role(found, name))
    assert ParquetSource(tmp_path / "log.parquet", found.schema).samples("train") == N
    assert role(draft(tmp_path / "log.parquet", drop=["x", "more"])) == "--drop"
    with pytest.raises(DataError, match=r"label column 'x': it is decimal128"):
        draft(tmp_path / "log.parquet", label="x")


def test_decimals_with_a_fraction_are_no_ids(tmp_path: Path) -> None:
    schema = Schema(sparse=(SparseColumn(name="x", rows=1 << 20),), labels=())
    with pytest.raises(SpecError, match=r"log\.parquet: sparse column 'x': got decimal128\(10, 2\)"):
        encoded(write(tmp_path / "log.parquet", x=decimals([1, 2], 10, 2)), schema)


@pytest.mark.parametrize("name", ["uid", "product_id"])
def test_decimals_with_a_scale_that_are_named_like_ids_are_left_out(tmp_path: Path, name: str) -> None:
    found = drafted(tmp_path, decimals(RNG.integers(0, 500, N), 20, 2), name)
    assert re.search(r"decimal128\(20, 2\)\. Write it as integers", role(found, name))
    source = ParquetSource(tmp_path / "log.parquet", found.schema)  # raises if the draft cannot be read
    assert len(source.read("train", 0)) > 0


SIGNED_32 = RNG.integers(-(2**31), 2**31, 500)[RNG.integers(0, 500, N)]
SIGNED_64 = RNG.integers(-(2**62), 2**62, 500)[RNG.integers(0, 500, N)]


def test_signed_hashes_are_ids(tmp_path: Path) -> None:
    for hashes in (SIGNED_32, with_one_missing(SIGNED_32), SIGNED_64, -np.abs(SIGNED_64), decimals(SIGNED_64)):
        assert role(drafted(tmp_path, hashes)) == "ids"
    for floats in (with_one_missing(SIGNED_64), with_one_missing(-np.abs(SIGNED_64))):
        with pytest.raises(DataError, match=r"column 'x': .*double.*expected at most 9,007,199,254,740,992"):
            drafted(tmp_path, floats)
    profits = np.floor(RNG.standard_t(1.5, 500) * 1e6)[RNG.integers(0, 500, N)].astype(int)
    assert abs(profits).max() > 2**24
    assert role(drafted(tmp_path, profits)) == "asinh"
