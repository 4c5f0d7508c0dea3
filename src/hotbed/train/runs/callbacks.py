"""Define callbacks of the training loop: logs, stopping early, signals, checkpoints.

The `Trainer` calls a `Callback` after steps, evaluations and so on. All callbacks of hotbed are in this file, except
the progress of commands (`hotbed.train.runs.report`) and the schedule of hot batches.

`KeepLast` saves ``last-STEP`` to resume from, `KeepBest` ``best-STEP``; a `Saver` writes them. They never remove the
base of a differential checkpoint that stays.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from inspect import signature
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from hotbed.checkpoint import MANIFEST, Directory, checkpoints_in, directory, load_checkpoint
from hotbed.checkpoint.manifest import base_of, step_of
from hotbed.checks import naming
from hotbed.config import HIGHER_IS_BETTER, Monitor, Recipe
from hotbed.config.validation import monitored
from hotbed.errors import RecipeError
from hotbed.files import without_nan
from hotbed.train.checkpoints import remove_checkpoint
from hotbed.train.metrics import Metrics, refuse_monitor
from hotbed.train.trainer import Callback, Trainer

if TYPE_CHECKING:
    from hotbed.train.runs.publish import Publisher


_log = logging.getLogger("hotbed")


class JsonLines(Callback):
    """Append every record and evaluation to a file, one JSON object per line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Trainer) -> None:
        """Append ``{"event": "resume", "step": …}`` if steps were taken: what follows repeats the later steps above.

        A line that a full disk has cut short is removed first, so that every line is whole.
        """
        self._remove_cut_line()
        if trainer.step:
            self._write({"event": "resume", "step": trainer.step})

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Append ``{"event": "train", …}``."""
        self._write({"event": "train", **record})

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Append ``{"event": "eval", …}``."""
        self._write({"event": "eval", "step": trainer.step, **metrics.to_dict()})

    def on_checkpoint(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Append ``{"event": "checkpoint", …}``."""
        self._write({"event": "checkpoint", **record})

    def on_schedule(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Append ``{"event": "schedule", …}``."""
        self._write({"event": "schedule", "step": trainer.step, **record})

    def _remove_cut_line(self) -> None:
        if self.path.is_file():
            with self.path.open("rb+") as stream:
                content = stream.read()
                stream.truncate(content.rfind(b"\n") + 1)

    def _write(self, record: dict[str, Any]) -> None:
        # Opened for each line, so that a killed run loses none.
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(without_nan(record)) + "\n")


class TensorBoard(Callback):
    """Write event files for TensorBoard. Raise `RecipeError` if TensorBoard is not installed."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RecipeError(
                f"train.tensorboard is set, but TensorBoard cannot be imported ({error}); "
                f"pip install 'hotbed[tensorboard]', or set train.tensorboard to false"
            ) from None
        self._writer = SummaryWriter(str(directory))

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Write loss, learning rates and rate."""
        for name in record.keys() - {"step", "epoch"}:
            self._writer.add_scalar(f"train/{name}", record[name], trainer.step)

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Write the metrics, also those of each task where there are several."""
        for name, value in metrics.curves("valid").items():
            self._writer.add_scalar(name, value, trainer.step)

    def on_schedule(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Write the rate at which hot and cold batches take turns."""
        self._writer.add_scalar("hot/rate", record["rate"], trainer.step)

    def on_train_end(self, trainer: Trainer) -> None:
        """Close the file."""
        self._writer.close()


def refuse_callbacks(recipe: Recipe) -> None:
    """Raise `RecipeError` for a callback of a recipe that is none."""
    for name, component in recipe.callbacks.items():
        with naming(f"callbacks.{name}"):
            cls = component.load()
        if not issubclass(cls, Callback):
            raise RecipeError(f"callbacks.{name} is {component.class_path}, which is not a hotbed.Callback")


def own_callbacks(recipe: Recipe, directory: Path, *, is_first: bool) -> list[Callback]:
    """Make the callbacks that a recipe names, on the first rank or another one.

    They get ``recipe``, and ``directory``, which is the run's, if they take arguments of these names and init_args has
    none.
    """
    made: list[Callback] = []
    for name, component in recipe.callbacks.items():
        cls = component.load()
        if cls.first_rank_only and not is_first:
            continue
        known = signature(cls).parameters
        wanted = known.keys() - component.init_args.keys()
        given = {key: value for key, value in (("recipe", recipe), ("directory", directory)) if key in wanted}
        with naming(f"callbacks.{name}"):
            made.append(component.build(**given))
    return made


