"""Write files and directories atomically, and read recipes and other text files of users."""

from __future__ import annotations

import errno
import glob
import json
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from hotbed.errors import DataError, RecipeError, StoreError
from hotbed.parsing import TextError, parse_yaml, read_limited

MOST_TEXT_BYTES = 16 << 20
"""Largest text file that is read, in bytes."""


def write_text(path: Path, text: str) -> None:
    """Write a hidden file in the same directory, then rename it to ``path``. A failure leaves ``path`` unchanged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.unfinished-{uuid.uuid4().hex[:8]}"
    try:
        with name_file_errors(path), unfinished.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def name_file_errors(path: Path) -> Generator[None]:
    """Add the file's name to `OSError` without one, e.g. of a full disk while an open file is written."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def new_file(path: Path) -> Generator[Path]:
    """Yield a hidden file in the same directory, and rename it to ``path`` when the body succeeds.

    The hidden file exists, is empty and is locked. Write into it and do not replace it, because a new file would not be
    locked. Files that killed processes left are removed by the next process that writes the same ``path``.
    """
    unfinished = path.parent / f".{path.name}.unfinished-{uuid.uuid4().hex[:8]}"
    with _exclusive_access(path.parent):
        for left in path.parent.glob(f".{glob.escape(path.name)}.unfinished-????????"):
            if left.is_file() and (claim := _lock(left)) is not None:
                left.unlink()
                os.close(claim)
        unfinished.touch()
        claim = _lock(unfinished)
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
        if claim is not None:
            os.close(claim)


def unnamed_file(directory: str | Path | None, what: str) -> int:
    """Create a file without a name, which disappears with the process, and return its descriptor.

    The file is in ``directory``, which is created if needed. Default: the directory of temporary files. If this fails,
    raise `StoreError` with the purpose ``what``.
    """
    try:
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, prefix="hotbed-") as unnamed:
            return os.dup(unnamed.fileno())
    except OSError as error:
        place = directory or tempfile.gettempdir()
        raise StoreError(f"no file for {what} can be created in {place} ({error}). Use another directory") from None


def sync(path: Path) -> None:
    """Flush a file's content, or a directory's list of files, so that it survives a power failure."""
    if os.name == "nt" and path.is_dir():
        return  # Windows cannot open directories, and writes changes of directories through
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write JSON with `write_text`."""
    write_text(path, json_text(value))


def json_text(value: object) -> str:
    """Return a value as JSON. NaN and infinities become null, because JSON does not have them."""
    return json.dumps(without_nan(value), indent=2, allow_nan=False) + "\n"


def without_nan(value: object) -> object:
    """Return a plain value with non-finite floats replaced by None, and paths by text."""
    if isinstance(value, Mapping):
        return {str(k): without_nan(v) for k, v in cast("Mapping[Any, object]", value).items()}
    if isinstance(value, list | tuple):
        return [without_nan(v) for v in cast("list[object]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def read_text(path: Path) -> str:
    """Return the text of a file or a pipe.

    Raise `RecipeError` if it is a directory, or longer than `MOST_TEXT_BYTES`, e.g. /dev/zero.
    """
    if path.is_dir():
        raise RecipeError(f"got the directory {path}, expected a file. Pass a file")
    try:
        return read_limited(path, MOST_TEXT_BYTES).decode("utf-8")
    except TextError as error:
        raise RecipeError(f"{path} {error}, so it is not a recipe. Pass another file") from None


def read_yaml(path: Path) -> Any:
    """Return the plain values of a recipe's file.

    Raise `RecipeError` if the file does not exist, or `parse_yaml` rejects its text.
    """
    return yaml_of(lambda: read_text(path), str(path))


def yaml_of(read: Callable[[], str], path: str) -> Any:
    """Like `read_yaml`, for a recipe on any storage. ``read`` returns its text, and messages name ``path``."""
    try:
        return parse_yaml(read())
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe {path}. See recipes/, or draft one with hotbed init") from None
    except RecipeError:
        raise
    except TextError as error:
        raise RecipeError(f"{path} {error}") from None
    except ValueError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from None


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def new_directory(
    path: Path,
    *,
    marker: str,  # a file that such directories contain; only a directory with this file is ever replaced
    overwrite: bool = False,  # whether to replace an existing ``path``
    key: str | None = None,  # 8 hexadecimal digits, a hash of everything that determines the content
    # errors after which the hidden directory is kept for a successor with the same key
    kept_on: tuple[type[BaseException], ...] = (),
) -> Generator[Path]:
    """Yield a hidden directory next to ``path``, and rename it to ``path`` when the body succeeds.

    On any failure the hidden directory is removed, and ``path`` is unchanged. The message about a full disk states
    this. If a process was killed, the next process that creates the same directory removes its hidden directory, and
    restores a directory that was being replaced. If the hidden directory has the same ``key``, it is yielded again, so
    that the next process can resume.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.unfinished-{key or uuid.uuid4().hex[:8]}"
    with _exclusive_access(path.parent):
        _clean_up_after_killed(path, unfinished)
    filled = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    if filled and not overwrite:
        raise DataError(f"{path} exists already. Use another directory, or pass overwrite=True to replace it")
    if filled and not (path / marker).is_file():
        raise DataError(f"{path} has no {marker}, so it is not a dataset and will not be replaced. Use another")
    with _exclusive_access(path.parent):
        is_left = unfinished.is_dir()
        unfinished.mkdir(exist_ok=True)
        claim = _lock(unfinished)
    if is_left and claim is None and os.name != "nt":
        raise DataError(
            f"another process is creating {path}. Wait for it, or use another directory. If there is no such process, "
            f"remove {unfinished}"
        )
    try:
        yield unfinished
        if filled:
            old = path.parent / f".{path.name}.old-{uuid.uuid4().hex[:8]}"
            with _exclusive_access(path.parent):
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
        if isinstance(error, kept_on):
            raise
        free = shutil.disk_usage(path.parent).free
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            raise OSError(
                error.errno,
                f"{os.strerror(error.errno)}: writing {path} failed with {free:,} bytes free on its disk, and the "
                "unfinished files were removed. Free some space or use another directory, and start again",
            ) from error
        raise
    finally:
        if claim is not None:
            os.close(claim)


def _clean_up_after_killed(path: Path, keep: Path) -> None:
    """Restore a directory that a killed process was replacing. Remove unfinished directories of killed processes."""
    for old in sorted(path.parent.glob(f".{glob.escape(path.name)}.old-????????")):
        if not path.exists():  # the process was killed between two renames
            old.rename(path)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for unfinished in path.parent.glob(f".{glob.escape(path.name)}.unfinished-????????"):
        if unfinished != keep and unfinished.is_dir() and (claim := _lock(unfinished)) is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
            os.close(claim)


@contextmanager
def _exclusive_access(directory: Path) -> Generator[None]:
    """Lock a directory while hidden files are created and claimed in it, if its file system has locks."""
    claim = _lock(directory, wait=True)
    try:
        yield
    finally:
        if claim is not None:
            os.close(claim)


def _lock(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file or directory and return its open descriptor, or None if it is locked already or cannot be locked."""
    if os.name == "nt":
        return None  # Windows cannot open directories, and has other locks
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
