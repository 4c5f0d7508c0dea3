"""Find what this process may use of the machine: cores, control groups, OpenMP's threads.

*Waiting.* torch and Numba compute on OpenMP's threads, each with a runtime of its own (torch's wheel brings a
``libgomp``, Numba loads the system's), and a step of training has hundreds of barriers. At each of them threads spin,
by default for milliseconds, so that they go on at once when the last one arrives. Where another process has the core
that the last one needs, they spin against it: on two cores beside two busy processes a training loop fell to a fiftieth
of its rate (docs/log.md). A short spin loses nothing on idle cores, and is over before it does harm on busy ones.

Runtimes read the environment when they are loaded, so `hotbed` imports this module before anything imports torch.

*How many.* A container may be granted the time of fewer cores than it sees. Threads that are more than that are stopped
together, in the middle of what the others wait for.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

SPINNING = {"GOMP_SPINCOUNT": "3000", "KMP_BLOCKTIME": "1"}
"""How long threads spin: turns of a loop, for GNU's runtime; milliseconds, for LLVM's and Intel's."""
OF_USERS = (*SPINNING, "OMP_WAIT_POLICY", "KMP_LIBRARY")
"""Whoever sets one of these has decided how threads wait."""


class Cpu(NamedTuple):
    """Describe this machine's processor as the system does."""

    name: str  # the product's
    kind: str  # vendor, family and model, which decide about instructions and libraries' code
    is_amd: bool
    family: int  # of AMD or Intel, e.g. 25 for Zen 3 and 4, 26 for Zen 5; 0 where there is none
    flags: frozenset[str]  # instruction sets by their names in Linux, e.g. avx512_bf16, amx_bf16, bf16 (Arm)


@cache
def cpu(root: Path = Path("/")) -> Cpu:
    """Read the processor's kind and instruction sets; none are known where there is no ``/proc/cpuinfo``."""
    facts: dict[str, str] = {}
    for line in _text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    vendor = facts.get("vendor_id", facts.get("CPU implementer", ""))
    numbers = (facts.get("cpu family", ""), facts.get("model", facts.get("CPU part", "")))
    kind = " ".join(part for part in (vendor, *numbers) if part) or platform.machine()
    flags = facts.get("flags", facts.get("Features", ""))
    family = facts.get("cpu family", "")
    name = facts.get("model name") or platform.processor() or platform.machine()
    return Cpu(name, kind, vendor == "AuthenticAMD", int(family) if family.isdecimal() else 0, frozenset(flags.split()))


def release() -> str:
    """Return the version of hotbed that is installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("hotbed")
    except PackageNotFoundError:  # imported from src/, never installed
        return "unknown (source checkout)"


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Let OpenMP's runtimes that are loaded later spin only shortly, unless the user has set how they wait."""
    if not any(name in environment for name in OF_USERS):
        environment.update(SPINNING)


USER_DECIDED = any(name in os.environ for name in OF_USERS)
"""Whether how threads wait was set before hotbed was imported."""
TORCH_CAME_FIRST = "torch" in sys.modules and not USER_DECIDED
"""Whether torch's runtime had read the environment before anything was set: its threads spin as long as they do."""
spin_briefly(os.environ)


def waited_for_cores_s(root: Path = Path("/")) -> float | None:
    """Return the seconds that threads of this process waited for a core; None where the system does not count them."""
    threads = root / "proc/self/task"
    try:
        counted = [_text(thread / "schedstat").split() for thread in threads.iterdir()]
    except OSError:
        return None
    waited = [int(fields[1]) for fields in counted if len(fields) == 3]  # a thread may end meanwhile
    return sum(waited) / 1e9 if waited else None


