"""Callbacks that decide when checkpoints are saved, and which are kept."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.checkpoint import MANIFEST, Directory, checkpoints_in, directory, load_checkpoint
from hotbed.config import Recipe
from hotbed.train.callbacks import BestSoFar, Callback
from hotbed.train.metrics import Metrics

if TYPE_CHECKING:
    from hotbed.train.trainer import Trainer

_log = logging.getLogger("hotbed")
_NAME = re.compile(r"(last|best)-\d{8,}")


class KeepLast(Callback):
    """Keeps the newest checkpoints, to resume from and to evaluate: ``last-STEP``.

    One is saved whenever training is told to stop, or ``trainer.ask_save`` is set, as a signal does.

    Parameters
    ----------
    where
        Directory that checkpoints go to: a local path, or a URI like ``s3://bucket/path``.
    recipe
        Stored in each.
    every
        Steps between checkpoints; None: no other reason.
    minutes
        Minutes between checkpoints, by the first rank's clock.
    keep_last
        How many of the newest are kept.
    keep_every
        Those of steps that are multiples of this are kept for good.
    background
        Write while training goes on (see `save_checkpoint`); the last one is waited for.
    at_end
        Whether to save one when training is over.
    """

    def __init__(
        self,
        where: str | Path | Directory,
        recipe: Recipe,
        every: int | None = None,
        *,
        minutes: float | None = None,
        keep_last: int = 1,
        keep_every: int | None = None,
        background: bool = True,
        at_end: bool = True,
    ) -> None:
        self._where, self._recipe, self._at_end = directory(where), recipe, at_end
        self._every, self._minutes = every, minutes
        self._keep_last, self._keep_every, self._background = keep_last, keep_every, background
        self._saved_at = time.monotonic()

    def on_train_start(self, trainer: Trainer) -> None:
        """Remove what earlier runs left unfinished in the directory."""
        self._saved_at = time.monotonic()
        if trainer.ranks.is_first:
            remove_unfinished(self._where)

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Save if it is time."""
        trainer.saver.poll()
        if trainer.save_now or (self._every is not None and trainer.step % self._every == 0):
            self._save(trainer, background=self._background)
        if self._minutes is not None and trainer.ranks.is_first:
            trainer.ask_save = time.monotonic() - self._saved_at >= 60 * self._minutes  # all save after the next step

    def on_train_end(self, trainer: Trainer) -> None:
        """Save the final state."""
        if self._at_end or trainer.told_to_stop:
            self._save(trainer, background=False)

    def _save(self, trainer: Trainer, *, background: bool) -> None:
        place = self._where / f"last-{trainer.step:08d}"
        trainer.saver.finish()
        (exists,) = trainer.ranks.add(trainer.ranks.is_first and place.has(MANIFEST))
        if not exists:
            trainer.saver.begin(place, self._recipe, background=background, then=self._remove_old)
        self._saved_at = time.monotonic()

    def _remove_old(self) -> None:
        kept = [c for c in checkpoints_in(self._where) if c.name.startswith("last-")]
        for checkpoint in kept[: -self._keep_last]:
            if self._keep_every is None or int(checkpoint.name.removeprefix("last-")) % self._keep_every:
                remove_checkpoint(checkpoint)


class KeepBest(Callback):
    """Keeps the checkpoint of the best evaluation, ``best-STEP``, and goes back to it when training ends.

    Parameters
    ----------
    where, recipe, background
        As in `KeepLast`.
    """

    def __init__(self, where: str | Path | Directory, recipe: Recipe, *, background: bool = True) -> None:
        self._where, self._recipe, self._background = directory(where), recipe, background
        self._best = BestSoFar(recipe.train.monitor)
        self._place: Directory | None = None

    def on_train_start(self, trainer: Trainer) -> None:
        """Remove what earlier runs left unfinished in the directory."""
        if trainer.ranks.is_first:
            remove_unfinished(self._where)

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Report what was written meanwhile."""
        trainer.saver.poll()

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Save if this evaluation is the best."""
        if not self._best.improved(metrics):
            return
        trainer.saver.finish()  # what it does at its end is about the best before this one
        place = self._place = self._where / f"best-{trainer.step:08d}"
        (exists,) = trainer.ranks.add(trainer.ranks.is_first and place.has(MANIFEST))
        if not exists:
            trainer.saver.begin(place, self._recipe, background=self._background, then=self._remove_old)

    def on_train_end(self, trainer: Trainer) -> None:
        """Load the best model; it stays as it is if there was no evaluation."""
        if self._place is not None and not trainer.told_to_stop:  # then there is more to train
            load_checkpoint(self._place, {"model": trainer.model})

    def state_dict(self) -> dict[str, Any]:
        """The best value, and where its checkpoint is."""
        return {"best": self._best.value, "path": None if self._place is None else self._place.path}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was the best; anew, if its checkpoint is gone."""
        if state["path"] is None:
            return
        place = directory(state["path"])
        if not place.has(MANIFEST):
            _log.warning("the best checkpoint so far, %s, is gone; the best is looked for anew", place)
            return
        self._best.value, self._place = state["best"], place

    def _remove_old(self) -> None:
        assert self._place is not None
        for checkpoint in checkpoints_in(self._where):
            if checkpoint.name.startswith("best-") and checkpoint.name != self._place.name:
                remove_checkpoint(checkpoint)


def remove_checkpoint(place: Directory) -> None:
    """Remove a checkpoint, the manifest first, so that no part of it is taken for all."""
    place.remove(MANIFEST)
    place.remove_all()


def remove_unfinished(where: Directory) -> None:
    """Remove checkpoints that killed runs began in a directory, and those that they began to remove."""
    for name in where.names():
        folder = where / name
        if _NAME.fullmatch(name) and not folder.has(MANIFEST):
            folder.remove_all()
            _log.info("removed %s, which was never finished", folder)
