"""Protects: tables, moments and lookups of training over ranks keep their recorded bits, under every plan of the demo.

``hotbed demo --promise`` compares plans with each other (`tests/train/test_promise.py`); its hashes differ between
CPUs, as products of dense layers do. Here gradients are given, so one hash holds for all CPUs and all releases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

import hotbed as hb
from tests.fixtures.models import Case, adam, build, rowwise, sha256, state, train
from tests.matrix import full
from tests.ranks import Ranks

TABLES = [
    hb.Table("bags", rows=90, dim=48),
    hb.Table("singles", rows=40, dim=48),
    hb.Table("popular", rows=60, dim=16, dtype="bf16", fp32_rows=5),
    hb.Table("scaled", rows=20, dim=256, dtype="int8"),
]
FEATURES = [
    hb.Feature("bags", table="bags"),
    hb.Feature("mean", table="bags", pooling="mean"),
    hb.Feature("singles", table="singles", max_len=1, on_too_long="truncate"),
    hb.Feature("popular", table="popular"),
    hb.Feature("walk", table="popular", pooling="none"),
    hb.Feature("scaled", table="scaled"),
]
PLANS: dict[str, Any] = {
    "whole tables": "table",
    "cut into rows": "row",
    "cut into columns": "column",
    "grid of rows and columns": "grid",
    "copies on all ranks": "dp",
    "popular rows copied": hb.Cut(hot_rows=11, rows=0),
    "made when trained": hb.Cut(rows=0, tier="host"),
    "on disk": hb.Cut(rows=0, tier="disk"),
    "on disk, cached": hb.Cut(rows=0, tier="disk", cache_rows=6),
    "popular rows in memory, others on disk": hb.Cut(hot_rows=7, rows=0, tier="disk", cache_rows=4),
}
SENT = "cut into rows, vectors sent"
"""Of bags of one id, whose vectors have no partial sums."""
QUICK = ["whole tables", "grid of rows and columns", "on disk, cached", "popular rows in memory, others on disk", SENT]
"""The others cut tables or place rows as one of these does in part."""
RANKS, STEPS = 3, 2
RECORDED = {
    "adam": [
        "3a21d2e572e3cee8d37b7e67151476f8bef0c490399fcc70ef72d81555bf9771",
        "2ae1cbd1ad15b7181a74e4b11f57600560165415a53dabb5f998711867c05a31",
        "c4b8aa1f25a1b536b5e2e2a079f8d9118c64f27cac46dcde4a3c816244a8b88f",
        "a8eee3d0ab2bc837e1fc5adfcc2b6e4401c3e158531467f6edeb1a3657161bf1",
    ],
    "rowwise": [
        "027b754c874295af74ae03a655d32a0444d7d36652d5abfeb0a48a5a5ca5d505",
        "ff37c611b0e311ccfb18a0e66aa0e886df42b51927cdd6fbf82172333ac729dc",
        "da846b0911d38e24d5314ecd6904ad1a31f3ba1d0e1bc8aa994f219fed325416",
        "7bec6977281718a3bcbf9884399ae6ede6e88f8e054afc329ad2935473060374",
    ],
}
"""By optimizer, SHA-256 of rows, moments and step counts, with what every rank looked up."""


def trained(group: dist.ProcessGroup, optimizer: str, plan: Any) -> tuple[str, str]:
    case = Case(TABLES, FEATURES, {"sparse": {"adam": adam, "rowwise": rowwise}[optimizer]})
    if plan is None:
        plan = hb.make_plan(TABLES, RANKS, hb.Cut(rows=0), wire={"singles": "pooled"})
    parts = build(case, group=group, plan=plan)
    rank = dist.get_rank(group)
    looked_up = train(case, parts, range(rank, STEPS * RANKS, RANKS))
    return sha256(state(parts)), sha256(looked_up)


@pytest.mark.parametrize("name", [name if name in QUICK else full(name) for name in (*PLANS, SENT)])
def test_every_plan_leaves_the_recorded_bits(ranks: Ranks, name: str) -> None:
    assert bits(ranks, "adam", name) == RECORDED["adam"]


@pytest.mark.parametrize("name", [full("whole tables"), "grid of rows and columns", full("on disk, cached")])
def test_moments_of_rows_that_are_cut_have_the_recorded_bits(ranks: Ranks, name: str) -> None:
    assert bits(ranks, "rowwise", name) == RECORDED["rowwise"]


def bits(ranks: Ranks, optimizer: str, name: str) -> list[str]:
    found = ranks.run(RANKS, trained, optimizer, PLANS.get(name))
    assert len({tables for tables, _ in found}) == 1
    return [found[0][0], *(looked_up for _, looked_up in found)]
