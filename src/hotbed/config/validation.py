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
    """Return whether ``train.checkpoint: auto`` means ``best``. Periodic checkpoints make it mean ``last``."""
    return _could_decide(recipe) and not _periodic_keys(recipe)


def _could_decide(recipe: Recipe) -> bool:
    """Return whether evaluations would decide without periodic checkpoints: with several epochs and a valid split.

    A number of steps may end training before the first evaluation. Evaluations of alternating hot and cold batches are
    not at the ends of epochs.
    """
    train, data = recipe.train, recipe.data
    several = train.epochs > 1 and train.steps is None and data.valid_split is not None
    return train.checkpoint == "auto" and several and recipe.hot.batches != "alternating"


def _periodic_keys(recipe: Recipe) -> str:
    """Return the keys that ask for periodic checkpoints, joined by "and"."""
    keys = ("checkpoint_every", "checkpoint_minutes", "keep_every")
    return " and ".join(f"train.{key}" for key in keys if getattr(recipe.train, key) is not None)


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
    """Return a warning if a recipe has several epochs and the best one is not selected, or None."""
    epochs = f"train.epochs is {recipe.train.epochs:,}"
    if _could_decide(recipe) and (keys := _periodic_keys(recipe)):
        return (
            f"{epochs}, and these keys are set: {keys}. So all epochs are trained and the last model is kept. To stop "
            f"early and keep the best model, remove {keys}. Each better evaluation then saves a checkpoint, and a "
            "killed run resumes from the newest one"
        )
    if recipe.train.epochs == 1 or recipe.data.valid_split is not None:
        return None
    return (
        f"{epochs}, but there is no valid split. Later epochs often make models on sparse ids worse, which is not "
        "detected without a valid split. Set data.valid_split"
    )
