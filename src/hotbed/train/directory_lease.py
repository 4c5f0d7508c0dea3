"""Keep a directory of checkpoints for one run: two in one directory would remove each other's checkpoints.

On a local file system this is a lock of the system's, which ends with the process, however that ends (`FileLock`). An
object store has no locks. There the file ``.owner.json`` is a lease (`Lease`):

1. It is created, which one process alone can do; it names its owner and has a number.
2. The owner replaces it at a third of its time to live, with the next number, on condition that it is as it was.
3. Whoever finds it and cannot know that the owner has ended waits. If the file changes, the owner lives: refused. If it
   is the same for its time to live, by the clock of the one who waits, the owner has ended, and the file is replaced,
   again on condition that it is as it was. No clock of another host is believed.
4. An owner that finds another's lease has lost: its training ends, and it publishes nothing. It looks at each renewal,
   before it begins to write a checkpoint, before it removes anything, and last before it writes the manifest.

The owner is known to have ended where it was a process of this system with another one's number now, or none. Where it
seems to be of the same job of torchrun, which has started processes again since and ended all before it did, the wait
is only as long as a renewal takes (`RENEWAL`): another cluster may have a job of this name, whose owner lives.

Between the last look and the manifest another run can take over, if this process is stopped for the time to live just
there; a conditional write is tried for less than that (`hotbed.locations.CONDITIONAL_S`). Each attempt to save a
checkpoint has names of files of its own, and one alone creates the manifest, so neither harms the other's.
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
"""File that names the process which writes into a directory."""
TIME_TO_LIVE_S = 60.0
"""Seconds that a lease holds without being renewed."""
RENEWAL = 0.4
"""Share of the time to live within which an owner that lives has renewed its lease: more than the third after which it
does."""
_LOOKS = 30
"""Looks per time to live, of one who waits for it to end."""

_LONGEST_S = 600.0
"""More is not waited for, whatever a file says."""
HELD: set[str] = set()
"""Names of the leases of this process."""

_log = logging.getLogger("hotbed")


def lock(where: Directory) -> DirectoryLock:
    """Return the lock of a directory; entering it raises `CheckpointError` if another run has the directory."""
    return FileLock(where) if isinstance(where, LocalDirectory) else Lease(where)


class FileLock:
    """A lock of the system's on ``.owner.json``; of NFS, too, from version 4 on, whose server forgets hosts that died.

    While another host has it, this waits for as long as such servers remember a host.
    """

    PATIENCE_S = 120.0
    """How long a lock of another host is waited for: longer than servers of NFS remember it, which is 90 s."""

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
            os.pwrite(descriptor, json.dumps({"name": self._name, **_me()}).encode(), 0)
        except BaseException:  # also Ctrl-C while it waits
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def _acquire(self, descriptor: int) -> None:
        """Take the lock, waiting for another host's if need be."""
        import fcntl

        end: float | None = None
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    _log.warning("%s keeps no locks (%s): a run that begins there ends this one", self.where, error)
                    return
                owner = _parsed(os.pread(descriptor, 10_000, 0))
                if end is None and owner.get("system") not in (None, system()):
                    end = time.monotonic() + self.PATIENCE_S
                    _log.warning("%s; waiting %.0f s for its lock to end", _belongs(self.where, owner), self.PATIENCE_S)
                if end is None or time.monotonic() > end:
                    raise _running_error(self.where, owner) from None
                time.sleep(1)

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)  # the file stays: another process may be about to lock it
            self._descriptor = None

    def check(self) -> None:
        """Raise `NotOursError` if the directory was taken over by another run, or was given back."""
        if self._descriptor is None:
            raise _released_error(self.where)
        try:
            os.pread(self._descriptor, 1, 0)  # fails over NFS once its server has given the lock to another host
            with self._file.open("rb") as there:
                owner, now = _parsed(there.read(10_000)), os.fstat(there.fileno())
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.EIO, errno.ESTALE):
                raise
            raise NotOursError(
                f"{self._file} was lost ({error.strerror}), and with it the lock on {self.where}; this run ends, and "
                "publishes nothing more"
            ) from None
        own = os.fstat(self._descriptor)
        if (own.st_dev, own.st_ino) != (now.st_dev, now.st_ino) or owner.get("name") != self._name:
            raise NotOursError(
                f"{_belongs(self.where, owner)}, which took it over: its file system gave it the lock that this "
                "process had; this run ends, and publishes nothing more"
            )

    def check_renewals(self) -> None:
        """Do nothing: a lock is not renewed."""


