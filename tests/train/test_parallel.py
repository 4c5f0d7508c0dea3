"""Tests of training over several ranks: plans, prefetching, exchanges, and runs that stop early."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotbed as hb
from hotbed.batch import Batch
from hotbed.checkpoint import checkpoints_in, verify_checkpoint
from hotbed.comm import Handle, Link
from hotbed.comm.collectives import waits
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, CommError, NonFiniteError
from hotbed.nn import DLRM
from hotbed.train import Callback, Metrics, Trainer
from hotbed.train.metrics import evaluate
from hotbed.train.runs.stored_model import bad_ids
from tests.checkpoint.damage import flip_last_bit
from tests.matrix import full
from tests.ranks import ANSWER_S, TIMEOUT_S, Ranks
from tests.train import planted
from tests.train.launcher import ENDLESS, PATIENCE_S, Launcher, Processes, lines_of, the_run
from tests.train.parallel_cases import (
    FEATURES,
    TABLES,
    TIMEOUT,
    TRAIN,
    Group,
    assert_equal,
    hotbed_threads,
    make_trainer,
    place,
    shares,
    state_of,
)
from tests.train.planted import Do, Losses

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


def trained_with_sgd(group: Group, scheme: str, steps: int, size: int) -> dict[str, Any]:
    return trained(group, scheme, steps, size=size, sgd=True)


@pytest.mark.parametrize(("ranks_count", "scheme", "steps", "size"), [full(3, "row", 50, 64), full(4, "table", 8, 3)])
def test_ranks_train_the_model_of_one_also_without_a_sample(
    ranks: Ranks, ranks_count: int, scheme: str, steps: int, size: int
) -> None:
    alone = trained(None, "", steps, size=size, sgd=True)
    assert alone["hidden"] == (0, 0)
    for found in ranks.run(ranks_count, trained_with_sgd, scheme, steps, size):
        assert found["losses"] == pytest.approx(alone["losses"], abs=1e-5)
        assert found["auc"] == pytest.approx(alone["auc"], abs=1e-5)
        assert found["samples"] == alone["samples"] == (steps - 1) * size + 2
        for name, value in alone["state"].items():
            assert torch.allclose(found["state"][name], value, rtol=0, atol=1e-5), name


def evaluated_while_ids_are_exchanged(group: Group, overlap: bool) -> tuple[list[float], dict[str, Tensor]]:
    """An evaluation after every step, and exchanges ahead that wait until it is under way."""
    prefetch, evaluating = EmbeddingCollection.prefetch_ids, threading.Event()

    def late(self: EmbeddingCollection, *args: Any) -> None:
        evaluating.wait(0.3)
        prefetch(self, *args)

    class Slow(list[Batch]):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                evaluating.set()
                time.sleep(0.05)
                yield batch
            evaluating.clear()

    losses = Losses()
    trainer = make_trainer(group, "row", replace(TRAIN, eval_every=1), callbacks=[losses], overlap=overlap)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EmbeddingCollection, "prefetch_ids", late)
        trainer.fit(shares(planted.batches(5), group), Slow(shares(planted.batches(2, seed=5), group)))
    return losses.losses, state_of(trainer)


def test_an_evaluation_does_not_disturb_the_batch_that_is_prepared_meanwhile(ranks: Ranks) -> None:
    losses, state = ranks.run(3, evaluated_while_ids_are_exchanged, False)[0]
    for found in ranks.run(3, evaluated_while_ids_are_exchanged, True):
        assert found[0] == losses
        assert_equal(found[1], state)


def in_stages(group: Group, overlaps: bool, steps: int) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Losses and state, and the exchanges that this rank started; where they may not overlap, in the step's thread."""
    order: list[str] = []
    exchange = Link.exchange

    def noted(self: Link, what: str, *tensors: Any) -> Handle[None]:
        assert overlaps or threading.current_thread() is threading.main_thread()
        order.append(what)
        return exchange(self, what, *tensors)

    losses = Losses()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Link, "overlaps", property(lambda _: overlaps))
        patch.setattr(Link, "exchange", noted)
        trainer = make_trainer(group, "row", callbacks=[losses])
        trainer.fit(shares(planted.batches(steps, 16, last=2), group))
    return losses.losses, state_of(trainer), order


