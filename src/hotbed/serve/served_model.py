"""Score raw rows with one version of a model, and replace it by the next version while requests run.

`ServedModel.apply` reads a set of changes while requests run, checks its hashes and shapes, writes its rows to unused
space, and loads its dense parameters into a new program. Between two batches it swaps rows, ids and program. So a batch
is computed by a single version, and a refused version changes nothing.
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
"""Reasons to refuse a version.

``gap``: earlier changes are missing; ``duplicate``: the version is served already; ``disorder``: the version is older;
``other_model``: tables, inputs or origin differ; ``damaged``: files do not match their hashes; ``disk_full``: no space
for changed rows; ``unreadable``: files cannot be read at the moment; ``failed``: any other error.
"""


class RefusedError(CheckpointError):
    """A version that is refused for a `Reason`; the previous version is still served."""

    def __init__(self, message: str, reason: Reason) -> None:
        super().__init__(message)
        self.reason: Reason = reason


class ServedModel:
    """A model that scores rows and applies changes; `open` creates it.

    One thread at a time may call `score`, while another calls `apply` or `take_over`.

    Attributes
    ----------
    name
        Name of the recipe.
    step, state
        The served version: its training step, and the SHA-256 of its checkpoint's manifest.
    written
        Time when this version was published, in seconds since 1970.
    labels
        Labels of the score columns.
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
        features = {
            name: (feature.collection, feature.spec(feature.table)) for name, feature in manifest.features.items()
        }
        lookups = dict(tables.collections)
        self._scorer = Scorer(model.dense().to(device), lookups, features, device=device, threads=threads)
        self._turn = threading.Lock()
        """Held during a batch or a swap."""
        self._waiting = threading.Event()
        """Set while a swap waits, so that the swap runs before the next batch."""
        self._swapped = threading.Event()
        self._swapped.set()
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
            Memory limit for rows. Tables beyond the limit are read from files behind a cache. None keeps all rows in
            memory.
        redis
            Address of a Redis that caches rows of tables in files for several servers.
        directory
            Directory for files of changed rows, which need as much space as these rows (default: the directory of
            temporary files).
        device
            Device for lookups and scores. ``memory_bytes`` limits its memory for rows.
        backend
            Backend of the kernels.
        threads
            Number of threads for the dense part.
        verify
            Whether to check the hashes of all files first.
        encoded
            Whether requests have ids and numbers as in datasets written by ``hotbed prepare``, instead of raw values.
        cache
            Directory for files of models at URIs, see `hotbed.serve.model_files.Published`.

        Raises
        ------
        CheckpointError
            If ``source`` is not an exported model, or is damaged.
        StoreError
            If the rows do not fit into the memory.
        """
        kept = None if cache is None else Path(cache)
        model = source if isinstance(source, ExportedModel) else ExportedModel.open(source, kept)
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
        """The encoder of raw rows, as in training. A new full model may replace the encoder."""
        return self._encoder

    # -- requests --------------------------------------------------------------------------------------------------

    def score(self, columns: pa.RecordBatch | pa.Table) -> tuple[NDArray[np.float64], int]:
        """Return probabilities ``[B, T]`` of raw rows, and the step of the version that computed them.

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
        """Score rows that the served `encoder` has encoded; see `score`."""
        with self._hold_version():
            return self._score(batch)

    @contextmanager
    def _hold_version(self) -> Generator[None]:
        """Keep the served version from being swapped."""
        if self._waiting.is_set():
            self._swapped.wait()
        with self._turn:
            if self._broken is not None:
                raise StoreError(f"no version of {self.name} is intact, because a swap failed halfway ({self._broken})")
            yield

    def _score(self, batch: Batch) -> tuple[NDArray[np.float64], int]:
        return self._scorer(batch if self._device.type == "cpu" else batch.to(self._device)), self.step

    def counters(self) -> dict[str, dict[str, float]]:
        """Return totals since the start, by metric, then by feature. Any thread may call this."""
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
        """End threads and close files. No request may be pending."""
        self._scorer.close()
        self.tables.close()

    # -- versions --------------------------------------------------------------------------------------------------

    def apply(self, change: ChangeSet, *, check: Callable[[], None] = lambda: None) -> None:
        """Apply a set of changes to this version; ``check`` is as in `take_over`.

        Raise `RefusedError` if the changes are for a different version or cannot be applied. Then the model is
        unchanged.
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
        """Yield reasons why a set of changes cannot be applied to the served version."""
        base, step = change.manifest.base, self.step
        if change.manifest.sequence.state == self.state:
            yield f"{change} leads to step {step:,}, which is served already", "duplicate"
        if base.state != self.state and base.step > step:
            yield (
                f"{change} applies to step {base.step:,}; the changes from the served step {step:,} are missing",
                "gap",
            )
        if base.state != self.state and base.step < step:
            yield f"{change} applies to step {base.step:,}, before the served step {step:,}", "disorder"
        if base.state != self.state:
            yield f"{change} applies to a different model of step {step:,} ({base.state[:12]}…)", "other_model"
        if change.manifest.encoder != encoder_digest(self._model.manifest.encoder):
            yield (
                f"{change} belongs to a model that encodes rows differently (lookup tables, vocabularies, boundaries "
                "or types of ids have changed); publish a full model",
                "other_model",
            )

    def take_over(self, model: ExportedModel, *, verify: bool = True, check: Callable[[], None] = lambda: None) -> None:
        """Replace this version by a different export of this model, and free files of changed rows.

        For tables in memory, only rows that differ are swapped. ``verify`` is as in `open`. ``check`` is called
        regularly until the swap; its exceptions cancel the swap. Raise `RefusedError` for a different model, for an
        earlier step unless it was written later (by a resumed run), or if the export cannot be loaded. Then the model
        is unchanged.
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
        """Yield reasons why an exported model cannot replace the served version."""
        own, manifest = self._model.manifest, model.manifest
        if not same_tables(own, manifest):
            yield f"{model} has different tables, inputs or labels than {self._model}", "other_model"
        if manifest.step < self.step and manifest.written <= self.written and not self.is_broken:
            yield f"{model} is of step {manifest.step:,}, before the served step {self.step:,}", "disorder"
        before, now = (of.encoder.get("preparation") for of in (own, manifest))
        if (before is None) != (now is None) or (self._encoded and before != now):
            yield (
                f"{model} was trained on data prepared differently than {self._model}, so requests would have a "
                "different meaning; start a separate server for it",
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
        """Publish the staged version between two batches."""
        self._swapped.clear()
        self._waiting.set()
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
            self._waiting.clear()
            self._swapped.set()
        self.tables.tidy()

    @property
    def is_broken(self) -> bool:
        """Whether a swap failed halfway. Requests then fail until another version is loaded."""
        return self._broken is not None

    def _open_encoder(self, model: ExportedModel) -> Encoder:
        encoder = model.encoder()
        if not self._encoded:
            return encoder
        if encoder.preparation is None and encoder.ids != "raw":
            raise CheckpointError(
                f"{model} was trained on hashed values instead of a dataset written by hotbed prepare, so requests "
                "cannot be encoded. Remove --encoded true"
            )
        return encoder.encoded


@contextmanager
def _refuse_failures(served: ServedModel, version: str) -> Generator[None]:
    """Raise `RefusedError` for every failure to stage a version, and drop the staged rows."""
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
        raise RefusedError(f"{version} is refused: {what}", reason) from error


def _load(dense: torch.nn.Module, change: ChangeSet) -> None:
    """Overwrite all parameters and buffers of a dense program."""
    values, own = change.dense(), dense.state_dict()
    if {n: (t.shape, t.dtype) for n, t in values.items()} != {n: (t.shape, t.dtype) for n, t in own.items()}:
        raise DamagedError(f"{change} has different dense parameters than the model; publish a full model")
    with torch.no_grad():
        dense.load_state_dict(values)


def _floats(counts: Counter[str]) -> dict[str, float]:
    return {name: float(count) for name, count in counts.items()}
