"""Describe ranks, sharders and plans as TorchRec does, on hotbed's plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

import torch.distributed as dist
from torch import nn

from hotbed.comm import Link
from hotbed.compat.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from hotbed.config.places import Codec, ParallelOptions
from hotbed.embed.agreed_plan import plan_of_first
from hotbed.embed.plan_names import collections_of, names_in_plans, plan_for
from hotbed.errors import SpecError
from hotbed.plan import Plan


class ShardingType(Enum):
    """How a table is divided over ranks."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


SCHEMES = {
    "data_parallel": "dp",
    "table_wise": "table",
    "column_wise": "column",
    "row_wise": "row",
    "table_row_wise": "row",
    "table_column_wise": "column",
    "grid_shard": "grid",
}
"""Schemes of hotbed by TorchRec's sharding types; where ranks exchange in two hops is not a matter of the plan."""


class ShardingEnv:
    """The ranks that share a model; ``pg`` is None for one process without a process group."""

    def __init__(self, world_size: int, rank: int, pg: dist.ProcessGroup | None = None) -> None:
        self.world_size, self.rank, self.process_group = world_size, rank, pg

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> Self:
        """Return the ranks of a process group."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> Self:
        """Return ranks without a process group."""
        return cls(world_size, rank)


class CommType(Enum):
    """Number formats in which rows and gradients can cross the wire."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"

    @property
    def codec(self) -> Codec:
        """The format by hotbed's name."""
        return self.value


@dataclass
class QCommsConfig:
    """Number formats in which rows (forward) and their gradients (backward) are exchanged."""

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32


def get_qcomm_codecs_registry(qcomms_config: QCommsConfig, device: object = None) -> QCommsConfig:
    """Return what a sharder needs to know of the number formats."""
    return qcomms_config


class EmbeddingBagCollectionSharder:
    """Options for the tables of `EmbeddingBagCollection`s; `DistributedModelParallel` shards them by its plan.

    Parameters
    ----------
    fused_params
        Optimizer of tables to which none was applied: ``optimizer``, ``learning_rate``, ``eps``, ``weight_decay``,
        ``beta1``, ``beta2``.
    qcomm_codecs_registry
        Number formats of exchanges, from `get_qcomm_codecs_registry`.
    """

    module_type: type[nn.Module] = EmbeddingBagCollection

    def __init__(
        self, fused_params: Mapping[str, Any] | None = None, qcomm_codecs_registry: QCommsConfig | None = None
    ) -> None:
        self.fused_params, self.qcomm_codecs_registry = fused_params, qcomm_codecs_registry

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return all sharding types."""
        return [kind.value for kind in ShardingType]


class EmbeddingCollectionSharder(EmbeddingBagCollectionSharder):
    """Options for the tables of `EmbeddingCollection`s, as for `EmbeddingBagCollectionSharder`."""

    module_type = EmbeddingCollection


Sharder = EmbeddingBagCollectionSharder


def parallel_options(sharders: Sequence[Sharder]) -> ParallelOptions:
    """Return the number formats that sharders ask for."""
    chosen: set[tuple[Codec, Codec]] = {
        (config.forward_precision.codec, config.backward_precision.codec)
        for config in (sharder.qcomm_codecs_registry for sharder in sharders)
        if config is not None
    }
    if len(chosen) > 1:
        raise SpecError(
            f"sharders have {len(chosen)} different qcomm_codecs_registry, expected one. Give all of them the same."
        )
    if not chosen:
        return ParallelOptions()
    forward, backward = chosen.pop()
    return ParallelOptions(forward_codec=forward, backward_codec=backward)


@dataclass
class Topology:
    """The machine that a plan is for.

    Parameters
    ----------
    world_size
        Number of ranks.
    compute_device
        ``"cpu"`` or ``"cuda"``.
    hbm_cap, ddr_cap
        Bytes of device and host memory per rank (default: those of this machine). On a CPU, tables are in ``ddr_cap``.
    local_world_size
        Ranks per node.
    """

    world_size: int
    compute_device: str = "cuda"
    hbm_cap: int | None = None
    ddr_cap: int | None = None
    local_world_size: int | None = None

    @property
    def capacity_bytes(self) -> int | None:
        """Bytes that a rank can hold."""
        return self.ddr_cap if self.compute_device == "cpu" else self.hbm_cap


@dataclass
class ParameterConstraints:
    """What a planner may do with a table.

    Parameters
    ----------
    sharding_types
        Allowed values of `ShardingType` (default: all). One is used as it is; of several, or all, the planner
        searches for the fastest.
    compute_kernels
        ``"fused"`` or ``"dense"``; both mean hotbed's kernels.
    min_partition
        Accepted for TorchRec's sake: columns are cut in multiples of 16.
    pooling_factors
        Mean number of ids per sample of each feature.
    num_poolings, batch_sizes, is_weighted, feature_names
        Accepted for TorchRec's sake, without effect.
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [1.0])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    feature_names: list[str] | None = None

    def scheme(self, table: str) -> str:
        """Return the scheme of hotbed for a table."""
        kinds = [str(getattr(kind, "value", kind)) for kind in self.sharding_types or SCHEMES]
        if unknown := [kind for kind in kinds if kind not in SCHEMES]:
            raise SpecError(
                f"table '{table}': sharding_types has '{unknown[0]}', expected one of {', '.join(SCHEMES)}. Use "
                "ShardingType.ROW_WISE.value or another of them."
            )
        kernels = [str(getattr(kernel, "value", kernel)) for kernel in self.compute_kernels or ()]
        if unknown := [kernel for kernel in kernels if kernel not in ("fused", "dense")]:
            raise SpecError(
                f"table '{table}': compute_kernels has '{unknown[0]}', expected 'fused' or 'dense'. Place rows in host "
                "memory or files by a plan: hotbed.Cut(tier='host'), see larger_than_memory.md."
            )
        schemes = {SCHEMES[kind] for kind in kinds}
        return schemes.pop() if len(schemes) == 1 else "auto"