@pytest.mark.parametrize("steps", [1, full(2), full(6)])
def test_ids_are_exchanged_ahead_in_one_order_where_exchanges_may_not_overlap(ranks: Ranks, steps: int) -> None:
    """As over NCCL: ids of a batch a step ahead, their numbers two; also where there are fewer batches than stages."""
    losses, state, _ = ranks.run(3, in_stages, True, steps)[0]
    found = ranks.run(3, in_stages, False, steps)
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


@pytest.mark.parametrize("overlap", [True, False])
def test_ids_out_of_range_are_counted_in_the_batches_that_were_trained_on(ranks: Ranks, overlap: bool) -> None:
    assert ids_dropped(None, overlap) == {"user": 18}
    assert ranks.run(3, ids_dropped, overlap) == [{"user": 18}] * 3


def unfrozen_on_the_way(group: Group, overlap: bool) -> dict[str, Tensor]:
    unfreeze = Do({2: lambda trainer: trainer.model.embeddings.unfreeze()})
    trainer = make_trainer(group, "dp", callbacks=[unfreeze], overlap=overlap)
    trainer.model.embeddings.freeze()
    trainer.fit(shares(planted.batches(4), group))
    return state_of(trainer)


def test_tables_that_are_unfrozen_while_ids_are_exchanged_are_trained_at_once(ranks: Ranks) -> None:
    ahead, one_by_one = ranks.run(3, unfrozen_on_the_way, True), ranks.run(3, unfrozen_on_the_way, False)
    for found, expected in zip(ahead, one_by_one, strict=True):
        assert_equal(found, expected)


# -- sums, names and metrics over ranks --------------------------------------------------------------------------------


def exchanged(group: Group, folder: Path) -> dict[str, Any]:
    there = make_trainer(group).ranks
    rank = there.rank
    own = torch.arange(3 * rank, dtype=torch.float64).view(rank, 3)
    of_dtypes = [
        torch.full((2 - rank,), rank, dtype=dtype)
        for dtype in (torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64)
    ]
    return {
        "place": (there.rank, there.size, there.is_first),
        "add": there.add([1e16, 1.0, -1e16][rank], rank, torch.tensor(0.5, requires_grad=True)),
        "gather": there.gather(own),
        "gathered": [there.gather(t) for t in of_dtypes],
        "of one rank": there.gather(torch.tensor([7] if rank == 2 else [], dtype=torch.int64)),
        "of none": there.gather(torch.zeros(0, 4)),
        "names": there.names([["b", "a"], [], ["ü", "b"]][rank]),
        "no names": there.names([]),
        "one name": there.names(["same"]),
        "counts": there.add_counts([{"a": 2, "b": 1}, {}, {"b": 3, "ü": 1 << 40}][rank]),
        "no counts": there.add_counts({}),
        "path": there.path(folder if there.is_first else None),
        "ignored": there.path(folder / str(rank)),
    }


def test_ranks_agree_on_sums_rows_names_and_paths(ranks: Ranks, tmp_path: Path) -> None:
    folder = tmp_path / "with spaces ü"
    for rank, found in enumerate(ranks.run(3, exchanged, folder)):
        assert found["place"] == (rank, 3, rank == 0)
        assert found["add"] == [(1e16 + 1.0) - 1e16, 3, 1.5]  # in rank order
        assert found["gather"].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
        assert [t.tolist() for t in found["gathered"]] == [[0, 0, 1]] * 7
        assert found["gathered"][0].dtype == torch.bool
        assert (found["of one rank"].tolist(), found["of one rank"].dtype) == ([7], torch.int64)
        assert found["of none"].shape == (0, 4)
        assert (found["names"], found["no names"]) == (["a", "b", "ü"], [])
        assert found["one name"] == ["same"]
        assert (found["counts"], found["no counts"]) == ({"a": 2, "b": 4, "ü": 1 << 40}, {})
        assert (found["path"], found["ignored"]) == (folder, folder / "0")


