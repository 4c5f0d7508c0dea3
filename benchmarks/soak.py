"""Train for an hour with everything on, and see whether what the processes use stays flat.

    python -m benchmarks.soak [--minutes 60] [--ranks 1] [--every_s 10] [--json FILE] [--svg FILE]

Rows are in memory, in the host's memory and on disk, with a cache; batches are prefetched; checkpoints, full and
differential, are saved in the background every few hundred steps and the newest three kept; every epoch is evaluated.
Then SIGTERM ends the run, which must leave checkpoints of which every byte is right.

*Flat* is a Theil-Sen slope (the median of the slopes between all pairs of samples; a saw-tooth does not move it), times
an hour, within a tolerance (`CURVES`). The first sixth of the time, in which rows are materialized and caches fill,
does not count. Samples per second fall beside other programs, and a little even those per second of processor time; so
beside each sample a fixed work is timed, and samples for such work say whether the run slows down; the other two rates
are not judged where that work itself had to wait, or took longer than in the fastest samples (`BUSY`). Exits with 1 if
a curve that was judged is not flat.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from benchmarks.command import run

ROOT = Path(__file__).resolve().parents[1]
TICKS = os.sysconf("SC_CLK_TCK")
PATIENCE_S = 600
WARM_UP = 1 / 6
"""Share of the time that does not count."""
Record = dict[str, float]


class Curve(NamedTuple):
    """What is sampled, and how much it may change within an hour: a share of its median, or so many at least."""

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
"""The last is in units of the work of `reference_s`."""
OF_THE_MACHINE = ("samples_per_s", "samples_per_cpu_s")
"""Rates that are not judged on a busy machine: other programs take caches and the other thread of a core, so the same
work takes more time, by the clock and of the processor."""
BUSY = 1.1
"""A machine is busy if the fixed work took, by the clock, so many times the processor time of the fastest samples."""
REFERENCE = np.random.default_rng(0).integers(0, 1 << 20, 1 << 18)
ROWS = np.zeros((1 << 20, 4), np.float32)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, sample, say what is flat, and write the samples and their curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--ranks", type=int, default=1, help="processes that train, under torchrun if several")
    parser.add_argument("--every_s", type=float, default=10, help="seconds between samples")
    parser.add_argument("--samples", type=int, default=300_000, help="lines of the log")
    parser.add_argument("--folder", type=Path, help="where all files go, which stay; by default a temporary one")
    parser.add_argument("--json", type=Path, help="write the samples here")
    parser.add_argument("--svg", type=Path, help="draw the curves here (needs matplotlib)")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="hotbed-soak-") as temporary:
        found = soak(given.folder or Path(temporary), given.minutes * 60, given.every_s, given.ranks, given.samples)
    flat = flatness(found["samples"])
    found = {"flat": flat, **found}
    print(report(flat))
    print(f"checkpoints saved: {found['checkpoints']}, kept and whole: {found['whole']}; evaluations: {found['evals']}")
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.svg is not None:
        draw(found, given.svg)
    if any(each["flat"] is False for each in flat.values()):
        raise SystemExit(1)


def make_recipe(folder: Path, samples: int) -> Path:
    """A log, its dataset, and a recipe that never ends by itself."""
    from hotbed.data import write_synthetic_log

    write_synthetic_log(folder / "log.tsv", samples, seed=1)
    run("prepare", folder / "log.tsv", folder / "data", "--threshold", "1", "--valid_fraction", "0.05")
    (folder / "log.tsv").unlink()
    few = max(samples // 100, 16)
    recipe = {
        "name": "soak",
        "data": {"path": str(folder / "data"), "dim": 16, "valid_split": "valid"},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [64, 16], "top": [64, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.02}},
        "memory": {
            "tier": "disk",
            "device_bytes": few * 68,
            "host_bytes": few * 68,
            "cache_rows": few,
            "directory": str(folder / "rows"),
        },
        "train": {
            "batch_size": 512,
            "device": "cpu",
            "precision": "fp32",
            "epochs": 1_000_000,
            "log_every": 20,
            "checkpoint": "last",
            "checkpoint_every": max(samples // 1024, 5),
            "checkpoint_full_every": 4,
            "keep_last": 3,
        },
    }
    (folder / "rows").mkdir()
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def soak(folder: Path, seconds: float, every_s: float, ranks: int, samples: int) -> dict[str, Any]:
    """Train for so long; what was sampled meanwhile, and what the run left."""
    import torch

    from hotbed.checkpoint import checkpoints_in, directory, verify_checkpoint
    from hotbed.train.runs.report import environment

    recipe = make_recipe(folder, samples)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "hotbed", "train", str(recipe), "--out", str(folder / "runs")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "GLOO_SOCKET_IFNAME": "lo"}
    env |= {"OMP_NUM_THREADS": "1"}
    with (folder / "errors.txt").open("wb") as errors:
        process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=errors)
    try:
        taken = list(sampled(process, folder, seconds, every_s))
        ended_early = process.poll() is not None
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)
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
    return {
        "date": datetime.now(UTC).date().isoformat(),
        **environment(torch.device("cpu")),
        "minutes": seconds / 60,
        "ranks": ranks,
        "checkpoints": events.count("checkpoint"),
        "whole": len(kept),
        "evals": events.count("eval"),
        "samples": taken,
    }


# -- samples -----------------------------------------------------------------------------------------------------------


def sampled(process: subprocess.Popen[bytes], folder: Path, seconds: float, every_s: float) -> Iterator[Record]:
    """A record every so often, from the first logged step on until the time is over or the process has ended."""
    start = before = usual_s = None
    while process.poll() is None and (start is None or time.monotonic() - start < seconds):
        done = samples_of(folder)
        if done and start is None:
            start = time.monotonic()
        if start is not None:
            now = {"at": time.monotonic() - start, "done": done, **used_by(process.pid)}
            now["disk"] += disk(folder / "runs") + disk(folder / "rows")
            clock = time.perf_counter()
            work_s = reference_s()
            clock_s = time.perf_counter() - clock
            usual_s = work_s if usual_s is None else min(usual_s, work_s)
            if before is not None:
                more, cpu_s = now["done"] - before["done"], max(now["cpu_s"] - before["cpu_s"], 1 / TICKS)
                rates = {
                    "reference_s": work_s,
                    "reference_clock_s": clock_s,
                    "samples_per_s": more / (now["at"] - before["at"]),
                    "samples_per_cpu_s": more / cpu_s,
                    "samples_per_work": more / (cpu_s * usual_s / work_s),
                }
                yield now | rates
            before = now
        time.sleep(every_s if start is not None else 0.1)


def reference_s() -> float:
    """Seconds of processor time of a fixed work: rows are picked of a table of 16 MiB and added."""
    start = time.process_time()
    for _ in range(8):
        ROWS[REFERENCE].sum(1)
    return time.process_time() - start


def samples_of(folder: Path) -> int:
    """Samples trained on, as the run's last line on training says."""
    for file in folder.glob("runs/soak/*/metrics.jsonl"):
        with file.open("rb") as stream:
            stream.seek(max(file.stat().st_size - 20_000, 0))
            for line in reversed(stream.read().splitlines()):
                if b'"event": "train"' in line and line.endswith(b"}"):
                    return int(json.loads(line)["step"]) * 512
    return 0


