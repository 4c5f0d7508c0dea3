"""Directories that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from hotbed.errors import DataError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_directory(path: Path, *, marker: str, overwrite: bool = False) -> Generator[Path]:
    """Give a hidden directory beside ``path`` to write into, and rename it to ``path`` when the body succeeds.

    On any failure the hidden directory is removed and ``path`` is as it was.

    Parameters
    ----------
    path
        The directory to make; its parents are made too.
    marker
        Name of a file that such directories hold. Only a directory with it is ever replaced.
    overwrite
        Replace an existing ``path``.

    Raises
    ------
    DataError
        If ``path`` exists and may not be replaced.
    OSError
        If writing fails (a full disk); the message says that nothing was left behind.
    """
    path = path.absolute()
    filled = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    if filled and not overwrite:
        raise DataError(f"{path} exists already; choose another directory, or pass overwrite=True to replace it")
    if filled and not (path / marker).is_file():
        raise DataError(f"{path} holds no {marker}, so it is not a dataset and will not be replaced; choose another")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.unfinished-{uuid.uuid4().hex[:8]}"
    unfinished.mkdir()
    try:
        yield unfinished
        if filled:
            old = path.parent / f".{path.name}.old-{uuid.uuid4().hex[:8]}"
            path.rename(old)
            try:
                unfinished.rename(path)
            except BaseException:
                old.rename(path)
                raise
            shutil.rmtree(old)
        else:
            unfinished.replace(path)
    except BaseException as error:
        free = shutil.disk_usage(path.parent).free
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: writing {path} failed with {free:,} bytes free on its disk; nothing was "
                f"left behind, so free some space or choose another directory and start again",
            ) from error
        raise
