"""Which settings a resumed run may change, and the refusal of all others.

Learning rates, moments and positions come out of the checkpoint, so another value in the recipe would be ignored or,
worse, half obeyed. A resumed run may change only how long it goes on, what it shows and keeps, and where it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from hotbed.checkpoint import Directory, read_manifest
from hotbed.config import InitRecipe, MemoryRecipe, Recipe
from hotbed.errors import RecipeError

MAY_DIFFER = frozenset(
    {
        "name",
        "hot.rows",
        *(f"data.{key}" for key in ("path", "workers", "prefetch", "valid_split", "test_split")),
        *(f"train.{key}" for key in ("steps", "epochs", "device", "log_every", "tensorboard", "checkpoint")),
        *(f"init.{field.name}" for field in fields(InitRecipe)),
        *(f"memory.{field.name}" for field in fields(MemoryRecipe)),
        *(f"parallel.{key}" for key in ("plan", "overlap", "reader", "ranks_per_node", "timeout_s")),
        *(f"train.{key}" for key in ("precision", "linear_library")),  # `Numerics` says that they change bits
        *(f"train.{key}" for key in ("eval_every", "eval_batch_size", "monitor", "patience")),
        *(f"train.checkpoint_{key}" for key in ("every", "minutes", "dir", "in_background")),
        *(f"train.keep_{key}" for key in ("last", "every")),
    }
)
"""Keys that do not change what a step does, or say so; a plan may, in the one way that `Plan.wire` states."""


def refuse_another_recipe(checkpoint: str | Path | Directory, recipe: Recipe) -> None:
    """Raise `RecipeError` if a recipe would train otherwise than the one that a checkpoint was made with.

    Parameters
    ----------
    checkpoint
        The checkpoint's directory; one that holds no recipe is not compared.
    recipe
        The recipe to go on with.

    Raises
    ------
    RecipeError
        With every key that differs and its values in both.
    CheckpointError
        If there is no valid checkpoint.
    """
    stored = read_manifest(checkpoint).recipe
    if stored is None:
        return
    # Both as recipes, so that options which an older release did not know have their defaults; and through JSON, which
    # has no tuples.
    before, now = (_by_key(json.loads(json.dumps(r.to_dict()))) for r in (Recipe.from_dict(stored), recipe))
    differing = [key for key in {**before, **now} if key not in MAY_DIFFER and before.get(key) != now.get(key)]
    if differing:
        lines = "; ".join(f"{key} was {before.get(key)!r} and is now {now.get(key)!r}" for key in differing)
        raise RecipeError(
            f"{checkpoint} was made with another recipe: {lines}. A resumed run goes on as it began: give the values "
            f"that it was made with, or train anew without --resume"
        )


def _by_key(value: object, key: str = "") -> dict[str, object]:
    """Plain values by dotted key; an empty mapping counts as a value."""
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    parts = cast("Mapping[str, Any]", value).items()
    return {k: v for name, part in parts for k, v in _by_key(part, f"{key}.{name}".lstrip(".")).items()}
