"""Callbacks that decide when checkpoints are saved, and which are kept.

`Saver`: the checkpoints of a trainer, one at a time, and what they cost.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.checkpoint import MANIFEST, Directory, Saving, checkpoints_in, directory, load_checkpoint, save_checkpoint
from hotbed.checkpoint.manifest import NAME, step_of
from hotbed.checkpoint.storage import LocalDirectory
from hotbed.config import Recipe
from hotbed.train.callbacks import BestSoFar, Callback
from hotbed.train.directory_lock import DirectoryLock
from hotbed.train.metrics import Metrics

if TYPE_CHECKING:
    from hotbed.train.trainer import Trainer


class Saver:
    """Saves checkpoints of a trainer.

    Parameters
    ----------
    trainer
        Whose.

    Attributes
    ----------
    records
        Of every checkpoint that this rank has written its part of: ``step``, ``path``, ``bytes``, ``seconds`` and
        ``stalled_s``, the time that training was held up.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._saving: Saving | None = None
        self._step = 0
        self._waited_s = 0.0
        self._claims: dict[str, DirectoryLock] = {}
        self.records: list[dict[str, Any]] = []

    def claim(self, where: Directory) -> None:
        """Hold a directory for this run until `release`; all ranks must call this."""
        with self._trainer.ranks.together(f"use {where}"):
            if self._trainer.ranks.is_first and where.path not in self._claims:
                self._claims[where.path] = DirectoryLock(where).__enter__()

    def release(self) -> None:
        """Give directories up."""
        for claim in self._claims.values():
            claim.__exit__()
        self._claims.clear()

    def begin(
        self,
        place: Directory,
        recipe: Recipe,
        *,
        background: bool,
        then: Callable[[], None] | None = None,
        may_exist: bool = False,
    ) -> None:
        """Save the present state, once the checkpoint before is written; all ranks must call this.

        Parameters
        ----------
        place
            The checkpoint's directory.
        recipe
            Stored in it.
        background
            Whether training goes on meanwhile.
        then
            Called on the first rank when the checkpoint is there.
        may_exist
            Save nothing if it is there already.
        """
        trainer = self._trainer
        with trainer.clock.paused():
            start = time.perf_counter()
            self.finish()
            self._waited_s = time.perf_counter() - start
            (exists,) = trainer.ranks.add(may_exist and trainer.ranks.is_first and place.has(MANIFEST))
            if exists:
                return
            self._step = trainer.step
            self._saving = save_checkpoint(
                place, trainer.parts(), step=trainer.step, recipe=recipe.to_dict(), background=background, then=then
            )
            if not background:
                self.finish()

    def poll(self) -> None:
        """Report the checkpoint if this rank has written its part; raise what went wrong here."""
        if self._saving is not None and not self._saving.under_way:
            self._report(self._saving)

    def finish(self) -> None:
        """Wait for the checkpoint under way; all ranks must call this."""
        saving = self._saving
        if saving is not None:
            saving.wait()
            self._report(saving)
            self._saving = None

    def abandon(self) -> None:
        """Let the checkpoint under way be written where training has failed."""
        if self._saving is not None:
            self._saving.abandon()

    def _report(self, saving: Saving) -> None:
        if self.records and self.records[-1]["path"] == saving.path:
            return
        record = {
            "step": self._step,
            "path": saving.path,
            "bytes": saving.nbytes,
            "seconds": saving.seconds,
            "stalled_s": saving.stalled_s + self._waited_s,
        }
        self.records.append(record)
        self._trainer.report_checkpoint(record)


_log = logging.getLogger("hotbed")


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
        self._saved_at, self._own = time.monotonic(), -1

    def on_train_start(self, trainer: Trainer) -> None:
        """Lock the directory, and remove what earlier runs left unfinished there."""
        self._saved_at, self._own = time.monotonic(), trainer.step
        claim(trainer, self._where)

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

    def _save(self, trainer: Trainer, *, background: bool) -> None:
        step = trainer.step
        trainer.saver.begin(
            self._where / f"last-{step:08d}",
            self._recipe,
            background=background,
            then=partial(self._remove_old, step),
            may_exist=step == self._own,  # it was saved already, or it is what was resumed from
        )
        self._saved_at, self._own = time.monotonic(), step

    def _remove_old(self, newest: int) -> None:
        """Remove what is older than the newest, of which this is the step, and is not to be kept."""
        found = {step: c for c in checkpoints_in(self._where, "last") if (step := step_of(c)) <= newest}
        for step in sorted(found)[: -self._keep_last]:
            if self._keep_every is None or step % self._keep_every:
                remove_checkpoint(found[step])


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
        self._is_best = False

    def on_train_start(self, trainer: Trainer) -> None:
        """Lock the directory, and remove what earlier runs left unfinished there."""
        claim(trainer, self._where)

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Remember whether this evaluation is the best."""
        self._is_best = self._best.improved(metrics)

    def on_step_end(self, trainer: Trainer) -> None:
        """Save if the evaluation of this step was the best."""
        trainer.saver.poll()
        if self._is_best:
            self._is_best = False
            place = self._place = self._where / f"best-{trainer.step:08d}"
            trainer.saver.begin(
                place, self._recipe, background=self._background, then=partial(self._remove_old, place.name)
            )

    def on_train_end(self, trainer: Trainer) -> None:
        """Load the best model; it stays as it is if there was no evaluation."""
        if self._place is not None and not trainer.told_to_stop:  # then there is more to train
            load_checkpoint(self._place, {"model": trainer.model})

    def state_dict(self) -> dict[str, Any]:
        """The best value, and where its checkpoint is."""
        return {**self._best.state_dict(), "path": None if self._place is None else self._place.path}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was the best; anew, if its checkpoint is gone, or another metric is monitored."""
        if state["path"] is None:
            return
        place = directory(state["path"])
        if not place.has(MANIFEST):
            _log.warning("the best checkpoint so far, %s, is gone; the best is looked for anew", place)
        elif self._best.load_state_dict(state):
            self._place = place

    def _remove_old(self, best: str) -> None:
        for checkpoint in checkpoints_in(self._where, "best"):
            if checkpoint.name != best:
                remove_checkpoint(checkpoint)


def claim(trainer: Trainer, where: Directory) -> None:
    """Hold a directory of checkpoints, and remove what earlier runs left unfinished there."""
    trainer.saver.claim(where)
    if trainer.ranks.is_first:
        remove_unfinished(where)


def remove_checkpoint(place: Directory) -> None:
    """Remove a checkpoint, the manifest first, so that no part of it is taken for all."""
    place.remove(MANIFEST)
    place.remove_all()


def set_aside(place: Directory) -> str:
    """Give a damaged checkpoint a name under which no run finds it; say what was done.

    Object stores cannot rename: there it is removed, since the step is saved again under its name.
    """
    if not isinstance(place, LocalDirectory):
        remove_checkpoint(place)
        return "removed"
    target = place.root.with_name(f"damaged-{place.root.name}-{uuid.uuid4().hex[:8]}")
    place.root.rename(target)
    return f"renamed to {target.name}"


def remove_unfinished(where: Directory) -> None:
    """Remove checkpoints that killed runs began in a directory, and those that they began to remove."""
    for name in where.names():
        folder = where / name
        if NAME.fullmatch(name) and not folder.has(MANIFEST):
            folder.remove_all()
            _log.info("removed %s, which was never finished", folder)
