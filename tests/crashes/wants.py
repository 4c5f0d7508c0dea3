"""Let a process run out of disk: its n-th write of a kind fails with ENOSPC, and so do all that follow.

A real full disk needs a file system of its own, which not every machine lets a test make. What the system would answer
is raised here where hotbed writes, file by file; reads, removals and renames go on, as they do on a full disk.
"""

from __future__ import annotations

import errno
import functools
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotbed import files
from hotbed.checkpoint import storage
from hotbed.ops import cpu_cache
from hotbed.train.runs.callbacks import JsonLines


@dataclass(frozen=True)
class Want:
    """What a process runs out of.

    Attributes
    ----------
    kind
        One of `KINDS`.
    number
        The first write that fails, from 1.
    lasts
        How many fail; a disk may have room again later.
    """

    kind: str
    number: int
    lasts: int = 1 << 30


class _State:
    want: Want | None = None
    note: Path | None = None
    count = 0
    lock = threading.Lock()


def _full(*args: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def _no_records(file: int, numbers: Any, records: Any) -> int:
    return 0


KINDS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "tensors": (storage._LocalWriter, "write", _full),
    "manifest": (storage.LocalDirectory, "write", _full),
    "sync": (storage._LocalWriter, "finish", _full),
    "directory": (storage.LocalDirectory, "make", _full),
    "lease": (storage.LocalDirectory, "create", _full),
    "metrics": (JsonLines, "_write", _full),
    "text": (files, "write_text", _full),
    "rows": (cpu_cache, "write_records", _no_records),
}
"""Kinds of writing: the method that writes, and what it does on a full disk."""


def begin(want: Want, note: Path) -> None:
    """Fail from now on as wanted."""
    _State.want, _State.note = want, note


def _failing(kind: str, method: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def called(*args: Any, **options: Any) -> Any:
        want = _State.want
        if want is None or want.kind != kind or _State.note is None:
            return method(*args, **options)
        with _State.lock:
            _State.count += 1
            count = _State.count
        if not want.number <= count < want.number + want.lasts:
            return method(*args, **options)
        with _State.note.open("a") as stream:
            stream.write(json.dumps({"kind": kind, "number": count}) + "\n")
        return instead(*args, **options)

    return called


def install() -> None:
    """Wrap everything, once."""
    for kind, (owner, name, instead) in KINDS.items():
        setattr(owner, name, _failing(kind, getattr(owner, name), instead))
