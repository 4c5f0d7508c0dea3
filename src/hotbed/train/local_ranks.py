"""Start the processes of a world on this machine, and wait for them: for commands that need several ranks.

Each runs the same program, and finds the others by the variables of torchrun in its environment. Training itself is
started with torchrun, by the user.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from hotbed.errors import CommError

_PAUSE_S = 0.05
_SHOWN_CHARACTERS = 2000
"""Of what a process that failed has written."""


def run_local(argv: Sequence[str], ranks: int, folder: Path, *, expected: int = 0) -> None:
    """Run a program as several ranks until all have ended, or one has failed; then the others are killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            place = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(argv, env=os.environ | place, stdout=log, stderr=subprocess.STDOUT))
        failed = first_failure(processes, expected)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is not None:
        text = (folder / f"rank{failed}.log").read_text(encoding="utf-8", errors="replace")
        raise CommError(
            f"process {failed} of {ranks} ended with {processes[failed].returncode}: {text[-_SHOWN_CHARACTERS:]}"
        )


def first_failure(processes: Sequence[subprocess.Popen[bytes]], expected: int = 0) -> int | None:
    """Wait for the first process that ends otherwise than expected; None once all have ended so."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, expected):
                return rank
        if None not in codes:
            return None
        time.sleep(_PAUSE_S)
