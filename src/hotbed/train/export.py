"""Export the model of a checkpoint in parts, as one program, or what has changed in it since an earlier one.

In parts, the model is built by the recipe that the checkpoint holds, without its tables, which are copied from file to
file. As one program (``--single``), the model has its tables inside and needs torch only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from hotbed.checkpoint import Directory, find_checkpoint, load_checkpoint, read_manifest
from hotbed.checkpoint.load import load_dense
from hotbed.checkpoint.manifest import find_earlier
from hotbed.checkpoint.storage import LocalDirectory, directory
from hotbed.checkpoint.tensor_files import new_directory
from hotbed.config import MemoryRecipe, Recipe
from hotbed.data import Source, SparseColumn
from hotbed.data.encode import described_features, encoding_of
from hotbed.data.hashing import HASH
from hotbed.embed import tables_on_meta
from hotbed.errors import CheckpointError
from hotbed.files import new_file
from hotbed.nn import plain
from hotbed.nn.dense_part import DensePart, dense_dtype, traced
from hotbed.nn.normalization import normalization_of, take_raw
from hotbed.serve.format import ChangeManifest, ModelManifest, encoder_digest
from hotbed.serve.writing import Model, Progress, write_change, write_model
from hotbed.train.build import build_model, new_model
from hotbed.train.retrieval import model_source
from hotbed.train.stored import FEATURES, encoder_of, id_kinds_of, labels_of, recipe_of, take_features, trained_inputs


class Exporter:
    """Write the models of a recipe's checkpoints, and changes between them; made once, used for any number of them.

    The model is built and traced here, which draws random numbers and tells all threads that torch traces: so do it
    before training begins. Writing does neither.
    """

    def __init__(self, recipe: Recipe, source: Source) -> None:
        source = model_source(recipe, source)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), tables_on_meta():
            model = new_model(recipe, source)
        normalization = normalization_of(model)
        if normalization is not None:
            normalization.assume_standard()  # until a checkpoint is loaded
        self._recipe, self._source = recipe, source
        self._labels = labels_of(recipe, source)
        self._part = DensePart(model)
        self._program = traced(self._part, len(source.schema.dense))

    def write_model(
        self, target: str | Path | Directory, checkpoint: Directory, progress: Progress = lambda done, total: None
    ) -> ModelManifest:
        """Write an exported model; see `hotbed.serve.writing.write_model`."""
        model = self._loaded(checkpoint)
        with torch.no_grad():
            for name, value in self._program.state_dict.items():
                value.copy_(model.state[name])
        return write_model(target, checkpoint, model, self._program, progress)

    def write_change(
        self,
        target: str | Path | Directory,
        checkpoint: Directory,
        since: Directory,
        progress: Progress = lambda done, total: None,
    ) -> ChangeManifest:
        """Write what has changed since an earlier checkpoint; see `hotbed.serve.writing.write_change`.

        `CheckpointError` also if inputs were made otherwise then: changes have rows and parameters only.
        """
        new, old = read_manifest(checkpoint), read_manifest(since)
        if (new.parts.get(FEATURES), id_kinds_of(new)) != (old.parts.get(FEATURES), id_kinds_of(old)):
            raise CheckpointError(
                f"{checkpoint} makes other inputs of rows than {since} (looked-up tables, vocabularies, "
                "boundaries or kinds of ids have changed, or the earlier one is of a release that recorded no "
                "vocabularies); leave --since out, so that a full model is written"
            )
        return write_change(target, checkpoint, since, self._loaded(checkpoint), progress)

    def encoder_digest(self, checkpoint: Directory) -> str:
        """What changes to a checkpoint's model say of how its inputs are made."""
        return encoder_digest(encoder_of(self._recipe, self._source, read_manifest(checkpoint)).to_dict())

    def _loaded(self, checkpoint: Directory) -> Model:
        """All of a checkpoint's model but its rows."""
        manifest = load_dense(checkpoint, self._part.model)
        encoder = encoder_of(self._recipe, self._source, manifest)
        return Model(
            name=self._recipe.name,
            labels=self._labels,
            encoder=encoder,
            hash=HASH if encoder.hashed else None,
            collections=self._part.collections,
            state=self._part.state_dict(),
            inputs=len(self._source.schema.dense),
            dtype=dense_dtype(self._part),
        )


def export_model(
    # a checkpoint with a recipe, or a run (its best or newest checkpoint); path or URI
    checkpoint: str | Path | Directory,
    target: str | Path | Directory,  # path or URI to create
    *,
    # earlier checkpoint of the same model, or the step of an adjacent one: write only changes
    since: str | Path | Directory | None = None,
    # other data to build the model for; default: the data of the recipe, opened only if the recipe has no schema
    data: str | None = None,
    trust_recipe: bool = False,  # import classes outside of hotbed and torch.optim, see `hotbed.config.check_trust`
    progress: Progress = lambda done, total: None,  # called with the rows done and the total
) -> ModelManifest | ChangeManifest:
    """Write the model of a checkpoint as an exported model, or its changes since an earlier one.

    Memory is that of the dense part, of some windows of the tables, and of one table's vocabulary at a time. Raise
    `CheckpointError` if there is no recipe, the model cannot be traced, its tables differ from those of ``since``, or
    ``target`` exists; nothing is left there then. Raise `SpecError` if a sequence feature has no ``max_len``, or the
    model uses ids themselves.
    """
    place = find_checkpoint(checkpoint, best=True)
    earlier = None if since is None else find_earlier(place, since)
    manifest = read_manifest(place)
    recipe = recipe_of(manifest, str(place), trusted=trust_recipe)
    exporter = Exporter(recipe, trained_inputs(recipe, manifest, data))
    if earlier is not None:
        return exporter.write_change(target, place, earlier, progress)
    return exporter.write_model(target, place, progress)


def described(manifest: ModelManifest | ChangeManifest) -> dict[str, Any]:
    """What a command says of what it wrote, as plain values."""
    files = {name: entry.bytes for name, entry in manifest.files.items()}
    if isinstance(manifest, ChangeManifest):
        tables = cast("Mapping[str, Any]", manifest.model_dump()["tables"])
        return {"base": manifest.base.step, "sequence": manifest.sequence.step, "tables": tables, "files": files}
    return {"step": manifest.step, "state": manifest.state, "tables": list(manifest.tables), "files": files}


MODEL = "model.pt2"
INPUTS = "inputs.json"


def export_single(
    checkpoint: str | Path, target: str | Path, data: str | None = None, *, trust_recipe: bool = False
) -> dict[str, Any]:
    """Write the model of a checkpoint to a program of torch (``docs/prediction.md``), with twice the model's memory.

    ``checkpoint`` is one with a recipe, or a run (its newest checkpoint). ``target`` is a file ``NAME.pt2``, which has
    ``inputs.json`` inside (``torch.export.load(FILE, extra_files={"inputs.json": ""})``), or else a directory with
    ``model.pt2`` and ``inputs.json``. ``data`` and ``trust_recipe`` are as in `export_model`. Raise `CheckpointError`
    if there is no recipe, the model cannot be traced, or ``target`` exists.
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
    program = plain.traced(plain.plain_model(model), origin.schema)
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
