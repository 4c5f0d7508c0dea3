"""Protects that metrics and callbacks that a recipe names are computed, called and checked as hotbed's own are."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from hotbed.config import Recipe, TaskRecipe, check_trust
from hotbed.config.component import Component
from hotbed.errors import RecipeError
from hotbed.nn.loss import summed_cross_entropy
from hotbed.train import Callback, Trainer
from hotbed.train.metrics import Predictions, evaluate, metrics_of, own_metrics
from hotbed.train.runs.build import losses_of
from hotbed.train.runs.callbacks import own_callbacks, refuse_callbacks
from hotbed.train.runs.report import print_metrics
from hotbed.train.tracking import MLflow
from tests.train import planted
from tests.train.test_callbacks import RECIPE, TRAIN

HERE = __name__


class Brier:
    """Mean squared error of scores, by weights if there are some, as a user would write it."""

    def __init__(self, factor: float = 1.0) -> None:
        self.factor, self.sums = factor, torch.zeros(2, dtype=torch.float64)

    def update(self, scores: Tensor, labels: Tensor, weight: Tensor | None = None) -> None:
        weights = torch.ones_like(scores) if weight is None else weight
        self.sums += torch.stack([((scores - labels) ** 2 * weights).sum(), weights.sum()]).double()

    def compute(self) -> Tensor:
        return self.factor * self.sums[0] / self.sums[1]


class Unweighted(Brier):
    """Takes no weights."""

    def update(self, scores: Tensor, labels: Tensor) -> None:  # type: ignore[override]
        super().update(scores, labels)


class Curve(Brier):
    """Gives several numbers."""

    def compute(self) -> Tensor:
        return torch.zeros(3)


def metrics(**components: Component) -> dict[str, Any]:
    return own_metrics(components)


def own(name: str, **init_args: Any) -> Component:
    return Component(class_path=f"{HERE}.{name}", init_args=init_args)


def test_they_are_computed_task_by_task_beside_the_others() -> None:
    draw = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(90, 2, generator=draw), torch.rand(90, 2, generator=draw).round()
    weights = torch.rand(90, 2, generator=draw)
    found = Predictions(["click", "buy"], metrics(brier=own("Brier", factor=10.0)))
    for part in range(0, 90, 30):
        at = slice(part, part + 30)
        found.add(logits[at], labels[at], weights=weights[at])
    result = found.metrics()
    of_tasks = [
        float(10 * ((logits[:, t].sigmoid() - labels[:, t]) ** 2 * weights[:, t]).sum() / weights[:, t].sum())
        for t in range(2)
    ]
    assert [task.others["brier"] for task in result.tasks.values()] == pytest.approx(of_tasks)
    assert result.others["brier"] == pytest.approx(sum(of_tasks) / 2)
    plain = result.to_dict()
    assert (plain["brier"], plain["tasks"]["buy"]["brier"]) == pytest.approx((sum(of_tasks) / 2, of_tasks[1]))
    assert result.curves("valid")["valid/buy/brier"] == pytest.approx(of_tasks[1])
    assert "others" not in plain


def test_a_task_has_metrics_of_its_own() -> None:
    """Beside those of all, or in the place of one of the same name; only what all have has a mean."""
    buy = {"brier": own("Brier", factor=2.0), "half": own("Brier", factor=0.5)}
    recipe = replace(RECIPE, metrics={"brier": own("Brier")}, tasks={"buy": TaskRecipe(metrics=buy)})
    found = Predictions(["click", "buy"], metrics_of(recipe))
    logits, labels = torch.zeros(4, 2), torch.ones(4, 2)
    found.add(logits, labels)
    result = found.metrics()
    assert result.tasks["click"].others == {"brier": 0.25}
    assert result.tasks["buy"].others == {"brier": 0.5, "half": 0.125}
    assert result.others == {"brier": 0.375}
    assert result.curves("valid")["valid/buy/half"] == 0.125
    screen = io.StringIO()
    print_metrics(Console(file=screen, width=120), "test", result.to_dict())
    (line,) = (line for line in screen.getvalue().splitlines() if "half" in line)
    assert [cell.strip() for cell in line.strip("│ ").split("│")] == ["half", "–", "–", "0.12500"]
    alone = Predictions(["buy"], metrics_of(recipe))
    alone.add(logits[:, :1], labels[:, :1])
    assert alone.metrics().others == {"brier": 0.5, "half": 0.125}


def test_a_name_with_a_k_is_no_monitored_metric() -> None:
    found = Predictions(metrics={"auc@top": lambda: Brier()})
    found.add(torch.tensor([[1.0], [-1.0]]), torch.tensor([[1.0], [0.0]]))
    result = found.metrics()
    assert result.others["auc@top"] < 0.2
    assert result.value("auc") == 1


def test_metrics_of_a_task_are_checked_as_those_of_all() -> None:
    for name, component, message in [
        ("auc", own("Brier"), "tasks.buy.metrics has 'auc'"),
        ("brier", own("Bryer"), "tasks.buy.metrics.brier: module .* has no class 'Bryer'; did you mean 'Brier'"),
        ("curve", own("Curve"), r"tasks.buy.metrics.curve: Curve failed on scores and labels \[4\]: "),
    ]:
        with pytest.raises(RecipeError, match=message):
            metrics_of(replace(RECIPE, tasks={"buy": TaskRecipe(metrics={name: component})}))
    recipe = replace(RECIPE, tasks={"buy": TaskRecipe(metrics={"brier": own("Brier")})})
    with pytest.raises(RecipeError, match=r"tasks.buy.metrics.brier .*Brier.*--trust_recipe"):
        check_trust(recipe, "the checkpoint", trusted=False)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert losses_of(recipe.tasks, ["click", "buy"], torch.device("cpu")) is summed_cross_entropy


def test_those_of_torchmetrics_are_what_hotbed_says() -> None:
    pytest.importorskip("torchmetrics")
    area = Component(class_path="torchmetrics.classification.BinaryAUROC")
    sizes = Component(class_path="torchmetrics.classification.BinaryAccuracy", init_args={"threshold": 0.5})
    model = planted.trainer(TRAIN).model
    found = evaluate(model, planted.batches(3), metrics=metrics(area=area, right=sizes))
    assert found.others["area"] == pytest.approx(found.auc, abs=1e-6)
    assert 0.2 < found.others["right"] < 0.8


@pytest.mark.parametrize(
    ("name", "component", "message"),
    [
        ("auc", own("Brier"), "metrics has 'auc'"),
        ("brier", own("Bryer"), "metrics.brier: module .* has no class 'Bryer'; did you mean 'Brier'"),
        ("brier", own("Brier", power=2), "metrics.brier: .* takes no 'power'; init_args may be factor"),
        ("loss", Component(class_path="torch.nn.MSELoss"), r"metrics.loss: torch.nn.MSELoss has no update\(scores, l"),
        ("curve", own("Curve"), r"metrics.curve: Curve failed on scores and labels \[4\]: "),
    ],
)
def test_metrics_that_are_none(name: str, component: Component, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        own_metrics({name: component})


def test_weights_are_not_left_out_in_silence() -> None:
    found = Predictions(metrics=metrics(brier=own("Unweighted")))
    found.add(torch.zeros(4, 1), torch.ones(4, 1), weights=torch.ones(4))
    with pytest.raises(RecipeError, match=r"metrics.brier: samples have weights, but Unweighted.update"):
        found.metrics()
    recipe = replace(RECIPE, metrics={"all": own("Brier")}, tasks={"buy": TaskRecipe(metrics={"b": own("Unweighted")})})
    of_task = Predictions(["buy"], metrics_of(recipe))
    of_task.add(torch.zeros(4, 1), torch.ones(4, 1), weights=torch.ones(4))
    with pytest.raises(RecipeError, match=r"^tasks\.buy\.metrics\.b: samples have weights, but Unweighted"):
        of_task.metrics()


# -- callbacks -----------------------------------------------------------------------------------------------------


class Counts(Callback):
    """Counts steps on all ranks."""

    def __init__(self, every: int, recipe: Recipe, directory: Path) -> None:
        self.every, self.name, self.directory, self.steps = every, recipe.name, directory, 0

    def on_step(self, trainer: Trainer, loss: float) -> None:
        self.steps += trainer.step % self.every == 0


class Writes(Callback):
    """Is made where something is written."""

    first_rank_only = True


def with_callbacks(**components: Component) -> Recipe:
    return replace(RECIPE, callbacks=components)


def test_callbacks_are_made_with_what_they_ask_for_where_they_are_wanted(tmp_path: Path) -> None:
    recipe = with_callbacks(counts=own("Counts", every=2), writes=own("Writes"))
    first = own_callbacks(recipe, tmp_path, is_first=True)
    assert [type(callback) for callback in first] == [Counts, Writes]
    (counts,) = own_callbacks(recipe, tmp_path, is_first=False)
    assert isinstance(counts, Counts)
    assert (counts.every, counts.name, counts.directory) == (2, "test", tmp_path)
    planted.trainer(TRAIN, callbacks=[counts]).fit(planted.batches(5))
    assert counts.steps == 2


@pytest.mark.parametrize(
    ("component", "message"),
    [
        (own("Brier"), r"callbacks.own is .*Brier, expected a hotbed.Callback"),
        (own("Count"), r"callbacks.own: module .* has no class 'Count'; did you mean 'Counts'"),
        (own("Counts"), r"callbacks.own: .*Counts needs 'every'; set it in init_args"),
    ],
)
def test_callbacks_that_are_none(component: Component, message: str, tmp_path: Path) -> None:
    recipe = with_callbacks(own=component)
    with pytest.raises(RecipeError, match=message):
        refuse_callbacks(recipe)
        own_callbacks(recipe, tmp_path, is_first=True)


# -- MLflow --------------------------------------------------------------------------------------------------------


class Client:
    """What is used of ``mlflow.MlflowClient``, in memory."""

    def __init__(self, uri: str | None = None) -> None:
        self.uri, self.runs, self.status = uri, dict[str, dict[str, Any]](), dict[str, str]()

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment_id: str, *, run_name: str | None, tags: dict[str, str]) -> Any:
        run = f"run{len(self.runs)}"
        self.runs[run] = {"of": experiment_id, "name": run_name, "tags": tags, "metrics": [], "params": []}
        self.status[run] = "RUNNING"
        return SimpleNamespace(info=SimpleNamespace(run_id=run))

    def update_run(self, run: str, *, status: str) -> None:
        self.status[run] = status

    def log_batch(self, run: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100
        self.runs[run]["metrics"] += metrics
        self.runs[run]["params"] += params

    def set_terminated(self, run: str, status: str) -> None:
        self.status[run] = status


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Client:
    made, mlflow, entities = Client(), ModuleType("mlflow"), ModuleType("mlflow.entities")
    vars(mlflow).update(MlflowClient=lambda uri: made, entities=entities)
    vars(entities).update(Param=lambda key, value: (key, value), Metric=lambda *values: values)
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    return made


def test_mlflow_gets_the_recipe_losses_and_evaluations(client: Client) -> None:
    callback = MLflow("ads", tags={"day": "1"}, recipe=RECIPE)
    trainer = planted.trainer(replace(TRAIN, eval_every=4), callbacks=[callback])
    trainer.fit(planted.batches(4), planted.batches(1))
    (run,) = client.runs.values()
    assert (run["of"], run["name"], run["tags"], client.status) == ("ads", "test", {"day": "1"}, {"run0": "FINISHED"})
    assert ("model.class_path", "hotbed.nn.DLRM") in run["params"]
    steps = {(name, step) for name, _, _, step in run["metrics"]}
    assert {("train/loss", 2), ("train/loss", 4), ("valid/auc", 4), ("train/lr_sparse", 2)} <= steps
    again = MLflow("ads", recipe=RECIPE)
    again.load_state_dict(callback.state_dict())
    planted.trainer(TRAIN, callbacks=[again]).fit(planted.batches(2))
    assert list(client.runs) == ["run0"]
    assert len(run["metrics"]) > len(steps)


def test_mlflow_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    recipe = with_callbacks(mlflow=Component(class_path="hotbed.train.tracking.MLflow"))
    with pytest.raises(RecipeError, match=r"tracking.MLflow needs MLflow, .*pip install mlflow-skinny"):
        own_callbacks(recipe, tmp_path, is_first=True)
