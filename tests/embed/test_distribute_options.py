"""Every option of `hotbed.distribute` is stated once."""

from __future__ import annotations

from dataclasses import fields

import pytest

import hotbed as hb
from hotbed.config import MemoryRecipe, ParallelRecipe
from hotbed.errors import RecipeError


def test_a_recipe_states_the_same_options():
    for options, section in ((hb.ParallelOptions, ParallelRecipe), (hb.MemoryOptions, MemoryRecipe)):
        assert issubclass(section, options)
        assert {f.name for f in fields(options)} < {f.name for f in fields(section)}
    with pytest.raises(RecipeError, match="layout: got 'group', expected one of groups, replicas; did you mean"):
        ParallelRecipe(layout="group")  # type: ignore[arg-type]
