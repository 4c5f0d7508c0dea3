"""Read windows of an epoch on an executor, by readers apart from the trainer.

A window is a pure function of the source, the seed, the epoch and its number: a `WindowTask` says these, `read_window`
computes it anywhere, and it comes back as one Arrow message. So it does not matter which reader a window is read by, or
how often; the trainer alone knows the position. Readers keep the sources that they have opened, and nothing else.
"""

from __future__ import annotations

import os
import pickle
import platform
import signal
import threading
import zlib
from collections.abc import Generator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from multiprocessing import parent_process
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hotbed.batch import Batch
from hotbed.data.executors import STARTED_HERE, Pending, Tasks, open_tasks
from hotbed.data.join import join
from hotbed.data.source import Source
from hotbed.errors import DataError, HotbedError, SpecError, WorkerError

Ranges: TypeAlias = NDArray[np.int64]
"""Samples of a window that a rank is given ``[n, 2]``: from … up to before …, in order."""

_SOURCES = 4
_LEVEL = 1
_SAME_PATH = "readers need the data at the same path as the trainer: on a file system that all have, or at a URI"


@contextmanager
def open_readers(executor: str | Executor, workers: int = 2) -> Generator[Tasks | None]:
    """Open what reads for a `Loader` (``Loader(executor=…)``), by its name.

    It is `open_tasks` for reading: threads are None here, as a loader makes its own, which share the trainer's memory;
    and ``workers``, which a recipe has for any executor (``data.workers``, windows in work), counts processes only.

    Parameters
    ----------
    executor
        ``"threads"``, ``"processes"``, ``"dask:ADDRESS"``, ``"ray:ADDRESS"``, or a `concurrent.futures.Executor`, which
        stays open.
    workers
        How many processes; nothing for the others.

    Raises
    ------
    SpecError
        If there is no such executor, or its package is not installed.
    WorkerError
        If a cluster cannot be reached.
    """
    if executor == "threads":
        yield None
        return
    with open_tasks(executor, workers if executor in STARTED_HERE else None) as tasks:
        yield tasks


@dataclass(frozen=True, eq=False)
class WindowTask:
    """What a reader has to know of a window."""

    source: bytes  # see `packed_source`
    split: str
    chunks: tuple[int, ...]  # in the order in which they are merged
    sizes: tuple[int, ...]  # samples that the trainer found in each chunk
    order: tuple[int, ...] | None  # seed of the order of the samples; None keeps the stored order
    ranges: Ranges  # samples to return, by position in that order


class RemoteWindow:
    """A window that an executor reads."""

    def __init__(self, tasks: Tasks, task: WindowTask) -> None:
        self._tasks, self._ranges = tasks, task.ranges
        self._before = np.cumsum([0, *(task.ranges[:, 1] - task.ranges[:, 0])])
        self._pending: Pending[Any, Any] = tasks.submit(read_window, task)

    def place(self, sample: int) -> int:
        """Where a sample of the window, or the end of a range, is among those that come back."""
        i = max(int(np.searchsorted(self._ranges[:, 0], sample, side="right")) - 1, 0)
        return int(self._before[i] + np.clip(sample - self._ranges[i, 0], 0, self._ranges[i, 1] - self._ranges[i, 0]))

    def result(self) -> Batch:
        """Wait for its samples, views of the message that has come; safe from several threads."""
        from hotbed.data.batch_ipc import batch_from_buffer

        batch, _ = batch_from_buffer(self._tasks.result(self._pending))
        assert batch is not None
        return batch

    def cancel(self) -> None:
        """Give it up."""
        self._tasks.cancel(self._pending)


def packed_source(source: Source) -> bytes:
    """A source as readers get it."""
    try:
        return zlib.compress(pickle.dumps(source), _LEVEL)
    except Exception as error:  # whatever a class of the user's raises
        raise SpecError(
            f"{type(source).__name__} cannot be sent to readers ({error}); use data.executor threads, or let it open "
            "what cannot be pickled when it is first read"
        ) from None


def read_window(task: WindowTask) -> Any:
    """Read a window, and return the samples that were asked for as an Arrow buffer, see `hotbed.data.batch_ipc`."""
    from hotbed.data.batch_ipc import batch_to_buffer

    _ignore_interrupts()
    here = f"reader {platform.node()} (process {os.getpid()})"
    try:
        source = _opened(task.source)
    except (ImportError, AttributeError) as error:
        raise WorkerError(
            f"{here} cannot load the class of data.source ({error}); install it where readers run"
        ) from None
    chunks: list[Batch] = []
    for i, size in zip(task.chunks, task.sizes, strict=True):
        try:
            chunk = source.read(task.split, i)
        except (OSError, HotbedError) as error:
            raise _on_reader(here, error) from None
        if len(chunk) != size:
            raise DataError(
                f"{here} finds {len(chunk):,} samples in chunk {i:,} of split '{task.split}', where the trainer has "
                f"found {size:,}: the files at this path are others; give all the same ones"
            )
        chunks.append(chunk)
    return batch_to_buffer(merge_window(chunks, task.order, task.ranges))


def _on_reader(here: str, error: OSError | HotbedError) -> Exception:
    """An error of a source that says where it was raised, and what readers need if a file is not there."""
    if isinstance(error, OSError):
        return DataError(f"{here} cannot read the data ({error}); {_SAME_PATH}")
    missing = isinstance(error.__cause__, FileNotFoundError)
    return type(error)(f"{here}: {error}" + (f"; {_SAME_PATH}" if missing else ""))


def merge_window(chunks: Sequence[Batch], order: tuple[int, ...] | None, ranges: Ranges | None = None) -> Batch:
    """Return samples of a window: of its chunks in a random order (by its seed), or of its only chunk as stored.

    ``ranges`` selects samples by their places in that order; default: all.
    """
    if order is None:
        (chunk,) = chunks
        return join(
            [(chunk, start, stop) for start, stop in ([(0, len(chunk))] if ranges is None else ranges.tolist())]
        )
    # The whole window at once: taking a batch at a time from an unshuffled window takes 5 times as long, because each
    # column falls out of the cache between batches (2 cores of AMD EPYC (Zen 5), 26 columns × 524,288).
    shuffled = np.random.default_rng(order).permutation(sum(map(len, chunks)))
    chosen = shuffled if ranges is None else np.concatenate([shuffled[start:stop] for start, stop in ranges.tolist()])
    return join([(chunk, 0, len(chunk)) for chunk in chunks], chosen)


@cache
def _ignore_interrupts() -> None:
    """Leave Ctrl-C to the trainer, which may have to go on until a checkpoint is saved."""
    if parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@lru_cache(_SOURCES)
def _opened(source: bytes) -> Source:
    return pickle.loads(zlib.decompress(source))
