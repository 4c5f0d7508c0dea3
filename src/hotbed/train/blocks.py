"""Hashes of files by block, so that a part of a file can be checked without the rest, and damage has a place."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hotbed.errors import CheckpointError

BLOCK_BYTES = 16 << 20
"""Bytes of a block; the last of a file may be shorter."""


def describe(file: Path) -> dict[str, Any]:
    """A file's entry in a manifest: ``bytes``, ``block_bytes`` and the ``sha256`` of each block."""
    return {"bytes": file.stat().st_size, "block_bytes": BLOCK_BYTES, "sha256": _hashes(file, BLOCK_BYTES)}


def verify(file: Path, entry: Mapping[str, Any]) -> None:
    """Read a file and compare it with its entry.

    Raises
    ------
    CheckpointError
        If it is missing, or has another size, or the first block whose content has changed.
    """
    if not file.is_file():
        raise CheckpointError(f"{file} is missing, but the manifest lists it; copy the checkpoint again")
    size = file.stat().st_size
    if size != entry["bytes"]:
        raise CheckpointError(
            f"{file} has {size:,} bytes, the manifest says {entry['bytes']:,}; copy the checkpoint again"
        )
    step: int = entry["block_bytes"]
    expected: list[str] = entry["sha256"]
    for i, (found, wanted) in enumerate(zip(_hashes(file, step), expected, strict=True)):
        if found != wanted:
            raise CheckpointError(
                f"{file}: block {i} of {len(expected)} (bytes {i * step:,} … {min((i + 1) * step, size) - 1:,}) has "
                f"SHA-256 {found[:12]}…, the manifest says {wanted[:12]}…: its content has changed; copy the "
                "checkpoint again"
            )


def _hashes(file: Path, step: int) -> list[str]:
    with file.open("rb") as stream:
        return [hashlib.sha256(block).hexdigest() for block in iter(lambda: stream.read(step), b"")]
