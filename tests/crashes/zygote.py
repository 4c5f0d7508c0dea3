"""A process that has imported everything and run no kernel, and forks those of a command for each line of stdin."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from numba.core.registry import cpu_target

from hotbed.checkpoint import differential
from hotbed.cli.main import main as command
from hotbed.store.file_records import FileRecords
from hotbed.train import Trainer
from tests.crashes import exchanges, points, wants
from tests.crashes.points import COUNTING, COUNTS, DEATH, DIGESTS, Point
from tests.ranks import PRELOADED

MORE = ("hotbed.data.preparation.prepare_dataset", "hotbed.checkpoint.changes", "torch.distributed.fsdp")


def digest_of(trainer: Trainer) -> dict[str, Any]:
    """SHA-256 by tensor of rows, moments and dense parameters, and the counters; all ranks must call this."""
    from tests.train.parallel_cases import state_of

    tensors = {
        name: hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, t in state_of(trainer).items()
    }
    counters = {name: getattr(trainer, name) for name in ("step", "samples", "epoch", "position")}
    return {**tensors, **counters}


def _noting(fit: Callable[..., None], folder: Path) -> Callable[..., None]:
    def called(trainer: Trainer, *args: Any, **options: Any) -> None:
        fit(trainer, *args, **options)
        note, COUNTING.note = COUNTING.note, None  # what follows is the harness's, and not counted
        found = digest_of(trainer)
        if trainer.ranks.is_first:
            with (folder / DIGESTS).open("a") as stream:
                stream.write(json.dumps(found) + "\n")
        COUNTING.note = note

    return called


def run(task: dict[str, Any], rank: int) -> int:
    """Be one process of a command, until it ends or dies."""
    folder = Path(task["folder"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        os.dup2(os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), stream.fileno())
    if task["ranks"] > 1:
        size = str(task["ranks"])
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(task["port"])}
    FileRecords.__init__.__defaults__ = (1 << 14,)  # few bytes wait to be written, so that many writes are counted
    differential.MOST_SHARE = 10.0  # most rows of such small tables change, and differences are saved all the same
    Trainer.fit = _noting(Trainer.fit, folder)
    point = None if task["point"] is None else Point(**task["point"])
    COUNTING.begin(point if point is not None and point.rank == rank else None, folder / DEATH, task["whole"])
    if (want := task.get("want")) is not None:
        wants.begin(wants.Want(**want), folder / DEATH)
    if (fault := task.get("fault")) is not None and fault["rank"] == rank:
        exchanges.begin(exchanges.Fault(**fault), folder / DEATH)
    code = command(task["args"])
    COUNTING.note = None
    (folder / f"{rank}.{COUNTS}").write_text(
        json.dumps({"phases": COUNTING.by_phase, "operations": COUNTING.operations, "exchanges": exchanges.BEGUN}),
        encoding="utf-8",
    )
    return code


def serve() -> None:
    """Answer each task with the exit code of every rank (negative: the signal that ended it), and how long it took."""
    for name in (*PRELOADED, "hotbed.cli.train", "hotbed.cli.checkpoint", *MORE):
        import_module(name)
    cpu_target.typing_context.refresh()  # what every first kernel waits for
    cpu_target.target_context.refresh()
    points.install()
    wants.install()
    exchanges.install()
    for line in sys.stdin:
        task = json.loads(line)
        started = time.monotonic()
        ranks: dict[int, int] = {}
        for rank in range(task["ranks"]):
            if pid := os.fork():
                ranks[pid] = rank
                continue
            code = 70
            try:
                code = run(task, rank)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        codes, ended = [0] * task["ranks"], [0.0] * task["ranks"]
        left, end = set(ranks), started + task["limit_s"]
        fault = task.get("fault")
        stopped = fault["rank"] if fault and fault["how"] == "stop" else None
        while left:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                left.discard(pid)
                codes[ranks[pid]] = os.waitstatus_to_exitcode(status)
                ended[ranks[pid]] = time.monotonic() - started
            elif stopped is not None and [ranks[of] for of in left] == [stopped]:
                os.kill(left.copy().pop(), signal.SIGKILL)  # it was stopped; the others have ended
            elif time.monotonic() > end:
                for late in left:
                    os.kill(late, signal.SIGABRT)
                end += 60
            else:
                time.sleep(0.005)
        print(json.dumps({"codes": codes, "ended": ended, "started": started}), flush=True)
