"""Make models plain PyTorch: ``nn.Embedding`` with sparse gradients for the tables, ``nn.Linear``, padded histories.

The layers between are those of ``hotbed.nn``, which are torch's, so the formula is the same; what differs is what
hotbed has of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

import hotbed as hb
from hotbed.embed import EmbeddingCollection
from hotbed.nn.linear import Linear

Padded = tuple[Tensor, Tensor]
"""Ids ``[B, L]``, and a mask that is set where there is one."""


@dataclass(frozen=True)
class PlainBatch:
    """What a model reads of a batch: single ids ``[B]`` and padded histories by feature, dense inputs."""

    sparse: dict[str, Tensor | Padded]
    dense: Tensor | None


def plain_batch(batch: hb.Batch, length: int) -> PlainBatch:
    """Pad the histories of a batch to a length, oldest ids first."""
    ids: dict[str, Tensor | Padded] = {}
    for name in batch.sparse.names:
        bags = batch.sparse[name]
        if bags.offsets is None:
            ids[name] = bags.values
            continue
        mask = torch.arange(length) < bags.lengths()[:, None]
        padded = torch.zeros(mask.shape, dtype=bags.values.dtype)
        padded[mask] = bags.values
        ids[name] = padded, mask
    return PlainBatch(ids, batch.dense)


def plain(model: nn.Module) -> nn.Module:
    """A copy of a model with the same values."""
    made = copy.deepcopy(model)
    _replace(made)
    return made


def _replace(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, EmbeddingCollection):
            setattr(module, name, PlainTables(child))
        elif isinstance(child, Linear):
            linear = nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
            linear.load_state_dict(child.state_dict())
            setattr(module, name, linear)
        else:
            _replace(child)


class PlainTables(nn.Module):
    """An embedding for each table of a collection."""

    def __init__(self, collection: EmbeddingCollection) -> None:
        super().__init__()
        self.number = {name: i for i, name in enumerate(collection.tables)}
        self.of = {feature.name: self.number[feature.table] for feature in collection.features}
        weights = (collection.weight(name).detach().clone() for name in collection.tables)
        self.tables = nn.ModuleList([nn.Embedding.from_pretrained(w, freeze=False, sparse=True) for w in weights])

    @override
    def forward(self, ids: dict[str, Any]) -> Found:
        """Look up the rows of all ids, also of those that are padding."""
        return Found(self, ids)


class Found:
    """Vectors of a batch, as models ask for them."""

    def __init__(self, tables: PlainTables, ids: dict[str, Any]) -> None:
        self.tables, self.ids = tables, ids

    def __getitem__(self, name: str) -> Tensor:
        return self._look_up(name, self.ids[name])

    def padded(self, name: str) -> tuple[Tensor, Tensor]:
        """``[B, L, D]``, 0 where there is no id, and the mask."""
        ids, mask = self.ids[name]
        return self._look_up(name, ids) * mask[:, :, None], mask

    def concatenate(self) -> Tensor:
        """``[B, ΣD]``."""
        return torch.cat([self[name] for name in self.tables.of], dim=1)

    def _look_up(self, name: str, ids: Tensor) -> Tensor:
        return self.tables.tables[self.tables.of[name]](ids)
