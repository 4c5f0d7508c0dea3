"""Time training steps of small DLRMs between real processes.

A `StepJob` describes a step with plain values. It also creates the input of the cost model, so that a prediction and a
measurement are about the same step. This module is the program of a rank::

    python -m hotbed.measure.step_jobs '{"jobs": [{"plan": "row", "batch": 512}], "repeats": 3, "steps": 4}'

Each repeat runs some steps of every job, in alternating order: from the first job to the last, then from the last to
the first. So jobs are compared under the same load of the machine, and no job always follows the same job. A step is
the library's: forward pass, backward pass, dense and sparse optimizer. Batches are not prefetched.
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
"""Steps before the measurement. In them, kernels are compiled, connections are opened, and memory is allocated. After 3
steps, a step was still 20 % slower than later steps (docs/log.md)."""
_CODEC_ROWS, _CODEC_DIM = 2048, 64


@dataclass(frozen=True, kw_only=True)
class StepJob:
    """A DLRM, its batches, and its distribution over ranks."""

    tables: int = 2
    rows: tuple[int, ...] = (1000,)
    """Rows of tables. Table i has ``rows[i % len(rows)]`` rows."""
    dim: int = 64
    dtypes: tuple[RowDtype, ...] = ("fp32",)
    """Dtypes of stored rows. Table i has ``dtypes[i % len(dtypes)]``."""
    batch: int = 8
    """Samples per rank."""
    ids: int = 1
    """Ids per feature and sample."""
    zipf: float = 0.0
    """Exponent of Zipf's law for ids. Row 0 is the most popular."""
    bottom: tuple[int, ...] = ()
    """Widths of the bottom MLP without its last layer, which has width ``dim``."""
    top: tuple[int, ...] = (1,)
    plan: str | Mapping[str, Any] = "row"
    """A scheme, schemes by table or pattern as in recipes, or a plan as plain values."""
    forward_codec: Codec = "fp32"
    backward_codec: Codec = "fp32"
    replicas: int = 1
    sync_every: int = 1
    warmup: int = WARMUP
    """Steps before the measurement. In them, rows outside of the device's memory are materialized."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a job from plain values of JSON."""
        made: dict[str, Any] = {n: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**made)

    def specs(self) -> list[Table]:
        """Return the tables."""
        rows, dtypes = self.rows, self.dtypes
        return [
            Table(f"t{i}", rows[i % len(rows)], self.dim, dtype=dtypes[i % len(dtypes)]) for i in range(self.tables)
        ]

    def model(self) -> DLRM:
        """Return the model, which is not distributed."""
        features = [Feature(t.name, table=t.name) for t in self.specs()]
        return DLRM(self.specs(), features, DENSE_FEATURES, bottom=(*self.bottom, self.dim), top=self.top)

    def make_plan(self, ranks: int) -> Plan:
        """Return the plan of the tables for one group of replicas, given the number of all ranks."""
        if isinstance(self.plan, Mapping) and "tiles" in self.plan:
            return Plan.from_dict(self.plan)
        schemes = self.plan if isinstance(self.plan, str) else schemes_from(self.plan, "a step job")
        moments = optim.RowWiseAdagrad.rule.moments
        return make_plan(self.specs(), ranks // self.replicas, schemes, moments=moments)

    def workload(self, ranks: int) -> Workload:
        """Return the cost model's description of a step."""
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
        """Return random batches of a rank, each with different ids."""
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
    """Seconds of the slowest rank, in each repeat."""

    steps: list[list[float]]  # by job: median seconds of a step
    layers: dict[tuple[int, int], list[float]] = field(default_factory=dict[tuple[int, int], list[float]])
    """By ``(width, samples)``: seconds of a dense layer in a separate MLP, for forward pass, backward pass and
    update."""
    codecs: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """By codec: seconds for encoding and decoding a value."""


def step_seconds(
    jobs: Sequence[StepJob],
    ranks: int,
    *,
    repeats: int,
    steps: int,
    layers: Sequence[tuple[int, int]] = (),
    codecs: Sequence[Codec] = (),
) -> Measured:
    """Start ranks on this machine's cores, and time the steps of jobs, dense layers and codecs.

    Every repeat times ``steps`` steps of each job. A layer is a pair of width and samples. All ranks compute layers
    concurrently.
    """
    found = run_ranks(__name__, build_request(jobs, repeats, steps) | {"layers": layers, "codecs": codecs}, ranks)
    timed = {(width, samples): seconds for (width, samples), seconds in zip(layers, found["layers"], strict=True)}
    return Measured(steps=found["steps"], layers=timed, codecs=found["codecs"])


def build_request(jobs: Sequence[StepJob], repeats: int, steps: int) -> dict[str, Any]:
    """Return the request for a rank, as plain values."""
    return {"jobs": [asdict(job) for job in jobs], "repeats": repeats, "steps": steps}


# -- one rank -------------------------------------------------------------------------------------------------------


def run_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Run a request as one of the ranks. The results are the seconds of the slowest rank."""
    logging.getLogger("hotbed").setLevel(logging.ERROR)  # codecs and replicas warn that they change results
    with process_group(ParallelRecipe(timeout_s=TIMEOUT_S), "cpu") as here:
        if here.size == 1:
            fit_threads()
        return _time_request(request, here)


def _time_request(request: Mapping[str, Any], here: TorchrunWorld) -> dict[str, Any]:
    """Time jobs, layers and codecs. Models and their threads are released when this returns."""
    repeats = range(request["repeats"])
    runs = [JobRun(StepJob.from_dict(job), here.rank, here.size, request) for job in request["jobs"]]
    steps: list[list[float]] = []
    for i in repeats:
        of_repeat = [run.seconds() for run in runs[:: -1 if i % 2 else 1]]
        steps.append(of_repeat[::-1] if i % 2 else of_repeat)
    layers = [_time_layer(width, samples, here.size, len(repeats)) for width, samples in request.get("layers", ())]
    codecs = {codec: _time_codec(codec, here.size, len(repeats)) for codec in request.get("codecs", ())}
    by_job = [list(of_job) for of_job in zip(*steps, strict=True)]
    return {
        "steps": [_slowest(seconds) for seconds in by_job],
        "layers": [_slowest(seconds) for seconds in layers],
        "codecs": {codec: _slowest(seconds) for codec, seconds in codecs.items()},
        "rank": here.rank,
    }


class JobRun:
    """A job on this rank, with its position in the batches. See `build_request` for ``request``."""

    def __init__(self, job: StepJob, rank: int, ranks: int, request: Mapping[str, Any]) -> None:
        torch.manual_seed(0)
        options = ParallelOptions(
            forward_codec=job.forward_codec,
            backward_codec=job.backward_codec,
            replicas=job.replicas,
            sync_every=job.sync_every,
        )
        with torch.device("cpu" if ranks == 1 else "meta"):  # if there are several ranks, each creates its own tiles
            model = job.model()
        self.model = distribute(model, job.make_plan(ranks), options)
        self.optimizers = (
            torch.optim.SGD(self.model.parameters(), lr=LEARNING_RATE),
            optim.RowWiseAdagrad(self.model, lr=LEARNING_RATE),
        )
        every = job.sync_every
        self.steps = -(-request["steps"] // every) * every  # a multiple of the steps between averages
        warmup = -(-job.warmup // every) * every
        self.batches = iter(job.batches(rank, warmup + request["repeats"] * self.steps))
        self.every, self.alone = every, ranks == 1
        for _ in range(warmup):
            self._step()

    def seconds(self) -> float:
        """Return the seconds of a step: the median over averaging intervals of the mean over an interval's steps."""
        times = [self._step() for _ in range(self.steps)]
        rounds = [times[i : i + self.every] for i in range(0, self.steps, self.every)]
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
        cast("Any", self.model).embeddings.settle()  # includes work that would overlap with the next step
        return time.perf_counter() - start


def _time_layer(width: int, samples: int, ranks: int, repeats: int) -> list[float]:
    """Return the seconds of a layer of an MLP with three layers, in each repeat."""
    layers = 3
    mlp = MLP(width, (width,) * layers)
    optimizer = torch.optim.SGD(mlp.parameters(), lr=LEARNING_RATE)
    given = torch.randn(samples, width, requires_grad=True)

    def call() -> None:
        optimizer.zero_grad()
        cast("nn.Module", mlp)(given).sum().backward()
        optimizer.step()

    return [seconds / layers for seconds in _time_calls(call, ranks, repeats)]


def _time_codec(codec: Codec, ranks: int, repeats: int) -> list[float]:
    """Return the seconds for encoding and decoding one value, in each repeat."""
    values = torch.randn(_CODEC_ROWS, _CODEC_DIM)
    return [s / values.numel() for s in _time_calls(lambda: decode(encode(values, codec), codec), ranks, repeats)]


def _time_calls(call: Callable[[], object], ranks: int, repeats: int, count: int = 20) -> list[float]:
    """Return the median seconds of a call in each repeat. All ranks run the call concurrently."""
    medians: list[float] = []
    for _ in range(1 + repeats):
        if ranks > 1:
            dist.barrier()
        each: list[float] = []
        for _ in range(count):
            start = time.perf_counter()
            call()
            each.append(time.perf_counter() - start)
        medians.append(statistics.median(each))
    return medians[1:]


def _slowest(seconds: Sequence[float]) -> list[float]:
    """Return the maximum over all ranks, in each repeat."""
    found = torch.tensor(seconds, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()


def _main() -> None:
    """Run as a rank. The first rank writes the results into ``folder``. Without a folder, all ranks print them."""
    request = json.loads(sys.argv[1])
    found = run_request(request)
    if "folder" not in request:
        print(json.dumps(found))
    elif found["rank"] == 0:
        write_found(request, found)


if __name__ == "__main__":
    _main()
