"""Measure the server under open-loop load, compared with plain PyTorch with all tables in memory behind the same HTTP.

    python -m benchmarks.serving [--seconds 20] [--rows 1000000] [--cores 1 2] [--batches 1 64 1024] [--json FILE]

A DLRM of 26 tables is trained for a step and exported. *hotbed* is ``hotbed serve``. *plain* is the model as a program
of torch alone (``hotbed export --single``), as a model class of Triton's Python backend would call it, behind the same
HTTP server, encoder and batching. Each runs in a process of its own on some cores. The load comes from this process,
which shares the cores with the server if there are no others.

First the highest rate is measured: connections that ask again as soon as they are answered (closed loop). Then
requests arrive open-loop at shares of this rate: arrivals are a Poisson process with times that are drawn beforehand.
A latency counts from the drawn time even if no connection was free, so a stall counts for each request that it delays.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import torch

from benchmarks import runner
from hotbed.data.encoding.encoder import Encoder
from hotbed.files import write_json
from hotbed.serve.model_files import ExportedModel
from hotbed.serve.monitoring import json_logs
from hotbed.serve.options import ServeOptions
from hotbed.serve.served_model import ServedModel
from hotbed.serve.server import Served, Server, listen

SPARSE, DENSE, BODIES = 26, 13, 64
SHARES = (0.5, 0.9)
SIDES = ("hotbed", "plain")


def make_model(folder: Path, rows: int, dim: int) -> None:
    """Train for a step, and export as `model` and as `plain.pt2`."""
    generator = np.random.default_rng(0)
    columns = {f"c{i}": generator.integers(0, 10 * rows, 4096) for i in range(SPARSE)}
    columns |= {f"n{i}": generator.lognormal(size=4096) for i in range(DENSE)}
    pl.DataFrame(columns | {"label": generator.integers(0, 2, 4096)}).write_parquet(folder / "log.parquet")
    schema = {
        "labels": ["label"],
        "dense": [f"n{i}" for i in range(DENSE)],
        "sparse": [{"name": f"c{i}", "rows": rows} for i in range(SPARSE)],
    }
    source = {"class_path": "hotbed.data.ParquetSource", "init_args": {"schema": schema}}
    recipe = {
        "name": "serving",
        "data": {"path": str(folder / "log.parquet"), "dim": dim, "source": source, "test_split": None},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [512, 256, dim], "top": [512, 256, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}},
        "sparse_optimizer": {"class_path": "hotbed.optim.SGD", "init_args": {"lr": 0.01}},
        "train": {"batch_size": 1024, "steps": 1, "device": "cpu", "precision": "fp32", "checkpoint": "last"},
    }
    runner.hotbed("train", runner.write_recipe(folder / "recipe.yaml", recipe), "--out", folder / "runs")
    runner.hotbed("export", folder / "runs" / "serving", folder / "model")
    runner.hotbed("export", folder / "runs" / "serving", "--single", folder / "plain.pt2")


def bodies(batch: int, rows: int) -> list[bytes]:
    """Return requests with binary tensors. Ids follow Zipf's law with exponent 1.05."""
    generator = np.random.default_rng(1)
    weights = np.arange(1, 10 * rows + 1, dtype=np.float64) ** -1.05
    ends = np.cumsum(weights / weights.sum())
    made = list[bytes]()
    for _ in range(BODIES):
        ids = np.searchsorted(ends, generator.random((SPARSE, batch))).astype("<i8")
        tensors = [(f"c{i}", "INT64", ids[i]) for i in range(SPARSE)]
        tensors += [(f"n{i}", "FP64", generator.lognormal(size=batch).astype("<f8")) for i in range(DENSE)]
        inputs = [
            {"name": name, "shape": [batch], "datatype": kind, "parameters": {"binary_data_size": values.nbytes}}
            for name, kind, values in tensors
        ]
        text = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}}).encode()
        body = text + b"".join(values.tobytes() for _, _, values in tensors)
        head = f"POST /v2/models/serving/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        made.append(f"{head}Inference-Header-Content-Length: {len(text)}\r\n\r\n".encode() + body)
    return made


class PlainModel:
    """The program of torch alone behind hotbed's server."""

    step, state, labels, is_broken = 1, "", ("label",), False

    def __init__(self, folder: Path) -> None:
        self._program = torch.export.load(folder / "plain.pt2").module()
        self.encoder = Encoder.from_dict(ExportedModel.open(folder / "model").manifest.encoder)

    def score(self, columns: Any, /) -> tuple[np.ndarray, int]:
        batch = self.encoder.batch(columns)
        ids = {name: ids.long() for name, ids in batch.sparse.to_dict().items()}
        with torch.inference_mode():
            return self._program(batch.dense, ids).double().sigmoid().numpy(), self.step

    def counters(self) -> dict[str, dict[str, float]]:
        return {}


