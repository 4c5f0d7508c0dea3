"""Evaluate predictions: AUC, logloss, normalized entropy, calibration and grouped AUC.

Everything is computed from logits, not from probabilities: a float32 sigmoid is exactly 1 from 17 on, which would make
ties that the model did not make. Sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from inspect import signature
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.auc import auc, check_labels, grouped_auc
from hotbed.batch import Batch
from hotbed.checks import naming
from hotbed.config import Component, Monitor, Recipe
from hotbed.data import Schema
from hotbed.embed import EmbeddingCollection
from hotbed.errors import BatchError, HotbedError, NonFiniteError, RecipeError, SpecError
from hotbed.nn.normalization import normalization_of
from hotbed.train.ranks.broadcast import SentBatch
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.size_classes import SizeClasses

Makers: TypeAlias = Mapping[str, Callable[[], Any]]
"""By name, what makes a metric."""


@dataclass(frozen=True)
class TaskMetrics:
    """Metrics of all tasks, and those that some have besides or in their place."""

    of_all: Makers  # those of all tasks
    of_tasks: Mapping[str, Makers]  # by task, those that it alone has

    def of(self, task: str) -> Makers:
        """All that are computed for a task."""
        return {**self.of_all, **self.of_tasks.get(task, {})}

    def key(self, task: str, name: str) -> str:
        """Where a recipe has a metric of a task."""
        return f"tasks.{task}.metrics.{name}" if name in self.of_tasks.get(task, {}) else f"metrics.{name}"


OwnMetrics: TypeAlias = Makers | TaskMetrics
"""What makes metrics: of all tasks alike, or of each."""

OWN_NAMES = frozenset(
    {"samples", "auc", "logloss", "normalized_entropy", "calibration", "gauc", "groups", "groups_left_out", "tasks"}
    | {"undefined", "event", "step"}
)
"""Names that records of evaluations have already."""

_WEIGHTS = ("weight", "weights", "sample_weight", "sample_weights")


def metrics_of(recipe: Recipe) -> OwnMetrics:
    """What makes the metrics of a recipe and of its tasks, each tried once; see `own_metrics` for the errors."""
    of_tasks = {
        label: own_metrics(task.metrics, f"tasks.{label}.metrics")
        for label, task in recipe.tasks.items()
        if task.metrics
    }
    of_all = own_metrics(recipe.metrics)
    return TaskMetrics(of_all, of_tasks) if of_tasks else of_all


def own_metrics(components: Mapping[str, Component], key: str = "metrics") -> dict[str, Callable[[], Any]]:
    """What makes the metrics that are at a key of a recipe, each tried once.

    A metric is a class of torchmetrics, torcheval or one's own. It has ``update(scores, labels)``, which takes scores
    from 0 to 1 and labels of samples ``[n]``, and ``compute()``, which gives a number. hotbed gathers what all ranks
    have scored, so none needs to know of ranks.
    """
    found: dict[str, Callable[[], Any]] = {}
    for name, component in components.items():
        if name in OWN_NAMES:
            raise RecipeError(f"{key} has '{name}', which every evaluation has already; give the metric another name")
        with naming(f"{key}.{name}"):
            made = component.build()
        if not all(callable(getattr(made, method, None)) for method in ("update", "compute")):
            raise RecipeError(f"{key}.{name}: {component.class_path} has no update(scores, labels) and compute()")
        found[name] = partial(component.build)
        value_of(f"{key}.{name}", made, torch.tensor([0.1, 0.6, 0.8, 0.3]), torch.tensor([0.0, 1.0, 0.0, 1.0]), None)
    return found


def value_of(name: str, metric: Any, scores: Tensor, labels: Tensor, weights: Tensor | None) -> float:
    """A metric of scores, labels and weights ``[n]``; labels that are all 0 or 1 are given as integers."""
    given = labels.long() if bool(((labels == 0) | (labels == 1)).all()) else labels
    kind, more = type(metric).__name__, {}
    if weights is not None:
        known = signature(metric.update).parameters
        place = next((key for key in _WEIGHTS if key in known), None)
        if place is None:
            raise RecipeError(
                f"{name}: samples have weights, which {kind}.update does not take ({', '.join(_WEIGHTS)}); "
                "leave the metric out, or use one of torcheval or your own"
            )
        more = {place: weights}
    try:
        metric.update(scores, given, **more)
        return float(metric.compute())
    except HotbedError:
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RecipeError(f"{name}: {kind} failed on scores and labels [{len(scores)}]: {text}") from error


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The metrics of one evaluation; NaN where one is not defined.

    Attributes
    ----------
    samples
        Number of samples.
    auc
        Area under the ROC curve: the chance that a random positive is scored above a random negative, ties counting
        half. Not defined without both classes.
    logloss
        Mean binary cross-entropy in nats.
    normalized_entropy
        logloss ÷ entropy of the base rate (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook");
        1 is what a constant prediction reaches.
    calibration
        Mean prediction ÷ mean label.
    gauc
        Mean AUC of the groups that have both classes, weighted by their samples; None without a group column.
    groups, groups_left_out
        Groups with both classes, and groups with one class, which ``gauc`` leaves out.
    tasks
        Metrics by label where there are several; the values above are then their means.
    others
        Values of the recipe's own metrics, by their names; of several labels the means of those that all have.
    undefined
        Why a metric is not defined, by its name.
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
        """The defined and requested metrics as plain values; what is not defined is None."""
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
        """Give a metric that can be monitored; NaN where it is not defined."""
        return getattr(self, monitor, math.nan)

    def curves(self, place: str) -> dict[str, float]:
        """Defined metrics by ``place/name``, and those of each task by ``place/task/name``, as trackers show them."""
        names = ("auc", "logloss", "normalized_entropy", "calibration", "gauc")
        found = {f"{place}/{name}": getattr(self, name) for name in names}
        found |= {f"{place}/{name}": value for name, value in self.others.items()}
        of_tasks = {k: v for name, task in self.tasks.items() for k, v in task.curves(f"{place}/{name}").items()}
        return {k: v for k, v in found.items() if v is not None and not math.isnan(v)} | of_tasks


class Predictions:
    """Collects predictions batch by batch, then gives their `Metrics`.

    Kept per sample and task: logit and label (8 bytes), and weight and group where there are any. Everything else is
    summed as it comes. 100 M samples of one task take 0.8 GB, and 10 GB more for the AUC (97 bytes per sample, measured
    on 10 M).
    """

    def __init__(self, labels: Sequence[str] | None = None, metrics: OwnMetrics | None = None) -> None:
        self._names = labels
        self._own = metrics if isinstance(metrics, TaskMetrics) else TaskMetrics(metrics or {}, {})
        self._parts: list[tuple[Tensor, Tensor, Tensor | None, Tensor | None]] = []
        self._sums: Tensor | None = None

    def add(
        self, logits: Tensor, labels: Tensor, *, weights: Tensor | None = None, groups: Tensor | None = None
    ) -> None:
        """Add a batch: logits and labels ``[B, T]``, sample weights ``[B]`` or ``[B, T]``, groups ``[B]``."""
        weight = torch.ones(len(logits), 1) if weights is None else weights if weights.dim() == 2 else weights[:, None]
        weight = weight.to(logits.device, torch.float64)
        wide, target = logits.double(), labels.double()
        loss = F.binary_cross_entropy_with_logits(wide, target, reduction="none")
        columns = torch.stack([loss, wide.sigmoid(), target, torch.ones_like(target)])
        sums = (columns * weight).sum(1)  # [4, T]
        self._sums = sums if self._sums is None else self._sums + sums
        self._parts.append((logits.float(), labels.float(), weights, groups))

    def gather(self, ranks: Ranks) -> None:
        """Add what the other ranks have; all of them must call this, and end with the same."""
        if ranks.link is None or self._sums is None:
            return
        columns = [_cat([p[i] for p in self._parts]) for i in range(4)]
        self._sums = ranks.gather(self._sums[None].contiguous()).sum(0)
        logits, labels, weights, groups = (None if c is None else ranks.gather(c.contiguous()) for c in columns)
        assert logits is not None
        assert labels is not None
        self._parts = [(logits, labels, weights, groups)]

    def metrics(self) -> Metrics:
        """Metrics of everything that was added."""
        if self._sums is None:
            raise BatchError("there is no sample to evaluate; the batches are empty")
        logits = torch.cat([p[0] for p in self._parts])
        labels = torch.cat([p[1] for p in self._parts])
        if not bool(logits.isfinite().all()):
            sample, task = (~logits.isfinite()).nonzero()[0].tolist()
            raise NonFiniteError(
                f"evaluation: the logit of sample {sample:,}, task {task} is {float(logits[sample, task])}; "
                f"the model has diverged or an input is not finite"
            )
        weights = _cat([p[2] for p in self._parts])
        groups = _cat([p[3] for p in self._parts])
        names = self._names or [str(t) for t in range(logits.shape[1])]
        tasks = [
            _metrics(logits[:, t], labels[:, t], _of_task(weights, t), groups, self._sums[:, t].tolist())
            for t in range(logits.shape[1])
        ]
        tasks = [
            replace(task, others=_others(self._own, name, logits[:, t], labels[:, t], _of_task(weights, t)))
            for t, (name, task) in enumerate(zip(names, tasks, strict=True))
        ]
        return tasks[0] if len(tasks) == 1 else _mean(dict(zip(names, tasks, strict=True)))


def _others(own: TaskMetrics, task: str, logits: Tensor, labels: Tensor, weights: Tensor | None) -> dict[str, float]:
    """The recipe's own metrics of a task, on the CPU."""
    scores, labels = logits.double().sigmoid().float().cpu(), labels.cpu()
    weights = None if weights is None else weights.cpu()
    return {name: value_of(own.key(task, name), make(), scores, labels, weights) for name, make in own.of(task).items()}


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [p for p in parts if p is not None]
    return torch.cat(tensors) if tensors else None


