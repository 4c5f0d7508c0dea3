"""Define the recipe's sections on optimizers: groups with an optimizer of their own, and learning rates by step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import cast

from hotbed.config.component import Component, above_zero, at_least
from hotbed.errors import RecipeError

_NAMES_IN_CHECKPOINTS = ("model", "dense", "sparse", "random", "position", "ids")
"""What a run's checkpoints hold beside the groups' optimizers, so that no group can be called so."""


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerGroup:
    """Parameters that have an optimizer of their own."""

    parameters: list[str]
    """Names of parameters or of modules that contain them; one name is a list of one. ``*`` stands for any characters:
    ``top``, ``top.*.bias``, ``*norm*``."""
    optimizer: Component
    """A torch.optim optimizer, made with these parameters."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", _patterns("parameters", self.parameters, "top.*.bias"))


@dataclass(frozen=True, kw_only=True)
class SparseOptimizerGroup:
    """Tables that have an optimizer of their own."""

    tables: list[str]
    """Names of tables or of modules that contain them; one name is a list of one. ``*`` stands for any characters:
    ``user``, ``wide.user``, ``wide``, ``*_id``."""
    optimizer: Component
    """A hotbed.optim optimizer, made with these tables."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", _patterns("tables", self.tables, "wide.*"))


def _patterns(key: str, value: object, example: str) -> list[str]:
    """Return one pattern or several as a list."""
    patterns = [value] if isinstance(value, str) else list(value) if isinstance(value, list | tuple) else []
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise RecipeError(f"{key} is {value!r}, must be a name or a list of names, such as {example}")
    return cast("list[str]", patterns)


def check_group_names(dense: Collection[str], sparse: Collection[str]) -> None:
    """Raise `RecipeError` for names of groups that logs and checkpoints cannot have."""
    for key, names in (("dense_optimizer_groups", dense), ("sparse_optimizer_groups", sparse)):
        for name in names:
            if not name.isidentifier() or name.endswith("_schedule"):
                raise RecipeError(
                    f"{key} has a group called {name!r}, which must be a word of letters, digits and '_' that does not "
                    "end with _schedule; rename the group"
                )
            if name in _NAMES_IN_CHECKPOINTS:
                raise RecipeError(
                    f"{key} has a group called '{name}', as something else in a checkpoint is; rename the group"
                )
    if both := {*dense} & {*sparse}:
        raise RecipeError(
            f"dense_optimizer_groups and sparse_optimizer_groups both have a group '{min(both)}'; rename one of them"
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    """Learning-rate factor by step: a linear warm-up, then 1, then a polynomial fall to 0.

    The fall is at steps that are given, or at the end of every epoch, however many steps that has. Then every epoch
    ends with a model that is settled, so evaluations of epochs can be compared, and the first epoch of several is the
    run of one epoch.
    """

    warmup_steps: int = 0
    """Steps over which the factor rises to 1."""
    decay_start: int | None = None
    """Step after which the factor falls; it never does by default."""
    decay_end: int | None = None
    """Step at which it reaches 0."""
    decay_power: float = 2.0
    """Power of the fall: 1 is linear, 2 as in NVIDIA's DLRM."""
    decay_share: float | None = None
    """In the place of decay_start and decay_end: the share of every epoch's steps, its last, over which it falls."""

    def __post_init__(self) -> None:
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        if (self.decay_start is None) != (self.decay_end is None):
            raise RecipeError("schedule.decay_start and schedule.decay_end go together; set both, or neither")
        if self.decay_start is not None and self.decay_end is not None:
            at_least("schedule.decay_start", self.decay_start, self.warmup_steps, "schedule.warmup_steps")
            at_least("schedule.decay_end", self.decay_end, self.decay_start + 1, "schedule.decay_start + 1")
        if self.decay_share is not None:
            if not 0 < self.decay_share <= 1:
                raise RecipeError(f"schedule.decay_share is {self.decay_share}, must be above 0 and at most 1")
            if self.decay_start is not None:
                raise RecipeError(
                    "schedule.decay_share and schedule.decay_start say both when the rate falls; leave one of them out"
                )
        above_zero("schedule.decay_power", self.decay_power, "; 1 is linear")

    def factor(self, step: int, epoch_steps: int | None = None) -> float:
        """Factor of the learning rate in step s, counted from 1 (NVIDIA DLRM).

        s / warm-up; then 1; then ((end − s) / (end − start))^power. With ``decay_share`` a and n steps of an epoch, the
        p-th of an epoch has ((n − p + 1) / (a n))^power, at most 1, times that of the warm-up.
        """
        if self.decay_share is not None and epoch_steps is not None:
            left = epoch_steps - (step - 1) % epoch_steps
            fall = min(left / (self.decay_share * epoch_steps), 1.0) ** self.decay_power
            return fall * min(step / max(self.warmup_steps, 1), 1.0)
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.decay_start is None or self.decay_end is None or step <= self.decay_start:
            return 1.0
        return (max(self.decay_end - step, 0) / (self.decay_end - self.decay_start)) ** self.decay_power
