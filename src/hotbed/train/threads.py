"""Keep threads out of each other's way: fewer spins where the cores are busy, a word where there are more than cores.

How long threads spin at barriers is set by `import hotbed` (`hotbed.machine`) for idle cores. Where other processes
have the cores, spinning takes them from the thread that all wait for; so that is looked at while training runs.
"""

from __future__ import annotations

import logging
import time

import torch

from hotbed import machine

WINDOW_S = 1.0
"""Seconds over which waiting is measured."""
MOST_WAITED = 0.25
"""Share of the time, per thread, that threads wait for cores on which other work runs."""

_log = logging.getLogger("hotbed")


class ThreadWatch:
    """Throttle spinning while the cores are busy, and warn once of what makes training slow and cannot be mended.

    Whether the cores are busy is what the system says of the time that this process's threads were ready and not
    running; it is asked for every `WINDOW_S` seconds. How threads wait changes no bits. It is the user's choice where a
    variable of `machine.OF_USERS` was set.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._waited = 0.0
        self._throttle = machine.SpinThrottle()

    def start(self) -> None:
        """Check the number of threads, and begin to watch if there are several."""
        threads, cores = torch.get_num_threads(), machine.usable_cores()
        if threads > cores:
            _log.warning(
                "torch computes on %d threads, but this process may use %d cores: threads wait for each other's cores, "
                "which is slower than %d threads; call torch.set_num_threads(%d), or set OMP_NUM_THREADS=%d",
                *(threads, cores, cores, cores, cores),
            )
        if threads > 1 and not machine.USER_DECIDED:
            self._begin()

    def tick(self) -> None:
        """Look whether threads waited for cores, if it is time to."""
        if self._since is None or (passed := time.perf_counter() - self._since) < WINDOW_S:
            return
        before = self._waited
        self._begin()
        busy = self._waited - before > MOST_WAITED * torch.get_num_threads() * passed
        if busy and not self._throttle.set(True):
            self._since = None
            if machine.TORCH_CAME_FIRST:
                _log.warning(
                    "other work keeps the cores busy (threads of this process waited %.1f s for one within %.1f s), "
                    "and torch was imported before hotbed, so its threads spin at barriers against that work: training "
                    "can be 50 times slower than with a short spin; import hotbed before torch, or set "
                    "KMP_BLOCKTIME=%s",
                    *(self._waited - before, passed, machine.SPINNING["KMP_BLOCKTIME"]),
                )
        elif not busy:
            self._throttle.set(False)

    def stop(self) -> None:
        """End the watch; threads spin as they were set to."""
        self._since = None
        self._throttle.set(False)

    def _begin(self) -> None:
        """Begin a window; where the system does not count waiting, there is none."""
        waited = machine.waited_for_cores_s()
        self._since = None if waited is None else time.perf_counter()
        self._waited = waited or 0.0
