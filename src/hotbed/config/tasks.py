"""Define the recipe's section on tasks: each label's loss, how much that counts, and metrics of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hotbed.config.component import Component
from hotbed.errors import RecipeError

BINARY_CROSS_ENTROPY = "torch.nn.BCEWithLogitsLoss"


@dataclass(frozen=True, kw_only=True)
class TaskRecipe:
    """How a model is trained and measured for one label."""

    loss: Component = field(default_factory=lambda: Component(class_path=BINARY_CROSS_ENTROPY))
    """A torch.nn loss or one of your own, made with ``reduction="none"``: it maps logits and labels ``[n]`` to a value
    per sample ``[n]``. Arguments that are tensors are given as numbers or lists."""
    weight: float = 1.0
    """Factor of the loss. Weights of samples are columns of the data: `Schema.weight`, `Schema.label_weights`."""
    metrics: dict[str, Component] = field(default_factory=dict)
    """By name, metrics of this label beside the recipe's ``metrics``, or in the place of those of the same name."""

    def __post_init__(self) -> None:
        value: object = self.weight
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf:
            raise RecipeError(f"weight is {value!r}, must be a finite number, at least 0")

    @property
    def is_default(self) -> bool:
        """Whether it is trained as a label is that the recipe does not name."""
        return replace(self, metrics={}) == TaskRecipe()
