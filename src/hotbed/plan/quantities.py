"""Read and write quantities with units: ``1.3 TB/s``, ``200 Gbit/s``, ``40 GiB``, ``5 us``, ``156 TFLOP/s``.

Kilo is 1,000 and Kibi 1,024. A plain number is in bytes, bytes/s, FLOP/s or seconds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Literal

from hotbed.errors import HotbedError, RecipeError

Dimension = Literal["bytes", "bytes/s", "FLOP/s", "s", "number"]

_PREFIXES = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}
_BYTES = {f"{prefix}B": scale for prefix, scale in (_PREFIXES | _BINARY).items()}

UNITS: Mapping[Dimension, Mapping[str, float]] = {
    "bytes": _BYTES,
    "bytes/s": {f"{unit}/s": scale for unit, scale in _BYTES.items()}
    | {f"{prefix}bit/s": scale / 8 for prefix, scale in _PREFIXES.items()},
    "FLOP/s": {f"{prefix}FLOP/s": scale for prefix, scale in _PREFIXES.items()},
    "s": {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
    "number": {},
}
"""Units by what they measure, and how many of the International System's each is."""

_EXAMPLES: Mapping[Dimension, str] = {
    "bytes": "80 GB or 64 GiB",
    "bytes/s": "1.3 TB/s or 200 Gbit/s",
    "FLOP/s": "19.5 TFLOP/s",
    "s": "5 us",
    "number": "8",
}
_QUANTITY = re.compile(r"([+-]?[\d.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z/]*)")


def parse(
    what: str, text: object, dimension: Dimension, error: type[HotbedError] = RecipeError, fix: str = ""
) -> float:
    """Read a quantity; the error names it by ``what`` and ends with a ``fix``."""
    number = isinstance(text, int | float | str) and not isinstance(text, bool)
    match = _QUANTITY.fullmatch(str(text).strip()) if number else None
    scale = {"": 1.0, **UNITS[dimension]}.get(match[2]) if match else None
    value = math.nan
    with suppress(ValueError):  # as 1.2.3 is
        value = float(match[1]) * scale if match and scale is not None else math.nan
    if not math.isfinite(value):
        kind = "a number" if dimension == "number" else f"a number of {dimension}, or one with a unit"
        raise error(f"{what}: got {text!r}, expected {kind}, like {_EXAMPLES[dimension]}{fix}")
    return value


def show(value: float, dimension: Dimension) -> str:
    """Write a quantity with four digits, in the largest decimal unit that it fills."""
    units = {u: s for u, s in UNITS[dimension].items() if "i" not in u and u[:1] != "K"}
    fitting = [(scale, unit) for unit, scale in units.items() if scale <= abs(value)]
    scale, unit = max(fitting, default=min(((s, u) for u, s in units.items()), default=(1.0, "")))
    return f"{value / scale:.4g} {unit}".strip()
