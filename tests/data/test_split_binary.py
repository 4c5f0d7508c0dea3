from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from data_cases import MIXED_SCHEMA, NUMBERED_SCHEMA, numbered_batch

from hotbed.batch import Batch
from hotbed.data import Scaling, Schema, Source, SparseColumn, SplitBinarySource, SplitBinaryWriter
from hotbed.errors import DataError, SpecError
from hotbed.testing.source_contract import SourceContract


def write(path: Path, schema: Schema = NUMBERED_SCHEMA, **splits: Batch) -> Path:
    path.mkdir(exist_ok=True)
    with SplitBinaryWriter(path, schema, list(splits)) as writer:
        for split, batch in splits.items():
            writer.append(split, batch)
    return path


class TestContract(SourceContract):
    def make(self, path: Path) -> tuple[Source, dict[str, Batch]]:
        splits = {"train": numbered_batch(50), "valid": numbered_batch(8), "test": numbered_batch(5)}
        return SplitBinarySource(write(path / "set", **splits), chunk_samples=8), splits


@pytest.mark.parametrize(("rows", "dtype"), [(126, "int8"), (127, "int16"), (32766, "int16"), (32767, "int32")])
def test_dtype_is_the_smallest_by_nvidias_rule(tmp_path: Path, rows: int, dtype: str) -> None:
    schema = Schema(sparse=(SparseColumn(name="a", rows=rows), SparseColumn(name="b", rows=5)), dense=("x",))
    path = write(tmp_path / "set", schema, train=numbered_batch(3))
    assert yaml.safe_load((path / "feature_spec.yaml").read_text())["feature_spec"]["a"] == {
        "dtype": dtype,
        "cardinality": rows,
    }
    assert (path / "train/cat_0.bin").stat().st_size == 3 * np.dtype(dtype).itemsize


def test_bytes_on_disk(tmp_path: Path) -> None:
    path = write(tmp_path / "set", train=numbered_batch(4))
    assert (path / "train/label.bin").read_bytes() == b"\0\1\0\1"
    assert np.fromfile(path / "train/numerical.bin", "<f2").tolist() == [0, 1, 2, 3]
    assert np.fromfile(path / "train/cat_1.bin", "<i2").tolist() == [1, 2, 3, 4]


def nvidia_dataset(path: Path, n: int = 6, wide: bool = False) -> Path:
    """A dataset as NVIDIA's scripts describe it: `.bin` in names, YAML anchors, empty metadata, unordered keys."""
    (path / "train").mkdir(parents=True)
    (path / "test").mkdir()
    wide_dtype = "int64" if wide else "int32"
    (path / "feature_spec.yaml").write_text(f"""
channel_spec:
  categorical: [cat_0.bin, cat_1.bin]
  label: [label]
  numerical: &id001 [num_0, num_1]
feature_spec:
  cat_1.bin: {{cardinality: 4, dtype: int8}}
  cat_0.bin: {{cardinality: 7912889, dtype: {wide_dtype}}}
  label: {{dtype: bool}}
  num_0: {{dtype: float16}}
  num_1: {{dtype: float16}}
metadata: {{}}
source_spec:
  test:
  - {{features: *id001, files: [test/numerical.bin], type: split_binary}}
  - {{features: [label], files: [test/label.bin], type: split_binary}}
  - {{features: [cat_0.bin], files: [test/cat_0.bin], type: split_binary}}
  - {{features: [cat_1.bin], files: [test/cat_1.bin], type: split_binary}}
  train:
  - {{features: *id001, files: [train/numerical.bin], type: split_binary}}
  - {{features: [label], files: [train/label.bin], type: split_binary}}
  - {{features: [cat_0.bin], files: [train/cat_0.bin], type: split_binary}}
  - {{features: [cat_1.bin], files: [train/cat_1.bin], type: split_binary}}
""")
    for split in ("train", "test"):
        np.arange(2 * n, dtype="<f2").tofile(path / split / "numerical.bin")
        (np.arange(n) % 2 == 0).tofile(path / split / "label.bin")
        (np.arange(n) + 7_000_000).astype(wide_dtype).tofile(path / split / "cat_0.bin")
        (np.arange(n) % 4).astype(np.int8).tofile(path / split / "cat_1.bin")
    return path


