"""Build the parts that a recipe names: data source, model, losses, optimizers and trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed.checks import check_known, naming
from hotbed.config import Component, DataRecipe, Recipe, TaskRecipe
from hotbed.config.validation import checkpoint_policy, patience
from hotbed.data import Source
from hotbed.data.skew.hot_cold import COLD, HOT, by_feature
from hotbed.embed import Distributed, tables_on_meta
from hotbed.embed.dense_parallel import is_sharded
from hotbed.errors import DataError, HotbedError, RecipeError, SpecError
from hotbed.nn.loss import SummedLoss, summed_cross_entropy
from hotbed.nn.normalization import normalize
from hotbed.optim import SparseOptimizer, TableSelection
from hotbed.specs import Table
from hotbed.torch_private import has_cuda_kernel
from hotbed.train.metrics import metrics_of, refuse_monitor
from hotbed.train.numerics import resolve_device
from hotbed.train.parameter_groups import group_parameters, group_tables
from hotbed.train.prefetch import Divide, whole
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.retrieval import (
    Retrieval,
    build_loss,
    build_retrieval,
    model_source,
    refuse_no_positive,
    refuse_retrieval,
)
from hotbed.train.runs.hot_batches import HotSplit
from hotbed.train.runs.idle_settings import idle_settings
from hotbed.train.runs.plan_search import distribute_model, needs_a_plan, read_hot_rows, refuse_impossible
from hotbed.train.trainer import Trainer

_log = logging.getLogger("hotbed")
_TORCHS_TABLES = (nn.Embedding, nn.EmbeddingBag)
_FUSED: dict[str, list[type[Optimizer]]] = {
    "cpu": [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad],
    "cuda": [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD],
}
"""Optimizers of torch that are faster with ``fused=True``, by device type."""
if has_cuda_kernel("aten::_fused_adagrad_"):  # depends on the torch version
    _FUSED["cuda"].append(torch.optim.Adagrad)


def open_source(data: DataRecipe) -> Source:
    """Open the recipe's data source and check its splits."""
    source = new_source(data)
    for key in ("train_split", "valid_split", "test_split"):
        split: str | None = getattr(data, key)
        if split is not None:
            check_split(f"data.{key}", split, source)
    return source


def new_source(data: DataRecipe) -> Source:
    """Open the recipe's data source without checking its splits."""
    return build_component("data.source", data.source, Source, data.path)


def tables_of(source: Source, data: DataRecipe) -> list[Table]:
    """Return the tables of a source with the dtypes and other options that the recipe's ``data`` sets for them."""
    tables = source.schema.tables(data.dim)
    known = [table.name for table in tables]
    for key in ("dtype", "fp32_rows", "frozen", "dynamic"):
        value: object = getattr(data, key)
        for name in value if isinstance(value, dict | list) else ():
            check_known(f"table in data.{key}", name, known, RecipeError)
    made: list[Table] = []
    for table in tables:
        dtype = data.dtype.get(table.name, "fp32") if isinstance(data.dtype, dict) else data.dtype
        fp32_rows = data.fp32_rows.get(table.name, 0) if isinstance(data.fp32_rows, dict) else data.fp32_rows
        options: dict[str, Any] = {"dtype": dtype, "fp32_rows": min(fp32_rows, table.rows)}
        if (dynamic := data.dynamic.get(table.name)) is not None:
            options |= {"rows": "dynamic", "dynamic": dynamic.spec(), "init_bound": dynamic.init_bound}
        made.append(replace(table, **options, frozen=table.name in data.frozen))
    return made


def build_model(
    recipe: Recipe, source: Source, device: torch.device, *, trained: bool = False, virtual_ranks: int | None = None
) -> nn.Module:
    """Seed torch and build the recipe's model on the device; each process allocates only the rows that it stores.

    ``virtual_ranks`` is the number of the checkpoint to resume. The recipe's number is for models that are ``trained``.
    """
    if not trained:
        recipe = replace(recipe, parallel=replace(recipe.parallel, virtual_ranks=None))

    def seeded(*, on_meta: bool) -> nn.Module:
        torch.manual_seed(recipe.train.seed)
        with device, tables_on_meta() if on_meta else nullcontext():
            return new_model(recipe, source)

    planned = needs_a_plan(recipe, virtual_ranks)
    if not planned:
        refuse_impossible(recipe, tables_of(source, recipe.data), device)
    model = distribute_model(seeded(on_meta=planned), recipe, device, source, virtual_ranks=virtual_ranks)
    if not isinstance(model, Distributed):
        if planned:  # the plan assigns all rows to this device
            model = seeded(on_meta=False)
        model = model.to(device)  # because a user's model may create tensors on the CPU
    # Later random numbers (e.g. of dropout) depend on the rank, which has its own samples, but not on the plan.
    rank = model.link.rank if isinstance(model, Distributed) else 0
    torch.manual_seed((recipe.train.seed + rank) % 2**64)
    return model


