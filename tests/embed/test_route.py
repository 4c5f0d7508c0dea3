"""The numbers of the worked examples in `hotbed.embed` are those of the code, on three ranks."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist

import hotbed as hb
from hotbed.comm import Link
from hotbed.embed.ids import FeatureBags
from hotbed.embed.pooled_exchange import PooledRoute, make_pooled_route
from hotbed.embed.shard_routing import IdExchange, Locator, Route, make_route
from hotbed.jagged import Jagged
from hotbed.ops import select
from tests.ranks import Ranks

TABLE, FEATURE = hb.Table("t", 9, 16), hb.Feature("f", "t")
BAGS = [[[4, 1], [3, 4, 2]], [[1], [8]], [[], []]]
"""By rank, the bags of the example in `hotbed.embed.shard_routing`."""


def routed(group: dist.ProcessGroup, pooled: bool) -> dict[str, Any]:
    rank, cpu = dist.get_rank(group), torch.device("cpu")
    locator = Locator([TABLE], hb.make_plan([TABLE], 3, "row"), rank, cpu)
    bags = FeatureBags({FEATURE: 0}, {"t": (0, 0)}).layout(Jagged.from_dict({"f": BAGS[rank]}), 1, 0)
    kernels, exchange = select(cpu, "auto"), IdExchange(Link(group))
    if pooled:
        route: PooledRoute | Route = make_pooled_route(bags, locator, kernels, exchange.link, trained=True)
    else:
        under_way = make_route(bags, locator, kernels, exchange, trained=True)
        exchange.finish()
        route = under_way.result(0)
    (transfer,) = route.transfers
    cuts = route.bags.offsets[0].tolist()
    found = {
        "send_counts": transfer.send_counts,
        "rows": route.rows,
        "bags": [route.bags.ids[a:b].tolist() for a, b in pairwise(cuts)],
    }
    if isinstance(route, PooledRoute):
        asked = transfer.requested
        return found | {
            "position": transfer.rows.tolist(),
            "bag": transfer.bags.tolist(),
            "slots": asked.slots.tolist(),
            "lengths": asked.lengths.tolist(),
            "ids": asked.ids,
            "partials": asked.partials,
        }
    return found | {
        "slots": transfer.slots.tolist(),
        "positions": route.positions.tolist(),
        "received": transfer.received.tolist(),
        "recv_counts": transfer.recv_counts,
    }


def test_ids_of_three_ranks_are_routed_as_in_the_picture(ranks: Ranks):
    zero, one, two = ranks.run(3, routed, False)
    assert zero == {
        "send_counts": [1, 2, 1],
        "slots": [1, 0, 1, 0],
        "rows": 4,
        "positions": [1, 3, 0, 2],
        "bags": [[2, 1], [0, 2, 3]],
        "received": [1],
        "recv_counts": [1, 0, 0],
    }
    assert (one["received"], one["recv_counts"]) == ([0, 1, 0], [2, 1, 0])
    assert (two["received"], two["recv_counts"], two["rows"]) == ([0, 2], [1, 1, 0], 0)


def test_bags_of_three_ranks_are_cut_into_units_as_in_the_picture(ranks: Ranks):
    zero, one, _ = ranks.run(3, routed, True)
    own = ("send_counts", "rows", "position", "bag", "bags")
    assert {key: zero[key] for key in own} == {
        "send_counts": [1, 2, 1],
        "rows": 4,
        "position": [1, 0, 2, 3],
        "bag": [1, 0, 1, 1],
        "bags": [[0], [1, 2, 3]],
    }
    of_owner = ("slots", "lengths", "ids", "partials")
    assert [one[key] for key in of_owner] == [[1, 0, 1, 0], [2, 1, 1], [3, 1, 0], [2, 1, 0]]


def test_rows_are_placed_as_in_the_example():
    locator = Locator([TABLE], hb.make_plan([TABLE], 3, "row"), 0, torch.device("cpu"))
    assert locator.entries.T.tolist() == [[0, r, r, r + 7, 3, 0, 0, 0, -1] for r in range(3)]
    found = locator.find(torch.tensor([1, 2, 3, 4]))
    assert found.tile.tolist() == [1, 2, 0, 1]
    assert locator.slots(torch.tensor([1, 2, 3, 4]), found).tolist() == [0, 0, 1, 1]
    (layer,) = locator._layers
    assert layer.keys.tolist() == [0, 10, 20]
    second = hb.Table("u", 9, 16)
    both = Locator([TABLE, second], hb.make_plan([TABLE, second], 3, "row"), 0, torch.device("cpu"))
    assert both.first_keys.tolist() == [0, 9, 18]
    assert both.entries[:, 3:].T.tolist() == [[1, r, r, r + 7, 3, 0, 0, 3, -1] for r in range(3)]
