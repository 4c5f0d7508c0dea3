"""Save a checkpoint. Every rank writes the tiles that it owns. The first rank writes all other parts and the manifest.

Ranks write into one directory. Each rank reports its files to the first rank in a small file ``rank-N.json``
(`RankReports`), so that ranks can write in background threads without collectives. Collectives are used only in the
training thread, for information that all ranks need immediately. No table is gathered, and only the manifest waits for
other ranks.

If another run may take over the directory, file names end with the attempt, eight digits of its token. So a run that
was suspended and continues later does not overwrite or remove files of a newer attempt. The manifest is created
conditionally, which only one run can do, and only while all of its files exist (docs/decisions/restarts.md).
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotbed.checkpoint.contents import (
    OwnedTile,
    Stateful,
    chunks_of,
    find_link,
    model_tables,
    owned_tiles,
    plan_of,
    refuse_parts_of_distributed,
    refuse_while_saved,
    states_of,
)
from hotbed.checkpoint.differential import Baseline, changed_since
from hotbed.checkpoint.manifest import (
    MANIFEST,
    MOST_BYTES,
    FileEntry,
    Manifest,
    Report,
    SavedTile,
    parse_object,
    write_manifest,
)
from hotbed.checkpoint.snapshot import Snapshot
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.tensor_files import UNFINISHED, Array, FileWriter, is_left_by_attempts, make_directory
from hotbed.comm import Link
from hotbed.errors import CheckpointError, CommError
from hotbed.machine import start_alone
from hotbed.parsing import validate_model
from hotbed.store import RowStore, SortedSlots

ATTEMPT_DIGITS = 8
PATIENCE_S = 600.0
"""Seconds that the first rank waits for a rank without new files, or for any rank after its own failure."""
LAST_PATIENCE_S = 5.0
"""Seconds that the first rank waits for reports after training has failed."""
POLL_S = 0.25
"""Seconds between two exchanges of ranks that wait for a checkpoint."""

_log = logging.getLogger("hotbed")


def save_checkpoint(
    path: str | Path | Directory,
    parts: Mapping[str, Stateful],
    *,
    step: int = 0,
    recipe: Mapping[str, Any] | None = None,
    base: Saving | None = None,
    track: bool = False,
    background: bool = False,
    then: Callable[[], None] | None = None,
    check: Callable[[], None] | None = None,
) -> Saving:
    """Save the states of some parts. For a distributed model, all ranks must call this function with the same path.

    Parameters
    ----------
    path
        The directory to create: a local path on a file system that all ranks share, or a URI like
        ``s3://bucket/path``.
    parts
        The objects to save, by name, e.g. ``{"model": model, "sparse": optimizer}``.
    step
        Number of optimizer steps so far.
    recipe
        Plain values of the recipe, so that the model can be built again.
    base
        A completed full checkpoint in the same parent directory, which was saved from the same parts with
        ``track=True``. If it is passed, only rows that have changed since it began are saved, and it must be kept as
        long as this checkpoint. In-place changes of memory shared with ``EmbeddingCollection.weight`` or a state are
        not detected. If most rows have changed, or changed rows are not known, all rows are saved, and the reason is
        logged (`hotbed.checkpoint.differential`).
    track
        Save all rows, and track changed rows from now on, so that this checkpoint can be a base. This needs one byte
        per row. For tables with rows that are materialized on their first update, it needs 8 bytes per changed row.
    background
        Copy all states except tables, return, and write in a thread while training continues. The checkpoint has the
        values at the time of this call. Until it is written, only optimizers may change tables.
    then
        Called on the first rank by the writing thread, when the checkpoint is complete.
    check
        Pass this function if another run may take over the directory. The first rank calls it before each change that
        the other run could notice. If it raises an error, the checkpoint is not completed. File names include this
        attempt's token.

    Returns
    -------
    Saving
        The checkpoint that was written or is being written. Call `Saving.wait` to wait for its completion.

    Raises
    ------
    CheckpointError
        If ``path`` exists already, a rank cannot write, or a part's state has a value that is neither a tensor nor
        plain.
    """
    started = time.perf_counter()
    link = find_link(parts)
    refuse_parts_of_distributed(parts, link)
    tables = model_tables(parts)
    for name in parts:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise CheckpointError(f"part name: got '{name}', expected letters, digits, '_', '-' and '.'")
    plains, tensors = states_of(parts, is_first=link is None or link.rank == 0)
    place = directory(path)
    saved_tables = {name: table.saved for name, table in tables.items()}
    plain_recipe = None if recipe is None else dict(recipe)
    values = {"step": step, "recipe": plain_recipe, "plan": plan_of(parts), "parts": plains, "tables": saved_tables}
    manifest = validate_model(Manifest, values, CheckpointError, str(place))
    token = from_first(link, lambda: make_directory(place, shared=check is not None))
    if background:
        refuse_while_saved(tables)
        tensors = {name: {key: t.clone() for key, t in of.items()} for name, of in tensors.items()}
    # This waits for averages of replicas, so it must not run in the background thread.
    owned = owned_tiles(tables)
    stores = list(dict.fromkeys(tile.arena.store for _, _, tile in owned))
    changed = None if base is None else changed_since(base.baseline, place, stores, saved_tables, link)
    if changed is None and track:
        for store in stores:
            store.track(token)
    saving = Saving(
        place,
        token,
        manifest.model_copy(
            update={
                "base": None if changed is None or base is None else base.baseline.base,
                "attempt": "" if check is None else token[:ATTEMPT_DIGITS],
            }
        ),
        owned,
        tensors if link is None or link.rank == 0 else {},
        link,
        Snapshot(stores, changed=changed) if background else None,
        then,
        changed,
        check,
    )
    saving.started_s = time.perf_counter() - started
    if background or link is not None:
        saving.start()
    else:
        saving.run()
    if not background:
        saving.wait()
    return saving


class Saving:
    """A checkpoint that is being written.

    Attributes
    ----------
    path
        Its path.
    nbytes
        Bytes that this rank has written.
    seconds
        Seconds that this rank has spent writing.
    stalled_s
        Seconds that training was blocked: at the start, and while rows had to be copied (see `Snapshot`).
    base
        Name of its base, or None if it is a full checkpoint.
    """

    def __init__(
        self,
        place: Directory,
        token: str,
        manifest: Manifest,
        owned: Sequence[OwnedTile],
        tensors: Mapping[str, Mapping[str, Tensor]],
        link: Link | None,
        snapshot: Snapshot | None,
        then: Callable[[], None] | None,
        changed: Mapping[RowStore, SortedSlots] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self.path = place.path
        self.base = None if manifest.base is None else manifest.base.name
        self._place, self._token, self._manifest = place, token, manifest
        self._owned, self._tensors, self._link, self._then = owned, tensors, link, then
        self._check = check or (lambda: None)
        self._snapshot, self._changed = snapshot, changed
        self._sha256: str | None = None
        self._rank, self._size = (0, 1) if link is None else (link.rank, link.size)
        self._reports = RankReports(place, token, manifest.attempt, self._rank, self._size)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.nbytes = 0
        self.seconds = 0.0
        self.started_s = self._ended = 0.0

    @property
    def stalled_s(self) -> float:  # noqa: D102
        waited = 0.0 if self._snapshot is None else self._snapshot.waited_s
        return self.started_s + (self.seconds if self._snapshot is None else waited)

    @property
    def holds_up(self) -> bool:
        """Whether training is blocked now, because rows must be written before it changes more rows."""
        return self._snapshot is not None and self._snapshot.is_waiting

    @property
    def under_way(self) -> bool:
        """Whether this rank is still writing. Raise this rank's error, if it has failed."""
        writes = self._thread is not None and self._thread.is_alive()
        if not writes and self._error is not None:
            raise self._error
        return writes

    @property
    def baseline(self) -> Baseline:
        """The information that differential checkpoints need about this checkpoint as their base."""
        return Baseline(self._place, self._token, self._sha256, self._manifest.tables)

    def start(self) -> None:
        """Write in a thread, so that the calling thread can detect ranks that have ended."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # because the thread uses another stream
        self._thread = start_alone(self.run, "hotbed-checkpoint")

    def abandon(self) -> None:
        """Finish writing after training has failed, but do not wait for ranks that may have ended."""
        self._reports.hurry()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            _log.error("%s was not saved: %s", self.path, self._error)

    def wait(self) -> None:
        """Wait until the checkpoint is complete. All ranks must call this method.

        Raises
        ------
        CheckpointError
            If another rank could not write its files.
        OSError
            If this rank could not write its files.
        """
        states = self._wait_for_ranks()
        failed = [rank for rank, state in enumerate(states) if state in (State.FAILED, State.GIVEN_UP)]
        over = State.WRITING not in states  # no rank is writing any more
        if failed and over and self._rank == 0 and self._may_remove() and not self._place.has(MANIFEST):
            self._remove_files()
        if self._error is not None:
            raise self._error
        if failed:
            raise CheckpointError(f"{self.path} was not saved: rank {failed[0]} could not write its files. See its log")

    def _wait_for_ranks(self) -> list[State]:
        """Wait until all ranks have finished, or the first rank has given up. Return the states by rank.

        Ranks exchange their states repeatedly. So slow ranks are waited for, and ranks that have ended are detected,
        after which the first rank does not wait for their reports.
        """
        states = [State.WRITING]
        try:
            while State.WRITING in states and State.GIVEN_UP not in states:
                if self._thread is not None:
                    self._thread.join(POLL_S)
                states = exchange_states(self._link, self._state())
                self._reports.failed = {rank for rank, state in enumerate(states) if state is State.FAILED}
        except CommError:
            self.abandon()
            raise
        return states

    def _state(self) -> State:
        if self._thread is not None and self._thread.is_alive():
            return State.WRITING
        if self._rank == 0 and self._error is not None and time.monotonic() > self._ended + PATIENCE_S:
            return State.GIVEN_UP
        own = self._error is not None and not isinstance(self._error, OtherRankError)
        return State.FAILED if own else State.WRITTEN

    def _may_remove(self) -> bool:
        """Return whether the directory still belongs to this run."""
        try:
            self._check()
        except (CheckpointError, OSError) as error:
            _log.warning("%s is not removed: %s", self.path, error)
            return False
        return True

    def _remove_files(self) -> None:
        """Remove the files of this attempt, and the directory if it has no other files."""
        attempt = self._manifest.attempt
        for name in self._place.names() if attempt else ():
            if f"-{attempt}." in name:
                self._place.remove(name)
        if not attempt or self._place.names() in ([], [UNFINISHED]):
            self._place.remove_all()

    def run(self) -> None:
        """Write the checkpoint. Errors are kept for `wait`."""
        start = time.perf_counter()
        try:
            files, tiles = self._write_files()
            self._reports.write(files, tiles)
            if self._rank == 0:
                self._write_manifest(files, tiles)
                self._do_then()
        except BaseException as error:
            self._error = error
            self._reports.write_error(error)
        finally:
            if self._snapshot is not None:
                self._snapshot.close()
            self._owned, self._tensors, self._changed = [], {}, None
            self.seconds = time.perf_counter() - start
            self._ended = time.monotonic()
        if self._snapshot is not None and self._error is None:
            _log.info("%s: %.1f s, training blocked for %.2f s", self.path, self.seconds, self.stalled_s)

    def _write_files(self) -> tuple[dict[str, FileEntry], dict[str, list[SavedTile]]]:
        """Write this rank's files. Return their entries, and their tiles by table."""
        manifest = self._manifest
        with FileWriter(self._place) as writer:
            for part, tensors in self._tensors.items():
                if tensors:
                    writer.write(manifest.file_of(part), {key: Array.of(t) for key, t in tensors.items()})
            chunks = chunks_of(self._owned, self._snapshot, self._changed)
            tiles = writer.write_chunks(chunks, f"tables-{self._rank:05d}", attempt=manifest.attempt)
            if self._snapshot is not None:
                self._snapshot.close()
            files = writer.entries()
        self.nbytes = sum(entry.bytes for entry in files.values())
        return files, tiles

    def _write_manifest(self, files: dict[str, FileEntry], tiles: dict[str, list[SavedTile]]) -> None:
        """Collect the reports of the other ranks, write the manifest, and remove the reports."""
        self._check()  # before reading reports, because another run may have removed files
        for rank in range(1, self._size):
            report = self._reports.read(rank)
            files |= report.files
            for name, of in report.tiles.items():
                tiles.setdefault(name, []).extend(of)
        in_order = {name: tuple(sorted(of, key=lambda t: (t.cols.start, t.rows.start))) for name, of in tiles.items()}
        tables = {
            name: table.model_copy(update={"tiles": in_order[name]}) for name, table in self._manifest.tables.items()
        }
        for name, table in tables.items():
            table.check(name, self.path)
        self._refuse_missing(files)
        if self.base is not None and not self._place.sibling(self.base).has(MANIFEST):
            raise CheckpointError(
                f"{self.path} was not saved: its base {self.base} does not exist any more. Check whether another run "
                "removes it"
            )
        self._check()
        made = self._manifest.model_copy(update={"tables": tables, "files": files})
        self._sha256 = write_manifest(self._place, made).sha256
        if self._manifest.attempt:
            self._withdraw_if_incomplete(files)
            self._check()
            for name in self._place.names():  # remove files of earlier attempts
                if is_left_by_attempts(name) and name not in files:
                    self._place.remove(name)
        self._place.remove(UNFINISHED)
        self._reports.remove()

    def _refuse_missing(self, files: Mapping[str, FileEntry]) -> None:
        missing = files.keys() - set(self._place.names())
        if missing:
            raise CheckpointError(
                f"{self.path} was not saved: {min(missing)} does not exist any more. Check whether another run writes "
                "there"
            )

    def _withdraw_if_incomplete(self, files: Mapping[str, FileEntry]) -> None:
        """Remove the manifest if another run has meanwhile removed files as unfinished."""
        try:
            self._refuse_missing(files)
        except CheckpointError:
            self._place.remove(MANIFEST)
            raise

    def _do_then(self) -> None:
        """Call ``then`` after the checkpoint is complete. Its errors are only logged."""
        try:
            if self._then is not None:
                self._check()
                self._then()
        except Exception:
            _log.exception("%s is saved, but the action after it failed", self.path)


