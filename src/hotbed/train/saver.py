"""`Saver`: the checkpoints of a trainer, one at a time, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hotbed.checkpoint import MANIFEST, Directory, Saving, save_checkpoint
from hotbed.config import Recipe
from hotbed.train.claim import Claim

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
        self._claims: dict[str, Claim] = {}
        self.records: list[dict[str, Any]] = []

    def claim(self, where: Directory) -> None:
        """Hold a directory for this run until `release`; all ranks must call this."""
        with self._trainer.ranks.together(f"use {where}"):
            if self._trainer.ranks.is_first and where.path not in self._claims:
                self._claims[where.path] = Claim(where).__enter__()

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
