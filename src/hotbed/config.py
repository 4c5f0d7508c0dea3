"""The recipe: everything that a training run is, as one tree of plain values.

A `Recipe` is what a YAML file in ``recipes/`` holds and what every run and checkpoint keeps a copy of. Models,
optimizers and data sources are named by import path, so a user's own classes need no registration::

    model:
      class_path: my_package.MyModel
      init_args: {width: 512}

Importing this module is cheap and loads no class that a recipe names.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Self, cast, get_args, get_type_hints

from hotbed.errors import HotbedError, RecipeError, did_you_mean
from hotbed.specs import OnBadId, RowDtype, is_int

Precision = Literal["fp32", "bf16"]
Device = Literal["auto", "cpu", "cuda"]
Monitor = Literal["auc", "logloss"]
CheckpointPolicy = Literal["none", "last", "best"]
DensePart = Literal["ddp", "fsdp"]
Reader = Literal["each", "first", "owners"]
Layout = Literal["groups", "replicas"]
Codec = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
Tier = Literal["device", "host", "disk"]
CachePolicy = Literal["lru", "lfu"]
CacheTier = Literal["device", "host"]
HostRows = Literal["records", "uva"]
Batches = Literal["mixed", "apart", "split"]


@dataclass(frozen=True, kw_only=True)
class Component:
    """A class by import path, and the arguments it is made with."""

    class_path: str
    """Import path of the class, for example ``torch.optim.Adam``."""
    init_args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments, besides those that hotbed gives."""

    def __post_init__(self) -> None:
        if "." not in str(self.class_path):
            raise RecipeError(f"class_path is '{self.class_path}', must be an import path like torch.optim.Adam")

    def load(self) -> type[Any]:
        """Import the class.

        Raises
        ------
        RecipeError
            If there is no such module or class.
        """
        module_name, name = self.class_path.rsplit(".", 1)
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not module_name.startswith(error.name):
                raise  # the module is there and what it imports is not
            raise RecipeError(
                f"class_path is '{self.class_path}', but there is no module '{error.name}'; install it, or add its "
                f"directory to PYTHONPATH"
            ) from None
        found = getattr(module, name, None)
        if not isinstance(found, type):
            classes = [n for n, value in vars(module).items() if isinstance(value, type)]
            raise RecipeError(f"module '{module_name}' has no class '{name}'{did_you_mean(name, classes)}")
        return found

    def build(self, *args: Any, **given: Any) -> Any:
        """Make the object from what hotbed gives and ``init_args``.

        Raises
        ------
        RecipeError
            If an argument is unknown, missing, given by hotbed already, or refused by the class.
        """
        cls = self.load()
        signature = inspect.signature(cls)
        known = signature.parameters
        taken = {*list(known)[: len(args)], *given}
        any_name = any(p.kind is p.VAR_KEYWORD for p in known.values())
        for name in self.init_args:
            if name in taken:
                raise RecipeError(f"{self.class_path}: '{name}' is given by hotbed; remove it from init_args")
            if name not in known and not any_name:
                free = [n for n in known if n not in taken]
                raise RecipeError(
                    f"{self.class_path} takes no '{name}'; init_args may be {', '.join(free) or 'nothing'}"
                    f"{did_you_mean(name, free)}"
                )
        for name, parameter in known.items():
            variadic = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if not variadic and parameter.default is parameter.empty and name not in (taken | self.init_args.keys()):
                raise RecipeError(f"{self.class_path} needs '{name}'; set it in init_args")
        try:
            signature.bind(*args, **given, **self.init_args)
        except TypeError as error:
            raise RecipeError(f"{self.class_path} does not take the arguments that hotbed gives: {error}") from None
        try:
            return cls(*args, **given, **self.init_args)
        except HotbedError:
            raise
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{self.class_path} refused init_args {self.init_args}: {error}") from error


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
        for key, dim in _by_table("data.dim", self.dim):
            _at_least(key, dim, 1)
        for key, dtype in _by_table("data.dtype", self.dtype):
            _one_of(key, dtype, get_args(RowDtype))
        for key, rows in _by_table("data.fp32_rows", self.fp32_rows):
            _at_least(key, rows, 0)
        for name in ("window", "workers", "prefetch"):
            _at_least(f"data.{name}", getattr(self, name), 1)
        _one_of("data.on_bad_id", self.on_bad_id, get_args(OnBadId))


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
        _at_least("schedule.warmup_steps", self.warmup_steps, 0)
        if (self.decay_start is None) != (self.decay_end is None):
            raise RecipeError("schedule.decay_start and schedule.decay_end go together; set both, or neither")
        if self.decay_start is not None and self.decay_end is not None:
            _at_least("schedule.decay_start", self.decay_start, self.warmup_steps, "schedule.warmup_steps")
            _at_least("schedule.decay_end", self.decay_end, self.decay_start + 1, "schedule.decay_start + 1")
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
    precision: Precision = "fp32"
    """``bf16`` runs the forward pass under torch.autocast; weights and evaluation stay float32."""
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
            _at_least(f"train.{name}", getattr(self, name), 1)
        for name in ("steps", "eval_every", "patience", "checkpoint_every", "keep_every"):
            if getattr(self, name) is not None:
                _at_least(f"train.{name}", getattr(self, name), 1)
        _at_least("train.seed", self.seed, 0)
        _one_of("train.device", self.device, get_args(Device))
        _one_of("train.precision", self.precision, get_args(Precision))
        _one_of("train.monitor", self.monitor, get_args(Monitor))
        _one_of("train.checkpoint", self.checkpoint, get_args(CheckpointPolicy))
        if self.checkpoint_minutes is not None and not self.checkpoint_minutes > 0:
            raise RecipeError(f"train.checkpoint_minutes is {self.checkpoint_minutes}, must be above 0")
        for name in ("checkpoint_every", "checkpoint_minutes", "keep_every"):
            if getattr(self, name) is not None and self.checkpoint != "last":
                raise RecipeError(f"train.{name} is set, but train.checkpoint is '{self.checkpoint}'; set it to 'last'")


