"""Over NCCL all ranks start their exchanges in one order, whatever threads there are and however late they are.

Gloo takes NCCL's place, as far as a machine without GPUs lets it: `Link.overlaps` says what it says of NCCL.
"""

from __future__ import annotations

import random
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotbed as hb
from hotbed.comm import Handle, Link
from hotbed.comm.hierarchical import NodeLink
from hotbed.embed import dense_parallel as dense
from tests.matrix import full
from tests.ranks import TIMEOUT_S, Ranks

BATCH, STEPS = 12, 4


class Interleaved(nn.Module):
    """Vectors of two collections come in between dense layers, so their gradients go out between those of layers."""

    def __init__(self) -> None:
        super().__init__()
        tables = [hb.Table("a", rows=50, dim=16), hb.Table("b", rows=40, dim=32), hb.Table("c", rows=30, dim=16)]
        features = [hb.Feature(t.name, table=t.name) for t in tables]
        self.late = hb.EmbeddingCollection(tables[:2], features[:2], seed=1)
        self.early = hb.EmbeddingCollection(tables[2:], features[2:], seed=2)
        self.layers = nn.ModuleList(
            [nn.Linear(4, 16), nn.Linear(16 + 16, 16), nn.Linear(16 + 48, 16), nn.Linear(16, 1)]
        )

    def forward(self, x: Tensor, ids: dict[str, Tensor]) -> Tensor:
        late, early = (hb.Jagged.from_dict({n: ids[n] for n in names}) for names in ("ab", "c"))
        x = self.layers[1](torch.cat([torch.relu(self.layers[0](x)), self.early(early).concatenate()], 1))
        x = self.layers[2](torch.cat([torch.relu(x), self.late(late).concatenate()], 1))
        return self.layers[3](torch.relu(x)).mean()


def started(
    group: dist.ProcessGroup, overlaps: bool, options: dict[str, Any], bucket_messages: int = 128
) -> tuple[list[str], list[float]]:
    """What this rank started, in order, each after a delay of its own; and the losses."""
    record: list[str] = []
    delays, one = random.Random(dist.get_rank(group)), threading.Lock()
    before, bucket, start = Link.overlaps, (dense.BUCKET_MIB, dense.BUCKET_MESSAGES), Link._start

    def noted(self: Link, what: str, begin: Any, result: Any) -> Handle[Any]:
        time.sleep(delays.random() / 50)
        with one:
            record.append(what)
            return start(self, what, begin, result)

    Link.overlaps = property(lambda _: overlaps)  # type: ignore[method-assign, assignment]
    dense.BUCKET_MIB, dense.BUCKET_MESSAGES = 0.001, bucket_messages  # type: ignore[assignment]
    Link._start = noted  # type: ignore[method-assign]
    try:
        torch.manual_seed(0)
        parallel = hb.ParallelOptions(**options)
        model = hb.distribute(Interleaved(), "row", parallel, group=group, timeout=timedelta(seconds=TIMEOUT_S))
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), hb.optim.SGD(model, lr=0.1)]
        losses: list[float] = []
        draw = torch.Generator().manual_seed(dist.get_rank(group))
        for _ in range(STEPS):
            x = torch.randn(BATCH, 4, generator=draw)
            loss = model(x, {name: torch.randint(0, 30, (BATCH,), generator=draw) for name in "abc"})
            losses.append(loss.item())
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    finally:
        Link.overlaps, Link._start = before, start  # type: ignore[method-assign]
        dense.BUCKET_MIB, dense.BUCKET_MESSAGES = bucket
    return record, losses


@pytest.mark.parametrize("options", [full({}), {"ranks_per_node": 2}, full({"replicas": 2, "exact": True})], ids=str)
def test_all_ranks_start_exchanges_in_one_order_where_they_may_not_overlap(
    ranks: Ranks, options: dict[str, Any]
) -> None:
    found = ranks.run(4, started, False, options)
    order = found[0][0]
    assert {"gradients", "gradients of dense parameters"} <= set(order)
    assert all(record == order for record, _ in found)
    # Between those of rows, as backward comes to them, and not before or after all of them.
    kinds = [what for what in order[-len(order) // STEPS :] if what in ("gradients", "gradients of dense parameters")]
    assert kinds.index("gradients of dense parameters") < len(kinds) - 1 - kinds[::-1].index("gradients")
    assert [losses for _, losses in found] == [losses for _, losses in ranks.run(4, started, True, options)]


def test_buckets_of_many_messages_are_larger_and_change_no_bit(ranks: Ranks) -> None:
    small, large = (ranks.run(4, started, True, {}, messages) for messages in (128, 1))
    what = "gradients of dense parameters"
    assert 0 < large[0][0].count(what) < small[0][0].count(what)
    assert [losses for _, losses in large] == [losses for _, losses in small]


class Recorder:
    """Work of a collective between GPUs: says over which group it was started and when it is waited for."""

    def __init__(self, events: list[tuple[str, object]], group: object) -> None:
        self.events, self.group = events, group
        events.append(("start", group))

    def wait(self) -> None:
        self.events.append(("wait", self.group))


def over_nccl(group: dist.ProcessGroup) -> tuple[bool, bool, list[tuple[str, int]]]:
    """Whether clones share communicators, and what is started and waited for; of tensors that are nowhere."""
    events: list[tuple[str, object]] = []
    asked, exchange, cast = dist.get_backend_config, dist.all_to_all, dist.broadcast
    dist.get_backend_config = lambda _: "cpu:gloo,cuda:nccl"  # type: ignore[assignment]
    dist.all_to_all = lambda *_, group, async_op: Recorder(events, group)
    dist.broadcast = lambda *_, group, group_src, async_op: Recorder(events, group)
    try:
        base = Link(group)
        clone, nodes = base.clone(), NodeLink(base.clone(), 2)
        again = nodes.clone()
        here = torch.zeros(4, device="meta")
        parts = [here] * 4
        for link in (base, clone, nodes.inside, again.inside, nodes.between, clone, clone):
            size = link.size
            link.exchange("rows", parts[:size], parts[:size])
        again.broadcast("rows", here, 0)
    finally:
        dist.get_backend_config, dist.all_to_all, dist.broadcast = asked, exchange, cast
    links = (base, clone, nodes, again)
    names = {id(base.gpu_group): 0, id(nodes.inside.gpu_group): 1, id(nodes.between.gpu_group): 2}
    one = all(link.gpu_group is group for link in links) and again.inside.gpu_group is nodes.inside.gpu_group
    own = len({id(link.group) for link in links if link is not nodes}) == 3
    return one, own, [(what, names[id(over)]) for what, over in events]


def test_clones_share_a_communicator_and_another_waits_for_the_last_exchange(ranks: Ranks) -> None:
    for one, own, events in ranks.run(4, over_nccl):
        assert one and own  # one for GPUs; for the host every clone has its own
        assert events == [
            *[("start", 0), ("start", 0)],
            *[("wait", 0), ("start", 1), ("start", 1)],
            *[("wait", 1), ("start", 2)],
            *[("wait", 2), ("start", 0), ("start", 0), ("start", 0)],
        ]
