"""Look up as TorchRec does: ``EmbeddingBagCollection`` pools, ``EmbeddingCollection`` does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic

import torch
from torch import Tensor, nn
from typing_extensions import override

from hotbed import embed
from hotbed.batch import Embeddings
from hotbed.compat.drop_in import weight_of
from hotbed.compat.torchrec.configs import (
    Config,
    EmbeddingBagConfig,
    EmbeddingConfig,
    embedding_names,
    feature_of,
    is_symmetric,
    table_of,
)
from hotbed.compat.torchrec.optimizers import TableHandle, optimizers_in_backward
from hotbed.compat.torchrec.tensors import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from hotbed.errors import BatchError, SpecError
from hotbed.jagged import Jagged
from hotbed.optim import SparseOptimizer


class TableView(nn.Module):
    """Show a table under the path that TorchRec has for it; its parameter has no values, and stands for the table.

    Attributes
    ----------
    handle
        What ``parameters()`` gives for the table: optimizers are applied to it by ``apply_optimizer_in_backward``.
    """

    def __init__(self, rows: embed.EmbeddingCollection, table: str) -> None:
        super().__init__()
        self._rows = [rows]  # in a list, so that it is no part of this module
        self.table = table
        self.handle = TableHandle.of(rows, table)

    @property
    def weight(self) -> Tensor:
        """Rows ``[R, D]``: the memory of the table where it is float32 and all on this rank; without a gradient."""
        return weight_of(self._rows[0], self.table)


class _Collection(nn.Module, Generic[Config]):
    """Hold what both collections share: tables, features, and names in ``state_dict``."""

    views_name: str

    def __init__(self, tables: Sequence[Config], device: torch.device | str | None) -> None:
        super().__init__()
        self._configs = list(tables)
        self._names = embedding_names(self._configs)
        place = torch.get_default_device() if device is None else torch.device(device)
        features = [feature_of(name, config) for name, (_, config) in self._names.items()]
        self.rows = embed.EmbeddingCollection([table_of(c) for c in self._configs], features, device=place)
        setattr(self, self.views_name, nn.ModuleDict({c.name: TableView(self.rows, c.name) for c in self._configs}))
        self._fused: list[SparseOptimizer] = []
        self._features = tuple(feature for feature, _ in self._names.values())
        for config in self._configs:
            self._initialize(config, place)
        self.register_state_dict_post_hook(_rename_saved)
        self.register_load_state_dict_pre_hook(_rename_loaded)

    @torch.no_grad()
    def _initialize(self, config: EmbeddingConfig, place: torch.device) -> None:
        """Fill a table as its config says, where that is not what tables do by themselves."""
        if is_symmetric(config):
            return
        if place.type == "meta":
            raise SpecError(
                f"table '{config.name}': init_fn, or bounds that are not ±x, cannot fill a table on 'meta'; make the "
                "collection on 'cpu', or give weight_init_min = −weight_init_max"
            )
        values = torch.empty(config.num_embeddings, config.embedding_dim, device=place)
        if config.init_fn is None:
            values.uniform_(config.get_weight_init_min(), config.get_weight_init_max())
        else:
            config.init_fn(values)
        self.rows.set_weight(config.name, values)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fused": []}  # a copy makes optimizers of its own

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.rows.device

    def _look_up(self, features: KeyedJaggedTensor | Jagged, weighted: bool) -> Embeddings:
        if self.training and torch.is_grad_enabled():
            self.fused_optimizers()
        return self.rows(self._ids(features, weighted))

    def fused_optimizers(self) -> list[SparseOptimizer]:
        """The optimizers that ``apply_optimizer_in_backward`` chose for the tables; made when they are first needed."""
        views: nn.ModuleDict = getattr(self, self.views_name)
        self._fused = self._fused or optimizers_in_backward(self.rows, list(views.parameters()))
        return self._fused

    def _ids(self, features: KeyedJaggedTensor | Jagged, weighted: bool) -> Jagged:
        """Convert a batch, of TorchRec or this package."""
        if isinstance(features, Jagged):
            return features
        inverse = getattr(features, "inverse_indices_or_none", lambda: None)()
        if inverse is not None or getattr(features, "variable_stride_per_key", lambda: False)():
            raise BatchError(
                "the batch has inverse indices, or batch sizes that differ by key, which hotbed does not take; give "
                "every key the ids of every sample"
            )
        weights = features.weights_or_none() if weighted else None
        if weighted and weights is None:
            raise BatchError("the collection is_weighted, the batch has no weights; give it some, or is_weighted=False")
        ids = Jagged.from_keyed(features.keys(), features.values(), features.lengths(), weights)
        if self._features == tuple(self._names):
            return ids
        given = ids.to_dict()  # a feature of several tables comes once for each
        of_names = {name: feature for name, (feature, _) in self._names.items()}
        own = {name: w for name, f in of_names.items() if (w := ids[f].weights) is not None}
        return Jagged.from_dict({name: given[ids.names[ids.index(f)]] for name, f in of_names.items()}, own)


class EmbeddingBagCollection(_Collection[EmbeddingBagConfig]):
    """Look up and pool features in tables.

    Parameters
    ----------
    tables
        Their configs, of this package or TorchRec's.
    is_weighted
        Whether batches bring a weight per id.
    device
        Where the tables are; default: torch's default device. On ``"meta"``, `DistributedModelParallel` makes them.

    Raises
    ------
    ValueError
        If two tables have the same name.
    SpecError
        If a config asks for what tables of hotbed do not have.
    """

    views_name = "embedding_bags"
    embedding_bags: nn.ModuleDict

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tables, device)
        self._is_weighted = is_weighted

    @override
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up: vectors ``[B, Σ D]`` float32, keys in the order of tables and their features.

        Raises
        ------
        BatchError
            If a feature is missing, an id is out of range, or weights are missing.
        """
        found = self._look_up(features, self._is_weighted)
        sizes = [config.embedding_dim for _, config in self._names.values()]
        return KeyedTensor(list(self._names), sizes, found.concatenate, found)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configs of the tables."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether batches bring a weight per id."""
        return self._is_weighted


