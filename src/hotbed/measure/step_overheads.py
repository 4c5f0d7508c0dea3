"""Measure the overheads of a training step, which do not depend on bytes and matrix products.

Very small steps (`StepJob`) are timed between 1, 2, … processes on the same cores. The differences of steps that differ
in one property are the overheads of a profile (`hotbed.plan.hardware.OVERHEADS`):

============================  ======================================================================================
overhead                      measurement
============================  ======================================================================================
``layer``                     a layer of 16 × 16 for one sample
``table``, ``arena``          16 additional tables; half of the tables in another dtype, ÷ 1
``step``                      the smallest step − its tables, arena and layers
``copies``, ``sums``          the same tables copied to all ranks; sharded by columns
``average``                   the same tables in two replicas, averaged in every step
``average_row``               a larger batch with two replicas − all other parts of its step, ÷ averaged rows
``host``, ``disk``            the same tables in another memory
``host_row``, ``disk_row``    a larger batch in that memory − the same batch in the device's, ÷ its distinct rows
``id``, and `efficiency`      a larger batch at two dims − fixed parts, exchanged bytes and dense part, is
                              ``id · ids + (seconds by gather and scatter) ÷ efficiency``
``bf16`` …                    encoding and decoding of a vector
============================  ======================================================================================

The overheads do not depend on the plans and models that are later predicted with them.

A `StepJob` describes a step with plain values. It also creates the input of the cost model, so that a prediction and a
measurement are about the same step. This module is the program of a rank::

    python -m hotbed.measure.step_overheads '{"jobs": [{"plan": "row", "batch": 512}], "repeats": 3, "steps": 4}'

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
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, cast, get_args

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
from hotbed.plan.cost import LOOKUP, POOLING, UPDATE, CostModel
from hotbed.plan.hardware import Hardware
from hotbed.plan.schemes import schemes_from
from hotbed.plan.search import make_plan
from hotbed.plan.step_time import estimate_step
from hotbed.plan.workload import Workload
from hotbed.specs import Feature, RowDtype, Table
from hotbed.train.ranks.process_group import TorchrunWorld, process_group
from hotbed.train.runs.plan_search import count_dense_part

DIMS = (16, 128)
"""Columns of the tables for larger batches."""
TABLES_MORE = 16
LAYERS = ((16, 1), (64, 256), (256, 512), (512, 1024))
"""Widths and samples of dense layers. The first layer consists of overhead only."""
LEAST_SHARE = 0.1
"""Lower limit of a layer's seconds without overhead, as a fraction of all its seconds."""
LEAST_FACTOR = 0.05
"""Lower limit of the measured seconds of rows ÷ seconds by gather and scatter. Smaller values are noise."""

