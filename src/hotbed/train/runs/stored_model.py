"""Use a stored model: evaluate it, and open data as it was trained on, or new ones without labels."""

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
from hotbed.checkpoint.single_files import suffix
from hotbed.config import Component, ParallelRecipe, Recipe, TaskRecipe, check_trust
from hotbed.data import Encoder, Loader, NpySource, ParquetSource, Schema, Source, SplitBinarySource
from hotbed.data.items import ItemSet, items_of, merge_items
from hotbed.data.formats.parquet import is_prepared
from hotbed.data.row_location import check_id_type
from hotbed.data.formats.split_binary import DESCRIPTION
from hotbed.errors import CheckpointError, DataError, RecipeError
from hotbed.locations import is_storage, location
from hotbed.train.runs.build import build_component, build_model, check_split, new_source
from hotbed.train.metrics import Metrics, evaluate, metrics_of
from hotbed.train.numerics import resolve_device
from hotbed.train.retrieval import all_items, evaluate_found, item_features, model_schema, model_source, options_of

FEATURES = "features"
"""Part of checkpoints that says what is known of derived columns, and of vocabularies."""
_SPLITTING = ("valid_fraction", "test_fraction", "split", "split_paths")
"""Arguments of sources that say how data are cut into splits; new data are one."""


def evaluate_checkpoint(
    path: str | Path, split: str | None = None, data: str | None = None, *, trust_recipe: bool = False
) -> tuple[Directory, str, Metrics]:
    """Evaluate a checkpoint's model with the recipe that is stored in it."""
    checkpoint = find_checkpoint(path, best=True)
    manifest = read_manifest(checkpoint)
    recipe = recipe_of(manifest, str(checkpoint), trusted=trust_recipe, evaluates=True)
    component = _as_trained(recipe.data.source, manifest)
    if data is not None and split is None:
        component = uncut(component)
    source = new_source(replace(recipe.data, source=component, path=data or recipe.data.path))
    refuse_other_ids(manifest, source, str(data or recipe.data.path))
    take_features(source, manifest)
    whole = data is not None and split is None and len(source.splits) == 1
    split = source.splits[0] if whole else split or "test"
    check_split("--split", split, source)
    source.check_labels(split)
    device = resolve_device("auto")
    model = build_model(recipe, source, device)
    load_checkpoint(checkpoint, {"model": model})
    loader = Loader(source, split, recipe.train.eval_batch_size)
    place = "all" if whole else split
    if recipe.retrieval is not None:
        items = _items(recipe, manifest, source, data, item_features(model))
        found = evaluate_found(model, loader, items, options_of(recipe, model), device=device)
        return checkpoint, place, found
    options: dict[str, Any] = {"device": device, "group": source.schema.group, "labels": source.schema.labels}
    metrics = evaluate(model, loader, **options, metrics=metrics_of(recipe))
    return checkpoint, place, metrics


def _items(recipe: Recipe, manifest: Manifest, source: Source, data: str | None, item: Sequence[str]) -> ItemSet:
    """All items that a model may find: those that it was trained with, and those of other data to evaluate it on."""
    if data is None:
        return all_items(recipe, source, item)
    here = items_of(source, item, source.splits)
    try:
        trained = source
        if recipe.retrieval is None or recipe.retrieval.items is None:
            trained = new_source(replace(recipe.data, source=_as_trained(recipe.data.source, manifest)))
            take_features(trained, manifest)
        return merge_items([all_items(recipe, trained, item), here])
    except DataError as error:
        raise DataError(
            f"items are searched for among those of {data} and those that the model was trained with, which cannot be "
            f"read (in the folder {Path.cwd()}): {error}; put them there again"
        ) from None


