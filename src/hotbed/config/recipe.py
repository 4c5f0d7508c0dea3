"""Define `Recipe`, the complete configuration of a training run. Its values are checked when it is created.

The options for ranks, memory tiers and hot rows are in `hotbed.config.parallel_memory`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, Field, asdict, dataclass, field, fields, replace
from types import NoneType
from typing import Annotated, Any, Literal, Self, cast, get_args, get_origin

from typing_extensions import override

from hotbed.checks import (
    MAY_DIFFER_ON_RESUME,
    Count,
    NotNegative,
    Positive,
    Range,
    Section,
    Size,
    annotations_of,
    section_of,
)
from hotbed.config.component import Component
from hotbed.config.parallel_memory import HotRecipe, MemoryRecipe, ParallelRecipe
from hotbed.errors import RecipeError, did_you_mean
from hotbed.specs import Dynamic, OnBadId, RowDtype

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
AskedPrecision = Literal["auto", "fp32", "tf32", "bf16", "fp16"]
LinearLibrary = Literal["auto", "torch", "onednn"]
Device = Literal["auto", "cpu", "cuda"]
Monitor = Literal["auc", "logloss", "recall", "ndcg"]
HIGHER_IS_BETTER: tuple[Monitor, ...] = ("auc", "recall", "ndcg")
CheckpointPolicy = Literal["none", "last", "best"]
AskedCheckpointPolicy = Literal["auto", "none", "last", "best"]
CudaGraph = bool | Literal["auto"]
SampledBy = Literal["uniform", "popularity"]
BINARY_CROSS_ENTROPY = "torch.nn.BCEWithLogitsLoss"
_NAMES_IN_CHECKPOINTS = ("model", "dense", "sparse", "random", "position", "ids")
"""Names of parts of a run's checkpoints. No optimizer group can have such a name."""


@dataclass(frozen=True, kw_only=True)
class DynamicRecipe(Section):
    """A dynamic table, which assigns a row to each new id and evicts ids when it is full."""

    capacity_bytes: Count
    """Upper limit of the bytes of all rows, without moments."""
    init_bound: NotNegative
    """Initial values are uniform in [−init_bound, init_bound]. The bound of other tables depends on their rows."""
    admit_after: Count = 1
    """Number of times that an id must be seen before it is assigned a row."""
    evict: Literal["lru", "lfu"] = "lru"
    """Ids to evict first: the least recently seen (``lru``) or the least frequently seen (``lfu``)."""
    ttl_steps: Count | None = None
    """Steps after which an id that has not been seen expires, and starts again from its initial values. Default:
    never."""

    def spec(self) -> Dynamic:
        """Return these options for a `Table`."""
        return Dynamic(self.capacity_bytes, self.admit_after, self.evict, self.ttl_steps)


@dataclass(frozen=True, kw_only=True)
class DataRecipe(Section, where="data."):
    """Source of the samples, and properties of the embedding tables."""

    source: Component = field(default_factory=lambda: Component(class_path="hotbed.data.SplitBinarySource"))
    """`Source` class. Its constructor receives ``path`` and the init_args."""
    path: str = field(metadata=MAY_DIFFER_ON_RESUME)
    """File or directory of the source."""
    dim: Count | dict[str, Count] = 16
    """Number of columns of every embedding table, or of each table by name."""
    dtype: RowDtype | dict[str, RowDtype] = "fp32"
    """Dtype of stored rows, of every table or by table name. Default for tables that are not named: fp32. See
    `Table`."""
    fp32_rows: Size | dict[str, Size] = 0
    """Number of first rows that are always float32, of every table or by table name. Default for tables that are not
    named: 0. If the number exceeds a table's rows, all its rows are float32."""
    dynamic: dict[str, DynamicRecipe] = field(default_factory=dict)
    """Dynamic tables by name, which assign rows to ids as they are seen. The schema's number of rows of such a table is
    only the range of hashed ids, and may be any number, e.g. 2**40."""
    frozen: list[str] = field(default_factory=list)
    """Tables that are looked up but not trained."""
    on_bad_id: OnBadId = "error"
    """Handling of ids that are negative or not below the number of a table's rows."""
    train_split: str = "train"
    """Split to train on."""
    valid_split: str | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Split to evaluate on during training. Default: none."""
    test_split: str | None = field(default="test", metadata=MAY_DIFFER_ON_RESUME)
    """Split to test on after training."""
    shuffle: bool = True
    """Shuffle samples into another order every epoch."""
    window: Count = 8
    """Number of the source's chunks that are shuffled together."""
    executor: str = field(default="threads", metadata=MAY_DIFFER_ON_RESUME)
    """Readers of the data: ``threads`` or ``processes`` of each trainer, or a cluster that all trainers share,
    ``dask:ADDRESS`` or ``ray:ADDRESS``."""
    workers: Count = field(default=2, metadata=MAY_DIFFER_ON_RESUME)
    """Number of reading threads or processes. In a cluster: number of its workers that each trainer keeps busy."""
    prefetch: Count = field(default=4, metadata=MAY_DIFFER_ON_RESUME)
    """Number of batches to prefetch."""

    @override
    def contradictions(self) -> Iterator[str]:
        if not self.path:
            yield "data.path is empty. Pass a file or directory, e.g. --data.path prepared/"


