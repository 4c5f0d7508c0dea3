"""Write files and directories that appear whole or not at all, and read what a user names."""

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
"""Largest file that is read as text that somebody has written."""


def write_text(path: Path, text: str) -> None:
    """Write a file under a hidden name beside it, then rename it; on any failure ``path`` is as it was."""
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
    """Name a file in the errors of the body that name none, as those of open files do: a full disk's."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def new_file(path: Path) -> Generator[Path]:
    """Give a hidden file beside ``path`` to write to, and rename it to ``path`` when the body succeeds.

    The hidden file is there, empty and locked: write into it, as another one in its place would not be locked. What a
    killed process has left is removed by the next one that writes the same file.
    """
    unfinished = path.parent / f".{path.name}.unfinished-{uuid.uuid4().hex[:8]}"
    with _alone_in(path.parent):
        for left in path.parent.glob(f".{glob.escape(path.name)}.unfinished-????????"):
            if left.is_file() and (claim := _locked(left)) is not None:
                left.unlink()
                os.close(claim)
        unfinished.touch()
        claim = _locked(unfinished)
    try:
        yield unfinished
        sync(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
        if claim is not None:
            os.close(claim)


def unnamed_file(directory: str | Path | None, what: str) -> int:
    """Make a file without a name, which ends with the process, and return its descriptor.

    It is in ``directory``, made if it is not there; None: that of temporary files. The `StoreError` where it cannot be
    made names ``what`` it is for.
    """
    try:
        if directory is not None:
            Path(directory).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory, prefix="hotbed-") as unnamed:
            return os.dup(unnamed.fileno())
    except OSError as error:
        place = directory or tempfile.gettempdir()
        raise StoreError(f"no file for {what} can be made in {place} ({error}); choose another") from None


def sync(path: Path) -> None:
    """Wait until a file's content, or a directory's list of files, is on the disk and survives a power failure."""
    if os.name == "nt" and path.is_dir():
        return  # Windows opens no directory, and writes such lists through
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: object) -> None:
    """Write JSON as `write_text` does."""
    write_text(path, json_text(value))


def json_text(value: object) -> str:
    """A value as JSON; NaN and infinities, which JSON lacks, become null."""
    return json.dumps(without_nan(value), indent=2, allow_nan=False) + "\n"


def without_nan(value: object) -> object:
    """The same plain value with None in place of floats that are not finite, and paths as text."""
    if isinstance(value, Mapping):
        return {str(k): without_nan(v) for k, v in cast("Mapping[Any, object]", value).items()}
    if isinstance(value, list | tuple):
        return [without_nan(v) for v in cast("list[object]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def read_text(path: Path) -> str:
    """Text of a file that people write, also of a pipe; what has no end, as /dev/zero, is refused.

    `RecipeError` if it is a directory, or longer than `MOST_TEXT_BYTES`.
    """
    if path.is_dir():
        raise RecipeError(f"{path} is a directory; give a file")
    try:
        return read_limited(path, MOST_TEXT_BYTES).decode("utf-8")
    except TextError as error:
        raise RecipeError(f"{path} {error}, as no recipe is; give another file") from None


def read_yaml(path: Path) -> Any:
    """Read what a recipe's file holds; `RecipeError` if there is no such file, or `parse_yaml` refuses its text."""
    return yaml_of(lambda: read_text(path), str(path))


def yaml_of(read: Callable[[], str], path: str) -> Any:
    """What a recipe's file holds whose text ``read`` gives, from wherever it is; see `read_yaml`."""
    try:
        return parse_yaml(read())
    except FileNotFoundError:
        raise RecipeError(f"there is no recipe {path}; see recipes/, or draft one with hotbed init") from None
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
    marker: str,  # file that such directories hold; only a directory with it is ever replaced
    overwrite: bool = False,  # whether to replace an existing ``path``
    key: str | None = None,  # 8 hexadecimal digits of everything that decides the content
    # errors after which the hidden directory stays, for a successor with the same key
    kept_on: tuple[type[BaseException], ...] = (),
) -> Generator[Path]:
    """Give a hidden directory beside ``path`` to write into, and rename it to ``path`` when the body succeeds.

    On any failure the hidden directory is removed and ``path`` is as it was; the message of a full disk says so. What a
    killed process has left is removed by the next one that makes the same directory, or put back where that process was
    replacing it. With an equal ``key`` the left directory is given again instead, so that the successor resumes.
    """
    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.unfinished-{key or uuid.uuid4().hex[:8]}"
    with _alone_in(path.parent):
        _clear_up_after_killed(path, unfinished)
    filled = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    if filled and not overwrite:
        raise DataError(f"{path} exists already; choose another directory, or pass overwrite=True to replace it")
    if filled and not (path / marker).is_file():
        raise DataError(f"{path} holds no {marker}, so it is not a dataset and will not be replaced; choose another")
    with _alone_in(path.parent):
        is_left = unfinished.is_dir()
        unfinished.mkdir(exist_ok=True)
        claim = _locked(unfinished)
    if is_left and claim is None and os.name != "nt":
        raise DataError(
            f"{path} is being made by another process; wait for it, or choose another directory (or remove "
            f"{unfinished}, if there is none)"
        )
    try:
        yield unfinished
        if filled:
            old = path.parent / f".{path.name}.old-{uuid.uuid4().hex[:8]}"
            with _alone_in(path.parent):
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
                f"{os.strerror(error.errno)}: writing {path} failed with {free:,} bytes free on its disk; nothing was "
                f"left behind, so free some space or choose another directory and start again",
            ) from error
        raise
    finally:
        if claim is not None:
            os.close(claim)


def _clear_up_after_killed(path: Path, keep: Path) -> None:
    """Put back the directory that a killed process was replacing, and remove those that killed ones were filling."""
    for old in sorted(path.parent.glob(f".{glob.escape(path.name)}.old-????????")):
        if not path.exists():  # it died between two renames
            old.rename(path)
        else:
            shutil.rmtree(old, ignore_errors=True)
    for unfinished in path.parent.glob(f".{glob.escape(path.name)}.unfinished-????????"):
        if unfinished != keep and unfinished.is_dir() and (claim := _locked(unfinished)) is not None:
            shutil.rmtree(unfinished, ignore_errors=True)
            os.close(claim)


@contextmanager
def _alone_in(directory: Path) -> Generator[None]:
    """Let one process at a time make and claim hidden directories in a directory, where its file system has locks."""
    claim = _locked(directory, wait=True)
    try:
        yield
    finally:
        if claim is not None:
            os.close(claim)


def _locked(path: Path, *, wait: bool = False) -> int | None:
    """Lock a file or directory until its descriptor is closed, or this process ends; None if locked or not lockable."""
    if os.name == "nt":
        return None  # Windows opens no directory, and has other locks
    import fcntl

    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
