"""`Clock`: the rate of training."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

SETTLING_STEPS = 5
"""First steps that the rate leaves out: kernels are compiled and buffers allocated in them."""


class Clock:
    """Counts training samples and the seconds they took."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._steps = 0
        # Seconds and samples of the settling steps, and of those after them.
        self._settling, self._settled = [0.0, 0], [0.0, 0]

    def start(self) -> None:
        """Count from now on."""
        self._mark = time.perf_counter()

    def tick(self, samples: int) -> None:
        """Count a step that is over."""
        now = time.perf_counter()
        self._steps += 1
        total = self._settling if self._steps <= SETTLING_STEPS else self._settled
        total[0] += now - self._mark
        total[1] += samples
        self._mark = now

    @contextmanager
    def paused(self) -> Generator[None]:
        """Leave out the time of the body."""
        yield
        self.start()

    @property
    def samples_per_s(self) -> float:
        """Rate without the settling steps; where there were no others, theirs."""
        seconds, samples = self._settled if self._settled[1] else self._settling
        return samples / seconds if seconds else 0.0