def recipe_of(manifest: Manifest, place: str, *, trusted: bool, evaluates: bool = False) -> Recipe:
    """The recipe of a checkpoint, for one process; a `CheckpointError` if it holds none, see also `check_trust`.

    It names no class that only training needs (losses, callbacks), nor metrics unless it ``evaluates``.
    """
    if manifest.recipe is None:
        raise CheckpointError(
            f"{place} holds no recipe, so its model cannot be built; use load_checkpoint, or convert its tables to "
            "safetensors (hotbed checkpoint convert)"
        )
    recipe = replace(Recipe.from_dict(manifest.recipe), callbacks={})
    of_tasks = {label: TaskRecipe(metrics=task.metrics) for label, task in recipe.tasks.items()}
    recipe = replace(recipe, tasks=of_tasks) if evaluates else replace(recipe, tasks={}, metrics={})
    check_trust(recipe, place, trusted=trusted)
    return replace(recipe, parallel=ParallelRecipe())


def new_data(
    recipe: Recipe, manifest: Manifest, data: str | Path, prepared: str | None = None, missing: Sequence[str] = ()
) -> tuple[Source, tuple[str, ...]]:
    """Open data with the source of a checkpoint's recipe, without labels and uncut; and say what labels it has.

    Where that is a prepared dataset, data that are none are raw rows as ``hotbed prepare`` takes them. They are encoded
    by the vocabularies of the recipe's dataset, or of ``prepared``. Data may lack the columns ``missing``.
    """
    component = uncut(_as_trained(recipe.data.source, manifest))
    if _takes_raw_rows(component, manifest) and not _is_prepared(data):
        trained = _prepared(recipe, data, prepared)
        if trained.encoder is None or trained.encoder.preparation is None:
            raise DataError(
                f"{data} has raw rows, and the model's data, {prepared or recipe.data.path}, do not say how raw values "
                "became ids: another program prepared them. Prepare the log again with hotbed "
                "(hotbed prepare RAW OUT) and train with that, or predict of rows that are prepared as they "
                "were"
            )
        _refuse_unknown(trained, manifest)
        take_features(trained, manifest)
        text = trained.encoder.preparation.text
        encoder = trained.encoder.of(model_source(recipe, trained).schema.inputs)
        source = ParquetSource(data, encoder.schema, ids="raw", text=text, missing=missing, encoder=encoder)
        return source, labels_of(recipe, trained)
    if prepared is not None:
        raise RecipeError(f"--prepared is {prepared}, but {data} has no raw rows of prepared data; leave it out")
    given = dict(component.init_args)
    if missing:
        if not issubclass(component.load(), ParquetSource):
            raise RecipeError(
                f"--missing is {', '.join(missing)}, but the model was trained with a {component.load().__name__}, "
                "whose data always have all columns; leave it out"
            )
        given["missing"] = list(missing)
    if isinstance(given.get("schema"), Mapping):
        schema = Schema.from_dict(cast("Mapping[str, object]", given["schema"])).inputs
        given["schema"] = model_schema(recipe, schema).to_dict()
    source = build_component("data.source", replace(component, init_args=given), Source, data)
    take_features(source, manifest)
    return model_source(recipe, source), labels_of(recipe, source)


class _InputsOnly(Source):
    """The inputs of a checkpoint's model, without any samples."""

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
    """Return the inputs of a checkpoint's model; its training data are opened only if they alone describe them.

    The recipe of a table has its schema, and the checkpoint the rest. Other formats describe themselves, and prepared
    data have the vocabularies of their ids.
    """
    component, schema = recipe.data.source, recipe.data.source.init_args.get("schema")
    in_recipe = issubclass(component.load(), ParquetSource) and isinstance(schema, Mapping)
    if data is None and in_recipe and not _takes_raw_rows(component, manifest):
        of_table = Schema.from_dict(cast("Mapping[str, object]", schema))
        encoder = Encoder(of_table, ids=component.init_args.get("ids", "hash"))
        return _InputsOnly(encoder.with_kinds(id_kinds_of(manifest)))
    try:
        return new_source(replace(recipe.data, path=str(data or recipe.data.path)))
    except DataError as error:
        if data is not None:
            raise
        raise DataError(
            f"the inputs of this model are described by its training data, which cannot be read (in the folder "
            f"{Path.cwd()}): {error}; give a copy of the data with --data"
        ) from None


