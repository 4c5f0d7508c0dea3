"""Agents of torchrun that come and go: nobody types a command again, and the model is the one of a single process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.cli.cases import train
from tests.train.launcher import PATIENCE_S, ROOT, lines_of, the_run, unused_port

STEPS = 300
ELASTIC = ["--nnodes", "1:3", "--nproc_per_node", "1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
QUICKLY = ["--max-restarts", "9", "--rdzv-conf", "last_call_timeout=2,join_timeout=200", "--monitor-interval", "0.2"]
OPTIONS = ["--plan", "row", "--train.steps", str(STEPS), "--train.epochs", "1000", "--train.checkpoint_every", "5"]


class Agents:
    """Agents of one job, as hosts would run them; the first has the store by which they meet."""

    def __init__(self, folder: Path, recipe: Path) -> None:
        self._folder, self._recipe, self._port = folder, recipe, unused_port()
        self.processes: list[subprocess.Popen[bytes]] = []

    def add(self) -> subprocess.Popen[bytes]:
        """Start one more."""
        command = [sys.executable, "-m", "torch.distributed.run", *ELASTIC, *QUICKLY]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self._port}", "-m", "hotbed", "train", str(self._recipe), *OPTIONS]
        command += ["--model.class_path", "tests.train.rank_models.Slow", "--out", str(self._folder / "runs")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "COLUMNS": "200"}
        env |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self._folder / f"agent-{len(self.processes)}.err").open("wb") as file:
            process = subprocess.Popen(command, cwd=self._folder, env=env, stdout=subprocess.DEVNULL, stderr=file)
        self.processes.append(process)
        return process

    @property
    def said(self) -> str:
        """All that they and their processes wrote to stderr."""
        return "".join(f.read_text(encoding="utf-8") for f in sorted(self._folder.glob("agent-*.err")))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < end, self.said[-5000:]
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()


@pytest.fixture
def agents(recipe: Path, tmp_path: Path) -> Iterator[Agents]:
    made = Agents(tmp_path, recipe)
    yield made
    made.close()


def steps_of(folder: Path) -> list[tuple[str, int]]:
    with suppress(FileNotFoundError, ValueError, json.JSONDecodeError):
        return [(line["event"], line["step"]) for line in lines_of(the_run(folder)) if "step" in line]
    return []


def workers_of(agent: subprocess.Popen[Any]) -> list[int]:
    found = Path(f"/proc/{agent.pid}/task/{agent.pid}/children")
    return [int(pid) for pid in found.read_text().split()]


@pytest.mark.full
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_agents_are_killed_and_added_and_the_run_goes_on(agents: Agents, recipe: Path, tmp_path: Path) -> None:
    def resumed(times: int) -> Callable[[], bool]:
        return lambda: sum(event == "resume" for event, _ in steps_of(tmp_path)) == times

    def checkpoints(after: int) -> Callable[[], bool]:
        return lambda: any(event == "checkpoint" and step > after for event, step in steps_of(tmp_path))

    for _ in range(3):
        agents.add()
    agents.wait_until(checkpoints(5))
    (worker,) = workers_of(agents.processes[2])
    agents.processes[2].kill()  # as its host dies; its process ends with it
    agents.wait_until(lambda: not Path(f"/proc/{worker}").exists())
    agents.wait_until(resumed(1))
    last = steps_of(tmp_path)[-1][1]
    agents.wait_until(checkpoints(last + 5))
    agents.add()
    agents.wait_until(resumed(2))
    (worker,) = workers_of(agents.processes[1])
    os.kill(worker, signal.SIGKILL)
    for process in (agents.processes[0], agents.processes[1], agents.processes[3]):
        assert process.wait(PATIENCE_S) == 0, agents.said[-5000:]
    assert "has ended" in agents.said
    assert agents.said.count("no checkpoint to resume; a new run starts") == 1
    summary = json.loads((the_run(tmp_path) / "summary.json").read_text())
    assert (summary["steps"], summary["ranks"]) == (STEPS, 3)
    _, whole, _ = train(recipe, *OPTIONS, "--name", "whole")
    assert summary["test"]["logloss"] == pytest.approx(whole["test"]["logloss"], abs=1e-4)
    assert summary["test"]["auc"] == pytest.approx(whole["test"]["auc"], abs=1e-3)
