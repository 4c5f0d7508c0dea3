"""When checkpoints are saved, which are kept, and who may use a directory of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hotbed.checkpoint import checkpoints_in, directory, load_checkpoint, read_manifest, save_checkpoint, storage
from hotbed.errors import CheckpointError
from hotbed.train import Callback, Trainer
from hotbed.train.callbacks import EarlyStop
from hotbed.train.claim import OWNER, Claim
from hotbed.train.keep import KeepBest, KeepLast
from hotbed.train.signals import signals_to
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
    assert trainer.told_to_stop
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
        {"best": 0.7, "path": str(tmp_path / "a" / "best-00000002")},
        {"best": 0.7, "waited": 2},
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
    keep.load_state_dict({"best": 0.7, "path": str(tmp_path / "best-00000002")})
    assert "is gone; the best is looked for anew" in caplog.text
    assert keep.state_dict()["path"] is None


def test_what_a_killed_run_left_unfinished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "last-00000007").mkdir()
    (tmp_path / "last-00000007" / "model.safetensors").write_text("half")
    (tmp_path / "last-words").mkdir()
    planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE)]).fit(planted.batches(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last-00000002", "last-words"]


def test_a_checkpoint_that_cannot_be_written_ends_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    trainer = planted.trainer(
        TRAIN,
        callbacks=[
            KeepLast(tmp_path, RECIPE, every=3, background=False),
            Do({3: lambda _: monkeypatch.setattr(storage._LocalWriter, "write", full)}),
        ],
    )
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(planted.batches(50))
    assert names(tmp_path) == ["last-00000003"]


def test_a_directory_belongs_to_one_run(tmp_path: Path) -> None:
    place = directory(tmp_path / "c")
    with Claim(place, None), pytest.raises(CheckpointError, match=rf"belongs to process {os.getpid()} on .*running"):
        Claim(place, None).__enter__()
    with Claim(place, None):
        pass
    assert list((tmp_path / "c").iterdir()) == []


def test_the_claim_of_a_killed_process_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from hotbed.train.claim import Claim; from hotbed.checkpoint import directory\n"
        "Claim(directory(sys.argv[1]), None).__enter__(); os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert json.loads((tmp_path / OWNER).read_text())["pid"]
    with Claim(directory(tmp_path), None):
        pass


def test_checkpoints_of_another_run_are_not_mixed_with(tmp_path: Path) -> None:
    for step in (3, 5):
        save_checkpoint(tmp_path / f"last-{step:08d}", {}, step=step)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of another run, up to last-00000005; go on from"):
        Claim(directory(tmp_path), None).__enter__()
    with pytest.raises(CheckpointError, match="another run"):
        Claim(directory(tmp_path), directory(tmp_path / "elsewhere" / "last-00000003")).__enter__()
    with Claim(directory(tmp_path), directory(tmp_path / "last-00000003")):
        pass


def test_the_position_counters_and_losses_are_saved(tmp_path: Path) -> None:
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE)])
    trainer.fit(planted.batches(3))
    position = read_manifest(tmp_path / "last-00000003").parts["position"]
    assert (position["step"], position["epoch"], position["samples"]) == (3, 1, 3 * 64)
