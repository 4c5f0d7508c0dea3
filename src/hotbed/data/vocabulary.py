"""Number the values of each column; values seen in earlier data keep their ids.

A vocabulary is a text file per column, ``C1.txt``: line n is the value with id n, as 8 hexadecimal digits. Id 0 is not
in it: it stands for values that are missing or too rare. Files are append-only: a later one starts with the earlier.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from hotbed.errors import DataError

VOCABULARY = "vocabulary"
"""Folder of a prepared dataset that has them."""
_LINES = 1 << 20  # values converted to text at once
_LINE_BYTES = 9


class Vocabulary:
    """Values of one column in id order.

    Parameters
    ----------
    values
        Distinct values ``[V]`` uint32; the one at position i has id i + 1.
    """

    def __init__(self, values: NDArray[np.uint32]) -> None:
        self.values = values
        order = np.argsort(values, kind="stable")
        self._sorted = values[order]
        self._ids = (order + 1).astype(np.int32 if len(values) < np.iinfo(np.int32).max else np.int64)

    @staticmethod
    def empty() -> Vocabulary:
        """Make a vocabulary without values."""
        return Vocabulary(np.zeros(0, dtype=np.uint32))

    @property
    def rows(self) -> int:
        """Rows a table of this column needs: all values and id 0."""
        return len(self.values) + 1

    def lookup(self, values: NDArray[np.uint32]) -> NDArray[Any]:
        """Ids ``[n]`` of values ``[n]``; 0 for those that are not in the vocabulary."""
        if not len(self.values):
            return np.zeros(len(values), dtype=np.int32)
        # Clicks are heavy-tailed: searching each distinct value once beats searching all.
        distinct, inverse = np.unique(values, return_inverse=True)
        at = np.minimum(np.searchsorted(self._sorted, distinct), len(self.values) - 1)
        return np.where(self._sorted[at] == distinct, self._ids[at], 0)[inverse]

    def extended(self, values: NDArray[np.uint32], counts: NDArray[Any], threshold: int) -> Vocabulary:
        """Append the values that are new and were seen at least ``threshold`` times, by falling count, then by value.

        Parameters
        ----------
        values
            Distinct values ``[n]``.
        counts
            How often each was seen ``[n]``.
        threshold
            Smallest count of a value that gets an id.
        """
        new = (counts >= threshold) & (self.lookup(values) == 0)
        values, counts = values[new], counts[new]
        order = np.lexsort((values, -counts.astype(np.int64)))
        return Vocabulary(np.concatenate([self.values, values[order]]))

    def save(self, path: Path) -> None:
        """Write the text file."""
        with path.open("wb") as stream:
            for text in _lines(self.values):
                stream.write(text)

    @staticmethod
    def load(path: Path) -> Vocabulary:
        """Read a text file.

        Raises
        ------
        DataError
            If the file does not exist, a line is not 8 hexadecimal digits, or a value occurs twice.
        """
        check_exists(path)
        if (size := path.stat().st_size) > _LINE_BYTES << 32:
            raise DataError(f"{path} is damaged: {size:,} bytes are more lines than the 2^32 values there are")
        parts: list[NDArray[np.uint32]] = [np.zeros(0, dtype=np.uint32)]
        with path.open("rb") as stream:
            while text := stream.read(_LINES * _LINE_BYTES):
                try:
                    part = np.frombuffer(bytes.fromhex(text.decode("ascii")), dtype=">u4").astype(np.uint32)
                except (UnicodeDecodeError, ValueError):
                    part = np.zeros(0, dtype=np.uint32)
                if b"".join(_lines(part)) != text.lower():
                    raise DataError(f"{path} is damaged: every line must be 8 hexadecimal digits; copy the file again")
                parts.append(part)
        values = np.concatenate(parts)
        if len(np.unique(values)) != len(values):
            raise DataError(f"{path} is damaged: a value occurs twice, so it would have two ids; copy the file again")
        return Vocabulary(values)


def vocabulary_file(directory: str | Path, table: str) -> Path:
    """Where the vocabulary of a table is."""
    return Path(directory) / f"{quote(table, safe=' ')}.txt"


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a vocabulary, and check it; a `DataError` says that there is none, or that it is damaged."""
    return Vocabulary.load(path)


def check_exists(path: Path) -> None:
    """Raise `DataError` unless there is such a vocabulary file."""
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the `vocabulary` directory of a prepared dataset")


def _lines(values: NDArray[np.uint32]) -> Iterator[bytes]:
    for start in range(0, len(values), _LINES):
        part = values[start : start + _LINES].astype(">u4")
        yield part.tobytes().hex("\n", 4).encode("ascii") + b"\n"
