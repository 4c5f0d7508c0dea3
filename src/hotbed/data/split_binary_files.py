"""Read rows of split-binary's files: `OpenFiles`.

A chunk is a piece of every column's file, so a file is opened once and read by position, by any number of threads: with
26 files, opening each for every chunk took as long as reading. Memory of large results is used again.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotbed.data.feature_spec import StoredFile
from hotbed.data.source import label_error
from hotbed.errors import DataError

_MOST_OPEN = 256
"""Files that stay open at a time, of the 1,024 that a process commonly may have."""
_WIDENED_AT_ONCE = 1 << 14
"""Values; torch divides 32,768 and more among threads."""
_LABELS_AT_ONCE = 1 << 24


class OpenFiles:
    """Files of a dataset that were read, open until this is garbage; safe for several threads."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._scratch = threading.local()
        weakref.finalize(self, _close, self._descriptors)

    def read(self, file: StoredFile, start: int, out: NDArray[Any]) -> None:
        """Fill ``out`` (``[n]`` or ``[n, I]``) with the samples from ``start`` on, converted to its dtype."""
        descriptor = self._descriptor(file.path)
        try:
            same = file.dtype == out.dtype
            stored = out.reshape(-1) if same else self._memory(out.size, file.dtype)
            _fill(file, descriptor, start * file.sample_bytes, stored)
        finally:
            if file.path not in self._descriptors:
                os.close(descriptor)
        if not same:
            _convert(stored, out.reshape(-1))

    def label_range(self, name: str, file: StoredFile, samples: int) -> tuple[float, float]:
        """Smallest and largest label of a file; a `DataError` names the first that is not from 0 to 1."""
        low, high = math.inf, -math.inf
        for start in range(0, samples, _LABELS_AT_ONCE):
            part = np.empty(min(_LABELS_AT_ONCE, samples - start), dtype=file.dtype)
            self.read(file, start, part)
            if part.dtype == np.bool_:
                part = part.view(np.uint8)  # a byte may hold more than 0 and 1
            least, most = float(part.min()), float(part.max())  # NaN if one is
            if not (least >= 0 and most <= 1):
                at = int((~((part >= 0) & (part <= 1))).argmax())
                raise label_error(str(file.path), name, part[at], f"sample {start + at:,}")
            low, high = min(low, least), max(high, most)
        return low, high

    def _descriptor(self, path: Path) -> int:
        """One that stays open, unless there are too many of them."""
        found = self._descriptors.get(path)
        if found is None:
            with self._lock:
                found = self._descriptors.get(path)
                if found is None:
                    found = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                    if len(self._descriptors) < _MOST_OPEN:
                        self._descriptors[path] = found
        return found

    def _memory(self, size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
        """Uninitialised ``[size]`` of this thread, until it asks again."""
        found: NDArray[np.uint8] | None = getattr(self._scratch, "memory", None)
        if found is None or len(found) < size * dtype.itemsize:
            found = self._scratch.memory = np.empty(size * dtype.itemsize, np.uint8)
        return found[: size * dtype.itemsize].view(dtype)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[()]]:
        return OpenFiles, ()  # of another process, or of a copy: none


def _fill(file: StoredFile, descriptor: int, first: int, out: NDArray[Any]) -> None:
    """Read ``out`` from byte ``first`` on."""
    view, found = out.view(np.uint8).data, 0
    while found < len(view):
        count = os.preadv(descriptor, [view[found:]], first + found)
        if not count:
            raise DataError(
                f"{file.path}: expected {len(view):,} bytes from byte {first:,} on, found {found:,}; the file was cut "
                "short after it was opened"
            )
        found += count


def _close(descriptors: Mapping[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def count_samples(files: Mapping[str, StoredFile]) -> int:
    """Count the samples of a split; raises unless every file holds whole samples and all hold as many."""
    sizes: dict[str, int] = {}
    for name, file in files.items():
        if not file.path.is_file():
            raise DataError(f"{file.path} does not exist, but feature_spec.yaml lists it for '{name}'")
        sizes[name] = file.path.stat().st_size
    fullest = max(files, key=lambda name: sizes[name] / files[name].sample_bytes)
    samples = -(-sizes[fullest] // files[fullest].sample_bytes)
    for name, file in files.items():
        expected = samples * file.sample_bytes
        if sizes[name] != expected:
            raise DataError(
                f"{file.path}: expected {expected:,} bytes, found {sizes[name]:,} ({samples:,} samples × "
                f"{file.sample_bytes} bytes of {file.dtype.name}, as {files[fullest].path.name} has); the file is "
                f"truncated or its dtype in feature_spec.yaml is wrong: copy or prepare it again"
            )
    return samples


def _convert(stored: NDArray[Any], out: NDArray[Any]) -> None:
    """Convert values ``[n]``; float16 by torch, five times as fast as NumPy, in parts that it does not divide."""
    if stored.dtype == np.float16 and out.dtype == np.float32:
        # One call for all parts, as each call waits for Python's lock.
        target, source = (list(torch.from_numpy(of).split(_WIDENED_AT_ONCE)) for of in (out, stored))
        torch._foreach_copy_(target, source)  # pyright: ignore[reportPrivateImportUsage]
    else:
        np.copyto(out, stored, casting="unsafe")
