"""Tests of building: losses of tasks, dtypes of rows, and models of recipes."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.batch import Batch
from hotbed.checkpoint import MANIFEST, find_checkpoint
from hotbed.cli.dry_run import memory_plan
from hotbed.cli.main import main
from hotbed.config import DataRecipe, Recipe, TaskRecipe
from hotbed.config.component import Component
from hotbed.data import Schema, SparseColumn
from hotbed.data.source import Source
from hotbed.embed import plan_tables
from hotbed.errors import BatchError, RecipeError
from hotbed.files import read_yaml
from hotbed.jagged import Jagged
from hotbed.nn.loss import summed_cross_entropy
from hotbed.specs import Table
from hotbed.train.metrics import Predictions
from hotbed.train.runs.build import TaskLosses, build, losses_of, new_model, open_source, tables_of
from hotbed.train.runs.resume import refuse_another_recipe
from tests.cli.cases import Output, refused, train
from tests.matrix import full

# -- losses and weights of tasks ---------------------------------------------------------------------------------------

CPU = torch.device("cpu")
HERE = __name__
LABELS = ("click", "buy")


class Focal(nn.Module):
    """Focal loss (Lin et al. 2017, equation 4), a loss as a user would write one."""

    def __init__(self, gamma: float = 2.0, *, reduction: str) -> None:
        super().__init__()
        assert reduction == "none"
        self.gamma = gamma

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        missed = torch.where(labels > 0.5, (-logits).sigmoid(), logits.sigmoid())
        return missed**self.gamma * F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


class Learnt(Focal):
    """Has a parameter."""

    def __init__(self, *, reduction: str) -> None:
        super().__init__(reduction=reduction)
        self.scale = nn.Parameter(torch.ones(()))


class Mean(Focal):
    """Gives one value for all samples."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().forward(logits, labels).mean()


class NoReduction(nn.Module):
    """Cannot be told to give a value per sample."""

    def __init__(self) -> None:
        super().__init__()


class NoModule:
    """Is no module."""


def task(loss: str, weight: float = 1.0, **init_args: Any) -> TaskRecipe:
    return TaskRecipe(loss=Component(class_path=loss, init_args=init_args), weight=weight)


