"""Make batches of a source in a reproducible order, read ahead by threads or by readers elsewhere.

*Theory of operation.* The order of an epoch is fixed before anything is read: chunks in order, or for a shuffled epoch
chunks in a random order, taken ``window`` at a time, the samples of a window in a random order. All randomness comes
from (seed, epoch, window), so it depends neither on threads nor on where the epoch was entered. Batch j is the samples
j·B … (j + 1)·B − 1 of that order, whatever windows they fall in.

The work is a queue of futures on one thread pool: *read a chunk*, *merge the chunks of a window*, *cut batches*. A task
only waits for tasks that were queued before it, and the pool starts tasks in the order they were queued, so the oldest
running task never waits for one that has not started: no deadlock at any number of threads. Tasks are queued a few
batches ahead of the consumer, which bounds memory: at most two windows more than the one being consumed, and
``prefetch`` batches. Handing a result from thread to thread takes longer than cutting a batch of 1,024 samples, so a
task cuts as many neighbouring batches of a window as have 16,384 samples together, and then two tasks are ahead.

With an ``executor`` a window is one task of it (`hotbed.data.readers`): it reads the chunks, merges them, and returns
this rank's samples. ``workers`` windows are asked for beyond those that the next batches need, and no more, so a pool
is never ahead of the consumer by more than that; batches are cut here.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import accumulate, islice
from typing import TypeAlias

import numpy as np
import torch

from hotbed.batch import Batch
from hotbed.data.executors import Tasks
from hotbed.data.join import join
from hotbed.data.readers import Ranges, RemoteWindow, WindowTask, merge_window, packed_source
from hotbed.data.source import Source
from hotbed.errors import SpecError, did_you_mean

_CUTTERS = 2
"""Threads that cut batches where others read."""
_CUT_TOGETHER = 16_384
"""Samples."""


def share_of(samples: int, rank: int, world_size: int) -> slice:
    """Which samples of a batch are a rank's; wherever batches are divided, so that runs can change who divides them."""
    return slice(samples * rank // world_size, samples * (rank + 1) // world_size)


class Loader:
    """Iterate over a split of a source in batches; one iteration is one epoch.

    An iterator that is left early (``break``) leaves no thread behind, and its epoch counts as over: the next iteration
    starts the next epoch. To go on where it stopped, pass `state_dict` to `load_state_dict`, of this or another loader.

    Parameters
    ----------
    source
        Where the samples are.
    split
        Which split of it.
    batch_size
        Samples per batch.
    shuffle
        Whether every epoch has an order of its own.
    seed
        Seed of the shuffling.
    drop_last
        Leave out a last batch that is shorter than ``batch_size``.
    window
        Chunks that are shuffled together. More mixes better and takes more memory: about three windows are held.
    workers
        Threads that read, shuffle and cut; with an executor the windows that are asked of it ahead, so how many of its
        workers this loader keeps busy.
    prefetch
        Batches made ahead of the consumer, at least; of small ones those of up to 32,768 samples.
    executor
        What reads in the place of threads: any `concurrent.futures.Executor`, or what `hotbed.data.open_readers`
        gives, which also repeats what workers were doing that died. Several loaders may share it, and it stays open.
    pin_memory
        Put batches into page-locked memory. Default: where there is a CUDA device.
    transform
        Applied to every batch, in the threads; it must be safe to call from several at once.
    rank, world_size
        Of ``world_size`` loaders with equal arguments, that of ``rank`` gives its share of every batch: neighbouring
        samples, as equally many as can be; none, where a batch has fewer samples than there are loaders.

    Attributes
    ----------
    queue_depth
        Of the ``prefetch`` batches, those that were ready when the consumer asked for the last one; 0 where it waited.

    Raises
    ------
    SpecError
        If an argument is out of range, the source has no such split, or the split has no sample.
    WorkerError
        When iterated, if readers die again and again.
    """

    def __init__(
        self,
        source: Source,
        split: str,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        window: int = 8,
        workers: int = 2,
        prefetch: int = 4,
        pin_memory: bool | None = None,
        transform: Callable[[Batch], Batch] | None = None,
        rank: int = 0,
        world_size: int = 1,
        executor: Executor | Tasks | None = None,
    ) -> None:
        numbers = {"batch_size": batch_size, "window": window, "workers": workers, "prefetch": prefetch}
        for name, value in numbers.items():
            if value < 1:
                raise SpecError(f"{name} is {value:,}, must be at least 1")
        if world_size < 1:
            raise SpecError(f"world_size is {world_size:,}, must be at least 1")
        if not 0 <= rank < world_size:
            raise SpecError(f"rank is {rank:,}, must be between 0 and world_size − 1, which is {world_size - 1:,}")
        if seed < 0:
            raise SpecError(f"seed is {seed:,}, must not be negative")
        self.source = source
        self.split = split
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.window = window
        self.workers = workers
        self.prefetch = prefetch
        self.pin_memory = torch.cuda.is_available() if pin_memory is None else pin_memory
        self.transform = transform
        self.rank = rank
        self.world_size = world_size
        self.tasks = Tasks.of(executor) if isinstance(executor, Executor) else executor
        self.queue_depth = 0
        sizes = source.chunks(split)
        self.samples = sum(sizes)
        self._chunks_digest = hashlib.sha256(",".join(map(str, sizes)).encode()).hexdigest()[:16]
        if self.samples == 0:
            raise SpecError(f"split '{split}' has no sample")
        self._epoch = 0
        self._consumed = 0
        self._fresh = True  # whether the next iteration starts at the position, rather than at the next epoch

    def __len__(self) -> int:
        """Count the batches of a whole epoch."""
        full, rest = divmod(self.samples, self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        if not self._fresh:
            self._epoch, self._consumed = self._epoch + 1, 0
        self._fresh = False
        start = self._consumed
        end = self.samples - (self.samples % self.batch_size if self.drop_last else 0)
        epoch = _Epoch(self, self._epoch, start, end)
        threads = self.workers if self.tasks is None else _CUTTERS
        with ThreadPoolExecutor(threads, thread_name_prefix="hotbed-loader") as pool:
            ahead: deque[tuple[Future[list[Batch | Exception]], int]] = deque()  # task, and where its next batch ends
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
                    # Set before the yield: inside the loop's body the position counts the batch that was just given.
                    over = stop >= end
                    self._epoch, self._consumed, self._fresh = epoch.number + over, 0 if over else stop, over
                    yield batch
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                epoch.cancel()

    # -- position --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, int | bool | str]:
        """Position in the data, as plain values: the epoch, and the samples of it that the consumer was given.

        The other entries say what the order depends on; a loader must have the same to go on from here.
        """
        return {"epoch": self._epoch, "consumed": self._consumed, **self._order()}

    def load_state_dict(self, state: Mapping[str, int | bool | str]) -> None:
        """Go on from a position: the next iteration gives exactly the batches that were left.

        Raises
        ------
        SpecError
            If a key is missing or unknown, or the position belongs to another order of samples.
        """
        order = self._order()
        known = ["epoch", "consumed", *order]
        for key in state:
            if key not in known:
                raise SpecError(f"the loader's position has no key '{key}'{did_you_mean(key, known)}")
        for key in known:
            if key not in state:
                raise SpecError(f"the loader's position lacks '{key}'; pass what state_dict() returned")
        for key, value in order.items():
            if state[key] != value:
                if key == "chunks":
                    raise SpecError(
                        f"the position was saved with other chunks than this source's (digest of their sizes "
                        f"{state[key]}, here {value}), so its order of samples is another; make the source with the "
                        f"same files and chunk_samples, or start a new epoch"
                    )
                raise SpecError(
                    f"the position was saved with {key} {state[key]!r}, but this loader has {value!r}, so its order of "
                    f"samples is another; make the loader with {key}={state[key]!r}, or start a new epoch"
                )
        epoch, consumed = int(state["epoch"]), int(state["consumed"])
        if epoch < 0 or not 0 <= consumed <= self.samples:
            raise SpecError(f"position epoch {epoch:,}, consumed {consumed:,} is not within {self.samples:,} samples")
        self._epoch, self._consumed, self._fresh = epoch, consumed, True

    def _order(self) -> dict[str, int | bool | str]:
        order: dict[str, int | bool | str] = {"split": self.split, "samples": self.samples, "shuffle": self.shuffle}
        if self.shuffle:
            order |= {"seed": self.seed, "window": self.window, "chunks": self._chunks_digest}
        return order


# First in the seeds of generators. At the end a 0 would be lost: NumPy seeds (s, e) and (s, e, 0) alike.
_CHUNK_ORDER, _WINDOW_ORDER = 1, 2


_Part: TypeAlias = tuple["Future[Batch] | RemoteWindow", int, int]
"""Samples ``start … stop − 1`` of a window."""


class _Epoch:
    """The order of one epoch, and the tasks that make its batches. Used by the consumer's thread only."""

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
        self._source = b"" if loader.tasks is None else packed_source(loader.source)

    def stops(self, start: int) -> list[int]:
        """Where the batches end that are cut by one task: neighbours from ``start`` on, which begin in one window."""
        size = self._loader.batch_size
        window = self._starts[int(np.searchsorted(self._starts, start, side="right"))]
        last = min(window, start + max(_CUT_TOGETHER, size), self._end)
        return [min(stop, self._end) for stop in range(start + size, last + size, size)]

    def batches(self, pool: ThreadPoolExecutor, start: int, stops: Sequence[int]) -> Future[list[Batch | Exception]]:
        """Queue neighbouring batches from sample ``start`` on, which end before ``stops``, and their windows."""
        loader, found = self._loader, []
        for stop in stops:
            share = share_of(stop - start, loader.rank, loader.world_size)
            found.append(self._parts(pool, start + share.start, start + share.stop))
            start = stop
        return pool.submit(self._cut, found)

    def _parts(self, pool: ThreadPoolExecutor, start: int, stop: int) -> list[_Part]:
        """Samples ``start … stop − 1`` of the epoch, perhaps none, in the windows that have them; these are queued."""
        first = min(int(np.searchsorted(self._starts, start, side="right")), len(self._windows)) - 1
        last = max(int(np.searchsorted(self._starts, stop, side="left")) - 1, first)
        for done in [w for w in self._pending if w < first]:
            del self._pending[done]
        ahead = 1 if self._loader.tasks is None else self._loader.workers  # windows more than needed
        for w in range(first, min(last + 1 + ahead, len(self._windows))):
            if w not in self._pending and (w <= last or self._starts[w] < self._end):
                self._pending[w] = self._queue_window(pool, w)
        return [
            self._part(w, max(start - self._starts[w], 0), min(stop, self._starts[w + 1]) - self._starts[w])
            for w in range(first, last + 1)
        ]

    def cancel(self) -> None:
        """Give up the windows that readers were asked for."""
        for window in self._pending.values():
            if isinstance(window, RemoteWindow):
                window.cancel()

    def _part(self, w: int, start: int, stop: int) -> _Part:
        window = self._pending[w]
        if isinstance(window, RemoteWindow):
            return window, window.place(start), window.place(stop)
        return window, start, stop

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
        """Samples of a window that are this rank's: its share of every batch."""
        loader, at, window_end = self._loader, self._starts[w], min(self._starts[w + 1], self._end)
        found: list[tuple[int, int]] = [(0, 0)]
        of_batch = max(at - self._begin, 0) // loader.batch_size * loader.batch_size + self._begin
        for start in range(of_batch, window_end, loader.batch_size):
            share = share_of(min(loader.batch_size, self._end - start), loader.rank, loader.world_size)
            low, high = max(start + share.start, at), min(start + share.stop, window_end)
            if low < high:
                found.append((low - at, high - at))
        return np.array(found, np.int64)

    def _cut(self, batches: Sequence[list[_Part]]) -> list[Batch | Exception]:
        """Make the batches; an error ends the list, so that those before it are given away first."""
        found: list[Batch | Exception] = []
        try:
            found.extend(map(self._batch, batches))
        except Exception as error:
            found.append(error)
        return found

    def _batch(self, parts: Sequence[_Part]) -> Batch:
        batch = join([(window.result(), start, stop) for window, start, stop in parts])
        if self._loader.transform is not None:
            batch = self._loader.transform(batch)
        return batch.pin_memory() if self._loader.pin_memory else batch


def _merge(chunks: list[Future[Batch]], order: tuple[int, ...]) -> Batch:
    return merge_window([chunk.result() for chunk in chunks], order)
