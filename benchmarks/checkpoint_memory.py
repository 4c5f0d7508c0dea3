"""Measure the memory of commands that save or load a model on disk, in a control group that ends what takes too much.

    python -m benchmarks.checkpoint_memory --gigabytes 4 10 --limit_mib 1024 --json out.json

A model of one table of rows on disk is trained without a checkpoint, then with full and differential checkpoints in the
background; then it is resumed, converted, exported and asked for predictions, each by the command line in a process of
its own. A row takes 6 KiB (512 columns with the moments of Adam), because the index in memory takes about 100 bytes per
row, whatever its size. The largest anonymous memory of each command is printed. Needs root and Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.process_memory import memory_group

DIM, BATCH, IDS = 512, 256, 8
RECORD_BYTES = 3 * DIM * 4
"""A row and two moments of Adam."""


def recipe(folder: Path, gigabytes: float, cache_rows: int) -> tuple[Path, int]:
    """Write a recipe whose training touches so many bytes of rows; return it and its steps."""
    trained = int(gigabytes * 1e9 / RECORD_BYTES)
    rows = trained * 5 // 4  # uniform draws of 1.6 times as many ids leave a fifth of the rows out
    (folder / "tables.yaml").write_text(json.dumps({"rows": [rows], "dense": 13, "ids": IDS}))
    steps = int(1.61 * rows / (BATCH * IDS))
    samples = (steps + 1) * BATCH
    text = {
        "name": "large",
        "data": {
            "source": {
                "class_path": "hotbed.data.ZipfSource",
                "init_args": {"train_samples": samples, "test_samples": 8192, "exponent": 0.0},
            },
            "path": str(folder / "tables.yaml"),
            "dim": DIM,
            "shuffle": False,
            "test_split": None,
        },
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [64, DIM], "top": [64, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}},
        "sparse_optimizer": {"class_path": "hotbed.optim.Adam", "init_args": {"lr": 0.001}},
        "train": {"batch_size": BATCH, "eval_batch_size": BATCH, "steps": steps},
        "memory": {"tier": "disk", "cache_rows": cache_rows, "directory": str(folder)},
    }
    path = folder / "recipe.json"
    path.write_text(json.dumps(text))
    return path, steps


def anonymous_mib(pid: int) -> float:
    """Anonymous memory of a process and its children, in MiB; 0 where it has ended."""
    found = 0.0
    try:
        pids = [pid, *map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
        for each in pids:
            for line in Path(f"/proc/{each}/status").read_text().splitlines():
                if line.startswith(("RssAnon:", "RssShmem:")):
                    found += int(line.split()[1]) / 1024
    except (OSError, ValueError):
        return 0.0
    return found


def run(name: str, argv: list[str], limit_mib: int) -> dict[str, Any]:
    """Run a command in a control group; return its status, its peak and its time."""
    with memory_group(limit_mib << 20) as group:
        if group is None:
            sys.exit("this needs root and a writable control group of memory")

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        start, peak = time.perf_counter(), 0.0
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "hotbed", *argv], stdout=output, stderr=output, preexec_fn=enter
            )
            while process.poll() is None:
                peak = max(peak, anonymous_mib(process.pid))
                time.sleep(0.01)
            output.seek(0)
            end = output.read()[-600:]
    found = {"exit": process.returncode, "peak_mib": round(peak), "seconds": round(time.perf_counter() - start, 1)}
    print(f"{name:44} exit {found['exit']:4}  peak {found['peak_mib']:6,} MiB  {found['seconds']:7.1f} s", flush=True)
    if process.returncode:
        print(end)
    return found


def measure(gigabytes: float, limit_mib: int, cache_rows: int, folder: Path, only: Sequence[str]) -> dict[str, Any]:
    """Run commands on a model with so many bytes of trained rows: those whose name has one of these words."""
    path, steps = recipe(folder, gigabytes, cache_rows)
    out = str(folder / "run")
    found: dict[str, Any] = {}

    def step(name: str, *argv: str) -> None:
        if any(word in name for word in only):
            found[name] = run(name, list(argv), limit_mib)

    step("train, no checkpoint", "train", str(path), "--train.checkpoint", "none", "--out", str(folder / "plain"))
    shutil.rmtree(folder / "plain", ignore_errors=True)
    often = ["--train.checkpoint_every", str(steps // 3), "--train.checkpoint_full_every", "2"]
    step("train, full and differential checkpoints", "train", str(path), *often, "--out", out)
    checkpoints = list(folder.rglob("manifest.json"))
    found["checkpoint_bytes"] = sum(f.stat().st_size for c in checkpoints for f in c.parent.glob("*.safetensors"))
    print(f"checkpoints: {len(checkpoints)} with {found['checkpoint_bytes'] / 1e9:.2f} GB")
    run_folder = str(next(iter({c.parent.parent for c in checkpoints})))
    step("resume, train on and save", "train", str(path), "--resume", run_folder, "--train.steps", str(steps + 5))
    step("checkpoint convert", "checkpoint", "convert", run_folder, str(folder / "converted"), "--compact")
    shutil.rmtree(folder / "converted", ignore_errors=True)
    step("export", "export", run_folder, str(folder / "exported"))
    shutil.rmtree(folder / "exported", ignore_errors=True)
    step(
        "predict", "predict", run_folder, str(folder / "tables.yaml"), "--out", str(folder / "s.csv"), "--split", "test"
    )
    return found


def main() -> None:
    """Measure, print, and write results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[4.0, 10.0])
    parser.add_argument("--limit_mib", type=int, default=1024)
    parser.add_argument("--cache_rows", type=int, default=10_000)
    parser.add_argument("--only", nargs="+", default=[""], help="words of the commands to run, e.g. 'checkpoints'")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    parsed = parser.parse_args()
    results: dict[str, Any] = {}
    for gigabytes in parsed.gigabytes:
        with tempfile.TemporaryDirectory(prefix="hotbed-memory-", dir=parsed.folder) as folder:
            print(f"-- {gigabytes:g} GB of trained rows, {parsed.limit_mib:,} MiB")
            results[f"{gigabytes:g} GB"] = measure(
                gigabytes, parsed.limit_mib, parsed.cache_rows, Path(folder), parsed.only
            )
    if parsed.json is not None:
        before = json.loads(parsed.json.read_text()) if parsed.json.exists() else {}
        parsed.json.write_text(json.dumps(before | {"limit_mib": parsed.limit_mib} | results, indent=1) + "\n")


if __name__ == "__main__":
    main()
