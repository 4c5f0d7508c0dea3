"""Fit this process to the machine: its cores, control groups, OpenMP threads, and heap.

*Spinning.* torch and Numba each have an OpenMP runtime (``libgomp`` from torch's wheel, and the system's). A training
step has hundreds of barriers. At each barrier, threads spin, by default for milliseconds, to continue quickly when the
last thread arrives. If a different process uses the core of that last thread, they spin in vain. On two cores with two
other busy processes, the rate of a training loop fell to 18 %. With a short spin it fell to 55 %. The runtimes read the
environment when they are loaded. Therefore `hotbed` imports this module before torch. Measurements:
docs/decisions/cpu.md.

*Number of threads.* A container may see more cores than its quota allows. If there are more threads than granted cores,
the system stops all of them together, even while other threads wait for them.

*Heap.* glibc gives every few threads a heap of their own (an arena). A block that one thread allocates and another
thread frees returns to the arena of the first. Batches and rows do this all the time, so free pieces accumulate in each
arena (`share_heap`). Furthermore, glibc returns large freed blocks to the system. Then each activation and gradient of
a step is mapped again, with a page fault per 4 KiB (`keep_heap`). Commands change both settings when they start. The
library does not change the heap of the user's process.
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
"""Duration of spinning: loop iterations for GNU's runtime, and milliseconds for the runtimes of LLVM and Intel."""
OF_USERS = (*SPINNING, "OMP_WAIT_POLICY", "KMP_LIBRARY")
"""Variables by which a user decides how threads wait. If one is set, hotbed changes none."""


class Cpu(NamedTuple):
    """Processor of this machine, as described by the system."""

    name: str  # product name
    kind: str  # vendor, family and model, which determine the instruction sets and the code paths of libraries
    is_amd: bool
    family: int  # CPU family of AMD or Intel, e.g. 25 for Zen 3 and 4, 26 for Zen 5; 0 if there is none
    flags: frozenset[str]  # Linux names of instruction sets, e.g. avx512_bf16, amx_bf16, bf16 (Arm)


@cache
def cpu(root: Path = Path("/")) -> Cpu:
    """Return the processor of this machine. Without ``/proc/cpuinfo``, most fields are empty."""
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
    """Return the installed version of hotbed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("hotbed")
    except PackageNotFoundError:  # imported from src/, never installed
        return "unknown (source checkout)"


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Make OpenMP runtimes that are loaded later spin only briefly, unless the user has set a variable."""
    if not any(name in environment for name in OF_USERS):
        environment.update(SPINNING)


USER_DECIDED = any(name in os.environ for name in OF_USERS)
"""Whether the user set a variable of `OF_USERS` before hotbed was imported."""
TORCH_CAME_FIRST = "torch" in sys.modules and not USER_DECIDED
"""Whether torch was imported before hotbed. Then its threads spin for the default duration."""
spin_briefly(os.environ)


def waited_for_cores_s(root: Path = Path("/")) -> float | None:
    """Return the seconds that threads of this process waited for a core. None if the system does not count them."""
    threads = root / "proc/self/task"
    try:
        counted = [_text(thread / "schedstat").split() for thread in threads.iterdir()]
    except OSError:
        return None
    waited = [int(fields[1]) for fields in counted if len(fields) == 3]  # a thread may end meanwhile
    return sum(waited) / 1e9 if waited else None


