"""Tests of resumed runs and damaged checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from hotbed.batch import Batch
from hotbed.checkpoint import checkpoints_in, differential, directory, find_checkpoint, runs_in, save_checkpoint
from hotbed.checkpoint.manifest import base_of
from hotbed.cli.main import main
from hotbed.nn import DLRM
from hotbed.train import Trainer
from hotbed.train.directory_lock import lock
from hotbed.train.step import TrainingStep
from tests.checkpoint.damage import flip_last_bit
from tests.cli.cases import Output, refused, train
from tests.matrix import full

# -- ``--resume`` and ``--init_from``: where a run goes on, what it begins with, and what is left of it.

AUTO = ["--resume", "auto"]
OFTEN = ["--train.checkpoint_every", "3", "--train.keep_last", "9", "--train.log_every", "1"]


def runs(recipe: Path) -> list[Path]:
    return [Path(run.path) for run in runs_in(recipe.parent / "runs" / "small")]


def names(run: Path) -> list[str]:
    return [checkpoint.name for checkpoint in checkpoints_in(run / "checkpoints")]


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


class Killed(BaseException):
    """As a signal ends a process, with nothing of hotbed's running any more."""


def train_until_killed(recipe: Path, step: int, *args: str) -> None:
    """Train, and be killed after a step."""
    advance = Trainer._advance

    def kill(trainer: Trainer, *args: Any) -> None:
        advance(trainer, *args)
        if trainer.step == step:
            raise Killed

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Trainer, "_advance", kill)
        train(recipe, *args)


@pytest.fixture
def killed(recipe: Path) -> Path:
    """The directory of a run that was killed after step 10, with checkpoints of steps 3, 6 and 9."""
    train_until_killed(recipe, 10, *OFTEN, *AUTO)
    (run,) = runs(recipe)
    assert names(run) == ["last-00000003", "last-00000006", "last-00000009"]
    return run


# -- auto ----------------------------------------------------------------------------------------------------------


def test_auto_begins_and_after_a_crash_goes_on_in_the_same_directory(
    recipe: Path, killed: Path, capsys: Output
) -> None:
    capsys.readouterr()
    status, summary, run = train(recipe, *OFTEN, *AUTO)
    assert (status, summary["steps"], runs(recipe)) == (0, 19, [killed])
    assert run == killed
    assert f"resumed from {killed}/checkpoints/last-00000009 at step 9" in capsys.readouterr().err
    steps = [(line["event"], line["step"]) for line in lines_of(run) if line["event"] in ("train", "resume")]
    assert steps == [("train", s) for s in range(1, 11)] + [("resume", 9)] + [("train", s) for s in range(10, 20)]
    losses = [(line["step"], line["loss"]) for line in lines_of(run) if line["event"] == "train"]
    assert losses[9] == losses[10]
    _, whole, _ = train(recipe, *OFTEN, "--name", "whole")
    assert summary["test"] == whole["test"]


