"""The promise holds for any tiling, not only for those that have a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hotbed.plan import Plan, Tile, make_plan
from tests.matrix import examples, full
from tests.ranks import Ranks
from tests.tilings import tilings

from .sharding import SIZES, TABLES, Job
from .test_sharding import WHOLE, differing, results

OPTIMIZERS = {"SGD": {}, "RowWiseAdagrad": {}, "LAMB": {"max_norm": 0.5}}
ONE_HOT = {"big", "small"}
"""Tables whose pooled features have one id per bag."""

few = settings(max_examples=examples(4), derandomize=True, suppress_health_check=list(HealthCheck))


def can_be_pooled(table: str, tiles: Sequence[Tile]) -> bool:
    """Whether pooled vectors give the bits of rows: no bag is summed in parts."""
    uncut = len({tile.rows for tile in tiles}) == 1
    return not any(tile.readers for tile in tiles) and (uncut or table in ONE_HOT)


@st.composite
def plans(draw: st.DrawFn, size: int) -> Plan:
    """Any tiling of the tables, in any wire format that is exact."""
    plan = draw(tilings(TABLES, size, depth=2))
    possible = [name for name, tiles in plan.by_table.items() if can_be_pooled(name, tiles)]
    return replace(plan, wire={name: draw(st.sampled_from(["rows", "pooled"])) for name in possible})


@pytest.mark.parametrize("size", [3, full(4)])
@few
@given(data=st.data())
def test_any_tiling_gives_the_bits_of_uncut_tables(ranks: Ranks, size: int, data: st.DataObject):
    kind = data.draw(st.sampled_from(sorted(SIZES)))
    plan = data.draw(plans(size))
    jobs = {
        optimizer: Job(plan, steps=2, optimizer=optimizer, options=options, kind=kind)
        for optimizer, options in OPTIMIZERS.items()
    }
    found = results(ranks, size, jobs)
    for optimizer in jobs:
        assert not differing(found[optimizer], uncut(ranks, size, kind)[optimizer]), optimizer


@cache
def uncut(ranks: Ranks, size: int, kind: str) -> dict[str, dict[str, torch.Tensor]]:
    """Results by optimizer where every table is one tile."""
    plan = make_plan(TABLES, size, "table")
    jobs = {o: Job(plan, steps=2, optimizer=o, options=options, kind=kind) for o, options in OPTIMIZERS.items()}
    return results(ranks, size, jobs)


@few
@given(data=st.data())
def test_pooled_vectors_of_bags_that_are_cut_anyhow_agree_to_rounding(ranks: Ranks, data: st.DataObject):
    plan = data.draw(tilings(WHOLE, 3, depth=2))
    plan = Plan(3, tuple(replace(t, readers=()) for t in plan.tiles), {t.name: "pooled" for t in WHOLE})
    jobs = {"cut": plan, "uncut": make_plan(WHOLE, 3, "table")}
    kind = data.draw(st.sampled_from(sorted(SIZES)))
    found = results(ranks, 3, {name: Job(p, steps=2, kind=kind, tables=WHOLE) for name, p in jobs.items()})
    for name, value in found["uncut"].items():
        assert (found["cut"][name] - value).abs().max() <= 1e-5 * value.abs().max(), name


def test_pooled_vectors_of_a_bag_whose_rows_are_cut_at_different_columns(ranks: Ranks):
    """One of them whole, another in two parts that are both with the owner of the whole one."""
    table = make_plan(WHOLE, 3, "table")
    others = tuple(tile for tile in table.tiles if tile.table != "words")
    rows = {range(1): (range(16), range(16, 20)), range(1, 30): (range(20),)}
    words = tuple(Tile("words", part, cols, 0) for part, cuts in rows.items() for cols in cuts)
    jobs = {
        form: Job(Plan(3, (*others, *words), {"words": form}), steps=2, tables=WHOLE) for form in ("rows", "pooled")
    }
    found = results(ranks, 3, jobs)
    for name, value in found["rows"].items():
        assert (found["pooled"][name] - value).abs().max() <= 1e-5 * value.abs().max(), name
