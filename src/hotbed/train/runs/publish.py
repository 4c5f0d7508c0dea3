"""Publish each checkpoint for servers during training: a full model, then changes.

::

    PUBLISHED/model-000000000100/    change-000000000120/    change-000000000140/

A thread exports one checkpoint after another. If checkpoints are saved faster than the thread exports, the thread skips
to the newest checkpoint, so changes become larger. A change needs the last published checkpoint and the next one, so
both are kept until the change is written (`needed`).

If a run restarts from a step before the last published step, servers may already have loaded the published step, which
``went-back.json`` then stores. Changes would not fit these servers, but servers replace their model by any full model
that was written later. So only full models are written until training passes the stored step.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

from hotbed.checkpoint import MANIFEST, Directory, read_manifest
from hotbed.checkpoint.manifest import step_of
from hotbed.errors import CheckpointError, HotbedError
from hotbed.serve.model_files import MOST_BYTES, ChangeManifest, ModelManifest, encoder_digest
from hotbed.train.checkpoints import remove_checkpoint
from hotbed.train.runs.model_export import Exporter

WENT_BACK = "went-back.json"
_NAME = re.compile(r"(model|change)-(\d{12,})")
_log = logging.getLogger("hotbed")


class _Published(NamedTuple):
    """A published model or change."""

    step: int
    form: str  # ``model`` or ``change``
    where: Directory

    def state(self) -> str:
        """Return the SHA-256 of the manifest of the checkpoint that was exported."""
        values = self._manifest()
        return str(values["state"] if self.form == "model" else values["sequence"]["state"])

    def encoder(self) -> str | None:
        """Return the digest of the inputs' encoding, or None for a change that an old release wrote."""
        found = self._manifest().get("encoder")
        return encoder_digest(cast("dict[str, Any]", found)) if self.form == "model" else found

    def _manifest(self) -> dict[str, Any]:
        return json.loads(self.where.read(MANIFEST, MOST_BYTES))


