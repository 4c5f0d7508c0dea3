from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from data_cases import MIXED_SCHEMA, mixed_batch, unweighted
from derived_cases import row_of
from pyarrow import fs

from hotbed.batch import Batch
from hotbed.data import Label, Numerical, ParquetSource, Schema, Source, SparseColumn
from hotbed.data.files.parquet_files import RowGroup, RowSlice, divide_into_slices, find_parquet
from hotbed.data.formats import parquet as parquet_source
from hotbed.data.hashing import hash_integers, hashes_to_rows
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged
from hotbed.testing.source_contract import SourceContract


def table_of(batch: Batch) -> pa.Table:
    """The columns of `MIXED_SCHEMA`, with lists for the two-hot and the ragged column."""
    features = {name: batch.sparse[name] for name in batch.sparse.names}
    history = features["history"]
    assert history.offsets is not None and batch.dense is not None and batch.labels is not None
    pairs = features["pair"].values.reshape(-1, 2).tolist()
    offsets, values = history.offsets.tolist(), history.values.tolist()
    return pa.table(
        {
            "session": batch.extra["session"].numpy(),
            "click": batch.labels[:, 0].bool().numpy(),
            "buy": batch.labels[:, 1].to(torch.int64).numpy(),
            "age": batch.dense[:, 0].numpy(),
            "price": pa.array(batch.dense[:, 1].numpy()).cast(pa.float64()),
            "user": features["user"].values.numpy().astype(np.int32),
            "pair": pa.array(pairs, pa.list_(pa.int64(), 2)),
            "history": pa.array([values[a:b] for a, b in pairwise(offsets)], pa.list_(pa.int16())),
            "weight": None if batch.weights is None else batch.weights.numpy(),
            "unused": pa.array([{"x": 1}] * len(batch)),
        }
    )


class TestRawIds(SourceContract):
    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        batch = unweighted(mixed_batch(60))
        pq.write_table(table_of(batch), path / "all.parquet", row_group_size=10)
        source = ParquetSource(path / "all.parquet", MIXED_SCHEMA, ids="raw", valid_fraction=0.17, test_fraction=0.33)
        cuts = {"train": (0, 30), "valid": (30, 40), "test": (40, 60)}
        return source, {split: batch.take(torch.arange(*cut)) for split, cut in cuts.items()}


class TestRawNumbersAndMappedLabels(SourceContract):
    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        batch = unweighted(mixed_batch(40))
        assert batch.labels is not None and batch.dense is not None
        table = table_of(batch)
        signs = pa.array((batch.labels[:, 0] * 2 - 1).numpy().astype(np.int8))
        table = table.set_column(table.column_names.index("click"), "click", signs)
        pq.write_table(table, path / "all.parquet", row_group_size=10)
        numericals = (Numerical(name="price", rule="log", missing="indicator"),)
        positives = (Label("click", "> 0"), Label("buy", "== 1"))
        schema = replace(MIXED_SCHEMA, numericals=numericals, positives=positives)
        source = ParquetSource(path / "all.parquet", schema, ids="raw")
        return source, {"train": replace(batch, dense=batch.dense.double())}


