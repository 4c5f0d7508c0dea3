"""Configure tables and look up ids, like TorchRec.

``EmbeddingBagCollection`` pools the vectors of each bag. ``EmbeddingCollection`` returns the vector of each id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from math import sqrt
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from hotbed import embed
from hotbed.batch import Embeddings
from hotbed.checks import check_known
from hotbed.compat.torch_nn import rename_states
from hotbed.compat.torchrec.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from hotbed.compat.torchrec.keyed_tensor import KeyedTensor, check_names
from hotbed.compat.torchrec.table_views import TableView, optimizers_in_backward, untrained
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Bags, Jagged
from hotbed.optim import SparseOptimizer
from hotbed.specs import Feature, Pooling, RowDtype, Table

_POOLINGS: dict[str, Pooling] = {"SUM": "sum", "MEAN": "mean"}
_CASTS = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
_EPSILON = 1e-6
"""Number that is added to the sum of a bag's weights before a division, as in TorchRec, so that no divisor is 0."""


class PoolingType(Enum):
    """Pooling of the vectors of a bag."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(Enum):
    """Dtypes of stored rows that hotbed supports."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT8 = "INT8"
    NFP8 = "NFP8"


_DTYPES: dict[str, RowDtype] = {"FP32": "fp32", "FP16": "fp16", "BF16": "bf16", "INT8": "int8", "NFP8": "fp8"}
InitFn = Callable[[Tensor], object]


