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
from hotbed.nn.plain import plain_model
from tests.ranks import Ranks
from tests.train import planted
from tests.train.conftest import one_thread as one_thread
from tests.train.parallel_cases import Group, assert_equal, shares, state_of
from tests.train.planted import Losses

TABLES = [hb.Table("user", 50, 32), hb.Table("item", 30, 32), hb.Table("page", 3, 48)]
FEATURES = [hb.Feature(table.name, table.name) for table in TABLES]


def model_of(tasks: int = 2, **options: Any) -> MMoE:
    torch.manual_seed(1)
    return MMoE(TABLES, FEATURES, planted.DENSE, tasks=tasks, experts=3, expert=[16, 8], tower=[8], **options)


def batches(count: int, size: int = 64, **options: Any) -> list[hb.Batch]:
    """The planted task, and another one that is right where a numerical is positive, too."""

    def with_second(batch: hb.Batch) -> hb.Batch:
        assert batch.labels is not None
        assert batch.dense is not None
        second = batch.labels[:, 0] * (batch.dense[:, 0] > 0)
        return replace(batch, labels=torch.stack([batch.labels[:, 0], second], dim=1))

    return [with_second(batch) for batch in planted.batches(count, size, **options)]


def plain(model: MMoE, weights: dict[str, Tensor], batch: hb.Batch) -> Tensor:
    """Equations 6 to 8, written for one sample after the other."""
    assert batch.dense is not None
    logits: list[Tensor] = []
    for b in range(len(batch)):
        ids = [int(batch.sparse[f.name].values[b]) for f in FEATURES]
        x = torch.cat([*(weights[f.table][i] for f, i in zip(FEATURES, ids, strict=True)), batch.dense[b]])
        found = [nn.Sequential(*expert)(x) for expert in model.mixtures.experts]  # type: ignore[misc]
        of_sample: list[Tensor] = []
        for k, tower in enumerate(model.towers):
            gate = torch.softmax(model.mixtures.gates.weight[3 * k : 3 * k + 3] @ x, dim=0)
            mixture = sum((share * f for share, f in zip(gate, found, strict=True)), torch.zeros(8))
            of_sample.append(nn.Sequential(*tower)(mixture))  # type: ignore[misc]
        logits.append(torch.cat(of_sample))
    return torch.stack(logits)


def test_it_is_the_published_formula_with_its_gradients() -> None:
    model, batch = model_of(), batches(1, 23)[0]
    twin = copy.deepcopy(model)
    weights = {t.name: nn.Parameter(model.embeddings.weight(t.name).clone()) for t in TABLES}
    got, wanted = model(batch), plain(twin, weights, batch)
    assert got.shape == (23, 2)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)
    rows = hb.optim.SGD(model, lr=1.0)
    for logits in (got, wanted):
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
    rows.step()
    of_twin = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        if not name.startswith("embeddings"):
            assert parameter.grad is not None, name
            torch.testing.assert_close(parameter.grad, of_twin[name].grad, rtol=0, atol=1e-6, msg=name)
    for name, weight in weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(model.embeddings.weight(name), weight.detach() - weight.grad, rtol=0, atol=1e-6)


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
    with pytest.raises(SpecError, match=r"has 3 experts and 0 gates \(one per task\), must have at least 1"):
        model_of(tasks=0)
    with pytest.raises(SpecError, match="MixtureOfExperts has 0 experts and 2 gates"):
        MixtureOfExperts(4, [3], experts=0, gates=2)
    with pytest.raises(SpecError, match=r"MLP\(116, \[\]\): needs at least one layer"):
        MMoE(TABLES, FEATURES, planted.DENSE, expert=[])
    with pytest.raises(SpecError, match="MMoE: feature 'user' is not pooled"):
        MMoE(TABLES[:1], [hb.Feature("user", "user", pooling="none")], 0)
