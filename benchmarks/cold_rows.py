"""Measure rows on disk when memory holds a quarter of them: ``python -m benchmarks.cold_rows [--json FILE]`` (as root).

*Steps*. The DLRM of NVIDIA's sizes trains on the tables of Criteo 1TB without a threshold (883 million rows of 128
columns; rows exist from their first update), with all rows in memory (tier ``host``) and with all in a file, without
a cache and with caches for an eighth and for a half of the rows that are there after `WARM_UP` steps. Each side is a
process in a memory cgroup of its own; after warming up, the group of a side with a file is limited to what the process
itself takes and a quarter of the bytes of the rows in its file. So three quarters of the rows can be in no cache of the
system. Batches are not seen twice; the trainer reads the rows of the next one while it computes. Hit rates and what was
read are of the steps that are timed.

*Reads*. Records that no memory has are read from a file as a training step does it; the limit is what as many threads
get of random blocks of 4 KiB without the system's cache (``O_DIRECT``), of the same disk in the same run.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import torch
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

import hotbed as hb
from benchmarks.command import json_of
from benchmarks.process_memory import memory_group, set_limit, status_kib
from benchmarks.quality_results import measured_on
from hotbed.commands.demo import demo_recipe
from hotbed.config import Recipe
from hotbed.data import Loader, ZipfSource
from hotbed.errors import HotbedError
from hotbed.files import write_json
from hotbed.heap import keep_heap
from hotbed.store.file_records import READERS, FileRecords
from hotbed.store.lazy import LazyStore
from hotbed.train.build import build_trainer

WARM_UP, STEPS, BATCH, DIM = 120, 60, 4_096, 128
SIDES = {"memory": 0.0, "file": 0.0, "file, cache for an eighth": 0.125, "file, cache for a half": 0.5}
"""Rows that a cache has room for, of those that are there after warming up."""
NO_LIMIT = 1 << 60
ROWS_AFTER_WARM_UP = 1_290_000
"""About; what a cache's share is of."""
RECORDS, RECORD_BYTES, READ, BLOCK, ROUNDS = 4_000_000, 4 * DIM + 4, 40_000, 4096, 5
"""Of the file that is read: records, their bytes, records of a read; bytes of the blocks they are compared with."""


@contextmanager
def group() -> Iterator[Path]:
    """Put this process into a new memory control group without a limit, and back at the end."""
    with memory_group(NO_LIMIT) as made:
        if made is None:
            raise HotbedError("no control group of memory can be made here; run this as root on Linux")
        (made / "cgroup.procs").write_text("0")
        try:
            yield made
        finally:
            (made.parent / "cgroup.procs").write_text("0")


# -- steps ---------------------------------------------------------------------------------------------------------


def files_of(collection: hb.EmbeddingCollection) -> list[FileRecords]:
    """List the files that a collection has rows in."""
    stores = [store for store in collection.stores() if isinstance(store, LazyStore)]
    return [layer for store in stores for layer in store.records.layers() if isinstance(layer, FileRecords)]


