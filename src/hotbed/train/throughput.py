"""Measure training: samples per second, waits for batches, balance of ranks, traffic of tiers."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TypeVar

import torch
from torch import nn

from hotbed import machine
from hotbed.batch import Batch, ModelParallelInput
from hotbed.embed import Distributed, collections_of
from hotbed.store import Traffic

T = TypeVar("T")

SETTLING_STEPS = 5
"""Number of first steps that throughput excludes, because they compile kernels and allocate buffers."""
WINDOW_S = 1.0
"""Seconds between two checks for busy cores."""
BUSY_SHARE = 0.25
"""Share of a window that threads may wait for a core before the cores count as busy."""

_log = logging.getLogger("hotbed")


class Clock:
    """Count training samples, their seconds, and the seconds of waits for batches."""

    def __init__(self) -> None:
        # batches: number of steps and evaluated batches; the watchdog detects a hang if this number does not grow.
        # drawn, ids: number of samples yielded for training, and number of their ids by feature. A `ModelParallelInput`
        # is not counted, because it has samples of other ranks. A resumed run counts from 0.
        # paused_s: seconds of evaluations and of waits for checkpoints, which throughput excludes.
        self.batches, self.drawn, self.ids, self.paused_s = 0, 0, Counter[str](), 0.0
        self._mark = time.perf_counter()
        self._steps = 0
        # [seconds, samples, seconds of waits] of the settling steps, of later steps, and since the last `record`
        self._settling, self._settled, self._recent = [0.0, 0, 0.0], [0.0, 0, 0.0], [0.0, 0, 0.0]
        self._waited = 0.0
        self._depths: list[float] = []
        self._threads = _ThreadWatch()

    def start(self) -> None:
        """Start counting, and check the number of compute threads."""
        self._threads.start()
        self._mark = time.perf_counter()

    def tick(self, samples: int) -> None:
        """Count a finished step."""
        self.count()
        now = time.perf_counter()
        self._steps += 1
        for total in (self._settling if self._steps <= SETTLING_STEPS else self._settled, self._recent):
            total[0] += now - self._mark
            total[1] += samples
            total[2] += self._waited
        self._threads.tick()
        self._mark, self._waited = now, 0.0

    def waited_for(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield batches; count the seconds of waits and the number of ready batches (`Loader.queue_depth`)."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._waited += time.perf_counter() - start
            depth: float | None = getattr(batches, "queue_depth", None)
            self._depths += [] if depth is None else [depth]
            if isinstance(batch, Batch) and not isinstance(batch.sparse, ModelParallelInput):
                self.drawn += len(batch)
                self.ids.update(batch.sparse.ids_by_feature)
            yield batch

    def count(self) -> None:
        """Count a finished batch."""
        self.batches += 1

    @contextmanager
    def paused(self) -> Generator[None]:
        """Exclude the time inside the context from throughput."""
        start = time.perf_counter()
        yield
        now = time.perf_counter()
        self.paused_s += now - start
        self._mark, self._waited = now, 0.0

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of the first steps (with compilation), later steps, their waits for batches, and pauses."""
        seconds, _, waited = self._settled
        return {
            "first_steps_s": self._settling[0],
            "steps_s": seconds - waited,
            "waited_s": waited,
            "paused_s": self.paused_s,
        }

    def seconds_for(self, steps: int) -> float | None:
        """Estimate the seconds of ``steps`` further steps with pauses; return None during the settling steps."""
        settled = self._steps - SETTLING_STEPS
        return (self._settled[0] / settled + self.paused_s / self._steps) * steps if settled > 0 else None

    @property
    def samples_per_s(self) -> float:
        """Samples per second of the steps after the settling steps, or of the settling steps if there are no more."""
        seconds, samples, _ = self._whole
        return samples / seconds if seconds else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time of these steps that training waited for batches."""
        seconds, _, waited = self._whole
        return waited / seconds if seconds else 0.0

    def record(self, largest: Callable[..., list[float]]) -> dict[str, float]:
        """Return log entries for the steps since the last record; all ranks must call this."""
        seconds, _, waited = self._recent
        depth = sum(self._depths) / len(self._depths) if self._depths else None
        self._recent, self._depths = [0.0, 0, 0.0], []
        share, least = largest(waited / seconds if seconds else 0.0, -(depth or 0.0))
        return {"stall_share": share} | ({} if depth is None else {"queue_depth": -least})

    @property
    def _whole(self) -> list[float]:
        return self._settled if self._settled[1] else self._settling


class Balance:
    """Compare the load of a distributed model's ranks since the last record."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model if isinstance(model, Distributed) else None
        self._last = [0.0] * 4

    def record(self) -> dict[str, float]:
        """Return log entries on the load of the ranks; all ranks must call this."""
        if self._model is None:
            return {}
        wire = self._model.wire
        replicas = wire.replicas
        syncs = (0.0, 0.0) if replicas is None else (replicas.sync_s, float(replicas.sync_bytes))
        now = [float(wire.load.lookups), wire.load.seconds, *syncs]
        collections = collections_of(self._model).values()
        own = [float(sum(c.nbytes for c in collections)), *(a - b for a, b in zip(now, self._last, strict=True))]
        self._last = now
        link = self._model.link
        values = torch.tensor(own, dtype=torch.float64, device=link.device)
        columns: list[list[float]] = link.all_gather("work of ranks", values).wait().T.tolist()
        found = {
            f"imbalance_{name}": max(of) * len(of) / sum(of) if sum(of) else 1.0
            for name, of in zip(("bytes", "lookups", "time"), columns, strict=False)
        }
        if replicas is not None and not replicas.exact:
            found |= {"sync_s": max(columns[3]), "sync_bytes": sum(columns[4])}
        return found


