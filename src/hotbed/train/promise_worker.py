"""One process of ``hotbed demo --promise``: trains what a JSON argument says, under one plan after the other."""

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
from safetensors.torch import save_file
from torch import Tensor

from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.comm import end_groups
from hotbed.config import ParallelRecipe, Recipe
from hotbed.data import Loader
from hotbed.embed import collections_of
from hotbed.files import read_yaml
from hotbed.plan import Cut, make_plan
from hotbed.train.build import build_trainer, open_source, tables_of
from hotbed.train.callbacks import Callback
from hotbed.train.process_group import process_group
from hotbed.train.trainer import Trainer


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


def main() -> None:
    """Train, and write what was found."""
    job = json.loads(sys.argv[1])
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
    trainer = build_trainer(recipe, source)
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
    main()