@pytest.mark.parametrize("wide", [False, True])
def test_loads_what_nvidias_scripts_write(tmp_path: Path, wide: bool) -> None:
    source = SplitBinarySource(nvidia_dataset(tmp_path / "set", wide=wide))
    columns = (SparseColumn(name="cat_0", rows=7_912_889), SparseColumn(name="cat_1", rows=4))
    assert source.schema == Schema(sparse=columns, dense=("num_0", "num_1"))
    assert source.splits == ("test", "train")
    batch = source.read("train", 0)
    assert batch.sparse.values.dtype == (torch.int64 if wide else torch.int32)
    assert batch.sparse["cat_0"].values.tolist() == [7_000_000 + i for i in range(6)]
    assert batch.sparse["cat_1"].values.tolist() == [0, 1, 2, 3, 0, 1]
    assert batch.dense is not None and batch.dense.tolist() == [[2.0 * i, 2.0 * i + 1] for i in range(6)]
    assert batch.labels is not None and batch.labels.tolist() == [[1.0], [0.0]] * 3


@pytest.mark.parametrize(
    ("file", "cut", "message"),
    [
        ("cat_0.bin", 1, r"cat_0\.bin: got 23 bytes"),
        ("cat_0.bin", 4, r"cat_0\.bin: got 20 bytes"),
        ("label.bin", 2, r"label\.bin: got 4 bytes"),
        ("numerical.bin", 4, r"numerical\.bin: got 20 bytes"),
        ("cat_1.bin", 6, r"cat_1\.bin: got 0 bytes"),
    ],
)
def test_truncated_file(tmp_path: Path, file: str, cut: int, message: str) -> None:
    path = nvidia_dataset(tmp_path / "set") / "train" / file
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(DataError, match=message):
        SplitBinarySource(tmp_path / "set")


def test_file_truncated_after_opening(tmp_path: Path) -> None:
    source = SplitBinarySource(nvidia_dataset(tmp_path / "set"))
    (tmp_path / "set/train/cat_1.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"cat_1\.bin: got 2 bytes from byte 0"):
        source.read("train", 0)


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"feature_spec\.yaml does not exist"):
        SplitBinarySource(tmp_path)
    path = nvidia_dataset(tmp_path / "set")
    (path / "test/cat_1.bin").unlink()
    with pytest.raises(DataError, match=r"cat_1\.bin does not exist"):
        SplitBinarySource(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("cardinality: 4, dtype: int8", "cardinality: 129, dtype: int8", r"cat_1\.bin\.cardinality: got 129"),
        ("cardinality: 4", "cardinality: -4", r"feature_spec\.cat_1\.bin\.cardinality: got -4"),
        ("cardinality: 4", "cardinality: many", "cardinality: got 'many', expected an integer"),
        ("dtype: int8", "dtype: uint8", r"feature_spec\.cat_1\.bin\.dtype: got 'uint8'"),
        ("dtype: bool", "dtype: int64", r"feature_spec\.label\.dtype: got 'int64'"),
        ("  label: {dtype: bool}", "  label: 3", r"feature_spec\.label: got 3, expected a mapping"),
        ("  label: {dtype: bool}", "  lable: {dtype: bool}", "column of channel_spec: got 'label'"),
        ("  label: [label]", "  label: y", r"channel_spec\.label: got 'y', expected a list"),
        ("source_spec:", "source_specs:", "source_spec is missing; did you mean 'source_specs'"),
        (
            "[test/cat_1.bin], type: split_binary",
            "[test/cat_1.bin], type: csv",
            "type: got 'csv', expected 'split_binary'",
        ),
        (
            "{features: [label], files: [test/label",
            "{features: [cat_1.bin], files: [x",
            r"source_spec\.test: .*'label'",
        ),
        ("features: *id001, files: [train", "features: [num_1, num_0], files: [train", r"got \['num_1', 'num_0'\]"),
        ("channel_spec:", "channel_spec: [", "is not YAML"),
        (
            "metadata: {}",
            "metadata: {schema: {sparse: [{name: cat_0, rows: 5}]}}",
            r"metadata\.schema and feature_spec",
        ),
    ],
)
def test_bad_description(tmp_path: Path, old: str, new: str, message: str) -> None:
    file = nvidia_dataset(tmp_path / "set") / "feature_spec.yaml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(DataError, match=message) as caught:
        SplitBinarySource(tmp_path / "set")
    assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"feature_spec": 3}, "feature_spec: got 3, expected a mapping"),
        ({"source_spec": {}}, "source_spec: got {}, expected a mapping with at least `train`"),
    ],
)
def test_a_part_that_is_none(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = nvidia_dataset(tmp_path / "set") / "feature_spec.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), **change}))
    with pytest.raises(DataError) as caught:
        SplitBinarySource(tmp_path / "set")
    assert str(caught.value) == f"{file}: {message}"


def test_what_is_not_used_is_not_checked(tmp_path: Path) -> None:
    file = nvidia_dataset(tmp_path / "set") / "feature_spec.yaml"
    given = yaml.safe_load(file.read_text())
    given["feature_spec"] |= {"unused": {"cardinality": "many"}}
    given["feature_spec"]["label"]["cardinality"] = 0
    file.write_text(yaml.safe_dump(given))
    assert SplitBinarySource(tmp_path / "set").splits


def test_what_the_format_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="split-binary format: got a weight or group column"):
        SplitBinaryWriter(tmp_path, MIXED_SCHEMA, ["train"])
    ragged = Schema(sparse=(SparseColumn(name="h", rows=3, ids=None),))
    with pytest.raises(
        SpecError, match="split-binary format: sparse column 'h': got a varying number of ids per sample"
    ):
        SplitBinaryWriter(tmp_path, ragged, ["train"])
    huge = Schema(sparse=(SparseColumn(name="h", rows=2**31),))
    with pytest.raises(SpecError, match="column 'h': cardinality: got 2,147,483,648"):
        SplitBinaryWriter(tmp_path, huge, ["train"])


