"""From a recipe to a trained, tested model: what ``hotbed train``, ``eval`` and ``demo`` call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from hotbed.batch import Batch
from hotbed.checkpoint import Directory, find_checkpoint, load_checkpoint, read_manifest
from hotbed.config import Component, DataRecipe, ParallelRecipe, Recipe
from hotbed.data import Loader, Source
from hotbed.embed import Distributed, EmbeddingCollection, tables_on_meta
from hotbed.errors import CheckpointError, RecipeError, SpecError, did_you_mean
from hotbed.specs import Table
from hotbed.train.broadcast import BroadcastLoader
from hotbed.train.callbacks import Callback, EarlyStop, JsonLines, KeepBest, KeepLast, TensorBoard
from hotbed.train.metrics import Metrics, evaluate
from hotbed.train.parallel import Ranks, distributed, spread_batch
from hotbed.train.progress import ShowProgress
from hotbed.train.report import RunDirectory, environment
from hotbed.train.resume import refuse_another_recipe
from hotbed.train.trainer import Trainer, resolve_device


def train(
    recipe: Recipe,
    run: RunDirectory,
    console: Console,
    *,
    resume: Path | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train and test by a recipe, and write the run's directory.

    Parameters
    ----------
    recipe
        What to do.
    run
        Where to write.
    console
        Where progress goes.
    resume
        Checkpoint to go on from; with as many processes as before, what is trained then is bit for bit what the run
        that made it would have trained.
        A recipe that would train something else is refused (`refuse_another_recipe`).
        Early stopping counts anew.
    extra
        Further entries of the summary.

    Returns
    -------
    dict
        The summary, as in ``summary.json``.
    """
    source = open_source(recipe.data)
    trainer = build_trainer(recipe, source)
    ranks = trainer.ranks
    run.share(ranks)
    loader = _training_loader(recipe, source, ranks, trainer.model)
    if resume is not None:
        refuse_another_recipe(resume, recipe)
        load_checkpoint(resume, trainer.parts())
        trainer.resume_data(loader)
        if ranks.is_first:
            console.print(f"resumed from {resume} at step {trainer.step:,}")
    if ranks.is_first:
        run.begin(recipe, trainer.model.plan if isinstance(trainer.model, Distributed) else None)
    progress = ShowProgress(console) if ranks.is_first else Callback()
    trainer.callbacks += [*_callbacks(recipe, run, ranks), progress]
    try:
        trainer.fit(loader, _evaluation_loader(recipe, source, recipe.data.valid_split, ranks))
    finally:
        if isinstance(progress, ShowProgress):
            progress.close()
    test = _evaluation_loader(recipe, source, recipe.data.test_split, ranks)
    summary = {
        "name": recipe.name,
        "seed": recipe.train.seed,
        "steps": trainer.step,
        "epochs": trainer.epoch,
        "samples": trainer.samples,
        "samples_per_s": trainer.samples_per_s,
        "test": None if test is None else trainer.evaluate(test).to_dict(),
        "ids_out_of_range": ranks.add_counts(_own_bad_ids(trainer, recipe)),
        **_of_ranks(trainer),
        **environment(trainer.device),
        "run": str(run.path),
        **(extra or {}),
    }
    if ranks.is_first:
        run.finish(summary)
    return summary


def _of_ranks(trainer: Trainer) -> dict[str, Any]:
    """What a summary says of several ranks: how many, and how much of the exchange of ids the steps hid."""
    if trainer.ranks.size == 1:
        return {}
    return {
        "ranks": trainer.ranks.size,
        "ids_exchange_s": trainer.ahead.exchange_s,
        "ids_exchange_hidden_share": trainer.ahead.hidden_share,
    }


def evaluate_checkpoint(path: str | Path, split: str, data: str | None = None) -> tuple[Directory, Metrics]:
    """Evaluate a checkpoint's model with the recipe that is stored in it.

    Parameters
    ----------
    path
        The checkpoint, or a run's directory, whose newest checkpoint is taken.
    split
        Split of the data.
    data
        Path of other data; default: the recipe's.

    Returns
    -------
    tuple
        The checkpoint and its metrics.
    """
    checkpoint = find_checkpoint(path)
    stored = read_manifest(checkpoint).recipe
    if stored is None:
        raise CheckpointError(f"{checkpoint} holds no recipe, so its model cannot be built; use load_checkpoint")
    recipe = replace(Recipe.from_dict(stored), parallel=ParallelRecipe())  # this is one process
    source = open_source(replace(recipe.data, path=data or recipe.data.path, valid_split=None, test_split=None))
    _check_split("--split", split, source)
    device = resolve_device("auto")
    model = build_model(recipe, source, device)
    load_checkpoint(checkpoint, {"model": model})
    loader = Loader(source, split, recipe.train.eval_batch_size)
    metrics = evaluate(model, loader, device=device, group=source.schema.group, labels=source.schema.labels)
    return checkpoint, metrics