def _takes_raw_rows(component: Component, manifest: Manifest) -> bool:
    """Whether a model was trained on prepared data: others have no vocabularies that its checkpoint knows."""
    given = component.init_args
    is_parquet = issubclass(component.load(), ParquetSource) and given.get("ids") == "raw"
    derived = isinstance(schema := given.get("schema"), Mapping) and "features" in schema
    return issubclass(component.load(), SplitBinarySource) or (
        is_parquet and not derived and bool(manifest.parts.get(FEATURES))
    )


def _is_prepared(data: str | Path) -> bool:
    """Whether data are rows of a dataset that ``hotbed prepare`` made; their source says where it cannot read one."""
    place = location(str(data))
    if isinstance(place, Path) and not place.exists():
        raise DataError(f"{data} does not exist; give a log or Parquet of raw rows, or a dataset of hotbed prepare")
    if suffix(place) == ".yaml" or (suffix(place) == "" and is_storage(place) and directory(place).has(DESCRIPTION)):
        return True
    return (suffix(place) == ".parquet" or (isinstance(place, Path) and place.is_dir())) and is_prepared(data)


def _prepared(recipe: Recipe, data: str | Path, prepared: str | None) -> Source:
    """The dataset whose vocabularies encode raw rows."""
    try:
        return new_source(replace(recipe.data, path=prepared or recipe.data.path))
    except DataError as error:
        raise DataError(
            f"{data} has raw rows, which are encoded by the vocabularies of the data that the model was trained on, "
            f"and these cannot be read (in the folder {Path.cwd()}): {error}; name them with --prepared DATASET"
        ) from None


def _refuse_unknown(source: Source, manifest: Manifest) -> None:
    """Raise `DataError` if a checkpoint does not say that its model was trained with the vocabularies of its data."""
    if unknown_vocabularies(source, manifest) is not None:
        raise DataError(
            "the checkpoint does not say what values its rows stand for (its data did not "
            "say it), and its data now have vocabularies, which may be others; if they are not, go on with "
            "the run on these data (--resume RUN and a larger train.steps or train.epochs), which records them"
        )


def uncut(component: Component) -> Component:
    """Return a source without the rules that cut its data into splits."""
    if issubclass(component.load(), NpySource):  # it cuts them by default
        return replace(component, init_args={**component.init_args, "splits": "none"})
    return replace(component, init_args={k: v for k, v in component.init_args.items() if k not in _SPLITTING})


def _as_trained(component: Component, manifest: Manifest) -> Component:
    """A source for which ids are text where they were in training: files of CSV do not say what ``12`` is."""
    if not issubclass(component.load(), ParquetSource):
        return component
    text = {name for name, kind in id_kinds_of(manifest).items() if kind == "text"}
    text |= set(cast("Sequence[str]", component.init_args.get("text", ())))
    return replace(component, init_args={**component.init_args, "text": sorted(text)})


def labels_of(recipe: Recipe, source: Source) -> tuple[str, ...]:
    """The labels that a recipe's model was trained for; of one that finds items without any label, ``score``."""
    schema, labels = recipe.data.source.init_args.get("schema"), source.schema.labels
    if isinstance(schema, Mapping):
        labels = Schema.from_dict(cast("Mapping[str, object]", schema)).labels
    return labels if labels or recipe.retrieval is None else ("score",)


def refuse_other_ids(manifest: Manifest, source: Source, data: str) -> None:
    """Raise `DataError` if ids are stored otherwise than in training: they would be hashed to other rows."""
    before = id_kinds_of(manifest)
    for name, kind in source.id_kinds().items():
        trained = before.get(name, "")
        if trained not in ("", kind) and not source.is_missing(name):
            check_id_type(data, name, kind, trained)


def has_features(source: Source) -> bool:
    """Whether checkpoints must say what inputs are made by: derived columns, or the vocabularies of prepared data."""
    return bool(source.schema.derived) or (source.encoder is not None and source.encoder.preparation is not None)


