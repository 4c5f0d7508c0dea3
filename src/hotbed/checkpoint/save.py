"""Save a checkpoint: every rank writes the tiles that it owns, the first one all else and, last, the manifest.

Ranks write into one directory and report what they wrote to the first rank (`RankReports`): a small file each,
``rank-N.json``, so that ranks can write in threads beside training without an exchange. What all ranks must know at
once, in the thread of training, is exchanged. No table is gathered, and only the manifest waits for other ranks.

Where the directory may pass to another run, names of files end in the attempt, eight digits of its token: a writer that
was stopped for a while, and then goes on, overwrites and removes nothing of an attempt that began later. The manifest
is created, which one of them alone can do, and only while all of its files are there (docs/decisions/0038).
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
    parsed,
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
"""How long the first rank waits for another that has written no further file, and for any once it has failed itself."""
LAST_PATIENCE_S = 5.0
"""How long the first rank waits for the others' reports once training has failed."""
SAY_S = 0.25
"""Seconds between two messages of ranks that wait for a checkpoint; an exchange may take longer than that."""

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
    """Save the state of some parts; of a distributed model, all ranks must call this with the same path.

    Parameters
    ----------
    path
        The directory to make: a local path that all ranks see, or a URI like ``s3://bucket/path``.
    parts
        What to save by name, for example ``{"model": model, "sparse": optimizer}``.
    step
        Optimizer steps taken so far.
    recipe
        Plain values of the recipe, so that the model can be built again.
    base
        A full checkpoint beside this one, saved of the same parts with ``track=True`` and written: only rows that have
        changed since it began are saved, and it must be kept as long as this one. What was written in place into memory
        that ``EmbeddingCollection.weight`` or a state shares is not seen. All rows are saved where it is not known
        which have changed, or where most have (`hotbed.checkpoint.differential`); the log says why.
    track
        Note from now on which rows change, so that this checkpoint can be a base; it holds all rows then. Takes a byte
        per row, or eight per changed row of tables whose rows are materialized on their first update.
    background
        Return as soon as what is not in tables has been copied, and write in a thread while training goes on: the
        checkpoint is of the moment of this call. Until it is written, tables may be changed by optimizers only.
    then
        Called on the first rank, by the thread that writes, when the checkpoint is there.
    check
        Where the directory may pass to another run while this one writes: called on the first rank before anything that
        the other would notice, and what it raises keeps the checkpoint from being there. Names of files are this
        attempt's own then.

    Returns
    -------
    Saving
        What was written, or is being written: `Saving.wait` for it.

    Raises
    ------
    CheckpointError
        If there is a checkpoint or anything else at ``path``, a rank cannot write, or a part's state holds what is
        neither a tensor nor plain.
    """
    started = time.perf_counter()
    link = find_link(parts)
    refuse_parts_of_distributed(parts, link)
    tables = model_tables(parts)
    for name in parts:
        if not re.fullmatch(r"\w[\w.-]*", name):
            raise CheckpointError(f"a part is called '{name}'; names may have letters, digits, '_', '-' and '.'")
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
    # Asked for here: it waits for averages of replicas, which a thread must not do beside training.
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
        Where.
    nbytes
        Bytes that this rank has written.
    seconds
        How long this rank has written.
    stalled_s
        How long training was held up by it: at its start, and for rows that had to be kept (see `Snapshot`).
    base
        Name of the base beside it, if it holds only rows that have changed since; None: it holds all rows.
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
        """Whether training waits at present, because rows that it is about to change are still to be written."""
        return self._snapshot is not None and self._snapshot.is_waiting

    @property
    def under_way(self) -> bool:
        """Whether this rank still writes. What went wrong is raised here as well as by `wait`, if it is this rank's."""
        writes = self._thread is not None and self._thread.is_alive()
        if not writes and self._error is not None:
            raise self._error
        return writes

    @property
    def baseline(self) -> Baseline:
        """What other checkpoints need of this one to be differences to it."""
        return Baseline(self._place, self._token, self._sha256, self._manifest.tables)

    def start(self) -> None:
        """Write in a thread, which leaves this one free to notice ranks that have ended."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # the thread has another stream
        self._thread = start_alone(self.run, "hotbed-checkpoint")

    def abandon(self) -> None:
        """Where training has failed: write what is under way, but wait no longer for ranks that may be gone."""
        self._reports.hurry()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            _log.error("%s was not saved: %s", self.path, self._error)

    def wait(self) -> None:
        """Return when the checkpoint is there; all ranks must call this.

        Raises
        ------
        CheckpointError
            If another rank could not write its files.
        OSError
            If this one could not.
        """
        states = self._meet()
        failed = [rank for rank, state in enumerate(states) if state in (State.FAILED, State.GIVEN_UP)]
        over = State.WRITING not in states  # nobody writes there any more
        if failed and over and self._rank == 0 and self._may_remove() and not self._place.has(MANIFEST):
            self._remove_files()
        if self._error is not None:
            raise self._error
        if failed:
            raise CheckpointError(
                f"{self.path} was not saved: rank {failed[0]} could not write its files; its own output says why"
            )

    def _meet(self) -> list[State]:
        """Wait until all ranks have written, or the first has given up; how it went, by rank.

        Ranks tell each other again and again that they still write: a slow one is waited for, and one that has ended is
        noticed, for whose report the first then does not look any longer.
        """
        states = [State.WRITING]
        try:
            while State.WRITING in states and State.GIVEN_UP not in states:
                if self._thread is not None:
                    self._thread.join(SAY_S)
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
        """Whether the place is known to be this run's still."""
        try:
            self._check()
        except (CheckpointError, OSError) as error:
            _log.warning("%s is left as it is: %s", self.path, error)
            return False
        return True

    def _remove_files(self) -> None:
        """Remove what this attempt has written, and the directory, unless another's files are there, too."""
        attempt = self._manifest.attempt
        for name in self._place.names() if attempt else ():
            if f"-{attempt}." in name:
                self._place.remove(name)
        if not attempt or self._place.names() in ([], [UNFINISHED]):
            self._place.remove_all()

    def run(self) -> None:
        """Write; what goes wrong is raised by `wait`."""
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
            _log.info("%s: %.1f s, training held up for %.2f s", self.path, self.seconds, self.stalled_s)

    def _write_files(self) -> tuple[dict[str, FileEntry], dict[str, list[SavedTile]]]:
        """Write this rank's files; their entries, and the tiles of each table that are in them."""
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
        self._check()  # first: in a place that is another run's by now, missing files are no news
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
                f"{self.path} was not saved: its base {self.base} is gone; does another run remove it?"
            )
        self._check()
        self._sha256 = write_manifest(self._place, self._manifest.model_copy(update={"tables": tables, "files": files}))
        if self._manifest.attempt:
            self._withdraw_unless_whole(files)
            self._check()
            for name in self._place.names():  # what attempts that ended have left
                if is_left_by_attempts(name) and name not in files:
                    self._place.remove(name)
        self._place.remove(UNFINISHED)
        self._reports.remove()

    def _refuse_missing(self, files: Mapping[str, FileEntry]) -> None:
        missing = files.keys() - set(self._place.names())
        if missing:
            raise CheckpointError(f"{self.path} was not saved: {min(missing)} is gone; does another run write there?")

    def _withdraw_unless_whole(self, files: Mapping[str, FileEntry]) -> None:
        """Remove the manifest if another run has removed files since the last look, as unfinished ones."""
        try:
            self._refuse_missing(files)
        except CheckpointError:
            self._place.remove(MANIFEST)
            raise

    def _do_then(self) -> None:
        """What is to be done when the checkpoint is there; it is there whatever comes of this."""
        try:
            if self._then is not None:
                self._check()
                self._then()
        except Exception:
            _log.exception("%s is saved, but what was to be done then failed", self.path)


