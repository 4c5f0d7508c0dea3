"""Follow training: load the versions that training publishes in a directory, in order, while requests run.

A published directory contains full models and changes. Their names contain the step that they lead to::

    model-000000000100/   change-000000000120/   change-000000000140/   model-000000000140/

A server stores applied changes only in memory and in temporary files without names. So a restarted server loads the
newest full model (`open_newest`), and applies the changes that follow the model.
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
from hotbed.serve.served_model import Reason, RefusedError, ServedModel, floats

LONGEST_WAIT_S = 60.0  # longest time until a refused version is tried again, and until a manifest is read again
CLOSE_S = 30.0  # longest time that `Follower.close` waits for the thread
COMPACTED_SHARE = 0.5  # a full model replaces the changes when they need more disk space than this share of the model

_log = logging.getLogger("hotbed")
_NAME = re.compile(r"(model|change)-(\d{1,18})")
_Published = TypeVar("_Published", ExportedModel, ChangeSet)


class _Version(NamedTuple):
    """Step and name of a published directory."""

    step: int
    name: str


class _ClosedError(Exception):
    """Stops the loading of a version in the follower's thread, because the follower was closed."""


class _Retry(NamedTuple):
    """Time of the next attempt to load a refused version, and the wait before this attempt."""

    at: float
    wait_s: float


