"""Time training steps of small DLRMs between real processes: what they are, and the processes that run them.

A `StepJob` says what a step does, as numbers that JSON can carry, and also what the cost model is told of it, so that a
prediction and a measurement are of the same step. As a program, this file is one of the ranks::

    python -m hotbed.measure.step_jobs '{"jobs": [{"plan": "row", "batch": 512}], "repeats": 3, "steps": 4}'

Each repeat runs some steps of every job in turn, every other one from the last job to the first, so that jobs are
compared under the same load of the machine and none always follows the same other. The loop
is the library's own: forward, backward, dense and sparse optimizer; nothing is prefetched.
"""

from __future__ import annotations

import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from hotbed import optim
from hotbed.batch import Batch
from hotbed.config import ParallelRecipe
from hotbed.config.parallel_memory import Codec, ParallelOptions
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.embed.distribute import distribute
from hotbed.jagged import Jagged
from hotbed.machine import fit_threads
from hotbed.measure.rank_exchanges import TIMEOUT_S, run_ranks, write_found
from hotbed.nn import DLRM
from hotbed.nn.layers import MLP
from hotbed.ops.rows import decode, encode
from hotbed.plan import Plan
from hotbed.plan import hit_rates as popularities
from hotbed.plan.schemes import schemes_from
from hotbed.plan.search import make_plan
from hotbed.plan.workload import Workload
from hotbed.specs import Feature, RowDtype, Table
from hotbed.train.ranks.process_group import TorchrunWorld, process_group
from hotbed.train.runs.plan_search import count_dense_part

