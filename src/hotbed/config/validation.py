"""Resolve the settings that depend on evaluations: which checkpoint is kept, and when training stops early.

Adaptive optimizers on sparse ids overfit from the second epoch on. Therefore, evaluations decide by default if a recipe
has several epochs and a valid split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotbed.config.recipe import CheckpointPolicy, Monitor, Recipe

PATIENCE = 2
"""Value of ``patience: auto``: epochs without a better evaluation before training stops."""


def validation_decides(recipe: Recipe) -> bool:
    """Return whether ``train.checkpoint: auto`` means ``best``, which requires several epochs and a valid split.

    Some settings require ``last``: periodic checkpoints; a number of steps, because training may end before the first
    evaluation; and alternating hot and cold batches, because their evaluations are not at the ends of epochs.
    """
    train = recipe.train
    in_between = (train.checkpoint_every, train.checkpoint_minutes, train.keep_every)
    return (
        train.checkpoint == "auto"
        and train.epochs > 1
        and train.steps is None
        and recipe.data.valid_split is not None
        and recipe.hot.batches != "alternating"
        and all(value is None for value in in_between)
    )


def checkpoint_policy(recipe: Recipe) -> CheckpointPolicy:
    """Return the checkpoint policy, with ``auto`` resolved."""
    if recipe.train.checkpoint != "auto":
        return recipe.train.checkpoint
    return "best" if validation_decides(recipe) else "last"


def patience(recipe: Recipe) -> int | None:
    """Return the number of evaluations without a better one before training stops, or None for never.

    ``auto`` counts epochs, so it means never if evaluations are not at the ends of epochs.
    """
    if recipe.train.patience != "auto":
        return recipe.train.patience
    return PATIENCE if validation_decides(recipe) and recipe.train.eval_every is None else None


def monitored(recipe: Recipe) -> Monitor:
    """Return the metric that determines the best evaluation. With retrieval, it is recall unless ndcg is set."""
    named = recipe.train.monitor
    return "recall" if recipe.retrieval is not None and named not in ("recall", "ndcg") else named


def notice(recipe: Recipe) -> str | None:
    """Return a warning about several epochs without a valid split, or None."""
    if recipe.train.epochs == 1 or recipe.data.valid_split is not None:
        return None
    return (
        f"train.epochs is {recipe.train.epochs:,}, but there is no valid split. Later epochs often make models on "
        "sparse ids worse, which is not detected without a valid split. Set data.valid_split"
    )