class Publisher:
    """Publish checkpoints in a background thread until `finish`."""

    def __init__(self, where: Directory, exporter: Exporter, full_every: int) -> None:
        self._where, self._exporter, self._full_every = where, exporter, full_every
        self._wake = threading.Condition()
        self._next: Directory | None = None
        self._under_way: Directory | None = None
        self._last: tuple[str, Directory] | None = None  # checkpoint that was published last, after its SHA-256
        self._behind: int | None = None  # step that servers may have loaded, if the run restarted from an earlier step
        self._thread: threading.Thread | None = None
        self.records: list[dict[str, Any]] = []  # step, path, bytes and seconds of each export

    def begin(self, step: int, checkpoints: Directory) -> None:
        """Prepare the directory for a run that continues at ``step``, and remove exports of later steps."""
        entries = self._entries()
        if entries and not step:
            raise CheckpointError(
                f"{self._where} contains exports of another run, up to {entries[-1].where.name}. Resume that run with "
                "--resume, or choose a different train.publish"
            )
        for name in self._where.names():  # a killed run has left exports without a manifest
            if _NAME.fullmatch(name) and not (self._where / name).has(MANIFEST):
                (self._where / name).remove_all()
        later = [entry for entry in entries if entry.step > step]
        if self._where.has(WENT_BACK):
            self._behind = int(json.loads(self._where.read(WENT_BACK, MOST_BYTES))["step"])
        if later:
            self._behind = max(self._behind or 0, *(entry.step for entry in later))
            # Written before the removal, because this process may be killed during the removal
            self._where.write(WENT_BACK, json.dumps({"step": self._behind}))
        for entry in later:
            remove_checkpoint(entry.where)
        newest = next((entry for entry in reversed(entries) if entry.step <= step), None)
        if newest is None:
            return
        state = newest.state()
        for checkpoint in (checkpoints / f"{name}-{newest.step:08d}" for name in ("last", "best")):
            if checkpoint.has(MANIFEST) and read_manifest(checkpoint).sha256 == state:
                self._note(state, checkpoint)

    def publish(self, checkpoint: Directory) -> None:
        """Publish a checkpoint after the current export.

        An earlier checkpoint that still waits is not published, because only the newest checkpoint waits.
        """
        with self._wake:
            self._next = checkpoint
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hotbed-publish", daemon=True)
                self._thread.start()

    def needed(self) -> set[str]:
        """Return the names of the checkpoints that the publisher still needs."""
        with self._wake:
            last = None if self._last is None else self._last[1]
            return {c.name for c in (self._next, self._under_way, last) if c is not None}

    def finish(self) -> None:
        """Wait until all checkpoints are published."""
        with self._wake:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._under_way, self._next = self._next, None
                if self._under_way is None:
                    self._thread = None
                    return
                checkpoint = self._under_way
            try:
                self._write(checkpoint)
            except (HotbedError, OSError) as error:
                _log.error("%s was not published; the next export will include its changes: %s", checkpoint, error)
            except Exception:
                _log.exception("%s was not published; the next export will include its changes", checkpoint)

    def _write(self, checkpoint: Directory) -> None:
        step, state = step_of(checkpoint), read_manifest(checkpoint).sha256
        entries = self._entries()
        newest = entries[-1] if entries else None
        if newest is not None and newest.state() == state:
            self._note(state, checkpoint)
            return
        base = self._last[1] if self._last and newest and self._last[0] == newest.state() else None
        # Changes have only rows and parameters, so a new encoding needs a full model.
        if (
            base is None
            or newest is None
            or self._behind is not None
            or newest.encoder() != self._exporter.encoder_digest(checkpoint)
        ):
            self._write_model(checkpoint, step)
            self._note(state, checkpoint)
            if self._behind is not None and step > self._behind:
                self._where.remove(WENT_BACK)
                self._behind = None
            return
        self._timed("change", step, partial(self._exporter.write_change, checkpoint=checkpoint, since=base))
        self._note(state, checkpoint)
        models = [i for i, entry in enumerate(entries) if entry.form == "model"]
        changes = len(entries) - max(models, default=-1)  # since the newest full model, including this change
        if changes >= self._full_every:
            try:
                self._write_model(checkpoint, step)
            except (HotbedError, OSError) as error:
                _log.error("step %s was published as a change, but not as a full model: %s", step, error)

    def _write_model(self, checkpoint: Directory, step: int) -> None:
        self._timed("model", step, partial(self._exporter.write_model, checkpoint=checkpoint))
        self._remove_old()

    def _timed(self, form: str, step: int, write: Callable[[Directory], ModelManifest | ChangeManifest]) -> None:
        target, start = self._where / f"{form}-{step:012d}", time.perf_counter()
        made = write(target)
        nbytes = sum(entry.bytes for entry in made.files.values())
        record = {"step": step, "path": str(target), "bytes": nbytes, "seconds": time.perf_counter() - start}
        self.records.append(record)
        _log.info("published %s: %d bytes in %.1f s", target, nbytes, record["seconds"])

    def _note(self, state: str, checkpoint: Directory) -> None:
        with self._wake:
            self._last = state, checkpoint

    def _remove_old(self) -> None:
        """Remove exports before the second newest full model, which servers may still use."""
        entries = self._entries()
        models = [entry.step for entry in entries if entry.form == "model"]
        for entry in entries if len(models) > 1 else ():
            if entry.step < models[-2] or (entry.step == models[-2] and entry.form == "change"):
                remove_checkpoint(entry.where)

    def _entries(self) -> list[_Published]:
        """Return all exports, ordered by step; the full model of a step follows the change of the same step."""
        found = [(m, self._where / m[0]) for name in self._where.names() if (m := _NAME.fullmatch(name))]
        return sorted(
            (_Published(int(m[2]), m[1], where) for m, where in found if where.has(MANIFEST)),
            key=lambda entry: (entry.step, entry.form),
        )
