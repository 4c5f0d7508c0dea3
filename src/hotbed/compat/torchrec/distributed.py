"""Plan, distribute and train as TorchRec does, on hotbed's plans."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from hotbed.checks import check_known
from hotbed.comm import Link
from hotbed.compat.torchrec.keyed_jagged import CombinedOptimizer, TablesOptimizer
from hotbed.compat.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from hotbed.compat.torchrec.table_configs import adopt_optimizers
from hotbed.config.parallel_memory import Codec, MemoryOptions, ParallelOptions
from hotbed.embed import Distributed, collections_of, distribute
from hotbed.embed.agreed_plan import plan_of_first
from hotbed.embed.plan_names import names_in_plans, plan_for
from hotbed.errors import SpecError
from hotbed.plan import Cut, Plan


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
        (config.forward_precision.value, config.backward_precision.value)
        for sharder in sharders
        if (config := sharder.qcomm_codecs_registry) is not None
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


@dataclass
class ParameterConstraints:
    """What a planner may do with a table.

    Parameters
    ----------
    sharding_types
        Allowed values of `ShardingType` (default: all). The planner searches for the fastest of several.
    compute_kernels
        ``"fused"`` or ``"dense"``; both mean hotbed's kernels.
    pooling_factors
        Mean number of ids per sample of each feature.
    min_partition, num_poolings, batch_sizes, is_weighted, feature_names
        Accepted for TorchRec's sake, without effect. Columns are cut in multiples of 16.
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
        for kind in kinds:
            check_known(f"table '{table}': sharding_types", kind, SCHEMES, SpecError)
        kernels = [str(getattr(kernel, "value", kernel)) for kernel in self.compute_kernels or ()]
        fix = "Place rows in host memory or files by a plan: hotbed.Cut(tier='host'), see larger_than_memory.md."
        for kernel in kernels:
            check_known(f"table '{table}': compute_kernels", kernel, ("fused", "dense"), SpecError, fix)
        schemes = {SCHEMES[kind] for kind in kinds}
        return schemes.pop() if len(schemes) == 1 else "auto"


class EmbeddingShardingPlanner:
    """Make plans of hotbed from TorchRec's constraints.

    Parameters
    ----------
    topology, batch_size
        The machine (default: this one, with the ranks of the default process group), and samples per rank.
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
        for table in self._constraints:
            check_known("table in constraints", table, sorted(own), SpecError, "Use the names of EmbeddingBagConfig.")
        machine = self._topology or Topology(_world_size())
        default = ParameterConstraints()
        schemes = {name: self._constraints.get(table, default).scheme(name) for (_, table), name in tables.items()}
        options: dict[str, Any] = {}
        if (capacity := machine.ddr_cap if machine.compute_device == "cpu" else machine.hbm_cap) is not None:
            options["capacity_bytes"] = capacity
        if self._batch_size is not None and "auto" in schemes.values():
            options["batch_size"] = self._batch_size * machine.world_size
        if self._constraints:
            options["ids"] = self._ids(module, tables)
        return plan_for(module, machine.world_size, schemes, **options)

    def _ids(self, module: nn.Module, names: Mapping[tuple[str, str], str]) -> dict[str, float]:
        """Return the mean number of ids per sample of each table."""
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


class DistributedModelParallel(nn.Module):
    """Shard the tables of a model over all ranks, and copy the rest to each: `hotbed.distribute` by TorchRec's name.

    Parameters
    ----------
    module
        The model; tables and parameters on ``meta`` get their initial values here.
    env
        The ranks; default: those of the default process group, or this process.
    device
        Where the model is to be; default: where it is, the CPU where that is ``meta``.
    plan
        A plan of hotbed, e.g. of `EmbeddingShardingPlanner`, a scheme (``"table"``, ``"row"``, ``"column"``,
        ``"auto"`` …), or schemes by table; default ``"table"``. Plans of TorchRec are refused.
    sharders
        Optimizers of tables to which none was applied (default: SGD with lr 0.01), and number formats of exchanges.
    init_data_parallel, init_parameters
        Accepted for TorchRec's sake: parameters always get values.
    parallel, memory
        As for `hotbed.distribute`.

    Attributes
    ----------
    module, device
        The distributed model, and its device.
    fused_optimizer
        Trains the tables in backward; its ``step`` does nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        env: ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: Plan | str | Cut | Mapping[str, str | Cut] | None = None,
        sharders: Sequence[Sharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        *,
        parallel: ParallelOptions | None = None,
        memory: MemoryOptions | None = None,
    ) -> None:
        super().__init__()
        _check(env, sharders or ())
        if plan is not None and not isinstance(plan, (Plan, str, Cut, Mapping)):
            raise SpecError(
                f"plan is a {type(plan).__name__}, must be a plan of hotbed or a scheme, 'table', 'row', 'column' or "
                "'auto'; a plan changes where rows are, not the model, so any will do"
            )
        for _, collection in _collections(module):
            own = [s.fused_params for s in sharders or () if s.module_type is type(collection)]
            adopt_optimizers(collection.table_views(), next((params for params in own if params), {}))
        self._given = given = "table" if plan is None else plan
        self.module = distribute(module, given, parallel or parallel_options(sharders or ()), memory, device=device)
        own_device = next((c.device for c in collections_of(self.module).values()), torch.device("cpu"))
        self.device = own_device if device is None else torch.device(device)
        self.fused_optimizer = CombinedOptimizer(
            [
                TablesOptimizer(optimizer, f"{path}.{collection.views_name}".lstrip("."))
                for path, collection in _collections(self.module)
                for optimizer in collection.fused_optimizers()
            ]
        )

    @property
    def plan(self) -> Plan:
        """Where the tables are."""
        if isinstance(self.module, Distributed):
            return self.module.plan
        return self._given if isinstance(self._given, Plan) else plan_for(self.module, 1, self._given)

    def init_data_parallel(self) -> None:
        """Do nothing: the model is ready."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the whole state of the model; all ranks must call this."""
        return self.module.state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        return self.module.load_state_dict(state_dict, strict, assign)

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.module.named_parameters(*args, **kwargs)

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.module.named_buffers(*args, **kwargs)


