"""Lay operations of ranks out in time: threads and resources do one thing after the other, exchanges wait for all.

A rank's *threads* issue operations in a fixed order. An operation begins when its thread, the resource that it needs
and what it waits for are free; one that is `among` several ranks begins when the last of them is ready, and ends when
the one with most to send is done. Each resource serves one operation at a time, in the order in which they are given
to `run`: so no resource ever does more than it can, and no operation that gets shorter makes anything later (which
queues that choose what to serve next do not promise).

Ranks are a matrix of replicas × shards; ranks that are alike can be one column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Array = np.ndarray[Any, Any]

Among = Literal["rank", "shards", "replicas", "all"]
"""Who does something together: a rank by itself, a group with one copy of the tables, the copies of a tile, all."""
_AXES: dict[Among, tuple[int, ...]] = {"rank": (), "shards": (1,), "replicas": (0,), "all": (0, 1)}
THREADS = ("step", "prefetch", "all-reduce", "average")
"""Of a rank, as `hotbed.train.prefetch`, `hotbed.embed.dense_parallel` and `hotbed.embed.replicas` have them."""


@dataclass(frozen=True)
class Operation:
    """What a rank does."""

    name: str
    resource: str | None  # which it needs for itself; none for what waits only
    seconds: Array  # of each rank ``[M or 1, N or 1]``
    among: Among = "rank"


@dataclass(frozen=True)
class Event:
    """An operation of one rank, in seconds since the beginning."""

    rank: int
    thread: str
    name: str
    resource: str
    start: float
    seconds: float


class Timeline:
    """Clocks of ranks, their threads and resources.

    Attributes
    ----------
    busy
        By resource, seconds that each rank has used it ``[M, N]``.
    spent
        By operation, seconds of the thread "step" that it took, or that it was waited for.
    waited
        Seconds in which the thread "step" waited for other ranks, or for a resource.
    """

    def __init__(self, replicas: int, shards: int) -> None:
        self._shape = replicas, shards
        self._threads = {name: np.zeros(self._shape) for name in THREADS}
        self._free: dict[str, Array] = {}
        self.busy: dict[str, Array] = {}
        self.spent: dict[str, Array] = {}
        self.waited = np.zeros(self._shape)
        self._watched: Sequence[tuple[int, int, int]] = ()
        self.events: list[Event] = []

    def watch(self, ranks: Sequence[tuple[int, int, int]]) -> None:
        """Record events of these ranks from now on: number, replica and column of each; none: stop."""
        self._watched = ranks

    def run(self, operation: Operation, thread: str = "step") -> None:
        """Do an operation next in a thread."""
        if not operation.seconds.any():
            return
        own = np.broadcast_to(operation.seconds, self._shape)
        ready = self._threads[thread]
        start = ready
        if operation.resource is not None:
            start = np.maximum(start, self._free.setdefault(operation.resource, np.zeros(self._shape)))
        axes = _AXES[operation.among]
        end, others = start + own, np.zeros(1)
        if axes:
            start = np.broadcast_to(start.max(axes, keepdims=True), self._shape)
            others = own.max(axes, keepdims=True) - own  # what the slowest takes longer
            end = start + own.max(axes, keepdims=True)
        if operation.resource is not None:
            self._free[operation.resource] = end
            self.busy[operation.resource] = self.busy.get(operation.resource, 0.0) + own
        if thread == "step":
            self._add(operation.name, own)
            self.waited = self.waited + (start - ready) + others
        self._threads[thread] = end
        for rank, replica, shard in self._watched:
            begin, seconds = float(start[replica, shard]), float(own[replica, shard])
            if seconds:
                self.events.append(Event(rank, thread, operation.name, operation.resource or "", begin, seconds))

    def join(self, thread: str, other: str, name: str = "") -> None:
        """Let a thread wait until another has done all that it was given; the wait is called ``name``."""
        self.join_at(thread, self._threads[other], name)

    def join_at(self, thread: str, moment: Array, name: str = "") -> None:
        """Let a thread wait for moments of ranks."""
        ready = self._threads[thread]
        self._threads[thread] = np.maximum(ready, moment)
        if thread == "step" and name:
            self._add(name, self._threads[thread] - ready)

    def meet(self) -> None:
        """Let the step of all ranks wait for the last one."""
        ready = self._threads["step"]
        self._threads["step"] = np.full(self._shape, ready.max())
        self.waited = self.waited + (ready.max() - ready)

    def moment(self, thread: str = "step") -> Array:
        """When a thread of each rank has done all that it was given ``[M, N]``."""
        return self._threads[thread]

    def reset_counts(self) -> None:
        """Count `busy`, `spent` and `waited` from here on."""
        self.busy, self.spent, self.waited = {}, {}, np.zeros(self._shape)

    def _add(self, name: str, seconds: Array) -> None:
        self.spent[name] = self.spent.get(name, 0.0) + seconds


def chrome_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Write events as Chrome and Perfetto read them: a process per rank, a thread per thread, microseconds."""
    found: list[dict[str, Any]] = []
    for rank in sorted({event.rank for event in events}):
        found.append({"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}})
        for number, thread in enumerate(THREADS):
            about = {"name": thread}
            found.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": about})
    found += [
        {
            "ph": "X",
            "name": event.name,
            "cat": event.resource,
            "pid": event.rank,
            "tid": THREADS.index(event.thread),
            "ts": event.start * 1e6,
            "dur": event.seconds * 1e6,
        }
        for event in events
    ]
    return {"traceEvents": found, "displayTimeUnit": "ms"}
