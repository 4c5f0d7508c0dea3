"""Measure how soon all processes end when one dies or hangs, and how soon torchrun has the run going again.

    python -m benchmarks.elastic [--json FILE] [--timeout_s 10] [--only EXCHANGE …]

Rank 1 of two is killed (SIGKILL), or stopped as if it hung (SIGSTOP), at the start of the third exchange of a kind, or
while it writes its files of a checkpoint. *Ended* is the time from then until the other has ended, which must name
rank 1. The *restart* is torchrun's, with one agent: from the death of a rank to the first step of the next attempt, the
start of Python and its imports with it. What is waited for at most is ``HOTBED_PATIENCE_S`` seconds (300).
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
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import torch
import yaml
from rich.console import Console
from rich.table import Table as RichTable

from hotbed.train.report import environment
from tests.crashes.campaign import Commands
from tests.crashes.exchanges import KINDS, How, end_of
from tests.crashes.workloads import TRAIN, make_data

ROOT = Path(__file__).resolve().parents[1]
PATIENCE_S = float(os.environ.get("HOTBED_PATIENCE_S", "300"))


def main() -> None:
    """Measure everything, print and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--timeout_s", type=int, default=10, help="parallel.timeout_s, which ends the wait for a hung rank"
    )
    parser.add_argument("--only", nargs="+", choices=[*KINDS, "restart"], default=[*KINDS, "restart"])
    given = parser.parse_args()
    ended: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hotbed-elastic-") as name:
        folder = Path(name)
        data = make_data(folder / "data")
        with Commands(data) as commands:
            for kind in [kind for kind in KINDS if kind in given.only]:
                for how in get_args(How)[:2]:
                    ended.append(ended_after(commands, folder / f"{len(ended)}", kind, how, given.timeout_s))
        restart = restarted_after(folder, data) if "restart" in given.only else None
    found = {"timeout_s": given.timeout_s, "ended": ended, "restart": restart}
    show(Console(), found)
    if given.json is not None:
        about = {"date": datetime.now(UTC).date().isoformat(), **environment(torch.device("cpu"))}
        given.json.write_text(json.dumps({**about, **found}, indent=1) + "\n", encoding="utf-8")


def ended_after(commands: Commands, folder: Path, kind: str, how: How, timeout_s: int) -> dict[str, Any]:
    """Seconds from a rank's death until the other has ended, and what it said."""
    timeout = timeout_s if how == "stop" else 600  # who notices a death does not wait for it
    args = (*TRAIN, "--parallel.timeout_s", str(timeout))
    ended = end_of(commands, folder, args, kind, how)
    if ended.seconds is None or ended.codes[0] != 2 or not ended.blames(1):
        raise SystemExit(f"{kind}, {how}: nobody says that rank 1 is gone: {ended}")
    return {"kind": kind, "how": how, "seconds": round(ended.seconds, 2), "said": ended.said[0]}


# -- torchrun starts again ---------------------------------------------------------------------------------------------


def restarted_after(folder: Path, data: Path) -> dict[str, float]:
    """Seconds from a rank's death to the first step of the next attempt."""
    recipe = yaml.safe_load((data / "recipe.yaml").read_text())
    recipe["train"] |= {"epochs": 1_000_000, "checkpoint_every": 10}
    file, out = folder / "endless.yaml", folder / "restart"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["--max-restarts", "1", "-m", "hotbed", "train", str(file), "--out", str(out), "--plan", "row"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    agent = subprocess.Popen(
        command, env=env | {"GLOO_SOCKET_IFNAME": "lo"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until(lambda: "checkpoint" in events_of(out))
        worker = int(Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()[-1])
        start = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        wait_until(lambda: "resume" in events_of(out))
        resumed_s = time.monotonic() - start
        wait_until(lambda: (events := events_of(out))[-1] != "resume" and "train" in events[events.index("resume") :])
        return {"resumed_s": round(resumed_s, 2), "first_step_s": round(time.monotonic() - start, 2)}
    finally:
        agent.terminate()
        agent.wait()


def events_of(out: Path) -> list[str]:
    """What the run's lines are about, in their order."""
    lines = [line for file in out.glob("*/*/metrics.jsonl") for line in file.read_text().splitlines()]
    return [json.loads(line)["event"] for line in lines if line.endswith("}")]


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait, but not for ever."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"the run does not come as far as it should in {PATIENCE_S:,.0f} s; set HOTBED_PATIENCE_S")
        time.sleep(0.02)


def show(console: Console, found: dict[str, Any]) -> None:
    """A row for each exchange."""
    table = RichTable(title=f"seconds until the other has ended (hangs: parallel.timeout_s {found['timeout_s']})")
    for column in ("rank 1 is in", "killed", "hangs"):
        table.add_column(column, justify="left" if column.startswith("rank") else "right")
    by = {(entry["kind"], entry["how"]): f"{entry['seconds']:.1f}" for entry in found["ended"]}
    for kind in dict.fromkeys(entry["kind"] for entry in found["ended"]):
        table.add_row(kind, by[kind, "kill"], by[kind, "stop"])
    console.print(table)
    if (restart := found["restart"]) is not None:
        console.print(
            f"torchrun: resumed after {restart['resumed_s']:.1f} s, first step after {restart['first_step_s']:.1f} s"
        )


if __name__ == "__main__":
    main()