def open_source(data: DataRecipe) -> Source:
    """The recipe's data source; a `RecipeError` names a split that it lacks."""
    source = build("data.source", data.source, data.path)
    if not isinstance(source, Source):
        raise RecipeError(f"data.source is {data.source.class_path}, which is not a hotbed.data.Source")
    for key in ("train_split", "valid_split", "test_split"):
        split: str | None = getattr(data, key)
        if split is not None:
            _check_split(f"data.{key}", split, source)
    return source


def tables_of(source: Source, data: DataRecipe) -> list[Table]:
    """The source's tables, with rows stored as the recipe says; a `RecipeError` names a table that there is not."""
    tables = source.schema.tables(data.dim)
    known = [table.name for table in tables]
    for key, given in (("data.dtype", data.dtype), ("data.fp32_rows", data.fp32_rows)):
        for name in given if isinstance(given, dict) else ():
            if name not in known:
                raise RecipeError(f"{key} names table '{name}', which does not exist{did_you_mean(name, known)}")

    def stored(table: Table) -> Table:
        dtype = data.dtype.get(table.name, "fp32") if isinstance(data.dtype, dict) else data.dtype
        fp32_rows = data.fp32_rows.get(table.name, 0) if isinstance(data.fp32_rows, dict) else data.fp32_rows
        return replace(table, dtype=dtype, fp32_rows=min(fp32_rows, table.rows))

    return [stored(table) for table in tables]


def build_model(recipe: Recipe, source: Source, device: torch.device) -> nn.Module:
    """The recipe's model with the tables of a source, seeded; its parameters and tables are made on the device.

    Where several processes train, each makes only what it holds.
    """
    torch.manual_seed(recipe.train.seed)
    several = dist.is_available() and dist.is_initialized()
    with device, tables_on_meta() if several else nullcontext():
        model = new_model(recipe, source)
    if not isinstance(model, nn.Module):
        raise RecipeError(f"model is {recipe.model.class_path}, which is not a torch.nn.Module")
    model = distributed(model, recipe.parallel, device)
    if isinstance(model, Distributed):
        torch.manual_seed(recipe.train.seed + model.link.rank)  # what is drawn from now on is of a rank's own samples
        return model
    # A model of the user's may make some of its tensors on the CPU whatever the default device is.
    return model.to(device)


def new_model(recipe: Recipe, source: Source) -> Any:
    """What the recipe's model class makes, on torch's default device."""
    return build(
        "model",
        recipe.model,
        tables=tables_of(source, recipe.data),
        features=source.schema.features(recipe.data.on_bad_id),
        dense_features=len(source.schema.dense),
        seed=recipe.train.seed,
    )


def build_trainer(recipe: Recipe, source: Source) -> Trainer:
    """The recipe's model and optimizers, in a trainer without callbacks."""
    if not source.schema.labels:
        raise SpecError("the source's schema names no label, so there is nothing to train for; set schema.labels")
    model = build_model(recipe, source, resolve_device(recipe.train.device))
    dense = build("dense_optimizer", recipe.dense_optimizer, model.parameters())
    wide, rest = None, model
    if recipe.wide_optimizer is not None:
        collection = _wide_of(model, recipe)
        wide = build("wide_optimizer", recipe.wide_optimizer, collection)
        rest = _without(model, collection)
    sparse = build("sparse_optimizer", recipe.sparse_optimizer, rest)
    for key, optimizer in (("dense_optimizer", dense), ("sparse_optimizer", sparse), ("wide_optimizer", wide)):
        component: Component | None = getattr(recipe, key)
        if component is not None and not isinstance(optimizer, Optimizer):
            raise RecipeError(f"{key} is {component.class_path}, which is not a torch.optim.Optimizer")
    return Trainer(
        model,
        dense,
        sparse,
        wide=wide,
        recipe=recipe.train,
        schedule=recipe.schedule,
        group=source.schema.group,
        labels=source.schema.labels,
        overlap=recipe.parallel.overlap,
    )


def _wide_of(model: nn.Module, recipe: Recipe) -> EmbeddingCollection:
    wide = getattr(model, "wide", None)
    if not isinstance(wide, EmbeddingCollection):
        raise RecipeError(
            f"wide_optimizer is set, but {recipe.model.class_path} has no attribute `wide` that is an "
            f"EmbeddingCollection; leave wide_optimizer out, or use a model like hotbed.nn.WideDeep"
        )
    return wide


def _without(model: nn.Module, part: nn.Module) -> nn.Module:
    """The model's other parts, by the names that they have in the model."""
    rest = nn.Module()
    for name, child in (model.module if isinstance(model, Distributed) else model).named_children():
        if child is not part:
            rest.add_module(name, child)
    return rest


