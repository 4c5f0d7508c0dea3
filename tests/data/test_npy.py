"""Protects that arrays of TorchRec's and MLPerf's scripts are read where they are, and that bad ones are named."""

import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_cases import DENSE, FEATURES, NAMES, ROWS, SCHEMA, Day, days, several, write_multi_hot, write_npy

from hotbed.batch import Batch
from hotbed.data import NpySource, Source
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged
from hotbed.testing.source_contract import SourceContract, assert_same

Splits = dict[str, Batch]


def batch_of(samples: list[Day], *, multi_hot: bool = False) -> Batch:
    ids = {
        name: np.concatenate([several(day, i) if multi_hot else day.ids[:, [i]] for day in samples])
        for i, name in enumerate(NAMES)
    }
    return Batch(
        sparse=Jagged.from_dict({n: torch.from_numpy(v[:, 0] if v.shape[1] == 1 else v) for n, v in ids.items()}),
        dense=torch.from_numpy(np.concatenate([day.dense for day in samples])),
        labels=torch.from_numpy(np.concatenate([day.labels for day in samples])).float()[:, None],
    )


def by_default(whole: Batch, train: int, valid: int) -> Splits:
    ends = [0, train, train + valid, len(whole)]
    parts = [whole.take(torch.arange(a, b)) for a, b in pairwise(ends)]
    return dict(zip(("train", "valid", "test"), parts, strict=True))


class TestOneHot(SourceContract):
    def make(self, path: Path) -> tuple[Source, Splits]:
        # 120, 121 and 122 samples, the last day halved
        return NpySource(write_npy(path / "set", days()), rows=ROWS), by_default(batch_of(days()), 241, 61)


class TestByColumn(SourceContract):
    def make(self, path: Path) -> tuple[Source, Splits]:
        folder = write_npy(path / "set", days(), by_column=True)
        return NpySource(folder, SCHEMA, chunk_samples=50), by_default(batch_of(days()), 241, 61)


class TestMultiHot(SourceContract):
    def make(self, path: Path) -> tuple[Source, Splits]:
        source = NpySource(write_multi_hot(path / "set", days()), rows=[ROWS] * FEATURES, chunk_samples=50)
        return source, by_default(batch_of(days(), multi_hot=True), 241, 61)


def test_splits(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days(11, 20))
    source = NpySource(folder, rows=ROWS)
    assert {s: source.samples(s) for s in source.splits} == {"train": sum(range(20, 30)), "valid": 15, "test": 15}
    # day_10 is the last, not day_9
    assert source.read("test", 0).labels[-1] == days(11, 20)[10].labels[-1]  # pyright: ignore[reportOptionalSubscript]
    chosen = NpySource(folder, rows=ROWS, splits={"train": ["day_10", "day_2"], "test": ["day_3"]})
    assert {s: chosen.samples(s) for s in chosen.splits} == {"train": 52, "test": 23}
    assert_same(chosen.read("train", 1), batch_of([days(11, 20)[2]]))
    # of one day the last tenth; names that are splits' are splits
    one = NpySource(write_npy(tmp_path / "one", days(1)), rows=ROWS)
    assert [one.samples(s) for s in one.splits] == [108, 6, 6]
    named = tmp_path / "named"
    named.mkdir()
    for i, split in enumerate(("train", "test")):
        for part in ("sparse", "dense", "labels"):
            (named / f"{split}_{part}.npy").write_bytes((folder / f"day_{i}_{part}.npy").read_bytes())
    of_names = NpySource(named, rows=ROWS)
    assert {s: of_names.samples(s) for s in of_names.splits} == {"test": 21, "train": 20}


def test_types_as_scripts_write_them(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days(2))
    for i, day in enumerate(days(2)):
        np.save(folder / f"day_{i}_sparse.npy", day.ids.astype(np.int64) + (1 << 40))
        np.save(folder / f"day_{i}_labels.npy", day.labels.astype(np.float32))
        np.save(folder / f"day_{i}_dense.npy", day.dense.astype(">f8"))
    source = NpySource(folder, rows=7, modulo=True)
    batch = source.read("train", 0)
    assert batch.sparse["cat_1"].values.tolist() == [(int(i) + (1 << 40)) % 7 for i in days(2)[0].ids[:, 1]]
    assert batch.dense is not None and torch.equal(batch.dense, torch.from_numpy(days(2)[0].dense))
    stored = NpySource(folder, rows=7).read("train", 0)
    assert stored.sparse["cat_1"].values.tolist() == [int(i) + (1 << 40) for i in days(2)[0].ids[:, 1]]


