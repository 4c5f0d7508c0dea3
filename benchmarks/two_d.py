"""Measure what replicas cost in quality: M = 1, 2, 4, 8 at one global batch, with scaled moments, without, and exact.

    python -m benchmarks.two_d --real_log LOG --json benchmarks/results/two_d.json     # from the repository's root

Eight processes train every case on the same samples from the same initial values: M groups of 8/M processes, averaged
after every step. So M = 1 is one group, and the exact mode must have its numbers to the bit. Learning rates are those
of M = 1. Logs: one with a known truth (`quality_training`), and a real one in the Criteo layout, prepared first.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Read when torch and Numba are imported: one thread per process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("NUMBA_NUM_THREADS", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

import hotbed as hb
from benchmarks.quality_training import PlantedLog, share
from hotbed.commands.demo import TEST_FRACTION, THRESHOLD
from hotbed.data import Loader, SplitBinarySource
from hotbed.data.prepare import prepare
from hotbed.train.metrics import evaluate
from hotbed.train.report import environment

DECILES = 10
ROWS = (10, 50, 200, 1_000, 5_000, 20_000, 100_000)

DEFINITIONS = {
    "curve": "by samples trained on: logloss, normalized entropy and AUC on the test samples",
    "v_ratio": "v of M groups after their last average ÷ v of one group, ratio of sums over the rows of a "
    "decile; the first decile are the most popular rows, those that take a tenth of all lookups, and so on",
    "same_as_one": "whether all test metrics are those of one group to the last bit",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How models are trained; learning rates were chosen for one group."""

    ranks: int = 8
    replicas: tuple[int, ...] = (1, 2, 4, 8)
    samples: int = 400_000
    test_samples: int = 100_000
    batch_size: int = 1_024
    dim: int = 16
    sparse_lr: float = 0.02
    dense_lr: float = 0.002
    points: int = 6
    seeds: tuple[int, ...] = (0, 1)


