"""Protects: a run that lost its directory, though it has not noticed yet, harms nothing of the run that has it now."""

from __future__ import annotations

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hotbed.checkpoint import (
    MANIFEST,
    Directory,
    checkpoints_in,
    directory,
    load_checkpoint,
    read_manifest,
    save,
    verify_checkpoint,
)
from hotbed.checkpoint.save import RankReports
from hotbed.errors import CheckpointError, NotOursError
from hotbed.locations import CONDITIONAL_S
from hotbed.train import Trainer
from hotbed.train import checkpoints as checkpointing
from hotbed.train.directory_lease import OWNER, TIME_TO_LIVE_S, FileLock, lock
from hotbed.train.runs import resume
from hotbed.train.runs.callbacks import KeepLast
from hotbed.train.runs.report import RunDirectory
from tests.fixtures.models import sha256
from tests.train import planted
from tests.train.parallel_cases import RECIPE
from tests.train.test_callbacks import TRAIN
from tests.train.test_lease import take_over, write

NAME = "last-00000003"


TRAINERS: list[Trainer] = []


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Ends leases, whose threads would go on."""
    yield
    while TRAINERS:
        TRAINERS.pop().saver.release()


@pytest.fixture(params=["local", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    """An empty directory, of a kind that keeps locks and of one that keeps leases."""
    if request.param == "local":
        return directory(tmp_path / "checkpoints")
    return directory(request.getfixturevalue("s3").replace("PATH", f"lost-{uuid.uuid4().hex}"))


def made(place: Directory, seed: int) -> Trainer:
    keep = KeepLast(place, RECIPE, every=3, background=False, at_end=False)
    TRAINERS.append(planted.trainer(replace(TRAIN, seed=seed), callbacks=[keep]))
    return TRAINERS[-1]


def trained(trainer: Trainer) -> str:
    return sha256([trainer.model.state_dict(), trainer.sparse.state_dict()["state"]])


def taken_over_by_another(place: Directory, monkeypatch: pytest.MonkeyPatch, *, trains: bool = True) -> Trainer:
    """Lose the directory to another run, which saves a checkpoint of the same step; what it has trained."""
    if isinstance(lock(place), FileLock):
        Path(place.path, OWNER).unlink()  # a server of NFS would forget the lock
    else:
        take_over(place)
        there = place.read_tagged(OWNER)
        assert there is not None
        assert place.replace(OWNER, b'{"name": "x", "released": true}', there.tag) is not None
    winner = made(place, 2)
    if not trains:
        winner.saver.lock(place)
        return winner
    with monkeypatch.context() as patch:
        # Removed when it began, if the other had not been about to write them.
        patch.setattr(checkpointing, "_remove_unfinished", lambda *_: None)
        winner.fit(planted.batches(3, seed=2))
    return winner


def once(action: Callable[[], Any]) -> Callable[[], Any]:
    """Do something in the first call only."""
    done: list[Any] = []

    def act() -> Any:
        if not done:
            done.append(None)
            action()

    return act


def assert_is_of(winner: Trainer, place: Directory) -> None:
    assert [c.name for c in checkpoints_in(place)] == [NAME]
    verify_checkpoint(place / NAME)
    other = made(place, 3)
    load_checkpoint(place / NAME, other.parts())
    assert trained(other) == trained(winner)


def test_a_late_writer_overwrites_no_file_of_the_winner(place: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = type((directory(place.path)).writer("x")) if "://" in place.path else save.FileWriter
    finish_name = "finish" if "://" in place.path else "entries"
    finish, winners = getattr(writer, finish_name), list[Trainer]()
    act = once(lambda: winners.append(taken_over_by_another(place, monkeypatch)))

    def late(*args: Any) -> Any:
        act()
        return finish(*args)

    monkeypatch.setattr(writer, finish_name, late)
    with pytest.raises(NotOursError, match="ends without publishing"):
        made(place, 1).fit(planted.batches(9))
    assert_is_of(winners[0], place)


def test_of_two_that_publish_a_step_one_does(place: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, winners = save.write_manifest, list[Trainer]()
    act = once(lambda: winners.append(taken_over_by_another(place, monkeypatch)))

    def late(*args: Any) -> str:
        act()  # after the last look at the lease
        return publish(*args)

    monkeypatch.setattr(save, "write_manifest", late)
    with pytest.raises(CheckpointError, match=r"last-00000003.* was not saved: another process has saved it since"):
        made(place, 1).fit(planted.batches(9))
    assert_is_of(winners[0], place)
    names = set((place / NAME).names())
    assert names == {MANIFEST, *read_manifest(place / NAME).files}


def test_what_was_removed_before_it_was_published_is_withdrawn(
    place: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = save.write_manifest

    def late(where: Directory, manifest: Any) -> str:
        for name in manifest.files:  # by another run, as what a killed one left
            where.remove(name)
        return publish(where, manifest)

    monkeypatch.setattr(save, "write_manifest", late)
    with pytest.raises(CheckpointError, match=r"was not saved: .*\.safetensors is gone; does another run write there"):
        made(place, 1).fit(planted.batches(9))
    assert checkpoints_in(place) == []


def test_files_of_a_run_have_names_of_their_attempt(tmp_path: Path) -> None:
    """Old names are read as ever: tests/fixtures/checkpoints."""
    made(directory(tmp_path), 1).fit(planted.batches(3))
    manifest = read_manifest(tmp_path / NAME)
    assert len(manifest.attempt) == 8
    assert all(name.endswith(f"-{manifest.attempt}.safetensors") for name in manifest.files)
    assert manifest.file_of("model") in manifest.files


def test_what_a_killed_attempt_left_goes_when_the_next_is_published(tmp_path: Path) -> None:
    place = directory(tmp_path) / NAME
    place.make()
    for name in ("model-0123abcd.safetensors", "rank-1-0123abcd.json", "unfinished.json"):
        place.write(name, "half")
    saver = made(directory(tmp_path), 1).saver
    saver.begin(place, 3, RECIPE, background=False)
    assert set(place.names()) == {MANIFEST, *read_manifest(place).files}


def test_a_save_that_is_late_is_refused_after_the_directory_was_given_back(
    place: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, report = threading.Event(), RankReports.write

    def late(*args: Any) -> None:
        assert released.wait(300)
        report(*args)

    monkeypatch.setattr(RankReports, "write", late)
    saver = made(place, 1).saver
    saver.lock(place)
    saver.begin(place / NAME, 3, RECIPE, background=True)
    saver.release()
    released.set()
    with pytest.raises(NotOursError, match="this run has released"):
        saver.finish()
    assert checkpoints_in(place) == []


def test_a_lock_that_was_lost_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of NFS, whose server gives locks of a host that it does not hear of to others."""
    file = tmp_path / OWNER
    with lock(directory(tmp_path)) as held:
        held.check()
        content = file.read_text()
        write(directory(tmp_path), name="x")  # another file
        with pytest.raises(NotOursError, match=r"belongs to process 7 on elsewhere .*This run ends"):
            held.check()
        file.write_text(content)  # the same content in another file
        with pytest.raises(NotOursError, match="has passed the lock"):
            held.check()
        file.unlink()
        with pytest.raises(NotOursError, match=r"was lost with .*owner\.json \(No such file or directory\)"):
            held.check()
    with lock(directory(tmp_path)) as held:
        file.write_text('{"name": "x"}')  # the same file, locked by another host
        with pytest.raises(NotOursError, match="has passed the lock"):
            held.check()

        def lost(*_: Any) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pread", lost)
        with pytest.raises(NotOursError, match=r"was lost with .*owner\.json \(Input/output error\)"):
            held.check()


