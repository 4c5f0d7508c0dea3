"""A new pooling mode divides values and gradients on every backend."""

import pytest
import torch

import hotbed as hb


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
def test_sqrtn(backend: str) -> None:
    feature = hb.Feature("history", table="items", pooling="sqrtn")
    model = hb.EmbeddingCollection([hb.Table("items", rows=10, dim=4)], [feature], backend=backend)
    ids, offsets = torch.tensor([1, 1, 2, 7, 8]), torch.tensor([0, 3, 3, 5])
    before = model.weight("items").clone()
    found = model(hb.Jagged.from_dict({"history": (ids, offsets)}))["history"]
    sums = torch.stack([before[ids[:3]].sum(0) / 3**0.5, torch.zeros(4), before[ids[3:]].sum(0) / 2**0.5])
    torch.testing.assert_close(found, sums)

    optimizer = hb.optim.SGD(model, lr=1.0)
    found.sum().backward()
    optimizer.step()
    torch.testing.assert_close(
        model.weight("items")[[1, 7]], before[[1, 7]] - torch.tensor([[2 / 3**0.5], [1 / 2**0.5]])
    )
