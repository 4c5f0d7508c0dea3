"""Evaluate predictions: AUC, log loss, normalized entropy, calibration, grouped AUC and metrics of the recipe.

Metrics are computed from logits. A float32 sigmoid of logits above 17 is exactly 1, which would create ties. Sums are
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, NoReturn, Self, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.auc import auc, check_labels, grouped_auc
from hotbed.batch import Batch
from hotbed.checks import naming
from hotbed.config import Component, Monitor, Recipe
from hotbed.data import Schema
from hotbed.embed import Distributed, EmbeddingCollection
from hotbed.embed.slices import Slicer, VirtualBatch
from hotbed.errors import BatchError, HotbedError, NonFiniteError, RecipeError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn.normalization import normalization_of
from hotbed.train.ranks.broadcast import SentBatch
from hotbed.train.ranks.parallel import Ranks, sum_virtual_ranks

Makers: TypeAlias = Mapping[str, Callable[[], Any]]
"""Factories of metrics by metric name; a factory returns a new metric without samples."""

RESERVED_NAMES = frozenset(
    {"samples", "auc", "logloss", "normalized_entropy", "calibration", "gauc", "groups", "groups_left_out", "tasks"}
    | {"undefined", "event", "step"}
)
"""A metric of a recipe must not have these names, because records of evaluations use them."""

_CURVES = ("auc", "logloss", "normalized_entropy", "calibration", "gauc")
_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")  # possible parameters of ``update`` for weights


@dataclass(frozen=True)
class TaskMetrics:
    """Factories of the recipe's metrics: ``shared`` for all tasks, and ``by_task`` for single tasks."""

    shared: Makers
    by_task: Mapping[str, Makers]

    def of(self, task: str) -> Makers:
        """Return the factories of a task's metrics; the task's factories override shared factories of the same name."""
        return {**self.shared, **self.by_task.get(task, {})}

    def key(self, task: str, name: str) -> str:
        """Return the recipe key that defines a task's metric."""
        return f"tasks.{task}.metrics.{name}" if name in self.by_task.get(task, {}) else f"metrics.{name}"


OwnMetrics: TypeAlias = Makers | TaskMetrics
"""Factories of metrics, for all tasks or by task."""


def metrics_of(recipe: Recipe) -> TaskMetrics:
    """Return the factories of a recipe's metrics; raise `RecipeError` like `recipe_metrics`."""
    by_task = {name: recipe_metrics(task.metrics, f"tasks.{name}.metrics") for name, task in recipe.tasks.items()}
    return TaskMetrics(recipe_metrics(recipe.metrics), by_task)


def recipe_metrics(components: Mapping[str, Component], key: str = "metrics") -> dict[str, Callable[[], Any]]:
    """Build each metric at ``key`` of a recipe, compute it for four samples, and return the factories of the metrics.

    A metric is a class of torchmetrics, torcheval or your own code, with the methods ``update(scores, labels)`` and
    ``compute()``. Scores are in [0, 1], scores and labels have the shape ``[n]``, and ``compute`` returns a number.
    hotbed gathers the scores of all ranks, so a metric needs no distributed code. Raise `RecipeError` for a metric
    without these methods, or if the metric fails.
    """
    found: dict[str, Callable[[], Any]] = {}
    for name, component in components.items():
        if name in RESERVED_NAMES:
            raise RecipeError(f"{key}: '{name}' is reserved for a value that every evaluation has. Rename the metric")
        with naming(f"{key}.{name}"):
            made = component.build()
        if not all(callable(getattr(made, method, None)) for method in ("update", "compute")):
            raise RecipeError(
                f"{key}.{name}: {component.class_path} lacks update(scores, labels) or compute(). Use a metric class "
                "with both methods, e.g. of torchmetrics or torcheval"
            )
        found[name] = component.build
        value_of(f"{key}.{name}", made, torch.tensor([0.1, 0.6, 0.8, 0.3]), torch.tensor([0.0, 1.0, 0.0, 1.0]), None)
    return found


