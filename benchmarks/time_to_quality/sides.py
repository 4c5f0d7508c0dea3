"""Train the model of a log in one process by hotbed, plain PyTorch or TorchRec, each with a loop as its users write it.

All sides start with equal tables up to their seeds, and use Adam for the layers and AdaGrad for the tables: row-wise,
except plain PyTorch, which has it only per element. Everything is float32 except the layers of `HotbedBf16`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from benchmarks.peers.plain_side import PlainDLRM
from benchmarks.time_to_quality.logs import Log, Samples

EPS = 1e-10


class Rates(NamedTuple):
    """Learning rates of the layers and of the tables."""

    layers: float
    tables: float


class Point(NamedTuple):
    """Test logloss after so many samples and seconds of training."""

    samples: int
    seconds: float
    logloss: float


def curve(side: Any, log: Log) -> list[Point]:
    """Train a side once through a log, and test it between batches. Tests are not timed."""
    points: list[Point] = []
    samples, seconds = 0, 0.0
    for start in range(0, len(log.train), log.every):
        stop = min(start + log.every, len(log.train))
        begun = time.perf_counter()
        side.train(start, stop)
        seconds += time.perf_counter() - begun
        samples += sum(map(len, log.train[start:stop]))
        points.append(Point(samples, seconds, logloss(side, log.test)))
    return points


@torch.no_grad()
def logloss(side: Any, test: Sequence[Samples]) -> float:
    logits = torch.cat([side.logits(batch).double() for batch in test])
    return F.binary_cross_entropy_with_logits(logits, torch.cat([batch.labels for batch in test]).double()).item()


class _OneProcess:
    """Steps of a model that takes hotbed's batches."""

    log: Log
    model: nn.Module
    optimizers: Sequence[Any]

    def logits(self, batch: Samples) -> Tensor:
        sparse = hb.Jagged(self.log.names, batch.ids.view(-1), batch_size=len(batch))
        return self.model(hb.Batch(sparse=sparse, dense=batch.dense))

    def train(self, start: int, stop: int) -> None:
        for batch in self.log.train[start:stop]:
            loss = F.binary_cross_entropy_with_logits(self.logits(batch), batch.labels)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()


class Hotbed(_OneProcess):
    """hotbed's DLRM and row-wise AdaGrad."""

    def __init__(self, log: Log, rates: Rates, seed: int) -> None:
        self.log, self.model = log, log.dlrm(seed)
        self.optimizers = (
            torch.optim.Adam(self.model.parameters(), lr=rates.layers, fused=True),
            hb.optim.RowWiseAdagrad(self.model, lr=rates.tables),
        )


class HotbedBf16(Hotbed):
    """hotbed with layers under autocast to bf16."""

    def logits(self, batch: Samples) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().logits(batch).float()


class Plain(_OneProcess):
    """PyTorch's model of ``nn.EmbeddingBag(sparse=True)``, trained by ``torch.optim.Adagrad``."""

    def __init__(self, log: Log, rates: Rates, seed: int) -> None:
        torch.sparse.check_sparse_tensor_invariants.disable()  # otherwise torch warns
        self.log, self.model = log, PlainDLRM(log.dlrm(seed))
        self.optimizers = (
            torch.optim.Adam(self.model.layers.parameters(), lr=rates.layers, fused=True),
            torch.optim.Adagrad(self.model.bags.parameters(), lr=rates.tables),
        )


class TorchRec(_OneProcess):
    """TorchRec's DLRM, planned by default, with row-wise AdaGrad in backward."""

    def __init__(self, log: Log, rates: Rates, seed: int) -> None:
        load: Callable[[str], Any] = importlib.import_module
        theirs, peer = load("torchrec"), load("benchmarks.peers.torchrec_side")
        keyed, filters = load("torchrec.optim.keyed"), load("torchrec.optim.optimizers")
        self.log = log
        torch.manual_seed(seed)
        tables = {name: (rows, log.dim) for name, rows in zip(log.names, log.rows, strict=True)}
        bags = peer.bags(tables, rates.tables, EPS)
        made: nn.Module = load("torchrec.models.dlrm").DLRM(bags, log.dense, [*log.bottom], [*log.top])
        self.model = peer.distributed(made, bags, log.names, "sparse_arch.embedding_bag_collection", None)
        layers = dict(filters.in_backward_optimizer_filter(self.model.named_parameters()))
        adam = keyed.KeyedOptimizerWrapper(layers, lambda of: torch.optim.Adam(of, lr=rates.layers, fused=True))
        self.optimizers = (keyed.CombinedOptimizer([self.model.fused_optimizer, adam]),)
        self.ids = theirs.KeyedJaggedTensor
        self.constants = {len(b): peer.same_every_batch(log.names, len(b), 1) for b in [*log.train, *log.test]}

    def logits(self, batch: Samples) -> Tensor:
        return self.model(batch.dense, self.ids(values=batch.ids.view(-1), **self.constants[len(batch)]))
