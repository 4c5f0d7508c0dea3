"""Measure training: samples per second, how evenly ranks share the load of tables, traffic of caches and files."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import nn

from hotbed.embed import Distributed, collections_of
from hotbed.store import Traffic
from hotbed.train.threads import ThreadWatch

SETTLING_STEPS = 5
"""First steps that the rate leaves out: kernels are compiled and buffers allocated in them."""


class Clock:
    """Count training samples and the seconds they took.

    Attributes
    ----------
    batches
        Steps taken, and batches evaluated: what tells that a process does not hang.
    """

    def __init__(self) -> None:
        self.batches = 0
        self._mark = time.perf_counter()
        self._steps = 0
        # Seconds and samples of the settling steps, and of those after them.
        self._settling, self._settled = [0.0, 0], [0.0, 0]
        self._threads = ThreadWatch()

    def start(self) -> None:
        """Count from now on, and watch the threads that compute."""
        self._threads.start()
        self._mark = time.perf_counter()

    def tick(self, samples: int) -> None:
        """Count a step that is over."""
        self.count()
        now = time.perf_counter()
        self._steps += 1
        total = self._settling if self._steps <= SETTLING_STEPS else self._settled
        total[0] += now - self._mark
        total[1] += samples
        self._threads.tick()
        self._mark = now

    def count(self) -> None:
        """Count a batch that is finished."""
        self.batches += 1

    def stop(self) -> None:
        """End the watch of the threads."""
        self._threads.stop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave out the time of the body."""
        yield
        self._mark = time.perf_counter()

    @property
    def samples_per_s(self) -> float:
        """Rate without the settling steps; where there were no others, theirs."""
        seconds, samples = self._settled if self._settled[1] else self._settling
        return samples / seconds if seconds else 0.0


_LOADS = ("bytes", "lookups", "time")


class Balance:
    """Compare the load of a distributed model's ranks since the last record; of any other model, nothing.

    Parameters
    ----------
    model
        As it is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model if isinstance(model, Distributed) else None
        self._last = [0.0] * 4

    def record(self) -> dict[str, float]:
        """Return entries for a record of training; all ranks must call this.

        Returns
        -------
        dict
            ``imbalance_bytes``, ``imbalance_lookups`` and ``imbalance_time``: the largest rank's load over the mean,
            of bytes that tables and moments take, of rows read, and of time spent on reading and updating them (1 where
            nothing was done). Of replicas that are averaged also ``sync_s``, seconds of the slowest rank, and
            ``sync_bytes``, sent by all ranks.
        """
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
        found = {f"imbalance_{name}": _over_mean(of) for name, of in zip(_LOADS, columns, strict=False)}
        if replicas is not None and not replicas.exact:
            found |= {"sync_s": max(columns[3]), "sync_bytes": sum(columns[4])}
        return found


class TierCounters:
    """Count what caches and files of this rank's tables do, in all and since the last record.

    Parameters
    ----------
    model
        As it is trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._last = Traffic()

    @property
    def total(self) -> Traffic:
        """What they did so far."""
        return sum((c.traffic for c in collections_of(self._model).values()), Traffic())

    def record(self) -> dict[str, float]:
        """Return entries for a record of training; none if all rows are in the device's memory."""
        now = self.total
        last, self._last = self._last, now
        return {} if now == Traffic() else {"hit_rate": (now - last).hit_rate, **asdict(now - last)}


def _over_mean(values: list[float]) -> float:
    return max(values) * len(values) / sum(values) if sum(values) else 1.0
