"""Distribute a model over the ranks of a process group: tables by a plan, all other modules data-parallel.

Each rank keeps the tiles of the tables that the plan assigns to it. A training loop then calls `Distributed`. For the
exchanges of a batch, see `hotbed.embed.shard_routing`.

All ranks start with the initial values of the first rank, like parameters in ``DistributedDataParallel``. Otherwise,
copies of a row could differ from the owner's row, and the model would depend on the plan.
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
    find_wrapper,
    gather_shards,
    is_sharded,
    make_data_parallel,
    materialize,
    refuse_sharded,
    shard_parameters,
)
from hotbed.embed.plan_names import (
    agree_on_plan,
    agree_on_seeds,
    broadcast_plan,
    collections_of,
    is_searched,
    local_plan,
    names_in_plans,
    plan_for,
    plan_tables,
)
from hotbed.embed.pooled_exchange import Wire
from hotbed.embed.replicas import Replicas, check_replicas
from hotbed.errors import PlanError, SpecError
from hotbed.plan import Cut, Plan
from hotbed.specs import Table
from hotbed.store import Storage
from hotbed.torch_hooks import are_tables_left_out
from hotbed.virtual_ranks import VirtualRanks, nodes_are_subtrees, tree_size

_log = logging.getLogger("hotbed")
_BLOCK = 1 << 26
"""Bytes of a table that are summed or sent at once."""


def broadcast_initial_values(collections: Iterable[EmbeddingCollection], link: Link) -> None:
    """Copy the seeds and rows of the first rank to all ranks, before tables are distributed. All ranks must call this.

    Only tables that differ on some rank are sent. Seeds are needed for tables on ``meta``, which are filled later.
    """
    if link.size == 1:
        return
    collections = list(collections)
    seeds = agree_on_seeds(link, [collection.seed for collection in collections])
    if seeds is not None:
        _log.info("seeds of initial values differ between ranks: all ranks use the seeds of rank 0")
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
    checksums = link.all_gather("checksums of tables", sums).wait()
    for tensor, differs in zip(stored, (checksums != checksums[0]).any(0).tolist(), strict=True):
        for block in _split_bytes(tensor) if differs else ():
            block.copy_(link.broadcast("initial rows of tables", block.to(link.device), 0).wait())


def _split_bytes(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.view(torch.uint8).flatten().split(_BLOCK)


def _checksum(tensor: Tensor) -> Tensor:
    """Return the sum of 8-byte words, each times another odd number, as a 0-d int64 that wraps around."""
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for i, block in enumerate(_split_bytes(tensor)):
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
    """Distribute a model over the ranks of a process group. All processes must call this.

    The plan assigns the tiles of all tables to ranks, and each rank keeps its tiles. All other modules are
    data-parallel: DDP averages their gradients along a tree. So the loss of a rank must be the mean over its samples,
    and the gradient of a table is the mean over all ranks. If batch sizes differ between ranks, use `mean_over_ranks`.

    The model has the same bits for all plans. Exceptions are some options of `ParallelOptions`, which are documented
    there, and plans with pooled vectors of cut bags, see `Plan.wire`. In a custom loop each rank is one virtual rank,
    so bits depend on the number of ranks. `hotbed.train.Trainer` can compute several virtual ranks per process, e.g.
    with ``ParallelOptions(virtual_ranks=8)``. Then the bits do not depend on the number of processes.

    Parameters
    ----------
    model
        Any module. It is changed in place. All ranks use the rows of the first rank, like parameters in DDP. Tables and
        parameters on ``meta`` are initialized here. Parameters are initialized by the modules' ``reset_parameters``,
        which may differ from the module's constructor.
    plan
        Plan, or a scheme of `make_plan` for all tables or by table, e.g. ``"row"``.
    parallel
        Codecs, hops between nodes, replicas of the tables, and the sharing of dense parameters. With ``replicas=M`` the
        plan is for the ``N = T / M`` ranks of a group (2D sparse parallelism, arXiv 2508.03854). A group updates its
        copy with the gradients of its samples, see `hotbed.optim.RowWiseAdagrad`. Copies and moments are averaged every
        ``sync_every`` steps, and for `state_dict`, checkpoints, evaluations and at the end of a `Trainer`'s run. Call
        ``model.sync()`` at the end of a custom loop. Memory per rank is M times the memory without replicas. A sync
        sends ``2 (M − 1) / M`` of the updated rows of a rank.
    memory
        Options for rows that the plan stores in host memory or on disk.
    group
        Process group of all ranks (default: torch's default group). It must be initialized before, e.g. by ``torchrun``
        and ``torch.distributed.init_process_group()``. Without a process group, the model is returned unchanged, unless
        it is on ``meta`` or the plan has rows outside of the device's memory.
    device
        Device of the model (default: its current device, or the CPU if it is on ``meta``).
    timeout
        Timeout of an exchange (default: the timeout of torch.distributed).

    Returns
    -------
    nn.Module
        The model, or a wrapper with the same attributes, names and state.

    Raises
    ------
    PlanError
        If the plan is for another number of ranks or other tables, or dynamic tables have replicas.
    SpecError
        If the model has no tables, a module on ``meta`` cannot initialize its parameters, ``group`` does not contain
        all ranks, ``replicas`` does not divide their number, or ``virtual_ranks`` is not a power of two.

    Examples
    --------
    With plan ``"row"`` and 3 ranks, rank r of a table with 9 rows and 32 columns keeps rows r, r + 3, r + 6. If ranks 0
    and 2 have local gradients of row 4, each sums them and sends the sum to rank 1, which adds them along a tree.

    >>> import hotbed as hb
    >>> import torch
    >>> model = hb.EmbeddingCollection([hb.Table("items", rows=9, dim=32)], [hb.Feature("item", table="items")])
    >>> model = hb.distribute(model, "row")  # in a process group, keeps the rows of this rank
    >>> model(hb.Jagged.from_dict({"item": torch.tensor([4, 7])}))["item"].shape
    torch.Size([2, 32])
    """
    parallel, memory = parallel or ParallelOptions(), memory or MemoryOptions()
    _refuse_wrapped(model)
    alone = not dist.is_available() or not dist.is_initialized()
    if alone:
        check_replicas(1, parallel)
        plan = _plan_of_one(model, plan)
        if plan.is_in_device_memory and not _is_on_meta(model) and parallel.virtual_ranks in (None, 1):
            return model
    collections = collections_of(model)
    if not collections:
        raise SpecError(
            f"{type(model).__name__} has no tables: expected a model with a hotbed.EmbeddingCollection. Call "
            "hotbed.swap_embeddings(model) first, or train the model without hotbed.distribute"
        )
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise SpecError(
            f"process group: got {dist.get_world_size(group)} ranks, expected all {dist.get_world_size()} ranks. "
            "Remove the argument `group`"
        )
    base = OneRank() if alone else Link(group, timeout)
    check_replicas(base.size, parallel)
    _check_virtual_ranks(base.size, parallel)
    plan = _check_plan(model, plan, base, parallel)
    if base.rank == 0:
        _warn_of_changed_results(plan, parallel)
    broadcast_initial_values(collections.values(), base)
    device = _choose_device(model, device)
    replicas = Replicas(base, parallel) if parallel.replicas > 1 else None
    link = base.clone() if replicas is None else replicas.shards.clone()
    virtual, members = VirtualRanks(base.rank, base.size, parallel.virtual_ranks), list(range(base.size))
    if replicas is not None:
        members = replicas.mesh.mesh[replicas.link.rank].tolist()
        if not replicas.exact:  # a replica sums the gradients of its own ranks
            virtual, members = VirtualRanks(link.rank, link.size), list(range(link.size))
    hops = parallel.ranks_per_node
    # Codecs round the sums of each rank, so these are forwarded.
    is_lossless = (parallel.forward_codec, parallel.backward_codec) == ("fp32", "fp32")
    combines_rows = is_lossless and nodes_are_subtrees(virtual, members, hops or 1)
    wire = Wire(
        make_hierarchical(link, hops, combines_rows=combines_rows), parallel, replicas, virtual=virtual, members=members
    )
    storage = Storage(
        policy=memory.cache_policy, cache_tier=memory.cache_tier, host=memory.host, directory=memory.directory
    )
    names = names_in_plans(model)
    for path, collection in collections.items():
        own = {name: names[path, name] for name in collection.tables}
        collection.distribute(local_plan(plan, own), wire, device, storage)
    materialize(model, device)
    return Distributed(model, wire, base, plan)


def _check_virtual_ranks(size: int, parallel: ParallelOptions) -> None:
    """Raise `SpecError` if ``size`` processes cannot compute the virtual ranks."""
    total = parallel.virtual_ranks
    if total in (None, size):
        return
    if parallel.replicas > 1 or total < size or total != tree_size(total):
        expected = "" if parallel.replicas > 1 else f"a power of two of at least {size}, or "
        raise SpecError(f"virtual_ranks: got {total:,}, expected {expected}{size}, the number of processes. Use {size}")


def _refuse_wrapped(model: nn.Module) -> None:
    """Raise `SpecError` for a model that is already distributed or in DDP."""
    if isinstance(model, Distributed):
        raise SpecError("the model is already distributed. Pass the original module, `model.module`")
    if isinstance(model, DistributedDataParallel):
        raise SpecError(
            "the model is already in DistributedDataParallel, which distribute() applies. Pass the original module, "
            "`model.module`"
        )


def _check_plan(
    model: nn.Module, plan: Plan | str | Cut | Mapping[str, str | Cut], link: Link, parallel: ParallelOptions
) -> Plan:
    """Return the plan for the ranks of a group, equal on all ranks. Raise `PlanError` if it does not fit."""
    size = link.size // parallel.replicas
    if not isinstance(plan, Plan) and is_searched(plan):
        schemes = plan
        plan = broadcast_plan(link, lambda: plan_for(model, size, schemes))

    def checked() -> Plan:
        found = plan if isinstance(plan, Plan) else plan_for(model, size, plan)
        if found.world_size != size:
            count = parallel.replicas
            has = f"this process group has {size}" if count == 1 else f"each of {count} replicas has {size}"
            raise PlanError(
                f"the plan is for {found.world_size} ranks, {has}. Make a plan for {size} ranks, or start "
                f"{found.world_size * count} processes"
            )
        tables = plan_tables(model)
        found.check(tables)
        if parallel.replicas > 1:
            _refuse_replicas(tables)
        return found

    return agree_on_plan(link, checked)


class Distributed(nn.Module):
    """A distributed model with the call, attributes, module names and state of the original model."""

    def __init__(self, model: nn.Module, wire: Wire, base: Link, plan: Plan) -> None:
        super().__init__()
        self.module = model
        self.plan = plan
        self.wire = wire
        # all ranks by ("replica", "shard"); None: one group
        self.mesh = None if wire.replicas is None else wire.replicas.mesh
        self.link = base.clone()  # link to all ranks for small exchanges between steps
        self.virtual = VirtualRanks(base.rank, base.size, wire.options.virtual_ranks)
        dense = wire.options.dense
        hops = wire.options.ranks_per_node if dense == "ddp" else None
        # link for gradients of dense parameters
        self.dense_link = wire.link.clone() if hops and wire.replicas is None else make_hierarchical(base.clone(), hops)
        self._register_load_state_dict_pre_hook(self._shard_state_hook)
        self._is_called = False
        self.is_sliced = False
        """Whether calls compute one of several virtual ranks of this process, see `hotbed.embed.slices`."""
        # In a list, because it must not be a submodule.
        self._call = [make_data_parallel(model, self.dense_link if dense == "ddp" else base, dense)]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the model with the same ranks. All ranks must call this."""
        made = self.__class__(deepcopy(self.module, memo), self.wire, self.link, self.plan)
        memo[id(self)] = made
        return made

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model. Another tool's ``DistributedDataParallel`` around it replaces the own one."""
        if not self._is_called:
            refuse_sharded(self.module, self.wire.options.dense)
            self._is_called = True
        if not (self.is_sliced or self.virtual.are_processes) and self.training and torch.is_grad_enabled():
            raise SpecError(
                f"virtual_ranks: got {self.virtual.total} for {self.virtual.size} processes in your own training loop, "
                "which computes one per process. Remove virtual_ranks, or train with hotbed.train.Trainer"
            )
        is_whole = self.is_sliced or find_wrapper(self.module) is not None
        return (self.module if is_whole else self._call[0])(*args, **kwargs)

    def sync(self) -> None:
        """Average the replicas of the tables if any step followed the last average. All ranks must call this."""
        for collection in collections_of(self.module).values():
            collection.sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Skip the exchange of dense gradients, for all but the last of several accumulated batches."""
        call = self._call[0]
        if isinstance(call, DistributedDataParallel):
            return call.no_sync()
        if self.link.size > 1 and any(p.requires_grad for p in self.module.parameters()):
            raise SpecError("no_sync() needs data parallelism by DDP: got dense='fsdp', expected dense='ddp'")
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
        """Yield from the original model."""
        return self.module.named_modules(*args, **kwargs)

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield from the original model."""
        return self.module.named_parameters(*args, **kwargs)

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield from the original model."""
        return self.module.named_buffers(*args, **kwargs)

    @override
    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """Train or freeze the parameters of the model, including tables from `swap_embeddings`."""
        self.module.requires_grad_(requires_grad)
        return self

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of parameters, including tables from `swap_embeddings`."""
        self.module.zero_grad(set_to_none)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Average replicas and return the state of the model with whole tensors. All ranks must call this."""
        self.sync()
        state = self.module.state_dict(*args, **kwargs)
        if not are_tables_left_out():  # a checkpoint gathers tensors itself, for the writing rank only
            prefix: str = kwargs.get("prefix", args[1] if len(args) > 1 else "")
            own = {name: value for name, value in state.items() if name.startswith(prefix) and is_sharded(value)}
            state.update(gather_shards(own))
        return state

    def _shard_state_hook(self, state: dict[str, Any], prefix: str, *_: object) -> None:
        """Rename keys of a state that a parent module loads, and shard the entries of sharded parameters."""
        own = {key: state.pop(key) for key in [key for key in state if key.startswith(prefix)]}
        own = {key.removeprefix(prefix): value for key, value in own.items()}
        state.update({f"{prefix}module.{key}": v for key, v in shard_parameters(self.module, own).items()})

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state of the model with whole tensors. Each rank copies its tiles and shards."""
        state = shard_parameters(self.module, args[0] if args else kwargs.pop("state_dict"))
        return self.module.load_state_dict(state, *args[1:], **kwargs)


def mean_over_ranks(total: Tensor, count: int, model: nn.Module) -> Tensor:
    """Scale a loss for ``backward`` if batch sizes may differ between ranks.

    Parameters
    ----------
    total
        Sum of the losses of this rank's samples, 0-d.
    count
        Number of this rank's samples.
    model
        Result of `distribute`.

    Returns
    -------
    Tensor
        ``total · W / (samples of all ranks)``. Its average over ranks, as in DDP, is the mean over all samples.
    """
    if not isinstance(model, Distributed):
        return total / max(count, 1)
    counts = model.link.all_gather("batch sizes", torch.tensor([count], device=total.device)).wait()
    return total * model.link.size / max(int(counts.sum()), 1)


def _choose_device(model: nn.Module, device: torch.device | str | None) -> torch.device:
    """Return the given device of a model, or else the device of its tables."""
    if device is not None:
        return torch.device(device)
    here = next((c.device for c in collections_of(model).values()), torch.device("cpu"))
    return torch.device("cpu") if here.type == "meta" else here


def _is_on_meta(model: nn.Module) -> bool:
    """Return whether any tables or parameters are on ``meta``."""
    on_meta = any(collection.device.type == "meta" for collection in collections_of(model).values())
    return on_meta or any(parameter.is_meta for parameter in model.parameters())


def _refuse_replicas(tables: Sequence[Table]) -> None:
    """Raise `PlanError` for dynamic tables, which do not support replicas."""
    for table in tables:
        if table.dynamic is not None:
            raise PlanError(
                f"table '{table.name}' is dynamic, which does not support replicas in this release. Use replicas=1"
            )


def _plan_of_one(model: nn.Module, plan: Plan | str | Cut | Mapping[str, str | Cut]) -> Plan:
    """Return the plan for one rank. Raise `PlanError` if it is for several ranks or does not fit the model."""
    if not isinstance(plan, Plan):
        plan = plan_for(model, 1, plan)
    if plan.world_size > 1:
        raise PlanError(
            f"the plan is for {plan.world_size} ranks, but torch.distributed is not initialized. Start with "
            f"`torchrun --nproc_per_node {plan.world_size}` and call torch.distributed.init_process_group(), or "
            "make a plan for 1 rank"
        )
    plan.check(plan_tables(model))
    return plan


def _warn_of_changed_results(plan: Plan, options: ParallelOptions) -> None:
    """Log a warning for each option that changes results compared to one rank."""
    if options.dense == "fsdp":
        _log.warning("dense='fsdp': gradients of dense parameters are not summed along a tree")
    for name in ("forward_codec", "backward_codec"):
        codec = getattr(options, name)
        if codec != "fp32":
            _log.warning("%s=%r rounds exchanged values: results differ from results of one rank", name, codec)
    if options.per_shard_statistics and any(len({t.cols for t in tiles}) > 1 for tiles in plan.by_table.values()):
        _log.warning("per_shard_statistics=True: row-wise rules use the columns of each tile separately")
    pooled = [t for t, form in plan.wire.items() if form == "pooled" and len({x.rows for x in plan.by_table[t]}) > 1]
    if pooled:
        _log.warning("wire='pooled': bags of several ids of %s are summed in parts", ", ".join(pooled))
    if options.replicas > 1 and not options.exact:
        _log.warning(
            "replicas=%d are averaged every %d steps: results differ from one group's",
            options.replicas,
            options.sync_every,
        )
