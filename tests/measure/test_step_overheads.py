"""Overheads of training steps: what is run, and what follows from the seconds; no test depends on a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from hotbed.errors import PlanError
from hotbed.measure import step_overheads
from hotbed.measure.step_overheads import (
    LAYERS,
    TABLES_MORE,
    Measured,
    StepJob,
    StepSizes,
    fixed_overheads,
    jobs_of,
    measure_overheads,
    mlp_rates,
    solve_overheads,
    tabulate_overheads,
)
from hotbed.plan import make_plan
from hotbed.plan.cost import CostModel
from hotbed.plan.hardware import OVERHEADS, Hardware
from hotbed.plan.step_time import estimate_step

SIZES = StepSizes(table_bytes=1 << 20, batch=64, slow_rows=100, steps=1, repeats=2)
CPU = Hardware.load("epyc-7742x2").with_(cores_per_node=2)
FIXED = {"step": 1.0, "arena": 0.5, "table": 0.01, "layer": 0.001, "copies": 0.25, "sums": 0.125, "average": 0.0625}
BY_ROW = {"host_row": 1e-4, "disk_row": 2e-4, "average_row": 3e-4, "id": 1e-5}
TRUTH = FIXED | BY_ROW | {"host": 0.3, "disk": 0.4, "bf16": 1e-9, "int8": 2e-9}
RATE = 1e9


def machine(ranks: int) -> Hardware:
    """A machine whose overheads are known, the same for any number of ranks."""
    overheads = {what: {ranks: seconds} for what, seconds in TRUTH.items()}
    mlp = {ranks: {2 * samples * width**2: RATE for width, samples in LAYERS}}
    return CPU.with_(overheads=overheads, efficiency={ranks: 0.5}, mlp=mlp, ranks_per_node=max(ranks, 2))


def as_predicted(jobs: Sequence[StepJob], ranks: int, *, repeats: int, **_: Any) -> Measured:
    """What such a machine would measure, if it were as the cost model has it."""
    here = machine(ranks)
    seconds = []
    for job in jobs:
        plan, model = job.make_plan(ranks), CostModel(job.workload(ranks), ranks // job.replicas, here)
        seconds.append([estimate_step(plan, model.ranks(plan), model).seconds] * repeats)
    least = TRUTH["layer"]
    layers = {(w, n): [least + 6 * n * w * w / RATE * ((w, n) != LAYERS[0])] * repeats for w, n in LAYERS}
    return Measured(steps=seconds, layers=layers, codecs={"bf16": [1e-9] * repeats, "int8": [2e-9] * repeats})


def test_overheads_of_a_machine_are_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_overheads, "step_seconds", as_predicted)
    stages: list[str] = []
    found = measure_overheads([2], CPU, SIZES, stages.append)
    assert stages == ["training steps of 1 rank", "training steps of 2 ranks"]
    assert set(found["overheads"]) == {*TRUTH} <= {*OVERHEADS}
    for what, by_ranks in found["overheads"].items():
        alone, together = what.startswith(("host", "disk")), what in ("copies", "sums", "average", "average_row")
        assert set(by_ranks) == ({1} if alone else {2} if together else {1, 2}), what
        for repeats in by_ranks.values():
            # fixed costs are found in steps of 8 samples, whose few rows and operations are in them, too
            assert repeats == pytest.approx([TRUTH[what]] * 2, rel=0.2, abs=1e-3), what
    assert found["mlp"][2] == {2 * n * w * w: [pytest.approx(RATE)] * 2 for w, n in LAYERS[1:]}
    assert set(found["efficiency"]) == {1, 2}


def test_overheads_are_differences_and_never_negative() -> None:
    jobs = {name: StepJob() for name in ("least", "tables", "arenas", "copies")}
    found = Measured(steps=[[10.0], [10.0 + TABLES_MORE], [9.0], [12.0]], layers={LAYERS[0]: [0.5]}, codecs={})
    of = fixed_overheads(jobs, found, 0)
    assert of == {"layer": 0.5, "table": 1.0, "arena": 0.0, "copies": 2.0, "step": 10.0 - 2 * 1.0 - 2 * 0.5}


def test_a_layer_is_not_faster_than_its_overhead_leaves() -> None:
    found = Measured(steps=[], layers={LAYERS[0]: [1.0, 1.0], (10, 5): [3.0, 0.5]})
    assert mlp_rates(found) == {2 * 5 * 100: [6 * 5 * 100 / 2.0, pytest.approx(6 * 5 * 100 / 0.05)]}


def test_ids_and_rows_are_told_apart() -> None:
    assert solve_overheads([5.0, 9.0], [1.0, 3.0], 100.0) == (pytest.approx(0.03), 2.0)
    of_id, factor = solve_overheads([1.0, 6.0], [1.0, 3.0], 100.0)  # no time is left for ids
    assert (of_id, factor) == (0.0, pytest.approx(1.9))
    assert solve_overheads([4.0, 3.0], [1.0, 3.0], 100.0)[1] == step_overheads.LEAST_FACTOR  # noise
    assert solve_overheads([0.0, 0.0], [1.0, 3.0], 100.0) == (0.0, step_overheads.LEAST_FACTOR)


def test_what_other_parts_take_is_not_taken_for_rows() -> None:
    jobs = jobs_of(2, SIZES)
    of_id, factor = tabulate_overheads(
        jobs, as_predicted(list(jobs.values()), 2, repeats=1), machine(2).with_(efficiency={}), 2, 0
    )
    assert of_id == pytest.approx(0, abs=1e-12)  # the machine's overheads have these already
    assert factor == pytest.approx(2.0)  # half the rate: twice as long


def test_steps_that_are_compared_differ_in_one_thing() -> None:
    assert set(jobs_of(1, SIZES)) >= {"host", "disk", "host, many", "disk, many", "device, many"}
    assert set(jobs_of(4, SIZES)) >= {"copies", "sums", "average"}
    assert "average" not in jobs_of(3, SIZES)
    least = asdict(jobs_of(2, SIZES)["least"])
    for name in ("tables", "arenas", "copies", "sums", "average"):
        own = asdict(jobs_of(2, SIZES)[name])
        assert len([field for field in own if own[field] != least[field]]) == 1, name


def test_a_job_is_the_same_after_json() -> None:
    job = StepJob(rows=(10, 20), dtypes=("fp32", "bf16"), bottom=(8,), plan={"t0": {"rows": 2}, "*": "dp"})
    assert StepJob.from_dict(json.loads(json.dumps(asdict(job)))) == job


def test_a_job_tells_the_cost_model_what_it_does() -> None:
    job = StepJob(tables=3, rows=(10, 20), dtypes=("fp32", "bf16"), dim=16, batch=6, ids=2, bottom=(4,), top=(5, 1))
    assert [(t.rows, t.dtype) for t in job.specs()] == [(10, "fp32"), (20, "bf16"), (10, "fp32")]
    work = job.workload(4)
    assert (work.batch_size, [use.ids for use in work.uses], work.dense.layers) == (24, [2.0] * 3, 4)
    assert work.dense.parameters == sum(p.numel() for p in job.model().parameters())
    plan = make_plan(job.specs(), 2, "row")
    assert replace(job, plan=plan.to_dict()).make_plan(2) == plan
    first, second = job.batches(0, 2)
    assert first.sparse["t0"].values.shape == (12,)
    assert not torch.equal(first.sparse["t0"].values, second.sparse["t0"].values)
    assert all(int(first.sparse[t.name].values.max()) < t.rows for t in job.specs())


def test_popular_rows_come_first() -> None:
    values = StepJob(rows=(1000,), batch=4096, zipf=1.2).batches(0, 1)[0].sparse["t0"].values
    counts = torch.bincount(values, minlength=1000)
    assert all(a > b for a, b in pairwise(counts[[0, 3, 30]].tolist()))


def test_a_cut_that_cannot_be_is_said() -> None:
    with pytest.raises(PlanError, match="a step job: a cut of table 't0': got 'row', expected one of rows"):
        StepJob(plan={"t0": {"row": 2}}).make_plan(1)
