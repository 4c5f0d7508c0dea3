"""Make what a recipe's section ``retrieval`` asks for, or say why it cannot be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import nn

from hotbed.config import Component, Recipe
from hotbed.data import Schema, Source
from hotbed.data.items import ItemSet, items_of
from hotbed.embed import Distributed
from hotbed.errors import DataError, RecipeError, did_you_mean
from hotbed.train.parallel import Ranks
from hotbed.train.retrieval import Options, Retrieval


def retrieval_of(recipe: Recipe, source: Source, model: nn.Module, device: torch.device) -> Retrieval:
    """Make the candidates and the loss of a recipe."""
    asked = recipe.retrieval
    assert asked is not None
    options = options_of(recipe, model)
    loss = _made("retrieval.loss", _with_temperature(asked.loss, model)).to(device)
    correction = None if asked.correction is None else _made("retrieval.correction", asked.correction).to(device)

    return Retrieval(options, loss, correction, lambda: all_items(recipe, source, options.item), Ranks(model))


def options_of(recipe: Recipe, model: nn.Module) -> Options:
    """Give what a recipe asks for, of a model of two towers."""
    asked = recipe.retrieval
    assert asked is not None
    return Options(
        item=item_features(model),
        sampled=asked.sampled,
        by_popularity=asked.sampled_by == "popularity",
        negatives=asked.negatives,
        seed=recipe.train.seed,
        k=asked.k,
    )


def all_items(recipe: Recipe, source: Source, item: Sequence[str]) -> ItemSet:
    """Collect all items that can be found: those of the recipe's Parquet of items, or of all splits of the data."""
    asked = recipe.retrieval
    if asked is None or asked.items is None:
        return items_of(source, item, source.splits, counted=recipe.data.train_split)
    of_items = source_of_items(recipe, source, asked.items, item)
    return items_of(of_items, item, of_items.splits)


def source_of_items(recipe: Recipe, source: Source, path: str, item: Sequence[str]) -> Source:
    """Open a Parquet of items, which is read as the samples are."""
    from hotbed.data import ParquetSource

    given = recipe.data.source
    if not issubclass(given.load(), ParquetSource):
        raise RecipeError(
            f"retrieval.items is {path}, which needs data of hotbed.data.ParquetSource, and data.source is "
            f"{given.class_path}; leave retrieval.items out, so that the items of the data's splits are taken"
        )
    schema = source.schema.inputs.only(item)
    schema = replace(schema, dense=(), scaling=(), numericals=())
    kept = {key: value for key, value in given.init_args.items() if key in ("ids", "text")}
    return ParquetSource(path, schema, **kept)


def refuse_retrieval(recipe: Recipe, source: Source) -> None:
    """Raise `RecipeError` if a recipe's other sections or its data do not go with ``retrieval``; before data are read.

    It is allowed to have no label, or one of which all are 1.
    """
    asked = recipe.retrieval
    assert asked is not None
    schema = source.schema
    if len(schema.labels) > 1:
        raise RecipeError(
            f"retrieval is set, and there are the labels {', '.join(schema.labels)}; leave one, which is 1 for the "
            "samples that an item is to be found for, or none if it is to be found for all"
        )
    sections = (("tasks", recipe.tasks, "a loss of its own"), ("metrics", recipe.metrics, "metrics of its own"))
    for section, given, has in sections:
        if given:
            raise RecipeError(f"{section} is set, but retrieval has {has}; leave {section} out")
    for key, value, may in (
        ("hot.batches", recipe.hot.batches, ("mixed",)),
        ("parallel.reader", recipe.parallel.reader, ("each", "first")),
    ):
        if value not in may:
            raise RecipeError(
                f"{key} is '{value}', but retrieval needs all samples of a batch with all of their columns at once; "
                "leave it out"
            )
    if asked.negatives is not None:
        _check_negatives(asked.negatives, recipe, source)


def refuse_no_positive(source: Source, found: Sequence[Mapping[str, tuple[float, float]]]) -> None:
    """Raise `DataError` if no label to train on is 1; ``found`` has the smallest and the largest by column."""
    for label in source.schema.labels:
        if found and max(spans.get(label, (0, 1))[1] for spans in found) < 1:
            raise DataError(
                f"no label '{label}' to train on is 1, so there is no sample to find an item for; say which "
                "values are positive in the schema's labels, or leave labels out if all samples are positive"
            )


def _check_negatives(negatives: str, recipe: Recipe, source: Source) -> None:
    columns = {column.name: column for column in source.schema.sparse}
    if negatives not in columns:
        raise RecipeError(
            f"retrieval.negatives is '{negatives}', which is no sparse column of the schema"
            f"{did_you_mean(negatives, columns)}; add it there, with the table of the item's column"
        )
    item = recipe.model.init_args.get("item", [None])[0]
    if item in columns and columns[negatives].table_name != columns[item].table_name:
        raise RecipeError(
            f"retrieval.negatives is '{negatives}', whose table is '{columns[negatives].table_name}', and that of the "
            f"item's column '{item}' is '{columns[item].table_name}', so its values are not items; give both one table"
        )


def model_source(recipe: Recipe, source: Source) -> Source:
    """Give a source without the column of negatives, which the model does not take."""
    schema = model_schema(recipe, source.schema)
    return source if schema is source.schema else source.only([column.name for column in schema.sparse])


def model_schema(recipe: Recipe, schema: Schema) -> Schema:
    """Give a schema without the column of negatives."""
    if recipe.retrieval is None or recipe.retrieval.negatives is None:
        return schema
    return schema.only([column.name for column in schema.sparse if column.name != recipe.retrieval.negatives])


def item_features(model: nn.Module) -> list[str]:
    """Give the features of the items' tower, first that of which item it is; a `RecipeError` if there is no tower."""
    inner = model.module if isinstance(model, Distributed) else model
    towers: Any = getattr(inner, "towers", None)
    known = signature(inner.forward).parameters
    if not isinstance(towers, dict) or not towers.get("item") or not {"vectors", "users"} <= known.keys():
        raise RecipeError(
            f"retrieval is set, but {type(inner).__name__} gives no vectors of users and items; use "
            "hotbed.nn.TwoTower, or a model with towers = {'user': […], 'item': […]} whose forward takes vectors= "
            "and users= as it does"
        )
    return list(towers["item"])


def _with_temperature(loss: Component, model: nn.Module) -> Component:
    """Give the loss the model's temperature, unless it has one of its own or takes none."""
    temperature = getattr(model, "temperature", None)
    try:
        takes = "temperature" in signature(loss.load()).parameters
    except RecipeError as error:
        raise RecipeError(f"retrieval.loss: {error}") from error
    if temperature is None or not takes or "temperature" in loss.init_args:
        return loss
    return replace(loss, init_args={**loss.init_args, "temperature": temperature})


def _made(key: str, component: Component) -> nn.Module:
    try:
        made: object = component.build()
    except RecipeError as error:
        raise RecipeError(f"{key}: {error}") from error
    if not isinstance(made, nn.Module):
        raise RecipeError(f"{key}: {component.class_path} is not a torch.nn.Module")
    if any(True for _ in made.parameters()):
        raise RecipeError(
            f"{key}: {component.class_path} has parameters, which no optimizer trains; make them part of the model"
        )
    return made