def test_a_run_that_is_finished_says_so_and_trains_nothing(
    recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, first, run = train(recipe, *AUTO)
    assert "no checkpoint to resume; a new run starts" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", None)
        status, again, _ = train(recipe, *AUTO)
    assert (status, again, runs(recipe)) == (0, first, [run])
    captured = capsys.readouterr()
    assert f"{run} is finished after 19 steps" in captured.err
    assert "small: test, 300 samples" in captured.out
    status, shorter, _ = train(recipe, *AUTO, "--train.steps", "5")
    assert (status, shorter) == (0, first)
    assert json.loads((run / "summary.json").read_text()) == first
    status, more, _ = train(recipe, *AUTO, "--train.epochs", "2")
    assert (status, more["steps"], more["run"], runs(recipe)) == (0, 38, str(run), [run])
    assert "dense_optimizer.init_args.lr was 0.01 and is now 0.5" in refused(
        ["train", str(recipe), "--out", str(recipe.parent / "runs"), *AUTO, *LR], capsys
    )


LR = ["--dense_optimizer.init_args.lr", "0.5"]


def test_a_finished_run_that_goes_on_and_is_killed_is_not_finished(recipe: Path) -> None:
    longer = [*OFTEN, *AUTO, "--train.epochs", "2"]
    _, _, run = train(recipe, *OFTEN, *AUTO)
    train_until_killed(recipe, 30, *longer)
    status, summary, again = train(recipe, *longer)
    assert (status, summary["steps"], again) == (0, 38, run)


def test_a_directory_of_checkpoints_is_the_same_however_it_is_written(recipe: Path) -> None:
    place = recipe.parent / "elsewhere"
    _, first, run = train(recipe, *AUTO, "--train.checkpoint_dir", str(place))
    other = f"{recipe.parent}/runs/../elsewhere"
    assert train(recipe, *AUTO, "--train.checkpoint_dir", other)[1:] == (first, run)


def test_a_run_that_was_killed_before_its_test_is_tested(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, first, run = train(recipe, *AUTO)
    (run / "summary.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "queue", None)
        status, again, _ = train(recipe, *AUTO)
    assert (status, again["test"], again["run"]) == (0, first["test"], str(run))
    assert json.loads((run / "summary.json").read_text())["steps"] == 19


def test_another_recipe_and_a_run_that_is_running_are_refused(recipe: Path, killed: Path, capsys: Output) -> None:
    argv = ["train", str(recipe), "--out", str(recipe.parent / "runs"), *AUTO, *OFTEN]
    assert "dense_optimizer.init_args.lr was 0.01 and is now 0.5" in refused([*argv, *LR], capsys)
    with lock(directory(killed / "checkpoints")):
        assert "belongs to process" in refused(argv, capsys)
    message = refused([*argv[:-6], "--train.checkpoint", "none"], capsys)
    assert "train.checkpoint is 'none'" in message
    assert (runs(recipe), len(names(killed))) == ([killed], 3)
    assert train(recipe, *AUTO, *OFTEN)[0] == 0  # the claim ended with each of them


def test_auto_with_a_directory_of_checkpoints(recipe: Path, capsys: Output) -> None:
    place = recipe.parent / "elsewhere"
    kept = ["--train.checkpoint_dir", str(place)]
    _, _, begun = train(recipe, *AUTO, *kept, "--train.steps", "5")
    _, summary, run = train(recipe, *AUTO, *kept, "--train.steps", "8")
    assert (summary["steps"], run) == (8, begun)
    assert "resumed from " + str(place / "last-00000005") in capsys.readouterr().err
    # Another machine, where nothing is left but the checkpoints.
    shutil.rmtree(recipe.parent / "runs")
    _, summary, run = train(recipe, *AUTO, *kept, "--train.steps", "9")
    assert summary["steps"] == 9
    assert [checkpoint.name for checkpoint in checkpoints_in(place)] == ["last-00000009"]
    # Runs of this name that keep their checkpoints elsewhere are others.
    assert train(recipe, "--train.steps", "2")[0] == 0
    assert train(recipe, *AUTO, *kept, "--train.steps", "10")[2] == run


def test_auto_with_the_best_checkpoint(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = ["--train.checkpoint", "best", "--data.valid_split", "valid", "--train.eval_every", "4"]
    _, first, run = train(recipe, *AUTO, *best)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "fit", None)
        status, again, _ = train(recipe, *AUTO, *best)  # the best step is not the last one
    assert (status, again, runs(recipe)) == (0, first, [run])


# -- under torchrun ------------------------------------------------------------------------------------------------


@pytest.fixture
def under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")


@pytest.mark.usefixtures("under_torchrun")
def test_under_torchrun_a_run_of_this_recipe_is_gone_on_with(recipe: Path, capsys: Output) -> None:
    train_until_killed(recipe, 10, *OFTEN)
    (first,) = runs(recipe)
    train_until_killed(recipe, 5, *OFTEN, "--train.seed", "1")  # another run of this name, which may be under way
    other = runs(recipe)[-1]
    capsys.readouterr()
    status, _, run = train(recipe, *OFTEN)
    shown = capsys.readouterr().err
    assert (status, run) == (0, first)
    assert "--resume none" in shown
    assert f"resumed from {first}/checkpoints/last-00000009 at step 9" in shown
    assert train(recipe, *OFTEN, "--train.seed", "1")[2] == other
    capsys.readouterr()
    assert train(recipe, *OFTEN)[2] == first
    assert "Raise train.steps or train.epochs" in (capsys.readouterr().err)
    assert train(recipe, *OFTEN, "--resume", "none")[2] not in (first, other)


@pytest.mark.usefixtures("under_torchrun")
def test_under_torchrun_other_data_and_another_warm_start_are_other_runs(recipe: Path, prepared: Path) -> None:
    _, _, first = train(recipe, "--train.steps", "2")
    shutil.copytree(prepared, recipe.parent / "day2")
    _, _, second = train(recipe, "--train.steps", "2", "--data.path", str(recipe.parent / "day2"))
    _, _, third = train(recipe, "--train.steps", "2", "--init_from", str(first))
    _, _, fourth = train(recipe, "--train.steps", "2", "--train.checkpoint", "none")
    assert runs(recipe) == [first, second, third, fourth]
    (first / "recipe.yaml").write_text("")  # a run that cannot be read is another one, too
    assert train(recipe, "--train.steps", "2")[2] not in (first, second, third, fourth)


# -- paths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--train.steps", "7"], "step 7 is reached and train.steps is 7"),
        (["--train.epochs", "1"], "epoch 1 is over and train.epochs is 1"),
    ],
)
def test_to_go_on_with_what_is_finished_is_refused(args: list[str], message: str, recipe: Path, capsys: Output) -> None:
    _, _, run = train(recipe, *args)
    found = refused(["train", str(recipe), "--out", str(recipe.parent / "runs"), *args, "--resume", str(run)], capsys)
    assert "belongs to a finished run: " + message.strip("; ") in found
    assert runs(recipe) == [run]


def test_a_run_that_was_stopped_early_is_finished(
    recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is learned at this rate, so that no evaluation is better than the first.
    slow = ["--dense_optimizer.init_args.lr", "0.0", "--sparse_optimizer.init_args.lr", "0.0"]
    early = [*slow, "--data.valid_split", "valid", "--train.eval_every", "2", "--train.patience", "2"]
    _, summary, run = train(recipe, *early)
    assert summary["steps"] == 6
    argv = ["train", str(recipe), "--out", str(recipe.parent / "runs"), *early]
    assert "2 evaluations in a row did not improve" in refused([*argv, "--resume", str(run)], capsys)
    (run / "summary.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "queue", None)
        assert train(recipe, *early, *AUTO)[1]["steps"] == 6
    assert train(recipe, *early[:-1], "3", *AUTO)[1]["steps"] == 8


def test_runs_of_one_second_are_numbers(tmp_path: Path) -> None:
    found = ["20260101-000000", "20260101-000000-2", "20260101-000000-10", "20260102-000000"]
    for name in [*found, "20260103-latest", "data"]:
        save_checkpoint(tmp_path / name / "checkpoints" / "last-00000001", {})
    assert [run.name for run in runs_in(tmp_path)] == found
    assert find_checkpoint(tmp_path).path == str(tmp_path / found[-1] / "checkpoints" / "last-00000001")


# -- Ctrl-C --------------------------------------------------------------------------------------------------------


class Interrupted(DLRM):
    """Gets Ctrl-C in its first batch, as when kernels are being compiled."""

    def forward(self, batch: Batch) -> Tensor:
        if not hasattr(self, "began"):
            self.began = True
            os.kill(os.getpid(), signal.SIGINT)
        return super().forward(batch)


def test_ctrl_c_saves_and_ends_with_130_also_in_the_first_batch(recipe: Path, capfd: Output) -> None:
    before = signal.getsignal(signal.SIGINT)
    model = ["--model.class_path", f"{__name__}.Interrupted"]
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where tests run in the background
        assert train(recipe, *model)[0] == 130
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    (run,) = runs(recipe)
    assert names(run) == ["last-00000001"]
    shown = capfd.readouterr().err
    assert "hotbed: training ends after the current step; press Ctrl-C again" in shown
    assert f"stopped by a signal after step 1. Resume with --resume {run}/checkpoints/last-00000001" in shown


def test_a_signal_that_is_ignored_stays_ignored(recipe: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert train(recipe, "--model.class_path", f"{__name__}.Interrupted", "--train.steps", "3")[0] == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_outside_of_training_interrupts(recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, argv in (
        ("hotbed.train.runs.run.build", ["train", str(recipe), "--out", str(recipe.parent / "runs")]),
        ("hotbed.cli.inspect.describe_path", ["inspect", str(recipe)]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
            assert main(argv) == 130
        assert capsys.readouterr().err == "hotbed: interrupted\n"
    assert not (recipe.parent / "runs").exists()


# -- ``--resume auto`` where checkpoints are damaged, or lack what they need: what is taken, set aside or left alone.


def file_of(checkpoint: Path, part: str) -> Path:
    (file,) = checkpoint.glob(f"{part}-*.safetensors")
    return file


def test_a_damaged_checkpoint_is_not_taken_but_the_one_before_it(recipe: Path, killed: Path, capsys: Output) -> None:
    flip_last_bit(file_of(killed / "checkpoints" / "last-00000009", "model"))
    (killed / "checkpoints" / "last-00000010").mkdir()
    (killed / "checkpoints" / "last-00000010" / "model.safetensors").write_text("half")
    (killed / "checkpoints" / "last-00000002").mkdir()  # older ones are of no interest
    capsys.readouterr()
    status, summary, _ = train(recipe, *OFTEN, *AUTO)
    shown = capsys.readouterr().err
    assert status == 0
    assert "warning: " in shown
    assert "block 0 of 1" in shown
    assert "last-00000009 was renamed to damaged-last-00000009-" in shown
    assert "last-00000010 is incomplete and is ignored" in shown
    assert "last-00000002" not in shown
    assert f"resumed from {killed}/checkpoints/last-00000006 at step 6" in shown
    assert names(killed) == [f"last-{step:08d}" for step in (3, 6, 9, 12, 15, 18, 19)]
    assert summary["test"] == train(recipe, "--name", "whole")[1]["test"]


def test_differences_to_a_damaged_base_are_not_taken_but_the_full_one_before(
    recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differential, "MOST_SHARE", 10.0)
    options = [*OFTEN, *AUTO, "--train.checkpoint_full_every", "2"]
    train_until_killed(recipe, 16, *options)
    (run,) = runs(recipe)
    place = run / "checkpoints"
    assert {name: base_of(directory(place / name)) for name in names(run)} == {
        "last-00000003": None,
        "last-00000006": "last-00000003",
        "last-00000009": None,
        "last-00000012": "last-00000009",
        "last-00000015": None,
    }
    shutil.rmtree(place / "last-00000015")
    file = file_of(place / "last-00000009", "tables")
    flip_last_bit(file)
    capsys.readouterr()
    status, summary, _ = train(recipe, *options)
    shown = capsys.readouterr().err
    assert status == 0
    for name in ("last-00000012", "last-00000009"):
        assert f"{name} was renamed to damaged-{name}-" in shown
    assert f"warning: {place}/last-00000009/{file.name}: block 0 of 1" in shown  # why the difference is not taken
    assert f"resumed from {place}/last-00000006 at step 6" in shown
    assert summary["test"] == train(recipe, "--name", "whole")[1]["test"]


@pytest.mark.parametrize("how", ["text", "file", full("bytes")])
def test_what_counts_as_damage(how: str, recipe: Path, killed: Path, capsys: Output) -> None:
    place = killed / "checkpoints" / "last-00000009"
    if how == "text":
        (place / "manifest.json").write_text((place / "manifest.json").read_text()[:-100])
    elif how == "file":
        file_of(place, "dense").unlink()
    else:
        file_of(place, "dense").write_bytes(b"")
    assert train(recipe, *AUTO, *OFTEN)[0] == 0
    assert "last-00000009 was renamed to damaged-last-00000009-" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["absent", "another"])
def test_a_difference_whose_base_is_not_there_is_left_alone(
    how: str, recipe: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(differential, "MOST_SHARE", 10.0)
    options = [*OFTEN, *AUTO, "--train.checkpoint_full_every", "3"]
    train_until_killed(recipe, 10, *options)
    (run,) = runs(recipe)
    place = run / "checkpoints"
    base, last = place / "last-00000003", place / "last-00000009"
    assert base_of(directory(last)) == base.name
    base.rename(place / "moved")
    if how == "another":
        save_checkpoint(base, {"model": nn.Linear(2, 2)})
    before = {file.name: file.read_bytes() for file in last.iterdir()}
    argv = ["train", str(recipe), "--out", str(recipe.parent / "runs"), *options]
    message = refused(argv, capsys)
    assert f"its base {base}" in message or f"base {base}: got" in message
    assert ("does not exist" if how == "absent" else "Copy both checkpoints again") in message
    assert {file.name: file.read_bytes() for file in last.iterdir()} == before
    shutil.rmtree(base, ignore_errors=True)
    (place / "moved").rename(base)
    capsys.readouterr()
    assert train(recipe, *options)[0] == 0
    assert f"resumed from {last} at step 9" in capsys.readouterr().err


# -- virtual ranks -------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_its_virtual_ranks(recipe: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its own recipe has none; another number is used, and said."""
    several = ["--parallel.virtual_ranks", "4"]
    expected = train(recipe, *OFTEN, "--name", "straight", *several)[1]["test"]
    other = train(recipe, *OFTEN, "--name", "other")[1]["test"]
    assert expected != other
    train_until_killed(recipe, 10, *OFTEN, *AUTO, *several)
    assert "virtual ranks" not in caplog.text
    assert train(recipe, *AUTO, *OFTEN)[1]["test"] == expected
    train_until_killed(recipe, 10, *OFTEN, "--name", "again", *several)
    changed = train(recipe, *AUTO, *OFTEN, "--name", "again", "--parallel.virtual_ranks", "2")[1]["test"]
    assert "the run had 4 virtual ranks and now has 2" in caplog.text
    assert changed not in (expected, other)