Samples = list[float]
"""One value per repeat."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """Sizes of the training steps."""

    table_bytes: int = 1 << 29
    """Bytes of the tables for a larger batch."""
    batch: int = 2048
    """Samples of a larger batch, per rank."""
    slow_rows: int = 10_000
    """Rows of tables in other memories. All of them are materialized before the measurement."""
    steps: int = 12
    repeats: int = 11


def jobs_of(ranks: int, sizes: StepSizes) -> dict[str, StepJob]:
    """Return the jobs to run, by name."""
    few = StepJob()
    found = {
        "least": few,
        "tables": replace(few, tables=few.tables + TABLES_MORE),
        "arenas": replace(few, dtypes=("fp32", "bf16")),
    }
    for dim in DIMS:
        rows = max(sizes.table_bytes // (8 * 4 * dim), 1)
        found[f"rows of {dim}"] = replace(few, tables=8, dim=dim, rows=(rows,), batch=sizes.batch)
    if ranks > 1:
        found["copies"] = replace(few, plan="dp")
        found["sums"] = replace(few, plan="column")
        if ranks % 2 == 0:
            found["average"] = replace(few, replicas=2)
            rows = max(sizes.table_bytes // (8 * 4 * few.dim), 1)
            found["average, many"] = replace(few, tables=8, rows=(rows,), batch=sizes.batch // 4, replicas=2)
        return found
    warm = 2 + 5 * -(-sizes.slow_rows // sizes.batch)
    many = replace(few, rows=(sizes.slow_rows,), batch=sizes.batch, warmup=warm)
    found["device, many"] = many
    for tier in ("host", "disk"):
        plan = {"*": {"tier": tier}}
        found[tier] = replace(few, rows=(sizes.slow_rows,), plan=plan, warmup=warm)
        found[f"{tier}, many"] = replace(many, plan=plan)
    return found


def measure_overheads(
    worlds: Sequence[int], hardware: Hardware, sizes: StepSizes, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Run the jobs. Return ``overheads``, ``efficiency`` and ``mlp`` as in `Hardware`, with repeats for each value.

    ``hardware`` has the figures that were measured before: rates and exchanges. One rank is added to ``worlds``.
    """
    overheads: dict[str, dict[int, Samples]] = {}
    efficiency: dict[int, Samples] = {}
    mlp: dict[int, dict[int, Samples]] = {}
    for ranks in sorted({1, *worlds}):
        progress(f"training steps of {ranks} rank{'s' * (ranks > 1)}")
        jobs = jobs_of(ranks, sizes)
        codecs: list[Codec] = [codec for codec in get_args(Codec) if codec != "fp32"]
        found = step_seconds(
            list(jobs.values()), ranks, repeats=sizes.repeats, steps=sizes.steps, layers=LAYERS, codecs=codecs
        )
        mlp[ranks] = mlp_rates(found)
        fixed = [fixed_overheads(jobs, found, i) for i in range(sizes.repeats)]
        for what in fixed[0]:
            overheads.setdefault(what, {})[ranks] = [of[what] for of in fixed]
        known = {name: {at: statistics.median(v) for at, v in by.items()} for name, by in overheads.items()}
        rates = {at: {of: statistics.median(v) for of, v in by.items()} for at, by in mlp.items()}
        here = hardware.with_(overheads=known, mlp=rates, ranks_per_node=max(ranks, hardware.ranks_per_node))
        pairs = [tabulate_overheads(jobs, found, here, ranks, i) for i in range(sizes.repeats)]
        overheads.setdefault("id", {})[ranks] = [of_id for of_id, _ in pairs]
        efficiency[ranks] = [1 / factor for _, factor in pairs]
        if "average, many" in jobs:
            known["id"] = {ranks: statistics.median(overheads["id"][ranks])}
            here = here.with_(overheads=known, efficiency={ranks: statistics.median(efficiency[ranks])})
            seconds = found.steps[list(jobs).index("average, many")]
            of_row = averaged_rows(jobs["average, many"], seconds, here, ranks)
            overheads.setdefault("average_row", {})[ranks] = of_row
    return {"overheads": overheads, "efficiency": efficiency, "mlp": mlp}


def mlp_rates(found: Measured) -> dict[int, Samples]:
    """Return the FLOP/s of a layer without its overhead in each repeat, by operations of its forward pass."""
    least = found.layers[LAYERS[0]]
    return {
        2 * samples * width**2: [
            6 * samples * width**2 / max(s - of_layer, LEAST_SHARE * s)
            for s, of_layer in zip(seconds, least, strict=True)
        ]
        for (width, samples), seconds in list(found.layers.items())[1:]
    }


