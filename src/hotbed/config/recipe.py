"""`Recipe`: the whole, its plain values, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from typing import Any, Self, cast, get_args, get_type_hints

from hotbed.config.component import Component
from hotbed.config.places import HotRecipe, MemoryRecipe, ParallelRecipe
from hotbed.config.training import DataRecipe, InitRecipe, ScheduleRecipe, TrainRecipe
from hotbed.errors import RecipeError, did_you_mean

MOST_NAME_BYTES = 200
"""Of a run's name; file systems take 255."""


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
        if not _is_plain(self.name):
            raise RecipeError(
                f"name is {self.name!r}, must be a plain directory name of at most {MOST_NAME_BYTES} bytes; it becomes "
                "runs/NAME"
            )
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


def _is_plain(name: object) -> bool:
    """Whether a value can be the name of a directory."""
    if not isinstance(name, str) or not name.strip() or name in (".", ".."):
        return False
    return name.isprintable() and not {*"/\\"} & {*name} and len(name.encode(errors="replace")) <= MOST_NAME_BYTES


def _part(annotation: Any, value: object) -> type[Any] | None:
    """The dataclass that a value is to become; None where it stays as it is."""
    choices = (annotation, *get_args(annotation))
    if value is None and type(None) in choices:
        return None
    return next((c for c in choices if isinstance(c, type) and is_dataclass(c)), None)
