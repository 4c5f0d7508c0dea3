"""hotbed: row-wise AdaGrad on the tables, SGD on the MLPs; on one process, or distributed over ranks by a scheme."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks.kernels.limits import gather_limit, rows_by_matrix, scatter_limit
from benchmarks.peers.workloads import BOTTOM, DENSE_FEATURES, EPS, LR, TOP, Workload


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def tables(workload: Workload) -> list[hb.Table]:
    """Tables ``t0 …``."""
    sizes = zip(workload.names, workload.rows_of_each, strict=True)
    return [hb.Table(name, rows=rows, dim=workload.dim) for name, rows in sizes]


def features(workload: Workload) -> list[hb.Feature]:
    """One feature per table, of the same name."""
    return [hb.Feature(name, table=name) for name in workload.names]


def jagged(workload: Workload, ids: Tensor, weights: Tensor | None = None) -> hb.Jagged:
    """Ids of one batch; a new object, so they are checked again."""
    fixed = [workload.pooling] * workload.tables
    return hb.Jagged(workload.names, ids, batch_size=workload.batch, fixed=fixed, weights=weights)


def dlrm(workload: Workload) -> hb.nn.DLRM:
    """The model of all sides."""
    return hb.nn.DLRM(tables(workload), features(workload), DENSE_FEATURES, bottom=BOTTOM, top=TOP)


def distributed(make: Callable[[], nn.Module], scheme: str | None, per_shard_statistics: bool) -> Any:
    """What ``make`` makes, whole; or with a scheme this rank's part of it, without its ever being whole."""
    if scheme is None:
        return make()
    with torch.device("meta"):
        model = make()
    options = hb.ParallelOptions(per_shard_statistics=per_shard_statistics)
    return hb.distribute(model, scheme, options, device="cpu")


class Embedding:
    def __init__(self, workload: Workload, scheme: str | None = None, per_shard_statistics: bool = False) -> None:
        self.workload = workload
        self.collection = distributed(
            lambda: hb.EmbeddingCollection(tables(workload), features(workload)), scheme, per_shard_statistics
        )
        self.optimizer = hb.optim.RowWiseAdagrad(self.collection, lr=LR, eps=EPS)
        self.weights = workload.weights

    def prepare(self, ids: Tensor) -> hb.Jagged:
        return jagged(self.workload, ids, self.weights)

    def lookup(self, batch: hb.Jagged) -> Tensor:
        return self.collection(batch).stack()

    def update(self, pooled: Tensor, grad: Tensor) -> None:
        pooled.backward(grad)
        self.optimizer.step()

    def row_limit(self, batches: Sequence[Tensor]) -> tuple[float, float, float]:
        """Seconds in which this machine could look up and update the same rows in the same memory; bytes of both.

        Bytes are those of distinct rows, read once and read and written once with their moments, of vectors and of
        gradients. Medians over batches, at least six. The ways to gather take turns from batch to batch, because rows
        that one of them has just read are no longer cold for the other; the first time of each is left out, and the
        fastest counts.
        """
        w = self.workload
        (arena,) = self.collection._groups[0].arenas
        store = arena.store
        first_slots = torch.tensor([0, *w.rows_of_each[:-1]]).cumsum(0)[:, None]
        gathers: dict[int, list[float]] = defaultdict(list)
        scatters: list[float] = []
        nbytes: list[int] = []
        for i, ids in enumerate(batches):
            slots = (ids.view(w.tables, -1) + first_slots).flatten()
            parts = rows_by_matrix(store.rows, slots, w.pooling)
            ways = gather_limit(parts, w.pooling, nbytes=0).ways  # how many bytes is of interest on GPUs only
            (scatter,) = scatter_limit(parts, store.moments, nbytes=0).ways
            gathers[i % len(ways)].append(seconds(ways[i % len(ways)].move))
            scatters.append(seconds(scatter.move))
            nbytes.append(len(slots.unique()) * (3 * 4 * w.dim + 2 * 4) + 2 * w.batch * w.tables * 4 * w.dim)
        return min(median(times[1:]) for times in gathers.values()), median(scatters[1:]), median(nbytes)


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