def fixed_overheads(jobs: Mapping[str, StepJob], found: Measured, repeat: int) -> dict[str, float]:
    """Return the overheads that are differences of two steps, in one repeat. Negative differences become 0."""
    step = {name: seconds[repeat] for name, seconds in zip(jobs, found.steps, strict=True)}
    least, few = step["least"], jobs["least"]
    of = {
        "layer": found.layers[LAYERS[0]][repeat],
        "table": (step["tables"] - least) / TABLES_MORE,
        "arena": step["arenas"] - least,
        **{name: step[name] - least for name in ("copies", "sums", "average", "host", "disk") if name in step},
    }
    of = {name: max(seconds, 0.0) for name, seconds in of.items()}
    layers = len(few.bottom) + 1 + len(few.top)
    of["step"] = max(least - of["arena"] - few.tables * of["table"] - layers * of["layer"], 0.0)
    if "device, many" in step:
        many = jobs["device, many"]
        uses = many.workload(1).uses
        distinct = sum(use.expected.distinct(range(use.table.rows), use.ids * many.batch) for use in uses)
        for tier in ("host", "disk"):
            more = step[f"{tier}, many"] - step["device, many"] - of[tier]
            of[f"{tier}_row"] = max(more, 0.0) / distinct
    return of | {codec: seconds[repeat] for codec, seconds in found.codecs.items()}


def averaged_rows(job: StepJob, seconds: Samples, here: Hardware, ranks: int) -> Samples:
    """Return the seconds per row that replicas average, without the time for its bytes, in each repeat."""
    plan = job.make_plan(ranks)

    def step(of_row: float) -> float:
        priced = here.with_(overheads={**here.overheads, "average_row": {ranks: of_row}})
        model = CostModel(job.workload(ranks), ranks // job.replicas, priced)
        return estimate_step(plan, model.ranks(plan), model).seconds

    others = step(0.0)
    rows = step(1.0) - others
    return [max(each - others, 0.0) / rows for each in seconds]


def tabulate_overheads(
    jobs: Mapping[str, StepJob], found: Measured, here: Hardware, ranks: int, repeat: int
) -> tuple[float, float]:
    """Return the seconds per id, and the measured ÷ estimated seconds of rows, in one repeat.

    The estimated seconds are the bytes of the rows at the measured rates of gather and scatter.
    """
    left: list[float] = []
    counted: list[float] = []
    ids = 0.0
    for name, seconds in zip(jobs, found.steps, strict=True):
        if not name.startswith("rows of "):
            continue
        job = jobs[name]
        ids = float(job.tables * job.ids * job.batch)
        moved, others = _predict(job, here, ranks)
        counted.append(moved)
        left.append(max(seconds[repeat] - others, 0.0))
    return solve_overheads(left, counted, ids)


def _predict(job: StepJob, here: Hardware, ranks: int) -> tuple[float, float]:
    """Return the estimated seconds of a step's rows by gather and scatter, and of all other parts."""
    model = CostModel(job.workload(ranks), ranks // job.replicas, here)
    plan = job.make_plan(ranks)
    costs = model.ranks(plan)
    busiest = costs.parts[int(costs.load.argmax())]
    moved = float(busiest[[LOOKUP, POOLING, UPDATE]].sum())
    return moved, estimate_step(plan, costs, model).seconds - moved


def solve_overheads(left: Sequence[float], counted: Sequence[float], ids: float) -> tuple[float, float]:
    """Solve ``left = of_id · ids + factor · counted`` at two dims, with nonnegative results.

    ``left`` are the seconds of a step without the parts that are known otherwise. ``counted`` are the estimated seconds
    of its rows by gather and scatter. ``ids`` is the number of ids in a rank's batch, the same at both dims.
    """
    factor = (left[1] - left[0]) / (counted[1] - counted[0])
    if left[0] < factor * counted[0]:  # no time is left for ids, so fit only the factor by least squares
        factor = sum(x * c for x, c in zip(left, counted, strict=True)) / sum(c * c for c in counted)
    factor = max(factor, LEAST_FACTOR)
    of_id = max(statistics.mean(x - factor * c for x, c in zip(left, counted, strict=True)), 0.0) / ids
    return of_id, factor


# -- step jobs --------------------------------------------------------------------------------------------------------


DENSE_FEATURES = 13
LEARNING_RATE = 0.01
WARMUP = 24
"""Steps before the measurement. In them, kernels are compiled, connections are opened, and memory is allocated. After 3
steps, a step was still 20 % slower than later steps."""
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


# -- one rank ---------------------------------------------------------------------------------------------------------


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
