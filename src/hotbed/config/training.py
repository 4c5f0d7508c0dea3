"""Sections of a recipe: the data, learning rates, how to train, and what to begin with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from hotbed.config.component import Component
from hotbed.config.limits import at_least, by_table, one_of, seed
from hotbed.errors import RecipeError
from hotbed.specs import OnBadId, RowDtype

Precision = Literal["fp32", "bf16"]
AskedPrecision = Literal["auto", "fp32", "bf16"]
LinearLibrary = Literal["auto", "torch", "onednn"]
Device = Literal["auto", "cpu", "cuda"]
Monitor = Literal["auc", "logloss"]
CheckpointPolicy = Literal["none", "last", "best"]
Batches = Literal["mixed", "apart", "split"]


@dataclass(frozen=True, kw_only=True)
class DataRecipe:
    """Where samples come from, and how wide the vectors of their ids are."""

    source: Component = field(default_factory=lambda: Component(class_path="hotbed.data.SplitBinarySource"))
    """The `Source` class; it is made with ``path`` and its init_args."""
    path: str
    """File or directory of the source."""
    dim: int | dict[str, int] = 16
    """Columns of every embedding table, or of each table by name."""
    dtype: RowDtype | dict[str, RowDtype] = "fp32"
    """What rows are stored as: of every table, or by table name; a table that is not named is fp32. See `Table`."""
    fp32_rows: int | dict[str, int] = 0
    """First rows that are float32 whatever the dtype: of every table, or by table name (0 for a table not named).
    A number above a table's rows means all of them, so that one number serves tables of any size."""
    frozen: list[str] = field(default_factory=list)
    """Tables that are looked up and never trained."""
    on_bad_id: OnBadId = "error"
    """What to do with ids that are negative or not below a table's rows."""
    train_split: str = "train"
    """Split to train on."""
    valid_split: str | None = None
    """Split to evaluate on during training; none by default."""
    test_split: str | None = "test"
    """Split to test on after training."""
    shuffle: bool = True
    """Train in another order every epoch."""
    window: int = 8
    """Chunks of the source that are shuffled together."""
    workers: int = 2
    """Threads that read and cut batches."""
    prefetch: int = 4
    """Batches made ahead of the trainer."""

    def __post_init__(self) -> None:
        if not self.path:
            raise RecipeError("data.path is empty; give a file or directory, for example --data.path prepared/")
        for key, dim in by_table("data.dim", self.dim):
            at_least(key, dim, 1)
        for key, dtype in by_table("data.dtype", self.dtype):
            one_of(key, dtype, get_args(RowDtype))
        for key, rows in by_table("data.fp32_rows", self.fp32_rows):
            at_least(key, rows, 0)
        for name in ("window", "workers", "prefetch"):
            at_least(f"data.{name}", getattr(self, name), 1)
        one_of("data.on_bad_id", self.on_bad_id, get_args(OnBadId))


@dataclass(frozen=True, kw_only=True)
class ScheduleRecipe:
    """Learning-rate factor by step: a linear warm-up, then 1, then a polynomial fall to 0."""

    warmup_steps: int = 0
    """Steps over which the factor rises to 1."""
    decay_start: int | None = None
    """Step after which the factor falls; it never does by default."""
    decay_end: int | None = None
    """Step at which it reaches 0."""
    decay_power: float = 2.0
    """Power of the fall: 1 is linear, 2 as in NVIDIA's DLRM."""

    def __post_init__(self) -> None:
        at_least("schedule.warmup_steps", self.warmup_steps, 0)
        if (self.decay_start is None) != (self.decay_end is None):
            raise RecipeError("schedule.decay_start and schedule.decay_end go together; set both, or neither")
        if self.decay_start is not None and self.decay_end is not None:
            at_least("schedule.decay_start", self.decay_start, self.warmup_steps, "schedule.warmup_steps")
            at_least("schedule.decay_end", self.decay_end, self.decay_start + 1, "schedule.decay_start + 1")
        if not self.decay_power > 0:
            raise RecipeError(f"schedule.decay_power is {self.decay_power}, must be above 0; 1 is linear")

    def factor(self, step: int) -> float:
        """Factor of the learning rate in step s, counted from 1 (NVIDIA DLRM).

        s / warm-up; then 1; then ((end − s) / (end − start))^power.
        """
        if step < self.warmup_steps:
            return step / self.warmup_steps
        if self.decay_start is None or self.decay_end is None or step <= self.decay_start:
            return 1.0
        return (max(self.decay_end - step, 0) / (self.decay_end - self.decay_start)) ** self.decay_power


