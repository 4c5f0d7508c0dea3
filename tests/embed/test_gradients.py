"""Gradients of every memory layout that autograd produces reach the rows."""

from functools import partial

import pytest
import torch
from torch import Tensor

from hotbed.embed import EmbeddingCollection
from hotbed.jagged import Jagged
from hotbed.optim import SGD, Adam
from hotbed.specs import Feature, Table

ROWS = 7
UPSTREAM = torch.randn(6, 4, 16, generator=torch.Generator().manual_seed(1))


def like(x: Tensor) -> Tensor:
    """Different numbers, in the shape of x."""
    return UPSTREAM[: x.shape[0], : x.shape[1], : x.shape[2]]


LOSSES = {
    "sum": lambda x: x.sum(),
    "mean_over_samples": lambda x: (x.mean(0) * like(x)[0]).sum(),
    "sum_over_features": lambda x: (x.sum(1) * like(x)[:, 0]).sum(),
    "sum_over_columns": lambda x: (x.sum(2) * like(x)[:, :, 0]).sum(),
    "contiguous": lambda x: (x * like(x)).sum(),
    "features_first": lambda x: (x.transpose(0, 1).contiguous() * like(x).transpose(0, 1)).sum(),
    "columns_first": lambda x: (x.permute(2, 0, 1).reshape(x.shape[2], -1) ** 2).sum(),
    "flat": lambda x: (x.flatten(1) * like(x).flatten(1)).sum(),
    "flat_sum": lambda x: x.flatten(1).sum(),
    "first_feature": lambda x: (x[:, 0] * like(x)[:, 0]).sum(),
    "last_sample": lambda x: (x[-1:] * like(x)[-1:]).sum(),
    "every_other_column": lambda x: (x[:, :, ::2] * like(x)[:, :, ::2]).sum(),
    "joined_in_front": lambda x: (torch.cat([x, x[:, :1]], 1) ** 2).sum(),
    "joined_behind": lambda x: (torch.cat([x[:, :1], x], 1) ** 2).sum(),
    "matrix_product": lambda x: (x @ x.mT).square().sum(),
}


SHAPES = [(6, 3, 16, None), (1, 3, 5, None), (5, 1, 4, None), (4, 2, 1, None), (5, 2, 16, 0), (5, 2, 16, 1)]
"""Samples, features, dim, and the room where ids have weights and vectors stand behind a lead."""


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("samples", "features", "dim", "room"), SHAPES)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_a_gradient_of_any_layout_is_read_right(loss, samples, features, dim, room, backend):
    names = [f"f{i}" for i in range(features)]
    collection = EmbeddingCollection(
        [Table("t", rows=ROWS, dim=dim)], [Feature(n, table="t") for n in names], backend=backend
    )
    optimizer = SGD(collection, lr=1.0)
    rows = collection.weight("t").clone().requires_grad_()
    ids = torch.randint(0, ROWS, (features, samples), generator=torch.Generator().manual_seed(2))
    lead, plain_lead = (torch.full((samples, dim), 0.5, requires_grad=True) for _ in range(2))
    weights, plain_weights = (torch.full((features, samples), 0.5, requires_grad=True) for _ in range(2))
    named = dict(zip(names, ids, strict=True))
    if room is None:
        loss(collection(Jagged.from_dict(named)).stack()).backward()
        loss(rows[ids.T]).backward()
    else:
        batch = Jagged.from_dict(named, dict(zip(names, weights, strict=True)))
        loss(collection(batch, room=room).stack(lead)).backward()
        loss(torch.cat([plain_lead[:, None], rows[ids.T] * plain_weights.T[:, :, None]], 1)).backward()
    optimizer.step()
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
    close(rows.detach() - collection.weight("t"), rows.grad)
    close(lead.grad, plain_lead.grad)
    close(weights.grad, plain_weights.grad)


@pytest.mark.parametrize("dtype", ["fp32", "int8"])
@pytest.mark.parametrize("make", [partial(SGD, momentum=0.9), Adam])
def test_a_step_behind_a_closed_gate_touches_nothing_and_is_not_counted(make, dtype):
    collection = EmbeddingCollection([Table("t", rows=ROWS, dim=16, dtype=dtype)], [Feature("f", table="t")])
    optimizer = make(collection, lr=1.0)

    def stepped(gate):
        collection(Jagged.from_dict({"f": torch.arange(5)}))["f"].sum().backward()
        optimizer.gate = gate
        optimizer.step()
        optimizer.gate = None
        return {name: t.clone() for of in optimizer.state_dict()["state"].values() for name, t in of.items()}

    first = stepped(None)
    rows = collection.weight("t").clone()
    again = stepped(torch.tensor(False))
    assert collection.weight("t").equal(rows)
    assert all(first[name].equal(again[name]) for name in first)
    assert int(again["step"]) == 1
    assert int(stepped(torch.tensor(True))["step"]) == 2
    assert not collection.weight("t").equal(rows)
