"""Plan, distribute and train models with TorchRec's interface, but with hotbed's plans."""

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
from hotbed.compat.torchrec.keyed_optimizers import CombinedOptimizer, TablesOptimizer
from hotbed.compat.torchrec.modules import EmbeddingBagCollection, EmbeddingCollection
from hotbed.compat.torchrec.table_views import adopt_optimizers
from hotbed.config.parallel_memory import Codec, MemoryOptions, ParallelOptions
from hotbed.embed import Distributed, collections_of, distribute
from hotbed.embed.plan_names import broadcast_plan, names_in_plans, plan_for
from hotbed.errors import SpecError
from hotbed.plan import Cut, Plan


class ShardingType(Enum):
    """Ways in which a table is sharded over ranks."""

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
"""hotbed's scheme for each sharding type. Exchange in two hops (TABLE_ROW_WISE) is not part of hotbed's plans."""


class ShardingEnv:
    """The ranks that share a model. ``pg`` is None for a single process without a process group."""

    def __init__(self, world_size: int, rank: int, pg: dist.ProcessGroup | None = None) -> None:
        self.world_size, self.rank, self.process_group = world_size, rank, pg

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup) -> Self:
        """Create the environment of this rank in a process group."""
        return cls(dist.get_world_size(pg), dist.get_rank(pg), pg)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> Self:
        """Create an environment without a process group."""
        return cls(world_size, rank)


class CommType(Enum):
    """Dtypes in which ranks can exchange rows and gradients."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"


@dataclass
class QCommsConfig:
    """Dtypes of exchanged rows (forward) and gradients (backward)."""

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32


def get_qcomm_codecs_registry(qcomms_config: QCommsConfig, device: object = None) -> QCommsConfig:
    """Return ``qcomms_config`` unchanged. Pass the result to a sharder as ``qcomm_codecs_registry``."""
    return qcomms_config


class EmbeddingBagCollectionSharder:
    """Options of the tables of an `EmbeddingBagCollection`. The plan of `DistributedModelParallel` shards the tables.

    Parameters
    ----------
    fused_params
        Optimizer of the tables that `apply_optimizer_in_backward` has not handled. The keys are ``optimizer``,
        ``learning_rate``, ``eps``, ``weight_decay``, ``beta1`` and ``beta2``.
    qcomm_codecs_registry
        Dtypes of exchanges, from `get_qcomm_codecs_registry`.
    """

    module_type: type[nn.Module] = EmbeddingBagCollection

    def __init__(
        self, fused_params: Mapping[str, Any] | None = None, qcomm_codecs_registry: QCommsConfig | None = None
    ) -> None:
        self.fused_params, self.qcomm_codecs_registry = fused_params, qcomm_codecs_registry

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the values of all sharding types. They are the same for every ``compute_device_type``."""
        return [kind.value for kind in ShardingType]


class EmbeddingCollectionSharder(EmbeddingBagCollectionSharder):
    """Options of the tables of an `EmbeddingCollection`, as for `EmbeddingBagCollectionSharder`."""

    module_type = EmbeddingCollection


Sharder = EmbeddingBagCollectionSharder


def parallel_options(sharders: Sequence[Sharder]) -> ParallelOptions:
    """Return options with the dtypes of exchanges that the sharders set. Raise `SpecError` if the sharders disagree."""
    chosen: set[tuple[Codec, Codec]] = {
        (config.forward_precision.value, config.backward_precision.value)
        for sharder in sharders
        if (config := sharder.qcomm_codecs_registry) is not None
    }
    if len(chosen) > 1:
        raise SpecError(
            f"qcomm_codecs_registry of sharders: got {len(chosen)} different values, expected one. Pass the same value "
            "to all sharders."
        )
    if not chosen:
        return ParallelOptions()
    forward, backward = chosen.pop()
    return ParallelOptions(forward_codec=forward, backward_codec=backward)