@dataclass(frozen=True, kw_only=True)
class TrainRecipe(Section, where="train."):
    """Length, precision and device of training, evaluations, and checkpoints."""

    batch_size: Count
    """Samples per step, over all processes."""
    epochs: Count = field(default=1, metadata=MAY_DIFFER_ON_RESUME)
    """Passes over the train split."""
    steps: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Stop after this number of steps, even within an epoch."""
    seed: Size = 0
    """Seed of initial values and of shuffling."""
    device: Device = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """Device. ``auto`` is ``cuda`` if a GPU is available, otherwise ``cpu``."""
    precision: AskedPrecision = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """Precision of matrix products. ``bf16`` and ``fp16`` (with loss scaling) run the forward pass under
    torch.autocast, while weights and evaluation stay float32. ``tf32`` rounds float32 products on GPUs. ``auto`` is
    ``bf16`` if all devices support it, otherwise ``fp32``; a resumed run keeps the choice."""
    linear_library: LinearLibrary = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """Library for float32 products of `hotbed.nn.MLP` on CPUs: ``torch`` (MKL on x86) or ``onednn``. ``auto`` is the
    faster library for the type of CPU; a resumed run keeps the choice."""
    compile: bool = False
    """Compile the model with torch.compile. Lookups are operators of its graph (docs/frameworks.md)."""
    recompute: bool = field(default=False, metadata=MAY_DIFFER_ON_RESUME)
    """Recompute the activations of MLPs in the backward pass instead of storing them. This saves memory, and results do
    not change."""
    cuda_graph: CudaGraph = field(default=False, metadata=MAY_DIFFER_ON_RESUME)
    """Capture steps in CUDA graphs and replay them (`hotbed.train.cuda_graph`). Results do not change. ``auto`` falls
    back to normal steps if a step cannot be captured; ``true`` raises an error instead. The Python code of a model
    does not run in replayed steps (docs/gpu.md)."""
    clip_grad_norm: Positive | None = None
    """Largest norm of the gradients of all parameters and tables together. Larger gradients are scaled down, as by
    `hotbed.clip_grad_norm_`. Steps are then not captured in CUDA graphs, because the host computes the norm."""
    log_every: Count = field(default=100, metadata=MAY_DIFFER_ON_RESUME)
    """Steps between lines of metrics.jsonl."""
    eval_every: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Steps between evaluations on the valid split. Default: one evaluation at the end of every epoch."""
    eval_batch_size: Count = field(default=16_384, metadata=MAY_DIFFER_ON_RESUME)
    """Samples per batch in evaluations. Results do not change."""
    monitor: Monitor = field(default="logloss", metadata=MAY_DIFFER_ON_RESUME)
    """Metric that determines the best evaluation. With `Recipe.retrieval`, it is recall unless this is ndcg."""
    patience: Count | Literal["auto"] | None = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """Stop after this number of evaluations without a better one; null: never. ``auto`` is 2 if ``checkpoint: auto``
    means ``best`` and evaluations are at the ends of epochs, otherwise never."""
    checkpoint: AskedCheckpointPolicy = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """Checkpoint to keep. ``best`` is restored at the end, before the test. ``auto`` is ``best`` with several epochs
    and a valid split, otherwise ``last`` (`hotbed.config.validation`)."""
    checkpoint_every: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """With ``last``: steps between checkpoints for resuming. Default: one checkpoint at the end."""
    checkpoint_minutes: Positive | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """With ``last``: minutes between checkpoints, in addition to ``checkpoint_every``."""
    checkpoint_full_every: Count = field(default=1, metadata=MAY_DIFFER_ON_RESUME)
    """One checkpoint in every ``checkpoint_full_every`` holds all rows. The next ones hold only the rows that have
    changed since, and require the full checkpoint to be read."""
    checkpoint_dir: str | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Directory of checkpoints, e.g. ``s3://bucket/path``. Default: the run's directory."""
    checkpoint_in_background: bool = field(default=True, metadata=MAY_DIFFER_ON_RESUME)
    """Write checkpoints while training continues. Results do not change."""
    keep_last: Count = field(default=1, metadata=MAY_DIFFER_ON_RESUME)
    """With ``last``: number of newest checkpoints to keep."""
    keep_every: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """With ``last``: also keep all checkpoints of steps that are multiples of ``keep_every``."""
    publish: str | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Directory for servers, e.g. ``s3://bucket/path``. A full model is published first, then the changes of each
    checkpoint."""
    publish_full_every: Count = field(default=100, metadata=MAY_DIFFER_ON_RESUME)
    """Number of changes after which a full model is published again. Files that only the previous full model needs are
    removed."""
    tensorboard: bool = field(default=False, metadata=MAY_DIFFER_ON_RESUME)
    """Write curves for TensorBoard into the run directory."""
    step_limit_s: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Seconds without a batch after which a process is considered to hang. It writes the stacks of its threads into the
    run's directory, and exits. Default: ``parallel.timeout_s`` if several processes train, otherwise no limit."""

    @override
    def contradictions(self) -> Iterator[str]:
        for name in ("checkpoint_every", "checkpoint_minutes", "keep_every"):
            if getattr(self, name) is not None and self.checkpoint not in ("auto", "last"):
                yield f"train.{name} is set, but train.checkpoint is '{self.checkpoint}'. Set it to 'last'"
        if self.publish is not None and self.checkpoint == "none":
            yield (
                "train.publish is set, but train.checkpoint is 'none', so there is no checkpoint to publish. Set "
                "train.checkpoint to 'last'"
            )


