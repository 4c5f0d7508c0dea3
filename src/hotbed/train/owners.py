"""Say who owns a directory of checkpoints, and tell whether that process has ended.

An owner is what a process writes about itself into the file ``.owner.json`` of the directory (`hotbed.train.lease`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, cast

from hotbed.checkpoint import Directory

_LONGEST_S = 600.0
"""More is not waited for, whatever a file says."""
HELD: set[str] = set()
"""Names of the leases of this process."""


def me() -> dict[str, Any]:
    """Say who this process is."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "system": system(),
        "started": _started(os.getpid()),
        "job": os.environ.get("TORCHELASTIC_RUN_ID"),
        "restarts": _restarts(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _restarts() -> int | None:
    """How often the agent of torchrun that started this process has started processes again; None without one."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else None


def parsed(content: bytes) -> Mapping[str, Any]:
    """What a file says of its owner; nothing if it is damaged."""
    try:
        values = json.loads(content or b"{}")
    except ValueError:
        return {}
    return cast("Mapping[str, Any]", values) if isinstance(values, dict) else {}


def time_to_live(owner: Mapping[str, Any], default: float) -> float:
    """Seconds that an owner's lease holds, within what could be meant."""
    seconds = owner.get("time_to_live_s")
    return min(float(seconds), _LONGEST_S) if isinstance(seconds, int | float) and seconds > 0 else default


def belongs(where: Directory, owner: Mapping[str, Any]) -> str:
    """Say in an error whose a directory is."""
    named = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    return f"{where} belongs to {named} since {owner.get('since', '?')}"


def given_back(where: Directory) -> str:
    """Say in an error that a directory was unlocked."""
    return f"{where} is this run's no more: it is over, and has given it back; nothing more is published there"


def is_of_another_system(owner: Mapping[str, Any]) -> bool:
    """Whether nothing can be known here of an owner's process."""
    return owner.get("system") not in (None, system())


def has_ended(owner: Mapping[str, Any]) -> bool:
    """Whether an owner is known to have ended, as a process of this system."""
    if owner.get("name") in HELD:
        return False
    pid = owner.get("pid")
    if owner.get("system") != system() or not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    # Numbers of processes come again, in containers soon. This process holds no other lease than those in HELD.
    there = owner.get("started"), _started(pid)
    return pid == os.getpid() or (None not in there and there[0] != there[1])


def seems_of_an_earlier_attempt(owner: Mapping[str, Any]) -> bool:
    """Whether an owner may be of this job of torchrun before it started processes again, which ended all of them.

    Agents count for themselves, so an earlier attempt may have a count that is not lower. And another cluster may have
    a live job of this name, which was started again less often: an owner that renews its lease lives.
    """
    job, then, now = os.environ.get("TORCHELASTIC_RUN_ID"), owner.get("restarts"), _restarts()
    if job in (None, "none") or owner.get("job") != job:  # "none": torchrun without --rdzv-id
        return False
    return isinstance(then, int) and now is not None and then < now


@cache
def system() -> str:
    """Name of what numbers processes: the host since it was started, and the container in it."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    return socket.gethostname()


def _started(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None where that cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