@dataclass(frozen=True, kw_only=True)
class ParallelRecipe:
    """How the model is distributed where several processes train it (``torchrun -m hotbed train …``)."""

    plan: str = "table"
    """Sharding scheme of the tables (table, row, column, grid, dp), or a plan's JSON file."""
    dense: DensePart = "ddp"
    """``ddp``: every process has all dense parameters; ``fsdp``: they are sharded."""
    forward_codec: Codec = "fp32"
    """How rows cross the wire; all but fp32 round them."""
    backward_codec: Codec = "fp32"
    """How gradients of rows cross the wire; all but fp32 round them."""
    sums_apart: bool = False
    """Let row-wise optimizers see the columns of each tile by themselves, where rows are cut into columns."""
    ranks_per_node: int | None = None
    """Exchange in two hops, inside nodes of so many processes and then between nodes; it does not change results."""
    replicas: int = 1
    """Groups of processes that hold a copy of all tables each; the plan is for the processes of one. Copies are
    averaged, which changes results, unless ``exact`` is set."""
    sync_every: int = 1
    """Steps between averages of copies; they are also averaged for evaluations and checkpoints."""
    layout: Layout = "groups"
    """What neighbouring processes, as on a host, are: of one of the ``groups``, or ``replicas`` of the same tiles."""
    exact: bool = False
    """Update every copy by the gradients of all samples instead: results of one group, for more bytes every step."""
    overlap: bool = True
    """Exchange the ids of the next batch while one is computed; it does not change results."""
    reader: Reader = "each"
    """``each`` process reads its samples; or the ``first`` one reads all and sends the others theirs; or ``owners``
    read the features whose tables they own, of all samples; no ids are exchanged, and no table may be cut into rows."""
    timeout_s: int = 600
    """Seconds after which an exchange between processes fails."""

    def __post_init__(self) -> None:
        _one_of("parallel.dense", self.dense, get_args(DensePart))
        _one_of("parallel.reader", self.reader, get_args(Reader))
        for key in ("forward_codec", "backward_codec"):
            _one_of(f"parallel.{key}", getattr(self, key), get_args(Codec))
        _one_of("parallel.layout", self.layout, get_args(Layout))
        for key in ("replicas", "sync_every", "timeout_s"):
            _at_least(f"parallel.{key}", getattr(self, key), 1)
        if self.replicas > 1 and self.reader == "owners":
            raise RecipeError(
                f"parallel.reader is 'owners' and parallel.replicas is {self.replicas}, but owners read for one group "
                "only; use reader 'each' or 'first', or replicas 1"
            )
        if self.ranks_per_node is not None:
            _at_least("parallel.ranks_per_node", self.ranks_per_node, 1)
        if not self.plan:
            raise RecipeError("parallel.plan is empty; give a scheme like table or row, or a plan's file")


