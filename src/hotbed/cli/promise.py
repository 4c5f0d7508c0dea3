"""Train one model under every kind of plan, and compare hashes of all results: ``hotbed demo --promise``.

The command starts several processes on this machine for each group of plans. Each process runs this file as a script,
with a job in JSON as its argument.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from torch import Tensor

from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.cli.pages.report_page import ReportTable, print_table
from hotbed.config import ParallelRecipe, Recipe
from hotbed.data import Loader
from hotbed.embed import collections_of
from hotbed.files import read_yaml
from hotbed.plan import Cut, make_plan
from hotbed.train.ranks.process_group import end_groups, process_group, run_local
from hotbed.train.runs.build import build, open_source, tables_of
from hotbed.train.runs.callbacks import Callback
from hotbed.train.runs.report import RunDirectory, environment, recipe_yaml, size
from hotbed.train.trainer import Trainer

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
"""Plans that all train the same model: schemes of `hotbed.make_plan`, or arguments of a `Cut` and the wire format."""
DIM = 48  # columns of the tables: three blocks of 16, between which tables can be cut
KILLED, RESUMED = "on disk, cached", "cut into columns"
"""Plan of the killed run, and the plan under which it is resumed."""
VIRTUAL_RANKS = 8
"""Virtual ranks of the runs with other numbers of processes."""
_REPORTED = ("name", "samples_per_s", "sha256", "bytes", "disk_bytes")


def run_promise(
    recipe: Recipe, run: RunDirectory, console: Console, *, ranks: int, steps: int, processes: Sequence[int]
) -> dict[str, Any]:
    """Train the demo's model under every plan of `PLANS`, and with other numbers of processes.

    Of both kinds, one run is killed and resumed: under another plan, and with another number of processes.
    """
    demo, file = recipe.to_dict(), run.path / "recipe.yaml"
    demo["data"]["dim"] = demo["model"]["init_args"]["bottom"][-1] = DIM
    # The recorded hashes of the promise are of SGD.
    demo["dense_optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.02}}
    demo["sparse_optimizer"]["init_args"]["lr"] = 0.02
    file.write_text(recipe_yaml(Recipe.from_dict(demo)), encoding="utf-8")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def train_plans(name: str, size: int, plans: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
            progress.update(task, description=f"{name}: {', '.join(plans)}")
            folder = run.path / name
            folder.mkdir()
            job = {"recipe": str(file), "plans": plans, "steps": steps, "folder": str(folder), **options}
            argv = [sys.executable, "-m", "hotbed.cli.promise", json.dumps(job)]
            run_local(argv, size, folder, expected=-signal.SIGKILL if "save" in job else 0)
            return [] if "save" in job else json.loads((folder / "found.json").read_text(encoding="utf-8"))

        found = train_plans("plans", ranks, PLANS)
        at = steps // 2
        killed = {"checkpoint": str(run.path / "checkpoint"), "at": at}
        train_plans("killed", ranks, {KILLED: PLANS[KILLED]}, save=killed)
        (resumed,) = train_plans("resumed", ranks, {RESUMED: PLANS[RESUMED]}, resume=killed)
        of_processes: list[dict[str, Any]] = []
        for count in processes:
            plan = {"cut into rows": "row" if count > 1 else "table"}
            (of_count,) = train_plans(f"{count} processes", count, plan, virtual_ranks=VIRTUAL_RANKS)
            of_processes.append({"processes": count, **{key: of_count[key] for key in _REPORTED[1:]}})
        first, last, rows = processes[0], processes[-1], {"cut into rows": "row"}
        killed = {"checkpoint": str(run.path / f"checkpoint of {last}"), "at": at}
        train_plans(f"{last} killed", last, rows, save=killed, virtual_ranks=VIRTUAL_RANKS)
        options = {"resume": killed, "virtual_ranks": VIRTUAL_RANKS}
        (continued,) = train_plans(f"{first} resumed", first, rows if first > 1 else {"whole": "table"}, **options)
    hashes = {plan["sha256"] for plan in found} | {resumed["sha256"]}
    by_count = {of_count["sha256"] for of_count in of_processes} | {continued["sha256"]}
    return {
        "ranks": ranks,
        "steps": steps,
        "plans": [{key: plan[key] for key in _REPORTED} for plan in found],
        "resumed": {"killed": KILLED, "at_step": at, "resumed": RESUMED, "sha256": resumed["sha256"]},
        "virtual_ranks": VIRTUAL_RANKS,
        "processes": of_processes,
        "continued": {"killed": last, "at_step": at, "resumed": first, "sha256": continued["sha256"]},
        "equal": len(hashes) == len(by_count) == 1,
        **environment(torch.device("cpu")),
        "run": str(run.path),
    }


def print_promise(console: Console, result: Mapping[str, Any]) -> None:
    """For each run, print the bytes of a process's tables, samples per second, and the hash of losses and model."""

    def row(name: str, of_run: Mapping[str, Any]) -> list[str]:
        where = " … ".join(dict.fromkeys(size(b) for b in (min(of_run["bytes"]), max(of_run["bytes"]))))
        where += f", {size(max(of_run['disk_bytes']))} on disk" if any(of_run["disk_bytes"]) else ""
        return [name, where, f"{of_run['samples_per_s']:,.0f}", of_run["sha256"][:16]]

    resumed, continued = result["resumed"], result["continued"]
    name = f"{resumed['killed']}, kill -9 at step {resumed['at_step']}, then {resumed['resumed']}"
    rows = [*(row(plan["name"], plan) for plan in result["plans"]), [name, "", "", resumed["sha256"][:16]]]
    title = f"one model, {result['ranks']} processes, {result['steps']} steps"
    head = ("plan", "tables of a process", "samples/s", "SHA-256 of losses and model")
    print_table(console, ReportTable(title, head, rows, left=head[3:]))
    rows = [row(f"{of_count['processes']}", of_count) for of_count in result["processes"]]
    name = f"{continued['killed']}, kill -9 at step {continued['at_step']}, then {continued['resumed']}"
    rows.append([name, "", "", continued["sha256"][:16]])
    title = f"one model with {result['virtual_ranks']} virtual ranks, {result['steps']} steps"
    print_table(console, ReportTable(title, ("processes", *head[1:]), rows, left=head[3:]))
    console.print("all equal" if result["equal"] else "NOT equal", style=None if result["equal"] else "red")
    console.print(f"run: {result['run']}", soft_wrap=True)


