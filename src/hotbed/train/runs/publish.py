"""Publish the model of each checkpoint for servers, beside training: a full model, then changes.

::

    PUBLISHED/model-000000000100/    change-000000000120/    change-000000000140/

A thread writes them, one after the other. Where it takes longer than training needs from one checkpoint to the next, it
goes on with the newest, so that servers get larger changes more seldom. What a change is made of, the last checkpoint
that was published and the new one, is kept until it is written (`needed`).

Where a run goes back, ``went-back.json`` has the step that servers may have been at. While it is there, only full
models are written: servers take over one that was written later than what they serve, whatever its step.
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


class _Entry(NamedTuple):
    """What was published: the step and state that it leads to."""

    step: int
    kind: str
    place: Directory

    def state(self) -> str:
        """SHA-256 of the checkpoint's manifest, see `hotbed.serve.model_files`."""
        values = self._manifest()
        return str(values["state"] if self.kind == "model" else values["sequence"]["state"])

    def encoder(self) -> str | None:
        """Digest of what makes its inputs; None where a manifest does not say it."""
        found = self._manifest().get("encoder")
        return encoder_digest(cast("dict[str, Any]", found)) if self.kind == "model" else found

    def _manifest(self) -> dict[str, Any]:
        return json.loads(self.place.read(MANIFEST, MOST_BYTES))


class Publisher:
    """Publishes checkpoints in the background, until `finish`."""

    def __init__(self, place: Directory, exporter: Exporter, full_every: int) -> None:
        self._place, self._exporter, self._full_every = place, exporter, full_every
        self._wake = threading.Condition()
        self._next: Directory | None = None
        self._under_way: Directory | None = None
        self._last: tuple[str, Directory] | None = None  # state and checkpoint of what was published last
        self._behind: int | None = None  # step that servers may have been at before this run went back
        self._thread: threading.Thread | None = None
        self.records: list[dict[str, Any]] = []  # of all that was written: step, path, bytes and seconds

    def begin(self, step: int, checkpoints: Directory) -> None:
        """Take over the directory for a run: what was published of later steps than the run is at is removed."""
        entries = self._entries()
        if entries and not step:
            raise CheckpointError(
                f"{self._place} holds what another run has published, up to {entries[-1].place.name}; go on from that "
                "run with --resume, or choose another train.publish"
            )
        for name in self._place.names():  # killed runs leave some without a manifest
            if _NAME.fullmatch(name) and not (self._place / name).has(MANIFEST):
                (self._place / name).remove_all()
        later = [entry for entry in entries if entry.step > step]
        if self._place.has(WENT_BACK):
            self._behind = int(json.loads(self._place.read(WENT_BACK, MOST_BYTES))["step"])
        if later:
            self._behind = max(self._behind or 0, *(entry.step for entry in later))
            self._place.write(WENT_BACK, json.dumps({"step": self._behind}))  # before they go: this may be killed
        for entry in later:
            remove_checkpoint(entry.place)
        newest = next((entry for entry in reversed(entries) if entry.step <= step), None)
        if newest is None:
            return
        state = newest.state()
        for place in (checkpoints / f"{kind}-{newest.step:08d}" for kind in ("last", "best")):
            if place.has(MANIFEST) and read_manifest(place).sha256 == state:
                self._note(state, place)

    def publish(self, checkpoint: Directory) -> None:
        """Publish a checkpoint when those before are; one that waits is left out for it."""
        with self._wake:
            self._next = checkpoint
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hotbed-publish", daemon=True)
                self._thread.start()

    def needed(self) -> set[str]:
        """Names of checkpoints that may not be removed yet."""
        with self._wake:
            last = None if self._last is None else self._last[1]
            return {place.name for place in (self._next, self._under_way, last) if place is not None}

    def finish(self) -> None:
        """Wait until all is published."""
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
                _log.error("%s was not published, the next one will be with all since: %s", checkpoint, error)
            except Exception:
                _log.exception("%s was not published, the next one will be with all since", checkpoint)

    def _write(self, checkpoint: Directory) -> None:
        step, state = step_of(checkpoint), read_manifest(checkpoint).sha256
        entries = self._entries()
        newest = entries[-1] if entries else None
        if newest is not None and newest.state() == state:
            self._note(state, checkpoint)
            return
        base = self._last[1] if self._last and newest and self._last[0] == newest.state() else None
        if base is None or newest is None or self._behind is not None or not self._has_encoder_of(newest, checkpoint):
            self._write_model(checkpoint, step)
            self._note(state, checkpoint)
            if self._behind is not None and step > self._behind:
                self._place.remove(WENT_BACK)
                self._behind = None
            return
        self._timed("change", step, partial(self._exporter.write_change, checkpoint=checkpoint, since=base))
        self._note(state, checkpoint)
        changes = sum(entry.kind == "change" for entry in entries[_last_model(entries) + 1 :])
        if changes + 1 >= self._full_every:
            try:
                self._write_model(checkpoint, step)
            except (HotbedError, OSError) as error:
                _log.error("no full model of %s was published, only the change; the next one is tried: %s", step, error)

    def _has_encoder_of(self, newest: _Entry, checkpoint: Directory) -> bool:
        """Whether inputs are made as in what is published: changes have rows and parameters only."""
        return newest.encoder() == self._exporter.encoder_digest(checkpoint)

    def _write_model(self, checkpoint: Directory, step: int) -> None:
        self._timed("model", step, partial(self._exporter.write_model, checkpoint=checkpoint))
        self._remove_old()

    def _timed(self, kind: str, step: int, write: Callable[[Directory], ModelManifest | ChangeManifest]) -> None:
        place, start = self._place / f"{kind}-{step:012d}", time.perf_counter()
        made = write(place)
        nbytes = sum(entry.bytes for entry in made.files.values())
        record = {"step": step, "path": str(place), "bytes": nbytes, "seconds": time.perf_counter() - start}
        self.records.append(record)
        _log.info("published %s: %d bytes in %.1f s", place, nbytes, record["seconds"])

    def _note(self, state: str, checkpoint: Directory) -> None:
        with self._wake:
            self._last = state, checkpoint

    def _remove_old(self) -> None:
        """Remove what the newest full model and the one before make superfluous: servers may still be at the latter."""
        entries = self._entries()
        models = [entry.step for entry in entries if entry.kind == "model"]
        for entry in entries if len(models) > 1 else ():
            if entry.step < models[-2] or (entry.step == models[-2] and entry.kind == "change"):
                remove_checkpoint(entry.place)

    def _entries(self) -> list[_Entry]:
        """What is published, by step; the full model of a step after the change that leads to it."""
        found = [(m, self._place / m[0]) for name in self._place.names() if (m := _NAME.fullmatch(name))]
        return sorted(
            (_Entry(int(m[2]), m[1], place) for m, place in found if place.has(MANIFEST)),
            key=lambda entry: (entry.step, entry.kind),
        )


def _last_model(entries: list[_Entry]) -> int:
    """Position of the newest full model, −1 if there is none."""
    return max((i for i, entry in enumerate(entries) if entry.kind == "model"), default=-1)
