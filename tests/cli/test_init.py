"""Protects that recipes drafted by `hotbed init` load, name what is there, test on test data, and scale numericals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.cli.arguments import Parser, add_recipe, parse_recipe
from hotbed.cli.init import draft_recipe
from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.files import read_yaml
from hotbed.train.runs.build import open_source
from hotbed.train.runs.report import recipe_yaml
from tests.cli.cases import Output, refused, train

NAMES = [
    *("10", "1e3", "0x1F", "-1", ".5", ".nan", "null", "Null", "~", "None", "yes", "on", "true", "NaN", "2024-01-01"),
    *("name", "y", "$HOME", "${x}", "%(x)s", "a,b", "a/b", "a.b", "#1", "-", "?", "*x", "&x", "!t", "%p", "@at", "`q`"),
    *("..", "{a}", "{0}", "[a]", "<<", "=", "'q'", '"d"', "a\\b", "a: b", "day #1", "- a", "a  b", " lead", "trail "),
    *("tab\there", "x\ny", "\r", "\x85", "\u2028 x", "é ü", "日本", "😀", "\x00", "\x7f", "\ufeffx", "x" * 300),
]


def loaded(file: Path) -> Recipe:
    """What ``hotbed train FILE`` makes of a recipe, which is what the library makes of it, too."""
    recipe = parse_recipe(Parser(add_recipe).parse_args([str(file)]))
    assert recipe == Recipe.from_dict(read_yaml(file))
    return recipe


def check_columns(folder: Path, names: Sequence[str], file: str = "log.parquet") -> Recipe:
    """A drafted recipe loads, and its columns are those of the data; so does the recipe that a run writes."""
    columns: dict[str, Any] = {"label": np.arange(40) % 2, "id": np.arange(40)}
    columns |= {name: np.arange(40) / 7 if i % 2 else np.arange(40) % 5 for i, name in enumerate(names)}
    pq.write_table(pa.table(columns), folder / file, row_group_size=4)
    (folder / "drafted.yaml").write_text(draft_recipe(folder / file), encoding="utf-8")
    recipe = loaded(folder / "drafted.yaml")
    assert recipe.data.path == str(folder / file)
    schema = open_source(recipe.data).schema
    assert sorted([c.name for c in schema.sparse] + [*schema.dense]) == sorted(["id", *names])
    (folder / "written.yaml").write_text(recipe_yaml(recipe), encoding="utf-8")
    assert loaded(folder / "written.yaml") == recipe
    return recipe


@pytest.mark.parametrize("first", [0, 1])
def test_odd_names_of_columns(tmp_path: Path, first: int) -> None:
    check_columns(tmp_path, NAMES[first:])


words = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(words, min_size=1, max_size=6, unique=True).filter(lambda names: not {"label", "id"} & set(names)))
def test_any_names_of_columns(tmp_path: Path, names: list[str]) -> None:
    taken = ("weight", "weights", "sample_weight", "click", "clicks", "clicked", "target", "y", "labels")
    check_columns(tmp_path, [f"{name}_" if name.lower() in taken else name for name in names])


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("10.parquet", "10"),
        ("null.parquet", "run-null"),
        ("Null.parquet", "run-Null"),
        ("~.parquet", "run-~"),
        ("yes.pq", "yes"),
        ("1e3.parq", "1e3"),
        ("day #1.parquet", "day #1"),
        ("a: b.parquet", "a_ b"),
        ("x\ny.parquet", "x_y"),
        ("back\\slash.parquet", "slash"),
        ("...parquet", "run"),
        (".parquet", "run"),
        (f"{'é' * 100}.parquet", "é" * 50),
    ],
)
def test_odd_names_of_files(tmp_path: Path, file: str, name: str) -> None:
    assert check_columns(tmp_path, [], file).name == name


def test_folders_give_their_own_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "day #2").mkdir()
    pq.write_table(pa.table({"label": [0, 1], "id": [1, 2]}), tmp_path / "day #2" / "log.parquet")
    monkeypatch.chdir(tmp_path / "day #2")
    for path in (".", f"{tmp_path / 'day #2'}/"):
        drafted = yaml.safe_load(draft_recipe(path))
        assert (drafted["name"], drafted["data"]["path"]) == ("day #2", path)


def test_a_uri_stays_one(tmp_path: Path) -> None:
    pq.write_table(pa.table({"label": [0, 1], "id": [1, 2]}), tmp_path / "log.parquet")
    uri = (tmp_path / "log.parquet").as_uri()
    drafted = yaml.safe_load(draft_recipe(uri))
    assert (drafted["name"], drafted["data"]["path"]) == ("log", uri)


def test_a_run_with_odd_names_trains_and_can_be_evaluated(tmp_path: Path, capsys: Output) -> None:
    rng = np.random.default_rng(0)
    columns = {"label": rng.integers(0, 2, 200)}
    columns |= {name: rng.integers(0, 5, 200) if i % 2 else rng.random(200) for i, name in enumerate(NAMES[:40])}
    pq.write_table(pa.table(columns), tmp_path / "day #1.parquet", row_group_size=20)
    out = tmp_path / "drafted.yaml"
    assert main(["init", str(tmp_path / "day #1.parquet"), "--out", str(out)]) == 0
    status, summary, run = train(out, "--train.device", "cpu", "--train.batch_size", "90")
    assert (status, run.parent.name) == (0, "day #1")
    assert main(["eval", "--checkpoint", str(run), "--json", str(tmp_path / "eval.json")]) == 0
    assert read_yaml(tmp_path / "eval.json")["test"] == summary["test"]


def test_ids_as_floats_train_and_are_scored_as_the_integers_and_decimals_that_they_were(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    account = rng.integers(2**40, 2**53, 50)[rng.integers(0, 50, 400)]
    floats = np.where(np.arange(400) == 7, np.nan, account)
    pq.write_table(pa.table({"click": account % 2, "account": floats}), tmp_path / "log.parquet")
    out = tmp_path / "drafted.yaml"
    assert main(["init", str(tmp_path / "log.parquet"), "--out", str(out)]) == 0
    status, _, run = train(out, "--train.device", "cpu", "--train.epochs", "1")
    assert status == 0
    scores: list[list[float]] = []
    kinds = {"floats": pa.float64(), "integers": pa.int64(), "decimals": pa.decimal128(20, 0)}
    for name, kind in kinds.items():
        new = pa.array(account, mask=np.arange(400) == 7).cast(kind)
        pq.write_table(pa.table({"account": new}), tmp_path / f"{name}.parquet")
        scored = tmp_path / f"{name}_scores.parquet"
        assert main(["predict", str(run), str(tmp_path / f"{name}.parquet"), "--out", str(scored)]) == 0
        scores.append(pq.read_table(scored)["score"].to_pylist())
    assert scores[0] == scores[1] == scores[2] and len(set(scores[0])) > 20


# -- splits --------------------------------------------------------------------------------------------------------


def write_splits(folder: Path, *names: str) -> None:
    for i, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"click": [0, 1] * (i + 1), "user": [1, 2] * (i + 1)}), folder / name)


def test_a_folder_with_splits_is_trained_validated_and_tested_on_its_own(tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_splits(data, "train/part.parquet", "valid/part.parquet", "test/part.parquet")
    (tmp_path / "r.yaml").write_text(draft_recipe(data))
    recipe = loaded(tmp_path / "r.yaml")
    assert (recipe.data.train_split, recipe.data.valid_split, recipe.data.test_split) == ("train", "valid", "test")
    source = open_source(recipe.data)
    assert {split: source.samples(split) for split in source.splits} == {"train": 2, "valid": 4, "test": 6}
    status, summary, _ = train(tmp_path / "r.yaml", "--train.device", "cpu")
    assert (status, summary["test"]["samples"]) == (0, 6)
    assert summary["samples"] % 2 == 0  # of one epoch or several


def test_other_data_is_split_by_its_own_names(tmp_path: Path) -> None:
    write_splits(tmp_path / "day1", "train.parquet", "test.parquet")
    write_splits(tmp_path / "day2", "test.parquet", "train.parquet")
    (tmp_path / "r.yaml").write_text(draft_recipe(tmp_path / "day1"))
    _, summary, _ = train(tmp_path / "r.yaml", "--train.device", "cpu", "--data.path", str(tmp_path / "day2"))
    assert (summary["samples"], summary["test"]["samples"]) == (4, 2)


@pytest.mark.parametrize("names", [["train.parquet", "valid.parquet"], ["train/a.parquet"], ["a.parquet"]])
def test_data_without_a_test_split(tmp_path: Path, names: list[str]) -> None:
    write_splits(tmp_path / "data", *names)
    drafted = draft_recipe(tmp_path / "data")
    assert "  test_split: null                # 2 rows are too few to cut off splits" in drafted
    assert ("  valid_split: valid\n" in drafted) == (len(names) > 1)
    (tmp_path / "r.yaml").write_text(drafted)
    assert loaded(tmp_path / "r.yaml").data.test_split is None


# -- numericals ----------------------------------------------------------------------------------------------------


def test_labels_of_one_class_make_no_recipe(tmp_path: Path, capsys: Output) -> None:
    pq.write_table(pa.table({"click": np.arange(400) % 2, "user": np.arange(400) % 9}), tmp_path / "log.parquet")
    out = tmp_path / "recipe.yaml"
    message = refused(["init", str(tmp_path / "log.parquet"), "--positive", "> 1", "--out", str(out)], capsys)
    assert "all labels 'click' (positive: '> 1') of training are 0" in message
    assert not out.exists()


def test_a_recipe_says_what_a_weight_is_and_how_there_is_a_validation_split(tmp_path: Path) -> None:
    user = np.random.default_rng(0).integers(0, 20_000, 30_000)
    table = pa.table({"click": user % 2, "user": user, "weight": user + 1.5})
    pq.write_table(table, tmp_path / "log.parquet")
    text = draft_recipe(tmp_path / "log.parquet")
    assert "weight: weight" in text and "# the weight of each sample" in text
    assert "--valid" in text
    assert "tuning" not in draft_recipe(tmp_path / "log.parquet", valid=True)


def test_what_is_no_table_is_refused(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "log.jsonl").write_text('{"click": 1}')
    message = refused(["init", str(tmp_path / "log.jsonl")], capsys)
    assert "log.jsonl is not a Parquet file" in message and ".csv or .tsv" in message
    for device in ("/dev/null", "/dev/zero"):
        message = refused(["init", device], capsys)
        assert f"{device} is neither a file nor a folder" in message
