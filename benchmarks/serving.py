"""Measure the server under open-loop load, beside plain PyTorch with all tables in memory behind the same HTTP stack.

    python -m benchmarks.serving [--seconds 20] [--rows 1000000] [--cores 1 2] [--batches 1 64 1024] [--json FILE]

A DLRM of 26 tables is trained for a step and exported. *hotbed* is ``hotbed serve``; *plain* is the model as a program
of torch alone (``hotbed export --single``: ``torch.nn.functional.embedding_bag`` over tensors in memory), as a model
class of Triton's Python backend would call it, behind the same HTTP server, encoder and batching. Each runs in a
process of its own on the cores that are said; the load comes from this process, which takes turns with it where there
are no other cores.

First the highest rate is looked for: connections that ask again as soon as they are answered (closed loop). Then
requests arrive open-loop at shares of it: arrivals are a Poisson process whose times are drawn beforehand, and a
latency counts from the time that was drawn, also where no connection was free, so a stall counts against every request
that it held up.
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
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import polars as pl
import torch
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.command import run
from hotbed.data.encoding.encoder import Encoder
from hotbed.serve.model_files import ExportedModel
from hotbed.serve.monitoring import json_logs
from hotbed.serve.options import ServeOptions
from hotbed.serve.served_model import ServedModel
from hotbed.serve.server import Served, Server, listen
from hotbed.train.runs.report import environment

SPARSE, DENSE, BODIES = 26, 13, 64
SHARES = (0.5, 0.9)
SIDES = ("hotbed", "plain")


class Sent(NamedTuple):
    """Latencies in seconds, from the scheduled times; answers that were no scores; the time that all took."""

    latencies: np.ndarray
    failed: int
    seconds: float


# -- what is served ------------------------------------------------------------------------------------------------


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
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    run("train", folder / "recipe.yaml", "--out", folder / "runs")
    run("export", folder / "runs" / "serving", folder / "model")
    run("export", folder / "runs" / "serving", "--single", folder / "plain.pt2")


def bodies(batch: int, rows: int) -> list[bytes]:
    """Requests with binary tensors, which are sent in turn; ids are Zipf-distributed with exponent 1.05."""
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
    """Serve `PlainModel` until a signal; what the process for *plain* runs."""
    options = ServeOptions(port=0, access_log=False)
    server = Server([Served("serving", cast(ServedModel, PlainModel(folder)))], options, listen(options))
    with json_logs():
        server.run()


def started(side: str, folder: Path, cores: int) -> tuple[subprocess.Popen[str], int]:
    """A server on the first cores of this machine, and its port."""
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
    said = list[str]()
    for line in process.stderr:
        said.append(line)
        if line.startswith("{") and (event := json.loads(line))["event"] == "ready":
            return process, int(event["port"])
    raise SystemExit(f"{side} did not start:\n{''.join(said)}")


# -- the load ------------------------------------------------------------------------------------------------------


async def ask(streams: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> bytes:
    """Send a request on a connection, and read the answer; nothing if it has no scores."""
    reader, writer = streams
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    body = await reader.readexactly(length)
    return body if head.startswith(b"HTTP/1.1 200") else b""


async def closed_loop(port: int, requests: Sequence[bytes], seconds: float, connections: int) -> float:
    """Requests per second of connections that ask again as soon as they are answered."""
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


async def open_loop(port: int, requests: Sequence[bytes], rate: float, seconds: float, connections: int) -> Sent:
    """Ask at times of a Poisson process of this rate; each request waits for its time, then for a free connection."""
    count = max(1, round(rate * seconds))
    times = np.cumsum(np.random.default_rng(2).exponential(1 / rate, count))
    free: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(connections):
        free.put_nowait(await asyncio.open_connection("127.0.0.1", port))
    latencies, failed, tasks = np.zeros(count), 0, set[asyncio.Task[None]]()

    async def one(i: int) -> None:
        nonlocal failed
        streams = await free.get()
        scored = await ask(streams, requests[i % len(requests)])
        failed += not scored
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
    return Sent(latencies, failed, took)


def measure(port: int, requests: Sequence[bytes], batch: int, seconds: float) -> list[dict[str, Any]]:
    """The highest rate, and latencies at shares of it."""

    def awaited(load: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        async def main() -> Any:
            return await load(port, requests, *args)

        return asyncio.run(main())

    connections = 64 if batch < 256 else 8
    awaited(closed_loop, min(2.0, seconds), 4)  # warm
    highest = awaited(closed_loop, seconds, connections)
    found = list[dict[str, Any]]()
    for share in SHARES:
        sent: Sent = awaited(open_loop, share * highest, seconds, 4 * connections)
        p50, p99, p999 = (float(np.quantile(sent.latencies, q)) * 1000 for q in (0.5, 0.99, 0.999))
        found.append(
            {
                "highest_requests_per_s": highest,
                "share": share,
                "rows_per_s": len(sent.latencies) * batch / sent.seconds,
                "requests": len(sent.latencies),
                "failed": sent.failed,
                "p50_ms": p50,
                "p99_ms": p99,
                "p999_ms": p999,
            }
        )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure all, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--cores", type=int, nargs="+", default=[1, 2], help="that the server may use")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 1024], help="rows of a request")
    parser.add_argument("--json", type=Path, help="write results here")
    parser.add_argument("--plain", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
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
                process, port = started(side, folder, cores)
                try:
                    for batch, of in requests.items():
                        about = {"side": side, "cores": cores, "batch": batch}
                        results += [about | found for found in measure(port, of, batch, args.seconds)]
                finally:
                    process.terminate()
                    process.communicate()
    table = Table("server", "cores", "batch", "load", "rows/s", "p50 ms", "p99 ms", "p99.9 ms", "failed")
    for r in results:
        latencies = (f"{r[key]:,.2f}" for key in ("p50_ms", "p99_ms", "p999_ms"))
        load = f"{r['share']:.0%} of {r['highest_requests_per_s']:,.0f}/s"
        row = (
            r["side"],
            str(r["cores"]),
            str(r["batch"]),
            load,
            f"{r['rows_per_s']:,.0f}",
            *latencies,
            str(r["failed"]),
        )
        table.add_row(*row)
    Console().print(table)
    if args.json:
        about = {**environment(torch.device("cpu")), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        options = {key: getattr(args, key) for key in ("seconds", "rows", "dim")}
        args.json.write_text(json.dumps({"results": results, **options, "measured": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
