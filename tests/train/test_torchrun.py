"""``hotbed train`` under torchrun and in several processes: what it says, and how it starts again."""

from __future__ import annotations

import json
import re
import signal
import time
from itertools import pairwise
from pathlib import Path

import pytest

from hotbed.checkpoint import checkpoints_in, verify_checkpoint
from hotbed.plan import Plan
from tests.train.launcher import ENDLESS, PATIENCE_S, Launcher, lines_of, output_of, the_run, torchrun
from tests.train.rank_models import DiesOnce, DiesTwice


def test_torchrun_trains_one_model_and_says_everything_once(recipe: Path, tmp_path: Path) -> None:
    options = ["--plan", "table", "--data.valid_split", "valid", "--train.log_every", "5", "--train.eval_every", "10"]
    done = torchrun(tmp_path, str(recipe), *options)
    stdout, stderr = output_of(done)
    assert done.returncode == 0, stderr
    run = the_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    assert sorted(path.name for path in run.iterdir()) == [
        "checkpoints",
        "metrics.jsonl",
        "plan.json",
        "recipe.yaml",
        "summary.json",
    ]
    assert (summary["ranks"], summary["steps"], summary["samples"], summary["epochs"]) == (2, 19, 2400, 1)
    assert 0 <= summary["ids_exchange_hidden_share"] <= 1
    assert summary["test"]["samples"] == 300
    assert 0.5 < summary["test"]["auc"] < 1
    assert [(line["event"], line["step"]) for line in lines_of(run)] == [
        ("train", 5),
        ("train", 10),
        ("eval", 10),
        ("train", 15),
        ("train", 19),
        ("checkpoint", 19),
    ]
    plan = Plan.from_json((run / "plan.json").read_text())
    assert plan.world_size == 2
    assert len(plan.by_table) == 26
    (checkpoint,) = checkpoints_in(run / "checkpoints")
    verify_checkpoint(checkpoint)
    assert stdout.count("small: test, 300 samples") == 1
    assert stdout.count("19 steps, 2,400 samples") == 1
    assert stdout.count("2 processes; ") == 1
    assert stdout.count("run: ") == 1
    assert len(re.findall(r"^step 10/19 ", stderr, flags=re.MULTILINE)) == 1
    assert stderr.count("valid AUC") == 1


def restarted(recipe: Path, folder: Path, model: type[DiesOnce]) -> list[str]:
    """Have torchrun start a run again as often as it dies; its options."""
    options = ["--train.checkpoint_every", "3", "--train.log_every", "1"]
    options += [
        "--model.class_path",
        f"tests.train.rank_models.{model.__name__}",
        "--parallel.timeout_s",
        str(PATIENCE_S),
    ]
    done = torchrun(folder, "--max-restarts", str(len(model.deaths)), str(recipe), *options)
    _, stderr = output_of(done)
    assert done.returncode == 0, stderr
    run = the_run(folder)
    assert stderr.count("under torchrun, the newest run of this recipe is resumed") == (len(model.deaths) + 1)
    assert stderr.count("no checkpoint to resume") == 1
    assert stderr.count("resumed from ") == len(model.deaths)
    lines = lines_of(run)
    steps = [0, *(line["step"] for line in lines if line["event"] == "resume")]
    assert len(steps) == len(model.deaths) + 1 and steps[1] in (3, 6)  # checkpoints are written in the background
    assert all(first < second <= first + 6 for first, second in pairwise(steps))
    assert json.loads((run / "summary.json").read_text())["steps"] == 19
    losses: dict[int, set[float]] = {}
    for line in lines:
        if line["event"] == "train":
            losses.setdefault(line["step"], set()).add(line["loss"])
    assert sorted(losses) == [*range(1, 20)]
    assert all(len(of_step) == 1 for of_step in losses.values())  # what was trained twice is the same, to the bit
    return options


