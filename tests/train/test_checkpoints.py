"""Tests of the checkpoints of a run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotbed.checkpoint import (
    checkpoints_in,
    directory,
    find_checkpoint,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    snapshot,
    storage,
)
from hotbed.errors import CheckpointError
from hotbed.train import Callback, Trainer
from hotbed.train.checkpoints import Saver, refuse_other_checkpoints
from hotbed.train.directory_lock import OWNER, lock
from hotbed.train.runs.callbacks import EarlyStop, JsonLines, KeepBest, KeepLast, signals_to
from tests.train import planted
from tests.train.parallel_cases import RECIPE
from tests.train.planted import Losses
from tests.train.test_callbacks import TRAIN, Scripted


def names(folder: Path) -> list[str]:
    return [checkpoint.name for checkpoint in checkpoints_in(folder)]


class Do(Callback):
    """Does something after some steps."""

    def __init__(self, actions: dict[int, Any]) -> None:
        self.actions = actions

    def on_step(self, trainer: Trainer, loss: float) -> None:
        if trainer.step in self.actions:
            self.actions[trainer.step](trainer)


def ask(trainer: Trainer) -> None:
    trainer.ask_save = True


def test_the_newest_are_kept_and_some_for_good(tmp_path: Path) -> None:
    keep = KeepLast(tmp_path, RECIPE, every=2, keep_last=3, keep_every=6)
    trainer = planted.trainer(TRAIN, callbacks=[keep])
    trainer.fit(planted.batches(19))
    assert names(tmp_path) == [f"last-{step:08d}" for step in (6, 12, 16, 18, 19)]
    assert [record["step"] for record in trainer.saver.records] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 19]
    for record in trainer.saver.records:
        assert record["stalled_s"] > 0
        assert record["bytes"] > 1000


def test_a_checkpoint_can_be_asked_for(tmp_path: Path) -> None:
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, at_end=False), Do({3: ask})])
    trainer.fit(planted.batches(8))
    assert names(tmp_path) == ["last-00000004"]  # the step before was over
    assert not trainer.ask_save


def test_checkpoints_by_the_clock(tmp_path: Path) -> None:
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, minutes=1e-9, keep_last=9)])
    trainer.fit(planted.batches(4))
    assert names(tmp_path) == [f"last-{step:08d}" for step in (2, 3, 4)]


def test_signals_ask(tmp_path: Path) -> None:
    assert threading.current_thread() is threading.main_thread()
    usr1 = Do({2: lambda _: os.kill(os.getpid(), signal.SIGUSR1), 5: lambda _: os.kill(os.getpid(), signal.SIGTERM)})
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, keep_last=9), usr1])
    before = signal.getsignal(signal.SIGTERM)
    with signals_to(trainer):
        trainer.fit(planted.batches(20))
    assert signal.getsignal(signal.SIGTERM) == before
    assert names(tmp_path) == ["last-00000003", "last-00000006"]
    assert trainer.stop_requested
    assert trainer.step == 6


def test_a_run_that_is_told_to_stop_does_not_go_back_to_its_best(tmp_path: Path) -> None:
    def stop(trainer: Trainer) -> None:
        trainer.ask_save = trainer.ask_stop = True

    keep = KeepBest(tmp_path, RECIPE)
    last = KeepLast(tmp_path, RECIPE, at_end=False)
    callbacks = [last, Scripted([0.5, 0.4, 0.4, 0.4], keep, Losses()), keep, Do({3: stop})]
    trainer = planted.trainer(TRAIN, callbacks=callbacks)
    trainer.fit(planted.batches(9))
    assert names(tmp_path) == ["best-00000001", "last-00000004"]
    other = planted.trainer(TRAIN)
    load_checkpoint(tmp_path / "last-00000004", other.parts())
    assert str(other.model.state_dict()) == str(trainer.model.state_dict())


def test_callbacks_go_on_as_they_were(tmp_path: Path) -> None:
    recipe = replace(RECIPE, train=replace(RECIPE.train, monitor="auc"))
    first = [keep := KeepBest(tmp_path / "a", recipe), stop := EarlyStop(3, "auc")]
    trainer = planted.trainer(TRAIN, callbacks=[Scripted([0.5, 0.7, 0.6, 0.6], *first), *first])
    trainer.fit(planted.batches(4))
    save_checkpoint(tmp_path / "c", trainer.parts(), step=4)
    assert (keep.state_dict(), stop.state_dict()) == (
        {"monitor": "auc", "best": 0.7, "path": str(tmp_path / "a" / "best-00000002")},
        {"monitor": "auc", "best": 0.7, "waited": 2},
    )
    second = [again := KeepBest(tmp_path / "b", recipe), EarlyStop(3, "auc")]
    resumed = planted.trainer(replace(TRAIN, epochs=9), callbacks=[Scripted([0, 0, 0, 0, 0.65], *second), *second])
    load_checkpoint(tmp_path / "c", resumed.parts())
    assert resumed.samples == 4 * 64
    resumed.fit(planted.batches(9))
    assert resumed.step == 5  # the third evaluation that is not better
    assert again.state_dict()["path"] == str(tmp_path / "a" / "best-00000002")


def test_the_best_is_looked_for_anew_if_it_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = KeepBest(tmp_path, RECIPE)
    keep.load_state_dict({"monitor": "logloss", "best": 0.7, "path": str(tmp_path / "best-00000002")})
    assert "was removed; the best one is chosen" in caplog.text
    assert keep.state_dict()["path"] is None


def test_what_a_killed_run_left_unfinished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "last-00000007").mkdir()
    (tmp_path / "last-00000007" / "model.safetensors").write_text("half")
    (tmp_path / "last-words").mkdir()
    planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE)]).fit(planted.batches(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [OWNER, "last-00000002", "last-words"]


def test_to_wait_for_room_to_keep_rows_is_to_wait_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the watchdog asks: a slow disk is not a process that hangs."""
    monkeypatch.setattr(snapshot, "KEPT_BYTES", 0)
    seen, go_on, read = threading.Event(), threading.Event(), snapshot.Snapshot.read

    def slow(*args: Any) -> Any:
        assert go_on.wait(300)
        return read(*args)

    monkeypatch.setattr(snapshot.Snapshot, "read", slow)
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, every=1, at_end=False)])

    def watch() -> None:
        end = time.monotonic() + 300
        while time.monotonic() < end and not seen.is_set():
            # Between the start of a save and the next update nothing else says so.
            if trainer.saver._saving is not None and not trainer.saver._is_waiting and trainer.saver.is_waited_for:
                seen.set()
            time.sleep(0.01)
        go_on.set()

    watching = threading.Thread(target=watch)
    watching.start()
    trainer.fit(planted.batches(2))
    watching.join()
    assert seen.is_set()
    assert not trainer.saver.is_waited_for


