"""Protects that DeepFM computes the published formula, with an optimizer of its own for its first-order weights."""

import pytest
import torch
from torch import Tensor

import hotbed as hb
from hotbed.embed import plan_for
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn import DeepFM, FactorizationMachine, NumericalEmbedding

from .parity import Weights, assert_parity, mlp, pooled

TABLES = [hb.Table("users", 9, 4), hb.Table("items", 12, 4)]
FEATURES = [hb.Feature("user", "users"), hb.Feature("item", "items"), hb.Feature("bought", "items")]
DENSE = 2


def batch(n: int = 6, dense: int = DENSE) -> hb.Batch:
    draw = torch.Generator().manual_seed(0)
    ids = {
        "user": torch.randint(0, 9, (n,), generator=draw),
        "item": torch.randint(0, 12, (n,), generator=draw),
        "bought": [torch.randint(0, 12, (i % 4,), generator=draw).tolist() for i in range(n)],
    }
    return hb.Batch(sparse=Jagged.from_dict(ids), dense=torch.randn(n, dense, generator=draw) if dense else None)


def plain(weights: Weights, of: hb.Batch) -> Tensor:
    """Equations 1 to 4 as they are printed: every pair of fields by itself."""
    vectors = [pooled(of, f.name, weights[f"embeddings.{f.table}"]) for f in FEATURES]
    linear = sum(pooled(of, f.name, weights[f"wide.{f.table}"]) for f in FEATURES)
    assert isinstance(linear, Tensor)
    if of.dense is not None:
        x = of.dense.double()
        vectors += [x[:, i, None] * weights["numericals.weight"][i] for i in range(DENSE)]
        linear = linear + x @ weights["linear.weight"].T + weights["linear.bias"]
    pairs = [(vectors[i] * vectors[j]).sum(1, keepdim=True) for i in range(len(vectors)) for j in range(i)]
    return linear + torch.stack(pairs).sum(0) + mlp(torch.cat(vectors, dim=1), weights, "top", 2)


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("dense", [0, DENSE])
def test_logits_and_gradients_are_those_of_the_formula(labels: int, dense: int) -> None:
    assert_parity(DeepFM(TABLES, FEATURES, dense, top=(8, labels)), plain, batch(dense=dense))


def test_products_of_pairs_are_added_in_float32_under_autocast() -> None:
    vectors = torch.randn(3, 5, 8)
    exact = FactorizationMachine()(vectors)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(FactorizationMachine()(vectors), exact)


def test_vectors_of_numericals_are_drawn_alike_on_meta_and_elsewhere() -> None:
    torch.manual_seed(1)
    here = NumericalEmbedding(3, 16)
    assert 0.005 < here.weight.std() < 0.02
    with torch.device("meta"):
        made = NumericalEmbedding(3, 16)
    made = made.to_empty(device="cpu")
    torch.manual_seed(1)
    made.reset_parameters()
    assert torch.equal(made.weight, here.weight)


def test_first_order_weights_start_at_0_and_are_on_every_rank() -> None:
    model = DeepFM(TABLES, FEATURES, DENSE)
    assert [table.dim for table in model.wide.tables.values()] == [1, 1]
    assert not any(model.wide.weight(table).any() for table in model.wide.tables)
    for name, tiles in plan_for(model, 2, "row").by_table.items():
        assert (len(tiles) == 1 and {tiles[0].owner, *tiles[0].readers} == {0, 1}) == name.startswith("wide."), name


def test_ids_are_counted_once() -> None:
    features = [hb.Feature("user", "users", on_bad_id="drop")]
    model = DeepFM(TABLES[:1], features, 0, top=(4, 1))
    model(hb.Batch(sparse=Jagged.from_dict({"user": torch.tensor([3, 99])})))
    assert model.embeddings.bad_ids == {"user": 1}
    assert not model.wide.bad_ids


def test_what_it_cannot_be_made_of() -> None:
    with pytest.raises(SpecError, match=r"got \{'users': 4, 'items': 8\}, expected one dim, because vectors are"):
        DeepFM([TABLES[0], hb.Table("items", 12, 8)], FEATURES)
    with pytest.raises(SpecError, match="DeepFM: top: got no widths"):
        DeepFM(TABLES, FEATURES, top=())
    with pytest.raises(SpecError, match="DeepFM: last width of top: got 0, expected at least 1 and at most 1,024"):
        DeepFM(TABLES, FEATURES, top=(4, 0))
    with pytest.raises(SpecError, match="DeepFM: pooling of feature 'user': got 'none', expected 'sum'"):
        DeepFM(TABLES, [hb.Feature("user", "users", pooling="none"), *FEATURES[1:]])
    with pytest.raises(BatchError, match="DeepFM: dense inputs of the batch: got 3, expected 2"):
        DeepFM(TABLES, FEATURES, DENSE)(batch(dense=3))
