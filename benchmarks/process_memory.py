"""Measure the memory of processes, and limit it by control groups of Linux."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from hotbed.machine import control_groups

_LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}


def kib_of(file: Path) -> dict[str, int]:
    """Return the fields of a file of `/proc` that are in KiB."""
    lines = (line.split(":", 1) for line in file.read_text(encoding="ascii").splitlines() if line.endswith(" kB"))
    return {name: int(value.split()[0]) for name, value in lines}


def peak_extra_kib(action: Callable[[], object]) -> int:
    """Return by how much the resident memory of this process grows at most during an action."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # resets the peak
    before = kib_of(Path("/proc/self/status"))["VmRSS"]
    action()
    return kib_of(Path("/proc/self/status"))["VmHWM"] - before


def family(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return [pid, *(of for child in children for of in family(int(child)))]
    return []


@contextmanager
def memory_group(limit_bytes: int) -> Generator[Path | None]:
    """Make a control group with a limit of memory, or yield None if this process may not make one."""
    made: Path | None = None
    for folder, version in control_groups("memory"):
        if not (folder / "cgroup.procs").is_file():
            continue
        try:
            made = folder / f"hotbed-{os.getpid()}"
            made.mkdir()
            (made / _LIMIT_FILES[version]).write_text(str(limit_bytes), encoding="ascii")
            break
        except OSError:
            if made is not None and made.is_dir():
                made.rmdir()
            made = None
    try:
        yield made
    finally:
        if made is not None:
            made.rmdir()
