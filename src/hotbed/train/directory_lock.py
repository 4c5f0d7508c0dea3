"""Lock a checkpoint directory for one run, because two runs would remove each other's checkpoints.

Run directories need no lock, because every run creates a new one (`hotbed.train.runs.report`). `hotbed daily` locks its
output directory. If a second run uses a locked directory, it waits before it fails or takes the directory over:

=================  ==============================  ====================================================================
directory          owner is alive on this host     owner is on a different host, or unknown
=================  ==============================  ====================================================================
local or NFS       fails without waiting           tries once per second, for up to `FileLock.PATIENCE_S`
object store       fails without waiting           waits one TTL of the owner's lease, at most 600 s
=================  ==============================  ====================================================================

A local directory is locked by the operating system, which releases the lock when the process ends (`FileLock`). Object
stores have no locks, so a lease is used instead (`Lease`): a file ``.owner.json`` that is written conditionally.

1. One process creates the file, with a unique name and a sequence number.
2. After each third of the TTL, the owner renews the lease: it replaces the unchanged file by one with the next number.
3. If the owner of a lease may be alive, a second process waits one TTL. If the lease is renewed meanwhile, the process
   fails. Otherwise it replaces the unchanged file and is the new owner. Clocks of other hosts are not used.
4. An owner that finds the lease of another run stops training and publishes nothing. The owner reads the file at each
   renewal, before it writes a checkpoint, before it removes files, and before it writes a manifest.

An owner is known to be dead if no process of this system has its PID, or if the process with its PID has started later.
If the owner seems to be an earlier attempt of this torchrun job, the second process waits only for the time of one
renewal (`RENEWAL`). It must wait, because a different cluster may run a job of this name.

If this process is suspended for one TTL between its last check and the manifest, another run can take over. Neither run
then damages the other's checkpoint, because file names are unique per attempt, and only one process can create the
manifest. Conditional writes are retried for less than one TTL (`hotbed.locations.CONDITIONAL_S`).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

from hotbed.checkpoint import Directory
from hotbed.checkpoint.storage import LocalDirectory, Tagged
from hotbed.errors import CheckpointError, NotOursError

OWNER = ".owner.json"
"""File that names the owner of a directory."""
TIME_TO_LIVE_S = 60.0
"""Seconds after which a lease expires unless it is renewed."""
RENEWAL = 0.4
"""A live owner renews its lease within this share of the TTL, because renewals are due after a third of the TTL."""
_LOOKS = 30  # a waiting process reads the lease this often per TTL
_LONGEST_S = 600.0  # longest wait, even if the lease has a longer TTL
HELD: set[str] = set()
"""Names of the leases that this process owns."""

_log = logging.getLogger("hotbed")


def lock(where: Directory) -> DirectoryLock:
    """Return the lock of a directory; entering it raises `CheckpointError` if another run owns the directory."""
    return FileLock(where) if isinstance(where, LocalDirectory) else Lease(where)


class FileLock:
    """Lock of the operating system on the file ``.owner.json``, which also works on NFS 4."""

    PATIENCE_S = 120.0
    """Seconds to wait for the lock of a different host; an NFS server releases the locks of a dead host after 90 s."""

    def __init__(self, where: LocalDirectory) -> None:
        self.where = where
        self._file, self._name = where.root / OWNER, uuid.uuid4().hex
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        self.where.make()
        descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._acquire(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"name": self._name, **_own_process()}).encode(), 0)
        except BaseException:  # also Ctrl-C during the wait
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def _acquire(self, descriptor: int) -> None:
        import fcntl

        end: float | None = None
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    _log.warning(
                        "the file system of %s has no locks (%s), so a second run in this directory would end this run",
                        self.where,
                        error,
                    )
                    return
                owner = _parse(os.pread(descriptor, 10_000, 0))
                if end is None and owner.get("system") not in (None, system()):
                    end = time.monotonic() + self.PATIENCE_S
                    _log.warning("%s; waiting up to %.0f s for the lock", _belongs(self.where, owner), self.PATIENCE_S)
                if end is None or time.monotonic() > end:
                    raise _running_error(self.where, owner) from None
                time.sleep(1)

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)  # the file is not removed, because another process may be about to lock it
            self._descriptor = None

    def check(self) -> None:
        """Raise `NotOursError` if another run has taken over the directory, or this run has released it."""
        if self._descriptor is None:
            raise _released_error(self.where)
        try:
            os.pread(self._descriptor, 1, 0)  # fails if the NFS server has granted the lock to a different host
            with self._file.open("rb") as current:
                owner, now = _parse(current.read(10_000)), os.fstat(current.fileno())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO, errno.ESTALE):
                raise
            raise NotOursError(
                f"this run has lost its lock on {self.where}, because {self._file} cannot be read ({error.strerror}). "
                "The run ends without publishing"
            ) from None
        own = os.fstat(self._descriptor)
        if (own.st_dev, own.st_ino) != (now.st_dev, now.st_ino) or owner.get("name") != self._name:
            raise NotOursError(
                f"{_belongs(self.where, owner)}, because the file system has released the lock of this run. This run "
                "ends without publishing"
            )

    def check_renewals(self) -> None:
        """Do nothing: a lock needs no renewal."""


class Lease:
    """Lease on a directory of an object store, which a thread renews; see the module's docstring."""

    def __init__(self, where: Directory, time_to_live_s: float = TIME_TO_LIVE_S) -> None:
        self.where = where
        self._seconds = time_to_live_s
        self._name, self._number, self._tag = uuid.uuid4().hex, 0, ""
        self._writes = threading.Lock()
        self._over = threading.Event()
        self._lost: str | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.where.make()
        while not self._acquire():
            pass
        HELD.add(self._name)
        self._thread = threading.Thread(target=self._renew_until_over, name="hotbed-lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        HELD.discard(self._name)
        if self._lost is None:
            with suppress(CheckpointError, OSError):
                self._replace(self._tag, released=True)

    def check(self) -> None:
        """Raise `NotOursError` if another run has taken over the directory, or this run has released it."""
        if self._over.is_set() and self._lost is None:
            raise _released_error(self.where)
        if self._thread is not None and self._lost is None:
            with self._writes:
                self._compare(self.where.read_tagged(OWNER))
        self.check_renewals()

    def check_renewals(self) -> None:
        """Raise `NotOursError` if the last renewal found another owner; this does not read the directory."""
        if self._lost is not None:
            raise NotOursError(
                f"{self._lost}, because this run did not renew its lease for {self._seconds:g} s, or torchrun has "
                "restarted its job. This run ends without publishing"
            )

    def _acquire(self) -> bool:
        """Create the lease, or take over an expired lease; return False if another process was faster."""
        tag = self.where.create(OWNER, self._content())
        if tag is not None:
            self._tag = tag
            return True
        found = self.where.read_tagged(OWNER)
        if found is None:
            return False
        owner = _parse(found.content)
        if owner.get("name") == self._name:  # the file was created, but the store's response was lost
            self._tag = found.tag
            return True
        if not owner.get("released") and not _is_dead(owner):
            self._wait_for_the_end_of(found, owner)
        return self._replace(found.tag)

    def _wait_for_the_end_of(self, lease: Tagged, owner: Mapping[str, Any]) -> None:
        """Wait until a lease expires; raise `CheckpointError` if it is renewed."""
        if owner.get("system") == system():
            raise _running_error(self.where, owner)
        live = owner.get("time_to_live_s")
        live = min(float(live), _LONGEST_S) if isinstance(live, int | float) and live > 0 else self._seconds
        seconds = live * RENEWAL if _is_earlier_attempt(owner) else live
        start = time.monotonic()
        _log.warning("%s; waiting up to %.0f s for a renewal of the lease", _belongs(self.where, owner), seconds)
        while time.monotonic() - start < seconds:
            time.sleep(live / _LOOKS)
            found = self.where.read_tagged(OWNER)
            if found is None or _parse(found.content).get("released"):
                return
            if found.tag != lease.tag:
                raise _running_error(self.where, owner)
        _log.warning("%s was not renewed for %.0f s and is taken over", f"{self.where}/{OWNER}", seconds)

    def _renew_until_over(self) -> None:
        while not self._over.wait(self._seconds / 3):
            with self._writes:
                try:
                    if not self._replace(self._tag):
                        self._compare(self.where.read_tagged(OWNER))
                except (CheckpointError, OSError) as error:  # this run owns the lease until another run takes it over
                    _log.warning("the lease on %s could not be renewed (%s), retrying", self.where, error)
            if self._lost is not None:
                return

    def _compare(self, found: Tagged | None) -> None:
        """If this run still owns the lease, store the tag of the lease. Otherwise, store that it is lost."""
        owner: Mapping[str, Any] = {} if found is None else _parse(found.content)
        if found is None or owner.get("name") != self._name:
            self._lost = _belongs(self.where, owner)
        else:
            self._tag = found.tag

    def _replace(self, tag: str, *, released: bool = False) -> bool:
        """Write the lease with the next number if its tag is unchanged; return whether the lease was written."""
        self._number += 1
        new = self.where.replace(OWNER, self._content(released=released), tag)
        if new is not None:
            self._tag = new
        return new is not None

    def _content(self, *, released: bool = False) -> bytes:
        own = {"name": self._name, "number": self._number, "time_to_live_s": self._seconds, "released": released}
        return json.dumps({**own, **_own_process()}).encode()


DirectoryLock: TypeAlias = FileLock | Lease

# -- owners in ``.owner.json`` -----------------------------------------------------------------------------------------


def _own_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "system": system(),
        "started": _start_time(os.getpid()),
        "job": os.environ.get("TORCHELASTIC_RUN_ID"),
        "restarts": _restarts(),
        "since": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _restarts() -> int | None:
    """Return how often torchrun's agent has restarted its processes, or None without torchrun."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else None


def _parse(content: bytes) -> Mapping[str, Any]:
    """Return the owner that a lock file describes, or an empty mapping if the file is damaged."""
    try:
        values = json.loads(content or b"{}")
    except ValueError:
        return {}
    return cast("Mapping[str, Any]", values) if isinstance(values, dict) else {}


def _belongs(where: Directory, owner: Mapping[str, Any]) -> str:
    process = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    return f"{where} belongs to {process} since {owner.get('since', '?')}"


def _running_error(where: Directory, owner: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"{_belongs(where, owner)}, and that process is running. Choose a different train.checkpoint_dir, or end that "
        "process"
    )


def _released_error(where: Directory) -> NotOursError:
    return NotOursError(f"this run has released {where} and publishes nothing to this directory any more")


def _is_dead(owner: Mapping[str, Any]) -> bool:
    """Return whether an owner was a process of this system (see `system`) that has ended."""
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
    # PIDs are reused, in containers quickly. A lease with this process's PID that is not in HELD had an earlier owner.
    starts = owner.get("started"), _start_time(pid)
    return pid == os.getpid() or (None not in starts and starts[0] != starts[1])


def _is_earlier_attempt(owner: Mapping[str, Any]) -> bool:
    """Return whether an owner may be an earlier attempt of this torchrun job, which torchrun has ended.

    The answer may be wrong, because agents count restarts separately, and a different cluster may run a job of this
    name. So the caller still waits for the lease, but not as long.
    """
    job, before, now = os.environ.get("TORCHELASTIC_RUN_ID"), owner.get("restarts"), _restarts()
    if job in (None, "none") or owner.get("job") != job:  # "none": torchrun without --rdzv-id
        return False
    return isinstance(before, int) and now is not None and before < now


@cache
def system() -> str:
    """Return a name for the boot of this host and its PID namespace (container), in which PIDs are unique."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        return f"{boot} {Path('/proc/self/ns/pid').stat().st_ino}"
    return socket.gethostname()


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in ticks since boot, or None if it is unknown."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
