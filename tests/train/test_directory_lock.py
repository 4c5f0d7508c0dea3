"""Tests of locks and leases of checkpoint directories, and of runs that lose them."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
from hotbed.checkpoint.storage import LocalDirectory
from hotbed.errors import CheckpointError, NotOursError
from hotbed.locations import CONDITIONAL_S
from hotbed.train import Trainer
from hotbed.train import checkpoints as checkpointing
from hotbed.train import directory_lock as lease
from hotbed.train.directory_lock import OWNER, TIME_TO_LIVE_S, FileLock, Lease, lock
from hotbed.train.runs import resume
from hotbed.train.runs.callbacks import KeepLast
from hotbed.train.runs.report import RunDirectory
from tests.checkpoint.damage import disk_is_full
from tests.fixtures.models import sha256
from tests.matrix import full
from tests.train import planted
from tests.train.launcher import PATIENCE_S
from tests.train.parallel_cases import RECIPE
from tests.train.planted import Do
from tests.train.test_callbacks import TRAIN

# -- A directory of checkpoints belongs to one run, also in an object store, and passes to another when that has ended.

LIFE_S = 0.6
"""Of leases that are to end here."""


def write(place: Directory, **owner: Any) -> None:
    place.make()
    place.write(OWNER, json.dumps({"host": "elsewhere", "pid": 7, "since": "2026-01-01T00:00:00+00:00", **owner}))


def owner_of(place: Directory) -> dict[str, Any]:
    return json.loads(place.read(OWNER))


@pytest.fixture(params=["local", "s3", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    """An empty directory of each kind."""
    name = f"lease-{time.monotonic_ns()}"
    if request.param == "s3":
        return directory(request.getfixturevalue("s3").replace("PATH", name))
    return directory(str(tmp_path / name) if request.param == "local" else f"memory://{name}")


def test_a_directory_belongs_to_one_run(place: Directory) -> None:
    with lock(place) as held:
        assert owner_of(place)["pid"] == os.getpid()
        held.check()
        with pytest.raises(CheckpointError, match=rf"belongs to process {os.getpid()} on .*is running"):
            lock(place).__enter__()
    with lock(place):
        pass
    keep = KeepLast(place, RECIPE)
    trainer = planted.trainer(TRAIN, callbacks=[keep])
    with lock(place), pytest.raises(CheckpointError, match="is running"):
        trainer.fit(planted.batches(2))
    trainer.fit(planted.batches(2))
    assert [c.name for c in checkpoints_in(place)] == ["last-00000002"]


@pytest.fixture
def store(s3: str) -> Iterator[Directory]:
    """An empty directory of an object store."""
    yield directory(s3.replace("PATH", f"lease-{time.monotonic_ns()}"))


def second_restart_of(job: str, patch: pytest.MonkeyPatch) -> None:
    """Let this process be of a job that torchrun has restarted twice."""
    patch.setenv("TORCHELASTIC_RUN_ID", job)
    patch.setenv("TORCHELASTIC_RESTART_COUNT", "2")


@pytest.mark.parametrize("owner", [{"time_to_live_s": LIFE_S}, {"time_to_live_s": 2, "job": "job-7", "restarts": 1}])
def test_the_lease_of_another_host_is_waited_for_and_taken_over(
    store: Directory, owner: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An earlier attempt of the same job is waited for only as long as a renewal takes, half of the lease's time."""
    second_restart_of("job-7", monkeypatch)
    write(store, name="x", system="another", **owner)
    with Lease(store):
        assert owner_of(store)["host"] == socket.gethostname()
    assert f"{store} belongs to process 7 on elsewhere since 2026" in caplog.text
    assert "waiting up to 1 s for" in caplog.text
    assert ".owner.json was not renewed for 1 s and is taken over" in caplog.text


@pytest.mark.parametrize(
    "content", [b"", full(b"["), full(b"[1]"), b'{"time_to_live_s": "x", "pid": "y"}', full(b'{"pid": 7}')]
)
def test_a_file_that_names_nobody_ends_too(store: Directory, content: bytes) -> None:
    store.write(OWNER, content.decode())
    with Lease(store, LIFE_S):
        assert owner_of(store)["pid"] == os.getpid()


