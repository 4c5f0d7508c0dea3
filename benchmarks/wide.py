"""Time small tables between ranks, by rows, copied and all-reduced: ``python -m benchmarks.wide [--json FILE]``.

26 tables of one feature each and a linear layer, 2,048 samples per rank, ids by Zipf's law (1.05), two ranks of a
thread. *By rows* and *copied* are hotbed's schemes ``row`` and ``dp`` with row-wise AdaGrad; *all-reduced* is what
others call data-parallel tables: ``nn.EmbeddingBag`` with dense gradients under torch's DDP, and
``torch.optim.Adagrad``. One column is the wide part of Wide&Deep. As a program with ``--job``, this file is one rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import hotbed as hb
from benchmarks.quality_results import measured_on
from hotbed.config import ParallelRecipe
from hotbed.data.zipf_source import Zipf
from hotbed.files import write_json
from hotbed.train.local_ranks import run_local
from hotbed.train.process_group import process_group

TABLES, BATCH, RANKS, ZIPF, LR = 26, 2_048, 2, 1.05, 0.01
SHAPES = ((1_000, 1), (10_000, 1), (1_000, 16), (10_000, 16))
"""Rows and columns of every table."""
SIDES = ("by rows", "copied", "all-reduced")
NAMES = [f"t{i}" for i in range(TABLES)]


class Linear(nn.Module):
    """A linear layer behind tables."""

    def __init__(self, tables: nn.Module, dim: int) -> None:
        super().__init__()
        self.tables, self.layer = tables, nn.Linear(TABLES * dim, 1)

    def forward(self, batch: Any) -> Tensor:
        found = self.tables(batch)
        vectors = found if isinstance(found, Tensor) else found.stack()
        return self.layer(vectors.reshape(BATCH, -1))


class Side:
    """A model in training.

    Parameters
    ----------
    name
        Of `SIDES`.
    rows, dim
        Of every table.
    """

    def __init__(self, name: str, rows: int, dim: int) -> None:
        self._rows, self._is_plain = rows, name == "all-reduced"
        if self._is_plain:
            model: Any = Linear(nn.EmbeddingBag(TABLES * rows, dim, mode="sum"), dim)
            self.model: Any = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
            self._optimizers: list[Any] = [torch.optim.Adagrad(self.model.parameters(), lr=LR, foreach=True)]
        else:
            tables = [hb.Table(n, rows=rows, dim=dim) for n in NAMES]
            model = Linear(hb.EmbeddingCollection(tables, [hb.Feature(n, table=n) for n in NAMES]), dim)
            self.model = hb.distribute(model, "row" if name == "by rows" else "dp")
            self._optimizers = [
                hb.optim.RowWiseAdagrad(self.model, lr=LR),
                torch.optim.Adagrad(self.model.parameters(), lr=LR, foreach=True),
            ]

    def seconds(self, ids: Tensor, labels: Tensor) -> float:
        """Time a step with ids ``[TABLES, BATCH]``."""
        if self._is_plain:
            batch: Any = (ids + torch.arange(TABLES)[:, None] * self._rows).T.reshape(-1, 1)
        else:
            batch = hb.Jagged(NAMES, ids.flatten(), batch_size=BATCH, fixed=[1] * TABLES)
        dist.barrier()
        start = time.perf_counter()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        binary_cross_entropy_with_logits(self.model(batch), labels).backward()
        for optimizer in self._optimizers:
            optimizer.step()
        return time.perf_counter() - start


def measure(rows: int, dim: int, steps: int) -> dict[str, float]:
    """Median milliseconds of a step of the slower rank, by side; all sides in turns."""
    torch.set_num_threads(1)
    rank, law = dist.get_rank(), Zipf(rows, ZIPF)
    sides = {name: Side(name, rows, dim) for name in SIDES}
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    labels = torch.rand(BATCH, 1, generator=torch.Generator().manual_seed(rank))
    for step in range(3 + steps):
        drawn = law.draw((rank, step), np.arange(TABLES * BATCH, dtype=np.uint64))
        ids = torch.from_numpy(drawn.astype(np.int64)).view(TABLES, BATCH)
        for name, side in sides.items():
            slower = torch.tensor(side.seconds(ids, labels))
            dist.all_reduce(slower, dist.ReduceOp.MAX)
            times[name].append(slower.item())
    return {name: 1e3 * statistics.median(of_side[3:]) for name, of_side in times.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all shapes, or be one rank of one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.job:
        rows, dim, steps, folder = json.loads(args.job)
        with process_group(ParallelRecipe(), "cpu"):
            found = measure(rows, dim, steps)
            if dist.get_rank() == 0:
                Path(folder, "found.json").write_text(json.dumps(found), encoding="utf-8")
        return
    view = Table("rows × columns", *SIDES, "copied ÷ all-reduced", title="ms per step", box=MARKDOWN)
    results: dict[str, dict[str, float]] = {}
    for rows, dim in SHAPES:
        with TemporaryDirectory() as folder:
            job = json.dumps([rows, dim, args.steps, folder])
            run_local([sys.executable, "-m", "benchmarks.wide", "--job", job], RANKS, Path(folder))
            of_shape: dict[str, float] = json.loads(Path(folder, "found.json").read_text(encoding="utf-8"))
        results[f"{rows:,} × {dim}"] = of_shape
        cells = [f"{of_shape[name]:.2f}" for name in SIDES]
        view.add_row(f"{rows:,} × {dim}", *cells, f"{of_shape['copied'] / of_shape['all-reduced']:.2f}")
    Console().print(view)
    if args.json:
        write_json(args.json, {"measured on": measured_on(), "step_ms": results})


if __name__ == "__main__":
    main()
