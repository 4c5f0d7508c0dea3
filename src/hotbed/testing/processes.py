"""Run a function in several processes with a Gloo group, for contracts that need ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hotbed.train.ranks.process_group import end_groups

TIMEOUT_S = 300
"""Timeout of collectives; other ranks may compile kernels on a busy machine."""


class World(Protocol):
    """Calls ``function(group, *args)`` in ``size`` processes, and returns the results by rank."""

    def __call__(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]: ...


def run_in_processes(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call ``function(group, *args)`` in new processes, which must be able to import it; return results by rank."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(size, get_context("spawn")) as pool:
        store = str(Path(folder) / "store")
        # Each rank waits for all others, so each call has its own process.
        return [f.result() for f in [pool.submit(_run_rank, rank, size, store, function, args) for rank in range(size)]]


def _run_rank(rank: int, size: int, store: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    try:
        return function(dist.group.WORLD, *args)
    finally:
        end_groups()
        dist.destroy_process_group()