class Sum(nn.Module):
    """Logits of a sample that do not depend on what else is in the batch, to the bit; of one task or two."""

    def __init__(self, tasks: int) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(TABLES, FEATURES, seed=4)
        self.scale = nn.Parameter(torch.linspace(1, -2, tasks))

    def forward(self, batch: Batch) -> Tensor:
        assert batch.dense is not None
        return (self.embeddings(batch.sparse).concatenate().sum(1) + batch.dense.sum(1))[:, None] * self.scale


def evaluated(group: Group, weighted: bool, grouped: bool, tasks: int, sizes: Sequence[int]) -> Metrics:
    model: nn.Module = Sum(tasks)
    if group is not None:
        model = hb.distribute(model, "row", group=group, timeout=TIMEOUT)
    batches: list[Batch] = []
    for i, size in enumerate(sizes):
        (batch,) = planted.batches(1, size, seed=i)
        assert batch.labels is not None
        labels = torch.cat([batch.labels, batch.labels.flip(0)], dim=1)[:, :tasks]
        weights = torch.rand(size, generator=torch.Generator().manual_seed(i)) if weighted else None
        batches.append(replace(batch, labels=labels, weights=weights))
    return evaluate(model, shares(batches, group), group="user" if grouped else None, labels=["a", "b"][:tasks])


@pytest.mark.parametrize(
    ("weighted", "grouped", "tasks", "sizes"),
    [
        (False, False, 1, (200, 200, 200, 7)),
        (True, True, 2, (200, 200, 1)),  # ranks without a sample of the last batch
        (False, True, 1, (1,) * 12),  # ranks without any sample
    ],
)
def test_all_ranks_have_the_metrics_of_one(
    ranks: Ranks, weighted: bool, grouped: bool, tasks: int, sizes: tuple[int, ...]
) -> None:
    alone = flat(evaluated(None, weighted, grouped, tasks, sizes))
    assert alone["samples"] == sum(sizes)
    by_rank = [flat(m) for m in ranks.run(3, evaluated, weighted, grouped, tasks, sizes)]
    assert by_rank[1] == by_rank[2] == by_rank[0]
    assert by_rank[0].keys() == alone.keys()
    for name, value in alone.items():
        assert by_rank[0][name] == (None if value is None else pytest.approx(value, rel=1e-9)), name


def flat(metrics: Metrics) -> dict[str, Any]:
    """Plain values, without those of tasks in a dictionary of their own."""
    values = metrics.to_dict()
    for task, own in values.pop("tasks", {}).items():
        values |= {f"{task}.{name}": value for name, value in own.items()}
    return values


def evaluations_that_fail(group: Group) -> list[str]:
    trainer = make_trainer(group)
    batches = shares(planted.batches(2, 9), group)
    said: list[str] = []
    with pytest.raises(BatchError) as nothing:
        trainer.evaluate([])
    said.append(str(nothing.value))
    if place(group)[0] == 2:
        assert batches[1].dense is not None
        batches[1] = replace(batches[1], dense=batches[1].dense * torch.nan)
    with pytest.raises(NonFiniteError) as not_finite:
        trainer.evaluate(batches)
    return [*said, str(not_finite.value)]


def test_an_evaluation_that_fails_does_so_on_all_ranks(ranks: Ranks) -> None:
    for nothing, not_finite in ranks.run(3, evaluations_that_fail):
        assert "no sample to evaluate" in nothing
        assert "task 0 is nan" in not_finite


# -- runs that end early -----------------------------------------------------------------------------------------------


