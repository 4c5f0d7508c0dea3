"""Protects that folders which say themselves what they have give recipes that train, without hashing their ids anew."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.data import SplitBinarySource
from hotbed.errors import DataError
from hotbed.train.runs.build import open_source
from tests.cli.cases import Output, refused, train
from tests.cli.stored_cases import FOLDERS, prepared
from tests.data.format_cases import days, write_npy

STEP = ("--train.device", "cpu", "--train.steps", "1", "--train.epochs", "1", "--train.checkpoint", "none")


def drafted(folder: Path, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    out = tmp_path / "drafted.yaml"
    assert main(["init", str(folder), "--out", str(out)]) == 0
    return out, yaml.safe_load(out.read_text(encoding="utf-8"))


@pytest.mark.parametrize("form", FOLDERS)
def test_a_step_is_trained(tmp_path: Path, form: str) -> None:
    out, recipe = drafted(FOLDERS[form](tmp_path / "set"), tmp_path)
    status, summary, _ = train(out, *STEP)
    assert status == 0
    assert (summary["test"] is not None) == (form != "split-binary")
    assert recipe["data"]["source"]["class_path"].startswith("hotbed.data.")
    assert recipe["data"]["test_split"] == ("test" if summary["test"] else None)


def test_ids_of_prepared_data_are_taken_as_they_are(tmp_path: Path) -> None:
    _, recipe = drafted(prepared(tmp_path / "set"), tmp_path)
    said = yaml.safe_load((tmp_path / "set/source.yaml").read_text())
    assert recipe["data"]["source"] == said
    assert said["init_args"]["ids"] == "raw"


def test_rows_of_arrays_are_the_largest_ids(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days(3, 400))
    _, recipe = drafted(folder, tmp_path)
    largest = np.concatenate([day.ids for day in days(3, 400)]).max(0)
    source = recipe["data"]["source"]
    assert source == {"class_path": "hotbed.data.NpySource", "init_args": {"rows": (largest + 1).tolist()}}
    assert recipe["data"]["valid_split"] == "valid"
    text = (tmp_path / "drafted.yaml").read_text()
    assert "# `rows` is 1 + the largest id in 1,203 of 1,203 samples." in text


def test_arrays_of_hashes_are_taken_modulo_rows(tmp_path: Path) -> None:
    folder = write_npy(tmp_path / "set", days(2, 400))
    for i, day in enumerate(days(2, 400)):
        ids = day.ids.astype(np.int64)
        ids[:, 0] = ids[:, 0] * 99_999_989 % (1 << 32)  # as numbers of eight hexadecimal digits
        np.save(folder / f"day_{i}_sparse.npy", ids)
    out, recipe = drafted(folder, tmp_path)
    arguments = recipe["data"]["source"]["init_args"]
    assert arguments["modulo"] and arguments["rows"][0] == 1024 and arguments["rows"][1] <= 40
    assert "# `modulo` replaces larger ids" in out.read_text()
    source = open_source(Recipe.from_dict(yaml.safe_load(out.read_text())).data)
    assert int(source.read("train", 0).sparse["cat_0"].values.max()) < 1024
    assert train(out, *STEP)[0] == 0


def test_another_folder_of_the_same_kind(tmp_path: Path) -> None:
    out, _ = drafted(write_npy(tmp_path / "set", days(3, 400)), tmp_path)
    other = write_npy(tmp_path / "other", days(2, 300))
    status, summary, _ = train(out, *STEP, "--data", str(other))
    assert status == 0 and summary["test"]["samples"] == 150


def test_new_samples_are_predicted_whole(tmp_path: Path) -> None:
    out, _ = drafted(write_npy(tmp_path / "set", days(3, 400)), tmp_path)
    status, _, run = train(out, *STEP[:-1], "last")
    assert status == 0
    new = write_npy(tmp_path / "new", days(1, 30))
    scores = tmp_path / "scores.parquet"
    assert main(["predict", str(run), str(new), "--out", str(scores), "--device", "cpu"]) == 0
    assert pq.read_metadata(scores).num_rows == 30


def test_what_is_refused(tmp_path: Path, capsys: Output) -> None:
    folder = prepared(tmp_path / "set")
    message = refused(["init", str(folder), "--label", "label"], capsys)
    assert "is a dataset with its own schema, so --label has no effect" in message
    message = refused(["init", str(folder / "train")], capsys)
    assert "0.parquet: got `hash`, expected `raw`" in message
    source = (folder / "source.yaml").read_text()
    for text, expected in (
        ("a: [", "source.yaml: "),
        ("class_path: os.system", "source.yaml: expected class_path: hotbed.data.ParquetSource"),
        (source + "  rows: 3\n", "source.yaml, init_args: got an unexpected keyword argument 'rows'"),
    ):
        (folder / "source.yaml").write_text(text)
        assert expected in refused(["init", str(folder)], capsys)
    (folder / "source.yaml").write_text(source)
    arrays = write_npy(tmp_path / "arrays", days())
    np.save(arrays / "day_0_sparse.npy", days()[0].ids - 1)
    assert "column 'cat_0': got id -1," in refused(["init", str(arrays)], capsys)
    shutil.rmtree(arrays)
    arrays.mkdir()
    with pytest.raises(DataError, match="`hotbed init`"):
        SplitBinarySource(arrays)
