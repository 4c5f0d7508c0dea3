"""Follow training: take over what it publishes in a directory, in order, while requests run.

A published directory has full models and changes, named by the step they lead to (`hotbed.serve.format`)::

    model-000000000100/   change-000000000120/   change-000000000140/   model-000000000140/

What a server has applied is nowhere but in its memory and in files without names. A server that is killed begins again
with the newest full model (`open_newest`), and applies the changes after it.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hotbed.checkpoint.storage import Directory, directory
from hotbed.errors import CheckpointError, HotbedError
from hotbed.serve.format import MANIFEST, ChangeSet, ExportedModel
from hotbed.serve.model import Reason, RefusedError, ServedModel

LONGEST_WAIT_S = 60.0
"""Most time until a version that was refused is tried again."""
COMPACTED_SHARE = 0.5
"""Changes that take so much of the size of the files below are given up for a full model of the same step."""

_log = logging.getLogger("hotbed")
_NAME = re.compile(r"(model|change)-(\d{1,18})")


class _Version(NamedTuple):
    """A directory that was published, and the step that its name says."""

    step: int
    name: str


class _Retry(NamedTuple):
    """When a version that was refused is tried again, and how long it waited."""

    at: float
    wait_s: float


class Follower:
    """Look for new versions of a model every so often, by a thread, and let the model take them over.

    Parameters
    ----------
    model
        The model; nobody else changes it.
    place
        The directory or URI that training publishes in.
    interval_s
        Time between two looks.
    verify
        Whether hashes of full models are compared before they are taken over; those of changes are always.

    Attributes
    ----------
    refused
        How many versions were refused, by reason (`hotbed.serve.model.Reason`).
    applied
        How many were taken over: ``"change"`` and ``"model"``.
    """

    def __init__(
        self, model: ServedModel, place: str | Path | Directory, *, interval_s: float = 1.0, verify: bool = True
    ) -> None:
        self._model, self._place = model, directory(place)
        self._interval_s, self._verify = interval_s, verify
        self.refused: Counter[Reason] = Counter()
        self.applied: Counter[str] = Counter()
        self._retries: dict[str, _Retry] = {}
        self._newest_at = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, in the background."""
        self._thread = threading.Thread(target=self._run, name="hotbed-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread, when it has done what it is doing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def staleness_s(self) -> float:
        """Seconds since the version that answers was published."""
        return max(time.time() - self._model.written, 0.0)

    @property
    def behind_s(self) -> float:
        """Seconds since the version that answers was last seen to be the newest that is published."""
        return time.monotonic() - self._newest_at

    def counters(self) -> dict[str, dict[str, float]]:
        """Totals since the start, by metric and kind; any thread may call this."""
        return {
            "applied": {kind: float(count) for kind, count in self.applied.copy().items()},
            "refused": {reason: float(count) for reason, count in self.refused.copy().items()},
        }

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.look()
            except Exception:
                _log.exception("following %s failed; %s goes on serving step %d", self._place, *self._served())

    def look(self) -> None:
        """Take over all that is there, in order."""
        started = time.monotonic()
        try:
            models, changes = self._published()
        except (HotbedError, OSError) as error:
            self._refuse(str(self._place), RefusedError(f"{self._place} cannot be read: {error}", "unreadable"))
            return
        while not self._stop.is_set() and (
            self._apply_one(changes) or self._take_over_one(models) or self._compact(models)
        ):
            self._retries.clear()
        self._refuse_misfits(changes)
        if not any(version.step > self._model.step for version in (*models, *changes)):
            self._newest_at = started

    def _published(self) -> tuple[list[_Version], list[_Version]]:
        """List full models and changes that are complete, by rising step."""
        found: dict[str, list[_Version]] = {"model": [], "change": []}
        for name in self._place.names():
            match = _NAME.fullmatch(name)
            # Those of earlier steps are not asked for: there may be many.
            if match and int(match[2]) >= self._model.step and (self._place / name).has(MANIFEST):
                found[match[1]].append(_Version(int(match[2]), name))
        return sorted(found["model"]), sorted(found["change"])

    def _apply_one(self, changes: list[_Version]) -> bool:
        """Apply the changes that come next, if they are there."""
        return not self._model.is_broken and any(
            self._tried(name, "change", partial(self._model.apply, change))
            for name, change in self._opened(changes)
            if change.manifest.base.state == self._model.state
        )

    def _refuse_misfits(self, changes: list[_Version]) -> None:
        """Let the model say why changes do not come next, where nothing leads on to them."""
        for name, change in self._opened(changes):
            if change.manifest.base.state != self._model.state:
                self._tried(name, "change", partial(self._model.apply, change))

    def _opened(self, changes: list[_Version]) -> Iterator[tuple[str, ChangeSet]]:
        """Open changes to later versions, but those that were refused not long ago."""
        for version in changes:
            if version.step <= self._model.step or not self._is_due(version.name):
                continue
            try:
                yield version.name, ChangeSet.open(self._place / version.name)
            except (CheckpointError, OSError) as error:
                self._refuse(version.name, RefusedError(str(error), "damaged"))

    def _take_over_one(self, models: list[_Version]) -> bool:
        """Take over the newest full model, if it is of a later step, or nothing is whole here."""
        for version in reversed(models):
            if (version.step > self._model.step or self._model.is_broken) and self._is_due(version.name):
                taken = self._tried(version.name, "model", partial(self._take_over, version))
                if taken:
                    return True
        return False

    def _compact(self, models: list[_Version]) -> bool:
        """Take over a full model of the step that is served, if changes have become large."""
        if self._model.tables.changed_share <= COMPACTED_SHARE:
            return False
        same = [v for v in models if v.step == self._model.step and self._is_due(v.name)]
        return any(self._tried(v.name, "model", partial(self._take_over, v)) for v in same)

    def _take_over(self, version: _Version) -> None:
        self._model.take_over(ExportedModel.open(self._place / version.name), verify=self._verify)

    def _tried(self, name: str, kind: str, take: Callable[[], None]) -> bool:
        """Take a version over; count and remember it if it is refused."""
        try:
            take()
        except RefusedError as error:
            self._refuse(name, error)
            return False
        except CheckpointError as error:
            self._refuse(name, RefusedError(str(error), "damaged"))
            return False
        self.applied[kind] += 1
        _log.info("%s serves step %d now, of %s", *self._served(), name)
        return True

    def _refuse(self, name: str, error: RefusedError) -> None:
        self.refused[error.reason] += 1
        wait_s = min(2 * self._retries[name].wait_s if name in self._retries else self._interval_s, LONGEST_WAIT_S)
        self._retries[name] = _Retry(time.monotonic() + wait_s, wait_s)
        _log.warning("refused (%s): %s; %s goes on serving step %d", error.reason, error, *self._served())

    def _is_due(self, name: str) -> bool:
        return name not in self._retries or time.monotonic() >= self._retries[name].at

    def _served(self) -> tuple[str, int]:
        return self._model.name, self._model.step


def open_newest(place: str | Path | Directory, **options: Any) -> ServedModel:
    """Open an exported model, or the newest full one of a published directory that is not damaged.

    Parameters
    ----------
    place
        A path or a URI.
    options
        As in `ServedModel.open`.

    Raises
    ------
    CheckpointError
        If there is none.
    """
    found = directory(place)
    if found.has(MANIFEST):
        return ServedModel.open(found, **options)
    names = [name for name in found.names() if name.startswith("model-") and _NAME.fullmatch(name)]
    failure: CheckpointError | None = None
    for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]), reverse=True):
        if not (found / name).has(MANIFEST):
            continue
        try:
            return ServedModel.open(found / name, **options)
        except CheckpointError as error:
            _log.warning("%s is passed over: %s", name, error)
            failure = failure or error
    if failure is not None:
        raise failure
    raise CheckpointError(f"{place} holds no exported model; make one with hotbed export, or set train.publish to it")