class TestHashedIdsInSplitFolders(SourceContract):
    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        batch = unweighted(mixed_batch(40))
        cuts = {"train/part-2": (0, 15), "train/part-10": (15, 25), "validation/x": (25, 30), "test/x": (30, 40)}
        for name, (start, stop) in cuts.items():
            (path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
            part = table_of(batch).slice(start, stop - start)
            pq.write_table(part, path / "set" / f"{name}.parquet", row_group_size=6)
        (path / "set/_SUCCESS").touch()
        hashed: dict[str, Any] = {}
        for column in MIXED_SCHEMA.sparse:
            bags = batch.sparse[column.name]
            ids = torch.from_numpy(hashes_to_rows(hash_integers(bags.values.numpy()), column.rows))
            hashed[column.name] = (ids, bags.offsets) if bags.offsets is not None else ids.reshape(-1, bags.fixed or 1)
        batch = Batch(
            sparse=Jagged.from_dict(hashed),
            dense=batch.dense,
            labels=batch.labels,
            weights=batch.weights,
            extra=batch.extra,
        )
        cuts = {"train": (0, 25), "valid": (25, 30), "test": (30, 40)}
        source = ParquetSource(path / "set", MIXED_SCHEMA.to_dict())
        return source, {split: batch.take(torch.arange(*cut)) for split, cut in cuts.items()}


IDS = Schema(sparse=(SparseColumn(name="c", rows=9),), labels=())


def opened(path: Path, columns: dict[str, Any], schema: dict[str, Any] | None = None, **options: Any) -> ParquetSource:
    """Write a file, and open it with a schema, which has ids `c` and no labels unless it says otherwise."""
    pq.write_table(pa.table(columns), path / "t.parquet")
    plain = {"sparse": [{"name": "c", "rows": 9}], "labels": []}
    return ParquetSource(path / "t.parquet", plain | (schema or {}), **options)


def numbers(source: ParquetSource) -> torch.Tensor:
    dense = source.read("train", 0).dense
    assert dense is not None
    return dense


def one_column(path: Path, values: Any, ids: int | None = 1) -> Batch:
    """The only chunk of a dataset with one sparse column."""
    return opened(path, {"c": values}, {"sparse": [{"name": "c", "rows": 1000, "ids": ids}]}).read("train", 0)


def string_rows(*texts: str) -> list[int]:
    return [row_of(text, 1000) for text in texts]


OLDEST_WITH_VIEWS = 21
"""Version of pyarrow that writes columns of type string_view."""


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())]
)
def test_strings_of_every_type_hash_alike(tmp_path: Path, kind: pa.DataType) -> None:
    texts = ["user-1", "", None, "a longer text than eight bytes", "user-1"]
    array = pa.array(texts)
    if kind == pa.string_view() and int(pa.__version__.split(".")[0]) < OLDEST_WITH_VIEWS:
        pytest.skip("this pyarrow writes no such column")
    if kind != array.type:
        array = array.dictionary_encode() if pa.types.is_dictionary(kind) else array.cast(kind)
    user, empty, long = string_rows("user-1", "", "a longer text than eight bytes")
    assert one_column(tmp_path, array).sparse.values.tolist() == [user, empty, 0, long, user]


def test_lists_of_strings_with_nulls_at_every_level(tmp_path: Path) -> None:
    array = pa.array([["a", None], None, [], ["b"]])
    bags = one_column(tmp_path, array, ids=None).sparse["c"]
    a, b = string_rows("a", "b")
    assert bags.values.tolist() == [a, 0, b]
    assert bags.lengths().tolist() == [2, 0, 0, 1]


def test_integers_booleans_and_nulls(tmp_path: Path) -> None:
    expected = hashes_to_rows(hash_integers(np.array([5, -5, 2**62])), 1000).tolist()
    array = pa.array([5, None, -5, 2**62])
    assert one_column(tmp_path, array).sparse.values.tolist() == [expected[0], 0, *expected[1:]]
    yes, no = hashes_to_rows(hash_integers(np.array([1, 0])), 1000).tolist()
    assert one_column(tmp_path, pa.array([True, False, None])).sparse.values.tolist() == [yes, no, 0]
    unsigned = one_column(tmp_path, pa.array([2**64 - 1], pa.uint64())).sparse.values
    assert unsigned.tolist() == hashes_to_rows(hash_integers(np.array([-1])), 1000).tolist()


def test_null_numericals_are_0_and_nan_stays(tmp_path: Path) -> None:
    columns = {"c": [1, 2, 3], "x": pa.array([1.5, None, float("nan")]), "n": pa.array([1, None, 3], pa.int8())}
    found = numbers(opened(tmp_path, columns, {"dense": ["x", "n"]}))
    assert torch.equal(found.nan_to_num(7.0), torch.tensor([[1.5, 1.0], [0.0, 0.0], [7.0, 3.0]]))


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.int64(), pa.decimal128(20, 2)])
def test_scaled_numericals(tmp_path: Path, kind: pa.DataType) -> None:
    given = np.array([1_700_000_000, 0, 1_700_000_256, 1_699_999_360])  # float32 holds them exactly
    column = pa.array(given, mask=given == 0).cast(pa.float64()).cast(kind)
    dense = ["y", {"name": "x", "center": 1_700_000_000, "scale": 300}]
    found = numbers(opened(tmp_path, {"c": [1, 2, 3, 4], "x": column, "y": column}, {"dense": dense}))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[:, 1], torch.tensor([0, 0, 256 / 300, -640 / 300]).asinh())
    assert found[0, 0] == 1.7e9


