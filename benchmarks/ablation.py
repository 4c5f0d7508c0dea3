"""Measure here what NVIDIA's 113-billion-parameter DLRM reports a gain for, and show both gains.

    python -m benchmarks.ablation [--only mixed_precision compile …] [--rounds 5] [--json FILE] [--quick]
    python -m benchmarks.ablation --isa [--json FILE]

A gain is seconds of a step without the thing ÷ seconds with it; both sides take turns in one process (the loaders: in
turn, two processes each). The published figures are of another machine, 8 or 1 A100, and of TensorFlow 2.

With ``--isa`` mixed precision is measured once for each set of instructions that this CPU has: torch, oneDNN and Numba
are told, in processes of their own, to use no later ones.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
from benchmarks.json_lines import CHUNK as JSON_CHUNK
from benchmarks.json_lines import write_json_lines
from hotbed.cli.demo import demo_recipe
from hotbed.data import write_synthetic_log
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.embed import tables_on_meta
from hotbed.files import write_json
from hotbed.machine import cpu
from hotbed.train.runs.report import environment

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
    """What measures it, and the published gain, if there is one."""

    gain: Callable[[Sizes], float]
    published: float | None


class Unfused(nn.Module):
    """A collection per table: as many lookups and updates as there are tables."""

    def __init__(self, tables: list[hb.Table], features: list[hb.Feature]) -> None:
        super().__init__()
        self.each = nn.ModuleList(hb.EmbeddingCollection([t], [f]) for t, f in zip(tables, features, strict=True))

    def forward(self, ids: hb.Jagged) -> Tensor:
        """``[B, F, D]``."""
        return torch.stack([collection(ids).stack()[:, 0] for collection in self.each], dim=1)


class UnfusedDLRM(nn.Module):
    """A DLRM with a collection per table."""

    def __init__(self, tables: list[hb.Table], features: list[hb.Feature]) -> None:
        super().__init__()
        self.tables = Unfused(tables, features)
        self.layers = hb.nn.DLRM([replace(t, rows=1) for t in tables], features, 13, bottom=BOTTOM, top=TOP)
        del self.layers.embeddings  # of which only the other layers are wanted

    def forward(self, samples: hb.Batch) -> Tensor:
        """Logits ``[B, 1]``."""
        assert samples.dense is not None
        dense = self.layers.bottom(samples.dense)[:, None]
        return self.layers.top(self.layers.interaction(torch.cat([dense, self.tables(samples.sparse)], dim=1)))


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


def dlrm(tables: list[hb.Table], features: list[hb.Feature]) -> nn.Module:
    """NVIDIA's DLRM, all of whose tables are one collection."""
    return hb.nn.DLRM(tables, features, 13, bottom=BOTTOM, top=TOP)


def dlrm_step(
    sizes: Sizes, make: Callable[..., nn.Module] = dlrm, *, bf16: bool = True, compiled: bool = False
) -> Callable[[hb.Batch], None]:
    """A training step of a whole DLRM."""
    torch.manual_seed(0)
    model = make(*specs(sizes))
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


def embedding_step(sizes: Sizes, make: Callable[..., nn.Module]) -> Callable[[hb.Batch], None]:
    """Lookup, backward and update of all tables."""
    model = make(*specs(sizes))
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
    """A whole step with a launch per table ÷ with one for all."""
    return alternated(sizes, dlrm_step(sizes, UnfusedDLRM), dlrm_step(sizes))


def fused_lookups(sizes: Sizes) -> float:
    """The same of lookup, backward and update alone."""
    return alternated(sizes, embedding_step(sizes, Unfused), embedding_step(sizes, Fused))


def in_host_memory(tables: list[hb.Table], features: list[hb.Feature]) -> nn.Module:
    """NVIDIA's DLRM with rows as records in the host's memory, behind no cache."""
    with tables_on_meta():
        model = dlrm(tables, features)
    return hb.distribute(model, hb.make_plan(tables, 1, hb.Cut(tier="host")), device="cpu")


def host_tables(sizes: Sizes) -> float:
    """A whole step with rows in the tier of the host's memory ÷ in the device's; a CPU has one memory for both."""
    return alternated(sizes, dlrm_step(sizes, in_host_memory), dlrm_step(sizes))


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
        return rate_of_readers(values, Path(folder))


def broadcast_slow(sizes: Sizes) -> float:
    """The same of lines of JSON, read by a source in Python, and a small model."""
    with tempfile.TemporaryDirectory() as folder:
        write_json_lines(Path(folder) / "data", sizes.samples)
        source = {"class_path": "benchmarks.json_lines.JsonLines"}
        model = {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16], "top": [16, 1]}}
        values = {
            "name": "json_lines",
            "data": {"path": f"{folder}/data", "dim": 16, "test_split": None, "workers": 1, "source": source},
            "model": model,
            "dense_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
            "sparse_optimizer": {"class_path": "hotbed.optim.SGD", "init_args": {"lr": 0.01}},
            "train": {"batch_size": JSON_CHUNK, "checkpoint": "none"},
        }
        return rate_of_readers(values, Path(folder))