def test_what_another_host_renews_is_refused(store: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(lease, "system", lambda: "another")
        patch.setattr(socket, "gethostname", lambda: "elsewhere")
        held = Lease(store, 2).__enter__()  # renews, as a host would
        lease.HELD.clear()
    try:
        with pytest.raises(CheckpointError, match=r"belongs to process \d+ on elsewhere since "):
            Lease(store, LIFE_S).__enter__()
        held.check()
    finally:
        held.__exit__()


KILLED = """
import os, signal, socket, sys, time
from hotbed.checkpoint import directory
from hotbed.train import directory_lock as lease
if sys.argv[2] == "elsewhere":
    lease.system = lambda: "another"
    socket.gethostname = lambda: "elsewhere"
place = directory(sys.argv[1])
(lease.lock(place) if sys.argv[2] == "local" else lease.Lease(place, float(sys.argv[3]))).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("host", [full("local"), full("here"), full("elsewhere")])
def test_what_a_killed_process_held_passes_on(
    store: Directory, tmp_path: Path, host: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = directory(tmp_path) if host == "local" else store
    command = [sys.executable, "-c", KILLED, place.path, host, "2" if host == "elsewhere" else "1000"]
    killed = subprocess.run(command, check=False, timeout=PATIENCE_S)
    assert killed.returncode == -signal.SIGKILL
    assert owner_of(place)["host"] == ("elsewhere" if host == "elsewhere" else socket.gethostname())
    with lock(place):
        assert owner_of(place)["pid"] == os.getpid()
    assert ("waiting up to 2 s" in caplog.text) == (host == "elsewhere")


def test_an_owner_that_is_known_to_have_ended_is_not_waited_for(
    store: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Lease, "_wait_for_the_end_of", None)
    second_restart_of("job-7", monkeypatch)
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = {"system": lease.system()}
    dead = [{**here, "pid": ended.pid}, {"released": True}, {**here, "pid": os.getpid()}]
    if Path("/proc/self/stat").exists():
        dead.append({**here, "pid": os.getppid(), "started": "1"})  # the number is another process's now
    for owner in dead:
        write(store, **owner)
        with Lease(store):
            assert owner_of(store)["job"] == "job-7"


def test_an_owner_that_may_live_is_waited_for_or_refused(store: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[Any] = []
    monkeypatch.setattr(Lease, "_wait_for_the_end_of", lambda *args: waited.append(args[2]))
    here = {"system": lease.system(), "pid": os.getppid()}
    alive: dict[str, list[dict[str, Any]]] = {
        "none": [{"job": "none", "restarts": 1}],  # what torchrun says where it was given no name
        # Another job of this name, an agent that counts otherwise, and an owner without a job.
        "job-7": [
            {"job": "job-8", "restarts": 1},
            here,
            {},
            *({"job": "job-7", "restarts": n} for n in (1, 2, 3, None)),
        ],
    }
    for job, them in alive.items():
        second_restart_of(job, monkeypatch)
        for owner in them:
            write(store, **owner)
            with Lease(store):
                pass
    assert len(waited) == 8
    monkeypatch.undo()
    write(store, system=lease.system(), pid=os.getppid())
    with pytest.raises(CheckpointError, match=rf"belongs to process {os.getppid()} on elsewhere .*is running"):
        Lease(store).__enter__()


def test_a_live_job_of_the_same_name_elsewhere_keeps_its_directory(
    store: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    second_restart_of("job-7", monkeypatch)
    write(store, job="job-7", restarts=1, time_to_live_s=6, system="another", number=1)
    read, looks = type(store).read_tagged, list[str]()

    def renewed(place: Directory, name: str) -> Any:
        looks.append(name)
        if len(looks) == 2:  # after the first look, while it is waited for
            write(store, job="job-7", restarts=1, time_to_live_s=6, system="another", number=2)
        return read(place, name)

    monkeypatch.setattr(type(store), "read_tagged", renewed)
    with pytest.raises(CheckpointError, match="is running"):
        Lease(store).__enter__()
    assert len(looks) == 2


def test_of_many_that_start_at_once_one_has_it(store: Directory) -> None:
    gate = threading.Barrier(4)

    def start(mine: Lease) -> str:
        gate.wait()
        try:
            mine.__enter__()
        except CheckpointError:
            return "refused"
        finally:
            gate.wait()
        mine.__exit__()
        return "held"

    with ThreadPoolExecutor(4) as threads:
        found = sorted(threads.map(start, [Lease(store) for _ in range(4)]))
    assert found == ["held", "refused", "refused", "refused"]


def test_an_answer_that_is_lost_is_no_loss(store: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    create, replace = type(store).create, type(store).replace
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "create", lambda *args: create(*args) and None)
        patch.setattr(type(store), "replace", lambda *args: replace(*args) and None)
        with Lease(store, LIFE_S) as held:
            time.sleep(2 * LIFE_S)
            held.check()
            held.check_renewals()
    with lock(store):
        pass


def test_a_store_that_cannot_be_reached_for_a_while_ends_nothing(
    store: Directory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise OSError("the network is down")

    with Lease(store, LIFE_S) as held:
        with monkeypatch.context() as patch:
            patch.setattr(type(store), "replace", broken)
            while "could not be renewed (the network is down)" not in caplog.text:
                time.sleep(LIFE_S / 10)
        number = owner_of(store)["number"]
        while owner_of(store)["number"] < number + 2:  # it is renewed again, for as long as it is held
            time.sleep(LIFE_S / 10)
        held.check()
    assert owner_of(store)["released"]
    assert "hotbed-lease" not in [thread.name for thread in threading.enumerate()]


# -- runs that lose it -------------------------------------------------------------------------------------------------


def take_over(place: Directory) -> None:
    there = place.read_tagged(OWNER)
    assert there is not None
    taken = json.dumps({"name": "x", "host": "elsewhere", "pid": 7, "system": "another"}).encode()
    assert place.replace(OWNER, taken, there.tag) is not None


@pytest.mark.parametrize("background", [False, True])
def test_a_run_that_lost_its_directory_publishes_nothing(store: Directory, background: bool) -> None:
    def lose(trainer: Trainer) -> None:
        trainer.saver.finish()
        take_over(store)
        (store / "last-00000006").write("theirs.json", "{}")

    keep = KeepLast(store, RECIPE, every=3, keep_last=9, background=background)
    trainer = planted.trainer(TRAIN, callbacks=[keep, Do({5: lose})])
    with pytest.raises(NotOursError, match=r"belongs to process 7 on elsewhere .*This run ends without publishing"):
        trainer.fit(planted.batches(50))
    assert [c.name for c in checkpoints_in(store)] == ["last-00000003"]
    assert (store / "last-00000006").names() == ["theirs.json"]
    assert owner_of(store)["host"] == "elsewhere"


def test_training_ends_soon_after_a_renewal_has_found_another(
    store: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "TIME_TO_LIVE_S", LIFE_S)
    monkeypatch.setattr(lease, "lock", lambda where: Lease(where, LIFE_S))
    monkeypatch.setattr("hotbed.train.checkpoints.lock", lambda where: Lease(where, LIFE_S))
    trainer = planted.trainer(
        TRAIN, callbacks=[KeepLast(store, RECIPE), Do({2: lambda _: (take_over(store), time.sleep(2 * LIFE_S))})]
    )
    with pytest.raises(NotOursError, match=r"for 0\.6 s"):
        trainer.fit(planted.batches(50))
    assert trainer.step == 2


# -- other places ------------------------------------------------------------------------------------------------------


def test_a_disk_without_locks_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with lock(directory(tmp_path)):
        assert owner_of(directory(tmp_path))["pid"] == os.getpid()
    assert "has no locks ([Errno 37] No locks available)" in caplog.text


def test_a_lock_of_a_host_that_died_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = directory(tmp_path)
    assert isinstance(place, LocalDirectory)
    other = FileLock(place).__enter__()
    write(place, system="another", pid=7)  # renames: the lock is of the file before, so it is taken again
    other.__exit__()
    other = os.open(tmp_path / OWNER, os.O_RDWR)
    fcntl.flock(other, fcntl.LOCK_EX)
    threading.Timer(0.5, os.close, [other]).start()  # as the server forgets the host
    with caplog.at_level(logging.WARNING), lock(place):
        assert owner_of(place)["pid"] == os.getpid()
    assert "belongs to process 7 on elsewhere since 2026-01-01T00:00:00+00:00; waiting up to 120 s for the lock" in (
        caplog.text
    )
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match="is running"):
        patch.setattr(FileLock, "PATIENCE_S", 0.1)
        write(place, system="another", pid=7)
        other = os.open(tmp_path / OWNER, os.O_RDWR)
        fcntl.flock(other, fcntl.LOCK_EX)
        lock(place).__enter__()
    os.close(other)


def test_a_lock_whose_file_cannot_be_written_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "pwrite", disk_is_full)
        lock(directory(tmp_path)).__enter__()
    with lock(directory(tmp_path)):  # the descriptor that had it is closed
        assert owner_of(directory(tmp_path))["pid"] == os.getpid()


# -- Protects: a run that lost its directory, though it has not noticed yet, harms nothing of the run that has it now.

NAME = "last-00000003"


TRAINERS: list[Trainer] = []


@pytest.fixture(autouse=True)
def released() -> Iterator[None]:
    """Ends leases, whose threads would go on."""
    yield
    while TRAINERS:
        TRAINERS.pop().saver.release()


@pytest.fixture(params=["local", "s3"])
def owned(request: pytest.FixtureRequest, tmp_path: Path) -> Directory:
    """An empty directory, of a kind that keeps locks and of one that keeps leases."""
    if request.param == "local":
        return directory(tmp_path / "checkpoints")
    return directory(request.getfixturevalue("s3").replace("PATH", f"lost-{uuid.uuid4().hex}"))


def made(owned: Directory, seed: int) -> Trainer:
    keep = KeepLast(owned, RECIPE, every=3, background=False, at_end=False)
    TRAINERS.append(planted.trainer(replace(TRAIN, seed=seed), callbacks=[keep]))
    return TRAINERS[-1]


def trained(trainer: Trainer) -> str:
    return sha256([trainer.model.state_dict(), trainer.sparse.state_dict()["state"]])


def taken_over_by_another(owned: Directory, monkeypatch: pytest.MonkeyPatch, *, trains: bool = True) -> Trainer:
    """Lose the directory to another run, which saves a checkpoint of the same step; what it has trained."""
    if isinstance(lock(owned), FileLock):
        Path(owned.path, OWNER).unlink()  # a server of NFS would forget the lock
    else:
        take_over(owned)
        there = owned.read_tagged(OWNER)
        assert there is not None
        assert owned.replace(OWNER, b'{"name": "x", "released": true}', there.tag) is not None
    winner = made(owned, 2)
    if not trains:
        winner.saver.lock(owned)
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


def assert_is_of(winner: Trainer, owned: Directory) -> None:
    assert [c.name for c in checkpoints_in(owned)] == [NAME]
    verify_checkpoint(owned / NAME)
    other = made(owned, 3)
    load_checkpoint(owned / NAME, other.parts())
    assert trained(other) == trained(winner)


def test_a_late_writer_overwrites_no_file_of_the_winner(owned: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = type((directory(owned.path)).writer("x")) if "://" in owned.path else save.FileWriter
    finish_name = "finish" if "://" in owned.path else "entries"
    finish, winners = getattr(writer, finish_name), list[Trainer]()
    act = once(lambda: winners.append(taken_over_by_another(owned, monkeypatch)))

    def late(*args: Any) -> Any:
        act()
        return finish(*args)

    monkeypatch.setattr(writer, finish_name, late)
    with pytest.raises(NotOursError, match="ends without publishing"):
        made(owned, 1).fit(planted.batches(9))
    assert_is_of(winners[0], owned)


def test_of_two_that_publish_a_step_one_does(owned: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    publish, winners = save.write_manifest, list[Trainer]()
    act = once(lambda: winners.append(taken_over_by_another(owned, monkeypatch)))

    def late(*args: Any) -> str:
        act()  # after the last look at the lease
        return publish(*args)

    monkeypatch.setattr(save, "write_manifest", late)
    with pytest.raises(CheckpointError, match=r"last-00000003.* was not saved: another process has saved it"):
        made(owned, 1).fit(planted.batches(9))
    assert_is_of(winners[0], owned)
    names = set((owned / NAME).names())
    assert names == {MANIFEST, *read_manifest(owned / NAME).files}


def test_what_was_removed_before_it_was_published_is_withdrawn(
    owned: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = save.write_manifest

    def late(where: Directory, manifest: Any) -> str:
        for name in manifest.files:  # by another run, as what a killed one left
            where.remove(name)
        return publish(where, manifest)

    monkeypatch.setattr(save, "write_manifest", late)
    with pytest.raises(CheckpointError, match=r"was not saved: .*\.safetensors does not exist any more"):
        made(owned, 1).fit(planted.batches(9))
    assert checkpoints_in(owned) == []


def test_what_a_killed_attempt_left_goes_when_the_next_is_published(tmp_path: Path) -> None:
    owned = directory(tmp_path) / NAME
    owned.make()
    for name in ("model-0123abcd.safetensors", "rank-1-0123abcd.json", "unfinished.json"):
        owned.write(name, "half")
    saver = made(directory(tmp_path), 1).saver
    saver.begin(owned, 3, RECIPE, background=False)
    assert set(owned.names()) == {MANIFEST, *read_manifest(owned).files}


def test_a_save_that_is_late_is_refused_after_the_directory_was_given_back(
    owned: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, report = threading.Event(), RankReports.write

    def late(*args: Any) -> None:
        assert released.wait(300)
        report(*args)

    monkeypatch.setattr(RankReports, "write", late)
    saver = made(owned, 1).saver
    saver.lock(owned)
    saver.begin(owned / NAME, 3, RECIPE, background=True)
    saver.release()
    released.set()
    with pytest.raises(NotOursError, match="this run has released"):
        saver.finish()
    assert checkpoints_in(owned) == []


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
        with pytest.raises(NotOursError, match="released the lock"):
            held.check()
        file.unlink()
        with pytest.raises(NotOursError, match=r"lost its lock .*owner\.json .*\(No such file or directory\)"):
            held.check()
    with lock(directory(tmp_path)) as held:
        file.write_text('{"name": "x"}')  # the same file, locked by another host
        with pytest.raises(NotOursError, match="released the lock"):
            held.check()

        def lost(*_: Any) -> bytes:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "pread", lost)
        with pytest.raises(NotOursError, match=r"lost its lock .*owner\.json .*\(Input/output error\)"):
            held.check()


def test_nothing_is_removed_after_the_directory_was_lost(owned: Directory, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(where: Directory) -> Any:
        held = lock(where)
        enter = held.__enter__

        def entered() -> Any:
            enter()
            taken_over_by_another(where, monkeypatch)
            return held

        monkeypatch.setattr(held, "__enter__", entered, raising=False)
        return held

    (owned / "last-00000007").make()
    (owned / "last-00000007").write("model.safetensors", "half")
    locks = iter([lost])
    monkeypatch.setattr(checkpointing, "lock", lambda where: next(locks, lock)(where))
    with pytest.raises(NotOursError):
        made(owned, 1).fit(planted.batches(9))
    assert (owned / "last-00000007").names() == ["model.safetensors"]


def test_damaged_checkpoints_are_set_aside_by_their_owner_only(
    owned: Directory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = made(owned, 1)
    first.fit(planted.batches(3))
    first.saver.begin(owned / "last-00000004", 4, RECIPE, background=False)
    first.saver.release()
    recipe = replace(RECIPE, train=replace(RECIPE.train, checkpoint_dir=owned.path))
    before = (owned / "last-00000004").names()

    def damaged(checkpoint: Directory, *_: Any) -> str | None:
        if checkpoint.name != NAME:
            return f"{checkpoint} is damaged"
        taken_over_by_another(owned, monkeypatch, trains=False)
        return None

    monkeypatch.setattr(resume, "_load_whole", damaged)
    run = RunDirectory(tmp_path / "runs", "any")
    with pytest.raises(NotOursError):
        resume.resume_newest(made(owned, 1), recipe, run, resume.Resume(auto=True), Console(quiet=True))
    assert (owned / "last-00000004").names() == before


def test_a_conditional_write_ends_before_a_lease_that_was_looked_at() -> None:
    """It is renewed at a third of its time, and the last request may take half as long as all tries."""
    assert 1.5 * CONDITIONAL_S < TIME_TO_LIVE_S * 2 / 3