def test_values_that_are_not_finite_are_0_once_scaled(tmp_path: Path) -> None:
    x = [float("nan"), float("inf"), -float("inf"), 1e308, 5.0]
    found = numbers(opened(tmp_path, {"c": [1] * 5, "x": x}, {"dense": [{"name": "x", "center": 4.0, "scale": 1e-9}]}))
    assert found[:, 0].tolist() == [0, 0, 0, 0, pytest.approx(np.arcsinh(1e9))]


def test_group_of_strings(tmp_path: Path) -> None:
    source = opened(tmp_path, {"c": [1, 2, 3], "user": ["u", "v", "u"]}, {"group": "user"})
    group = source.read("train", 0).extra["user"]
    assert group.dtype == torch.int64
    assert group[0] == group[2] != group[1]


@pytest.mark.parametrize("role", ["label", "weight", "group"])
def test_null_where_there_may_be_none(tmp_path: Path, role: str) -> None:
    columns: dict[str, list[Any]] = {"c": [1, 2, 3], "label": [0, 1, 0], "weight": [1.0] * 3, "group": [1, 2, 3]}
    columns[role] = [columns[role][0], None, None]
    source = opened(tmp_path, columns, {"labels": ["label"], "weight": "weight", "group": "group"})
    message = rf"t.parquet, row group 0, column '{role}': {role} null at row 1 \(row 1 of the file\)"
    with pytest.raises(DataError, match=message):
        source.read("train", 0)


@pytest.mark.parametrize(
    ("values", "ids", "options", "message"),
    [
        ([1, None], 1, {"ids": "raw"}, "id null at row 1"),
        ([[1, 2], [3]], 2, {}, "1 ids at row 1"),
        ([1.0, 0.5], 1, {}, r"id 0\.5 at row 1"),
        ([1.0, 2.0**60], 1, {}, r"id 1\.152921504606847e\+18 at row 1"),
        ([1.0, float("inf")], 1, {}, "id inf at row 1"),
    ],
)
def test_bad_ids(tmp_path: Path, values: list[Any], ids: int, options: dict[str, Any], message: str) -> None:
    source = opened(tmp_path, {"c": values}, {"sparse": [{"name": "c", "rows": 9, "ids": ids}]}, **options)
    with pytest.raises(DataError, match=rf"t\.parquet, row group 0, column 'c': {message} \(row 1 of the file\)"):
        source.read("train", 0)


S, FILE = {"sparse": [{"name": "s", "rows": 9}]}, r"t\.parquet: "


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        ({"sparse": [{"name": "sc", "rows": 9}]}, {}, FILE + "column 'sc' is missing"),
        ({"sparse": [{"name": "t", "rows": 9}]}, {}, FILE + r"sparse column 't': got timestamp\[ms\]"),
        (S, {"ids": "raw"}, FILE + "sparse column 's': got string with ids='raw'"),
        ({"sparse": [{"name": "s", "rows": 1}]}, {}, FILE + "sparse column 's': rows: got 1"),
        ({"sparse": [{"name": "s", "rows": 9, "ids": None}]}, {}, FILE + "sparse column 's': got one value per sample"),
        (S | {"dense": ["t"]}, {}, FILE + r"column 't': got timestamp\[ms\]"),
        (S | {"group": "f"}, {}, FILE + "group column 'f': got double"),
        (S, {"ids": "mod"}, "ids: got 'mod'"),
        (S, {"test_fraction": 0.5}, FILE + r"got 1 row groups, too few for a train split with .* test_fraction 0\.5"),
        (S, {"test_fraction": 1.5}, r"valid_fraction and test_fraction: got 0\.0 and 1\.5"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, schema: dict[str, Any], options: dict[str, Any], message: str) -> None:
    columns = {"s": ["a"], "f": [1.0], "t": pa.array([0], pa.timestamp("s"))}
    with pytest.raises((DataError, SpecError), match=message):
        opened(tmp_path, columns, schema, **options)