def new_model(recipe: Recipe, source: Source, tables: Sequence[Table] | None = None) -> nn.Module:
    """Build the recipe's model on torch's default device; ``tables`` replaces the tables of the source."""
    model = build_component(
        "model",
        recipe.model,
        nn.Module,
        tables=tables_of(source, recipe.data) if tables is None else tables,
        features=model_source(recipe, source).schema.features(recipe.data.on_bad_id),
        dense_features=source.schema.dense_features,
        seed=recipe.train.seed,
    )
    return normalize(model, source.schema)


def build(recipe: Recipe, source: Source | None = None, *, virtual_ranks: int | None = None) -> Trainer:
    """Build the recipe's model, optimizers and trainer, without callbacks; ``trainer.fit(batches)`` trains.

    Parameters
    ----------
    recipe
        Model, optimizers, data and so on.
    source
        Open data source of the recipe (default: this function opens it).
    virtual_ranks
        Number of virtual ranks of the checkpoint to resume, which the run keeps if it can.

    Raises
    ------
    HotbedError
        If recipe, data and machine do not fit together, e.g. a label is out of range.
    """
    source = open_source(recipe.data) if source is None else source
    device = resolve_device(recipe.train.device)
    if recipe.retrieval is not None:
        refuse_retrieval(recipe, source)
    elif not source.schema.labels:
        raise SpecError("the source's schema has no label to train on. Set `labels` of the schema")
    # Losses and metrics are built once here, to raise their errors before labels are read and tables are allocated.
    losses_of(recipe.tasks, source.schema.labels, device)
    metrics_of(recipe)
    _check_labels(recipe, source)
    model = build_model(recipe, source, device, trained=True, virtual_ranks=virtual_ranks)
    if Ranks(model).is_first:
        plan = model.plan if isinstance(model, Distributed) else None
        for message in idle_settings(recipe, plan, tables_of(source, recipe.data), device):
            _log.warning("%s", message)
    return build_trainer(recipe, source, model)


def build_trainer(recipe: Recipe, source: Source, model: nn.Module) -> Trainer:
    """Build the recipe's trainer for a model, without callbacks."""
    optimizers, device = _optimizers(recipe, model), resolve_device(recipe.train.device)
    labels, divide = source.schema.labels, cast("Divide", whole)
    if recipe.retrieval is None:
        loss = losses_of(recipe.tasks, labels, device)
    else:
        loss = build_retrieval(recipe, source, model, device)
    if recipe.hot.batches == "split" and recipe.hot.rows is not None:
        hot_rows = by_feature(source.schema, read_hot_rows(recipe.hot.rows, source.schema.rows))
        divide = HotSplit(hot_rows, Ranks(model).virtual.total)
    trainer = Trainer(
        model,
        optimizers.pop("dense"),
        optimizers.pop("sparse"),
        group_optimizers=optimizers,
        recipe=recipe.train,
        schedule=recipe.schedule,
        group=source.schema.group,
        labels=labels,
        metrics=metrics_of(recipe),
        loss=loss,
        overlap=recipe.parallel.overlap,
        divide=divide,
    )
    trainer.id_kinds = source.id_kinds()
    if isinstance(loss, Retrieval):
        trainer.other_parts["retrieval"] = loss
    return trainer


def _check_labels(recipe: Recipe, source: Source) -> None:
    """Raise an error if a label is out of range, all labels have one class, or the monitored metric is undefined."""
    data, train = recipe.data, recipe.train
    named = {*train_splits(recipe), data.valid_split, data.test_split}
    found = {split: source.check_labels(split) for split in source.splits if split in named}
    of_train = [found[split] for split in train_splits(recipe) if split in found]
    if recipe.retrieval is not None:
        refuse_no_positive(source, of_train)
        return
    refuse_one_class(source, of_train)
    if train.monitor == "auc" and (patience(recipe) is not None or checkpoint_policy(recipe) == "best"):
        for label, (low, high) in found.get(str(data.valid_split), {}).items():
            if low == high and low in (0, 1):
                refuse_monitor(train.monitor, f"all labels '{label}' are {low:g}")


def train_splits(recipe: Recipe) -> list[str]:
    """Return the names of the splits that the recipe trains on."""
    train = recipe.data.train_split
    return [f"{train}_{part}" for part in (HOT, COLD)] if recipe.hot.batches == "alternating" else [train]