def test_without_labels_for_predictions(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days(2))
    for file in folder.glob("*_labels.npy"):
        file.unlink()
    assert NpySource(folder, {**SCHEMA, "labels": []}).read("test", 0).labels is None
    with pytest.raises(SpecError, match="the schema: got 1 labels"):
        NpySource(folder, SCHEMA)


def test_numbers_that_the_model_normalizes(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days(2))
    source = NpySource(folder, {**SCHEMA, "dense": [{"name": name, "rule": "standard"} for name in DENSE]})
    found = source.read_numericals("train", 0)
    assert found is not None and found.dtype == torch.float64


def test_labels_are_checked(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days(2))
    labels = days(2)[0].labels.astype(np.float32)[:, None]
    for bad, message in ((-1, r"label -1.0 at row 70"), (np.nan, "label nan at row 70")):
        labels[70] = bad
        np.save(folder / "day_0_labels.npy", labels)
        with pytest.raises(DataError, match=rf"day_0_labels.npy, column 'label': {message}"):
            NpySource(folder, rows=ROWS).check_labels("train")


# -- what is refused -------------------------------------------------------------------------------------------------


def cut(file: str, by: int = 4) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes()[:-by])

    return change


def append(file: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).write_bytes((folder / file).read_bytes() + b"0")

    return change


def remove(file: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).unlink()


def save(file: str, values: Any) -> Callable[[Path], None]:
    return lambda folder: np.save(folder / file, values)


def savez(**arrays: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "day_0_sparse.npy").unlink()
        np.savez(folder / "day_0_sparse_multi_hot.npz", **arrays)

    return change


def zipped(folder: Path) -> None:
    (folder / "day_0_sparse.npy").unlink()
    np.savez_compressed(folder / "day_0_sparse_multi_hot.npz", **{"0": days()[0].ids})