def test_a_checkpoint_that_cannot_be_written_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = planted.trainer(
        TRAIN,
        callbacks=[
            KeepLast(tmp_path, RECIPE, every=3, background=False),
            Do({4: lambda _: monkeypatch.setattr(storage._LocalWriter, "write", full)}),
        ],
    )
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(planted.batches(50))
    assert names(tmp_path) == ["last-00000003"]


def test_the_claim_of_a_killed_process_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys\nfrom hotbed.train.directory_lock import lock\n"
        "from hotbed.checkpoint import directory\n"
        "lock(directory(sys.argv[1])).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert json.loads((tmp_path / OWNER).read_text())["pid"]
    with lock(directory(tmp_path)):
        pass


def test_checkpoints_of_another_run_are_not_mixed_with(tmp_path: Path) -> None:
    refuse_other_checkpoints(directory(tmp_path), None)
    for step in (3, 5):
        save_checkpoint(tmp_path / f"last-{step:08d}", {}, step=step)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another run, up to last-00000005"):
        refuse_other_checkpoints(directory(tmp_path), None)
    with pytest.raises(CheckpointError, match="another run"):
        refuse_other_checkpoints(directory(tmp_path), directory(tmp_path / "elsewhere" / "last-00000003"))
    with pytest.raises(CheckpointError, match=r"newer than last-00000003: last-00000005"):
        refuse_other_checkpoints(directory(tmp_path), directory(tmp_path / "last-00000003"))
    refuse_other_checkpoints(directory(tmp_path), directory(tmp_path / "x" / ".." / "last-00000005"))


def test_what_is_newer_or_called_otherwise_is_never_removed(tmp_path: Path) -> None:
    for name in ("last-00000099", "last-00000001-compact", "best-00000001"):
        save_checkpoint(tmp_path / name, {}, step=0)
    planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, every=1)]).fit(planted.batches(4))
    found = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert found == ["best-00000001", "last-00000001-compact", "last-00000004", "last-00000099"]
    assert names(tmp_path) == ["best-00000001", "last-00000004", "last-00000099"]


def test_steps_are_numbers(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 8):
        save_checkpoint(tmp_path / f"last-{step:08d}", {}, step=step)
    assert find_checkpoint(tmp_path).name == "last-100000000"


