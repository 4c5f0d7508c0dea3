"""Protects that the two-tower model and its softmax compute the published formulas, also over ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import hotbed as hb
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn import InBatchSoftmax, ItemFrequencies, TwoTower
from tests.ranks import Ranks

from .parity import Weights, assert_parity, mlp, pooled

TABLES = [hb.Table("users", 9, 4), hb.Table("items", 12, 8), hb.Table("shops", 5, 4)]
FEATURES = [hb.Feature("shop", "shops"), hb.Feature("user", "users"), hb.Feature("item", "items")]
OPTIONS = {"item": ["item", "shop"], "widths": (6, 5), "temperature": 0.5}


def batch(n: int = 12, *, dense: int = 2, seed: int = 0) -> hb.Batch:
    draw = torch.Generator().manual_seed(seed)
    rows = {"user": 9, "item": 12, "shop": 5}
    ids = {name: torch.randint(0, most, (n,), generator=draw) for name, most in rows.items()}
    return hb.Batch(sparse=Jagged.from_dict(ids), dense=torch.randn(n, dense, generator=draw) if dense else None)


def plain(weights: Weights, of: hb.Batch) -> Tensor:
    user, item, shop = (
        pooled(of, name, weights[f"embeddings.{table}"])
        for name, table in (("user", "users"), ("item", "items"), ("shop", "shops"))
    )
    u = mlp(torch.cat([user, *([] if of.dense is None else [of.dense.double()])], dim=1), weights, "user", 2)
    v = mlp(torch.cat([item, shop], dim=1), weights, "item", 2)
    return ((u * v).sum(1) / u.square().sum(1).sqrt() / v.square().sum(1).sqrt() / 0.5)[:, None]


@pytest.mark.parametrize("dense", [0, 2])
def test_logits_and_gradients_are_those_of_the_formula(dense: int) -> None:
    assert_parity(TwoTower(TABLES, FEATURES, dense, **OPTIONS), plain, batch(dense=dense))


def test_logits_are_products_of_the_vectors() -> None:
    model = TwoTower(TABLES, FEATURES, 2, **OPTIONS)
    user, item = model(batch(), vectors=True)
    assert user.shape == item.shape == (12, 5)
    torch.testing.assert_close(model(batch()), (user * item).sum(1, keepdim=True) / 0.5)


def test_the_softmax_is_the_formula() -> None:
    torch.manual_seed(0)
    users, items = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    ids, p = torch.tensor([4, 7, 4, 1, 0]), torch.tensor([0.5, 0.1, 0.5, 0.02, 0.01])
    losses = InBatchSoftmax(0.3)(users, items, ids, p.log())
    expected: list[Tensor] = []
    for i in range(5):
        scores = [users[i].double() @ items[j].double() / 0.3 - p[j].double().log() for j in range(5)]
        among = torch.stack([scores[j] for j in range(5) if j == i or ids[j] != ids[i]])
        expected.append(-(scores[i] - among.exp().sum().log()))
    torch.testing.assert_close(losses.double(), torch.stack(expected), rtol=1e-6, atol=1e-6)
    found = torch.autograd.grad(losses.sum(), [users, items])
    wanted = torch.autograd.grad(torch.stack(expected).sum(), [users, items])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_without_its_correction_and_without_samples() -> None:
    users, items = torch.randn(3, 2), torch.randn(3, 2)
    ids = torch.arange(3)
    alike = InBatchSoftmax()(users, items, ids, torch.full((3,), -2.0))
    torch.testing.assert_close(InBatchSoftmax()(users, items, ids), alike)
    assert InBatchSoftmax()(users[:0], items[:0], ids[:0]).shape == (0,)


def test_frequencies_come_near_those_of_the_stream() -> None:
    draw = torch.Generator().manual_seed(0)
    often = torch.tensor([0.9, 0.5, 0.1, 0.02])
    frequencies = ItemFrequencies(1 << 10, rate=0.05, first=10.0)
    for _ in range(3000):
        frequencies((torch.rand(4, generator=draw) < often).nonzero()[:, 0])
    found = frequencies.eval()(torch.arange(4)).exp()
    torch.testing.assert_close(found, often, rtol=0.5, atol=0.0)
    assert torch.equal(frequencies(torch.arange(4)).exp(), found), "evaluation counts nothing"
    torch.testing.assert_close(frequencies(torch.tensor([77])).exp(), torch.tensor([0.1]))


def trained(group: dist.ProcessGroup, scheme: str) -> dict[str, Tensor]:
    """Three steps of retrieval: the loss of a loop of one's own."""
    torch.manual_seed(0)
    tables = [hb.Table(t.name, rows=t.rows, dim=16) for t in TABLES]
    model = hb.distribute(TwoTower(tables, FEATURES, 2, **OPTIONS), scheme, group=group)
    softmax, frequencies = InBatchSoftmax(), ItemFrequencies(64)
    dense, sparse = torch.optim.SGD(model.parameters(), lr=0.1), hb.optim.RowWiseAdagrad(model, lr=0.1)
    rank = dist.get_rank(group)
    for step in range(3):
        own = batch(13, seed=step).take(torch.arange(13)[[slice(6), slice(0), slice(6, 13)][rank]])
        ids = own.sparse["item"].values
        total = softmax(*model(own, vectors=True), ids, frequencies(ids)).sum()
        hb.mean_over_ranks(total, len(own), model).backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def test_retrieval_over_ranks_is_the_same_to_the_bit_under_any_plan(ranks: Ranks) -> None:
    whole, rows = ranks.run(3, trained, "table"), ranks.run(3, trained, "row")
    for name, value in whole[0].items():
        assert torch.equal(rows[2][name], value), name


def test_what_it_cannot_be_made_of() -> None:
    with pytest.raises(SpecError, match=r"TwoTower: item: got 'itm', .*; did you mean 'item'"):
        TwoTower(TABLES, FEATURES, item=["itm"])
    for item in ([], ["item", "user", "shop"]):
        with pytest.raises(SpecError, match=r"got item .* expected at least one feature for each tower"):
            TwoTower(TABLES, FEATURES, item=item)
    with pytest.raises(
        SpecError,
        match=r"and temperature 0\.0, expected",
    ):
        TwoTower(TABLES, FEATURES, item=["item"], temperature=0.0)
    with pytest.raises(SpecError, match="TwoTower: pooling of feature 'user': got 'none', expected 'sum'"):
        TwoTower(TABLES, [FEATURES[0], hb.Feature("user", "users", pooling="none"), FEATURES[2]], item=["item"])
    with pytest.raises(BatchError, match="TwoTower: dense inputs of the batch: got 2, expected 1"):
        TwoTower(TABLES, FEATURES, 1, **OPTIONS)(batch())