class _Recorder(Callback):
    """Records losses. With ``save``, it also saves a checkpoint at a step, and kills the process one step later."""

    def __init__(self, save: Mapping[str, Any] | None) -> None:
        self.losses: list[float] = []
        self._save = save

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Record the loss."""
        self.losses.append(loss)
        if self._save is not None and trainer.step == self._save["at"]:
            path = Path(self._save["checkpoint"])
            save_checkpoint(path, trainer.parts(), step=trainer.step)
            if trainer.ranks.is_first:
                path.with_suffix(".json").write_text(json.dumps(self.losses), encoding="utf-8")
            trainer.ranks.add(0)  # no rank dies before the checkpoint is complete
        if self._save is not None and trainer.step == self._save["at"] + 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _run_job(job: Mapping[str, Any]) -> None:
    recipe = Recipe.from_dict(read_yaml(Path(job["recipe"])))
    with process_group(ParallelRecipe(), "cpu"):
        found: list[dict[str, Any]] = []
        for name, plan in job["plans"].items():
            found.append(_train_plan(recipe, name, plan, job))
            end_groups()
    if int(os.environ["RANK"]) == 0:
        (Path(job["folder"]) / "found.json").write_text(json.dumps(found), encoding="utf-8")


def _train_plan(recipe: Recipe, name: str, scheme: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    folder = Path(job["folder"])
    if not isinstance(scheme, str):  # write a plan file with this cut of all tables; each rank has its own file
        cut = dict(scheme)
        wire = cut.pop("wire", "rows")
        tables = tables_of(open_source(recipe.data), recipe.data)
        plan = make_plan(tables, int(os.environ["WORLD_SIZE"]), Cut(**cut), wire=wire)
        scheme = str(folder / f"plan{os.environ['RANK']}.json")
        Path(scheme).write_text(plan.to_json(), encoding="utf-8")
    values = recipe.to_dict()
    values["train"] |= {"steps": job["steps"], "device": "cpu"}
    values["schedule"] |= {"decay_end": max(values["schedule"]["decay_end"] or 0, job["steps"])}
    values["parallel"] |= {"plan": scheme, "virtual_ranks": job.get("virtual_ranks")}
    recipe = Recipe.from_dict(values)
    source = open_source(recipe.data)
    trainer = build(recipe, source)
    ranks, split = trainer.ranks, recipe.data.train_split
    size, total = recipe.train.batch_size, ranks.virtual.total
    loader = Loader(source, split, size, rank=ranks.rank, world_size=ranks.size, virtual_ranks=total)
    recorder = _Recorder(job.get("save"))
    if "resume" in job:
        path = Path(job["resume"]["checkpoint"])
        load_checkpoint(path, trainer.parts())
        trainer.resume_data(loader)
        recorder.losses = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    trainer.callbacks.append(recorder)
    trainer.fit(loader)
    state: dict[str, Tensor] = {key: t.detach().contiguous() for key, t in trainer.model.state_dict().items()}
    for key, optimizer_state in trainer.sparse.state_dict()["state"].items():
        state |= {f"sparse.{key}.{moment}": t.contiguous() for moment, t in optimizer_state.items()}
    digest = hashlib.sha256(struct.pack(f"<{len(recorder.losses)}d", *recorder.losses))
    for key in sorted(state):
        digest.update(key.encode())
        digest.update(state[key].view(-1).view(torch.uint8).numpy().tobytes())
    collections = collections_of(trainer.model).values()
    held, on_disk = sum(c.nbytes for c in collections), sum(c.disk_bytes for c in collections)
    return {
        "name": name,
        "samples_per_s": trainer.samples_per_s,
        "sha256": digest.hexdigest(),
        "bytes": [int(b) for b in ranks.gather(torch.tensor([held])).tolist()],
        "disk_bytes": [int(b) for b in ranks.gather(torch.tensor([on_disk])).tolist()],
    }


if __name__ == "__main__":
    _run_job(json.loads(sys.argv[1]))
