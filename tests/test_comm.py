"""Exchanges between real processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hotbed.comm import Link
from hotbed.errors import CommError

from .ranks import SIZES, Ranks

pytestmark = pytest.mark.xdist_group("ranks")


def rows_for(sender: int, receiver: int) -> torch.Tensor:
    """What one rank sends another: as many rows as the sum of their ranks, and none to rank 1."""
    count = 0 if receiver == 1 else sender + receiver
    return torch.full((count, 3), 10.0 * sender + receiver)


def exchanged(group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    link = Link(group)
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
        assert message == "exchange of ids: 5 rows, counts [5] to and [1, 2, 3] from 3 ranks do not fit together"


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
    where = "rank 0 of 1, step 7: the exchange of ids failed; {} has ended or not answered in time, its own output "
    assert started == again == where.format("another rank") + "says why (no route)"
    assert later == once_more == where.format("rank 0") + "says why (Connection closed by peer)"


def test_without_a_process_group_the_error_says_what_to_do():
    with pytest.raises(
        CommError, match=r"not initialised; start with `torchrun` and call torch.distributed.init_process"
    ):
        Link()
