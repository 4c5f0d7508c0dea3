"""Serve tables that are larger than memory: ``python -m benchmarks.serving_rows --gib 10 --memory_gib 1``.

Tables of random rows are written as an exported model. Then, for each place that rows may come from, a process of its
own answers batches of random ids and says how many rows it looked up a second, and how long batches took:

``memory``  all rows in memory, without a limit
``disk``    files behind a cache of a quarter of the memory (``--rows_gib``), in a control group of that memory: page
            cache counts, and so do Python, torch and the kernels, which take half a GiB
``redis``   as ``disk``, with all rows in a Redis (outside of the group) in front of the files

Ids are uniform, or by Zipf's law with the exponent 1.05. What the page cache has of the files is dropped before each
process. Batches follow each other without a pause, so times are those of the work, not of a queue.

A control group has to be made, which needs root, or a delegated group. Where none can be made the output says so, and
the limit is not there; limits of a process (``prlimit``) would not count the page cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import hotbed as hb
from benchmarks.process_memory import memory_group
from hotbed.batch import Batch
from hotbed.data.columns import SparseColumn
from hotbed.data.encoding.encoder import Encoder
from hotbed.files import write_json
from hotbed.nn.dense_program import DensePart, trace_dense_part
from hotbed.serve.model_files import (
    MANIFEST,
    DenseEntry,
    ExportedFile,
    ExportedModel,
    FeatureEntry,
    InitEntry,
    ModelManifest,
    TableEntry,
    record_format,
)
from hotbed.serve.redis_records import RedisRecords
from hotbed.serve.served_model import ServedModel
from hotbed.train.runs.report import environment

GIB = 1 << 30
DIM, TABLES = 32, 8
CHUNK_ROWS = 1 << 18
EXPONENTS = {"uniform": 0.0, "zipf": 1.05}


class Sums(torch.nn.Module):
    """Hardly any dense part, so that rows are what is measured."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        tables = [hb.Table(f"t{i}", rows, DIM) for i in range(TABLES)]
        self.embeddings = hb.EmbeddingCollection(tables, [hb.Feature(t.name, t.name) for t in tables], device="meta")

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.embeddings(batch.sparse).stack().sum((1, 2))[:, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=10.0, help="of the tables")
    parser.add_argument("--memory_gib", type=float, default=1.0, help="of the control group")
    parser.add_argument("--rows_gib", type=float, help="of the cache; default: a quarter of the memory")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--batches", type=int, default=500, help="that are measured, after as many that are not")
    parser.add_argument("--only", choices=["memory", "disk", "redis"], nargs="+", default=["memory", "disk", "redis"])
    parser.add_argument("--folder", type=Path, help="on the disk that is measured; default: of temporary files")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured(json.loads(args.measure))))
        return
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="hotbed-rows-") as folder:
        found = compared(args, Path(folder))
    report(found)
    if args.json:
        write_json(args.json, found)


