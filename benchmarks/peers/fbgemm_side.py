"""FBGEMM's table-batched embeddings on the CPU: exact row-wise AdaGrad, fused into backward.

The wheel of 1.8.0 is compiled without OpenMP (no library in it refers to a ``GOMP`` symbol), so ``at::parallel_for``
inside it is a plain loop: lookup and update use one thread.
"""

from __future__ import annotations

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    OptimType,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from benchmarks.peers.workloads import EPS, LR, Workload


class Embedding:
    """All tables in one operator; ids and offsets are int64, its default."""

    def __init__(self, workload: Workload) -> None:
        where = (EmbeddingLocation.HOST, ComputeDevice.CPU)
        self.tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(workload.rows, workload.dim, *where) for _ in workload.names],
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=LR,
            eps=EPS,
        )
        for table in self.tables.split_embedding_weights():
            table.uniform_(-(len(table) ** -0.5), len(table) ** -0.5)
        self.workload = workload

    def prepare(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids, torch.arange(0, len(ids) + 1, self.workload.pooling)

    def lookup(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return self.tables(*batch)

    def update(self, pooled: Tensor, grad: Tensor) -> None:
        pooled.backward(grad.flatten(1))
