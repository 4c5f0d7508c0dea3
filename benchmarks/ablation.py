"""Measure the gains that NVIDIA reports for its DLRM with 113 billion parameters, and show both gains.

    python -m benchmarks.ablation [--only mixed_precision compile …] [--rounds 5] [--json FILE] [--quick]
    python -m benchmarks.ablation --isa [--json FILE]

A gain is the seconds of a step without an option ÷ the seconds with it. Both sides take turns in one process. The
readers take turns with two processes each. The published figures are of 1 or 8 A100 and of TensorFlow 2.

With ``--isa``, mixed precision is measured once for each instruction set of this CPU. Torch, oneDNN and Numba are
limited to it by environment variables of a new process.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hotbed as hb
from benchmarks import runner
from benchmarks.json_lines import CHUNK as JSON_CHUNK
from benchmarks.json_lines import write_json_lines
from hotbed.cli.demo import demo_recipe
from hotbed.data import write_synthetic_log
from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.embed import tables_on_meta
from hotbed.files import read_yaml, write_json
from hotbed.machine import cpu

BOTTOM, TOP = (512, 256, 128), (1024, 1024, 512, 256, 1)
Make = Callable[[list[hb.Table], list[hb.Feature]], nn.Module]


class Sizes(NamedTuple):
    """Tables, their rows, samples of a batch, steps of a measurement, and samples of the readers' log."""

    tables: int = 26
    rows: int = 100_000
    batch: int = 2048
    steps: int = 4
    samples: int = 200_000


class Unfused(nn.Module):
    """A collection per table, so each step has one lookup and one update per table."""

    def __init__(self, tables: list[hb.Table], features: list[hb.Feature]) -> None:
        super().__init__()
        self.each = nn.ModuleList(hb.EmbeddingCollection([t], [f]) for t, f in zip(tables, features, strict=True))

    def forward(self, ids: hb.Jagged) -> Tensor:
        return torch.stack([collection(ids).stack()[:, 0] for collection in self.each], dim=1)


class UnfusedDLRM(nn.Module):
    """A DLRM with a collection per table."""

    def __init__(self, tables: list[hb.Table], features: list[hb.Feature]) -> None:
        super().__init__()
        self.tables = Unfused(tables, features)
        self.layers = dlrm([replace(t, rows=1) for t in tables], features)
        del self.layers.embeddings

    def forward(self, samples: hb.Batch) -> Tensor:
        assert samples.dense is not None
        dense = self.layers.bottom(samples.dense)[:, None]
        return self.layers.top(self.layers.interaction(torch.cat([dense, self.tables(samples.sparse)], dim=1)))


def dlrm(tables: list[hb.Table], features: list[hb.Feature]) -> hb.nn.DLRM:
    return hb.nn.DLRM(tables, features, 13, bottom=BOTTOM, top=TOP)


def in_host_memory(tables: list[hb.Table], features: list[hb.Feature]) -> nn.Module:
    """Return NVIDIA's DLRM with rows as records in the host's memory, without a cache."""
    with tables_on_meta():
        model = dlrm(tables, features)
    return hb.distribute(model, hb.make_plan(tables, 1, hb.Cut(tier="host")), device="cpu")


def specs(sizes: Sizes) -> tuple[list[hb.Table], list[hb.Feature]]:
    """Return tables of 128 columns, and one feature for each."""
    tables = [hb.Table(f"t{i}", rows=sizes.rows, dim=128) for i in range(sizes.tables)]
    return tables, [hb.Feature(t.name, table=t.name) for t in tables]


def batch(sizes: Sizes, seed: int) -> hb.Batch:
    draw = torch.Generator().manual_seed(seed)
    ids = (torch.rand(sizes.tables * sizes.batch, generator=draw, dtype=torch.float64) ** 4 * sizes.rows).long()
    return hb.Batch(
        sparse=hb.Jagged([f"t{i}" for i in range(sizes.tables)], ids, batch_size=sizes.batch),
        dense=torch.randn(sizes.batch, 13, generator=draw),
        labels=torch.rand(sizes.batch, 1, generator=draw).round(),
    )


