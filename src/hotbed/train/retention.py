"""Save a run's checkpoints when it is time, and remove those that are not to be kept.

`KeepLast` saves ``last-STEP`` to go on from, `KeepBest` ``best-STEP``; a `Saver` writes them. What is removed is never
the base of a differential checkpoint that stays.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.checkpoint import MANIFEST, Directory, checkpoints_in, directory, load_checkpoint
from hotbed.checkpoint.manifest import base_of, step_of
from hotbed.config import Recipe
from hotbed.config.validation import monitored
from hotbed.train.callbacks import BestSoFar
from hotbed.train.checkpointing import remove_checkpoint
from hotbed.train.metrics import Metrics
from hotbed.train.trainer import Callback, Trainer

if TYPE_CHECKING:
    from hotbed.train.publish import Publisher

_log = logging.getLogger("hotbed")


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
