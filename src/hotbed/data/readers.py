"""Read windows of an epoch in other processes, and merge chunks into batches.

A window is a pure function of the source, the seed, the epoch and the window's number. A `WindowTask` holds these
values. `read_window` computes the window on any reader and returns it as one Arrow buffer. Only the trainer tracks the
position, so tasks may be repeated or reordered. Readers cache opened sources and nothing else.

`merge_batches` is the inner loop of reading. It copies with NumPy, which releases the GIL. Unlike torch, NumPy starts
no threads that compete with the training step. Each column is written once, directly to its final memory, because page
faults of fresh memory dominate the cost. They took 3 times as long as the copies when whole windows were copied twice.
"""

from __future__ import annotations

import os
import pickle
import platform
import signal
import threading
import zlib
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from multiprocessing import parent_process
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.batch import Batch
from hotbed.data.executors import STARTED_HERE, RunningTask, Tasks, open_tasks
from hotbed.data.source import Source
from hotbed.errors import DataError, HotbedError, SpecError, WorkerError
from hotbed.jagged import Jagged

Array: TypeAlias = NDArray[Any]
Order: TypeAlias = NDArray[np.int64]
BatchSlice: TypeAlias = tuple[Batch, int, int]
"""A batch, and the ``start`` and exclusive ``stop`` of a range of its samples."""
Ranges: TypeAlias = NDArray[np.int64]
"""Ascending ranges of a window's samples ``[n, 2]``: starts and exclusive ends."""

_SOURCES = 4  # number of sources that a reader caches
_SAME_PATH = "Readers need the data at the same path as the trainer: use a shared file system, or a URI"


@contextmanager
def open_readers(executor: str | Executor, workers: int = 2) -> Generator[Tasks | None]:
    """Open the executor with this name, and yield the value for the argument ``executor`` of a `Loader`.

    For threads, the value is None, because a loader creates its own threads, which share the trainer's memory.

    Parameters
    ----------
    executor
        ``"threads"``, ``"processes"``, ``"dask:ADDRESS"``, ``"ray:ADDRESS"``, or a `concurrent.futures.Executor`, which
        stays open.
    workers
        Number of processes. It has no effect on clusters that exist already.

    Raises
    ------
    SpecError
        If the name is unknown, or the executor's package is not installed.
    WorkerError
        If a cluster is unreachable.
    """
    if executor == "threads":
        yield None
        return
    with open_tasks(executor, workers if executor in STARTED_HERE else None) as tasks:
        yield tasks


@dataclass(frozen=True, eq=False)
class WindowTask:
    """The description of a window, which is sent to a reader."""

    source: bytes  # the value of `pack_source`
    split: str
    chunks: tuple[int, ...]  # numbers of the chunks, in the order in which they are merged
    sizes: tuple[int, ...]  # number of samples of each chunk in the trainer's data
    order: tuple[int, ...] | None  # seed of the random order of the samples, or None to keep the stored order
    ranges: Ranges  # positions, in that order, of the samples to return


class RemoteWindow:
    """A window that an executor reads."""

    def __init__(self, tasks: Tasks, task: WindowTask) -> None:
        self._tasks, self._ranges = tasks, task.ranges
        self._before = np.cumsum([0, *(task.ranges[:, 1] - task.ranges[:, 0])])
        self._pending: RunningTask[Any, Any] = tasks.submit(read_window, task)

    def position(self, sample: int) -> int:
        """Convert a position in the window to a position among the samples that the reader returns.

        The position must be that of a requested sample, or the end of a requested range.
        """
        i = max(int(np.searchsorted(self._ranges[:, 0], sample, side="right")) - 1, 0)
        return int(self._before[i] + np.clip(sample - self._ranges[i, 0], 0, self._ranges[i, 1] - self._ranges[i, 0]))

    def result(self) -> Batch:
        """Return the samples. Tensors are views of the received buffer. Several threads may call this at once."""
        from hotbed.data.batch_ipc import batch_from_buffer

        return batch_from_buffer(self._tasks.result(self._pending))

    def cancel(self) -> None:
        """Cancel the task."""
        self._tasks.cancel(self._pending)


def pack_source(source: Source) -> bytes:
    """Serialize a source for readers."""
    try:
        return zlib.compress(pickle.dumps(source), level=1)
    except Exception as error:  # a class of the user may raise anything
        raise SpecError(
            f"{type(source).__name__} cannot be pickled for readers ({error}). Set data.executor to threads, or change "
            "the class so that it opens unpicklable objects on first use"
        ) from None


