"""Measure how soon all processes end when one dies or hangs, and how soon torchrun has the run going again.

    python -m benchmarks.elastic [--json FILE] [--timeout_s 10] [--only KIND …]

Rank 1 is killed (SIGKILL), or stopped as if it hung (SIGSTOP), at the start of the eighth exchange of a kind, or while
it writes its files of a checkpoint. *Ended* is the time from then until the last of the others has ended; one of them
must have named rank 1. The *restart* is torchrun's, with one agent: from the death of a rank to the first step of the
next attempt, the start of Python and its imports with it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table as RichTable

from benchmarks.command import run
from hotbed.train.report import environment

ROOT = Path(__file__).resolve().parents[1]
KINDS = {
    "ids": "ids",
    "rows": "rows",
    "gradients of rows": "gradients",
    "dense gradients": "gradients of dense parameters",
    "losses": "losses and sizes",
    "replicas": "numbers of touched rows",
    "checkpoint": "",
}
"""Exchanges by the names that they have in errors; a checkpoint is none."""
PATIENCE_S = 300
DEATH = 8
"""Which exchange of a kind is the one that the rank dies in."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--timeout_s", type=int, default=10, help="parallel.timeout_s, which ends the wait for a hung rank"
    )
    parser.add_argument("--only", nargs="+", choices=[*KINDS, "restart"], default=[*KINDS, "restart"])
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="hotbed-elastic-") as folder:
        recipe = prepared(Path(folder))
        kinds = [kind for kind in KINDS if kind in given.only]
        ended = [
            ended_after(Path(folder), recipe, kind, how, given.timeout_s) for kind in kinds for how in ("KILL", "STOP")
        ]
        restart = restarted_after(Path(folder), recipe) if "restart" in given.only else None
    found = {"timeout_s": given.timeout_s, "ended": ended, "restart": restart}
    show(Console(), found)
    if given.json is not None:
        about = {"date": datetime.now(UTC).date().isoformat(), **environment(torch.device("cpu"))}
        given.json.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")


def prepared(folder: Path) -> Path:
    """A small dataset, and a recipe whose training does not end by itself."""
    from hotbed.data import write_synthetic_log

    write_synthetic_log(folder / "log.tsv", 20_000, seed=1)
    run("prepare", folder / "log.tsv", folder / "data")
    recipe = {
        "name": "elastic",
        "data": {"path": str(folder / "data"), "dim": 16},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [64, 16], "top": [64, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.1}},
        "train": {"batch_size": 512, "device": "cpu", "epochs": 1_000_000, "checkpoint_every": 10, "log_every": 1},
    }
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def environment_of(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "COLUMNS": "300",
        **more,
    }


# -- one rank dies or hangs --------------------------------------------------------------------------------------------


def ended_after(folder: Path, recipe: Path, kind: str, how: str, timeout_s: int) -> dict[str, Any]:
    """Seconds from a rank's death until the others have ended, and what they said."""
    size = 4 if kind == "replicas" else 3
    place = folder / f"{kind}-{how}".replace(" ", "-")
    place.mkdir()
    options = [
        "--out",
        str(place / "runs"),
        "--plan",
        "row",
        "--parallel.timeout_s",
        str(timeout_s),
        "--resume",
        "none",
    ]
    options += ["--parallel.replicas", "2", "--parallel.sync_every", "1"] if kind == "replicas" else []
    port = str(20_000 + os.getpid() % 10_000)
    ranks: list[subprocess.Popen[bytes]] = []
    for rank in range(size):
        env = environment_of(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "HOTBED_DIES": f"{kind}:{how}:{place / 'death'}"}
        command = [sys.executable, "-c", "from benchmarks.elastic import rank; rank()", "train", str(recipe), *options]
        with (place / f"{rank}.err").open("wb") as file:
            ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=file))
    others = [process for rank, process in enumerate(ranks) if rank != 1]
    try:
        for process in others:
            process.wait(PATIENCE_S)
        seconds = time.time() - float((place / "death").read_text())
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    said = {rank: (place / f"{rank}.err").read_text().strip().splitlines()[-1] for rank in range(size) if rank != 1}
    if not any(re.search(r"ranks? (?:\d, )*1\b", text.partition(": ")[2].partition(": ")[2]) for text in said.values()):
        raise SystemExit(f"{kind}, {how}: nobody says that rank 1 is gone: {said}")
    return {"kind": kind, "how": how, "seconds": seconds, "said": said}


def rank() -> None:
    """A rank of ``hotbed train`` that dies as ``HOTBED_DIES`` says if it is the second."""
    from hotbed.checkpoint.storage import _LocalWriter
    from hotbed.comm import Link
    from hotbed.commands.main import main as command

    kind, how, file = os.environ["HOTBED_DIES"].split(":", 2)
    left = [DEATH]

    def die() -> None:
        left[0] -= 1
        if left[0] == 0:
            Path(file).write_text(str(time.time()), encoding="utf-8")
            os.kill(os.getpid(), signal.SIGKILL if how == "KILL" else signal.SIGSTOP)

    start, write = Link._start, _LocalWriter.write

    def exchange(link: Link, what: str, *args: Any) -> Any:
        if what == KINDS[kind]:
            die()
        return start(link, what, *args)

    def save(writer: _LocalWriter, data: memoryview) -> None:
        die()
        write(writer, data)

    if os.environ["RANK"] == "1":
        if kind == "checkpoint":
            _LocalWriter.write = save  # pyright: ignore[reportAttributeAccessIssue]
        else:
            Link._start = exchange  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(command(sys.argv[1:]))


# -- torchrun starts again ---------------------------------------------------------------------------------------------


def restarted_after(folder: Path, recipe: Path) -> dict[str, float]:
    """Seconds from a rank's death to the first step of the next attempt."""
    out = folder / "restart"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        "--max-restarts",
        "1",
    ]
    command += ["-m", "hotbed", "train", str(recipe), "--out", str(out), "--plan", "row"]
    agent = subprocess.Popen(command, env=environment_of(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: any(event["event"] == "checkpoint" for event in events_of(out)))
        worker = int(Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()[-1])
        os.kill(worker, signal.SIGKILL)
        start = time.monotonic()
        wait_until(lambda: any(event["event"] == "resume" for event in events_of(out)))
        resumed_s = time.monotonic() - start
        wait_until(lambda: "resume" in (kinds := [event["event"] for event in events_of(out)]) and kinds[-1] == "train")
        return {"resumed_s": resumed_s, "first_step_s": time.monotonic() - start}
    finally:
        agent.terminate()
        agent.wait()


def events_of(out: Path) -> list[dict[str, Any]]:
    lines = [line for file in out.glob("elastic/*/metrics.jsonl") for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def wait_until(condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit("the run does not come as far as it should")
        time.sleep(0.02)


def show(console: Console, found: dict[str, Any]) -> None:
    table = RichTable(title=f"seconds until all others have ended (parallel.timeout_s {found['timeout_s']})")
    for column in ("rank 1 is in", "killed", "hangs"):
        table.add_column(column, justify="left" if column.startswith("rank") else "right")
    by = {(entry["kind"], entry["how"]): f"{entry['seconds']:.1f}" for entry in found["ended"]}
    for kind in dict.fromkeys(entry["kind"] for entry in found["ended"]):
        table.add_row(kind, by[kind, "KILL"], by[kind, "STOP"])
    console.print(table)
    if found["restart"] is not None:
        restart = found["restart"]
        console.print(
            f"torchrun: resumed after {restart['resumed_s']:.1f} s, first step after {restart['first_step_s']:.1f} s"
        )


if __name__ == "__main__":
    main()
