"""Tests of simulated steps, and of the usage of resources."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.embed import dense_parallel as dense
from hotbed.errors import PlanError
from hotbed.optim import RowWiseAdagrad
from hotbed.plan import Plan, make_plan
from hotbed.plan.cost import LAUNCHES, POOLING, CostModel, RankCosts
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import Found, search
from hotbed.plan.simulation.simulate import (
    MEASURED,
    Overlap,
    Simulation,
    Stragglers,
    Usage,
    link_of_exchange,
    simulate,
    usage_of,
)
from hotbed.plan.step_time import BUCKET_BYTES, BUCKET_MESSAGES, arenas_of, estimate_step
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table

A100 = Hardware.load("a100-40")
CPU = Hardware.load("epyc-7742x2")
IN_ORDER = Overlap(ids=False, averages=False, buckets=False)
"""As `hotbed.plan.step_time` counts."""
RATES = ["gather", "scatter", "flops", "host_link", "host_stream", "node_link", "network"]
Layout = Literal["groups", "replicas"]


def work_of(
    rows: tuple[int, ...], *, ranks: int = 1, replicas: int = 1, every: int = 1, layout: Layout = "groups", **dense: Any
) -> Workload:
    tables = [Table(f"t{i}", count, 64) for i, count in enumerate(rows)]
    figures: dict[str, Any] = {"parameters": 300_000, "flops": 2e5, "input_bytes": 300.0} | dense
    return Workload.of(
        tables,
        moments=RowWiseAdagrad.rule.moments,
        batch_size=256 * ranks * replicas,
        replicas=replicas,
        sync_every=every,
        layout=layout,
        dense=DenseWork(**figures),
    )


def run(found: Found, **options: Any) -> Simulation:
    return simulate(found.plan, found.costs, found.model, **options)


@st.composite
def founds(draw: st.DrawFn) -> Found:
    ranks, replicas = draw(st.sampled_from([1, 2, 5, 8, 16])), draw(st.sampled_from([1, 2, 4]))
    rows = draw(st.lists(st.integers(1, 100_000), min_size=1, max_size=5))
    work = work_of(
        tuple(rows),
        ranks=ranks,
        replicas=replicas,
        every=draw(st.sampled_from([1, 3, 10])),
        layout=draw(st.sampled_from(["groups", "replicas"])),
        parameters=draw(st.sampled_from([0, 1000, 10**6, 10**8])),
        flops=draw(st.sampled_from([0.0, 1e4, 1e8])),
        input_bytes=draw(st.sampled_from([0.0, 1e3, 1e7])),
    )
    return search(work, ranks, draw(st.sampled_from([A100, CPU])), capacity_bytes=10**12, integer_program=False)


@settings(max_examples=25, deadline=None)
@given(founds(), st.sampled_from([None, Stragglers(share=0.2, slowdown=3.0)]))
def test_no_resource_does_more_than_it_can(found: Found, stragglers: Stragglers | None):
    simulated = run(found, stragglers=stragglers)
    estimate = estimate_step(found.plan, found.costs, found.model)
    own = [estimate.dense, estimate.input, estimate.launches, estimate.all_reduce, float(found.costs.load.mean())]
    assert simulated.step_s >= max(own) * (1 - 1e-9)
    assert all(usage.utilisation <= 1 + 1e-9 for usage in simulated.usage.values())
    assert 0 <= simulated.waiting < 1
    assert simulated.samples_per_s == pytest.approx(found.model.workload.batch_size / simulated.step_s)


@settings(max_examples=25, deadline=None)
@given(founds(), st.sampled_from(RATES), st.sampled_from([1.01, 2.0, 1000.0]))
def test_faster_hardware_is_never_slower(found: Found, figure: str, factor: float):
    assert found.model.hardware is not None
    model = CostModel(found.model.workload, found.plan.world_size, found.model.hardware.scaled(figure, factor))
    faster = simulate(found.plan, model.ranks(found.plan), model)
    assert faster.step_s <= run(found).step_s * (1 + 1e-3)


@settings(max_examples=20, deadline=None)
@given(founds(), st.floats(0.01, 1.0), st.floats(1.0, 5.0), st.integers(0, 10))
def test_stragglers_only_slow_and_are_the_same_for_a_seed(found: Found, share: float, slowdown: float, seed: int):
    stragglers = Stragglers(share=share, slowdown=slowdown, seed=seed)
    simulated = run(found, stragglers=stragglers)
    assert simulated.step_s >= run(found).step_s * (1 - 1e-3)
    assert run(found, stragglers=stragglers) == simulated


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 3]),
    st.sampled_from([1e4, 1e6, 1e9]),
    st.sampled_from([1000, 10**6, 10**8]),
    st.sampled_from([0.0, 1e3, 1e8]),
)
def test_the_closed_form_is_the_simulation_of_ranks_that_are_alike(
    ranks: int, replicas: int, every: int, flops: float, parameters: int, nbytes: float
):
    """But for the sums per row, which go on beside what is left of the all-reduce."""
    work = work_of(
        (3200, 64), ranks=ranks, replicas=replicas, every=every, flops=flops, parameters=parameters, input_bytes=nbytes
    )
    plan = make_plan([use.table for use in work.uses], ranks, "row", moments=RowWiseAdagrad.rule.moments)
    model = CostModel(work, ranks, A100)
    costs = model.ranks(plan)
    estimate = estimate_step(plan, costs, model)
    hidden = min(max(estimate.all_reduce - 2 / 3 * estimate.dense, 0.0), float(costs.parts[0, POOLING]) / 2)
    expected = max(estimate.seconds - hidden, estimate.input)
    assert simulate(plan, costs, model, overlap=IN_ORDER).step_s == pytest.approx(expected, rel=1e-6)


def test_one_rank_exchanges_nothing():
    found = search(work_of((1000, 3)), 1, A100)
    simulated = run(found)
    assert not {"node link", "network"} & simulated.usage.keys() and simulated.waiting == 0
    assert not {"ids", "rows", "gradients", "all-reduce", "copies", "average"} & simulated.critical.keys()


def test_overlap_hides_ids_over_gloo_and_not_over_nccl():
    assert Overlap.of(CPU).ids and not Overlap.of(A100).ids
    found = search(work_of((100_000,), ranks=8, flops=1e8), 8, A100)
    in_order, ahead = (run(found, overlap=Overlap(ids=ids, averages=False)) for ids in (False, True))
    assert "ids" in in_order.critical and "ids" not in ahead.critical
    assert ahead.step_s < in_order.step_s  # by less than the ids take: rows wait for the link that ids are on
    assert in_order.step_s - ahead.step_s <= in_order.critical["ids"] * (1 + 1e-9)


def test_a_small_dense_part_is_one_bucket_that_nothing_hides():
    assert BUCKET_BYTES == dense.BUCKET_MIB << 20 and BUCKET_MESSAGES == dense.BUCKET_MESSAGES
    found = search(work_of((1000,), ranks=8, flops=1e8), 8, A100)
    late, early = (run(found, overlap=replace(IN_ORDER, buckets=buckets)) for buckets in (True, False))
    all_reduce = estimate_step(found.plan, found.costs, found.model).all_reduce
    assert 0 < late.step_s - early.step_s <= all_reduce * (1 + 1e-9)


def test_replicas_are_averaged_every_few_steps_and_neighbours_are_cheaper():
    steps: dict[tuple[str, int], float] = {}
    for layout in ("groups", "replicas"):
        for every in (1, 10):
            found = search(work_of((500_000,), ranks=8, replicas=8, every=every, layout=layout), 8, A100)
            simulated = run(found)
            assert simulated.steps % every == 0 and simulated.steps >= MEASURED
            steps[layout, every] = simulated.critical["average"]
    assert steps["groups", 10] < steps["groups", 1] and steps["replicas", 1] < steps["groups", 1]


@pytest.mark.parametrize(
    ("layout", "replicas", "shards", "near"),
    [("groups", 4, 8, (1.0, 0.0)), ("replicas", 4, 8, (1 / 7, 1.0)), ("groups", 4, 4, (1.0, 1 / 3))],
)
def test_layouts_say_who_is_on_a_node(layout: Layout, replicas: int, shards: int, near: tuple[float, float]):
    model = CostModel(work_of((100,), ranks=shards, replicas=replicas, layout=layout), shards, A100)
    assert model.links is not None
    assert (model.links.near_share("shards"), model.links.near_share("replicas")) == near


def test_all_ranks_wait_for_the_slowest():
    found = search(work_of((1000,), ranks=4), 4, A100)
    parts = found.costs.parts.copy()
    parts[1, 0] += 1.0  # rank 1 takes a second longer for its lookups
    costs = RankCosts(found.costs.memory, found.costs.parts_bytes, parts)
    simulated = simulate(found.plan, costs, found.model)
    assert simulated.step_s == pytest.approx(run(found).step_s + 1.0, rel=1e-6)
    assert simulated.waiting == pytest.approx(3 / 4, rel=0.01) and simulated.binds == "device memory"


def test_sixteen_thousand_ranks_of_unequal_load_are_simulated():
    work, ranks = work_of((10**6,), ranks=4096, replicas=4), 4096
    model = CostModel(work, ranks, A100)
    one = make_plan([use.table for use in work.uses], ranks, "table")
    costs = model.ranks(one)
    parts = costs.parts * np.random.default_rng(0).uniform(1, 2, (ranks, 1))
    plan = Plan(ranks, one.tiles)
    simulated = simulate(plan, RankCosts(costs.memory, costs.parts_bytes, parts), model)
    slower = simulate(plan, RankCosts(costs.memory, costs.parts_bytes, parts), model, stragglers=Stragglers(share=0.01))
    assert slower.step_s > simulated.step_s > 0
    assert slower.nodes == 2048


def test_events_are_those_of_the_ranks_that_are_shown():
    found = search(work_of((1000, 70_000), ranks=16, flops=1e6), 16, A100)
    simulated = run(found)
    assert {event.name for event in simulated.events} >= {"forward", "backward", "lookup", "all-reduce", "input"}
    assert len({event.rank for event in simulated.events}) <= 3
    for thread in ("step", "prefetch", "all-reduce"):
        for rank in {event.rank for event in simulated.events}:
            own = sorted((e.start, e.seconds) for e in simulated.events if (e.rank, e.thread) == (rank, thread))
            assert all(a + length <= b + 1e-12 for (a, length), (b, _) in pairwise(own))


def test_a_price_is_that_of_all_nodes():
    priced = A100.with_(price_per_hour=32.0)
    found = search(work_of((1000,), ranks=12), 12, priced)
    simulated = run(found)
    assert simulated.per_billion == pytest.approx(1e9 / simulated.samples_per_s / 3600 * 2 * 32.0)
    assert run(search(work_of((1000,), ranks=12), 12, A100)).per_billion is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 1.5}, "stragglers.share: got 1.5, expected a finite number at least 0 and at most 1"),
        ({"slowdown": 0.5}, "stragglers.slowdown: got 0.5, expected a finite number at least 1"),
        ({"slowdown": float("nan")}, "stragglers.slowdown: got nan, expected a finite number at least 1"),
        ({"seed": -1}, "stragglers.seed: got -1, expected at least 0"),
    ],
)
def test_stragglers_that_cannot_be_are_refused(values: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        Stragglers(**values)


def test_a_simulation_needs_hardware():
    found = search(work_of((1000,)), 1)
    with pytest.raises(PlanError, match="hardware: got none"):
        run(found)


# -- usage of resources ------------------------------------------------------------------------------------------------

A100_FREE_MESSAGES = Hardware.load("a100-40").with_(message_s=0.0)
TABLES = [Table("users", 100_000, 64), Table("items", 70_000, 64)]


def work(ranks: int, replicas: int = 1, **dense: float) -> Workload:
    part = DenseWork(**{"parameters": 300_000, "flops": 2e5, **dense})  # pyright: ignore[reportArgumentType]
    moments = RowWiseAdagrad.rule.moments
    return Workload.of(TABLES, moments=moments, batch_size=256 * ranks, replicas=replicas, dense=part)


def simulated(hardware: Hardware, ranks: int, replicas: int = 1, **dense: float) -> Simulation:
    found = search(work(ranks, replicas, **dense), ranks // replicas, hardware)
    return simulate(found.plan, found.costs, found.model)


@pytest.mark.parametrize(("ranks", "replicas"), [(64, 8), (64, 64)])
def test_replicas_on_other_nodes_wait_for_the_network(ranks: int, replicas: int) -> None:
    here = A100_FREE_MESSAGES.with_(network=1e6)  # next to nothing: exchanges between nodes are the step
    assert simulated(here, ranks, replicas).binds == "network"


@pytest.mark.parametrize(
    ("exchange", "ranks", "replicas", "link"),
    [
        ("rows", 64, 8, "node link"),
        ("average", 64, 8, "network"),
        ("all-reduce", 64, 8, "network"),
        ("all-reduce", 8, 1, "node link"),
        ("rows", 64, 1, "network"),
    ],
)
def test_each_exchange_has_its_link(exchange: str, ranks: int, replicas: int, link: str) -> None:
    assert link_of_exchange(CostModel(work(ranks, replicas), ranks // replicas, A100_FREE_MESSAGES), exchange) == link


def test_dense_gradients_in_two_hops_use_both_links() -> None:
    def on_links(parameters: int) -> tuple[CostModel, dict[str, Usage]]:
        model = CostModel(replace(work(64, parameters=parameters), ranks_per_node=8), 64, A100_FREE_MESSAGES)
        plan = make_plan(TABLES, 64, "row")
        return model, usage_of({}, 1.0, model.ranks(plan), model, 1.0)

    (model, few), (_, many) = on_links(300_000), on_links(600_000)
    assert link_of_exchange(model, "all-reduce") == "network"
    more = {link: many[link].amount - few[link].amount for link in ("node link", "network")}
    # Inside nodes first, then an eighth of the data between them.
    assert more == pytest.approx({"node link": 2 * 7 / 8 * 4 * 300_000, "network": 2 * 7 / 8 * 4 * 300_000 / 8})


@pytest.mark.parametrize("ranks", [8, 16])
def test_links_are_used_for_the_seconds_that_are_charged(ranks: int) -> None:
    plain = simulated(A100_FREE_MESSAGES, ranks)
    slow = simulated(A100_FREE_MESSAGES.with_(all_to_all={ranks: {1: 1e6}}, all_reduce={ranks: {1: 1e6}}), ranks)
    link = "node link" if ranks == 8 else "network"
    rate = (
        A100_FREE_MESSAGES.node_link
        if ranks == 8
        else A100_FREE_MESSAGES.network * A100_FREE_MESSAGES.network_efficiency
    )
    assert plain.usage[link].seconds == pytest.approx(plain.usage[link].amount / rate)
    assert slow.usage[link].seconds > 100 * plain.usage[link].seconds
    assert slow.usage[link].amount == pytest.approx(plain.usage[link].amount, rel=0.2)
    assert all(usage.utilisation <= 1 + 1e-9 for usage in slow.usage.values())


def test_a_step_that_waits_for_launches_is_bound_by_cores() -> None:
    slow = simulated(A100_FREE_MESSAGES, 4, launches=100_000)
    assert slow.binds == "cores" and slow.closed_form.dense == pytest.approx(
        100_000 * A100_FREE_MESSAGES.launch_s, rel=0.01
    )
    assert 0 < slow.usage["arithmetic"].utilisation < 0.01
    assert simulated(A100_FREE_MESSAGES, 4, flops=1e12).binds == "arithmetic"


def test_an_arena_costs_its_launches_or_what_was_measured() -> None:
    found = search(work(2), 2, A100_FREE_MESSAGES)
    arenas = arenas_of(found.plan.tiles, found.model.workload)
    assert found.model.arena_s == LAUNCHES * A100_FREE_MESSAGES.launch_s > 0
    assert estimate_step(found.plan, found.costs, found.model).launches == pytest.approx(found.model.arena_s * arenas)
    measured = CostModel(work(2), 2, A100_FREE_MESSAGES.with_(overheads={"step": {1: 1.0}, "arena": {2: 0.25}}))
    assert measured.arena_s == 0.25
    step = estimate_step(found.plan, measured.ranks(found.plan), measured)
    assert step.launches == pytest.approx(1 + 0.25 * arenas)
