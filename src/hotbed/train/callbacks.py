"""`Callback`, and the callbacks that come with hotbed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.config import Monitor, Recipe
from hotbed.errors import RecipeError
from hotbed.files import without_nan
from hotbed.train.metrics import Metrics

if TYPE_CHECKING:
    from hotbed.train.trainer import Trainer


class Callback:
    """Does something at certain moments of training; override what you need."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Before the first step; ``trainer.steps_total`` is known here, if it can be."""

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """After every step; ``trainer.step`` counts it already."""

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Every ``log_every`` steps: step, epoch, mean loss since the last record, learning rates, samples/s."""

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """After every evaluation during training."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step; not called when training fails."""


class JsonLines(Callback):
    """Appends every record and evaluation to a file, one JSON object per line.

    Parameters
    ----------
    path
        The file, ``metrics.jsonl``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Append ``{"event": "train", …}``."""
        self._write({"event": "train", **record})

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Append ``{"event": "eval", …}``."""
        self._write({"event": "eval", "step": trainer.step, **metrics.to_dict()})

    def _write(self, record: dict[str, Any]) -> None:
        # Opened for each line, so that a killed run loses none.
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(without_nan(record)) + "\n")


class TensorBoard(Callback):
    """Writes curves for TensorBoard.

    Parameters
    ----------
    directory
        Where the event files go.

    Raises
    ------
    RecipeError
        If TensorBoard is not installed.
    """

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
        """Write the metrics."""
        for name in ("auc", "logloss", "normalized_entropy", "calibration", "gauc"):
            if (value := getattr(metrics, name)) is not None:
                self._writer.add_scalar(f"valid/{name}", value, trainer.step)

    def on_train_end(self, trainer: Trainer) -> None:
        """Close the file."""
        self._writer.close()


class BestSoFar:
    """Remembers the best value of a metric.

    Parameters
    ----------
    monitor
        ``"auc"`` (higher is better) or ``"logloss"`` (lower).
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        self._best = -math.inf

    def improved(self, metrics: Metrics) -> bool:
        """Whether these metrics are better than all before them; NaN never is."""
        value = metrics.auc if self._monitor == "auc" else -metrics.logloss
        if not value > self._best:
            return False
        self._best = value
        return True


class KeepLast(Callback):
    """Keeps the newest checkpoint, to resume from and to evaluate.

    Parameters
    ----------
    directory
        Where checkpoints go, each named by its step.
    recipe
        Stored in each.
    every
        Steps between checkpoints; None saves one, at the end.
    """

    def __init__(self, directory: Path, recipe: Recipe, every: int | None = None) -> None:
        self._directory, self._recipe, self._every = directory, recipe, every

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Save if it is time."""
        if self._every is not None and trainer.step % self._every == 0:
            self._save(trainer)

    def on_train_end(self, trainer: Trainer) -> None:
        """Save the final state."""
        self._save(trainer)

    def _save(self, trainer: Trainer) -> None:
        with trainer.clock.paused():
            replace_checkpoint(self._directory, "last", trainer, self._recipe)


class KeepBest(Callback):
    """Keeps the checkpoint of the best evaluation, and goes back to it when training ends.

    Parameters
    ----------
    directory, recipe
        As in `KeepLast`.
    """

    def __init__(self, directory: Path, recipe: Recipe) -> None:
        self._directory, self._recipe = directory, recipe
        self._best = BestSoFar(recipe.train.monitor)
        self._path: Path | None = None

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Save if this evaluation is the best."""
        if self._best.improved(metrics):
            self._path = replace_checkpoint(self._directory, "best", trainer, self._recipe)

    def on_train_end(self, trainer: Trainer) -> None:
        """Load the best model; it stays as it is if there was no evaluation."""
        if self._path is not None:
            load_checkpoint(self._path, {"model": trainer.model})


def replace_checkpoint(directory: Path, kind: str, trainer: Trainer, recipe: Recipe) -> Path:
    """Save ``kind-STEP``, then remove older ones of the kind, so that there is one at any moment."""
    path = directory / f"{kind}-{trainer.step:08d}"
    first = trainer.ranks.is_first
    (exists,) = trainer.ranks.add(first and path.exists())
    if not exists:
        save_checkpoint(path, trainer.parts(), step=trainer.step, recipe=recipe.to_dict())
    if first:
        for other in directory.glob(f"{kind}-*"):
            if other != path:
                shutil.rmtree(other)
    trainer.ranks.add(0)  # the others go on when it is there
    return path


class EarlyStop(Callback):
    """Stops when evaluations have not become better for a while.

    Parameters
    ----------
    patience
        Evaluations without a better one before training stops.
    monitor
        Which metric.
    """

    def __init__(self, patience: int, monitor: Monitor) -> None:
        self._patience, self._best, self._waited = patience, BestSoFar(monitor), 0

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Count, and stop if it was enough."""
        self._waited = 0 if self._best.improved(metrics) else self._waited + 1
        trainer.stop = trainer.stop or self._waited >= self._patience