@dataclass(frozen=True, kw_only=True)
class TaskRecipe(Section):
    """Loss and metrics of one label."""

    loss: Component = field(default_factory=lambda: Component(class_path=BINARY_CROSS_ENTROPY))
    """Loss of torch.nn or your own. It is created with ``reduction="none"``, and maps logits and labels ``[n]`` to one
    value per sample ``[n]``. Pass tensor arguments as numbers or lists."""
    weight: NotNegative = 1.0
    """Factor of the loss. Weights of samples are columns of the data: `Schema.weight`, `Schema.label_weights`."""
    metrics: dict[str, Component] = field(default_factory=dict)
    """Metrics of this label by name. They extend the recipe's ``metrics``, and replace metrics of the same name."""

    @property
    def is_default(self) -> bool:
        """Whether loss and weight are the defaults, which apply to labels without an entry in the recipe."""
        return replace(self, metrics={}) == TaskRecipe()


@dataclass(frozen=True, kw_only=True)
class RetrievalRecipe(Section, where="retrieval."):
    """Loss, negatives and evaluation of a two-tower model.

    The item of a sample is the id in the first of the model's ``item`` columns. A sample is a positive if its label is
    1, or if the data has no label. The items of all other samples are negatives for all positives.
    """

    loss: Component = field(default_factory=lambda: Component(class_path="hotbed.nn.InBatchSoftmax"))
    """Loss of the vectors of users and items, with the signature of `hotbed.nn.InBatchSoftmax`. It is created with the
    model's ``temperature``, unless init_args contain one."""
    correction: Component | None = field(default_factory=lambda: Component(class_path="hotbed.nn.ItemFrequencies"))
    """Estimator of the probability of each item in a batch, for the correction of the sampling bias; null: no
    correction."""
    sampled: Size = 0
    """Number of items that are drawn per batch. They are negatives for all samples, in addition to the items of the
    batch."""
    sampled_by: SampledBy = "uniform"
    """Distribution of drawn items: ``uniform``, or ``popularity``, the frequency in the train split."""
    negatives: str | None = None
    """Column with a list of items per sample, from the same table as the item column. They are negatives for their own
    sample only."""
    items: str | None = None
    """Parquet file of all items, one row each, with the model's item columns. Default: the items of the data's
    splits."""
    k: list[Count] = field(default_factory=lambda: [10, 100], metadata=MAY_DIFFER_ON_RESUME)
    """Evaluations measure recall@k and ndcg@k among all items. `TrainRecipe.monitor` uses the last k."""

    @override
    def contradictions(self) -> Iterator[str]:
        if not self.k:
            yield "retrieval.k: got [], expected a list of numbers of items, e.g. [10, 100]"
        if len(set(self.k)) < len(self.k):
            yield f"retrieval.k: got {self.k}, expected unique numbers. Remove the repeated number"
        if self.sampled and self.sampled_by == "popularity" and self.items is not None:
            yield (
                f"retrieval.sampled_by is 'popularity', but retrieval.items {self.items} has no counts of items. "
                "Remove retrieval.items, so that the items of the data are counted, or set sampled_by to 'uniform'"
            )


