"""Compare saving and restoring with plain copying of files, and measure what saving in the background costs training.

    python -m benchmarks.checkpoint [--gigabytes 10] [--rounds 3] [--folder DIR] [--json FILE] [--quick]

Both sides take turns on the same disk. Everything that is written is on the disk when the clock stops (fsync); what is
read is dropped from the page cache before. Training is of a DLRM's tables and MLPs (``dlrm``), and of the tables alone
(``tables``), which changes rows as fast as this machine can.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table as RichTable

import hotbed as hb
from benchmarks.process_memory import peak_extra_kib
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.plan.cost import table_bytes
from hotbed.train.runs.report import environment

ROOT = Path(__file__).resolve().parents[1]
TABLES, DIM, DENSE = 26, 128, 13
BUFFER_BYTES = 16 << 20


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def drop_from_cache(folder: Path) -> None:
    os.sync()
    for file in files_of(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy(source: Path, target: Path) -> None:
    """What ``cp`` and ``sync`` do."""
    target.mkdir()
    for file in files_of(source):
        shutil.copyfile(file, target / file.name)
        descriptor = os.open(target / file.name, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)


def read(source: Path) -> None:
    buffer = bytearray(BUFFER_BYTES)
    for file in files_of(source):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


class Model:
    """A DLRM, and one step of it or of its tables alone."""

    def __init__(self, rows: int, batch: int) -> None:
        tables = [hb.Table(f"t{i}", rows, DIM) for i in range(TABLES)]
        features = [hb.Feature(t.name, table=t.name) for t in tables]
        self.module = hb.nn.DLRM(tables, features, DENSE, bottom=(512, 256, DIM), top=(1024, 1024, 512, 256, 1))
        self.sparse = hb.optim.RowWiseAdagrad(self.module, lr=0.01)
        self.dense = torch.optim.SGD(self.module.parameters(), lr=0.01)
        draw, law = np.random.default_rng(0), ZipfLaw(1 << 52, 1.05)
        self._batches = [self._batch(draw, law, i, rows, batch) for i in range(32)]
        self._next = 0

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.module, "sparse": self.sparse, "dense": self.dense}

    @property
    def nbytes(self) -> int:
        return self.module.embeddings.nbytes

    def _batch(self, draw: np.random.Generator, law: ZipfLaw, number: int, rows: int, batch: int) -> hb.Batch:
        """Ranks beyond the rows wrap round: about half of the ids are popular ones, the others any rows."""
        counters = np.arange(number * batch, (number + 1) * batch, dtype=np.uint64)
        ids = {f"t{i}": torch.from_numpy(law.draw((i,), counters) % rows) for i in range(TABLES)}
        dense = torch.from_numpy(draw.random((batch, DENSE), dtype=np.float32))
        labels = torch.from_numpy(draw.integers(0, 2, (batch, 1)).astype(np.float32))
        return hb.Batch(sparse=hb.Jagged.from_dict(ids), dense=dense, labels=labels)

    def step(self, what: str) -> None:
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        if what == "tables":
            found = self.module.embeddings(batch.sparse).stack()
            found.backward(torch.full_like(found, 1e-3))
        else:
            self.dense.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                logits = self.module(batch)
            torch.nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.labels).backward()
            self.dense.step()
        self.sparse.step()


def while_training(model: Model, what: str, folder: Path) -> dict[str, Any]:
    """A checkpoint in the background: what steps take before it and during it."""
    for _ in range(5):
        model.step(what)
    before = [seconds(lambda: model.step(what)) for _ in range(20)]
    during: list[float] = []
    found: dict[str, Any] = {}

    def save() -> None:
        saving = hb.save_checkpoint(folder / "background", model.parts, background=True)
        while saving.under_way:
            during.append(seconds(lambda: model.step(what)))
        saving.wait()
        found.update(seconds=saving.seconds, stalled_s=saving.stalled_s, start_s=saving.started_s)

    found["peak_extra_mib"] = peak_extra_kib(save) / 1024
    shutil.rmtree(folder / "background")
    return {
        **found,
        "steps": len(during),
        "step_before_s": statistics.median(before),
        "step_during_s": statistics.median(during) if during else None,
        "longest_step_s": max(during, default=None),
        "stalled_share": found["stalled_s"] / found["seconds"],
    }


def measure(model: Model, folder: Path, rounds: int, console: Console) -> dict[str, Any]:
    """Seconds of everything by round, and bytes. A first checkpoint, which is not timed, is what is copied."""
    times: dict[str, list[float]] = {name: [] for name in ("save", "copy", "restore", "read")}
    peaks: dict[str, list[float]] = {"save": [], "restore": []}
    old, copied = folder / "saved", folder / "copied"
    hb.save_checkpoint(old, model.parts)
    size = sum(file.stat().st_size for file in files_of(old))

    def timed(name: str, action: Callable[[], object]) -> None:
        os.sync()
        found: list[float] = []
        peak = peak_extra_kib(lambda: found.append(seconds(action))) / 1024
        times[name] += found
        if name in peaks:
            peaks[name].append(peak)

    for i in range(rounds):
        new = folder / f"saved{i}"
        writing: list[tuple[str, Callable[[], object]]] = [
            ("save", lambda new=new: hb.save_checkpoint(new, model.parts)),
            ("copy", lambda old=old: copy(old, copied)),
        ]
        reading: list[tuple[str, Callable[[], object]]] = [
            ("restore", lambda new=new: hb.load_checkpoint(new, model.parts)),
            ("read", lambda new=new: read(new)),
        ]
        for name, action in writing[:: 1 if i % 2 else -1]:
            timed(name, action)
        for name, action in reading[:: 1 if i % 2 else -1]:
            drop_from_cache(new)
            timed(name, action)
        shutil.rmtree(old)
        shutil.rmtree(copied)
        old = new
        console.print(f"round {i + 1}: " + ", ".join(f"{n} {t[-1]:.1f} s" for n, t in times.items()))
    shutil.rmtree(old)
    return {"bytes": size, "seconds": times, "peak_extra_mib": {name: max(p) for name, p in peaks.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=None, help="On the disk to measure; default: the temporary one.")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--quick", action="store_true", help="A hundredth of a gigabyte, once.")
    options = parser.parse_args()
    gigabytes, rounds, batch = (0.01, 1, 64) if options.quick else (options.gigabytes, options.rounds, 4096)
    rows = int(gigabytes * 1e9 / (TABLES * table_bytes(hb.Table("t", 1, DIM), hb.optim.RowWiseAdagrad.rule.moments)))
    console = Console()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = Model(rows, batch)
        console.print(f"{TABLES} tables of {rows:,} × {DIM}, {model.nbytes / 1e9:.2f} GB with moments")
        found = measure(model, Path(folder), rounds, console)
        training = {what: while_training(model, what, Path(folder)) for what in ("dlrm", "tables")}
    rates = {name: found["bytes"] / 1e9 / statistics.median(t) for name, t in found["seconds"].items()}
    pairs = (("save", "copy"), ("restore", "copy"), ("restore", "read"))
    ratios = {
        f"{a} / {b}": statistics.median(y / x for x, y in zip(found["seconds"][a], found["seconds"][b], strict=True))
        for a, b in pairs
    }
    table = RichTable(title="GB/s, and as many times as fast as the plain side", title_justify="left")
    for name in ("", "hotbed", "plain", "ratio", "peak extra MiB"):
        table.add_column(name, justify="right")
    for ours, plain in pairs:
        name = f"{ours} / {plain}"
        cells = (name, f"{rates[ours]:.2f}", f"{rates[plain]:.2f}", f"{ratios[name]:.2f}")
        table.add_row(*cells, f"{found['peak_extra_mib'][ours]:,.0f}")
    console.print(table)
    for what, of in training.items():
        steps = f"step {of['step_before_s'] * 1e3:.0f} → {(of['step_during_s'] or 0) * 1e3:.0f} ms"
        console.print(
            f"{what}: saved in {of['seconds']:.1f} s beside {of['steps']} steps; held up {of['stalled_s']:.2f} s "
            f"({of['stalled_share']:.0%}), {steps}, "
            f"peak extra {of['peak_extra_mib']:,.0f} MiB"
        )
    if options.json is not None:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
        result = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit.stdout.strip(),
            **environment(torch.device("cpu")),
            "tables": TABLES,
            "rows": rows,
            "dim": DIM,
            "batch": batch,
            **found,
            "gb_per_s": rates,
            "ratio": ratios,
            "training": training,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
