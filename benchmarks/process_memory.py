"""Read what memory this process takes, and limit what processes may take by control groups of Linux."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from hotbed.machine import control_groups

_LIMIT_FILES = {1: "memory.limit_in_bytes", 2: "memory.max"}


def status_kib(key: str) -> int:
    """A value of this process's memory, in KiB."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    raise KeyError(key)


def peak_extra_kib(action: Callable[[], object]) -> int:
    """Most memory above that before an action, in KiB."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak is counted anew
    before = status_kib("VmRSS")
    action()
    return status_kib("VmHWM") - before


@contextmanager
def memory_group(limit_bytes: int) -> Generator[Path | None]:
    """Make a control group of so much memory, in the one that this process is in; None where that is not allowed."""
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


def set_limit(group: Path, limit_bytes: int) -> None:
    """Limit what a control group takes from now on, page cache included."""
    (file,) = (group / name for name in _LIMIT_FILES.values() if (group / name).is_file())
    file.write_text(str(limit_bytes), encoding="ascii")
