"""hotbed: row-wise AdaGrad on the tables, SGD on the MLPs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import hotbed as hb
from benchmarks.peers.workloads import BOTTOM, DENSE_FEATURES, EPS, LR, TOP, Workload
from benchmarks.row_limit import row_limit_seconds


def tables(workload: Workload) -> list[hb.Table]:
    """Tables ``t0 …``."""
    return [hb.Table(name, rows=workload.rows, dim=workload.dim) for name in workload.names]


def features(workload: Workload) -> list[hb.Feature]:
    """One feature per table, of the same name."""
    return [hb.Feature(name, table=name) for name in workload.names]


def jagged(workload: Workload, ids: Tensor) -> hb.Jagged:
    """Ids of one batch; a new object, so they are checked again."""
    return hb.Jagged(workload.names, ids, batch_size=workload.batch, fixed=[workload.pooling] * workload.tables)


def dlrm(workload: Workload) -> hb.nn.DLRM:
    """The model of all sides."""
    return hb.nn.DLRM(tables(workload), features(workload), DENSE_FEATURES, bottom=BOTTOM, top=TOP)


class Embedding:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.collection = hb.EmbeddingCollection(tables(workload), features(workload))
        self.optimizer = hb.optim.RowWiseAdagrad(self.collection, lr=LR, eps=EPS)

    def prepare(self, ids: Tensor) -> hb.Jagged:
        return jagged(self.workload, ids)

    def lookup(self, batch: hb.Jagged) -> Tensor:
        return self.collection(batch).stack()

    def update(self, pooled: Tensor, grad: Tensor) -> None:
        pooled.backward(grad)
        self.optimizer.step()

    def row_limit(self, batches: Sequence[Tensor], grad: Tensor) -> tuple[float, float]:
        """What the machine could do with the same rows in the same memory; see `row_limit_seconds`."""
        w = self.workload
        views = [self.collection.weight(name) for name in w.names]
        first_slots = [(view.data_ptr() - views[0].data_ptr()) // (4 * w.dim) for view in views]
        if first_slots != [i * w.rows for i in range(w.tables)]:
            raise RuntimeError("the tables are not one after the other in memory, so there is no arena to measure")
        arena = torch.as_strided(views[0], (w.tables * w.rows, w.dim), (w.dim, 1))
        base = torch.tensor(first_slots)[:, None, None]
        slots = [(ids.view(w.tables, w.batch, w.pooling) + base).transpose(0, 1).flatten() for ids in batches]
        return row_limit_seconds(arena, slots, grad.flatten(0, 1))


class Step:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.model = dlrm(workload)
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