class _OptimizerGroup(Section):
    """A group with patterns of names in its first field. A single name is converted to a list."""

    @override
    def __post_init__(self) -> None:
        name = fields(cast("Any", self))[0].name
        patterns = getattr(self, name)
        made = list(patterns) if isinstance(patterns, tuple) else patterns
        object.__setattr__(self, name, [patterns] if isinstance(patterns, str) else made)
        super().__post_init__()

    @override
    def contradictions(self) -> Iterator[str]:
        name = fields(cast("Any", self))[0].name
        if not (patterns := getattr(self, name)) or "" in patterns:
            yield f"{name}: got {patterns}, expected a name or a list of names, e.g. wide.* or top.*.bias"


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerGroup(_OptimizerGroup):
    """Parameters with a separate optimizer."""

    parameters: list[str]
    """A name or a list of names, of parameters or of modules that contain them. ``*`` matches any characters, e.g.
    ``top``, ``top.*.bias``, ``*norm*``."""
    optimizer: Component
    """Optimizer of torch.optim for these parameters."""


@dataclass(frozen=True, kw_only=True)
class SparseOptimizerGroup(_OptimizerGroup):
    """Tables with a separate optimizer."""

    tables: list[str]
    """A name or a list of names, of tables or of modules that contain them. ``*`` matches any characters, e.g.
    ``user``, ``wide.user``, ``wide``, ``*_id``."""
    optimizer: Component
    """Optimizer of hotbed.optim for these tables."""


