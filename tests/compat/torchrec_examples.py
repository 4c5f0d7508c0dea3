"""Train as TorchRec's examples ``golden_training`` and ``retrieval`` do, with hotbed or with TorchRec itself.

    torchrun --nproc_per_node 2 -m tests.compat.torchrec_examples golden torchrec

prints the losses of a rank, one list per rank, in rank order. Calls are those of the examples; models and data are
small, and initial values are a function of their place, so that both libraries start equal.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ROWS, IDS, DIM, SAMPLES, STEPS = 2000, 40, 16, 8, 6  # TorchRec trains smaller tables as it trains dense parameters


def library(name: str) -> Any:
    """Return the names that the examples import, from TorchRec or hotbed."""
    if name == "hotbed":
        import hotbed.compat.torchrec

        return hotbed.compat.torchrec
    found: dict[str, Any] = {}
    for module, names in PLACES.items():
        imported = importlib.import_module(module)
        found |= {name: getattr(imported, name) for name in names}
    return SimpleNamespace(**found)


PLACES = {
    "torchrec": ("EmbeddingBagCollection", "EmbeddingBagConfig", "KeyedJaggedTensor", "Pipelineable"),
    "torchrec.distributed": ("TrainPipelineSparseDist",),
    "torchrec.distributed.embeddingbag": ("EmbeddingBagCollectionSharder",),
    "torchrec.distributed.model_parallel": ("DistributedModelParallel",),
    "torchrec.inference.state_dict_transform": ("state_dict_gather", "state_dict_to_device"),
    "torchrec.optim.keyed": ("KeyedOptimizerWrapper",),
    "torchrec.optim.optimizers": ("in_backward_optimizer_filter",),
    "torchrec.optim.rowwise_adagrad": ("RowWiseAdagrad",),
}
"""Where TorchRec's examples import their names from."""


@dataclass
class Batch:
    dense: Tensor
    sparse: Any
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        moved = self.sparse.to(device, non_blocking=non_blocking)
        return Batch(self.dense.to(device), moved, self.labels.to(device))

    def record_stream(self, stream: Any) -> None:
        self.sparse.record_stream(stream)

    def pin_memory(self) -> Batch:
        return self


def batches(lib: Any, keys: list[str], rank: int) -> Iterator[Batch]:
    """Yield batches with one id per feature, as TorchRec's random datasets do."""
    lib.Pipelineable.register(Batch)
    random = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = torch.randint(IDS, (len(keys) * SAMPLES,), generator=random)
        sparse = lib.KeyedJaggedTensor(keys=keys, values=ids, lengths=torch.ones(len(ids), dtype=torch.int32))
        labels = torch.randint(2, (SAMPLES,), generator=random)
        yield Batch(torch.rand(SAMPLES, 4, generator=random), sparse, labels)