class TierCounters:
    """Count reads and writes of this rank's caches and files."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last = Traffic()

    @property
    def total(self) -> Traffic:
        """All traffic so far."""
        return sum((c.traffic for c in collections_of(self._model).values()), Traffic())

    def record(self) -> dict[str, float]:
        """Return the traffic since the last record, or an empty dict if all rows are in device memory."""
        now = self.total
        last, self._last = self._last, now
        return {} if now == Traffic() else {"hit_rate": (now - last).hit_rate, **asdict(now - last)}


class _ThreadWatch:
    """Warn once about more threads than cores, and once about cores that other processes keep busy."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._waited = 0.0

    def start(self) -> None:
        """Check the number of threads, and start the watch if there are several."""
        threads, cores = torch.get_num_threads(), machine.usable_cores()
        if threads > cores:
            _log.warning(
                "torch uses %d threads, but this process may use %d cores, so threads wait for each other. Call "
                "torch.set_num_threads(%d), or set OMP_NUM_THREADS=%d",
                *(threads, cores, cores, cores),
            )
        if threads > 1 and not machine.USER_DECIDED:
            self._start_window()

    def tick(self) -> None:
        """Warn at the end of a window if threads waited for cores; the watch ends with the warning."""
        if self._since is None or (passed := time.perf_counter() - self._since) < WINDOW_S:
            return
        before = self._waited
        self._start_window()
        waited = self._waited - before
        if waited <= BUSY_SHARE * torch.get_num_threads() * passed:
            return
        self._since = None
        fix = "Stop the other processes, or set OMP_NUM_THREADS to the number of free cores"
        if machine.TORCH_CAME_FIRST:
            settings = " ".join(f"{name}={value}" for name, value in machine.SPINNING.items())
            fix = (
                "Import hotbed before torch, or set "
                f"{settings}, because torch's threads now spin at barriers, which can be 50 times slower"
            )
        _log.warning(
            "other processes keep the cores busy: threads of this process waited %.1f s for a core within %.1f s. %s",
            *(waited, passed, fix),
        )

    def _start_window(self) -> None:
        """Start a window if the system counts waits of threads."""
        waited = machine.waited_for_cores_s()
        self._since = None if waited is None else time.perf_counter()
        self._waited = waited or 0.0
