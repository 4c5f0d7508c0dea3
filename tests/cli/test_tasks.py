"""Protects that a recipe of several tasks trains, evaluates, predicts, exports and serves each of them by its name."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import yaml

from hotbed.cli.main import main
from hotbed.serve.served_model import ServedModel
from tests.cli.cases import Output, refused, train

ROOT = Path(__file__).parent.parent.parent
RECIPE = ROOT / "recipes" / "census_income_mmoe.yaml"
ROWS = 600
LABELS = ("income", "marital_stat")


def census(path: Path) -> Path:
    """Files with the columns of the recipe, whose labels follow from two of them."""
    schema = yaml.safe_load(RECIPE.read_text())["data"]["source"]["init_args"]["schema"]
    path.mkdir()
    for seed, split in enumerate(("train", "test")):
        rng = np.random.default_rng(seed)
        columns: dict[str, Any] = {c["name"]: rng.integers(0, 5, ROWS).astype(str) for c in schema["sparse"]}
        columns |= {c["name"]: rng.integers(0, 99, ROWS) for c in schema["dense"]}
        noise = rng.random((2, ROWS)) < 0.1
        rich = (columns["education"] == "3") ^ noise[0]
        single = (columns["age"] < 40) ^ noise[1]
        columns["income"] = np.where(rich, "50000+.", "- 50000.")
        columns["marital_stat"] = np.where(single, "Never married", "Widowed")
        columns["seen"] = rng.random(ROWS).round(3)
        pl.DataFrame(columns).write_parquet(path / f"{split}.parquet", row_group_size=200)
    return path


@pytest.fixture(scope="module", name="run")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "recipe.yaml").write_text(RECIPE.read_text())
    options = ["--data.path", str(census(folder / "census")), "--train.batch_size", "64", "--train.epochs", "3"]
    loss = ["--tasks.income.loss.init_args", "{pos_weight: 2.0}", "--tasks.income.loss.class_path"]
    device = ["--train.device", "cpu", "--dense_optimizer.init_args.lr", "0.01", "--train.precision", "fp32"]
    status, _, run = train(folder / "recipe.yaml", *options, *loss, "torch.nn.BCEWithLogitsLoss", *device)
    assert status == 0
    return run


def test_each_task_is_evaluated_by_its_name(run: Path, capsys: Output) -> None:
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if line["event"] == "eval"]
    for metrics in (summary["test"], *evaluations):
        assert list(metrics["tasks"]) == list(LABELS)
        of_tasks = metrics["tasks"].values()
        for name in ("auc", "logloss"):
            assert metrics[name] == pytest.approx(np.mean([task[name] for task in of_tasks]))
    assert all(task["auc"] > 0.7 for task in summary["test"]["tasks"].values())
    stored = yaml.safe_load((run / "recipe.yaml").read_text())
    assert stored["tasks"]["income"]["loss"]["init_args"] == {"pos_weight": 2.0}
    file = run / "eval.json"
    assert main(["eval", "--checkpoint", str(run), "--json", str(file)]) == 0
    assert json.loads(file.read_text())["test"] == summary["test"]
    assert all(label in capsys.readouterr().out for label in ("income",))


def test_each_task_has_a_score_where_it_is_served(run: Path, tmp_path: Path) -> None:
    new = tmp_path / "new.parquet"
    whole = pl.read_parquet(run.parents[2] / "census" / "test.parquet")
    whole.drop(LABELS).write_parquet(new)
    out = tmp_path / "scores.parquet"
    assert main(["predict", str(run), str(new), "--out", str(out)]) == 0
    scores = pl.read_parquet(out)
    assert scores.columns == [f"score_{label}" for label in LABELS]
    single = whole["marital_stat"].to_numpy() == "Never married"
    of_single = scores["score_marital_stat"].to_numpy()
    assert of_single[single].mean() > of_single[~single].mean()
    assert main(["export", str(run), str(tmp_path / "model")]) == 0
    with closing(ServedModel.open(tmp_path / "model")) as served:
        assert served.labels == LABELS
        rows = whole.drop(LABELS)[:7].to_dict(as_series=False)
        found, _ = served.score(served.encoder.table(rows))
        assert found.tolist() == scores[:7].to_numpy().tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tasks.incom.weight", "2"],
            "label in tasks: got 'incom', expected one of income, marital_stat",
        ),
        (["--tasks.income.weight", "-1"], "tasks.income.weight: got -1.0, expected a finite number at least 0"),
        (["--tasks.income.wait", "1"], "unknown argument --tasks.income.wait; did you mean '--tasks.income.weight'?"),
        (["--tasks.income.loss.class_path", "torch.nn.BCELoss"], "a loss of logits (not probabilities) and labels"),
        (["--tasks", "{income: 3}"], "tasks.income: got 3, expected a mapping"),
    ],
)
def test_tasks_that_cannot_be_are_refused_before_anything_is_trained(
    options: list[str], message: str, tmp_path: Path, capsys: Output
) -> None:
    given = ["train", str(RECIPE), "--data.path", str(census(tmp_path / "census")), "--out", str(tmp_path / "runs")]
    assert message in refused([*given, *options], capsys)
    assert not (tmp_path / "runs").exists()


def test_a_run_is_not_gone_on_with_by_another_loss(run: Path, tmp_path: Path, capsys: Output) -> None:
    values = yaml.safe_load((run / "recipe.yaml").read_text())
    values["tasks"]["income"]["weight"] = 3.0
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    given = ["train", str(tmp_path / "recipe.yaml"), "--resume", str(run), "--out", str(tmp_path / "runs")]
    assert "tasks.income.weight was 1.0 and is now 3.0" in refused(given, capsys)
