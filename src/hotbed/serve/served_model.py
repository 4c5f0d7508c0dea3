"""Score raw rows with one version of a model, and replace it by the next version while requests run.

`ServedModel.apply` reads a set of changes while requests run. It checks hashes and shapes, writes the rows to unused
space, and loads the dense parameters into a new program. Between two batches it swaps rows, ids and program. So each
batch is computed by a single version, and a refused version changes nothing.
"""

from __future__ import annotations

import errno
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
"""Reasons to refuse a version.

``gap``: changes between the served version and this version are missing. ``duplicate``: the version is served already.
``disorder``: the version is older than the served version. ``other_model``: tables, inputs or the base differ from the
served model. ``damaged``: files differ from their hashes. ``disk_full``: the disk has no space for changed rows.
``unreadable``: files cannot be read at the moment. ``failed``: all other errors.
"""


class RefusedError(CheckpointError):
    """The served model refused a version, and still serves the previous version."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class ServedModel:
    """A model that scores rows and applies changes. Create it with `open`.

    One thread at a time may call `score`, while a second thread calls `apply` or `take_over`.

    Attributes
    ----------
    name
        Name of the recipe.
    step, state
        The served version: its training step, and the SHA-256 of the manifest of the exported checkpoint.
    written
        Time when this version was published, in seconds since 1970.
    labels
        Label of each column of the scores.
    tables
        Rows of the tables.
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
        self._encoder = self._open_encoder(model)
        manifest = model.manifest
        self.name, self.labels = manifest.name, tuple(manifest.labels)
        self.step, self.state, self.written = manifest.step, manifest.state, manifest.written
        self._device = device
        features = {name: (of.collection, of.spec(of.table)) for name, of in manifest.features.items()}
        dense = model.dense().to(device)
        self._scorer = Scorer(dense, tables.collections, features, device=device, threads=threads)
        self._turn = threading.Lock()
        """Lock that a batch or a swap holds."""
        self._no_swap_waits = threading.Event()
        """Event that is cleared while a swap waits, so that the swap runs before the next batch."""
        self._no_swap_waits.set()
        self._changing = threading.Lock()
        self._broken: BaseException | None = None

    @classmethod
    def open(
        cls,
        source: str | Path | Directory | ExportedModel,
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
        source
            Directory or URI written by ``hotbed export`` or ``train.publish``.
        memory_bytes
            Memory limit for rows, in bytes (default: no limit). Tables beyond the limit are read from files behind a
            cache.
        redis
            Address of a Redis that caches the rows of tables in files, for several servers.
        directory
            Directory for files of changed rows, which need as much space as these rows (default: the directory of
            temporary files).
        device
            Device that looks up rows and computes scores. ``memory_bytes`` limits the memory for rows on this device.
        backend
            Backend of the kernels.
        threads
            Number of threads that compute the dense part (default: torch's number of threads).
        verify
            Whether to check the hashes of all files before the model is opened.
        encoded
            Whether requests have ids and numbers as in datasets written by ``hotbed prepare``, instead of raw values.
        cache
            Directory for copies of remote files, see `hotbed.serve.model_files.Published`.

        Raises
        ------
        CheckpointError
            If ``source`` is not an exported model, or is damaged.
        StoreError
            If the rows do not fit into the memory.
        """
        model = source if isinstance(source, ExportedModel) else ExportedModel.open(source, cache)
        if verify:
            model.verify()
        target = torch.device(device)
        tables = ServedTables(
            model,
            memory_bytes=memory_bytes,
            redis=redis,
            directory=directory,
            device=target,
            backend=backend,
        )
        return cls(model, tables, redis=redis, device=target, threads=threads, encoded=encoded)

    @property
    def encoder(self) -> Encoder:
        """The encoder that converts raw rows to batches, as in training. `take_over` may replace the encoder."""
        return self._encoder

    # -- requests --------------------------------------------------------------------------------------------------

    def score(self, columns: pa.RecordBatch | pa.Table) -> tuple[NDArray[np.float64], int]:
        """Return probabilities ``[B, T]`` of B raw rows and T labels, and the step of the version that computed them.

        Raises
        ------
        DataError, SpecError, BatchError
            If the rows do not match the model's inputs.
        StoreError
            If rows of tables cannot be read.
        """
        with self._hold_version():
            return self._score(self._encoder.batch(columns))

    def score_batch(self, batch: Batch) -> tuple[NDArray[np.float64], int]:
        """Score rows that the `encoder` of this model has encoded; see `score`."""
        with self._hold_version():
            return self._score(batch)

    @contextmanager
    def _hold_version(self) -> Generator[None]:
        """Delay swaps until the context ends. Raise `StoreError` if a failed swap left no intact version."""
        self._no_swap_waits.wait()
        with self._turn:
            if self._broken is not None:
                raise StoreError(f"no version of {self.name} is intact, because a swap failed halfway ({self._broken})")
            yield

    def _score(self, batch: Batch) -> tuple[NDArray[np.float64], int]:
        return self._scorer(batch if self._device.type == "cpu" else batch.to(self._device)), self.step

    def counters(self) -> dict[str, dict[str, float]]:
        """Return counts since the start by metric, e.g. ``{"bad_ids": {FEATURE: 3}, "cache_hits": {"": 9}}``.

        Any thread may call this method.
        """
        traffic = self.tables.traffic
        found: dict[str, dict[str, float]] = {
            "unknown_ids": floats(self.tables.unknown_ids),
            "bad_ids": floats(self.tables.bad_ids),
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
        """End threads and close files. The caller must wait for pending requests first."""
        self._scorer.close()
        self.tables.close()

    # -- versions --------------------------------------------------------------------------------------------------

    def apply(self, change: ChangeSet, *, check: Callable[[], None] = lambda: None) -> None:
        """Apply a set of changes to the served version. ``check`` is as in `take_over`.

        Raise `RefusedError`, and leave the model unchanged, if the changes are for a different version or cannot be
        applied.
        """
        with self._changing, _refuse_failures(self, str(change)):
            if fault := next(self._change_faults(change), None):
                raise RefusedError(*fault)
            self.tables.stage(change, check)
            dense = self._model.dense().to(self._device)
            _load(dense, change)
            manifest = change.manifest
            self._swap(dense, self._encoder, manifest.sequence, manifest.written, same_program=True)

    def _change_faults(self, change: ChangeSet) -> Iterator[tuple[str, Reason]]:
        """Yield why a set of changes cannot be applied to the served version: a message, and the reason for metrics."""
        base, step = change.manifest.base, self.step
        if change.manifest.sequence.state == self.state:
            yield f"{change} leads to step {step:,}, which is served already", "duplicate"
        if base.state == self.state:
            pass
        elif base.step > step:
            missing = f"the changes from the served step {step:,} to this step are missing"
            yield f"{change} applies to step {base.step:,}. But {missing}", "gap"
        elif base.step < step:
            yield f"{change} applies to step {base.step:,}, which is before the served step {step:,}", "disorder"
        else:
            yield f"{change} applies to a different model of step {step:,} (state {base.state[:12]}…)", "other_model"
        if change.manifest.encoder != encoder_digest(self._model.manifest.encoder):
            yield (
                f"{change} belongs to a model that encodes rows differently, because lookup tables, vocabularies, "
                "boundaries or types of ids have changed. Publish a full model with hotbed export",
                "other_model",
            )

    def take_over(self, model: ExportedModel, *, verify: bool = True, check: Callable[[], None] = lambda: None) -> None:
        """Replace the served version by a different export of the same model, and free the files of changed rows.

        For tables in memory, only rows that differ are swapped. ``verify`` is as in `open`. ``check`` is called
        regularly until the swap. If ``check`` raises an exception, the version is not swapped. Raise `RefusedError`,
        and leave the served version unchanged, if the export cannot be loaded, is a different model, or has an earlier
        step. An earlier step is accepted if it was written later, as by a resumed run.
        """
        manifest = model.manifest
        with self._changing, _refuse_failures(self, str(model)):
            if fault := next(self._model_faults(model), None):
                raise RefusedError(*fault)
            if verify:
                model.verify(lambda done, total: check())
            encoder = self._open_encoder(model)
            if encoder.columns() != self._encoder.columns():
                raise RefusedError(f"{model} has different input columns than {self._model}", "other_model")
            same_state = manifest.state == self.state and not self.is_broken
            self.tables.stage_model(model, same_state=same_state, check=check)
            check()
            version = StateEntry(step=manifest.step, state=manifest.state)
            self._swap(model.dense().to(self._device), encoder, version, manifest.written)
            self._model.forget(kept=model)
            self._model = model

    def _model_faults(self, model: ExportedModel) -> Iterator[tuple[str, Reason]]:
        """Yield why an exported model cannot replace the served version: a message, and the reason for metrics."""
        own, manifest = self._model.manifest, model.manifest
        if not same_tables(own, manifest):
            yield f"{model} has different tables, inputs or labels than {self._model}", "other_model"
        if manifest.step < self.step and manifest.written <= self.written and not self.is_broken:
            yield f"{model} has step {manifest.step:,}, which is before the served step {self.step:,}", "disorder"
        before, now = (of.encoder.get("preparation") for of in (own, manifest))
        if (before is None) != (now is None) or (self._encoded and before != now):
            yield (
                f"{model} was trained on differently prepared data than {self._model}, so the ids in requests would "
                "have a different meaning. Start a separate server for this model",
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
        """Publish the staged rows, ``dense`` and ``encoder`` between two batches, and then free unused disk space.

        ``same_program`` means that ``dense`` differs from the served program only in its parameters.
        """
        self._no_swap_waits.clear()
        try:
            with self._turn:
                try:
                    try:
                        self.tables.swap()
                    except OSError:  # disks may fail briefly; a swap can be repeated
                        self.tables.swap()
                    self._scorer.replace_dense(dense, same_program=same_program)
                    self._encoder = encoder
                    self.step, self.state, self.written, self._broken = version.step, version.state, written, None
                except BaseException as error:  # the swap may be incomplete
                    self._broken = error
                    raise
        finally:
            self._no_swap_waits.set()
        self.tables.tidy()

    @property
    def is_broken(self) -> bool:
        """Whether the swap to a new version failed halfway. Requests then fail until a later swap succeeds."""
        return self._broken is not None

    def _open_encoder(self, model: ExportedModel) -> Encoder:
        encoder = model.encoder()
        if not self._encoded:
            return encoder
        if encoder.preparation is None and encoder.ids != "raw":
            raise CheckpointError(
                f"{model} was trained on hashed values instead of a dataset written by hotbed prepare, so requests "
                "must contain raw values. Remove --encoded true"
            )
        return encoder.encoded


@contextmanager
def _refuse_failures(served: ServedModel, version: str) -> Generator[None]:
    """If staging a version fails, drop the staged rows. Convert errors of hotbed and `OSError` to `RefusedError`."""
    try:
        yield
    except BaseException as error:
        served.tables.discard()
        if served.is_broken or isinstance(error, RefusedError) or not isinstance(error, OSError | HotbedError):
            raise
        what, reason = str(error), "damaged" if isinstance(error, CheckpointError) else "unreadable"
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, reason = f"the disk for changed rows is full ({error})", "disk_full"
        elif isinstance(error, OSError):
            what = f"files cannot be read or written ({error})"
        raise RefusedError(f"{version} is refused: {what}", reason) from error


def _load(dense: torch.nn.Module, change: ChangeSet) -> None:
    """Overwrite all parameters and buffers of a dense program by the values in a set of changes."""
    values, own = change.dense(), dense.state_dict()
    if {n: (t.shape, t.dtype) for n, t in values.items()} != {n: (t.shape, t.dtype) for n, t in own.items()}:
        raise DamagedError(
            f"{change} has different dense parameters than the served model. Publish a full model with hotbed export"
        )
    with torch.no_grad():
        dense.load_state_dict(values)


def floats(counts: Counter[Any]) -> dict[str, float]:
    """Convert counts to float. The copy is atomic, so other threads may count meanwhile."""
    return {name: float(count) for name, count in counts.copy().items()}
