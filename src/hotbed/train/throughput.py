"""Measure training: samples per second, waits for batches, how evenly ranks work, and traffic of memory tiers."""

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
from hotbed.batch import Batch
from hotbed.embed import Distributed, collections_of
from hotbed.store import Traffic

T = TypeVar("T")

SETTLING_STEPS = 5
"""Throughput excludes this many first steps, because they compile kernels and allocate buffers."""
WINDOW_S = 1.0
"""Seconds between two checks whether other processes keep the cores busy."""
BUSY_SHARE = 0.25
"""Cores count as busy if threads wait for a core in more than this share of the time."""

_log = logging.getLogger("hotbed")


class Clock:
    """Count training samples, the seconds of training, and the seconds in which training waited for batches."""

    def __init__(self) -> None:
        # batches: number of steps and evaluated batches. The watchdog ends a process if this number stops growing.
        # drawn, ids: number of samples that were yielded for training, and number of their ids by feature. A resumed
        # run starts at 0.
        # paused_s: seconds of evaluations and of waits for checkpoints. Throughput excludes these seconds.
        self.batches, self.drawn, self.ids, self.paused_s = 0, 0, Counter[str](), 0.0
        self._mark = time.perf_counter()
        self._steps = 0
        # [seconds, samples, seconds of waits for batches] of the first `SETTLING_STEPS` steps, of the later steps, and
        # of the steps since the last `record`
        self._settling, self._settled, self._recent = [0.0, 0, 0.0], [0.0, 0, 0.0], [0.0, 0, 0.0]
        self._waited = 0.0
        self._depths: list[float] = []
        self._threads = _ThreadWatch()

    def start(self) -> None:
        """Start the clock, and warn if there are more compute threads than cores."""
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
        """Yield batches; add up the seconds of waits for a batch, and note how many batches are ready each time.

        `Loader.queue_depth` is the number of batches that are ready.
        """
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
            if isinstance(batch, Batch):
                self.drawn += len(batch)
                self.ids.update(batch.sparse.ids_by_feature)
            yield batch

    def count(self) -> None:
        """Count a batch that was trained or evaluated."""
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
        """Seconds by activity: first steps (with compilation), later steps, waits of the later steps, and pauses."""
        seconds, _, waited = self._settled
        return {
            "first_steps_s": self._settling[0],
            "steps_s": seconds - waited,
            "waited_s": waited,
            "paused_s": self.paused_s,
        }

    def seconds_for(self, steps: int) -> float | None:
        """Estimate the seconds that ``steps`` further steps take, including pauses for evaluations and checkpoints.

        Return None during the first `SETTLING_STEPS` steps, which are slower than later steps.
        """
        settled = self._steps - SETTLING_STEPS
        return (self._settled[0] / settled + self.paused_s / self._steps) * steps if settled > 0 else None

    @property
    def samples_per_s(self) -> float:
        """Samples per second without the first `SETTLING_STEPS` steps, unless there are no further steps."""
        seconds, samples, _ = self._whole
        return samples / seconds if seconds else 0.0

    @property
    def stall_share(self) -> float:
        """Share of the time in which training waited for batches, in the same steps that `samples_per_s` counts."""
        seconds, _, waited = self._whole
        return waited / seconds if seconds else 0.0

    def record(self, largest: Callable[..., list[float]]) -> dict[str, float]:
        """Return log entries for the steps since the last record; all ranks must call this.

        ``largest`` returns the maximum over ranks of each argument.
        """
        seconds, _, waited = self._recent
        depth = sum(self._depths) / len(self._depths) if self._depths else None
        self._recent, self._depths = [0.0, 0, 0.0], []
        share, least = largest(waited / seconds if seconds else 0.0, -(depth or 0.0))
        return {"stall_share": share} | ({} if depth is None else {"queue_depth": -least})

    @property
    def _whole(self) -> list[float]:
        return self._settled if self._settled[1] else self._settling


class Balance:
    """Compare how much work the ranks of a distributed model have done since the last record."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model if isinstance(model, Distributed) else None
        self._last = [0.0] * 4

    def record(self) -> dict[str, float]:
        """Return log entries, e.g. the largest time of a rank ÷ the mean time; all ranks must call this."""
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
    """Count reads and writes of this rank's caches and files of table rows."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last = Traffic()

    @property
    def total(self) -> Traffic:
        """Reads and writes since training started."""
        return sum((c.traffic for c in collections_of(self._model).values()), Traffic())

    def record(self) -> dict[str, float]:
        """Return hit rate, reads and writes since the last record, or an empty dict if all rows are on the device."""
        now = self.total
        last, self._last = self._last, now
        return {} if now == Traffic() else {"hit_rate": (now - last).hit_rate, **asdict(now - last)}


class _ThreadWatch:
    """Warn if there are more threads than cores, and warn once if other processes keep the cores busy."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._waited = 0.0

    def start(self) -> None:
        """Check the number of threads; if there are several, start to watch their waits."""
        threads, cores = torch.get_num_threads(), machine.usable_cores()
        if threads > cores:
            _log.warning(
                "torch uses %d threads, but this process may use %d cores, so threads wait for each other. Call "
                "torch.set_num_threads(%d), or set OMP_NUM_THREADS=%d",
                threads,
                cores,
                cores,
                cores,
            )
        if threads > 1 and not machine.USER_DECIDED:
            self._start_window()

    def tick(self) -> None:
        """Warn if threads waited for cores in the last `WINDOW_S` seconds; stop watching after the warning."""
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
                f"Import hotbed before torch, or set {settings}. Otherwise torch's threads spin while they wait for "
                "each other, which can be 50 times slower"
            )
        _log.warning(
            "other processes keep the cores busy: the threads of this process waited %.1f s for a core within %.1f s. "
            "%s",
            waited,
            passed,
            fix,
        )

    def _start_window(self) -> None:
        """Start a window of `WINDOW_S` seconds, if the system counts how long threads wait for cores."""
        waited = machine.waited_for_cores_s()
        self._since = None if waited is None else time.perf_counter()
        self._waited = waited or 0.0