class BestSoFar:
    """Remember the best value of a metric."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor: Monitor = monitor
        self.value = -math.inf
        """The best so far; higher is better."""

    def state_dict(self) -> dict[str, Any]:
        """Of which metric the best value is, and what it is."""
        return {"monitor": self._monitor, "best": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Take over the best value if it is of the same metric; return whether it is."""
        same = bool(state["monitor"] == self._monitor)
        if same:
            self.value = state["best"]
        return same

    def improved(self, metrics: Metrics) -> bool:
        """Whether these metrics are better than all before them."""
        value = metrics.value(self._monitor) * (1 if self._monitor in HIGHER_IS_BETTER else -1)
        if math.isnan(value):
            refuse_monitor(self._monitor, metrics.undefined.get(self._monitor, "it is NaN"))
        if not value > self.value:
            return False
        self.value = value
        return True


class EarlyStop(Callback):
    """Stop after ``patience`` evaluations in which ``monitor`` has not improved."""

    def __init__(self, patience: int, monitor: Monitor) -> None:
        self._patience, self._best, self._waited = patience, BestSoFar(monitor), 0

    def on_train_start(self, trainer: Trainer) -> None:
        """Stop if it was enough before training was resumed."""
        trainer.stop = trainer.stop or self._waited >= self._patience

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Count, and stop if it was enough."""
        self._waited = 0 if self._best.improved(metrics) else self._waited + 1
        trainer.stop = trainer.stop or self._waited >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """The best value, and evaluations since."""
        return {**self._best.state_dict(), "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the count, unless another metric is monitored."""
        if self._best.load_state_dict(state):
            self._waited = state["waited"]


SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


@dataclass
class Signals:
    """Signals that this process got."""

    stopped_by: int | None = None
    """The one that requested a stop."""


@contextmanager
def signals_to(trainer: Trainer) -> Generator[Signals]:
    """Turn signals into requests to a trainer while the body runs: to save a checkpoint, and to stop.

    SIGUSR1 requests a checkpoint; SIGTERM and SIGINT (Ctrl-C) a checkpoint and the end of training. Any rank may get
    them: all save after the same step, the one under way or the next. So a checkpoint is there after at most two steps,
    an evaluation that is under way, and the time that writing takes. A second SIGTERM or SIGINT does
    what it did before: it ends the process, SIGINT too at once, whatever runs. Handlers of the process are as before
    afterwards; a signal that it ignores stays ignored, and where the body runs in another thread than the main one,
    signals are left alone.
    """
    got = Signals()

    def request(number: int, _: FrameType | None) -> None:
        trainer.ask_save = True
        if number in (signal.SIGTERM, signal.SIGINT):
            trainer.ask_stop, got.stopped_by = True, number
            # Python's own handler of SIGINT would wait for the call under way, which may be compiling or exchanging.
            usual = before[number]
            signal.signal(number, signal.SIG_DFL if usual is signal.default_int_handler else usual)
        if number == signal.SIGINT and trainer.ranks.is_first:
            _print_line("hotbed: training ends after the step under way; Ctrl-C again ends it at once")

    if threading.current_thread() is not threading.main_thread():
        yield got
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, request)
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _print_line(message: str) -> None:
    """Write a line to stderr whatever else writes there, with the cursor that a progress bar has hidden."""
    cursor = "\x1b[?25h" if sys.stderr.isatty() else ""
    with suppress(OSError):
        os.write(2, f"{cursor}{message}\n".encode())


# -- checkpoints -------------------------------------------------------------------------------------------------------