@dataclass(frozen=True, kw_only=True)
class TrainRecipe:
    """How long, how precisely and where to train, and what to keep."""

    batch_size: int
    """Samples per step, over all processes."""
    epochs: int = 1
    """Passes over the train split."""
    steps: int | None = None
    """Stop after this many steps, even within an epoch."""
    seed: int = 0
    """Seed of initial values and of shuffling."""
    device: Device = "auto"
    """``auto`` is ``cuda`` where there is one, else ``cpu``."""
    precision: AskedPrecision = "auto"
    """``bf16`` runs the forward pass under torch.autocast; weights and evaluation stay float32. ``auto`` is ``bf16``
    where the GPU or all processes' CPUs have instructions for it, else ``fp32``; a resumed run keeps what it was."""
    linear_library: LinearLibrary = "auto"
    """What computes float32 products of `hotbed.nn.MLP` on CPUs: ``torch`` (MKL on x86) or ``onednn``. ``auto`` is the
    faster one by kind of CPU; a resumed run keeps what it was."""
    compile: bool = False
    """Compile the dense part of the model with torch.compile."""
    log_every: int = 100
    """Steps between lines of metrics.jsonl."""
    eval_every: int | None = None
    """Steps between evaluations on the valid split; by default one at the end of every epoch."""
    eval_batch_size: int = 16_384
    """Samples per batch in evaluations; it does not change results."""
    monitor: Monitor = "logloss"
    """Metric that tells the best evaluation."""
    patience: int | None = None
    """Stop after this many evaluations without a better one; never by default."""
    checkpoint: CheckpointPolicy = "last"
    """Which checkpoint to keep. ``best`` is restored at the end, before the test."""
    checkpoint_every: int | None = None
    """With ``last``: steps between checkpoints, to resume from; by default one at the end."""
    checkpoint_minutes: float | None = None
    """With ``last``: minutes between checkpoints, besides those of ``checkpoint_every``."""
    checkpoint_dir: str | None = None
    """Where checkpoints go, also ``s3://bucket/path``; by default the run's directory."""
    checkpoint_in_background: bool = True
    """Write checkpoints while training goes on; it does not change results."""
    keep_last: int = 1
    """With ``last``: how many of the newest checkpoints to keep."""
    keep_every: int | None = None
    """With ``last``: keep checkpoints of steps that are multiples of this for good."""
    tensorboard: bool = False
    """Write curves for TensorBoard into the run directory."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "log_every", "eval_batch_size", "keep_last"):
            at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("steps", "eval_every", "patience", "checkpoint_every", "keep_every"):
            if getattr(self, name) is not None:
                at_least(f"train.{name}", getattr(self, name), 1)
        seed("train.seed", self.seed)
        one_of("train.device", self.device, get_args(Device))
        one_of("train.precision", self.precision, get_args(AskedPrecision))
        one_of("train.linear_library", self.linear_library, get_args(LinearLibrary))
        one_of("train.monitor", self.monitor, get_args(Monitor))
        one_of("train.checkpoint", self.checkpoint, get_args(CheckpointPolicy))
        if self.checkpoint_minutes is not None and not self.checkpoint_minutes > 0:
            raise RecipeError(f"train.checkpoint_minutes is {self.checkpoint_minutes}, must be above 0")
        for name in ("checkpoint_every", "checkpoint_minutes", "keep_every"):
            if getattr(self, name) is not None and self.checkpoint != "last":
                raise RecipeError(f"train.{name} is set, but train.checkpoint is '{self.checkpoint}'; set it to 'last'")


@dataclass(frozen=True, kw_only=True)
class InitRecipe:
    """What a new run begins with, if not with initial values; a resumed run goes on with its own."""

    checkpoint: str | None = None
    """Checkpoint, or a directory whose newest is meant, also of an earlier model; what does not fit begins anew."""
    rename: dict[str, str] = field(default_factory=dict)
    """What the checkpoint calls a table, by its name here."""
    leave: list[str] = field(default_factory=list)
    """Tables that begin anew."""
    optimizers: bool = True
    """Take the moments of tables and parameters, too."""

    def __post_init__(self) -> None:
        for key in ("rename", "leave"):
            if getattr(self, key) and self.checkpoint is None:
                raise RecipeError(f"init.{key} is set, but init.checkpoint is not; set it, or use --init_from")