def test_torchrun_starts_a_run_again_that_goes_on_from_its_newest_checkpoint(recipe: Path, tmp_path: Path) -> None:
    restarted(recipe, tmp_path, DiesOnce)


@pytest.mark.full
def test_torchrun_starts_a_run_again_twice_and_a_finished_one_trains_nothing(recipe: Path, tmp_path: Path) -> None:
    options = restarted(recipe, tmp_path, DiesTwice)
    run = the_run(tmp_path)
    lines = lines_of(run)
    again = torchrun(tmp_path, str(recipe), *options)
    stdout, stderr = output_of(again)
    assert again.returncode == 0, stderr
    assert stderr.count("is finished after 19 steps") == 1
    assert stdout.count("small: test, 300 samples") == 1
    assert len(lines_of(run)) == len(lines)


@pytest.mark.full
def test_torchrun_hands_ctrl_c_on_and_every_rank_saves(recipe: Path, tmp_path: Path) -> None:
    started = torchrun(tmp_path, str(recipe), "--resume", "auto", *ENDLESS)
    try:
        end = time.monotonic() + PATIENCE_S
        while not list(tmp_path.glob("runs/small/*/metrics.jsonl")):
            assert started.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
    finally:
        started.send_signal(signal.SIGINT)
    _, stderr = output_of(started)
    assert started.returncode == 1  # torchrun's, whatever its processes end with
    assert "stopped by a signal after step " in stderr
    (checkpoint,) = checkpoints_in(the_run(tmp_path) / "checkpoints")
    verify_checkpoint(checkpoint)


@pytest.mark.full
def test_replicas_are_trained_averaged_and_reported(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--plan", "row", "--parallel.replicas", "2", "--parallel.sync_every", "4"]
    options += ["--memory.tier", "disk", "--memory.cache_rows", "500"]
    with launcher.start(tmp_path / "ranks", 4, str(recipe), *options, "--out", str(tmp_path / "runs")) as started:
        assert started.wait() == [0, 0, 0, 0], started.text(0, "err")[-2000:]
    run = the_run(tmp_path)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["ranks"], summary["replicas"], summary["syncs"]) == (4, 2, 5)
    assert summary["sync_bytes"] > 0 and summary["sync_s"] > 0 and summary["imbalance_lookups"] >= 1
    assert summary["memory"]["hits"] > 0
    assert Plan.from_json((run / "plan.json").read_text()).world_size == 2
    (checkpoint,) = checkpoints_in(run / "checkpoints")
    verify_checkpoint(checkpoint)


@pytest.mark.full
def test_replicas_that_do_not_divide_the_processes(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--parallel.replicas", "2", "--out", str(tmp_path / "runs")]
    with launcher.start(tmp_path / "ranks", 3, str(recipe), *options) as started:
        assert started.wait() == [2, 2, 2]
    assert started.error(0).endswith(
        "replicas: got 2, expected a divisor of the 3 ranks. Choose one of 1, 3, or start another number of processes"
    )


def test_a_plan_that_there_is_not(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    with launcher.start(
        tmp_path / "ranks", 2, str(recipe), "--plan", "tabel", "--out", str(tmp_path / "runs")
    ) as started:
        assert started.wait() == [2, 2]
    for rank in range(2):
        assert started.error(rank).startswith(f"hotbed: error: rank {rank}: plan tabel does not exist.")
        assert "Traceback" not in started.text(rank, "err")
        assert started.text(rank, "out") == ""
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
def test_what_the_first_rank_cannot_find_ends_all(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--resume", str(tmp_path / "nowhere"), "--out", str(tmp_path / "runs")]
    with launcher.start(tmp_path / "ranks", 2, str(recipe), *options) as started:
        assert started.wait() == [2, 2]
    assert "nowhere is neither a checkpoint (manifest.json), nor a run's directory" in started.error(0)
    expected = "hotbed: error: rank 0 cannot find the checkpoint to resume"
    assert started.error(1).startswith(expected)
    assert not (tmp_path / "runs").exists()
