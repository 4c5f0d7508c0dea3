"""Decide what evaluations during training are for: which checkpoint is kept, when training ends, and what is told.

Adaptive rules on sparse ids over-fit from the second epoch on, so where a recipe has several epochs and a valid split,
evaluations decide by default. Without a valid split, or with one epoch, nothing is evaluated to decide by.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hotbed.config.recipe import CheckpointPolicy, Monitor, Recipe

PATIENCE = 2
"""Epochs without a better one before training stops, where ``auto`` decides."""


def validation_decides(recipe: Recipe) -> bool:
    """Whether ``train.checkpoint: auto`` is ``best``: with several epochs, and a valid split to compare them on.

    It is ``last`` where only that can be: with checkpoints in between, with a number of steps, which may end before the
    first evaluation, and where hot and cold batches alternate, whose evaluations are not those of whole epochs.
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
    """Which checkpoint is kept; ``auto`` is decided."""
    if recipe.train.checkpoint != "auto":
        return recipe.train.checkpoint
    return "best" if validation_decides(recipe) else "last"


def patience(recipe: Recipe) -> int | None:
    """Evaluations without a better one before training stops; None for never.

    ``auto`` counts epochs, so it is never where evaluations are made otherwise than after each.
    """
    if recipe.train.patience != "auto":
        return recipe.train.patience
    return PATIENCE if validation_decides(recipe) and recipe.train.eval_every is None else None


def monitored(recipe: Recipe) -> Monitor:
    """The metric that tells the best evaluation: of items to be found recall, unless ndcg is named."""
    named = recipe.train.monitor
    return "recall" if recipe.retrieval is not None and named not in ("recall", "ndcg") else named


def notice(recipe: Recipe) -> str | None:
    """What a user should know before several epochs that nothing is compared by; None where there is nothing to say."""
    if recipe.train.epochs == 1 or recipe.data.valid_split is not None:
        return None
    return (
        f"train.epochs is {recipe.train.epochs:,} and there is no valid split, so nothing tells whether later epochs "
        "make the model worse, as they often do with sparse ids; set data.valid_split"
    )