class EmbeddingCollection(_Collection[EmbeddingConfig]):
    """Look up features in tables, a vector per id.

    Parameters
    ----------
    tables, device
        As for `EmbeddingBagCollection`; all of one dim.
    need_indices
        Whether what is returned has the ids as its weights.

    Raises
    ------
    ValueError
        If two tables have the same name, or dims differ.
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
            raise ValueError(f"tables of an EmbeddingCollection must have one embedding_dim, got {sorted(dims)}")
        super().__init__(tables, device)
        self._need_indices = need_indices

    @override
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up: by name, vectors ``[N, D]`` float32 with the lengths of the feature's bags.

        Raises
        ------
        BatchError
            If a feature is missing, or an id is out of range.
        """
        ids = self._ids(features, False)
        found = self._look_up(ids, False)
        made: dict[str, JaggedTensor] = {}
        for name in self._names:
            values, offsets = found.jagged(name)
            indices = ids[name].values if self._need_indices else None
            made[name] = JaggedTensor(values, indices, offsets=offsets)
        return made

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configs of the tables."""
        return self._configs

    def embedding_dim(self) -> int:
        """Columns of all tables."""
        return self._configs[0].embedding_dim

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of what is looked up in each table."""
        of_tables = {config.name: [] for config in self._configs}
        for name, (_, config) in self._names.items():
            of_tables[config.name].append(name)
        return list(of_tables.values())

    def need_indices(self) -> bool:
        """Whether what is returned has the ids as its weights."""
        return self._need_indices


def _rename_saved(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Save tables by TorchRec's names, ``embedding_bags.NAME.weight``."""
    assert isinstance(module, _Collection)
    for key in [key for key in state if key.startswith(f"{prefix}{module.views_name}.")]:
        del state[key]  # of a handle
    for key in [key for key in state if key.startswith(f"{prefix}rows.")]:
        state[f"{prefix}{module.views_name}.{key.removeprefix(f'{prefix}rows.')}"] = state.pop(key)


def _rename_loaded(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take tables by TorchRec's names."""
    assert isinstance(module, _Collection)
    views: nn.ModuleDict = getattr(module, module.views_name)
    start = f"{prefix}{module.views_name}."
    for key in [key for key in state if key.startswith(start)]:
        state[f"{prefix}rows.{key.removeprefix(start)}"] = state.pop(key)
    for name, parameter in views.named_parameters():
        state[f"{start}{name}"] = parameter.detach()