@dataclass(frozen=True, kw_only=True)
class MemoryRecipe:
    """In which memory the rows of tables are; it does not change results."""

    tier: Tier = "device"
    """Where rows are that no budget holds: in the compute device's memory, all at once; or in the ``host``'s memory or
    on ``disk``, where they come to be when they are trained."""
    device_bytes: int = 0
    """With another tier: bytes of the device's memory, per process, for the rows with the most accesses per byte. Rows
    have to be numbered by falling popularity, as hotbed prepare does."""
    host_bytes: int = 0
    """With tier ``disk``: the same of the host's memory, for the rows that follow."""
    cache_rows: int = 0
    """With another tier: rows, per process, of a cache for those that are used."""
    cache_policy: CachePolicy = "lru"
    """Which rows the cache gives up: the least recently or the least often used ones (``lfu``)."""
    cache_tier: CacheTier = "device"
    """Where the cache is: in the compute device's memory, or in the ``host``'s."""
    host: HostRows = "records"
    """How rows are in the host's memory: ``records`` come to be when they are trained, and are brought to the device
    batch by batch; with ``uva`` all rows are there at once, and a GPU reads and writes them in place, without a cache.
    """
    directory: str | None = None
    """Where files are made for tier ``disk``, which end with the process; by default that of temporary files."""

    def __post_init__(self) -> None:
        _one_of("memory.tier", self.tier, get_args(Tier))
        _one_of("memory.cache_policy", self.cache_policy, get_args(CachePolicy))
        _one_of("memory.cache_tier", self.cache_tier, get_args(CacheTier))
        _one_of("memory.host", self.host, get_args(HostRows))
        for name in ("device_bytes", "host_bytes", "cache_rows"):
            _at_least(f"memory.{name}", getattr(self, name), 0)
            if getattr(self, name) and self.tier == "device":
                raise RecipeError(f"memory.{name} is set, but memory.tier is 'device'; set it to 'host' or 'disk'")
        if self.host_bytes and self.tier != "disk":
            raise RecipeError(f"memory.host_bytes is set, but memory.tier is '{self.tier}'; set it to 'disk'")
        if self.host == "uva" and self.tier == "host" and self.cache_rows:
            raise RecipeError(
                f"memory.cache_rows is {self.cache_rows:,}, but memory.host is 'uva', whose rows a GPU reads in place; "
                "set it to 'records', or cache_rows to 0"
            )

    @property
    def cached_tiers(self) -> tuple[Tier, ...]:
        """Memories whose rows may have a cache before them."""
        return ("disk",) if self.host == "uva" else ("host", "disk")


