"""Protects that `hotbed tune` searches on the valid split alone, repeats itself, and loses nothing when interrupted."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from hotbed.commands.main import main
from hotbed.train import tune as module
from tests.commands.cases import Output, refused, train

VALID = ("--data.valid_split", "valid", "--train.batch_size", "512")


def tuned(recipe: Path, out: str, *args: str) -> tuple[int, dict[str, Any], Path]:
    """Exit status, figures and directory of a search."""
    file, root = recipe.parent / "tuned.json", recipe.parent / out
    file.unlink(missing_ok=True)
    status = main(["tune", str(recipe), "--out", str(root), "--json", str(file), *VALID, *args])
    return status, json.loads(file.read_text()) if file.exists() else {}, root / "small" / "tune"


def without_times(found: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**trial, "seconds": None} for trial in found["trials"]]


def test_a_search_repeats_itself_also_in_two_calls(recipe: Path, capsys: Output) -> None:
    status, whole, directory = tuned(recipe, "a", "--trials", "3")
    assert status == 0
    printed = capsys.readouterr()
    assert "trial 3/3" in printed.err
    assert f"best recipe: {directory / 'best.yaml'}" in printed.out
    tuned(recipe, "b", "--trials", "2")
    _, again, _ = tuned(recipe, "b", "--trials", "3")
    assert without_times(again) == without_times(whole)
    assert whole["trials"][0]["values"]["sparse_optimizer.init_args.lr"] == 0.1  # the recipe as it is
    assert len({json.dumps(trial["values"]) for trial in whole["trials"]}) == 3


def test_the_best_recipe_trains_and_reaches_what_it_says(recipe: Path) -> None:
    _, found, directory = tuned(recipe, "a", "--trials", "3")
    best = directory / "best.yaml"
    assert found["best"]["value"] == min(trial["value"] for trial in found["trials"] if trial["value"] is not None)
    text = best.read_text()
    assert f"logloss {found['best']['value']:.5f} on the split 'valid'" in text
    assert "The test split was not used" in text
    renamed = best.rename(recipe.parent / "best.yaml")
    status, summary, run = train(renamed, "--train.eval_every", "1")
    assert (status, summary["test"] is not None) == (0, True)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    reached = [record["logloss"] for record in records if record["event"] == "eval"]
    assert reached[-1] == pytest.approx(found["best"]["value"], rel=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        ["--train.steps", "1"],
        ["--train.steps", "1", "--train.epochs", "2"],
        ["--train.steps", "3", "--train.eval_every", "50"],
        ["--train.eval_every", "5000"],
    ],
)
def test_a_trial_too_short_for_the_recipes_evaluations_is_evaluated_at_its_end(
    options: list[str], recipe: Path
) -> None:
    status, found, _ = tuned(recipe, "a", "--trials", "1", *options)
    assert status == 0
    assert found["trials"][0]["state"] == "complete"
    assert 0 < found["best"]["value"] < 2


def test_the_test_split_is_never_opened(recipe: Path) -> None:
    status, _, directory = tuned(recipe, "a", "--trials", "1", "--data.test_split", "nowhere")
    assert status == 0
    assert yaml.safe_load((directory / "best.yaml").read_text())["data"]["test_split"] == "nowhere"


def test_ctrl_c_keeps_what_is_there(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    _, whole, _ = tuned(recipe, "a", "--trials", "3")
    trained, calls = module._train, list[None]()

    def interrupted(*args: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return trained(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "_train", interrupted)
        status, _, directory = tuned(recipe, "b", "--trials", "3")
    assert status == 130
    assert "hotbed: interrupted" in capsys.readouterr().err
    assert (directory / "best.yaml").is_file()
    _, found, _ = tuned(recipe, "b", "--trials", "3")
    assert [t["values"] for t in found["trials"]] == [t["values"] for t in whole["trials"]]


def test_settings_that_diverge_are_no_results(recipe: Path, capsys: Output) -> None:
    endless = ("--sparse_optimizer.class_path", "hotbed.optim.SGD", "--sparse_optimizer.init_args", "{lr: 1.0e+38}")
    status, _, directory = tuned(recipe, "a", "--trials", "1", *endless)
    assert status == 2
    assert "none of 1 trials came to an evaluation: losses were NaN or infinite; lower" in capsys.readouterr().err
    assert not (directory / "best.yaml").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["--data.valid_split", "null"],
            "to compare trials on, and the test split is not for that; draft it with hotbed init --valid",
        ),
        (["--trials", "0"], "--trials is 0, must be at least 1"),
        (["--trials", "many"], "trials is 'many', must be int"),
        (["--search_seed", "-1"], "--search_seed is -1, must be at least 0 and below 2**32"),
        (["--init_from", "somewhere"], "init.checkpoint is set, but trials begin with initial values; leave it out"),
        (["--hot.batches", "alternating"], "hot.batches is 'alternating', which tune does not search with"),
        (["--data.valid_split", "vaild"], "data.valid_split is 'vaild', but the data has only train, valid, test"),
    ],
)
def test_what_cannot_be_searched(recipe: Path, capsys: Output, args: list[str], message: str) -> None:
    out = recipe.parent / "out"
    assert message in refused(["tune", str(recipe), "--out", str(out), *VALID, *args], capsys)
    assert not out.exists()


def test_another_search_in_the_same_place_is_refused(recipe: Path, capsys: Output) -> None:
    tuned(recipe, "a", "--trials", "1")
    argv = ["tune", str(recipe), "--out", str(recipe.parent / "a"), *VALID]
    assert "tune holds a search with another seed; choose another --name or --out" in refused(
        [*argv, "--search_seed", "1"], capsys
    )
    assert "holds a search with another recipe" in refused([*argv, "--train.seed", "1"], capsys)


def test_what_is_needed_is_named(recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert "tune trains in one process, but torchrun has started 2; start one" in refused(
        ["tune", str(recipe), *VALID], capsys
    )
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "optuna", None)
    out = recipe.parent / "out"
    assert "hotbed tune needs optuna, which cannot be imported" in (
        said := refused(["tune", str(recipe), "--out", str(out), *VALID], capsys)
    )
    assert "pip install 'hotbed[tune]'" in said
    assert not out.exists()


def test_numericals_are_measured_once_for_all_trials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    price, user = np.exp(rng.normal(8, 2, 2_000)), rng.integers(0, 20, 2_000)
    click = rng.random(2_000) < 1 / (1 + np.exp(-(np.log(price) - 8)))
    pq.write_table(pa.table({"click": click, "price": price, "user": user}), tmp_path / "a.parquet", row_group_size=200)
    schema = {
        "labels": ["click"],
        "dense": [{"name": "price", "rule": "log"}],
        "sparse": [{"name": "user", "rows": 64}],
    }
    given = {
        "name": "small",
        "data": {
            "path": str(tmp_path / "a.parquet"),
            "dim": 8,
            "valid_split": "valid",
            "source": {
                "class_path": "hotbed.data.ParquetSource",
                "init_args": {"schema": schema, "valid_fraction": 0.2, "test_fraction": 0.2},
            },
        },
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 8], "top": [16, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {"batch_size": 50, "device": "cpu"},
    }
    recipe = tmp_path / "small.yaml"
    recipe.write_text(yaml.safe_dump(given))
    measure, measured = module.measure_numericals, list[int]()

    def counted(trainer: Any, *args: Any) -> None:
        measured.append(len(trainer.model.normalization.unmeasured))
        measure(trainer, *args)

    monkeypatch.setattr(module, "measure_numericals", counted)
    status = main(
        ["tune", str(recipe), "--trials", "3", "--out", str(tmp_path / "runs"), "--json", str(tmp_path / "t")]
    )
    assert status == 0
    assert measured == [1, 0, 0]
    assert json.loads((tmp_path / "t").read_text())["best"]["value"] < 0.66  # 0.69 without the price
