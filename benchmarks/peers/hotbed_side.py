"""hotbed with row-wise AdaGrad on the tables and SGD on the MLPs, in one process or distributed by a scheme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks.peers.workloads import BOTTOM, DENSE_FEATURES, EPS, LR, TOP, Workload


def specs(workload: Workload) -> tuple[list[hb.Table], list[hb.Feature]]:
    """Return tables ``t0 …``, and one feature of the same name for each."""
    tables = [hb.Table(name, rows=workload.rows, dim=workload.dim) for name in workload.names]
    return tables, [hb.Feature(name, table=name) for name in workload.names]


def jagged(workload: Workload, ids: Tensor) -> hb.Jagged:
    """Return the ids of one batch as a new object, so they are checked again."""
    fixed = [workload.pooling] * workload.tables
    return hb.Jagged(workload.names, ids, batch_size=workload.batch, fixed=fixed)


def dlrm(workload: Workload) -> hb.nn.DLRM:
    return hb.nn.DLRM(*specs(workload), DENSE_FEATURES, bottom=BOTTOM, top=TOP)


def distributed(make: Callable[[], nn.Module], scheme: str | None, per_shard_statistics: bool) -> Any:
    """Return a model, or with a scheme this rank's part of it, which is never made as a whole."""
    if scheme is None:
        return make()
    with torch.device("meta"):
        model = make()
    options = hb.ParallelOptions(per_shard_statistics=per_shard_statistics)
    return hb.distribute(model, scheme, options, device="cpu")


class Embedding:
    def __init__(self, workload: Workload, scheme: str | None = None, per_shard_statistics: bool = False) -> None:
        self.workload = workload
        self.collection = distributed(lambda: hb.EmbeddingCollection(*specs(workload)), scheme, per_shard_statistics)
        self.optimizer = hb.optim.RowWiseAdagrad(self.collection, lr=LR, eps=EPS)

    def prepare(self, ids: Tensor) -> hb.Jagged:
        return jagged(self.workload, ids)

    def lookup(self, batch: hb.Jagged) -> Tensor:
        return self.collection(batch).stack()

    def update(self, pooled: Tensor, grad: Tensor) -> None:
        pooled.backward(grad)
        self.optimizer.step()


class Step:
    def __init__(self, workload: Workload, scheme: str | None = None, per_shard_statistics: bool = False) -> None:
        self.workload = workload
        self.model = distributed(lambda: dlrm(workload), scheme, per_shard_statistics)
        self.sparse = hb.optim.RowWiseAdagrad(self.model, lr=LR, eps=EPS)
        self.dense = torch.optim.SGD(self.model.parameters(), lr=LR)

    def prepare(self, ids: Tensor, dense: Tensor, labels: Tensor) -> hb.Batch:
        return hb.Batch(sparse=jagged(self.workload, ids), dense=dense, labels=labels)

    def logits(self, batch: hb.Batch) -> Tensor:
        return self.model(batch)

    def zero_grad(self) -> None:
        self.dense.zero_grad()
        self.sparse.zero_grad()

    def update(self) -> None:
        self.dense.step()
        self.sparse.step()
