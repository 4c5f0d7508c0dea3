"""Replicas: meshes that cannot be are refused, the fewest bytes are sent, and equal rows keep their bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import hotbed as hb
from hotbed.embed import replicas as embed_replicas
from hotbed.embed.replicas import check_replicas
from hotbed.errors import CommError, PlanError, SpecError
from hotbed.plan import make_plan
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


def refused(group: dist.ProcessGroup) -> str:
    with pytest.raises(PlanError) as caught:
        hb.distribute(Model("fp32"), make_plan(TABLES, 4, "row"), hb.ParallelOptions(replicas=2), group=group)
    return str(caught.value)


def test_plans_for_all_ranks_are_refused(ranks: Ranks):
    message = "the plan is for 4 ranks, each of 2 replicas has 2. Make a plan for 2 ranks, or start 8 processes"
    assert all(found.startswith(message) for found in ranks.run(4, refused))


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


# -- averages ------------------------------------------------------------------------------------------------------


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