class State(IntEnum):
    """State of a rank that writes its files of a checkpoint."""

    WRITING = 0
    WRITTEN = 1
    FAILED = 2
    GIVEN_UP = 3
    """The first rank has failed, and does not wait any longer for ranks that are still writing."""


class OtherRankError(CheckpointError):
    """A failure of another rank, raised on the first rank."""


class RankReports:
    """The reports of a checkpoint's ranks to the first rank.

    ``token`` and ``attempt`` identify this attempt to save the checkpoint. Reports with another token are ignored. The
    first rank does not wait for reports of ranks in ``failed``.
    """

    def __init__(self, place: Directory, token: str, attempt: str, rank: int, size: int) -> None:
        self._place, self._token, self._attempt, self._rank, self._size = place, token, attempt, rank, size
        self._deadline = float("inf")
        self.failed: Set[int] = frozenset()

    def hurry(self) -> None:
        """Limit the time to wait for ranks that may have ended."""
        self._deadline = time.monotonic() + LAST_PATIENCE_S

    def name(self, rank: int) -> str:
        """Return the file name of a rank's report."""
        return f"rank-{rank}-{self._attempt}.json" if self._attempt else f"rank-{rank}.json"

    def write(self, files: Mapping[str, FileEntry], tiles: Mapping[str, list[SavedTile]]) -> None:
        """Report the files and tiles that this rank wrote."""
        self._write(Report(token=self._token, files=dict(files), tiles=dict(tiles)))

    def write_error(self, error: BaseException) -> None:
        """Report an error, so that the first rank does not wait. Errors of writing the report are ignored."""
        with suppress(OSError):
            self._write(Report(token=self._token, error=str(error) or type(error).__name__))

    def _write(self, report: Report) -> None:
        if self._rank != 0:
            self._place.write(self.name(self._rank), json.dumps(report.model_dump(exclude_unset=True)))

    def read(self, rank: int) -> Report:
        """Wait for a rank's report, as long as the rank continues to write files.

        Raise `OtherRankError` if the rank failed. Raise `CheckpointError` if there is no report or it is not valid.
        """
        name = self.name(rank)
        start = seen = time.monotonic()
        written = 0
        while time.monotonic() < min(seen + PATIENCE_S, self._deadline):
            count = sum(file.startswith(f"tables-{rank:05d}-") for file in self._place.names())
            if count != written:
                seen, written = time.monotonic(), count
            failed = rank in self.failed  # read before the report, which a rank writes before it reports failure
            if self._place.has(name):
                where = f"{self._place}/{name}"
                values = parse_object(self._place.read(name, MOST_BYTES), where)
                if values.get("token") == self._token:
                    report = validate_model(Report, values, CheckpointError, where)
                    if report.error is not None:
                        raise OtherRankError(f"{self._place} was not saved: rank {rank} failed: {report.error}")
                    return report
            if failed:
                raise OtherRankError(f"{self._place} was not saved: rank {rank} failed. See the log of rank {rank}")
            time.sleep(min(0.02 + (time.monotonic() - start) / 20, 1.0))
        waited = time.monotonic() - start
        raise CheckpointError(
            f"{self._place} was not saved: rank {rank} has not written {name} in {waited:,.0f} s. Use a directory that "
            "all ranks share, on a shared file system or an object store"
        )

    def remove(self) -> None:
        """Remove all reports."""
        for rank in range(1, self._size):
            self._place.remove(self.name(rank))


def from_first(link: Link | None, first: Callable[[], str]) -> str:
    """Call a function on the first rank, and return its result on all ranks. If it raises, all ranks raise.

    The result has at most 32 ASCII characters.
    """
    if link is None:
        return first()
    error: Exception | None = None
    text = ""
    if link.rank == 0:
        try:
            text = first()
        except Exception as raised:
            error = raised
    sent = torch.tensor(list(text.encode().ljust(32, b"\0")), dtype=torch.uint8, device=link.device)
    received = bytes(link.broadcast("the checkpoint's token", sent, 0).wait().tolist()).rstrip(b"\0").decode()
    if error is not None:
        raise error
    if not received:
        raise CheckpointError("rank 0 could not create the checkpoint's directory. See the log of rank 0")
    return received


def exchange_states(link: Link | None, own: State) -> list[State]:
    """Return the states of all ranks. All ranks must call this function."""
    if link is None:
        return [own]
    states = link.all_gather("whether the checkpoint was written", torch.tensor([own], device=link.device)).wait()
    return [State(state) for state in states.flatten().tolist()]
