"""A new directory of files by one process: converted and imported checkpoints, and what is exported."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from hotbed.checkpoint.save import UNFINISHED, _make
from hotbed.checkpoint.storage import Directory, directory
from hotbed.checkpoint.writing import FileWriter


@contextmanager
def making(path: str | Path | Directory) -> Generator[tuple[Directory, FileWriter]]:
    """A new directory, and what writes its files; until the end it is marked as unfinished, and on errors it goes.

    Raises
    ------
    CheckpointError
        If there is anything at the path but what an unfinished checkpoint left.
    """
    place = directory(path)
    _make(place)
    try:
        with FileWriter(place) as writer:
            yield place, writer
        place.remove(UNFINISHED)
    except BaseException:
        place.remove_all()
        raise
