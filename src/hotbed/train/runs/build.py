"""Build what a recipe names: its data source, model, losses, optimizers and trainer."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed.checks import check_known, naming
from hotbed.config import Component, DataRecipe, Recipe, TaskRecipe
from hotbed.config.validation import checkpoint_policy, patience
from hotbed.data import Source
from hotbed.data.skew.hot_cold import COLD, HOT
from hotbed.embed import Distributed, tables_on_meta
from hotbed.embed.dense_shards import is_sharded
from hotbed.errors import DataError, HotbedError, RecipeError, SpecError
from hotbed.nn.loss import SummedLoss, summed_cross_entropy
from hotbed.nn.normalization import normalize
from hotbed.optim import SparseOptimizer, TableSelection
from hotbed.specs import Table
from hotbed.torch_private import has_cuda_kernel
from hotbed.train.runs.hot_batches import HotSplit
from hotbed.train.runs.idle_settings import warn_of_idle_settings
from hotbed.train.metrics import metrics_of, refuse_monitor
from hotbed.train.numerics import resolve_device
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.parameter_groups import group_parameters, group_tables
from hotbed.train.prefetch import Divide, whole
from hotbed.train.runs.plan_search import distributed, needs_a_plan, refuse_impossible
from hotbed.train.retrieval import (
    Retrieval,
    build_loss,
    model_source,
    refuse_no_positive,
    refuse_retrieval,
    retrieval_of,
)
from hotbed.train.trainer import Trainer

_log = logging.getLogger("hotbed")
_TORCHS_TABLES = (nn.Embedding, nn.EmbeddingBag)
_FUSED: dict[str, list[type[Optimizer]]] = {
    "cpu": [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad],
    "cuda": [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD],
}
"""Optimizers that can update all parameters in one pass, by kind of device. SGD gains nothing by it on CPUs."""
if has_cuda_kernel("aten::_fused_adagrad_"):  # newer releases of torch
    _FUSED["cuda"].append(torch.optim.Adagrad)


def open_source(data: DataRecipe) -> Source:
    """The recipe's data source; a `RecipeError` names a split that it lacks."""
    source = new_source(data)
    for key in ("train_split", "valid_split", "test_split"):
        split: str | None = getattr(data, key)
        if split is not None:
            check_split(f"data.{key}", split, source)
    return source


def new_source(data: DataRecipe) -> Source:
    """What the recipe's source class makes of the path; its splits are not looked at."""
    return build_component("data.source", data.source, Source, data.path)


def tables_of(source: Source, data: DataRecipe) -> list[Table]:
    """The source's tables, with rows stored as the recipe says; a `RecipeError` names a table that there is not."""
    tables = source.schema.tables(data.dim)
    known = [table.name for table in tables]
    named: dict[str, Any] = {"data.dtype": data.dtype, "data.fp32_rows": data.fp32_rows, "data.frozen": data.frozen}
    named["data.dynamic"] = data.dynamic
    for key, given in named.items():
        for name in given if isinstance(given, dict | list) else ():
            check_known(f"table in {key}", name, known, RecipeError)

    def stored(table: Table) -> Table:
        dtype = data.dtype.get(table.name, "fp32") if isinstance(data.dtype, dict) else data.dtype
        fp32_rows = data.fp32_rows.get(table.name, 0) if isinstance(data.fp32_rows, dict) else data.fp32_rows
        frozen = table.name in data.frozen
        made = replace(table, dtype=dtype, fp32_rows=min(fp32_rows, table.rows), frozen=frozen)
        if (dynamic := data.dynamic.get(table.name)) is None:
            return made
        options: dict[str, Any] = {"rows": "dynamic", "dynamic": dynamic.spec()}
        return replace(made, **options, init_bound=dynamic.init_bound)

    return [stored(table) for table in tables]


