"""Protects that DCNv2 computes the published formula, and costs by its inputs, not by pairs of features."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hotbed as hb
from hotbed.config import Recipe
from hotbed.errors import BatchError, SpecError
from hotbed.files import read_yaml
from hotbed.jagged import Jagged
from hotbed.nn import CrossLayer, DCNv2
from hotbed.nn.dense_program import plain_model
from hotbed.train.runs.build import new_model, open_source

from .parity import Weights, assert_parity, mlp, pooled

ROOT = Path(__file__).parents[2]
TABLES = [hb.Table("a", 20, 4), hb.Table("b", 10, 8)]
FEATURES = [hb.Feature("x", "a"), hb.Feature("y", "b"), hb.Feature("z", "a")]


def batch(n: int = 5, dense: int = 3) -> hb.Batch:
    torch.manual_seed(0)
    ids = {name: torch.randint(0, 10, (n,)) for name in ("x", "y", "z")}
    return hb.Batch(
        sparse=Jagged.from_dict(ids), dense=torch.randn(n, dense) if dense else None, labels=torch.ones(n, 1)
    )


def expected(model: DCNv2, of: hb.Batch) -> Tensor:
    """x₀ ⊙ (U Vᵀ x + b) + x, layer by layer, by hand."""
    vectors = [model.embeddings.weight(f.table)[of.sparse[f.name].values.long()] for f in FEATURES]
    first = torch.cat([*vectors, *([] if of.dense is None else [of.dense])], dim=1)
    x = first
    for layer in model.cross:
        assert isinstance(layer, CrossLayer)
        weight = layer.up.weight if layer.down is None else layer.up.weight @ layer.down.weight
        x = first * (x @ weight.T + layer.up.bias) + x
    return model.top(x)


@pytest.mark.parametrize("low_rank", [None, 2, 64])
@pytest.mark.parametrize("dense", [0, 3])
def test_it_is_the_published_formula(low_rank: int | None, dense: int) -> None:
    torch.manual_seed(1)
    model = DCNv2(TABLES, FEATURES, dense, layers=3, low_rank=low_rank, top=[8, 2])
    of = batch(dense=dense)
    torch.testing.assert_close(model(of), expected(model, of), rtol=1e-5, atol=1e-6)
    assert model(of).shape == (5, 2)
    assert all((layer.down is not None) == (low_rank == 2) for layer in model.cross)


def deep_cross(weights: Weights, of: hb.Batch) -> Tensor:
    """Dense inputs as they are, or through an MLP with a last ReLU; equation 1 or 2 layer by layer; an MLP."""
    vectors = [pooled(of, f.name, weights[f"embeddings.{f.table}"]) for f in FEATURES]
    if of.dense is not None:
        x = of.dense.double()
        vectors.append(mlp(x, weights, "bottom", 2).relu() if "bottom.0.weight" in weights else x)
    first = x = torch.cat(vectors, dim=1)
    for i in range(2):
        of_layer = f"cross.{i}"
        low = x @ weights[f"{of_layer}.down.weight"].T if f"{of_layer}.down.weight" in weights else x
        x = first * (low @ weights[f"{of_layer}.up.weight"].T + weights[f"{of_layer}.up.bias"]) + x
    return mlp(x, weights, "top", 2)


@pytest.mark.parametrize("low_rank", [None, 4])
@pytest.mark.parametrize(("dense", "bottom"), [(0, ()), (3, ()), (3, (6, 5))])
def test_logits_and_gradients_are_those_of_the_formula(
    low_rank: int | None, dense: int, bottom: tuple[int, ...]
) -> None:
    model = DCNv2(TABLES, FEATURES, dense, layers=2, low_rank=low_rank, bottom=bottom, top=[8, 1])
    assert_parity(model, deep_cross, batch(dense=dense))


def test_with_a_bottom_it_is_the_model_of_mlperf() -> None:
    model = DCNv2(TABLES, FEATURES, 3, layers=2, low_rank=4, bottom=[6, 5], top=[8, 1])
    assert model.top[0].in_features == 4 + 8 + 4 + 5
    assert_parity(model, deep_cross, batch())
    alone = DCNv2(TABLES, FEATURES, 0, layers=2, low_rank=4, bottom=[6, 5], top=[8, 1])
    assert alone(batch(dense=0)).shape == (5, 1)


def test_the_recipe_of_mlperf_has_its_sizes() -> None:
    recipe = Recipe.from_dict(read_yaml(ROOT / "recipes" / "mlperf_dcnv2.yaml"))
    data = replace(recipe.data, path=str(ROOT / recipe.data.path))
    source = open_source(data)
    with torch.device("meta"):
        model = new_model(recipe, source)
    assert isinstance(model, DCNv2)
    assert sum(table.rows for table in model.embeddings.tables.values()) == 204_184_588
    assert sum(column.ids or 0 for column in source.schema.sparse) == 214
    inputs = 27 * 128
    assert [(layer.down.out_features, layer.up.out_features) for layer in model.cross] == [(512, inputs)] * 3
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if "cross" not in name and p.dim() > 1]
    assert shapes[:3] == [(512, 13), (256, 512), (128, 256)]
    assert shapes[3:] == [(1024, inputs), (1024, 1024), (512, 1024), (256, 512), (1, 256)]


def test_weights_grow_with_the_features_and_not_with_their_pairs() -> None:
    tables = [hb.Table(f"t{i}", 10, 16) for i in range(400)]
    features = [hb.Feature(f"t{i}", f"t{i}") for i in range(400)]
    with torch.device("meta"):
        model = DCNv2(tables, features, 100, layers=2, low_rank=64, top=[256, 128, 1])
    count = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embeddings"))
    assert count < 4_000_000  # DLRM's first layer alone has 80,601 × 256


def test_it_learns_and_can_be_exported() -> None:
    torch.manual_seed(2)
    model = DCNv2(TABLES, FEATURES, 3, top=[16, 1], low_rank=4)
    dense = torch.optim.Adam([p for n, p in model.named_parameters() if not n.startswith("embeddings")], lr=0.01)
    sparse = hb.optim.RowWiseAdagrad(model, lr=0.1)
    of = batch(64)
    target = (of.sparse["x"].values.float() > 4).float()[:, None]
    losses: list[float] = []
    for _ in range(30):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(model(of), target)
        loss.backward()
        for optimizer in (dense, sparse):
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    out = model(of)
    plain = plain_model(copy.deepcopy(model))
    ids = {name: of.sparse[name].values.long()[:, None] for name in of.sparse.names}
    torch.testing.assert_close(plain(of.dense, ids), out, rtol=1e-5, atol=1e-6)


def test_what_cannot_be() -> None:
    with pytest.raises(SpecError, match="CrossNetwork: layers: got 0, expected at least 1"):
        DCNv2(TABLES, FEATURES, 3, layers=0)
    with pytest.raises(SpecError, match="CrossNetwork: low_rank: got 0, expected at least 1"):
        DCNv2(TABLES, FEATURES, 3, low_rank=0)
    with pytest.raises(SpecError, match="got 9, expected 1 to 8, the inputs, or None"):
        CrossLayer(8, 9)
    with pytest.raises(SpecError, match="feature 'x': got 'none', expected 'sum'"):
        DCNv2(TABLES, [hb.Feature("x", "a", pooling="none")], 3)
    with pytest.raises(BatchError, match="DCNv2: dense inputs of the batch: got 2, expected 3"):
        DCNv2(TABLES, FEATURES, 3)(batch(dense=2))
