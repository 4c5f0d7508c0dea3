"""Protects: a server is led to the newest version that is published, whatever else is there, and whenever it begins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hotbed.errors import CheckpointError
from hotbed.serve import follower, model_files
from hotbed.serve.follower import Follower, open_newest
from hotbed.serve.model_files import ExportedModel
from hotbed.serve.served_model import ServedModel
from tests.matrix import full
from tests.serve.published import WITH_IDS, Planted, Publisher, batch_of, scores_of

OPTIONS = {"memory_bytes": 1_000, "threads": 1}


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    model = Planted(*WITH_IDS)
    model.train_some(1, most_id=400)
    publisher = Publisher(model, tmp_path)
    publisher.save()
    publisher.export()
    return publisher


@pytest.fixture
def served(publisher: Publisher) -> ServedModel:
    return open_newest(publisher.published, **OPTIONS)


@pytest.fixture
def following(publisher: Publisher, served: ServedModel) -> Follower:
    return Follower(served, publisher.published, interval_s=0)


def is_newest(served: ServedModel, publisher: Publisher) -> bool:
    batch = batch_of(publisher.model, 40, 3, most_id=400)
    found, step = served.score_batch(batch)
    return step == publisher.step and found.tobytes() == scores_of(publisher.model, batch).tobytes()


def test_changes_are_applied_in_order_and_a_model_bridges_a_gap(
    publisher: Publisher, served: ServedModel, following: Follower
) -> None:
    for seed in range(3):
        publisher.step_on(seed)
    (publisher.published / "change-000000000090").mkdir()  # not finished
    (publisher.published / "notes.txt").write_text("of somebody")
    following.poll()
    assert is_newest(served, publisher)
    assert following.applied == {"change": 3}
    publisher.step_on(4)
    shutil.rmtree(publisher.published / "change-000000000050")
    publisher.step_on(5)
    following.poll()
    assert following.refused == {"gap": 1}
    assert served.step == 40
    assert following.behind_s > 0
    assert following.staleness_s >= 0
    publisher.export()
    publisher.step_on(6)
    following.poll()
    assert is_newest(served, publisher)
    assert following.counters() == {"applied": {"change": 4.0, "model": 1.0}, "refused": {"gap": 1.0}}


def test_changes_are_applied_when_the_model_below_them_is_gone(publisher: Publisher, served: ServedModel) -> None:
    shutil.rmtree(publisher.published / "model-000000000010")
    following = Follower(served, publisher.published, interval_s=0)
    for seed in range(2):
        publisher.step_on(seed)
        following.poll()
    assert is_newest(served, publisher)
    assert (following.applied, following.refused) == ({"change": 2}, {})
    assert [column.name for column in served.encoder.columns()] == ["item", "user"]


def test_a_run_that_went_back_is_followed(publisher: Publisher, served: ServedModel, following: Follower) -> None:
    for seed in (1, 2):
        publisher.step_on(seed)
    following.poll()
    assert served.step == 30
    for step in (20, 30):
        shutil.rmtree(publisher.published / f"change-{step:012}")
        shutil.rmtree(publisher.checkpoint(step))
    publisher.step = 10
    publisher.step_to_model(7)
    following.poll()
    assert is_newest(served, publisher)
    publisher.step_on(8)
    following.poll()
    assert (served.step, is_newest(served, publisher)) == (30, True)
    assert (following.applied, following.refused) == ({"change": 3, "model": 1}, {})


def test_a_manifest_that_cannot_be_keeps_no_other_from_being_served(publisher: Publisher, served: ServedModel) -> None:
    following = Follower(served, publisher.published, interval_s=60)
    publisher.step_on(1)
    publisher.export()
    impossible = publisher.published / "model-000000000900"
    shutil.copytree(publisher.published / "model-000000000020", impossible)
    values = json.loads((impossible / "manifest.json").read_text())
    values["encoder"]["schema"]["sparse"][0]["rows"] = -5
    (impossible / "manifest.json").write_text(json.dumps({**values, "written": values["written"] + 9}))
    assert open_newest(publisher.published, **OPTIONS).step == 20
    for _ in range(3):
        following.poll()
    assert is_newest(served, publisher)
    assert following.refused == {"damaged": 2}  # once more after a version was taken over


@pytest.mark.parametrize("error", [MemoryError(), ZeroDivisionError("of a library"), OSError("no route")])
def test_whatever_goes_wrong_is_counted_and_tried_later(
    publisher: Publisher, served: ServedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    following = Follower(served, publisher.published, interval_s=60)
    publisher.step_on(1)

    def fails(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(served.tables, "stage", fails)
        for _ in range(3):
            following.poll()
    assert following.refused == {"unreadable" if isinstance(error, OSError) else "failed": 1}
    following._retries.clear()
    following.poll()
    assert is_newest(served, publisher)


def test_a_model_that_broke_halfway_recovers_from_the_full_model_that_is_there(
    publisher: Publisher, served: ServedModel, following: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.step_on(1)
    following.poll()
    publisher.step_on(2)
    swap, failures = served.tables.swap, [OSError("once")]

    def fails() -> None:
        swap()
        if failures:
            raise failures.pop()

    monkeypatch.setattr(served.tables, "swap", fails)
    following.poll()  # a disk that fails for a moment
    assert (is_newest(served, publisher), following.refused) == (True, {})
    failures += [OSError("and again"), OSError("twice")]
    publisher.step_on(3)
    following.poll()
    assert (is_newest(served, publisher), served.is_broken) == (True, False)
    assert (following.applied, following.refused) == ({"change": 5, "model": 1}, {"unreadable": 1})


def test_a_follower_that_is_closed_gives_up_what_it_stages(
    publisher: Publisher, served: ServedModel, following: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.step_to_model(5)
    begun = threading.Event()
    verify = ExportedModel.verify

    def waits(model: ExportedModel, progress: Callable[[int, int], None]) -> None:
        begun.set()
        assert following._stop.wait(120)
        verify(model, progress)

    monkeypatch.setattr(ExportedModel, "verify", waits)
    following.start()
    assert begun.wait(120)
    following.close()
    assert following._thread is not None
    assert not following._thread.is_alive()
    assert (served.step, following.applied, following.refused) == (10, {}, {})


def test_what_was_fetched_is_removed(publisher: Publisher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(model_files, "LocalDirectory", type("None", (), {}))  # what is local is fetched, too

    def cached() -> set[str]:
        return {path.name for path in (tmp_path / "cache" / "hotbed" / "models").iterdir()}

    def hashes_of(step: int) -> set[str]:
        manifest = ExportedModel.open(publisher.published / f"model-{step:012}").manifest
        return {entry.sha256 for entry in manifest.files.values()}

    served = open_newest(publisher.published, **OPTIONS)
    following = Follower(served, publisher.published, interval_s=0)
    publisher.step_on(1)
    following.poll()
    assert following.applied == {"change": 1}
    assert cached() <= hashes_of(10)
    publisher.step_to_model(2)
    following.poll()
    assert is_newest(served, publisher)
    assert cached() <= hashes_of(30)
    for path in (tmp_path / "cache" / "hotbed" / "models").iterdir():  # a disk that lost some
        path.write_bytes(bytes(path.stat().st_size))
    assert is_newest(open_newest(publisher.published, **OPTIONS), publisher)


def test_a_refused_version_is_tried_again_at_growing_intervals(
    publisher: Publisher, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = Follower(served, publisher.published, interval_s=1)
    now = 1000.0
    monkeypatch.setattr(follower.time, "monotonic", lambda: now)
    change = publisher.step_on(2)
    path = Path(str(change)) / "rows.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    counts = []
    for _ in range(8):
        following.poll()
        counts.append(following.refused["damaged"])
        now += 1
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4]
    path.write_bytes(whole)
    now += 60
    following.poll()
    assert is_newest(served, publisher)


def test_changes_that_grew_large_are_given_up_for_a_full_model(
    publisher: Publisher, served: ServedModel, following: Follower
) -> None:
    publisher.step_on(2)
    publisher.export()
    following.poll()
    assert following.applied == {"change": 1, "model": 1}
    assert served.tables.changed_share == 0
    assert is_newest(served, publisher)


def test_the_newest_whole_model_is_opened(publisher: Publisher, tmp_path: Path) -> None:
    publisher.step_on(2)
    damaged = publisher.export()
    file = damaged.path("tables/embeddings.items.rows")
    file.write_bytes(file.read_bytes()[:-1])
    (publisher.published / "model-000000000090").mkdir()
    served = open_newest(publisher.published, **OPTIONS)
    assert served.step == 10
    Follower(served, publisher.published).poll()
    assert is_newest(served, publisher)
    with pytest.raises(CheckpointError, match=r"has no exported model"):
        open_newest(tmp_path / "nothing")
    shutil.rmtree(publisher.published / "model-000000000010")
    with pytest.raises(CheckpointError, match=r"embeddings\.items\.rows: got 4,799 bytes"):
        open_newest(publisher.published)


def test_a_directory_that_cannot_be_read_is_counted(
    publisher: Publisher, served: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = Follower(served, publisher.published)

    def fails(self: object) -> list[str]:
        raise CheckpointError("no route to host")

    monkeypatch.setattr(type(following._source), "names", fails)
    following.poll()
    assert following.refused == {"unreadable": 1}


def test_a_thread_follows(publisher: Publisher, served: ServedModel) -> None:
    following = Follower(served, publisher.published, interval_s=0.01)
    following.start()
    publisher.step_on(2)
    deadline = time.monotonic() + 120
    while served.step != 20 and time.monotonic() < deadline:
        threading.Event().wait(0.01)
    following.close()
    assert is_newest(served, publisher)
    assert following.applied == {"change": 1}


KILLED = """
import os, signal, sys
from hotbed.serve import row_files, served_tables
from hotbed.serve.follower import Follower, open_newest

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

served = open_newest(sys.argv[1], memory_bytes=1000, threads=1)
Follower(served, sys.argv[1]).poll()
assert served.step == 20
point = sys.argv[2]
if point == "stage":
    row_files.write_all = killed
elif point == "swap":
    served_tables.ServedIds.swap = killed
else:
    served.tables.tidy = killed
print("ready", flush=True)
sys.stdin.readline()
Follower(served, sys.argv[1]).poll()
"""


@pytest.mark.parametrize("point", ["swap", full("stage"), full("tidy")])
def test_a_server_that_is_killed_begins_again_with_the_newest(publisher: Publisher, point: str, tmp_path: Path) -> None:
    publisher.step_on(2)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(publisher.published), point],
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    publisher.step_on(3)
    process.communicate("\n", timeout=120)
    assert process.returncode == -signal.SIGKILL
    assert not [p for p in temporary.iterdir() if p.name.startswith("hotbed-")]
    served = open_newest(publisher.published, **OPTIONS)
    Follower(served, publisher.published).poll()
    assert is_newest(served, publisher)