def read_window(task: WindowTask) -> Any:
    """Read a window, and return the requested samples as an Arrow buffer, see `hotbed.data.batch_ipc`."""
    from hotbed.data.batch_ipc import batch_to_buffer

    _ignore_interrupts()
    here = f"reader {platform.node()} (process {os.getpid()})"
    try:
        source = _open_source(task.source)
    except (ImportError, AttributeError) as error:
        raise WorkerError(
            f"{here} cannot load the class of data.source ({error}). Install the package of this class on all readers"
        ) from None
    chunks: list[Batch] = []
    for i, size in zip(task.chunks, task.sizes, strict=True):
        try:
            chunk = source.read(task.split, i)
        except OSError as error:
            raise DataError(f"{here} cannot read the data ({error}). {_SAME_PATH}") from None
        except HotbedError as error:
            fix = f". {_SAME_PATH}" if isinstance(error.__cause__, FileNotFoundError) else ""
            raise type(error)(f"{here}: {error}{fix}") from None
        if len(chunk) != size:
            raise DataError(
                f"{here}: chunk {i:,} of split '{task.split}': got {len(chunk):,} samples, expected {size:,} as on the "
                "trainer. Use the same files on all machines"
            )
        chunks.append(chunk)
    return batch_to_buffer(merge_window(chunks, task.order, task.ranges))


@cache
def _ignore_interrupts() -> None:
    """Ignore Ctrl-C in reader processes, because the trainer may need them until it has saved a checkpoint."""
    if parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@lru_cache(_SOURCES)
def _open_source(source: bytes) -> Source:
    return pickle.loads(zlib.decompress(source))


# -- merging ---------------------------------------------------------------------------------------------------------


def merge_window(chunks: Sequence[Batch], order: tuple[int, ...] | None, ranges: Ranges | None = None) -> Batch:
    """Return the samples of a window in a random order. ``order`` is the seed of this order.

    If ``order`` is None, the window has only one chunk, and samples keep the stored order. ``ranges`` selects samples
    by their positions in the order (default: all samples).
    """
    if order is None:
        (chunk,) = chunks
        return merge_batches(
            [(chunk, start, stop) for start, stop in ([(0, len(chunk))] if ranges is None else ranges.tolist())]
        )
    # Shuffling the whole window at once is 5 times as fast as copying a batch at a time from an unshuffled window,
    # because each column leaves the cache between batches (2 cores of AMD EPYC (Zen 5), 26 columns × 524,288).
    shuffled = np.random.default_rng(order).permutation(sum(map(len, chunks)))
    chosen = shuffled if ranges is None else np.concatenate([shuffled[start:stop] for start, stop in ranges.tolist()])
    return merge_batches([(chunk, 0, len(chunk)) for chunk in chunks], chosen)


def merge_batches(parts: Sequence[BatchSlice], order: Order | None = None) -> Batch:
    """Concatenate the samples of all parts to a new batch. All parts have the same columns, in CPU memory.

    ``order`` has positions of concatenated samples ``[b]``, which the new batch contains in this order (default: all
    samples, in sequence). If there is only one part, and it is a whole batch, this batch is returned without a copy.
    """
    first = parts[0][0]
    if order is None and len(parts) == 1 and parts[0][1:] == (0, len(first)):
        return first

    def column(of: Callable[[Batch], Tensor | None]) -> Tensor | None:
        pieces = [t.numpy()[start:stop] for batch, start, stop in parts if (t := of(batch)) is not None]
        return torch.from_numpy(_merge_arrays(pieces, order)) if pieces else None

    extra = {name: column(lambda batch, name=name: batch.extra[name]) for name in first.extra}
    return Batch(
        sparse=_merge_sparse(parts, order),
        dense=column(lambda batch: batch.dense),
        labels=column(lambda batch: batch.labels),
        weights=column(lambda batch: batch.weights),
        extra={name: t for name, t in extra.items() if t is not None},
    )


