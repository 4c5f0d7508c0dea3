"""End a process that makes no progress, or whose agent of torchrun is gone, before others wait for it in vain.

A rank that hangs in code of its own (a loop without an end, a file system that does not answer) waits in no exchange,
so no timeout of Gloo ends it. Ranks that wait for it fail after ``parallel.timeout_s``, and torchrun then kills it, but
where it hung nobody knows. `Watchdog` is a thread that ends the process itself, with the stacks of all threads, once no
batch was finished for ``train.step_limit_s``, in training or in evaluation.

What does not count as hanging:

- to wait for another rank: that one hangs, and ``parallel.timeout_s`` ends the wait with its number;
- to write a checkpoint: how long that takes depends on its size;
- time in which the process did not run at all: it, or its whole machine, was suspended.

Code that hangs without letting go of Python's global lock stops this thread as well. So the thread sets an alarm of
faulthandler's, whose thread needs no lock, and puts it off as long as it runs; the alarm writes the stacks to stderr.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn, Self

from hotbed.comm import waits
from hotbed.config import Recipe

STATUS = 2
"""Exit status of a process that ends itself: that of an error, which torchrun takes for a failure."""
_TICKS = 20
"""Looks per limit."""
_LONGEST_TICK_S = 1.0


class Watchdog:
    """End this process if it finishes no batch for a while; a context around training or evaluation."""

    def __init__(
        self,
        progress: Callable[[], int],
        limit_s: float | None,
        where: Path,
        *,
        rank: int,
        here: Callable[[], str],
        is_exempt: Callable[[], bool],
    ) -> None:
        self._progress, self._limit_s, self._file = progress, limit_s, where / f"stacks-{rank}.txt"
        self._here, self._is_exempt = here, is_exempt
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._limit_s is not None:
            self._over.clear()
            self._thread = threading.Thread(
                target=self._watch, args=(self._limit_s,), name="hotbed-watchdog", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None
            faulthandler.cancel_dump_traceback_later()

    def _watch(self, limit_s: float) -> None:
        tick = min(limit_s / _TICKS, _LONGEST_TICK_S)
        seen, idle_s, before = self._progress(), 0.0, time.monotonic()
        while True:
            faulthandler.dump_traceback_later(limit_s + 2 * tick, exit=True, file=2)
            if self._over.wait(tick):
                return
            now = time.monotonic()
            idle_s += min(now - before, 2 * tick)  # more has passed only where the process did not run
            before = now
            if self._progress() != seen or waits() or self._is_exempt():
                seen, idle_s = self._progress(), 0.0
            elif idle_s >= limit_s:
                self._end(limit_s)

    def _end(self, limit_s: float) -> NoReturn:
        end(
            f"{self._here()}: no batch was finished for {limit_s:g} s (train.step_limit_s); this process is in "
            f"{_innermost()}, and ends; {_write_stacks(self._file)}; raise the limit if it was only slow"
        )


def end(reason: str) -> NoReturn:
    """End this process as it is, whatever its threads do, with one message on stderr."""
    with suppress(OSError):
        os.write(2, f"hotbed: error: {reason}\n".encode())
    os._exit(STATUS)


def end_with_parent(what: str, *, every_s: float = 1.0) -> None:
    """End this process soon after its parent has ended, which nothing else would tell it."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(every_s)
        end(f"rank {os.environ.get('RANK', '?')}: {what}, process {parent}, has ended, and this process with it")

    threading.Thread(target=watch, name="hotbed-parent", daemon=True).start()


def limit_of(recipe: Recipe, ranks: int) -> float | None:
    """Seconds without a batch after which a process is ended: the recipe's, or else, of several, the timeout."""
    if recipe.train.step_limit_s is not None:
        return recipe.train.step_limit_s
    return recipe.parallel.timeout_s if ranks > 1 else None


def _innermost() -> str:
    """The function that the main thread is in."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "no function of Python"
    return f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})"


def _write_stacks(file: Path) -> str:
    """Write the stacks of all threads to a file, or to stderr where it cannot be made; say where they are."""
    try:
        with file.open("a", encoding="utf-8") as stream:
            faulthandler.dump_traceback(stream)
            os.fsync(stream.fileno())
    except OSError as error:
        faulthandler.dump_traceback(2)
        return f"the stacks of its threads are above ({file} cannot be written: {error.strerror})"
    return f"the stacks of its threads are in {file}"
