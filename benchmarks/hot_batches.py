"""Measure what hot rows, pure hot batches and split batches are worth where other rows take longer to read.

    python -m benchmarks.hot_batches                            # one process, the other rows in files
    python -m benchmarks.hot_batches --ranks 2 --limit 1000     # processes, the other rows behind a link, Mbit/s

One epoch of the same samples (Zipf's law), in several ways: all rows in files (and again with a cache of as many rows
as are hot), or cut row-wise; hot rows in the memory of every process, and batches as they come; the same with batches
that are split, and with hot and cold batches in turns (at the first rate, and without evaluations). A step is timed
from one ``on_step`` to the next, of the slowest process. Medians over rounds, which take the ways in turns.

Links are those of `benchmarks.net`, which needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import track

import hotbed as hb
from benchmarks.net.hosts import Hosts, available, run_ranks
from hotbed.commands.pack import pack_by_popularity
from hotbed.config import ParallelRecipe, Recipe
from hotbed.data import SplitBinaryWriter, ZipfSource
from hotbed.data.hot_loader import HotColdLoader
from hotbed.data.pack import hot_inputs
from hotbed.files import write_json
from hotbed.plan.cost import table_bytes
from hotbed.train import Callback
from hotbed.train.build import build_trainer, open_source
from hotbed.train.loaders import training_loader
from hotbed.train.process_group import process_group
from hotbed.train.report import environment


class Steps(Callback):
    """Seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_start(self, trainer: Any) -> None:
        self._last = time.perf_counter()

    def on_step(self, trainer: Any, loss: float) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1] == "--epoch":  # a process of several
        job = json.loads(sys.argv[2])
        torch.set_num_threads(1)
        with process_group(ParallelRecipe(), "cpu"):
            print(json.dumps(one_epoch(Recipe.from_dict(job["recipe"]), job["tables"])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 500_000), ("tables", 8), ("dim", 64), ("samples", 200_000), ("batch", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--budget_share", type=float, default=0.1, help="of the bytes of all rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--limit", type=float, help="of each process's link, Mbit/s; default: none")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.ranks > 1 and (reason := available()):
        raise SystemExit(f"cannot measure here: {reason}")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    print(json.dumps(found, indent=2))
    if args.json:
        write_json(args.json, found)


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    (folder / "tables.yaml").write_text(yaml.safe_dump({"rows": [args.rows] * args.tables, "dense": 13}))
    made = ZipfSource(folder / "tables.yaml", train_samples=args.samples, valid_samples=1000, exponent=args.exponent)
    (folder / "data").mkdir()
    with SplitBinaryWriter(folder / "data", made.schema, ["train", "valid"]) as writer:
        for split in ("train", "valid"):
            for i in range(len(made.chunks(split))):
                writer.append(split, made.read(split, i))
    base: dict[str, Any] = {
        "name": "hot",
        "data": {"path": str(folder / "data"), "dim": args.dim, "valid_split": "valid", "test_split": None},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [64, args.dim], "top": [64, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.05}},
        "train": {"batch_size": args.batch, "checkpoint": "none", "device": "cpu"},
    }
    if args.ranks == 1:
        base["memory"] = {"tier": "disk", "directory": str(folder / "rows")}
    else:
        base["parallel"] = {"plan": "row"}
    table = hb.Table("t", args.rows, args.dim)
    budget = int(args.budget_share * args.tables * table_bytes(table, hb.optim.RowWiseAdagrad.rule.moments))
    packed = pack_by_popularity(Recipe.from_dict(base), folder / "packed", Console(stderr=True), budget=budget)
    base["data"]["path"] = str(folder / "packed")
    hot = {"rows": str(folder / "packed" / "hot_rows.json")}
    rows = sum(table["hot_rows"] for table in packed["tables"])
    ways: dict[str, dict[str, Any]] = {"files" if args.ranks == 1 else "cut into rows": {}}
    if args.ranks == 1:
        ways["files, cached"] = {"memory": {**base["memory"], "cache_rows": rows}}
    ways |= {
        f"hot rows, {batches}": {"hot": {**hot, "batches": batches}} for batches in ("mixed", "split", "alternating")
    }
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in track(range(args.rounds), "epochs", console=Console(stderr=True)):
        for way, more in ways.items():
            recipe = {**base, **more}
            if args.ranks == 1:
                runs[way].append(one_epoch(Recipe.from_dict(recipe), packed["tables"]))
            else:
                runs[way].append(epoch_of_ranks(args, {"recipe": recipe, "tables": packed["tables"]}))
    return {
        "settings": {k: v for k, v in vars(args).items() if k != "json"},
        "measured": environment(torch.device("cpu")),
        "hot_share": packed["hot_samples"] / packed["samples"],
        "hot_bytes": packed["hot_bytes"],
        "ways": {way: {k: statistics.median(r[k] for r in found) for k in found[0]} for way, found in runs.items()},
    }


def epoch_of_ranks(args: argparse.Namespace, job: dict[str, Any]) -> dict[str, float]:
    """The same as `one_epoch` of each process; the slowest counts."""
    with Hosts(args.ranks, args.limit) as hosts:
        command = [sys.executable, "-m", "benchmarks.hot_batches", "--epoch", json.dumps(job)]
        found = run_ranks(hosts, command, timeout_s=600)
    return {key: max(rank[key] for rank in found) for key in found[0]}


def one_epoch(recipe: Recipe, tables: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of an epoch, and medians of steps by kind of batch (from the sixth on)."""
    source = open_source(recipe.data)
    trainer = build_trainer(recipe, source)
    loader: Any = training_loader(recipe, source, trainer.ranks, trainer.model)
    steps = Steps()
    trainer.callbacks.append(steps)
    limits = {t["table"]: t["hot_rows"] for t in tables}
    again = training_loader(recipe, source, trainer.ranks, trainer.model)
    kinds = [bool(hot_inputs(batch.sparse, limits).all()) for batch in again]
    trainer.fit(loader)
    of = {name: [s for s, hot in list(zip(steps.seconds, kinds, strict=True))[5:] if hot == kind]
          for name, kind in (("hot_step_ms", True), ("cold_step_ms", False))}  # fmt: skip
    apart = isinstance(loader, HotColdLoader)
    medians = {name: 1000 * statistics.median(s) for name, s in of.items() if s and (apart or name == "cold_step_ms")}
    return {"epoch_s": sum(steps.seconds), **medians}


if __name__ == "__main__":
    main()
