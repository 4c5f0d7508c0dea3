"""Progress of training and of work in stages: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hotbed.train.callbacks import Callback
from hotbed.train.metrics import Metrics

if TYPE_CHECKING:
    from hotbed.train.trainer import Trainer

_STAGES = {
    "read": "reading the log",
    "count": "counting values",
    "write": "writing the dataset",
    "accesses": "counting accesses",
    "pack": "packing hot and cold samples",
}


class StageProgress:
    """Progress through named stages, as `hotbed.prepare` reports it; a context manager.

    Parameters
    ----------
    console
        Where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._bar: Progress | None = None

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("", total=None)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Show how much of a stage is done."""
        new = stage != self._stage
        self._stage = stage
        if self._bar is not None:
            task = self._bar.task_ids[0]
            if new:
                self._bar.reset(task, description=_STAGES[stage])
            self._bar.update(task, completed=done, total=total)
        elif new:
            self._console.print(f"{_STAGES[stage]} …")


class ShowProgress(Callback):
    """A progress bar with loss, rate and time left; plain lines where the output is not a terminal.

    Parameters
    ----------
    console
        Where to print.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._started = 0.0
        self._first_step = 0

    def on_numerics(self, trainer: Trainer, chosen: str) -> None:
        """Print a line."""
        self._console.print(chosen)

    def on_train_start(self, trainer: Trainer) -> None:
        """Show an empty bar."""
        self._started, self._first_step = time.perf_counter(), trainer.step
        if self._console.is_terminal:
            columns = (
                "training",
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("train", total=trainer.steps_total, completed=trainer.step, note="")
            self._bar.start()

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Move the bar."""
        if self._bar is not None:
            note = f"loss {loss:.4f}  {trainer.samples_per_s:,.0f} samples/s"
            self._bar.update(self._bar.task_ids[0], completed=trainer.step, note=note)

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Print a line."""
        if self._bar is None:
            of = f"/{trainer.steps_total:,}" if trainer.steps_total else ""
            self._console.print(
                f"step {trainer.step:,}{of}  loss {record['loss']:.4f}  "
                f"{record['samples_per_s']:,.0f} samples/s{self._time_left(trainer)}"
            )

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Print a line."""
        shown = [f"{label} {_shown(metrics, name)}" for name, label in (("auc", "AUC"), ("logloss", "logloss"))]
        self._console.print(f"step {trainer.step:,}  valid {'  '.join(shown)}", soft_wrap=True)

    def on_train_end(self, trainer: Trainer) -> None:
        """Take the bar away."""
        self.close()

    def close(self) -> None:
        """Take the bar away, also where training failed."""
        if self._bar is not None:
            self._bar.stop()

    def _time_left(self, trainer: Trainer) -> str:
        done = trainer.step - self._first_step
        if not trainer.steps_total or not done:
            return ""
        seconds = (time.perf_counter() - self._started) / done * (trainer.steps_total - trainer.step)
        minutes, seconds = divmod(round(seconds), 60)
        return f"  {minutes}:{seconds:02d} left"


def _shown(metrics: Metrics, name: str) -> str:
    value: float = getattr(metrics, name)
    return f"– ({metrics.undefined.get(name, 'not defined')})" if math.isnan(value) else f"{value:.5f}"