def build(key: str, component: Component, *args: Any, **given: Any) -> Any:
    """Make a component; errors say which of the recipe's it is."""
    try:
        return component.build(*args, **given)
    except RecipeError as error:
        raise RecipeError(f"{key}: {error}") from error


def bad_ids(model: nn.Module) -> dict[str, int]:
    """By feature, how many ids were out of range and dropped or hashed."""
    counts: dict[str, int] = {}
    for module in model.modules():
        for feature, count in getattr(module, "bad_ids", {}).items():
            counts[feature] = counts.get(feature, 0) + count
    return counts


def _own_bad_ids(trainer: Trainer, recipe: Recipe) -> dict[str, int]:
    """The same, of ids that no other rank counts: where owners read, all owners of a table read its ids."""
    counts = bad_ids(trainer.model)
    if recipe.parallel.reader != "owners" or not isinstance(trainer.model, Distributed):
        return counts
    first_owner = {table: tiles[0].owner for table, tiles in trainer.model.plan.by_table.items()}
    collections = (m for m in trainer.model.modules() if isinstance(m, EmbeddingCollection))
    own = {f.name for c in collections for f in c.features if first_owner[f.table] == trainer.ranks.rank}
    return {feature: count for feature, count in counts.items() if feature in own}


def _callbacks(recipe: Recipe, run: RunDirectory, ranks: Ranks) -> list[Callback]:
    train = recipe.train
    callbacks: list[Callback] = [JsonLines(run.path / "metrics.jsonl")] if ranks.is_first else []
    if train.tensorboard and ranks.is_first:
        callbacks.append(TensorBoard(run.path / "tensorboard"))
    if train.checkpoint == "last":
        callbacks.append(KeepLast(run.checkpoints, recipe, train.checkpoint_every))
    if train.checkpoint == "best":
        callbacks.append(KeepBest(run.checkpoints, recipe))
    if train.patience is not None:
        callbacks.append(EarlyStop(train.patience, train.monitor))
    return callbacks


def _training_loader(recipe: Recipe, source: Source, ranks: Ranks, model: nn.Module) -> Loader | BroadcastLoader:
    """Batches of this rank, as `ParallelRecipe.reader` says."""

    def loader(source: Source, rank: int, world_size: int, transform: Callable[[Batch], Batch] | None = None) -> Loader:
        return Loader(
            source,
            recipe.data.train_split,
            recipe.train.batch_size,
            shuffle=recipe.data.shuffle,
            seed=recipe.train.seed,
            window=recipe.data.window,
            workers=recipe.data.workers,
            prefetch=recipe.data.prefetch,
            transform=transform,
            rank=rank,
            world_size=world_size,
        )

    if recipe.parallel.reader == "first" and ranks.link is not None:
        return BroadcastLoader(loader(source, 0, 1) if ranks.is_first else None, ranks.link)
    if recipe.parallel.reader == "owners" and isinstance(model, Distributed):
        tables = {c.table_name for c in source.schema.sparse}
        if tables != set(model.plan.by_table):
            raise RecipeError(
                f"parallel.reader is 'owners', but the tables of {recipe.model.class_path} are not those of the data, "
                "once each; use 'each' or 'first'"
            )
        cut = [table for table, tiles in model.plan.by_table.items() if any(t.rows != tiles[0].rows for t in tiles)]
        copied = [table for table, tiles in model.plan.by_table.items() if any(t.readers for t in tiles)]
        for how, names in (("cut into rows", cut), ("copied", copied)):
            if names:
                raise RecipeError(
                    f"parallel.reader is 'owners', but parallel.plan {recipe.parallel.plan} has tables that are {how} "
                    f"({', '.join(names[:3])}{' …' * (len(names) > 3)}), whose owners need ids of other samples; "
                    "use 'each' or 'first', or plan 'table' or 'column'"
                )
        own = model.plan.tables_of(ranks.rank) or set(list(model.plan.by_table)[:1])
        features = [c.name for c in source.schema.sparse if c.table_name in own]
        return loader(source.only(features), 0, 1, lambda batch: spread_batch(batch, ranks.rank, ranks.size))
    return loader(source, ranks.rank, ranks.size)


def _evaluation_loader(recipe: Recipe, source: Source, split: str | None, ranks: Ranks) -> Loader | None:
    if split is None:
        return None
    return Loader(source, split, recipe.train.eval_batch_size, rank=ranks.rank, world_size=ranks.size)


def _check_split(key: str, split: str, source: Source) -> None:
    if split not in source.splits:
        raise RecipeError(
            f"{key} is '{split}', but the data has only {', '.join(source.splits)}{did_you_mean(split, source.splits)}"
        )