@dataclass
class EmbeddingConfig:
    """Configuration of a table without pooling.

    Parameters
    ----------
    num_embeddings, embedding_dim, name, data_type
        Number of rows, number of columns, a unique name, and the dtype of the rows.
    feature_names
        Features that use the table (default: one feature with the table's name).
    weight_init_max, weight_init_min
        Bounds of uniform initial values (default: ``±√(1 / embedding_dim)``, as in TorchRec).
    init_fn
        Function that fills a tensor ``[R, D]`` with initial values. The bounds above are then ignored.
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
        """Return the largest initial value."""
        return sqrt(1 / self.embedding_dim) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Return the smallest initial value."""
        return -sqrt(1 / self.embedding_dim) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Return the number of features."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """Configuration of a table with pooling by sum or mean. All further fields are as in `EmbeddingConfig`."""

    pooling: PoolingType = PoolingType.SUM


def _table_of(config: EmbeddingConfig) -> Table:
    """Build a table from a config of this package or TorchRec."""
    kind: str = config.data_type.value
    check_known(f"table '{config.name}': data_type", kind, _DTYPES, SpecError)
    if getattr(config, "use_virtual_table", False):
        raise SpecError(
            f"table '{config.name}': got use_virtual_table, expected False. Use a hotbed.Table with hotbed.Dynamic."
        )
    bound = config.get_weight_init_max() if _is_symmetric(config) else None
    return Table(
        config.name, rows=config.num_embeddings, dim=config.embedding_dim, dtype=_DTYPES[kind], init_bound=bound
    )


def _is_symmetric(config: EmbeddingConfig) -> bool:
    """Return whether initial values are uniform on ``±x``. A table can generate such values on any rank."""
    bounds = {"a": config.get_weight_init_min(), "b": config.get_weight_init_max()}
    fill = config.init_fn  # TorchRec's default is a partial of uniform_ with these bounds
    is_uniform = getattr(getattr(fill, "func", None), "__name__", "") == "uniform_"
    is_default = is_uniform and getattr(fill, "keywords", None) == bounds
    return (fill is None or is_default) and bounds["a"] == -bounds["b"]


Config = TypeVar("Config", bound=EmbeddingConfig)


def _embedding_names(configs: Sequence[Config]) -> dict[str, tuple[str, Config]]:
    """Map the name of each output to its feature and the config of its table.

    An output has the name of its feature. If several tables have this feature, the names are ``feature@table``.
    """
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


def _pooling_of(config: EmbeddingConfig) -> Pooling:
    kind = getattr(config, "pooling", None)
    if kind is not None:
        fix = "Use EmbeddingCollection for lookups without pooling."
        check_known(f"table '{config.name}': pooling", kind.value, _POOLINGS, SpecError, fix)
    return "none" if kind is None else _POOLINGS[kind.value]


class _TorchRecCollection(nn.Module, Generic[Config]):
    """Base class of `EmbeddingBagCollection` and `EmbeddingCollection`. Names in ``state_dict`` are as in TorchRec."""

    views_name: str
    loaded_from = ""
    """Prefix of this module's names in the state that was loaded last."""

    def __init__(self, tables: Sequence[Config], device: torch.device | str | None, weighted: bool = False) -> None:
        super().__init__()
        self._configs = list(tables)
        self._names = _embedding_names(self._configs)
        self._device = device = torch.get_default_device() if device is None else torch.device(device)
        poolings: dict[str, Pooling] = {config.name: _pooling_of(config) for config in self._configs}
        self._weighted_means = {table for table, pooling in poolings.items() if weighted and pooling == "mean"}
        for table in self._weighted_means:
            poolings[table] = "sum"  # weights are normalized, which turns the sum into a mean
        features = [Feature(name, c.name, pooling=poolings[c.name]) for name, (_, c) in self._names.items()]
        if self._configs:
            seed = int(torch.randint(2**32, (), device="cpu"))  # depends on torch.manual_seed
            tables_of_rows = [_table_of(config) for config in self._configs]
            self.rows = embed.EmbeddingCollection(tables_of_rows, features, seed=seed, device=device)
            self.rows.are_parameters = True
        setattr(self, self.views_name, nn.ModuleDict({c.name: TableView(self.rows, c.name) for c in self._configs}))
        self._fused: list[SparseOptimizer] = []
        self._features = tuple(feature for feature, _ in self._names.values())
        for config in self._configs:
            self._initialize(config, device)
        rename_states(self, "rows.", f"{self.views_name}.")

    @torch.no_grad()
    def _initialize(self, config: EmbeddingConfig, device: torch.device) -> None:
        """Fill a table with the initial values of its config, unless the table itself generates such values."""
        if _is_symmetric(config):
            return
        if device.type == "meta":
            raise SpecError(
                f"table '{config.name}' on 'meta': got init_fn or asymmetric bounds, expected weight_init_min = "
                "-weight_init_max without init_fn. Build the collection on 'cpu', or change the bounds."
            )
        values = torch.empty(config.num_embeddings, config.embedding_dim, device=device)
        if config.init_fn is None:
            values.uniform_(config.get_weight_init_min(), config.get_weight_init_max())
        else:
            config.init_fn(values)
        self.rows.set_weight(config.name, values)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fused": []}  # a copy builds its own optimizers

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self.rows.device if self._configs else self._device

    def table_views(self) -> list[TableView]:
        """Return the views of the tables."""
        views: nn.ModuleDict = getattr(self, self.views_name)
        return [view for view in views.values() if isinstance(view, TableView)]

    def _look_up(self, ids: Jagged) -> tuple[Embeddings | None, dict[str, TableView]]:
        """Look up ids. Return the vectors, and in training also the `TableView`s that no sparse optimizer trains.

        The keys of the `TableView`s are the names of tables. If no table at all has a sparse optimizer, and torch's
        optimizers can train all tables, the vectors are None, and the caller looks up rows with a dense gradient.
        """
        if not (self.training and torch.is_grad_enabled()):
            return self.rows(ids), {}
        self.fused_optimizers()
        views = self.table_views()
        for view in views:
            view.follow()
        idle = self.rows.idle_tables()
        apart = {view.ref.table: view for view in views if view.ref.table in idle}
        if apart:
            for store in self.rows.stores():
                store.replaced()  # because torch's optimizers write to rows without a notice to the store
        if len(apart) == len(views) and all(view.has_rows for view in views):
            return None, apart
        dense = [table for table, view in apart.items() if view.has_rows]
        if not dense:
            return self.rows(ids), apart
        self.rows.freeze(*dense)
        try:
            return self.rows(ids), apart
        finally:
            self.rows.unfreeze(*dense)

    def _checked(self, ids: Jagged) -> Jagged:
        """Check ids before a dense lookup. In a compiled graph, torch's lookup checks ids instead."""
        return ids if torch.compiler.is_dynamo_compiling() else self.rows.check(ids)

    def fused_optimizers(self) -> list[SparseOptimizer]:
        """Return the optimizers that update tables in backward. They are built on first use."""
        self._fused = self._fused or optimizers_in_backward(view.ref for view in self.table_views())
        return self._fused

    def _ids(self, features: KeyedJaggedTensor | Jagged, weighted: bool) -> Jagged:
        """Convert a batch of TorchRec or this package to `Jagged`."""
        if isinstance(features, Jagged):
            return features
        inverse = getattr(features, "inverse_indices_or_none", lambda: None)()
        if inverse is not None or getattr(features, "variable_stride_per_key", lambda: False)():
            raise BatchError(
                "batch: got inverse indices or batch sizes that differ by key, expected the ids of every sample for "
                "every key. Expand the batch to one bag per key and sample."
            )
        weights = features.weights_or_none() if weighted else None
        if weighted and weights is None:
            raise BatchError(
                "batch of a weighted collection: got no weights, expected one per id. Add weights to the batch, or "
                "build the collection with is_weighted=False."
            )
        ids = Jagged.from_keyed(features.keys(), features.values(), features.lengths(), weights)
        if self._features == tuple(self._names) and not self._weighted_means:
            return ids
        values = ids.to_dict()  # a feature that several tables use is repeated for each table
        own: dict[str, Tensor] = {}
        for name, (feature, config) in self._names.items():
            bags = ids[feature]
            if bags.weights is not None:
                is_mean = config.name in self._weighted_means
                own[name] = _normalize(bags.weights, bags.lengths()) if is_mean else bags.weights
        return Jagged.from_dict({name: values[ids.names[ids.index(f)]] for name, (f, _) in self._names.items()}, own)