def test_several_labels_and_pooling_survive(tmp_path: Path) -> None:
    columns = tuple(SparseColumn(name=n, rows=9, table="t", pooling="mean") for n in "ab")
    schema = Schema(sparse=columns, labels=("click", "buy"))
    batch = numbered_batch(4)
    batch = Batch(sparse=batch.sparse, labels=torch.tensor([[1.0, 0.0]] * 4))
    source = SplitBinarySource(write(tmp_path / "set", schema, train=batch))
    assert source.schema == schema
    labels = source.read("train", 0).labels
    assert labels is not None and labels.tolist() == [[1.0, 0.0]] * 4


def test_ids_at_or_above_the_cardinality_are_left_to_the_embedding(tmp_path: Path) -> None:
    path = nvidia_dataset(tmp_path / "set")
    np.full(6, 99, dtype=np.int8).tofile(path / "train/cat_1.bin")
    assert SplitBinarySource(path).read("train", 0).sparse["cat_1"].values.tolist() == [99] * 6


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("ids", [0, 9_999, 10_000], "cat_1.bin, column 'b': 10000 at sample 6; expected an id from 0 to 9,999"),
        ("ids", [-1, 0, 0], "column 'b': -1 at sample 4; expected an id"),
        ("dense", [0.0, 65_504.0, 70_000.0], "numerical.bin, column 'x': 70000.0 at sample 6; expected"),
        ("dense", [0.0, float("nan"), float("inf")], "column 'x': nan at sample 5; expected .*65,504"),
        ("labels", [0.0, 0.5, 2.0], "label.bin, column 'label': 0.5 at sample 5; expected 0 or 1"),
    ],
)
def test_values_that_the_format_cannot_hold_are_named(
    tmp_path: Path, name: str, values: list[float], message: str
) -> None:
    with (
        pytest.raises(DataError, match=f"train/.*{message}"),
        SplitBinaryWriter(tmp_path, NUMBERED_SCHEMA, ["train"]) as writer,
    ):
        writer.append("train", numbered_batch(4))
        {
            "ids": lambda: writer.append_ids("train", 1, np.array(values)),
            "dense": lambda: writer.append_dense("train", np.array(values)[:, None]),
            "labels": lambda: writer.append_labels("train", np.array(values)),
        }[name]()
    assert not (tmp_path / "feature_spec.yaml").exists()


def test_the_largest_values_of_the_format_are_kept(tmp_path: Path) -> None:
    batch = numbered_batch(2)
    batch = Batch(sparse=batch.sparse, dense=torch.tensor([[65_504.0], [-65_504.0]]), labels=batch.labels)
    dense = SplitBinarySource(write(tmp_path / "set", train=batch)).read("train", 0).dense
    assert dense is not None and dense.flatten().tolist() == [65_504.0, -65_504.0]


def test_numericals_are_not_scaled_by_this_format(tmp_path: Path) -> None:
    schema = replace(NUMBERED_SCHEMA, scaling=(Scaling(name=NUMBERED_SCHEMA.dense[0]),))
    with pytest.raises(SpecError, match="split-binary format: got columns to scale"):
        SplitBinaryWriter(tmp_path, schema, ["train"])
    path = write(tmp_path / "set", train=numbered_batch(4))
    description = yaml.safe_load((path / "feature_spec.yaml").read_text())
    description["metadata"]["schema"] = schema.to_dict()
    (path / "feature_spec.yaml").write_text(yaml.safe_dump(description))
    with pytest.raises(DataError, match=r"feature_spec\.yaml: metadata\.schema and feature_spec"):
        SplitBinarySource(path)
