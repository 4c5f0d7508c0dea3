"""What exchanges cost in one hop and in two: messages, bytes over each link, seconds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hotbed.errors import PlanError
from hotbed.plan import make_plan
from hotbed.plan.cost import (
    ALL_POOLED_EXCHANGES,
    ALL_POOLED_LAUNCHES,
    GRADIENTS,
    GROUPING,
    HOST,
    IDS,
    LOOKUP,
    POOLING,
    ROWS,
    UPDATE,
    CostModel,
)
from hotbed.plan.hardware import Hardware
from hotbed.plan.hit_rates import Zipf
from hotbed.plan.links import COMBINED_COPIES, HOP_COPIES, Links
from hotbed.plan.parts import Array
from hotbed.plan.schemes import Cut
from hotbed.plan.search import search
from hotbed.plan.simulation.simulate import simulate
from hotbed.plan.step_time import BUCKET_BYTES, StepEstimate, estimate_step
from hotbed.plan.tiling import Tile
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table

A100 = Hardware.load("a100-40")
NETWORK = A100.network * A100.network_efficiency


def test_two_hops_have_fewer_messages() -> None:
    one, two = (Links(hardware=A100, size=64, ranks_per_node=hop) for hop in (None, 8))
    assert (one.messages, two.messages) == (63, 7 + 7 + 7)  # sizes and bytes inside the node, bytes between nodes
    assert not Links(hardware=A100, size=8, ranks_per_node=8).in_two_hops  # all are on one node
    assert Links(hardware=A100, size=8, ranks_per_node=1).messages == 7


def test_as_many_bytes_cross_between_nodes_in_two_hops() -> None:
    one, two = (Links(hardware=A100, size=16, ranks_per_node=hop).shares("shards") for hop in (None, 8))
    assert one == pytest.approx({"node link": 7 / 15, "network": 8 / 15})
    assert two["network"] == pytest.approx(one["network"])
    assert two["node link"] == pytest.approx(14 / 15)  # all but what is for this rank's place


def test_both_links_carry_at_once_in_one_hop_and_one_after_the_other_in_two() -> None:
    one, two = (Links(hardware=A100, size=16, ranks_per_node=hop) for hop in (None, 8))
    assert one.byte_s("shards") == pytest.approx(max(7 / 15 / A100.node_link, 8 / 15 / NETWORK))
    expected = 14 / 15 / A100.node_link + 8 / 15 / NETWORK + 2 * HOP_COPIES / A100.stream
    assert two.byte_s("shards") == pytest.approx(expected)
    assert two.byte_s("replicas") == one.byte_s("replicas")


def test_rows_that_nodes_combine_cross_the_network_once_per_node() -> None:
    links = Links(hardware=A100, size=16, ranks_per_node=8)
    assert links.combines_rows and links.messages_of_rows == 7 + 1  # no sizes inside the node
    assert links.shares("shards", 0.25) == pytest.approx({"node link": 14 / 15, "network": 8 / 15 / 4})
    expected = 14 / 15 / A100.node_link + 8 / 15 / 4 / NETWORK + 2 * COMBINED_COPIES / A100.stream
    assert links.byte_s("shards", 0.25) == pytest.approx(expected)
    # 12 ranks have one or two of 16 virtual ranks, and nodes of 3 have 4. Nodes of 4 have 5.
    assert Links(hardware=A100, size=12, ranks_per_node=3).combines_rows
    assert not Links(hardware=A100, size=12, ranks_per_node=4).combines_rows
    for other in (replace(links, size=24), replace(links, is_lossless=False), replace(links, ranks_per_node=None)):
        assert not other.combines_rows and other.messages_of_rows == other.messages


def test_the_planner_prices_the_distinct_rows_of_a_node() -> None:
    """All 64 samples of a rank look up the same row, so 8 ranks of a node need one."""
    table = Table("t", 64, 16)
    work = Workload.of([table], ids={"t": 1.0}, popularity={"t": Zipf(64, 50.0)}, batch_size=64 * 16, ranks_per_node=8)
    model = CostModel(work, 16, A100)
    costs = model.ranks(make_plan([table], 16, "table"))
    assert model.combined_share(()) == pytest.approx(1 / 8, rel=1e-3)
    price = costs.parts[0, ROWS] / costs.parts_bytes[0, ROWS]
    assert price == pytest.approx(Links(hardware=A100, size=16, ranks_per_node=8).byte_s("shards", 1 / 8), rel=1e-3)
    pooled = model.tile(Tile("t", range(64), range(16), 0), wire="pooled").prices
    assert pooled[ROWS] == pytest.approx(model.wire_s)  # pooled vectors are forwarded
    assert (model.combined_share({"t"}), model.dims_of_rows(()), model.dims_of_rows({"t"})) == (1, 1, 0)


def test_a_first_hop_between_nodes_takes_the_network() -> None:
    far = Links(hardware=A100, size=16, replicas=8, layout="replicas", ranks_per_node=8)
    assert far.shares("shards")["node link"] == 0


def test_ranks_that_two_hops_cannot_have_are_refused() -> None:
    work = Workload.of([Table("t", 1000, 16)], batch_size=1024, ranks_per_node=8)
    with pytest.raises(PlanError, match=r"parallel\.ranks_per_node: got 8"):
        CostModel(work, 12, A100)
    assert CostModel(work, 4, A100).links is not None  # fewer are on one node
    with pytest.raises(PlanError, match="ranks_per_node: got 0, expected at least 1"):
        Workload.of([], ranks_per_node=0)


def test_many_ranks_are_faster_in_two_hops_and_few_are_not() -> None:
    def step(ranks: int, hop: int | None, network: float) -> float:
        work = Workload.of([Table("t", 10**6, 64)], batch_size=4096 * ranks, ranks_per_node=hop)
        found = search(work, ranks, A100.with_(network=network), integer_program=False)
        return simulate(found.plan, found.costs, found.model).step_s

    assert step(512, 8, A100.network) < step(512, None, A100.network)
    assert step(16, 8, A100.node_link * 100) > step(16, None, A100.node_link * 100)


def test_exchanges_of_a_group_have_messages_to_its_ranks_alone() -> None:
    assert [Links(hardware=A100, size=64 // m, replicas=m).messages for m in (1, 4, 16)] == [63, 15, 3]


def reduced(
    parameters: int, ranks: int, hop: int | None = None, here: Hardware = A100, replicas: int = 1
) -> tuple[float, float]:
    """Seconds of the bytes and of the messages of summing dense gradients."""
    dense = DenseWork(parameters=parameters)
    tables = [Table("t", 1000, 16)]
    work = Workload.of(tables, batch_size=ranks, dense=dense, ranks_per_node=hop, replicas=replicas)
    model = CostModel(work, ranks // replicas, here)
    found = estimate_step(plan := make_plan(tables, ranks // replicas, "row"), model.ranks(plan), model)
    return found.all_reduce - found.reduce_messages, found.reduce_messages


def test_sums_of_dense_gradients_have_messages_in_few_hops() -> None:
    message, launch = A100.message_s, A100.launch_s
    assert reduced(100, 8)[1] == pytest.approx(2 * 7 * message + launch)
    assert reduced(100, 64)[1] == pytest.approx(2 * (3 + 1 + 7) * message + 3 * launch)
    assert reduced(100, 64, hop=8)[1] == pytest.approx(2 * (7 + 7) * message + 2 * launch)
    assert reduced(100, 64, hop=8, replicas=4) == reduced(100, 64, hop=8)  # of all ranks
    assert reduced(100, 4096)[1] == pytest.approx(2 * (3 + 1 + 3 * 7) * message + 5 * launch)
    on_cores = A100.with_(cores_shared=True)
    assert reduced(100, 64, here=on_cores)[1] == pytest.approx((3 + 1 + 7) * (2 * message + launch))
    parameters = 3 * BUCKET_BYTES // 4
    assert reduced(parameters, 64)[1] == pytest.approx(3 * reduced(100, 64)[1])
    # An odd number of nodes takes one hop. Its 7 + 300 messages are more than twice 128, so buckets are larger.
    assert reduced(parameters, 8 * 301, hop=8)[1] == pytest.approx(2 * (7 + 300) * message + 2 * launch)
    assert reduced(0, 64) == (0, 0)


@pytest.mark.parametrize("hop", [None, 8])
@pytest.mark.parametrize("nodes", [2, 4, 8, 512])
def test_the_network_carries_an_eighth_of_dense_gradients(nodes: int, hop: int | None) -> None:
    """Ranks add them inside their node first, whether they know the nodes or not."""
    parameters, inside, across = 10_000, 2 * 7 / 8, 2 * (nodes - 1) / nodes / 8
    links = Links(hardware=A100, size=8 * nodes, ranks_per_node=hop)
    assert links.shares_of_sums() == pytest.approx({"node link": inside, "network": across})
    seconds = 4 * parameters * (inside / A100.node_link + across / NETWORK)
    assert reduced(parameters, 8 * nodes, hop)[0] == pytest.approx(seconds)
    assert links.slowest_of_sums() == ("node link" if nodes == 2 else "network")
    in_nodes_of_3 = Links(hardware=A100.with_(ranks_per_node=3), size=9, ranks_per_node=3)
    assert in_nodes_of_3.shares_of_sums()["network"] == pytest.approx(2 * 8 / 9 * 6 / 8)  # 9 ranks have one hop


def test_rows_of_the_host_are_read_by_cores_and_then_copied() -> None:
    work = Workload.of([Table("t", 10**6, 64)], batch_size=1024)
    for ranks in (1, 8):
        tile = make_plan([use.table for use in work.uses], ranks, Cut(tier="host")).tiles[0]
        price = CostModel(work, ranks, A100).tile(tile).prices[HOST]
        assert price == pytest.approx(1 / A100.host_link + 2 * ranks / A100.host_stream)


@pytest.mark.parametrize("bags", [1.0, 4.0])
def test_owners_that_pool_send_one_vector_for_a_bag(bags: float) -> None:
    ids, ranks, batch, vector = 20.0, 2, 64, 4 * 64
    tables = [Table("t", 10**6, 64)]
    plan = make_plan(tables, ranks, "table", wire="pooled")

    def costs(*, fused: bool) -> tuple[Array, StepEstimate, CostModel]:
        size = {"ids": {"t": ids}, "bags": {"t": bags}, "batch_size": batch * ranks}
        model = CostModel(Workload.of(tables, **size, fused_pooling=fused), ranks, A100)
        found = model.ranks(plan)
        return found.parts_bytes, estimate_step(plan, found, model), model

    (nbytes, step, _), (ours, own_step, model) = costs(fused=True), costs(fused=False)
    assert nbytes[0, ROWS] == nbytes[0, GRADIENTS] == pytest.approx(batch * bags * vector)
    assert nbytes[0, LOOKUP] == pytest.approx(ranks * batch * (ids + bags) * vector)  # all rows read, sums written
    assert nbytes[1, POOLING] == pytest.approx(2 * 2 * batch * bags * vector)
    # hotbed copies the rows first, sends lengths of bags, groups the ids of all ranks, and sums gradients by rank.
    assert ours[0, LOOKUP] - nbytes[0, LOOKUP] == pytest.approx(ranks * batch * 2 * ids * vector)
    assert ours[0, IDS] - nbytes[0, IDS] == pytest.approx(batch * bags * 8)
    assert ours[0, GROUPING] - nbytes[0, GROUPING] == pytest.approx(ranks * batch * ids * 8)
    assert nbytes[0, UPDATE] < ours[0, UPDATE] < nbytes[0, UPDATE] + 2 * ranks * batch * ids * vector
    assert own_step.messages - step.messages == pytest.approx(ALL_POOLED_EXCHANGES * (ranks - 1) * A100.message_s)
    assert own_step.launches - step.launches == pytest.approx(ALL_POOLED_LAUNCHES * A100.launch_s)
    assert (
        sum(model.pooled_s(["t"]))
        == model.least_pooled_s()
        == pytest.approx(own_step.seconds - step.seconds - (ours[0] - nbytes[0]) @ _prices(model))
    )


def _prices(model: CostModel) -> Array:
    return model.tile(Tile("t", range(10**6), range(64), 0)).prices
