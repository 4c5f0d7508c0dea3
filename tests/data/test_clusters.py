"""Clusters whose workers were started by separate commands, in other working directories, prepare the same bytes."""

import functools
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, Executor
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import numpy as np
import pytest
from cluster_cases import (
    DEADLINE_S,
    HAS_CLIENT,
    SOURCE,
    Ray,
    choose_moments,
    free_port,
    kill_workers_at,
    needs_ray,
)
from prepare_cases import FILES, GROUP_ROWS, SMALL, digests

from hotbed.data.executors import Cluster, RayExecutor, dask_cluster, open_tasks, ray_cluster
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import SpecError, WorkerError
from hotbed.testing.executor_contract import ExecutorContract, double, ones

Client = pytest.importorskip("distributed", reason="needs hotbed[dask]").Client
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of Dask, of Ray, and of sockets that they leave open
    pytest.mark.usefixtures("small_groups"),
]

SEED = 25


@pytest.mark.full
class TestDask(ExecutorContract):
    @pytest.fixture(autouse=True)
    def connected(self, dask: str) -> Iterator[None]:
        with Client(dask.removeprefix("dask:"), set_as_default=False) as self.client:
            yield

    def make(self) -> Executor:
        return self.client.get_executor(pure=False)


class TwoArgumentsError(Exception):
    """An error that cannot be unpickled, as its `args` are not those of its constructor."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


def fail_with_two() -> NoReturn:
    raise TwoArgumentsError(1, 2)


def end() -> NoReturn:
    sys.exit(3)


def lock() -> object:
    return threading.Lock()


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(file: Path, there: bool) -> None:
    """Until a file is there, or is not."""
    while file.exists() != there:
        time.sleep(0.05)


@needs_ray
@pytest.mark.full
class TestRay(ExecutorContract):
    @pytest.fixture(autouse=True, scope="class")
    def cluster(self, ray_nodes: Ray) -> Iterator[Cluster]:
        with ray_cluster(ray_nodes.executor.removeprefix("ray:")) as cluster:
            yield cluster

    def make(self) -> Executor:
        return RayExecutor(2)

    def test_it_is_connected_once(self, ray: str, cluster: Cluster) -> None:
        """A connection that is there is used, and left."""
        for address in ("auto", ray.removeprefix("ray:")):
            with ray_cluster(address) as same:
                assert same.executor.submit(double, 1).result(DEADLINE_S) == 2
        assert cluster.executor.submit(double, 2).result(DEADLINE_S) == 4
        message = r"got ray:other:1, but this process is connected to ray:\S+. Use ray:auto"
        with pytest.raises(SpecError, match=message), ray_cluster("other:1"):
            pass

    def test_both_nodes_are_counted(self, cluster: Cluster) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while cluster.slots() < 2 and time.monotonic() < deadline:
            time.sleep(0.5)
        assert cluster.slots() == 2

    def test_a_sigterm_goes_to_who_had_it(self) -> None:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_calls_that_wait_are_cancelled_by_shutdown(self, executor: Executor, tmp_path: Path) -> None:
        begun = [executor.submit(wait_for, tmp_path / "go", there=True) for _ in range(2)]
        waiting = [executor.submit(double, i) for i in range(5)]
        executor.shutdown(wait=False, cancel_futures=True)
        assert all(future.cancelled() for future in waiting)
        (tmp_path / "go").touch()
        assert [future.result(DEADLINE_S) for future in begun] == [None, None]

    def test_arrays_are_views_of_the_object_store(self, executor: Executor) -> None:
        made = executor.submit(ones, 100_000).result(DEADLINE_S)
        assert not made.flags.writeable and np.array_equal(made, np.ones(100_000))

    def test_errors_that_cannot_be_pickled(self, executor: Executor) -> None:
        with pytest.raises(TypeError):
            pickle.loads(pickle.dumps(TwoArgumentsError(1, 2)))
        with pytest.raises(RuntimeError, match=r"^TwoArgumentsError: 1 and 2$"):
            executor.submit(fail_with_two).result(DEADLINE_S)
        for call in (lock, functools.partial(double, threading.Lock())):
            with pytest.raises(TypeError, match=r"pickle|serialize"):
                executor.submit(call).result(DEADLINE_S)

    def test_a_worker_that_ends_itself(self, executor: Executor) -> None:
        with pytest.raises(SystemExit, match="3") as caught:
            executor.submit(end).result(DEADLINE_S)
        assert "in end" in str(caught.value.__cause__)

    def test_a_call_that_always_kills_its_worker(self, executor: Executor) -> None:
        with pytest.raises(BrokenExecutor, match="Ray: The worker died unexpectedly"):
            executor.submit(die).result(DEADLINE_S)
        assert executor.submit(double, 1).result(DEADLINE_S) == 2


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["dask", pytest.param("ray", marks=needs_ray)])
def test_the_same_bytes(
    request: pytest.FixtureRequest,
    raw: Path,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cluster: str,
) -> None:
    """Paths are relative to where the command runs."""
    monkeypatch.chdir(tmp_path)
    prepare(os.path.relpath(raw), "out", **SMALL, executor=request.getfixturevalue(cluster))
    assert digests(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("executor", "moments"),
    [
        ("processes", 2),
        pytest.param("processes", 20, marks=pytest.mark.full),
        pytest.param("dask", 20, marks=pytest.mark.full),
        pytest.param("ray", 20, marks=[pytest.mark.full, needs_ray]),
    ],
)
def test_the_same_bytes_where_workers_are_killed(
    request: pytest.FixtureRequest,
    raw: Path,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
    moments: int,
) -> None:
    groups = [f"{i:06d}" for i in range(-(-FILES * 400 // GROUP_ROWS))]
    results = {"count_values": groups, "merge_runs": ["user", "tags"], "encode_group": groups}
    tasks = [f"{name}-{result}" for name, of_task in results.items() for result in of_task]
    choose_moments(tmp_path / "moments", tasks, moments, SEED)
    kill_workers_at(monkeypatch, tmp_path / "moments")
    if executor == "processes":
        prepare(raw, tmp_path / "out", **SMALL, executor=executor, workers=2)
    else:
        prepare(raw, tmp_path / "out", **SMALL, executor=request.getfixturevalue(executor))
    assert list((tmp_path / "moments").iterdir()) == []
    assert digests(tmp_path / "out") == expected


def test_a_scheduler_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hotbed.data.executors._CONNECT_S", 1)
    message = r"the scheduler dask:tcp://127\.0\.0\.1:1 is unreachable"
    with pytest.raises(WorkerError, match=message), dask_cluster("tcp://127.0.0.1:1"):
        pass


@pytest.mark.parametrize("address", ["nowhere.invalid:8786", "127.0.0.1:SILENT"])
def test_a_scheduler_that_does_not_answer_is_one_line_in_time(tmp_path: Path, raw: Path, address: str) -> None:
    """The name is unknown, or something listens that is no scheduler."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = address.replace("SILENT", str(server.getsockname()[1]))
        command = [sys.executable, "-m", "hotbed", "prepare", str(raw), str(tmp_path / "out"), "--threshold", "2"]
        done = subprocess.run(
            [*command, "--executor", f"dask:{address}"],
            env={**os.environ, "PYTHONPATH": str(SOURCE)},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        start = time.monotonic()
        with pytest.raises(WorkerError, match=r"the scheduler.* 8 s\)"), dask_cluster(address):
            pass
        assert time.monotonic() - start < 12  # so that the command ends in 15
    assert done.returncode == 2
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert f"the scheduler dask:{address} is unreachable" in " ".join(done.stderr.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cluster", ["dask:local", pytest.param("ray:local", marks=[pytest.mark.full, needs_ray])])
def test_a_cluster_is_started_on_this_machine(
    raw: Path, expected: dict[str, str], tmp_path: Path, cluster: str
) -> None:
    prepare(raw, tmp_path / "out", **SMALL, executor=cluster, workers=2)
    assert digests(tmp_path / "out") == expected
    with open_tasks(cluster, 1) as tasks:
        assert list(tasks.map(double, [1, 2])) == [2, 4]


@needs_ray
def test_a_ray_cluster_that_is_not_there() -> None:
    for address in (f"127.0.0.1:{free_port()}", f"ray://127.0.0.1:{free_port()}"):
        with (
            pytest.raises(WorkerError, match=rf"the cluster ray:{address} is unreachable .*refused.*running"),
            ray_cluster(address),
        ):
            pass


@needs_ray
@pytest.mark.parametrize("address", ["somewhere", "host:", "host:1:2/3", "tcp://host:6379"])
def test_an_address_that_is_none(address: str) -> None:
    message = rf"got 'ray:{address}', expected ray:auto, ray:HOST:6379, ray://HOST:10001"
    with pytest.raises(SpecError, match=message), open_tasks(f"ray:{address}"):
        pass


@needs_ray
@pytest.mark.full
def test_a_ray_cluster_of_another_version(ray: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.__version__", "1.2.3")
    message = r"the cluster ray:\S+ runs a different version .*\(.*Ray: 1\.2\.3.*\)"
    with pytest.raises(WorkerError, match=message), ray_cluster(ray.removeprefix("ray:")):
        pass


@needs_ray
@pytest.mark.full
def test_a_ray_cluster_that_asks_for_a_token(ray: str, raw: Path, tmp_path: Path) -> None:
    """Asked by a process that has none, and by one that is told where it is."""
    command = [sys.executable, "-m", "hotbed", "prepare", str(raw), "out", "--threshold", "2", "--executor", ray]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    environment |= {"HOME": str(tmp_path), "PYTHONPATH": str(SOURCE), "RAY_AUTH_MODE": "disabled"}
    refused = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert refused.returncode == 2 and "Traceback" not in refused.stderr
    assert "If it asks for a token, set RAY_AUTH_MODE=token" in " ".join(refused.stderr.split())
    assert list(tmp_path.glob("*out*")) == []
    environment |= {name: os.environ[name] for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "source.yaml").is_file()


@needs_ray
@pytest.mark.full
@pytest.mark.skipif(not HAS_CLIENT, reason="needs pip install 'ray[client]'")
def test_the_same_bytes_by_a_client_of_ray(ray_nodes: Ray, raw: Path, expected: dict[str, str], tmp_path: Path) -> None:
    prepare(raw, tmp_path / "out", **SMALL, executor=ray_nodes.client)
    assert digests(tmp_path / "out") == expected


@pytest.mark.full
@pytest.mark.parametrize("cluster", ["dask", pytest.param("ray", marks=needs_ray)])
def test_a_worker_that_cannot_import_a_task(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cluster: str
) -> None:
    module = ModuleType("installed_here_alone")
    exec("def task(i): return i", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with (
        open_tasks(request.getfixturevalue(cluster)) as tasks,
        pytest.raises(WorkerError, match="installed_here_alone"),
    ):
        list(tasks.map(module.task, [1, 2]))
