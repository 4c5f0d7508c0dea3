"""Clusters whose parts are started by commands of their own, and workers that are killed at chosen moments."""

import atexit
import importlib.util
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SOURCE = Path(__file__).parents[2] / "src"
DEADLINE_S = 300

HAS_RAY = importlib.util.find_spec("ray") is not None
"""Found without importing it, as Ray reads how it authenticates when it is imported."""
HAS_CLIENT = importlib.util.find_spec("grpc") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs Ray: pip install 'hotbed[ray]'")


_WATCHED = """
import os, signal, subprocess, sys, threading

def end_with_the_parent():
    os.read(0, 1)
    os.killpg(0, signal.SIGKILL)

child = subprocess.Popen([sys.executable, "-m", *sys.argv[1:]], stdin=subprocess.DEVNULL)
threading.Thread(target=end_with_the_parent, daemon=True).start()
os._exit(abs(child.wait()))
"""
"""Runs a command, and kills its own process group when the pipe to whoever started it is closed, even by a SIGKILL."""


@contextmanager
def running(folder: Path, *command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a working directory of its own, which finds hotbed; it ends with all that it has started.

    It has a session of its own, so that it can be killed as a whole; it ends when this process does, however that ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"PYTHONPATH": f"{SOURCE}{os.pathsep}{Path(__file__).parent}"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _WATCHED, *command],
            cwd=folder,
            env={**os.environ, **paths, **environment},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def read_when_there(file: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    """What a process writes when it is ready."""
    deadline = time.monotonic() + DEADLINE_S
    while not file.is_file() or not (text := file.read_text(encoding="utf-8").strip()):
        assert process.poll() is None and time.monotonic() < deadline, log.read_text(encoding="utf-8")
        time.sleep(0.1)
    return text


def wait_until_it_says(text: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait for a line of a log."""
    deadline = time.monotonic() + DEADLINE_S
    while text not in (said := log.read_text(encoding="utf-8")):
        assert process.poll() is None and time.monotonic() < deadline, said
        time.sleep(0.1)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def dask_command_line(folder: Path) -> Iterator[str]:
    """The executor of a Dask cluster of two workers, which their nannies start again."""
    file = folder / "scheduler.json"
    quiet = ("--no-dashboard", "--scheduler-file", str(file))
    with ExitStack() as stack:
        scheduler = running(folder / "scheduler", "distributed.cli.dask_scheduler", "--port", "0", *quiet)
        process = stack.enter_context(scheduler)
        address = json.loads(read_when_there(file, process, folder / "scheduler" / "log"))["address"]
        for i in range(2):
            worker = ("distributed.cli.dask_worker", "--nthreads", "1", "--nworkers", "1", *quiet)
            stack.enter_context(running(folder / f"worker-{i}", *worker))
        yield f"dask:{address}"


class Ray(NamedTuple):
    """The executor of a Ray cluster on its nodes, and elsewhere."""

    executor: str
    client: str


def ask_for_a_token() -> None:
    """Set the token of all Ray clusters of this process before any test; Ray looks for one when imported."""
    if "RAY_AUTH_TOKEN_PATH" not in os.environ:
        token = Path(tempfile.mkdtemp(prefix="ray-token")) / "token"
        atexit.register(shutil.rmtree, token.parent, ignore_errors=True)
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token))


@contextmanager
def ray_command_line(folder: Path) -> Iterator[Ray]:
    """A Ray cluster of two nodes that asks for a token; its sockets need a short path."""
    environment = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": str(DEADLINE_S),
        "RAY_worker_register_timeout_seconds": str(DEADLINE_S),
        "RAY_enable_metrics_collection": "0",
    }
    any_ports = ("--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0")
    start = (
        "ray.scripts.scripts",
        "start",
        "--block",
        "--num-cpus",
        "1",
        "--object-store-memory",
        "200000000",
        *any_ports,
    )
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment.items():
            patch.setenv(name, value)
        client = ("--ray-client-server-port", str(free_port())) if HAS_CLIENT else ()
        head = ("--head", "--port", "0", "--include-dashboard", "false", *client)
        options = (*start, *head, "--temp-dir", str(folder))
        process = stack.enter_context(running(folder / "head", *options))
        address = read_when_there(folder / "ray_current_cluster", process, folder / "head" / "log")
        node = stack.enter_context(running(folder / "node", *start, "--address", address))
        wait_until_it_says("Ray runtime started", node, folder / "node" / "log")
        host = address.rpartition(":")[0]
        yield Ray(f"ray:{address}", f"ray://{host}:{client[1]}" if client else "")


PLACES = ("begin", "halfway", "end")
"""Where in a task its worker is killed: before it has done anything, before its result has its name, and after that."""


def choose_moments(folder: Path, tasks: Iterable[str], n: int, seed: int, places: Sequence[str] = PLACES) -> None:
    """Draw moments, a file of each, which is named ``TASK-PLACE``."""
    folder.mkdir()
    moments = [f"{task}-{place}" for task in tasks for place in places]
    for moment in random.Random(seed).sample(moments, n):
        (folder / moment).touch()


def kill_at(moment: Path) -> None:
    """Kill this process, once, if the moment was drawn."""
    try:
        moment.unlink()
    except FileNotFoundError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def dying(folder: Path, module: str, name: str, job: Any) -> Any:
    """Run a task of a preparation, and kill the worker at the moments that were drawn."""
    task: Callable[[Any], Any] = getattr(importlib.import_module(module), name)
    result = job.table if name == "merge_runs" else job.out.name
    at = {place: folder / f"{name}-{result}-{place}" for place in PLACES}
    kill_at(at["begin"])
    with pytest.MonkeyPatch.context() as patch:
        for method in ("rename", "replace"):
            renamed = getattr(Path, method)

            def halfway(path: Path, to: Path, renamed: Callable[..., Path] = renamed) -> Path:
                kill_at(at["halfway"])
                return renamed(path, to)

            patch.setattr(Path, method, halfway)
        made = task(job)
    kill_at(at["end"])
    return made


def kill_workers_at(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let the tasks of preparations kill their workers at the moments of a folder."""
    for module, name in (("counting", "count_values"), ("counting", "merge_runs"), ("encoded_rows", "encode_group")):
        patch.setattr(
            f"hotbed.data.preparation.prepare_dataset.{name}",
            partial(dying, folder, f"hotbed.data.preparation.{module}", name),
        )
