"""Callbacks of the training loop: logs, early stopping, signals and checkpoints.

`KeepLast` saves checkpoints ``last-STEP`` to resume from, and `KeepBest` saves the best model as ``best-STEP``. Neither
removes a checkpoint that is the base of a kept differential checkpoint.
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
        """Append ``{"event": "resume", "step": …}`` on resume, because the following records may repeat steps."""
        if self.path.is_file():  # the last line may be incomplete, e.g. after a full disk, and is then removed
            with self.path.open("rb+") as stream:
                content = stream.read()
                stream.truncate(content.rfind(b"\n") + 1)
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

    def _write(self, record: dict[str, Any]) -> None:
        # The file is closed after each line, so that a killed run loses no line.
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(without_nan(record)) + "\n")


class TensorBoard(Callback):
    """Write event files for TensorBoard. Raise `RecipeError` if TensorBoard is not installed."""

    def __init__(self, directory: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RecipeError(
                f"train.tensorboard is set, but TensorBoard cannot be imported ({error}). "
                "Run pip install 'hotbed[tensorboard]', or set train.tensorboard to false"
            ) from None
        self._writer = SummaryWriter(str(directory))

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Write loss, learning rates and throughput."""
        for name in record.keys() - {"step", "epoch"}:
            self._writer.add_scalar(f"train/{name}", record[name], trainer.step)

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Write the metrics of all tasks."""
        for name, value in metrics.curves("valid").items():
            self._writer.add_scalar(name, value, trainer.step)

    def on_schedule(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Write the rate at which hot and cold batches alternate."""
        self._writer.add_scalar("hot/rate", record["rate"], trainer.step)

    def on_train_end(self, trainer: Trainer) -> None:
        """Close the file."""
        self._writer.close()


def refuse_callbacks(recipe: Recipe) -> None:
    """Raise `RecipeError` unless all callbacks of a recipe are subclasses of `Callback`."""
    for name, component in recipe.callbacks.items():
        with naming(f"callbacks.{name}"):
            cls = component.load()
        if not issubclass(cls, Callback):
            raise RecipeError(f"callbacks.{name} is {component.class_path}, expected a subclass of hotbed.Callback")


def own_callbacks(recipe: Recipe, directory: Path, *, is_first: bool) -> list[Callback]:
    """Build the callbacks that a recipe names, on this rank.

    Callbacks may have constructor parameters ``recipe`` and ``directory``. Unless their init_args set these parameters,
    the recipe and the run's directory are passed.
    """
    made: list[Callback] = []
    for name, component in recipe.callbacks.items():
        cls = component.load()
        if cls.first_rank_only and not is_first:
            continue
        free = signature(cls).parameters.keys() - component.init_args.keys()
        options = {key: value for key, value in (("recipe", recipe), ("directory", directory)) if key in free}
        with naming(f"callbacks.{name}"):
            made.append(component.build(**options))
    return made


class BestSoFar:
    """Track the best value of a metric."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor: Monitor = monitor
        self.value = -math.inf  # best value, negated if lower values are better

    def state_dict(self) -> dict[str, Any]:
        """Return the metric and its best value."""
        return {"monitor": self._monitor, "best": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Load the best value; return False without loading it if the state is about a different metric."""
        same = bool(state["monitor"] == self._monitor)
        if same:
            self.value = state["best"]
        return same

    def improved(self, metrics: Metrics) -> bool:
        """Update the best value; return whether it improved. Raise `RecipeError` if the metric is undefined."""
        value = metrics.value(self._monitor) * (1 if self._monitor in HIGHER_IS_BETTER else -1)
        if math.isnan(value):
            refuse_monitor(self._monitor, metrics.undefined.get(self._monitor, "it is NaN"))
        if not value > self.value:
            return False
        self.value = value
        return True


