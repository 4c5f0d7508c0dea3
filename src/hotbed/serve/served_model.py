# pyright: reportUnknownParameterType=false
"""Serve one model: scores of raw rows by one version of its parameters, and changes that make the next one.

`ServedModel.apply` does all that takes time beside requests: a set of changes is read, its hashes and shapes are
checked, its rows are written where nobody looks yet, its dense parameters are loaded into a program of their own. Then,
between two batches, rows, ids and program are swapped. So a batch is computed by one version, whole, and what is
refused leaves everything as it was.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.checkpoint.storage import Directory
from hotbed.errors import CheckpointError, DamagedError, HotbedError, StoreError
from hotbed.ops import BackendName
from hotbed.serve.model_files import ChangeSet, ExportedModel, StateEntry, encoder_digest
from hotbed.serve.redis_records import RedisRecords
from hotbed.serve.scorer import Scorer
from hotbed.serve.served_tables import ServedTables, same_tables

if TYPE_CHECKING:
    import pyarrow as pa

    from hotbed.data.encoding.encoder import Encoder

Reason = Literal["gap", "duplicate", "disorder", "other_model", "damaged", "disk_full", "unreadable", "failed"]
"""Why a version is refused.

``gap``: changes between are missing; ``duplicate``: it is served already; ``disorder``: of changes to an earlier
version; ``other_model``: of another model, or one with other tables or inputs; ``damaged``: files that are not what was
written; ``disk_full``: no room for changed rows; ``unreadable``: files that could not be read, now; ``failed``: all
else, as too little memory.
"""


class RefusedError(CheckpointError):
    """A version that is not taken over; the one before goes on serving. ``reason`` says why, in a word."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class ServedModel:
    """A model that scores and follows changes; made by `open`.

    `score` is called by one thread at a time, `apply` and `take_over` by another one, also at the same time.

    Attributes
    ----------
    name
        The recipe's.
    step, state
        Which version answers now: the step of training, and the SHA-256 of its checkpoint's manifest.
    written
        When that was published, in seconds since 1970.
    labels
        What the columns of scores are.
    tables
        The rows.
    """

    def __init__(
        self,
        model: ExportedModel,
        tables: ServedTables,
        *,
        redis: str | None,
        device: torch.device,
        threads: int | None,
        encoded: bool,
    ) -> None:
        self._model, self.tables, self._redis, self._encoded = model, tables, redis, encoded
        self._encoder = self._encoder_of(model)
        manifest = model.manifest
        self.name, self.labels = manifest.name, tuple(manifest.labels)
        self.step, self.state, self.written = manifest.step, manifest.state, manifest.written
        self._device = device
        features = {
            name: (feature.collection, feature.spec(feature.table)) for name, feature in manifest.features.items()
        }
        lookups = dict(tables.collections)
        self._scorer = Scorer(model.dense().to(device), lookups, features, device=device, threads=threads)
        self._turn = threading.Lock()
        """Held by a batch, and by a swap."""
        self._waiting = threading.Event()
        """Set while a swap waits for its turn, so that batch after batch does not keep it waiting."""
        self._swapped = threading.Event()
        self._swapped.set()
        self._changing = threading.Lock()
        self._broken: BaseException | None = None

    @classmethod
    def open(
        cls,
        place: str | Path | Directory | ExportedModel,
        *,
        memory_bytes: int | None = None,
        redis: str | None = None,
        directory: str | Path | None = None,
        device: str = "cpu",
        backend: BackendName = "auto",
        threads: int | None = None,
        verify: bool = True,
        encoded: bool = False,
        cache: str | Path | None = None,
    ) -> ServedModel:
        """Open an exported model.

        Parameters
        ----------
        place
            A directory or URI that ``hotbed export`` or ``train.publish`` made.
        memory_bytes
            Most memory for rows; tables that do not fit are read from files, behind a cache. None: all rows are in
            memory.
        redis
            Address of a Redis that keeps rows of such tables in front of the files, for several servers.
        directory
            Where files for changed rows are made; default: that of temporary files. They are as large as the rows that
            change.
        device
            Where vectors are looked up and scores are computed; memory is then that device's.
        backend
            Kernels.
        threads
            Threads that compute the dense part.
        verify
            Whether all files are read and their hashes compared before any row is served.
        encoded
            Whether ids and numbers of requests are as ``hotbed prepare`` makes them, and not raw values.
        cache
            Where files of models at URIs are put, see `hotbed.serve.model_files.Published`.

        Raises
        ------
        CheckpointError
            If it is no exported model, or damaged.
        StoreError
            If its rows do not fit.
        """
        kept = None if cache is None else Path(cache)
        model = place if isinstance(place, ExportedModel) else ExportedModel.open(place, kept)
        if verify:
            model.verify()
        target = torch.device(device)
        tables = ServedTables(
            model,
            memory_bytes=memory_bytes,
            redis=redis,
            directory=None if directory is None else Path(directory),
            device=target,
            backend=backend,
        )
        return cls(model, tables, redis=redis, device=target, threads=threads, encoded=encoded)

    @property
    def encoder(self) -> Encoder:
        """What makes batches of raw rows, as in training; a full model that is taken over may bring another one."""
        return self._encoder

    # -- requests --------------------------------------------------------------------------------------------------

    def score(self, columns: pa.RecordBatch | pa.Table) -> tuple[NDArray[np.float64], int]:
        """Score raw rows: probabilities ``[B, T]``, and the step of the version that computed all of them.

        Raises
        ------
        DataError, SpecError, BatchError
            If the rows are not what the model takes.
        StoreError
            If rows of tables cannot be read.
        """
        with self._answering():
            return self._scored(self._encoder.batch(columns))

    def score_batch(self, batch: Batch) -> tuple[NDArray[np.float64], int]:
        """Score rows that are encoded already, by the `encoder` that is served; see `score`."""
        with self._answering():
            return self._scored(batch)

    @contextmanager
    def _answering(self) -> Generator[None]:
        """Let one version answer: what is inside is encoded, looked up and computed by it."""
        if self._waiting.is_set():
            self._swapped.wait()
        with self._turn:
            if self._broken is not None:
                raise StoreError(f"no version of {self.name} is whole: a change failed halfway ({self._broken})")
            yield

    def _scored(self, batch: Batch) -> tuple[NDArray[np.float64], int]:
        return self._scorer(batch if self._device.type == "cpu" else batch.to(self._device)), self.step

    def counters(self) -> dict[str, dict[str, float]]:
        """Totals since the model was opened, by metric, then by feature or kind; any thread may call this."""
        traffic = self.tables.traffic
        found: dict[str, dict[str, float]] = {
            "unknown_ids": _floats(self.tables.unknown_ids),
            "bad_ids": _floats(self.tables.bad_ids),
            "cache_hits": {"": float(traffic.hits)},
            "cache_misses": {"": float(traffic.misses)},
            "read_bytes": {"": float(traffic.read_bytes)},
        }
        redis = [layer for layer in self.tables.layers() if isinstance(layer, RedisRecords)]
        if redis:
            for name in ("hits", "misses", "failures"):
                found[f"redis_{name}"] = {"": float(sum(getattr(layer, name) for layer in redis))}
        return found

    def close(self) -> None:
        """End threads and close files; no request may be under way."""
        self._scorer.close()
        self.tables.close()

    # -- versions --------------------------------------------------------------------------------------------------

    def apply(self, change: ChangeSet, *, check: Callable[[], None] = lambda: None) -> None:
        """Apply a set of changes to this version; ``check`` is as in `take_over`.

        Raise `RefusedError` if the changes are for another version or cannot be applied. Then nothing has changed.
        """
        with self._changing, _refusing(self, str(change)):
            if fault := next(self._against_change(change), None):
                raise RefusedError(*fault)
            self.tables.stage(change, check)
            dense = self._model.dense().to(self._device)
            _load(dense, change)
            manifest = change.manifest
            self._swap(dense, self._encoder, manifest.sequence, manifest.written, same_program=True)

    def _against_change(self, change: ChangeSet) -> Iterator[tuple[str, Reason]]:
        """Yield why a set of changes cannot be applied to the served version."""
        base, step = change.manifest.base, self.step
        if change.manifest.sequence.state == self.state:
            yield f"{change} leads to step {step:,}, which is served already", "duplicate"
        if base.state != self.state and base.step > step:
            yield f"{change} has changes to step {base.step:,}; those from step {step:,} to it are missing", "gap"
        if base.state != self.state and base.step < step:
            yield f"{change} has changes to step {base.step:,}, which step {step:,} has been past", "disorder"
        if base.state != self.state:
            yield f"{change} has changes to another model of step {step:,} ({base.state[:12]}…)", "other_model"
        if change.manifest.encoder != encoder_digest(self._model.manifest.encoder):
            yield (
                f"{change} is of a model that makes other inputs of rows (looked-up tables, vocabularies, boundaries "
                "or kinds of ids have changed); a full model brings them",
                "other_model",
            )

    def take_over(self, model: ExportedModel, *, verify: bool = True, check: Callable[[], None] = lambda: None) -> None:
        """Replace this version by another export of this model, and free files of changed rows.

        Tables in memory are compared with it, and only different rows are swapped. ``verify`` is as in `open`.
        ``check`` is called regularly until the swap; its exceptions cancel the swap. Raise `RefusedError` for another
        model, for an earlier step unless it was written later (by a run that went back), or if the export cannot be
        loaded. Then nothing has changed.
        """
        manifest = model.manifest
        with self._changing, _refusing(self, str(model)):
            if fault := next(self._against_model(model), None):
                raise RefusedError(*fault)
            if verify:
                model.verify(lambda done, total: check())
            encoder = self._encoder_of(model)
            if encoder.columns() != self._encoder.columns():
                raise RefusedError(f"{model} takes other columns than {self._model}", "other_model")
            same_state = manifest.state == self.state and not self.is_broken
            self.tables.stage_model(model, same_state=same_state, check=check)
            check()
            version = StateEntry(step=manifest.step, state=manifest.state)
            self._swap(model.dense().to(self._device), encoder, version, manifest.written)
            self._model.forget(kept=model)
            self._model = model

    def _against_model(self, model: ExportedModel) -> Iterator[tuple[str, Reason]]:
        """Yield why an exported model cannot replace the served version."""
        own, manifest = self._model.manifest, model.manifest
        if not same_tables(own, manifest):
            yield f"{model} has other tables, inputs or labels than {self._model}", "other_model"
        if manifest.step < self.step and manifest.written <= self.written and not self.is_broken:
            yield f"{model} is of step {manifest.step:,}, before {self.step:,}", "disorder"
        before, now = (of.encoder.get("preparation") for of in (own, manifest))
        if (before is None) != (now is None) or (self._encoded and before != now):
            yield (
                f"{model} was trained on data that were prepared otherwise than those of {self._model}, so that "
                "requests would mean other values; serve it by a server of its own",
                "other_model",
            )

    def _swap(
        self,
        dense: torch.nn.Module,
        encoder: Encoder,
        version: StateEntry,
        written: float,
        *,
        same_program: bool = False,
    ) -> None:
        """Let what is staged answer, between two batches."""
        self._swapped.clear()
        self._waiting.set()
        try:
            with self._turn:
                try:
                    try:
                        self.tables.swap()
                    except OSError:  # a disk may fail for a moment; what was swapped is swapped again
                        self.tables.swap()
                    self._scorer.replace_dense(dense, same_program=same_program)
                    self._encoder = encoder
                    self.step, self.state, self.written, self._broken = version.step, version.state, written, None
                except BaseException as error:  # half of it may be there
                    self._broken = error
                    raise
        finally:
            self._waiting.clear()
            self._swapped.set()
        self.tables.tidy()

    @property
    def is_broken(self) -> bool:
        """Whether a swap failed halfway, so that no version is whole; requests are refused until one is taken over."""
        return self._broken is not None

    def _encoder_of(self, model: ExportedModel) -> Encoder:
        encoder = model.encoder()
        if not self._encoded:
            return encoder
        if encoder.preparation is None and encoder.ids != "raw":
            raise CheckpointError(
                f"{model} was trained on values that are hashed, not on data of hotbed prepare, so its rows cannot be "
                "encoded beforehand; serve it without --encoded true"
            )
        return encoder.encoded


@contextmanager
def _refusing(served: ServedModel, place: str) -> Generator[None]:
    """Make every failure to stage a version a `RefusedError`, and forget what was staged."""
    try:
        yield
    except BaseException as error:
        served.tables.discard()
        if served.is_broken or isinstance(error, RefusedError) or not isinstance(error, OSError | HotbedError):
            raise
        what, reason = str(error), "damaged" if isinstance(error, CheckpointError) else "unreadable"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, reason = f"the disk of changed rows is full ({error})", "disk_full"
        elif isinstance(error, OSError):
            what = f"files cannot be read or written ({error})"
        raise RefusedError(f"{place} is not taken over: {what}", reason) from error


def _load(dense: torch.nn.Module, change: ChangeSet) -> None:
    """Overwrite all parameters and buffers of a dense program."""
    values, own = change.dense(), dense.state_dict()
    if {n: (t.shape, t.dtype) for n, t in values.items()} != {n: (t.shape, t.dtype) for n, t in own.items()}:
        raise DamagedError(f"{change} has other dense parameters than the model")
    with torch.no_grad():
        dense.load_state_dict(values)


def _floats(counts: Counter[str]) -> dict[str, float]:
    return {name: float(count) for name, count in counts.items()}
