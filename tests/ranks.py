"""Processes joined by Gloo, started once and used by all tests of exchanges: starting four takes seconds."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hotbed.comm import point_to_point
from hotbed.train.ranks.process_group import end_groups

TIMEOUT_S = 300
"""After which a rank that waits for another gives up: the other may be compiling kernels on a busy machine."""
ANSWER_S = 15
"""The same for a rank that is meant to wait in vain; the others, with their kernels compiled, answer sooner."""
PRELOADED = ["torch._dynamo", "hotbed.cli.main", "hotbed.ops.cpu", "hotbed.train.runs.run", "tests.ranks"]
"""What is imported once, by the process that ranks are forked from."""
SIZES = (1, 3, 4)
"""World sizes that tests ask for; 2 proves nothing for sums, which have one order then. 3 ranks exchange by sockets."""


class RankError(Exception):
    """What a rank raised, with its traceback."""


class Ranks:
    """Worlds of several sizes, each of processes that are started when it is first needed."""

    def __init__(self) -> None:
        self._worlds: dict[int, _World] = {}

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(group, *args)`` on every rank of a world of this size; results by rank. It must be importable."""
        if size not in self._worlds:
            self._worlds[size] = _World(size)
        return self._worlds[size].run(function, args)

    def close(self) -> None:
        """End the processes."""
        for world in self._worlds.values():
            world.close()


class _World:
    def __init__(self, size: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # Processes that are forked hash strings alike. In one world they do not, so that no order of a set can matter.
        context = get_context("spawn" if size == 3 else "forkserver")
        if size != 3:
            context.set_forkserver_preload(PRELOADED)
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(size):
            here, there = context.Pipe()
            args = (rank, size, str(Path(self._folder.name) / "store"), there)
            process = context.Process(target=_serve, args=args, daemon=True)
            process.start()
            self._connections.append(here)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        task = pickle.dumps((function, args))
        for connection in self._connections:
            connection.send_bytes(task)
        results = [pickle.loads(connection.recv_bytes()) for connection in self._connections]
        errors = [f"rank {rank}:\n{error}" for rank, (error, _) in enumerate(results) if error is not None]
        if errors:
            raise RankError("\n".join(errors))
        return [result for _, result in results]

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = timedelta(seconds=TIMEOUT_S)
    if size == 3:  # as ranks of three machines do
        point_to_point._create_memory = lambda ranks: None
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    assert dist.group.WORLD is not None
    while True:
        try:
            function, args = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        try:
            answer = (None, function(dist.group.WORLD, *args))
        except Exception:
            answer = (traceback.format_exc(), None)
        connection.send_bytes(pickle.dumps(answer))
        del answer
        logging.getLogger("hotbed").setLevel(logging.NOTSET)  # tasks may have silenced it
        end_groups()
    dist.destroy_process_group()