class KeepLast(Callback):
    """Keep the newest checkpoints, to resume from and to evaluate: ``last-STEP``.

    One is saved whenever a stop is requested, or ``trainer.ask_save`` is set, as a signal does.
    """

    def __init__(
        self,
        where: str | Path | Directory,  # local directory, or a URI like `s3://bucket/path`
        recipe: Recipe,  # stored in each checkpoint
        every: int | None = None,  # steps between checkpoints; None: not by steps
        *,
        minutes: float | None = None,  # minutes between checkpoints, by the first rank's clock
        keep_last: int = 1,  # number of newest checkpoints to keep
        keep_every: int | None = None,  # steps that are multiples of this are kept for good
        kept: Collection[int] = (),  # further steps to keep
        background: bool = True,  # write during training (see `save_checkpoint`); the last one is waited for
        at_end: bool = True,  # save after training
        publisher: Publisher | None = None,  # checkpoints that it needs are not removed
    ) -> None:
        self._where, self._recipe, self._at_end = directory(where), recipe, at_end
        self._publisher = publisher
        self._every, self._minutes = every, minutes
        self._keep_last, self._keep_every, self._background = keep_last, keep_every, background
        self._saved_at, self._own, self._kept = time.monotonic(), -1, frozenset(kept)

    def on_train_start(self, trainer: Trainer) -> None:
        """Lock the directory, and remove what earlier runs left unfinished there."""
        self._saved_at, self._own = time.monotonic(), trainer.step
        trainer.saver.lock(self._where, remove_unfinished=True)

    def on_step_end(self, trainer: Trainer) -> None:
        """Save if it is time."""
        trainer.saver.poll()
        if trainer.save_now or (self._every is not None and trainer.step % self._every == 0):
            self._save(trainer, background=self._background)
        if self._minutes is not None and time.monotonic() - self._saved_at >= 60 * self._minutes:
            trainer.ask_save = trainer.ask_save or trainer.ranks.is_first  # all ranks save after the next step

    def on_train_end(self, trainer: Trainer) -> None:
        """Save the final state."""
        if self._at_end or trainer.told_to_stop:
            self._save(trainer, background=False)
        if self._recipe.train.publish is not None:
            with trainer.saver.waited_for():
                trainer.saver.finish()  # by all ranks
                if self._publisher is not None:
                    self._publisher.finish()
                    self._remove_old(trainer.step)

    def _save(self, trainer: Trainer, *, background: bool) -> None:
        step = trainer.step
        place = self._where / f"last-{step:08d}"
        trainer.saver.begin(
            place,
            step,
            self._recipe,
            background=background,
            then=partial(self._saved, place),
            may_exist=step == self._own,  # it was saved already, or it is what was resumed from
        )
        self._saved_at, self._own = time.monotonic(), step

    def _saved(self, place: Directory) -> None:
        if self._publisher is not None:
            self._publisher.publish(place)
        self._remove_old(step_of(place))

    def _remove_old(self, newest: int) -> None:
        """Remove what is older than the newest, of which this is the step, and is not to be kept."""
        found = {step: c for c in checkpoints_in(self._where, "last") if (step := step_of(c)) <= newest}
        older = [found[step] for step in sorted(found)[: -self._keep_last] if step not in self._kept]
        own = [c for c in older if self._keep_every is None or step_of(c) % self._keep_every]
        remove_unneeded(self._where, [*own, *checkpoints_in(self._where, "best")[:-1]], self._publisher)


class KeepBest(Callback):
    """Keep the checkpoint of the best evaluation, ``best-STEP``, and goes back to it when training ends."""

    def __init__(
        self,
        where: str | Path | Directory,
        recipe: Recipe,
        *,
        background: bool = True,
        publisher: Publisher | None = None,
    ) -> None:
        self._where, self._recipe, self._background = directory(where), recipe, background
        self._publisher = publisher
        self._best = BestSoFar(monitored(recipe))
        self._place: Directory | None = None
        self._is_best = False

    @property
    def step(self) -> int | None:
        """Step of the best evaluation so far."""
        return None if self._place is None else step_of(self._place)

    def on_train_start(self, trainer: Trainer) -> None:
        """Lock the directory, and remove what earlier runs left unfinished there."""
        trainer.saver.lock(self._where, remove_unfinished=True)

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Remember whether this evaluation is the best."""
        self._is_best = self._best.improved(metrics)

    def on_step_end(self, trainer: Trainer) -> None:
        """Save if the evaluation of this step was the best."""
        trainer.saver.poll()
        if self._is_best:
            self._is_best = False
            place = self._place = self._where / f"best-{trainer.step:08d}"
            then = partial(self._saved, place)
            trainer.saver.begin(place, trainer.step, self._recipe, background=self._background, then=then)

    def on_train_end(self, trainer: Trainer) -> None:
        """Load the best model; it stays as it is if there was no evaluation."""
        if self._place is not None and not trainer.told_to_stop:  # then there is more to train
            with trainer.saver.waited_for():
                load_checkpoint(self._place, {"model": trainer.model})

    def state_dict(self) -> dict[str, Any]:
        """The best value, and where its checkpoint is."""
        return {**self._best.state_dict(), "path": None if self._place is None else self._place.path}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what was the best, unless its checkpoint is gone or another metric is monitored."""
        if state["path"] is None:
            return
        place = directory(state["path"])
        if not place.has(MANIFEST):
            _log.warning("the best checkpoint so far, %s, is gone; later evaluations decide which is the best", place)
        elif self._best.load_state_dict(state):
            self._place = place

    def _saved(self, place: Directory) -> None:
        if self._publisher is not None:
            self._publisher.publish(place)
        others = [c for c in checkpoints_in(self._where, "best") if c.name != place.name]
        remove_unneeded(self._where, others, self._publisher)


def remove_unneeded(where: Directory, unwanted: Collection[Directory], publisher: Publisher | None = None) -> None:
    """Remove checkpoints of a directory, but not the bases of those that stay; differences before their bases.

    What a publisher still reads, or compares the next checkpoint with, stays.
    """
    read = set[str]() if publisher is None else publisher.needed()
    unwanted = [checkpoint for checkpoint in unwanted if checkpoint.name not in read]
    names = {checkpoint.name for checkpoint in unwanted}
    needed = {base_of(checkpoint) for checkpoint in checkpoints_in(where) if checkpoint.name not in names}
    for checkpoint in sorted(unwanted, key=lambda c: (base_of(c) is None, -step_of(c))):
        if checkpoint.name not in needed:
            remove_checkpoint(checkpoint)
