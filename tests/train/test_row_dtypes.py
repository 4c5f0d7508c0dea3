"""The recipe's row dtypes, from its options to tables, memory and checkpoints."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hotbed.checkpoint import MANIFEST, find_checkpoint
from hotbed.cli.dry_run import memory_plan
from hotbed.cli.main import main
from hotbed.config import DataRecipe, Recipe
from hotbed.errors import RecipeError
from hotbed.specs import Table
from hotbed.train.runs.build import build, build_model, open_source, tables_of
from hotbed.train.runs.resume import refuse_another_recipe
from tests.cli.cases import Output, refused, train


@pytest.fixture(name="data")
def data_fixture(prepared: Path) -> DataRecipe:
    return DataRecipe(path=str(prepared), dim=8)


def stored(data: DataRecipe, **changes: Any) -> dict[str, Table]:
    return {table.name: table for table in tables_of(open_source(data), replace(data, **changes))}


def test_rows_are_fp32_unless_the_recipe_says_otherwise(data: DataRecipe) -> None:
    assert all((t.dtype, t.fp32_rows) == ("fp32", 0) for t in stored(data).values())


def test_one_dtype_for_all_tables(data: DataRecipe) -> None:
    tables = stored(data, dtype="bf16", fp32_rows=10)
    assert min(t.rows for t in tables.values()) < 10 < max(t.rows for t in tables.values())
    assert all((t.dtype, t.fp32_rows) == ("bf16", min(t.rows, 10)) for t in tables.values())


def test_dtypes_by_table(data: DataRecipe) -> None:
    tables = stored(data, dtype={"C1": "int8", "C3": "fp8"}, fp32_rows={"C1": 10**9, "C4": 2})
    assert {name: t.dtype for name, t in tables.items() if t.dtype != "fp32"} == {"C1": "int8", "C3": "fp8"}
    assert {name: t.fp32_rows for name, t in tables.items() if t.fp32_rows} == {"C1": tables["C1"].rows, "C4": 2}


@pytest.mark.parametrize("changes", [{"dtype": {"C266": "int8"}}, {"fp32_rows": {"C266": 5}}])
def test_a_table_that_there_is_not(data: DataRecipe, changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(RecipeError, match=rf"table in data\.{key}: got 'C266', .*; did you mean 'C26'"):
        stored(data, **changes)


def test_what_a_dry_run_counts_is_what_is_allocated(recipe: Path) -> None:
    made = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    dtypes = {"C1": "int8", "C3": "fp8", "C4": "fp16", "C5": "bf16"}
    made = replace(made, data=replace(made.data, dtype=dtypes, fp32_rows=3))
    plan = memory_plan(made)
    trainer = build(made)
    assert plan["table_bytes"] == trainer.model.get_submodule("embeddings").nbytes
    (first,) = (entry for entry in plan["tables"] if entry["name"] == "C1")
    assert first["weight_bytes"] == 3 * 8 * 4 + (first["rows"] - 3) * (8 + 1)


def test_the_model_has_the_tables(recipe: Path) -> None:
    made = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    made = replace(made, data=replace(made.data, dtype="fp16", fp32_rows=2))
    model = build_model(made, open_source(made.data), torch.device("cpu"))
    state = model.state_dict()
    assert state["embeddings.C1.weight"].dtype == torch.float16
    assert state["embeddings.C1.fp32_weight"].shape == (2, 8)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8", "int8"])
def test_narrow_rows_are_trained_and_come_back_from_a_checkpoint(dtype: str, recipe: Path) -> None:
    status, summary, run = train(recipe, "--data.dtype", dtype, "--data.fp32_rows", "4")
    assert status == 0
    file = recipe.parent / "eval.json"
    assert main(["eval", "--checkpoint", str(run), "--json", str(file)]) == 0
    assert json.loads(file.read_text())["test"] == summary["test"]


def test_dtypes_on_the_command_line(recipe: Path, capsys: Output) -> None:
    status, _, run = train(recipe, "--data.dtype", "{C1: int8, C2: bf16}", "--data.fp32_rows", "{C1: 5}")
    assert status == 0
    data = yaml.safe_load((run / "recipe.yaml").read_text())["data"]
    assert (data["dtype"], data["fp32_rows"]) == ({"C1": "int8", "C2": "bf16"}, {"C1": 5})
    assert "data.dtype" in refused(["train", str(recipe), "--data.dtype", "int4"], capsys)
    assert "did you mean 'C26'" in refused(["train", str(recipe), "--data.dtype", "{C266: int8}"], capsys)


def test_a_checkpoint_from_before_there_were_row_dtypes_can_be_resumed(recipe: Path) -> None:
    _, _, run = train(recipe, "--train.steps", "2")
    checkpoint = Path(find_checkpoint(run).path)
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    del manifest["recipe"]["data"]["dtype"], manifest["recipe"]["data"]["fp32_rows"], manifest["sha256"]
    manifest["sha256"] = hashlib.sha256(json.dumps(manifest, indent=1).encode()).hexdigest()
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    made = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    refuse_another_recipe(checkpoint, made)
    with pytest.raises(RecipeError, match=r"data\.dtype was 'fp32' and is now 'int8'"):
        refuse_another_recipe(checkpoint, replace(made, data=replace(made.data, dtype="int8")))