def test_nothing_is_removed_after_the_directory_was_lost(place: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(where: Directory) -> Any:
        held = lock(where)
        enter = held.__enter__

        def entered() -> Any:
            enter()
            taken_over_by_another(where, monkeypatch)
            return held

        monkeypatch.setattr(held, "__enter__", entered, raising=False)
        return held

    (place / "last-00000007").make()
    (place / "last-00000007").write("model.safetensors", "half")
    monkeypatch.setattr(checkpointing, "lock", once_then(lost, lock))
    with pytest.raises(NotOursError):
        made(place, 1).fit(planted.batches(9))
    assert (place / "last-00000007").names() == ["model.safetensors"]


def once_then(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """Call one thing the first time, and another from then on."""
    calls = iter([first])
    return lambda *args: next(calls, then)(*args)


def test_damaged_checkpoints_are_set_aside_by_their_owner_only(
    place: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = made(place, 1)
    first.fit(planted.batches(3))
    first.saver.begin(place / "last-00000004", 4, RECIPE, background=False)
    first.saver.release()
    recipe = replace(RECIPE, train=replace(RECIPE.train, checkpoint_dir=place.path))
    before = (place / "last-00000004").names()

    def damaged(checkpoint: Directory, *_: Any) -> str | None:
        if checkpoint.name != NAME:
            return f"{checkpoint} is damaged"
        taken_over_by_another(place, monkeypatch, trains=False)
        return None

    monkeypatch.setattr(resume, "_load_whole", damaged)
    run = RunDirectory(tmp_path / "runs", "any")
    with pytest.raises(NotOursError):
        resume.resume_newest(made(place, 1), recipe, run, resume.Resume(auto=True), Console(quiet=True))
    assert (place / "last-00000004").names() == before


def test_a_conditional_write_ends_before_a_lease_that_was_looked_at() -> None:
    """It is renewed at a third of its time, and the last request may take half as long as all tries."""
    assert 1.5 * CONDITIONAL_S < TIME_TO_LIVE_S * 2 / 3