class Lease:
    """A file that is created and replaced on condition, and renewed; see the theory of operation above."""

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
        """Raise `NotOursError` if the directory was taken over by another run, or was given back."""
        if self._over.is_set() and self._lost is None:
            raise _released_error(self.where)
        if self._thread is not None and self._lost is None:
            with self._writes:
                self._compare(self.where.read_tagged(OWNER))
        self.check_renewals()

    def check_renewals(self) -> None:
        """Do the same, by what is known without a look at the directory."""
        if self._lost is not None:
            raise NotOursError(
                f"{self._lost}, which took it over: this process did not renew its lease for {self._seconds:g} s, or "
                "its job was started again; this run ends, and publishes nothing more"
            )

    # -- taking it -------------------------------------------------------------------------------------------------

    def _acquire(self) -> bool:
        """Create the lease, or take it over, waiting if need be; False if another process was faster."""
        tag = self.where.create(OWNER, self._content())
        if tag is not None:
            self._tag = tag
            return True
        there = self.where.read_tagged(OWNER)
        if there is None:
            return False
        owner = _parsed(there.content)
        if owner.get("name") == self._name:  # the answer was lost on its way, and the request sent again
            self._tag = there.tag
            return True
        if not owner.get("released") and not _has_ended(owner):
            self._wait_for_the_end_of(there, owner)
        return self._replace(there.tag)

    def _wait_for_the_end_of(self, lease: Tagged, owner: Mapping[str, Any]) -> None:
        """Return when a lease was not renewed for its time to live; `CheckpointError` if it was."""
        if owner.get("system") == system():
            raise _running_error(self.where, owner)
        live = owner.get("time_to_live_s")
        live = min(float(live), _LONGEST_S) if isinstance(live, int | float) and live > 0 else self._seconds
        seconds = live * RENEWAL if _seems_of_an_earlier_attempt(owner) else live
        start = time.monotonic()
        _log.warning("%s; waiting up to %.0f s to see whether that run lives", _belongs(self.where, owner), seconds)
        while time.monotonic() - start < seconds:
            time.sleep(live / _LOOKS)
            found = self.where.read_tagged(OWNER)
            if found is None or _parsed(found.content).get("released"):
                return
            if found.tag != lease.tag:
                raise _running_error(self.where, owner)
        _log.warning("%s was not renewed for %.0f s and is taken over", f"{self.where}/{OWNER}", seconds)

    # -- holding it ------------------------------------------------------------------------------------------------

    def _renew_until_over(self) -> None:
        while not self._over.wait(self._seconds / 3):
            with self._writes:
                try:
                    renewed = self._replace(self._tag)
                    if not renewed:
                        self._compare(self.where.read_tagged(OWNER))
                except (CheckpointError, OSError) as error:  # it holds until somebody has taken it over
                    _log.warning("the lease on %s could not be renewed (%s); trying again", self.where, error)
            if self._lost is not None:
                return

    def _compare(self, there: Tagged | None) -> None:
        """Note whose the lease is, if it is not this one's any more."""
        owner: Mapping[str, Any] = {} if there is None else _parsed(there.content)
        if there is None or owner.get("name") != self._name:
            self._lost = _belongs(self.where, owner)
        else:
            self._tag = there.tag

    def _replace(self, tag: str, *, released: bool = False) -> bool:
        """Write the lease with the next number if it still has a tag."""
        self._number += 1
        new = self.where.replace(OWNER, self._content(released=released), tag)
        if new is not None:
            self._tag = new
        return new is not None

    def _content(self, *, released: bool = False) -> bytes:
        own = {"name": self._name, "number": self._number, "time_to_live_s": self._seconds, "released": released}
        return json.dumps({**own, **_me()}).encode()


DirectoryLock: TypeAlias = FileLock | Lease

# -- owners: what a process writes about itself into ``.owner.json`` ---------------------------------------------------


def _me() -> dict[str, Any]:
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


def _parsed(content: bytes) -> Mapping[str, Any]:
    """What a file says of its owner; nothing if it is damaged."""
    try:
        values = json.loads(content or b"{}")
    except ValueError:
        return {}
    return cast("Mapping[str, Any]", values) if isinstance(values, dict) else {}


def _belongs(where: Directory, owner: Mapping[str, Any]) -> str:
    """Say in an error whose a directory is."""
    named = f"process {owner.get('pid', '?')} on {owner.get('host', '?')}"
    return f"{where} belongs to {named} since {owner.get('since', '?')}"


def _running_error(where: Directory, owner: Mapping[str, Any]) -> CheckpointError:
    """Make the error for a directory whose owner is running."""
    return CheckpointError(
        f"{_belongs(where, owner)}, which is running; choose another train.checkpoint_dir, or end that run"
    )


def _released_error(where: Directory) -> NotOursError:
    """Make the error for a directory that this process has released."""
    return NotOursError(
        f"{where} is this run's no more: it is over, and has given it back; nothing more is published there"
    )


def _has_ended(owner: Mapping[str, Any]) -> bool:
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


def _seems_of_an_earlier_attempt(owner: Mapping[str, Any]) -> bool:
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
