"""Compute metrics of a user's choice beside hotbed's: classes of torchmetrics, torcheval or one's own.

A metric has ``update(scores, labels)``, which takes scores from 0 to 1 and labels of samples ``[n]``, and
``compute()``, which gives a number. hotbed gathers what all ranks have scored, so none needs to know of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hotbed.config import Component, Recipe
from hotbed.errors import HotbedError, RecipeError

Makers: TypeAlias = Mapping[str, Callable[[], Any]]
"""By name, what makes a metric."""


@dataclass(frozen=True)
class TaskMetrics:
    """Metrics of all tasks, and those that some have besides or in their place.

    Attributes
    ----------
    of_all
        Those of all tasks.
    of_tasks
        By task, those that it alone has.
    """

    of_all: Makers
    of_tasks: Mapping[str, Makers]

    def of(self, task: str) -> Makers:
        """All that are computed for a task."""
        return {**self.of_all, **self.of_tasks.get(task, {})}

    def key(self, task: str, name: str) -> str:
        """Where a recipe has a metric of a task."""
        return f"tasks.{task}.metrics.{name}" if name in self.of_tasks.get(task, {}) else f"metrics.{name}"


OwnMetrics: TypeAlias = Makers | TaskMetrics
"""What makes metrics: of all tasks alike, or of each."""

OWN_NAMES = frozenset(
    {"samples", "auc", "logloss", "normalized_entropy", "calibration", "gauc", "groups", "groups_left_out", "tasks"}
    | {"undefined", "event", "step"}
)
"""Names that records of evaluations have already."""

_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")


def metrics_of(recipe: Recipe) -> OwnMetrics:
    """What makes the metrics of a recipe and of its tasks, each tried once; see `own_metrics` for the errors."""
    of_tasks = {
        label: own_metrics(task.metrics, f"tasks.{label}.metrics")
        for label, task in recipe.tasks.items()
        if task.metrics
    }
    of_all = own_metrics(recipe.metrics)
    return TaskMetrics(of_all, of_tasks) if of_tasks else of_all


def own_metrics(components: Mapping[str, Component], key: str = "metrics") -> dict[str, Callable[[], Any]]:
    """What makes the metrics that are at a key of a recipe, each tried once.

    Raises
    ------
    RecipeError
        If a name is one of hotbed's own, or a class has no ``update`` and ``compute``, or refuses scores and labels.
    """
    found: dict[str, Callable[[], Any]] = {}
    for name, component in components.items():
        if name in OWN_NAMES:
            raise RecipeError(f"{key} has '{name}', which every evaluation has already; give the metric another name")
        try:
            made = component.build()
        except RecipeError as error:
            raise RecipeError(f"{key}.{name}: {error}") from error
        if not all(callable(getattr(made, method, None)) for method in ("update", "compute")):
            raise RecipeError(f"{key}.{name}: {component.class_path} has no update(scores, labels) and compute()")
        found[name] = partial(component.build)
        value_of(f"{key}.{name}", made, torch.tensor([0.1, 0.6, 0.8, 0.3]), torch.tensor([0.0, 1.0, 0.0, 1.0]), None)
    return found


def value_of(name: str, metric: Any, scores: Tensor, labels: Tensor, weights: Tensor | None) -> float:
    """A metric of scores, labels and weights ``[n]``; labels that are all 0 or 1 are given as integers."""
    given = labels.long() if bool(((labels == 0) | (labels == 1)).all()) else labels
    kind, more = type(metric).__name__, {}
    if weights is not None:
        known = signature(metric.update).parameters
        place = next((key for key in _WEIGHTS if key in known), None)
        if place is None:
            raise RecipeError(
                f"{name}: samples have weights, which {kind}.update does not take ({', '.join(_WEIGHTS)}); "
                "leave the metric out, or use one of torcheval or your own"
            )
        more = {place: weights}
    try:
        metric.update(scores, given, **more)
        return float(metric.compute())
    except HotbedError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(f"{name}: {kind} failed on scores and labels [{len(scores)}]: {text}") from error
