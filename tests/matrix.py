"""What ``make test`` takes of large matrices and of drawn examples; ``make test-all`` takes all."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings

MORE_EXAMPLES = 250
"""Drawn by ``make test-all`` where ``make test`` draws 100, which is what Hypothesis draws."""


def full(*values: Any, id: str | None = None) -> Any:
    """A set of parameters that only ``make test-all`` runs."""
    return pytest.param(*values, marks=pytest.mark.full, id=id)


def examples(count: int) -> int:
    """How many examples to draw where ``make test`` draws `count`."""
    return count * settings().max_examples // 100