def _wrong_group_names(dense: Collection[str], sparse: Collection[str]) -> Iterator[str]:
    """Yield messages about group names that are not possible in logs and checkpoints."""
    for key, names in (("dense_optimizer_groups", dense), ("sparse_optimizer_groups", sparse)):
        for name in names:
            if not name.isidentifier() or name.endswith("_schedule"):
                yield (
                    f"{key}: got the name {name!r}, expected letters, digits and '_' without _schedule at the end. "
                    "Rename the group"
                )
            if name in _NAMES_IN_CHECKPOINTS:
                yield f"{key}: got the name '{name}', which checkpoints use for another part. Rename the group"
    if both := {*dense} & {*sparse}:
        yield (
            f"dense_optimizer_groups and sparse_optimizer_groups both have a group '{min(both)}'. Rename one of them"
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe(Section, where="schedule."):
    """Learning-rate factor by step: a linear warm-up, then 1, then a polynomial decay to 0.

    The decay is either between two steps, or at the end of every epoch. With a decay in every epoch, evaluations at the
    ends of epochs are comparable, and the first epoch of several equals a run of one epoch.
    """

    warmup_steps: Size = 0
    """Steps over which the factor increases to 1."""
    decay_start: Size | None = None
    """Step after which the factor decays. Default: no decay."""
    decay_end: Count | None = None
    """Step at which the factor reaches 0."""
    decay_power: Annotated[float, Range(above=0, note="; 1 is linear")] = 2.0
    """Power of the decay. 1 is linear, and 2 is the power of NVIDIA's DLRM."""
    decay_share: Annotated[float, Range(above=0, most=1)] | None = None
    """Fraction of each epoch's steps, at its end, over which the factor decays. It replaces decay_start and
    decay_end."""

    @override
    def contradictions(self) -> Iterator[str]:
        start, end = self.decay_start, self.decay_end
        if (start is None) != (end is None):
            yield "schedule.decay_start or schedule.decay_end is set without the other. Set both, or neither"
        if start is not None and end is not None:
            if start < self.warmup_steps:
                least = f"{self.warmup_steps:,} (schedule.warmup_steps)"
                yield f"schedule.decay_start: got {start:,}, expected at least {least}"
            if end <= start:
                yield f"schedule.decay_end: got {end:,}, expected at least {start + 1:,} (schedule.decay_start + 1)"
        if self.decay_share is not None and start is not None:
            yield "schedule.decay_share and schedule.decay_start are both set. Remove one of them"

    def factor(self, step: int, epoch_steps: int | None = None) -> float:
        """Return the factor of the learning rate in step s, counted from 1 (NVIDIA DLRM).

        The factor is s / warm-up; then 1; then ((end − s) / (end − start))^power. With ``decay_share`` a and n steps
        per epoch, the factor of the p-th step of an epoch is ((n − p + 1) / (a n))^power, at most 1, times the factor
        of the warm-up.
        """
        if self.decay_share is not None and epoch_steps is not None:
            left = epoch_steps - (step - 1) % epoch_steps
            fall = min(left / (self.decay_share * epoch_steps), 1.0) ** self.decay_power
            return fall * min(step / max(self.warmup_steps, 1), 1.0)
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.decay_start is None or self.decay_end is None or step <= self.decay_start:
            return 1.0
        return (max(self.decay_end - step, 0) / (self.decay_end - self.decay_start)) ** self.decay_power


@dataclass(frozen=True, kw_only=True)
class InitRecipe(Section, where="init."):
    """Checkpoint that a new run starts from. Resumed runs ignore it."""

    checkpoint: str | None = None
    """Checkpoint, also of another model, or a directory, which stands for its newest checkpoint. Tables and parameters
    that do not match are initialized as usual."""
    rename: dict[str, str] = field(default_factory=dict)
    """Names of tables in the checkpoint, by their names in this model."""
    leave: list[str] = field(default_factory=list)
    """Tables that are not loaded, but initialized as usual."""
    optimizers: bool = True
    """Also load the moments of tables and parameters."""

    @override
    def contradictions(self) -> Iterator[str]:
        for key in ("rename", "leave"):
            if getattr(self, key) and self.checkpoint is None:
                yield f"init.{key} is set, but init.checkpoint is not. Set init.checkpoint, or use --init_from"


MOST_NAME_BYTES = 200
"""Upper limit of the bytes of a run's name. File systems allow 255."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """Configuration of a training run."""

    name: str = field(metadata=MAY_DIFFER_ON_RESUME)
    """Name of the run's directory."""
    data: DataRecipe
    model: Component
    """nn.Module class with the arguments ``tables=, features=, dense_features=, seed=``. The module maps a batch to
    logits [B, T]."""
    dense_optimizer: Component
    """Optimizer of torch.optim for the model's parameters that are in no group."""
    sparse_optimizer: Component
    """Optimizer of hotbed.optim for the model's tables that are in no group."""
    tasks: dict[str, TaskRecipe] = field(default_factory=dict)
    """Loss and weight by label. Labels that are not named have binary cross-entropy with weight 1."""
    retrieval: RetrievalRecipe | None = None
    """Train a two-tower model for retrieval of items, instead of predicting the probabilities of labels."""
    metrics: dict[str, Component] = field(default_factory=dict, metadata=MAY_DIFFER_ON_RESUME)
    """Additional metrics of each label by name: of torchmetrics, torcheval or your own
    (`train.metrics.recipe_metrics`)."""
    callbacks: dict[str, Component] = field(default_factory=dict, metadata=MAY_DIFFER_ON_RESUME)
    """Callbacks by name: `hotbed.Callback` classes, e.g. hotbed.train.tracking.MLflow. If their constructors have the
    arguments ``recipe`` or ``directory``, they receive the recipe and the run's directory."""
    dense_optimizer_groups: dict[str, DenseOptimizerGroup] = field(default_factory=dict)
    """Groups of parameters with separate optimizers, by name. Logs and checkpoints use the names."""
    sparse_optimizer_groups: dict[str, SparseOptimizerGroup] = field(default_factory=dict)
    """Groups of tables with separate optimizers, by name. Logs and checkpoints use the names."""
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    train: TrainRecipe
    init: InitRecipe = field(default_factory=InitRecipe, metadata=MAY_DIFFER_ON_RESUME)
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)
    memory: MemoryRecipe = field(default_factory=MemoryRecipe, metadata=MAY_DIFFER_ON_RESUME)
    hot: HotRecipe = field(default_factory=HotRecipe)

    @override
    def contradictions(self) -> Iterator[str]:
        if not _is_plain(self.name):
            limit = (
                f"a plain directory name of at most {MOST_NAME_BYTES} bytes, because the run is written to runs/NAME"
            )
            yield f"name: got {self.name!r}, expected {limit}"
        yield from _wrong_group_names(self.dense_optimizer_groups, self.sparse_optimizer_groups)
        if self.hot.rows is not None and (self.memory.device_bytes or self.memory.host_bytes):
            yield (
                "hot.rows and memory.device_bytes or memory.host_bytes are set, but both choose the rows in the "
                "device's memory. Remove one of them"
            )
        if self.hot.batches == "alternating":
            for key, value in (("train.eval_every", self.train.eval_every), ("parallel.reader", self.parallel.reader)):
                if value not in (None, "each"):
                    yield (
                        f"{key} is {value}, but hot.batches 'alternating' evaluates after its rounds and reads in each "
                        f"process. Remove {key}"
                    )
        if self.hot.batches == "split":
            for key, value, needed in (
                ("dense", self.parallel.dense, "ddp"),
                ("overlap", self.parallel.overlap, True),
            ):
                if value != needed:
                    yield (
                        f"parallel.{key}: got {value}, expected {needed} with hot.batches 'split'. Remove "
                        f"parallel.{key}"
                    )
        if self.retrieval is None and self.train.monitor in ("recall", "ndcg"):
            yield (
                f"train.monitor is '{self.train.monitor}', a metric of retrieval, but retrieval is not set. Set "
                "retrieval, or monitor auc or logloss"
            )
        end, steps, needs = self.schedule.decay_end, self.train.steps, self.data.valid_split is None
        if end is not None and steps is not None and steps > end:
            yield (
                f"train.steps is {steps:,}, but the learning rate is 0 after schedule.decay_end {end:,}. Set "
                f"schedule.decay_end to at least {steps:,}"
            )
        for key, value in (
            ("train.eval_every", self.train.eval_every),
            ("train.patience", None if self.train.patience == "auto" else self.train.patience),
            ("hot.batches", "alternating" if self.hot.batches == "alternating" else None),
            ("train.checkpoint", "best" if self.train.checkpoint == "best" else None),
        ):
            if needs and value is not None:
                yield f"{key} is {value}, but there is no split to evaluate on. Set data.valid_split"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for YAML and JSON. `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Create a recipe from plain values.

        Raises
        ------
        RecipeError
            If a key is unknown or missing, or a value is not valid. The message about an unknown key names the closest
            known key.
        """
        return cast("Self", _build(cls, values, ""))


def _build(cls: type[Any], values: object, where: str) -> Any:
    """Create a section and its nested sections from plain values."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where.rstrip('.') or 'the recipe'}: got {values!r}, expected a mapping")
    given, types = cast("Mapping[str, Any]", values), annotations_of(cls)
    for key in given:
        if key not in types:
            raise RecipeError(
                f"the recipe has an unknown key '{where}{key}'. The keys of {where.rstrip('.') or 'a recipe'} are "
                f"{', '.join(types)}{did_you_mean(str(key), types)}"
            )
    made: dict[str, Any] = {}
    for f in fields(cls):
        if f.name in given:
            made[f.name] = _build_value(types[f.name], given[f.name], f"{where}{f.name}.", f)
        elif f.default is MISSING and f.default_factory is MISSING:
            if section_of(types[f.name]) is None:
                raise RecipeError(f"the recipe lacks '{where}{f.name}', which is required")
            _build(types[f.name], {}, f"{where}{f.name}.")  # raises if a key in the section is required
    try:
        return cls(**made)
    except RecipeError as error:
        if not where or str(error).startswith(where):
            raise
        # A component, or an entry of a mapping, does not know its key.
        raise RecipeError(f"{where}{error}") from None


def _build_value(annotation: Any, value: Any, where: str, of: Field[Any]) -> Any:
    """Create the sections in a key's value. Other values are returned unchanged."""
    section = section_of(annotation)
    if section is None or (value is None and NoneType in get_args(annotation)):
        return value
    if get_origin(annotation) is dict:
        if not isinstance(value, Mapping):
            raise RecipeError(f"{where.rstrip('.')}: got {value!r}, expected a mapping of names to sections")
        entries = cast("Mapping[str, Any]", value).items()
        return {name: _build(section, entry, f"{where}{name}.") for name, entry in entries}
    if section is Component and of.default_factory is not MISSING and isinstance(value, Mapping):
        value = {"class_path": of.default_factory().class_path, **value}
    return _build(section, value, where)


def _is_plain(name: object) -> bool:
    """Return whether a value can be the name of a directory."""
    if not isinstance(name, str) or not name.strip() or name in (".", ".."):
        return False
    return name.isprintable() and not {*"/\\"} & {*name} and len(name.encode(errors="replace")) <= MOST_NAME_BYTES
