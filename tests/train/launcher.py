"""Ranks of ``hotbed train`` in processes of their own, for tests of torchrun, of signals and of ranks that die."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hotbed

ROOT = Path(hotbed.__file__).parents[2]
PATIENCE_S = 300
"""A process that takes longer hangs; the machine may be busy."""
ENDLESS = ["--train.steps", "100000", "--train.epochs", "100000", "--train.log_every", "1"]

# Processes with the environment that torchrun gives them, forked by one that has imported everything: that takes
# seconds, and so none starts so much later than the others that these give up waiting.
LAUNCHER = """
import json, os, signal, sys
import torch._dynamo, hotbed.cli.main, hotbed.ops.cpu, hotbed.train.runs.run, tests.train.rank_models
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    if not os.fork():
        break
else:
    sys.exit()
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background of a shell
os.setsid()
folder, size, port, args = json.loads(line)

def note(name, text):
    with open(f"{folder}/{name}", "w") as file:
        file.write(str(text))

note("leader.pid", os.getpid())
ranks = {}
for rank in range(size):
    if pid := os.fork():
        ranks[pid] = rank
        note(f"{rank}.pid", pid)
        continue
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(f"{folder}/{rank}.{name}", os.O_CREAT | os.O_WRONLY, 0o600), stream.fileno())
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.exit(hotbed.cli.main.main(args))
while ranks:
    pid, status = os.wait()
    note(f"{ranks.pop(pid)}.code", os.waitstatus_to_exitcode(status))
"""


def wait_until(condition: Callable[[], bool], said: Callable[[], str]) -> None:
    """Wait until a condition holds; a failure shows what was said."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, said()[-5000:]
        time.sleep(0.02)


class Processes:
    """Ranks of one ``hotbed`` command; their output is in files."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder, self.size = folder, size

    def text(self, rank: int | str, name: str) -> str:
        file = self.folder / f"{rank}.{name}"
        return file.read_text(encoding="utf-8") if file.exists() else ""

    def error(self, rank: int) -> str:
        """Last line on stderr."""
        return (self.text(rank, "err").strip().splitlines() or [""])[-1]

    def wait_for(self, rank: int | str, name: str, text: str = "") -> None:
        """Wait until a file of a rank has content, or contains a text."""

        def is_there() -> bool:
            found = self.text(rank, name)
            done = bool(found) and text in found
            assert done or name == "code" or not self.text(rank, "code"), self.text(rank, "err")[-2000:]
            return done

        self.wait_until(is_there)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, lambda: "\n".join(self.text(rank, "err")[-1000:] for rank in range(self.size)))

    def wait(self, *ranks: int) -> list[int]:
        """Wait until ranks (all by default) have ended; their exit codes."""
        ranks = ranks or tuple(range(self.size))
        for rank in ranks:
            self.wait_for(rank, "code")
        return [int(self.text(rank, "code")) for rank in ranks]

    def send(self, rank: int, how: signal.Signals) -> None:
        os.kill(int(self.text(rank, "pid")), how)

    def end(self) -> None:
        """Kill what is left of them."""
        self.wait_for("leader", "pid")
        with suppress(ProcessLookupError):
            os.killpg(int(self.text("leader", "pid")), signal.SIGKILL)


def unused_port() -> int:
    """A TCP port of the loopback interface, below those that the system gives to connections of other programs."""
    while True:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


class Launcher:
    """Starts ranks."""

    def __init__(self) -> None:
        env = os.environ | {"COLUMNS": "200", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", LAUNCHER]
        self._process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, text=True)

    @contextmanager
    def start(self, folder: Path, size: int, *args: str, command: str = "train") -> Iterator[Processes]:
        """Ranks of ``hotbed COMMAND ARGS``; what is left of them afterwards is killed."""
        folder.mkdir()
        port = unused_port()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(folder), size, port, [command, *args]]) + "\n")
        self._process.stdin.flush()
        started = Processes(folder, size)
        try:
            yield started
        finally:
            started.end()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


def the_run(folder: Path) -> Path:
    """The one run's directory."""
    (run,) = (folder / "runs" / "small").iterdir()
    return run


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def torchrun(folder: Path, *args: str) -> subprocess.Popen[str]:
    """``torchrun`` of ``hotbed train`` in two processes; ``ARGS`` of torchrun end with the recipe."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    at = next(i for i, arg in enumerate(args) if arg.endswith(".yaml"))
    return subprocess.Popen(
        [*command, *args[:at], "-m", "hotbed", "train", *args[at:], "--out", "runs", "--json", "summary.json"],
        cwd=folder,
        env=os.environ | {"COLUMNS": "200", "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def output_of(process: subprocess.Popen[str]) -> tuple[str, str]:
    """What it says until it ends."""
    try:
        return process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