def dlrm_step(
    sizes: Sizes, make: Make = dlrm, *, bf16: bool = True, compiled: bool = False
) -> Callable[[hb.Batch], None]:
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


def embedding_step(sizes: Sizes, make: Make) -> Callable[[hb.Batch], None]:
    model = make(*specs(sizes))
    sparse = hb.optim.RowWiseAdagrad(model, lr=0.01)
    grad = torch.randn(sizes.batch, sizes.tables, 128)

    def step(samples: hb.Batch) -> None:
        found = model(samples.sparse)
        (found if isinstance(found, Tensor) else found.stack()).backward(grad)
        sparse.step()

    return step


def gain(sizes: Sizes, without: Callable[[hb.Batch], None], with_it: Callable[[hb.Batch], None]) -> float:
    """Return median seconds without ÷ with. Steps alternate, and the first two of each are not counted."""
    times: list[list[float]] = [[], []]
    for i in range(2 + sizes.steps):
        for of_side, step in zip(times, (without, with_it), strict=True):
            samples = batch(sizes, i)
            of_side.append(runner.seconds(lambda step=step, samples=samples: step(samples)))
    return statistics.median(times[0][2:]) / statistics.median(times[1][2:])


def broadcast(sizes: Sizes) -> float:
    """Measure prepared data, which two processes read: each all of it, or one for both."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.tsv"
        write_synthetic_log(log, sizes.samples, seed=0, test_fraction=0.05)
        made = prepare(log, Path(folder) / "data", threshold=2, test_fraction=0.05)
        values = demo_recipe(Path(folder) / "data", made.samples["train"]).to_dict()
        values["data"] |= {"shuffle": True, "test_split": None}
        values["train"] |= {"batch_size": 4096, "checkpoint": "none"}
        return gain_of_one_reader(values, Path(folder))


def broadcast_slow(sizes: Sizes) -> float:
    """Measure lines of JSON, which a source in Python reads, and a small model."""
    with tempfile.TemporaryDirectory() as folder:
        write_json_lines(Path(folder) / "data", sizes.samples)
        source = {"class_path": "benchmarks.json_lines.JsonLines"}
        values = {
            "name": "json_lines",
            "data": {"path": f"{folder}/data", "dim": 16, "test_split": None, "workers": 1, "source": source},
            "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16], "top": [16, 1]}},
            "dense_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.01}},
            "sparse_optimizer": {"class_path": "hotbed.optim.SGD", "init_args": {"lr": 0.01}},
            "train": {"batch_size": JSON_CHUNK, "checkpoint": "none"},
        }
        return gain_of_one_reader(values, Path(folder))


def gain_of_one_reader(values: Mapping[str, Any], folder: Path) -> float:
    """Return samples/s of two processes if the first reads for both ÷ if each reads."""
    recipe = runner.write_recipe(folder / "recipe.yaml", values)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    rates: dict[str, float] = {}
    for reader in ("each", "first"):
        summary = folder / f"{reader}.json"
        options = ["--parallel.reader", reader, "--out", folder, "--json", summary]
        runner.python(*torchrun, "-m", "hotbed", "train", recipe, *options)
        rates[reader] = read_yaml(summary)["samples_per_s"]
    return rates["first"] / rates["each"]


class Case(NamedTuple):
    """How a gain is measured, what is compared, and the published gain if there is one."""

    gain: Callable[[Sizes], float]
    compared: str
    published: float | None


CASES: Mapping[str, Case] = {
    "mixed_precision": Case(
        lambda sizes: gain(sizes, dlrm_step(sizes, bf16=False), dlrm_step(sizes)), "float32 ÷ bf16 autocast", 1.23
    ),
    "fused_tables": Case(
        lambda sizes: gain(sizes, dlrm_step(sizes, UnfusedDLRM), dlrm_step(sizes)),
        "a whole step with a launch per table ÷ with one for all",
        1.39,
    ),
    "fused_lookups": Case(
        lambda sizes: gain(sizes, embedding_step(sizes, Unfused), embedding_step(sizes, hb.EmbeddingCollection)),
        "the same for lookup, backward and update alone",
        None,
    ),
    "compile": Case(
        lambda sizes: gain(sizes, dlrm_step(sizes), dlrm_step(sizes, compiled=True)), "eager ÷ torch.compile", 3.36
    ),
    "broadcast": Case(broadcast, "one process reads prepared data for two ÷ each reads", 1.32),
    "broadcast_slow": Case(broadcast_slow, "one process reads lines of JSON for two ÷ each reads", 1.32),
    "host_tables": Case(
        lambda sizes: gain(sizes, dlrm_step(sizes, in_host_memory), dlrm_step(sizes)),
        "rows in the host's tier ÷ in the device's (a CPU has one memory for both)",
        15.5,
    ),
}


class Isa(NamedTuple):
    """An instruction set: the flag of the CPU, the names of oneDNN and torch, and Numba's CPU and features."""

    needs: str
    onednn: str
    torch: str
    numba: tuple[str, str]

    @property
    def is_here(self) -> bool:
        return self.needs in cpu().flags