def placed(shape: Any, salt: int) -> Tensor:
    """Return values that are a function of their place."""
    return (
        torch.sin(torch.arange(torch.Size(shape).numel(), dtype=torch.float64) * (1 + salt) * 0.7).view(shape).float()
        / 4
    )


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Fill parameters and tables, wherever their rows are."""
    state = model.state_dict()
    whole: dict[str, Tensor] = {}
    for salt, name in enumerate(sorted(state)):
        values = placed(state[name].size(), salt)
        if hasattr(state[name], "local_shards"):
            for shard in state[name].local_shards():
                start, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(values[start[0] : start[0] + size[0], start[1] : start[1] + size[1]])
            values = state[name]
        whole[name] = values
    model.load_state_dict(whole)


class Dlrm(nn.Module):
    """A small DLRM with its loss."""

    def __init__(self, collection: nn.Module, features: list[str]) -> None:
        super().__init__()
        self.sparse_arch = collection
        self.features = features
        self.dense_arch = nn.Sequential(nn.Linear(4, DIM), nn.ReLU())
        self.over_arch = nn.Sequential(nn.Linear(DIM + len(features) + 1, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        dense = self.dense_arch(batch.dense)
        pooled = self.sparse_arch(batch.sparse)
        vectors = torch.stack([dense, *[pooled[name] for name in self.features]], dim=1)
        dots = torch.bmm(vectors, vectors.sum(1, keepdim=True).transpose(1, 2)).squeeze(2)
        logits = self.over_arch(torch.cat([dense, dots], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach())


class TwoTower(nn.Module):
    """A small two-tower model with its loss."""

    def __init__(self, collection: nn.Module, features: list[str]) -> None:
        super().__init__()
        self.ebc = collection
        self.features = features
        self.query_proj = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 8))
        self.candidate_proj = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, 8))

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        pooled = self.ebc(batch.sparse)
        query = self.query_proj(torch.cat([pooled[self.features[0]]], dim=1))
        candidate = self.candidate_proj(torch.cat([pooled[self.features[1]]], dim=1))
        logits = (query * candidate).sum(dim=1).squeeze()
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach())


def tables(lib: Any, names: list[str]) -> list[Any]:
    return [
        lib.EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in names
    ]


def apply_by_torch(*args: Any) -> None:
    with warnings.catch_warnings():  # torch.jit.script, which torch itself calls there, is deprecated
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(*args)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.1)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def golden(lib: Any, rank: int) -> list[float]:
    """Train a DLRM by AdaGrad: row-wise in backward for tables, and another one for the rest."""
    device, names = torch.device("cpu"), ["a", "b", "c"]
    collection = lib.EmbeddingBagCollection(tables=tables(lib, names), device=torch.device("meta"))
    train_model = Dlrm(collection, names)
    apply_by_torch(lib.RowWiseAdagrad, train_model.sparse_arch.parameters(), {"lr": 0.1})
    sharder = lib.EmbeddingBagCollectionSharder(qcomm_codecs_registry=None)
    model = lib.DistributedModelParallel(module=train_model, device=device, sharders=[sharder])
    fill(model)
    dense = dict(lib.in_backward_optimizer_filter(model.named_parameters()))
    optimizer = lib.KeyedOptimizerWrapper(dense, adagrad)
    pipeline = lib.TrainPipelineSparseDist(model, optimizer, device)
    data = iter(batches(lib, names, rank))
    return [float(pipeline.progress(data)[0]) for _ in range(STEPS)]


def two_tower(lib: Any, rank: int) -> list[float]:
    """Train a two-tower model until its data end, gather it on the host and look items up there."""
    device, names = torch.device("cpu"), ["userId", "movieId"]
    configs = tables(lib, names)
    task = TwoTower(lib.EmbeddingBagCollection(tables=configs, device=torch.device("meta")), names)
    apply_by_torch(lib.RowWiseAdagrad, task.ebc.parameters(), {"lr": 0.01})
    model = lib.DistributedModelParallel(module=task, device=device)
    fill(model)
    optimizer = lib.KeyedOptimizerWrapper(dict(model.named_parameters()), adam)
    pipeline = lib.TrainPipelineSparseDist(model, optimizer, device)
    data, losses = iter(batches(lib, names, rank)), []
    for _ in range(2 * STEPS):
        try:
            losses.append(float(pipeline.progress(data)[0]))
        except StopIteration:
            break
    group = dist.new_group(backend="gloo")
    state = lib.state_dict_to_device(model.state_dict(), pg=group, device=torch.device("cpu"))
    task_cpu = TwoTower(lib.EmbeddingBagCollection(tables=configs, device=torch.device("meta")), names)
    if rank == 0:
        task_cpu = task_cpu.to_empty(device="cpu")
    lib.state_dict_gather(state, task_cpu.state_dict())
    dist.barrier()
    if rank == 0:
        lengths = torch.tensor([0] * ROWS + [1] * ROWS)
        items = lib.KeyedJaggedTensor(keys=names, values=torch.arange(ROWS), lengths=lengths)
        with torch.no_grad():
            losses.append(float(task_cpu.candidate_proj(task_cpu.ebc(items)[names[1]]).square().mean()))
    return losses


EXAMPLES = {"golden": golden, "two_tower": two_tower}


def main(example: str, name: str) -> None:
    """Train an example over the processes of torchrun, and print the losses of all ranks."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, EXAMPLES[example](library(name), rank))
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
