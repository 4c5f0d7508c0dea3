"""Write the model of a checkpoint as a program that needs torch only: ``hotbed checkpoint convert --to torch``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hotbed.checkpoint import find_checkpoint, load_checkpoint, read_manifest
from hotbed.checkpoint.storage import LocalDirectory, directory
from hotbed.checkpoint.tensor_files import new_directory
from hotbed.config import MemoryRecipe, ParallelRecipe, Recipe
from hotbed.errors import CheckpointError
from hotbed.nn.plain import plain_model, traced
from hotbed.train.build import build_model, open_source

MODEL = "model.pt2"
INPUTS = "inputs.json"


def export_model(checkpoint: str | Path, target: str | Path, data: str | None = None) -> dict[str, Any]:
    """Write the model of a checkpoint to ``model.pt2``, which needs torch only.

    ``torch.export.load("model.pt2").module()(dense, ids)`` gives the logits ``[B, T]`` of any number of samples:
    ``dense [B, I]`` float32 (None where there are no dense inputs) and ``ids``, by feature ``[B, k]`` int64, or
    ``(values [N], lengths [B])`` where the number of ids varies. ``inputs.json`` lists them; dense inputs that have a
    center and a scale there are to be scaled as `hotbed.data.Scaling` says. Ids out of range are treated as the
    recipe's ``data.on_bad_id`` says. It takes twice the memory of the model.

    Parameters
    ----------
    checkpoint
        A checkpoint with a recipe, or a run's directory, whose newest one is taken.
    target
        Local directory to make.
    data
        Path of other data that the model can be built for; default: the recipe's.

    Returns
    -------
    dict
        What ``inputs.json`` holds.

    Raises
    ------
    CheckpointError
        If there is no recipe, the model cannot be traced, or there is anything at ``target``.
    """
    source = find_checkpoint(checkpoint)
    if not isinstance(directory(target), LocalDirectory):
        raise CheckpointError(f"{target} is no local directory; torch writes {MODEL} to local disks only")
    stored = read_manifest(source).recipe
    if stored is None:
        raise CheckpointError(
            f"{source} holds no recipe, so its model cannot be built; export its tables as safetensors instead"
        )
    recipe = replace(Recipe.from_stored(stored), parallel=ParallelRecipe(), memory=MemoryRecipe())
    origin = open_source(replace(recipe.data, path=data or recipe.data.path, valid_split=None, test_split=None))
    model = build_model(recipe, origin, torch.device("cpu"))
    load_checkpoint(source, {"model": model})
    program = traced(plain_model(model), origin.schema)
    found = {
        "dense": origin.schema.to_dict()["dense"],
        "labels": list(origin.schema.labels),
        "ids": {c.name: {"rows": c.rows, "ids": c.ids, "pooling": c.pooling} for c in origin.schema.sparse},
        "tables": origin.schema.rows,
    }
    with new_directory(target) as (place, _):
        torch.export.save(program, Path(place.path) / MODEL)
        place.write(INPUTS, json.dumps(found, indent=1))
    return found
