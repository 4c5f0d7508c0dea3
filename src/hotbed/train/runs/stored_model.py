"""Evaluate stored models, open data with the encoding of a stored model, and compare vocabularies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from torch import nn
from typing_extensions import override

from hotbed.batch import Batch
from hotbed.checkpoint import Directory, Taken, directory, find_checkpoint, load_checkpoint, read_manifest
from hotbed.checkpoint.manifest import Manifest
from hotbed.checkpoint.storage import suffix
from hotbed.config import Component, DataRecipe, ParallelRecipe, Recipe, TaskRecipe, check_trust
from hotbed.data import Encoder, Loader, NpySource, ParquetSource, Schema, Source, SplitBinarySource
from hotbed.data.formats.parquet import is_prepared
from hotbed.data.formats.split_binary import DESCRIPTION
from hotbed.data.items import items_of, merge_items
from hotbed.data.row_location import check_id_type
from hotbed.errors import CheckpointError, DataError, RecipeError
from hotbed.locations import is_storage, location
from hotbed.train.metrics import Metrics, evaluate, metrics_of
from hotbed.train.numerics import resolve_device
from hotbed.train.retrieval import (
    all_items,
    evaluate_retrieval,
    item_features,
    model_schema,
    model_source,
    retrieval_options,
)
from hotbed.train.runs.build import build_component, build_model, check_split, new_source

FEATURES = "features"
"""Name of the part of a checkpoint that has the state of derived columns and of vocabularies."""
_SPLITTING = ("valid_fraction", "test_fraction", "split", "split_paths")  # arguments that divide data into splits


def evaluate_checkpoint(
    path: str | Path, split: str | None = None, data: str | None = None, *, trust_recipe: bool = False
) -> tuple[Directory, str, Metrics]:
    """Evaluate a checkpoint's model on a split of its data, or of the dataset at ``data``.

    ``split`` defaults to ``test``, or to all rows of ``data`` if ``data`` is set. Return the path of the checkpoint,
    the name of the split (``"all"`` for all rows), and the metrics.
    """
    checkpoint = find_checkpoint(path, best=True)
    manifest = read_manifest(checkpoint)
    recipe = stored_recipe(manifest, str(checkpoint), trusted=trust_recipe, evaluates=True)
    component = _with_text(recipe.data.source, manifest)
    if data is not None and split is None:
        component = without_splits(component)
    source = new_source(replace(recipe.data, source=component, path=data or recipe.data.path))
    check_id_kinds(manifest, source, str(data or recipe.data.path))
    load_features(source, manifest)
    whole = data is not None and split is None and len(source.splits) == 1
    split = source.splits[0] if whole else split or "test"
    check_split("--split", split, source)
    source.check_labels(split)
    device = resolve_device("auto")
    model = build_model(recipe, source, device)
    load_checkpoint(checkpoint, {"model": model})
    loader = Loader(source, split, recipe.train.eval_batch_size)
    name = "all" if whole else split
    if recipe.retrieval is None:
        options: dict[str, Any] = {"device": device, "group": source.schema.group, "labels": source.schema.labels}
        return checkpoint, name, evaluate(model, loader, **options, metrics=metrics_of(recipe))
    item = item_features(model)
    if data is None:
        items = all_items(recipe, source, item)
    else:  # search the items of the training data and the items of ``data``
        new, trained = items_of(source, item, source.splits), source
        try:
            if recipe.retrieval.items is None:
                trained = new_source(replace(recipe.data, source=_with_text(recipe.data.source, manifest)))
                load_features(trained, manifest)
            items = merge_items([all_items(recipe, trained, item), new])
        except DataError as error:
            raise DataError(
                "the evaluation needs the items of the training data, which cannot be read: "
                f"{error} (current directory: {Path.cwd()}). Restore the training data"
            ) from None
    return checkpoint, name, evaluate_retrieval(model, loader, items, retrieval_options(recipe, model), device=device)


def stored_recipe(manifest: Manifest, path: str, *, trusted: bool, evaluates: bool = False) -> Recipe:
    """Return a checkpoint's recipe, changed to one process; raise `CheckpointError` if the checkpoint has no recipe.

    Losses and callbacks are removed, because only training needs them. Metrics are removed unless the caller
    ``evaluates``. If the recipe names classes outside of hotbed and torch.optim, it must be ``trusted``
    (`check_trust`).
    """
    if manifest.recipe is None:
        raise CheckpointError(
            f"{path} has no recipe, so its model cannot be built. Build the model in code and call load_checkpoint, or "
            "convert the tables to safetensors (hotbed checkpoint convert)"
        )
    recipe = replace(Recipe.from_dict(manifest.recipe), callbacks={})
    tasks = {label: TaskRecipe(metrics=task.metrics) for label, task in recipe.tasks.items()}
    recipe = replace(recipe, tasks=tasks) if evaluates else replace(recipe, tasks={}, metrics={})
    check_trust(recipe, path, trusted=trusted)
    return replace(recipe, parallel=ParallelRecipe())


# -- data --------------------------------------------------------------------------------------------------------------


def open_new_data(
    recipe: Recipe, manifest: Manifest, data: str | Path, prepared: str | None = None, missing: Sequence[str] = ()
) -> tuple[Source, tuple[str, ...]]:
    """Open data with a checkpoint's encoding, without labels and splits; return the source and the model's labels.

    If the model was trained on a prepared dataset and ``data`` has raw rows, these are encoded with the vocabularies of
    the training dataset, or of the dataset at ``prepared``. Columns that ``missing`` names may be absent.
    """
    component = without_splits(_with_text(recipe.data.source, manifest))
    if _takes_raw_rows(component, manifest) and not _is_prepared(data):
        fix = "Pass the prepared dataset with --prepared DATASET"
        trained = _open_training_data(recipe.data, prepared, f"raw rows of {data} need the vocabularies in", fix)
        if trained.encoder is None or trained.encoder.preparation is None:
            raise DataError(
                f"{data} has raw rows, but {prepared or recipe.data.path} has no vocabularies, because it was not "
                "prepared by hotbed. Prepare the log with `hotbed prepare RAW OUT` and train on OUT, or pass rows that "
                "were prepared like the training data"
            )
        _refuse_unknown(trained, manifest)
        load_features(trained, manifest)
        encoder = trained.encoder.of(model_source(recipe, trained).schema.inputs)
        text = trained.encoder.preparation.text
        source = ParquetSource(data, encoder.schema, ids="raw", text=text, missing=missing, encoder=encoder)
        return source, labels_of(recipe, trained)
    if prepared is not None:
        raise RecipeError(f"--prepared is {prepared}, but {data} needs no vocabularies. Remove --prepared")
    options = dict(component.init_args)
    if missing:
        if not issubclass(component.load(), ParquetSource):
            raise RecipeError(
                f"--missing is {', '.join(missing)}, but the data is read by {component.load().__name__}, which always "
                "has all columns. Remove --missing"
            )
        options["missing"] = list(missing)
    if (schema := _schema_of(component)) is not None:
        options["schema"] = model_schema(recipe, schema.inputs).to_dict()
    source = build_component("data.source", replace(component, init_args=options), Source, data)
    load_features(source, manifest)
    return model_source(recipe, source), labels_of(recipe, source)


class _InputsOnly(Source):
    """A source that describes the inputs of a checkpoint's model, but has no samples."""

    splits = ()

    def __init__(self, encoder: Encoder) -> None:
        self.schema, self._encoder = encoder.schema, encoder

    @property
    @override
    def encoder(self) -> Encoder:
        return self._encoder if self._encoder.schema is self.schema else self._encoder.of(self.schema)

    @override
    def id_kinds(self) -> dict[str, str]:
        encoder = self.encoder
        return {name: encoder.id_kinds[name] for name in encoder.hashed if name in encoder.id_kinds}

    @override
    def _chunks(self, split: str) -> Sequence[int]:
        return ()

    @override
    def _read(self, split: str, i: int) -> Batch:
        raise AssertionError("there are no samples")