IDS = days()[0].ids
NO_ARRAY = r"day_0_dense\.npy is not a NumPy array, or is truncated \(EOF: reading "
OTHERS = r"day_0_sparse_multi_hot\.npz"
BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut short": (cut("day_1_sparse.npy"), r"day_1_sparse\.npy: got 1,448 bytes"),
    "longer": (append("day_0_dense.npy"), r"day_0_dense\.npy: got 961 bytes"),
    "no array": (lambda f: (f / "day_0_dense.npy").write_bytes(b"1,2\n"), NO_ARRAY + "magic string"),
    "cut within its header": (cut("day_0_dense.npy", 1000), NO_ARRAY + "array header"),
    "objects": (save("day_0_sparse.npy", IDS.astype(object)), r"day_0_sparse\.npy: got values of type object"),
    "text": (save("day_0_dense.npy", IDS[:, :2].astype(str)), r"day_0_dense\.npy: got values of type <U"),
    "floats as ids": (save("day_0_sparse.npy", IDS / 2), r"day_0_sparse\.npy: got values of type float64"),
    "one dimension": (save("day_0_sparse.npy", IDS[:, 0]), r"day_0_sparse\.npy: got shape \[120\]"),
    "other columns": (save("day_0_sparse.npy", IDS[:, :2]), r"set: ids per sample of day_1: got \(1, 1, 1\)"),
    "other rows": (save("day_0_labels.npy", IDS[:7, :1]), r"day_0_labels\.npy: got 7 rows"),
    "no labels of a day": (remove("day_2_labels.npy"), r"set: got day_2_dense\.npy, day_2_sparse\.npy"),
    "no ids of a day": (remove("day_2_sparse.npy"), r"set: got day_2_dense\.npy, day_2_labels\.npy"),
    "one and several ids": (
        lambda f: np.savez(f / "day_0_sparse_multi_hot.npz", **{"0": IDS}),
        rf"set: got day_0_sparse\.npy and {OTHERS}",
    ),
    "several ids, compressed": (zipped, rf"{OTHERS} is compressed"),
    "several ids, of other names": (savez(C1=IDS), rf"{OTHERS}: got array 'C1\.npy'"),
    "several ids, not all": (savez(**{"0": IDS, "2": IDS}), rf"{OTHERS}: got arrays 0, 2"),
    "several ids, floats": (savez(**{"0": IDS / 2}), rf"{OTHERS}, array 0: got values of type float64"),
    "no arrays": (lambda f: [file.unlink() for file in f.iterdir()], "set: got no arrays"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arrays_are_named(tmp_path: Path, case: str) -> None:
    folder = write_npy(tmp_path / "set", days())
    change, message = BAD[case]
    change(folder)
    with pytest.raises(DataError, match=message):
        NpySource(folder, rows=ROWS)


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    folder = write_multi_hot(tmp_path / "set", days())
    cut("day_0_sparse_multi_hot.npz", 60)(folder)
    with pytest.raises(
        DataError, match=r"day_0_sparse_multi_hot\.npz is damaged or truncated \(File is not a zip file\)"
    ):
        NpySource(folder, rows=ROWS)
    with zipfile.ZipFile(folder / "day_0_sparse_multi_hot.npz", "w") as archive:
        archive.writestr("0.npy", b"nothing")
    with pytest.raises(DataError, match=r"day_0_sparse_multi_hot\.npz, array 0 is not a NumPy array, or is truncated"):
        NpySource(folder, rows=ROWS)


def test_a_file_that_is_cut_short_while_it_is_read(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days())
    source = NpySource(folder, rows=ROWS)
    cut("day_1_sparse.npy", 400)(folder)
    with pytest.raises(DataError, match=r"day_1_sparse\.npy: got 1,052 bytes from byte 128"):
        source.read("train", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set: `rows` is missing"),
        ({"rows": [5, 6]}, "rows: got 2 numbers"),
        ({"rows": 5, "schema": SCHEMA}, "got both schema and rows"),
        ({"rows": 5, "chunk_samples": 0}, "chunk_samples: got 0"),
        ({"schema": {**SCHEMA, "dense": ["a"]}}, "the schema: got 1 dense columns"),
        ({"schema": {**SCHEMA, "sparse": SCHEMA["sparse"][:1]}}, "the schema: got 1 sparse columns"),
        (
            {"schema": {**SCHEMA, "sparse": [{"name": n, "rows": 5, "ids": 2} for n in NAMES]}},
            "sparse column 'cat_0': ids: got 2",
        ),
        ({"schema": {**SCHEMA, "weight": "w"}}, "NumPy arrays do not support sample weights or groups"),
        (
            {"schema": {**SCHEMA, "labels": [{"column": "label", "positive": "> 0"}]}},
            "NumPy arrays do not support scaled, mapped or derived columns",
        ),
        ({"rows": 5, "splits": {"train": ["day_7"]}}, r"splits\.train: day of .*set: got 'day_7'"),
        ({"rows": 5, "splits": {"train": "day_0"}}, r"splits\.train: got 'day_0'"),
        ({"rows": 5, "splits": {"train": ["day_0"], "test": ["day_0"]}}, "splits: got day 'day_0' in train and test"),
        ({"rows": 5, "splits": {}}, r"splits: got \{\}"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    folder = write_npy(tmp_path / "set", days())
    with pytest.raises(SpecError, match=message):
        NpySource(folder, **options)


def test_places_without_arrays(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere is not a folder"):
        NpySource(tmp_path / "nowhere", rows=ROWS)
    with pytest.raises(DataError, match="s3://models/days: got a URI"):
        NpySource("s3://models/days", rows=ROWS)
    few = write_npy(tmp_path / "few", [Day(*(part[:3] for part in days()[0]))])
    with pytest.raises(DataError, match="few: got too few samples for a valid split"):
        NpySource(few, rows=ROWS)
    assert NpySource(few, rows=ROWS, splits={"train": ["day_0"]}).samples("train") == 3
