"""Measure the memory of commands that save or load a model on disk, in a control group with a limit.

    python -m benchmarks.checkpoint_memory --gigabytes 4 10 --limit_mib 1024 --json out.json

A model of one table with rows on disk is trained without a checkpoint, then with full and differential checkpoints in
the background. Then it is resumed, converted, exported and asked for predictions, each by a command of its own. A row
takes 6 KiB (512 columns with the moments of Adam), because the index in memory takes about 100 bytes per row of any
size. The largest anonymous memory of each command is printed. Needs root and Linux.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.process_memory import family, kib_of, memory_group
from hotbed.files import write_json

DIM, BATCH, IDS = 512, 256, 8
RECORD_BYTES = 3 * DIM * 4  # a row and two moments of Adam
SAVES = "train, full and differential checkpoints"
"""The command that saves the checkpoints that later commands read."""


def recipe(folder: Path, gigabytes: float, cache_rows: int) -> tuple[Path, int]:
    """Write a recipe that trains this many bytes of rows, and return it with its steps."""
    trained = int(gigabytes * 1e9 / RECORD_BYTES)
    rows = trained * 5 // 4  # uniform draws of 1.6 times as many ids leave a fifth of the rows out
    write_json(folder / "tables.yaml", {"rows": [rows], "dense": 13, "ids": IDS})
    steps = int(1.61 * rows / (BATCH * IDS))
    sizes = {"train_samples": (steps + 1) * BATCH, "test_samples": 8192, "exponent": 0.0}
    values = {
        "name": "large",
        "data": {
            "source": {"class_path": "hotbed.data.ZipfSource", "init_args": sizes},
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
    return runner.write_recipe(folder / "recipe.yaml", values), steps


def anonymous_mib(pid: int) -> float:
    found = 0
    for each in family(pid):
        with suppress(OSError):  # it ended meanwhile
            of = kib_of(Path(f"/proc/{each}/status"))
            found += of.get("RssAnon", 0) + of.get("RssShmem", 0)
    return found / 1024


def run(name: str, argv: list[str], limit_mib: int) -> dict[str, Any]:
    """Run a command in a control group, and return its status, its peak and its time."""
    with memory_group(limit_mib << 20) as group:
        if group is None:
            sys.exit("no control group of memory can be made. Run as root.")

        def enter() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        start, peak = time.perf_counter(), 0.0
        with tempfile.TemporaryFile("w+") as output:
            command = [sys.executable, "-m", "hotbed", *argv]
            process = subprocess.Popen(command, stdout=output, stderr=output, preexec_fn=enter)
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


def measure(gigabytes: float, args: Any, folder: Path) -> dict[str, Any]:
    """Run the commands with a word of `--only` in their names."""
    path, steps = recipe(folder, gigabytes, args.cache_rows)
    found: dict[str, Any] = {}

    def step(name: str, *argv: object) -> None:
        if any(word in name for word in args.only):
            found[name] = run(name, [str(arg) for arg in argv], args.limit_mib)

    step("train, no checkpoint", "train", path, "--train.checkpoint", "none", "--out", folder / "plain")
    shutil.rmtree(folder / "plain", ignore_errors=True)
    often = ["--train.checkpoint_every", steps // 3, "--train.checkpoint_full_every", 2]
    step(SAVES, "train", path, *often, "--out", folder / "run")
    checkpoints = list(folder.rglob("manifest.json"))
    found["checkpoint_bytes"] = sum(f.stat().st_size for c in checkpoints for f in c.parent.glob("*.safetensors"))
    print(f"checkpoints: {len(checkpoints)} with {found['checkpoint_bytes'] / 1e9:.2f} GB")
    trained = next(iter({c.parent.parent for c in checkpoints}))
    step("resume, train on and save", "train", path, "--resume", trained, "--train.steps", steps + 5)
    step("checkpoint convert", "checkpoint", "convert", trained, folder / "converted", "--compact")
    shutil.rmtree(folder / "converted", ignore_errors=True)
    step("export", "export", trained, folder / "exported")
    shutil.rmtree(folder / "exported", ignore_errors=True)
    step("predict", "predict", trained, folder / "tables.yaml", "--out", folder / "s.csv", "--split", "test")
    return found


def main() -> None:
    parser = runner.arguments(__doc__)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[4.0, 10.0])
    parser.add_argument("--limit_mib", type=int, default=1024)
    parser.add_argument("--cache_rows", type=int, default=10_000)
    parser.add_argument("--only", nargs="+", default=[""], help="Words of the commands to run, e.g. `checkpoints`.")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    args = parser.parse_args()
    if not any(word in SAVES for word in args.only):
        parser.error(f"--only leaves out the command that saves checkpoints: got {args.only}. Add a word of {SAVES!r}.")
    results = runner.read_json(args.json) | {"limit_mib": args.limit_mib}
    for gigabytes in args.gigabytes:
        with tempfile.TemporaryDirectory(prefix="hotbed-memory-", dir=args.folder) as folder:
            print(f"-- {gigabytes:g} GB of trained rows, {args.limit_mib:,} MiB")
            results[f"{gigabytes:g} GB"] = measure(gigabytes, args, Path(folder))
    if args.json is not None:
        write_json(args.json, results)


if __name__ == "__main__":
    main()