def trained_inputs(recipe: Recipe, manifest: Manifest, data: str | Path | None = None) -> Source:
    """Return a source that describes the inputs of a checkpoint's model.

    If ``data`` is given, this dataset is opened. Otherwise no data is opened if the training data are Parquet or CSV
    files, because the recipe then contains their schema. Other formats and prepared data contain their own schema, so
    the training data is opened.
    """
    component = recipe.data.source
    schema = _schema_of(component) if issubclass(component.load(), ParquetSource) else None
    if data is None and schema is not None and not _takes_raw_rows(component, manifest):
        encoder = Encoder(schema, ids=component.init_args.get("ids", "hash"))
        return _InputsOnly(encoder.with_kinds(id_kinds_of(manifest)))
    if data is not None:
        return new_source(replace(recipe.data, path=str(data)))
    return _open_training_data(recipe.data, None, "the schema of this model's inputs is in", "Pass a copy with --data")


def _open_training_data(recipe: DataRecipe, path: str | None, reason: str, fix: str) -> Source:
    try:
        return new_source(replace(recipe, path=path or recipe.path))
    except DataError as error:
        raise DataError(
            f"{reason} the training data, which cannot be read: {error} (current directory: {Path.cwd()}). {fix}"
        ) from None


def _schema_of(component: Component) -> Schema | None:
    """Return the schema that a recipe sets for its source, or None if the recipe has no schema."""
    schema = component.init_args.get("schema")
    return Schema.from_dict(cast("Mapping[str, object]", schema)) if isinstance(schema, Mapping) else None