def used_by(pid: int) -> Record:
    """What a process and its descendants use; on disk, files without names, in which rows are."""
    used = dict.fromkeys(("rss", "anonymous", "open_files", "threads", "cpu_s"), 0.0)
    unlinked: dict[tuple[int, int], int] = {}
    for each in family(pid):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            place = Path(f"/proc/{each}")
            lines = (place / "smaps_rollup").read_text().splitlines()
            rollup = {line.partition(":")[0]: 1024 * int(line.split()[1]) for line in lines if line.endswith(" kB")}
            stat = (place / "stat").read_text().rpartition(")")[2].split()
            used["rss"] += rollup["Rss"]
            used["anonymous"] += rollup["Anonymous"]
            used["threads"] += int(stat[17])
            used["cpu_s"] += (int(stat[11]) + int(stat[12])) / TICKS
            for file in (place / "fd").iterdir():
                with suppress(FileNotFoundError):
                    used["open_files"] += 1
                    if str(file.readlink()).endswith(" (deleted)"):
                        of = file.stat()
                        unlinked[of.st_dev, of.st_ino] = 512 * of.st_blocks
    return {**used, "disk": sum(unlinked.values())}


def family(pid: int) -> list[int]:
    """A process and those that it started, and they."""
    with suppress(FileNotFoundError, ProcessLookupError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *(of for child in children for of in family(int(child)))]
    return []


