"""Protects that the same samples are the same in all formats: read in place, prepared, and sent to other processes."""

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from data_cases import MIXED_SCHEMA, ListSource, log_line, mixed_batch, read_whole, unweighted, write_log
from format_cases import (
    SCHEMA,
    Day,
    days,
    write_hive,
    write_multi_hot,
    write_npy,
    write_parquet,
    write_split_binary,
    write_text,
)
from prepare_cases import digests, open_prepared

from hotbed.data import NpySource, ParquetSource, Source, SplitBinarySource
from hotbed.data.encoding.vocabulary import read_vocabulary
from hotbed.data.files.delimited import has_header
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.data.preparation.raw_inputs import find_input
from hotbed.errors import DataError, SpecError
from hotbed.locations import resolve_uri
from hotbed.testing.source_contract import assert_same

Make = Callable[[Path, list[Day]], Path]
TABLES: dict[str, Make] = {
    "Parquet": write_parquet,
    "Parquet, a folder per day": write_hive,
    "CSV": partial(write_text, suffix=".csv"),
    "TSV with a header": partial(write_text, suffix=".tsv"),
}
OTHERS: dict[str, Make] = {"NumPy": write_npy, "split-binary": write_split_binary}
ALL = {**TABLES, **OTHERS}
PREPARE: dict[str, Any] = {"threshold": 2, "test_fraction": 0, "format": "parquet"}


def opened_source(form: str, path: Path) -> Source:
    """All samples to train on, ids as they are stored."""
    if form == "NumPy":
        return NpySource(path, SCHEMA, splits="none")
    return SplitBinarySource(path) if form == "split-binary" else ParquetSource(path, SCHEMA, ids="raw")


@pytest.mark.parametrize("form", ALL)
def test_samples_are_the_same_in_place(tmp_path: Path, form: str) -> None:
    expected = read_whole(opened_source("Parquet", write_parquet(tmp_path / "expected", days())))
    source = opened_source(form, ALL[form](tmp_path / "set", days()))
    assert_same(read_whole(source), expected)
    assert_same(read_whole(pickle.loads(pickle.dumps(source))), expected)


@pytest.mark.parametrize("form", ALL)
def test_samples_are_the_same_when_they_are_prepared(tmp_path: Path, form: str) -> None:
    given = {"schema": SCHEMA} if form in TABLES else {}
    folder = ALL[form](tmp_path / "set", days())
    report = prepare(folder, tmp_path / "out", **PREPARE, **given)
    assert report.samples == {"train": 363}
    prepare(write_parquet(tmp_path / "expected", days()), tmp_path / "other", schema=SCHEMA, **PREPARE)
    assert_same(read_whole(dataset(tmp_path / "out")), read_whole(dataset(tmp_path / "other")))
    values = [read_vocabulary(tmp_path / out / "vocabulary/cat_1.parquet").values for out in ("out", "other")]
    assert values[0].equals(values[1])


def dataset(path: Path) -> Source:
    return ParquetSource(path, {**SCHEMA, "sparse": [{**c, "rows": 41} for c in SCHEMA["sparse"]]}, ids="raw")


def test_several_ids_of_arrays(tmp_path: Path) -> None:
    folder = write_multi_hot(tmp_path / "set", days())
    prepare(folder, tmp_path / "out", **PREPARE)
    source = NpySource(folder, rows=40, splits="none")
    values = read_vocabulary(tmp_path / "out/vocabulary/cat_2.parquet").values.to_pylist()
    stored = pq.read_table(tmp_path / "out/train")["cat_2"].to_pylist()
    given = read_whole(source).sparse["cat_2"].values.reshape(-1, 3).tolist()
    assert [[values[i - 1] for i in ids] for ids in stored] == given


def test_splits_of_a_dataset_are_kept(tmp_path: Path) -> None:
    prepare(write_npy(tmp_path / "set", days()), tmp_path / "one", threshold=2, test_rows=60, format="split_binary")
    report = prepare(tmp_path / "one", tmp_path / "two", threshold=2)
    assert report.samples == {"train": 303, "test": 60}
    with pytest.raises(SpecError, match=r"schema: got one for .*one, which defines its own columns"):
        prepare(tmp_path / "one", tmp_path / "three", schema=SCHEMA)


