"""Compare the memory that training takes with what the planner predicts: ``python -m benchmarks.memory [--json FILE]``.

Cases are those of ``benchmarks.predicted`` without links, and larger ones; each is trained between real processes. A
rank first takes steps of a small model of the same kind, so that kernels are compiled and runtimes have what they keep.
Then its peak is set back, the case is trained, and what the peak is above what the rank had before is what the case
took. *Predicted* is rows and moments in memory of any kind, those that caches have room for, activations, dense
parameters and rows in exchange (`hotbed.plan.limits`), and the batches, which are all made beforehand here.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.predicted import CASES, WIDE, Case
from benchmarks.process_memory import peak_extra_kib
from benchmarks.quality_results import measured_on
from hotbed.config import ParallelRecipe
from hotbed.files import write_json
from hotbed.measure.step_jobs import JobRun, StepJob, request_of
from hotbed.optim import RowWiseAdagrad
from hotbed.plan.cost import CostModel, tile_bytes
from hotbed.plan.hardware import Hardware
from hotbed.plan.limits import limits_of
from hotbed.train.local_ranks import run_local
from hotbed.train.memory_trace import nbytes_of
from hotbed.train.process_group import Started, process_group

WARMUP, STEPS = 2, 6
MLPS = {"bottom": (512, 256), "top": (1024, 1024, 512, 256, 1)}
LARGER = {
    "1 rank, 1.7 GB of tables": Case(1, replace(WIDE, tables=26, rows=(250_000,), batch=4096)),
    "1 rank, NVIDIA's layers, 8,192 samples": Case(1, StepJob(tables=26, rows=(10_000,), dim=128, batch=8192, **MLPS)),
    "2 ranks, row, NVIDIA's layers": Case(2, StepJob(tables=26, rows=(50_000,), dim=128, batch=4096, **MLPS)),
    "2 ranks, 1.7 GB of tables, host": Case(
        2, replace(WIDE, tables=26, rows=(250_000,), plan={"*": {"rows": 0, "tier": "host"}})
    ),
}


def small(job: StepJob) -> StepJob:
    """The same with few rows and samples."""
    return replace(job, rows=tuple(min(n, 2_000) for n in job.rows), batch=64)


def predicted(case: Case) -> dict[str, float]:
    """Bytes of a rank, of the fullest, by what they are for."""
    job = case.job
    machine = Hardware.load("epyc-7742x2")  # its size does not matter: what the runtime takes is left out
    model = CostModel(job.workload(case.ranks), case.ranks // job.replicas, machine)
    plan, tables = job.placed(case.ranks), {table.name: table for table in job.specs()}
    costs = model.ranks(plan)
    beside = {what: n for what, n in limits_of(model).beside.items() if what != "runtime"}
    in_memory = [of for tier, of in costs.memory.items() if tier != "disk"]
    rows = max(map(sum, zip(*in_memory, strict=True)))
    caches = [0] * plan.world_size
    for tile in plan.tiles:
        if tile.cache_rows:
            cached = replace(tile, rows=tile.rows[: tile.cache_rows])
            caches[tile.owner] += tile_bytes(tables[tile.table], cached, RowWiseAdagrad.rule.moments)
    (batch,) = job.batches(0, 1)
    batches = (WARMUP + STEPS) * nbytes_of([batch.sparse.values, batch.dense, batch.labels])
    return {"rows and moments": int(rows), "caches": max(caches), **beside, "batches": batches}


def measure(case: Case) -> int:
    """Bytes that the rank which took most took."""
    with TemporaryDirectory(prefix="hotbed-") as name:
        run_local(
            [sys.executable, "-m", "benchmarks.memory", "--as_rank", json.dumps(asdict(case.job)), name],
            case.ranks,
            Path(name),
        )
        return max(int(file.read_text()) for file in Path(name).glob("took*"))


def be_rank(job: StepJob, folder: Path) -> None:
    """Train as one rank, and write what it took."""
    with process_group(ParallelRecipe(), "cpu") as here:
        _train(small(job), here)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        taken = 1024 * peak_extra_kib(lambda: _train(job, here))
        (folder / f"took{here.rank}").write_text(str(taken))


def _train(job: StepJob, here: Started) -> None:
    JobRun(replace(job, warmup=WARMUP), here.rank, here.size, request_of([job], 1, STEPS)).seconds()


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all cases, and print the table."""
    args = _arguments(argv)
    if args.as_rank:
        job, folder = args.as_rank
        be_rank(StepJob.from_dict(json.loads(job)), Path(folder))
        return
    console = Console()
    if not console.is_terminal:
        console.width = 160
    cases = {n: c for n, c in {**CASES, **LARGER}.items() if c.mbit_per_s is None and args.only in n}
    found: dict[str, Any] = {}
    for name, case in track(cases.items(), "cases", console=console, disable=not console.is_terminal):
        found[name] = {"predicted": predicted(case), "measured": measure(case)}
        console.print(f"{name}: {found[name]['measured']:,} bytes")
    console.print(_table(found))
    if args.json:
        write_json(args.json, {"measured on": measured_on(), "cases": found})


def _table(found: Mapping[str, Any]) -> Table:
    parts = list(next(iter(found.values()))["predicted"])
    view = Table("case", *parts, "predicted, MB", "measured, MB", "predicted ÷ measured", box=MARKDOWN)
    for name, of in found.items():
        total = sum(of["predicted"].values())
        view.add_row(
            name,
            *(f"{of['predicted'][part] / 1e6:,.0f}" for part in parts),
            f"{total / 1e6:,.0f}",
            f"{of['measured'] / 1e6:,.0f}",
            f"{total / of['measured']:.2f}",
        )
    return view


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.memory", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="cases whose names have this in them")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--as_rank", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
