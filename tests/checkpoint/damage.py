"""Faults of files and disks, for tests of what notices them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any, NoReturn


def flip_last_bit(file: Path) -> None:
    """Damage a file whose content is otherwise valid."""
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def disk_is_full(*_: Any) -> NoReturn:
    """Replace a function that writes."""
    raise OSError(errno.ENOSPC, "No space left on device")