def _takes_raw_rows(component: Component, manifest: Manifest) -> bool:
    """Return whether a model was trained on prepared data, so that its vocabularies can encode raw rows."""
    options = component.init_args
    is_parquet = issubclass(component.load(), ParquetSource) and options.get("ids") == "raw"
    has_derived = isinstance(schema := options.get("schema"), Mapping) and "features" in schema
    return issubclass(component.load(), SplitBinarySource) or (
        is_parquet and not has_derived and bool(manifest.parts.get(FEATURES))
    )


def _is_prepared(data: str | Path) -> bool:
    """Return whether data was written by ``hotbed prepare``."""
    where = location(str(data))
    if isinstance(where, Path) and not where.exists():
        raise DataError(f"{data} does not exist. Pass a log or Parquet of raw rows, or a prepared dataset")
    if suffix(where) == ".yaml" or (suffix(where) == "" and is_storage(where) and directory(where).has(DESCRIPTION)):
        return True
    return (suffix(where) == ".parquet" or (isinstance(where, Path) and where.is_dir())) and is_prepared(data)


def without_splits(component: Component) -> Component:
    """Return a source without the arguments that divide its data into splits."""
    if issubclass(component.load(), NpySource):  # an NpySource has splits by default
        return replace(component, init_args={**component.init_args, "splits": "none"})
    return replace(component, init_args={k: v for k, v in component.init_args.items() if k not in _SPLITTING})


def _with_text(component: Component, manifest: Manifest) -> Component:
    """Return a source that reads ids as text if they were text in training.

    This is necessary because ``12`` in a CSV file may be a number or text.
    """
    if not issubclass(component.load(), ParquetSource):
        return component
    text = {name for name, kind in id_kinds_of(manifest).items() if kind == "text"}
    text |= set(cast("Sequence[str]", component.init_args.get("text", ())))
    return replace(component, init_args={**component.init_args, "text": sorted(text)})


def labels_of(recipe: Recipe, source: Source) -> tuple[str, ...]:
    """Return the labels of a recipe's model, or ``score`` for retrieval without labels."""
    schema = _schema_of(recipe.data.source)
    labels = source.schema.labels if schema is None else schema.labels
    return labels if labels or recipe.retrieval is None else ("score",)


def id_kinds_of(manifest: Manifest) -> Mapping[str, str]:
    """Return the types of hashed ids in the training data, as `Source.id_kinds` returned them."""
    position = cast("Mapping[str, Any]", manifest.parts.get("position", {}))
    return position.get("id_kinds", {})


def check_id_kinds(manifest: Manifest, source: Source, data: str) -> None:
    """Raise `DataError` if ids have a different type than in training, because their hashes would differ."""
    before = id_kinds_of(manifest)
    for name, kind in source.id_kinds().items():
        trained = before.get(name, "")
        if trained not in ("", kind) and not source.is_missing(name):
            check_id_type(data, name, kind, trained)


# -- derived columns and vocabularies ----------------------------------------------------------------------------------


def has_features(source: Source) -> bool:
    """Return whether checkpoints need part `FEATURES`, because a source has derived columns or vocabularies."""
    return bool(source.schema.derived) or (source.encoder is not None and source.encoder.preparation is not None)


