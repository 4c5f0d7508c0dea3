"""Compute the loss of a batch over all of its labels: each by a loss of its own, where the recipe names one.

A loss sees logits and labels of one task and gives a value per sample, so a batch can be divided among ranks and
micro-batches, and a sample's weight counts whatever the loss is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hotbed.config import Component, TaskRecipe
from hotbed.errors import HotbedError, RecipeError, did_you_mean
from hotbed.nn.loss import summed_cross_entropy

SummedLoss: TypeAlias = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Maps logits and labels ``[…, B, T]`` and sample weights ``[B, 1]`` or ``[B, T]`` to the sum of all losses."""


class TaskLosses:
    """Σ over tasks of weight · Σ over samples of the task's loss."""

    def __init__(self, losses: Sequence[nn.Module], weights: Sequence[float]) -> None:
        self._tasks = list(zip(losses, weights, strict=True))

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The sum, of logits and labels ``[…, B, T]`` and sample weights ``[B, 1]`` or ``[B, T]``."""
        weights = None if weights is None else weights.expand_as(labels)
        sums: list[Tensor] = []
        for task, (loss, factor) in enumerate(self._tasks):
            found = loss(logits[..., task].reshape(-1), labels[..., task].reshape(-1))
            own = found if weights is None else found * weights[..., task].reshape(-1)
            sums.append(own.sum() * factor)
        return torch.stack(sums).sum()


def losses_of(tasks: Mapping[str, TaskRecipe], labels: Sequence[str], device: torch.device) -> SummedLoss:
    """What a recipe's tasks ask for; binary cross-entropy where they ask for nothing else."""
    for name in tasks:
        if name not in labels:
            raise RecipeError(
                f"tasks has '{name}', which is no label; name one of {', '.join(labels)}, or add it to the schema"
                f"{did_you_mean(name, labels)}"
            )
    chosen = [tasks.get(label, TaskRecipe()) for label in labels]
    if all(task.is_default for task in chosen):
        return summed_cross_entropy
    if not any(task.weight for task in chosen):
        raise RecipeError("the weight of every task is 0, so there is nothing to train for; raise tasks.LABEL.weight")
    made = [_loss(f"tasks.{label}.loss", task.loss).to(device) for label, task in zip(labels, chosen, strict=True)]
    return TaskLosses(made, [task.weight for task in chosen])


def _loss(key: str, component: Component) -> nn.Module:
    """Make a loss and try it; a `RecipeError` says which of the recipe's it is."""
    name = component.class_path
    try:
        cls = component.load()
        if not issubclass(cls, nn.Module):
            raise RecipeError(f"{name} is not a torch.nn.Module")
        with torch.device("cpu"):
            loss = Component(class_path=name, init_args=_with_tensors(cls, component.init_args)).build(reduction="none")
    except RecipeError as error:
        raise RecipeError(f"{key}: {error}") from error
    if any(True for _ in loss.parameters()):
        raise RecipeError(f"{key}: {name} has parameters, which no optimizer trains; make them part of the model")
    logits = torch.tensor([-2.0, 0.5, 3.0], device="cpu", requires_grad=True)
    labels = torch.tensor([0.0, 1.0, 1.0], device="cpu")
    try:
        found = loss(logits, labels)
    except HotbedError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(
            f"{key}: {name} refused logits [3] and labels [3]: {text}; a loss takes logits (not probabilities) and "
            "labels from 0 to 1, such as torch.nn.BCEWithLogitsLoss"
        ) from error
    if not isinstance(found, Tensor) or found.shape != labels.shape or not found.requires_grad:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise RecipeError(
            f"{key}: {name} gave {got} for logits [3] and labels [3], must give the loss of each sample [3] with "
            'reduction="none", with a gradient'
        )
    return loss


def _with_tensors(cls: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make tensors of numbers and lists of them where a class says that it takes tensors, as torch's losses do."""
    kinds = {name: str(p.annotation) for name, p in signature(cls).parameters.items()}

    def is_tensor(name: str, value: object) -> bool:
        return "Tensor" in kinds.get(name, "") and isinstance(value, int | float | list) and not isinstance(value, bool)

    return {k: torch.as_tensor(v, dtype=torch.float32) if is_tensor(k, v) else v for k, v in arguments.items()}
