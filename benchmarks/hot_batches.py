"""What hot rows and pure hot batches are worth where other rows are in files: ``python -m benchmarks.hot_batches``.

One epoch of the same samples (Zipf's law), four ways: all rows in files; the same, with a cache of as many rows as are
hot; hot rows in memory and batches mixed; the same, with hot and cold batches in turns (at the first rate, and without
evaluations). A step is timed from one ``on_step`` to the next. Medians over rounds, which take the ways in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from hotbed.config import Recipe
from hotbed.data import SplitBinaryWriter, ZipfSource
from hotbed.data.hot_loader import HotColdLoader
from hotbed.data.pack import hot_inputs
from hotbed.files import write_json
from hotbed.train import Callback
from hotbed.train.build import build_trainer, open_source
from hotbed.train.hot_rows import pack_by_popularity
from hotbed.train.run import _training_loader


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
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", 500_000), ("tables", 8), ("dim", 64), ("samples", 200_000), ("batch", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--exponent", type=float, default=1.05)
    parser.add_argument("--budget_share", type=float, default=0.1, help="of the bytes of all rows")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
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
        "memory": {"tier": "disk", "directory": str(folder / "rows")},
    }
    budget = int(args.budget_share * args.rows * args.tables * 4 * (args.dim + 1))
    packed = pack_by_popularity(Recipe.from_dict(base), folder / "packed", Console(stderr=True), budget=budget)
    base["data"]["path"] = str(folder / "packed")
    hot = {"rows": str(folder / "packed" / "hot_rows.json")}
    rows = sum(table["hot_rows"] for table in packed["tables"])
    ways: dict[str, dict[str, Any]] = {
        "files": {},
        "files, cached": {"memory": {**base["memory"], "cache_rows": rows}},
        "hot rows, mixed": {"hot": hot},
        "hot rows, apart": {"hot": {**hot, "batches": "apart"}},
    }
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way, more in ways.items():
            runs[way].append(one_epoch(Recipe.from_dict({**base, **more}), packed["tables"]))
    return {
        "settings": {k: v for k, v in vars(args).items() if k != "json"},
        "hot_share": packed["hot_samples"] / packed["samples"],
        "hot_bytes": packed["hot_bytes"],
        "ways": {way: {k: statistics.median(r[k] for r in found) for k in found[0]} for way, found in runs.items()},
    }


def one_epoch(recipe: Recipe, tables: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of an epoch, and medians of steps by kind of batch (from the sixth on)."""
    source = open_source(recipe.data)
    trainer = build_trainer(recipe, source)
    loader: Any = _training_loader(recipe, source, trainer.ranks, trainer.model)
    steps = Steps()
    trainer.callbacks.append(steps)
    limits = {t["table"]: t["hot_rows"] for t in tables}
    again = _training_loader(recipe, source, trainer.ranks, trainer.model)
    kinds = [bool(hot_inputs(batch.sparse, limits).all()) for batch in again]
    trainer.fit(loader)
    of = {name: [s for s, hot in list(zip(steps.seconds, kinds, strict=True))[5:] if hot == kind]
          for name, kind in (("hot_step_ms", True), ("cold_step_ms", False))}  # fmt: skip
    apart = isinstance(loader, HotColdLoader)
    medians = {name: 1000 * statistics.median(s) for name, s in of.items() if s and (apart or name == "cold_step_ms")}
    return {"epoch_s": sum(steps.seconds), **medians}


if __name__ == "__main__":
    main()