class FeaturesState:
    """State of a source's encoder, which checkpoints store as part `FEATURES`.

    Loading does not compare the lookup tables; `load_features` compares them.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def has_derived(self) -> bool:
        """Whether the source has derived columns, which may need measured boundaries."""
        return bool(self._source.schema.derived)

    def state_dict(self) -> dict[str, Any]:
        """Return `Encoder.state`."""
        return {} if self._source.encoder is None else self._source.encoder.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load `Encoder.state`."""
        if self._source.encoder is not None:
            self._source.encoder.load_state(state, other_tables=True)


def load_features(source: Source, manifest: Manifest, *, other_tables: bool = False) -> None:
    """Load a checkpoint's state of derived columns and vocabularies into a source; see `Encoder.load_state`."""
    if source.encoder is not None:
        source.encoder.load_state(manifest.parts.get(FEATURES, {}), other_tables=other_tables)


def check_vocabularies(
    source: Source, manifest: Manifest, taken: Sequence[Taken] | None = None, rename: Mapping[str, str] | None = None
) -> None:
    """Raise `DataError` if a row stands for a different value in the source's vocabularies than in a checkpoint.

    The source's vocabularies may have more values than the vocabularies of the checkpoint.

    Only tables that the model has ``taken`` from the checkpoint are compared (default: all tables). ``rename`` maps new
    names of tables to their names in the checkpoint.
    """
    preparation = None if source.encoder is None else source.encoder.preparation
    if preparation is None:
        return

    def matches(full: str, name: str) -> bool:  # ``full`` may be prefixed with the path of a collection
        return full == name or full.endswith(f".{name}")

    stored = cast("Mapping[str, Any]", manifest.parts.get(FEATURES, {}))
    before: dict[str, Any] = {}
    for name in preparation.state():
        earlier = next((old for new, old in (rename or {}).items() if matches(new, name)), name)
        found = next((table for table in stored if matches(earlier, table)), None)
        is_taken = taken is None or any(of.what == "table" and of.taken and matches(of.name, name) for of in taken)
        if found is not None and is_taken:
            before[name] = stored[found]
    preparation.refuse_other(before, may_grow=True)


def lacks_vocabularies(manifest: Manifest, source: Source) -> bool:
    """Return whether a checkpoint lacks vocabularies of ``source``. Old releases did not store them."""
    preparation = None if source.encoder is None else source.encoder.preparation
    stored = cast("Mapping[str, Any]", manifest.parts.get(FEATURES, {}))
    return preparation is not None and bool(preparation.unknown(stored))


def _refuse_unknown(source: Source, manifest: Manifest) -> None:
    """Raise `DataError` if a checkpoint lacks vocabularies of ``source``."""
    if lacks_vocabularies(manifest, source):
        raise DataError(
            "the checkpoint has no vocabularies, so the vocabularies of the data cannot be checked. If the data is "
            "the training data, resume the run (--resume RUN with a larger train.steps or train.epochs). The next "
            "checkpoint then contains the vocabularies"
        )


def encoder_of(recipe: Recipe, source: Source, manifest: Manifest) -> Encoder:
    """Return the encoder that turns raw rows into inputs of a checkpoint's model.

    ``source`` provides the schema, lookup tables and vocabularies.
    """
    options = recipe.data.source.init_args
    ids = options.get("ids", "hash") if issubclass(recipe.data.source.load(), ParquetSource) else "raw"
    tables = None if source.encoder is None else source.encoder.tables
    preparation = None if source.encoder is None else source.encoder.preparation
    encoder = Encoder(
        source.schema.inputs, ids=ids, id_kinds=id_kinds_of(manifest), tables=tables, preparation=preparation
    )
    _refuse_unknown(source, manifest)
    encoder.load_state(manifest.parts.get(FEATURES, {}))
    return encoder


def bad_ids(model: nn.Module) -> dict[str, int]:
    """Return the number of invalid ids by feature; a feature of several collections is counted once."""
    counts: dict[str, int] = {}
    for module in model.modules():
        for feature, count in getattr(module, "bad_ids", {}).items():
            counts[feature] = max(counts.get(feature, 0), count)
    return counts
