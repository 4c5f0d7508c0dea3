"""Protects that an ensemble is several DLRMs over columns of their own, trained apart, and scored by their mean."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

import hotbed as hb
from hotbed.config import TrainRecipe
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn import DLRM, DLRMEnsemble
from hotbed.nn.dense_program import plain_model
from hotbed.train.numerics import Numerics
from hotbed.train.ranks.parallel import Ranks

FEATURES = [hb.Feature("x", "a"), hb.Feature("y", "b"), hb.Feature("z", "a")]
MEMBERS, COLUMNS = 3, 4


def tables(dim: int) -> list[hb.Table]:
    return [hb.Table("a", 20, dim), hb.Table("b", 10, dim)]


def ensemble(dense: int = 2, labels: int = 1) -> DLRMEnsemble:
    torch.manual_seed(1)
    return DLRMEnsemble(tables(12), FEATURES, dense, members=MEMBERS, bottom=[5, COLUMNS], top=[6, labels])


def batch(n: int = 7, dense: int = 2, labels: int = 1) -> hb.Batch:
    torch.manual_seed(0)
    ids = {name: torch.randint(0, 10, (n,)) for name in ("x", "y", "z")}
    numbers = torch.randn(n, dense) if dense else None
    return hb.Batch(
        sparse=Jagged.from_dict(ids),
        dense=numbers,
        labels=torch.randint(0, 2, (n, labels)).float(),
        weights=torch.rand(n),
    )


def member(model: DLRMEnsemble, number: int, dense: int) -> DLRM:
    """A DLRM of its own with a member's values."""
    own = DLRM(tables(COLUMNS), FEATURES, dense, bottom=[5, COLUMNS], top=[6, 1], embeddings_to_top=True)
    own.bottom.load_state_dict(model.bottoms[number].state_dict())
    own.top.load_state_dict(model.tops[number].state_dict())
    for name in ("a", "b"):
        columns = slice(number * COLUMNS, (number + 1) * COLUMNS)
        own.embeddings.weight(name).copy_(model.embeddings.weight(name)[:, columns])
    return own


@pytest.mark.parametrize("dense", [0, 2])
def test_each_member_is_a_dlrm_and_the_mean_is_the_ensemble_s(dense: int) -> None:
    model, of = ensemble(dense), batch(dense=dense)
    logits = model(of)
    assert logits.shape == (MEMBERS, 7, 1)
    for number in range(MEMBERS):
        torch.testing.assert_close(logits[number], member(model, number, dense)(of), rtol=1e-5, atol=1e-6)
    model.eval()
    torch.testing.assert_close(model(of), logits.mean(0))


def test_members_are_trained_by_losses_of_their_own() -> None:
    model, of = ensemble(), batch()
    numerics = Numerics(
        model, TrainRecipe(batch_size=7, precision="fp32", device="cpu"), torch.device("cpu"), Ranks(model)
    )
    (total,), tasks = numerics.summed_losses([of])
    assert tasks == 1 and of.labels is not None and of.weights is not None
    apart = [
        F.binary_cross_entropy_with_logits(logits, of.labels, of.weights[:, None], reduction="sum")
        for logits in model(of)
    ]
    torch.testing.assert_close(total, torch.stack(apart).mean())
    total.backward()
    own = member(model, 1, 2)
    F.binary_cross_entropy_with_logits(own(of), of.labels, of.weights[:, None], reduction="sum").backward()
    got = [p.grad for p in [*model.bottoms[1].parameters(), *model.tops[1].parameters()]]
    expected = [p.grad for p in [*own.bottom.parameters(), *own.top.parameters()]]
    for mine, theirs in zip(got, expected, strict=True):
        assert mine is not None and theirs is not None
        torch.testing.assert_close(mine * MEMBERS, theirs, rtol=1e-5, atol=1e-6)


def test_it_learns_is_evaluated_by_the_mean_and_can_be_exported() -> None:
    model, of = ensemble(labels=2), batch(64, labels=2)
    groups = [
        hb.optim.RowWiseAdagrad(model, lr=0.1),
        torch.optim.Adam([*model.bottoms.parameters(), *model.tops.parameters()], lr=0.02),
    ]
    trainer = hb.Trainer(
        model, dense=groups[1], sparse=groups[0], recipe=TrainRecipe(batch_size=64, device="cpu", steps=40)
    )
    before = hb.evaluate(model, [of])
    trainer.fit([of] * 40)
    after = hb.evaluate(model, [of])
    assert after.logloss < before.logloss / 1.5
    model.eval()
    plain = plain_model(copy.deepcopy(model))
    ids = {name: of.sparse[name].values.long()[:, None] for name in of.sparse.names}
    torch.testing.assert_close(plain(of.dense, ids), model(of), rtol=1e-5, atol=1e-6)


def test_logits_of_another_shape_are_refused_also_those_of_members_outside_training() -> None:
    model, of = ensemble(), batch()
    numerics = Numerics(model, TrainRecipe(batch_size=7, device="cpu"), torch.device("cpu"), Ranks(model))
    model.forward = lambda _: torch.zeros(MEMBERS, 5, 1)
    with pytest.raises(BatchError, match=r"\[3, 5, 1\], expected .*\[7, 1\]"):
        numerics.summed_losses([of])
    model.forward = lambda _: torch.zeros(MEMBERS, 7, 1)
    with pytest.raises(BatchError, match=r"\[3, 7, 1\]"):
        hb.evaluate(model, [of])


def test_what_cannot_be() -> None:
    with pytest.raises(SpecError, match=r"got 1, expected at least 2"):
        DLRMEnsemble(tables(8), FEATURES, 2, members=1)
    with pytest.raises(SpecError, match="bottom: got no widths"):
        DLRMEnsemble(tables(8), FEATURES, 2, bottom=[])
    with pytest.raises(SpecError, match="got 16, expected 32, which is 4 members × 8, the last width of bottom"):
        DLRMEnsemble(tables(16), FEATURES, 2)
    with pytest.raises(SpecError, match="feature 'x': got 'none', expected 'sum'"):
        DLRMEnsemble(tables(32), [hb.Feature("x", "a", pooling="none")], 2)
