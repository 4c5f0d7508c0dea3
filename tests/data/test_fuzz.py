"""Protects: whatever the bytes of a dataset are, opening and reading it works or ends with one of hotbed's errors.

Files that were right are changed in one place. ``HOTBED_FUZZ=5000`` looks further.
"""

import copy
import gzip
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hotbed.data import NpySource, ParquetSource, Schema, SplitBinarySource, draft_schema, write_synthetic_log
from hotbed.data.columns import SparseColumn
from hotbed.data.encoding.vocabulary import Vocabulary, read_vocabulary, write_vocabulary
from hotbed.data.formats.split_binary import SplitBinaryWriter
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.data.skew.hot_cold import read_hot_order, write_hot_order
from hotbed.errors import DataError, HotbedError, SpecError
from hotbed.train.runs.plan_search import read_hot_rows, read_skew

EXAMPLES = int(os.environ.get("HOTBED_FUZZ", "40"))
Fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
SCHEMA = {"sparse": [{"name": "user", "rows": 50}], "dense": ["age"], "labels": ["click"]}


@cache
def saved() -> dict[str, bytes]:
    """Files that are right, by name."""
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        table = pa.table({"user": [f"u{i}" for i in range(60)], "age": np.linspace(0, 9, 60), "click": [0, 1] * 30})
        pq.write_table(table, root / "table.parquet", row_group_size=20)
        (root / "table.csv").write_text("user,age,click\n" + "".join(f"u{i},{i / 7:.3f},{i % 2}\n" for i in range(60)))
        (root / "table.csv.gz").write_bytes(gzip.compress((root / "table.csv").read_bytes()))
        write_synthetic_log(root / "log.tsv", 100, seed=1)
        (root / "log.tsv.gz").write_bytes(gzip.compress((root / "log.tsv").read_bytes()))
        write_vocabulary(root / "C1.parquet", Vocabulary(pa.array(range(5))))
        np.save(root / "day_0_sparse.npy", np.arange(60, dtype=np.int32).reshape(20, 3))
        np.savez(root / "day_0_sparse_multi_hot.npz", **{"0": np.ones((20, 2), np.int32), "1": np.ones((20, 1), int)})
        write_hot_order(root, {"order": np.arange(9)[::-1].astype(np.int64)})
        return {f.name: f.read_bytes() for f in sorted(root.iterdir())}


def read_table(path: Path) -> None:
    for schema in (SCHEMA, draft_schema(path)):
        source = ParquetSource(path, schema)
        source.check_labels("train")
        for i in range(min(len(source.chunks("train")), 4)):
            source.read("train", i)


def read_log(path: Path) -> None:
    prepare(path, path.parent / "prepared", threshold=1, test_fraction=0)


def read_dataset(path: Path) -> None:
    source = SplitBinarySource(path)
    for split in source.splits:
        source.check_labels(split)
        for i in range(len(source.chunks(split))):
            source.read(split, i)


def read_arrays(path: Path) -> None:
    np.save(path.parent / "day_0_labels.npy", np.zeros((20, 1), np.int32))
    source = NpySource(path.parent, rows=100, splits="none", chunk_samples=7)
    for i in range(min(len(source.chunks("train")), 4)):
        source.read("train", i)


READERS: dict[str, Callable[[Path], object]] = {
    "table.parquet": read_table,
    "table.csv": read_table,
    "table.csv.gz": read_table,
    "log.tsv": read_log,
    "log.tsv.gz": read_log,
    "C1.parquet": read_vocabulary,
    "day_0_sparse.npy": read_arrays,
    "day_0_sparse_multi_hot.npz": read_arrays,
    "order.npy": lambda path: read_hot_order(path.parent, "order", 9),
}


def works(name: str, content: bytes) -> bool:
    """Whether a file is read; otherwise one of hotbed's errors says what is wrong, and nothing is left behind."""
    with tempfile.TemporaryDirectory() as place:
        (Path(place) / name).write_bytes(content)
        os.environ["HOTBED_TABLES"], before = f"{place}/tables", os.environ.get("HOTBED_TABLES")
        try:
            READERS[name](Path(place) / name)
        except HotbedError as error:
            assert 0 < len(str(error)) < 3000
            assert not [f for f in Path(place).rglob("*") if "unfinished" in f.name or f.name == "prepared"]
            return False
        finally:
            os.environ["HOTBED_TABLES"] = before or ""
        return True


