"""Signals as wishes: SIGUSR1 asks for a checkpoint, SIGTERM for a checkpoint and the end of training."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotbed.train.trainer import Trainer

SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]


@contextmanager
def signals_to(trainer: Trainer) -> Generator[None]:
    """Let signals ask a trainer while the body runs.

    Any rank may get them: all save after the same step, the one under way or the next. So a checkpoint is there after
    at most two steps, an evaluation that is under way, and the time that writing takes; a second SIGTERM does not wait
    for it. Handlers of the process are as
    before afterwards; where the body runs in another thread than the main one, signals are left alone.
    """

    def asked(number: int, _: FrameType | None) -> None:
        trainer.ask_save = True
        if number == signal.SIGTERM:
            trainer.ask_stop = True
            signal.signal(number, before[number])  # a second one does what it always does

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, asked) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
