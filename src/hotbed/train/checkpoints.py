"""Write a run's checkpoints, one at a time, to directories that are locked for this run.

The callbacks `KeepLast` and `KeepBest` decide when `Saver` saves, and which checkpoints are kept.
`hotbed.train.directory_lock` prevents other runs from using the directories.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from hotbed.checkpoint import MANIFEST, Directory, Saving, Stateful, checkpoints_in, save_checkpoint
from hotbed.checkpoint.manifest import NAME, step_of
from hotbed.checkpoint.storage import LocalDirectory
from hotbed.config import Recipe
from hotbed.errors import CheckpointError
from hotbed.train.directory_lock import DirectoryLock, lock
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.throughput import Clock

_log = logging.getLogger("hotbed")


class Saver:
    """Save checkpoints of a run, one at a time."""

    def __init__(
        self,
        ranks: Ranks,
        clock: Clock,
        parts: Callable[[], Mapping[str, Stateful]],
        report: Callable[[dict[str, Any]], None],
        full_every: int = 1,
    ) -> None:
        self._ranks, self._clock, self._parts, self._report = ranks, clock, parts, report
        self._saving: Saving | None = None
        self._full_every, self._base, self._differences = full_every, cast("Saving | None", None), 0
        self._step = 0
        self._waited_s = 0.0
        self._is_waiting = False
        self._locks: dict[str, DirectoryLock] = {}
        # A record for each checkpoint: its step and path, and this rank's bytes, seconds and stalled_s (the seconds by
        # which saving delayed training). If full_every is above 1, also base, which is None for full checkpoints.
        self.records: list[dict[str, Any]] = []

    def lock(self, where: Directory, *, remove_unfinished: bool = False) -> None:
        """Lock a directory for this run until `release`; all ranks must call this.

        With ``remove_unfinished``, remove checkpoints without a manifest, which killed runs have left.
        """
        with self._ranks.together(f"use {where}"):
            if self._ranks.is_first and where.path not in self._locks:
                self._locks[where.path] = lock(where).__enter__()
            if self._ranks.is_first and remove_unfinished:
                _remove_unfinished(where, self._locks[where.path])

    def check(self) -> None:
        """Raise `NotOursError` if another run has taken over a locked directory."""
        _check(self._locks.values())

    def release(self) -> None:
        """Unlock the directories. A checkpoint that is still being written gets no manifest, so it stays incomplete."""
        for held in self._locks.values():
            held.__exit__()
        self._locks.clear()

    def begin(
        self,
        place: Directory,
        step: int,
        recipe: Recipe,
        *,
        background: bool,
        then: Callable[[], None] | None = None,
        may_exist: bool = False,
    ) -> None:
        """Wait until the previous checkpoint is written, and save a checkpoint of the run; all ranks must call this.

        With ``background``, files are written while training continues. The first rank calls ``then`` when the
        checkpoint is complete. With ``may_exist``, nothing is saved if ``place`` already has a complete checkpoint.
        """
        with self._clock.paused(), self.waited_for():
            start = time.perf_counter()
            self.finish()
            self._waited_s = time.perf_counter() - start
            exists = False
            with self._ranks.together(f"read {place}"):
                exists = may_exist and self._ranks.is_first and place.has(MANIFEST)
            if any(self._ranks.add(exists)):
                return
            check = partial(_check, tuple(self._locks.values()))  # a copy, so that `release` does not empty it
            with self._ranks.together(f"write to {place}"):
                check()
            self._step = step
            self._saving = save_checkpoint(
                place,
                self._parts(),
                step=step,
                recipe=recipe.to_dict(),
                base=self._base if self._differences + 1 < self._full_every else None,
                track=self._full_every > 1,
                background=background,
                then=then,
                check=check,
            )
            self._differences += 1
            if self._saving.base is None:
                self._base, self._differences = self._saving, 0
            if not background:
                self.finish()

    @property
    def is_waited_for(self) -> bool:
        """Whether training currently waits for a checkpoint."""
        return self._is_waiting or (self._saving is not None and self._saving.holds_up)

    def poll(self) -> None:
        """If this rank has written the current checkpoint, add its record to `records`; raise an error of writing."""
        for held in self._locks.values():
            held.check_renewals()
        if self._saving is not None and not self._saving.under_way:
            self._record(self._saving)

    def finish(self) -> None:
        """Wait until the current checkpoint is written; all ranks must call this."""
        saving = self._saving
        if saving is not None:
            with self.waited_for():
                saving.wait()
            self._record(saving)
            self._saving = None

    @contextmanager
    def waited_for(self) -> Generator[None]:
        """Set `is_waited_for` while the body runs."""
        before, self._is_waiting = self._is_waiting, True
        try:
            yield
        finally:
            self._is_waiting = before

    def abandon(self) -> None:
        """After training has failed, end the current checkpoint without waiting for ranks that may have ended."""
        if self._saving is not None:
            with self.waited_for():
                self._saving.abandon()

    def _record(self, saving: Saving) -> None:
        if self.records and self.records[-1]["path"] == saving.path:
            return
        record = {
            "step": self._step,
            "path": saving.path,
            "bytes": saving.nbytes,
            "seconds": saving.seconds,
            "stalled_s": saving.stalled_s + self._waited_s,
            **({} if self._full_every == 1 else {"base": saving.base}),
        }
        self.records.append(record)
        self._report(record)


def _check(locks: Iterable[DirectoryLock]) -> None:
    for held in locks:
        held.check()


def refuse_other_checkpoints(where: Directory, resumed: Directory | None) -> None:
    """Raise `CheckpointError` if a directory has checkpoints, unless this run ``resumed`` the newest of them."""
    existing = checkpoints_in(where)
    if not existing:
        return
    found = [c for c in existing if resumed is not None and are_same(resumed, c)]
    if not found:
        raise CheckpointError(
            f"{where} contains checkpoints of another run, up to {existing[-1].name}. Resume that run with "
            f"--resume {where}, or choose a different train.checkpoint_dir"
        )
    newer = [c.name for c in existing if step_of(c) > step_of(found[0])]
    if newer:
        raise CheckpointError(
            f"{where} contains checkpoints that are newer than {found[0].name}: {', '.join(newer)}. Remove the newer "
            "checkpoints, resume the newest one, or choose a different train.checkpoint_dir"
        )


def are_same(a: Directory, b: Directory) -> bool:
    """Return whether two paths name the same directory."""
    if isinstance(a, LocalDirectory) and isinstance(b, LocalDirectory):
        return a.root.resolve() == b.root.resolve()
    return a.path == b.path


def remove_checkpoint(place: Directory) -> None:
    """Remove a checkpoint. The manifest is removed first, because a checkpoint with a manifest counts as complete."""
    place.remove(MANIFEST)
    place.remove_all()


def set_aside(place: Directory) -> str:
    """Rename a damaged checkpoint so that no run finds it, or remove it; return what was done, e.g. ``"removed"``.

    It is removed from object stores, which cannot rename. The run will save the step again under the old name.
    """
    if not isinstance(place, LocalDirectory):
        remove_checkpoint(place)
        return "removed"
    target = place.root.with_name(f"damaged-{place.root.name}-{uuid.uuid4().hex[:8]}")
    place.root.rename(target)
    return f"renamed to {target.name}"


def _remove_unfinished(where: Directory, held: DirectoryLock) -> None:
    """Remove the checkpoints without a manifest, which killed runs have left."""
    for name in where.names():
        folder = where / name
        if NAME.fullmatch(name) and not folder.has(MANIFEST):
            held.check()
            folder.remove_all()
            _log.info("removed the unfinished checkpoint %s", folder)
