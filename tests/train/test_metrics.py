"""Tests of metrics of evaluations, and of metrics and callbacks of a recipe."""

from __future__ import annotations

import io
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.config import Recipe, TaskRecipe, TrainRecipe, check_trust
from hotbed.config.component import Component
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, NonFiniteError, RecipeError
from hotbed.jagged import Jagged
from hotbed.nn.loss import summed_cross_entropy
from hotbed.optim import SGD
from hotbed.specs import Feature, Table
from hotbed.train import Callback, Trainer
from hotbed.train.metrics import Predictions, auc, evaluate, grouped_auc, metrics_of, move_batch, recipe_metrics
from hotbed.train.runs.build import losses_of
from hotbed.train.runs.callbacks import own_callbacks, refuse_callbacks
from hotbed.train.runs.report import print_metrics
from hotbed.train.runs.stored_model import bad_ids
from hotbed.train.tracking import MLflow
from tests.train import planted
from tests.train.parallel_cases import RECIPE
from tests.train.test_callbacks import TRAIN

# -- Protects: metrics are their definitions, whatever the order, ties, weights and labels.


def brute_auc(scores: list[float], labels: list[float], weights: list[float]) -> float:
    """Weighted share of (positive, negative) pairs in the right order, ties counting half."""
    won = total = 0.0
    for s, y, w in zip(scores, labels, weights, strict=True):
        for s2, y2, w2 in zip(scores, labels, weights, strict=True):
            pair = w * y * w2 * (1 - y2)
            total += pair
            won += pair * (1.0 if s > s2 else 0.5 if s == s2 else 0.0)
    return won / total if total else math.nan


def brute_gauc(
    scores: list[float], labels: list[float], groups: list[int], weights: list[float]
) -> tuple[float, int, int]:
    parts: list[tuple[float, float]] = []
    left_out = 0
    for g in sorted(set(groups)):
        at = [i for i, other in enumerate(groups) if other == g]
        value = brute_auc([scores[i] for i in at], [labels[i] for i in at], [weights[i] for i in at])
        if math.isnan(value):
            left_out += 1
        else:
            parts.append((value, sum(weights[i] for i in at)))
    total = sum(w for _, w in parts)
    return (sum(v * w for v, w in parts) / total if parts else math.nan), len(parts), left_out


samples = st.lists(
    st.tuples(
        st.integers(-3, 3).map(float),  # few values, so many ties
        st.sampled_from([0.0, 1.0, 0.0, 1.0, 0.25]),
        st.sampled_from([0.25, 1.0, 3.0]),
        st.integers(-2, 2),
    ),
    min_size=1,
    max_size=40,
)


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


@settings(deadline=None)
@given(samples)
def test_auc_and_gauc_are_those_of_all_pairs(drawn: list[tuple[float, float, float, int]]) -> None:
    scores, labels, weights, groups = (list(column) for column in zip(*drawn, strict=True))
    s, y, w, g = torch.tensor(scores), torch.tensor(labels), torch.tensor(weights), torch.tensor(groups)
    ones = [1.0] * len(scores)
    assert same(auc(s, y), brute_auc(scores, labels, ones))
    assert same(auc(s, y, w), brute_auc(scores, labels, weights))
    expected = brute_gauc(scores, labels, groups, weights)
    got = grouped_auc(s, y, g, w)
    assert same(got.value, expected[0])
    assert (got.groups, got.left_out) == expected[1:]


def test_auc_of_nothing_is_nan() -> None:
    assert math.isnan(auc(torch.empty(0), torch.empty(0)))


def test_auc_sees_the_order_of_logits_whose_probabilities_are_all_one() -> None:
    logits = torch.tensor([30.0, 31.0, 32.0, 33.0])
    assert len(logits.sigmoid().unique()) == 1
    assert auc(logits, torch.tensor([0.0, 0.0, 1.0, 1.0])) == 1.0


def test_auc_is_exact_for_a_million_samples() -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 50_000, (1_000_000,), generator=generator)
    labels = (torch.rand(1_000_000, generator=generator) < 0.3).long()
    # In integers: 2 U = Σ over positives of 2 · (negatives below) + (negatives equal).
    negatives = torch.bincount(scores[labels == 0], minlength=50_000)
    below = negatives.cumsum(0) - negatives
    twice = int((2 * below + negatives)[scores[labels == 1]].sum())
    pairs = int(labels.sum()) * int((1 - labels).sum())
    assert auc(scores.float(), labels.float()) == pytest.approx(twice / (2 * pairs), rel=1e-15)


def predictions_of(logits: Tensor, labels: Tensor, weights: Tensor | None = None, parts: int = 3) -> Predictions:
    predictions = Predictions()
    for i in range(parts):
        predictions.add(logits[i::parts], labels[i::parts], weights=None if weights is None else weights[i::parts])
    return predictions


