"""Replicas: meshes that cannot be are refused, the fewest bytes are sent, and equal rows keep their bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hotbed as hb
from hotbed.comm import Link
from hotbed.embed import replicas as embed_replicas
from hotbed.embed.arena import Arena, Shard
from hotbed.embed.replicas import check_replicas
from hotbed.errors import CommError, PlanError, SpecError
from hotbed.optim import Moment
from hotbed.plan import make_plan
from hotbed.specs import Table
from hotbed.store import DenseStore, LazyStore, Span, Storage
from hotbed.store.row_cache import CachedRecords
from tests.embed.replica_cases import TABLES, Model, batch
from tests.ranks import Ranks

BAD = [
    ((8, 3, 1, False), "replicas: got 3, expected a divisor of the 8 ranks. Choose one of 1, 2, 4, 8"),
    ((4, 0, 1, False), "replicas: got 0, expected at least 1"),
    ((4, 2, 0, False), "sync_every: got 0, expected at least 1"),
    ((4, 1, 5, False), "sync_every: got 5 with replicas 1"),
    ((4, 1, 1, True), "exact: got True with replicas 1"),
    ((4, 2, 5, True), "sync_every: got 5 with exact replicas"),
]


@pytest.mark.parametrize(("numbers", "message"), BAD)
def test_meshes_that_cannot_be_are_refused(numbers: tuple[int, int, int, bool], message: str):
    size, count, sync_every, exact = numbers
    with pytest.raises(SpecError) as caught:
        check_replicas(size, hb.ParallelOptions(replicas=count, sync_every=sync_every, exact=exact))
    assert str(caught.value).startswith(message)


def test_one_process_has_no_replicas():
    with pytest.raises(SpecError, match="got 2, expected a divisor of the 1 ranks"):
        hb.distribute(Model("fp32"), "table", hb.ParallelOptions(replicas=2))


def refused(group: dist.ProcessGroup) -> list[str]:
    found: list[str] = []
    for plan, options in ((make_plan(TABLES, 4, "row"), {}), ("row", {"layout": "group"})):
        with pytest.raises((PlanError, SpecError)) as caught:
            hb.distribute(Model("fp32"), plan, hb.ParallelOptions(replicas=2, **options), group=group)
        found.append(str(caught.value))
    return found


def test_plans_for_all_ranks_and_unknown_layouts_are_refused(ranks: Ranks):
    for plan, layout in ranks.run(4, refused):
        assert plan.startswith(
            "the plan is for 4 ranks, each of 2 replicas has 2. Make a plan for 2 ranks, or start 8 processes"
        )
        assert layout == "layout: got 'group', expected one of groups, replicas; did you mean 'groups'?"


# -- links ---------------------------------------------------------------------------------------------------------


# -- what is sent --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "slots", "message"),
    [
        ([3, 5], 1_000_000, "numbers"),
        ([40_000, 50_000], 1_000_000, "bitmap"),
        ([10, 1000], 1000, "nothing"),
        ([0, 995], 1000, "bitmap"),
        ([999, 0], 1000, "nothing"),
    ],
)
def test_replicas_tell_what_they_touched_in_the_fewest_bytes(counts: list[int], slots: int, message: str):
    assert embed_replicas.choose_list_format(counts, slots, 68) == message


@pytest.mark.parametrize("message", ["numbers", "bitmap"])
@pytest.mark.parametrize("slots", [1, 8, 37])
def test_what_any_replica_touched_is_found(ranks: Ranks, message: str, slots: int):
    found = ranks.run(3, union, slots, message)
    masks = [mask(rank, slots) for rank in range(3)]
    expected = (masks[0] | masks[1] | masks[2]).nonzero()[:, 0]
    assert all(torch.equal(one, expected) for one in found)


def mask(rank: int, slots: int) -> Tensor:
    draw = torch.Generator().manual_seed(rank)
    return torch.rand(slots, generator=draw) < 0.3 * rank


def union(group: dist.ProcessGroup, slots: int, message: Any) -> Tensor:
    link, chosen = Link(group), embed_replicas.choose_list_format
    own = mask(link.rank, slots).nonzero()[:, 0]
    counts = link.all_gather("counts", torch.tensor(len(own))).wait().tolist()
    embed_replicas.choose_list_format = lambda *_: message
    try:
        return embed_replicas.find_updated_slots(DenseStore([Span(slots)], 16), own, counts, link)
    finally:
        embed_replicas.choose_list_format = chosen


# -- averages ------------------------------------------------------------------------------------------------------


TABLE = Table("t", rows=1 << 33, dim=20)


def averaged(group: dist.ProcessGroup) -> tuple[Tensor, Tensor, list[int], int]:
    """Rows and moments after some were averaged, which rows exist, and how many the file had been given before."""
    link = Link(group)
    storage = Storage(tier="disk", cache_rows=8)
    piece = Shard.whole(TABLE)
    arena = Arena([piece], TABLE.dim, seed=0, device=torch.device("cpu"), backend="auto", storage=storage)
    store = arena.store
    assert isinstance(store, LazyStore) and isinstance(store.records, CachedRecords)
    store.add_moment(Moment("m", "row"))
    own = torch.tensor([0, 1, 4, (1 << 33) - 1])
    store.write(own, torch.full((4, 20), float(link.rank)) + torch.arange(4)[:, None])
    store.write(own, torch.arange(4.0) * link.rank, "m")
    below = len(store.records.below.slots())
    embed_replicas.average_rows(arena, own[1:3], arena.seeds, link)
    return store.read(own), store.read(own, "m"), store.keys(0)[:].tolist(), below


def test_rows_that_a_cache_has_not_written_back_are_averaged(ranks: Ranks):
    for rank, (rows, moments, keys, below) in enumerate(ranks.run(3, averaged)):
        expected = torch.tensor([rank, 1, 1, rank])
        assert torch.equal(rows, (torch.arange(4) + expected)[:, None].expand(4, 20).float())
        assert torch.equal(moments, torch.arange(4.0) * expected)
        assert keys == [0, 1, 4, (1 << 33) - 1]
        assert below == 0  # all of them were in the cache alone


@pytest.mark.parametrize("replicas", [2, 3, 5, 8])
def test_the_mean_of_equal_values_is_that_value(replicas: int):
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    values[:3] = torch.tensor([-0.0, torch.inf, -torch.inf])
    assert torch.equal(embed_replicas._mean(values.expand(replicas, -1)).view(torch.int32), values.view(torch.int32))
    different = torch.randn(replicas, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(embed_replicas._mean(different), different.mean(0))


def broken(group: dist.ProcessGroup) -> str:
    model: Any = hb.distribute(Model("fp32"), "row", hb.ParallelOptions(replicas=2), group=group)
    optimizer = hb.optim.SGD(model, lr=0.1)

    def fail(*_: object) -> None:
        raise CommError("rank 3 of 4: the exchange of rows of replicas failed")

    average, embed_replicas.average_rows = embed_replicas.average_rows, fail
    try:
        model(batch(0, dist.get_rank(group)), 0.0).backward()
        optimizer.step()
        with pytest.raises(CommError) as caught:
            model.sync()
        with pytest.raises(CommError):
            model.embeddings.settle()  # whoever waits next hears of it as well
    finally:
        embed_replicas.average_rows = average
    return str(caught.value)


def test_what_fails_in_the_background_is_raised_by_who_waits_for_it(ranks: Ranks):
    assert ranks.run(4, broken) == ["rank 3 of 4: the exchange of rows of replicas failed"] * 4