@dataclass(frozen=True, kw_only=True)
class HotRecipe:
    """Rows that most inputs need, and in which order inputs come that need no others (``hotbed pack``)."""

    rows: str | None = None
    """``hot_rows.json`` of hotbed pack: these rows are in the memory of every process's device, the others where
    parallel.plan and memory.tier say; it does not change results."""
    batches: Batches = "mixed"
    """``apart``: pure hot and pure cold batches take turns, of the splits that hotbed pack has made of the train split;
    this is another order of the same samples. ``split``: the samples of each batch that need hot rows only are computed
    while the rows of its others come; gradients add up to the batch's, in another order of summands."""
    rate: int = 50
    """With ``apart``: percent of the cold batches, and then of the hot ones, before the next evaluation; at first."""
    floor: int = 1
    """The least rate. It is halved when the loss of an evaluation is above the one before."""
    cap: int = 50
    """The largest rate."""
    patience: int = 4
    """The rate is doubled when the loss has fallen so many times in a row."""

    def __post_init__(self) -> None:
        _one_of("hot.batches", self.batches, get_args(Batches))
        _at_least("hot.floor", self.floor, 1)
        _at_least("hot.rate", self.rate, self.floor, "hot.floor")
        _at_least("hot.cap", self.cap, self.rate, "hot.rate")
        _at_least("hot.patience", self.patience, 1)
        if self.cap > 100:
            raise RecipeError(f"hot.cap is {self.cap}, must be at most 100 percent")
        if self.rows == "":
            raise RecipeError("hot.rows is empty; give the hot_rows.json that hotbed pack has written")
        if self.batches == "split" and self.rows is None:
            raise RecipeError(
                "hot.batches is 'split', but nothing says which rows are hot; set hot.rows to the hot_rows.json of "
                "hotbed pack"
            )


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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A whole training run."""

    name: str
    """Name of the run's directory."""
    data: DataRecipe
    model: Component
    """An nn.Module made with ``tables=, features=, dense_features=, seed=``; it maps a batch to logits [B, T]."""
    dense_optimizer: Component
    """A torch.optim optimizer, made with the model's parameters."""
    sparse_optimizer: Component
    """A hotbed.optim optimizer, made with the model."""
    wide_optimizer: Component | None = None
    """Sparse optimizer of the model's ``wide`` collection; by default ``sparse_optimizer`` trains that, too."""
    schedule: ScheduleRecipe = field(default_factory=ScheduleRecipe)
    train: TrainRecipe
    init: InitRecipe = field(default_factory=InitRecipe)
    parallel: ParallelRecipe = field(default_factory=ParallelRecipe)
    memory: MemoryRecipe = field(default_factory=MemoryRecipe)
    hot: HotRecipe = field(default_factory=HotRecipe)

    def __post_init__(self) -> None:
        if not self.name or any(c in self.name for c in "/\\"):
            raise RecipeError(f"name is '{self.name}', must be a plain directory name; it becomes runs/NAME")
        if self.parallel.dense == "fsdp" and self.train.checkpoint != "none":
            raise RecipeError(
                "parallel.dense is 'fsdp', of which this release saves no checkpoint; set train.checkpoint to 'none', "
                "or parallel.dense to 'ddp'"
            )
        if self.hot.rows is not None and (self.memory.device_bytes or self.memory.host_bytes):
            raise RecipeError(
                "hot.rows says which rows are in the device's memory, but memory.device_bytes or memory.host_bytes is "
                "set, too; leave one of them out"
            )
        if self.hot.batches == "apart":
            for key, value in (("train.eval_every", self.train.eval_every), ("parallel.reader", self.parallel.reader)):
                if value not in (None, "each"):
                    raise RecipeError(
                        f"hot.batches is 'apart', which evaluates after its rounds and reads in each process, but "
                        f"{key} is {value}; leave it out"
                    )
        if self.hot.batches == "split":
            for key, value, needed in (
                ("reader", self.parallel.reader, ("each", "first")),
                ("dense", self.parallel.dense, ("ddp",)),
                ("overlap", self.parallel.overlap, (True,)),
            ):
                if value not in needed:
                    either = " or ".join(map(str, needed))
                    raise RecipeError(
                        f"hot.batches is 'split', which needs parallel.{key} {either}, but it is {value}; leave it out"
                    )
        end, steps, needs = self.schedule.decay_end, self.train.steps, self.data.valid_split is None
        if end is not None and steps is not None and steps > end:
            raise RecipeError(
                f"train.steps is {steps:,}, but the learning rate is 0 after schedule.decay_end {end:,}; raise "
                f"schedule.decay_end to at least {steps:,}"
            )
        for key, value in (
            ("train.eval_every", self.train.eval_every),
            ("train.patience", self.train.patience),
            ("hot.batches", "apart" if self.hot.batches == "apart" else None),
            ("train.checkpoint", "best" if self.train.checkpoint == "best" else None),
        ):
            if needs and value is not None:
                raise RecipeError(f"{key} is {value}, but there is nothing to evaluate on; set data.valid_split")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for YAML and JSON; `from_dict` is the inverse."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Make a recipe from plain values.

        Raises
        ------
        RecipeError
            If a key is unknown (with the closest known one) or missing, or a value is out of range.
        """
        check_keys(values)
        return cast("Self", _from_mapping(cls, values, ""))


def check_keys(values: object, *, complete: bool = True) -> None:
    """Raise `RecipeError` if a recipe's plain values have an unknown key, or lack one unless ``complete`` is False."""
    _check_keys(Recipe, values, "", complete)


