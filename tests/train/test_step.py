"""Tests of clipped gradients, and of measured steps."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import hotbed as hb
from hotbed.batch import Batch, Embeddings
from hotbed.config import TrainRecipe
from hotbed.errors import NonFiniteError, RecipeError
from hotbed.jagged import Jagged
from hotbed.train import Trainer
from hotbed.train.prefetch import Divide, whole
from hotbed.train.runs.hot_batches import HotSplit
from hotbed.train.runs.report import summarize_tables
from tests.cli.cases import train
from tests.ranks import Ranks
from tests.train import planted
from tests.train.parallel_cases import TRAIN, Group, assert_equal, make_trainer, shares
from tests.train.planted import Losses
from tests.train.test_hot_batches import packed_fixture  # noqa: F401

# -- Protects: ``train.clip_grad_norm`` limits the norm of each step's gradients, whatever else a recipe asks for.

LIMITS = {"user": 30, "item": 20, "page": 2}


def change_of(divide: Divide = whole, **options: Any) -> dict[str, Tensor]:
    """What a step of gradient descent with rate 1 takes off parameters and rows: the gradient."""
    recipe = replace(TrainRecipe(batch_size=60, device="cpu", precision="fp32", steps=1), **options)
    model = planted.trainer(recipe).model
    before = {name: t.clone() for name, t in model.state_dict().items()}
    dense, sparse = torch.optim.SGD(model.parameters(), lr=1.0), hb.optim.SGD(model, lr=1.0)
    Trainer(model, dense, sparse, recipe=recipe, divide=divide).fit(planted.batches(1, 60))
    return {name: before[name] - t for name, t in model.state_dict().items()}


def norm_of(gradient: dict[str, Tensor]) -> float:
    return float(torch.cat([t.flatten() for t in gradient.values()]).double().norm())


@pytest.mark.parametrize(("divide", "precision"), [(whole, "fp32"), (HotSplit(LIMITS), "fp32"), (whole, "fp16")])
def test_a_step_has_the_direction_of_its_gradient_and_the_largest_norm(divide: Divide, precision: Any) -> None:
    gradient = change_of(divide, precision=precision)
    norm = norm_of(gradient)
    clipped = change_of(divide, precision=precision, clip_grad_norm=norm / 4)
    assert norm_of(clipped) == pytest.approx(norm / 4, rel=1e-4)
    for name, change in clipped.items():
        torch.testing.assert_close(change, gradient[name] / 4, rtol=1e-3, atol=1e-6)
    if precision == "fp32":
        within = change_of(divide, precision=precision, clip_grad_norm=norm * 1.01)
        assert all(torch.equal(change, gradient[name]) for name, change in within.items())


def test_a_norm_that_is_not_finite_ends_training_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = TrainRecipe(batch_size=64, device="cpu", precision="fp32", steps=1, clip_grad_norm=0.1)
    trainer = planted.trainer(recipe)
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match=r"norm of the gradients: got (inf|nan) in step 1 "):
        trainer.fit(planted.batches(1))
    assert all(torch.equal(t, before[name]) for name, t in trainer.model.state_dict().items())


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan])
def test_limits_that_cannot_be(norm: float) -> None:
    with pytest.raises(RecipeError, match=f"train.clip_grad_norm: got {norm}, expected a finite number above 0"):
        TrainRecipe(batch_size=8, clip_grad_norm=norm)


def trained(group: ProcessGroup | None, scheme: str) -> dict[str, Tensor]:
    trainer = make_trainer(group, scheme, replace(TRAIN, steps=4, clip_grad_norm=0.05))
    trainer.fit(shares(planted.batches(4), group))
    return {name: t.clone() for name, t in trainer.model.state_dict().items()}


def test_ranks_train_the_same_bits_in_all_plans(ranks: Ranks) -> None:
    alone = trained(None, "table")
    first = ranks.run(3, trained, "table")[0]
    for scheme in ("row", "column"):
        for state in ranks.run(3, trained, scheme):
            assert all(torch.equal(t, first[name]) for name, t in state.items())
    torch.testing.assert_close(first, alone, rtol=1e-3, atol=1e-4)


CLIPPED = ("--hot.batches", "split", "--train.precision", "fp32", "--train.clip_grad_norm", "0.05")


@pytest.mark.usefixtures("packed")
def test_rows_on_disk_and_resumed_runs_train_the_same_bits(packed: Path) -> None:
    _, on_disk, _ = train(packed, *CLIPPED)
    assert on_disk["memory"]["disk_bytes"] > 0
    _, in_memory, _ = train(packed, *CLIPPED, "--memory.tier", "device", "--memory.cache_rows", "0")
    assert on_disk["test"] == in_memory["test"]
    _, free, _ = train(packed, *CLIPPED[:-2])
    assert free["test"] != on_disk["test"]
    _, _, first = train(packed, *CLIPPED, "--train.steps", "7")
    _, resumed, _ = train(packed, *CLIPPED, "--resume", str(first))
    assert resumed["test"] == on_disk["test"]


# -- Protects: steps that are logged are measured, their norms are those of autograd on any number of ranks, and no bit

PARTS = ["step_lookup_s", "step_forward_s", "step_backward_s", "step_tables_s", "step_dense_s"]


def measured(records: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: v for name, v in record.items() if name.startswith("step_")} for record in records]


def test_each_logged_step_has_its_parts_and_the_last_one_too() -> None:
    losses = Losses()
    trainer = make_trainer(None, recipe=replace(TRAIN, log_every=3, steps=7), callbacks=[losses])
    start = time.perf_counter()
    trainer.fit(planted.batches(10))
    seconds = time.perf_counter() - start
    assert [record["step"] for record in losses.records] == [3, 6, 7]
    for parts in measured(losses.records):
        assert sorted(parts) == sorted(PARTS)
        assert all(0 < part < seconds for part in parts.values())
    assert sum(sum(parts.values()) for parts in measured(losses.records)) < seconds
    collection = trainer.model.embeddings
    assert isinstance(collection, nn.Module)
    assert not (collection._forward_hooks or collection._forward_pre_hooks)


def test_what_callbacks_look_up_is_no_part_of_the_step() -> None:
    class Evaluates(Losses):
        def on_step(self, trainer: Trainer, loss: float) -> None:
            super().on_step(trainer, loss)
            before = dict(trainer.training_step.logged._seconds)
            trainer.model(planted.batches(1)[0])
            assert dict(trainer.training_step.logged._seconds) == before

    losses = Evaluates()
    make_trainer(None, recipe=replace(TRAIN, log_every=1, steps=8), callbacks=[losses]).fit(planted.batches(8))
    assert len(measured(losses.records)) == 8


def test_measuring_changes_no_bit() -> None:
    def trained(every: int) -> tuple[list[float], dict[str, Tensor]]:
        losses = Losses()
        trainer = planted.trainer(replace(TRAIN, log_every=every), callbacks=[losses])
        trainer.fit(planted.batches(9))
        return losses.losses, {name: t.clone() for name, t in trainer.model.state_dict().items()}

    (always, weights), (once, others) = trained(1), trained(9)
    assert always == once
    assert_equal(weights, others)


class Sequences(nn.Module):
    """Pooled features, a sequence and a padded one, of three dims, of which two features share a table."""

    def __init__(self) -> None:
        super().__init__()
        tables = [hb.Table("a", rows=50, dim=8), hb.Table("b", rows=50, dim=8), hb.Table("c", rows=50, dim=4)]
        self.embeddings = hb.EmbeddingCollection(
            tables,
            [
                hb.Feature("first", table="a"),
                hb.Feature("second", table="a", pooling="mean"),
                hb.Feature("history", table="b", pooling="none"),
                hb.Feature("padded", table="c", pooling="none", max_len=3, padding="right"),
            ],
        )
        self.top = nn.Linear(8 + 8 + 8 + 12, 1)
        self.found: Embeddings | None = None

    def forward(self, batch: Batch) -> Tensor:
        found = self.found = self.embeddings(batch.sparse)
        history, _ = found.padded("history")
        return self.top(torch.cat([found["first"], found["second"], history.sum(1), found["padded"].flatten(1)], dim=1))


def ragged(samples: int) -> Batch:
    generate = torch.Generator().manual_seed(3)
    ids = {
        name: [torch.randint(50, (i % 4,), generator=generate).tolist() for i in range(samples)]
        for name in ("first", "second", "history")
    }
    ids["padded"] = [bag[:3] for bag in ids["first"]]
    return Batch(sparse=Jagged.from_dict(ids), labels=torch.rand(samples, 1, generator=generate).round())


def test_norms_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    model, batch = Sequences(), ragged(24)
    rows = {name: t.clone() for name, t in model.embeddings.state_dict().items()}
    loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)  # type: ignore[arg-type]
    assert model.found is not None
    vectors = [v for _, v in model.found.looked_up()]
    by_part = dict(zip(map(tuple, (n for n, _ in model.found.looked_up())), torch.autograd.grad(loss, vectors)))  # noqa: B905
    expected = {
        "a": by_part["first", "second"].norm().item(),
        "b": by_part["history",].norm().item(),
        "c": by_part["padded",].norm().item(),
    }
    assert all(torch.equal(t, rows[name]) for name, t in model.embeddings.state_dict().items())
    dense, sparse = torch.optim.SGD(model.parameters(), lr=0.1), hb.optim.SGD(model, lr=0.1)
    trainer = Trainer(model, dense, sparse, recipe=TrainRecipe(batch_size=24, device="cpu", precision="fp32", steps=1))
    trainer.fit([batch])
    assert {t["table"]: t["grad_norm"] for t in summarize_tables(trainer)} == pytest.approx(expected, rel=1e-5)


def test_a_run_that_logged_nothing_and_a_table_that_is_not_trained_have_no_norm() -> None:
    trainer = planted.trainer(TRAIN)
    assert {table["grad_norm"] for table in summarize_tables(trainer)} == {None}
    frozen = trainer.model.embeddings.handles["user"]  # type: ignore[union-attr]
    frozen.requires_grad_(False)  # type: ignore[union-attr,operator]
    trainer.fit(planted.batches(5))
    norms = {table["table"]: table["grad_norm"] for table in summarize_tables(trainer)}
    assert norms.pop("user") is None
    assert norms
    assert all(norm > 0 for norm in norms.values())


def norms(group: Group) -> tuple[dict[str, float], list[dict[str, float]]]:
    losses = Losses()
    trainer = make_trainer(group, "row", callbacks=[losses], sgd=True)
    trainer.fit(shares(planted.batches(10, last=2), group))
    return {table["table"]: table["grad_norm"] for table in summarize_tables(trainer)}, measured(losses.records)


@pytest.mark.usefixtures("one_thread")
def test_ranks_have_the_norms_of_one(ranks: Ranks) -> None:
    alone, _ = norms(None)
    assert set(alone) == set(planted.ROWS)
    for found, records in ranks.run(3, norms):
        assert found == pytest.approx(alone, rel=1e-5)
        for parts in records:
            assert sorted(parts) == sorted([*PARTS, "step_ranks_s"])


class Swapped(nn.Module):
    """A plain model whose table is swapped for hotbed's."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.top = nn.Embedding(30, 8), nn.Linear(8, 1)

    def forward(self, batch: Batch) -> Tensor:
        return self.top(self.item(batch.sparse["item"].values))


@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings(r"ignore:[\s\S]*Dynamo detected a call to a `functools\.lru_cache`:UserWarning")
@pytest.mark.filterwarnings(r"ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("is_compiled", [False, True], ids=["swapped", "compiled"])
def test_where_lookups_are_not_seen_they_are_part_of_the_forward_pass(is_compiled: bool) -> None:
    model = planted.trainer(TRAIN).model if is_compiled else hb.swap_embeddings(Swapped())
    if is_compiled:  # the graph that is traced, run by Python: no compiler is needed for it
        torch._dynamo.reset()
        model.compile(backend="eager")
    dense, losses = torch.optim.SGD(model.parameters(), lr=0.1), Losses()
    trainer = Trainer(model, dense, hb.optim.SGD(model, lr=0.1), recipe=TRAIN, callbacks=[losses])
    trainer.fit(planted.batches(5))
    (parts,) = measured(losses.records)
    assert sorted(parts) == sorted(set(PARTS) - {"step_lookup_s"})
    assert {table["grad_norm"] for table in summarize_tables(trainer)} == {None}
