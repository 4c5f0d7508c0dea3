"""Protects that bad files of every format are named, with what is wrong where, by every command, and leave nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pytest

from hotbed.cli.main import main
from tests.cli.cases import Output, refused
from tests.data.format_cases import Day, days, write_hive, write_npy, write_split_binary, write_text


def write_compressed(folder: Path, samples: list[Day], suffix: str, codec: str) -> Path:
    """TSV with a header, in streams."""
    for file in sorted(write_text(folder, samples, ".tsv").iterdir()):
        with pa.CompressedOutputStream(f"{file}{suffix}", codec) as out:
            out.write(file.read_bytes())
        file.unlink()
    return folder


FORMATS: dict[str, Callable[[Path, list[Day]], Path]] = {
    "hive": write_hive,
    "tsv": lambda folder, samples: write_text(folder, samples, ".tsv"),
    "gz": lambda folder, samples: write_compressed(folder, samples, ".gz", "gzip"),
    "zst": lambda folder, samples: write_compressed(folder, samples, ".zst", "zstd"),
    "split-binary": write_split_binary,
    "NumPy": write_npy,
}


@pytest.fixture(scope="module", name="recipes")
def _recipes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What is drafted of good files."""
    folder = tmp_path_factory.mktemp("good")
    for form, write in FORMATS.items():
        write(folder / form, days())
        assert main(["init", str(folder / form), "--out", str(folder / f"{form}.yaml")]) == 0
    return {form: folder / f"{form}.yaml" for form in FORMATS}


class Bad(NamedTuple):
    """What is done to a file, and what is said of it."""

    form: str
    file: str
    change: Callable[[Path], Any]
    message: str


PART = "day=1/part-00000-c000.snappy.parquet"


def cut(count: int) -> Callable[[Path], Any]:
    return lambda file: file.write_bytes(file.read_bytes()[:-count])


def line(number: int, make: Callable[[list[str]], list[str]]) -> Callable[[Path], Any]:
    """Other fields in a line of text."""

    def change(file: Path) -> None:
        lines = file.read_text().splitlines()
        lines[number] = "\t".join(make(lines[number].split("\t")))
        file.write_text("\n".join(lines) + "\n")

    return change


def byte(at: int, value: int) -> Callable[[Path], Any]:
    def change(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[at] = value
        file.write_bytes(content)

    return change


def first_nan(file: Path) -> None:
    labels = np.load(file).astype(np.float32)
    labels[70] = np.nan
    np.save(file, labels)


CASES = {
    "hive, cut short": Bad("hive", PART, cut(9), f"{PART} is not a Parquet file, or is truncated"),
    "tsv, cut short": Bad("tsv", "1.tsv", cut(9), "1.tsv cannot be parsed: CSV parse error: "),
    "tsv, a text for a label": Bad("tsv", "1.tsv", line(70, lambda f: ["x", *f[1:]]), "label"),
    "tsv, no label": Bad("tsv", "1.tsv", line(70, lambda f: ["", *f[1:]]), "column 'label': label null at row "),
    "tsv, zeros": Bad("tsv", "1.tsv", lambda f: f.write_bytes(bytes(99)), "1.tsv has bytes with value 0"),
    "gz, cut short": Bad("gz", "1.tsv.gz", cut(30), "1.tsv.gz cannot be read: "),
    "zst, cut short": Bad("zst", "1.tsv.zst", cut(30), "1.tsv.zst cannot be read: "),
    "split-binary, cut short": Bad("split-binary", "train/cat_1.bin", cut(1), "cat_1.bin"),
    "split-binary, a label": Bad("split-binary", "train/label.bin", byte(70, 7), "label.bin"),
    "NumPy, cut short": Bad("NumPy", "day_1_sparse.npy", cut(4), "day_1_sparse.npy: got "),
    "NumPy, no label": Bad("NumPy", "day_0_labels.npy", first_nan, "day_0_labels.npy"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_command_names_it(
    tmp_path: Path, recipes: dict[str, Path], capsys: Output, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    bad, folder = CASES[case], tmp_path / "set"
    FORMATS[bad.form](folder, days())
    bad.change(folder / bad.file)
    recipe = recipes[bad.form]
    step = ["--train.steps", "1", "--train.device", "cpu", "--out", str(tmp_path / "runs")]
    assert bad.message in refused(["train", str(recipe), "--data", str(folder), *step], capsys)
    schema = ["--schema", str(recipe)] if bad.form in ("hive", "tsv", "gz", "zst") else []
    argv = ["prepare", str(folder), str(tmp_path / "p"), "--threshold", "1", *schema]
    assert bad.message in refused(argv, capsys)
    shutil.rmtree(tmp_path / "tables", ignore_errors=True)
    assert {path.name for path in tmp_path.iterdir()} <= {"set", "runs"}
