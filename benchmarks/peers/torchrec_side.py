"""TorchRec: embedding bags, or its DLRM, under ``DistributedModelParallel``.

Tables become FBGEMM's operators with row-wise AdaGrad in backward, and the MLPs are trained by SGD. One process is
planned and sharded by default. Several processes shard all tables by one scheme. As in TorchRec's Criteo
loader, each batch is a new ``KeyedJaggedTensor`` with its lengths and offsets, so that a step computes none of them.

TorchRec divides the gradients of embeddings by the number of ranks after the exchange
(``comm_ops.GRADIENT_DIVISION``), and hotbed divides in its update. ``tests/compat/test_torchrec_examples.py`` checks
that both compute the same numbers in one and two processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.peers.workloads import BOTTOM, DENSE_FEATURES, EPS, LR, TOP, Workload


def bags(tables: Mapping[str, tuple[int, int]], lr: float, eps: float) -> EmbeddingBagCollection:
    """Return a collection on ``meta`` from rows and dim of each table. Each table has one feature of the same name."""
    collection = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
            for name, (rows, dim) in tables.items()
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": lr, "eps": eps})
    return collection


def distributed(
    model: nn.Module, collection: EmbeddingBagCollection, tables: Sequence[str], path: str, scheme: str | None
) -> DistributedModelParallel:
    """Shard the model by TorchRec's default plan, or all tables of the collection at ``path`` by ``scheme``.

    With ``table``, each rank has the same number of consecutive tables, so that pooled vectors keep the order of
    features.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plan: ShardingPlan | None = None
    if scheme is not None:
        ranks = dist.get_world_size()
        of_table = {
            "table": lambda i: table_wise(rank=i * ranks // len(tables)),
            "row": lambda i: row_wise(),
            "column": lambda i: column_wise(ranks=list(range(ranks))),
        }[scheme]
        generators = {name: of_table(i) for i, name in enumerate(tables)}
        options = {"local_size": ranks, "world_size": ranks, "device_type": "cpu"}
        plan = ShardingPlan({path: construct_module_sharding_plan(collection, generators, **options)})
        kernels = {sharding.compute_kernel for sharding in plan.plan[path].values()}
        if kernels != {"fused"}:
            raise RuntimeError(f"TorchRec plans {kernels} where the optimizer works in backward, must be fused")
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan)


def same_every_batch(names: Sequence[str], batch: int, pooling: int) -> dict[str, Any]:
    """Return the arguments of ``KeyedJaggedTensor`` that are equal in all batches."""
    size = batch * pooling
    return {
        "keys": list(names),
        "lengths": torch.full((len(names) * batch,), pooling),
        "offsets": torch.arange(0, len(names) * size + 1, pooling),
        "stride": batch,
        "length_per_key": [size] * len(names),
        "offset_per_key": [i * size for i in range(len(names) + 1)],
        "index_per_key": {name: i for i, name in enumerate(names)},
    }


class _Side:
    """Tables of a workload, and its batches."""

    def __init__(self, workload: Workload) -> None:
        w = workload
        self.constants = same_every_batch(w.names, w.batch, w.pooling)
        self.tables = bags(dict.fromkeys(w.names, (w.rows, w.dim)), LR, EPS)

    def ids(self, ids: Tensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(values=ids, **self.constants)


class Embedding(_Side):
    def __init__(self, workload: Workload, scheme: str | None = None) -> None:
        super().__init__(workload)
        self.model = distributed(self.tables, self.tables, workload.names, "", scheme)

    def prepare(self, ids: Tensor) -> KeyedJaggedTensor:
        return self.ids(ids)

    def lookup(self, batch: KeyedJaggedTensor) -> Tensor:
        return self.model(batch).values()

    def update(self, pooled: Tensor, grad: Tensor) -> None:
        pooled.backward(grad.flatten(1))


class Step(_Side):
    def __init__(self, workload: Workload, scheme: str | None = None) -> None:
        super().__init__(workload)
        model = DLRM(self.tables, DENSE_FEATURES, [*BOTTOM], [*TOP])
        path = "sparse_arch.embedding_bag_collection"
        self.model = distributed(model, self.tables, workload.names, path, scheme)
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.SGD(parameters, lr=LR),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])

    def prepare(self, ids: Tensor, dense: Tensor, labels: Tensor) -> tuple[Tensor, KeyedJaggedTensor]:
        return dense, self.ids(ids)

    def logits(self, batch: tuple[Tensor, KeyedJaggedTensor]) -> Tensor:
        return self.model(*batch)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def update(self) -> None:
        self.optimizer.step()
