"""Exchange the ids of a batch in two parts: how many ids the ranks need of each other, and then which.

A GPU does not tell the host how many ids there are unless the host asks, and then the host waits. So all that looks ids
up adds its numbers to one exchange: they cross the wire together and come to the host in one copy, which it waits for
once. Where batches are prepared ahead (`hotbed.train.prefetch`) a step lies between `start` and `finish`, and the
numbers have arrived long before they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.store.memory import staging

T = TypeVar("T")
Counts = list[list[int]]
"""By rank, the numbers of a request."""


class IdExchange:
    """The ids of batches, or of parts of one, that are exchanged together; all ranks must make the same calls."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self._counts: list[Tensor] = []
        self._work: list[Callable[[Counts, Counts], None]] = []
        self._widths: list[int] = []
        self._arrived: tuple[Tensor, torch.cuda.Event | None] | None = None

    def add(self, counts: Tensor, work: Callable[[Counts, Counts], T]) -> Future[T]:
        """Add a request, before `start`; done is what is returned when `finish` has been called.

        ``counts`` are numbers for each rank ``[W, k]`` int64, on the device. `finish` calls ``work``, in the order of
        requests, with the own numbers and those of the ranks for this one.
        """
        future: Future[T] = Future()
        self._work.append(lambda own, received: future.set_result(work(own, received)))
        self._widths.append(counts.shape[1])
        self._counts.append(counts)
        return future

    def then(self, work: Callable[[], T]) -> Future[T]:
        """Let something be done when what was added before is; it needs no numbers."""
        future: Future[T] = Future()
        self._work.append(lambda own, received: future.set_result(work()))
        self._widths.append(0)
        return future

    def start(self) -> None:
        """Exchange the numbers; they are on their way to the host when this returns."""
        if not self._counts:
            return
        first = self._counts[0]
        both = first.new_empty(2, self.link.size, sum(self._widths))
        torch.cat(self._counts, dim=1, out=both[0])
        if self.link.size == 1:
            both[1] = both[0]
        else:
            ones = [1] * self.link.size
            self.link.all_to_all("numbers of ids", both[0], ones, ones, out=both[1]).wait()
        if both.device.type == "cpu":
            self._arrived = both, None
        else:
            host, copied = staging(both.shape, both.dtype, both.device), torch.cuda.Event()
            host.copy_(both, non_blocking=True)
            copied.record()
            self._arrived = host, copied

    def finish(self) -> None:
        """Wait for the numbers, and do what was added; `start` is called if it was not."""
        if self._arrived is None:
            self.start()
        own: Counts = [[] for _ in range(self.link.size)]
        received = own
        if self._arrived is not None:
            both, copied = self._arrived
            if copied is not None:
                copied.synchronize()
            own, received = both.tolist()
        first = 0
        for work, width in zip(self._work, self._widths, strict=True):
            here = partial(_columns, first, first + width)
            work(here(own), here(received))
            first += width


def _columns(first: int, stop: int, of_ranks: Counts) -> Counts:
    return [numbers[first:stop] for numbers in of_ranks]
