"""Ranks that die or hang: the others end soon and say which one it was."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from hotbed.checkpoint import checkpoints_in, verify_checkpoint
from tests.train.launcher import ENDLESS, PATIENCE_S, Launcher, Processes, lines_of, the_run

EXCHANGE = re.compile(r"the exchange of [\w' ]+ failed: rank (\d) has ended, or did not answer in time")
AVERAGE = re.compile(
    r"(?:one of ranks|rank) (\d(?:, \d)*) ended or does not answer, so gradients cannot be averaged; its "
)


def assert_it_is_said_who_died(started: Processes, dead: int, first_step: int) -> None:
    """Who notices may itself be what the third one misses, so a chain of messages leads to the rank that died."""
    blamed: dict[int, list[int]] = {}
    for rank in {0, 1, 2} - {dead}:
        error = started.error(rank)
        found = re.match(rf"hotbed: error: rank {rank} of 3, step (\d+): ", error)
        assert found, started.text(rank, "err")[-3000:]
        assert int(found[1]) >= first_step
        what = EXCHANGE.match(error, found.end()) or AVERAGE.match(error, found.end())
        assert what, error
        assert "Traceback" not in started.text(rank, "err")
        blamed[rank] = [int(r) for r in what[1].split(", ")]
    assert any(dead in others for others in blamed.values()), blamed
    for others in blamed.values():
        assert any(r == dead or dead in blamed[r] for r in others), blamed


def test_when_a_rank_is_killed_the_others_end_and_the_run_can_be_gone_on_with(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    # The others must not wait for the timeout: this test would not.
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--parallel.timeout_s", str(10 * PATIENCE_S)]
    first = ["--plan", "row", "--train.checkpoint_every", "10", "--train.keep_last", "1000"]
    with launcher.start(tmp_path / "killed", 3, *options, *ENDLESS, *first) as started:
        started.wait_for(0, "err", "step 10/")
        run = the_run(tmp_path)
        started.wait_until(lambda: bool(checkpoints_in(run / "checkpoints")))  # they are written in the background
        checkpoint = checkpoints_in(run / "checkpoints")[0]
        step = int(checkpoint.name.removeprefix("last-"))
        started.wait_for(0, "err", f"step {step + 2}/")
        started.send(1, signal.SIGKILL)
        assert started.wait() == [2, -signal.SIGKILL, 2]
    assert_it_is_said_who_died(started, 1, step + 2)
    assert started.text(0, "out") == ""
    assert not (run / "summary.json").exists()
    verify_checkpoint(checkpoint)
    rest = ["--plan", str(run / "plan.json"), "--resume", str(checkpoint), "--train.steps", str(step + 3)]
    rest += ["--train.epochs", "100000", "--name", "again", "--train.log_every", "1"]
    with launcher.start(tmp_path / "again", 3, *options, *rest) as started:
        assert started.wait() == [0, 0, 0], started.text(0, "err")
    (again,) = (tmp_path / "runs" / "again").iterdir()
    summary = json.loads((again / "summary.json").read_text())
    assert (summary["steps"], summary["samples"], summary["ranks"]) == (step + 3, (step + 3) * 128, 3)
    assert (again / "plan.json").read_text() == (run / "plan.json").read_text()
    # The last steps before the death are done again, to the bit.
    before = {line["step"]: line["loss"] for line in lines_of(run) if line["event"] == "train"}
    after = {line["step"]: line["loss"] for line in lines_of(again) if line["event"] == "train"}
    assert sorted(after) == [step + 1, step + 2, step + 3]
    both = before.keys() & after.keys()
    assert both >= {step + 1, step + 2}
    assert [after[s] for s in both] == [before[s] for s in both]
    assert started.text(0, "out").count("run: ") == 1
    assert started.text(1, "out") == started.text(2, "out") == ""


@pytest.mark.full
def test_when_a_rank_hangs_the_others_end_after_the_timeout(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "runs"), "--train.checkpoint", "none", "--parallel.timeout_s", "30"]
    with launcher.start(tmp_path / "stopped", 3, str(recipe), *options, *ENDLESS) as started:
        started.wait_for(0, "err", "step 5/")
        started.send(2, signal.SIGSTOP)
        assert started.wait(0, 1) == [2, 2]
        assert started.text(2, "code") == ""
    assert_it_is_said_who_died(started, 2, 5)


def test_when_a_rank_dies_before_dense_gradients_are_averaged_the_others_say_so(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    options = ["--out", str(tmp_path / "runs"), "--train.checkpoint", "none", "--parallel.timeout_s", str(PATIENCE_S)]
    options += ["--model.class_path", "tests.train.rank_models.DiesInBackward"]
    with launcher.start(tmp_path / "dead", 3, str(recipe), *options, *ENDLESS) as started:
        assert started.wait() == [2, 3, 2], started.error(0) + started.error(2)
    assert_it_is_said_who_died(started, 1, 4)
    for rank in (0, 2):
        assert ", step 4: " in started.error(rank)
        assert "gradients" in started.error(rank)


@pytest.mark.full
def test_a_rank_that_hangs_ends_itself_and_says_where(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    # The other must not wait for its timeout: this test would not.
    options = ["--out", str(tmp_path / "runs"), "--parallel.timeout_s", str(10 * PATIENCE_S)]
    options += ["--train.step_limit_s", "20", "--model.class_path", "tests.train.rank_models.Hangs"]
    with launcher.start(tmp_path / "hung", 2, str(recipe), *options) as started:
        assert started.wait() == [2, 2]
    file = the_run(tmp_path) / "stacks-1.txt"
    assert re.fullmatch(
        r"hotbed: error: rank 1 of 2, step 4: no batch was finished within 20 s, so this process ends. It is "
        rf"in wait \(.*/threading.py:\d+\); stacks of its threads are in {file}. Raise train.step_limit_s if the step "
        "was only slow",
        started.error(1),
    ), started.text(1, "err")
    stacks = file.read_text()
    assert re.search(r'rank_models.py", line \d+ in hang', stacks)
    assert re.search(r"rank 0 of 2, step 4: .*rank 1 .*See the output of that rank", started.error(0))
    assert not (the_run(tmp_path) / "stacks-0.txt").exists()


@pytest.mark.full
def test_a_process_that_hangs_with_pythons_lock_is_ended(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "runs"), "--train.step_limit_s", "20"]
    options += ["--model.class_path", "tests.train.rank_models.HoldsTheLock"]
    with launcher.start(tmp_path / "hung", 1, str(recipe), *options) as started:
        assert started.wait() == [1]
    assert "Timeout (0:00:2" in started.text(0, "err")
    assert re.search(r'rank_models.py", line \d+ in hang', started.text(0, "err"))