def _of_task(weights: Tensor | None, task: int) -> Tensor | None:
    return weights if weights is None or weights.dim() == 1 else weights[:, task]


def _metrics(
    logits: Tensor, labels: Tensor, weights: Tensor | None, groups: Tensor | None, sums: Sequence[float]
) -> Metrics:
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
        gauc=None if grouped is None else grouped.value,
        groups=None if grouped is None else grouped.groups,
        groups_left_out=None if grouped is None else grouped.left_out,
    )
    undefined = [name for name, value in vars(metrics).items() if isinstance(value, float) and math.isnan(value)]
    return replace(metrics, undefined={name: _reason(name, metrics, labels, total) for name in undefined})


def _reason(name: str, metrics: Metrics, labels: Tensor, total: float) -> str:
    """Why a metric is not defined."""
    if not total:
        return f"the weights of all {metrics.samples:,} samples are 0"
    if name == "gauc":
        return f"none of the {metrics.groups_left_out:,} groups has labels of both classes"
    low, high = float(labels.min()), float(labels.max())
    if low == high:
        return f"all {metrics.samples:,} labels are {low:g}"
    return "all samples of one class have weight 0"


def _mean(tasks: dict[str, Metrics]) -> Metrics:
    first = next(iter(tasks.values()))
    of_all = [name for name in first.others if all(name in task.others for task in tasks.values())]
    gaucs = [task.gauc for task in tasks.values() if task.gauc is not None]

    def mean(name: str) -> float:
        return sum(float(getattr(task, name)) for task in tasks.values()) / len(tasks)

    return Metrics(
        samples=first.samples,
        auc=mean("auc"),
        logloss=mean("logloss"),
        normalized_entropy=mean("normalized_entropy"),
        calibration=mean("calibration"),
        gauc=sum(gaucs) / len(gaucs) if gaucs else None,
        tasks=tasks,
        others={name: sum(task.others[name] for task in tasks.values()) / len(tasks) for name in of_all},
        undefined={
            metric: f"label '{name}': {reason}"
            for name, task in reversed(tasks.items())  # of several the first
            for metric, reason in task.undefined.items()
        },
    )


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.nan


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Put a model into evaluation inside, without gradients."""
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
    """Metrics of a model over batches, in float32 whatever precision it is trained in; nothing is updated.

    Parameters
    ----------
    model
        Maps a `Batch` to logits ``[B, T]``.
    batches
        Batches with labels; sample weights count where there are any.
    device
        Where the model is.
    group
        Name of the column in ``Batch.extra`` to group by for ``gauc``.
    labels
        Names of the tasks.
    metrics
        By name, what makes a metric to be computed, too; see `hotbed.train.metrics.own_metrics`.
    finished
        Called after each batch.

    Raises
    ------
    BatchError
        If there is no sample, or a batch lacks labels or the group column.
    NonFiniteError
        If a logit is NaN or infinite.
    """
    refuse_unnormalized(model, batches)
    predictions = Predictions(labels, metrics)
    Ranks(model).sync()
    with evaluating(model):
        for i, batch in enumerate(batches):
            if group is not None and group not in batch.extra:
                raise BatchError(f"batch {i} has no column '{group}' to group by; it has {list(batch.extra) or 'none'}")
            batch = to_device(batch, model, device)
            groups = None if group is None else batch.extra[group]
            logits, target = checked_logits(model(batch), batch.labels)
            predictions.add(logits, target, weights=batch.weights, groups=groups)
            finished()
    predictions.gather(Ranks(model))
    return predictions.metrics()


def refuse_unnormalized(model: nn.Module, batches: Iterable[Batch]) -> None:
    """Raise `SpecError` if a loader's source hands raw numbers, and the model does not normalize them or cannot yet."""
    schema: object = getattr(getattr(batches, "source", None), "schema", None)
    found = normalization_of(model)
    if isinstance(schema, Schema) and schema.numericals and found is None:
        names = ", ".join(numerical.name for numerical in schema.numericals)
        raise SpecError(
            f"the source hands {names} as stored, for the model to normalize, and {type(model).__name__} does not; "
            "call hotbed.nn.normalize(model, source.schema).normalization.measure(source) before training"
        )
    if found is not None:
        found.check_measured()


