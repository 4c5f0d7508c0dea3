"""Accept former names of a recipe's keys and values, and warn of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from hotbed.errors import RecipeError

RENAMED_KEYS = {"parallel.sums_apart": "parallel.per_shard_statistics"}
"""Former names of keys, by section and key; they work until version 0.3 and warn."""

RENAMED_VALUES = {"hot.batches": {"apart": "alternating"}}
"""Former names of values, by key; they work until version 0.3 and warn."""


def with_new_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace former names of keys and values in a recipe's plain values; a `FutureWarning` names the new ones.

    >>> with_new_names({"hot": {"batches": "apart"}})  # doctest: +SKIP
    FutureWarning: hot.batches 'apart' is now called 'alternating'; the former name works until hotbed 0.3
    {'hot': {'batches': 'alternating'}}

    Raises
    ------
    RecipeError
        If a key is given by both of its names.
    """
    changed = dict(values)
    for old, new in RENAMED_KEYS.items():
        section, key = old.split(".")
        if isinstance(of := changed.get(section), Mapping) and key in of:
            name = new.split(".")[1]
            if name in of:
                raise RecipeError(f"the recipe has both '{new}' and its former name '{old}'; remove '{old}'")
            warn_renamed(old, new)
            changed[section] = {name if k == key else k: v for k, v in of.items()}
    for where, names in RENAMED_VALUES.items():
        section, key = where.split(".")
        if isinstance(of := changed.get(section), Mapping) and isinstance(value := of.get(key), str) and value in names:
            warn_renamed(f"{where} '{value}'", f"'{names[value]}'")
            changed[section] = {**of, key: names[value]}
    if (wide := changed.pop("wide_optimizer", None)) is not None:
        warn_renamed("wide_optimizer", "sparse_optimizer_groups.wide.optimizer")
        groups = changed.get("sparse_optimizer_groups", {})
        if isinstance(groups, Mapping):  # what else it may be is an error of its own
            group = _with_wide_optimizer(groups.get("wide", {"tables": ["wide.*"]}), wide)
            changed["sparse_optimizer_groups"] = {**groups, "wide": group}
    return changed


def _with_wide_optimizer(group: Any, wide: Any) -> Any:
    """The group ``wide`` with what the former key ``wide_optimizer`` says: all or, on a command line, some of it."""
    if not isinstance(group, Mapping):
        return group
    optimizer = group.get("optimizer", {})
    if isinstance(optimizer, Mapping) and isinstance(wide, Mapping):
        init_args = {**optimizer.get("init_args", {}), **wide.get("init_args", {})}
        wide = {**optimizer, **wide, **({"init_args": init_args} if init_args else {})}
    return {**group, "optimizer": wide}


def warn_renamed(old: str, new: str) -> None:
    """Warn of a former name."""
    warnings.warn(f"{old} is now called {new}; the former name works until hotbed 0.3", FutureWarning, stacklevel=4)
