"""Make batches of a source in a reproducible order, read ahead by threads.

*Theory of operation.* The order of an epoch is fixed before anything is read: chunks in order, or for a shuffled epoch
chunks in a random order, taken ``window`` at a time, the samples of a window in a random order. All randomness comes
from (seed, epoch, window), so it depends neither on threads nor on where the epoch was entered. Batch j is the samples
j·B … (j + 1)·B − 1 of that order, whatever windows they fall in.

The work is a queue of futures on one thread pool: *read a chunk*, *merge the chunks of a window*, *cut a batch*. A task
only waits for tasks that were queued before it, and the pool starts tasks in the order they were queued, so the oldest
running task never waits for one that has not started: no deadlock at any number of threads. Tasks are queued a few
batches ahead of the consumer, which bounds memory: at most two windows more than the one being consumed, and
``prefetch`` batches.

*The inner loop* cuts, joins and permutes batches. NumPy does the copying: it lets other threads run and, unlike torch,
starts no threads of its own, so the loader's threads do not take cores from the training step. Every column is written
once, where it ends up: fresh memory is what costs here, in page faults (3 × the time of the copies where whole windows
were copied twice).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotbed.batch import Batch
from hotbed.data.source import Source
from hotbed.errors import SpecError, did_you_mean
from hotbed.jagged import Jagged

Array: TypeAlias = NDArray[Any]
Order: TypeAlias = NDArray[np.int64]
BatchSlice: TypeAlias = tuple[Batch, int, int]
"""Samples ``start … stop − 1`` of a batch."""


def join(parts: Sequence[BatchSlice], order: Order | None = None) -> Batch:
    """Make a new batch of the samples of all parts, which have the same columns.

    Parameters
    ----------
    parts
        Parts of batches in CPU memory, ``B`` samples in all.
    order
        A permutation ``[B]`` of the joined samples; default: as they are.
    """
    first = parts[0][0]

    def column(of: Callable[[Batch], Tensor | None]) -> Tensor | None:
        pieces = [t.numpy()[start:stop] for batch, start, stop in parts if (t := of(batch)) is not None]
        return torch.from_numpy(_joined(pieces, order)) if pieces else None

    extra = {name: column(lambda batch, name=name: batch.extra[name]) for name in first.extra}
    return Batch(
        sparse=_join_sparse(parts, order),
        dense=column(lambda batch: batch.dense),
        labels=column(lambda batch: batch.labels),
        weights=column(lambda batch: batch.weights),
        extra={name: t for name, t in extra.items() if t is not None},
    )


def _join_sparse(parts: Sequence[BatchSlice], order: Order | None) -> Jagged:
    first = parts[0][0].sparse
    size = sum(stop - start for _, start, stop in parts)
    spans = [_id_spans(parts, i) for i in range(len(first.names))]
    starts = (0, *np.cumsum([sum(b - a for a, b in span) for span in spans]).tolist())
    values = np.empty(starts[-1], dtype=first.values.numpy().dtype)
    weights = None if first.weights is None else np.empty(starts[-1], dtype=first.weights.numpy().dtype)
    offsets: list[Array] = []
    for i, (k, span) in enumerate(zip(first.fixed, spans, strict=True)):
        ids_order, width = order, k or 1
        if k is None:
            lengths = np.concatenate([np.diff(_offsets(b.sparse, i)[start : stop + 1]) for b, start, stop in parts])
            if order is not None:
                ids_order = _order_of_ids(lengths, order)
                lengths = lengths[order]
            offsets.append(np.concatenate([[0], np.cumsum(lengths)]))
        for out, of in ((values, _values), (weights, _weights)):
            if out is not None:
                pieces = [of(b.sparse)[a:z] for (b, _, _), (a, z) in zip(parts, span, strict=True)]
                _joined(pieces, ids_order, out[starts[i] : starts[i + 1]], width)
    return Jagged(
        first.names,
        torch.from_numpy(values),
        batch_size=size,
        fixed=first.fixed,
        offsets=torch.from_numpy(np.stack(offsets)) if offsets else None,
        weights=None if weights is None else torch.from_numpy(weights),
        starts=starts,
    )


def _joined(pieces: Sequence[Array], order: Order | None, out: Array | None = None, width: int = 1) -> Array:
    """Concatenate and permute into ``out``; ``width`` consecutive elements move as one."""
    if out is None:
        out = np.empty((sum(map(len, pieces)), *pieces[0].shape[1:]), dtype=pieces[0].dtype)
    if order is None:
        return np.concatenate(pieces, out=out)
    whole = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
    if width > 1:
        whole, target = whole.reshape(-1, width), out.reshape(-1, width)
    else:
        target = out
    # mode="clip" lets NumPy write into `out` without a buffer; a permutation has nothing to clip.
    np.take(whole, order, axis=0, out=target, mode="clip")
    return out


def _order_of_ids(lengths: Array, order: Order) -> Order:
    """Order of the ids of bags of these lengths ``[B]``, when the bags are permuted."""
    moved = lengths[order]
    first = (np.cumsum(lengths) - lengths)[order]
    return np.arange(int(moved.sum())) + np.repeat(first - (np.cumsum(moved) - moved), moved)


def _id_spans(parts: Sequence[BatchSlice], i: int) -> list[tuple[int, int]]:
    """Per part, where the ids of feature ``i`` are in the values of its batch."""
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
        Threads that read, shuffle and cut.
    prefetch
        Batches made ahead of the consumer.
    pin_memory
        Put batches into page-locked memory. Default: where there is a CUDA device.
    transform
        Applied to every batch, in the threads; it must be safe to call from several at once.
    rank, world_size
        Of ``world_size`` loaders with equal arguments, that of ``rank`` gives its share of every batch: neighbouring
        samples, as equally many as can be; none, where a batch has fewer samples than there are loaders.

    Raises
    ------
    SpecError
        If an argument is out of range, the source has no such split, or the split has no sample.
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
        epoch, start = _Epoch(self, self._epoch), self._consumed
        end = self.samples - (self.samples % self.batch_size if self.drop_last else 0)
        with ThreadPoolExecutor(self.workers, thread_name_prefix="hotbed-loader") as pool:
            ahead: deque[tuple[Future[Batch], int]] = deque()
            try:
                while start < end or ahead:
                    while start < end and len(ahead) < self.prefetch:
                        stop = min(start + self.batch_size, end)
                        share = share_of(stop - start, self.rank, self.world_size)
                        ahead.append((epoch.batch(pool, start + share.start, start + share.stop), stop))
                        start = stop
                    future, stop = ahead.popleft()
                    batch = future.result()
                    # Set before the yield: inside the loop's body the position counts the batch that was just given.
                    over = stop >= end
                    self._epoch, self._consumed, self._fresh = epoch.number + over, 0 if over else stop, over
                    yield batch
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

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


class _Epoch:
    """The order of one epoch, and the tasks that make its batches. Used by the consumer's thread only."""

    def __init__(self, loader: Loader, number: int) -> None:
        self.number = number
        self._loader = loader
        sizes = loader.source.chunks(loader.split)
        chunks = list(range(len(sizes)))
        per_window = 1
        if loader.shuffle:
            chunks = np.random.default_rng((_CHUNK_ORDER, loader.seed, number)).permutation(len(sizes)).tolist()
            per_window = loader.window
        self._windows = [chunks[i : i + per_window] for i in range(0, len(chunks), per_window)]
        self._starts = [0, *accumulate(sum(sizes[c] for c in window) for window in self._windows)]
        self._pending: dict[int, Future[Batch]] = {}

    def batch(self, pool: ThreadPoolExecutor, start: int, stop: int) -> Future[Batch]:
        """Queue the batch of samples ``start … stop − 1`` of the epoch, perhaps none, and the windows it needs."""
        first = min(int(np.searchsorted(self._starts, start, side="right")), len(self._windows)) - 1
        last = max(int(np.searchsorted(self._starts, stop, side="left")) - 1, first)
        for done in [w for w in self._pending if w < first]:
            del self._pending[done]
        for w in range(first, min(last + 2, len(self._windows))):  # one window more than needed, to read ahead
            if w not in self._pending:
                self._pending[w] = self._queue_window(pool, w)
        parts = [
            (self._pending[w], max(start - self._starts[w], 0), min(stop, self._starts[w + 1]) - self._starts[w])
            for w in range(first, last + 1)
        ]
        return pool.submit(self._cut, parts)

    def _queue_window(self, pool: ThreadPoolExecutor, w: int) -> Future[Batch]:
        chunks = [pool.submit(self._loader.source.read, self._loader.split, i) for i in self._windows[w]]
        return pool.submit(self._merge, w, chunks) if self._loader.shuffle else chunks[0]

    def _merge(self, w: int, chunks: list[Future[Batch]]) -> Batch:
        parts = [(batch := chunk.result(), 0, len(batch)) for chunk in chunks]
        rng = np.random.default_rng((_WINDOW_ORDER, self._loader.seed, self.number, w))
        # The whole window at once: taking a batch at a time from an unshuffled window takes 5 times as long, because
        # each column falls out of the cache between batches (2 cores of AMD EPYC (Zen 5), 26 columns × 524,288).
        return join(parts, rng.permutation(sum(stop for _, _, stop in parts)))

    def _cut(self, parts: list[tuple[Future[Batch], int, int]]) -> Batch:
        batch = join([(window.result(), start, stop) for window, start, stop in parts])
        if self._loader.transform is not None:
            batch = self._loader.transform(batch)
        return batch.pin_memory() if self._loader.pin_memory else batch