@settings(deadline=None)
@given(samples)
def test_logloss_entropy_and_calibration_are_their_formulas(drawn: list[tuple[float, float, float, int]]) -> None:
    x, y, w, _ = (torch.tensor(column, dtype=torch.float64) for column in zip(*drawn, strict=True))
    got = predictions_of(x[:, None].float(), y[:, None].float(), w.float()).metrics()
    p, total = torch.sigmoid(x), w.sum()
    logloss = -float((w * (y * p.log() + (1 - y) * (1 - p).log())).sum() / total)
    rate = float((w * y).sum() / total)
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log(1 - rate)) if 0 < rate < 1 else 0.0
    assert got.samples == len(x)
    assert got.logloss == pytest.approx(logloss, rel=1e-12)
    assert same(got.normalized_entropy, logloss / entropy if entropy else math.nan) or entropy < 1e-6
    assert same(got.calibration, float((w * p).sum() / (w * y).sum()) if rate else math.nan)


def test_several_tasks_give_their_mean_and_each() -> None:
    predictions = Predictions(["click", "buy"])
    predictions.add(torch.tensor([[1.0, -1.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
    got = predictions.metrics()
    assert {name: task.auc for name, task in got.tasks.items()} == {"click": 1.0, "buy": 0.0}
    assert got.auc == 0.5
    assert got.to_dict()["tasks"]["click"]["auc"] == 1.0
    undefined = Predictions(["click", "buy"])
    undefined.add(torch.tensor([[1.0, -1.0], [0.0, 2.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
    got = undefined.metrics()
    assert math.isnan(got.auc)
    assert got.tasks["click"].auc == 1.0
    assert got.undefined["auc"] == "label 'buy': all 2 labels are 0"


def test_undefined_metrics_are_none_in_plain_values_and_say_why() -> None:
    got = predictions_of(torch.zeros(1200, 1), torch.zeros(1200, 1)).metrics().to_dict()
    assert got["auc"] is None
    assert got["calibration"] is None
    assert "gauc" not in got
    assert got["undefined"] == dict.fromkeys(("auc", "normalized_entropy", "calibration"), "all 1,200 labels are 0")
    got = predictions_of(torch.zeros(3, 1), torch.ones(3, 1)).metrics().to_dict()
    assert got["undefined"] == dict.fromkeys(("auc", "normalized_entropy"), "all 3 labels are 1")
    assert "undefined" not in predictions_of(torch.zeros(2, 1), torch.tensor([[0.0], [1.0]])).metrics().to_dict()


def test_weights_of_0_and_groups_of_one_class_leave_metrics_undefined() -> None:
    labels, groups = torch.tensor([[0.0], [1.0]]), torch.tensor([1, 2])
    predictions = Predictions()
    predictions.add(torch.zeros(2, 1), labels, weights=torch.tensor([1.0, 0.0]), groups=groups)
    got = predictions.metrics()
    assert got.undefined["auc"] == "all samples of one class have weight 0"
    assert got.undefined["gauc"] == "none of the 2 groups has labels of both classes"
    predictions = Predictions()
    predictions.add(torch.zeros(2, 1), labels, weights=torch.zeros(2))
    assert predictions.metrics().undefined["logloss"] == "the weights of all 2 samples are 0"


@pytest.mark.parametrize("value", [-1.0, 1.25, math.nan])
def test_metrics_refuse_labels_that_they_are_not_defined_for(value: float) -> None:
    labels = torch.tensor([0.0, value, 1.0])
    message = f"label: got {value} at sample 1 of 3, column 0, expected 0 to 1"
    for score in (
        lambda: auc(torch.zeros(3), labels),
        lambda: grouped_auc(torch.zeros(3), labels, torch.zeros(3, dtype=torch.int64)),
        lambda: predictions_of(torch.zeros(3, 1), labels[:, None], parts=1).metrics(),
    ):
        with pytest.raises(BatchError, match=message):
            score()


def test_a_logit_that_is_not_finite_is_named() -> None:
    with pytest.raises(NonFiniteError, match="logit of sample 1, task 0 is nan"):
        predictions_of(torch.tensor([[0.0], [math.nan]]), torch.zeros(2, 1), parts=1).metrics()


def test_nothing_to_evaluate_is_an_error() -> None:
    with pytest.raises(BatchError, match="no sample to evaluate"):
        Predictions().metrics()


class Constant(nn.Module):
    """Gives the dense input as logits, and notes in which mode it was called."""

    modes: list[tuple[bool, bool]]

    def __init__(self) -> None:
        super().__init__()
        self.modes = []

    def forward(self, batch: Batch) -> Tensor:
        self.modes.append((self.training, torch.is_grad_enabled()))
        assert batch.dense is not None
        return batch.dense


def batch_of(n: int, labels: Tensor | None, **extra: Tensor) -> Batch:
    ids = Jagged(["a"], torch.zeros(n, dtype=torch.int64), batch_size=n)
    return Batch(sparse=ids, dense=torch.arange(n, dtype=torch.float32)[:, None], labels=labels, extra=extra)


def test_evaluate_neither_trains_nor_leaves_a_mode_behind() -> None:
    model = Constant().train()
    labels = torch.tensor([[0.0], [1.0]])
    got = evaluate(model, [batch_of(2, labels, user=torch.tensor([1, 1]))], group="user")
    assert model.modes == [(False, False)]
    assert model.training
    assert (got.auc, got.gauc, got.groups, got.groups_left_out) == (1.0, 1.0, 1, 0)


@pytest.mark.parametrize(
    ("batch", "group", "message"),
    [
        (batch_of(2, None), None, "no labels"),
        (batch_of(2, torch.zeros(2, 2)), None, r"\[2, 1\], expected one per label \[2, 2\]"),
        (batch_of(2, torch.zeros(2, 1)), "user", "group column 'user'"),
    ],
)
def test_batches_that_cannot_be_evaluated(batch: Batch, group: str | None, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        evaluate(Constant(), [batch], group=group)


# -- ids out of range ----------------------------------------------------------------------------------------------


class TwoCollections(nn.Module):
    """Two collections see one feature; the smaller table drops ids that the larger one has rows for."""

    def __init__(self) -> None:
        super().__init__()
        feature = Feature("a", "t", on_bad_id="drop")
        self.small = EmbeddingCollection([Table("t", 3, 2)], [feature])
        self.large = EmbeddingCollection([Table("t", 9, 2)], [feature], seed=1)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Batch) -> Tensor:
        small, large = self.small(batch.sparse)["a"], self.large(batch.sparse)["a"]
        return self.scale * (small + large).sum(1, keepdim=True)


def out_of_range() -> Batch:
    """The ids 5 and 7 are out of range of the smaller table only, 11 of both."""
    return Batch(sparse=Jagged.from_dict({"a": torch.tensor([1, 5, 2, 7, 11])}), labels=torch.zeros(5, 1))


def test_repairs_of_one_collection_do_not_reach_another() -> None:
    model = TwoCollections()
    batch = move_batch(out_of_range(), model, "cpu")
    assert bad_ids(model) == {}
    expected = model(out_of_range())
    assert bad_ids(model) == {"a": 3}, "of the same ids, 3 are out of one table and 1 is out of the other"
    torch.testing.assert_close(model(batch), expected)
    assert expected[3] == model.large.weight("t")[7].sum() * model.scale


def test_training_repairs_and_counts_as_calling_the_model_does() -> None:
    def made() -> Trainer:
        model = TwoCollections()
        dense = torch.optim.SGD(model.parameters(), lr=0.1)
        return Trainer(
            model, dense, SGD(model, lr=0.1), recipe=TrainRecipe(batch_size=5, device="cpu", precision="fp32")
        )

    by_hand, trainer = made(), made()
    by_hand.loss(out_of_range()).backward()
    by_hand.dense.step()
    by_hand.sparse.step()
    trainer.fit([out_of_range()])
    assert bad_ids(trainer.model) == bad_ids(by_hand.model) == {"a": 3}
    for name, tensor in by_hand.model.state_dict().items():
        assert torch.equal(trainer.model.state_dict()[name], tensor), name


def test_good_ids_are_checked_once_on_the_host() -> None:
    batch = planted.batches(1)[0]
    model = planted.trainer(TrainRecipe(batch_size=64, device="cpu", precision="fp32")).model
    assert move_batch(batch, model, "cpu").sparse.verified == {(name, rows) for name, rows in planted.ROWS.items()}


# -- Protects that metrics and callbacks that a recipe names are computed, called and checked as hotbed's own are.

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
    return recipe_metrics(components)


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
        ("auc", own("Brier"), "metrics: 'auc'"),
        ("brier", own("Bryer"), "metrics.brier: module .* has no class 'Bryer'; did you mean 'Brier'"),
        ("brier", own("Brier", power=2), "metrics.brier: .* got 'power', expected one of factor"),
        ("loss", Component(class_path="torch.nn.MSELoss"), r"metrics.loss: torch.nn.MSELoss lacks update\(scores, l"),
        ("curve", own("Curve"), r"metrics.curve: Curve failed on scores and labels \[4\]: "),
    ],
)
def test_metrics_that_are_none(name: str, component: Component, message: str) -> None:
    with pytest.raises(RecipeError, match="^" + message):
        recipe_metrics({name: component})
    with pytest.raises(RecipeError, match=r"^tasks\.buy\." + message):
        metrics_of(replace(RECIPE, tasks={"buy": TaskRecipe(metrics={name: component})}))


def test_metrics_of_tasks_need_trust_and_change_no_loss() -> None:
    recipe = replace(RECIPE, tasks={"buy": TaskRecipe(metrics={"brier": own("Brier")})})
    with pytest.raises(RecipeError, match=r"tasks.buy.metrics.brier .*Brier.*--trust_recipe"):
        check_trust(recipe, "the checkpoint", trusted=False)
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert losses_of(recipe.tasks, ["click", "buy"], torch.device("cpu")) is summed_cross_entropy


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
        (own("Brier"), r"callbacks.own is .*Brier, expected a subclass of hotbed.Callback"),
        (own("Count"), r"callbacks.own: module .* has no class 'Count'; did you mean 'Counts'"),
        (own("Counts"), r"callbacks.own: .*Counts requires 'every'"),
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
