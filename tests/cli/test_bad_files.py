"""Protects that bad files are named, with what is wrong where, by every command, and that nothing is left behind."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.cli.main import main
from tests.cli.cases import Output, refused, write_yaml
from tests.data.format_cases import Day, days, write_hive, write_npy, write_split_binary, write_text

N = 400
COLUMNS: dict[str, Any] = {
    "label": np.arange(N) % 2,
    "user": [f"u{i * 7 % 31}" for i in range(N)],
    "price": np.arange(N) / 7,
    "tags": [[i % 5, i % 3] for i in range(N)],
}


def write(folder: Path, *files: dict[str, Any]) -> Path:
    """Files ``0.parquet`` and so on, of row groups of 100 rows, with these columns changed."""
    folder.mkdir(exist_ok=True)
    for i, changed in enumerate(files):
        pq.write_table(pa.table({**COLUMNS, **changed}), folder / f"{i}.parquet", row_group_size=100)
    return folder


def damage(file: Path, column: str, row_group: int) -> None:
    """Overwrite what a row group has of a column."""
    metadata = pq.read_metadata(file)
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    stored = metadata.row_group(row_group).column(names.index(column))
    start = stored.dictionary_page_offset or stored.data_page_offset
    content = bytearray(file.read_bytes())
    content[start : start + stored.total_compressed_size] = b"\xff" * stored.total_compressed_size
    file.write_bytes(content)


@pytest.fixture(name="recipe", scope="module")
def _recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe that was drafted when the files were good."""
    folder = tmp_path_factory.mktemp("good")
    out = folder / "recipe.yaml"
    assert main(["init", str(write(folder / "good", {}, {})), "--drop", "price", "--out", str(out)]) == 0
    values = yaml.safe_load(out.read_text())
    values["data"]["source"]["init_args"]["schema"]["dense"] = ["price"]
    return write_yaml(out, values)


class Bad(NamedTuple):
    """What is wrong with files, and what is said of it; init says another text, or drafts without the column."""

    make: Callable[[Path], Any]
    message: str
    of_init: str | None


def values(**changed: Any) -> Callable[[Path], Any]:
    return lambda folder: write(folder, {}, changed)


def then(change: Callable[[Path], Any]) -> Callable[[Path], Any]:
    def make(folder: Path) -> None:
        change(write(folder, {}, {}) / "1.parquet")

    return make


