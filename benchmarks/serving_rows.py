"""Serve tables that are larger than memory: ``python -m benchmarks.serving_rows --gib 10 --memory_gib 1``.

Tables of random rows are written as an exported model. For each memory of rows, a process of its own answers batches of
random ids. The benchmark reports rows per second and the time of batches:

``memory``  all rows in memory, without a limit
``disk``    files behind a cache of a quarter of the memory (``--rows_gib``), in a control group with this memory. It
            also counts the page cache, and Python, torch and the kernels, which take half a GiB.
``redis``   like ``disk``, with all rows in a Redis (outside of the group) in front of the files

Ids are uniform, or follow Zipf's law with exponent 1.05. The page cache of the files is dropped before each process.
Batches follow each other without a pause, so times are those of the work, not of a queue.

A control group needs root or a delegated group. Without one the memory is not limited, and the output says so. Limits
of a process (``prlimit``) would not count the page cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hotbed as hb
from benchmarks import runner
from benchmarks.process_memory import memory_group
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

GIB = 1 << 30
DIM, TABLES = 32, 8
CHUNK_ROWS = 1 << 18
EXPONENTS = {"uniform": 0.0, "zipf": 1.05}


class Sums(torch.nn.Module):
    """A model with a tiny dense part, so that rows take most of the time."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        tables = [hb.Table(f"t{i}", rows, DIM) for i in range(TABLES)]
        self.embeddings = hb.EmbeddingCollection(tables, [hb.Feature(t.name, t.name) for t in tables], device="meta")

    def forward(self, batch: hb.Batch) -> torch.Tensor:
        return self.embeddings(batch.sparse).stack().sum((1, 2))[:, None]


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--gib", type=float, default=10.0, help="Size of the tables.")
    parser.add_argument("--memory_gib", type=float, default=1.0, help="Memory of the control group.")
    parser.add_argument("--rows_gib", type=float, help="Size of the cache (default: a quarter of the memory).")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--batches", type=int, default=500, help="Measured batches, after as many for warm-up.")
    parser.add_argument("--only", choices=["memory", "disk", "redis"], nargs="+", default=["memory", "disk", "redis"])
    parser.add_argument("--folder", type=Path, help="Folder on the disk to measure (default: that of temporary files).")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measured(json.loads(args.measure))))
        return
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="hotbed-rows-") as folder:
        found = compared(args, Path(folder))
    keys = ("rows_per_s", "p50_ms", "p99_ms", "hit_rate", "read_bytes", "group_bytes", "failed")
    rows = [{"rows from, ids, batch": name} | {k: of.get(k) for k in keys} for name, of in found["results"].items()]
    runner.show(f"{found['bytes'] / GIB:,.2f} GiB of rows, {found['memory_limit'] / GIB:,.2f} GiB of memory", rows)
    if not found["limited"]:
        print("no control group could be made: the page cache was not limited")
    if args.json:
        write_json(args.json, found)


