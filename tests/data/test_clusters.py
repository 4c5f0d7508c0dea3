"""Clusters whose workers were started by separate commands, in other working directories, prepare the same bytes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from prepare_cases import SMALL, dataset, digests

from hotbed.data.clusters import dask_cluster
from hotbed.data.prepare import prepare
from hotbed.errors import WorkerError
from hotbed.testing.executor import ExecutorContract

pytest.importorskip("distributed", reason="needs hotbed[dask]")
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]
SOURCE = Path(__file__).parents[2] / "src"


@contextmanager
def running(folder: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a working directory of its own, which finds hotbed."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{Path(__file__).parent}"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            cwd=folder,
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class Dask:
    """A scheduler, and workers that can be killed and are started again."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.file = folder / "scheduler.json"
        command = (
            "distributed.cli.dask_scheduler",
            "--port",
            "0",
            "--no-dashboard",
            "--scheduler-file",
            str(self.file),
        )
        stack.enter_context(running(folder / "scheduler", *command))
        deadline = time.monotonic() + 120
        while not self.file.is_file() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.address = str(json.loads(self.file.read_text(encoding="utf-8"))["address"])
        self.workers = [self.start(i) for i in range(2)]

    def start(self, i: int) -> subprocess.Popen[bytes]:
        command = ("distributed.cli.dask_worker", "--scheduler-file", str(self.file), "--nthreads", "1", "--no-nanny")
        return self.stack.enter_context(running(self.folder / f"worker-{i}", *command, "--no-dashboard"))


@pytest.fixture(scope="module")
def dask(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dask]:
    with ExitStack() as stack:
        yield Dask(tmp_path_factory.mktemp("dask"), stack)


class TestDask(ExecutorContract):
    @pytest.fixture(autouse=True)
    def connected(self, dask: Dask) -> Iterator[None]:
        with dask_cluster(f"{dask.address}") as cluster:
            self.cluster = cluster
            yield

    def make(self) -> Executor:
        return self.cluster.executor


def test_the_same_bytes_by_dask_whose_workers_are_killed(
    dask: Dask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hotbed.data.pieces._GROUP_ROWS", 300)
    (tmp_path / "raw").mkdir()
    raw = dataset(tmp_path / "raw")
    prepare(raw, tmp_path / "here", **SMALL, workers=1)
    prepare(raw, tmp_path / "there", **SMALL, executor=f"dask:{dask.address}")
    assert digests(tmp_path / "there") == digests(tmp_path / "here")

    killed: list[int] = []

    def kill(stage: str, done: int, total: int) -> None:
        if done == 2:
            worker = dask.workers.pop(0)
            os.kill(worker.pid, signal.SIGKILL)
            killed.append(worker.pid)
            threading.Thread(target=lambda: dask.workers.append(dask.start(2 + len(killed)))).start()

    prepare(raw, tmp_path / "killed", **SMALL, executor=f"dask:{dask.address}", progress=kill)
    assert digests(tmp_path / "killed") == digests(tmp_path / "here")
    assert len(killed) == 2


def test_a_scheduler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.clusters._CONNECT_S", 1)
    message = r"the scheduler dask:tcp://127.0.0.1:1 cannot be reached .*is it running"
    with pytest.raises(WorkerError, match=message), dask_cluster("tcp://127.0.0.1:1"):
        pass