@dataclass(frozen=True)
class Case:
    """M and the rule: ``"c=1"``, ``"c=M"`` or ``"exact"``."""

    replicas: int
    rule: str

    def options(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of `hotbed.distribute` and of the optimizer."""
        exact = {"exact": True} if self.rule == "exact" else {}
        scale = self.replicas if self.rule == "c=M" else 1
        return {"replicas": self.replicas, **exact}, {"moment_scale": float(scale)}


@dataclass(frozen=True)
class Data:
    """A rank's share of a log."""

    rows: Mapping[str, int]
    dense: int
    train: list[hb.Batch]
    test: list[hb.Batch]


def cases(replicas: Iterable[int]) -> list[Case]:
    """One group first: the others are compared with it."""
    found = [Case(1, "c=1")]
    return found + [Case(m, rule) for m in replicas if m > 1 for rule in ("c=1", "c=M", "exact")]


def planted(settings: Settings, rank: int) -> Data:
    """The log whose truth is known."""
    log = PlantedLog(ROWS)
    train = log.batches("train", settings.samples, settings.batch_size)
    test = log.batches("test", settings.test_samples, 8_192)
    parts = [[share(b, rank, settings.ranks) for b in batches] for batches in (train, test)]
    return Data(dict(zip(log.names, log.rows, strict=True)), 4, *parts)


def real(settings: Settings, rank: int, prepared: Path) -> Data:
    """A prepared log, in the order of time."""
    source = SplitBinarySource(prepared)
    place = {"rank": rank, "world_size": settings.ranks}
    train = list(Loader(source, "train", min(settings.batch_size, 512), shuffle=False, **place))
    rows = {t.name: t.rows for t in source.schema.tables(settings.dim)}
    return Data(rows, len(source.schema.dense), train, list(Loader(source, "test", 4_096, **place)))


def run(case: Case, data: Data, settings: Settings, seed: int) -> dict[str, Any]:
    """Train and test one case; the curve, and v of every table."""
    torch.manual_seed(seed)
    tables = [hb.Table(name, rows=rows, dim=settings.dim) for name, rows in data.rows.items()]
    features = [hb.Feature(t.name, table=t.name) for t in tables]
    made = hb.nn.DLRM(tables, features, data.dense, bottom=(64, settings.dim), top=(64, 1), seed=seed)
    of_model, of_optimizer = case.options()
    model: Any = hb.distribute(made, "row", hb.ParallelOptions(**of_model))
    dense = torch.optim.Adam(model.parameters(), lr=settings.dense_lr)
    sparse = hb.optim.RowWiseAdagrad(model, lr=settings.sparse_lr, **of_optimizer)
    curve: list[dict[str, float]] = []
    at = {len(data.train) * (i + 1) // settings.points for i in range(settings.points)}
    samples = 0
    for step, batch in enumerate(data.train, 1):
        total = F.binary_cross_entropy_with_logits(model(batch), batch.labels, reduction="sum")
        loss = hb.mean_over_ranks(total, len(batch), model)
        for optimizer in (dense, sparse):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (dense, sparse):
            optimizer.step()
        samples += len(batch) * settings.ranks
        if step in at:
            found = evaluate(model, data.test)
            curve.append(
                {"samples": samples, "logloss": found.logloss, "ne": found.normalized_entropy, "auc": found.auc}
            )
    state = sparse.state_dict()["state"]
    v = {t.name: state[i]["sum_of_squares"].clone() for i, t in enumerate(tables)}
    return {**asdict(case), "curve": curve, "v": v}


def popularity(data: Data) -> dict[str, Tensor]:
    """How often each row occurs in training, by table."""
    counts: dict[str, Tensor] = {}
    for name, rows in data.rows.items():
        own = sum(torch.bincount(b.sparse[name].values.long(), minlength=rows) for b in data.train)
        assert isinstance(own, Tensor)
        dist.all_reduce(own)
        counts[name] = own
    return counts


def by_decile(counts: Tensor, ours: Tensor, theirs: Tensor) -> list[float]:
    """Ratio of the sums of two moments over rows that take each tenth of the lookups, from the most popular on."""
    order = counts.argsort(descending=True)
    order = order[counts[order] > 0]
    n = counts[order].double()
    decile = ((n.cumsum(0) - n / 2) / n.sum() * DECILES).long().clamp(max=DECILES - 1)
    sums = [torch.zeros(DECILES, dtype=torch.float64).index_add_(0, decile, v[order].double()) for v in (ours, theirs)]
    return (sums[0] / sums[1]).tolist()


def measure(data: Data, settings: Settings) -> list[dict[str, Any]]:
    """All cases and seeds of a log."""
    counts = popularity(data)
    every = torch.cat(list(counts.values()))
    results: list[dict[str, Any]] = []
    for seed in settings.seeds:
        found = [run(case, data, settings, seed) for case in cases(settings.replicas)]
        one = found[0]
        for result in found:
            ours, theirs = (torch.cat([r["v"][name] for name in counts]) for r in (result, one))
            ratio = by_decile(every, ours, theirs) if result["rule"] != "exact" and result["replicas"] > 1 else None
            same = {"same_as_one": result["curve"] == one["curve"]}
            results.append({k: v for k, v in result.items() if k != "v"} | {"seed": seed, "v_ratio": ratio, **same})
    return results


def work(rank: int, settings: Settings, prepared: Path | None, store: str, out: Path) -> None:
    """One process."""
    logging.getLogger("hotbed").setLevel(logging.ERROR)  # replicas announce that they change results
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=settings.ranks)
    found = {"planted": measure(planted(settings, rank), settings)}
    if prepared is not None:
        found["real"] = measure(real(settings, rank, prepared), settings)
    if rank == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def show(console: Console, log: str, results: Sequence[Mapping[str, Any]]) -> None:
    """A row per case: the last point of its curve, means over seeds."""
    table = Table("M", "rule", "logloss", "against M = 1", "NE", "AUC", "v ÷ v of one group", title=f"{log} log")
    of_case: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for result in results:
        of_case.setdefault((result["replicas"], result["rule"]), []).append(result)

    def last(found: Sequence[Mapping[str, Any]], name: str) -> float:
        return sum(r["curve"][-1][name] for r in found) / len(found)

    one = of_case[1, "c=1"]
    for (replicas, rule), found in of_case.items():
        of_seeds = [r["v_ratio"] for r in found if r["v_ratio"] is not None]
        ratios = [statistics.mean(decile) for decile in zip(*of_seeds, strict=True)] if of_seeds else None
        table.add_row(
            str(replicas),
            rule,
            f"{last(found, 'logloss'):.5f}",
            f"{last(found, 'logloss') - last(one, 'logloss'):+.5f}",
            f"{last(found, 'ne'):.4f}",
            f"{last(found, 'auc'):.4f}",
            "" if ratios is None else " ".join(f"{r:.1f}" for r in ratios),
        )
    console.print(table)


def main() -> int:
    """Measure, print, write; 1 where the exact mode has other numbers than one group."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Settings()
    parser.add_argument("--real_log", type=Path, help="raw lines in the Criteo layout; without, the planted log only")
    parser.add_argument("--ranks", type=int, default=default.ranks)
    parser.add_argument("--replicas", type=int, nargs="+", default=default.replicas)
    parser.add_argument("--samples", type=int, default=default.samples, help="of the planted log")
    parser.add_argument("--seeds", type=int, default=len(default.seeds))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    settings = Settings(
        ranks=args.ranks,
        replicas=tuple(args.replicas),
        samples=args.samples,
        test_samples=min(args.samples, default.test_samples),
        seeds=tuple(range(args.seeds)),
    )
    console = Console(width=None if os.isatty(1) else 140)
    with tempfile.TemporaryDirectory(prefix="hotbed-two-d-") as folder:
        prepared = None
        if args.real_log is not None:
            prepared = Path(folder) / "prepared"
            prepare(args.real_log, prepared, threshold=THRESHOLD, test_fraction=TEST_FRACTION)
        out = Path(folder) / "found.json"
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=work, args=(rank, settings, prepared, str(Path(folder) / "store"), out))
            for rank in range(settings.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            console.print("a process failed; its own output says why")
            return 1
        found: dict[str, list[dict[str, Any]]] = json.loads(out.read_text(encoding="utf-8"))
    for log, results in found.items():
        show(console, log, results)
    if args.json is not None:
        about = {**environment(torch.device("cpu")), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        text = {"results": found, "settings": asdict(settings), "measured": about, "definitions": DEFINITIONS}
        args.json.write_text(json.dumps(text, indent=1) + "\n", encoding="utf-8")
    exact = [r["same_as_one"] for results in found.values() for r in results if r["rule"] == "exact"]
    return int(not all(exact))


if __name__ == "__main__":
    raise SystemExit(main())
