"""Compute metrics of a user's choice beside hotbed's: classes of torchmetrics, torcheval or one's own.

A metric has ``update(scores, labels)``, which takes scores from 0 to 1 and labels of samples ``[n]``, and
``compute()``, which gives a number. hotbed gathers what all ranks have scored, so none needs to know of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hotbed.config import Component
from hotbed.errors import HotbedError, RecipeError

OwnMetrics: TypeAlias = Mapping[str, Callable[[], Any]]
"""By name, what makes a metric."""

OWN_NAMES = frozenset(
    {"samples", "auc", "logloss", "normalized_entropy", "calibration", "gauc", "groups", "groups_left_out", "tasks"}
    | {"undefined", "event", "step"}
)
"""Names that records of evaluations have already."""

_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")


def own_metrics(components: Mapping[str, Component]) -> dict[str, Callable[[], Any]]:
    """What makes the metrics of a recipe, each tried once.

    Raises
    ------
    RecipeError
        If a name is one of hotbed's own, or a class has no ``update`` and ``compute``, or refuses scores and labels.
    """
    found: dict[str, Callable[[], Any]] = {}
    for name, component in components.items():
        if name in OWN_NAMES:
            raise RecipeError(f"metrics has '{name}', which every evaluation has already; give the metric another name")
        try:
            made = component.build()
        except RecipeError as error:
            raise RecipeError(f"metrics.{name}: {error}") from error
        if not all(callable(getattr(made, method, None)) for method in ("update", "compute")):
            raise RecipeError(f"metrics.{name}: {component.class_path} has no update(scores, labels) and compute()")
        found[name] = partial(component.build)
        value_of(name, made, torch.tensor([0.1, 0.6, 0.8, 0.3]), torch.tensor([0.0, 1.0, 0.0, 1.0]), None)
    return found


def value_of(name: str, metric: Any, scores: Tensor, labels: Tensor, weights: Tensor | None) -> float:
    """A metric of scores, labels and weights ``[n]``; labels that are all 0 or 1 are given as integers.

    Raises
    ------
    RecipeError
        If the metric refuses them, gives no number, or takes no weights where there are some.
    """
    given = labels.long() if bool(((labels == 0) | (labels == 1)).all()) else labels
    kind, more = type(metric).__name__, {}
    if weights is not None:
        known = signature(metric.update).parameters
        place = next((key for key in _WEIGHTS if key in known), None)
        if place is None:
            raise RecipeError(
                f"metrics.{name}: samples have weights, which {kind}.update does not take ({', '.join(_WEIGHTS)}); "
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
        raise RecipeError(f"metrics.{name}: {kind} failed on scores and labels [{len(scores)}]: {text}") from error
