"""Run hotbed's commands, and programs that print what they found, from benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from hotbed.cli.main import main
from hotbed.errors import HotbedError


def run(*argv: object) -> None:
    """A command of hotbed's, in this process; ends it where the command fails."""
    if status := main([str(arg) for arg in argv]):
        raise SystemExit(status)


def json_of(name: str, module: str, *argv: object) -> Any:
    """Run a module as a process of its own, and read the last line that it prints; ``name`` is for what fails."""
    command = [sys.executable, "-m", module, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise HotbedError(f"{name} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
