"""Export the model of a checkpoint in parts, or what has changed in it since an earlier one: ``hotbed export``.

The model is built by the recipe that the checkpoint holds, without its tables, which are copied from file to file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from hotbed.checkpoint import Directory, find_checkpoint, read_manifest
from hotbed.checkpoint.load import load_dense
from hotbed.checkpoint.manifest import find_earlier
from hotbed.data.hashing import HASH
from hotbed.embed import tables_on_meta
from hotbed.nn.dense_part import DensePart, dense_dtype, traced
from hotbed.serve.schema import ChangeManifest, ModelManifest
from hotbed.serve.writing import Model, Progress, write_change, write_model
from hotbed.train.build import new_model, new_source
from hotbed.train.stored import id_kinds_of, labels_of, recipe_of


class Stored(NamedTuple):
    """The model of a checkpoint, without the rows of its tables."""

    checkpoint: Directory
    part: DensePart
    model: Model


def export_model(
    checkpoint: str | Path | Directory,
    target: str | Path | Directory,
    *,
    since: str | Path | Directory | None = None,
    data: str | None = None,
    trust_recipe: bool = False,
    progress: Progress = lambda done, total: None,
) -> ModelManifest | ChangeManifest:
    """Write the model of a checkpoint as an exported model, or what has changed in it since an earlier one.

    Memory is that of the dense part and of some windows of the tables.

    Parameters
    ----------
    checkpoint
        A checkpoint with a recipe, or a run's directory, whose best or newest is taken; a path or a URI.
    target
        Path or URI to make.
    since
        An earlier checkpoint of the same model, or the step of one beside it: only changes are written.
    data
        Path of other data that the model can be built for; default: the recipe's.
    trust_recipe
        Import what the stored recipe names, also if it is of neither hotbed nor torch.optim; see
        `hotbed.config.check_trust`.
    progress
        Called with rows done and all rows.

    Returns
    -------
    ModelManifest or ChangeManifest
        What was written.

    Raises
    ------
    CheckpointError
        If there is no recipe, the model cannot be traced, its tables are others than those of ``since``, or there is
        anything at ``target``; nothing is left there then.
    SpecError
        If a feature that is not pooled has no ``max_len``, or the model uses ids themselves.
    """
    place = find_checkpoint(checkpoint, best=True)
    stored = stored_model(place, data, trust_recipe=trust_recipe)
    if since is not None:
        return write_change(target, place, find_earlier(place, since), stored.model, progress)
    return write_model(target, place, stored.model, traced(stored.part, stored.model.inputs), progress)


def stored_model(place: Directory, data: str | None = None, *, trust_recipe: bool = False) -> Stored:
    """Build the model of a checkpoint, and load all but its tables."""
    manifest = read_manifest(place)
    recipe = recipe_of(manifest, str(place), trusted=trust_recipe)
    source = new_source(replace(recipe.data, path=data or recipe.data.path))
    torch.manual_seed(recipe.train.seed)
    with torch.device("cpu"), tables_on_meta():
        model = new_model(recipe, source)
    load_dense(place, model)
    part = DensePart(model)
    schema, kinds = source.schema, dict(id_kinds_of(manifest))
    described = Model(
        name=recipe.name,
        labels=labels_of(recipe, source),
        encoder={
            "schema": schema.inputs.to_dict(),
            "ids": "hash" if kinds else "raw",
            "id_kinds": {column.name: kinds[column.name] for column in schema.sparse if column.name in kinds},
        },
        hash=HASH if kinds else None,
        collections=part.collections,
        state=part.state_dict(),
        inputs=len(schema.dense),
        dtype=dense_dtype(part),
    )
    return Stored(place, part, described)


def described(manifest: ModelManifest | ChangeManifest) -> dict[str, Any]:
    """What a command says of what it wrote, as plain values."""
    files = {name: entry.bytes for name, entry in manifest.files.items()}
    if isinstance(manifest, ChangeManifest):
        tables = cast("Mapping[str, Any]", manifest.model_dump()["tables"])
        return {"base": manifest.base.step, "sequence": manifest.sequence.step, "tables": tables, "files": files}
    return {"step": manifest.step, "state": manifest.state, "tables": list(manifest.tables), "files": files}