def _merge_sparse(parts: Sequence[BatchSlice], order: Order | None) -> Jagged:
    first = parts[0][0].sparse
    size = sum(stop - start for _, start, stop in parts) if order is None else len(order)
    ids = set(first.fixed)
    if order is None and len(ids) == 1 and (k := ids.pop()) is not None:
        return _concatenate_fixed(parts, size, k)
    spans = [_id_spans(parts, i) for i in range(len(first.names))]
    lengths = {
        i: np.concatenate([np.diff(_offsets(b.sparse, i)[start : stop + 1]) for b, start, stop in parts])
        for i, k in enumerate(first.fixed)
        if k is None
    }
    moved = lengths if order is None else {i: of[order] for i, of in lengths.items()}
    counts = [int(moved[i].sum()) if k is None else size * k for i, k in enumerate(first.fixed)]
    starts = (0, *np.cumsum(counts).tolist())
    values = np.empty(starts[-1], dtype=first.values.numpy().dtype)
    weights = None if first.weights is None else np.empty(starts[-1], dtype=first.weights.numpy().dtype)
    for i, (k, span) in enumerate(zip(first.fixed, spans, strict=True)):
        ids_order = order if k is not None or order is None else _order_of_ids(lengths[i], order)
        for out, of in ((values, _values), (weights, _weights)):
            if out is not None:
                pieces = [of(b.sparse)[a:z] for (b, _, _), (a, z) in zip(parts, span, strict=True)]
                _merge_arrays(pieces, ids_order, out[starts[i] : starts[i + 1]], k or 1)
    offsets = [np.concatenate([[0], np.cumsum(of)]) for of in moved.values()]
    return Jagged(
        first.names,
        torch.from_numpy(values),
        batch_size=size,
        fixed=first.fixed,
        offsets=torch.from_numpy(np.stack(offsets)) if offsets else None,
        weights=None if weights is None else torch.from_numpy(weights),
        starts=starts,
    )


def _concatenate_fixed(parts: Sequence[BatchSlice], size: int, k: int) -> Jagged:
    """Concatenate features that all have ``k`` ids per sample, with one copy for all features."""
    first, features = parts[0][0].sparse, len(parts[0][0].sparse.names)

    def of(values: Callable[[Jagged], Array]) -> Tensor:
        pieces = [values(b.sparse).reshape(features, -1)[:, start * k : stop * k] for b, start, stop in parts]
        return torch.from_numpy(np.concatenate(pieces, axis=1).reshape(-1))

    return Jagged(
        first.names,
        of(_values),
        batch_size=size,
        fixed=first.fixed,
        weights=None if first.weights is None else of(_weights),
        starts=tuple(range(0, (features + 1) * size * k, size * k)) if size * k else (0,) * (features + 1),
    )


def _merge_arrays(pieces: Sequence[Array], order: Order | None, out: Array | None = None, width: int = 1) -> Array:
    """Concatenate arrays, and write the elements to ``out`` in ``order``.

    ``order`` has positions of groups of ``width`` consecutive elements.
    """
    if out is None:
        size = sum(map(len, pieces)) if order is None else len(order)
        out = np.empty((size, *pieces[0].shape[1:]), dtype=pieces[0].dtype)
    if order is None:
        return np.concatenate(pieces, out=out)
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    target = out
    if width > 1:
        whole, target = whole.reshape(-1, width), out.reshape(-1, width)
    # mode="clip" lets NumPy write into `target` without a buffer; all positions are in range.
    np.take(whole, order, axis=0, out=target, mode="clip")
    return out


def _order_of_ids(lengths: Array, order: Order) -> Order:
    """Return the positions of the ids of the bags at positions ``order [b]``. ``lengths [B]`` are of all bags."""
    moved = lengths[order]
    first = (np.cumsum(lengths) - lengths)[order]
    return np.arange(int(moved.sum())) + np.repeat(first - (np.cumsum(moved) - moved), moved)


def _id_spans(parts: Sequence[BatchSlice], i: int) -> list[tuple[int, int]]:
    """Return, for each part, the range of feature ``i``'s ids in the values of the part's batch."""
    spans: list[tuple[int, int]] = []
    for batch, start, stop in parts:
        base, k = batch.sparse.starts[i], batch.sparse.fixed[i]
        if k is None:
            offsets = _offsets(batch.sparse, i)
            spans.append((base + int(offsets[start]), base + int(offsets[stop])))
        else:
            spans.append((base + start * k, base + stop * k))
    return spans


def _offsets(sparse: Jagged, i: int) -> Array:
    assert sparse.offsets is not None  # feature i is ragged
    return sparse.offsets[sparse.ragged_rows[i]].numpy()


def _values(sparse: Jagged) -> Array:
    return sparse.values.numpy()


def _weights(sparse: Jagged) -> Array:
    assert sparse.weights is not None  # all parts have the same columns
    return sparse.weights.numpy()
