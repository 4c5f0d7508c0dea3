"""Describe tables as TorchRec does: ``EmbeddingBagConfig`` and ``EmbeddingConfig``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import sqrt
from typing import TypeVar

from torch import Tensor

from hotbed.errors import SpecError
from hotbed.pooling import Pooling
from hotbed.specs import Feature, RowDtype, Table


class PoolingType(Enum):
    """How the vectors of a bag become one."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(Enum):
    """What rows are stored as; those that hotbed has."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"
    NFP8 = "NFP8"


_DTYPES: dict[str, RowDtype] = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "int8", "NFP8": "fp8"}
InitFn = Callable[[Tensor], object]


@dataclass
class EmbeddingConfig:
    """A table whose vectors are not pooled.

    Parameters
    ----------
    num_embeddings, embedding_dim, name
        Rows, columns, and a name of its own.
    data_type
        What rows are stored as.
    feature_names
        Features that are looked up in it; default: one of the table's name.
    weight_init_max, weight_init_min
        Initial values are uniform between them; default ``±√(1 / embedding_dim)``, as in TorchRec.
    init_fn
        Fills the table in the place of that.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: InitFn | None = None

    def get_weight_init_max(self) -> float:
        """Largest initial value."""
        return sqrt(1 / self.embedding_dim) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Smallest initial value."""
        return -sqrt(1 / self.embedding_dim) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Number of features."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """A table whose vectors are pooled, by sum or mean; other fields are those of `EmbeddingConfig`."""

    pooling: PoolingType = PoolingType.SUM


def table_of(config: EmbeddingConfig) -> Table:
    """Make the table that a config describes; TorchRec's own configs will do."""
    kind: str = config.data_type.value
    if kind not in _DTYPES:
        raise SpecError(f"table '{config.name}': data_type is {kind}, must be one of {', '.join(_DTYPES)}")
    if getattr(config, "use_virtual_table", False):
        raise SpecError(f"table '{config.name}': use_virtual_table is not supported; use a table of hotbed.Dynamic")
    bound = config.get_weight_init_max() if is_symmetric(config) else None
    return Table(
        config.name, rows=config.num_embeddings, dim=config.embedding_dim, dtype=_DTYPES[kind], init_bound=bound
    )


def is_symmetric(config: EmbeddingConfig) -> bool:
    """Whether initial values are uniform on ``±x``, which tables make by themselves, on any rank."""
    filled = config.init_fn
    own = getattr(filled, "keywords", None)  # TorchRec's default is a partial of uniform_ with these bounds
    bounds = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    is_uniform = filled is None or (
        getattr(getattr(filled, "func", None), "__name__", "") == "uniform_" and own == bounds
    )
    return is_uniform and bounds["a"] == -bounds["b"]


Config = TypeVar("Config", bound=EmbeddingConfig)


def embedding_names(configs: Sequence[Config]) -> dict[str, tuple[str, Config]]:
    """Map what is looked up, ``feature`` or (of several tables) ``feature@table``, to feature and table."""
    names = [config.name for config in configs]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"Duplicate table name {twice[0]}")
    for config in configs:
        config.feature_names = config.feature_names or [config.name]
    features = [feature for config in configs for feature in config.feature_names]
    return {
        feature if features.count(feature) == 1 else f"{feature}@{config.name}": (feature, config)
        for config in configs
        for feature in config.feature_names
    }


def is_mean(config: EmbeddingConfig) -> bool:
    """Return whether bags are averaged."""
    pooling = getattr(config, "pooling", None)
    return pooling is not None and pooling.value == "MEAN"


def feature_of(name: str, config: EmbeddingConfig, weighted: bool = False) -> Feature:
    """Make the feature that a table's config describes; bags are summed where weights already make it a mean."""
    pooling = getattr(config, "pooling", None)
    kinds: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean"}
    if pooling is not None and pooling.value not in kinds:
        raise SpecError(
            f"table '{config.name}': pooling is {pooling.value}, must be SUM or MEAN; vectors that are not pooled are "
            "looked up by EmbeddingCollection"
        )
    if weighted and is_mean(config):
        return Feature(name, config.name, pooling="sum")
    return Feature(name, config.name, pooling="none" if pooling is None else kinds[pooling.value])
