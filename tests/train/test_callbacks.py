"""Protects: callbacks log, keep, restore and stop as they say, and do not change training."""

import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hotbed.batch import Batch
from hotbed.checkpoint import checkpoints_in, load_checkpoint, read_manifest
from hotbed.config import Recipe, TrainRecipe
from hotbed.errors import RecipeError
from hotbed.train import Callback, Metrics, Trainer
from hotbed.train.runs.callbacks import BestSoFar, EarlyStop, JsonLines, KeepBest, KeepLast, TensorBoard
from hotbed.train.runs.report import ShowProgress, StageProgress
from tests.train import planted
from tests.train.parallel_cases import RECIPE
from tests.train.planted import Losses

TRAIN = TrainRecipe(batch_size=64, device="cpu", precision="fp32", log_every=2)


def metrics(auc: float, logloss: float) -> Metrics:
    return Metrics(samples=1, auc=auc, logloss=logloss, normalized_entropy=1.0, calibration=1.0)


def test_records_and_evaluations_are_lines_of_json(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    trainer = planted.trainer(replace(TRAIN, eval_every=3), callbacks=[JsonLines(file)])
    trainer.fit(planted.batches(4), planted.batches(1))
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(line["event"], line["step"]) for line in lines] == [("train", 2), ("eval", 3), ("train", 4)]
    assert {"loss", "lr_dense", "lr_sparse", "samples_per_s", "epoch"} <= lines[0].keys()
    assert {"auc", "logloss", "normalized_entropy", "calibration", "samples"} <= lines[1].keys()


def test_a_metric_that_is_not_defined_is_null(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    JsonLines(file).on_eval(planted.trainer(TRAIN), metrics(float("nan"), float("inf")))
    assert json.loads(file.read_text())["auc"] is None
    assert json.loads(file.read_text())["logloss"] is None


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_writes_event_files(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="needs the tensorboard extra")
    trainer = planted.trainer(replace(TRAIN, eval_every=2), callbacks=[TensorBoard(tmp_path)])
    trainer.fit(planted.batches(2), planted.batches(1))
    assert [f.name.startswith("events.out.tfevents") for f in tmp_path.iterdir()] == [True]


def test_tensorboard_that_is_not_installed_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RecipeError, match=r"pip install 'hotbed\[tensorboard\]'"):
        TensorBoard(tmp_path)


def test_best_is_by_the_monitor() -> None:
    by_auc, by_logloss = BestSoFar("auc"), BestSoFar("logloss")
    seen = [metrics(0.6, 0.5), metrics(0.5, 0.4), metrics(0.7, 0.45), metrics(0.7, float("inf"))]
    assert [by_auc.improved(m) for m in seen] == [True, False, True, False]
    assert [by_logloss.improved(m) for m in seen] == [True, True, False, False]


def test_what_the_monitor_is_not_defined_for_is_refused() -> None:
    batch = planted.batches(1)[0]
    assert batch.labels is not None
    one_class = replace(batch, labels=torch.zeros_like(batch.labels))
    trainer = planted.trainer(TRAIN, callbacks=[EarlyStop(2, "auc")])
    with pytest.raises(RecipeError) as caught:
        trainer.fit(planted.batches(1), [one_class])
    assert "train.monitor is 'auc'" in str(caught.value)
    assert "all 64 labels are 0. Set train.monitor to logloss" in str(caught.value)
    planted.trainer(TRAIN, callbacks=[EarlyStop(2, "logloss")]).fit(planted.batches(1), [one_class])
    with pytest.raises(RecipeError, match=r"train.monitor is 'logloss', which is .* split: the weights of all 64"):
        trainer = planted.trainer(TRAIN, callbacks=[EarlyStop(2, "logloss")])
        trainer.fit(planted.batches(1), [replace(batch, weights=torch.zeros(64))])


class Scripted(Callback):
    """Stands in for evaluations: the metrics are given."""

    def __init__(self, aucs: list[float], *others: Callback) -> None:
        self.aucs, self.others = aucs, others

    def on_step(self, trainer: Trainer, loss: float) -> None:
        for other in self.others:
            other.on_eval(trainer, metrics(self.aucs[trainer.step - 1], 0.0))


def test_the_best_checkpoint_is_kept_and_restored(tmp_path: Path) -> None:
    recipe = replace(RECIPE, train=replace(RECIPE.train, monitor="auc"))
    keep = KeepBest(tmp_path / "checkpoints", recipe)
    trainer = planted.trainer(TRAIN, callbacks=[Scripted([0.5, 0.7, 0.6, 0.1], keep), keep])
    trainer.fit(planted.batches(4))
    best = checkpoints_in(tmp_path / "checkpoints")
    assert [path.name for path in best] == ["best-00000002"]
    other = planted.trainer(TRAIN)
    load_checkpoint(best[0], {"model": other.model})
    assert str(other.model.state_dict()) == str(trainer.model.state_dict())
    assert Recipe.from_dict(read_manifest(best[0]).recipe) == recipe


def test_checkpoints_do_not_change_training(tmp_path: Path) -> None:
    plain, saving = Losses(), Losses()
    planted.trainer(TRAIN, callbacks=[plain]).fit(planted.batches(4))
    planted.trainer(TRAIN, callbacks=[saving, KeepLast(tmp_path, RECIPE, every=1)]).fit(planted.batches(4))
    assert plain.losses == saving.losses


def shown(recipe: TrainRecipe, train: list[Batch], valid: list[Batch] | None = None, **options: Any) -> str:
    """Return what the progress of a run looks like."""
    stream = io.StringIO()
    progress = ShowProgress(Console(file=stream, width=100, **options))
    planted.trainer(recipe, callbacks=[progress]).fit(train, valid)
    return stream.getvalue()


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    text = shown(replace(TRAIN, eval_every=4), planted.batches(8), planted.batches(1))
    lines = text.splitlines()
    assert lines[0].startswith("precision fp32 (the recipe); matrix products by ")
    assert lines[1].startswith("step 2/8  loss 0.")
    assert "samples/s" in lines[1]
    assert "left" not in lines[1]  # kernels are compiled in the first steps
    assert lines[3].startswith("step 4  valid AUC 0.")
    assert lines[4].endswith("left")
    assert "\x1b" not in text


def test_progress_says_why_a_metric_is_not_defined() -> None:
    (batch,) = planted.batches(1)
    text = shown(TRAIN, [batch], [replace(batch, labels=torch.ones(64, 1))])
    assert "step 1  valid AUC – (all 64 labels are 1)  logloss " in text


def test_progress_is_a_bar_on_a_terminal() -> None:
    text = shown(TRAIN, planted.batches(4), force_terminal=True)
    assert "4/4" in text
    assert "samples/s" in text


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_of_preparation(terminal: bool) -> None:
    stream = io.StringIO()
    with StageProgress(Console(file=stream, width=100, force_terminal=terminal)) as progress:
        for stage in ("read", "count", "write"):
            progress(stage, 0, 10)
            progress(stage, 10, 10)
    for text in ("reading the log", "counting values", "writing the dataset"):
        assert (stream.getvalue().count(text) == 1) or terminal
    assert "writing the dataset" in stream.getvalue()
