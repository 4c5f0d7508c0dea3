"""Train one model per option side by side, as one rank of several, and say how long its steps took and what it learned.

    python -m benchmarks.price_training JOB_AS_JSON      # as every rank; the first prints the results as a line of JSON

All models of a job begin with the same values and take turns batch by batch, so what else the machine does, meets all.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

if __name__ == "__main__":  # read when torch and Numba are imported: one thread per rank
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from benchmarks.peers.plain_side import PlainLayers
from benchmarks.quality_results import Scores
from benchmarks.quality_training import DENSE, PlantedLog, share
from hotbed.plan.tiling import WireFormat

BATCH, TEST_BATCH, DIM = 4_096, 16_384, 32
BLOCKS = 32
SPARSE_LR, DENSE_LR = 0.02, 0.004
"""Those of ``benchmarks.quality``."""


@dataclass(frozen=True)
class Case:
    """A plan, options of `hotbed.distribute` and of row-wise AdaGrad, and the exact case that it is held against.

    A ``wire`` other than "rows" is that of the plan. Tables of at most ``dense_rows`` rows are no tables of hotbed's,
    but parameters of the dense part.
    """

    plan: str | Mapping[str, str] = "row"
    options: Mapping[str, Any] = field(default_factory=dict)
    rule: Mapping[str, Any] = field(default_factory=dict)
    exact: str | None = None
    dense_rows: int = 0
    wire: WireFormat = "rows"


@dataclass(frozen=True)
class Job:
    """What all ranks train."""

    cases: dict[str, Case]
    samples: int
    test_samples: int
    seed: int


class WithDenseTables(nn.Module):
    """A DLRM on the planted log whose small tables are plain modules of torch: their gradients are averaged whole."""

    def __init__(self, made: hb.nn.DLRM, features: Sequence[hb.Feature], dense_rows: int, seed: int) -> None:
        super().__init__()
        self.names = [f.name for f in features]
        tables = made.embeddings.tables
        large = [table for table in tables.values() if table.rows > dense_rows]
        kept = {table.name for table in large}
        self.embeddings = hb.EmbeddingCollection(large, [f for f in features if f.table in kept], seed=seed)
        self.small = nn.ModuleDict(
            {
                name: nn.EmbeddingBag.from_pretrained(made.embeddings.weight(name).clone(), freeze=False, mode="sum")
                for name in tables
                if name not in kept
            }
        )
        self.layers = PlainLayers(made)

    def forward(self, batch: hb.Batch) -> Tensor:
        assert batch.dense is not None
        embedded = self.embeddings(batch.sparse)
        ids = dict(zip(self.names, batch.sparse.values.view(len(self.names), -1, 1), strict=True))
        vectors = [self.small[n](ids[n]) if n in self.small else embedded[n] for n in self.names]
        return self.layers(batch.dense, vectors)


class Trained:
    """A case in training."""

    def __init__(self, case: Case, log: PlantedLog, seed: int) -> None:
        torch.manual_seed(seed)
        tables = [hb.Table(name, rows, DIM) for name, rows in zip(log.names, log.rows, strict=True)]
        features = [hb.Feature(name, table=name) for name in log.names]
        made = hb.nn.DLRM(tables, features, DENSE, bottom=(64, DIM), top=(64, 1), seed=seed)
        if case.dense_rows:
            made = WithDenseTables(made, features, case.dense_rows, seed)
        plan = case.plan
        if case.wire != "rows":
            plan = hb.make_plan(tables, dist.get_world_size(), plan, wire=case.wire)
        self.model: Any = hb.distribute(made, plan, hb.ParallelOptions(**case.options))
        self.optimizers = (
            torch.optim.Adam(self.model.parameters(), lr=DENSE_LR),
            hb.optim.RowWiseAdagrad(self.model, lr=SPARSE_LR, **case.rule),
        )
        self.seconds: list[float] = []

    def step(self, batch: hb.Batch) -> None:
        """Take a step when all ranks are ready, and time it."""
        assert batch.labels is not None
        dist.barrier()
        start = time.perf_counter()
        loss = F.binary_cross_entropy_with_logits(self.model(batch), batch.labels)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.embeddings.settle()  # nothing but the next step would hide it here
        self.seconds.append(time.perf_counter() - start)

    @torch.no_grad()
    def scores(self, test: Sequence[hb.Batch]) -> Scores:
        """Score on the test samples of all ranks."""
        self.model.sync()
        self.model.eval()
        logits = torch.cat([self.model(batch)[:, 0] for batch in test])
        labels = torch.cat([batch.labels[:, 0] for batch in test if batch.labels is not None])
        return Scores.of(_gathered(logits), _gathered(labels), BLOCKS)


def train(job: Job) -> dict[str, Any]:
    """Milliseconds of a step, of the slowest rank and the median over steps, and scores, by case."""
    rank, size = dist.get_rank(), dist.get_world_size()
    logging.getLogger("hotbed").setLevel(logging.ERROR)  # options announce that they change results
    log = PlantedLog()
    cases = {name: Trained(case, log, job.seed) for name, case in job.cases.items()}
    for batch in log.batches("train", job.samples, BATCH, seed=job.seed):
        own = share(batch, rank, size)
        for case in cases.values():
            case.step(own)
    test = [share(batch, rank, size) for batch in log.batches("test", job.test_samples, TEST_BATCH)]
    found: dict[str, Any] = {}
    for name, case in cases.items():
        slowest = torch.tensor(case.seconds)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        every = job.cases[name].options.get("sync_every", 1)
        periods = slowest[: len(slowest) // every * every].view(-1, every).mean(1)
        found[name] = {"step_ms": 1e3 * periods.median().item(), **asdict(case.scores(test))}
    return found


def _gathered(values: Tensor) -> Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)


def main() -> None:
    """Be one rank."""
    read = json.loads(sys.argv[1])
    read["cases"] = {name: Case(**case) for name, case in read["cases"].items()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(json.dumps(train(Job(**read))))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
