"""Say which settings of a recipe a search varies, and between which values: learning rates, dims, dropout and others.

What is varied follows from what the recipe names, and lies around its values.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from hotbed.config import Component, Recipe

if TYPE_CHECKING:
    import optuna

_LR_FACTOR = 8.0
_MOMENT_FACTOR = 100.0
_DIM_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
_DIMS = (4, 512)
_MOST_DROPOUT = 0.5


@dataclass(frozen=True, kw_only=True)
class Space:
    """Values of one setting.

    Attributes
    ----------
    key
        The recipe's key; for dims of tables ``data.dim``.
    value
        What the recipe has.
    low, high
        Limits of a real number.
    log
        Whether factors count, not differences.
    choices
        All values, where it is no real number.
    """

    key: str
    value: Any
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[Any, ...] = ()

    def draw(self, trial: optuna.Trial) -> Any:
        """Let a trial choose a value."""
        if self.choices:
            return trial.suggest_categorical(self.key, self.choices)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    def apply(self, recipe: Recipe, value: Any) -> Recipe:
        """Make the recipe with this value."""
        if value == self.value:
            return recipe
        return _with_dim(recipe, value) if self.key == "data.dim" else _with(recipe, self.key, value)

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "choices": list(self.choices)}


def search_space(recipe: Recipe) -> list[Space]:
    """What is searched: the rate of every optimizer, the first moment where one is set, the dim, the dropout."""
    spaces: list[Space] = []
    for key, component in _optimizers(recipe).items():
        lr = component.init_args.get("lr")
        if _is_positive(lr):
            spaces.append(_around(f"{key}.init_args.lr", float(lr), _LR_FACTOR))
        first = component.init_args.get("initial_accumulator")
        if _is_positive(first):
            spaces.append(_around(f"{key}.init_args.initial_accumulator", float(first), _MOMENT_FACTOR))
    if isinstance(recipe.data.dim, int) and (dims := _dims(recipe.data.dim, _init_arg(recipe, "members") or 1)):
        spaces.append(Space(key="data.dim", value=recipe.data.dim, choices=dims))
    if "dropout" in inspect.signature(recipe.model.load()).parameters:
        value = float(_init_arg(recipe, "dropout") or 0.0)
        key = "model.init_args.dropout"
        spaces.append(Space(key=key, value=value, low=0.0, high=max(_MOST_DROPOUT, value)))
    return spaces


def changed(before: Recipe, after: Recipe) -> dict[str, tuple[Any, Any]]:
    """Values by key, before and after, where they differ."""
    old, new = _flat(before.to_dict()), _flat(after.to_dict())
    return {key: (old.get(key), new.get(key)) for key in {**old, **new} if old.get(key) != new.get(key)}


def _around(key: str, value: float, factor: float) -> Space:
    return Space(key=key, value=value, low=value / factor, high=value * factor, log=True)


def _dims(dim: int, members: int) -> tuple[int, ...]:
    low, high = min(_DIMS[0], dim), max(_DIMS[1], dim)
    dims = sorted({round(dim * factor) for factor in _DIM_FACTORS if low <= dim * factor <= high})
    dims = [found for found in dims if found % members == 0]
    return tuple(dims) if len(dims) > 1 else ()


def _with_dim(recipe: Recipe, dim: int) -> Recipe:
    """The recipe with tables of another dim; a DLRM's bottom MLP ends with it, too, or with a member's share of it."""
    bottom, members = _init_arg(recipe, "bottom"), _init_arg(recipe, "members") or 1
    if isinstance(bottom, list | tuple) and bottom and bottom[-1] * members == recipe.data.dim:
        recipe = _with(recipe, "model.init_args.bottom", [*bottom[:-1], dim // members])
    return _with(recipe, "data.dim", dim)


def _init_arg(recipe: Recipe, name: str) -> Any:
    """What the model is made with; None where it has no such argument."""
    known = inspect.signature(recipe.model.load()).parameters
    default = known[name].default if name in known else None
    return recipe.model.init_args.get(name, None if default is inspect.Parameter.empty else default)


def _with(recipe: Recipe, key: str, value: Any) -> Recipe:
    values: dict[str, Any] = recipe.to_dict()
    at, (*parents, last) = values, key.split(".")
    for parent in parents:
        at = at[parent]
    at[last] = value
    return Recipe.from_dict(values)


def _optimizers(recipe: Recipe) -> dict[str, Component]:
    groups: Mapping[str, Any] = {
        **{f"sparse_optimizer_groups.{name}": group for name, group in recipe.sparse_optimizer_groups.items()},
        **{f"dense_optimizer_groups.{name}": group for name, group in recipe.dense_optimizer_groups.items()},
    }
    named = {f"{key}.optimizer": cast("Component", group.optimizer) for key, group in groups.items()}
    return {"sparse_optimizer": recipe.sparse_optimizer, "dense_optimizer": recipe.dense_optimizer, **named}


def _is_positive(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping) or not value:
        return {key: value}
    return {k: v for name, of in value.items() for k, v in _flat(of, f"{key}.{name}".lstrip(".")).items()}