AVX2 = "+sse4.2,+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt"
AVX512 = f"{AVX2},+avx512f,+avx512bw,+avx512cd,+avx512dq,+avx512vl"
ISAS = {
    "AVX2": Isa("avx2", "AVX2", "avx2", ("haswell", AVX2)),
    "AVX-512": Isa("avx512f", "AVX512_CORE", "avx512", ("skylake-avx512", AVX512)),
    "AVX-512 with bf16": Isa("avx512_bf16", "AVX512_CORE_BF16", "avx512", ("cooperlake", f"{AVX512},+avx512bf16")),
    "AMX": Isa("amx_bf16", "AVX512_CORE_AMX", "avx512", ("sapphirerapids", f"{AVX512},+avx512bf16,+amx-bf16")),
}


def by_isa(options: Sequence[str]) -> dict[str, Any]:
    """Measure mixed precision with each instruction set of this CPU, each in a new process."""
    found: dict[str, Any] = {}
    for name, isa in ISAS.items():
        if isa.is_here:
            limits = {"ONEDNN_MAX_CPU_ISA": isa.onednn, "ATEN_CPU_CAPABILITY": isa.torch}
            limits |= dict(zip(("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"), isa.numba, strict=True))
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "found.json"
                argv = ["--only", "mixed_precision", *options, "--json", file]
                runner.python("-m", "benchmarks.ablation", *argv, env=os.environ | limits)
                found[name] = runner.read_json(file)["results"]["mixed_precision"]
    return found


def main() -> None:
    parser = runner.arguments(__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    which.add_argument("--isa", action="store_true", help="Mixed precision by instruction set.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="Tiny sizes, to see that everything runs.")
    args = parser.parse_args()
    sizes = Sizes(tables=3, rows=100, batch=64, steps=2, samples=2000) if args.quick else Sizes()
    if args.isa:
        results = by_isa(["--rounds", str(args.rounds), *(["--quick"] if args.quick else [])])
    else:
        sides = {name: lambda name=name: CASES[name].gain(sizes) for name in args.only}
        found = runner.in_turns(sides, 1 if args.quick else args.rounds, title="ablation")
        results = {
            name: {"published": CASES[name].published, "gains": gains, "gain": statistics.median(gains)}
            for name, gains in found.items()
        }
    rows = [
        {
            "case": name,
            "gain": runner.spread(found["gains"]),
            "published": found["published"],
            "compared": CASES["mixed_precision" if args.isa else name].compared,
        }
        for name, found in results.items()
    ]
    runner.show(str(sizes), rows)
    if args.json:
        flags = [isa.needs for isa in ISAS.values() if isa.is_here]
        write_json(args.json, {"results": results, "measured": runner.about(flags=flags, sizes=sizes._asdict())})


if __name__ == "__main__":
    main()
