"""Give all ranks the initial values of the first rank, as ``DistributedDataParallel`` does with parameters.

Tables that torch's generator has filled differ between ranks whose generators do. Without this, copies of a row would
differ from their owner's, and the model would depend on the plan.

Distribute a model over the ranks of a process group: tables by a plan, everything else data-parallel.

Here a `Plan` meets a model: each table gives up all but the tiles of its rank, and a training loop then calls
`Distributed`. How a batch travels after that: `hotbed.embed.shard_routing`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from datetime import timedelta
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from hotbed.comm import Link, OneRank
from hotbed.comm.hierarchical import make_hierarchical
from hotbed.config.parallel_memory import MemoryOptions, ParallelOptions
from hotbed.embed.collection import EmbeddingCollection
from hotbed.embed.dense_parallel import (
    data_parallel,
    gather_shards,
    is_sharded,
    materialize,
    refuse_sharded,
    sharded_parameters,
    wrapper_of,
)
from hotbed.embed.plan_names import (
    agreed,
    agreed_seeds,
    collections_of,
    is_searched,
    local_plan,
    names_in_plans,
    plan_for,
    plan_of_first,
    plan_tables,
)
from hotbed.embed.pooled_exchange import Wire
from hotbed.embed.replicas import Replicas, check_replicas
from hotbed.errors import PlanError, SpecError
from hotbed.plan import Cut, Plan
from hotbed.specs import Table
from hotbed.store import Storage
from hotbed.torch_hooks import are_tables_left_out

_log = logging.getLogger("hotbed")
_BLOCK = 1 << 26
"""Bytes that are summed, or sent, at once."""


def agree_on_values(collections: Iterable[EmbeddingCollection], link: Link) -> None:
    """Give all ranks the seeds and rows of the first one, before tables are distributed; all ranks must call this.

    Only tables that differ on some rank are sent, as a whole. Seeds matter for tables on ``meta``, whose rows are made
    later.
    """
    if link.size == 1:
        return
    collections = list(collections)
    seeds = agreed_seeds(link, [collection.seed for collection in collections])
    if seeds is not None:
        _log.info("seeds of initial values differ between ranks: all ranks use those of rank 0")
        for collection, seed in zip(collections, seeds, strict=True):
            collection.seed = seed
    stored = [
        tensor
        for collection in collections
        for table in collection.tables.values()
        if collection.device.type != "meta" and table.dynamic is None
        for tensor in collection._group_of(table.name).raw(table.name).values()
    ]
    if not stored:
        return
    sums = torch.stack([_checksum(tensor).to(link.device) for tensor in stored])
    everyones = link.all_gather("checksums of tables", sums).wait()
    for tensor, differs in zip(stored, (everyones != everyones[0]).any(0).tolist(), strict=True):
        for block in _blocks(tensor) if differs else ():
            block.copy_(link.broadcast("initial rows of tables", block.to(link.device), 0).wait())


def _blocks(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(torch.uint8).flatten().split(_BLOCK)


def _checksum(tensor: Tensor) -> Tensor:
    """Sum the bytes of a tensor, 8 at a time, each times an odd number of its own: 0-d int64, which wraps around."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, block in enumerate(_blocks(tensor)):
        numbers = pad(block, (0, -len(block) % 8)).view(torch.int64)
        total += (numbers * torch.arange(i + 1, i + 1 + 2 * len(numbers), 2, device=block.device)).sum()
    return total


_log = logging.getLogger("hotbed")