def build_model(recipe: Recipe, source: Source, device: torch.device) -> nn.Module:
    """The recipe's model with the tables of a source, seeded; its parameters and tables are made on the device.

    Where several processes train, each makes only what it holds.
    """
    if not needs_a_plan(recipe):
        refuse_impossible(recipe, tables_of(source, recipe.data), device)
    model = distributed(_seeded(recipe, source, device, on_meta=needs_a_plan(recipe)), recipe, device, source)
    if not isinstance(model, Distributed):
        if needs_a_plan(recipe):  # by which all rows are in the memory of this one process's device
            model = _seeded(recipe, source, device, on_meta=False)
        # A model of the user's may make some of its tensors on the CPU whatever the default device is.
        model = model.to(device)
    # What is drawn from now on (dropout) is of a rank's own samples, and the same wherever rows are.
    rank = model.link.rank if isinstance(model, Distributed) else 0
    torch.manual_seed((recipe.train.seed + rank) % 2**64)
    return model


def _seeded(recipe: Recipe, source: Source, device: torch.device, *, on_meta: bool) -> nn.Module:
    torch.manual_seed(recipe.train.seed)
    with device, tables_on_meta() if on_meta else nullcontext():
        return new_model(recipe, source)


def new_model(recipe: Recipe, source: Source, tables: Sequence[Table] | None = None) -> nn.Module:
    """What the recipe's model class makes, on torch's default device; a `RecipeError` if that is no module.

    ``tables`` are others than the recipe's.
    """
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


def build(recipe: Recipe, source: Source | None = None) -> Trainer:
    """Build the recipe's model, optimizers and trainer, without callbacks; ``trainer.fit(batches)`` trains.

    Parameters
    ----------
    recipe
        A checked recipe.
    source
        The recipe's data, if it is open already.

    Raises
    ------
    HotbedError
        If the recipe, the data and the machine do not fit together, e.g. a label is out of range.
    """
    source = open_source(recipe.data) if source is None else source
    device = resolve_device(recipe.train.device)
    if recipe.retrieval is not None:
        refuse_retrieval(recipe, source)
    elif not source.schema.labels:
        raise SpecError("the source's schema names no label, so there is nothing to train for; set schema.labels")
    losses_of(recipe.tasks, source.schema.labels, device)  # before labels are read and tables made
    metrics_of(recipe)
    _check_labels(recipe, source)
    model = build_model(recipe, source, device)
    if Ranks(model).is_first:
        plan = model.plan if isinstance(model, Distributed) else None
        warn_of_idle_settings(recipe, plan, tables_of(source, recipe.data), device)
    return trainer_of(recipe, source, model)


def trainer_of(recipe: Recipe, source: Source, model: nn.Module) -> Trainer:
    """The recipe's optimizers for a model, in a trainer without callbacks."""
    optimizers, device = _optimizers(recipe, model), resolve_device(recipe.train.device)
    labels = source.schema.labels
    if recipe.retrieval is None:
        loss = losses_of(recipe.tasks, labels, device)
    else:
        loss = retrieval_of(recipe, source, model, device)
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
        divide=_divide(recipe, source, model),
    )
    trainer.id_kinds = source.id_kinds()
    if isinstance(loss, Retrieval):
        trainer.other_parts["retrieval"] = loss
    return trainer


def _check_labels(recipe: Recipe, source: Source) -> None:
    """Raise unless all labels are in range, those to train on of both classes, and the monitored metric is defined."""
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
    """The splits that are trained on."""
    train = recipe.data.train_split
    return [f"{train}_{kind}" for kind in (HOT, COLD)] if recipe.hot.batches == "alternating" else [train]


def refuse_one_class(source: Source, found: Sequence[Mapping[str, tuple[float, float]]]) -> None:
    """Raise `DataError` if all labels to train on are of one class; warn where this is so of some of several tasks.

    ``found`` has the smallest and the largest label by column, of each split that is trained on.
    """
    conditions = {label.column: label.positive for label in source.schema.positives}
    constant: list[str] = []
    for label in source.schema.labels:
        spans = [spans[label] for spans in found if label in spans]
        low, high = min((low for low, _ in spans), default=0), max((high for _, high in spans), default=1)
        if low == high and low in (0, 1):
            condition = f" (positive: '{conditions[label]}')" if label in conditions else ""
            constant.append(f"all labels '{label}'{condition} to train on are {low:g}")
    if constant and len(constant) == len(source.schema.labels):
        raise DataError(
            f"{'; '.join(constant)}: there is nothing to learn; say which values are positive in the schema's labels, "
            "or name another column"
        )
    for text in constant:
        _log.warning("%s: this task learns nothing but that", text)


