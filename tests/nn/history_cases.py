"""Batches with a user, a history of items and of shops, and candidates; and their vectors in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

import hotbed as hb
from hotbed.jagged import Jagged

from .parity import Weights, bags

TABLES = [hb.Table("users", 9, 4), hb.Table("items", 12, 8), hb.Table("shops", 5, 4)]
ITEM = hb.Feature("item", "items")
HISTORY = hb.Feature("history", "items", pooling="mean")
FEATURES = [hb.Feature("user", "users"), HISTORY, ITEM, hb.Feature("shop", "shops"), hb.Feature("visited", "shops")]


def batch(n: int = 7, *, dense: int = 0, longest: int = 4) -> hb.Batch:
    """Histories have 0, 1, … ids up to the longest, then 0 again."""
    draw = torch.Generator().manual_seed(0)

    def ragged(rows: int) -> list[list[int]]:
        return [torch.randint(0, rows, (i % (longest + 1),), generator=draw).tolist() for i in range(n)]

    ids = {
        "user": torch.randint(0, 9, (n,), generator=draw),
        "item": torch.randint(0, 12, (n,), generator=draw),
        "history": ragged(12),
        "shop": torch.randint(0, 5, (n,), generator=draw),
        "visited": ragged(5),
    }
    numbers = torch.randn(n, dense, generator=draw) if dense else None
    return hb.Batch(sparse=Jagged.from_dict(ids), dense=numbers)


def vectors(weights: Weights, of: hb.Batch, feature: str, table: str) -> list[Tensor]:
    """A feature's rows ``[j, D]``, for each sample."""
    weight = weights[f"embeddings.{table}"]
    return [weight[torch.tensor(bag, dtype=torch.int64)] for bag in bags(of, feature)]


def layer_norm(x: Tensor, weights: Weights, name: str) -> Tensor:
    """Rows with mean 0 and variance 1, times a weight, plus a bias."""
    centred = x - x.mean(-1, keepdim=True)
    normal = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return normal * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    """``x Wᵀ + b``."""
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
