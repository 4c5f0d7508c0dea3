"""Plain PyTorch: ``nn.EmbeddingBag(sparse=True)`` and ``torch.optim.SGD``, its fastest way to train tables on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from benchmarks.peers import hotbed_side
from benchmarks.peers.workloads import LR, Workload


class PlainLayers(nn.Module):
    """hotbed's DLRM without its tables, with its initial values, in modules of torch."""

    def __init__(self, model: hb.nn.DLRM) -> None:
        super().__init__()
        self.bottom, self.top = nn.Sequential(*model.bottom), nn.Sequential(*model.top)
        self.width = model.interaction.width
        vectors = len(model.embeddings.tables) + 1
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1))

    def forward(self, dense: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """Return logits ``[B, 1]`` from dense inputs and a vector ``[B, D]`` of each table."""
        hidden = self.bottom(dense)
        stacked = torch.stack([hidden, *vectors], 1)
        gram = torch.bmm(stacked, stacked.mT)
        flat = gram[:, self.pairs[0], self.pairs[1]]
        return self.top(F.pad(torch.cat([hidden, flat], 1), (0, self.width - hidden.shape[1] - flat.shape[1])))


class PlainDLRM(nn.Module):
    """hotbed's DLRM, with its initial values, in modules of torch."""

    def __init__(self, model: hb.nn.DLRM) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                model.embeddings.weight(name).clone(), freeze=False, mode="sum", sparse=True
            )
            for name in model.embeddings.tables
        )
        self.layers = PlainLayers(model)

    def forward(self, batch: hb.Batch) -> Tensor:
        size = len(batch)
        vectors = [bag(batch.sparse.values[i * size : (i + 1) * size].view(-1, 1)) for i, bag in enumerate(self.bags)]
        return self.layers(batch.dense, vectors)


class Embedding:
    """One module per table."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        bound = workload.rows**-0.5
        self.tables = nn.ModuleList(
            nn.EmbeddingBag.from_pretrained(
                torch.empty(workload.rows, workload.dim).uniform_(-bound, bound), freeze=False, mode="sum", sparse=True
            )
            for _ in workload.names
        )
        self.optimizer = torch.optim.SGD(self.tables.parameters(), lr=LR)

    def prepare(self, ids: Tensor) -> list[Tensor]:
        return list(ids.view(self.workload.tables, self.workload.batch, self.workload.pooling).unbind())

    def lookup(self, batch: list[Tensor]) -> Tensor:
        return torch.stack([table(ids) for table, ids in zip(self.tables, batch, strict=True)], 1)

    def update(self, pooled: Tensor, grad: Tensor) -> None:
        self.optimizer.zero_grad()
        pooled.backward(grad)
        self.optimizer.step()


class Step:
    """`PlainDLRM`, with sparse and dense SGD."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.model = PlainDLRM(hotbed_side.dlrm(workload))
        self.optimizers = [
            torch.optim.SGD(self.model.bags.parameters(), lr=LR),
            torch.optim.SGD(self.model.layers.parameters(), lr=LR),
        ]

    def prepare(self, ids: Tensor, dense: Tensor, labels: Tensor) -> hb.Batch:
        return hb.Batch(sparse=hotbed_side.jagged(self.workload, ids), dense=dense, labels=labels)

    def logits(self, batch: hb.Batch) -> Tensor:
        return self.model(batch)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
