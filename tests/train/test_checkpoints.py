"""Tests of the checkpoints of a run: saved by one rank or several, complete or differential, also under FSDP."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import hotbed as hb
from hotbed.checkpoint import (
    checkpoints_in,
    differential,
    directory,
    load_checkpoint,
    read_manifest,
    save_checkpoint,
    snapshot,
    storage,
    verify_checkpoint,
)
from hotbed.checkpoint.manifest import base_of
from hotbed.checkpoint.storage import LocalDirectory
from hotbed.embed.dense_parallel import gather_shards
from hotbed.errors import CheckpointError, CommError
from hotbed.nn import DLRM
from hotbed.train import Callback, Metrics, Trainer
from hotbed.train import checkpoints as checkpointing
from hotbed.train.checkpoints import Saver, refuse_other_checkpoints
from hotbed.train.directory_lock import OWNER
from hotbed.train.runs.callbacks import EarlyStop, JsonLines, KeepBest, KeepLast, remove_unneeded, signals_to
from tests.checkpoint.damage import disk_is_full
from tests.fixtures.models import sha256
from tests.ranks import Ranks
from tests.train import planted
from tests.train.parallel_cases import (
    RECIPE,
    Group,
    assert_equal,
    hotbed_threads,
    loader_of,
    make_trainer,
    shares,
    state_of,
)
from tests.train.parallel_cases import (
    TRAIN as RANKS_TRAIN,
)
from tests.train.planted import Do, Losses
from tests.train.test_callbacks import TRAIN, Scripted

pytestmark = pytest.mark.usefixtures("one_thread")


def names(folder: Path) -> list[str]:
    return [checkpoint.name for checkpoint in checkpoints_in(folder)]


def test_the_newest_are_kept_and_some_for_good(tmp_path: Path) -> None:
    keep = KeepLast(tmp_path, RECIPE, every=2, keep_last=3, keep_every=6)
    trainer = planted.trainer(TRAIN, callbacks=[keep])
    trainer.fit(planted.batches(19))
    assert names(tmp_path) == [f"last-{step:08d}" for step in (6, 12, 16, 18, 19)]
    assert [record["step"] for record in trainer.saver.records] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 19]
    for record in trainer.saver.records:
        assert record["stalled_s"] > 0
        assert record["bytes"] > 1000


@pytest.mark.parametrize("minutes", [None, 1000])
def test_a_checkpoint_can_be_asked_for(tmp_path: Path, minutes: float | None) -> None:
    ask = Do({3: lambda trainer: setattr(trainer, "ask_save", True)})
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, minutes=minutes, at_end=False), ask])
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


def test_a_run_that_resumes_from_its_best_checkpoint_keeps_it(tmp_path: Path) -> None:
    """A killed run has no later checkpoint, so the best one must name itself."""
    recipe = replace(RECIPE, train=replace(RECIPE.train, monitor="auc"))
    keep = KeepBest(tmp_path, recipe, background=False)
    planted.trainer(TRAIN, callbacks=[Scripted([0.4, 0.6], keep), keep]).fit(planted.batches(2))
    assert names(tmp_path) == ["best-00000002"]
    again = KeepBest(tmp_path, recipe, background=False)
    resumed = planted.trainer(replace(TRAIN, epochs=9), callbacks=[Scripted([0, 0, *[0.5] * 20], again), again])
    load_checkpoint(tmp_path / "best-00000002", resumed.parts())
    resumed.fit(planted.batches(2))
    assert resumed.step > 2
    assert again.step == 2
    assert names(tmp_path) == ["best-00000002"]


def test_the_best_is_looked_for_anew_if_it_is_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keep = KeepBest(tmp_path, RECIPE)
    keep.load_state_dict({"monitor": "logloss", "best": 0.7, "path": str(tmp_path / "best-00000002")})
    assert "was removed" in caplog.text
    assert keep.state_dict()["path"] is None


def test_only_what_a_killed_run_left_and_older_checkpoints_are_removed(tmp_path: Path) -> None:
    (tmp_path / "last-00000007").mkdir()
    (tmp_path / "last-00000007" / "model.safetensors").write_text("half")
    (tmp_path / "last-words").mkdir()
    for name in ("last-00000099", "last-00000001-compact", "best-00000001"):
        save_checkpoint(tmp_path / name, {}, step=0)
    planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, every=1)]).fit(planted.batches(4))
    left = [OWNER, "best-00000001", "last-00000001-compact", "last-00000004", "last-00000099", "last-words"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert names(tmp_path) == ["best-00000001", "last-00000004", "last-00000099"]


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
    fill = Do({4: lambda _: monkeypatch.setattr(storage._LocalWriter, "write", disk_is_full)})
    trainer = planted.trainer(TRAIN, callbacks=[KeepLast(tmp_path, RECIPE, every=3, background=False), fill])
    with pytest.raises(OSError, match="No space left"):
        trainer.fit(planted.batches(50))
    assert names(tmp_path) == ["last-00000003"]


def test_checkpoints_of_another_run_are_not_mixed_with(tmp_path: Path) -> None:
    refuse_other_checkpoints(directory(tmp_path), None)
    for step in (3, 5):
        save_checkpoint(tmp_path / f"last-{step:08d}", {}, step=step)
    with pytest.raises(CheckpointError, match=r"up to last-00000005"):
        refuse_other_checkpoints(directory(tmp_path), None)
    with pytest.raises(CheckpointError, match="another run"):
        refuse_other_checkpoints(directory(tmp_path), directory(tmp_path / "elsewhere" / "last-00000003"))
    with pytest.raises(CheckpointError, match=r"newer than last-00000003: last-00000005"):
        refuse_other_checkpoints(directory(tmp_path), directory(tmp_path / "last-00000003"))
    refuse_other_checkpoints(directory(tmp_path), directory(tmp_path / "x" / ".." / "last-00000005"))


def test_what_is_asked_in_the_last_evaluation_is_heard(tmp_path: Path) -> None:
    class AskAtTheEnd(Callback):
        def on_eval(self, trainer: Trainer, metrics: Any) -> None:
            trainer.ask_save = trainer.ask_stop = True

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


# -- differential checkpoints ------------------------------------------------------------------------------------------

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


# -- several ranks -----------------------------------------------------------------------------------------------------

STEPS, STOPPED = 14, 9
"""Steps of a run of two epochs of 7 steps, and where it was stopped."""


def run(
    group: Group,
    scheme: str,
    *,
    stop: int | None = None,
    save: Path | None = None,
    resume: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A run on a loader, perhaps stopped and saved, perhaps gone on from a checkpoint."""
    losses = Losses()
    trainer = make_trainer(group, scheme, replace(RANKS_TRAIN, epochs=2, steps=stop), callbacks=[losses], **options)
    if save is not None:
        trainer.callbacks.append(KeepLast(save, RECIPE, 4))
    loader = loader_of(group)
    if resume is not None:
        load_checkpoint(resume, trainer.parts())
        trainer.resume_data(loader)
    before = state_of(trainer)
    trainer.fit(loader)
    assert hotbed_threads() == []
    return {"before": before, "losses": losses.losses, "state": state_of(trainer), "step": trainer.step}


