"""Measure here what NVIDIA's 113-billion-parameter DLRM reports a gain for, and show both gains.

    python -m benchmarks.ablation [--only mixed_precision fused_tables compile host_tables broadcast] [--rounds 5]
                                  [--json FILE] [--quick]

A gain is seconds of a step without the thing ÷ seconds with it; both sides take turns in one process (the loaders: in
turn, two processes each). The published figures are of another machine, 8 or 1 A100, and of TensorFlow 2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from hotbed.commands.demo import demo_recipe
from hotbed.data import write_synthetic_log
from hotbed.data.prepare import prepare

ROOT = Path(__file__).resolve().parents[1]
BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)


class Sizes(NamedTuple):
    """Tables, their rows, samples of a batch, steps of a measurement, samples of the loaders' log."""

    tables: int = 26
    rows: int = 100_000
    batch: int = 2048
    steps: int = 4
    samples: int = 200_000


class Case(NamedTuple):
    """What measures it, if anything can, and the published gain."""

    gain: Callable[[Sizes], float] | None
    published: str


class Unfused(nn.Module):
    """A collection per table: as many lookups and updates as there are tables."""

    def __init__(self, tables: list[hb.Table], features: list[hb.Feature]) -> None:
        super().__init__()
        self.each = nn.ModuleList(hb.EmbeddingCollection([t], [f]) for t, f in zip(tables, features, strict=True))

    def forward(self, ids: hb.Jagged) -> Tensor:
        """``[B, F, D]``."""
        return torch.stack([collection(ids).stack()[:, 0] for collection in self.each], dim=1)


class Fused(nn.Module):
    """One collection of all tables."""

    def __init__(self, tables: list[hb.Table], features: list[hb.Feature]) -> None:
        super().__init__()
        self.all = hb.EmbeddingCollection(tables, features)

    def forward(self, ids: hb.Jagged) -> Tensor:
        """``[B, F, D]``."""
        return self.all(ids).stack()


def specs(sizes: Sizes) -> tuple[list[hb.Table], list[hb.Feature]]:
    """Tables of 128 columns, a feature each."""
    tables = [hb.Table(f"t{i}", rows=sizes.rows, dim=128) for i in range(sizes.tables)]
    return tables, [hb.Feature(t.name, table=t.name) for t in tables]


def batch(sizes: Sizes, seed: int) -> hb.Batch:
    """Random samples; popular ids are popular."""
    draw = torch.Generator().manual_seed(seed)
    ids = (torch.rand(sizes.tables * sizes.batch, generator=draw, dtype=torch.float64) ** 4 * sizes.rows).long()
    return hb.Batch(
        sparse=hb.Jagged([f"t{i}" for i in range(sizes.tables)], ids, batch_size=sizes.batch),
        dense=torch.randn(sizes.batch, 13, generator=draw),
        labels=torch.rand(sizes.batch, 1, generator=draw).round(),
    )


def dlrm_step(sizes: Sizes, *, bf16: bool = True, compiled: bool = False) -> Callable[[hb.Batch], None]:
    """A training step of a whole DLRM."""
    torch.manual_seed(0)
    model = hb.nn.DLRM(*specs(sizes), 13, bottom=BOTTOM, top=TOP)
    dense, sparse = torch.optim.SGD(model.parameters(), lr=0.01), hb.optim.RowWiseAdagrad(model, lr=0.01)
    if compiled:
        model.compile()

    def step(samples: hb.Batch) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(samples)
        dense.zero_grad()
        F.binary_cross_entropy_with_logits(logits.float(), samples.labels).backward()
        dense.step()
        sparse.step()

    return step


def embedding_step(sizes: Sizes, kind: type[nn.Module]) -> Callable[[hb.Batch], None]:
    """Lookup, backward and update of all tables."""
    model = kind(*specs(sizes))
    sparse = hb.optim.RowWiseAdagrad(model, lr=0.01)
    grad = torch.randn(sizes.batch, sizes.tables, 128)

    def step(samples: hb.Batch) -> None:
        model(samples.sparse).backward(grad)
        sparse.step()

    return step


