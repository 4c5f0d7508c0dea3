"""Define `Recipe`: everything that one training run is, as a tree of plain values that are checked when they are set.

Ranks, memories and hot rows, which change where bytes are and how fast, are in `hotbed.config.parallel_memory`.
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
"""What a run's checkpoints hold beside the groups' optimizers, so that no group can be called so."""


@dataclass(frozen=True, kw_only=True)
class DynamicRecipe(Section):
    """A table whose rows are given to ids when they are first seen, and taken back when there is no room."""

    capacity_bytes: Count
    """What its rows may take, without moments."""
    init_bound: NotNegative
    """Initial values are uniform from minus this to this; other tables have one by their number of rows."""
    admit_after: Count = 1
    """How often an id must be seen to get a row."""
    evict: Literal["lru", "lfu"] = "lru"
    """Which ids lose theirs: those seen least recently, or least often."""
    ttl_steps: Count | None = None
    """Steps after which an id that was not seen begins anew; by default never."""

    def spec(self) -> Dynamic:
        """The same for a `Table`."""
        return Dynamic(self.capacity_bytes, self.admit_after, self.evict, self.ttl_steps)


@dataclass(frozen=True, kw_only=True)
class DataRecipe(Section, where="data."):
    """Where samples come from, and how wide the vectors of their ids are."""

    source: Component = field(default_factory=lambda: Component(class_path="hotbed.data.SplitBinarySource"))
    """The `Source` class; it is made with ``path`` and its init_args."""
    path: str = field(metadata=MAY_DIFFER_ON_RESUME)
    """File or directory of the source."""
    dim: Count | dict[str, Count] = 16
    """Columns of every embedding table, or of each table by name."""
    dtype: RowDtype | dict[str, RowDtype] = "fp32"
    """What rows are stored as: of every table, or by table name; a table that is not named is fp32. See `Table`."""
    fp32_rows: Size | dict[str, Size] = 0
    """First rows that are float32 whatever the dtype: of every table, or by table name (0 for a table not named).
    A number above a table's rows means all of them, so that one number serves tables of any size."""
    dynamic: dict[str, DynamicRecipe] = field(default_factory=dict)
    """By table name, tables whose rows are given to ids when these are seen. The rows that a schema says of such a
    table are only what values are hashed to: any number, such as 2**40."""
    frozen: list[str] = field(default_factory=list)
    """Tables that are looked up and never trained."""
    on_bad_id: OnBadId = "error"
    """What to do with ids that are negative or not below a table's rows."""
    train_split: str = "train"
    """Split to train on."""
    valid_split: str | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Split to evaluate on during training; none by default."""
    test_split: str | None = field(default="test", metadata=MAY_DIFFER_ON_RESUME)
    """Split to test on after training."""
    shuffle: bool = True
    """Train in another order every epoch."""
    window: Count = 8
    """Chunks of the source that are shuffled together."""
    executor: str = field(default="threads", metadata=MAY_DIFFER_ON_RESUME)
    """What reads: ``threads`` or ``processes`` of each trainer, or, for all, ``dask:ADDRESS`` or ``ray:ADDRESS``."""
    workers: Count = field(default=2, metadata=MAY_DIFFER_ON_RESUME)
    """Threads or processes that read; of a cluster, how many of its workers each trainer keeps busy."""
    prefetch: Count = field(default=4, metadata=MAY_DIFFER_ON_RESUME)
    """Batches made ahead of the trainer."""

    @override
    def contradictions(self) -> Iterator[str]:
        if not self.path:
            yield "data.path is empty; give a file or directory, for example --data.path prepared/"


@dataclass(frozen=True, kw_only=True)
class TrainRecipe(Section, where="train."):
    """How long, how precisely and where to train, and what to keep."""

    batch_size: Count
    """Samples per step, over all processes."""
    epochs: Count = field(default=1, metadata=MAY_DIFFER_ON_RESUME)
    """Passes over the train split."""
    steps: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Stop after this many steps, even within an epoch."""
    seed: Size = 0
    """Seed of initial values and of shuffling."""
    device: Device = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """``auto`` is ``cuda`` where there is one, else ``cpu``."""
    precision: AskedPrecision = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """``bf16`` and ``fp16`` (with loss scaling) run the forward pass under torch.autocast, weights and evaluation stay
    float32; ``tf32`` rounds float32 products on GPUs. ``auto``: ``bf16`` where all have it, else ``fp32``; it stays."""
    linear_library: LinearLibrary = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """What computes float32 products of `hotbed.nn.MLP` on CPUs: ``torch`` (MKL on x86) or ``onednn``. ``auto`` is the
    faster one by kind of CPU; a resumed run keeps what it was."""
    compile: bool = False
    """Compile the model with torch.compile; lookups are operators of its graph (docs/frameworks.md)."""
    recompute: bool = field(default=False, metadata=MAY_DIFFER_ON_RESUME)
    """Compute the activations of MLPs again in backward, instead of keeping them: less memory, the same results."""
    cuda_graph: CudaGraph = field(default=False, metadata=MAY_DIFFER_ON_RESUME)
    """Capture steps in CUDA graphs and replay them, the same results (`hotbed.train.cuda_graph`): ``auto`` where that
    can be, ``true`` or not at all. What a model's own Python does from step to step is not repeated (docs/gpu.md)."""
    clip_grad_norm: Positive | None = None
    """Largest norm of the gradients of all parameters and tables together; longer ones are scaled down, as by
    `hotbed.clip_grad_norm_`. Steps are not captured in CUDA graphs then, because the host computes the norm."""
    log_every: Count = field(default=100, metadata=MAY_DIFFER_ON_RESUME)
    """Steps between lines of metrics.jsonl."""
    eval_every: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Steps between evaluations on the valid split; by default one at the end of every epoch."""
    eval_batch_size: Count = field(default=16_384, metadata=MAY_DIFFER_ON_RESUME)
    """Samples per batch in evaluations; it does not change results."""
    monitor: Monitor = field(default="logloss", metadata=MAY_DIFFER_ON_RESUME)
    """Metric that tells the best evaluation; with `Recipe.retrieval` recall unless it is ndcg."""
    patience: Count | Literal["auto"] | None = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """Stop after this many evaluations without a better one; null: never. ``auto`` is 2 where ``checkpoint: auto`` is
    ``best`` and evaluations are made after each epoch, else never."""
    checkpoint: AskedCheckpointPolicy = field(default="auto", metadata=MAY_DIFFER_ON_RESUME)
    """Which checkpoint to keep. ``best`` is restored at the end, before the test. ``auto`` is ``best`` with several
    epochs and a valid split, else ``last`` (`hotbed.config.validation`)."""
    checkpoint_every: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """With ``last``: steps between checkpoints, to resume from; by default one at the end."""
    checkpoint_minutes: Positive | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """With ``last``: minutes between checkpoints, besides those of ``checkpoint_every``."""
    checkpoint_full_every: Count = field(default=1, metadata=MAY_DIFFER_ON_RESUME)
    """Every so many checkpoints, one holds all rows; the others those that changed since, and need it to be read."""
    checkpoint_dir: str | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Where checkpoints go, also ``s3://bucket/path``; by default the run's directory."""
    checkpoint_in_background: bool = field(default=True, metadata=MAY_DIFFER_ON_RESUME)
    """Write checkpoints while training goes on; it does not change results."""
    keep_last: Count = field(default=1, metadata=MAY_DIFFER_ON_RESUME)
    """With ``last``: how many of the newest checkpoints to keep."""
    keep_every: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """With ``last``: keep checkpoints of steps that are multiples of this for good."""
    publish: str | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Directory, also ``s3://bucket/path``, where servers find the model of each checkpoint, then changes."""
    publish_full_every: Count = field(default=100, metadata=MAY_DIFFER_ON_RESUME)
    """Changes after which a full model is published again, to begin with; what only the one before needs is removed."""
    tensorboard: bool = field(default=False, metadata=MAY_DIFFER_ON_RESUME)
    """Write curves for TensorBoard into the run directory."""
    step_limit_s: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Seconds without a batch after which a process ends itself, with the stacks of its threads in the run's directory:
    it hangs. By default ``parallel.timeout_s`` where several processes train, else no limit."""

    @override
    def contradictions(self) -> Iterator[str]:
        for name in ("checkpoint_every", "checkpoint_minutes", "keep_every"):
            if getattr(self, name) is not None and self.checkpoint not in ("auto", "last"):
                yield f"train.{name} is set, but train.checkpoint is '{self.checkpoint}'; set it to 'last'"
        if self.publish is not None and self.checkpoint == "none":
            yield "train.publish is set, but train.checkpoint is 'none', so nothing is saved that could be"


@dataclass(frozen=True, kw_only=True)
class TaskRecipe(Section):
    """How a model is trained and measured for one label."""

    loss: Component = field(default_factory=lambda: Component(class_path=BINARY_CROSS_ENTROPY))
    """A torch.nn loss or one of your own, made with ``reduction="none"``: it maps logits and labels ``[n]`` to a value
    per sample ``[n]``. Arguments that are tensors are given as numbers or lists."""
    weight: NotNegative = 1.0
    """Factor of the loss. Weights of samples are columns of the data: `Schema.weight`, `Schema.label_weights`."""
    metrics: dict[str, Component] = field(default_factory=dict)
    """By name, metrics of this label beside the recipe's ``metrics``, or in the place of those of the same name."""

    @property
    def is_default(self) -> bool:
        """Whether it is trained as a label is that the recipe does not name."""
        return replace(self, metrics={}) == TaskRecipe()


