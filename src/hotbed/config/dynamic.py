"""Define the recipe's section on dynamic tables: which tables give rows to ids when these are seen, and how many."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from hotbed.errors import RecipeError, SpecError
from hotbed.specs import Dynamic


@dataclass(frozen=True, kw_only=True)
class DynamicRecipe:
    """A table whose rows are given to ids when they are first seen, and taken back when there is no room."""

    capacity_bytes: int
    """What its rows may take, without moments."""
    init_bound: float
    """Initial values are uniform from minus this to this; other tables have one by their number of rows."""
    admit_after: int = 1
    """How often an id must be seen to get a row."""
    evict: Literal["lru", "lfu"] = "lru"
    """Which ids lose theirs: those seen least recently, or least often."""
    ttl_steps: int | None = None
    """Steps after which an id that was not seen begins anew; by default never."""

    def __post_init__(self) -> None:
        bound: object = self.init_bound
        if not isinstance(bound, int | float) or isinstance(bound, bool) or not 0 <= bound < math.inf:
            raise RecipeError(f"init_bound is {bound!r}, must be a finite number, at least 0, such as 0.01")
        try:
            self.spec()
        except SpecError as error:
            raise RecipeError(str(error)) from None

    def spec(self) -> Dynamic:
        """The same for a `Table`."""
        return Dynamic(self.capacity_bytes, self.admit_after, self.evict, self.ttl_steps)