class FeaturesState:
    """A part of checkpoints: the measured values of a source's derived columns.

    `take_features` compares tables of lookups, because its errors name the table.
    """

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def has_derived(self) -> bool:
        """Whether there are derived columns, which need the measured values."""
        return bool(self._source.schema.derived)

    def state_dict(self) -> dict[str, Any]:
        """See `Encoder.state`."""
        return {} if self._source.encoder is None else self._source.encoder.state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the measured values."""
        if self._source.encoder is not None:
            self._source.encoder.load_state(state, other_tables=True)


def take_features(source: Source, manifest: Manifest, *, other_tables: bool = False) -> None:
    """Let a source make derived columns as a checkpoint's model was trained with, see `Encoder.load_state`."""
    if source.encoder is not None:
        source.encoder.load_state(manifest.parts.get(FEATURES, {}), other_tables=other_tables)


def begin_with(source: Source, manifest: Manifest, taken: Sequence[Taken], rename: Mapping[str, str]) -> None:
    """Take over what a checkpoint knows of derived columns, for a new model, and compare vocabularies of tables taken.

    Parameters are those of `_refuse_other_vocabularies`.
    """
    take_features(source, manifest, other_tables=True)
    _refuse_other_vocabularies(source, manifest, taken, rename)


def go_on_with(source: Source, manifest: Manifest, data: str | Path, *, are_others: bool) -> None:
    """Compare data to train on with those that a checkpoint was trained on."""
    if not are_others:
        take_features(source, manifest)
        return
    refuse_other_ids(manifest, source, str(data))
    _refuse_other_vocabularies(source, manifest)


def _refuse_other_vocabularies(
    source: Source, manifest: Manifest, taken: Sequence[Taken] | None = None, rename: Mapping[str, str] | None = None
) -> None:
    """Raise `DataError` if rows of a checkpoint stand for other values now; vocabularies may have grown."""
    preparation = None if source.encoder is None else source.encoder.preparation
    if preparation is None:
        return
    known = cast("Mapping[str, Any]", manifest.parts.get(FEATURES, {}))
    was: dict[str, Any] = {}
    for name in preparation.state():
        earlier = next((old for new, old in (rename or {}).items() if _is_table(new, name)), name)
        found = next((table for table in known if _is_table(earlier, table)), None)
        is_taken = taken is None or any(of.what == "table" and of.taken and _is_table(of.name, name) for of in taken)
        if found is not None and is_taken:
            was[name] = known[found]
    preparation.refuse_other(was, may_grow=True)


def unknown_vocabularies(source: Source, manifest: Manifest) -> str | None:
    """Say that a checkpoint does not know the vocabularies of its data; None where it does, or data have none."""
    preparation = None if source.encoder is None else source.encoder.preparation
    if preparation is None or not preparation.unknown(cast("Mapping[str, Any]", manifest.parts.get(FEATURES, {}))):
        return None
    return (
        "it does not say what values its rows stand for (its data did not say it), "
        "so this cannot be compared, and the vocabularies of the data are taken for those of the rows"
    )


def _is_table(full: str, name: str) -> bool:
    """Whether a table that may be named with its collection is the one of this name."""
    return full == name or full.endswith(f".{name}")


def encoder_of(recipe: Recipe, source: Source, manifest: Manifest) -> Encoder:
    """What turns raw rows into inputs of a checkpoint's model; of the source only schema and looked-up tables count."""
    given = recipe.data.source.init_args
    ids = given.get("ids", "hash") if issubclass(recipe.data.source.load(), ParquetSource) else "raw"
    tables = None if source.encoder is None else source.encoder.tables
    preparation = None if source.encoder is None else source.encoder.preparation
    encoder = Encoder(
        source.schema.inputs, ids=ids, id_kinds=id_kinds_of(manifest), tables=tables, preparation=preparation
    )
    _refuse_unknown(source, manifest)
    encoder.load_state(manifest.parts.get(FEATURES, {}))
    return encoder


def id_kinds_of(manifest: Manifest) -> Mapping[str, str]:
    """By sparse column what ids were in training, see `Source.id_kinds`."""
    position = cast("Mapping[str, Any]", manifest.parts.get("position", {}))
    return position.get("id_kinds", {})


def bad_ids(model: nn.Module) -> dict[str, int]:
    """By feature, how many ids were out of range and dropped or hashed; several collections may look up the same."""
    counts: dict[str, int] = {}
    for module in model.modules():
        for feature, count in getattr(module, "bad_ids", {}).items():
            counts[feature] = max(counts.get(feature, 0), count)
    return counts