@dataclass(frozen=True, kw_only=True)
class RetrievalRecipe(Section, where="retrieval."):
    """Which negatives an item is told from, and among how many items it is to be found.

    The item of a sample is what the first of the model's ``item`` columns says. A sample is a positive if its label is
    1, or if the data have no label; the item of any other sample is a negative of all positives.
    """

    loss: Component = field(default_factory=lambda: Component(class_path="hotbed.nn.InBatchSoftmax"))
    """The loss of vectors of users and items, called as `hotbed.nn.InBatchSoftmax` is; made with the model's
    ``temperature`` unless init_args say another."""
    correction: Component | None = field(default_factory=lambda: Component(class_path="hotbed.nn.ItemFrequencies"))
    """What estimates how probable each item is in a batch, to correct for it; null: nothing is corrected."""
    sampled: Size = 0
    """Items that are drawn for each batch, negatives of all its samples beside the batch's own items."""
    sampled_by: SampledBy = "uniform"
    """Draw all items alike, or in proportion to how often each is in the split to train on."""
    negatives: str | None = None
    """Column of lists of items, of the table of the item's column: negatives of their own sample alone."""
    items: str | None = None
    """Parquet of all items, a row each, with the model's item columns; default: the items of the data's splits."""
    k: list[Count] = field(default_factory=lambda: [10, 100], metadata=MAY_DIFFER_ON_RESUME)
    """Evaluations measure recall@k and ndcg@k among all items; the last one's is `TrainRecipe.monitor`'s."""

    @override
    def contradictions(self) -> Iterator[str]:
        if not self.k:
            yield "retrieval.k: got [], expected a list of numbers of items, such as [10, 100]"
        if len(set(self.k)) < len(self.k):
            yield f"retrieval.k is {self.k}, which names a number twice; once will do"
        if self.sampled and self.sampled_by == "popularity" and self.items is not None:
            yield (
                f"retrieval.sampled_by is 'popularity', and retrieval.items {self.items} does not say how often items "
                "are met; leave retrieval.items out, so that they are counted, or draw them uniform"
            )


