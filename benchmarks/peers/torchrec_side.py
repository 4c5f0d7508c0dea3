"""TorchRec: its DLRM under ``DistributedModelParallel``, one process, planned and sharded as by default.

Tables become one FBGEMM operator with row-wise AdaGrad fused into backward; the MLPs are trained by SGD. Batches are
what TorchRec's own Criteo loader makes: a new ``KeyedJaggedTensor`` per batch that brings its lengths, offsets and
places of keys along, so none of them is computed in the step.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.peers.workloads import BOTTOM, DENSE_FEATURES, EPS, LR, TOP, Workload


class Step:
    def __init__(self, workload: Workload) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        collection = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, embedding_dim=workload.dim, num_embeddings=workload.rows, feature_names=[name]
                )
                for name in workload.names
            ],
            device=torch.device("meta"),
        )
        model = DLRM(collection, DENSE_FEATURES, [*BOTTOM], [*TOP])
        apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": LR, "eps": EPS})
        self.model = DistributedModelParallel(model, device=torch.device("cpu"))
        dense = KeyedOptimizerWrapper(
            dict(in_backward_optimizer_filter(self.model.named_parameters())),
            lambda parameters: torch.optim.SGD(parameters, lr=LR),
        )
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, dense])
        w = workload
        self.constants = {
            "keys": w.names,
            "lengths": torch.ones(w.tables * w.batch, dtype=torch.int64),
            "offsets": torch.arange(w.tables * w.batch + 1),
            "stride": w.batch,
            "length_per_key": [w.batch] * w.tables,
            "offset_per_key": [i * w.batch for i in range(w.tables + 1)],
            "index_per_key": {name: i for i, name in enumerate(w.names)},
        }

    def prepare(self, ids: Tensor, dense: Tensor, labels: Tensor) -> tuple[Tensor, KeyedJaggedTensor]:
        return dense, KeyedJaggedTensor(values=ids, **self.constants)

    def logits(self, batch: tuple[Tensor, KeyedJaggedTensor]) -> Tensor:
        return self.model(*batch)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def update(self) -> None:
        self.optimizer.step()
