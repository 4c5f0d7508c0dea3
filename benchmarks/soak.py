"""Train for an hour with everything on, and check that the resources of the processes stay flat.

    python -m benchmarks.soak [--minutes 60] [--ranks 1] [--every_s 10] [--json FILE]

Rows are in memory, in the host's memory and on disk, with a cache. Batches are prefetched. Full and differential
checkpoints are saved in the background every few hundred steps, and the newest three are kept. Every epoch is
evaluated. Then SIGTERM ends the run, which must leave checkpoints without a wrong byte.

*Flat* is a Theil-Sen slope (the median of the slopes between all pairs of samples, which a saw-tooth does not move) per
hour, within a tolerance (`CURVES`). The first sixth of the time does not count, because rows are created and caches
fill. Other programs slow training down, so a fixed work is timed next to each sample. Samples per this work show
whether the run slows down. The other two rates are not judged if the fixed work had to wait (`BUSY`). The exit status
is 1 if a judged curve is not flat.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import runner
from benchmarks.process_memory import family, kib_of
from hotbed.checkpoint import checkpoints_in, directory, verify_checkpoint
from hotbed.data import write_synthetic_log
from hotbed.files import write_json

TICKS = os.sysconf("SC_CLK_TCK")
BATCH = 512
WARM_UP = 1 / 6  # share of the time that does not count


class Curve(NamedTuple):
    """The title of a curve, and its allowed change per hour: a share of its median, or at least a number."""

    title: str
    share: float
    least: float = 0.0
    scale: float = 1.0


CURVES = {
    "rss": Curve("resident, MiB", 0.05, scale=2**-20),
    "anonymous": Curve("of it anonymous, MiB", 0.05, scale=2**-20),
    "open_files": Curve("open files", 0.0, 2),
    "threads": Curve("threads", 0.0, 2),
    "disk": Curve("disk without the log, MiB", 0.05, scale=2**-20),
    "samples_per_s": Curve("samples / s", 0.1),
    "samples_per_cpu_s": Curve("samples / s of processor time", 0.1),
    "samples_per_work": Curve("samples / work that takes 1 s alone", 0.1),
}
OF_THE_MACHINE = ("samples_per_s", "samples_per_cpu_s")
"""Rates that are not judged on a busy machine, because other programs use its caches and the other thread of a core."""
BUSY = 1.1
"""A machine is busy if the fixed work took this many times the processor time of the fastest samples."""
REFERENCE = np.random.default_rng(0).integers(0, 1 << 20, 1 << 18)
ROWS = np.zeros((1 << 20, 4), np.float32)


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--ranks", type=int, default=1, help="Processes that train, by torchrun if several.")
    parser.add_argument("--every_s", type=float, default=10, help="Seconds between samples.")
    parser.add_argument("--samples", type=int, default=300_000, help="Lines of the log.")
    parser.add_argument("--folder", type=Path, help="Folder of all files, which are kept (default: a temporary one).")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hotbed-soak-") as temporary:
        found = soak(given.folder or Path(temporary), given.minutes * 60, given.every_s, given.ranks, given.samples)
    flat = flatness(found["samples"])
    runner.show("per hour", list(flat.values()))
    print(f"checkpoints saved: {found['checkpoints']}, kept and whole: {found['whole']}; evaluations: {found['evals']}")
    if given.json is not None:
        write_json(given.json, {"flat": flat, **found})
    if any(each["flat"] is False for each in flat.values()):
        raise SystemExit(1)


def make_recipe(folder: Path, samples: int) -> Path:
    """Prepare a log, and write a recipe that trains without an end."""
    write_synthetic_log(folder / "log.tsv", samples, seed=1)
    runner.hotbed("prepare", folder / "log.tsv", folder / "data", "--threshold", "1", "--valid_fraction", "0.05")
    (folder / "log.tsv").unlink()
    (folder / "rows").mkdir()
    few = max(samples // 100, 16)
    tiers = {"tier": "disk", "device_bytes": few * 68, "host_bytes": few * 68, "cache_rows": few}
    checkpoints = {"checkpoint_every": max(samples // 1024, 5), "checkpoint_full_every": 4, "keep_last": 3}
    train = {"batch_size": BATCH, "device": "cpu", "precision": "fp32", "epochs": 1_000_000, "log_every": 20}
    values = {
        "name": "soak",
        "data": {"path": str(folder / "data"), "dim": 16, "valid_split": "valid"},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [64, 16], "top": [64, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.02}},
        "memory": {**tiers, "directory": str(folder / "rows")},
        "train": {**train, "checkpoint": "last", **checkpoints},
    }
    return runner.write_recipe(folder / "recipe.yaml", values)


def soak(folder: Path, seconds: float, every_s: float, ranks: int, samples: int) -> dict[str, Any]:
    """Train for this time, and return samples and what the run left."""
    recipe = make_recipe(folder, samples)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "hotbed", "train", str(recipe), "--out", str(folder / "runs")]
    path = os.pathsep.join([str(runner.ROOT), str(runner.ROOT / "src")])
    env = os.environ | {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with (folder / "errors.txt").open("wb") as errors:
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        taken = list(sampled(process, folder, seconds, every_s))
        ended_early = process.poll() is not None
        process.send_signal(signal.SIGTERM)
        process.wait(600)
    finally:
        process.kill()
        process.wait()
    if ended_early or "stopped by a signal" not in (folder / "errors.txt").read_text():
        raise SystemExit(f"the run failed: {(folder / 'errors.txt').read_text()[-3000:]}")
    (of,) = (folder / "runs" / "soak").iterdir()
    kept = checkpoints_in(directory(of / "checkpoints"))
    for checkpoint in kept:
        verify_checkpoint(checkpoint)
    events = [json.loads(line)["event"] for line in (of / "metrics.jsonl").read_text().splitlines()]
    found = {"checkpoints": events.count("checkpoint"), "whole": len(kept), "evals": events.count("eval")}
    return {**runner.about(minutes=seconds / 60, ranks=ranks), **found, "samples": taken}


def sampled(
    process: subprocess.Popen[bytes], folder: Path, seconds: float, every_s: float
) -> Iterator[dict[str, float]]:
    """Yield samples from the first logged step on, until the time is over or the process has ended."""
    start = before = usual_s = None
    while process.poll() is None and (start is None or time.monotonic() - start < seconds):
        done = samples_of(folder)
        if done and start is None:
            start = time.monotonic()
        if start is not None:
            now = {"at": time.monotonic() - start, "done": done, **used_by(process.pid)}
            now["disk"] += disk(folder / "runs") + disk(folder / "rows")
            clock, processor = time.perf_counter(), time.process_time()
            for _ in range(8):  # the fixed work: read rows of a table of 16 MiB, and add them
                ROWS[REFERENCE].sum(1)
            work_s, clock_s = time.process_time() - processor, time.perf_counter() - clock
            usual_s = work_s if usual_s is None else min(usual_s, work_s)
            if before is not None:
                more, cpu_s = now["done"] - before["done"], max(now["cpu_s"] - before["cpu_s"], 1 / TICKS)
                yield now | {
                    "reference_s": work_s,
                    "reference_clock_s": clock_s,
                    "samples_per_s": more / (now["at"] - before["at"]),
                    "samples_per_cpu_s": more / cpu_s,
                    "samples_per_work": more / (cpu_s * usual_s / work_s),
                }
            before = now
        time.sleep(every_s if start is not None else 0.1)


def samples_of(folder: Path) -> int:
    """Return the number of trained samples in the last line of the run's log."""
    for file in folder.glob("runs/soak/*/metrics.jsonl"):
        with file.open("rb") as stream:
            stream.seek(max(file.stat().st_size - 20_000, 0))
            for line in reversed(stream.read().splitlines()):
                if b'"event": "train"' in line and line.endswith(b"}"):
                    return int(json.loads(line)["step"]) * BATCH
    return 0