def resident_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process takes now; 0 where the system does not say so."""
    lines = _text(root / "proc/self/status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def memory_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process may use: the machine's, at most the limits of its control groups."""
    lines = _text(root / "proc/meminfo").splitlines()
    found = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), 0)
    limits = [found or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder, group_version in control_groups("memory", root):
        limit = _text(folder / ("memory.limit_in_bytes" if group_version == 1 else "memory.max"))
        if limit.isdecimal():  # else ``max``, or there is no such file
            limits.append(int(limit))
    return min(limits)


def usable_cores(root: Path = Path("/")) -> int:
    """Cores that this process may use: those it may run on, at most the quota of its control groups, rounded up."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([cores, *map(math.ceil, _quotas(root))]), 1)


def fit_threads(processes: int = 1) -> None:
    """Set the threads of torch and kernels to this process's share of the cores, unless ``OMP_NUM_THREADS`` is set.

    ``processes`` share the usable cores. torchrun sets ``OMP_NUM_THREADS=1`` for several processes on any machine, so
    this 1 counts as not set.
    """
    import torch  # after what the runtimes that it loads read

    share = max(usable_cores() // processes, 1)
    if not _threads_are_set(os.environ):
        torch.set_num_threads(share if processes > 1 else min(share, torch.get_num_threads()))


def start_alone(work: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread that computes alone, see `single_threads`, and return it."""
    import torch

    before, begun = torch.get_num_threads(), threading.Event()

    def run() -> None:
        _compute_alone()
        begun.set()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    begun.wait()
    torch.set_num_threads(before)  # threads that begin later take the number that was set last
    return thread


def _compute_alone() -> None:
    import torch

    torch.get_num_threads()  # a thread's first question makes it take the number that all have
    torch.set_num_threads(1)


def single_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Start threads each of which computes alone, whatever number of threads torch uses elsewhere.

    For what is done beside something else. A thread whose operations begin a team of their own gives OpenMP more
    threads than there are cores, and then it lets those of all teams sleep at barriers (docs/log.md).
    """
    import torch

    before = torch.get_num_threads()
    barrier = threading.Barrier(count + 1)

    def start() -> None:
        _compute_alone()
        barrier.wait()

    pool = ThreadPoolExecutor(count, name, initializer=start)
    for _ in range(count):
        pool.submit(int)
    barrier.wait()
    torch.set_num_threads(before)  # threads that begin later take the number that was set last
    return pool


def _threads_are_set(environment: MutableMapping[str, str]) -> bool:
    """Whether the user, and not torchrun, has set a number of threads."""
    number = environment.get("OMP_NUM_THREADS")
    return number is not None and not (number == "1" and "TORCHELASTIC_RUN_ID" in environment)


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """List the directories of this process's control groups, from the innermost to the root, with their cgroup version.

    The version determines the names of files there. ``controller`` is ``"cpu"`` or ``"memory"``; ``root`` has ``/proc``
    and ``/sys``. In a container the group's own directory may be the mount point, while its path is that of the host,
    so not every directory exists.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():  # none where there is no Linux
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        path = PurePosixPath(group)
        for mount in {controllers, controller} if controllers else ("",):
            for parent in (path, *path.parents):
                yield root / "sys/fs/cgroup" / mount / parent.relative_to("/"), 1 if controllers else 2


def _quotas(root: Path) -> Iterator[float]:
    """Cores whose time is granted to the control groups that this process is in."""
    for folder, group_version in control_groups("cpu", root):
        if group_version == 1:  # two files; a quota of −1 is none
            quota, period = (_text(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        else:  # quota and period, in microseconds, or ``max``
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        if quota.isdecimal() and period.isdecimal():
            yield int(quota) / int(period)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


# -- the heap of glibc -----------------------------------------------------------------------------------------------

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h, see mallopt(3)
HEAPS = 2
"""How many arenas the threads of a `hotbed` command share: with 1 or 2 an hour of training stays flat, with glibc's own
8 per core two thirds of its heap were free pieces after three minutes, and still more later (docs/log.md)."""


def share_heap(environment: Mapping[str, str]) -> bool:
    """Let all threads of this process allocate from few arenas of glibc; return whether this was set.

    Arenas of running threads stay, so call it before threads are started. ``MALLOC_ARENA_MAX`` or ``GLIBC_TUNABLES`` in
    the environment have precedence. Return False if the C library is not glibc.
    """
    return _set_heap(environment, {"MALLOC_ARENA_MAX": "arena_max"}, {_M_ARENA_MAX: HEAPS})


KEPT_BLOCK_BYTES = 1 << 30
"""Blocks up to this size come from the heap, which keeps them; larger ones go back to the system once freed."""
KEPT_BYTES = (1 << 31) - 1
"""Free memory at the end of the heap that is kept: mallopt takes no more."""


_kept = threading.Event()


def keep_heap(environment: Mapping[str, str]) -> bool:
    """Let glibc keep freed blocks for the next step; return whether this was set.

    Without it, a DLRM's step maps 130 MB of activations and gradients anew, with 33,000 page faults: 6 to 22 % of its
    time (docs/log.md). ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` or ``GLIBC_TUNABLES`` in the environment
    have precedence. Return False if the C library is not glibc.
    """
    names = {"MALLOC_MMAP_THRESHOLD_": "mmap_threshold", "MALLOC_TRIM_THRESHOLD_": "trim_threshold"}
    options = {_M_MMAP_THRESHOLD: KEPT_BLOCK_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES}
    if not _set_heap(environment, names, options):
        return False
    _kept.set()
    return True


def heap_is_kept() -> bool:
    """Whether `keep_heap` has succeeded in this process; nothing takes that back."""
    return _kept.is_set()


def apart(nbytes: int) -> memoryview:
    """Return zeroed memory that is no part of the heap and goes back to the system as soon as it is freed.

    A long-lived block between the blocks of steps keeps these from being joined, and a heap that keeps what is freed
    then grows with every step.
    """
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))


def _set_heap(environment: Mapping[str, str], names: Mapping[str, str], options: Mapping[int, int]) -> bool:
    """Set options of glibc's heap, unless a variable of these names, or its tunable, is set."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    if any(name in environment or f"glibc.malloc.{tunable}" in tunables for name, tunable in names.items()):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    done = [bool(libc.mallopt(option, value)) for option, value in options.items()]  # all, even after one that failed
    return all(done)