def value_of(name: str, metric: Any, scores: Tensor, labels: Tensor, weights: Tensor | None) -> float:
    """Compute a metric for scores, labels and weights ``[n]``; raise `RecipeError` with ``name`` if it fails.

    Labels are passed as integers if all of them are 0 or 1.
    """
    targets = labels.long() if bool(((labels == 0) | (labels == 1)).all()) else labels
    metric_class, more = type(metric).__name__, {}
    if weights is not None:
        parameters = signature(metric.update).parameters
        parameter = next((p for p in _WEIGHTS if p in parameters), None)
        if parameter is None:
            raise RecipeError(
                f"{name}: samples have weights, but {metric_class}.update has no parameter for them, expected one of "
                f"{', '.join(_WEIGHTS)}. Remove the metric, or use a class with such a parameter, e.g. of torcheval"
            )
        more = {parameter: weights}
    try:
        metric.update(scores, targets, **more)
        return float(metric.compute())
    except HotbedError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(f"{name}: {metric_class} failed on scores and labels [{len(scores)}]: {text}") from error


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Metrics of one evaluation; undefined metrics are NaN.

    Attributes
    ----------
    samples
        Number of samples.
    auc
        Area under the ROC curve: the probability that a random positive has a higher score than a random negative, with
        ties counting half. AUC needs labels of both classes.
    logloss
        Mean binary cross-entropy in nats.
    normalized_entropy
        logloss ÷ entropy of the mean label (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook").
        A model that always predicts the mean label reaches 1.
    calibration
        Mean prediction ÷ mean label.
    gauc
        Mean AUC of the groups with both classes, weighted by their samples; None without a group column.
    groups, groups_left_out
        Number of groups with labels of both classes, and of groups with one class, which ``gauc`` excludes.
    tasks
        Metrics by label if there are several labels. The values above are then means over tasks.
    others
        Values of the recipe's metrics by name. With several labels, the means of those metrics that all labels have.
    undefined
        Reasons why metrics are undefined, by metric name.
    """

    samples: int
    auc: float
    logloss: float
    normalized_entropy: float
    calibration: float
    gauc: float | None = None
    groups: int | None = None
    groups_left_out: int | None = None
    tasks: dict[str, Metrics] = field(default_factory=dict)
    others: dict[str, float] = field(default_factory=dict)
    undefined: dict[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the metrics as plain values; undefined metrics are None."""
        values: dict[str, Any] = {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in {**vars(self), **self.others}.items()
            if name not in ("tasks", "others", "undefined") and (value is not None or name == "auc")
        }
        if self.undefined:
            values["undefined"] = self.undefined
        if self.tasks:
            values["tasks"] = {name: task.to_dict() for name, task in self.tasks.items()}
        return values

    def value(self, monitor: str) -> float:
        """Return the metric that ``monitor`` names, or NaN if it is undefined."""
        return getattr(self, monitor, math.nan)

    def curves(self, prefix: str) -> dict[str, float]:
        """Return the defined metrics by ``prefix/name`` and ``prefix/task/name``, as TensorBoard shows them."""
        found = {f"{prefix}/{name}": getattr(self, name) for name in _CURVES if getattr(self, name) is not None}
        found |= {f"{prefix}/{name}": value for name, value in self.others.items()}
        found = {name: value for name, value in found.items() if not math.isnan(value)}
        for name, task in self.tasks.items():
            found |= task.curves(f"{prefix}/{name}")
        return found


class Predictions:
    """Collect predictions batch by batch and compute their `Metrics`.

    A logit and a label (8 bytes together) are stored per sample and task, and also weights and groups if batches have
    them. 100 M samples of one task need 0.8 GB. Computing the AUC of these samples needs 10 GB more (97 bytes per
    sample, measured with 10 M samples).
    """

    def __init__(self, labels: Sequence[str] | None = None, metrics: OwnMetrics | None = None) -> None:
        self._names = labels
        self._own = metrics if isinstance(metrics, TaskMetrics) else TaskMetrics(metrics or {}, {})
        self._parts: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        self._sums: Tensor | None = None  # [4, T]: weighted sums of loss, prediction, label and 1

    def add(
        self, logits: Tensor, labels: Tensor, *, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> None:
        """Add a batch: logits and labels ``[B, T]``, sample weights ``[B]`` or ``[B, T]``, groups ``[B]``."""
        weight = torch.ones(len(logits), 1) if weights is None else weights if weights.dim() == 2 else weights[:, None]
        weight = weight.to(logits.device, torch.float64)
        wide, target = logits.double(), labels.double()
        loss = F.binary_cross_entropy_with_logits(wide, target, reduction="none")
        columns = torch.stack([loss, wide.sigmoid(), target, torch.ones_like(target)])
        sums = (columns * weight).sum(1)
        self._sums = sums if self._sums is None else self._sums + sums
        self._parts.append((logits.float(), labels.float(), weights, groups))

    @classmethod
    def gather(cls, own: Sequence[Self], ranks: Ranks) -> Self:
        """Gather the predictions of all virtual ranks on every rank; all ranks must call this.

        ``own`` has the predictions of this rank's virtual ranks, in order.
        """
        found = own[0]
        if ranks.link is None or found._sums is None:
            return found
        sums = torch.stack([of._sums for of in own if of._sums is not None])
        found._sums = sum_virtual_ranks(ranks.gather(sums))
        columns = [[t for t in column if t is not None] for column in zip(*(of._columns() for of in own), strict=True)]
        logits, labels, weights, groups = (
            ranks.gather(torch.cat(column).contiguous()) if column else None for column in columns
        )
        assert logits is not None
        assert labels is not None
        found._parts = [(logits, labels, weights, groups)]
        return found

    def _columns(self) -> list[Tensor | None]:
        tensors = [[t for t in column if t is not None] for column in zip(*self._parts, strict=True)]
        return [torch.cat(column) if column else None for column in tensors]

    def metrics(self) -> Metrics:
        """Return the metrics of all predictions."""
        if self._sums is None:
            raise BatchError("there is no sample to evaluate, because all batches are empty. Pass batches with samples")
        logits, labels, weights, groups = self._columns()
        assert logits is not None
        assert labels is not None
        if not bool(logits.isfinite().all()):
            sample, task = (~logits.isfinite()).nonzero()[0].tolist()
            raise NonFiniteError(
                f"evaluation: the logit of sample {sample:,}, task {task} is {float(logits[sample, task])}, expected a "
                "finite number. The model has diverged, or an input is not finite. Train with lower learning rates, or "
                "correct inputs that are not finite"
            )
        tasks: dict[str, Metrics] = {}
        for t, name in enumerate(self._names or map(str, range(logits.shape[1]))):
            weight = weights if weights is None or weights.dim() == 1 else weights[:, t]
            metrics = _metrics(logits[:, t], labels[:, t], weight, groups, self._sums[:, t].tolist())
            scores = logits[:, t].double().sigmoid().float().cpu()
            arguments = scores, labels[:, t].cpu(), None if weight is None else weight.cpu()
            own = {k: value_of(self._own.key(name, k), make(), *arguments) for k, make in self._own.of(name).items()}
            tasks[name] = replace(metrics, others=own)
        return next(iter(tasks.values())) if len(tasks) == 1 else _mean(tasks)


def _metrics(
    logits: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None, sums: Sequence[float]
) -> Metrics:
    """Compute the metrics of one task; ``sums``: weighted sums of losses, predictions and labels, sum of weights."""
    loss, predicted, positive, total = sums
    logloss, rate = _ratio(loss, total), _ratio(positive, total)
    entropy = -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate)) if 0 < rate < 1 else 0.0
    grouped = None if groups is None else grouped_auc(logits, labels, groups, weights)
    metrics = Metrics(
        samples=len(logits),
        auc=auc(logits, labels, weights),
        logloss=logloss,
        normalized_entropy=_ratio(logloss, entropy),
        calibration=_ratio(predicted, positive),
    )
    if grouped is not None:
        metrics = replace(metrics, gauc=grouped.value, groups=grouped.groups, groups_left_out=grouped.left_out)
    low, high = (0.0, 1.0) if not len(labels) else (float(labels.min()), float(labels.max()))
    reasons = dict[str, str]()
    for name in (name for name in _CURVES if math.isnan(getattr(metrics, name) or 0)):
        if not total:
            reasons[name] = f"the weights of all {metrics.samples:,} samples are 0"
        elif name == "gauc":
            reasons[name] = f"none of the {metrics.groups_left_out:,} groups has labels of both classes"
        elif low == high:
            reasons[name] = f"all {metrics.samples:,} labels are {low:g}"
        else:
            reasons[name] = "all samples of one class have weight 0"
    return replace(metrics, undefined=reasons)


