"""Seconds in which resources are used, and which link an exchange waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hotbed.optim import RowWiseAdagrad
from hotbed.plan import make_plan
from hotbed.plan.cost import LAUNCHES, CostModel
from hotbed.plan.hardware import Hardware
from hotbed.plan.search import search
from hotbed.plan.simulation.simulate import Simulation, Usage, link_of, simulate, usage_of
from hotbed.plan.step_time import arenas_of, estimate_step
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table

A100 = Hardware.load("a100-40").with_(message_s=0.0)
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
    here = A100.with_(network=1e6)  # next to nothing: exchanges between nodes are the step
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
    assert link_of(CostModel(work(ranks, replicas), ranks // replicas, A100), exchange) == link


def test_dense_gradients_in_two_hops_use_both_links() -> None:
    def on_links(parameters: int) -> tuple[CostModel, dict[str, Usage]]:
        model = CostModel(replace(work(64, parameters=parameters), ranks_per_node=8), 64, A100)
        plan = make_plan(TABLES, 64, "row")
        return model, usage_of({}, 1.0, model.ranks(plan), model, 1.0)

    (model, few), (_, many) = on_links(300_000), on_links(600_000)
    assert model.links is not None
    assert link_of(model, "all-reduce") == model.links.slowest("shards")
    for link, share in model.links.shares("shards").items():
        assert share > 0
        assert many[link].amount - few[link].amount == pytest.approx(2 * 63 / 64 * 4 * 300_000 * share)


@pytest.mark.parametrize("ranks", [8, 16])
def test_links_are_used_for_the_seconds_that_are_charged(ranks: int) -> None:
    plain = simulated(A100, ranks)
    slow = simulated(A100.with_(all_to_all={ranks: {1: 1e6}}, all_reduce={ranks: {1: 1e6}}), ranks)
    link = "node link" if ranks == 8 else "network"
    rate = A100.node_link if ranks == 8 else A100.network * A100.network_efficiency
    assert plain.usage[link].seconds == pytest.approx(plain.usage[link].amount / rate)
    assert slow.usage[link].seconds > 100 * plain.usage[link].seconds
    assert slow.usage[link].amount == pytest.approx(plain.usage[link].amount, rel=0.2)
    assert all(usage.utilisation <= 1 + 1e-9 for usage in slow.usage.values())


def test_a_step_that_waits_for_launches_is_bound_by_cores() -> None:
    slow = simulated(A100, 4, launches=100_000)
    assert slow.binds == "cores" and slow.closed_form.dense == pytest.approx(100_000 * A100.launch_s, rel=0.01)
    assert 0 < slow.usage["arithmetic"].utilisation < 0.01
    assert simulated(A100, 4, flops=1e12).binds == "arithmetic"


def test_an_arena_costs_its_launches_or_what_was_measured() -> None:
    found = search(work(2), 2, A100)
    arenas = arenas_of(found.plan.tiles, found.model.workload)
    assert found.model.arena_s == LAUNCHES * A100.launch_s > 0
    assert estimate_step(found.plan, found.costs, found.model).launches == pytest.approx(found.model.arena_s * arenas)
    measured = CostModel(work(2), 2, A100.with_(overheads={"step": {1: 1.0}, "arena": {2: 0.25}}))
    assert measured.arena_s == 0.25
    step = estimate_step(found.plan, measured.ranks(found.plan), measured)
    assert step.launches == pytest.approx(1 + 0.25 * arenas)
