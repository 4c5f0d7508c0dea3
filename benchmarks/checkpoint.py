"""Compare saving and restoring with copying and reading files, and measure what saving in the background costs.

    python -m benchmarks.checkpoint [--gigabytes 10] [--rounds 3] [--folder DIR] [--json FILE] [--quick]

All sides take turns on the same disk. Written data is on the disk when the clock stops (fsync), and data is dropped
from the page cache before it is read. Training is of a DLRM (``dlrm``), and of its tables alone (``tables``), which
changes rows as fast as this machine can.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hotbed as hb
from benchmarks import runner
from benchmarks.process_memory import peak_extra_kib
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.files import write_json
from hotbed.plan.cost import table_bytes

TABLES, DIM, DENSE = 26, 128, 13
PAIRS = (("save", "copy"), ("restore", "copy"), ("restore", "read"))


def files_of(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.is_file())


def drop_from_cache(folder: Path) -> None:
    os.sync()
    for file in files_of(folder):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def copy(source: Path, target: Path) -> None:
    """Copy files like ``cp`` and ``sync``."""
    target.mkdir()
    for file in files_of(source):
        shutil.copyfile(file, target / file.name)
        descriptor = os.open(target / file.name, os.O_RDWR)
        os.fsync(descriptor)
        os.close(descriptor)


def read(source: Path) -> None:
    buffer = bytearray(16 << 20)
    for file in files_of(source):
        with file.open("rb", buffering=0) as stream:
            while stream.readinto(buffer):
                pass


class Model:
    """A DLRM, and steps of it or of its tables alone."""

    def __init__(self, rows: int, batch: int) -> None:
        tables = [hb.Table(f"t{i}", rows, DIM) for i in range(TABLES)]
        features = [hb.Feature(t.name, table=t.name) for t in tables]
        self.module = hb.nn.DLRM(tables, features, DENSE, bottom=(512, 256, DIM), top=(1024, 1024, 512, 256, 1))
        self.sparse = hb.optim.RowWiseAdagrad(self.module, lr=0.01)
        self.dense = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.parts: dict[str, Any] = {"model": self.module, "sparse": self.sparse, "dense": self.dense}
        draw, law = np.random.default_rng(0), ZipfLaw(1 << 52, 1.05)
        self._batches = [self._batch(draw, law, i, rows, batch) for i in range(32)]
        self._next = 0

    def _batch(self, draw: np.random.Generator, law: ZipfLaw, number: int, rows: int, batch: int) -> hb.Batch:
        """Return a batch. Ids are taken modulo the rows, so about half of them are popular and the others uniform."""
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
    """Save a checkpoint in the background, and time the steps before it and next to it."""
    for _ in range(5):
        model.step(what)
    before = [runner.seconds(lambda: model.step(what)) for _ in range(20)]
    during: list[float] = []
    found: dict[str, Any] = {}

    def save() -> None:
        saving = hb.save_checkpoint(folder / "background", model.parts, background=True)
        while saving.under_way:
            during.append(runner.seconds(lambda: model.step(what)))
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


def measure(model: Model, folder: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of each round, and bytes. The first checkpoint is not timed, but copied."""
    times: dict[str, list[float]] = {name: [] for name in ("save", "copy", "restore", "read")}
    peaks: dict[str, list[float]] = {name: [] for name in times}
    old, copied = folder / "saved", folder / "copied"
    hb.save_checkpoint(old, model.parts)
    size = sum(file.stat().st_size for file in files_of(old))

    def timed(name: str, action: Callable[[], object]) -> None:
        peaks[name].append(peak_extra_kib(lambda: times[name].append(runner.seconds(action))) / 1024)

    for i in range(rounds):
        new = folder / f"saved{i}"
        actions: dict[str, Callable[[], object]] = {
            "save": lambda new=new: hb.save_checkpoint(new, model.parts),
            "copy": lambda old=old: copy(old, copied),
            "restore": lambda new=new: hb.load_checkpoint(new, model.parts),
            "read": lambda new=new: read(new),
        }
        for name in ("save", "copy", "restore", "read") if i % 2 else ("copy", "save", "read", "restore"):
            if name in ("restore", "read"):
                drop_from_cache(new)
            os.sync()
            timed(name, actions[name])
        shutil.rmtree(old)
        shutil.rmtree(copied)
        old = new
    shutil.rmtree(old)
    return {"bytes": size, "seconds": times, "peak_extra_mib": {name: max(peaks[name]) for name in ("save", "restore")}}


def report(found: dict[str, Any], ratios: dict[str, float], training: dict[str, dict[str, Any]]) -> None:
    rates = {name: found["bytes"] / 1e9 / statistics.median(t) for name, t in found["seconds"].items()}
    rows = [
        {"": f"{a} / {b}", "hotbed": rates[a], "plain": rates[b], "ratio": ratios[f"{a} / {b}"],
         "peak extra MiB": found["peak_extra_mib"][a]}
        for a, b in PAIRS
    ]  # fmt: skip
    runner.show("GB/s, and their ratio", rows)
    keys = ("seconds", "steps", "stalled_s", "stalled_share", "step_before_s", "step_during_s", "peak_extra_mib")
    runner.show("saving in the background", [{"of": what} | {k: of[k] for k in keys} for what, of in training.items()])


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="Folder on the disk to measure (default: that of temporary files).")
    parser.add_argument("--quick", action="store_true", help="A hundredth of a gigabyte, once.")
    options = parser.parse_args()
    gigabytes, rounds, batch = (0.01, 1, 64) if options.quick else (options.gigabytes, options.rounds, 4096)
    rows = int(gigabytes * 1e9 / (TABLES * table_bytes(hb.Table("t", 1, DIM), hb.optim.RowWiseAdagrad.rule.moments)))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        model = Model(rows, batch)
        found = measure(model, Path(folder), rounds)
        training = {what: while_training(model, what, Path(folder)) for what in ("dlrm", "tables")}
    times = found["seconds"]
    ratios = {f"{a} / {b}": statistics.median(y / x for x, y in zip(times[a], times[b], strict=True)) for a, b in PAIRS}
    report(found, ratios, training)
    if options.json is not None:
        rates = {name: found["bytes"] / 1e9 / statistics.median(t) for name, t in times.items()}
        sizes = {"tables": TABLES, "rows": rows, "dim": DIM, "batch": batch}
        result = {**runner.about(), **sizes, **found, "gb_per_s": rates, "ratio": ratios, "training": training}
        write_json(options.json, result)


if __name__ == "__main__":
    main()