def _divide(recipe: Recipe, source: Source, model: nn.Module) -> Divide:
    """How a step takes its batch: as `HotRecipe.batches` says."""
    if recipe.hot.batches != "split" or recipe.hot.rows is None:
        return whole
    return HotSplit.of_file(recipe.hot.rows, source.schema, Ranks(model).size)


def _optimizers(recipe: Recipe, model: nn.Module) -> dict[str, Optimizer]:
    """Make the optimizers ``dense``, ``sparse`` and those of the recipe's groups, by name."""
    for key, component in _dense_components(recipe).items():
        _refuse_unsuited(key, component)
    parameters = dict(model.named_parameters())
    of_dense, dense_groups = group_parameters(model, recipe)
    of_sparse, sparse_groups = group_tables(model, recipe)
    sparse_gradients = any(getattr(m, "sparse", False) for m in model.modules() if isinstance(m, _TORCHS_TABLES))

    def dense(key: str, component: Component, names: Sequence[str]) -> Optimizer:
        trained = [parameters[name] for name in names]
        # Torch's kernels take no sparse gradients, and leave momentum unwritten if the first scaled ones overflow.
        plain = sparse_gradients or recipe.train.precision == "fp16"
        return build_component(key, component if plain else fused(component, trained), Optimizer, trained)

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


def fused(component: Component, trained: Sequence[Tensor]) -> Component:
    """Let an optimizer of torch update all parameters in one pass, if the recipe leaves it open and torch can.

    On CUDA devices its step can then be told on the device to touch nothing, so no step waits for its loss
    (`hotbed.train.step`); on CPUs it reads and writes each value once. Parameters that FSDP has cut, and those that
    are no plain array (torch's kernels on CPUs take them for one), are left as they were.
    """
    given = component.init_args.keys() & {"fused", "foreach", "differentiable"}
    plain = all(p.is_floating_point() and p.is_contiguous() and not is_sharded(p) for p in trained)
    devices = {p.device.type for p in trained}
    if given or not plain or len(devices) != 1 or component.load() not in _FUSED.get(devices.pop(), ()):
        return component
    return replace(component, init_args={**component.init_args, "fused": True})


def build_component(key: str, component: Component, kind: type[Any], *args: Any, **given: Any) -> Any:
    """Make a component, which must be of a kind; errors say which of the recipe's it is."""
    with naming(key):
        if issubclass(component.load(), kind):
            return component.build(*args, **given)
    raise RecipeError(f"{key} is {component.class_path}, which is not a {_NAMES[kind]}")


_NAMES: dict[type[Any], str] = {
    Source: "hotbed.data.Source",
    nn.Module: "torch.nn.Module",
    Optimizer: "torch.optim.Optimizer",
    SparseOptimizer: "hotbed.optim.SparseOptimizer",
}


def _dense_components(recipe: Recipe) -> dict[str, Component]:
    """Optimizers of parameters, by their keys in the recipe."""
    groups = recipe.dense_optimizer_groups.items()
    return {
        "dense_optimizer": recipe.dense_optimizer,
        **{f"dense_optimizer_groups.{name}.optimizer": group.optimizer for name, group in groups},
    }