@pytest.mark.parametrize("name", READERS)
def test_what_is_not_changed_is_read(name: str) -> None:
    assert works(name, saved()[name])


@st.composite
def of_bytes(draw: st.DrawFn) -> tuple[str, str, int, int]:
    name = draw(st.sampled_from(list(READERS)))
    size = len(saved()[name])
    near = st.integers(0, min(size, 200) - 1)
    at = draw(st.one_of(st.integers(0, size - 1), near, near.map(lambda i: size - 1 - i)))
    return name, draw(st.sampled_from(["flip", "cut", "insert"])), at, draw(st.integers(0, 255))


@Fuzz
@given(of_bytes())
@example(("table.parquet", "flip", 32, 128))
@example(("table.parquet", "insert", 1593, 0))
def test_bytes_of_a_file_are_others(change: tuple[str, str, int, int]) -> None:
    name, how, at, byte = change
    data = saved()[name]
    put = {"flip": bytes([byte]) + data[at + 1 :], "cut": b"", "insert": bytes([byte]) + data[at:]}
    works(name, data[:at] + put[how])


# -- descriptions of datasets, and files about tables --------------------------------------------------------------

Odd = st.one_of(
    st.sampled_from(
        [None, True, -1, 0, 2**31, 2**63, 10**400, 0.5, float("inf"), "", "x", "train", "../x", "/dev/zero"]
    ),
    st.sampled_from([[], {}, [[]], [0], ["x"], ["../../x"], [None], {"x": 1}, {1: 2}, "a\0b", "\ud800", "x" * 5000]),
    st.integers(),
    st.text(max_size=5),
)
REMOVED = "(removed)"


def described(folder: Path) -> dict[str, Any]:
    """Write a dataset, and give its description."""
    schema = Schema(sparse=(SparseColumn(name="a", rows=9), SparseColumn(name="b", rows=300)), dense=("x", "y"))
    with SplitBinaryWriter(folder, schema, ["train", "test"]) as writer:
        for split in ("train", "test"):
            writer.append_labels(split, np.array([0, 1, 1]))
            writer.append_dense(split, np.ones((3, 2)))
            writer.append_ids(split, 0, np.array([0, 8, 3]))
            writer.append_ids(split, 1, np.array([0, 299, 3]))
    return yaml.safe_load((folder / "feature_spec.yaml").read_text())


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return ([path] if path else []) + [p for key, inner in items for p in nodes(inner, (*path, key))]


def put(values: Any, path: tuple[Any, ...], value: Any) -> Any:
    values = at = copy.deepcopy(values)
    for key in path[:-1]:
        at = at[key]
    if value == REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    return values


@cache
def paths_of_description() -> list[tuple[Any, ...]]:
    with tempfile.TemporaryDirectory() as place:
        return nodes(described(Path(place)))


@Fuzz
@given(st.deferred(lambda: st.sampled_from(paths_of_description())), Odd | st.just(REMOVED))
@example(("source_spec", "train", 0, "files", 0), "../../x")
@example(("feature_spec", "a", "cardinality"), 10**400)
@example(("feature_spec", "a", "dtype"), [])
@example(("metadata", "schema", "sparse", 0, "rows"), 10**400)
def test_an_entry_of_a_description_is_another(path: tuple[Any, ...], value: Any) -> None:
    with tempfile.TemporaryDirectory() as place:
        values = put(described(Path(place)), path, value)
        text = yaml.safe_dump(values, allow_unicode=True)
        (Path(place) / "feature_spec.yaml").write_text(text, encoding="utf-8", errors="replace")
        try:
            read_dataset(Path(place))
        except (DataError, SpecError) as error:
            assert 0 < len(str(error)) < 20_000


