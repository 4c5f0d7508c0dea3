"""``hotbed demo --promise``: one model under every kind of plan, and the hash of everything it learned.

The processes of each world are started by this one, on this machine. What they train is `hotbed.train.promise_worker`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from safetensors.torch import load_file

from hotbed.config import Recipe
from hotbed.data import write_synthetic_log
from hotbed.data.prepare import prepare
from hotbed.errors import CommError, RecipeError
from hotbed.train.demo import THRESHOLD, demo_recipe
from hotbed.train.report import RunDirectory, environment, recipe_yaml, size

PLANS = {
    "whole tables": "table",
    "cut into rows": "row",
    "cut into columns": "column",
    "grid of rows and columns": "grid",
    "copies on all ranks": "dp",
    "popular rows copied": {"hot_rows": 1000, "rows": 0},
    "cut into rows, vectors sent": {"rows": 0, "wire": "pooled"},
    "made when trained": {"rows": 0, "tier": "host"},
    "on disk": {"rows": 0, "tier": "disk"},
    "on disk, cached": {"rows": 0, "tier": "disk", "cache_rows": 200},
    "popular rows in memory, others on disk": {"hot_rows": 200, "rows": 0, "tier": "disk", "cache_rows": 50},
}
"""What the same model is trained under: schemes of `hotbed.make_plan`, or arguments of a `Cut` and the wire format."""

DIM = 48
"""Columns of the tables: three blocks of 16, so that they can be cut."""

_SHOWN = ("name", "samples_per_s", "sha256", "bytes", "disk_bytes")
KILLED, RESUMED = "on disk, cached", "cut into columns"
"""The plan of a run that is killed, and the plan that it goes on under."""


def run_promise(
    data: Path | None, root: Path, console: Console, *, ranks: int, steps: int, seed: int
) -> dict[str, Any]:
    """Train one model under every plan of `PLANS`, kill and resume it, and train it in one process.

    Parameters
    ----------
    data
        A raw Criteo log; None makes one.
    root
        Everything goes into a new directory below this one.
    console
        Where progress goes.
    ranks
        Processes; 2 prove little, for two numbers have one sum.
    steps
        Steps of 256 samples.
    seed
        Seed of the log and of the training.

    Returns
    -------
    dict
        ``plans``: name, samples/s, SHA-256, bytes by rank; ``resumed``; ``one_process``: largest differences of losses
        and of the model; ``equal``: whether all hashes are.
    """
    if ranks < 1 or steps < 4:
        raise RecipeError(f"--ranks is {ranks} and --steps is {steps}, must be at least 1 and 4")
    run = RunDirectory(root, "promise")
    log = data or run.path / "log.tsv"
    if data is None:
        write_synthetic_log(log, 256 * steps + 4096, seed=seed, test_fraction=0.01)
    made = prepare(log, run.path / "data", threshold=THRESHOLD, test_fraction=0.01)
    recipe = run.path / "recipe.yaml"
    demo = demo_recipe(run.path / "data", made.samples["train"], seed).to_dict()
    demo["data"]["dim"] = demo["model"]["init_args"]["bottom"][-1] = DIM
    # Adam divides by small numbers, so it would make much of a difference in the last bit between worlds.
    demo["dense_optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.02}}
    demo["sparse_optimizer"]["init_args"]["lr"] = 0.02
    recipe.write_text(recipe_yaml(Recipe.from_dict(demo)), encoding="utf-8")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def trained(name: str, size: int, plans: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
            progress.update(task, description=f"{name}: {', '.join(plans)}")
            return _run(run.path / name, size, {"recipe": str(recipe), "plans": plans, "steps": steps, **options})

        found = trained("plans", ranks, PLANS)
        at = steps // 2
        killed = {"checkpoint": str(run.path / "checkpoint"), "at": at}
        trained("killed", ranks, {KILLED: PLANS[KILLED]}, save=killed)
        (resumed,) = trained("resumed", ranks, {RESUMED: PLANS[RESUMED]}, resume=killed)
        (alone,) = trained("alone", 1, {"one process": "table"})
    hashes = {plan["sha256"] for plan in found} | {resumed["sha256"]}
    return {
        "ranks": ranks,
        "steps": steps,
        "plans": [{key: plan[key] for key in _SHOWN} for plan in found],
        "resumed": {"killed": KILLED, "at_step": at, "resumed": RESUMED, "sha256": resumed["sha256"]},
        "one_process": _differences(found[0], alone),
        "equal": len(hashes) == 1,
        **environment(torch.device("cpu")),
        "run": str(run.path),
    }


def print_promise(console: Console, result: Mapping[str, Any]) -> None:
    """Print where the bytes were, how fast it was, and what came out."""
    table = RichTable(title=f"one model, {result['ranks']} processes, {result['steps']} steps", title_justify="left")
    table.add_column("plan")
    table.add_column("tables of a process", justify="right")
    table.add_column("samples/s", justify="right")
    table.add_column("SHA-256 of losses and model")
    for plan in result["plans"]:
        where = " … ".join(dict.fromkeys(size(b) for b in (min(plan["bytes"]), max(plan["bytes"]))))
        if any(plan["disk_bytes"]):
            where += f", {size(max(plan['disk_bytes']))} on disk"
        table.add_row(plan["name"], where, f"{plan['samples_per_s']:,.0f}", plan["sha256"][:16])
    resumed = result["resumed"]
    name = f"{resumed['killed']}, kill -9 at step {resumed['at_step']}, then {resumed['resumed']}"
    table.add_row(name, "", "", resumed["sha256"][:16])
    console.print(table)
    console.print("all equal" if result["equal"] else "NOT equal", style=None if result["equal"] else "red")
    alone = result["one_process"]
    console.print(
        f"one process instead of {result['ranks']}: losses differ by at most {alone['losses']:.1e}, the model by "
        f"{alone['model']:.1e} (another order of sums)"
    )
    console.print(f"run: {result['run']}", soft_wrap=True)


def _differences(several: Mapping[str, Any], alone: Mapping[str, Any]) -> dict[str, float]:
    """Largest differences of losses and of the model's values between two runs."""
    a, b = load_file(several["state"]), load_file(alone["state"])
    losses = max(abs(x - y) for x, y in zip(several["losses"], alone["losses"], strict=True))
    return {"losses": losses, "model": max(float((a[name].float() - b[name].float()).abs().max()) for name in a)}


def _run(folder: Path, ranks: int, job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Start the processes of a world, wait for them, and return what the first one found.

    Raises
    ------
    CommError
        If one of them fails, with what it wrote.
    """
    folder.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(ranks):
        place = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": str(port)}
        argv = [sys.executable, "-m", "hotbed.train.promise_worker", json.dumps({**job, "folder": str(folder)})]
        with (folder / f"rank{rank}.log").open("wb") as log:
            processes.append(subprocess.Popen(argv, env=os.environ | place, stdout=log, stderr=subprocess.STDOUT))
    try:
        failed = _first_failure(processes, -signal.SIGKILL if "save" in job else 0)
    finally:
        for process in processes:
            process.kill()
    if failed is not None:
        text = (folder / f"rank{failed}.log").read_text(encoding="utf-8", errors="replace")
        raise CommError(f"process {failed} of {ranks} ended with {processes[failed].returncode}: {text[-2000:]}")
    return [] if "save" in job else json.loads((folder / "found.json").read_text(encoding="utf-8"))


def _first_failure(processes: Sequence[subprocess.Popen[bytes]], expected: int) -> int | None:
    """The first process that ends otherwise than expected; None once all have ended so."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code not in (None, expected):
                return rank
        if None not in codes:
            return None
        time.sleep(0.05)