def serve_plain(folder: Path) -> None:
    """Serve `PlainModel` until a signal arrives."""
    options = ServeOptions(port=0, access_log=False)
    server = Server([Served("serving", cast(ServedModel, PlainModel(folder)))], options, listen(options))
    with json_logs():
        server.run()


@contextmanager
def serving(side: str, folder: Path, cores: int) -> Generator[int]:
    """Run a server on the first cores of this machine, and yield its port."""
    args = {
        "hotbed": ["hotbed", "serve", "--model", f"serving={folder / 'model'}", "--port", "0", "--access_log", "false"],
        "plain": ["benchmarks.serving", "--plain", str(folder)],
    }[side]
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    process = subprocess.Popen(
        [sys.executable, "-m", *args],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": str(cores)},
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
    )
    assert process.stderr is not None
    lines = list[str]()
    try:
        for line in process.stderr:
            lines.append(line)
            if line.startswith("{") and (event := json.loads(line))["event"] == "ready":
                yield int(event["port"])
                return
        raise SystemExit(f"{side} did not start:\n{''.join(lines)}")
    finally:
        process.terminate()
        process.communicate()


async def ask(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> bool:
    """Send a request on a connection, read the answer, and return whether it has scores."""
    reader, writer = streams
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return len(await reader.readexactly(length)) > 0 and head.startswith(b"HTTP/1.1 200")


async def closed_loop(port: int, requests: Sequence[bytes], seconds: float, connections: int) -> float:
    """Return the requests per second of connections that ask again as soon as they are answered."""
    end, done = time.perf_counter() + seconds, 0

    async def worker(number: int) -> None:
        nonlocal done
        streams = await asyncio.open_connection("127.0.0.1", port)
        while time.perf_counter() < end:
            if await ask(streams, requests[(number + done) % len(requests)]):
                done += 1
        streams[1].close()

    start = time.perf_counter()
    await asyncio.gather(*(worker(i) for i in range(connections)))
    return done / (time.perf_counter() - start)


async def open_loop(
    port: int, requests: Sequence[bytes], rate: float, seconds: float, connections: int
) -> dict[str, float]:
    """Ask at the times of a Poisson process. Each request waits for its time, then for a free connection."""
    count = max(1, round(rate * seconds))
    times = np.cumsum(np.random.default_rng(2).exponential(1 / rate, count))
    free: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(await asyncio.open_connection("127.0.0.1", port))
    latencies, failed, tasks = np.zeros(count), 0, set[asyncio.Task[None]]()

    async def one(i: int) -> None:
        nonlocal failed
        streams = await free.get()
        failed += not await ask(streams, requests[i % len(requests)])
        latencies[i] = time.perf_counter() - start - times[i]
        free.put_nowait(streams)

    start = time.perf_counter()
    for i in range(count):
        if (wait := times[i] - (time.perf_counter() - start)) > 0:
            await asyncio.sleep(wait)
        task = asyncio.create_task(one(i))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    took = time.perf_counter() - start
    while not free.empty():
        free.get_nowait()[1].close()
    p50, p99, p999 = (float(np.quantile(latencies, q)) * 1000 for q in (0.5, 0.99, 0.999))
    about = {"rows_per_s": count / took, "requests": count, "failed": failed}
    return {**about, "p50_ms": p50, "p99_ms": p99, "p999_ms": p999}


def measure(port: int, requests: Sequence[bytes], batch: int, seconds: float) -> list[dict[str, Any]]:
    connections = 64 if batch < 256 else 8
    asyncio.run(closed_loop(port, requests, min(2.0, seconds), 4))  # warms the server up
    highest = asyncio.run(closed_loop(port, requests, seconds, connections))
    found = list[dict[str, Any]]()
    for share in SHARES:
        sent = asyncio.run(open_loop(port, requests, share * highest, seconds, 4 * connections))
        sent["rows_per_s"] *= batch
        found.append({"highest_requests_per_s": highest, "share": share, **sent})
    return found


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="Seconds of each load.")
    parser.add_argument("--rows", type=int, default=1_000_000, help="Rows of each of the 26 tables.")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2], help="Cores of the server.")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 1024], help="Rows of a request.")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.plain is not None:
        serve_plain(args.plain)
        return
    results = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder, args.rows, args.dim)
        requests = {batch: bodies(batch, args.rows) for batch in args.batches}
        for cores in args.cores:
            for side in SIDES:
                with serving(side, folder, cores) as port:
                    for batch, of in requests.items():
                        about = {"side": side, "cores": cores, "batch": batch}
                        results += [about | found for found in measure(port, of, batch, args.seconds)]
    runner.show("servers", results)
    if args.json:
        options = {key: getattr(args, key) for key in ("seconds", "rows", "dim")}
        write_json(args.json, {"results": results, **options, "measured": runner.about()})


if __name__ == "__main__":
    main()