def refuse_one_class(source: Source, found: Sequence[Mapping[str, tuple[float, float]]]) -> None:
    """Raise `DataError` if every label column has one class in training; warn if only some label columns have one.

    ``found`` has, for each training split, the minimum and maximum of each label column.
    """
    conditions = {label.column: label.positive for label in source.schema.positives}
    constant: list[str] = []
    for label in source.schema.labels:
        spans = [spans[label] for spans in found if label in spans]
        low, high = min((low for low, _ in spans), default=0), max((high for _, high in spans), default=1)
        if low == high and low in (0, 1):
            condition = f" (positive: '{conditions[label]}')" if label in conditions else ""
            constant.append(f"all labels '{label}'{condition} of training are {low:g}")
    if constant and len(constant) == len(source.schema.labels):
        raise DataError(
            f"{'; '.join(constant)}, expected both classes. Define the positive values in schema.labels, or use a "
            "different label column"
        )
    for text in constant:
        _log.warning("%s, so the task of this label can only learn this value", text)


def _optimizers(recipe: Recipe, model: nn.Module) -> dict[str, Optimizer]:
    """Build the optimizers; return them by name: ``dense``, ``sparse``, and the names of the recipe's groups."""
    _refuse_unsuited("dense_optimizer", recipe.dense_optimizer)
    for name, group in recipe.dense_optimizer_groups.items():
        _refuse_unsuited(f"dense_optimizer_groups.{name}.optimizer", group.optimizer)
    parameters = dict(model.named_parameters())
    of_dense, dense_groups = group_parameters(model, recipe)
    of_sparse, sparse_groups = group_tables(model, recipe)
    sparse_gradients = any(getattr(m, "sparse", False) for m in model.modules() if isinstance(m, _TORCHS_TABLES))

    def dense(key: str, component: Component, names: Sequence[str]) -> Optimizer:
        trained = [parameters[name] for name in names]
        # Fused kernels do not support sparse gradients. If the first scaled gradients of fp16 overflow, fused kernels
        # leave the momentum unwritten.
        plain = sparse_gradients or recipe.train.precision == "fp16"
        return build_component(key, component if plain else fuse_optimizer(component, trained), Optimizer, trained)

    def sparse(key: str, component: Component, tables: Sequence[str]) -> Optimizer:
        return build_component(key, component, SparseOptimizer, TableSelection(model, tables))

    made = {
        "dense": dense("dense_optimizer", recipe.dense_optimizer, of_dense),
        "sparse": sparse("sparse_optimizer", recipe.sparse_optimizer, of_sparse)
        if sparse_groups
        else build_component("sparse_optimizer", recipe.sparse_optimizer, Optimizer, model),
    }
    for name, names in dense_groups.items():
        key = f"dense_optimizer_groups.{name}.optimizer"
        made[name] = dense(key, recipe.dense_optimizer_groups[name].optimizer, names)
    for name, tables in sparse_groups.items():
        key = f"sparse_optimizer_groups.{name}.optimizer"
        made[name] = sparse(key, recipe.sparse_optimizer_groups[name].optimizer, tables)
    return made


def fuse_optimizer(component: Component, trained: Sequence[Tensor]) -> Component:
    """Return an optimizer of torch with ``fused`` set, if fused kernels support the parameters.

    If the recipe sets ``fused``, ``foreach`` or ``differentiable``, the optimizer is not changed.

    On CUDA devices, a fused optimizer can skip a step on the device, so the host need not wait for the loss
    (`hotbed.train.step`). On CPUs, a fused optimizer reads and writes each value only once.
    """
    given = component.init_args.keys() & {"fused", "foreach", "differentiable"}
    # Fused kernels do not support FSDP's shards and parameters that are not contiguous.
    plain = all(p.is_floating_point() and p.is_contiguous() and not is_sharded(p) for p in trained)
    devices = {p.device.type for p in trained}
    if given or not plain or len(devices) != 1 or component.load() not in _FUSED.get(devices.pop(), ()):
        return component
    return replace(component, init_args={**component.init_args, "fused": True})


def build_component(key: str, component: Component, base: type[Any], *args: Any, **options: Any) -> Any:
    """Build the component at ``key`` of a recipe; raise `RecipeError` unless its class is a subclass of ``base``."""
    with naming(key):
        if issubclass(component.load(), base):
            return component.build(*args, **options)
    raise RecipeError(f"{key} is {component.class_path}, expected a {_NAMES[base]}")


_NAMES: dict[type[Any], str] = {
    Source: "hotbed.data.Source",
    nn.Module: "torch.nn.Module",
    Optimizer: "torch.optim.Optimizer",
    SparseOptimizer: "hotbed.optim.SparseOptimizer",
}