@pytest.mark.parametrize(
    "name", ["../secret.bin", "/etc/hostname", "train/../../secret.bin", "", "a\0b", "link.bin", "up/x"]
)
def test_files_out_of_a_dataset_are_not_read(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    values = described(folder)
    (tmp_path / "secret.bin").write_bytes(b"\1\2\3")
    (folder / "link.bin").symlink_to(tmp_path / "secret.bin")
    (folder / "up").symlink_to("..")
    values["source_spec"]["train"][2]["files"] = [name]
    (folder / "feature_spec.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(DataError, match=r"feature_spec\.yaml: source_spec\.train:"):
        SplitBinarySource(folder)


def test_a_dataset_behind_a_link_and_links_within_it_are_read(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    described(tmp_path / "set")
    (tmp_path / "set" / "train" / "cat_0.bin").rename(tmp_path / "set" / "ids")
    (tmp_path / "set" / "train" / "cat_0.bin").symlink_to("../ids")
    (tmp_path / "newest").symlink_to("set")
    read_dataset(tmp_path / "newest")


@pytest.mark.parametrize("split", ["../train", "a/b", "..", ""])
def test_a_split_is_no_path(split: str, tmp_path: Path) -> None:
    values = described(tmp_path)
    values["source_spec"][split] = values["source_spec"].pop("test")
    (tmp_path / "feature_spec.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(DataError, match=r"feature_spec\.yaml:.*'"):
        SplitBinarySource(tmp_path)


HOT = {"tables": [{"table": "a", "rows": 9, "hot_rows": 3}]}
SKEW = {
    "samples": 10,
    "tables": [{"table": "a", "rows": 9, "accesses": 20, "cache_rows": [3, 9], "accesses_of_top_rows": [0.5, 1.0]}],
}


@Fuzz
@given(st.booleans(), st.data(), Odd | st.just(REMOVED))
def test_an_entry_about_a_table_is_another(hot: bool, data: st.DataObject, value: Any) -> None:
    values = put(HOT if hot else SKEW, data.draw(st.sampled_from(nodes(HOT if hot else SKEW))), value)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "tables.json"
        file.write_text(json.dumps(values))
        try:
            (read_hot_rows if hot else read_skew)(file, {"a": 9})
        except DataError as error:
            assert str(file) in str(error)


# -- what a few bytes would become ---------------------------------------------------------------------------------


def test_a_line_without_an_end_in_a_gzip_file(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "log.tsv.gz", "wb", compresslevel=1) as stream:
        stream.write(b"0" * (64 << 20))
    with pytest.raises(DataError, match=r"log\.tsv\.gz, line 1: got more than 1,048,576 bytes"):
        prepare(tmp_path / "log.tsv.gz", tmp_path / "out")
    with gzip.open(tmp_path / "table.csv.gz", "wb", compresslevel=1) as stream:
        stream.write(b"a,b\n" + b"0" * (64 << 20))
    with pytest.raises(
        DataError,
        match=r"table\.csv\.gz cannot be parsed",
    ):
        draft_schema(tmp_path / "table.csv.gz")


def test_a_header_of_a_million_columns(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(",".join(f"c{i}" for i in range(100_000)) + "\n")
    with pytest.raises(DataError, match=r"table\.csv: got 100,000 columns"):
        draft_schema(tmp_path / "table.csv")


def test_a_hot_order_that_is_longer_than_its_file(tmp_path: Path) -> None:
    header = b"{'descr': '<i4', 'fortran_order': False, 'shape': (1000000000000,), }"
    (tmp_path / "order.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(DataError, match=r"order\.npy is not in NumPy's format, or is truncated"):
        read_hot_order(tmp_path, "order", 9)


def test_a_row_group_of_more_rows_than_its_file_can_have(tmp_path: Path) -> None:
    rows = (1 << 24) + 1
    same = pa.chunked_array([pa.nulls(rows, pa.int8())])
    pq.write_table(pa.table({"user": same}), tmp_path / "table.parquet", row_group_size=rows, compression="zstd")
    assert (tmp_path / "table.parquet").stat().st_size < 100_000
    with pytest.raises(DataError, match=r"table\.parquet, row group 0: got 16,777,217 rows in 36,491 bytes"):
        ParquetSource(tmp_path / "table.parquet", {"sparse": [{"name": "user", "rows": 9}], "labels": []})
