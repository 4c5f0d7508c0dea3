"""What ``make test`` takes of large matrices and of drawn examples; ``make test-all`` takes all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

FEWER_EXAMPLES = 40
"""Drawn by ``make test`` where ``make test-all`` draws 100."""


def full(*values: Any, id: str | None = None) -> Any:
    """A set of parameters that only ``make test-all`` runs."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def examples(count: int) -> int:
    """How many examples to draw where ``make test-all`` draws `count`."""
    return max(1, count * settings.default.max_examples // 100)  # pyright: ignore[reportOptionalMemberAccess]