class State(IntEnum):
    """How far a rank is with its files of a checkpoint."""

    WRITING = 0
    WRITTEN = 1
    FAILED = 2
    GIVEN_UP = 3
    """The first rank has failed, and waits no longer for others that still write."""


class OtherRankError(CheckpointError):
    """What the first rank heard of another's failure."""


class RankReports:
    """The reports of a checkpoint's ranks.

    ``token`` and ``attempt`` are those of this attempt to save it; reports with another token are not read. The first
    rank does not wait for reports of ranks that are known to have ``failed``.
    """

    def __init__(self, place: Directory, token: str, attempt: str, rank: int, size: int) -> None:
        self._place, self._token, self._attempt, self._rank, self._size = place, token, attempt, rank, size
        self._deadline = float("inf")
        self.failed: Set[int] = frozenset()

    def hurry(self) -> None:
        """Wait no longer for ranks that may be gone."""
        self._deadline = time.monotonic() + LAST_PATIENCE_S

    def name(self, rank: int) -> str:
        """Name a rank's report."""
        return f"rank-{rank}-{self._attempt}.json" if self._attempt else f"rank-{rank}.json"

    def write(self, files: Mapping[str, FileEntry], tiles: Mapping[str, list[SavedTile]]) -> None:
        """Report the files and tiles that this rank wrote."""
        self._write(Report(token=self._token, files=dict(files), tiles=dict(tiles)))

    def write_error(self, error: BaseException) -> None:
        """Report an error, so that the first rank does not wait; an error of writing the report is dropped."""
        with suppress(OSError):
            self._write(Report(token=self._token, error=str(error) or type(error).__name__))

    def _write(self, report: Report) -> None:
        if self._rank != 0:
            self._place.write(self.name(self._rank), json.dumps(report.model_dump(exclude_unset=True)))

    def read(self, rank: int) -> Report:
        """Wait for a rank's report, for as long as it goes on writing files.

        Raise `OtherRankError` if it could not write its files, `CheckpointError` if no report came, or one that cannot
        be.
        """
        name = self.name(rank)
        start = seen = time.monotonic()
        written = 0
        while time.monotonic() < min(seen + PATIENCE_S, self._deadline):
            count = sum(file.startswith(f"tables-{rank:05d}-") for file in self._place.names())
            if count != written:
                seen, written = time.monotonic(), count
            failed = rank in self.failed  # asked before the report, which is written first
            if self._place.has(name):
                where = f"{self._place}/{name}"
                values = parsed(self._place.read(name, MOST_BYTES), where)
                if values.get("token") == self._token:
                    report = validate_model(Report, values, CheckpointError, where)
                    if report.error is not None:
                        raise OtherRankError(f"{self._place} was not saved: rank {rank} failed: {report.error}")
                    return report
            if failed:
                raise OtherRankError(f"{self._place} was not saved: rank {rank} failed; its own output says why")
            time.sleep(min(0.02 + (time.monotonic() - start) / 20, 1.0))
        waited = time.monotonic() - start
        raise CheckpointError(
            f"{self._place} was not saved: rank {rank} has not written {name} in {waited:,.0f} s; all ranks must see "
            "one directory, on a shared file system or an object store"
        )

    def remove(self) -> None:
        """Remove all of them."""
        for rank in range(1, self._size):
            self._place.remove(self.name(rank))


def from_first(link: Link | None, first: Callable[[], str]) -> str:
    """Call something on the first rank and return its result, at most 32 letters, on all ranks, or raise on all."""
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
    came = bytes(link.broadcast("the checkpoint's token", sent, 0).wait().tolist()).rstrip(b"\0").decode()
    if error is not None:
        raise error
    if not came:
        raise CheckpointError("rank 0 could not make the checkpoint's directory; its own output says why")
    return came


def exchange_states(link: Link | None, own: State) -> list[State]:
    """List how far each rank is; all must call this."""
    if link is None:
        return [own]
    states = link.all_gather("whether the checkpoint was written", torch.tensor([own], device=link.device)).wait()
    return [State(state) for state in states.flatten().tolist()]
