"""Follow training: take over what it publishes in a directory, in order, while requests run.

A published directory has full models and changes, named by the step they lead to (`hotbed.serve.model_files`)::

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
from typing import Any, NamedTuple, TypeVar

from hotbed.checkpoint.storage import Directory, directory
from hotbed.errors import CheckpointError, HotbedError, StoppedError
from hotbed.serve.model_files import MANIFEST, ChangeSet, ExportedModel
from hotbed.serve.served_model import Reason, RefusedError, ServedModel

LONGEST_WAIT_S = 60.0
"""Most time until a version that was refused is tried again, and until manifests that were read are read again."""
CLOSE_S = 30.0
"""How long `Follower.close` waits for what is under way."""
COMPACTED_SHARE = 0.5
"""Changes that take so much of the size of the files below are given up for a full model of the same step."""

_log = logging.getLogger("hotbed")
_NAME = re.compile(r"(model|change)-(\d{1,18})")
_Published = TypeVar("_Published", ExportedModel, ChangeSet)


class _Version(NamedTuple):
    """A directory that was published, and the step that its name says."""

    step: int
    name: str


class _ClosedError(Exception):
    """The follower was closed meanwhile."""


class _Known(NamedTuple):
    """A published version whose manifest was read, and when."""

    opened: ExportedModel | ChangeSet
    at: float


class _Retry(NamedTuple):
    """When a version that was refused is tried again, and how long it waited."""

    at: float
    wait_s: float


class Follower:
    """Poll for new versions of a model in a thread, and load them into the model. Nothing else may change the model."""

    def __init__(
        self,
        model: ServedModel,
        place: str | Path | Directory,  # directory or URI that training publishes to
        *,
        interval_s: float = 1.0,  # time between two polls
        verify: bool = True,  # check hashes of full models first; hashes of changes are always checked
        cache: str | Path | None = None,  # directory for remote files, see `hotbed.serve.model_files.Published`
    ) -> None:
        self._model, self._place = model, directory(place)
        self._interval_s, self._verify = interval_s, verify
        self._cache = None if cache is None else Path(cache)
        self.refused: Counter[Reason] = Counter()  # refused versions, by `hotbed.serve.served_model.Reason`
        self.applied: Counter[str] = Counter()  # versions loaded: "change" and "model"
        self._retries: dict[str, _Retry] = {}
        self._known: dict[str, _Known] = {}
        self._newest_at = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look, in the background."""
        self._thread = threading.Thread(target=self._run, name="hotbed-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a version that is being staged is given up, and waited for `CLOSE_S` at most."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _check(self) -> None:
        if self._stop.is_set():
            raise _ClosedError

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
            except _ClosedError:
                return
            except Exception:
                _log.exception("following %s failed; %s goes on serving step %d", self._place, *self._served())

    def look(self) -> None:
        """Take over all that is there, in order."""
        started, step = time.monotonic(), self._model.step
        try:
            models, changes = self._published()
        except Exception as error:  # of whichever client of object stores
            self._refuse(str(self._place), RefusedError(f"{self._place} cannot be read: {error}", "unreadable"))
            return
        names = {version.name for version in (*models, *changes)}
        self._known = {name: known for name, known in self._known.items() if name in names}
        while not self._stop.is_set() and (
            self._apply_one(changes) or self._take_over_one(models) or self._compact(models)
        ):
            self._retries.clear()
            if self._model.step < step:  # changes to what is served now were not asked for
                models, changes = self._published()
            step = self._model.step
        self._refuse_misfits(changes)
        if not any(version.step > self._model.step for version in (*models, *changes)):
            self._newest_at = started

    def _published(self) -> tuple[list[_Version], list[_Version]]:
        """List full models and changes that are complete, by rising step."""
        found: dict[str, list[_Version]] = {"model": [], "change": []}
        for name in self._place.names():
            match = _NAME.fullmatch(name)
            # Changes to earlier steps are not asked for: there may be many.
            is_wanted = match and (match[1] == "model" or int(match[2]) >= self._model.step)
            if match and is_wanted and (name in self._known or (self._place / name).has(MANIFEST)):
                found[match[1]].append(_Version(int(match[2]), name))
        return sorted(found["model"]), sorted(found["change"])

    def _apply_one(self, changes: list[_Version]) -> bool:
        """Apply the changes that come next, if they are there."""
        return not self._model.is_broken and any(
            self._tried(name, "change", partial(self._model.apply, change, check=self._check))
            for name, change in self._opened(changes)
            if change.manifest.base.state == self._model.state
        )

    def _refuse_misfits(self, changes: list[_Version]) -> None:
        """Let the model say why changes do not come next, where nothing leads on to them."""
        for name, change in self._opened(changes):
            if change.manifest.base.state != self._model.state:
                self._tried(name, "change", partial(self._model.apply, change, check=self._check))

    def _opened(self, changes: list[_Version]) -> Iterator[tuple[str, ChangeSet]]:
        """Open changes to later versions, but those that were refused not long ago."""
        for version in changes:
            if version.step <= self._model.step:
                continue
            change = self._open(version.name, ChangeSet)
            if change is not None:
                yield version.name, change

    def _open(self, name: str, kind: type[_Published]) -> _Published | None:
        """Read a version's manifest, at most once in a while; None if it was refused, now or not long ago."""
        if not self._is_due(name):
            return None
        known = self._known.get(name)
        if known is not None and isinstance(known.opened, kind) and time.monotonic() < known.at + LONGEST_WAIT_S:
            return known.opened
        try:
            opened = kind.open(self._place / name, self._cache)
        except Exception as error:  # whatever is in it
            self._refuse(name, _refusal(error))
            return None
        self._known[name] = _Known(opened, time.monotonic())
        return opened

    def _take_over_one(self, models: list[_Version]) -> bool:
        """Take over the newest full model, if it is newer than what is served, or nothing is whole here.

        The newest is that which was written last: a run that went back has written models of earlier steps since.
        """
        found = [(name, model) for _, name in models if (model := self._open(name, ExportedModel)) is not None]
        for name, model in sorted(found, key=lambda each: (each[1].manifest.written, each[0]), reverse=True):
            manifest = model.manifest
            if not self._model.is_broken:
                if manifest.state == self._model.state:
                    return False
                if manifest.written <= self._model.written and manifest.step <= self._model.step:
                    continue
            if self._tried(name, "model", partial(self._take_over, model)):
                return True
        return False

    def _compact(self, models: list[_Version]) -> bool:
        """Take over a full model of the step that is served, if changes have become large."""
        if self._model.tables.changed_share <= COMPACTED_SHARE:
            return False
        found = [(name, self._open(name, ExportedModel)) for step, name in models if step == self._model.step]
        return any(
            self._tried(name, "model", partial(self._take_over, model))
            for name, model in found
            if model is not None and model.manifest.state == self._model.state
        )

    def _take_over(self, model: ExportedModel) -> None:
        self._model.take_over(model, verify=self._verify, check=self._check)

    def _tried(self, name: str, kind: str, take: Callable[[], None]) -> bool:
        """Take a version over; count and remember it if it is refused."""
        try:
            take()
        except _ClosedError:
            raise
        except Exception as error:  # nothing that is published may keep others from being taken over
            if not isinstance(error, HotbedError | OSError | MemoryError):
                _log.exception("%s was not taken over", name)
            self._refuse(name, _refusal(error))
            return False
        self.applied[kind] += 1
        _log.info("%s serves step %d now, of %s", *self._served(), name)
        return True

    def _refuse(self, name: str, error: RefusedError) -> None:
        self.refused[error.reason] += 1
        self._known.pop(name, None)
        wait_s = min(2 * self._retries[name].wait_s if name in self._retries else self._interval_s, LONGEST_WAIT_S)
        self._retries[name] = _Retry(time.monotonic() + wait_s, wait_s)
        _log.warning("refused (%s): %s; %s goes on serving step %d", error.reason, error, *self._served())

    def _is_due(self, name: str) -> bool:
        return name not in self._retries or time.monotonic() >= self._retries[name].at

    def _served(self) -> tuple[str, int]:
        return self._model.name, self._model.step


def _refusal(error: Exception) -> RefusedError:
    """Say why a version is not taken over."""
    if isinstance(error, RefusedError):
        return error
    reason: Reason = "failed"
    if isinstance(error, CheckpointError):
        reason = "damaged"
    elif isinstance(error, OSError):
        reason = "unreadable"
    return RefusedError(f"{error or type(error).__name__}", reason)


def open_newest(place: str | Path | Directory, **options: Any) -> ServedModel:
    """Open an exported model, or the newest undamaged full model of a published directory (a path or a URI).

    ``options`` are those of `ServedModel.open`. Raise `CheckpointError` if there is no such model.
    """
    found = directory(place)
    if found.has(MANIFEST):
        return ServedModel.open(found, **options)
    names = [name for name in found.names() if name.startswith("model-") and _NAME.fullmatch(name)]
    failure: Exception | None = None
    for name in sorted(names, key=lambda name: int(name.rpartition("-")[2]), reverse=True):
        if not (found / name).has(MANIFEST):
            continue
        try:
            return ServedModel.open(found / name, **options)
        except StoppedError:
            raise
        except Exception as error:  # whatever is in it, an older one may be whole
            _log.warning("%s is passed over: %s", name, error)
            failure = failure or error
    if failure is not None:
        raise failure
    raise CheckpointError(f"{place} holds no exported model; make one with hotbed export, or set train.publish to it")
