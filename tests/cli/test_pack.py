"""Protects that `hotbed pack` makes rows hot within a budget, and splits samples by them."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hotbed.cli.main import main
from hotbed.config import Recipe
from hotbed.data import SplitBinarySource
from hotbed.embed import plan_tables
from hotbed.errors import DataError
from hotbed.plan.cost import tile_bytes
from hotbed.train.parameter_groups import moments_by_table
from hotbed.train.runs.build import new_model, open_source
from hotbed.train.runs.plan_search import plan_recipe, read_hot_rows
from tests.cli.cases import Output, inspected, refused

ROW = 4 * (8 + 1)  # bytes of a row and its moment


def packed(recipe: Path, out: Path, *options: str) -> dict[str, Any]:
    file = out.parent / "packed.json"
    assert main(["pack", str(recipe), str(out), "--json", str(file), *options]) == 0
    return json.loads(file.read_text())


def test_rows_fit_the_budget_and_more_of_it_makes_more_inputs_hot(recipe: Path, tmp_path: Path, capsys: Output) -> None:
    before: dict[str, Any] = {"hot_samples": 0, "tables": []}
    for budget in (0, 5_000, 15_000, 30_000, 10**9):
        found = packed(recipe, tmp_path / str(budget), "--budget", str(budget), "--sample", "1")
        rows = sum(t["hot_rows"] for t in found["tables"])
        assert found["hot_bytes"] == rows * ROW <= budget
        assert found["hot_samples"] >= before["hot_samples"]
        assert all(a["hot_rows"] <= b["hot_rows"] for a, b in zip(before["tables"], found["tables"], strict=False))
        source = SplitBinarySource(tmp_path / str(budget))
        assert source.samples("train_hot") == found["hot_samples"]
        assert found["hot_samples"] + source.samples("train_cold") == found["samples"] == source.samples("train")
        before = found
    assert before["hot_samples"] == before["samples"]
    assert all(t["hot_rows"] == t["rows"] for t in before["tables"])
    output = capsys.readouterr()
    assert "counting accesses" in output.err
    assert "packing hot and cold samples" in output.err
    assert "100.0% of 2,400 samples are hot" in output.out


def test_rows_of_a_wide_part_take_of_the_budget_too(recipe: Path, tmp_path: Path) -> None:
    values = yaml.safe_load(recipe.read_text())
    values["model"] = {"class_path": "hotbed.nn.WideDeep", "init_args": {"top": [16, 1]}}
    ftrl = {"class_path": "hotbed.optim.FTRL", "init_args": {"lr": 0.1}}
    values["sparse_optimizer_groups"] = {"wide": {"tables": "wide", "optimizer": ftrl}}
    recipe.write_text(yaml.safe_dump(values))
    found = packed(recipe, tmp_path / "out", "--budget", "15000", "--sample", "1")
    rows = sum(t["hot_rows"] for t in found["tables"])
    assert 14_900 < found["hot_bytes"] == rows * (ROW + 3 * 4) <= 15_000  # a wide row is a number with two moments
    values |= {"hot": {"rows": str(tmp_path / "out" / "hot_rows.json")}, "memory": {"tier": "disk"}}
    wide_deep = Recipe.from_dict(values)
    model = new_model(wide_deep, open_source(wide_deep.data))
    plan, moments = plan_recipe(model, wide_deep, 1), moments_by_table(model, wide_deep)
    tables = {t.name: t for t in plan_tables(model)}
    held = [t for t in plan.tiles if t.tier == "device"]
    assert sum(tile_bytes(tables[t.table], t, moments[t.table]) for t in held) == found["hot_bytes"]
    assert {t.table.split(".")[0] for t in held} == {"embeddings", "wide"}


def test_a_sample_says_how_many_it_counted(recipe: Path, tmp_path: Path) -> None:
    found = packed(recipe, tmp_path / "out", "--budget", "20000")
    assert found["sample"] == 0.05
    assert 60 < found["counted_samples"] < 200
    assert 0 < found["hot_accesses"] < 1
    assert inspected(tmp_path / "out", tmp_path)["samples"]["train_hot"] == found["hot_samples"]


def test_small_tables_come_first(recipe: Path, tmp_path: Path) -> None:
    found = packed(recipe, tmp_path / "out", "--budget", "9000", "--sample", "1", "--whole_bytes", "300")
    small = [t for t in found["tables"] if t["rows"] * ROW <= 300]
    assert small
    assert all(t["hot_rows"] == t["rows"] for t in small)


def test_another_dataset_than_the_recipes(recipe: Path, prepared: Path, tmp_path: Path, capsys: Output) -> None:
    values = yaml.safe_load(recipe.read_text())
    values["data"]["path"] = "absent"
    recipe.write_text(yaml.safe_dump(values))
    argv = ["pack", str(recipe), str(tmp_path / "out"), "--budget", "9000"]
    assert "absent/feature_spec.yaml does not exist" in refused(argv, capsys)
    assert packed(recipe, tmp_path / "out", "--budget", "9000", "--data", str(prepared))["samples"] == 2400


def test_mistakes_get_one_clear_message(recipe: Path, tmp_path: Path, capsys: Output) -> None:
    out = str(tmp_path / "out")
    assert "a budget of 5 bytes" in refused(["pack", str(recipe), out, "--budget", "5"], capsys)
    assert "sample: got 0.0" in refused(["pack", str(recipe), out, "--budget", "9000", "--sample", "0"], capsys)
    assert "absent.yaml does not exist" in refused(["pack", "absent.yaml", out, "--budget", "9"], capsys)
    (tmp_path / "bad.yaml").write_bytes(b"\xff")
    assert "is not YAML" in refused(["pack", str(tmp_path / "bad.yaml"), out, "--budget", "9"], capsys)
    values = yaml.safe_load(recipe.read_text())
    values["data"]["path"] = "criteo_1tb_t15"
    values["data"]["source"] = {"class_path": "hotbed.data.ZipfSource", "init_args": {"train_samples": 10}}
    recipe.write_text(yaml.safe_dump(values))
    assert "data.source: got hotbed.data.ZipfSource" in refused(["pack", str(recipe), out, "--budget", "9000"], capsys)
    assert not Path(out).exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"hot_rows.json is not JSON: "),
        ("{}", r"hotbed pack \(KeyError: 'tables'\)"),
        (
            '{"tables": [{"table": "a", "rows": 5, "hot_rows": 6}]}',
            r"table 'a': got hot_rows 6 and rows 5, expected .*\)",
        ),
        ('{"tables": [{"table": "a", "rows": 7, "hot_rows": 6}]}', "table 'a': got 7 rows, expected 5"),
        ('{"tables": []}', "has no table 'a' of the model"),
    ],
)
def test_a_file_of_hot_rows_is_checked(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "hot_rows.json"
    with pytest.raises(DataError, match=r"hot_rows\.json does not exist"):
        read_hot_rows(file, {"a": 5})
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        read_hot_rows(file, {"a": 5})
