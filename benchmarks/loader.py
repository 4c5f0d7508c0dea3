"""Measure reading: rates of loaders, the share of time that training waits for them, and readers of several trainers.

    python -m benchmarks.loader [--only rates stalls pool] [--samples 4000000] [--rounds 3] [--json FILE]

*rates*: hotbed's loader, PyTorch's, TorchRec's and a bare loop of ``preadv`` over the same samples
(`benchmarks.loader_rates`). ``make bench-peers`` makes an environment with TorchRec. *stalls*: ``stall_share`` of the
demo's model, and of a model of lookups only. *pool*: two trainers that read through the two workers of a Dask cluster.
Rounds take turns, so that all sides meet the same load. The machine must be idle.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hotbed as hb
from benchmarks import loader_rates, runner
from hotbed.cli.demo import demo_recipe
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.files import write_json

BATCHES = (1_024, 65_536)
WORKERS = 2
SECONDS = 3.0
MEASURED = ("samples_per_s", "stall_share")


class LookupsOnly(nn.Module):
    """A model that looks rows up and adds them, which is the least work for a batch."""

    def __init__(
        self, tables: Sequence[hb.Table], features: Sequence[hb.Feature], dense_features: int, seed: int
    ) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(tables, features, seed=seed)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: hb.Batch) -> Tensor:
        return self.embeddings(batch.sparse).concatenate().sum(1, keepdim=True) + self.bias


def rates(folder: Path, samples: int, rounds: int) -> list[dict[str, Any]]:
    """Return samples per second of each loader, by batch size."""
    loader_rates.write_data(folder, samples)
    sides = {
        (name, batch): lambda begin=begin: loader_rates.rate(begin, SECONDS)
        for batch in BATCHES
        for name, begin in loader_rates.sides(folder, batch, WORKERS).items()
    }
    found = runner.in_turns({f"{name}|{batch}": side for (name, batch), side in sides.items()}, rounds, title="rates")
    return [
        {"loader": name, "batch_size": batch, "samples_per_s": of}
        for (name, batch), of in zip(sides, found.values(), strict=True)
    ]


def stalls(folder: Path, samples: int, rounds: int) -> list[dict[str, Any]]:
    """Return the share of time that training waits for batches, by model."""
    recipes = make_recipes(folder, samples)
    turns = runner.progress([model for _ in range(rounds) for model in recipes], "stalls")
    return [{"model": model, **found} for model in turns for found in train(folder, [recipes[model]])]


def pool(folder: Path, samples: int, rounds: int) -> list[dict[str, Any]]:
    """Return the same for two trainers at once, with readers in threads and in the workers of a cluster."""
    from distributed import LocalCluster

    recipes = make_recipes(folder, samples)
    found: list[dict[str, Any]] = []
    with LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as cluster:
        executors = {"threads": "threads", "pool": f"dask:{cluster.scheduler_address}"}
        turns = [(model, name) for _ in range(rounds) for model in recipes for name in executors]
        for model, name in runner.progress(turns, "pool"):
            options = ["--data.executor", executors[name], "--data.workers", str(WORKERS)]
            for trainer, waits in enumerate(train(folder, [recipes[model]] * 2, options)):
                found.append({"model": model, "readers": name, "trainer": trainer, **waits})
    return found


def make_recipes(folder: Path, samples: int) -> dict[str, Path]:
    """Write recipes of the demo's model and of one of lookups only, for a synthetic log."""
    if not (folder / "data").exists():
        hb.data.write_synthetic_log(folder / "log.tsv", samples, seed=0)
        prepare(folder / "log.tsv", folder / "data", test_fraction=0.01)
    demo = demo_recipe(folder / "data", samples).to_dict()
    demo["train"] |= {"checkpoint": "none"}
    demo["data"] |= {"shuffle": True}
    lookups = {**demo, "model": {"class_path": "benchmarks.loader.LookupsOnly", "init_args": {}}}
    lookups["train"] = demo["train"] | {"batch_size": 4096}
    return {
        name: runner.write_recipe(folder / f"{name.replace(' ', '_')}.yaml", values)
        for name, values in (("demo", demo), ("lookups only", lookups))
    }


def train(folder: Path, recipes: Sequence[Path], options: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Run ``hotbed train`` for several recipes at once, and return rates and waits of each."""
    runs: list[tuple[subprocess.Popen[str], Path]] = []
    for i, recipe in enumerate(recipes):
        out = folder / f"summary-{i}.json"
        command = [sys.executable, "-m", "hotbed", "train", str(recipe), "--json", str(out), *options]
        command += ["--out", str(folder / f"runs-{i}")]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
        runs.append((subprocess.Popen(command, cwd=runner.ROOT, **quiet), out))
    for process, _ in runs:
        errors = process.communicate()[1]
        if process.returncode:
            raise SystemExit(errors)
    summaries = [runner.read_json(out) for _, out in runs]
    return [{name: summary[name] for name in MEASURED[::-1]} for summary in summaries]


def report(subject: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Print the medians of each case, and rates as shares of the bare loop's."""
    cases: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for result in results:
        case = cases.setdefault(tuple((k, v) for k, v in result.items() if k not in MEASURED), {})
        for m in MEASURED:
            if m in result:
                case.setdefault(m, []).extend(result[m] if isinstance(result[m], list) else [result[m]])
    rows = [dict(case) | {m: statistics.median(of[m]) for m in of} for case, of in cases.items()]
    bare = {row["batch_size"]: row["samples_per_s"] for row in rows if row.get("loader") == "bare preadv"}
    shares = [{"of bare preadv": row["samples_per_s"] / bare[row["batch_size"]]} if bare else {} for row in rows]
    runner.show(subject, [row | share for row, share in zip(rows, shares, strict=True)])


def main() -> None:
    measures = {"rates": (rates, 1), "stalls": (stalls, 10), "pool": (pool, 10)}
    parser = runner.arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(measures), default=list(measures))
    parser.add_argument("--samples", type=int, default=4_000_000, help="Samples of rates; a tenth for training.")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    found: dict[str, Any] = runner.read_json(args.json) or {"results": {}}
    with tempfile.TemporaryDirectory() as folder:
        for subject in args.only:
            measure, divisor = measures[subject]
            samples = args.samples // divisor
            results = found["results"][subject] = measure(Path(folder), samples, args.rounds)
            report(subject, results)
            about = runner.about(samples=samples, workers=WORKERS, torchrec=loader_rates.HAS_TORCHREC)
            found.setdefault("measured", {})[subject] = about
            if args.json:
                write_json(args.json, found)


if __name__ == "__main__":
    main()
