"""`DirectoryLock`: a directory of checkpoints belongs to one run at a time."""

from __future__ import annotations

import json
import os
import socket
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from hotbed.checkpoint import Directory, checkpoints_in
from hotbed.checkpoint.manifest import step_of
from hotbed.checkpoint.storage import LocalDirectory
from hotbed.errors import CheckpointError

OWNER = ".owner.json"


class DirectoryLock:
    """Holds a directory for this process while it is used as a context.

    Two runs in one directory would remove each other's checkpoints. On a local file system the claim ends with the
    process, however that ends. An object store has no such locks: there the file ``.owner.json`` names the process that
    writes. A killed one leaves it behind, which is noticed on the same host, and by ranks that torchrun starts again
    under the same ``--rdzv-id`` on any; of two runs that begin in the same moment neither may notice.

    Parameters
    ----------
    where
        The directory.

    Raises
    ------
    CheckpointError
        If another run has it.
    """

    def __init__(self, where: Directory) -> None:
        self._where = where
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        self._where.make()
        if isinstance(self._where, LocalDirectory):
            self._lock(self._where.root / OWNER)
            return self
        if self._where.has(OWNER):
            owner = json.loads(self._where.read(OWNER))
            if not _is_dead(owner):
                raise CheckpointError(
                    f"{self._where} belongs to process {owner['pid']} on {owner['host']} since {owner['since']}; "
                    f"choose another train.checkpoint_dir, or remove {self._where}/{OWNER} if that run is dead"
                )
        self._where.write(OWNER, json.dumps(_me()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is None:
            self._where.remove(OWNER)
        else:
            os.close(self._descriptor)  # the file stays: another process may be about to lock it

    def _lock(self, file: Path) -> None:
        import fcntl

        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            text = os.read(descriptor, 10_000)
            os.close(descriptor)
            owner = json.loads(text or b"{}")
            raise CheckpointError(
                f"{self._where} belongs to process {owner.get('pid', '?')} on {owner.get('host', '?')}, which is "
                "running; choose another train.checkpoint_dir, or end that run"
            ) from None
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(_me()).encode())
        self._descriptor = descriptor


def refuse_other_checkpoints(where: Directory, resumed: Directory | None) -> None:
    """Raise `CheckpointError` if a directory holds checkpoints that a new run would mix its own with.

    A run that goes on from one of them, ``resumed``, may use it if none is newer.
    """
    existing = checkpoints_in(where)
    if not existing:
        return
    here = [c for c in existing if resumed is not None and are_same(resumed, c)]
    if not here:
        raise CheckpointError(
            f"{where} holds checkpoints of another run, up to {existing[-1].name}; go on from them with "
            f"--resume {where}, or choose another train.checkpoint_dir"
        )
    newer = [c.name for c in existing if step_of(c) > step_of(here[0])]
    if newer:
        raise CheckpointError(
            f"{where} holds checkpoints that are newer than {here[0].name}: {', '.join(newer)}; remove them, go on "
            "from the newest, or choose another train.checkpoint_dir"
        )


def are_same(a: Directory, b: Directory) -> bool:
    """Tell whether two directories are one, however they are written."""
    if isinstance(a, LocalDirectory) and isinstance(b, LocalDirectory):
        return a.root.resolve() == b.root.resolve()
    return a.path == b.path


def _me() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "job": os.environ.get("TORCHELASTIC_RUN_ID"),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _is_dead(owner: dict[str, Any]) -> bool:
    """Whether the owner is known to have ended: as a process of this host, or as an earlier attempt of this job."""
    me = _me()
    if owner.get("job") is not None and owner["job"] == me["job"] != "none":  # "none": torchrun without --rdzv-id
        return True  # torchrun ends all ranks before it starts them again
    if owner["host"] != me["host"]:
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    there = owner.get("started"), _started(owner["pid"])  # numbers of processes come again, in containers soon
    return owner["pid"] == os.getpid() or (None not in there and there[0] != there[1])


def _started(pid: int) -> str | None:
    """When a process was started, in ticks since the machine was; None where that cannot be known."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
