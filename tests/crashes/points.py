"""Count the operations of a run by phase, and end the process at one of them.

Every operation that is wrapped here belongs to the phase that its thread is in (`SCOPES`), or else to one of its own.
A first, undisturbed run counts them; a point is a phase and a number up to that count. The process dies by SIGKILL
right before or after the operation, having noted where it was.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from torch.optim.adam import Adam

from hotbed.checkpoint import save, storage, tensor_files
from hotbed.checkpoint.snapshot import Snapshot
from hotbed.comm import Handle, Link
from hotbed.data.formats.split_binary import SplitBinaryWriter
from hotbed.data.preparation import counting
from hotbed.embed import dynamic, replicas
from hotbed.store.device_store import DenseStore
from hotbed.store.file_records import FileRecords
from hotbed.store.lazy_store import LazyStore
from hotbed.store.row_cache import CachedRecords
from hotbed.train.runs import resume
from hotbed.train.runs.callbacks import JsonLines
from hotbed.train.runs.report import RunDirectory
from hotbed.train.trainer import Trainer

PHASES = (
    "training",
    "saving",
    "difference",
    "publication",
    "compaction",
    "export",
    "loading",
    "preparing",
    "write-back",
    "evictions",
    "exchange",
    "replicas",
)

DIGESTS, COUNTS, DEATH = "digests.jsonl", "counts.json", "death.jsonl"
"""In the folder of a command: what was trained, what was counted, and where it died."""


@dataclass(frozen=True)
class Point:
    """Where a process dies.

    Attributes
    ----------
    phase
        One of `PHASES`.
    number
        Of the operation within its phase, from 1.
    before
        Whether it dies before that operation, or after.
    rank
        Which process dies.
    """

    phase: str
    number: int
    before: bool = False
    rank: int = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Counting:
    """What this process has done, by phase and operation."""

    def __init__(self) -> None:
        self.by_phase: Counter[str] = Counter()
        self.operations: Counter[str] = Counter()
        self.point: Point | None = None
        self.note: Path | None = None
        self.whole: str | None = None
        self._lock = threading.Lock()
        self._here = threading.local()

    def begin(self, point: Point | None, note: Path, whole: str | None = None) -> None:
        """Count from now on, and die at this point; ``whole``: the one phase that all of the command is."""
        self.point, self.note, self.whole = point, note, whole

    @property
    def phases(self) -> list[str]:
        """Phases that this thread is in, the innermost last."""
        if not hasattr(self._here, "phases"):
            self._here.phases = []
        return self._here.phases

    def operation(self, name: str, own: str, method: Callable[..., Any], args: Any, options: Any) -> Any:
        """Call a method that counts as an operation."""
        if self.note is None:
            return method(*args, **options)
        phase = self.whole or (self.phases[-1] if self.phases else own)
        with self._lock:
            self.by_phase[phase] += 1
            self.operations[f"{phase}: {name}"] += 1
            number = self.by_phase[phase]
        dies = self.point is not None and (phase, number) == (self.point.phase, self.point.number)
        if dies and self.point is not None and self.point.before:
            self._die(phase, name, number)
        try:
            return method(*args, **options)
        finally:
            if dies:
                self._die(phase, name, number)

    def _die(self, phase: str, name: str, number: int) -> None:
        assert self.note is not None
        line = json.dumps({"phase": phase, "operation": name, "number": number}) + "\n"
        descriptor = os.open(self.note, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        REAL_WRITE(descriptor, line.encode())
        REAL_FSYNC(descriptor)
        os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()


COUNTING = Counting()
REAL_FSYNC, REAL_WRITE = os.fsync, os.write


def _of_saving(args: Any) -> str:
    """Full checkpoints and differences to them."""
    return "saving" if getattr(args[0], "base", None) is None else "difference"


SCOPES: list[tuple[Any, str, Callable[[Any], str]]] = [
    (save.Saving, "run", _of_saving),
    (save.Saving, "_write_manifest", lambda _: "publication"),
    (save.Saving, "_do_then", lambda _: "publication"),
    (resume, "load_checkpoint", lambda _: "loading"),
    (resume, "read_manifest", lambda _: "loading"),
    (FileRecords, "_write", lambda _: "write-back"),
    (FileRecords, "_write_oldest", lambda _: "write-back"),
    (CachedRecords, "_insert", lambda _: "evictions"),
    (dynamic.DynamicVocabulary, "_local", lambda _: "evictions"),
    (replicas.Sync, "_average", lambda _: "replicas"),
    (replicas, "gather_gradients", lambda _: "replicas"),
]
"""Methods, and the phase that their thread is in while they run."""

OPERATIONS: list[tuple[Any, str, str]] = [
    (Trainer, "_advance", "training"),
    (Adam, "step", "training"),
    (DenseStore, "lookup", "training"),
    (DenseStore, "update", "training"),
    (LazyStore, "lookup", "training"),
    (LazyStore, "update", "training"),
    (JsonLines, "_write", "training"),
    (RunDirectory, "begin", "training"),
    (RunDirectory, "finish", "training"),
    (Snapshot, "read", "saving"),
    (storage._LocalWriter, "write", "saving"),
    (storage._LocalWriter, "finish", "saving"),
    (storage.LocalDirectory, "make", "saving"),
    (storage.LocalDirectory, "write", "saving"),
    (storage.LocalDirectory, "create", "saving"),
    (storage.LocalDirectory, "replace", "saving"),
    (storage.LocalDirectory, "remove", "saving"),
    (storage.LocalDirectory, "remove_all", "saving"),
    (storage._LocalReader, "read_into", "loading"),
    (tensor_files.TensorFiles, "read", "loading"),
    (tensor_files.TensorFiles, "copy_rows", "loading"),
    (FileRecords, "_write", "write-back"),
    (FileRecords, "_write_oldest", "write-back"),
    (FileRecords, "_put", "write-back"),
    (FileRecords, "_read", "write-back"),
    (FileRecords, "_make_room", "write-back"),
    (CachedRecords, "_insert", "evictions"),
    (CachedRecords, "_gather", "evictions"),
    (dynamic._Directory, "find", "evictions"),
    (dynamic._Directory, "take", "evictions"),
    (Link, "exchange", "exchange"),
    (Link, "all_gather", "exchange"),
    (Link, "broadcast", "exchange"),
    (Handle, "wait", "exchange"),
    (replicas.UpdatedSlotList, "take", "replicas"),
    (replicas, "average_rows", "replicas"),
    (SplitBinaryWriter, "append_labels", "preparing"),
    (SplitBinaryWriter, "append_dense", "preparing"),
    (SplitBinaryWriter, "append_ids", "preparing"),
    (counting, "write_vocabulary", "preparing"),
    (pq, "write_table", "preparing"),
    (pq.ParquetWriter, "write_table", "preparing"),
    (Path, "open", "training"),
    (os, "fsync", "training"),
    (os, "rename", "training"),
    (os, "replace", "training"),
    (os, "link", "training"),
    (os, "mkdir", "training"),
    (os, "unlink", "training"),
    (os, "rmdir", "training"),
]
"""What is counted, and the phase that it belongs to in a thread that is in none."""


def _scoped(method: Callable[..., Any], phase_of: Callable[[Any], str]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        phases = COUNTING.phases
        phases.append(phase_of(args))
        try:
            return method(*args, **options)
        finally:
            phases.pop()

    return called


def _counted(name: str, own: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        return COUNTING.operation(name, own, method, args, options)

    return called


def install() -> None:
    """Wrap everything, once; nothing is counted before `Counting.begin`."""
    for owner, name, own in OPERATIONS:
        if not hasattr(owner, name):
            raise AttributeError(f"{owner} has no {name} any more; name what is counted in its place")
        setattr(owner, name, _counted(f"{getattr(owner, '__name__', owner)}.{name}", own, getattr(owner, name)))
    for owner, name, phase_of in SCOPES:
        setattr(owner, name, _scoped(getattr(owner, name), phase_of))
    torch.set_num_threads(1)