def rate_of_readers(values: Mapping[str, Any], folder: Path) -> float:
    """Samples/s of a recipe on two processes where the first reads for both ÷ where each reads."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(json.loads(json.dumps(values))), encoding="utf-8")
    rates: dict[str, float] = {}
    for reader in ("each", "first"):
        summary = folder / f"{reader}.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        options = ["--parallel.reader", reader, "--out", str(folder), "--json", str(summary)]
        done = subprocess.run(
            [*torchrun, "-m", "hotbed", "train", str(recipe), *options],
            cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode:
            said = [line for line in done.stderr.splitlines() if "hotbed: error" in line] or [done.stderr[-2000:]]
            raise RuntimeError(f"reader {reader}: {said[0]}")
        rates[reader] = json.loads(summary.read_text(encoding="utf-8"))["samples_per_s"]
    return rates["first"] / rates["each"]


CASES: Mapping[str, Case] = {
    "mixed_precision": Case(mixed_precision, 1.23),
    "fused_tables": Case(fused_tables, 1.39),
    "fused_lookups": Case(fused_lookups, None),
    "compile": Case(compilation, 3.36),
    "broadcast": Case(broadcast, 1.32),
    "broadcast_slow": Case(broadcast_slow, 1.32),
    "host_tables": Case(host_tables, 15.5),
}


# -- sets of instructions ------------------------------------------------------------------------------------------


class Isa(NamedTuple):
    """A set of instructions: what a CPU that has it says, what oneDNN and torch call it, Numba's CPU and features."""

    needs: str
    onednn: str
    torch: str
    numba: tuple[str, str]


AVX2 = "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
ISAS = {
    "AVX2": Isa("avx2", "AVX2", "avx2", ("haswell", AVX2)),
    "AVX-512": Isa("avx512f", "AVX512_CORE", "avx512", ("skylake-avx512", AVX512)),
    "AVX-512 with bf16": Isa("avx512_bf16", "AVX512_CORE_BF16", "avx512", ("cooperlake", f"{AVX512},+avx512bf16")),
    "AMX": Isa("amx_bf16", "AVX512_CORE_AMX", "avx512", ("sapphirerapids", f"{AVX512},+avx512bf16,+amx-bf16")),
}


def by_isa(options: Sequence[str]) -> dict[str, Any]:
    """Measure mixed precision with each set of instructions that there is, each in a process of its own."""
    found: dict[str, Any] = {}
    for name, isa in ISAS.items():
        if not has(isa):
            continue
        limits = {"ONEDNN_MAX_CPU_ISA": isa.onednn, "ATEN_CPU_CAPABILITY": isa.torch}
        limits |= dict(zip(("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"), isa.numba, strict=True))
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "found.json"
            command = [sys.executable, "-m", "benchmarks.ablation", "--only", "mixed_precision", *options]
            subprocess.run([*command, "--json", str(file)], cwd=ROOT, env=os.environ | limits, check=True)
            found[name] = json.loads(file.read_text(encoding="utf-8"))["results"]["mixed_precision"]
    return found


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    which.add_argument("--isa", action="store_true", help="mixed precision by set of instructions")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    args = parser.parse_args()
    sizes = Sizes(tables=3, rows=100, batch=64, steps=2, samples=2000) if args.quick else Sizes()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if args.isa:
        results = by_isa(["--rounds", str(args.rounds), *(["--quick"] if args.quick else [])])
        notes = dict.fromkeys(results, "")
    else:
        results = measure(args.only, sizes, 1 if args.quick else args.rounds, console)
        notes = {name: (CASES[name].gain.__doc__ or "").strip(".") for name in args.only}
    table = RichTable("", "gain here", "published", "", title=str(sizes), title_justify="left")
    for name, found in results.items():
        gains, of_source = found["gains"], found["published"]
        shown = f"{statistics.median(gains):.2f} ({min(gains):.2f}–{max(gains):.2f})"
        table.add_row(name, shown, "–" if of_source is None else f"{of_source:.2f}", notes[name])
    console.print(table)
    if args.json:
        date = datetime.now(UTC).isoformat(timespec="seconds")
        here = environment(torch.device("cpu")) | {"flags": [isa.needs for isa in ISAS.values() if has(isa)]}
        about = {**here, "load": os.getloadavg(), "date": date, "sizes": sizes._asdict()}
        write_json(args.json, {"results": results, "measured": about})
    return 0


def has(isa: Isa) -> bool:
    """Whether this CPU has it."""
    return isa.needs in cpu().flags


def measure(names: Sequence[str], sizes: Sizes, rounds: int, console: Console) -> dict[str, dict[str, Any]]:
    """Gains of some cases by round, and their medians."""
    gains: dict[str, list[float]] = {name: [] for name in names}
    for _ in track(range(rounds), "ablation", console=console):
        for name, found in gains.items():
            found.append(CASES[name].gain(sizes))
    return {
        name: {"published": CASES[name].published, "gains": found, "gain": statistics.median(found)}
        for name, found in gains.items()
    }


if __name__ == "__main__":
    raise SystemExit(main())
