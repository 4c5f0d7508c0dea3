"""Training over several ranks: neither the plan nor prefetching changes a bit."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.batch import Batch
from hotbed.comm import Handle, Link
from hotbed.embed import EmbeddingCollection
from hotbed.nn import DLRM
from hotbed.train import Callback, Trainer
from hotbed.train.runs.stored_model import bad_ids
from tests.matrix import full
from tests.ranks import Ranks
from tests.train import planted
from tests.train.planted import Losses

from .parallel_cases import FEATURES, TABLES, TIMEOUT, TRAIN, Group, assert_equal, make_trainer, place, shares, state_of

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(
    group: Group, scheme: str, steps: int, *, size: int = 64, overlap: bool = True, sgd: bool = False, **options: Any
) -> dict[str, Any]:
    """Samples have weights, and the last batch has two samples, so some ranks have none of it."""
    losses = Losses()
    trainer = make_trainer(group, scheme, callbacks=[losses], overlap=overlap, sgd=sgd, **options)
    weigh = torch.Generator().manual_seed(7)
    batches = planted.batches(steps, size, last=2)
    batches = [replace(batch, weights=torch.rand(len(batch), generator=weigh) * 2) for batch in batches]
    trainer.fit(shares(batches, group), shares(planted.batches(2, seed=5), group))
    return {
        "losses": losses.losses,
        "logged": [record["loss"] for record in losses.records],
        "auc": losses.aucs,
        "state": state_of(trainer),
        "samples": trainer.samples,
        "hidden": (trainer.prefetcher.exchange_s, trainer.prefetcher.hidden_share),
    }


def trained_pipelined_and_not(group: Group, steps: int) -> list[dict[str, Any]]:
    return [
        trained(group, "table", steps),
        trained(group, "table", steps, overlap=False),
        trained(group, "row", steps),
        trained(group, "column", steps, overlap=False),
        *([trained(group, "grid", steps, ranks_per_node=2)] if place(group)[1] == 4 else []),
    ]


@pytest.mark.parametrize("size", [3, full(4)])
def test_neither_the_plan_nor_exchanging_ids_ahead_changes_a_bit(ranks: Ranks, size: int) -> None:
    by_rank = ranks.run(size, trained_pipelined_and_not, 12)
    first = by_rank[0][0]
    assert (len(first["losses"]), len(first["logged"]), first["samples"]) == (12, 3, 11 * 64 + 2)
    for runs in by_rank:
        for found in runs:
            for what in ("losses", "logged", "auc"):
                assert found[what] == first[what]
            assert_equal(found["state"], first["state"])
        for at, exchanged_ahead in enumerate((True, False, True, False, True)[: len(runs)]):
            seconds, share = runs[at]["hidden"]
            assert 0 <= share <= 1
            assert (seconds > 0) == exchanged_ahead
            assert exchanged_ahead or share == 0


def test_three_ranks_train_the_model_of_one(ranks: Ranks) -> None:
    alone = trained(None, "", 50, sgd=True)
    assert alone["hidden"] == (0, 0)
    for found in ranks.run(3, _trained_with_sgd, "row", 50, 64):
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert found["auc"] == pytest.approx(alone["auc"], abs=1e-5)
        for name, value in alone["state"].items():
            assert torch.allclose(found["state"][name], value, rtol=0, atol=1e-5), name


def test_ranks_without_a_sample_take_part_in_every_step(ranks: Ranks) -> None:
    alone = trained(None, "", 8, size=3, sgd=True)
    by_rank = ranks.run(4, _trained_with_sgd, "table", 8, 3)
    for found in by_rank:
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert found["samples"] == alone["samples"] == 7 * 3 + 2
        assert_equal(found["state"], by_rank[0]["state"])


def _trained_with_sgd(group: Group, scheme: str, steps: int, size: int) -> dict[str, Any]:
    return trained(group, scheme, steps, size=size, sgd=True)


def evaluated_while_ids_are_exchanged(group: Group, overlap: bool) -> tuple[list[float], dict[str, Tensor]]:
    """An evaluation after every step, and exchanges ahead that wait until it is under way."""
    original = EmbeddingCollection.prefetch_ids

    def late(self: EmbeddingCollection, *args: Any) -> None:
        evaluating.wait(0.3)
        original(self, *args)

    evaluating = threading.Event()

    class Slow(list[Batch]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                evaluating.set()
                time.sleep(0.05)
                yield batch
            evaluating.clear()

    losses = Losses()
    trainer = make_trainer(group, "row", replace(TRAIN, eval_every=1), callbacks=[losses], overlap=overlap)
    EmbeddingCollection.prefetch_ids = late  # type: ignore[method-assign]
    try:
        trainer.fit(shares(planted.batches(5), group), Slow(shares(planted.batches(2, seed=5), group)))
    finally:
        EmbeddingCollection.prefetch_ids = original  # type: ignore[method-assign]
    return losses.losses, state_of(trainer)


def test_an_evaluation_does_not_disturb_the_batch_that_is_prepared_meanwhile(ranks: Ranks) -> None:
    losses, state = ranks.run(3, evaluated_while_ids_are_exchanged, False)[0]
    for found in ranks.run(3, evaluated_while_ids_are_exchanged, True):
        assert found[0] == losses
        assert_equal(found[1], state)


def in_stages(group: Group, overlaps: bool, steps: int) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses and state, and the exchanges that this rank started; where they may not overlap, in the step's thread."""
    order: list[str] = []
    before, exchange = Link.overlaps, Link.exchange

    def noted(self: Link, what: str, *tensors: Any) -> Handle[None]:
        assert overlaps or threading.current_thread() is threading.main_thread()
        order.append(what)
        return exchange(self, what, *tensors)

    losses = Losses()
    Link.overlaps, Link.exchange = property(lambda _: overlaps), noted  # type: ignore[method-assign, assignment]
    try:
        trainer = make_trainer(group, "row", callbacks=[losses])
        trainer.fit(shares(planted.batches(steps, 16, last=2), group))
    finally:
        Link.overlaps, Link.exchange = before, exchange  # type: ignore[method-assign]
    return losses.losses, state_of(trainer), order


