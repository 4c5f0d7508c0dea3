"""Training over several ranks: what is hidden, cut or interrupted changes no bit."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
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
from hotbed.comm import Link
from hotbed.config import Recipe, TrainRecipe
from hotbed.data import Loader, Schema, SparseColumn
from hotbed.data.source import Source
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, CommError, NonFiniteError
from hotbed.nn import DLRM
from hotbed.train import Callback, Metrics, Trainer
from hotbed.train.broadcast import BroadcastLoader
from hotbed.train.callbacks import KeepBest, KeepLast
from hotbed.train.checkpoint import checkpoints_of, load_checkpoint, read_manifest, verify_checkpoint
from hotbed.train.metrics import evaluate
from hotbed.train.parallel import Ranks as TrainingRanks
from hotbed.train.run import bad_ids
from tests.ranks import Ranks
from tests.train import planted
from tests.train.planted import Losses

pytestmark = pytest.mark.xdist_group("ranks")

Group = dist.ProcessGroup | None
TABLES = [hb.Table(name, rows=rows, dim=32) for name, rows in planted.ROWS.items()]  # a row can be cut in two
FEATURES = [hb.Feature(name, table=name) for name in planted.ROWS]
TIMEOUT = timedelta(seconds=15)
TRAIN = TrainRecipe(batch_size=64, device="cpu", log_every=5)
RECIPE = Recipe.from_dict(
    {
        "name": "test",
        "data": {"path": "nowhere", "valid_split": "valid"},
        "model": {"class_path": "hotbed.nn.DLRM"},
        "dense_optimizer": {"class_path": "torch.optim.Adam"},
        "sparse_optimizer": {"class_path": "hotbed.optim.SGD"},
        "train": {"batch_size": 64},
    }
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """What one process trains to compare with takes no core from the ranks, which have one thread each."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_trainer(
    group: Group,
    scheme: str = "table",
    recipe: TrainRecipe = TRAIN,
    *,
    callbacks: Sequence[Callback] = (),
    overlap: bool = True,
    sgd: bool = False,
    timeout: timedelta = TIMEOUT,
    **options: Any,
) -> Trainer:
    torch.manual_seed(0)
    model: nn.Module = DLRM(TABLES, FEATURES, planted.DENSE, bottom=(16, 32), top=(16, 1), seed=0)
    if group is not None:
        model = hb.distribute(model, scheme, group=group, timeout=timeout, **options)
    dense = torch.optim.SGD(model.parameters(), lr=0.2) if sgd else torch.optim.Adam(model.parameters(), lr=0.01)
    sparse = hb.optim.SGD(model, lr=0.5) if sgd else hb.optim.RowWiseAdagrad(model, lr=0.05)
    return Trainer(model, dense, sparse, recipe=recipe, callbacks=callbacks, overlap=overlap, group="user")


