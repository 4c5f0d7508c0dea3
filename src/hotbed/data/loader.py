"""Iterate over a source in batches, in a reproducible order. Threads or other processes read ahead.

*Order.* The order of an epoch is fixed before anything is read. Without shuffling, samples are in stored order. With
shuffling, chunks are in a random order, and groups of ``window`` chunks are windows. The samples of a window are in a
random order. All randomness comes from (seed, epoch, window), so it depends neither on threads nor on where
an epoch is resumed. With batches of B samples, batch j has the samples j·B … (j + 1)·B − 1 of the order, which may
belong to several windows.

*Tasks.* One thread pool runs a queue of futures: read a chunk, merge the chunks of a window, slice batches. A task
waits only for tasks that were queued earlier, and the pool starts tasks in queue order. So the oldest running task
never waits for a task that has not started, and there are no deadlocks with any number of threads. Memory is bounded,
because tasks are queued only for the next ``prefetch`` batches, and for at most two windows after the current window.
Passing a result between threads takes longer than slicing a batch of 1,024 samples. Therefore one task slices several
consecutive batches of a window, up to 16,384 samples, and two of these tasks are queued ahead.

*Executors.* With an ``executor``, one task per window (`hotbed.data.readers`) reads and merges the window's chunks, and
returns this rank's samples. At most ``workers`` windows are requested in addition to the windows of the next batches.
Batches are sliced in this process.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, replace
from itertools import accumulate, islice, starmap
from typing import Annotated, TypeAlias

import numpy as np
import torch

from hotbed.batch import Batch
from hotbed.checks import Count, Range, Size, check, check_known
from hotbed.data.executors import Tasks
from hotbed.data.readers import Ranges, RemoteWindow, WindowTask, merge_batches, merge_window, pack_source
from hotbed.data.source import Source
from hotbed.errors import SpecError
from hotbed.virtual_ranks import Slices, VirtualRanks

_SLICERS = 2
"""Number of threads that slice batches if an executor reads the windows."""
_SLICED_TOGETHER = 16_384
"""Number of samples that one task slices into batches."""


@dataclass(eq=False, repr=False)
class Loader:
    """Iterate over a split of a source in batches. One iteration is one epoch.

    Leaving an iterator early (``break``) stops its threads and ends its epoch: the next iteration starts the next
    epoch. To resume the epoch instead, pass the value of `state_dict` to `load_state_dict` of this or a new loader.

    Parameters
    ----------
    source
        The samples.
    split
        The split of the source.
    batch_size
        Samples per batch.
    shuffle
        Shuffle each epoch in a different order.
    seed
        Seed of the shuffling.
    drop_last
        Drop the last batch if it has fewer samples than ``batch_size``.
    window
        Number of chunks that are shuffled together. Larger windows shuffle better, but about three windows are in
        memory.
    workers
        Number of threads that read, shuffle and slice. With an executor, this is the number of windows that are
        requested ahead, and so the number of workers that this loader keeps busy.
    prefetch
        Minimum number of batches that are prepared ahead. Of small batches, up to 32,768 samples are prepared ahead.
    executor
        Executor that reads instead of threads: a `concurrent.futures.Executor`, or the value of
        `hotbed.data.open_readers`, which also repeats tasks of killed workers. Several loaders may share an executor.
        The loader does not close it.
    pin_memory
        Copy batches into page-locked memory (default: if a CUDA device is available).
    transform
        Function that is applied to every batch. Several threads may call the function at once.
    rank, world_size
        Index of this rank, and the number of ranks. The loader returns the rank's share of every batch, which has
        consecutive samples. The sizes of shares differ by at most one sample. Some shares are empty if a batch has
        fewer samples than there are ranks.
    virtual_ranks
        Number of virtual ranks (`hotbed.virtual_ranks`), if it is not the number of ranks. A share then has the samples
        of the rank's virtual ranks, and `Batch.slices` has their numbers.

    Attributes
    ----------
    queue_depth
        Number of batches that were ready when the last batch was requested, at most ``prefetch``. 0 means that the
        consumer had to wait.

    Raises
    ------
    SpecError
        If an argument is out of range, the source has no such split, or the split is empty.
    WorkerError
        During iteration, if readers are killed repeatedly.
    """

    source: Source
    split: str
    batch_size: Count
    _: KW_ONLY
    shuffle: bool = False
    seed: Size = 0
    drop_last: bool = False
    window: Count = 8
    workers: Count = 2
    prefetch: Count = 4
    pin_memory: bool | None = None
    transform: Callable[[Batch], Batch] | None = None
    rank: int = 0
    world_size: Count = 1
    virtual_ranks: Count | None = None
    executor: Executor | Tasks | None = None

    def __post_init__(self) -> None:
        for name in ("batch_size", "window", "workers", "prefetch", "world_size", "seed"):
            check(name, getattr(self, name), Size if name == "seed" else Count, SpecError)
        check("rank", self.rank, Annotated[int, Range(least=0, below=self.world_size, note=" (world_size)")], SpecError)
        if self.pin_memory is None:
            self.pin_memory = torch.cuda.is_available()
        self.tasks = Tasks.of(self.executor) if isinstance(self.executor, Executor) else self.executor
        self.queue_depth = 0
        self.virtual = VirtualRanks(self.rank, self.world_size, self.virtual_ranks)
        sizes = self.source.chunks(self.split)
        self.samples = sum(sizes)
        self._chunks_digest = hashlib.sha256(",".join(map(str, sizes)).encode()).hexdigest()[:16]
        if self.samples == 0:
            raise SpecError(f"split '{self.split}': got no samples, expected at least one")
        self._epoch = 0
        self._consumed = 0
        self._fresh = True  # whether the next iteration starts at the position, rather than at the next epoch

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch."""
        full, rest = divmod(self.samples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        if not self._fresh:
            self._epoch, self._consumed = self._epoch + 1, 0
        self._fresh = False
        start = self._consumed
        end = self.samples - (self.samples % self.batch_size if self.drop_last else 0)
        epoch = _Epoch(self, self._epoch, start, end)
        threads = self.workers if self.tasks is None else _SLICERS
        with ThreadPoolExecutor(threads, thread_name_prefix="hotbed-loader") as pool:
            ahead: deque[tuple[Future[list[Batch | Exception]], int]] = deque()  # task, and the end of its next batch
            stops: list[int] = []
            try:
                while start < end or ahead:
                    while start < end and len(ahead) < max(self.prefetch, 2 * (len(stops) - 1)):
                        stops = epoch.stops(start)
                        task = epoch.batches(pool, start, stops)
                        ahead.extend((task, stop) for stop in stops)
                        start = stops[-1]
                    self.queue_depth = sum(future.done() for future, _ in islice(ahead, self.prefetch))
                    future, stop = ahead.popleft()
                    batch = future.result().pop(0)
                    if isinstance(batch, Exception):
                        raise batch
                    # The position is set before the yield, so that state_dict() in the loop counts the current batch.
                    over = stop >= end
                    self._epoch, self._consumed, self._fresh = epoch.number + over, 0 if over else stop, over
                    yield batch
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                epoch.cancel()

    # -- position --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int | bool | str]:
        """Return the position as plain values: ``epoch``, and ``consumed`` (number of consumed samples of the epoch).

        All other entries determine the order of samples. They must be equal in the loader that resumes.
        """
        return {"epoch": self._epoch, "consumed": self._consumed, **self._order()}

    def load_state_dict(self, state: Mapping[str, int | bool | str]) -> None:
        """Resume from a value of `state_dict`. The next iteration returns exactly the remaining batches.

        Raises
        ------
        SpecError
            If a key is missing or unknown, or the position belongs to a different order of samples.
        """
        order = self._order()
        known = ["epoch", "consumed", *order]
        for key in state:
            check_known("key of the loader's position", key, known, SpecError)
        for key in known:
            if key not in state:
                raise SpecError(f"the loader's position: key '{key}' is missing. Pass the value of state_dict()")
        for key, value in order.items():
            if state[key] != value:
                fix = "Use the earlier files and chunk_samples" if key == "chunks" else f"Use {key}={state[key]!r}"
                raise SpecError(
                    f"the loader's position: {key}: got {state[key]!r}, expected {value!r} as in this loader, because "
                    f"{key} determines the order of samples. {fix}, or start a new epoch"
                )
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        check("the loader's position: epoch", epoch, Size, SpecError)
        check("the loader's position: consumed", consumed, Annotated[int, Range(least=0, most=self.samples)], SpecError)
        self._epoch, self._consumed, self._fresh = epoch, consumed, True

    def _order(self) -> dict[str, int | bool | str]:
        order: dict[str, int | bool | str] = {"split": self.split, "samples": self.samples, "shuffle": self.shuffle}
        if self.shuffle:
            order |= {"seed": self.seed, "window": self.window, "chunks": self._chunks_digest}
        return order


# First numbers of the generators' seeds. They are not last, because NumPy's seeds (s, e) and (s, e, 0) are equal.
_CHUNK_ORDER, _WINDOW_ORDER = 1, 2


_Part: TypeAlias = tuple["Future[Batch] | RemoteWindow", int, int]
"""A window, and the ``start`` and exclusive ``stop`` of a range of its samples."""


class _Epoch:
    """The order of one epoch, and the tasks that prepare its batches. Only the consumer's thread calls its methods."""

    def __init__(self, loader: Loader, number: int, start: int, end: int) -> None:
        self.number = number
        self._loader, self._begin, self._end = loader, start, end
        self._sizes = loader.source.chunks(loader.split)
        chunks = list(range(len(self._sizes)))
        per_window = 1
        if loader.shuffle:
            chunks = np.random.default_rng((_CHUNK_ORDER, loader.seed, number)).permutation(len(chunks)).tolist()
            per_window = loader.window
        self._windows = [chunks[i : i + per_window] for i in range(0, len(chunks), per_window)]
        self._starts = [0, *accumulate(sum(self._sizes[c] for c in window) for window in self._windows)]
        self._pending: dict[int, Future[Batch] | RemoteWindow] = {}
        self._source = b"" if loader.tasks is None else pack_source(loader.source)

    def stops(self, start: int) -> list[int]:
        """Return the exclusive ends of the batches that one task slices. The first batch begins at sample ``start``.

        All these batches begin in the same window.
        """
        size = self._loader.batch_size
        window = self._starts[int(np.searchsorted(self._starts, start, side="right"))]
        last = min(window, start + max(_SLICED_TOGETHER, size), self._end)
        return [min(stop, self._end) for stop in range(start + size, last + size, size)]

    def batches(self, pool: ThreadPoolExecutor, start: int, stops: Sequence[int]) -> Future[list[Batch | Exception]]:
        """Queue the windows of consecutive batches, and the task that slices the batches.

        The first batch begins at sample ``start``. ``stops`` has the exclusive ends of the batches.
        """
        loader, found = self._loader, []
        for stop in stops:
            share = loader.virtual.share(stop - start)
            parts = self._parts(pool, start + share.start, start + share.stop)
            found.append((parts, loader.virtual.slices(stop - start)))
            start = stop
        return pool.submit(self._slice, found)

    def _parts(self, pool: ThreadPoolExecutor, start: int, stop: int) -> list[_Part]:
        """Queue the windows that have samples ``start … stop − 1`` of the epoch.

        Return each of these windows with the range of the samples in the window.
        """
        first = min(int(np.searchsorted(self._starts, start, side="right")), len(self._windows)) - 1
        last = max(int(np.searchsorted(self._starts, stop, side="left")) - 1, first)
        for done in [w for w in self._pending if w < first]:
            del self._pending[done]
        ahead = 1 if self._loader.tasks is None else self._loader.workers  # windows to queue beyond the last
        for w in range(first, min(last + 1 + ahead, len(self._windows))):
            if w not in self._pending and (w <= last or self._starts[w] < self._end):
                self._pending[w] = self._queue_window(pool, w)
        parts: list[_Part] = []
        for w in range(first, last + 1):
            window, low, high = self._pending[w], max(start - self._starts[w], 0), min(stop, self._starts[w + 1])
            high -= self._starts[w]
            if isinstance(window, RemoteWindow):
                low, high = window.position(low), window.position(high)
            parts.append((window, low, high))
        return parts

    def cancel(self) -> None:
        """Cancel the tasks of windows that readers have not yet returned."""
        for window in self._pending.values():
            if isinstance(window, RemoteWindow):
                window.cancel()

    def _queue_window(self, pool: ThreadPoolExecutor, w: int) -> Future[Batch] | RemoteWindow:
        loader, order = self._loader, (_WINDOW_ORDER, self._loader.seed, self.number, w)
        if loader.tasks is not None:
            chunks = tuple(self._windows[w])
            sizes = tuple(self._sizes[i] for i in chunks)
            seed = order if loader.shuffle else None
            task = WindowTask(self._source, loader.split, chunks, sizes, seed, self._own_samples(w))
            return RemoteWindow(loader.tasks, task)
        read = [pool.submit(loader.source.read, loader.split, i) for i in self._windows[w]]
        return pool.submit(_merge, read, order) if loader.shuffle else read[0]

    def _own_samples(self, w: int) -> Ranges:
        """Return the ranges of a window's samples that belong to this rank's shares of batches."""
        loader, at, window_end = self._loader, self._starts[w], min(self._starts[w + 1], self._end)
        found: list[tuple[int, int]] = [(0, 0)]
        of_batch = max(at - self._begin, 0) // loader.batch_size * loader.batch_size + self._begin
        for start in range(of_batch, window_end, loader.batch_size):
            share = loader.virtual.share(min(loader.batch_size, self._end - start))
            low, high = max(start + share.start, at), min(start + share.stop, window_end)
            if low < high:
                found.append((low - at, high - at))
        return np.array(found, np.int64)

    def _slice(self, batches: Sequence[tuple[list[_Part], Slices]]) -> list[Batch | Exception]:
        """Return the batches. If one fails, its error is the last entry, so that earlier batches are used first."""
        found: list[Batch | Exception] = []
        try:
            found.extend(starmap(self._batch, batches))
        except Exception as error:
            found.append(error)
        return found

    def _batch(self, parts: Sequence[_Part], slices: Slices) -> Batch:
        batch = merge_batches([(window.result(), start, stop) for window, start, stop in parts])
        if self._loader.transform is not None:
            batch = self._loader.transform(batch)
        if self._loader.virtual.total > 1:  # bits of products may depend on the alignment, which depends on the rank
            batch = batch.map_columns(batch.sparse, lambda t: t if t.data_ptr() % 64 == 0 else t.clone())
        if slices is not None:
            batch = replace(batch, slices=slices)
        return batch.pin_memory() if self._loader.pin_memory else batch


def _merge(chunks: list[Future[Batch]], order: tuple[int, ...]) -> Batch:
    return merge_window([chunk.result() for chunk in chunks], order)