def _check_keys(cls: type[Any], values: object, where: str, complete: bool) -> None:
    if not isinstance(values, Mapping):
        raise RecipeError(f"{where.rstrip('.') or 'the recipe'} is {values!r}, must be a mapping")
    given, types = cast("Mapping[str, Any]", values), get_type_hints(cls)
    for key, value in given.items():
        if key not in types:
            raise RecipeError(
                f"the recipe has an unknown key '{where}{key}'; {where.rstrip('.') or 'a recipe'} may have "
                f"{', '.join(types)}{did_you_mean(str(key), types)}"
            )
        if part := _part(types[key], value):
            _check_keys(part, value, f"{where}{key}.", complete)
    for f in fields(cls):
        if complete and f.name not in given and f.default is MISSING and f.default_factory is MISSING:
            raise RecipeError(f"the recipe lacks '{where}{f.name}', which is required")


def _from_mapping(cls: type[Any], values: Mapping[str, Any], where: str) -> Any:
    types = get_type_hints(cls)
    made = {
        key: _from_mapping(part, value, f"{where}{key}.") if (part := _part(types[key], value)) else value
        for key, value in values.items()
    }
    try:
        return cls(**made)
    except RecipeError as error:
        if cls is not Component:
            raise
        # A component does not know which of the recipe's components it is.
        raise RecipeError(f"{where}{error}") from None


def _part(annotation: Any, value: object) -> type[Any] | None:
    """The dataclass that a value is to become; None where it stays as it is."""
    choices = (annotation, *get_args(annotation))
    if value is None and type(None) in choices:
        return None
    return next((c for c in choices if isinstance(c, type) and is_dataclass(c)), None)


def _by_table(key: str, value: Any) -> list[tuple[str, Any]]:
    """Dotted keys and values of an option that may be given by table."""
    return [(f"{key}.{table}", v) for table, v in value.items()] if isinstance(value, dict) else [(key, value)]


def _at_least(key: str, value: object, limit: int, what: str = "") -> None:
    if not is_int(value):
        raise RecipeError(f"{key} is {value!r}, must be an integer")
    if not value >= limit or not math.isfinite(value):
        raise RecipeError(f"{key} is {value:,}, must be at least {limit:,}{f' ({what})' if what else ''}")


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise RecipeError(f"{key} is '{value}', must be one of {', '.join(choices)}{did_you_mean(str(value), choices)}")
