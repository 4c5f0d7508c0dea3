"""Protects that MMoE is the published formula, forward and gradients, trains over ranks, and leaves hotbed whole."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hotbed as hb
from hotbed.config import TrainRecipe
from hotbed.errors import SpecError
from hotbed.nn import MixtureOfExperts, MMoE
from hotbed.nn.dense_program import plain_model
from tests.ranks import Ranks
from tests.train import planted
from tests.train.conftest import one_thread as one_thread
from tests.train.parallel_cases import Group, assert_equal, shares, state_of
from tests.train.planted import Losses

from .parity import Weights, assert_parity, mlp, pooled

TABLES = [hb.Table("user", 50, 32), hb.Table("item", 30, 32), hb.Table("page", 3, 48)]
FEATURES = [hb.Feature(table.name, table.name) for table in TABLES]
EXPERTS = 3


def model_of(tasks: int = 2, **options: Any) -> MMoE:
    torch.manual_seed(1)
    return MMoE(TABLES, FEATURES, planted.DENSE, tasks=tasks, experts=EXPERTS, expert=[16, 8], tower=[8], **options)


def batches(count: int, size: int = 64, **options: Any) -> list[hb.Batch]:
    """The planted task, and another one that is right where a numerical is positive, too."""

    def with_second(batch: hb.Batch) -> hb.Batch:
        assert batch.labels is not None
        assert batch.dense is not None
        second = batch.labels[:, 0] * (batch.dense[:, 0] > 0)
        return replace(batch, labels=torch.stack([batch.labels[:, 0], second], dim=1))

    return [with_second(batch) for batch in planted.batches(count, size, **options)]


def plain(weights: Weights, batch: hb.Batch) -> Tensor:
    """Equations 6 to 8, expert by expert and task by task: layers as products of matrices."""
    vectors = [pooled(batch, f.name, weights[f"embeddings.{f.table}"]) for f in FEATURES]
    x = torch.cat([*vectors, *([] if batch.dense is None else [batch.dense.double()])], dim=1)
    experts = [mlp(x, weights, f"mixtures.experts.{i}", 2).relu() for i in range(EXPERTS)]
    logits: list[Tensor] = []
    for k in range(sum(name.startswith("towers.") for name in weights) // 4):
        scores = (x @ weights["mixtures.gates.weight"][EXPERTS * k : EXPERTS * (k + 1)].T).exp()
        shares = scores / scores.sum(1, keepdim=True)
        mixture = sum((shares[:, [i]] * expert for i, expert in enumerate(experts)), torch.zeros(1, 8))
        logits.append(mlp(mixture, weights, f"towers.{k}", 2))
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("tasks", [1, 2, 3])
@pytest.mark.parametrize("dense", [0, 3])
def test_logits_and_gradients_are_those_of_the_formula(tasks: int, dense: int) -> None:
    draw = torch.Generator().manual_seed(0)
    tables = [hb.Table(t.name, t.rows, 4) for t in TABLES]
    ids = {t.name: torch.randint(0, t.rows, (23,), generator=draw) for t in TABLES}
    numbers = torch.randn(23, dense, generator=draw) if dense else None
    model = MMoE(tables, FEATURES, dense, tasks=tasks, experts=EXPERTS, expert=[16, 8], tower=[8])
    assert_parity(model, plain, hb.Batch(sparse=hb.Jagged.from_dict(ids), dense=numbers))


def test_one_gate_is_the_mixture_that_all_share() -> None:
    torch.manual_seed(0)
    layer, x = MixtureOfExperts(5, [4], experts=3, gates=1), torch.randn(7, 5)
    shares = layer.gates(x).softmax(1)
    expected = sum(shares[:, [i]] * expert(x) for i, expert in enumerate(layer.experts))
    assert isinstance(expected, Tensor)
    torch.testing.assert_close(layer(x), expected[:, None])


def trained(group: Group, *schemes: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for scheme in schemes:
        model: nn.Module = model_of()
        if group is not None:
            model = hb.distribute(model, scheme, group=group)
        losses, recipe = Losses(), TrainRecipe(batch_size=64, device="cpu", precision="fp32", log_every=5)
        optimizers = torch.optim.Adam(model.parameters(), lr=0.01), hb.optim.RowWiseAdagrad(model, lr=0.05)
        trainer = hb.Trainer(model, *optimizers, recipe=recipe, callbacks=[losses], labels=["click", "buy"])
        trainer.fit(shares(batches(16, last=9), group), shares(batches(2, seed=5), group))
        metrics = trainer.evaluate(shares(batches(4, seed=6), group))
        found.append({"losses": losses.losses, "tasks": metrics.tasks, "state": state_of(trainer)})
    return found


@pytest.mark.usefixtures("one_thread")
def test_no_plan_changes_a_bit_and_three_ranks_train_the_model_of_one(ranks: Ranks) -> None:
    (alone,) = trained(None, "")
    by_rank = ranks.run(3, trained, "row", "column")
    first = by_rank[0][0]
    for of_plan in (found for of_rank in by_rank for found in of_rank):
        assert (of_plan["losses"], of_plan["tasks"]) == (first["losses"], first["tasks"])
        assert_equal(of_plan["state"], first["state"])
    assert first["losses"] == pytest.approx(alone["losses"], abs=1e-4)
    for name, task in alone["tasks"].items():
        assert first["tasks"][name].auc == pytest.approx(task.auc, abs=1e-3)
        assert task.auc > 0.6
    assert alone["losses"][-2] < alone["losses"][0]


def test_one_process_trains_it_twice_alike() -> None:
    first, second = trained(None, "", "")
    assert first["losses"] == second["losses"]
    assert_equal(first["state"], second["state"])


def test_it_can_be_exported_as_plain_torch() -> None:
    model, batch = model_of().eval(), batches(1, 9)[0]
    out = model(batch)
    ids = {name: batch.sparse[name].values.long()[:, None] for name in batch.sparse.names}
    torch.testing.assert_close(plain_model(copy.deepcopy(model))(batch.dense, ids), out, rtol=1e-5, atol=1e-6)


def test_what_cannot_be() -> None:
    with pytest.raises(SpecError, match=r"gates \(one per task\): got 0, expected at least 1"):
        model_of(tasks=0)
    with pytest.raises(SpecError, match="MixtureOfExperts: experts: got 0, expected at least 1"):
        MixtureOfExperts(4, [3], experts=0, gates=2)
    with pytest.raises(SpecError, match=r"got inputs 116 and widths \[\], expected positive inputs"):
        MMoE(TABLES, FEATURES, planted.DENSE, expert=[])
    with pytest.raises(SpecError, match="MMoE: pooling of feature 'user': got 'none', expected 'sum'"):
        MMoE(TABLES[:1], [hb.Feature("user", "user", pooling="none")], 0)