def stopped_early(group: Group) -> tuple[list[str], list[float], list[float]]:
    """Threads left after a stop within an epoch; losses of that run and of a whole one that follows on the group."""
    first, second = Losses(), Losses()
    trainer = make_trainer(group, "row", replace(TRAIN, steps=3), callbacks=[first])
    trainer.fit(shares(planted.batches(10), group))
    left = hotbed_threads()
    make_trainer(group, "row", replace(TRAIN, steps=5), callbacks=[second]).fit(shares(planted.batches(10), group))
    return left + hotbed_threads(), first.losses, second.losses


def stop_at(step: int) -> Callback:
    return Do({step: lambda trainer: setattr(trainer, "stop", True)})


def stopped_by_a_callback(group: Group) -> tuple[list[str], int]:
    trainer = make_trainer(group, "row", callbacks=[stop_at(2)])
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
    trainer = make_trainer(group, "row", callbacks=[losses, stop_at(2)])
    batches = shares(planted.batches(6), group)
    trainer.fit(batches)
    state = state_of(trainer)
    trainer.stop = False
    losses.losses.clear()
    trainer.fit(batches[3:])
    return state, losses.losses


@pytest.mark.parametrize("overlap", [True, full(False)])
def test_a_nan_on_one_rank_stops_all_before_anything_is_touched(ranks: Ranks, overlap: bool) -> None:
    state, losses = ranks.run(3, without_the_nan)[0]
    by_rank = ranks.run(3, with_a_nan, overlap)
    for message, found, threads, after in by_rank:
        assert message.startswith("the loss is nan in step 3 (epoch 0, batch 2)")
        assert_equal(found, state)
        assert threads == []
        assert after == losses
        assert len(after) == 3
    first, second, third = (message for message, *_ in by_rank)
    assert "The cause is in the input: dense of sample 0 of the batch, column 3 is nan" in second
    for message in (first, third):  # which neither blame their samples nor the model
        assert "different rank" in message or "rank 1" in message
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

    def break_exchanges(trainer: Trainer) -> None:
        link = trainer.model.dense_link
        original = link.exchange

        def fails(what: str, *tensors: Any) -> Any:
            original(what, *tensors).wait()
            raise CommError(f"step {link.step}: the exchange of {what} failed")

        link.exchange = fails

    trainer = make_trainer(group, callbacks=[Do({1: break_exchanges})])
    with pytest.raises(CommError) as caught:
        trainer.fit(shares(planted.batches(3), group))
    return str(caught.value)


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


def seen_while_asking(group: Group) -> list[bool]:
    """Whether this process counts as waiting before, while and after it asks which ranks are gone."""
    link, seen, send = Link(group, TIMEOUT).clone(), [waits()], dist.isend

    def asking(*args: Any, **options: Any) -> object:
        seen.append(waits())
        return send(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "isend", asking)
        link.unreachable(TIMEOUT_S)
    return [*seen, waits()]


def test_a_rank_that_asks_who_is_gone_counts_as_waiting(ranks: Ranks) -> None:
    """So the limit of a step does not end it before it can name the rank."""
    assert ranks.run(2, seen_while_asking) == [[False, True, False]] * 2


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


# -- signals to one rank, and damaged checkpoints ----------------------------------------------------------------------