class _OptimizerGroup(Section):
    """A group whose first field holds patterns of names; one name becomes a list of one."""

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
            yield f"{name}: got {patterns}, expected a name or a list of names, such as wide.* or top.*.bias"


@dataclass(frozen=True, kw_only=True)
class DenseOptimizerGroup(_OptimizerGroup):
    """Parameters that have an optimizer of their own."""

    parameters: list[str]
    """Names of parameters or of modules that contain them; one name is a list of one. ``*`` stands for any characters:
    ``top``, ``top.*.bias``, ``*norm*``."""
    optimizer: Component
    """A torch.optim optimizer, made with these parameters."""


@dataclass(frozen=True, kw_only=True)
class SparseOptimizerGroup(_OptimizerGroup):
    """Tables that have an optimizer of their own."""

    tables: list[str]
    """Names of tables or of modules that contain them; one name is a list of one. ``*`` stands for any characters:
    ``user``, ``wide.user``, ``wide``, ``*_id``."""
    optimizer: Component
    """A hotbed.optim optimizer, made with these tables."""


def _wrong_group_names(dense: Collection[str], sparse: Collection[str]) -> Iterator[str]:
    """Yield messages about names of groups that logs and checkpoints cannot have."""
    for key, names in (("dense_optimizer_groups", dense), ("sparse_optimizer_groups", sparse)):
        for name in names:
            if not name.isidentifier() or name.endswith("_schedule"):
                yield (
                    f"{key} has a group called {name!r}, which must be a word of letters, digits and '_' that does not "
                    "end with _schedule; rename the group"
                )
            if name in _NAMES_IN_CHECKPOINTS:
                yield (f"{key} has a group called '{name}', as something else in a checkpoint is; rename the group")
    if both := {*dense} & {*sparse}:
        yield (
            f"dense_optimizer_groups and sparse_optimizer_groups both have a group '{min(both)}'; rename one of them"
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe(Section, where="schedule."):
    """Learning-rate factor by step: a linear warm-up, then 1, then a polynomial fall to 0.

    The fall is at steps that are given, or at the end of every epoch, however many steps that has. Then every epoch
    ends with a model that is settled, so evaluations of epochs can be compared, and the first epoch of several is the
    run of one epoch.
    """

    warmup_steps: Size = 0
    """Steps over which the factor rises to 1."""
    decay_start: Size | None = None
    """Step after which the factor falls; it never does by default."""
    decay_end: Count | None = None
    """Step at which it reaches 0."""
    decay_power: Annotated[float, Range(above=0, note="; 1 is linear")] = 2.0
    """Power of the fall: 1 is linear, 2 as in NVIDIA's DLRM."""
    decay_share: Annotated[float, Range(above=0, most=1)] | None = None
    """In the place of decay_start and decay_end: the share of every epoch's steps, its last, over which it falls."""

    @override
    def contradictions(self) -> Iterator[str]:
        start, end = self.decay_start, self.decay_end
        if (start is None) != (end is None):
            yield "schedule.decay_start and schedule.decay_end go together; set both, or neither"
        if start is not None and end is not None:
            if start < self.warmup_steps:
                least = f"{self.warmup_steps:,} (schedule.warmup_steps)"
                yield f"schedule.decay_start: got {start:,}, expected at least {least}"
            if end <= start:
                yield f"schedule.decay_end: got {end:,}, expected at least {start + 1:,} (schedule.decay_start + 1)"
        if self.decay_share is not None and start is not None:
            yield "schedule.decay_share and schedule.decay_start say both when the rate falls; leave one of them out"

    def factor(self, step: int, epoch_steps: int | None = None) -> float:
        """Factor of the learning rate in step s, counted from 1 (NVIDIA DLRM).

        s / warm-up; then 1; then ((end − s) / (end − start))^power. With ``decay_share`` a and n steps of an epoch, the
        p-th of an epoch has ((n − p + 1) / (a n))^power, at most 1, times that of the warm-up.
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
    """What a new run begins with, if not with initial values; a resumed run goes on with its own."""

    checkpoint: str | None = None
    """Checkpoint, or a directory whose newest is meant, or of an earlier model; what does not fit is reinitialized."""
    rename: dict[str, str] = field(default_factory=dict)
    """What the checkpoint calls a table, by its name here."""
    leave: list[str] = field(default_factory=list)
    """Tables that are not taken, but reinitialized."""
    optimizers: bool = True
    """Take the moments of tables and parameters, too."""

    @override
    def contradictions(self) -> Iterator[str]:
        for key in ("rename", "leave"):
            if getattr(self, key) and self.checkpoint is None:
                yield f"init.{key} is set, but init.checkpoint is not; set it, or use --init_from"


MOST_NAME_BYTES = 200
"""Of a run's name; file systems take 255."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """A whole training run."""

    name: str = field(metadata=MAY_DIFFER_ON_RESUME)
    """Name of the run's directory."""
    data: DataRecipe
    model: Component
    """An nn.Module made with ``tables=, features=, dense_features=, seed=``; it maps a batch to logits [B, T]."""
    dense_optimizer: Component
    """A torch.optim optimizer, made with the model's parameters that are in no group."""
    sparse_optimizer: Component
    """A hotbed.optim optimizer, made with the model's tables that are in no group."""
    tasks: dict[str, TaskRecipe] = field(default_factory=dict)
    """By label, its loss and how much that counts; of a label that is not named binary cross-entropy, with weight 1."""
    retrieval: RetrievalRecipe | None = None
    """Train a two-tower model to find items among all of them, in the place of the probability of a label."""
    metrics: dict[str, Component] = field(default_factory=dict, metadata=MAY_DIFFER_ON_RESUME)
    """By name, more metrics of each label: of torchmetrics, torcheval or your own (`train.metrics.recipe_metrics`)."""
    callbacks: dict[str, Component] = field(default_factory=dict, metadata=MAY_DIFFER_ON_RESUME)
    """By name, what else is to happen in training: `hotbed.Callback` classes, such as hotbed.train.tracking.MLflow.
    They get ``recipe`` and ``directory`` (that of the run) if they take arguments of these names."""
    dense_optimizer_groups: dict[str, DenseOptimizerGroup] = field(default_factory=dict)
    """By name, parameters with an optimizer of their own; logs and checkpoints use the name."""
    sparse_optimizer_groups: dict[str, SparseOptimizerGroup] = field(default_factory=dict)
    """By name, tables with an optimizer of their own; logs and checkpoints use the name."""
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    train: TrainRecipe
    init: InitRecipe = field(default_factory=InitRecipe, metadata=MAY_DIFFER_ON_RESUME)
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)
    memory: MemoryRecipe = field(default_factory=MemoryRecipe, metadata=MAY_DIFFER_ON_RESUME)
    hot: HotRecipe = field(default_factory=HotRecipe)

    @override
    def contradictions(self) -> Iterator[str]:
        if not _is_plain(self.name):
            what = f"must be a plain directory name of at most {MOST_NAME_BYTES} bytes; it becomes runs/NAME"
            yield f"name is {self.name!r}, {what}"
        yield from _wrong_group_names(self.dense_optimizer_groups, self.sparse_optimizer_groups)
        if self.hot.rows is not None and (self.memory.device_bytes or self.memory.host_bytes):
            yield (
                "hot.rows says which rows are in the device's memory, but memory.device_bytes or memory.host_bytes is "
                "set, too; leave one of them out"
            )
        if self.hot.batches == "alternating":
            for key, value in (("train.eval_every", self.train.eval_every), ("parallel.reader", self.parallel.reader)):
                if value not in (None, "each"):
                    yield (
                        "hot.batches is 'alternating', which evaluates after its rounds and reads in each process, "
                        f"but {key} is {value}; leave it out"
                    )
        if self.hot.batches == "split":
            for key, value, needed in (
                ("reader", self.parallel.reader, ("each", "first")),
                ("dense", self.parallel.dense, ("ddp",)),
                ("overlap", self.parallel.overlap, (True,)),
            ):
                if value not in needed:
                    either = " or ".join(map(str, needed))
                    yield (
                        f"hot.batches is 'split', which needs parallel.{key} {either}, but it is {value}; leave it out"
                    )
        if self.retrieval is None and self.train.monitor in ("recall", "ndcg"):
            yield (
                f"train.monitor is '{self.train.monitor}', which is of items that are found, and retrieval is not set; "
                "set it, or monitor auc or logloss"
            )
        end, steps, needs = self.schedule.decay_end, self.train.steps, self.data.valid_split is None
        if end is not None and steps is not None and steps > end:
            yield (
                f"train.steps is {steps:,}, but the learning rate is 0 after schedule.decay_end {end:,}; raise "
                f"schedule.decay_end to at least {steps:,}"
            )
        for key, value in (
            ("train.eval_every", self.train.eval_every),
            ("train.patience", None if self.train.patience == "auto" else self.train.patience),
            ("hot.batches", "alternating" if self.hot.batches == "alternating" else None),
            ("train.checkpoint", "best" if self.train.checkpoint == "best" else None),
        ):
            if needs and value is not None:
                yield f"{key} is {value}, but there is nothing to evaluate on; set data.valid_split"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a recipe from plain values.

        A key that is unknown (the closest known one is named) or missing, and a value out of range, raise
        `RecipeError`.
        """
        return cast("Self", _build(cls, values, ""))


def _build(cls: type[Any], values: object, where: str) -> Any:
    """Make a section, and those within, from plain values."""
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where.rstrip('.') or 'the recipe'}: got {values!r}, expected a mapping")
    given, types = cast("Mapping[str, Any]", values), annotations_of(cls)
    for key in given:
        if key not in types:
            raise RecipeError(
                f"the recipe has an unknown key '{where}{key}'; {where.rstrip('.') or 'a recipe'} may have "
                f"{', '.join(types)}{did_you_mean(str(key), types)}"
            )
    made: dict[str, Any] = {}
    for f in fields(cls):
        if f.name in given:
            made[f.name] = _made(types[f.name], given[f.name], f"{where}{f.name}.", f)
        elif f.default is MISSING and f.default_factory is MISSING:
            if section_of(types[f.name]) is None:
                raise RecipeError(f"the recipe lacks '{where}{f.name}', which is required")
            _build(types[f.name], {}, f"{where}{f.name}.")  # which names the key within that is required
    try:
        return cls(**made)
    except RecipeError as error:
        if not where or str(error).startswith(where):
            raise
        # A component, or an entry of a mapping, does not know which one it is.
        raise RecipeError(f"{where}{error}") from None


def _made(annotation: Any, value: Any, where: str, of: Field[Any]) -> Any:
    """Make the sections of a key's value; any other value stays as it is."""
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
    """Whether a value can be the name of a directory."""
    if not isinstance(name, str) or not name.strip() or name in (".", ".."):
        return False
    return name.isprintable() and not {*"/\\"} & {*name} and len(name.encode(errors="replace")) <= MOST_NAME_BYTES
