"""Measure what virtual ranks cost in a training step, between this tree and an older one.

    git worktree add /tmp/before COMMIT
    python -m benchmarks.virtual_ranks [--before /tmp/before] [--batch 4096] [--rounds 5] [--json FILE]

Every measurement is a new group of processes that trains a DLRM on drawn samples. All cases take turns. ``before`` is
the same step of the older tree, which has no virtual ranks: with one process, and with two over Gloo.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import runner
from hotbed.files import write_json

TABLES, ROWS, DIM, DENSE = 26, 100_000, 32, 13
BOTTOM, TOP = [512, 256, DIM], [512, 256, 1]
WARM_UP = 5


class Case(NamedTuple):
    """A number of processes and of virtual ranks (None: of the older tree), and the precision."""

    processes: int
    virtual_ranks: int | None
    precision: str


PAIRS = [
    (Case(1, 1, "fp32"), Case(1, None, "fp32")),
    (Case(2, 2, "fp32"), Case(2, None, "fp32")),
    (Case(1, 8, "fp32"), Case(1, 1, "fp32")),
    (Case(1, 8, "bf16"), Case(1, 1, "bf16")),
]
"""Cases that are compared."""


def step_s(case: Case, batch: int, steps: int, before: Path | None) -> float:
    """Return the median seconds of a step of the slowest process."""
    source = runner.ROOT / "src" if case.virtual_ranks is not None or before is None else before / "src"
    with tempfile.TemporaryDirectory() as folder:
        job = {"case": case, "batch": batch, "steps": steps, "folder": folder}
        processes = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), json.dumps({**job, "rank": rank})],
                env=os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{runner.ROOT}"},
                cwd=folder,
            )
            for rank in range(case.processes)
        ]
        if any(process.wait() for process in processes):
            raise SystemExit(f"{case} failed")
        return max(json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(case.processes))


def train(job: Mapping[str, Any]) -> None:
    """Train one process's share, and write the median seconds of a step."""
    import torch
    import torch.distributed as dist

    import hotbed as hb
    from hotbed.batch import Batch
    from hotbed.config import TrainRecipe
    from hotbed.train import Callback, Trainer

    case, rank, folder = Case(*job["case"]), job["rank"], Path(job["folder"])
    torch.set_num_threads(max(len(os.sched_getaffinity(0)) // case.processes, 1))
    if case.processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.processes)
    torch.manual_seed(0)
    tables = [hb.Table(f"t{i}", rows=ROWS, dim=DIM) for i in range(TABLES)]
    model = hb.nn.DLRM(tables, [hb.Feature(t.name, t.name) for t in tables], DENSE, bottom=BOTTOM, top=TOP)
    options = {} if case.virtual_ranks is None else {"virtual_ranks": case.virtual_ranks}
    model = hb.distribute(model, "row" if case.processes > 1 else "table", hb.ParallelOptions(**options))
    samples = job["batch"] // case.processes
    draw = torch.Generator().manual_seed(rank)

    def batch() -> Batch:
        # Squared, so that some rows are much more frequent than others.
        ids = (torch.rand(TABLES, samples, generator=draw).square() * ROWS).long()
        labels = torch.randint(0, 2, (samples, 1), generator=draw).float()
        sparse = hb.Jagged.from_dict({t.name: ids[i] for i, t in enumerate(tables)})
        return Batch(sparse=sparse, dense=torch.randn(samples, DENSE, generator=draw), labels=labels)

    class Times(Callback):
        def __init__(self) -> None:
            self.at: list[float] = []

        def on_step(self, trainer: Trainer, loss: float) -> None:
            self.at.append(time.perf_counter())

    recipe = TrainRecipe(batch_size=job["batch"], steps=job["steps"], device="cpu", precision=case.precision)
    dense, sparse = torch.optim.SGD(model.parameters(), lr=0.01), hb.optim.RowWiseAdagrad(model, lr=0.01)
    trainer = Trainer(model, dense, sparse, recipe=recipe, callbacks=[times := Times()])
    trainer.fit([batch() for _ in range(job["steps"])])
    seconds = [b - a for a, b in zip(times.at[WARM_UP:], times.at[WARM_UP + 1 :], strict=False)]
    (folder / f"{rank}.json").write_text(json.dumps(statistics.median(seconds)), encoding="utf-8")
    if case.processes > 1:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    """Measure all cases in turn, and print ratios of pairs within a round."""
    parser = runner.arguments(__doc__)
    parser.add_argument("--before", type=Path, help="Working tree of an older commit.")
    parser.add_argument("--batch", type=int, default=4096, help="Samples of all processes.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    parsed = parser.parse_args()
    pairs = [pair for pair in PAIRS if parsed.before is not None or pair[1].virtual_ranks is not None]
    cases = list(dict.fromkeys(case for pair in pairs for case in pair))
    sides = {case: lambda case=case: step_s(case, parsed.batch, parsed.steps, parsed.before) for case in cases}
    found = runner.in_turns(sides, parsed.rounds, title="virtual ranks")
    rows: list[dict[str, Any]] = []
    for case, other in pairs:
        ratios = [a / b for a, b in zip(found[case], found[other], strict=True)]
        rows.append(
            {
                "processes": case.processes,
                "virtual ranks": case.virtual_ranks,
                "compared with": "before" if other.virtual_ranks is None else f"{other.virtual_ranks} virtual ranks",
                "precision": case.precision,
                "ms": statistics.median(found[case]) * 1e3,
                "other ms": statistics.median(found[other]) * 1e3,
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
            }
        )
    runner.show("seconds of a training step", rows)
    if parsed.json is not None:
        write_json(parsed.json, {**runner.about(batch=parsed.batch, rounds=parsed.rounds), "rows": rows})


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        train(json.loads(sys.argv[1]))
    else:
        main()