def place(group: Group) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def shares(batches: Iterable[Batch], group: Group) -> list[Batch]:
    """This rank's samples of every batch."""
    rank, size = place(group)
    return [b.take(torch.arange(len(b) * rank // size, len(b) * (rank + 1) // size)) for b in batches]


def state_of(trainer: Trainer) -> dict[str, Tensor]:
    """Parameters, tables and moments, whole; all ranks must call this."""
    found = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
    for name, optimizer in trainer.optimizers.items():
        state: dict[Any, dict[str, Tensor]] = optimizer.state_dict()["state"]
        found |= {f"{name}.{i}.{key}": t.detach().clone() for i, entry in state.items() for key, t in entry.items()}
    return found


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def hotbed_threads() -> list[str]:
    """Threads of iterations; that of the dense gradients lives as long as its model."""
    names = [thread.name for thread in threading.enumerate()]
    return [n for n in names if n.startswith(("hotbed-ahead", "hotbed-broadcast", "hotbed-loader"))]


# -- the same training, however it is distributed --------------------------------------------------------------------


def trained(
    group: Group, scheme: str, steps: int, *, size: int = 64, overlap: bool = True, sgd: bool = False
) -> dict[str, Any]:
    """Samples have weights, and the last batch has two samples, so some ranks have none of it."""
    losses = Losses()
    trainer = make_trainer(group, scheme, callbacks=[losses], overlap=overlap, sgd=sgd)
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
        "hidden": (trainer.ahead.exchange_s, trainer.ahead.hidden_share),
    }


def trained_pipelined_and_not(group: Group, steps: int) -> list[dict[str, Any]]:
    return [
        trained(group, "table", steps),
        trained(group, "table", steps, overlap=False),
        trained(group, "row", steps),
        trained(group, "column", steps, overlap=False),
    ]


@pytest.mark.parametrize("size", [3, 4])
def test_neither_the_plan_nor_exchanging_ids_ahead_changes_a_bit(ranks: Ranks, size: int) -> None:
    by_rank = ranks.run(size, trained_pipelined_and_not, 12)
    first = by_rank[0][0]
    assert (len(first["losses"]), len(first["logged"]), first["samples"]) == (12, 3, 11 * 64 + 2)
    for runs in by_rank:
        for found in runs:
            for what in ("losses", "logged", "auc"):
                assert found[what] == first[what]
            assert_equal(found["state"], first["state"])
        for at, exchanged_ahead in enumerate((True, False, True, False)):
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
    original = EmbeddingCollection.exchange_ahead

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
    EmbeddingCollection.exchange_ahead = late  # type: ignore[method-assign]
    try:
        trainer.fit(shares(planted.batches(5), group), Slow(shares(planted.batches(2, seed=5), group)))
    finally:
        EmbeddingCollection.exchange_ahead = original  # type: ignore[method-assign]
    return losses.losses, state_of(trainer)


def test_an_evaluation_does_not_disturb_the_batch_that_is_prepared_meanwhile(ranks: Ranks) -> None:
    losses, state = ranks.run(3, evaluated_while_ids_are_exchanged, False)[0]
    for found in ranks.run(3, evaluated_while_ids_are_exchanged, True):
        assert found[0] == losses
        assert_equal(found[1], state)


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


# -- stopping ---------------------------------------------------------------------------------------------------------


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
        assert message.startswith("the loss is nan in step 3 (epoch 0, batch 2 of it); training stopped before")
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
    trainer = make_trainer(group, "row", timeout=timedelta(seconds=2))
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


def test_an_error_of_one_rank_reaches_the_others_within_the_timeout(ranks: Ranks) -> None:
    """Its process would end, and theirs at once; here it lives on."""
    expected = Losses()
    make_trainer(None, callbacks=[expected]).fit(planted.batches(3))
    for rank, (message, step, threads, losses) in enumerate(ranks.run(3, with_an_error_of_one_rank)):
        assert step == 3
        if rank == 1:
            assert message.startswith("BatchError: feature user: id 1,000,000 at sample 0 is ≥ rows 50; raise `rows`")
        else:
            assert message.startswith(f"CommError: rank {rank} of 3, step 4: the exchange of ")
            assert re.search(r"failed; rank \d has ended or not answered in time", message)
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
    return None if link.rank == silent else link.unreachable(1)


def test_ranks_that_live_are_not_said_to_be_gone(ranks: Ranks) -> None:
    assert ranks.run(3, who_is_gone, None) == [[], [], []]
    assert ranks.run(3, who_is_gone, 1) == [[1], None, [1]]


# -- small exchanges --------------------------------------------------------------------------------------------------


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
        assert (found["counts"], found["no counts"]) == ({"a": 2, "b": 4, "ü": 1 << 40}, {})
        assert (found["path"], found["ignored"]) == (folder, folder / "0")


def test_one_rank_agrees_with_itself(tmp_path: Path) -> None:
    alone = TrainingRanks(nn.Linear(1, 1))
    assert (alone.rank, alone.size, alone.is_first, alone.link) == (0, 1, True, None)
    assert alone.add(1, 2.5, torch.tensor(3.0, requires_grad=True)) == [1, 2.5, 3]
    values = torch.arange(4)
    assert alone.gather(values) is values
    assert alone.names(["b", "a"]) == ["a", "b"]
    assert alone.add_counts({"a": 3}) == {"a": 3}
    assert alone.path(tmp_path) == tmp_path
    alone.at_step(3)
    with pytest.raises(RuntimeError, match="as it was"), alone.explained():
        raise RuntimeError("as it was")


# -- evaluation -------------------------------------------------------------------------------------------------------


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
        assert nothing == "there is no sample to evaluate; the batches are empty"
        assert "task 0 is nan" in not_finite


# -- checkpoints ------------------------------------------------------------------------------------------------------


class InMemory(Source):
    """The planted data, a chunk of 30 samples each."""

    def __init__(self) -> None:
        dense = tuple(f"x{i}" for i in range(planted.DENSE))
        sparse = tuple(SparseColumn(name=n, rows=r) for n, r in planted.ROWS.items())
        self.schema = Schema(sparse=sparse, dense=dense, labels=("click",), group="user")
        self.splits = ("train",)
        self._data = planted.batches(9, 30, last=10)

    def _chunks(self, split: str) -> list[int]:
        return [len(batch) for batch in self._data]

    def _read(self, split: str, i: int) -> Batch:
        return self._data[i]


STEPS, STOPPED = 14, 9
"""Steps of a run of two epochs of 7 steps, and where it was stopped."""


def run(
    group: Group,
    scheme: str,
    *,
    stop: int | None = None,
    save: Path | None = None,
    resume: Path | None = None,
    one_reads: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A run on a loader, perhaps stopped and saved, perhaps gone on from a checkpoint."""
    rank, size = place(group)
    losses = Losses()
    trainer = make_trainer(group, scheme, replace(TRAIN, epochs=2, steps=stop), callbacks=[losses], **options)
    if save is not None:
        trainer.callbacks.append(KeepLast(save, RECIPE, 4))
    loader: Loader | BroadcastLoader
    if one_reads and trainer.ranks.link is not None:
        whole = Loader(InMemory(), "train", 40, shuffle=True, window=3) if rank == 0 else None
        loader = BroadcastLoader(whole, trainer.ranks.link)
    else:
        loader = Loader(InMemory(), "train", 40, shuffle=True, window=3, rank=rank, world_size=size)
    if resume is not None:
        load_checkpoint(resume, trainer.parts())
        trainer.resume_data(loader)
    before = state_of(trainer)
    trainer.fit(loader)
    assert hotbed_threads() == []
    return {"before": before, "losses": losses.losses, "state": state_of(trainer), "step": trainer.step}


def _run(group: Group, scheme: str, options: dict[str, Any]) -> dict[str, Any]:
    return run(group, scheme, **options)


def test_a_checkpoint_of_three_ranks_is_gone_on_from_by_any_number(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(3, _run, "row", {})
    first = ranks.run(3, _run, "row", {"stop": STOPPED, "save": tmp_path / "run" / "checkpoints"})
    (checkpoint,) = checkpoints_of(tmp_path / "run")
    assert checkpoint.name == f"last-{STOPPED:08d}"
    assert [path.name for path in checkpoint.parent.iterdir()] == [checkpoint.name]  # nothing unfinished is left
    verify_checkpoint(checkpoint)
    assert read_manifest(checkpoint)["recipe"]["name"] == "test"
    saved = first[0]["state"]
    resume = {"resume": checkpoint}
    # Of equally many ranks, whatever the plan: the bits of a run that was not interrupted.
    for found, uninterrupted in zip(ranks.run(3, _run, "column", resume), whole, strict=True):
        assert_equal(found["before"], saved)
        assert found["step"] == STEPS
        assert found["losses"] == uninterrupted["losses"][STOPPED:]
        assert_equal(found["state"], uninterrupted["state"])
    # Of others: the same state, and the same training but for rounding.
    for found in (run(None, "", resume=checkpoint), *ranks.run(4, _run, "column", resume)):
        assert_equal(found["before"], saved)
        assert found["losses"] == pytest.approx(whole[0]["losses"][STOPPED:], abs=1e-4)


def test_four_ranks_go_on_bit_for_bit_whoever_reads(ranks: Ranks, tmp_path: Path) -> None:
    whole = ranks.run(4, _run, "table", {})
    ranks.run(4, _run, "table", {"stop": STOPPED, "save": tmp_path / "checkpoints", "one_reads": True})
    resume = {"resume": tmp_path / "checkpoints" / f"last-{STOPPED:08d}"}
    for one_reads in (True, False):
        found = ranks.run(4, _run, "table", resume | {"one_reads": one_reads})
        for one, uninterrupted in zip(found, whole, strict=True):
            assert one["losses"] == uninterrupted["losses"][STOPPED:]
            assert_equal(one["state"], uninterrupted["state"])


class Remember(Callback):
    """State and logloss at every evaluation, and the checkpoints that there are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[float, int, dict[str, Tensor]]] = []
        self.names: list[list[str]] = []

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        state = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
        self.seen.append((metrics.logloss, trainer.step, state))
        self.names.append(sorted(path.name for path in self.folder.iterdir()))


def kept_best(group: Group, folder: Path) -> dict[str, Any]:
    """A run that becomes better, then worse, with the best evaluation restored at the end."""
    remember = Remember(folder)
    trainer = make_trainer(group, "row", replace(TRAIN, eval_every=2), callbacks=[KeepBest(folder, RECIPE), remember])
    batches = planted.batches(12)
    for batch in batches[6:]:
        assert batch.labels is not None
        batch.labels.neg_().add_(1)
    trainer.fit(shares(batches, group), shares(planted.batches(2, seed=5), group))
    end = {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}
    return {"end": end, "seen": remember.seen, "names": remember.names}


def test_the_best_checkpoint_is_restored_on_all_ranks(ranks: Ranks, tmp_path: Path) -> None:
    by_rank = ranks.run(3, kept_best, tmp_path)
    for found in by_rank:
        _, step, state = min(found["seen"], key=lambda seen: seen[0])
        assert 2 < step < 12
        assert_equal(found["end"], state)
        assert [seen[0] for seen in found["seen"]] == [seen[0] for seen in by_rank[0]["seen"]]
        assert all(len(names) == 1 for names in found["names"])  # one at any moment
        assert found["names"][-1] == [f"best-{step:08d}"]