def disk(folder: Path) -> int:
    """Bytes that the files of a folder take, without the log, which gets a line every few steps."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            if path.name != "metrics.jsonl":
                total += 512 * path.lstat().st_blocks
    return total


# -- what is flat ------------------------------------------------------------------------------------------------------


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between all pairs of points (Theil 1950, Sen 1968)."""
    t, v = np.asarray(times), np.asarray(values)
    first, second = np.triu_indices(len(t), 1)
    return float(np.median((v[second] - v[first]) / (t[second] - t[first])))


def is_busy(samples: Sequence[Mapping[str, float]]) -> bool:
    """Whether other programs took so much that rates say little of the run; the fixed work was timed beside each."""
    clock, alone = ([sample[name] for sample in samples] for name in ("reference_clock_s", "reference_s"))
    return float(np.median(clock)) > BUSY * float(np.quantile(alone, 0.1))


def flatness(
    samples: Sequence[Mapping[str, float]], curves: Mapping[str, Curve] | None = None
) -> dict[str, dict[str, Any]]:
    """By curve: its median, its change per hour, what that may be, and whether it is; None: not judged."""
    settled = [sample for sample in samples if sample["at"] >= samples[-1]["at"] * WARM_UP]
    found: dict[str, dict[str, Any]] = {}
    chosen = CURVES if curves is None else curves
    busy = any(name in OF_THE_MACHINE for name in chosen) and is_busy(settled)
    for name, curve in chosen.items():
        values = [sample[name] * curve.scale for sample in settled]
        middle = float(np.median(values))
        per_hour = 3600 * slope([sample["at"] for sample in settled], values)
        tolerance = max(curve.share * middle, curve.least)
        rises = -per_hour if name.startswith("samples") else per_hour  # to be faster, or to use less, is no fault
        found[name] = {
            "what": curve.title,
            "median": round(middle, 3),
            "per_hour": round(per_hour, 3),
            "tolerance": round(tolerance, 3),
            "flat": None if busy and name in OF_THE_MACHINE else rises <= tolerance,
        }
    return found


VERDICTS = {True: "flat", False: "NOT FLAT", None: "not judged: the machine was busy"}


def report(flat: Mapping[str, Mapping[str, Any]]) -> str:
    """A line for each curve."""
    lines = [f"{'':32}{'median':>12}{'per hour':>12}{'tolerance':>12}"]
    for each in flat.values():
        numbers = "".join(f"{each[key]:>12,.1f}" for key in ("median", "per_hour", "tolerance"))
        lines.append(f"{each['what']:32}{numbers}  {VERDICTS[each['flat']]}")
    return "\n".join(lines)


def draw(found: Mapping[str, Any], file: Path) -> None:
    """A panel for each curve, over minutes."""
    from matplotlib import rcParams
    from matplotlib.figure import Figure

    rcParams["svg.hashsalt"] = "hotbed"  # the same samples give the same bytes
    figure = Figure(figsize=(9, 10), layout="constrained")
    panels = figure.subplots(-(-len(CURVES) // 2), 2, sharex=True).flat
    minutes = [sample["at"] / 60 for sample in found["samples"]]
    for panel, (name, curve) in zip(panels, CURVES.items(), strict=False):
        values = [sample[name] * curve.scale for sample in found["samples"]]
        of = found["flat"][name]
        panel.plot(minutes, values, linewidth=0.8)
        panel.axvspan(0, minutes[-1] * WARM_UP, color="0.93")
        panel.set_ylim(0, 1.2 * max(values) or 1)
        panel.set_title(f"{curve.title}: {of['per_hour']:+.1f} per hour (at most {of['tolerance']:.1f})", fontsize=9)
    figure.supxlabel("minutes")
    figure.savefig(file, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