def test_the_best_is_what_is_evaluated_and_the_newest_what_is_gone_on_from(tmp_path: Path) -> None:
    for name in ("best-00000004", "best-00000002", "last-00000005"):
        save_checkpoint(tmp_path / name, {})
    assert find_checkpoint(tmp_path).name == "last-00000005"
    assert find_checkpoint(tmp_path, best=True).name == "best-00000004"


def test_a_signal_is_not_lost_to_the_clock(tmp_path: Path) -> None:
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, minutes=1000, at_end=False), Do({3: ask})])
    trainer.fit(planted.batches(6))
    assert names(tmp_path) == ["last-00000004"]


class AskAtTheEnd(Callback):
    """Asks to stop when there is no step any more that could hear it."""

    def on_eval(self, trainer: Trainer, metrics: Any) -> None:
        trainer.ask_save = trainer.ask_stop = True


def test_what_is_asked_in_the_last_evaluation_is_heard(tmp_path: Path) -> None:
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE), AskAtTheEnd()])
    trainer.fit(planted.batches(2), planted.batches(1, seed=3))
    assert trainer.stop_requested
    assert names(tmp_path) == ["last-00000002"]


def test_a_checkpoint_of_an_evaluated_step_is_of_after_the_evaluation(tmp_path: Path) -> None:
    valid = planted.batches(2, seed=9)
    recipe = replace(TRAIN, eval_every=2, epochs=3, log_every=2)

    def run(resume: Path | None, folder: Path, steps: int | None) -> tuple[int, list[dict[str, Any]]]:
        lines = folder / "metrics.jsonl"
        folder.mkdir()
        # Evaluations get worse from the second on, because nothing is learned with this rate.
        callbacks = [KeepLast(folder, RECIPE, every=2, keep_last=9), EarlyStop(3, "logloss"), JsonLines(lines)]
        trainer = planted.trainer(replace(recipe, steps=steps), callbacks=callbacks, lr=1e-9)
        batches = Fixed()
        if resume is not None:
            load_checkpoint(resume, trainer.parts())
            batches.load_state_dict({"at": trainer.position})
        trainer.fit(batches, valid)
        events = [json.loads(line) for line in lines.read_text().splitlines()]
        assert [e["step"] for e in events if e["event"] == "resume"] == ([] if resume is None else [batches.began])
        shown = [
            {k: v for k, v in e.items() if k not in ("stall_share", "queue_depth") and not k.endswith("_s")}
            for e in events
            if e["event"] not in ("checkpoint", "resume")
        ]
        return trainer.step, shown

    whole, events = run(None, tmp_path / "whole", None)
    for at in (2, 4, 6):
        steps, rest = run(tmp_path / "whole" / f"last-{at:08d}", tmp_path / f"from{at}", None)
        assert steps == whole
        assert rest == [event for event in events if event["step"] > at]


class Fixed:
    """The same batches every epoch, with a position."""

    def __init__(self) -> None:
        self.at = self.began = 0

    def __len__(self) -> int:
        return 7

    def __iter__(self) -> Iterator[Any]:
        start, self.at = self.at, 0
        for i, batch in enumerate(planted.batches(7)[start:], start + 1):
            self.at = i % 7
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.at = self.began = state["at"]


def test_the_wait_for_the_checkpoint_before_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, wait = storage._LocalWriter.finish, Saver.finish
    waiting = threading.Event()

    def slow(writer: Any) -> None:
        assert waiting.wait(60)  # however long the steps until then take
        time.sleep(0.3)
        finish(writer)

    def noted(saver: Saver) -> None:
        waiting.set()
        wait(saver)
        waiting.clear()

    monkeypatch.setattr(storage._LocalWriter, "finish", slow)
    monkeypatch.setattr(Saver, "finish", noted)
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, every=1)])
    trainer.fit(planted.batches(4))
    assert all(record["stalled_s"] > 0.1 for record in trainer.saver.records[1:])


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(storage.LocalDirectory, "remove_all", broken)
    planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, every=1)]).fit(planted.batches(3))
    assert "is saved, but the action after it failed" in caplog.text
    assert names(tmp_path)[-1] == "last-00000003"


def test_the_position_counters_and_losses_are_saved(tmp_path: Path) -> None:
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE)])
    trainer.fit(planted.batches(3))
    position = read_manifest(tmp_path / "last-00000003").parts["position"]
    assert (position["step"], position["epoch"], position["samples"]) == (3, 1, 3 * 64)