class EmbeddingShardingPlanner:
    """Make plans of hotbed from TorchRec's constraints.

    Parameters
    ----------
    topology
        The machine (default: this one, with the ranks of the default process group).
    batch_size
        Samples of a step per rank.
    constraints
        Constraints by table. A table without them is planned ``"auto"``: hotbed searches for the fastest plan.
    debug
        Accepted for TorchRec's sake.
    """

    def __init__(
        self,
        topology: Topology | None = None,
        batch_size: int | None = None,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        debug: bool = True,
    ) -> None:
        self._topology, self._batch_size, self._constraints = topology, batch_size, constraints or {}

    def plan(self, module: nn.Module, sharders: Sequence[Sharder] = ()) -> Plan:
        """Make a plan for the tables of a model."""
        tables = names_in_plans(module)
        own = {table for _, table in tables}
        if unknown := [table for table in self._constraints if table not in own]:
            raise SpecError(
                f"constraints has table '{unknown[0]}', expected one of {', '.join(sorted(own))}. Use the names of "
                "EmbeddingBagConfig."
            )
        world_size = _world_size() if self._topology is None else self._topology.world_size
        default = ParameterConstraints()
        found = {name: self._constraints.get(table, default) for (_, table), name in tables.items()}
        schemes = {name: of.scheme(name) for name, of in found.items()}
        options: dict[str, Any] = {}
        if self._topology is not None and self._topology.capacity_bytes is not None:
            options["capacity_bytes"] = self._topology.capacity_bytes
        if self._batch_size is not None and "auto" in schemes.values():
            options["batch_size"] = self._batch_size * world_size
        if self._constraints:
            options["ids"] = self._ids(module)
        return plan_for(module, world_size, schemes, **options)

    def _ids(self, module: nn.Module) -> dict[str, float]:
        """Return the mean number of ids per sample of each table."""
        names = names_in_plans(module)
        found: dict[str, float] = {}
        for path, collection in collections_of(module).items():
            for table in collection.tables:
                factors = self._constraints.get(table, ParameterConstraints()).pooling_factors
                count = sum(feature.table == table for feature in collection.features)
                found[names[path, table]] = sum(factors) if len(factors) == count else factors[0] * count
        return found

    def collective_plan(
        self, module: nn.Module, sharders: Sequence[Sharder] = (), pg: dist.ProcessGroup | None = None
    ) -> Plan:
        """Make a plan on rank 0 and return it on all ranks, which must all call this."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.plan(module, sharders)
        return plan_of_first(Link(pg, None), lambda: self.plan(module, sharders))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