def compared(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rows = max(int(args.gib * GIB) // (TABLES * DIM * 4), 1)
    model, limit = folder / "model", int(args.memory_gib * GIB)
    write(model, rows)
    cache_bytes = int((args.rows_gib or args.memory_gib / 4) * GIB)
    results: dict[str, Any] = {}
    limited = False
    for tier in args.only:
        if tier == "redis" and shutil.which("redis-server") is None:
            print("no redis-server is installed: redis is left out")
            continue
        with redis(folder) if tier == "redis" else nullcontext() as address, memory_group(limit) as join:
            limited |= join is not None
            if address is not None:
                fill(model, address)
            for law, exponent in EXPONENTS.items():
                for batch in args.batch:
                    case = {
                        "model": str(model), "rows": rows, "exponent": exponent, "batch": batch,
                        "batches": args.batches, "redis": address, "folder": str(folder),
                        "memory_bytes": None if tier == "memory" else cache_bytes,
                        "group": None if tier == "memory" or join is None else str(join),
                    }  # fmt: skip
                    forget(model)
                    results[f"{tier} {law} {batch}"] = run(case)
    sizes = {"bytes": rows * TABLES * DIM * 4, "memory_limit": limit, "cache_bytes": cache_bytes, "limited": limited}
    return {"benchmark": "serving_rows", **sizes, "results": results, **runner.about()}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Measure in a process of its own, which joins the control group before it loads anything."""
    command = [sys.executable, "-m", "benchmarks.serving_rows", "--measure", json.dumps(case)]
    if case["group"] is not None:
        command = ["sh", "-c", f'echo $$ > {case["group"]}/cgroup.procs && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, cwd=runner.ROOT, check=False)
    if done.returncode:  # -9: the memory of the control group was too little
        return {"failed": f"status {done.returncode}: {done.stderr.strip()[-200:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def measured(case: dict[str, Any]) -> dict[str, Any]:
    served = ServedModel.open(
        case["model"],
        memory_bytes=case["memory_bytes"],
        redis=case["redis"],
        directory=case["folder"],
        verify=False,
    )
    law = np.random.default_rng(1)
    times: list[float] = []
    for _ in range(2 * case["batches"]):
        ids = {f"t{t}": torch.from_numpy(draw(law, case)) for t in range(TABLES)}
        batch = hb.Batch(sparse=hb.Jagged.from_dict(ids))
        times.append(runner.seconds(lambda batch=batch: served.score_batch(batch)))
    times = times[case["batches"] :]
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
    """Draw the ids of a batch. Ranks of Zipf's law come from its inverse, and are scattered over the table."""
    rows, s, u = case["rows"], case["exponent"], law.random(case["batch"])
    if not s:
        return (u * rows).astype(np.int64)
    rank = ((1 + u * ((rows + 1.0) ** (1 - s) - 1)) ** (1 / (1 - s)) - 1).astype(np.int64).clip(0, rows - 1)
    return (rank * 0x9E3779B1) % rows


def write(folder: Path, rows: int) -> None:
    (folder / "tables").mkdir(parents=True)
    part = DensePart(Sums(rows))
    torch.export.save(trace_dense_part(part, 0), folder / "dense.pt2")
    collection = part.collections["embeddings"]
    tables: dict[str, TableEntry] = {}
    features: dict[str, FeatureEntry] = {}
    random = np.random.default_rng(0)
    values = (random.random((min(CHUNK_ROWS, rows), DIM), np.float32) - 0.5) / 10
    for name, spec in collection.tables.items():
        with (folder / "tables" / f"{name}.rows").open("wb") as stream:
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
    paths = [p for p in folder.rglob("*") if p.is_file()]
    # Nothing here verifies hashes of tables, so that 10 GB are not read once more.
    hashes = {p: hashlib.sha256(p.read_bytes()).hexdigest() if p.suffix == ".pt2" else "0" * 64 for p in paths}
    files = {p.relative_to(folder).as_posix(): ExportedFile(bytes=p.stat().st_size, sha256=hashes[p]) for p in paths}
    schema = hb.Schema(sparse=tuple(SparseColumn(name=name, rows=rows) for name in collection.tables))
    manifest = ModelManifest(
        name="rows", step=0, state="0" * 64, written=time.time(), labels=["y"], hash=None,
        encoder=Encoder(schema.inputs, ids="raw").to_dict(), lookups={},
        dense=DenseEntry(file="dense.pt2", inputs=0, dtype=None), features=features, tables=tables, files=files,
    )  # fmt: skip
    (folder / MANIFEST).write_text(json.dumps(manifest.model_dump()), encoding="utf-8")


@contextmanager
def redis(folder: Path) -> Generator[str]:
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


def fill(folder: Path, address: str) -> None:
    model = ExportedModel.open(folder)
    least = sum(entry.rows for entry in model.manifest.tables.values())  # so that no table is in memory
    served = ServedModel.open(model, memory_bytes=least, redis=address, verify=False)
    for layer in served.tables.layers():
        if isinstance(layer, RedisRecords):
            rows = layer.slots()
            for some in rows.part(0, len(rows)).chunks(1 << 16):  # what Redis lacks is put there
                layer.read(some, torch.empty(len(some), layer.record_bytes, dtype=torch.uint8))
    served.close()


def used(folder: Path) -> int:
    """Return the peak of the memory of a control group with its page cache, or 0 if it is unknown."""
    for name in ("memory.max_usage_in_bytes", "memory.peak"):
        if (folder / name).is_file():
            return int((folder / name).read_text(encoding="ascii"))
    return 0


def forget(folder: Path) -> None:
    for path in folder.rglob("*.rows"):
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
