"""Serve under load while training publishes, and see whether every answer is of one version, how old, and how fast.

    python -m benchmarks.follow [--minutes 30] [--every_s 10] [--rate 50] [--batch 8] [--json FILE]

``hotbed train`` trains a model that tells its version in every score (`benchmarks.planted`) and publishes every so
often; ``hotbed serve`` follows it, with less memory than the tables take; this starts both, and a process that asks.
Requests arrive open-loop: the times are those of a Poisson process, and a latency counts from the scheduled time. The
scores of every row must be of the step that the answer says, by each of the three things that tell it.

*Staleness* is the time from when a version was published, its manifest written, to the first answer by it or a later
one. What the server uses is sampled meanwhile; *flat* is that of `benchmarks.soak`. When training has ended, the server
must reach the last version, and score as ``hotbed predict`` does by the newest checkpoint, to the bit. Exits with 1 if
a request failed, versions were mixed or refused, a score differs, or a curve is not flat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch
from prometheus_client.parser import text_string_to_metric_families

import hotbed as hb
from benchmarks.planted import LABELS, sample_rows, steps_of, write_recipe
from benchmarks.serving import ask
from benchmarks.soak import CURVES, Record, disk, flatness, report, used_by
from hotbed.train.report import environment

ROOT = Path(__file__).resolve().parents[1]
BODIES, PREDICTED_ROWS = 64, 200
CONNECTIONS = 32
PATIENCE_S, SLOWEST_S = 300.0, 30.0
USED = {name: CURVES[name] for name in ("rss", "anonymous", "open_files", "threads", "disk")}
"""Of the server; what it shares with others (pss) depends on them."""
WRONG = ("failed", "mixed", "refused", "unlike_predict")


def main(argv: Sequence[str] | None = None) -> None:
    """Run all, print and write what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--every_s", type=float, default=10, help="seconds between versions, and between samples")
    parser.add_argument("--rate", type=float, default=50, help="requests per second")
    parser.add_argument("--batch", type=int, default=8, help="rows of a request")
    parser.add_argument("--rows", type=int, default=50_000, help="of each of the 9 large tables")
    parser.add_argument("--memory_gib", type=float, default=0.01, help="memory for rows; all take 0.03 by default")
    parser.add_argument("--json", type=Path, help="write what was seen here")
    parser.add_argument("--load", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.load is not None:
        print(json.dumps(asyncio.run(loaded(args.load, args.rate, args.batch, args.rows))))
        return
    with tempfile.TemporaryDirectory(prefix="hotbed-follow-") as folder:
        found = followed(Path(folder), args)
    print(text_of(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if any(found[name] for name in WRONG) or not all(each["flat"] for each in found["flat"].values()):
        raise SystemExit(1)


# -- the processes -------------------------------------------------------------------------------------------------


def followed(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train, serve and ask for so long; what was seen."""
    recipe, published = write_recipe(folder, args.rows, args.every_s), folder / "published"
    with ExitStack() as stack:
        training = process(stack, folder / "training.txt", "hotbed", "train", recipe, "--out", folder / "runs")
        wait_for(lambda: bool(manifests(published)), training, "a published model")
        start = time.time()
        options = ("--port", 0, "--memory_gib", args.memory_gib, "--access_log", "false")
        serving = process(stack, folder / "serving.txt", "hotbed", "serve", published, *options)
        wait_for(lambda: port_of(folder / "serving.txt") is not None, serving, "a server that is ready")
        port = port_of(folder / "serving.txt")
        load = ("--rate", args.rate, "--batch", args.batch, "--rows", args.rows)
        loading = process(stack, folder / "loading.txt", "benchmarks.follow", "--load", port, *load)
        watched = Watched(folder, serving.pid)
        watched.look(60 * args.minutes, args.every_s, [training, serving, loading])
        stop(training, folder / "training.txt")
        newest = max(watched.manifests())
        wait_for(lambda: int(ask_now(port, [])["version"]) >= newest, serving, f"an answer of step {newest}")
        unlike = unlike_predict(folder, port)
        counters = counted(port)
        stop(loading, folder / "loading.txt")
        stop(serving, folder / "serving.txt")
    asked = json.loads((folder / "loading.txt").read_text().splitlines()[-1])
    staleness = stale(watched.published, asked.pop("first"))
    return {
        "date": datetime.now(UTC).date().isoformat(),
        **environment(torch.device("cpu")),
        **{name: getattr(args, name) for name in ("minutes", "every_s", "rate", "batch", "rows", "memory_gib")},
        "versions": len([at for at in watched.published.values() if at >= start]),
        "steps": newest,
        **asked,
        "unlike_predict": unlike,
        "refused": counters["hotbed_versions_refused_total"],
        "applied": counters["hotbed_versions_applied_total"],
        "staleness_s": {"median": round(float(np.median(staleness)), 3), "worst": round(max(staleness), 3)},
        "flat": flatness(watched.samples, USED),
        "samples": watched.samples,
    }


def process(stack: ExitStack, log: Path, *args: object) -> subprocess.Popen[bytes]:
    """Start a Python module whose output goes into a file, and which is killed when the stack is closed."""
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as output:
        command = [sys.executable, "-m", *map(str, args)]
        made = subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT)
    stack.callback(made.wait)
    stack.callback(made.kill)
    return made


def stop(process: subprocess.Popen[bytes], log: Path) -> None:
    """End a process by SIGTERM; it must end as one that was asked to."""
    process.send_signal(signal.SIGTERM)
    if process.wait(PATIENCE_S) not in (0, 128 + signal.SIGTERM):
        raise SystemExit(f"{process.args} ended with {process.returncode}:\n{log.read_text()[-3000:]}")


def wait_for(is_there: Callable[[], bool], process: subprocess.Popen[bytes], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_there():
        if process.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"there is no {what} after {PATIENCE_S:.0f} s, or {process.args} has ended")
        time.sleep(0.1)


def port_of(log: Path) -> int | None:
    events = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    return next((event["port"] for event in events if event["event"] == "ready"), None)


def manifests(published: Path) -> dict[int, float]:
    """When the versions that are there were published, by step."""
    found: dict[int, float] = {}
    for file in published.glob("*/manifest.json"):
        with suppress(FileNotFoundError):
            step, at = int(file.parent.name.rpartition("-")[2]), file.stat().st_mtime
            found[step] = min(at, found.get(step, at))
    return found


@dataclass
class Watched:
    """What is published, and what the server uses, over time."""

    folder: Path
    server: int
    published: dict[int, float] = field(default_factory=dict[int, float])
    samples: list[Record] = field(default_factory=list[Record])

    def manifests(self) -> dict[int, float]:
        """All that was seen to be published, with what is there now."""
        for step, at in manifests(self.folder / "published").items():
            self.published.setdefault(step, at)
        return self.published

    def look(self, seconds: float, every_s: float, running: Sequence[subprocess.Popen[bytes]]) -> None:
        """Take samples for so long, while all processes run."""
        start = time.monotonic()
        while (at := time.monotonic() - start) < seconds:
            for each in running:
                if each.poll() is not None:
                    logs = "\n".join(log.read_text()[-1000:] for log in self.folder.glob("*.txt"))
                    raise SystemExit(f"{each.args} ended early, with {each.returncode}:\n{logs}")
            sizes = {f"{name}_disk": float(disk(self.folder / name)) for name in ("published", "runs")}
            self.samples.append({"at": at, "load_average": os.getloadavg()[0], **used_by(self.server), **sizes})
            self.manifests()
            time.sleep(every_s)


# -- the load ------------------------------------------------------------------------------------------------------


@dataclass
class Asked:
    """What became of requests: latencies in seconds, with the time that they were scheduled for."""

    latencies: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    failures: list[str] = field(default_factory=list[str])
    mixed: int = 0
    first: dict[int, float] = field(default_factory=dict[int, float])
    """When a step answered first, in seconds since 1970."""

    def take(self, body: bytes) -> None:
        """Look at an answer: all its scores must be of the step that it says."""
        if not body:
            raise OSError("an answer without scores")
        answer = json.loads(body)
        step = int(answer["version"])
        self.first.setdefault(step, time.time())
        self.mixed += any(steps_of(scores) != {step} for scores in answer["scores"])

    def summary(self) -> dict[str, Any]:
        times = np.array(self.latencies)
        minute, ms = (times[:, 0] // 60).astype(int), times[:, 1] * 1000
        p50, p99, p999, worst = (round(float(np.quantile(ms, q)), 2) for q in (0.5, 0.99, 0.999, 1))
        by_minute = [round(float(np.quantile(ms[minute == m], 0.99)), 2) for m in np.unique(minute)]
        return {
            "requests": len(ms),
            "failed": len(self.failures),
            "failures": self.failures[:5],
            "mixed": self.mixed,
            "latency_ms": {"p50": p50, "p99": p99, "p999": p999, "worst": worst, "p99_by_minute": by_minute},
            "first": self.first,
        }


async def loaded(port: int, rate: float, batch: int, rows: int) -> dict[str, Any]:
    """Ask at the times of a Poisson process until SIGTERM; what became of it."""
    stopped, asked = asyncio.Event(), Asked()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    requests = [request(sample_rows(batch, 4 * rows, seed)) for seed in range(2, 2 + BODIES)]
    free: asyncio.Queue[Any] = asyncio.Queue()
    for _ in range(CONNECTIONS):
        free.put_nowait(None)
    tasks, random = set[asyncio.Task[None]](), np.random.default_rng(0)

    async def one(body: bytes, due: float) -> None:
        streams = await free.get()
        try:
            async with asyncio.timeout(SLOWEST_S):
                streams = streams or await asyncio.open_connection("127.0.0.1", port)
                asked.take(await ask(streams, body))
        except (OSError, EOFError, TimeoutError) as error:
            asked.failures.append(repr(error))
            if streams is not None:
                streams[1].close()
            streams = None
        asked.latencies.append((due, time.perf_counter() - start - due))
        free.put_nowait(streams)

    start, due = time.perf_counter(), 0.0
    while not stopped.is_set():
        due += random.exponential(1 / rate)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(due - (time.perf_counter() - start), 0)):
                await stopped.wait()
        task = asyncio.create_task(one(requests[random.integers(BODIES)], due))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return asked.summary()


def request(rows: pl.DataFrame) -> bytes:
    body = json.dumps(rows.to_dicts()).encode()
    return f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


# -- what was seen -------------------------------------------------------------------------------------------------


def ask_now(port: int | None, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask for the scores of some rows."""
    body = json.dumps(rows or sample_rows(1, 10, 0).to_dicts()).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/score", body, SLOWEST_S) as answer:
        return json.load(answer)


def unlike_predict(folder: Path, port: int | None) -> int:
    """How many scores of the server are others than those of ``hotbed predict`` by the run's newest checkpoint."""
    (run,) = (folder / "runs" / "follow").iterdir()
    rows = sample_rows(PREDICTED_ROWS, 1000, 1)
    rows.write_parquet(folder / "new.parquet")
    hb.predict(run, folder / "new.parquet", folder / "scores.parquet", trust_recipe=True)
    predicted = pl.read_parquet(folder / "scores.parquet").select(pl.col(f"score_{label}") for label in LABELS)
    served = pl.DataFrame(ask_now(port, rows.to_dicts())["scores"]).select(LABELS)
    return int((predicted.to_numpy() != served.to_numpy()).sum())


def counted(port: int | None) -> dict[str, int]:
    """Versions that the server applied and refused, as it says itself."""
    names = ("hotbed_versions_applied_total", "hotbed_versions_refused_total")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SLOWEST_S) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return {name: int(sum(sample.value for sample in samples if sample.name == name)) for name in names}


def stale(published: dict[int, float], first: dict[str, float]) -> list[float]:
    """Seconds from when a version was published to the first answer by it or a later one, for those after the first."""
    answered = {int(step): at for step, at in first.items()}
    steps = [step for step in published if step > min(answered)]
    return [min(at for s, at in answered.items() if s >= step) - published[step] for step in sorted(steps)]


def text_of(found: dict[str, Any]) -> str:
    latency, staleness = found["latency_ms"], found["staleness_s"]
    return "\n".join(
        [
            f"{found['requests']:,} requests of {found['batch']} rows, {found['failed']} failed",
            f"latency in ms: p50 {latency['p50']}, p99 {latency['p99']}, p99.9 {latency['p999']}, "
            f"worst {latency['worst']}",
            f"{found['versions']} versions up to step {found['steps']:,}, {found['refused']} refused; answers of "
            f"mixed versions: {found['mixed']}; scores unlike hotbed predict's: {found['unlike_predict']}",
            f"from published to answering: {staleness['median']} s (median), {staleness['worst']} s (worst)",
            report(found["flat"]),
        ]
    )


if __name__ == "__main__":
    main()
