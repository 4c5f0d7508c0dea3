"""Protects: a run that saves differences keeps what they need, and goes on from any of them to the same bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hotbed.checkpoint import differential, load_checkpoint, read_manifest, verify_checkpoint
from hotbed.checkpoint.manifest import base_of
from hotbed.checkpoint.storage import directory
from hotbed.train import Callback, Trainer
from hotbed.train.runs.callbacks import EarlyStop, KeepBest, KeepLast, remove_unneeded
from tests.fixtures.models import sha256
from tests.train import planted
from tests.train.parallel_cases import RECIPE
from tests.train.test_callbacks import TRAIN, Scripted
from tests.train.test_checkpoints import Fixed, names

EVERY_THIRD = replace(TRAIN, checkpoint_full_every=3)


@pytest.fixture(autouse=True)
def any_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets differences hold all rows, which change within a few steps of these small tables."""
    monkeypatch.setattr(differential, "MOST_SHARE", 10.0)


class Seen(Callback):
    """Lists and reads what is in a directory after every step."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.names = folder, list[list[str]]()

    def on_step_end(self, trainer: Trainer) -> None:
        found = names(self._folder)
        for name in found:
            read_manifest(self._folder / name)
        self.names.append([f"{name[:4]}{int(name[5:])}" for name in found])


def test_a_base_stays_as_long_as_a_difference_that_is_kept(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    keep = KeepLast(tmp_path, RECIPE, every=1, background=False, keep_every=6)
    trainer = planted.trainer(EVERY_THIRD, callbacks=[keep, seen])
    trainer.fit(planted.batches(8))
    assert seen.names == [
        ["last1"],
        ["last1", "last2"],
        ["last1", "last3"],
        ["last4"],
        ["last4", "last5"],
        ["last4", "last6"],
        ["last4", "last6", "last7"],  # the sixth is kept for good, and with it its base
        ["last4", "last6", "last7", "last8"],
    ]
    bases = [record.get("base") for record in trainer.saver.records]
    first, second, third = (f"last-{step:08d}" for step in (1, 4, 7))
    assert bases == [None, first, first, None, second, second, None, third]
    assert [base_of(directory(tmp_path / name)) for name in names(tmp_path)] == [None, second, None, third]


def test_the_best_and_the_newest_share_bases(tmp_path: Path) -> None:
    seen = Seen(tmp_path)
    best = KeepBest(tmp_path, replace(RECIPE, train=replace(RECIPE.train, monitor="auc")), background=False)
    last = KeepLast(tmp_path, RECIPE, every=2, background=False, at_end=False)
    scripted = Scripted([0.5, 0.6, 0.6, 0.6, 0.7, 0.6], best, EarlyStop(9, "auc"))
    recipe = replace(EVERY_THIRD, checkpoint_full_every=2)
    planted.trainer(recipe, callbacks=[scripted, best, last, seen]).fit(planted.batches(6))
    assert seen.names == [
        ["best1"],
        ["best1", "best2", "last2"],  # the second best is a difference to the first, and the newest is full
        ["best1", "best2", "last2"],
        ["best1", "best2", "last2", "last4"],
        ["last2", "last4", "best5"],  # full
        ["best5", "last6"],
    ]


@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_goes_on_from_a_difference_ends_as_one_that_was_not_stopped(tmp_path: Path, at: int) -> None:
    def ended(folder: Path, resume: Path | None) -> str:
        callbacks = [KeepLast(folder, RECIPE, every=1, keep_last=9)]
        trainer = planted.trainer(EVERY_THIRD, callbacks=callbacks)
        batches = Fixed()
        if resume is not None:
            load_checkpoint(resume, trainer.parts())
            batches.load_state_dict({"at": trainer.position})
        trainer.fit(batches)
        assert trainer.step == 7
        verify_checkpoint(folder / "last-00000007")
        return sha256([trainer.model.state_dict(), trainer.sparse.state_dict()["state"]])

    whole = ended(tmp_path / "whole", None)
    place = tmp_path / "whole" / f"last-{at:08d}"
    assert base_of(directory(place)) == "last-00000001"
    again = ended(tmp_path / "again", place)
    assert again == whole
    # What was loaded is not the base of what follows: the first checkpoint after a start is full.
    assert base_of(directory(tmp_path / "again" / f"last-{at + 1:08d}")) is None


def test_differences_are_removed_before_their_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = KeepLast(tmp_path, RECIPE, every=1, background=False, keep_last=9)
    planted.trainer(EVERY_THIRD, callbacks=[keep]).fit(planted.batches(4))
    places = [directory(tmp_path / name) for name in names(tmp_path)]
    removed: list[str] = []
    monkeypatch.setattr("hotbed.train.runs.callbacks.remove_checkpoint", lambda place: removed.append(place.name))
    remove_unneeded(directory(tmp_path), places[:3])
    assert removed == ["last-00000003", "last-00000002", "last-00000001"]
    removed.clear()
    remove_unneeded(directory(tmp_path), places[:2])
    assert removed == ["last-00000002"]