def _run(group: Group, scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    return run(group, scheme, **options)


def test_a_checkpoint_of_three_ranks_is_gone_on_from_by_any_number(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(3, _run, "row", {})
    first = ranks.run(3, _run, "row", {"stop": STOPPED, "save": tmp_path / "run" / "checkpoints"})
    (checkpoint,) = checkpoints_in(tmp_path / "run" / "checkpoints")
    assert checkpoint.name == f"last-{STOPPED:08d}"
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert left == {OWNER, checkpoint.name}  # nothing unfinished
    verify_checkpoint(checkpoint)
    assert read_manifest(checkpoint).recipe["name"] == "test"
    saved = first[0]["state"]
    resume = {"resume": checkpoint}
    # Of equally many ranks, whatever the plan: the bits of a run that was not interrupted.
    for found, uninterrupted in zip(ranks.run(3, _run, "column", resume), whole, strict=True):
        assert_equal(found["before"], saved)
        assert found["step"] == STEPS
        assert found["losses"] == uninterrupted["losses"][STOPPED:]
        assert_equal(found["state"], uninterrupted["state"])
    # Of others: the same state, and the same training but for rounding.
    for found in (run(None, "", resume=checkpoint), *ranks.run(4, _run, "column", resume)):
        assert_equal(found["before"], saved)
        assert found["losses"] == pytest.approx(whole[0]["losses"][STOPPED:], abs=1e-4)


class Remember(Callback):
    """State and logloss at every evaluation, and the checkpoints that there are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[float, int, dict[str, Tensor]]] = []
        self.names: list[list[str]] = []

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        state = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
        self.seen.append((metrics.logloss, trainer.step, state))

    def on_step_end(self, trainer: Trainer) -> None:
        self.names.append(sorted(path.name for path in self.folder.iterdir() if path.name != OWNER))


def kept_best(group: Group, folder: Path) -> dict[str, Any]:
    """A run that becomes better, then worse, with the best evaluation restored at the end."""
    remember = Remember(folder)
    callbacks = [KeepBest(folder, RECIPE, background=False), remember]
    trainer = make_trainer(group, "row", replace(RANKS_TRAIN, eval_every=2), callbacks=callbacks)
    batches = planted.batches(12)
    for batch in batches[6:]:
        assert batch.labels is not None
        batch.labels.neg_().add_(1)
    trainer.fit(shares(batches, group), shares(planted.batches(2, seed=5), group))
    end = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
    return {"end": end, "seen": remember.seen, "names": remember.names}


def test_the_best_checkpoint_is_restored_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks.run(3, kept_best, tmp_path)
    for found in by_rank:
        _, step, state = min(found["seen"], key=lambda seen: seen[0])
        assert 2 < step < 12
        assert_equal(found["end"], state)
        assert [seen[0] for seen in found["seen"]] == [seen[0] for seen in by_rank[0]["seen"]]
        assert found["names"][0] == []
        assert all(len(names) == 1 for names in found["names"][1:])  # one at any moment
        assert found["names"][-1] == [f"best-{step:08d}"]


def refused(group: Group, folder: Path, when: str) -> str:
    """What a rank says when the first one's store fails at this moment."""

    def fail(*_: object) -> None:
        raise OSError("the store does not answer")

    trainer = make_trainer(group, "row")
    where = directory(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            if when == "remove":
                patch.setattr(checkpointing, "_remove_unfinished", fail)
            trainer.saver.lock(where, remove_unfinished=True)
            patch.setattr(LocalDirectory, "has", fail)
            trainer.saver.begin(where / "last-00000001", 1, RECIPE, background=False, may_exist=True)
    except (OSError, CommError) as error:
        return str(error)
    finally:
        trainer.saver.release()
    return "nothing"


@pytest.mark.parametrize(("when", "what"), [("remove", "use"), ("look", "read")])
def test_what_the_first_rank_cannot_look_at_ends_all(ranks: Ranks, tmp_path: Path, when: str, what: str) -> None:
    first, *others = ranks.run(3, refused, tmp_path, when)
    assert first == "the store does not answer"
    assert all(said.startswith(f"rank 0 cannot {what} {tmp_path}") for said in others), others


# -- FSDP --------------------------------------------------------------------------------------------------------------

FSDP_STEPS, FSDP_STOPPED = 8, 4

Parts = dict[str, Any]


def made(group: Group, dense: str) -> Parts:
    """A model and its optimizers, as a loop of one's own has them."""
    trainer = make_trainer(group, "row", **({} if group is None else {"dense": dense}))
    return {"model": trainer.model, **trainer.optimizers}


def train(parts: Parts, group: Group, steps: range) -> None:
    batches = planted.batches(FSDP_STEPS, 24)
    for batch in shares([batches[step] for step in steps], group):
        loss = F.binary_cross_entropy_with_logits(parts["model"](batch), batch.labels)
        loss.backward()
        for optimizer in (parts["dense"], parts["sparse"]):
            optimizer.step()
            optimizer.zero_grad()


def whole_state_of(parts: Parts) -> dict[str, Tensor]:
    """Parameters, tables and moments, whole."""
    found = {f"model.{name}": value.clone() for name, value in parts["model"].state_dict().items()}
    for part in ("dense", "sparse"):
        for i, state in gather_shards(parts[part].state_dict())["state"].items():
            found |= {f"{part}.{i}.{name}": value.clone() for name, value in state.items()}
    assert not any(isinstance(value, DTensor) for value in found.values())
    return found


def first_half(group: Group, dense: str, path: Path, background: bool) -> dict[str, Tensor]:
    parts = made(group, dense)
    train(parts, group, range(FSDP_STOPPED))
    assert any(isinstance(p, DTensor) for p in parts["model"].parameters()) == (dense == "fsdp")
    saving = save_checkpoint(path, parts, background=background)
    state = whole_state_of(parts)
    saving.wait()
    return state


def second_half(group: Group, dense: str, path: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parts = made(group, dense)
    load_checkpoint(path, parts)
    loaded = whole_state_of(parts)
    train(parts, group, range(FSDP_STOPPED, FSDP_STEPS))
    return loaded, whole_state_of(parts)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-4, atol=2e-5, msg=lambda text, of=name: f"{of}: {text}")


@pytest.fixture(name="alone", scope="module")
def _alone() -> dict[str, Tensor]:
    parts = made(None, "ddp")
    train(parts, None, range(FSDP_STEPS))
    return whole_state_of(parts)


@pytest.mark.parametrize(
    ("saved_by", "dense", "background"), [(2, "fsdp", False), (3, "fsdp", True), (3, "ddp", False)], ids=str
)
def test_what_is_sharded_goes_on_at_any_world_size(
    ranks: Ranks, alone: dict[str, Tensor], tmp_path: Path, saved_by: int, dense: str, background: bool
) -> None:
    saved = ranks.run(saved_by, first_half, dense, tmp_path / "saved", background)[0]
    loaded, went_on = second_half(None, "ddp", tmp_path / "saved")
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    assert_close(went_on, alone)
    for loaded, went_on in ranks.run(3, second_half, "fsdp", tmp_path / "saved"):
        assert all(torch.equal(loaded[name], value) for name, value in saved.items())
        assert_close(went_on, alone)


def parts_by_hand(group: Group, path: Path | None) -> tuple[list[str], dict[str, Tensor]]:
    """`fully_shard` of a part by the user's own call, and of the rest by `distribute`."""
    torch.manual_seed(0)
    model: nn.Module = DLRM([hb.Table("a", 9, 32)], [hb.Feature("a", "a")], 3, bottom=(16, 32), top=(16, 1), seed=0)
    assert group is not None
    fully_shard(model.top, mesh=DeviceMesh.from_group(group, "cpu"))
    model = hb.distribute(model, "row", hb.ParallelOptions(dense="fsdp"), group=group)
    if path is not None:
        load_checkpoint(path, {"model": model})
    sharded = [type(m).__name__ for m in model.module.modules() if type(m).__name__.startswith("FSDP")]
    return sharded, dict(model.state_dict())


def save_plain(path: Path) -> dict[str, Tensor]:
    torch.manual_seed(7)
    model = DLRM([hb.Table("a", 9, 32)], [hb.Feature("a", "a")], 3, bottom=(16, 32), top=(16, 1), seed=1)
    save_checkpoint(path, {"model": model})
    return model.state_dict()


def test_units_that_a_user_has_sharded_stay_units_and_are_loaded(ranks: Ranks, tmp_path: Path) -> None:
    expected = save_plain(tmp_path / "plain")
    for sharded, found in ranks.run(3, parts_by_hand, tmp_path / "plain"):
        assert sharded == ["FSDPDLRM", "FSDPMLP"]
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def around(group: Group) -> None:
    """A module around the model, as other tools have it, saves and loads whole values."""
    models = [made(group, dense)["model"] for dense in ("fsdp", "ddp")]
    states: list[dict[str, Tensor]] = []
    for value, model in enumerate(models):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(value)
        states.append({name: t.clone() for name, t in nn.ModuleDict({"net": model}).state_dict().items()})
    assert states[0].keys() == states[1].keys()
    for model, state in zip(models, reversed(states), strict=True):
        nn.ModuleDict({"net": model}).load_state_dict(state)
        found = nn.ModuleDict({"net": model}).state_dict()
        assert all(torch.equal(found[name], value) for name, value in state.items())


def test_the_state_of_a_module_around_it_is_whole(ranks: Ranks) -> None:
    ranks.run(3, around)
