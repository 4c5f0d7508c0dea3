"""Notice threads that stand in each other's way: more than there are cores, or spinning ones on cores that are busy.

How threads wait at barriers is set by `import hotbed` (`hotbed.machine`), which is too late where a program imports
torch first. On idle cores that costs nothing, so it is said only where threads of this process are seen to wait for
cores.
"""

from __future__ import annotations

import logging
import time

import torch

from hotbed import machine

WINDOW_S = 3.0
"""Seconds over which waiting is measured."""
MOST_WAITED = 0.25
"""Share of the time that a thread may wait for a core before it is said, where torch's threads spin."""

_log = logging.getLogger("hotbed")


class ThreadWatch:
    """Warn once if the number of threads, or how they wait, makes training slow on this machine.

    Only a number that is wrong whatever else runs is warned of at once. Whether the cores are busy is what the system
    says of the time that this process's threads were ready and not running; it is asked for every `WINDOW_S` seconds.
    """

    def __init__(self) -> None:
        self._since: float | None = None
        self._waited = 0.0

    def start(self) -> None:
        """Check the number of threads, and begin to watch where torch's threads spin."""
        threads, cores = torch.get_num_threads(), machine.usable_cores()
        if threads > cores:
            _log.warning(
                "torch computes on %d threads, but this process may use %d cores: threads wait for each other's cores, "
                "which is slower than %d threads; call torch.set_num_threads(%d), or set OMP_NUM_THREADS=%d",
                *(threads, cores, cores, cores, cores),
            )
        if machine.TORCH_CAME_FIRST and threads > 1:
            self._begin()

    def tick(self) -> None:
        """Look whether threads waited for cores, if it is time to."""
        if self._since is None or (passed := time.perf_counter() - self._since) < WINDOW_S:
            return
        before = self._waited
        self._begin()
        if self._waited - before > MOST_WAITED * passed:
            self._since = None
            _log.warning(
                "other work keeps the cores busy (threads of this process waited %.1f s for one within %.1f s), and "
                "torch was imported before hotbed, so its threads spin at barriers against that work: training can be "
                "50 times slower than with a short spin; import hotbed before torch, or set GOMP_SPINCOUNT=%s",
                *(self._waited - before, passed, machine.SPINNING["GOMP_SPINCOUNT"]),
            )

    def _begin(self) -> None:
        """Begin a window; where the system does not count waiting, there is none."""
        waited = machine.waited_for_cores_s()
        self._since = None if waited is None else time.perf_counter()
        self._waited = waited or 0.0
