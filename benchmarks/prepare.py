"""Measure `hotbed prepare`: rows per second and the peak of memory, against scripts in polars and pandas.

    python -m benchmarks.prepare [--rows 20000000] [--only hotbed …] [--rounds 3] [--memory 2GiB] [--json FILE]

A log in Criteo's layout is written once: values by Zipf's law (exponent 1.05) with as many different ones per column as
Criteo's Kaggle log has, 225 bytes a line. Each contender is a process of its own, and they take turns. `pandas` is
left out where it is not installed.

*Memory* is that of the process and all its descendants: the sum of their proportional set sizes (private pages, and a
share of those that several processes have), sampled every 0.2 s, so a peak between two samples is missed; beside it,
the largest resident set that the kernel saw of any one of them, which misses nothing, but is of one process only and
counts mapped files. Of a single process the latter is thus an upper bound.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.prepare_scripts import SCRIPTS
from benchmarks.soak import family
from hotbed.data.formats.zipf_source import ZipfLaw, random_uniform, stream_key
from hotbed.data.hashing import mix
from hotbed.train.runs.report import environment, size

ROOT = Path(__file__).resolve().parents[1]
CONTENDERS = ("hotbed", "hotbed_processes", *SCRIPTS)
EXPONENT, PIECE = 1.05, 250_000
MISSING = 0.04
"""Share of the fields that are empty."""
SAMPLE_S = 0.2


def write_log(path: Path, rows: int, seed: int) -> None:
    """Write a log, which appears whole; the same arguments give the same bytes."""
    kaggle = yaml.safe_load((ROOT / "benchmarks/published/kaggle_tables.yaml").read_text(encoding="utf-8"))["rows"]
    laws = [ZipfLaw(values, EXPONENT) for values in kaggle]
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as file:
        for start in range(0, rows, PIECE):
            counters = np.arange(start, min(start + PIECE, rows), dtype=np.uint64)
            file.write(_lines(laws, counters, seed))
    unfinished.replace(path)


def _lines(laws: Sequence[ZipfLaw], counters: np.ndarray[Any, Any], seed: int) -> bytes:
    label = (random_uniform(stream_key(seed, 1), counters) < 0.26).astype(np.int8)
    fields = [pc.cast(pa.array(label), pa.string())]
    for i in range(13):
        u = random_uniform(stream_key(seed, 2 + i), counters)
        numbers = np.floor(np.exp(8 * u)).astype(np.int64)
        fields.append(pc.fill_null(pc.cast(pa.array(numbers, mask=u < MISSING), pa.string()), ""))
    for i, law in enumerate(laws):
        ranks = law.draw((seed, 20 + i), counters).astype(np.uint64)
        text = (mix(ranks + np.uint64(i << 32)) >> np.uint64(32)).astype(">u4").tobytes().hex()
        ends = np.arange(0, len(text) + 1, 8, dtype=np.int32)
        words = pa.StringArray.from_buffers(len(counters), pa.py_buffer(ends), pa.py_buffer(text.encode()))
        empty = random_uniform(stream_key(seed, 50 + i), counters) < MISSING
        fields.append(pc.if_else(pa.array(empty), "", words))
    lines = pc.binary_join_element_wise(*fields, "\t")
    return pc.binary_join_element_wise(lines, "", "\n").buffers()[2].to_pybytes()


def command_of(contender: str, log: Path, out: Path, memory: str) -> list[str]:
    """How a contender is started."""
    if contender in SCRIPTS:
        out.mkdir()
        return [sys.executable, "-m", "benchmarks.prepare_scripts", contender, str(log), str(out)]
    executor = contender.partition("_")[2] or "threads"
    options = ["--memory", memory, "--executor", executor]
    return [sys.executable, "-m", "hotbed", "prepare", str(log), str(out), *options]


def measure(command: Sequence[str], log: Path) -> dict[str, float]:
    """Run a command to its end: seconds, and bytes of memory at the peak."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    started = time.perf_counter()
    peak = samples = 0
    largest: dict[int, int] = {}
    with log.open("wb") as said:
        child = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=said, stderr=subprocess.STDOUT)
        try:
            while child.poll() is None:
                proportional = 0
                for pid in family(child.pid):
                    with suppress(FileNotFoundError, ProcessLookupError, KeyError):  # it ended meanwhile
                        proportional += _kilobytes(Path(f"/proc/{pid}/smaps_rollup"), "Pss")
                        largest[pid] = _kilobytes(Path(f"/proc/{pid}/status"), "VmHWM")
                peak, samples = max(peak, proportional), samples + 1
                time.sleep(SAMPLE_S)
        finally:
            child.kill()
            child.wait()
    seconds = time.perf_counter() - started
    if child.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {child.returncode}:\n{log.read_text(encoding='utf-8')[-4000:]}"
        )
    return {
        "seconds": seconds,
        "peak_bytes": 1024 * peak,
        "largest_process_bytes": 1024 * max(largest.values(), default=0),
        "memory_samples": samples,
    }


def _kilobytes(file: Path, name: str) -> int:
    values = dict(line.split(":", 1) for line in file.read_text().splitlines() if ":" in line)
    return int(values[name].split()[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the contenders, print and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", default="2GiB", help="of hotbed prepare")
    parser.add_argument("--folder", type=Path, help="where log and datasets go; the log is kept there, and used again")
    parser.add_argument("--json", type=Path, help="write results here")
    args = parser.parse_args(argv)
    contenders = [c for c in args.only if c != "pandas" or importlib.util.find_spec("pandas") is not None]
    found: dict[str, list[dict[str, float]]] = {contender: [] for contender in contenders}
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = args.folder or Path(scratch)
        log = folder / f"criteo-{args.rows}-{args.seed}.tsv"
        if not log.is_file():
            write_log(log, args.rows, args.seed)
        for _ in range(args.rounds):
            for contender in contenders:
                out = folder / f"out-{contender}"
                shutil.rmtree(out, ignore_errors=True)
                found[contender].append(measure(command_of(contender, log, out, args.memory), folder / "output.txt"))
                shutil.rmtree(out, ignore_errors=True)
                print(f"{contender}: {found[contender][-1]}", file=sys.stderr, flush=True)
        raw_bytes = log.stat().st_size
    table = Table("contender", "rows/s", "seconds", "peak, all processes", "largest process")
    for contender, runs in found.items():
        seconds = statistics.median(run["seconds"] for run in runs)
        peaks = [size(int(max(run[key] for run in runs))) for key in ("peak_bytes", "largest_process_bytes")]
        table.add_row(contender, f"{args.rows / seconds:,.0f}", f"{seconds:,.1f}", *peaks)
    Console().print(f"{args.rows:,} rows, {size(raw_bytes)}; --memory {args.memory}; seconds are medians", table)
    if args.json:
        about = {**environment(torch.device("cpu")), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        options = {"rows": args.rows, "seed": args.seed, "memory": args.memory, "raw_bytes": raw_bytes}
        args.json.write_text(json.dumps({**options, "results": found, "measured": about}, indent=1) + "\n")


if __name__ == "__main__":
    main()
