"""Exchanges between real processes deliver every byte, and errors name the rank, step and exchange."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hotbed.comm import Link, OneRank
from hotbed.comm.hierarchical import NodeLink
from hotbed.errors import CommError

from .ranks import ANSWER_S, SIZES, Ranks


def rows_for(sender: int, receiver: int) -> torch.Tensor:
    """What one rank sends another: as many rows as the sum of their ranks, and none to rank 0."""
    count = 0 if receiver == 0 else sender + receiver
    return torch.full((count, 3), 10.0 * sender + receiver)


def exchanged(group: dist.ProcessGroup, per_node: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    link = Link(group) if per_node is None else NodeLink(Link(group), per_node).clone()
    parts = [rows_for(link.rank, r) for r in range(link.size)]
    from_others = [len(rows_for(r, link.rank)) for r in range(link.size)]
    first = link.all_to_all("rows", torch.cat(parts), [len(p) for p in parts], from_others)
    second = link.all_gather("ranks", torch.tensor([link.rank, 7]))
    return first.wait(), second.wait()


@pytest.mark.parametrize("size", SIZES)
def test_every_rank_gets_what_was_sent_to_it(ranks: Ranks, size: int):
    for rank, (rows, gathered) in enumerate(ranks.run(size, exchanged)):
        assert torch.equal(rows, torch.cat([rows_for(r, rank) for r in range(size)]))
        assert gathered.tolist() == [[r, 7] for r in range(size)]


@pytest.mark.parametrize("per_node", [1, 2, 4])
def test_in_two_hops_every_rank_gets_the_same(ranks: Ranks, per_node: int):
    for one_hop, two_hops in zip(ranks.run(4, exchanged), ranks.run(4, exchanged, per_node), strict=True):
        for found, expected in zip(two_hops, one_hop, strict=True):
            assert torch.equal(found, expected)


def of_nodes(group: dist.ProcessGroup) -> tuple[set[int], int, str]:
    """Ranks that this one sends to in two hops, the bytes, and what is said when some have left."""
    link = NodeLink(Link(group, timedelta(seconds=ANSWER_S)), 2)
    sent_to: set[int] = set()
    for part in (link.inside, link.between):
        original = part._pairs.start

        def noted(outgoing: Any, incoming: Any, others: Any, part: Link = part, original: Any = original) -> Any:
            sent_to.update(part._names[r] for r in others if outgoing[r].numel())
            return original(outgoing, incoming, others)

        part._pairs.start = noted  # pyright: ignore[reportAttributeAccessIssue]
    ones = [1] * link.size
    link.all_to_all("numbers", torch.arange(link.size), ones, ones).wait()
    link.step = 3
    said = ""
    if link.rank < 2:  # the other node has left
        with pytest.raises(CommError) as caught:
            link.all_to_all("numbers", torch.arange(link.size), ones, ones).wait()
        said = str(caught.value)
    return sent_to, link.sent_bytes["numbers"], said


def test_in_two_hops_a_rank_talks_to_its_node_and_to_its_place_on_others(ranks: Ranks):
    found = ranks.run(4, of_nodes)
    assert [sent_to for sent_to, _, _ in found] == [{1, 2}, {0, 3}, {3, 0}, {2, 1}]
    for rank in (0, 1):
        _, nbytes, said = found[rank]
        assert nbytes >= 2 * 8 + 2 * 8  # two numbers to the rank beside it, two to the other node
        assert said.startswith(f"rank {rank} of 4, step 3: the exchange of numbers failed: rank {rank + 2} has ended")


def test_nodes_must_be_of_equal_size(ranks: Ranks):
    for said in ranks.run(3, of_uneven_nodes):
        assert "ranks_per_node: got 2, expected a divisor of 3" in said


def of_uneven_nodes(group: dist.ProcessGroup) -> str:
    with pytest.raises(CommError) as caught:
        NodeLink(Link(group), 2)
    return str(caught.value)


def overlapped(group: dist.ProcessGroup) -> list[float]:
    """Two exchanges under way at once, waited for in another order on every rank."""
    link = Link(group)
    other = link.clone()
    ones = [1] * link.size
    send = torch.arange(link.size).float()
    handles = [link.all_to_all("a", send, ones, ones), other.all_to_all("b", send + 100, ones, ones)]
    order = (0, 1) if link.rank % 2 else (1, 0)
    found = {i: handles[i].wait() for i in order}
    return [*found[0].tolist(), *found[1].tolist()]


def test_exchanges_over_groups_of_their_own_may_overlap(ranks: Ranks):
    for rank, found in enumerate(ranks.run(4, overlapped)):
        assert found == [rank] * 4 + [rank + 100] * 4


def refused(group: dist.ProcessGroup) -> str:
    with pytest.raises(CommError) as caught:
        Link(group).all_to_all("ids", torch.zeros(5), [5], [1, 2, 3])
    return str(caught.value)


def test_counts_that_do_not_fit_are_refused_before_anything_is_sent(ranks: Ranks):
    for message in ranks.run(3, refused):
        assert "got 5 rows, send_counts [5] and recv_counts [1, 2, 3]" in message


class Lost:
    """Work of a collective whose other end is gone."""

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def lost(group: dist.ProcessGroup) -> list[str]:
    """What an exchange says that fails when it starts, and one that fails later, waited for twice."""
    link = Link(group)
    link.step = 7
    original = dist.broadcast

    def fails(*args: object, **options: object) -> Lost:
        raise RuntimeError("no route")

    found = []
    try:
        for replacement in (fails, lambda *args, **options: Lost()):
            dist.broadcast = replacement
            handle = None
            for _ in range(2):
                with pytest.raises(CommError) as caught:
                    handle = handle or link.broadcast("ids", torch.zeros(1), 0)
                    handle.wait()
                found.append(str(caught.value))
    finally:
        dist.broadcast = original
    return found


def test_an_exchange_that_fails_says_which_and_never_gives_a_result(ranks: Ranks):
    started, again, later, once_more = ranks.run(1, lost)[0]
    failed = "rank 0 of 1, step 7: the exchange of ids failed: {} has ended, or did not answer in time ({})"
    assert started == again and started.startswith(failed.format("another rank", "no route"))
    assert later == once_more and later.startswith(failed.format("rank 0", "Connection closed by peer"))


def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(CommError, match=r"not initialized.*torchrun"):
        Link()


def overlapping(group: dist.ProcessGroup, config: str) -> tuple[str, bool, bool]:
    """Where tensors are exchanged, and whether exchanges may overlap, over these backends; also in two hops."""
    link = Link(group)
    hops = NodeLink(link, 1)
    asked = dist.get_backend_config
    dist.get_backend_config = lambda _: config  # type: ignore[assignment]
    current, torch.cuda.current_device = torch.cuda.current_device, lambda: 1
    try:
        return str(link.device), link.overlaps, hops.overlaps
    finally:
        dist.get_backend_config = asked
        torch.cuda.current_device = current


def test_exchanges_may_overlap_unless_they_are_of_nccl(ranks: Ranks):
    for config, device, may in (
        ("cpu:gloo", "cpu", True),
        ("cpu:gloo,cuda:gloo", "cpu", True),
        ("cpu:gloo,cuda:nccl", "cpu", False),
        ("cuda:nccl", "cuda:1", False),
    ):
        assert ranks.run(3, overlapping, config) == [(device, may, may)] * 3
    assert ranks.run(3, of_one) == [True] * 3


def of_one(group: dist.ProcessGroup) -> bool:
    return OneRank().overlaps and Link(group).overlaps