class Timed:
    """Batches that say when they were taken; before the timed ones, the group is limited."""

    def __init__(self, batches: Sequence[hb.Batch], made: Path) -> None:
        self.batches, self.made = batches, made
        self.trainer: Any = None
        self.taken: list[float] = []
        self.limited: dict[str, int] = {}
        self.before: Any = None

    def __iter__(self) -> Iterator[hb.Batch]:
        for i, batch in enumerate(self.batches):
            if i == WARM_UP:
                self._limit()
            self.taken.append(time.perf_counter())
            yield batch

    def _limit(self) -> None:
        collection = self.trainer.model.embeddings
        self.before = collection.traffic
        rows = sum(len(file) * file.record_bytes for file in files_of(collection))
        self.limited = {"file_bytes": collection.disk_bytes, "rows_bytes": rows, "cached_bytes": rows // 4}
        self.limited["own_bytes"] = 1024 * status_kib("RssAnon")
        if rows:
            os.sync()
            set_limit(self.made, self.limited["own_bytes"] + self.limited["cached_bytes"])


def steps(side: str, directory: Path) -> dict[str, Any]:
    """Train one side in this process; the first steps after the limit, while the page cache empties, do not count."""
    keep_heap(os.environ)  # as the command does: memory that is mapped anew takes pages of the file from the page cache
    source = ZipfSource("criteo_1tb_t0", train_samples=(WARM_UP + STEPS) * BATCH)
    cache_rows = int(SIDES[side] * ROWS_AFTER_WARM_UP)
    recipe = demo_recipe("-", source.samples("train"))
    memory = replace(
        recipe.memory, tier="host" if side == "memory" else "disk", cache_rows=cache_rows, directory=str(directory)
    )
    model = replace(recipe.model, init_args={"bottom": [512, 256, DIM], "top": [1024, 1024, 512, 256, 1]})
    train = replace(recipe.train, batch_size=BATCH, device="cpu", precision="bf16", log_every=10_000)
    recipe: Recipe = replace(recipe, data=replace(recipe.data, dim=DIM), memory=memory, model=model, train=train)
    with group() as made:
        batches = Timed(list(Loader(source, "train", BATCH, shuffle=False)), made)
        batches.trainer = build_trainer(recipe, source)
        batches.trainer.fit(batches)
        set_limit(made, NO_LIMIT)
    taken = batches.taken[WARM_UP + 5 :]
    moved = batches.trainer.model.embeddings.traffic - batches.before
    return {
        "step_ms": 1e3 * (taken[-1] - taken[0]) / (len(taken) - 1),
        "median_ms": 1e3 * statistics.median(after - before for before, after in pairwise(taken)),
        **batches.limited,
        "hit_rate": moved.hit_rate if moved.hits + moved.misses else None,
        "read_bytes": moved.read_bytes / STEPS,
        "waited_s": moved.waited_s / STEPS,
    }


# -- reads ---------------------------------------------------------------------------------------------------------


def reads(directory: Path) -> dict[str, Any]:
    """Records per second from a file that no memory has, and random blocks per second of the same disk."""
    records = FileRecords(RECORD_BYTES, directory)
    for start in range(0, RECORDS, READ):
        records.write(torch.arange(start, start + READ), torch.zeros(READ, RECORD_BYTES, dtype=torch.uint8))
    found: dict[str, list[float]] = {"records_per_s": [], "blocks_per_s": []}
    out = torch.empty(READ, RECORD_BYTES, dtype=torch.uint8)
    with TemporaryFile(dir=directory) as blocks, ThreadPoolExecutor(READERS) as readers:
        for _ in range(RECORDS * RECORD_BYTES >> 20):
            blocks.write(bytes(1 << 20))
        for round_ in range(ROUNDS):
            os.sync()
            Path("/proc/sys/vm/drop_caches").write_text("1")
            slots = torch.randperm(RECORDS, generator=torch.Generator().manual_seed(round_))[:READ]
            start = time.perf_counter()
            records.read(slots, out)
            found["records_per_s"].append(READ / (time.perf_counter() - start))
            direct = os.open(f"/proc/self/fd/{blocks.fileno()}", os.O_RDONLY | os.O_DIRECT)
            start = time.perf_counter()
            list(readers.map(partial(_read_blocks, direct), slots.numpy().reshape(READERS, -1)))
            found["blocks_per_s"].append(READ / (time.perf_counter() - start))
            os.close(direct)
    records.close()
    return {name: statistics.median(values) for name, values in found.items()}


def _read_blocks(file: int, slots: Any) -> None:
    """Read the block of each of these records."""
    buffer = mmap.mmap(-1, BLOCK)  # aligned, as the system wants it
    for at in (slots * RECORD_BYTES // BLOCK * BLOCK).tolist():
        os.preadv(file, [buffer], at)


# -- the command ---------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser("python -m benchmarks.cold_rows", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2, help="of the steps; sides take turns")
    parser.add_argument("--only", nargs="+", choices=list(SIDES), default=list(SIDES))
    parser.add_argument("--directory", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--side", choices=list(SIDES), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.side:
        print(json.dumps(steps(args.side, args.directory)))
        return
    console = Console()
    if not console.is_terminal:
        console.width = 160
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in args.only}
    for _ in range(args.rounds):
        for side, of_side in track(runs.items(), "steps", console=console, disable=not console.is_terminal):
            of_side.append(json_of(side, "benchmarks.cold_rows", "--side", side, "--directory", args.directory))
    of_reads = reads(args.directory)
    console.print(_table(runs))
    share = of_reads["records_per_s"] / of_reads["blocks_per_s"]
    console.print(
        f"records that no memory has: {of_reads['records_per_s']:,.0f} per second, {share:.0%} of the "
        f"{of_reads['blocks_per_s']:,.0f} random blocks of {BLOCK:,} bytes that {READERS} threads read of this disk"
    )
    if args.json:
        write_json(args.json, {"measured on": measured_on(), "steps": runs, "reads": of_reads})


def _table(runs: dict[str, list[dict[str, Any]]]) -> Table:
    view = Table(
        *(
            "rows in",
            "ms per step",
            "÷ memory",
            "rows in file, MB",
            "file, MB",
            "limit − own, MB",
            "hit rate",
            "read per step, MB",
        ),
        box=MARKDOWN,
    )

    def median(side: str, key: str, scale: float = 1.0) -> float:
        return statistics.median(scale * run[key] for run in runs[side])

    for side, of_side in runs.items():
        ratio = f"{median(side, 'step_ms') / median('memory', 'step_ms'):.2f}" if "memory" in runs else "–"
        cells = [side, f"{median(side, 'step_ms'):.0f}", ratio]
        if side != "memory":
            hits = "–" if of_side[0]["hit_rate"] is None else f"{median(side, 'hit_rate'):.0%}"
            cells += [f"{median(side, f'{of}_bytes', 1e-6):,.0f}" for of in ("rows", "file", "cached")] + [hits]
            cells += [f"{median(side, 'read_bytes', 1e-6):.1f}"]
        view.add_row(*cells)
    return view


if __name__ == "__main__":
    main()
