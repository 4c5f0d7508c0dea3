"""Start `hotbed serve` as a process, and ask it; wait for a version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.serve.clients import LONG_S, Client


class Running(Client):
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        self.process = process
        for line in process.stderr:
            if line.startswith("{") and (said := json.loads(line))["event"] == "ready":  # other lines are of libraries
                break
        self.host, self.port = said["host"], said["port"]

    def answer_of(self, step: int, rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        """Ask until the version of this step answers, or a later one; give that answer."""
        end = time.monotonic() + LONG_S
        while True:
            answer = self.ask("POST", "/score", rows)
            assert answer.status == 200, answer.body
            if int(answer.json["version"]) >= step:
                return answer.json
            assert time.monotonic() < end, f"step {answer.json['version']} answers still, not {step}"
            time.sleep(0.02)


@contextmanager
def running(*args: object) -> Generator[Running]:
    command = [sys.executable, "-m", "hotbed", "serve", *map(str, args)]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        try:
            yield Running(process)
        finally:
            process.kill()