def used_by(pid: int) -> dict[str, float]:
    """Return the resources of a process and its descendants. `disk` are files without names, which have rows."""
    used = dict.fromkeys(("rss", "anonymous", "open_files", "threads", "cpu_s"), 0.0)
    unlinked: dict[tuple[int, int], int] = {}
    for each in family(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            proc = Path(f"/proc/{each}")
            rollup = kib_of(proc / "smaps_rollup")
            stat = (proc / "stat").read_text().rpartition(")")[2].split()
            used["rss"] += 1024 * rollup["Rss"]
            used["anonymous"] += 1024 * rollup["Anonymous"]
            used["threads"] += int(stat[17])
            used["cpu_s"] += (int(stat[11]) + int(stat[12])) / TICKS
            for file in (proc / "fd").iterdir():
                with suppress(FileNotFoundError):
                    used["open_files"] += 1
                    if str(file.readlink()).endswith(" (deleted)"):
                        of = file.stat()
                        unlinked[of.st_dev, of.st_ino] = 512 * of.st_blocks
    return {**used, "disk": sum(unlinked.values())}


def disk(folder: Path) -> int:
    """Return the bytes of the files of a folder without the log, which grows by a line every few steps."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.name != "metrics.jsonl":
                total += 512 * path.lstat().st_blocks
    return total


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs of points (Theil 1950, Sen 1968)."""
    t, v = np.asarray(times), np.asarray(values)
    first, second = np.triu_indices(len(t), 1)
    return float(np.median((v[second] - v[first]) / (t[second] - t[first])))


def flatness(samples: Sequence[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Return for each curve its median, its change per hour, the tolerance, and whether it is flat (None: unjudged)."""
    settled = [sample for sample in samples if sample["at"] >= samples[-1]["at"] * WARM_UP]
    clock, alone = ([sample[name] for sample in settled] for name in ("reference_clock_s", "reference_s"))
    busy = float(np.median(clock)) > BUSY * float(np.quantile(alone, 0.1))
    found: dict[str, dict[str, Any]] = {}
    for name, curve in CURVES.items():
        values = [sample[name] * curve.scale for sample in settled]
        middle = float(np.median(values))
        per_hour = 3600 * slope([sample["at"] for sample in settled], values)
        tolerance = max(curve.share * middle, curve.least)
        rises = -per_hour if name.startswith("samples") else per_hour  # more speed or fewer resources are no fault
        figures = {"median": round(middle, 3), "per_hour": round(per_hour, 3), "tolerance": round(tolerance, 3)}
        unjudged = busy and name in OF_THE_MACHINE
        found[name] = {"what": curve.title, **figures, "flat": None if unjudged else rises <= tolerance}
    return found


if __name__ == "__main__":
    main()
