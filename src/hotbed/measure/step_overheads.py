"""Measure the overheads of a training step, which do not depend on bytes and matrix products.

`step_jobs` times very small steps that differ in one property, between 1, 2, … processes on the same cores. The
differences are the overheads of a profile (`hotbed.plan.hardware.OVERHEADS`):

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
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from hotbed.config.parallel_memory import Codec
from hotbed.measure.step_jobs import Measured, StepJob, step_seconds
from hotbed.plan.cost import LOOKUP, POOLING, UPDATE, CostModel
from hotbed.plan.hardware import Hardware
from hotbed.plan.step_time import estimate_step

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
