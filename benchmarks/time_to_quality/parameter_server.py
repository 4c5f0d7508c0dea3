"""Train the model of a log by an asynchronous parameter server of ``torch.distributed.rpc``.

Theory of operation::

    trainer 0   ids of the next batch ──► server: rows of all tables, their moments, and the center of the layers
    trainer 1   ◄── rows; gradients ──►           (no locks)

Each trainer has a replica of the layers and its own Adam. While it computes a batch, the rows of the next batch and
the gradients of the last one are sent. Every `PERIOD` batches, a replica and the center move towards each other by
`PULL` over the number of trainers (elastic averaging: Zhang, Choromanska and LeCun, 2015). Recommendation models were
trained like this on CPUs before synchronous training on GPUs. Tables, layers and tests are equal on all sides.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.peers.plain_side import PlainLayers
from benchmarks.time_to_quality.logs import Samples, load
from benchmarks.time_to_quality.sides import EPS, Rates

PERIOD, PULL = 8, 0.9
BEHIND = 2  # batches whose gradients may be on the way to the server


class Server:
    """All tables as one, and the center of the layers."""

    def __init__(self, path: Path, rates: Rates, seed: int, trainers: int) -> None:
        log = load(path)
        model = log.dlrm(seed)
        self.first = torch.tensor([0, *accumulate(log.rows[:-1])])[:, None]
        self.rows = torch.cat([model.embeddings.weight(name).detach() for name in log.names])
        self.moments = torch.zeros(len(self.rows))
        self.rate, self.pull = rates.tables, PULL / trainers
        self.layers = PlainLayers(model)
        self.center = parameters_to_vector(self.layers.parameters()).detach()
        self.averaging = threading.Lock()

    def look_up(self, ids: Tensor) -> Tensor:
        return self.rows[ids + self.first]

    def update(self, ids: Tensor, gradients: Tensor) -> None:
        rows, at = torch.unique(ids + self.first, return_inverse=True)
        summed = torch.zeros(len(rows), gradients.shape[-1]).index_add_(0, at.view(-1), gradients.flatten(0, 1))
        moments = self.moments[rows] + summed.square().mean(1)
        self.moments[rows] = moments
        self.rows.index_add_(0, rows, summed / (moments.sqrt() + EPS)[:, None], alpha=-self.rate)

    def average(self, replica: Tensor) -> Tensor:
        """Move the center towards a replica, and return the change of the replica."""
        with self.averaging:
            difference = (replica - self.center) * self.pull
            self.center += difference
            return difference

    @torch.no_grad()
    def logits(self, batch: Samples) -> Tensor:
        vector_to_parameters(self.center, self.layers.parameters())
        return self.layers(batch.dense, self.look_up(batch.ids).unbind())


class Trainer:
    """A replica of the layers, and its share of the batches: every n-th, beginning with the one of its number."""

    def __init__(self, log: Path, rates: Rates, seed: int, server: Any, number: int, trainers: int) -> None:
        self.log, self.number, self.trainers = load(log), number, trainers
        self.server, self.layers, self.steps = server, PlainLayers(self.log.dlrm(seed)), 0
        self.adam = torch.optim.Adam(self.layers.parameters(), lr=rates.layers, fused=True)

    def train(self, start: int, stop: int) -> None:
        """Take a step for each batch, and wait until the server has all gradients."""
        batches = self.log.train[start + self.number : stop : self.trainers]
        server = self.server.rpc_async()
        coming = server.look_up(batches[0].ids) if batches else None
        sent: list[Any] = []
        for batch, following in zip_longest(batches, batches[1:]):
            rows = coming.wait().requires_grad_()
            coming = server.look_up(following.ids) if following is not None else None
            self.adam.zero_grad()
            F.binary_cross_entropy_with_logits(self.layers(batch.dense, rows.unbind()), batch.labels).backward()
            sent.append(server.update(batch.ids, rows.grad))
            self.adam.step()
            self._average()
            if len(sent) > BEHIND:
                sent.pop(0).wait()
        for of in sent:
            of.wait()

    @torch.no_grad()
    def _average(self) -> None:
        self.steps += 1
        if self.steps % PERIOD == 0:
            replica = parameters_to_vector(self.layers.parameters())
            replica -= self.server.rpc_sync().average(replica)
            vector_to_parameters(replica, self.layers.parameters())


class ParameterServer:
    """A server and trainers as a side: this process tells them what to do. See `running`."""

    def __init__(self, log: Path, rates: Rates, seed: int, trainers: int) -> None:
        self.server = rpc.remote("server", Server, (log, rates, seed, trainers))
        self.trainers = [
            rpc.remote(f"trainer{i}", Trainer, (log, rates, seed, self.server, i, trainers)) for i in range(trainers)
        ]
        self.train(0, 0)  # returns where all have been made

    def train(self, start: int, stop: int) -> None:
        for done in [trainer.rpc_async(timeout=0).train(start, stop) for trainer in self.trainers]:
            done.wait()

    def logits(self, batch: Samples) -> Tensor:
        return self.server.rpc_sync(timeout=0).logits(batch)


@contextmanager
def running(log: Path, rates: Rates, seed: int, trainers: int) -> Generator[ParameterServer]:
    """Start a server and trainers as processes of one thread each, and end them."""
    names = ["driver", "server", *(f"trainer{i}" for i in range(trainers))]
    with TemporaryDirectory() as folder:
        processes = torch.multiprocessing.start_processes(
            _process, (names, folder), nprocs=len(names) - 1, join=False, start_method="spawn"
        )
        _start(0, names, folder)
        yield ParameterServer(log, rates, seed, trainers)
        rpc.shutdown()
        while not processes.join():
            pass


def _start(rank: int, names: Sequence[str], folder: str) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/meet", rpc_timeout=300)
    rpc.init_rpc(names[rank], rank=rank, world_size=len(names), rpc_backend_options=options)


def _process(index: int, names: Sequence[str], folder: str) -> None:
    _start(index + 1, names, folder)
    rpc.shutdown()