def distribute(
    model: nn.Module,
    plan: Plan | str | Cut | Mapping[str, str | Cut] = "table",
    parallel: ParallelOptions | None = None,
    memory: MemoryOptions | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    timeout: timedelta | None = None,
) -> nn.Module:
    """Distribute a model over the ranks of a process group; all processes must call this.

    The tables of all `EmbeddingCollection`s are cut and placed by the plan; each rank keeps its tiles. Everything else
    is data-parallel: DDP averages the gradients, in rank order. So a rank's loss must be the mean over its own samples
    (or, where ranks have batches of different sizes, its sum times the number of ranks over the size of the global
    batch, see `mean_over_ranks`), and the gradient of a table is that of the mean over all ranks.

    Whatever the plan, the model is the same to the bit at a given number of ranks, unless an option of
    `ParallelOptions` that says so is used, or a plan asks for pooled vectors of cut bags (see `Plan.wire`).

    Parameters
    ----------
    model
        Any module; it is changed in place. All ranks take the rows of the first rank, as DDP has them take its
        parameters. Tables and parameters on ``meta`` get their initial values here, the latter by the modules'
        ``reset_parameters``, so not those that a module's constructor would have given them.
    plan
        Where tables are; or a scheme for `make_plan`, for all tables or by table.
    parallel
        Codecs, hops between nodes, replicas of the tables, and how dense parameters are shared. With ``replicas=M`` the
        plan is for the ``N = T / M`` ranks of a group (2D sparse parallelism, arXiv 2508.03854): a group updates its
        copy by the gradients of its own samples, see `hotbed.optim.RowWiseAdagrad`; copies and their moments are
        averaged every ``sync_every`` steps, for `state_dict`, checkpoints, evaluations and at the end of a `Trainer`'s
        run; a loop of your own ends with ``model.sync()``. Memory per rank is M times that of one group; a sync sends
        ``2 (M − 1) / M`` of the touched rows that a rank holds.
    memory
        How rows are kept that the plan places in the host's memory or on disk.
    group
        Process group of all ranks; default: torch's own. It must be initialised already (``torchrun`` and
        ``torch.distributed.init_process_group()``). Without one, the model is returned as it is, unless it is on
        ``meta`` or the plan has rows that are not in the device's memory.
    device
        Where the model is to be; default: where it is (from ``meta``: the CPU).
    timeout
        After which an exchange fails; default: that of torch.distributed.

    Returns
    -------
    nn.Module
        The model, or a wrapper that has its attributes, names and state.

    Raises
    ------
    PlanError
        If the plan is for another number of ranks or other tables, or there are replicas of dynamic tables.
    SpecError
        If the model has no tables, a module on ``meta`` cannot make its parameters, ``group`` has not all ranks, or
        ``replicas`` does not divide their number.

    Examples
    --------
    A model with a table of 9 rows × 32 columns, planned ``"row"``: of 3 ranks, rank 0 keeps rows 0, 3, 6, rank 1 rows
    1, 4, 7 and rank 2 rows 2, 5, 8 (``Plan.tiles``: ``range(r, 9, 3) × range(0, 32)``, owner r). The gradient of row 4
    that arises on ranks 0 and 2 is summed on each, sent to rank 1, and added there in the order 0, 2::

        model = hotbed.distribute(model, "row", hotbed.ParallelOptions(backward_codec="bf16"))
    """
    parallel, memory = parallel or ParallelOptions(), memory or MemoryOptions()
    _refuse_wrapped(model)
    alone = not dist.is_available() or not dist.is_initialized()
    if alone:
        check_replicas(1, parallel)
        plan = _plan_of_one(model, plan)
        if plan.is_in_device_memory and not _is_on_meta(model):
            return model
    collections = collections_of(model)
    if not collections:
        raise SpecError(f"{type(model).__name__} has no hotbed.EmbeddingCollection, so there is nothing to distribute")
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise SpecError(
            f"the process group has {dist.get_world_size(group)} of {dist.get_world_size()} ranks; a model is "
            "distributed over all of them in this release, leave group out"
        )
    base = OneRank() if alone else Link(group, timeout)
    check_replicas(base.size, parallel)
    plan = _checked_plan(model, plan, base, parallel)
    if base.rank == 0:
        _warn_of_changed_results(plan, parallel)
    agree_on_values(collections.values(), base)
    place = _place(model, device)
    replicas = Replicas(base, parallel) if parallel.replicas > 1 else None
    link = base.clone() if replicas is None else replicas.shards.clone()
    wire = Wire(make_hierarchical(link, parallel.ranks_per_node), parallel, replicas)
    storage = Storage(
        policy=memory.cache_policy, cache_tier=memory.cache_tier, host=memory.host, directory=memory.directory
    )
    names = names_in_plans(model)
    for path, collection in collections.items():
        own = {name: names[path, name] for name in collection.tables}
        collection.distribute(local_plan(plan, own), wire, place, storage)
    materialize(model, place)
    return Distributed(model, wire, base, plan)


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise `SpecError` for a model that is distributed already, by this or by DDP."""
    if isinstance(model, Distributed):
        raise SpecError("the model is distributed already; distribute the module that was given to the first call")
    if isinstance(model, DistributedDataParallel):
        raise SpecError(
            "the model is in DistributedDataParallel, which distribute() calls itself; give it the module, "
            "`model.module`"
        )


def _checked_plan(
    model: nn.Module, plan: Plan | str | Cut | Mapping[str, str | Cut], link: Link, parallel: ParallelOptions
) -> Plan:
    """Make the plan for the ranks of a group, the same on all, or raise `PlanError` for one that does not fit them."""
    size = link.size // parallel.replicas
    if not isinstance(plan, Plan) and is_searched(plan):
        schemes = plan
        plan = plan_of_first(link, lambda: plan_for(model, size, schemes))

    def checked() -> Plan:
        found = plan if isinstance(plan, Plan) else plan_for(model, size, plan)
        if found.world_size != size:
            count = parallel.replicas
            has = f"this process group has {size}" if count == 1 else f"each of {count} replicas has {size}"
            raise PlanError(
                f"the plan is for {found.world_size} ranks, {has}; make a plan for {size}, or start as many processes"
            )
        tables = plan_tables(model)
        found.check(tables)
        if parallel.replicas > 1:
            _refuse_replicas(tables)
        return found

    return agreed(link, checked)


class Distributed(nn.Module):
    """A distributed model: calls, attributes, names of parts and state are those of the model."""

    def __init__(self, model: nn.Module, wire: Wire, base: Link, plan: Plan) -> None:
        super().__init__()
        self.module = model
        self.plan = plan
        self.wire = wire
        # all ranks by ("replica", "shard"); None: one group
        self.mesh = None if wire.replicas is None else wire.replicas.mesh
        self.link = base.clone()  # all ranks, for small exchanges between steps
        kind = wire.options.dense
        hops = wire.options.ranks_per_node if kind == "ddp" else None
        # for gradients of dense parameters; in two hops if rows are exchanged so
        self.dense_link = wire.link.clone() if hops and wire.replicas is None else make_hierarchical(base.clone(), hops)
        self._register_load_state_dict_pre_hook(self._take_state)
        self._is_called = False
        # In a list, so that it is no submodule.
        self._call = [data_parallel(model, self.dense_link if kind == "ddp" else base, kind)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the model, over the same ranks; all of them must call this."""
        made = self.__class__(deepcopy(self.module, memo), self.wire, self.link, self.plan)
        memo[id(self)] = made
        return made

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; where another tool has put it into ``DistributedDataParallel``, that averages gradients."""
        if not self._is_called:
            refuse_sharded(self.module, self.wire.options.dense)
            self._is_called = True
        return (self.module if wrapper_of(self.module) else self._call[0])(*args, **kwargs)

    def sync(self) -> None:
        """Average the replicas of the tables, if any step was taken since they were; all ranks must call this."""
        for collection in collections_of(self.module).values():
            collection.sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Skip the sums of dense gradients inside; for all but the last of accumulated batches."""
        call = self._call[0]
        if isinstance(call, DistributedDataParallel):
            return call.no_sync()
        if self.link.size > 1 and any(p.requires_grad for p in self.module.parameters()):
            raise SpecError("no_sync() is of models whose dense part is data-parallel by DDP (dense='ddp')")
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    @override
    def named_modules(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, *args: Any, **kwargs: Any
    ) -> Iterator[tuple[str, nn.Module]]:
        """Return those of the model."""
        return self.module.named_modules(*args, **kwargs)

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Return those of the model."""
        return self.module.named_parameters(*args, **kwargs)

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Return those of the model."""
        return self.module.named_buffers(*args, **kwargs)

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train the parameters of the model, or freeze them; tables, too, if `swap_embeddings` made them."""
        self.module.requires_grad_(requires_grad)
        return self

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters; those of tables, too, if `swap_embeddings` made them."""
        self.module.zero_grad(set_to_none)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return that of the model, all of it whole, after averaging replicas; all ranks must call this."""
        self.sync()
        state = self.module.state_dict(*args, **kwargs)
        if not are_tables_left_out():  # inside a checkpoint, which gathers for the rank that writes
            prefix: str = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            own = {name: value for name, value in state.items() if name.startswith(prefix) and is_sharded(value)}
            state.update(gather_shards(own))
        return state

    def _take_state(self, state: dict[str, Any], prefix: str, *_: object) -> None:
        """Rename keys of a state that a module around this one loads, and shard what is sharded here."""
        own = {key: state.pop(key) for key in [key for key in state if key.startswith(prefix)]}
        own = {key.removeprefix(prefix): value for key, value in own.items()}
        state.update({f"{prefix}module.{key}": v for key, v in sharded_parameters(self.module, own).items()})

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load that of the model, all of it whole, of which each rank takes its tiles and shards."""
        state = sharded_parameters(self.module, args[0] if args else kwargs.pop("state_dict"))
        return self.module.load_state_dict(state, *args[1:], **kwargs)