def _refuse_unsuited(key: str, component: Component) -> None:
    """Raise `RecipeError` for an optimizer of parameters that a step cannot use."""
    cls, name, lr = component.load(), component.class_path, component.init_args.get("lr", 0.0)
    if not issubclass(cls, Optimizer):
        return
    closure = signature(cls.step).parameters.get("closure")
    other = "use another, such as torch.optim.Adam"
    if issubclass(cls, SparseOptimizer):
        raise RecipeError(f"{key} is {name}, which trains tables; {other}")
    if not (isinstance(lr, Tensor | int | float) and abs(lr) <= torch.finfo(torch.float32).max):
        raise RecipeError(f"{key}.init_args.lr is {lr!r}, must be a finite number, also as a float32")
    if issubclass(cls, torch.optim.SparseAdam):
        needs = "sparse gradients, which dense parameters do not have; tables have a sparse_optimizer of their own"
        raise RecipeError(f"{key}: {name} needs {needs}; {other}")
    if closure is not None and closure.default is Parameter.empty:
        needs = "a closure that computes the loss again, which a step does once"
        raise RecipeError(f"{key}: {name} needs {needs}; {other}")


def check_split(key: str, split: str, source: Source) -> None:
    """Raise `RecipeError` if the data has no such split."""
    check_known(key, split, source.splits, RecipeError, "Give one of the data's splits, or other data.")
    if not source.samples(split):
        raise RecipeError(f"{key} is '{split}', but no sample of the data is in it; give other data, or another split")


# -- losses of tasks ---------------------------------------------------------------------------------------------------


class TaskLosses:
    """Σ over tasks of weight · Σ over samples of the task's loss.

    A task's loss sees logits and labels of one task and returns a value per sample. So a batch can be divided among
    ranks and micro-batches, and sample weights apply to any loss.
    """

    def __init__(self, losses: Sequence[nn.Module], weights: Sequence[float]) -> None:
        self._tasks = list(zip(losses, weights, strict=True))

    def __call__(self, logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The sum, of logits and labels ``[…, B, T]`` and sample weights ``[B, 1]`` or ``[B, T]``."""
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
        check_known("label in tasks", name, labels, RecipeError, "Or add it to the schema.")
    chosen = [tasks.get(label, TaskRecipe()) for label in labels]
    if all(task.is_default for task in chosen):
        return summed_cross_entropy
    if not any(task.weight for task in chosen):
        raise RecipeError("the weight of every task is 0, so there is nothing to train for; raise tasks.LABEL.weight")
    made = [_loss(f"tasks.{label}.loss", task.loss).to(device) for label, task in zip(labels, chosen, strict=True)]
    return TaskLosses(made, [task.weight for task in chosen])


def _loss(key: str, component: Component) -> nn.Module:
    """Make a loss and try it; a `RecipeError` says which of the recipe's it is."""
    name = component.class_path
    with naming(key), torch.device("cpu"):
        cls = component.load()
        given = _with_tensors(cls, component.init_args) if issubclass(cls, nn.Module) else component.init_args
    with torch.device("cpu"):
        loss = build_loss(key, Component(class_path=name, init_args=given), reduction="none")
    logits = torch.tensor([-2.0, 0.5, 3.0], device="cpu", requires_grad=True)
    labels = torch.tensor([0.0, 1.0, 1.0], device="cpu")
    try:
        found = loss(logits, labels)
    except HotbedError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(
            f"{key}: {name} refused logits [3] and labels [3]: {text}; a loss takes logits (not probabilities) and "
            "labels from 0 to 1, such as torch.nn.BCEWithLogitsLoss"
        ) from error
    if not isinstance(found, Tensor) or found.shape != labels.shape or not found.requires_grad:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise RecipeError(
            f"{key}: {name} gave {got} for logits [3] and labels [3], must give the loss of each sample [3] with "
            'reduction="none", with a gradient'
        )
    return loss


def _with_tensors(cls: type[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Make tensors of numbers and lists of them where a class says that it takes tensors, as torch's losses do."""
    kinds = {name: str(p.annotation) for name, p in signature(cls).parameters.items()}

    def is_tensor(name: str, value: object) -> bool:
        return "Tensor" in kinds.get(name, "") and isinstance(value, int | float | list) and not isinstance(value, bool)

    return {k: torch.as_tensor(v, dtype=torch.float32) if is_tensor(k, v) else v for k, v in arguments.items()}