def logits_and_labels(*shape: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(*shape, 2, generator=draw).mul_(3).requires_grad_()
    labels = torch.rand(shape[-1], 2, generator=draw).round().expand(*shape, 2)
    return logits, labels


@pytest.mark.parametrize("shape", [(9,), (3, 9)], ids=["one model", "an ensemble"])
@pytest.mark.parametrize("columns", [0, 1, 2], ids=["no weights", "weights of samples", "weights of labels"])
def test_losses_and_weights_of_tasks(shape: tuple[int, ...], columns: int) -> None:
    logits, labels = logits_and_labels(*shape)
    weights = torch.rand(9, columns, generator=torch.Generator().manual_seed(4)) if columns else None
    tasks = {"click": task("torch.nn.BCEWithLogitsLoss", 0.5, pos_weight=3.0), "buy": task(f"{HERE}.Focal", gamma=1.5)}
    total = losses_of(tasks, LABELS, CPU)(logits, labels, weights)
    click = F.binary_cross_entropy_with_logits(
        logits[..., 0], labels[..., 0], pos_weight=torch.tensor(3.0), reduction="none"
    )
    buy = Focal(1.5, reduction="none")(logits[..., 1], labels[..., 1])
    of_click, of_buy = (1, 1) if weights is None else (weights[:, 0], weights[:, -1])
    expected = 0.5 * (click * of_click).sum() + (buy * of_buy).sum()
    torch.testing.assert_close(total, expected)
    found, wanted = (torch.autograd.grad(of, logits, retain_graph=True)[0] for of in (total, expected))
    torch.testing.assert_close(found, wanted)


def test_without_tasks_it_is_the_loss_of_ever() -> None:
    """To the bit: also where a task says what is the default."""
    assert losses_of({}, LABELS, CPU) is summed_cross_entropy
    assert losses_of({"buy": TaskRecipe()}, LABELS, CPU) is summed_cross_entropy
    logits, labels = logits_and_labels(500)
    weights = torch.rand(500, 1)
    assert torch.equal(
        summed_cross_entropy(logits, labels, weights),
        F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum"),
    )
    same = TaskLosses([nn.BCEWithLogitsLoss(reduction="none")] * 2, [1.0, 1.0])(logits, labels, weights)
    torch.testing.assert_close(same, summed_cross_entropy(logits, labels, weights))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (
            {"bui": task("torch.nn.MSELoss")},
            r"label in tasks: got 'bui', expected one of click, buy.*; did you mean 'buy'\?",
        ),
        ({name: TaskRecipe(weight=0.0) for name in LABELS}, r"the weights of all tasks are 0"),
        ({"buy": task("torch.nn.NoLoss")}, r"tasks.buy.loss: module 'torch.nn' has no class 'NoLoss'"),
        (
            {"buy": task("torch.nn.MSELoss", redaction=1)},
            r"tasks.buy.loss: torch.nn.MSELoss: init_args: got 'redaction'",
        ),
        ({"buy": task("torch.nn.MSELoss", reduction="sum")}, r"tasks.buy.loss: .*hotbed passes 'reduction'"),
        ({"buy": task("torch.nn.BCELoss")}, r"failed on logits \[3\] and labels \[3\]: all elements .* \(not probabil"),
        (
            {"buy": task("torch.nn.CrossEntropyLoss")},
            r"torch.nn.CrossEntropyLoss .*returned \[\] for logits \[3\] and labels",
        ),
        (
            {"buy": task(f"{HERE}.Mean")},
            r"returned \[\] for logits \[3\] and labels \[3\], expected losses",
        ),
        ({"buy": task(f"{HERE}.Learnt")}, r"^tasks.buy.loss: tests.*Learnt has parameters"),
        (
            {"buy": task(f"{HERE}.NoReduction")},
            r"tasks.buy.loss: .*NoReduction does not accept the arguments that hotbed",
        ),
        ({"buy": task(f"{HERE}.NoModule")}, r"tasks.buy.loss: .*NoModule is not a torch.nn.Module"),
    ],
)
def test_tasks_that_cannot_be(tasks: dict[str, TaskRecipe], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        losses_of(tasks, LABELS, CPU)


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan"), "1", True, None])
def test_weights_of_tasks_that_are_none(weight: Any) -> None:
    with pytest.raises(RecipeError, match=f"weight: got {weight!r}, expected a "):
        TaskRecipe(weight=weight)


# -- weights of labels ---------------------------------------------------------------------------------------------


def batch_of(labels: Tensor, weights: Tensor | None = None) -> Batch:
    return Batch(
        sparse=Jagged.from_dict({"user": torch.zeros(len(labels), dtype=torch.int64)}), labels=labels, weights=weights
    )


def test_metrics_of_a_task_are_those_of_its_own_weights() -> None:
    logits, labels = logits_and_labels(200)
    logits = logits.detach()
    weights = torch.rand(200, 2, generator=torch.Generator().manual_seed(1))
    weights[:, 1] = labels[:, 0]  # of the clicked ones
    both = Predictions(LABELS)
    for part in range(0, 200, 50):
        at = slice(part, part + 50)
        both.add(logits[at], labels[at], weights=weights[at], groups=torch.arange(200)[at] % 7)
    found = both.metrics()
    for t, name in enumerate(LABELS):
        alone = Predictions()
        alone.add(logits[:, [t]], labels[:, [t]], weights=weights[:, t], groups=torch.arange(200) % 7)
        for key, value in alone.metrics().to_dict().items():
            assert found.tasks[name].to_dict()[key] == pytest.approx(value, abs=1e-12), key
    clicked = Predictions()
    chosen = labels[:, 0] == 1
    clicked.add(logits[chosen][:, [1]], labels[chosen][:, [1]])
    assert found.tasks["buy"].auc == pytest.approx(clicked.metrics().auc)
    assert found.tasks["buy"].logloss == pytest.approx(clicked.metrics().logloss)


def test_weights_of_a_batch_fit_its_labels() -> None:
    labels = torch.ones(4, 2)
    assert batch_of(labels).weights_by_label is None
    found = batch_of(labels, torch.arange(4.0)).weights_by_label
    assert found is not None
    assert found.tolist() == [[0], [1], [2], [3]]
    own = batch_of(labels, torch.arange(8.0).view(4, 2))
    assert own.take(torch.tensor([3, 0])).weights_by_label.tolist() == [[6, 7], [0, 1]]  # type: ignore[union-attr]
    assert replace(own, labels=None).weights is own.weights
    with pytest.raises(BatchError, match=r"weights: got \[4, 3\], expected \[4\] .*\[4, 2\]"):
        batch_of(labels, torch.ones(4, 3))
    with pytest.raises(BatchError, match=r"weights must be floating point \[4\], got"):
        batch_of(labels, torch.ones(4, 2, 1))


# -- dtypes of rows ----------------------------------------------------------------------------------------------------


@pytest.fixture(name="data")
def data_fixture(prepared: Path) -> DataRecipe:
    return DataRecipe(path=str(prepared), dim=8)


def stored(data: DataRecipe, **changes: Any) -> dict[str, Table]:
    return {table.name: table for table in tables_of(open_source(data), replace(data, **changes))}


def test_dtypes_of_rows_are_those_of_the_recipe(data: DataRecipe) -> None:
    assert all((t.dtype, t.fp32_rows) == ("fp32", 0) for t in stored(data).values())
    tables = stored(data, dtype="bf16", fp32_rows=10)
    assert min(t.rows for t in tables.values()) < 10 < max(t.rows for t in tables.values())
    assert all((t.dtype, t.fp32_rows) == ("bf16", min(t.rows, 10)) for t in tables.values())
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


@pytest.mark.parametrize("dtype", [full("bf16"), full("fp16"), full("fp8"), "int8"])
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


# -- recipes of models -------------------------------------------------------------------------------------------------

RECIPES = Path(__file__).parents[2] / "recipes"
CRITEO = Schema(
    sparse=tuple(SparseColumn(name=f"C{i}", rows=100) for i in range(1, 27)),
    dense=tuple(f"I{i}" for i in range(1, 14)),
)


class Columns(Source):
    """Columns without samples."""

    def __init__(self, schema: Schema) -> None:
        self.schema, self.splits = schema, ()

    def _chunks(self, split: str) -> list[int]:
        raise NotImplementedError

    def _read(self, split: str, i: int) -> Batch:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("criteo_kaggle_deepfm", 2 * 2600),
        ("amazon_electronics_din", 4_194_304 + 1_048_576 + 16_384),
        ("movielens_1m_sasrec", 65_536),
        ("movielens_1m_hstu", 65_536),
        ("movielens_1m_two_tower", 131_072 + 128 + 512 + 65_536 + 512),
    ],
)
def test_the_model_of_a_recipe_is_made(name: str, rows: int) -> None:
    recipe = Recipe.from_dict(read_yaml(RECIPES / f"{name}.yaml"))
    given = recipe.data.source.init_args.get("schema")
    with torch.device("meta"):
        model = new_model(recipe, Columns(CRITEO if given is None else Schema.from_dict(given)))
    assert name.replace("_", "").endswith(type(model).__name__.lower())
    assert sum(table.rows for table in plan_tables(model)) == rows
