"""Training over several ranks that ends early, by a request or by an error."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.errors import BatchError, CommError, NonFiniteError
from hotbed.train import Callback, Trainer
from tests.ranks import ANSWER_S, TIMEOUT_S, Ranks
from tests.train import planted
from tests.train.planted import Losses

from .parallel_cases import TIMEOUT, TRAIN, Group, assert_equal, hotbed_threads, make_trainer, place, shares, state_of

pytestmark = pytest.mark.usefixtures("one_thread")


def stopped_early(group: Group) -> tuple[list[str], list[float], list[float]]:
    """Threads left after a stop within an epoch; losses of that run and of a whole one that follows on the group."""
    first, second = Losses(), Losses()
    trainer = make_trainer(group, "row", replace(TRAIN, steps=3), callbacks=[first])
    trainer.fit(shares(planted.batches(10), group))
    left = hotbed_threads()
    make_trainer(group, "row", replace(TRAIN, steps=5), callbacks=[second]).fit(shares(planted.batches(10), group))
    return left + hotbed_threads(), first.losses, second.losses


class StopAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, loss: float) -> None:
        trainer.stop = trainer.step == self.step


def stopped_by_a_callback(group: Group) -> tuple[list[str], int]:
    trainer = make_trainer(group, "row", callbacks=[StopAt(2)])
    trainer.fit(shares(planted.batches(4), group))
    return hotbed_threads(), trainer.step


def test_a_run_that_stops_early_leaves_no_thread_and_no_exchange(ranks: Ranks) -> None:
    for threads, first, second in ranks.run(3, stopped_early):
        assert threads == []
        assert (len(first), len(second)) == (3, 5)
        assert first == second[:3]
    assert ranks.run(3, stopped_by_a_callback) == [([], 2)] * 3


def with_a_nan(group: Group, overlap: bool) -> tuple[str, dict[str, Tensor], list[str], list[float]]:
    """What is said, the state then, threads that are left, and the losses of batches after it."""
    losses = Losses()
    trainer = make_trainer(group, "row", callbacks=[losses], overlap=overlap)
    batches = shares(planted.batches(6), group)
    poisoned = batches[2].dense
    assert poisoned is not None
    if place(group)[0] == 1:
        batches[2] = replace(batches[2], dense=poisoned.where(torch.arange(planted.DENSE) != 3, torch.nan))
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit(batches)
    message = str(caught.value)
    del caught  # whose traceback holds the iterators
    state, threads = state_of(trainer), hotbed_threads()
    losses.losses.clear()
    trainer.fit(batches[3:])
    return message, state, threads, losses.losses


def without_the_nan(group: Group) -> tuple[dict[str, Tensor], list[float]]:
    """The state after two batches, and the losses of what follows when the third is left out."""
    losses = Losses()
    trainer = make_trainer(group, "row", callbacks=[losses, StopAt(2)])
    batches = shares(planted.batches(6), group)
    trainer.fit(batches)
    state = state_of(trainer)
    trainer.stop = False
    losses.losses.clear()
    trainer.fit(batches[3:])
    return state, losses.losses


@pytest.mark.parametrize("overlap", [True, False])
def test_a_nan_on_one_rank_stops_all_before_anything_is_touched(ranks: Ranks, overlap: bool) -> None:
    state, losses = ranks.run(3, without_the_nan)[0]
    by_rank = ranks.run(3, with_a_nan, overlap)
    for message, found, threads, after in by_rank:
        assert message.startswith("the loss is nan in step 3 (epoch 0, batch 2); training stopped before")
        assert_equal(found, state)
        assert threads == []
        assert after == losses
        assert len(after) == 3
    assert "The cause is in the input: dense of sample 0 of the batch, column 3 is nan" in by_rank[1][0]


def test_ranks_whose_samples_are_finite_blame_neither_them_nor_the_model(ranks: Ranks) -> None:
    first, _, third = (message for message, *_ in ranks.run(3, with_a_nan, True))
    for message in (first, third):
        assert "another rank" in message or "rank 1" in message
        assert "overflow" not in message


def with_an_error_of_one_rank(group: Group) -> tuple[str, int, list[str], list[float]]:
    """What is said, the step then, threads that are left, and losses of another model that is trained afterwards."""
    make_trainer(group, "row").fit(shares(planted.batches(1), group))  # compiles kernels, with time for it
    trainer = make_trainer(group, "row", timeout=timedelta(seconds=ANSWER_S))
    batches = shares(planted.batches(5), group)
    if place(group)[0] == 1:
        batches[3].sparse.values[0] = 1_000_000
    with pytest.raises((BatchError, CommError)) as caught:
        trainer.fit(batches)
    message = f"{type(caught.value).__name__}: {caught.value}"
    del caught
    losses = Losses()
    make_trainer(group, "row", callbacks=[losses]).fit(shares(planted.batches(3), group))
    return message, trainer.step, hotbed_threads(), losses.losses


@pytest.mark.full  # it waits for the timeout
def test_an_error_of_one_rank_reaches_the_others_within_the_timeout(ranks: Ranks) -> None:
    """Its process would end, and theirs at once; here it lives on."""
    expected = Losses()
    make_trainer(None, callbacks=[expected]).fit(planted.batches(3))
    for rank, (message, step, threads, losses) in enumerate(ranks.run(3, with_an_error_of_one_rank)):
        assert step == 3
        if rank == 1:
            assert message.startswith("BatchError: feature 'user': got id 1,000,000 at sample 0, expected 0 to 49")
        else:
            assert message.startswith(f"CommError: rank {rank} of 3, step 4: the exchange of ")
            assert re.search(r"failed: rank \d has ended, or did not answer in time", message)
        assert threads == []
        assert losses == pytest.approx(expected.losses, abs=1e-4)


def with_a_failing_exchange_of_dense_gradients(group: Group) -> str:
    """What is said when it fails on all ranks in the second step."""
    trainer = make_trainer(group, callbacks=[BreakAfter(1)])
    with pytest.raises(CommError) as caught:
        trainer.fit(shares(planted.batches(3), group))
    return str(caught.value)


class BreakAfter(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, trainer: Trainer, loss: float) -> None:
        link = trainer.model.dense_link
        original = link.exchange

        def fails(what: str, *tensors: Any) -> Any:
            original(what, *tensors).wait()
            raise CommError(f"step {link.step}: the exchange of {what} failed")

        if trainer.step == self.step:
            link.exchange = fails


def test_a_failing_exchange_of_dense_gradients_says_so_itself(ranks: Ranks) -> None:
    said = ranks.run(3, with_a_failing_exchange_of_dense_gradients)
    assert said == ["step 2: the exchange of gradients of dense parameters failed"] * 3


def who_is_gone(group: Group, silent: int | None) -> list[int] | None:
    """What each rank finds out, a little after each other, when one of them does not take part."""
    link = Link(group, TIMEOUT).clone()
    time.sleep(0.1 * link.rank)
    return None if link.rank == silent else link.unreachable(TIMEOUT_S if silent is None else ANSWER_S)


def test_ranks_that_live_are_not_said_to_be_gone(ranks: Ranks) -> None:
    assert ranks.run(3, who_is_gone, None) == [[], [], []]
    assert ranks.run(3, who_is_gone, 1) == [[1], None, [1]]


def with_an_error_that_is_not_of_an_exchange(group: Group) -> tuple[str, bool]:
    """What rank 1 says of an error of its own, and whether it asked who is gone."""
    there = make_trainer(group).ranks
    if there.rank != 1:
        return "", False
    assert there.link is not None
    asked: list[bool] = []
    there.link.unreachable = lambda: asked.append(True) or [0, 2]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(RuntimeError) as caught, there.explained():
        raise RuntimeError("out of memory")
    return str(caught.value), bool(asked)


def test_an_error_of_ones_own_is_not_put_down_to_ranks_that_wait(ranks: Ranks) -> None:
    assert ranks.run(3, with_an_error_that_is_not_of_an_exchange)[1] == ("out of memory", False)