def test_what_any_source_reads_is_prepared(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"ListSource/train, column '\w+': got weights of ids"):
        prepare(ListSource(mixed_batch(60), [20, 40], MIXED_SCHEMA), tmp_path / "weighted", threshold=1)
    source = ListSource(unweighted(mixed_batch(60)), [20, 40], MIXED_SCHEMA)
    report = prepare(source, tmp_path / "out", threshold=1)
    assert report.samples == {"train": 60}
    made = open_prepared(tmp_path / "out")
    found, given = read_whole(made), mixed_batch(60)
    values = read_vocabulary(tmp_path / "out/vocabulary/items.parquet").values.to_pylist()
    for name in ("pair", "history"):
        assert [values[i - 1] for i in found.sparse[name].values.tolist()] == given.sparse[name].values.tolist()
    assert torch.equal(found.sparse["history"].lengths(), given.sparse["history"].lengths())
    for a, b in ((found.dense, given.dense), (found.labels, given.labels), (found.weights, given.weights)):
        assert a is not None and b is not None and torch.equal(a, b)
    assert torch.equal(found.extra["session"], given.extra["session"])
    with pytest.raises(SpecError, match="schema: got one for ListSource"):
        prepare(source, tmp_path / "other", schema=MIXED_SCHEMA)


def test_a_bad_array_leaves_what_was_there(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days())
    prepare(folder, tmp_path / "out", **PREPARE)
    before = digests(tmp_path / "out")
    (folder / "day_0_labels.npy").write_bytes((folder / "day_1_labels.npy").read_bytes()[:-4])
    with pytest.raises(DataError, match=r"day_0_labels\.npy: got 480 bytes"):
        prepare(folder, tmp_path / "out", **PREPARE, overwrite=True)
    assert digests(tmp_path / "out") == before


# -- text: with a header, or a log ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["label\tcafe\tuser", "1\t2\tu"], True),
        (["a\tb"], True),
        ([log_line(1, [5], ["0a"]).rstrip("\n")] * 2, False),
        (["garbage", log_line(1, [5], ["0a"]).rstrip("\n")], False),
        (["x\ty\tz", log_line(1, [5], ["0a"]).rstrip("\n")], False),
        (["a\ta", "1\t2"], False),
        (["a\t1", "1\t2"], False),
        ([""], False),
    ],
)
def test_what_a_header_is(tmp_path: Path, lines: list[str], expected: bool) -> None:
    for name in ("log.tsv", "log.tsv.gz"):
        write_log(tmp_path / name, [line + "\n" for line in lines])
        assert has_header(tmp_path / name) == expected


def test_a_remote_log_that_was_written_anew_is_another(s3: str, tmp_path: Path) -> None:
    uri = s3.replace("PATH", f"{tmp_path.name}/log.tsv")
    store, path = resolve_uri(uri)
    with store.open_output_stream(path) as out:
        out.write(log_line(1).encode())
    found = find_input([uri], None).state
    assert found == ([(uri, len(log_line(1)), store.get_file_info(path).mtime_ns)], [])
    assert store.get_file_info(path).mtime_ns > 0


# -- hive-partitioned folders, object stores ---------------------------------------------------------------------------


def test_a_folders_column_is_an_input_and_divides_rows(tmp_path: Path) -> None:
    folder = write_hive(tmp_path / "set", days())
    schema = {**SCHEMA, "sparse": [*SCHEMA["sparse"], {"name": "day", "rows": 3}]}
    split = {"by": "time", "column": "day", "test_from": 2}
    source = ParquetSource(folder, schema, ids="raw", split=split)
    assert (source.samples("train"), source.samples("test")) == (241, 122)
    assert set(source.read("test", 0).sparse["day"].values.tolist()) == {2}
    report = prepare(folder, tmp_path / "out", schema=schema, threshold=1, split=split)
    assert report.samples == {"train": 241, "test": 122} and report.rows["day"] == 3


@pytest.mark.parametrize("form", ["Parquet", "Parquet, a folder per day", "TSV with a header"])
def test_objects_of_a_store_are_the_same(tmp_path: Path, s3: str, form: str) -> None:
    uri = s3.replace("PATH", f"{tmp_path.name}/set")
    folder = TABLES[form](tmp_path / "set", days())
    store, root = resolve_uri(uri)
    for file in folder.rglob("*.*"):
        with store.open_output_stream(f"{root}/{file.relative_to(folder).as_posix()}") as out:
            out.write(file.read_bytes())
    assert_same(read_whole(ParquetSource(uri, SCHEMA, ids="raw")), read_whole(opened_source(form, folder)))
    prepare(uri, tmp_path / "remote", schema=SCHEMA, **PREPARE)
    prepare(folder, tmp_path / "local", schema=SCHEMA, **PREPARE)
    assert digests(tmp_path / "remote") == digests(tmp_path / "local")