def _refuse_unsuited(key: str, component: Component) -> None:
    """Raise `RecipeError` for an optimizer that cannot train dense parameters."""
    cls, name, lr = component.load(), component.class_path, component.init_args.get("lr", 0.0)
    if not issubclass(cls, Optimizer):
        return
    closure = signature(cls.step).parameters.get("closure")
    if not (isinstance(lr, Tensor | int | float) and abs(lr) <= torch.finfo(torch.float32).max):
        raise RecipeError(f"{key}.init_args.lr: got {lr!r}, expected a finite float32")
    reason = None
    if issubclass(cls, SparseOptimizer):
        reason = "trains tables"
    elif issubclass(cls, torch.optim.SparseAdam):
        reason = "needs sparse gradients, but dense parameters have none"
    elif closure is not None and closure.default is Parameter.empty:
        reason = "needs a closure that computes the loss again"
    if reason is not None:
        raise RecipeError(f"{key}: {name} {reason}. Use a different optimizer, e.g. torch.optim.Adam")


def check_split(key: str, split: str, source: Source) -> None:
    """Raise `RecipeError` if the data has no samples of a split."""
    check_known(key, split, source.splits, RecipeError, "Choose a split of the data, or use different data.")
    if not source.samples(split):
        raise RecipeError(f"{key} is '{split}', which has no samples. Choose a different split or different data")


# -- losses of tasks ---------------------------------------------------------------------------------------------------


class TaskLosses:
    """Sum the losses of all tasks: Σ over tasks (task weight · Σ over samples (sample weight · loss)).

    A task's loss returns a value per sample. So batches can be divided, and any loss can have sample weights.
    """

    def __init__(self, losses: Sequence[nn.Module], weights: Sequence[float]) -> None:
        self._tasks = list(zip(losses, weights, strict=True))

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Return the sum (0-d) for logits and labels ``[…, B, T]`` and sample weights ``[B, 1]`` or ``[B, T]``."""
        weights = None if weights is None else weights.expand_as(labels)
        sums: list[Tensor] = []
        for task, (loss, factor) in enumerate(self._tasks):
            found = loss(logits[..., task].reshape(-1), labels[..., task].reshape(-1))
            own = found if weights is None else found * weights[..., task].reshape(-1)
            sums.append(own.sum() * factor)
        return torch.stack(sums).sum()


def losses_of(tasks: Mapping[str, TaskRecipe], labels: Sequence[str], device: torch.device) -> SummedLoss:
    """Build the loss of a recipe's tasks; the default is binary cross-entropy."""
    for name in tasks:
        check_known("label in tasks", name, labels, RecipeError, "Or add this label to schema.labels.")
    chosen = [tasks.get(label, TaskRecipe()) for label in labels]
    if all(task.is_default for task in chosen):
        return summed_cross_entropy
    if not any(task.weight for task in chosen):
        raise RecipeError("tasks: the weights of all tasks are 0. Set tasks.LABEL.weight of at least one label above 0")
    made = [_loss(f"tasks.{label}.loss", task.loss).to(device) for label, task in zip(labels, chosen, strict=True)]
    return TaskLosses(made, [task.weight for task in chosen])


def _loss(key: str, component: Component) -> nn.Module:
    """Build the loss at ``key`` of a recipe; raise `RecipeError` unless it returns a loss for each of three samples."""
    name = component.class_path
    with torch.device("cpu"):
        with naming(key):
            cls, options = component.load(), dict(component.init_args)
        # Some arguments of torch's losses are tensors, which are numbers or lists in recipes.
        if issubclass(cls, nn.Module):
            for argument, parameter in signature(cls).parameters.items():
                value = options.get(argument)
                is_number = isinstance(value, int | float | list) and not isinstance(value, bool)
                if is_number and "Tensor" in str(parameter.annotation):
                    options[argument] = torch.as_tensor(value, dtype=torch.float32)
        loss = build_loss(key, Component(class_path=name, init_args=options), reduction="none")
    logits = torch.tensor([-2.0, 0.5, 3.0], device="cpu", requires_grad=True)
    labels = torch.tensor([0.0, 1.0, 1.0], device="cpu")
    try:
        found = loss(logits, labels)
    except HotbedError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(
            f"{key}: {name} failed on logits [3] and labels [3]: {text}. Use a loss of logits (not probabilities) and "
            "labels in [0, 1], e.g. torch.nn.BCEWithLogitsLoss"
        ) from error
    if not isinstance(found, Tensor) or found.shape != labels.shape or not found.requires_grad:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise RecipeError(
            f'{key}: {name} with reduction="none" returned {got} for logits [3] and labels [3], expected losses [3] '
            "that have a gradient. Use a loss that returns one value per sample"
        )
    return loss
