"""Workers that are ranks of one process group: how they are started, and what they agree on when they measure.

All ranks run on this machine, joined by Gloo over the loopback interface. A step takes as long as its slowest rank.
Functions that ranks call together do nothing in a worker that is alone.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
LOOPBACK = {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


class RankError(RuntimeError):
    """A worker failed; says which, and the end of what it wrote to stderr."""


def launch(arguments: Sequence[str], ranks: int, environment: Mapping[str, str]) -> str:
    """Run ``python -m arguments`` in one process, or once per rank, until all have ended.

    Returns
    -------
    str
        The last line that rank 0 wrote to stdout.

    Raises
    ------
    RankError
        If a process fails: the first that does. The others are killed.
    """
    place = {**LOOPBACK, "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=ROOT,
            env={**environment, **({**place, "RANK": str(i), "LOCAL_RANK": str(i)} if ranks > 1 else {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i in range(ranks)
    ]
    failed: int | None = None
    with ThreadPoolExecutor(ranks) as readers:
        outputs = [readers.submit(process.communicate) for process in processes]
        try:
            ended = (outputs.index(output) for output in as_completed(outputs))
            failed = next((rank for rank in ended if processes[rank].returncode != 0), None)
        finally:
            for process in processes:
                process.kill()
    if failed is not None:
        status, stderr = processes[failed].returncode, outputs[failed].result()[1]
        raise RankError(f"{' '.join(arguments)}: rank {failed} failed with exit status {status}:\n{stderr[-4000:]}")
    return outputs[0].result()[0].splitlines()[-1]


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.create_server((LOOPBACK["MASTER_ADDR"], 0)) as server:
        return server.getsockname()[1]


def join() -> tuple[int, int]:
    """Meet the other ranks if there are any; this rank, and how many there are."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return 0, 1
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def leave() -> None:
    """End what `join` began, after all ranks have come as far as this."""
    if _several():
        dist.barrier()
        dist.destroy_process_group()


def wait_for_others() -> None:
    """Return on all ranks at once."""
    if _several():
        dist.barrier()


def largest(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each value, the largest of any rank."""
    return _reduced(values, dist.ReduceOp.MAX)


def total(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of each value, the sum over ranks."""
    return _reduced(values, dist.ReduceOp.SUM)


def _reduced(values: Sequence[Sequence[float]], how: dist.ReduceOp.RedOpType) -> list[list[float]]:
    found = torch.tensor(values, dtype=torch.float64)
    if _several():
        dist.all_reduce(found, how)
    return found.tolist()


def _several() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1
