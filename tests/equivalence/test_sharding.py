"""The promise: a plan changes where rows are, never what is learned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hotbed.plan import Cut, Plan, make_plan
from tests.ranks import Ranks

from .sharding import SIZES, TABLES, Job, trained

pytestmark = pytest.mark.xdist_group("ranks")

SCHEMES = {
    "table": "table",
    "row": "row",
    "column": "column",
    "grid": "grid",
    "dp": "dp",
    "hot": Cut(rows=0, hot_rows=7),
    "mixed": {"big": Cut(rows=3, cols=3), "small": "dp", "items": Cut(cols=3, hot_rows=4), "words": "row"},
}
OPTIMIZERS = {
    "SGD": {},
    "RowWiseAdagrad": {},
    "Adam": {},
    "LAMB": {"max_norm": 0.5},
}


def plan(name: str, size: int) -> Plan:
    if name.startswith("pooled"):
        return make_plan(TABLES, size, name.removeprefix("pooled "), wire="pooled")
    return make_plan(TABLES, size, SCHEMES[name])


def results(ranks: Ranks, size: int, job: Job) -> dict[str, torch.Tensor]:
    """What all ranks agree on; losses added up."""
    by_rank = ranks.run(size, trained, replace(job, world_size=size))
    first = by_rank[0]
    for other in by_rank[1:]:
        for name in first.keys() - {"losses"}:
            assert torch.equal(first[name], other[name]), name
    return first | {"losses": torch.stack([found["losses"] for found in by_rank])}


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_all_plans_give_the_same_bits(ranks: Ranks, size: int, kind: str, optimizer: str):
    job = Job(None, optimizer=optimizer, options=OPTIMIZERS[optimizer], kind=kind)
    expected = results(ranks, size, replace(job, plan=plan("table", size)))
    for scheme in (*SCHEMES, "pooled table", "pooled column"):
        found = results(ranks, size, replace(job, plan=plan(scheme, size)))
        for name, value in expected.items():
            assert torch.equal(value, found[name]), (scheme, name, (value - found[name]).abs().max())