def mean_over_ranks(total: Tensor, count: int, model: nn.Module) -> Tensor:
    """Scale a loss for ``backward`` where ranks may have batches of different sizes.

    Parameters
    ----------
    total
        0-d sum of the losses of this rank's samples.
    count
        Number of this rank's samples.
    model
        What `distribute` returned.

    Returns
    -------
    Tensor
        ``total · W / (samples of all ranks)``: averaged over ranks, as DDP does with gradients, it is the global mean.
    """
    if not isinstance(model, Distributed):
        return total / max(count, 1)
    counts = model.link.all_gather("batch sizes", torch.tensor([count], device=total.device)).wait()
    return total * model.link.size / max(int(counts.sum()), 1)


def _place(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Choose the device of a model: the given one, else that of its tables."""
    if device is not None:
        return torch.device(device)
    here = next((c.device for c in collections_of(model).values()), torch.device("cpu"))
    return torch.device("cpu") if here.type == "meta" else here


def _is_on_meta(model: nn.Module) -> bool:
    """Say whether tables or parameters are yet to be made."""
    on_meta = any(collection.device.type == "meta" for collection in collections_of(model).values())
    return on_meta or any(parameter.is_meta for parameter in model.parameters())


def _refuse_replicas(tables: Sequence[Table]) -> None:
    """Raise `PlanError` for dynamic tables, which cannot have replicas."""
    for table in tables:
        if table.dynamic is not None:
            raise PlanError(f"table '{table.name}' is dynamic, of which there can be no replicas in this release")


def _plan_of_one(model: nn.Module, plan: Plan | str | Cut | Mapping[str, str | Cut]) -> Plan:
    """Make the plan for one rank, or raise `PlanError` for one that does not fit the model or is for several ranks."""
    if not isinstance(plan, Plan):
        plan = plan_for(model, 1, plan)
    if plan.world_size > 1:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, but torch.distributed is not initialised; start with "
            f"`torchrun --nproc_per_node {plan.world_size}` and call torch.distributed.init_process_group(), or "
            "make a plan for 1 rank"
        )
    plan.check(plan_tables(model))
    return plan


def _warn_of_changed_results(plan: Plan, options: ParallelOptions) -> None:
    """Log each option by which results differ from those of one rank."""
    if options.dense == "fsdp":
        _log.warning("dense='fsdp': gradients of dense parameters are summed in another order than in rank order")
    for name in ("forward_codec", "backward_codec"):
        codec = getattr(options, name)
        if codec != "fp32":
            _log.warning("%s=%r rounds what crosses the wire: results differ from those of one rank", name, codec)
    if options.per_shard_statistics and any(len({t.cols for t in tiles}) > 1 for tiles in plan.by_table.values()):
        _log.warning("per_shard_statistics=True: row-wise rules see the columns of each tile by themselves")
    pooled = [t for t, form in plan.wire.items() if form == "pooled" and len({x.rows for x in plan.by_table[t]}) > 1]
    if pooled:
        _log.warning("wire='pooled': bags of several ids of %s are summed in parts", ", ".join(pooled))
    if options.replicas > 1 and not options.exact:
        _log.warning(
            "replicas=%d are averaged every %d steps: results differ from one group's",
            options.replicas,
            options.sync_every,
        )