def resident_bytes(root: Path = Path("/")) -> int:
    """Return the resident bytes of this process, or 0 if the system does not report them."""
    lines = _text(root / "proc/self/status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def memory_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process may use: the least of the machine's memory and cgroup limits."""
    lines = _text(root / "proc/meminfo").splitlines()
    found = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")), 0)
    limits = [found or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for folder, group_version in control_groups("memory", root):
        limit = _text(folder / ("memory.limit_in_bytes" if group_version == 1 else "memory.max"))
        if limit.isdecimal():  # otherwise ``max``, or a missing file
            limits.append(int(limit))
    return min(limits)


def usable_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that affinity and cgroup quotas (rounded up) allow."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(min([cores, *map(math.ceil, _quotas(root))]), 1)


def fit_threads(processes: int = 1) -> None:
    """Set the number of threads to this process's share of the cores, unless the user set ``OMP_NUM_THREADS``.

    ``processes`` processes share the usable cores. torchrun always sets ``OMP_NUM_THREADS=1`` for several processes, so
    under torchrun a value of 1 counts as not set.
    """
    import torch  # here, because its runtime reads variables that this module sets

    share = max(usable_cores() // processes, 1)
    if not _threads_are_set(os.environ):
        torch.set_num_threads(share if processes > 1 else min(share, torch.get_num_threads()))


def start_alone(work: Callable[[], None], name: str) -> threading.Thread:
    """Start and return a daemon thread that computes without further OpenMP threads. See `single_threads`."""
    import torch

    before, begun = torch.get_num_threads(), threading.Event()

    def run() -> None:
        _compute_alone()
        begun.set()
        work()

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    begun.wait()
    torch.set_num_threads(before)  # later threads inherit the number that was set last
    return thread


def _compute_alone() -> None:
    import torch

    torch.get_num_threads()  # the first call in a thread copies the global number
    torch.set_num_threads(1)


def single_threads(count: int, name: str) -> ThreadPoolExecutor:
    """Return a pool of threads that compute without further OpenMP threads, for work in the background.

    If a background thread started its own OpenMP team, there would be more threads than cores. Then OpenMP lets the
    threads of all teams sleep at barriers.
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
    torch.set_num_threads(before)  # later threads inherit the number that was set last
    return pool


def _threads_are_set(environment: MutableMapping[str, str]) -> bool:
    """Return whether the user, rather than torchrun, set the number of threads."""
    number = environment.get("OMP_NUM_THREADS")
    return number is not None and not (number == "1" and "TORCHELASTIC_RUN_ID" in environment)


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, int]]:
    """Yield the directories of this process's control groups, from the innermost to the root, with the cgroup version.

    The version determines the names of the files. ``controller`` is ``"cpu"`` or ``"memory"``. ``root`` contains
    ``/proc`` and ``/sys``. In a container, the group's directory may be the mount point, while its path is the path on
    the host. Therefore some directories may be missing.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():  # empty on other systems than Linux
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        path = PurePosixPath(group)
        for mount in {controllers, controller} if controllers else ("",):
            for parent in (path, *path.parents):
                yield root / "sys/fs/cgroup" / mount / parent.relative_to("/"), 1 if controllers else 2


def _quotas(root: Path) -> Iterator[float]:
    """Yield the quotas, in cores, of this process's control groups."""
    for folder, group_version in control_groups("cpu", root):
        if group_version == 1:  # two files, and a quota of −1 means no quota
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
"""Number of arenas that the threads of a `hotbed` command share. With 1 or 2, memory stays constant for an hour of
training. With glibc's default of 8 per core, two thirds of the heap were free pieces after three minutes, and more
later."""


def share_heap(environment: Mapping[str, str]) -> bool:
    """Make all threads of this process share few arenas of glibc. Return whether this was set.

    Call this before threads start, because running threads keep their arenas. ``MALLOC_ARENA_MAX`` or
    ``GLIBC_TUNABLES`` in the environment have precedence. Return False if the C library is not glibc.
    """
    return _set_heap(environment, {"MALLOC_ARENA_MAX": "arena_max"}, {_M_ARENA_MAX: HEAPS})


KEPT_BLOCK_BYTES = 1 << 30
"""The heap keeps freed blocks up to this size. Larger blocks return to the system."""
KEPT_BYTES = (1 << 31) - 1
"""Free memory that is kept at the end of the heap. It is the maximum of mallopt."""


_kept = threading.Event()


def keep_heap(environment: Mapping[str, str]) -> bool:
    """Make glibc keep freed blocks for the next step. Return whether this was set.

    Otherwise each step of a DLRM maps 130 MB of activations and gradients again. The 33,000 page faults take 6 to 22 %
    of its time. ``MALLOC_MMAP_THRESHOLD_``, ``MALLOC_TRIM_THRESHOLD_`` or ``GLIBC_TUNABLES`` in the
    environment have precedence. Return False if the C library is not glibc.
    """
    names = {"MALLOC_MMAP_THRESHOLD_": "mmap_threshold", "MALLOC_TRIM_THRESHOLD_": "trim_threshold"}
    options = {_M_MMAP_THRESHOLD: KEPT_BLOCK_BYTES, _M_TRIM_THRESHOLD: KEPT_BYTES}
    if not _set_heap(environment, names, options):
        return False
    _kept.set()
    return True


def heap_is_kept() -> bool:
    """Return whether `keep_heap` has succeeded in this process. The setting cannot be undone."""
    return _kept.is_set()


def apart(nbytes: int) -> memoryview:
    """Return zeroed memory outside of the heap, which returns to the system when it is freed.

    A long-lived block in the heap would separate the freed blocks of steps. They could not be merged, and the heap
    would grow with every step.
    """
    return memoryview(mmap.mmap(-1, max(nbytes, 1)))


def _set_heap(environment: Mapping[str, str], names: Mapping[str, str], options: Mapping[int, int]) -> bool:
    """Set options of glibc's heap, unless one of the variables or its tunable is set."""
    tunables = environment.get("GLIBC_TUNABLES", "")
    if any(name in environment or f"glibc.malloc.{tunable}" in tunables for name, tunable in names.items()):
        return False
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    done = [bool(libc.mallopt(option, value)) for option, value in options.items()]  # try all options
    return all(done)
