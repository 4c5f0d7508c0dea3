"""Compare a model with the same formula in plain PyTorch: logits, and the gradients of everything that it trains."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from hotbed.batch import Batch
from hotbed.embed import collections_of

Weights = dict[str, Tensor]
"""Parameters by their names, tables as ``collection.table``; float64."""


def assert_parity(model: nn.Module, plain: Callable[[Weights, Batch], Tensor], batch: Batch) -> None:
    """Assert that logits and gradients differ from those of the formula, in float64, by no more than 1e-6."""
    spread(model)
    weights = {name: p.detach().double() for name, p in model.named_parameters()}
    for path, collection in collections_of(model).items():
        weights |= {f"{path}.{table}": collection.weight(table).detach().double() for table in collection.tables}
    weights = {name: w.clone().requires_grad_() for name, w in weights.items()}
    expected = plain(weights, batch)
    logits = model(batch)
    assert logits.shape == expected.shape and logits.dtype == torch.float32
    assert expected.std() > 0.01, "all samples have nearly the same logit"
    torch.testing.assert_close(logits.double(), expected, rtol=1e-6, atol=1e-6)
    target = torch.arange(len(batch)).remainder(2)[:, None].expand_as(logits)
    F.binary_cross_entropy_with_logits(expected, target.double()).backward()
    optimizer = hb.optim.SGD(model, lr=1.0)
    F.binary_cross_entropy_with_logits(logits, target.float()).backward()
    optimizer.step()
    found = {name: p.grad for name, p in model.named_parameters()}
    for path, collection in collections_of(model).items():
        for table in collection.tables:
            found[f"{path}.{table}"] = weights[f"{path}.{table}"].detach() - collection.weight(table)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        gradient, own = weight.grad, found[name]
        assert gradient is not None and own is not None, f"{name} has no gradient"
        assert bool(gradient.any()), f"the gradient of {name} is 0"
        torch.testing.assert_close(own.double(), gradient, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def spread(model: nn.Module) -> None:
    """Draw all values anew, so that no term is 0 or tiny, nor any gradient only because of that."""
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, 0.4, generator=draw))
    for collection in collections_of(model).values():
        for table in collection.tables:
            weight = collection.weight(table)
            weight.copy_(torch.empty(weight.shape).normal_(0.0, 0.5, generator=draw))


def mlp(x: Tensor, weights: Weights, name: str, layers: int) -> Tensor:
    """An MLP with ReLU between its layers."""
    for i in range(layers):
        x = x @ weights[f"{name}.{2 * i}.weight"].T + weights[f"{name}.{2 * i}.bias"]
        x = x.relu() if i < layers - 1 else x
    return x


def bags(batch: Batch, feature: str) -> list[list[int]]:
    """A feature's ids, as a list for each sample."""
    ids = batch.sparse[feature]
    ends = ids.lengths().cumsum(0).tolist()
    return [ids.values[start:end].tolist() for start, end in zip([0, *ends], ends, strict=False)]


def pooled(batch: Batch, feature: str, table: Tensor) -> Tensor:
    """Sums of rows ``[B, D]``."""
    return torch.stack([table[torch.tensor(bag, dtype=torch.int64)].sum(0) for bag in bags(batch, feature)])
