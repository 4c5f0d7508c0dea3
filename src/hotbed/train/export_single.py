"""Write the model of a checkpoint and its tables as one program that needs torch only: ``hotbed export --single``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hotbed.checkpoint import find_checkpoint, load_checkpoint, read_manifest
from hotbed.checkpoint.storage import LocalDirectory, directory
from hotbed.checkpoint.tensor_files import new_directory
from hotbed.config import MemoryRecipe
from hotbed.data import Source, SparseColumn
from hotbed.data.described import described_features, encoding_of
from hotbed.data.hashing import HASH
from hotbed.errors import CheckpointError
from hotbed.files import new_file
from hotbed.nn.normalization import normalization_of, take_raw
from hotbed.nn.plain import plain_model, traced
from hotbed.train.build import build_model
from hotbed.train.stored import recipe_of, take_features, trained_inputs

MODEL = "model.pt2"
INPUTS = "inputs.json"


def export_single(
    checkpoint: str | Path, target: str | Path, data: str | None = None, *, trust_recipe: bool = False
) -> dict[str, Any]:
    """Write the model of a checkpoint to a program of torch.

    ``torch.export.load(FILE).module()(dense, ids)``, or ``(dense, ids, weights)`` where ids have weights, gives the
    logits ``[B, T]`` of any number of samples: ``dense [B, I]`` (None where there are no dense inputs), numbers as they
    are stored, which the program normalizes: float64, or float32 where there is nothing to normalize; ``ids``, by
    feature ``[B, k]`` int64, or ``(values [N], lengths [B])`` where the number of ids varies, of histories the newest
    last; ``weights``, by feature that has some, ``[B, k]`` or ``[N]`` float32. ``inputs.json`` describes them, with the
    way from stored values to ids; ``docs/prediction.md`` shows a stranger's code. Ids out of range are treated as the
    recipe's ``data.on_bad_id`` says, lists that are too long as the features' ``on_too_long``. It takes twice the
    memory of the model.

    Parameters
    ----------
    checkpoint
        A checkpoint with a recipe, or a run's directory, whose newest one is taken.
    target
        Local path to make: a file ``NAME.pt2``, which has ``inputs.json`` inside
        (``torch.export.load(FILE, extra_files={"inputs.json": ""})``), or else a directory with ``model.pt2`` and
        ``inputs.json``.
    data
        Path of other data that the model can be built for; default: the recipe's, which are opened only if the recipe
        has no schema.
    trust_recipe
        Import what the stored recipe names, also if it is of neither hotbed nor torch.optim; see
        `hotbed.config.check_trust`.

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
    file = Path(target) if str(target).endswith(".pt2") else None
    if file is not None and file.exists():
        raise CheckpointError(f"{file} exists already; choose another file")
    manifest = read_manifest(source)
    recipe = replace(recipe_of(manifest, str(source), trusted=trust_recipe), memory=MemoryRecipe())
    origin = trained_inputs(recipe, manifest, data)
    take_features(origin, manifest)
    model = build_model(recipe, origin, torch.device("cpu"))
    load_checkpoint(source, {"model": model})
    take_raw(model, origin.schema)
    program = traced(plain_model(model), origin.schema)
    found = _described(origin, raw=normalization_of(model) is not None)
    text = json.dumps(found, indent=1)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        with new_file(file) as unfinished, unfinished.open("wb") as stream:
            torch.export.save(program, stream, extra_files={INPUTS: text})
        return found
    with new_directory(target) as (place, _):
        torch.export.save(program, Path(place.path) / MODEL)
        place.write(INPUTS, text)
    return found


def _described(source: Source, *, raw: bool) -> dict[str, Any]:
    """What ``inputs.json`` says of inputs and outputs."""
    schema, kinds, encoder = source.schema, source.id_kinds(), source.encoder

    def encoding(column: str) -> dict[str, str]:
        if encoder is not None:
            return encoding_of(encoder, column)
        return {"encoding": "hash", "values": kinds[column]} if column in kinds else {"encoding": "rows"}

    def of_ids(column: SparseColumn) -> dict[str, Any]:
        weights = {} if column.weights is None else {"weights": column.weights}
        return {"rows": column.rows, "ids": column.ids, "pooling": column.pooling, **weights, **encoding(column.name)}

    return {
        "dense": replace(schema, derived=()).to_dict()["dense"],
        "dense_dtype": "float64" if raw else "float32",
        "labels": list(schema.labels),
        "positives": {label.column: label.positive for label in schema.positives},
        "output": "logits [B, labels]; the probability of a label is 1 / (1 + exp(-logit))",
        "ids": {c.name: of_ids(c) for c in schema.sparse},
        "features": [] if encoder is None else described_features(encoder),
        "hash": HASH if kinds else None,
        "tables": schema.rows,
    }