DENSE_FEATURES = 13
LEARNING_RATE = 0.01
WARMUP = 24
"""Steps before the clock starts: kernels are compiled, connections opened, memory of results is there to be used again.
After 3 steps a process still took a fifth more than later (docs/log.md)."""
_CODEC_ROWS, _CODEC_DIM = 2048, 64


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """A DLRM, its batches, and how ranks share it."""

    tables: int = 2
    rows: tuple[int, ...] = (1000,)
    """Of tables, which take turns."""
    dim: int = 64
    dtypes: tuple[RowDtype, ...] = ("fp32",)
    """What rows are stored as; tables take turns."""
    batch: int = 8
    """Samples of a rank."""
    ids: int = 1
    """Of every feature, per sample."""
    zipf: float = 0.0
    """Exponent of the law that ids follow; row 0 is the most popular."""
    bottom: tuple[int, ...] = ()
    """Widths of the bottom MLP before its last, which is ``dim``."""
    top: tuple[int, ...] = (1,)
    plan: str | Mapping[str, Any] = "row"
    """A scheme; or by table or pattern, as recipes have them; or a whole plan as JSON has it."""
    forward_codec: Codec = "fp32"
    backward_codec: Codec = "fp32"
    replicas: int = 1
    sync_every: int = 1
    warmup: int = WARMUP
    """Steps before the clock starts; rows outside of the device's memory come to be in their first updates."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make it of what JSON holds."""
        made: dict[str, Any] = {n: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**made)

    def specs(self) -> list[Table]:
        """Its tables."""
        rows, dtypes = self.rows, self.dtypes
        return [
            Table(f"t{i}", rows[i % len(rows)], self.dim, dtype=dtypes[i % len(dtypes)]) for i in range(self.tables)
        ]

    def model(self) -> DLRM:
        """The model, on this process alone."""
        features = [Feature(t.name, table=t.name) for t in self.specs()]
        return DLRM(self.specs(), features, DENSE_FEATURES, bottom=(*self.bottom, self.dim), top=self.top)

    def placed(self, ranks: int) -> Plan:
        """Where its tables are, in a group of the replicas of so many ranks."""
        if isinstance(self.plan, Mapping) and "tiles" in self.plan:
            return Plan.from_dict(self.plan)
        schemes = self.plan if isinstance(self.plan, str) else schemes_from(self.plan, "a job of steps")
        moments = optim.RowWiseAdagrad.rule.moments
        return make_plan(self.specs(), ranks // self.replicas, schemes, moments=moments)

    def workload(self, ranks: int) -> Workload:
        """What the cost model is told of its step."""
        names = [table.name for table in self.specs()]
        laws = {table.name: popularities.Zipf(table.rows, exponent=self.zipf) for table in self.specs()}
        with torch.device("meta"):
            model = self.model()
        return Workload.of(
            self.specs(),
            ids=dict.fromkeys(names, float(self.ids)),
            moments=optim.RowWiseAdagrad.rule.moments,
            popularity=laws,
            batch_size=self.batch * ranks,
            replicas=self.replicas,
            sync_every=self.sync_every,
            forward_codec=self.forward_codec,
            backward_codec=self.backward_codec,
            dense=count_dense_part(model),
        )

    def batches(self, rank: int, count: int) -> list[Batch]:
        """Random batches of a rank, each with ids of its own."""
        draw = torch.Generator().manual_seed(rank)
        laws = [ZipfLaw(table.rows, self.zipf) for table in self.specs()]
        size = self.batch * self.ids
        counters = [np.arange(i * size, (i + 1) * size, dtype=np.uint64) for i in range(count)]

        def ids(table: int, i: int) -> torch.Tensor:
            return torch.from_numpy(laws[table].draw((rank, table + 1), counters[i])).view(self.batch, self.ids)

        return [
            Batch(
                sparse=Jagged.from_dict({f"t{table}": ids(table, i) for table in range(self.tables)}),
                dense=torch.randn(self.batch, DENSE_FEATURES, generator=draw),
                labels=torch.rand(self.batch, self.top[-1], generator=draw).round(),
            )
            for i in range(count)
        ]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Seconds of the slowest rank."""

    steps: list[list[float]]  # by job, of a step in each repeat: medians over its steps
    layers: dict[tuple[int, int], list[float]] = field(default_factory=dict[tuple[int, int], list[float]])
    """By ``(width, samples)``, of a dense layer in each repeat, as part of an MLP of its own: forward and backward
    pass, update."""
    codecs: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By codec, of a value that is encoded and decoded, in each repeat."""


def step_seconds(
    jobs: Sequence[StepJob],
    ranks: int,
    *,
    repeats: int,
    steps: int,
    layers: Sequence[tuple[int, int]] = (),
    codecs: Sequence[Codec] = (),
) -> Measured:
    """Start ranks on this machine's cores, and time steps of jobs between them, and dense layers and codecs.

    Every repeat times ``steps`` steps of each job. Layers are given by width and samples; all ranks compute them at
    once.
    """
    found = run_ranks(__name__, build_request(jobs, repeats, steps) | {"layers": layers, "codecs": codecs}, ranks)
    timed = {(width, samples): seconds for (width, samples), seconds in zip(layers, found["layers"], strict=True)}
    return Measured(steps=found["steps"], layers=timed, codecs=found["codecs"])


def build_request(jobs: Sequence[StepJob], repeats: int, steps: int) -> dict[str, Any]:
    """What a rank is asked to run, as JSON."""
    return {"jobs": [asdict(job) for job in jobs], "repeats": repeats, "steps": steps}


# -- one rank -------------------------------------------------------------------------------------------------------


def run_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run what a rank is asked for, as one of the ranks; results are those of the slowest."""
    logging.getLogger("hotbed").setLevel(logging.ERROR)  # codecs and replicas announce that they change results
    with process_group(ParallelRecipe(timeout_s=TIMEOUT_S), "cpu") as here:
        if here.size == 1:
            fit_threads()
        return _timed(request, here)


def _timed(request: Mapping[str, Any], here: TorchrunWorld) -> dict[str, Any]:
    """Time jobs, layers and codecs; models are gone when it returns, and what they have threads for."""
    repeats = range(request["repeats"])
    runs = [JobRun(StepJob.from_dict(job), here.rank, here.size, request) for job in request["jobs"]]
    steps: list[list[float]] = []
    for i in repeats:
        of_repeat = [run.seconds() for run in runs[:: -1 if i % 2 else 1]]
        steps.append(of_repeat[::-1] if i % 2 else of_repeat)
    layers = [_layer(width, samples, here.size, len(repeats)) for width, samples in request.get("layers", ())]
    codecs = {codec: _codec(codec, here.size, len(repeats)) for codec in request.get("codecs", ())}
    by_job = [list(of_job) for of_job in zip(*steps, strict=True)]
    return {
        "steps": [_slowest(seconds) for seconds in by_job],
        "layers": [_slowest(seconds) for seconds in layers],
        "codecs": {codec: _slowest(seconds) for codec, seconds in codecs.items()},
        "rank": here.rank,
    }


class JobRun:
    """A job on this rank, and where it is in its batches; a `build_request` says how often it is timed."""

    def __init__(self, job: StepJob, rank: int, ranks: int, request: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        options = ParallelOptions(
            forward_codec=job.forward_codec,
            backward_codec=job.backward_codec,
            replicas=job.replicas,
            sync_every=job.sync_every,
        )
        with torch.device("cpu" if ranks == 1 else "meta"):  # of several ranks each makes its own tiles only
            model = job.model()
        self.model = distribute(model, job.placed(ranks), options)
        self.optimizers = (
            torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE),
            optim.RowWiseAdagrad(self.model, lr=LEARNING_RATE),
        )
        every = job.sync_every
        self.steps = -(-request["steps"] // every) * every  # whole rounds of averages
        warmup = -(-job.warmup // every) * every
        self.batches = iter(job.batches(rank, warmup + request["repeats"] * self.steps))
        self.every, self.alone = every, ranks == 1
        for _ in range(warmup):
            self._step()

    def seconds(self) -> float:
        """Seconds of a step: median over rounds of averages, each a mean."""
        taken = [self._step() for _ in range(self.steps)]
        rounds = [taken[i : i + self.every] for i in range(0, self.steps, self.every)]
        return statistics.median(map(statistics.mean, rounds))

    def _step(self) -> float:
        batch = next(self.batches)
        if not self.alone:
            dist.barrier()
        assert batch.labels is not None
        start = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(self.model(batch), batch.labels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        cast("Any", self.model).embeddings.settle()  # nothing but the next step would hide it
        return time.perf_counter() - start


def _layer(width: int, samples: int, ranks: int, repeats: int) -> list[float]:
    """Seconds of a layer of an MLP of three, in each repeat."""
    layers = 3
    mlp = MLP(width, (width,) * layers)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=LEARNING_RATE)
    given = torch.randn(samples, width, requires_grad=True)

    def call() -> None:
        optimizer.zero_grad()
        cast("nn.Module", mlp)(given).sum().backward()
        optimizer.step()

    return [seconds / layers for seconds in _calls(call, ranks, repeats)]


def _codec(codec: Codec, ranks: int, repeats: int) -> list[float]:
    """Seconds of a value that is encoded and decoded, in each repeat."""
    values = torch.randn(_CODEC_ROWS, _CODEC_DIM)
    return [s / values.numel() for s in _calls(lambda: decode(encode(values, codec), codec), ranks, repeats)]


def _calls(call: Callable[[], object], ranks: int, repeats: int, count: int = 20) -> list[float]:
    """Seconds of a call in each repeat, while all ranks do the same."""
    taken: list[float] = []
    for _ in range(1 + repeats):
        if ranks > 1:
            dist.barrier()
        each: list[float] = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            each.append(time.perf_counter() - start)
        taken.append(statistics.median(each))
    return taken[1:]


def _slowest(seconds: Sequence[float]) -> list[float]:
    """The largest of all ranks, in each repeat."""
    found = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def _main() -> None:
    """Run as a rank: the first writes what was found into ``folder``, or without one all print it."""
    request = json.loads(sys.argv[1])
    found = run_request(request)
    if "folder" not in request:
        print(json.dumps(found))
    elif found["rank"] == 0:
        write_found(request, found)


if __name__ == "__main__":
    _main()