class EmbeddingBagCollection(_TorchRecCollection[EmbeddingBagConfig]):
    """Look up and pool features in tables.

    Parameters
    ----------
    tables
        Configs of this package or TorchRec.
    is_weighted
        Whether batches have one weight per id.
    device
        Device of the tables (default: torch's default device). `DistributedModelParallel` creates tables on ``"meta"``.
    """

    views_name = "embedding_bags"
    embedding_bags: nn.ModuleDict

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tables, device, is_weighted)
        self._is_weighted = is_weighted

    @override
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return float32 vectors, with keys in the order of the tables and their features."""
        if not self._configs:
            return KeyedTensor([], [], torch.empty(features.stride(), 0, device=self._device))
        ids = self._ids(features, self._is_weighted)
        found, apart = self._look_up(ids)
        sizes = [config.embedding_dim for _, config in self._names.values()]
        if found is not None and not apart:
            return KeyedTensor(list(self._names), sizes, found.concatenate, found)
        ids = self._checked(ids)
        parts: dict[str, Tensor] = {}
        for name, (_, config) in self._names.items():
            view = apart.get(config.name)
            if view is None or not view.has_rows:
                assert found is not None
                parts[name] = found[name] if view is None else untrained(found[name], view)
            else:
                parts[name] = self._pooled(ids[name], view).to(self.rows.dtype)
        return KeyedTensor(list(parts), sizes, torch.cat(list(parts.values()), dim=1), parts)

    def _pooled(self, bags: Bags, view: TableView) -> Tensor:
        """Look up and pool rows of a table, with a dense gradient for torch's optimizers."""
        ids, offsets = bags.values.long(), functional.pad(bags.lengths().cumsum(0), (1, 0))
        mode = next(f.pooling for f in self.rows.features if f.table == view.ref.table)
        return functional.embedding_bag(
            ids, view.parameter, offsets, mode=mode, per_sample_weights=bags.weights, include_last_offset=True
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of the tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether batches have a weight per id."""
        return self._is_weighted


class EmbeddingCollection(_TorchRecCollection[EmbeddingConfig]):
    """Look up features in tables, without pooling.

    Parameters
    ----------
    tables, device
        As for `EmbeddingBagCollection`. All tables have the same dim.
    need_indices
        Whether the `JaggedTensor` results have the looked-up ids as their weights.
    """

    views_name = "embeddings"
    embeddings: nn.ModuleDict

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        device: torch.device | str | None = None,
        need_indices: bool = False,
    ) -> None:
        dims = {config.embedding_dim for config in tables}
        if len(dims) > 1:
            raise ValueError(
                f"embedding_dim of an EmbeddingCollection: got {sorted(dims)}, expected one for all tables"
            )
        super().__init__(tables, device)
        self._need_indices = need_indices

    @override
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return, for each feature, the float32 vectors ``[N, D]`` of its N ids, and the lengths of its bags."""
        if not self._configs:
            return {}
        ids = self._ids(features, False)
        found, apart = self._look_up(ids)
        checked = self._checked(ids) if apart else ids
        made: dict[str, JaggedTensor] = {}
        for name, (_, config) in self._names.items():
            view = apart.get(config.name)
            if view is None or not view.has_rows:
                assert found is not None
                values, offsets = found.jagged(name)
                values = values if view is None else untrained(values, view)
            else:
                bags = checked[name]
                offsets = functional.pad(bags.lengths().cumsum(0), (1, 0))
                values = functional.embedding(bags.values.long(), view.parameter).to(self.rows.dtype)
            indices = ids[name].values if self._need_indices else None
            made[name] = JaggedTensor(values, indices, offsets=offsets)
        return made

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Return the configs of the tables."""
        return self._configs

    def embedding_dim(self) -> int:
        """Return the number of columns of all tables, or −1 without tables, as in TorchRec."""
        return self._configs[0].embedding_dim if self._configs else -1

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return, for each table, the names of its outputs: ``feature``, or ``feature@table`` if it is ambiguous."""
        of_tables = {config.name: [] for config in self._configs}
        for name, (_, config) in self._names.items():
            of_tables[config.name].append(name)
        return list(of_tables.values())

    def need_indices(self) -> bool:
        """Return whether the `JaggedTensor` results have the looked-up ids as their weights."""
        return self._need_indices


def _normalize(weights: Tensor, lengths: Tensor) -> Tensor:
    """Divide each weight ``[N]`` by the sum of the weights of its bag. As in TorchRec, the sum has no gradient."""
    sums = torch.segment_reduce(weights.detach().float(), "sum", lengths=lengths)
    return weights / (sums + _EPSILON).repeat_interleave(lengths)


class ComputeKJTToJTDict(nn.Module):
    """Convert a `KeyedJaggedTensor` to a dict of `JaggedTensor`."""

    @override
    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """Convert a dict of `JaggedTensor` to a `KeyedJaggedTensor`."""

    @override
    def forward(self, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


class KTRegroupAsDict(nn.Module):
    """Regroup vectors, like `KeyedTensor.regroup_as_dict`.

    ``emb_dtype`` is the dtype of the result: FP32, FP16 or BF16 (default: the dtype of the vectors). ``multi_device``
    is ignored, because the module has no tensors, so it runs on the device of the vectors.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[str]],
        keys: Sequence[str],
        emb_dtype: DataType | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        del multi_device
        check_names(groups, keys)
        if emb_dtype is not None:
            check_known("emb_dtype", emb_dtype.value, _CASTS, SpecError)
        self._groups, self._names = [list(group) for group in groups], list(keys)
        self._dtype = None if emb_dtype is None else _CASTS[emb_dtype.value]

    @override
    def forward(self, keyed_tensors: Sequence[KeyedTensor]) -> dict[str, Tensor]:
        if not keyed_tensors:
            raise BatchError("keyed_tensors: got an empty list. Pass at least one KeyedTensor.")
        if len(dims := {keyed.key_dim() for keyed in keyed_tensors}) > 1:
            raise BatchError(
                f"key_dim of keyed_tensors: got {sorted(dims)}, expected one. Regroup each dim separately."
            )
        grouped = KeyedTensor.regroup_as_dict(keyed_tensors, self._groups, self._names)
        return {name: vectors.to(self._dtype or vectors.dtype) for name, vectors in grouped.items()}