def to_device(
    batch: Batch | SentBatch, model: nn.Module, device: torch.device | str, *, sizes: SizeClasses | None = None
) -> Batch:
    """Move a batch after its ids and labels were checked on the host: on an accelerator that would wait for the device.

    Ids out of range stay as they are: each collection repairs, in its forward, what only its own features ask for.
    Where none is, ids are padded to size classes if there are ``sizes``. What another rank has read was checked there.
    """
    if isinstance(batch, SentBatch):
        return batch.received(torch.device(device))
    if check(batch, model) and sizes is not None:
        batch = replace(batch, sparse=sizes(batch.sparse))
    return batch.to(device, non_blocking=True)


def check(batch: Batch, model: nn.Module) -> bool:
    """Check ids and labels of a batch on the host; return whether all ids are right as they are."""
    if batch.labels is not None:
        check_labels(batch.labels)
    verified = [m.verify(batch.sparse) for m in model.modules() if isinstance(m, EmbeddingCollection)]
    return all(verified)


def checked_logits(logits: Tensor, labels: Tensor | None, *, training: bool = False) -> tuple[Tensor, Tensor]:
    """Logits and labels, if both are there and ``[B, T]``, in training also ``[M, B, T]``; a `BatchError` otherwise."""
    if labels is None:
        raise BatchError("a batch has no labels, so there is nothing to compare with; name them in the source's schema")
    members = len(logits) if training and logits.ndim == 3 else None
    if logits.shape != (labels.shape if members is None else (max(members, 1), *labels.shape)):
        raise BatchError(
            f"the model gave logits {list(logits.shape)}, but the labels are {list(labels.shape)}; a model must return "
            "one logit per sample and label (an ensemble in training: for each member)"
        )
    return logits, labels if members is None else labels.expand_as(logits)


def refuse_monitor(monitor: Monitor, reason: str) -> NoReturn:
    """Raise `RecipeError`: by this metric no evaluation can be the best."""
    other = "set train.monitor to logloss, or " if monitor == "auc" else ""
    raise RecipeError(
        f"train.monitor is '{monitor}', which is not defined on the valid split: {reason}; {other}evaluate on other "
        f"data (data.valid_split)"
    )
