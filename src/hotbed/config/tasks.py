"""Define the recipe's section on tasks: with which loss a model is trained for each label, and how much that counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hotbed.config.component import Component
from hotbed.errors import RecipeError

BINARY_CROSS_ENTROPY = "torch.nn.BCEWithLogitsLoss"


@dataclass(frozen=True, kw_only=True)
class TaskRecipe:
    """How a model is trained for one label."""

    loss: Component = field(default_factory=lambda: Component(class_path=BINARY_CROSS_ENTROPY))
    """A torch.nn loss or one of your own, made with ``reduction="none"``: it maps logits and labels ``[n]`` to a value
    per sample ``[n]``. Arguments that are tensors are given as numbers or lists."""
    weight: float = 1.0
    """Factor of the loss. Weights of samples are columns of the data: `Schema.weight`, `Schema.label_weights`."""

    def __post_init__(self) -> None:
        value: object = self.weight
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise RecipeError(f"weight is {value!r}, must be a finite number, at least 0")

    @property
    def is_default(self) -> bool:
        """Whether it is what a label has that the recipe does not name."""
        return self == TaskRecipe()
