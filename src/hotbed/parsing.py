"""Parse YAML and JSON that others may have written, within limits: nothing is made that is much larger than its text.

A few hundred bytes can stand for more than any memory holds: aliases of aliases in YAML (a "billion laughs"), lists
in lists, numbers of a million digits. What is refused here is a `TextError`, whose text goes on after the name of a
file ("is not JSON: …", "is longer than …"); callers put it there, and raise their own error.
"""

from __future__ import annotations

import json
import reprlib
import warnings
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_BYTES = 64 << 20
"""Largest file of JSON or YAML that is read; recipes and the manifests of checkpoints have limits of their own."""
MOST_DEPTH = 100
"""Lists and mappings inside each other."""
MOST_VALUES = 1 << 18
"""Keys and values of a YAML document; those behind an alias count wherever it stands."""
MOST_DIGITS = 400
"""Characters of a number in YAML."""


class TextError(ValueError):
    """Text that is not what its format says, or beyond a limit."""


def read_limited(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a file, also a pipe, that has no more bytes than this; what has no end, as /dev/zero, is refused."""
    with path.open("rb") as stream:
        content = stream.read(most + 1)
    if len(content) > most:
        raise TextError(f"is longer than {most:,} bytes")
    return content


def map_npy(path: Path) -> NDArray[Any]:
    """Map an array of a ``.npy`` file into memory without allocating it; objects, which are pickles, are refused."""
    from numpy.lib.format import open_memmap

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of headers that Python 2 wrote
            return open_memmap(path, mode="r")
    except (ValueError, EOFError, TypeError, OverflowError, SyntaxError, TokenError) as error:
        raise TextError(f"is not a file of NumPy's format, or is cut short: {error}") from None


def parse_yaml(text: str) -> Any:
    """Parse a document of YAML into plain values."""
    from hotbed.yaml_values import load  # with PyYAML, which only YAML needs

    return load(text)


def parse_json(text: str | bytes) -> Any:
    """Parse JSON."""
    try:
        values = json.loads(text, object_pairs_hook=_distinct)
        depth = _depth(values) if isinstance(values, dict | list) else 0
    except RecursionError:
        raise TextError(f"is nested more than {MOST_DEPTH} deep") from None
    except TextError:
        raise
    except ValueError as error:
        raise TextError(f"is not JSON: {error}") from None
    if depth > MOST_DEPTH:
        raise TextError(f"is nested more than {MOST_DEPTH} deep")
    return values


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise TextError(f"has {reprlib.repr(twice)} twice")
    return found


def _depth(value: object) -> int:
    """How deep lists and objects are nested, level by level."""
    level: list[Any] = [value]
    depth = 0
    while level and depth <= MOST_DEPTH:
        inner = [of.values() if isinstance(of, dict) else of for of in level]
        level = [v for of in inner for v in of if isinstance(v, (dict, list))]
        depth += 1
    return depth