NULLS = [None if i == 250 else i % 2 for i in range(N)]
HIGH = np.where(np.arange(N) == 250, 3, np.arange(N) % 2)
DAMAGED = "1.parquet, row group 2, column '{}': the file is damaged or truncated"
CASES = {
    "cut short": Bad(then(lambda f: f.write_bytes(f.read_bytes()[:-9])), "1.parquet is not a Parquet file", ""),
    "empty": Bad(then(lambda f: f.write_bytes(b"")), "1.parquet is not a Parquet file, or is truncated", ""),
    "a damaged column of text": Bad(then(lambda f: damage(f, "user", 2)), DAMAGED.format("user"), ""),
    "a damaged column of lists": Bad(then(lambda f: damage(f, "tags.list.element", 2)), DAMAGED.format("tags"), ""),
    "a missing column": Bad(
        lambda folder: pq.write_table(pa.table(COLUMNS).drop(["user"]), write(folder, {}, {}) / "1.parquet"),
        "1.parquet: column 'user' is missing, expected one of label, price, tags",
        None,
    ),
    "text in one file, integers in another": Bad(values(user=np.arange(N)), "'user'", None),
    "a number in one file, text in another": Bad(
        values(price=["cheap"] * N), "1.parquet: column 'price': got string, expected numbers", None
    ),
    "a list in one file, a number in another": Bad(values(tags=np.arange(N)), "1.parquet: sparse column 'tags'", None),
    "a struct": Bad(
        values(user=[{"id": i, "zip": 1} for i in range(N)]),
        "1.parquet: sparse column 'user': got struct<id: int64, zip: int64>, expected",
        None,
    ),
    "labels that are missing": Bad(
        values(label=NULLS), "1.parquet, row group 2, column 'label': label null at row 50", "column 'label'"
    ),
    "labels out of range": Bad(values(label=HIGH), "1.parquet, row group 2, column 'label': label 3", None),
    "a label of text": Bad(
        values(label=["no", "yes"] * (N // 2)),
        "1.parquet: label column 'label': got string",
        "string in 1.parquet, but int64 in another file",
    ),
    "half ids": Bad(values(user=np.arange(N) + 0.5), "'user'", None),
}


@pytest.mark.parametrize("case", CASES)
def test_every_command_names_it(tmp_path: Path, recipe: Path, capsys: Output, case: str) -> None:
    bad = CASES[case]
    folder = tmp_path / "bad"
    bad.make(folder)
    before = sorted(path.name for path in tmp_path.iterdir())
    step = ["--train.steps", "1", "--train.device", "cpu", "--out", str(tmp_path / "runs")]
    message = refused(["train", str(recipe), "--data", str(folder), *step], capsys)
    assert bad.message in message
    message = refused(
        ["prepare", str(folder), str(tmp_path / "p"), "--schema", str(recipe), "--threshold", "1"], capsys
    )
    assert bad.message in message or (bad.message.startswith("1.parquet: ") and "1.parquet, column" in message)
    drafted = tmp_path / "drafted.yaml"
    if bad.of_init is None:
        assert main(["init", str(folder), "--label", "label", "--out", str(drafted)]) == 0
        assert "Unused columns" in drafted.read_text() or "positive: " in drafted.read_text()
        drafted.unlink()
    else:
        message = refused(["init", str(folder), "--label", "label", "--out", str(drafted)], capsys)
        assert (bad.of_init or bad.message) in message
    left = sorted(path.name for path in tmp_path.iterdir() if path.name != "runs")
    assert left == before


def test_fields_of_structs_are_named(tmp_path: Path, recipe: Path, capsys: Output) -> None:
    nested = write(tmp_path / "nested", {"user": [{"id": i} for i in range(N)]})
    renamed = tmp_path / "recipe.yaml"
    renamed.write_text(recipe.read_text().replace("name: user", "name: user.id"))
    message = refused(["train", str(renamed), "--data", str(nested), "--train.steps", "1"], capsys)
    assert "column 'user.id' is missing" in message
    assert "'id' of 'user'" in message


# -- files of every format -------------------------------------------------------------------------------------------


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


class BadFile(NamedTuple):
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


FORMAT_CASES = {
    "hive, cut short": BadFile("hive", PART, cut(9), f"{PART} is not a Parquet file, or is truncated"),
    "tsv, cut short": BadFile("tsv", "1.tsv", cut(9), "1.tsv cannot be parsed: CSV parse error: "),
    "tsv, a text for a label": BadFile("tsv", "1.tsv", line(70, lambda f: ["x", *f[1:]]), "label"),
    "tsv, no label": BadFile("tsv", "1.tsv", line(70, lambda f: ["", *f[1:]]), "column 'label': label null at row "),
    "tsv, zeros": BadFile("tsv", "1.tsv", lambda f: f.write_bytes(bytes(99)), "1.tsv has bytes with value 0"),
    "gz, cut short": BadFile("gz", "1.tsv.gz", cut(30), "1.tsv.gz cannot be read: "),
    "zst, cut short": BadFile("zst", "1.tsv.zst", cut(30), "1.tsv.zst cannot be read: "),
    "split-binary, cut short": BadFile("split-binary", "train/cat_1.bin", cut(1), "cat_1.bin"),
    "split-binary, a label": BadFile("split-binary", "train/label.bin", byte(70, 7), "label.bin"),
    "NumPy, cut short": BadFile("NumPy", "day_1_sparse.npy", cut(4), "day_1_sparse.npy: got "),
    "NumPy, no label": BadFile("NumPy", "day_0_labels.npy", first_nan, "day_0_labels.npy"),
}


@pytest.mark.parametrize("case", FORMAT_CASES)
def test_every_command_names_a_bad_file(
    tmp_path: Path, recipes: dict[str, Path], capsys: Output, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setenv("HOTBED_TABLES", str(tmp_path / "tables"))
    bad, folder = FORMAT_CASES[case], tmp_path / "set"
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