def compared(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure every place and law of ids."""
    console = Console(stderr=True)
    rows = max(int(args.gib * GIB) // (TABLES * DIM * 4), 1)
    model = folder / "model"
    console.print(f"writing {TABLES} tables of {rows:,} × {DIM} float32")
    write(model, rows)
    limit = int(args.memory_gib * GIB)
    cache_bytes = int((args.rows_gib or args.memory_gib / 4) * GIB)
    results: dict[str, Any] = {}
    limited = False
    for place in args.only:
        if place == "redis" and shutil.which("redis-server") is None:
            console.print("no redis-server is installed: redis is left out")
            continue
        with redis(folder) if place == "redis" else nothing() as address, memory_group(limit) as join:
            limited |= join is not None
            if place != "memory" and join is None:
                console.print("[red]no control group of memory can be made here: the page cache is not limited[/red]")
            if address is not None:
                fill(model, address)
            for law, exponent in EXPONENTS.items():
                for batch in args.batch:
                    case = {
                        "model": str(model), "rows": rows, "exponent": exponent, "batch": batch,
                        "batches": args.batches, "redis": address, "folder": str(folder),
                        "memory_bytes": None if place == "memory" else cache_bytes,
                        "group": None if place == "memory" or join is None else str(join),
                    }  # fmt: skip
                    forget(model)
                    results[f"{place} {law} {batch}"] = run(case)
    said = {"bytes": rows * TABLES * DIM * 4, "memory_limit": limit, "cache_bytes": cache_bytes, "limited": limited}
    return {"benchmark": "serving_rows", **said, "results": results, **environment(torch.device("cpu"))}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Measure in a process of its own, which joins the control group before it loads anything."""
    command = [sys.executable, "-m", "benchmarks.serving_rows", "--measure", json.dumps(case)]
    if case["group"] is not None:
        command = ["sh", "-c", f'echo $$ > {case["group"]}/cgroup.procs && exec "$@"', "sh", *command]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, check=False)
    if done.returncode == -signal.SIGKILL:
        return {"failed": "killed: the memory of the control group was too little"}
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
        return {"failed": lines[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def measured(case: dict[str, Any]) -> dict[str, Any]:
    """Answer batches; in the process that is measured."""
    served = ServedModel.open(
        case["model"],
        memory_bytes=case["memory_bytes"],
        redis=case["redis"],
        directory=case["folder"],
        verify=False,
    )
    law = np.random.default_rng(1)
    times: list[float] = []
    for i in range(2 * case["batches"]):
        ids = {f"t{t}": torch.from_numpy(draw(law, case)) for t in range(TABLES)}
        batch = Batch(sparse=hb.Jagged.from_dict(ids))
        start = time.perf_counter()
        served.score_batch(batch)
        if i >= case["batches"]:
            times.append(time.perf_counter() - start)
    counters, group_path = served.counters(), case["group"]
    return {
        "rows_per_s": case["batch"] * TABLES * len(times) / sum(times),
        "p50_ms": float(np.percentile(times, 50)) * 1e3,
        "p99_ms": float(np.percentile(times, 99)) * 1e3,
        "hit_rate": served.tables.traffic.hit_rate,
        "read_bytes": counters["read_bytes"][""],
        "redis_failures": counters.get("redis_failures", {}).get("", 0.0),
        "group_bytes": None if group_path is None else used(Path(group_path)),
    }


def draw(law: np.random.Generator, case: dict[str, Any]) -> np.ndarray:
    """Draw ids of a batch; of Zipf's law by its inverse for real ranks, which are then scattered over the table."""
    rows, s, u = case["rows"], case["exponent"], law.random(case["batch"])
    if not s:
        return (u * rows).astype(np.int64)
    rank = ((1 + u * ((rows + 1.0) ** (1 - s) - 1)) ** (1 / (1 - s)) - 1).astype(np.int64).clip(0, rows - 1)
    return (rank * 0x9E3779B1) % rows


# -- what is measured ------------------------------------------------------------------------------------------------


def write(place: Path, rows: int) -> None:
    """Write an exported model of random rows."""
    (place / "tables").mkdir(parents=True)
    part = DensePart(Sums(rows))
    torch.export.save(trace_dense_part(part, 0), place / "dense.pt2")
    collection = part.collections["embeddings"]
    tables: dict[str, TableEntry] = {}
    features: dict[str, FeatureEntry] = {}
    random = np.random.default_rng(0)
    values = (random.random((min(CHUNK_ROWS, rows), DIM), np.float32) - 0.5) / 10
    for name, spec in collection.tables.items():
        with (place / "tables" / f"{name}.rows").open("wb") as stream:
            for first in range(0, rows, CHUNK_ROWS):
                values[:, 0] = random.random(len(values), np.float32)
                stream.write(memoryview(values[: rows - first]).cast("B"))
        tables[f"embeddings.{name}"] = TableEntry(
            rows=rows, dim=DIM, dtype="fp32", fp32_rows=0, init=InitEntry(seed=0, bound=spec.bound, version=1),
            record_bytes=record_format(spec).record_bytes, file=f"tables/{name}.rows",
        )  # fmt: skip
        features[f"embeddings.{name}"] = FeatureEntry(
            collection="embeddings", feature=name, table=f"embeddings.{name}", pooling="sum", max_len=None,
            on_too_long="error", on_bad_id="error",
        )  # fmt: skip
    paths = [p for p in place.rglob("*") if p.is_file()]
    # Nothing here verifies hashes of tables, so that 10 GB are not read once more.
    hashes = {p: hashlib.sha256(p.read_bytes()).hexdigest() if p.suffix == ".pt2" else "0" * 64 for p in paths}
    files = {p.relative_to(place).as_posix(): ExportedFile(bytes=p.stat().st_size, sha256=hashes[p]) for p in paths}
    schema = hb.Schema(sparse=tuple(SparseColumn(name=name, rows=rows) for name in collection.tables))
    manifest = ModelManifest(
        name="rows", step=0, state="0" * 64, written=time.time(), labels=["y"], hash=None,
        encoder=Encoder(schema.inputs, ids="raw").to_dict(), lookups={},
        dense=DenseEntry(file="dense.pt2", inputs=0, dtype=None), features=features, tables=tables, files=files,
    )  # fmt: skip
    (place / MANIFEST).write_text(json.dumps(manifest.model_dump()), encoding="utf-8")


@contextmanager
def nothing() -> Generator[None]:
    yield None


@contextmanager
def redis(folder: Path) -> Generator[str]:
    """Start a Redis of our own."""
    socket = Path(tempfile.mkdtemp(prefix="redis")) / "s"
    options = ["--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    try:
        while not socket.exists():
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(socket.parent)


def fill(place: Path, address: str) -> None:
    """Put all rows into Redis."""
    model = ExportedModel.open(place)
    least = sum(entry.rows for entry in model.manifest.tables.values())  # so that no table is in memory
    served = ServedModel.open(model, memory_bytes=least, redis=address, verify=False)
    for layer in served.tables.layers():
        if isinstance(layer, RedisRecords):
            rows = layer.slots()
            for some in rows.part(0, len(rows)).chunks(1 << 16):  # what Redis lacks is put there
                layer.read(some, torch.empty(len(some), layer.record_bytes, dtype=torch.uint8))
    served.close()


def used(folder: Path) -> int:
    """Most bytes that a control group used, page cache and all; 0 where it is not told."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (folder / name).is_file():
            return int((folder / name).read_text(encoding="ascii"))
    return 0


def forget(place: Path) -> None:
    """Let the system drop what it keeps of files."""
    for path in place.rglob("*.rows"):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(found: dict[str, Any]) -> None:
    table = Table(title=f"{found['bytes'] / GIB:,.2f} GiB of rows, {found['memory_limit'] / GIB:,.2f} GiB of memory")
    for column in ("rows from, ids, batch", "rows/s", "p50 ms", "p99 ms", "hits", "read MB", "group MB"):
        table.add_column(column, justify="left" if "," in column else "right")
    for name, of in found["results"].items():
        if "failed" in of:
            table.add_row(name, of["failed"])
            continue
        memory = "" if of["group_bytes"] is None else f"{of['group_bytes'] / 1e6:,.0f}"
        times = f"{of['p50_ms']:.2f}", f"{of['p99_ms']:.2f}"
        reads = f"{of['hit_rate']:.1%}", f"{of['read_bytes'] / 1e6:,.0f}"
        table.add_row(name, f"{of['rows_per_s']:,.0f}", *times, *reads, memory)
    Console().print(table)
    if not found["limited"]:
        print("no control group could be made: the page cache was not limited")


if __name__ == "__main__":
    main()