def _mean(tasks: dict[str, Metrics]) -> Metrics:
    """Return the means of the metrics of several tasks."""
    first, count = next(iter(tasks.values())), len(tasks)
    shared = [name for name in first.others if all(name in task.others for task in tasks.values())]
    gaucs = [task.gauc for task in tasks.values() if task.gauc is not None]
    means: dict[str, Any] = {
        name: sum(float(getattr(task, name)) for task in tasks.values()) / count for name in _CURVES[:4]
    }
    undefined = dict[str, str]()
    for label, task in tasks.items():
        for name, reason in task.undefined.items():
            undefined.setdefault(name, f"label '{label}': {reason}")
    return Metrics(
        samples=first.samples,
        **means,
        gauc=sum(gaucs) / len(gaucs) if gaucs else None,
        tasks=tasks,
        others={name: sum(task.others[name] for task in tasks.values()) / count for name in shared},
        undefined=undefined,
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Inside the context, set a model to evaluation mode and disable gradients."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def evaluate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    device: torch.device | str = "cpu",
    group: str | None = None,
    labels: Sequence[str] | None = None,
    metrics: OwnMetrics | None = None,
    finished: Callable[[], None] = lambda: None,
) -> Metrics:
    """Evaluate a model in float32, even if it was trained in a different precision. All ranks must call this.

    Parameters
    ----------
    model
        Maps a `Batch` to logits ``[B, T]``.
    batches
        Batches with labels, and perhaps sample weights.
    device
        Device of the model.
    group
        Column of ``Batch.extra`` to group by for ``gauc``.
    labels
        Names of the tasks.
    metrics
        Factories of additional metrics by name; see `hotbed.train.metrics.recipe_metrics`.
    finished
        Called after each batch.

    Raises
    ------
    BatchError
        If there is no sample, or a batch has no labels or no group column.
    NonFiniteError
        If a logit is NaN or infinite.
    """
    refuse_unnormalized(model, batches)
    ranks = Ranks(model)
    slicer = slicer_of(model)
    predictions = [Predictions(labels, metrics) for _ in ranks.virtual.own]
    ranks.sync()
    with evaluating(model):
        for i, batch in enumerate(batches):
            if group is not None and group not in batch.extra:
                raise BatchError(
                    f"batch {i} lacks the group column '{group}': got {list(batch.extra) or 'no columns'} in "
                    "Batch.extra. Add the column, or evaluate without a group"
                )
            batch = move_batch(batch, model, device)
            with divide_batch(batch, slicer) as virtual:
                for own, of_rank in zip(virtual, predictions, strict=True):
                    logits, target = checked_logits(model(own), own.labels)
                    groups = None if group is None else own.extra[group]
                    of_rank.add(logits, target, weights=own.weights, groups=groups)
            finished()
    return Predictions.gather(predictions, ranks).metrics()


