"""Signals to one of several ranks, and checkpoints that one of them finds damaged."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from hotbed.checkpoint import checkpoints_in, verify_checkpoint
from tests.train.launcher import ENDLESS, Launcher, lines_of, the_run


def test_any_rank_may_be_asked_for_a_checkpoint_and_to_stop(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--plan", "row", "--train.keep_last", "9"]
    with launcher.start(tmp_path / "stopped", 3, *options, *ENDLESS) as started:
        started.wait_for(0, "err", "step 5/")
        started.send(2, signal.SIGUSR1)
        saved = the_run(tmp_path) / "checkpoints"
        started.wait_until(lambda: len(checkpoints_in(saved)) == 1)
        started.send(1, signal.SIGTERM)
        assert started.wait() == [143, 143, 143]
    asked, last = checkpoints_in(saved)
    step = verify_checkpoint(last).step
    assert 5 < verify_checkpoint(asked).step < step
    message = f"hotbed: stopped by a signal after step {step:,}. Resume with --resume {last}"
    assert message in started.text(0, "err")
    assert "stopped" not in started.text(1, "err") + started.text(2, "err")
    assert not (the_run(tmp_path) / "summary.json").exists()
    records = [line for line in lines_of(the_run(tmp_path)) if line["event"] == "checkpoint"]
    assert [record["path"] for record in records] == [asked.path, last.path]
    rest = ["--resume", str(saved), "--train.steps", str(step + 3), "--train.epochs", "100000", "--name", "again"]
    with launcher.start(tmp_path / "again", 3, *options, *rest) as started:
        assert started.wait() == [0, 0, 0], started.text(0, "err")
    (again,) = (tmp_path / "runs" / "again").iterdir()
    assert json.loads((again / "summary.json").read_text())["steps"] == step + 3


def test_ctrl_c_ends_all_ranks_with_a_checkpoint_and_a_second_one_at_once(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--plan", "row"]
    with launcher.start(tmp_path / "once", 2, *options, *ENDLESS) as started:
        started.wait_for(0, "err", "step 5/")
        for rank in (0, 1):
            started.send(rank, signal.SIGINT)
        assert started.wait() == [130, 130]
    (checkpoint,) = checkpoints_in(the_run(tmp_path) / "checkpoints")
    step = verify_checkpoint(checkpoint).step
    message = f"stopped by a signal after step {step:,}. Resume with --resume {checkpoint}"
    assert message in started.text(0, "err")
    model = ["--model.class_path", "tests.train.rank_models.Compiles", "--name", "twice"]
    with launcher.start(tmp_path / "twice", 2, *options, *model) as started:
        started.wait_for(0, "err", "Ctrl-C again to end it at once")
        time.sleep(0.5)  # the other rank's first one must be over
        for rank in (0, 1):
            started.send(rank, signal.SIGINT)
        assert started.wait() == [-signal.SIGINT, -signal.SIGINT]


@pytest.mark.full
def test_damage_that_one_rank_finds_is_avoided_by_all(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--plan", "row", "--resume", "auto"]
    options += ["--train.checkpoint_every", "4", "--train.keep_last", "9"]
    with launcher.start(tmp_path / "first", 2, *options, "--train.steps", "9") as started:
        assert started.wait() == [0, 0], started.text(0, "err")[-2000:]
    kept = the_run(tmp_path) / "checkpoints"
    (file,) = (kept / "last-00000009").glob("tables-00001-*")  # of rank 1's rows
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with launcher.start(tmp_path / "second", 2, *options) as started:
        assert started.wait() == [0, 0], started.text(0, "err")[-2000:]
    assert "last-00000009 was renamed to damaged-last-00000009-" in started.text(0, "err")
    assert "last-00000008 at step 8" in started.text(0, "err")
    assert [c.name for c in checkpoints_in(kept)] == [f"last-{step:08d}" for step in (4, 8, 12, 16, 19)]
    for checkpoint in checkpoints_in(kept):
        verify_checkpoint(checkpoint)