def test_bad_paths(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist"):
        ParquetSource(tmp_path / "nowhere", IDS)
    with pytest.raises(DataError, match="test_bad_paths0: got no files"):
        ParquetSource(tmp_path, IDS)
    (tmp_path / "text.parquet").write_text("label,c")
    with pytest.raises(DataError, match=r"text\.parquet is not a Parquet file, or is truncated"):
        ParquetSource(tmp_path, IDS)
    pq.write_table(pa.table({"c": [1]}), tmp_path / "text.parquet")
    (tmp_path / "train").mkdir()
    pq.write_table(pa.table({"c": [1]}), tmp_path / "train/x.parquet")
    with pytest.raises(DataError, match=r"the splits train, but .*text.parquet is in none"):
        ParquetSource(tmp_path, IDS)
    (tmp_path / "text.parquet").unlink()
    with pytest.raises(SpecError, match="has the splits train"):
        ParquetSource(tmp_path, IDS, test_fraction=0.5)


def test_file_damaged_after_opening(tmp_path: Path) -> None:
    source = opened(tmp_path, {"c": np.arange(1000)})
    path = tmp_path / "t.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=r"t\.parquet, row group 0, column 'c': the file is damaged or truncated"):
        source.read("train", 0)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("train.parquet test.parquet", {"train": 1, "test": 1}),
        ("Train.parquet TEST.pq val.parq", {"train": 1, "valid": 1, "test": 1}),
        (
            "train-00000-of-00002.parquet train-00001-of-00002.parquet validation-00000-of-00001.parquet",
            {"train": 2, "valid": 1},
        ),
        ("train_1.parquet train10.parquet test.0.parquet", {"train": 2, "test": 1}),
        ("train/a.parquet train/b.parquet test.parquet", {"train": 2, "test": 1}),
        ("Train/a.parquet Test/b.parquet", {"train": 1, "test": 1}),
        ("train.parquet", {"train": 1}),
        ("test.parquet", {"train": 1}),
        ("test-0.parquet test-1.parquet", {"train": 2}),
        ("trains.parquet tester.parquet", {"train": 2}),
        ("day/train.parquet day/test.parquet", {"train": 2}),
    ],
)
def test_splits_by_names_of_files_and_folders(tmp_path: Path, names: str, splits: dict[str, int]) -> None:
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"c": [1]}), tmp_path / name)
    source = ParquetSource(tmp_path, IDS)
    assert {split: source.samples(split) for split in source.splits} == splits


@pytest.mark.parametrize("other", ["items.parquet", "users_train.parquet", "more/items.parquet"])
def test_files_of_no_split_beside_those_of_one_are_refused(tmp_path: Path, other: str) -> None:
    for name in ("train.parquet", other):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"c": [1]}), tmp_path / name)
    with pytest.raises(DataError, match=rf"the splits train, but .*{other} is in none"):
        ParquetSource(tmp_path, IDS)


def test_uris_and_filesystems(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": [1, 2]}), tmp_path / "t.parquet")
    expected = ParquetSource(tmp_path, IDS).read("train", 0).sparse.values
    by_uri = ParquetSource(tmp_path.as_uri(), IDS)
    by_filesystem = ParquetSource("", IDS, filesystem=fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()))
    for source in (by_uri, by_filesystem):
        assert torch.equal(source.read("train", 0).sparse.values, expected)


def test_numbers_beyond_what_float32_holds_exactly_are_rounded(tmp_path: Path) -> None:
    large = pa.array([2**24 + 1, -(2**53) - 1, 2**63 - 1], pa.int64())
    found = numbers(opened(tmp_path, {"c": [1, 2, 3], "count": large}, {"dense": ["count"]}))
    assert found[:, 0].tolist() == [2.0**24, -(2.0**53), 2.0**63]


def test_whole_floats_are_ids_as_pandas_makes_them_of_integers_that_are_missing(tmp_path: Path) -> None:
    floats, integers = pa.array([7.0, None, float("nan"), -3.0]), pa.array([7, None, None, -3])
    read = [one_column(tmp_path, column).sparse.values.tolist() for column in (floats, integers)]
    assert read[0] == read[1]


# -- slices of a row group are its rows ------------------------------------------------------------------------------


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