class Follower:
    """Poll for new versions of a model in a thread, and load them. Only this thread may change the model."""

    def __init__(
        self,
        model: ServedModel,
        source: str | Path | Directory,  # directory or URI that training publishes to
        *,
        interval_s: float = 1.0,  # time between two polls
        verify: bool = True,  # whether to check the hashes of full models; the hashes of changes are always checked
        cache: str | Path | None = None,  # for copies of remote files, see `hotbed.serve.model_files.Published`
    ) -> None:
        self._model, self._source = model, directory(source)
        self._interval_s, self._verify, self._cache = interval_s, verify, cache
        self.refused: Counter[Reason] = Counter()  # number of refused versions by reason
        self.applied: Counter[str] = Counter()  # number of loaded versions by "change" and "model"
        self._retries: dict[str, _Retry] = {}
        self._known: dict[str, tuple[ExportedModel | ChangeSet, float]] = {}  # versions, and when they were opened
        self._newest_at = time.monotonic()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="hotbed-follow", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread. A version that is being staged is cancelled."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _check(self) -> None:
        if self._stop.is_set():
            raise _ClosedError

    @property
    def staleness_s(self) -> float:
        """Seconds since the served version was published."""
        return max(time.time() - self._model.written, 0.0)

    @property
    def behind_s(self) -> float:
        """Seconds since the last poll after which no published version was newer than the served version."""
        return time.monotonic() - self._newest_at

    def counters(self) -> dict[str, dict[str, float]]:
        """Return the number of versions since the start: ``applied`` by kind, and ``refused`` by reason.

        Kinds are "change" and "model". Any thread may call this method.
        """
        return {"applied": floats(self.applied), "refused": floats(self.refused)}

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.poll()
            except _ClosedError:
                return
            except Exception:
                _log.exception("following %s failed; %s still serves step %d", self._source, *self._served())

    def poll(self) -> None:
        """Load all published versions, in order."""
        started, step = time.monotonic(), self._model.step
        try:
            models, changes = self._list_published()
        except Exception as error:  # clients of object stores raise many classes of errors
            self._refuse(str(self._source), RefusedError(f"{self._source} cannot be read: {error}", "unreadable"))
            return
        names = {version.name for version in (*models, *changes)}
        self._known = {name: known for name, known in self._known.items() if name in names}
        while not self._stop.is_set() and (
            self._apply_next(changes) or self._load_newest(models) or self._compact(models)
        ):
            self._retries.clear()
            if self._model.step < step:  # after a step back, changes are needed that were not listed
                models, changes = self._list_published()
            step = self._model.step
        self._refuse_misfits(changes)
        if not any(version.step > self._model.step for version in (*models, *changes)):
            self._newest_at = started

    def _list_published(self) -> tuple[list[_Version], list[_Version]]:
        """Return the full models and the changes that are completely written, each sorted by step."""
        found: dict[str, list[_Version]] = {"model": [], "change": []}
        for name in self._source.names():
            match = _NAME.fullmatch(name)
            # Changes to earlier steps are skipped, because there may be many of them.
            is_wanted = match and (match[1] == "model" or int(match[2]) >= self._model.step)
            if match and is_wanted and (name in self._known or (self._source / name).has(MANIFEST)):
                found[match[1]].append(_Version(int(match[2]), name))
        return sorted(found["model"]), sorted(found["change"])

    def _apply_next(self, changes: list[_Version]) -> bool:
        """Apply the next set of changes, and return whether a set was applied."""
        return not self._model.is_broken and any(
            self._try(name, "change", partial(self._model.apply, change, check=self._check))
            for name, change in self._open_changes(changes)
            if change.manifest.base.state == self._model.state
        )

    def _refuse_misfits(self, changes: list[_Version]) -> None:
        """Try changes that do not start from the served version, so that the reason of the refusal is recorded."""
        for name, change in self._open_changes(changes):
            if change.manifest.base.state != self._model.state:
                self._try(name, "change", partial(self._model.apply, change, check=self._check))

    def _open_changes(self, changes: list[_Version]) -> Iterator[tuple[str, ChangeSet]]:
        """Yield the name and content of each change to a later version, except recently refused changes."""
        for version in changes:
            if version.step <= self._model.step:
                continue
            change = self._open(version.name, ChangeSet)
            if change is not None:
                yield version.name, change

    def _open(self, name: str, form: type[_Published]) -> _Published | None:
        """Open a version, or return the object of a recent call. Return None if the version is refused.

        ``form`` is the class of the version: `ExportedModel` or `ChangeSet`.
        """
        if name in self._retries and time.monotonic() < self._retries[name].at:
            return None
        known, at = self._known.get(name, (None, 0.0))
        if isinstance(known, form) and time.monotonic() < at + LONGEST_WAIT_S:
            return known
        try:
            opened = form.open(self._source / name, self._cache)
        except Exception as error:  # readers of an invalid file may raise any error
            self._refuse(name, _refusal(error))
            return None
        self._known[name] = opened, time.monotonic()
        return opened

    def _load_newest(self, models: list[_Version]) -> bool:
        """Load the last written full model that can be loaded. Return whether one was loaded.

        If the served version is intact, the model must be written later or have a later step. A model of a resumed run
        may be written later but have an earlier step.
        """
        found = [(name, model) for _, name in models if (model := self._open(name, ExportedModel)) is not None]
        for name, model in sorted(found, key=lambda each: (each[1].manifest.written, each[0]), reverse=True):
            manifest = model.manifest
            if not self._model.is_broken:
                if manifest.state == self._model.state:
                    return False
                if manifest.written <= self._model.written and manifest.step <= self._model.step:
                    continue
            if self._try(name, "model", partial(self._take_over, model)):
                return True
        return False

    def _compact(self, models: list[_Version]) -> bool:
        """If changes need too much disk space, load the full model of the served step. Return whether it was loaded.

        The full model contains the changes, so the disk space of the changes is freed.
        """
        if self._model.tables.changed_share <= COMPACTED_SHARE:
            return False
        found = [(name, self._open(name, ExportedModel)) for step, name in models if step == self._model.step]
        return any(
            self._try(name, "model", partial(self._take_over, model))
            for name, model in found
            if model is not None and model.manifest.state == self._model.state
        )

    def _take_over(self, model: ExportedModel) -> None:
        self._model.take_over(model, verify=self._verify, check=self._check)

    def _try(self, name: str, form: str, load: Callable[[], None]) -> bool:
        """Call ``load``, and return whether it succeeded. A failure is counted, and the version is tried again later.

        ``form`` is "change" or "model", for the counters.
        """
        try:
            load()
        except _ClosedError:
            raise
        except Exception as error:  # a faulty version must not prevent loading of other versions
            if not isinstance(error, HotbedError | OSError | MemoryError):
                _log.exception("%s was not loaded", name)
            self._refuse(name, _refusal(error))
            return False
        self.applied[form] += 1
        _log.info("%s now serves step %d from %s", *self._served(), name)
        return True

    def _refuse(self, name: str, error: RefusedError) -> None:
        self.refused[error.reason] += 1
        self._known.pop(name, None)
        wait_s = min(2 * self._retries[name].wait_s if name in self._retries else self._interval_s, LONGEST_WAIT_S)
        self._retries[name] = _Retry(time.monotonic() + wait_s, wait_s)
        _log.warning("refused (%s): %s; %s still serves step %d", error.reason, error, *self._served())

    def _served(self) -> tuple[str, int]:
        return self._model.name, self._model.step


def _refusal(error: Exception) -> RefusedError:
    """Convert any error to a `RefusedError`."""
    if isinstance(error, RefusedError):
        return error
    is_damaged, is_unreadable = isinstance(error, CheckpointError), isinstance(error, OSError)
    reason: Reason = "damaged" if is_damaged else "unreadable" if is_unreadable else "failed"
    return RefusedError(str(error) or type(error).__name__, reason)


def open_newest(source: str | Path | Directory, **options: Any) -> ServedModel:
    """Open an exported model, or the newest undamaged full model of a published directory. Both may be paths or URIs.

    ``options`` are passed to `ServedModel.open`. Raise `CheckpointError` if the directory has no such model.
    """
    found = directory(source)
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
        except Exception as error:  # an older model may be intact
            _log.warning("%s is skipped: %s", name, error)
            failure = failure or error
    if failure is not None:
        raise failure
    raise CheckpointError(
        f"{source} has no exported model. Create a model with hotbed export, or set train.publish to this directory"
    )