def slicer_of(model: nn.Module) -> Slicer | None:
    """Return the slicer of evaluations, or None if each process is one virtual rank."""
    return Slicer(cast("Distributed", model), is_random=False) if not Ranks(model).virtual.are_processes else None


@contextmanager
def divide_batch(batch: Batch, slicer: Slicer | None) -> Generator[VirtualBatch]:
    """Divide a batch into the virtual ranks of this process."""
    if slicer is None:
        yield VirtualBatch([batch])
    else:
        with slicer.divide(batch, last=False) as virtual:
            yield virtual


def refuse_unnormalized(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Raise `SpecError` if the source of ``batches`` yields raw numbers that the model does not normalize."""
    schema: object = getattr(getattr(batches, "source", None), "schema", None)
    found = normalization_of(model)
    if isinstance(schema, Schema) and schema.numericals and found is None:
        names = ", ".join(numerical.name for numerical in schema.numericals)
        raise SpecError(
            f"the source yields raw values of {names}, which {type(model).__name__} does not normalize. Call "
            "hotbed.nn.normalize(model, source.schema).normalization.measure(source) before training"
        )
    if found is not None:
        found.check_measured()


def move_batch(
    batch: Batch | SentBatch,
    model: nn.Module,
    device: torch.device | str,
    *,
    pad: Callable[[Jagged], Jagged] | None = None,
) -> Batch:
    """Check a batch and copy it to a device; ``pad`` pads its ids if all of them are valid.

    Checks run on the host, because checks on an accelerator would synchronize. Invalid ids are kept, because each
    collection repairs the ids of its own features in its forward pass. A `SentBatch` is not checked again, because the
    rank that read it has checked it.
    """
    if isinstance(batch, SentBatch):
        return batch.received(torch.device(device))
    if check_batch(batch, model) and pad is not None:
        batch = replace(batch, sparse=pad(batch.sparse))
    return batch.to(device, non_blocking=True)


def check_batch(batch: Batch, model: nn.Module) -> bool:
    """Check the labels and ids of a batch on the host; return whether all ids are valid."""
    if batch.labels is not None:
        check_labels(batch.labels)
    verified = [m.verify(batch.sparse) for m in model.modules() if isinstance(m, EmbeddingCollection)]
    return all(verified)


def checked_logits(logits: Tensor, labels: Tensor | None, *, training: bool = False) -> tuple[Tensor, Tensor]:
    """Return logits and labels; raise `BatchError` unless both are ``[B, T]``.

    In training, an ensemble of ``M`` models returns logits ``[M, B, T]``; the labels are then expanded to this shape.
    """
    if labels is None:
        raise BatchError("a batch has no labels. Set `labels` of the source's schema")
    members = len(logits) if training and logits.ndim == 3 else None
    if logits.shape != (labels.shape if members is None else (max(members, 1), *labels.shape)):
        raise BatchError(
            f"the model returned logits of shape {list(logits.shape)}, expected one per label {list(labels.shape)}, or "
            "for an ensemble in training one per member and label. Change the output of the model's forward"
        )
    return logits, labels if members is None else labels.expand_as(logits)


def refuse_monitor(monitor: Monitor, reason: str) -> NoReturn:
    """Raise `RecipeError` because ``monitor`` is undefined on the valid split; ``reason`` is part of the message."""
    fix = "Set train.monitor to logloss, or choose" if monitor == "auc" else "Choose"
    raise RecipeError(
        f"train.monitor is '{monitor}', which is undefined on the valid split: {reason}. {fix} a different "
        "data.valid_split"
    )