def test_any_rank_may_be_asked_for_a_checkpoint_and_to_stop(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--plan", "row", "--train.keep_last", "9"]
    with launcher.start(tmp_path / "stopped", 3, *options, *ENDLESS) as started:
        started.wait_for(0, "err", "step 5/")
        started.send(2, signal.SIGUSR1)
        saved = the_run(tmp_path) / "checkpoints"
        started.wait_until(lambda: len(checkpoints_in(saved)) == 1)
        started.send(1, signal.SIGTERM)
        assert started.wait() == [143, 143, 143]
    asked, last = checkpoints_in(saved)
    step = verify_checkpoint(last).step
    assert 5 < verify_checkpoint(asked).step < step
    message = f"hotbed: stopped by a signal after step {step:,}. Resume with --resume {last}"
    assert message in started.text(0, "err")
    assert "stopped" not in started.text(1, "err") + started.text(2, "err")
    assert not (the_run(tmp_path) / "summary.json").exists()
    records = [line for line in lines_of(the_run(tmp_path)) if line["event"] == "checkpoint"]
    assert [record["path"] for record in records] == [asked.path, last.path]
    rest = ["--resume", str(saved), "--train.steps", str(step + 3), "--train.epochs", "100000", "--name", "again"]
    with launcher.start(tmp_path / "again", 3, *options, *rest) as started:
        assert started.wait() == [0, 0, 0], started.text(0, "err")
    (again,) = (tmp_path / "runs" / "again").iterdir()
    assert json.loads((again / "summary.json").read_text())["steps"] == step + 3


def test_ctrl_c_ends_all_ranks_with_a_checkpoint_and_a_second_one_at_once(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--plan", "row"]
    with launcher.start(tmp_path / "once", 2, *options, *ENDLESS) as started:
        started.wait_for(0, "err", "step 5/")
        for rank in (0, 1):
            started.send(rank, signal.SIGINT)
        assert started.wait() == [130, 130]
    (checkpoint,) = checkpoints_in(the_run(tmp_path) / "checkpoints")
    step = verify_checkpoint(checkpoint).step
    message = f"stopped by a signal after step {step:,}. Resume with --resume {checkpoint}"
    assert message in started.text(0, "err")
    model = ["--model.class_path", "tests.train.rank_models.Compiles", "--name", "twice"]
    with launcher.start(tmp_path / "twice", 2, *options, *model) as started:
        started.wait_for(0, "err", "Ctrl-C again to end it at once")
        time.sleep(0.5)  # the other rank's first one must be over
        for rank in (0, 1):
            started.send(rank, signal.SIGINT)
        assert started.wait() == [-signal.SIGINT, -signal.SIGINT]


@pytest.mark.full
def test_damage_that_one_rank_finds_is_avoided_by_all(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--plan", "row", "--resume", "auto"]
    options += ["--train.checkpoint_every", "4", "--train.keep_last", "9"]
    with launcher.start(tmp_path / "first", 2, *options, "--train.steps", "9") as started:
        assert started.wait() == [0, 0], started.text(0, "err")[-2000:]
    kept = the_run(tmp_path) / "checkpoints"
    (file,) = (kept / "last-00000009").glob("tables-00001-*")  # of rank 1's rows
    flip_last_bit(file)
    with launcher.start(tmp_path / "second", 2, *options) as started:
        assert started.wait() == [0, 0], started.text(0, "err")[-2000:]
    assert "last-00000009 was renamed to damaged-last-00000009-" in started.text(0, "err")
    assert "last-00000008 at step 8" in started.text(0, "err")
    assert [c.name for c in checkpoints_in(kept)] == [f"last-{step:08d}" for step in (4, 8, 12, 16, 19)]
    for checkpoint in checkpoints_in(kept):
        verify_checkpoint(checkpoint)


# -- ranks that die or hang --------------------------------------------------------------------------------------------

EXCHANGE = re.compile(r"the exchange of [\w' ]+ failed: rank (\d) has ended, or did not answer in time")
AVERAGE = re.compile(
    r"(?:one of ranks|rank) (\d(?:, \d)*) ended or does not answer, so gradients cannot be averaged; its "
)


def assert_it_is_said_who_died(started: Processes, dead: int, first_step: int) -> None:
    """Who notices may itself be what the third one misses, so a chain of messages leads to the rank that died."""
    blamed: dict[int, list[int]] = {}
    for rank in {0, 1, 2} - {dead}:
        error = started.error(rank)
        found = re.match(rf"hotbed: error: rank {rank} of 3, step (\d+): ", error)
        assert found, started.text(rank, "err")[-3000:]
        assert int(found[1]) >= first_step
        what = EXCHANGE.match(error, found.end()) or AVERAGE.match(error, found.end())
        assert what, error
        assert "Traceback" not in started.text(rank, "err")
        blamed[rank] = [int(r) for r in what[1].split(", ")]
    assert any(dead in others for others in blamed.values()), blamed
    for others in blamed.values():
        assert any(r == dead or dead in blamed[r] for r in others), blamed


def test_when_a_rank_is_killed_the_others_end_and_the_run_can_be_gone_on_with(
    launcher: Launcher, recipe: Path, tmp_path: Path
) -> None:
    # The others must not wait for the timeout: this test would not.
    options = [str(recipe), "--out", str(tmp_path / "runs"), "--parallel.timeout_s", str(10 * PATIENCE_S)]
    first = ["--plan", "row", "--train.checkpoint_every", "10", "--train.keep_last", "1000"]
    with launcher.start(tmp_path / "killed", 3, *options, *ENDLESS, *first) as started:
        started.wait_for(0, "err", "step 10/")
        run = the_run(tmp_path)
        started.wait_until(lambda: bool(checkpoints_in(run / "checkpoints")))  # they are written in the background
        checkpoint = checkpoints_in(run / "checkpoints")[0]
        step = int(checkpoint.name.removeprefix("last-"))
        started.wait_for(0, "err", f"step {step + 2}/")
        started.send(1, signal.SIGKILL)
        assert started.wait() == [2, -signal.SIGKILL, 2]
    assert_it_is_said_who_died(started, 1, step + 2)
    assert started.text(0, "out") == ""
    assert not (run / "summary.json").exists()
    verify_checkpoint(checkpoint)
    rest = ["--plan", str(run / "plan.json"), "--resume", str(checkpoint), "--train.steps", str(step + 3)]
    rest += ["--train.epochs", "100000", "--name", "again", "--train.log_every", "1"]
    with launcher.start(tmp_path / "again", 3, *options, *rest) as started:
        assert started.wait() == [0, 0, 0], started.text(0, "err")
    (again,) = (tmp_path / "runs" / "again").iterdir()
    summary = json.loads((again / "summary.json").read_text())
    assert (summary["steps"], summary["samples"], summary["ranks"]) == (step + 3, (step + 3) * 128, 3)
    assert (again / "plan.json").read_text() == (run / "plan.json").read_text()
    # The last steps before the death are done again, to the bit.
    before = {line["step"]: line["loss"] for line in lines_of(run) if line["event"] == "train"}
    after = {line["step"]: line["loss"] for line in lines_of(again) if line["event"] == "train"}
    assert sorted(after) == [step + 1, step + 2, step + 3]
    both = before.keys() & after.keys()
    assert both >= {step + 1, step + 2}
    assert [after[s] for s in both] == [before[s] for s in both]
    assert started.text(0, "out").count("run: ") == 1
    assert started.text(1, "out") == started.text(2, "out") == ""


@pytest.mark.full
def test_a_rank_that_hangs_ends_itself_and_says_where(launcher: Launcher, recipe: Path, tmp_path: Path) -> None:
    # The other must not wait for its timeout: this test would not.
    options = ["--out", str(tmp_path / "runs"), "--parallel.timeout_s", str(10 * PATIENCE_S)]
    options += ["--train.step_limit_s", "20", "--model.class_path", "tests.train.rank_models.Hangs"]
    with launcher.start(tmp_path / "hung", 2, str(recipe), *options) as started:
        assert started.wait() == [2, 2]
    file = the_run(tmp_path) / "stacks-1.txt"
    assert re.fullmatch(
        r"hotbed: error: rank 1 of 2, step 4: no batch was finished within 20 s, so this process ends. It is "
        rf"in wait \(.*/threading.py:\d+\); stacks of its threads are in {file}. Raise train.step_limit_s if the step "
        "was only slow",
        started.error(1),
    ), started.text(1, "err")
    stacks = file.read_text()
    assert re.search(r'rank_models.py", line \d+ in hang', stacks)
    assert re.search(r"rank 0 of 2, step 4: .*rank 1 .*See the output of that rank", started.error(0))
    assert not (the_run(tmp_path) / "stacks-0.txt").exists()