def alternated(sizes: Sizes, without: Callable[[hb.Batch], None], with_it: Callable[[hb.Batch], None]) -> float:
    """Median seconds of a step without ÷ with, in turns; the first two of each are not counted."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for i in range(2 + sizes.steps):
        for given, step in ((False, without), (True, with_it)):
            samples = batch(sizes, i)
            start = time.perf_counter()
            step(samples)
            times[given].append(time.perf_counter() - start)
    return statistics.median(times[False][2:]) / statistics.median(times[True][2:])


def mixed_precision(sizes: Sizes) -> float:
    """float32 ÷ bf16 autocast."""
    return alternated(sizes, dlrm_step(sizes, bf16=False), dlrm_step(sizes))


def fused_tables(sizes: Sizes) -> float:
    """A launch per table ÷ one for all."""
    return alternated(sizes, embedding_step(sizes, Unfused), embedding_step(sizes, Fused))


def compilation(sizes: Sizes) -> float:
    """Eager ÷ torch.compile of the dense part."""
    return alternated(sizes, dlrm_step(sizes), dlrm_step(sizes, compiled=True))


def broadcast(sizes: Sizes) -> float:
    """Training on two processes that each read all data ÷ where one reads and sends the other its half."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.tsv"
        write_synthetic_log(log, sizes.samples, seed=0, test_fraction=0.05)
        made = prepare(log, Path(folder) / "data", threshold=2, test_fraction=0.05)
        values = demo_recipe(Path(folder) / "data", made.samples["train"]).to_dict()
        values["data"] |= {"shuffle": True, "test_split": None}
        values["train"] |= {"batch_size": 4096, "checkpoint": "none"}
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(json.loads(json.dumps(values))), encoding="utf-8")
        rates: dict[str, float] = {}
        for reader in ("each", "first"):
            summary = Path(folder) / f"{reader}.json"
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
            options = ["--parallel.reader", reader, "--out", folder, "--json", str(summary)]
            done = subprocess.run(
                [*torchrun, "-m", "hotbed", "train", str(recipe), *options],
                cwd=ROOT, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"reader {reader}: {done.stderr[-2000:]}")
            rates[reader] = json.loads(summary.read_text(encoding="utf-8"))["samples_per_s"]
    return rates["first"] / rates["each"]


NOT_YET = "not measured: needs tables in host memory under a GPU, which hotbed has not yet"
CASES: Mapping[str, Case] = {
    "mixed_precision": Case(mixed_precision, "1.23"),
    "fused_tables": Case(fused_tables, "1.39"),
    "compile": Case(compilation, "3.36"),
    "broadcast": Case(broadcast, "1.32"),
    "host_tables": Case(None, "15.5"),
}


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    args = parser.parse_args()
    sizes = Sizes(tables=3, rows=100, batch=64, steps=2, samples=2000) if args.quick else Sizes()
    console = Console(width=None if sys.stdout.isatty() else 120)
    gains: dict[str, list[float]] = {name: [] for name in args.only}
    for _ in track(range(1 if args.quick else args.rounds), "ablation", console=console):
        for name, found in gains.items():
            if (gain := CASES[name].gain) is not None:
                found.append(gain(sizes))
    results: dict[str, dict[str, Any]] = {}
    table = RichTable("", "gain here", "published", "", title=str(sizes), title_justify="left")
    for name in args.only:
        case, found = CASES[name], gains[name]
        results[name] = {"published": float(case.published), "gains": found}
        shown = "–"
        if found:
            results[name] |= {"gain": statistics.median(found)}
            shown = f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})"
        table.add_row(name, shown, case.published, NOT_YET if case.gain is None else (case.gain.__doc__ or "")[:-1])
    console.print(table)
    if args.json:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        about = {"load": os.getloadavg(), "date": date, "sizes": sizes._asdict()}
        args.json.write_text(json.dumps({"results": results, "measured": about}, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
