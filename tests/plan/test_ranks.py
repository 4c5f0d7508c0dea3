"""The choice of the number of ranks and of replicas: the best of what was tried, and why others were not taken."""

from __future__ import annotations

from typing import Any

import pytest

from hotbed.errors import PlanError
from hotbed.optim import RowWiseAdagrad
from hotbed.plan import ranks
from hotbed.plan.hardware import Hardware
from hotbed.plan.ranks import search_ranks
from hotbed.plan.search import Found, search
from hotbed.plan.workload import DenseWork, Workload
from hotbed.specs import Table

A100 = Hardware.load("a100-40")
SMALL = A100.with_(device_bytes=1 << 30)
TABLES = [Table("users", 4_000_000, 64), Table("items", 1_000_000, 64), Table("shops", 20, 64)]
"""1.2 GiB."""
DENSE = DenseWork(parameters=1_000_000, flops=1e9)
"""By which a step takes so long that more ranks are faster."""


def work(**options: Any) -> Workload:
    given: dict[str, Any] = {"batch_size": 65536, "dense": DENSE, **options}
    return Workload.of(TABLES, moments=RowWiseAdagrad.rule.moments, **given)


def test_the_fastest_that_fits_is_chosen_and_all_that_was_tried_is_told():
    chosen = search_ranks(work(), SMALL, ranks=[4, 1, 2])
    assert chosen.goal == "samples"
    tried = {(t.ranks, t.replicas): t for t in chosen.tried}
    assert list(tried) == [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
    assert [key for key, t in tried.items() if t.found is None] == [(1, 1), (2, 2), (4, 4)]
    assert tried[1, 1].refused.startswith("rows and moments take 1.21 GiB, and 1 ranks have ")
    best = max((t for t in chosen.tried if t.found), key=lambda t: t.samples_per_s)
    assert chosen.best.samples_per_s >= best.samples_per_s / 1.005 and chosen.best.ranks == 4
    assert chosen.best.found is not None
    assert chosen.best.found.plan.world_size * chosen.best.replicas == chosen.best.ranks
    assert chosen.best.to_dict() | {"samples_per_s": 0, "gap": 0} == {
        "ranks": 4,
        "replicas": chosen.best.replicas,
        "samples_per_s": 0,
        "cost_per_billion_samples": None,
        "gap": 0,
        "refused": None,
    }
    again = search_ranks(work(), SMALL, ranks=[4, 1, 2])
    assert [t.to_dict() for t in again.tried] == [t.to_dict() for t in chosen.tried]


def test_the_integer_program_is_tried_for_the_choice_only(monkeypatch: pytest.MonkeyPatch):
    asked: list[tuple[int, int, bool]] = []

    def counted(of: Workload, size: int, hardware: Hardware, *, integer_program: bool = True) -> Found:
        asked.append((size * of.replicas, of.replicas, integer_program))
        return search(of, size, hardware, integer_program=integer_program)

    monkeypatch.setattr(ranks, "search", counted)
    chosen = ranks.search_ranks(work(), A100, ranks=[1, 2, 4])
    assert asked == [
        *((t.ranks, t.replicas, False) for t in chosen.tried),
        (chosen.best.ranks, chosen.best.replicas, True),
    ]
    assert chosen.best in chosen.tried and chosen.best.found is not None
    del asked[:]
    ranks.search_ranks(work(), A100, ranks=[1], replicas=1, integer_program=False)
    assert asked == [(1, 1, False)]


def test_a_price_decides_where_it_is_known():
    """A second node of eight halves the time at best: at twice the price per hour it is never cheaper."""
    priced = SMALL.with_(price_per_hour=20.0)
    chosen = search_ranks(work(), priced, ranks=[8, 16], replicas=1, integer_program=False)
    assert chosen.goal == "cost" and chosen.best.ranks == 8
    for tried in chosen.tried:
        nodes = tried.ranks // 8
        assert tried.cost == pytest.approx(nodes * 20 / 3600 / tried.samples_per_s * 1e9)
    assert search_ranks(work(), SMALL, ranks=[8, 16], replicas=1, integer_program=False).best.ranks == 16


def test_ranks_are_those_of_whole_nodes_and_of_no_more_than_the_batch():
    chosen = search_ranks(work(batch_size=40), A100, replicas=1, integer_program=False)
    assert [t.ranks for t in chosen.tried] == [1, 2, 4, 8, 16, 32]
    three = A100.with_(ranks_per_node=3)
    chosen = search_ranks(work(batch_size=13), three, replicas=1, integer_program=False)
    assert [t.ranks for t in chosen.tried] == [1, 2, 3, 6, 12]


def test_replicas_that_are_averaged_seldom_cost_less():
    rates = [
        search_ranks(work(sync_every=every), SMALL, ranks=[16], replicas=4).best.samples_per_s for every in (1, 10, 100)
    ]
    assert rates == sorted(rates) and rates[0] < rates[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": [1]}, r"the tables fit none of 1 ranks; with 1: rows and moments take 1\.21 GiB"),
        ({"ranks": [2, 4], "replicas": 3}, "none of 2, 4 ranks; 3 replicas divide none"),
        ({"ranks": []}, r"ranks: got \(\), expected an integer\. Give 'auto', or a list of numbers\."),
        ({"ranks": [0, 2]}, "ranks: got 0, expected at least 1. Give 'auto', or a list of numbers."),
        ({"replicas": 0}, "replicas: got 0, expected at least 1"),
    ],
)
def test_what_cannot_be_chosen_is_said(options: dict[str, Any], message: str):
    with pytest.raises(PlanError, match=message):
        search_ranks(work(), SMALL, **options)
