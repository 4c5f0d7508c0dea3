"""Measure reading: rates of loaders, how long training waits for them, and readers that trainers share.

    python -m benchmarks.loader [--only rates stalls pool] [--samples 4000000] [--rounds 3] [--json FILE]

*rates*: hotbed's loader, PyTorch's, TorchRec's and a bare loop of ``preadv`` over the same samples
(`benchmarks.loader_rates`). TorchRec's own is measured where it is installed: ``make bench-peers`` makes an environment
that has it. *stalls*: ``stall_share`` of the demo's model, and of one that is lookups only. *pool*: two trainers that
are fed by the two workers of a Dask cluster. Rounds take turns, so that all of them meet the same load. The machine
must be idle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import hotbed as hb
from benchmarks import loader_rates
from hotbed.cli.demo import demo_recipe
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.train.runs.report import environment

ROOT = Path(__file__).resolve().parents[1]
SUBJECTS = ("rates", "stalls", "pool")
BATCHES = (1_024, 65_536)
WORKERS = 2
SECONDS = 3.0
DIM = 16


class LookupsOnly(nn.Module):
    """A model that looks rows up and adds them: the least that can be done with a batch."""

    def __init__(
        self, tables: Sequence[hb.Table], features: Sequence[hb.Feature], dense_features: int, seed: int
    ) -> None:
        super().__init__()
        self.embeddings = hb.EmbeddingCollection(tables, features, seed=seed)
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, batch: hb.Batch) -> Tensor:
        return self.embeddings(batch.sparse).concatenate().sum(1, keepdim=True) + self.bias


def rates(folder: Path, samples: int, rounds: int) -> list[dict[str, Any]]:
    """Samples per second of each loader, by batch size."""
    loader_rates.write_data(folder, samples)
    found: dict[tuple[str, int], list[float]] = {}
    sides = {batch: loader_rates.sides(folder, batch, WORKERS) for batch in BATCHES}
    turns = [(batch, name) for _ in range(rounds) for batch in BATCHES for name in sides[batch]]
    for batch, name in _track(turns, "rates"):
        found.setdefault((name, batch), []).append(loader_rates.rate(sides[batch][name], SECONDS))
    return [{"loader": name, "batch_size": batch, "samples_per_s": of} for (name, batch), of in found.items()]


def stalls(folder: Path, samples: int, rounds: int) -> list[dict[str, Any]]:
    """Shares of the time in which training waits for batches, by model."""
    recipes = make_recipes(folder, samples)
    found: list[dict[str, Any]] = []
    for _, model in _track([(i, model) for i in range(rounds) for model in recipes], "stalls"):
        (summary,) = train(folder, [recipes[model]])
        found.append({"model": model, **_waits(summary)})
    return found


def pool(folder: Path, samples: int, rounds: int) -> list[dict[str, Any]]:
    """The same of two trainers at once, by where their batches are read."""
    from distributed import LocalCluster

    recipes = make_recipes(folder, samples)
    found: list[dict[str, Any]] = []
    with LocalCluster(n_workers=WORKERS, threads_per_worker=1, dashboard_address=None) as cluster:
        executors = {"threads": "threads", "pool": f"dask:{cluster.scheduler_address}"}
        turns = [(model, name) for _ in range(rounds) for model in recipes for name in executors]
        for model, name in _track(turns, "pool"):
            options = ["--data.executor", executors[name], "--data.workers", str(WORKERS)]
            for trainer, summary in enumerate(train(folder, [recipes[model]] * 2, options)):
                found.append({"model": model, "readers": name, "trainer": trainer, **_waits(summary)})
    return found


def make_recipes(folder: Path, samples: int) -> dict[str, Path]:
    """The demo's model on a log that is written here, and one that is lookups only."""
    if not (folder / "data").exists():
        hb.data.write_synthetic_log(folder / "log.tsv", samples, seed=0)
        prepare(folder / "log.tsv", folder / "data", test_fraction=0.01)
    demo = demo_recipe(folder / "data", samples).to_dict()
    demo["train"] |= {"checkpoint": "none"}
    demo["data"] |= {"shuffle": True}
    lookups = {**demo, "model": {"class_path": "benchmarks.loader.LookupsOnly", "init_args": {}}}
    lookups["train"] = demo["train"] | {"batch_size": 4096}
    found: dict[str, Path] = {}
    for name, values in (("demo", demo), ("lookups only", lookups)):
        found[name] = folder / f"{name.replace(' ', '_')}.yaml"
        found[name].write_text(yaml.safe_dump(json.loads(json.dumps(values))), encoding="utf-8")
    return found


def train(folder: Path, recipes: Sequence[Path], options: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Summaries of runs of ``hotbed train`` that begin together."""
    runs: list[tuple[subprocess.Popen[str], Path]] = []
    for i, recipe in enumerate(recipes):
        out = folder / f"summary-{i}.json"
        command = [sys.executable, "-m", "hotbed", "train", str(recipe), "--json", str(out)]
        command += ["--out", str(folder / f"runs-{i}"), *options]
        runs.append(
            (subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True), out)
        )
    for process, _ in runs:
        _, said = process.communicate()
        if process.returncode:
            raise SystemExit(said)
    return [json.loads(out.read_text(encoding="utf-8")) for _, out in runs]


def _waits(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in ("stall_share", "samples_per_s")}


def report(subject: str, results: Sequence[Mapping[str, Any]]) -> Table:
    """A row per case, with medians of its measurements."""
    measured = ("samples_per_s", "stall_share")
    names = [name for name in results[0] if name not in measured]
    table = Table(*names, *(m for m in measured if m in results[0]), title=subject, title_justify="left")
    cases: dict[tuple[str, ...], dict[str, list[float]]] = {}
    for result in results:
        case = cases.setdefault(tuple(str(result[name]) for name in names), {})
        for m in measured:
            if m in result:
                case.setdefault(m, []).extend(result[m] if isinstance(result[m], list) else [result[m]])
    bare = {case[1]: statistics.median(of["samples_per_s"]) for case, of in cases.items() if case[0] == "bare preadv"}
    for case, of in cases.items():
        median = statistics.median(of["samples_per_s"])
        share = f"  ({median / bare[case[1]]:.0%})" if len(case) > 1 and case[1] in bare else ""
        cells = [f"{median:,.0f}{share}", *(f"{statistics.median(of[m]):.1%}" for m in measured[1:] if m in of)]
        table.add_row(*case, *cells)
    return table


def _track(turns: Sequence[Any], what: str) -> Any:
    return track(turns, what, console=Console(stderr=True), transient=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=SUBJECTS)
    parser.add_argument("--samples", type=int, default=4_000_000, help="of rates; a tenth for training")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write results here, after each subject; those of others stay")
    args = parser.parse_args(argv)
    measures = {"rates": (rates, 1), "stalls": (stalls, 10), "pool": (pool, 10)}
    found: dict[str, Any] = {"results": {}}
    if args.json and args.json.exists():
        found = json.loads(args.json.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        for subject in args.only:
            measure, less = measures[subject]
            samples = args.samples // less
            results = found["results"][subject] = measure(Path(folder), samples, args.rounds)
            Console().print(report(subject, results))
            about = {**environment(torch.device("cpu")), "date": datetime.now(UTC).isoformat(timespec="seconds")}
            about |= {"samples": samples, "workers": WORKERS, "torchrec": loader_rates.HAS_TORCHREC}
            found.setdefault("measured", {})[subject] = about
            if args.json:
                args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