@dataclass
class Topology:
    """Hardware to plan for.

    Parameters
    ----------
    world_size
        Number of ranks.
    compute_device
        ``"cpu"`` or ``"cuda"``.
    hbm_cap, ddr_cap
        Bytes of device and host memory per rank (default: the memory of this machine). On a CPU, tables use
        ``ddr_cap``.
    local_world_size
        Number of ranks per node.
    """

    world_size: int
    compute_device: str = "cuda"
    hbm_cap: int | None = None
    ddr_cap: int | None = None
    local_world_size: int | None = None


@dataclass
class ParameterConstraints:
    """Constraints on the plan of a table.

    Parameters
    ----------
    sharding_types
        Allowed values of `ShardingType` (default: all). The planner picks the fastest.
    compute_kernels
        ``"fused"`` or ``"dense"``. In both cases, hotbed's kernels are used.
    pooling_factors
        Mean number of ids per sample of each feature.
    min_partition, num_poolings, batch_sizes, is_weighted, feature_names
        Ignored. The number of columns of a column shard is a multiple of 16.
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
        """Return hotbed's scheme for the allowed sharding types, or "auto" if they allow several schemes.

        ``table`` is the name of the table for error messages.
        """
        kinds = [str(getattr(kind, "value", kind)) for kind in self.sharding_types or SCHEMES]
        for kind in kinds:
            check_known(f"table '{table}': sharding_types", kind, SCHEMES, SpecError)
        kernels = [str(getattr(kernel, "value", kernel)) for kernel in self.compute_kernels or ()]
        fix = "For rows in host memory or files, use a plan with hotbed.Cut(tier='host'), see larger_than_memory.md."
        for kernel in kernels:
            check_known(f"table '{table}': compute_kernels", kernel, ("fused", "dense"), SpecError, fix)
        schemes = {SCHEMES[kind] for kind in kinds}
        return schemes.pop() if len(schemes) == 1 else "auto"


class EmbeddingShardingPlanner:
    """Search for a plan of hotbed that satisfies TorchRec's constraints.

    Parameters
    ----------
    topology, batch_size
        Hardware (default: this machine with the ranks of the default process group), and number of samples per rank.
    constraints
        Constraints by table. For a table without constraints, the planner picks the fastest scheme.
    debug
        Ignored.
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
        """Return a plan for the tables of a model."""
        tables = names_in_plans(module)
        own = {table for _, table in tables}
        for table in self._constraints:
            check_known("table in constraints", table, sorted(own), SpecError, "Use the names in EmbeddingBagConfig.")
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
        """Return the plan of rank 0 on all ranks. All ranks must call this method."""
        if not (dist.is_available() and dist.is_initialized()):
            return self.plan(module, sharders)
        return broadcast_plan(Link(pg, None), lambda: self.plan(module, sharders))


def _world_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class DistributedModelParallel(nn.Module):
    """Shard the tables of a model over all ranks, and replicate the rest, like `hotbed.distribute`.

    Parameters
    ----------
    module
        The model. The constructor initializes tables and parameters that are on ``meta``.
    env
        The ranks (default: the ranks of the default process group, or this process).
    device
        Device of the model (default: the current device of the model, or the CPU if the model is on ``meta``).
    plan
        One of three: a plan of hotbed (e.g. from `EmbeddingShardingPlanner`); a scheme for all tables (``"table"``,
        ``"row"``, ``"column"``, ``"auto"`` …); or a mapping from tables to schemes. The default is ``"table"``. Plans
        of TorchRec are refused.
    sharders
        Dtypes of exchanges, and optimizers for tables without an optimizer (default: SGD with lr 0.01).
    init_data_parallel, init_parameters
        Ignored, because parameters are always initialized.
    parallel, memory
        As for `hotbed.distribute`.

    Attributes
    ----------
    module, device
        The distributed model, and its device.
    fused_optimizer
        Optimizer that updates the tables in backward. Its ``step`` does nothing.
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
                f"plan: got a {type(plan).__name__}, expected a plan of hotbed, or 'table', 'row', 'column' or 'auto'. "
                "Pass any of these to plan=, because results do not depend on the plan."
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
        """Plan of the tables."""
        if isinstance(self.module, Distributed):
            return self.module.plan
        return self._given if isinstance(self._given, Plan) else plan_for(self.module, 1, self._given)

    def init_data_parallel(self) -> None:
        """Do nothing, because the model is ready."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the full state of the model. All ranks must call this method."""
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
    """Raise `SpecError` if ``env`` is a subset of the ranks, or if ``sharders`` has sharders of TorchRec."""
    if env is not None and env.world_size != _world_size():
        raise SpecError(
            f"env: got {env.world_size} ranks, expected all {_world_size()}. Omit env, and start one process per rank."
        )
    for sharder in sharders:
        if not isinstance(sharder, Sharder):
            raise SpecError(
                f"sharders: got a {type(sharder).__name__}, expected sharders of hotbed.compat.torchrec. Import "
                "EmbeddingBagCollectionSharder from there, or omit sharders."
            )


