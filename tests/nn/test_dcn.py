"""DCN-V2 computes the formula of its paper, and trains with tables of several dims."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import hotbed as hb
from hotbed.errors import SpecError
from hotbed.nn.dcn import CrossLayer


@pytest.mark.parametrize("low_rank", [None, 1, 3])
def test_a_cross_layer_is_the_formula_of_the_paper(low_rank: int | None) -> None:
    layer = CrossLayer(5, low_rank)
    first, x = torch.randn(4, 5), torch.randn(4, 5)
    weight = layer.up.weight if layer.down is None else layer.up.weight @ layer.down.weight
    torch.testing.assert_close(layer(first, x), first * (x @ weight.T + layer.up.bias) + x)


@pytest.mark.parametrize("low_rank", [0, 6])
def test_a_rank_that_no_matrix_has_is_refused(low_rank: int) -> None:
    with pytest.raises(SpecError, match=f"low_rank is {low_rank}, must be from 1 to the 5 inputs, or None"):
        CrossLayer(5, low_rank)


def test_it_learns_a_product_of_two_features() -> None:
    torch.manual_seed(0)
    tables = [hb.Table("a", rows=4, dim=4), hb.Table("b", rows=4, dim=6)]
    model = hb.nn.DCNv2(tables, [hb.Feature(t.name, table=t.name) for t in tables], 1, layers=2, low_rank=4, top=(8, 1))
    a, b = torch.arange(16) // 4, torch.arange(16) % 4
    labels = ((a < 2) == (b < 2)).float()[:, None]
    batch = hb.Batch(sparse=hb.Jagged.from_dict({"a": a, "b": b}), dense=torch.zeros(16, 1), labels=labels)
    dense = torch.optim.Adam(model.parameters(), lr=0.02)
    sparse = hb.optim.RowWiseAdagrad(model, lr=0.2)
    for _ in range(60):
        dense.zero_grad()
        F.binary_cross_entropy_with_logits(model(batch), labels).backward()
        dense.step()
        sparse.step()
    assert model(batch).shape == (16, 1)
    assert ((model(batch) > 0).float() == labels).all()
