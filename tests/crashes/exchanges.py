"""End, stop or hold up one rank at the start of an exchange with others, and see how these take it."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hotbed.checkpoint import storage
from hotbed.comm import Link
from tests.crashes.points import DEATH
from tests.crashes.workloads import WIDE

How = Literal["kill", "stop", "slow"]
FILES = "files of a checkpoint"
"""No exchange, but what others wait for too: that a rank writes its files."""
LAST_FILES = "files of the last checkpoint"
"""The same while nothing is trained beside it."""
SLOW_S = 3.0


@dataclass(frozen=True)
class Fault:
    """What happens to a rank.

    Attributes
    ----------
    what
        The exchange, by the name that it has in errors, or `FILES`.
    how
        The process is killed, stopped as if it hung, or waits `SLOW_S` once.
    number
        Which exchange of this name it is, from 1.
    rank
        Which rank.
    """

    what: str
    how: How = "kill"
    number: int = 3
    rank: int = 1


class _State:
    fault: Fault | None = None
    note: Path | None = None
    lock = threading.Lock()


BEGUN: Counter[str] = Counter()
"""Exchanges that this process has begun, by name."""


def begin(fault: Fault | None, note: Path) -> None:
    """Let this happen to this process; when it does, ``note`` says at which time of the monotonic clock."""
    _State.fault, _State.note = fault, note


def _met(what: str) -> None:
    with _State.lock:
        BEGUN[what] += 1
        fault = _State.fault
        meets = fault is not None and (fault.what, fault.number) == (what, BEGUN[what])
    if not meets or fault is None or _State.note is None:
        return
    _State.note.write_text(json.dumps({"at": time.monotonic()}), encoding="utf-8")
    if fault.how == "slow":
        time.sleep(SLOW_S)
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault.how == "kill" else signal.SIGSTOP)


def install() -> None:
    """Wrap exchanges and the writing of files, once."""
    start, write = Link._start, storage._LocalWriter.write

    @functools.wraps(start)
    def exchange(link: Link, what: str, *args: Any) -> Any:
        _met(what)
        return start(link, what, *args)

    @functools.wraps(write)
    def save(writer: Any, data: memoryview) -> None:
        _met(FILES)
        write(writer, data)

    replaced: list[tuple[Any, str, Callable[..., Any]]] = [
        (Link, "_start", exchange),
        (storage._LocalWriter, "write", save),
    ]
    for owner, name, method in replaced:
        setattr(owner, name, method)


ROW = ("--parallel.plan", "row")
SETTINGS: dict[str, tuple[str, ...]] = {
    "ids": ROW,
    "rows": ROW,
    "gradients": ROW,
    "gradients of dense parameters": ROW,
    "losses and sizes": ROW,
    "predictions": ROW,
    "pooled vectors": ("--plan", "DATA/pooled.json"),
    "batches": ("--parallel.reader", "first"),
    "numbers of touched rows": ("--parallel.replicas", "2"),
    "rows of replicas": ("--parallel.replicas", "2"),
    "gradients of replicas": ("--parallel.replicas", "2", "--parallel.exact", "true"),
    "the checkpoint's token": ROW,
    FILES: ROW,
    LAST_FILES: (*ROW, "--train.checkpoint_every", "1000000"),
    "whether the checkpoint was written": ROW,
}
"""Every kind of exchange, and what two ranks must be told so that they have it."""


GRID = " (grid)"
KINDS = (*SETTINGS, *(f"{name}{GRID}" for name in ("ids", "rows", "gradients")))


def settings_of(exchange: str) -> tuple[str, ...]:
    """Options of ``hotbed train`` by which two ranks have an exchange; ``… (grid)``: of a grid-wise plan."""
    return ("--parallel.plan", "grid", *WIDE) if exchange.endswith(GRID) else SETTINGS[exchange]


@dataclass(frozen=True)
class Ended:
    """How ranks took what happened to one of them.

    Attributes
    ----------
    codes
        Exit statuses, by rank.
    seconds
        From then until the last of the others ended; None if it never happened.
    said
        The last line of what each of the others said.
    """

    codes: list[int]
    seconds: float | None
    said: list[str]

    def blames(self, rank: int) -> bool:
        """Whether one of them named this rank as the one that has ended or does not answer."""
        return any(
            re.search(rf"rank {rank} (has ended, or did not answer|ended or does not answer|has not)", line)
            for line in self.said
        )


def end_of(commands: Any, folder: Path, args: Sequence[str], exchange: str, how: How, number: int = 3) -> Ended:
    """Run a command in two ranks, to the second of which something happens, and see how they end."""
    # There is only one checkpoint, of few files, if it is the last.
    fault = Fault(FILES, how, 1) if exchange == LAST_FILES else Fault(exchange.removesuffix(GRID), how, number)
    ended = commands.run((*args, *settings_of(exchange)), folder, 2, fault=fault)
    note = folder / DEATH
    seconds = ended["started"] + ended["ended"][0] - json.loads(note.read_text())["at"] if note.exists() else None
    texts = [(folder / "0.err").read_text(encoding="utf-8").strip()]
    return Ended(ended["codes"], seconds, [text.splitlines()[-1] if text else "" for text in texts])
