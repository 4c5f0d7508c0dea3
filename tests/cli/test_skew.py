"""Protects what `hotbed inspect --skew` counts, prints and writes."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.checkpoint import checkpoints_in
from hotbed.cli.main import main
from hotbed.cli.pages.skew_report import SKEW_DEFAULTS
from hotbed.data import SplitBinarySource, read_hot_order
from tests.cli.cases import Output, refused, train


def skew(path: Path, tmp_path: Path, *options: str) -> dict[str, Any]:
    file = tmp_path / "found.json"
    assert main(["inspect", "--skew", str(path), "--json", str(file), *options]) == 0
    return json.loads(file.read_text())


def test_figures_of_a_prepared_dataset(prepared: Path, tmp_path: Path, capsys: Output) -> None:
    found = skew(prepared, tmp_path, "--split", "test", "--batch_size", "10")
    batch = SplitBinarySource(prepared).read("test", 0)
    assert found["samples"] == len(batch) == 300
    assert [table["table"] for table in found["tables"]] == [f"C{i}" for i in range(1, 27)]
    for table in found["tables"]:
        ids = batch.sparse[table["table"]].values.numpy()
        assert table["accesses"] == 300
        assert table["touched"] == len(np.unique(ids))
        assert table["lookups"] == sum(len(np.unique(ids[i : i + 10])) for i in range(0, 300, 10))
        assert table["accesses_of_top_rows"][-1] == pytest.approx(1)
        # A cache as large as the table misses the first lookup of each row only.
        assert table["lru"][-1] == pytest.approx(1 - table["touched"] / table["lookups"])
    total = sum(table["lookups"] for table in found["tables"])
    assert found["all"]["lookups"] == total
    assert found["all"]["lru"][-1] == pytest.approx(1 - found["all"]["touched"] / total)
    output = capsys.readouterr()
    assert "counting accesses" in output.err
    assert "split test: 300 samples, 7,800 accesses" in output.out
    assert "all tables, batches of 10 samples" in output.out
    assert "C26" in output.out


def test_a_directory_of_everything(prepared: Path, tmp_path: Path) -> None:
    out = tmp_path / "skew"
    found = skew(prepared, tmp_path, "--out", str(out), "--picture", "false")
    assert json.loads((out / "skew.json").read_text()) == found
    assert sorted(f.name for f in out.iterdir()) == ["hot_order", "skew.json"]
    source = SplitBinarySource(prepared)
    assert len(list((out / "hot_order").iterdir())) == 26
    for name, rows in source.schema.rows.items():
        counts = np.bincount(source.read("train", 0).sparse[name].values.numpy(), minlength=rows)
        assert read_hot_order(out / "hot_order", name, rows).tolist() == np.argsort(-counts, kind="stable").tolist()


def test_a_directory_is_replaced_only_if_asked(prepared: Path, tmp_path: Path, capsys: Output) -> None:
    argv = ["inspect", "--skew", str(prepared), "--out", str(tmp_path / "skew"), "--picture", "false"]
    assert main(argv) == 0
    assert "exists already" in refused(argv, capsys)
    assert main([*argv, "--overwrite", "true"]) == 0


def test_the_picture(prepared: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    skew(prepared, tmp_path, "--out", str(tmp_path / "skew"))
    assert (tmp_path / "skew" / "skew.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_without_matplotlib_says_how_to_get_it(
    prepared: Path, tmp_path: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused(["inspect", "--skew", str(prepared), "--out", str(tmp_path / "skew")], capsys)
    assert "pip install 'hotbed[plot]', or add --picture false" in message
    assert list(tmp_path.iterdir()) == []


def test_parquet_has_a_drafted_schema(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {"label": rng.integers(0, 2, 500), "item": rng.integers(0, 30, 500), "words": [["a", "b"], []] * 250}
    pq.write_table(pa.table(columns), tmp_path / "clicks.parquet")
    found = skew(tmp_path / "clicks.parquet", tmp_path)
    assert {t["table"]: t["accesses"] for t in found["tables"]} == {"item": 500, "words": 500}


def test_recipes_and_runs_name_their_source(recipe: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    tables = tmp_path / "tables.yaml"
    tables.write_text("rows: [100, 5, 2000]")
    values["data"]["path"] = str(tables)
    values["data"]["source"] = {"class_path": "hotbed.data.ZipfSource", "init_args": {"train_samples": 2000}}
    values["data"]["test_split"] = None
    recipe.write_text(yaml.safe_dump(values))
    found = skew(recipe, tmp_path, "--sampled_rows", "500")
    assert [t["rows"] for t in found["tables"]] == [100, 5, 2000]
    assert [t["sample_rate"] for t in found["tables"]] == [1, 1, 0.25]
    status, _, run = train(recipe, "--train.steps", "2")
    assert status == 0
    again = skew(run, tmp_path)
    assert [t["accesses_of_top_rows"] for t in again["tables"]] == [t["accesses_of_top_rows"] for t in found["tables"]]


def test_a_checkpoint_holds_no_samples(recipe: Path, capsys: Output) -> None:
    status, _, run = train(recipe, "--train.steps", "2")
    assert status == 0
    (checkpoint,) = checkpoints_in(run / "checkpoints")
    assert "is a checkpoint, which holds no samples" in refused(["inspect", "--skew", str(checkpoint)], capsys)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["absent"], "absent does not exist"),
        (["."], ". is neither a prepared dataset (feature_spec.yaml, source.yaml), arrays (day_0_sparse.npy)"),
        (["bad.yaml"], "bad.yaml is not YAML"),
        (
            ["PREPARED", "--split", "tets"],
            "split: got 'tets'",
        ),
        (["PREPARED", "--batch_size", "0"], "batch_size: got 0"),
        (["PREPARED", "--sampled_rows", "0"], "sampled_rows: got 0"),
        (["PREPARED", "--smpled_rows", "3"], "unknown argument --smpled_rows; did you mean '--sampled_rows'?"),
    ],
)
def test_mistakes_get_one_clear_message(
    argv: list[str], message: str, prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.yaml").write_bytes(b"\xff")
    assert message in refused(["inspect", "--skew", *(str(prepared) if a == "PREPARED" else a for a in argv)], capsys)


VALUES = {
    "split": "test",
    "batch_size": "5",
    "sampled_rows": "5",
    "out": "somewhere",
    "picture": "false",
    "overwrite": "true",
}


def test_options_of_skew_go_with_it(prepared: Path, capsys: Output) -> None:
    assert {*VALUES, "trust_recipe"} == SKEW_DEFAULTS.keys()
    for name, value in [*VALUES.items(), ("trust_recipe", None)]:
        given = [f"--{name}"] if value is None else [f"--{name}", value]
        message = refused(["inspect", str(prepared), *given], capsys)
        assert f"--{name} works only with --skew" in message
