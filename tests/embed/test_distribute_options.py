"""Every option of `hotbed.distribute` is stated once, and keywords of earlier versions serve for one more."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

import hotbed as hb
from hotbed.config import MemoryRecipe, ParallelRecipe
from hotbed.errors import RecipeError
from hotbed.plan import make_plan
from hotbed.specs import Table

from .distributed_cases import one_table


def test_keywords_of_earlier_versions_warn_with_the_new_form_and_serve():
    given = {"sums_apart": True, "cache_policy": "lfu"}
    new = (
        r"distribute\(…, sums_apart=…, cache_policy=…\) is deprecated and goes in the next version; call "
        r"distribute\(model, plan, parallel=hotbed.ParallelOptions\(per_shard_statistics=True\), "
        r"memory=hotbed.MemoryOptions\(cache_policy='lfu'\)\)"
    )
    plan = make_plan([Table("t", 9, 256)], 1, hb.Cut(tier="host", cache_rows=4))
    with pytest.warns(DeprecationWarning, match=new):
        model: Any = hb.distribute(one_table(), plan, hb.ParallelOptions(dense="fsdp"), **given)
    assert model.wire.options == hb.ParallelOptions(dense="fsdp", per_shard_statistics=True)
    assert model.module._groups[0].arenas[0].store.records._tags.by_count


def test_keywords_that_no_version_had_are_refused():
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'replica'; did you mean 'replicas'\?"):
        hb.distribute(one_table(), replica=2)


def test_a_recipe_states_the_same_options():
    for options, section in ((hb.ParallelOptions, ParallelRecipe), (hb.MemoryOptions, MemoryRecipe)):
        assert issubclass(section, options)
        assert {f.name for f in fields(options)} < {f.name for f in fields(section)}
    with pytest.raises(RecipeError, match="layout is 'group', must be one of groups, replicas; did you mean"):
        ParallelRecipe(layout="group")  # type: ignore[arg-type]
