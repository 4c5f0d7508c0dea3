"""What sections of a recipe say of a value that is out of range."""

from __future__ import annotations

import math
from typing import Any

from hotbed.errors import RecipeError, did_you_mean
from hotbed.specs import is_int


def by_table(key: str, value: Any) -> list[tuple[str, Any]]:
    """Dotted keys and values of an option that may be given by table."""
    return [(f"{key}.{table}", v) for table, v in value.items()] if isinstance(value, dict) else [(key, value)]


def at_least(key: str, value: object, limit: int, what: str = "") -> None:
    """Raise `RecipeError` unless a value is an integer of at least ``limit``, which is ``what``."""
    if not is_int(value):
        raise RecipeError(f"{key} is {value!r}, must be an integer")
    if not value >= limit or not math.isfinite(value):
        raise RecipeError(f"{key} is {value:,}, must be at least {limit:,}{f' ({what})' if what else ''}")


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `RecipeError` unless a value is one of these."""
    if value not in choices:
        raise RecipeError(f"{key} is '{value}', must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")


def seed(key: str, value: object) -> None:
    """Raise `RecipeError` unless a value is a seed: an integer of at most 64 bits."""
    at_least(key, value, 0)
    if is_int(value) and value >= 2**64:
        raise RecipeError(f"{key} is {value:,}, must be below 2**64")