class Multistreamable(ABC):
    """Base class of batches that several GPU streams may use."""

    @abstractmethod
    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the batch until the stream has finished its current work."""


class Pipelineable(Multistreamable):
    """Base class of batches that a pipeline copies to a device."""

    @abstractmethod
    def to(self, device: torch.device, non_blocking: bool) -> Pipelineable:
        """Return a copy of the batch on a device."""


class TrainPipelineBase:
    """Run training steps, and copy the next batch to the device during each step.

    A step calls ``optimizer.zero_grad()``, the model, ``backward()`` of the sum of its losses and ``optimizer.step()``.
    In ``eval()`` mode, only the model is called.

    Parameters
    ----------
    model, custom_model_fwd
        The model, and a function to call instead of the model. Both return a pair of losses and output.
    optimizer
        Optimizer of the parameters that are not updated in backward.
    device
        Device of the model.
    **ignored
        Further options of TorchRec's pipelines, which change when data is exchanged, but not the results.
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
        """Discard prefetched batches, and forget the current iterator."""
        self._batches: deque[Any] = deque()
        self._source: Iterator[Any] | None = None
        self._is_exhausted = False

    def progress(self, dataloader_iter: Iterator[Any]) -> Any:
        """Run a step with the next batch, and return the model's output. Raise `StopIteration` if no batch is left."""
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
        """Prefetch up to ``count`` batches."""
        while len(self._batches) < count and not self._is_exhausted:
            try:
                batch = next(batches)
            except StopIteration:
                self._is_exhausted = True
                return
            with torch.cuda.stream(self._stream):  # does nothing for None
                self._batches.append(batch.to(self._device, non_blocking=True) if hasattr(batch, "to") else batch)

    def _ready(self, batch: Any) -> Any:
        """Make the current stream wait for the copy of a batch, and return the batch."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            if hasattr(batch, "record_stream"):
                batch.record_stream(current)
        return batch


class TrainPipelineSparseDist(TrainPipelineBase):
    """Run training steps like `TrainPipelineBase`, with two prefetched batches.

    The ids of a batch are exchanged in the step of the batch. `hotbed.Trainer` exchanges ids one batch ahead.
    """

    ahead = 2

    def detach(self) -> nn.Module:
        """Return the model. Nothing is restored, because the pipeline does not change the model."""
        return self._model

    def attach(self, model: nn.Module | None = None) -> None:
        """Use ``model`` for further steps, also instead of ``custom_model_fwd``. None changes nothing."""
        if model is not None:
            self._model, self._forward = model, model


def state_dict_to_device(
    state_dict: Mapping[str, Any], pg: object = None, device: torch.device | str = "cpu"
) -> dict[str, Any]:
    """Return a copy of a state on a device. ``pg`` is ignored, because every rank has the full state."""
    return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in state_dict.items()}


@torch.no_grad()
def state_dict_gather(src: Mapping[str, Tensor], dst: Mapping[str, Tensor]) -> None:
    """Copy tensors of ``src`` into the tensors of ``dst`` with the same names. Tensors on ``meta`` in ``dst`` stay."""
    for name, value in dst.items():
        check_known("name in the state", name, src, SpecError, "Pass the states of equal models.")
        value.copy_(src[name])
