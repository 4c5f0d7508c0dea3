"""Signals that ask: SIGUSR1 for a checkpoint; SIGTERM and SIGINT (Ctrl-C) for a checkpoint and the end of training."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotbed.train.trainer import Trainer

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


@dataclass
class Signals:
    """What this process was asked for."""

    stopped_by: int | None = None
    """The signal that asked it to stop."""


@contextmanager
def signals_to(trainer: Trainer) -> Generator[Signals]:
    """Let signals ask a trainer while the body runs.

    Any rank may get them: all save after the same step, the one under way or the next. So a checkpoint is there after
    at most two steps, an evaluation that is under way, and the time that writing takes. A second SIGTERM or SIGINT does
    what it did before: it ends the process, SIGINT too at once, whatever runs. Handlers of the process are as before
    afterwards; a signal that it ignores stays ignored, and where the body runs in another thread than the main one,
    signals are left alone.
    """
    got = Signals()

    def asked(number: int, _: FrameType | None) -> None:
        trainer.ask_save = True
        if number in (signal.SIGTERM, signal.SIGINT):
            trainer.ask_stop, got.stopped_by = True, number
            # Python's own handler of SIGINT would wait for the call under way, which may be compiling or exchanging.
            usual = before[number]
            signal.signal(number, signal.SIG_DFL if usual is signal.default_int_handler else usual)
        if number == signal.SIGINT and trainer.ranks.is_first:
            _tell("hotbed: training ends after the step under way; Ctrl-C again ends it at once")

    if threading.current_thread() is not threading.main_thread():
        yield got
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, asked)
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _tell(message: str) -> None:
    """Write a line to stderr whatever is being written there, with the cursor that a progress bar has hidden."""
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(2, f"{cursor}{message}\n".encode())
