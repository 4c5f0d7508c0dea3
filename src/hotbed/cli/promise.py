"""Train one model under every kind of plan, and compare hashes of everything it learned: ``hotbed demo --promise``.

The processes of each world are started by this one, on this machine: each runs this file, as a program whose argument
says in JSON what it trains.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable
from safetensors.torch import load_file, save_file
from torch import Tensor

from hotbed.checkpoint import load_checkpoint, save_checkpoint
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
"""What the same model is trained under: schemes of `hotbed.make_plan`, or arguments of a `Cut` and the wire format."""

DIM = 48
"""Columns of the tables: three blocks of 16, so that they can be cut."""

_SHOWN = ("name", "samples_per_s", "sha256", "bytes", "disk_bytes")
KILLED, RESUMED = "on disk, cached", "cut into columns"
"""The plan of a run that is killed, and the plan that it goes on under."""


def run_promise(recipe: Recipe, run: RunDirectory, console: Console, *, ranks: int, steps: int) -> dict[str, Any]:
    """Train the demo's model under every plan of `PLANS`, kill and resume it, and train it in one process.

    Returns
    -------
    dict
        ``plans``: name, samples/s, SHA-256, bytes by rank; ``resumed``; ``one_process``: largest differences of losses
        and of the model; ``equal``: whether all hashes are.
    """
    demo, file = recipe.to_dict(), run.path / "recipe.yaml"
    demo["data"]["dim"] = demo["model"]["init_args"]["bottom"][-1] = DIM
    # Adam divides by small numbers, so it would make much of a difference in the last bit between worlds.
    demo["dense_optimizer"] = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.02}}
    demo["sparse_optimizer"]["init_args"]["lr"] = 0.02
    file.write_text(recipe_yaml(Recipe.from_dict(demo)), encoding="utf-8")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")

        def trained(name: str, size: int, plans: Mapping[str, Any], **options: Any) -> list[dict[str, Any]]:
            progress.update(task, description=f"{name}: {', '.join(plans)}")
            return _run(run.path / name, size, {"recipe": str(file), "plans": plans, "steps": steps, **options})

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
    """Start the processes of a world, wait for them, and return what the first one found."""
    folder.mkdir()
    argv = [sys.executable, "-m", "hotbed.cli.promise", json.dumps({**job, "folder": str(folder)})]
    run_local(argv, ranks, folder, expected=-signal.SIGKILL if "save" in job else 0)
    return [] if "save" in job else json.loads((folder / "found.json").read_text(encoding="utf-8"))


# -- one process of a world ----------------------------------------------------------------------------------------


class _Recorder(Callback):
    """Keeps the losses; saves a checkpoint at a step, goes on for a while, and kills the process."""

    def __init__(self, save: Mapping[str, Any] | None) -> None:
        self.losses: list[float] = []
        self._save = save

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Keep the loss."""
        self.losses.append(loss)
        if self._save is None:
            return
        path = Path(self._save["checkpoint"])
        if trainer.step == self._save["at"]:
            save_checkpoint(path, trainer.parts(), step=trainer.step)
            if trainer.ranks.is_first:
                path.with_suffix(".json").write_text(json.dumps(self.losses), encoding="utf-8")
            trainer.ranks.add(0)  # nobody dies before it is there
        if trainer.step == self._save["at"] + 1:
            os.kill(os.getpid(), signal.SIGKILL)


def _train(job: Mapping[str, Any]) -> None:
    """Train under one plan after the other, as one process of a world, and write what was found."""
    recipe = Recipe.from_dict(read_yaml(Path(job["recipe"])))
    with process_group(ParallelRecipe(), "cpu"):
        found: list[dict[str, Any]] = []
        for name, plan in job["plans"].items():
            found.append(_trained(recipe, name, plan, job))
            end_groups()
    if int(os.environ["RANK"]) == 0:
        (Path(job["folder"]) / "found.json").write_text(json.dumps(found), encoding="utf-8")


def _trained(recipe: Recipe, name: str, scheme: Any, job: Mapping[str, Any]) -> dict[str, Any]:
    folder = Path(job["folder"])
    values = recipe.to_dict()
    values["train"] |= {"steps": job["steps"], "device": "cpu"}
    values["schedule"] |= {"decay_end": max(values["schedule"]["decay_end"] or 0, job["steps"])}
    values["parallel"]["plan"] = scheme if isinstance(scheme, str) else _plan_file(recipe, scheme, folder)
    recipe = Recipe.from_dict(values)
    source = open_source(recipe.data)
    trainer = build(recipe, source)
    ranks, data = trainer.ranks, recipe.data
    loader = Loader(source, data.train_split, recipe.train.batch_size, rank=ranks.rank, world_size=ranks.size)
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
    file = folder / f"{name}.safetensors"
    if ranks.is_first:
        save_file({key: t.clone() for key, t in state.items()}, file)
    collections = collections_of(trainer.model).values()
    held, on_disk = sum(c.nbytes for c in collections), sum(c.disk_bytes for c in collections)
    return {
        "name": name,
        "samples_per_s": trainer.samples_per_s,
        "sha256": _sha256(recorder.losses, state),
        "bytes": [int(b) for b in ranks.gather(torch.tensor([held])).tolist()],
        "disk_bytes": [int(b) for b in ranks.gather(torch.tensor([on_disk])).tolist()],
        "losses": recorder.losses,
        "state": str(file),
    }


def _plan_file(recipe: Recipe, cut: Mapping[str, Any], folder: Path) -> str:
    """A plan of this cut of all tables, as a file; every rank writes its own."""
    own = dict(cut)
    wire = own.pop("wire", "rows")
    tables = tables_of(open_source(recipe.data), recipe.data)
    plan = make_plan(tables, int(os.environ["WORLD_SIZE"]), Cut(**own), wire=wire)
    file = folder / f"plan{os.environ['RANK']}.json"
    file.write_text(plan.to_json(), encoding="utf-8")
    return str(file)


def _sha256(losses: list[float], state: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256(struct.pack(f"<{len(losses)}d", *losses))
    for key in sorted(state):
        digest.update(key.encode())
        digest.update(state[key].view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    _train(json.loads(sys.argv[1]))
