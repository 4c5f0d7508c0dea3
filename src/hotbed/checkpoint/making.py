"""New directories: marked as unfinished until all is there, and never in the place of anything else."""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from hotbed.checkpoint.manifest import MANIFEST
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.writing import FileWriter
from hotbed.errors import CheckpointError

UNFINISHED = "unfinished.json"
"""File that says that what else is there belongs to a checkpoint that was never finished, until it is."""


@contextmanager
def making(path: str | Path | Directory) -> Generator[tuple[Directory, FileWriter]]:
    """A new directory, and what writes its files; until the end it is marked as unfinished, and on errors it goes.

    Raises
    ------
    CheckpointError
        If there is anything at the path but what an unfinished checkpoint left.
    """
    place = directory(path)
    make_directory(place)
    try:
        with FileWriter(place) as writer:
            yield place, writer
        place.remove(UNFINISHED)
    except BaseException:
        place.remove_all()
        raise


def make_directory(place: Directory) -> str:
    """Make the directory; only what an unfinished checkpoint left there is removed. Returns a token."""
    names = place.names()
    if MANIFEST in names:
        raise CheckpointError(f"{place} exists already; checkpoints are never overwritten, choose another directory")
    if names and UNFINISHED not in names:
        raise CheckpointError(f"{place} exists already and holds {names[0]}; choose another directory")
    for name in sorted(names, key=lambda name: name == UNFINISHED):  # the mark last
        place.remove(name)
    place.make()
    token = uuid.uuid4().hex
    place.write(UNFINISHED, json.dumps({"token": token}))
    return token