@pytest.mark.parametrize("steps", [1, 2, 6])
def test_ids_are_exchanged_ahead_in_one_order_where_exchanges_may_not_overlap(ranks: Ranks, steps: int) -> None:
    """As over NCCL: ids of a batch a step ahead, their numbers two; also where there are fewer batches than stages."""
    losses, state, _ = ranks.run(2, in_stages, True, steps)[0]
    found = ranks.run(2, in_stages, False, steps)
    order = found[0][2]
    assert all(of == order for _, _, of in found)
    assert (order.count("numbers of ids"), order.count("ids")) == (steps, steps * len({t.dim for t in TABLES}))
    first = order.index("rows")  # of the first step
    assert order[:first].count("numbers of ids") == min(steps, 3)
    for of_rank in found:
        assert of_rank[0] == losses
        assert_equal(of_rank[1], state)


def ids_dropped(group: Group, overlap: bool) -> dict[str, int]:
    """Of three batches with 6 ids out of range each, after which training stops."""
    features = [replace(feature, on_bad_id="drop") for feature in FEATURES]
    model: nn.Module = DLRM(TABLES, features, planted.DENSE, bottom=(16, 32), top=(16, 1), seed=0)
    if group is not None:
        model = hb.distribute(model, "row", group=group, timeout=TIMEOUT)
    sgd, sparse = torch.optim.SGD(model.parameters(), lr=0.1), hb.optim.SGD(model, lr=0.1)
    trainer = Trainer(model, sgd, sparse, recipe=replace(TRAIN, steps=3), overlap=overlap)
    batches = planted.batches(5)
    for batch in batches:
        batch.sparse.values[:6] = 1_000_000
    trainer.fit(shares(batches, group))
    return trainer.ranks.add_counts(bad_ids(trainer.model))


@pytest.mark.parametrize(
    "overlap",
    [
        True,
        False,
    ],
)
def test_ids_out_of_range_are_counted_in_the_batches_that_were_trained_on(ranks: Ranks, overlap: bool) -> None:
    assert ids_dropped(None, overlap) == {"user": 18}
    assert ranks.run(3, ids_dropped, overlap) == [{"user": 18}] * 3


class Unfreeze(Callback):
    """Trains the tables from the third step on."""

    def on_step(self, trainer: Trainer, loss: float) -> None:
        if trainer.step == 2:
            trainer.model.embeddings.unfreeze()


def unfrozen_on_the_way(group: Group, overlap: bool) -> dict[str, Tensor]:
    trainer = make_trainer(group, "dp", callbacks=[Unfreeze()], overlap=overlap)
    trainer.model.embeddings.freeze()
    trainer.fit(shares(planted.batches(4), group))
    return state_of(trainer)


def test_tables_that_are_unfrozen_while_ids_are_exchanged_are_trained_at_once(ranks: Ranks) -> None:
    ahead, one_by_one = ranks.run(3, unfrozen_on_the_way, True), ranks.run(3, unfrozen_on_the_way, False)
    for found, expected in zip(ahead, one_by_one, strict=True):
        assert_equal(found, expected)
