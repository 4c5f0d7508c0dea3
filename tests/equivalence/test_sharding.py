"""The promise: a plan changes where rows are, never what is learned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from hotbed.plan import Cut, Plan, make_plan
from hotbed.plan.hardware import Hardware
from hotbed.specs import Table
from tests.matrix import full
from tests.ranks import Ranks

from .sharding import SIZES, TABLES, Job, all_trained, trained

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
    "SGD": ("SGD", {}),
    "RowWiseAdagrad": ("RowWiseAdagrad", {"weight_decay": 0.01, "weight_decay_mode": "decoupled"}),
    "Adam": ("Adam", {}),
    "clipped": ("RowWiseAdagrad", {"weight_decay": 0.01, "max_grad_norm": 0.5}),
    "LAMB": ("LAMB", {"max_norm": 0.5}),
}
"""Those that sum over columns once, not at all, and several times."""
WHOLE = tuple(replace(t, dtype="fp32", fp32_rows=0) for t in TABLES)
"""The tables without narrow rows, whose rounding makes large differences of small ones."""


def plan(name: str, size: int, tables: tuple[Table, ...] = TABLES) -> Plan:
    if name.startswith("pooled"):
        return make_plan(tables, size, name.removeprefix("pooled "), wire="pooled")
    if name == "auto":
        return make_plan(tables, size, "auto", hardware=Hardware.load("a100-40"), batch_size=64)
    return make_plan(tables, size, SCHEMES[name])


Found = dict[str, torch.Tensor]


def results(ranks: Ranks, size: int, jobs: Mapping[str, Job]) -> dict[str, Found]:
    """By job, what all ranks agree on, and the losses of each."""
    by_rank = ranks.run(size, all_trained, {name: replace(job, world_size=size) for name, job in jobs.items()})
    found: dict[str, Found] = {}
    for job, first in by_rank[0].items():
        for other in by_rank[1:]:
            for name in first.keys() - {"losses"}:
                assert torch.equal(first[name], other[job][name]), (job, name)
        found[job] = first | {"losses": torch.stack([one[job]["losses"] for one in by_rank])}
    return found


def differing(found: Found, expected: Found) -> list[str]:
    """Names of the tensors that differ, and by how much."""
    return [
        f"{name} by {(found[name] - value).abs().max():.2g}"
        for name, value in expected.items()
        if not torch.equal(found[name], value)
    ]


QUICK = [(3, "fixed", "SGD"), (3, "ragged", "RowWiseAdagrad"), (4, "empty", "Adam"), (3, "weighted", "clipped")]


def combinations() -> list[Any]:
    """At 3 ranks the usual optimizers with every kind of batch; at 4 and 1 every optimizer with one."""
    kinds = list(SIZES)
    at_three = [(3, kind, o) for kind in kinds for o in ("SGD", "RowWiseAdagrad", "Adam")]
    at_four = [(4, kinds[(i + 1) % len(kinds)], o) for i, o in enumerate(OPTIMIZERS)]
    alone = [(1, kinds[i % len(kinds)], o) for i, o in enumerate(OPTIMIZERS)]
    cells = [*at_three, (3, "weighted", "clipped"), *at_four]
    return [*(cell if cell in QUICK else full(*cell) for cell in cells), (3, "empty", "LAMB"), *alone]


@pytest.mark.parametrize(("size", "kind", "optimizer"), combinations())
def test_all_plans_give_the_same_bits(ranks: Ranks, size: int, kind: str, optimizer: str):
    rule, options = OPTIMIZERS[optimizer]
    job = Job(None, steps=3, optimizer=rule, options=options, kind=kind)
    jobs = {s: replace(job, plan=plan(s, size)) for s in (*SCHEMES, "auto", "pooled table", "pooled column")}
    found = results(ranks, size, jobs)
    for scheme in jobs:
        assert not differing(found[scheme], found["table"]), scheme


@pytest.mark.parametrize("kind", ["ragged", full("weighted"), full("empty")])
def test_searched_plans_that_mix_wire_formats_give_the_same_bits(ranks: Ranks, kind: str):
    """The owners of two tables with long bags pool them. The other tables send rows, some of them for sequences."""
    slow = Hardware.load("a100-40").with_(network=1e6, ranks_per_node=1)
    ids = {"items": 100.0, "words": 100.0}
    options = {"ids": ids, "hardware": slow, "batch_size": 12}
    mixed = make_plan(TABLES, 3, "auto", **options)
    assert mixed.wire == {"items": "pooled", "words": "pooled"}
    job = Job(None, steps=3, optimizer="RowWiseAdagrad", kind=kind)
    plans = {"mixed": mixed, "rows": make_plan(TABLES, 3, "auto", wire="rows", **options), "table": plan("table", 3)}
    found = results(ranks, 3, {name: replace(job, plan=p) for name, p in plans.items()})
    assert not differing(found["mixed"], found["table"])
    assert not differing(found["rows"], found["table"])


def test_exchanging_in_two_hops_gives_the_same_bits(ranks: Ranks):
    job = Job(None, steps=3, optimizer="RowWiseAdagrad", kind="empty")
    plans = {s: plan(s, 4) for s in ("mixed", "column", "pooled column")}
    flat = results(ranks, 4, {s: replace(job, plan=p) for s, p in plans.items()})
    for combines in (False, True):
        jobs = {s: replace(job, plan=p, ranks_per_node=2, combines_rows=combines) for s, p in plans.items()}
        for scheme, found in results(ranks, 4, jobs).items():
            assert not differing(found, flat[scheme]), (scheme, combines)


def check_narrow(ranks: Ranks, dtype: str, fp32_rows: int, schemes: Sequence[str]) -> None:
    """Rows of 144 columns can be cut where int8 has its scales; of shorter ones no cut is there."""
    tables = tuple(
        replace(t, dtype=dtype, dim=144 if t.dim == 48 else t.dim, fp32_rows=min(t.rows, fp32_rows)) for t in TABLES
    )
    job = Job(None, steps=3, optimizer="RowWiseAdagrad", kind="ragged", tables=tables)
    found = results(ranks, 3, {s: replace(job, plan=plan(s, 3, tables)) for s in ("table", *schemes)})
    for scheme in schemes:
        assert not differing(found[scheme], found["table"]), scheme


@pytest.mark.parametrize("dtype", ["bf16", full("fp16"), "int8", full("fp8")])
def test_all_plans_give_the_same_bits_of_narrow_rows(ranks: Ranks, dtype: str):
    check_narrow(ranks, dtype, 2, ("column", "mixed", "pooled column"))


@pytest.mark.parametrize("dtype", [full("bf16"), "int8"])
def test_hot_rows_that_all_ranks_read_may_be_float32_and_the_others_narrow(ranks: Ranks, dtype: str):
    check_narrow(ranks, dtype, 7, ("hot",))


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [
        full("fixed", "SGD"),
        ("ragged", "clipped"),
        ("weighted", "Adam"),
        full("empty", "LAMB"),
        full("fixed", "RowWiseAdagrad"),
    ],
)
def test_distributed_training_agrees_with_training_on_one_rank(ranks: Ranks, kind: str, optimizer: str):
    rule, options = OPTIMIZERS[optimizer]
    alone = Job(None, steps=20, optimizer=rule, options=options, kind=kind, world_size=3, tables=WHOLE)
    found = results(ranks, 3, {"row": replace(alone, plan=plan("row", 3, WHOLE))})["row"]
    found["losses"] = found["losses"].sum(0)
    for name, value in trained(None, alone).items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_codecs_change_results_by_no_more_than_they_round(ranks: Ranks, direction: str):
    bounds = {"fp32": 0.0, "bf16": 2**-8, "fp16": 2**-11, "int8": 1 / 254, "fp8": 2**-4}
    job = Job(plan("grid", 3, WHOLE), options={"lr": 0.01}, optimizer="SGD", tables=WHOLE)
    jobs = {codec: replace(job, wire={f"{direction}_codec": codec}) for codec in bounds}
    found = results(ranks, 3, jobs)
    assert not differing(found["fp32"], results(ranks, 3, {"plain": job})["plain"])
    for codec in bounds.keys() - {"fp32"}:
        for name in ("losses", *(t.name for t in WHOLE)):
            exact = found["fp32"][name]
            change = (found[codec][name] - exact).abs().max()
            assert 0 < change <= bounds[codec] * exact.abs().max(), (codec, name)


def test_per_shard_statistics_change_rules_that_sum_over_columns_and_no_others(ranks: Ranks):
    jobs = {
        f"{optimizer} {scheme} {per_shard}": Job(
            plan(scheme, 3), optimizer=optimizer, wire={"per_shard_statistics": per_shard}
        )
        for optimizer in ("SGD", "RowWiseAdagrad")
        for scheme in ("table", "column")
        for per_shard in (False, True)
    }
    found = results(ranks, 3, jobs)
    for name in jobs:
        optimizer = name.split()[0]
        changed = {d.split()[0] for d in differing(found[name], found[f"{optimizer} table False"])}
        if name == "RowWiseAdagrad column True":
            assert changed >= {"big", "small", "items", "words", "losses"}
        else:
            assert not changed, name