class EarlyStop(Callback):
    """Stop after ``patience`` evaluations without an improvement of ``monitor``."""

    def __init__(self, patience: int, monitor: Monitor) -> None:
        self._patience, self._best, self._waited = patience, BestSoFar(monitor), 0

    def on_train_start(self, trainer: Trainer) -> None:
        """Stop at once if the resumed run had already reached the limit."""
        trainer.stop = trainer.stop or self._waited >= self._patience

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Count evaluations without improvement, and stop at the limit."""
        self._waited = 0 if self._best.improved(metrics) else self._waited + 1
        trainer.stop = trainer.stop or self._waited >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the number of evaluations since then."""
        return {**self._best.state_dict(), "waited": self._waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, unless a different metric is monitored now."""
        if self._best.load_state_dict(state):
            self._waited = state["waited"]


SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGUSR1") if hasattr(signal, name)]


@contextmanager
def signals_to(trainer: Trainer) -> Generator[list[int]]:
    """Turn signals into requests to a trainer while the body runs; yield the numbers of signals that request the end.

    SIGUSR1 requests a checkpoint. SIGTERM and SIGINT (Ctrl-C) request a checkpoint and the end of training. Any rank
    may receive the signals. All ranks save after the current or the next step, and after the running evaluation if
    there is one. A second SIGTERM or SIGINT ends the process at once. Signals that the process ignores stay ignored.
    The old handlers are restored after the body. Outside of the main thread, no signal is handled.
    """
    stopped_by: list[int] = []

    def request(number: int, _: FrameType | None) -> None:
        trainer.ask_save = True
        if number in (signal.SIGTERM, signal.SIGINT):
            trainer.ask_stop = True
            stopped_by.append(number)
            # Python's handler of SIGINT would not run before the current call (e.g. an exchange) has returned.
            old = before[number]
            signal.signal(number, signal.SIG_DFL if old is signal.default_int_handler else old)
        if number == signal.SIGINT and trainer.ranks.is_first:
            cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # show the cursor that a progress bar has hidden
            message = f"{cursor}hotbed: training ends after the current step; press Ctrl-C again to end it at once\n"
            with suppress(OSError):
                os.write(2, message.encode())

    if threading.current_thread() is not threading.main_thread():
        yield stopped_by
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in before:
        signal.signal(number, request)
    try:
        yield stopped_by
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- checkpoints -------------------------------------------------------------------------------------------------------


class _KeepCheckpoints(Callback):
    """Save checkpoints ``NAME-STEP`` to a directory, and remove checkpoints that need not be kept."""

    def __init__(
        self, name: str, where: str | Path | Directory, recipe: Recipe, publisher: Publisher | None, *, background: bool
    ) -> None:
        self._name, self._where, self._recipe, self._publisher = name, directory(where), recipe, publisher
        self._background = background

    def on_train_start(self, trainer: Trainer) -> None:
        """Lock the directory, and remove unfinished checkpoints of earlier runs."""
        trainer.saver.lock(self._where, remove_unfinished=True)

    def _path(self, step: int) -> Directory:
        return self._where / f"{self._name}-{step:08d}"

    def _save(self, trainer: Trainer, *, background: bool, may_exist: bool = False) -> None:
        step, checkpoint = trainer.step, self._path(trainer.step)
        options: dict[str, Any] = {"background": background, "may_exist": may_exist}
        trainer.saver.begin(checkpoint, step, self._recipe, then=partial(self._saved, checkpoint), **options)

    def _saved(self, checkpoint: Directory) -> None:
        if self._publisher is not None:
            self._publisher.publish(checkpoint)
        self._remove_old(step_of(checkpoint))

    def _remove_old(self, newest: int) -> None:
        """Remove checkpoints before step ``newest`` that need not be kept."""
        raise NotImplementedError


class KeepLast(_KeepCheckpoints):
    """Keep the newest checkpoints ``last-STEP``, to resume from and to evaluate.

    A checkpoint is also saved if ``trainer.ask_save``, a stop or a signal requests one.
    """

    def __init__(
        self,
        where: str | Path | Directory,  # local directory, or a URI like ``s3://bucket/path``
        recipe: Recipe,  # stored in each checkpoint
        every: int | None = None,  # steps between checkpoints
        *,
        minutes: float | None = None,  # minutes between checkpoints, by the first rank's clock
        keep_last: int = 1,  # number of newest checkpoints to keep
        keep_every: int | None = None,  # checkpoints of steps that are a multiple of this number are never removed
        kept: Collection[int] = (),  # checkpoints of these steps are never removed
        background: bool = True,  # write during training (see `save_checkpoint`), except after the last step
        at_end: bool = True,  # save after training
        publisher: Publisher | None = None,  # publishes checkpoints for servers, which may need older checkpoints
    ) -> None:
        super().__init__("last", where, recipe, publisher, background=background)
        self._every, self._minutes, self._at_end = every, minutes, at_end
        self._keep_last, self._keep_every, self._kept = keep_last, keep_every, frozenset(kept)
        self._saved_at, self._own = time.monotonic(), -1

    def on_train_start(self, trainer: Trainer) -> None:
        """Lock the directory, and remove unfinished checkpoints of earlier runs."""
        self._saved_at, self._own = time.monotonic(), trainer.step
        super().on_train_start(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        """Save a checkpoint if it is due."""
        trainer.saver.poll()
        if trainer.save_now or (self._every is not None and trainer.step % self._every == 0):
            self._save_own(trainer, background=self._background)
        if self._minutes is not None and time.monotonic() - self._saved_at >= 60 * self._minutes:
            trainer.ask_save = trainer.ask_save or trainer.ranks.is_first  # all ranks save after the next step

    def on_train_end(self, trainer: Trainer) -> None:
        """Save the final state."""
        if self._at_end or trainer.stop_requested:
            self._save_own(trainer, background=False)
        if self._recipe.train.publish is not None:
            with trainer.saver.waited_for():
                trainer.saver.finish()  # all ranks must call this
                if self._publisher is not None:
                    self._publisher.finish()
                    self._remove_old(trainer.step)

    def _save_own(self, trainer: Trainer, *, background: bool) -> None:
        # The checkpoint exists if this step was saved already, or the run was resumed from it.
        self._save(trainer, background=background, may_exist=trainer.step == self._own)
        self._saved_at, self._own = time.monotonic(), trainer.step

    def _remove_old(self, newest: int) -> None:
        found = {step: c for c in checkpoints_in(self._where, "last") if (step := step_of(c)) <= newest}
        older = [found[step] for step in sorted(found)[: -self._keep_last] if step not in self._kept]
        own = [c for c in older if self._keep_every is None or step_of(c) % self._keep_every]
        remove_unneeded(self._where, [*own, *checkpoints_in(self._where, "best")[:-1]], self._publisher)


class KeepBest(_KeepCheckpoints):
    """Keep the checkpoint of the best evaluation as ``best-STEP``, and load its model when training ends."""

    def __init__(
        self,
        where: str | Path | Directory,
        recipe: Recipe,
        *,
        background: bool = True,
        publisher: Publisher | None = None,
    ) -> None:
        super().__init__("best", where, recipe, publisher, background=background)
        self._best = BestSoFar(monitored(recipe))
        self._checkpoint: Directory | None = None
        self._is_best = False

    @property
    def step(self) -> int | None:
        """Step of the best evaluation, or None without an evaluation."""
        return None if self._checkpoint is None else step_of(self._checkpoint)

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Compare the evaluation with the best one."""
        self._is_best = self._best.improved(metrics)

    def on_step_end(self, trainer: Trainer) -> None:
        """Save a checkpoint if this step's evaluation is the best."""
        trainer.saver.poll()
        if self._is_best:
            self._is_best = False
            self._checkpoint = self._path(trainer.step)  # before saving, because the checkpoint contains this path
            self._save(trainer, background=self._background)

    def on_train_end(self, trainer: Trainer) -> None:
        """Load the best model, if there was an evaluation."""
        if self._checkpoint is not None and not trainer.stop_requested:  # a stopped run will be resumed
            with trainer.saver.waited_for():
                load_checkpoint(self._checkpoint, {"model": trainer.model})

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the path of its checkpoint."""
        return {**self._best.state_dict(), "path": None if self._checkpoint is None else self._checkpoint.path}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the best value, unless its checkpoint was removed or a different metric is monitored now."""
        if state["path"] is None:
            return
        checkpoint = directory(state["path"])
        if not checkpoint.has(MANIFEST):
            _log.warning(
                "the best checkpoint %s was removed, so the best one is chosen from later evaluations", checkpoint
            )
        elif self._best.load_state_dict(state):
            self._checkpoint = checkpoint

    def _remove_old(self, newest: int) -> None:
        others = [c for c in checkpoints_in(self._where, "best") if step_of(c) != newest]
        remove_unneeded(self._where, others, self._publisher)


def remove_unneeded(where: Directory, unwanted: Collection[Directory], publisher: Publisher | None = None) -> None:
    """Remove ``unwanted`` checkpoints, except bases of kept checkpoints and checkpoints that the publisher needs.

    Differential checkpoints are removed before their bases.
    """
    reserved = set[str]() if publisher is None else publisher.needed()
    unwanted = [checkpoint for checkpoint in unwanted if checkpoint.name not in reserved]
    names = {checkpoint.name for checkpoint in unwanted}
    needed = {base_of(checkpoint) for checkpoint in checkpoints_in(where) if checkpoint.name not in names}
    for checkpoint in sorted(unwanted, key=lambda c: (base_of(c) is None, -step_of(c))):
        if checkpoint.name not in needed:
            remove_checkpoint(checkpoint)