def _collections(model: nn.Module) -> list[tuple[str, EmbeddingBagCollection | EmbeddingCollection]]:
    kinds = (EmbeddingBagCollection, EmbeddingCollection)
    modules: dict[str, nn.Module] = dict(model.named_modules())
    return [(path, module) for path, module in modules.items() if isinstance(module, kinds)]


def _check(env: ShardingEnv | None, sharders: Sequence[Sharder]) -> None:
    """Raise `SpecError` for ranks that are not all, and for sharders that are not hotbed's."""
    if env is not None and env.world_size != _world_size():
        raise SpecError(
            f"env has {env.world_size} ranks, expected all {_world_size()}. Leave env out, and start as many processes "
            "as there are ranks."
        )
    for sharder in sharders:
        if not isinstance(sharder, Sharder):
            raise SpecError(
                f"sharders has a {type(sharder).__name__}, expected sharders of hotbed.compat.torchrec. Import "
                "EmbeddingBagCollectionSharder from there, or leave sharders out."
            )


class Multistreamable(ABC):
    """Base of batches whose memory may be used by several streams of a GPU."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory until the work of a stream that uses it is done."""


class Pipelineable(Multistreamable):
    """Base of batches that a pipeline moves to a device."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool) -> Pipelineable:
        """Copy to a device."""


class TrainPipelineBase:
    """Take training steps; the next batch is read and moved to the device while one is computed.

    A step calls ``optimizer.zero_grad()``, the model, ``backward()`` of the sum of its losses and ``optimizer.step()``.
    In ``eval()`` mode, only the model is called.

    Parameters
    ----------
    model, custom_model_fwd
        Model that a batch is passed to, and a function that is called in its place. It returns losses and an output.
    optimizer
        Trains what backward does not.
    device
        Where batches are computed.
    **ignored
        Further options of TorchRec's pipelines, which change when they exchange, not what they compute.
    """

    ahead = 1

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        custom_model_fwd: Callable[[Any], tuple[Tensor, Any]] | None = None,
        **ignored: Any,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, torch.device(device)
        self._forward = custom_model_fwd or model
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.reset()

    def reset(self) -> None:
        """Forget the batches that were read, and start with another iterator."""
        self._batches: deque[Any] = deque()
        self._source: Iterator[Any] | None = None
        self._is_exhausted = False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Take a step with the next batch and return the output of the model."""
        if dataloader_iter is not self._source:
            self._source, self._is_exhausted = dataloader_iter, False
        self._fill(dataloader_iter, 1)
        if not self._batches:
            raise StopIteration
        batch = self._ready(self._batches.popleft())
        if self._model.training:
            self._optimizer.zero_grad()
        losses, output = self._forward(batch)
        self._fill(dataloader_iter, self.ahead)
        if self._model.training:
            losses.sum().backward()
            self._optimizer.step()
        return output

    def _fill(self, batches: Iterator[Any], count: int) -> None:
        """Read batches until as many are waiting."""
        while len(self._batches) < count and not self._is_exhausted:
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                return
            with torch.cuda.stream(self._stream):  # no stream for None
                self._batches.append(batch.to(self._device, non_blocking=True) if hasattr(batch, "to") else batch)

    def _ready(self, batch: Any) -> Any:
        """Let the step wait for a batch that a stream of its own moves."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            if hasattr(batch, "record_stream"):
                batch.record_stream(current)
        return batch


class TrainPipelineSparseDist(TrainPipelineBase):
    """Take training steps as `TrainPipelineBase` does, with two batches read ahead.

    Ids are exchanged in the step itself; `hotbed.Trainer` exchanges them a batch ahead.
    """

    ahead = 2

    def detach(self) -> nn.Module:
        """Return the model."""
        return self._model

    def attach(self, model: nn.Module | None = None) -> None:
        """Train a model from now on."""
        if model is not None:
            self._model, self._forward = model, model


def state_dict_to_device(
    state_dict: Mapping[str, Any], pg: object = None, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Copy a state to a device; the state of a distributed model is whole on every rank.

    ``pg`` is accepted for TorchRec's sake.
    """
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in state_dict.items()}


@torch.no_grad()
def state_dict_gather(src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
    """Copy a state into the tensors of another one, by name; tensors on ``meta`` stay without values."""
    for name, value in dst.items():
        check_known("name in the state", name, src, SpecError, "Gather equal models.")
        value.copy_(src[name])
