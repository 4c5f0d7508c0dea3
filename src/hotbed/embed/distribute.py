"""`distribute`: a model over the ranks of a process group, tables by a plan, everything else data-parallel."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from hotbed.comm import Link, OneRank
from hotbed.embed.collection import collections_of, local_plan, names_in_plans, plan_for, plan_tables
from hotbed.embed.dense import data_parallel, materialize
from hotbed.embed.replicas import Layout, Replicas, check_replicas
from hotbed.embed.wire import Wire
from hotbed.errors import PlanError, SpecError, did_you_mean
from hotbed.hops import NodeLink
from hotbed.ops.rows import Codec
from hotbed.plan import Cut, Plan
from hotbed.specs import Table
from hotbed.store import Storage
from hotbed.store.cached import Policy
from hotbed.store.storage import CacheTier, HostRows

Dense = Literal["ddp", "fsdp"]
_log = logging.getLogger("hotbed")


def distribute(
    model: nn.Module,
    plan: Plan | str | Cut | Mapping[str, str | Cut] = "table",
    *,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    dense: Dense = "ddp",
    forward_codec: Codec = "fp32",
    backward_codec: Codec = "fp32",
    per_shard_statistics: bool = False,
    ranks_per_node: int | None = None,
    directory: str | Path | None = None,
    cache_policy: Policy = "lru",
    cache_tier: CacheTier = "device",
    host: HostRows = "records",
    replicas: int = 1,
    sync_every: int = 1,
    layout: Layout = "groups",
    exact: bool = False,
    timeout: timedelta | None = None,
) -> nn.Module:
    """Distribute a model over the ranks of a process group; all processes must call this.

    The tables of all `EmbeddingCollection`s are cut and placed by the plan; each rank keeps its tiles. Everything else
    is data-parallel: DDP averages the gradients, in rank order. So a rank's loss must be the mean over its own samples
    (or, where ranks have batches of different sizes, its sum times the number of ranks over the size of the global
    batch, see `mean_over_ranks`), and the gradient of a table is that of the mean over all ranks.

    Whatever the plan, the model is the same to the bit at a given number of ranks, unless one of the options below that
    say so is used, or a plan asks for pooled vectors of cut bags (see `Plan.wire`).

    Parameters
    ----------
    model
        Any module; it is changed in place. Tables and parameters on ``meta`` get their initial values here, the
        latter by the modules' ``reset_parameters``, so not those that a module's constructor would have given them.
    plan
        Where tables are; or a scheme for `make_plan`, for all tables or by table.
    group
        Process group of all ranks; default: torch's own. It must be initialised already (``torchrun`` and
        ``torch.distributed.init_process_group()``). Without one, the model is returned as it is, unless the plan has
        rows that are not in the device's memory.
    device
        Where the model is to be; default: where it is (from ``meta``: the CPU).
    dense
        ``"ddp"``: every rank has all dense parameters. ``"fsdp"``: they are sharded (FSDP2); sums are in another order
        than under DDP.
    forward_codec, backward_codec
        How rows and gradients cross the wire (see `hotbed.ops.rows`); all but ``"fp32"`` round, so they change the
        model, by at most the stated error.
    per_shard_statistics
        Let row-wise rules and norms take the sums of each tile for those of the row, where rows are cut into columns.
        Saves an exchange per step and changes the model.
    ranks_per_node
        Exchange ids, rows and gradients in two hops, inside nodes of so many ranks and then between nodes: fewer and
        larger messages between many nodes. Results stay the same to the bit. Default: every rank with every other.
    directory
        Where files are made for rows in tier ``"disk"``; they end with the process. Default: that of temporary files.
    cache_policy
        Which rows a cache (`Tile.cache_rows`) gives up: ``"lru"`` the least recently, ``"lfu"`` the least often used.
    cache_tier
        Where caches are: in the ``"device"``'s memory, or in the ``"host"``'s.
    host
        How rows are in tier ``"host"``: ``"records"`` come to be when they are trained, and are brought to the device
        batch by batch; with ``"uva"`` all rows are there at once, in page-locked memory that a GPU reads and writes in
        place. These tiles have no cache.
    replicas
        M groups of ranks hold a copy of all tables each (2D sparse parallelism, arXiv 2508.03854); the plan is for the
        ``N = T / M`` ranks of a group. A group updates its copy by the gradients of its own samples; copies and their
        moments are averaged every ``sync_every`` steps, which changes results; see `hotbed.optim.RowWiseAdagrad`. The
        gradient of a table is that of the mean over the group. Memory per rank is M times that of one group; a sync
        sends ``2 (M − 1) / M`` of the touched rows that a rank holds.
    sync_every
        Steps between these averages. Besides, replicas are averaged for `state_dict`, checkpoints, evaluations and at
        the end of a `Trainer`'s run; a loop of your own ends with ``model.sync()``.
    layout
        What ranks that follow each other, as on a host, are: of one of the ``"groups"``, or the ``"replicas"`` of the
        same tiles.
    exact
        Update every copy by the gradients of all samples, instead of averaging copies. Results are those of one group
        of all ranks: to the bit with ``layout="groups"``, otherwise but for the order of sums over ranks.
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
        If the model has no tables, a module on ``meta`` cannot make its parameters, ``group`` is a part of the ranks,
        or ``replicas`` does not divide their number.
    """
    for option, value, known in (
        ("dense", dense, get_args(Dense)),
        ("forward_codec", forward_codec, get_args(Codec)),
        ("backward_codec", backward_codec, get_args(Codec)),
        ("cache_policy", cache_policy, get_args(Policy)),
        ("cache_tier", cache_tier, get_args(CacheTier)),
        ("host", host, get_args(HostRows)),
        ("layout", layout, get_args(Layout)),
    ):
        if value not in known:
            raise SpecError(
                f"{option} is {value!r}, must be one of {', '.join(known)}{did_you_mean(str(value), known)}"
            )
    if isinstance(model, Distributed):
        raise SpecError("the model is distributed already; distribute the module that was given to the first call")
    if isinstance(model, DistributedDataParallel):
        raise SpecError(
            "the model is in DistributedDataParallel, which distribute() calls itself; give it the module, "
            "`model.module`"
        )
    alone = not dist.is_available() or not dist.is_initialized()
    if alone:
        check_replicas(1, replicas, sync_every, exact=exact)
        plan = _plan_of_one(model, plan)
        if plan.is_in_device_memory:
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
    check_replicas(base.size, replicas, sync_every, exact=exact)
    size = base.size // replicas
    if isinstance(plan, Plan):
        if plan.world_size != size:
            has = f"this process group has {size}" if replicas == 1 else f"each of {replicas} replicas has {size}"
            raise PlanError(
                f"the plan is for {plan.world_size} ranks, {has}; make a plan for {size}, or start as many processes"
            )
    else:
        plan = plan_for(model, size, plan)
    plan.check(plan_tables(model))
    if replicas > 1:
        _refuse_replicas(plan_tables(model))
    if base.rank == 0:
        _say_what_changes_results(plan, forward_codec, backward_codec, per_shard_statistics, dense)
        if replicas > 1 and not exact:
            _log.warning(
                "replicas=%d are averaged every %d steps: results differ from one group's", replicas, sync_every
            )
    place = _place(model, device)
    copies = Replicas(base, replicas, sync_every, layout, exact=exact) if replicas > 1 else None
    link = base.clone() if copies is None else copies.shards.clone()
    if ranks_per_node is not None and ranks_per_node not in (1, size):  # which would be one hop
        link = NodeLink(link, ranks_per_node)
    storage = Storage(directory=directory, policy=cache_policy, cache_tier=cache_tier, host=host)
    wire = Wire(link, forward_codec, backward_codec, per_shard_statistics, copies)
    names = names_in_plans(model)
    for path, collection in collections.items():
        own = {name: names[path, name] for name in collection.tables}
        collection.distribute(local_plan(plan, own), wire, place, storage)
    materialize(model, place)
    return Distributed(model, wire, base, plan, dense)


class Distributed(nn.Module):
    """A distributed model: calls, attributes, names of parts and state are those of the model.

    Attributes
    ----------
    module
        The model.
    plan
        Where its tables are.
    mesh
        All ranks by ``("replica", "shard")``; None where there is one group.
    link, dense_link
        All ranks, for small exchanges between steps, and for gradients of dense parameters.
    """

    def __init__(self, model: nn.Module, wire: Wire, base: Link, plan: Plan, dense: Dense) -> None:
        super().__init__()
        self.module = model
        self.plan = plan
        self.wire = wire
        self.mesh = None if wire.replicas is None else wire.replicas.mesh
        self.link = base.clone()
        self.dense_link = base.clone()
        self._register_load_state_dict_pre_hook(_named_as_module)
        self._call = [_data_parallel(model, self.dense_link, dense)]  # in a list, so that it is no part of the model

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns."""
        return self._call[0](*args, **kwargs)

    def sync(self) -> None:
        """Average the replicas of the tables now, if any step was taken since they were; all ranks must call this."""
        for collection in collections_of(self.module).values():
            collection.sync()

    def no_sync(self) -> AbstractContextManager[None]:
        """Do not sum gradients of dense parameters inside; for all but the last of accumulated batches."""
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
        """Of the model."""
        return self.module.named_modules(*args, **kwargs)

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Of the model."""
        return self.module.named_parameters(*args, **kwargs)

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Of the model."""
        return self.module.named_buffers(*args, **kwargs)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the model, with whole tables, of which replicas are averaged first; all ranks must call this."""
        self.sync()
        return self.module.state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the model, with whole tables, of which each rank takes its tiles."""
        return self.module.load_state_dict(*args, **kwargs)


def _named_as_module(state: dict[str, Any], prefix: str, *_: object) -> None:
    """Where a module around it loads a state: names of the model, as those of the wrapper's only part."""
    for key in [key for key in state if key.startswith(prefix)]:
        state[f"{prefix}module.{key.removeprefix(prefix)}"] = state.pop(key)


def mean_over_ranks(total: Tensor, count: int, model: nn.Module) -> Tensor:
    """The loss to call ``backward`` on where ranks may have batches of different sizes.

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
    """Where a model is to be."""
    if device is not None:
        return torch.device(device)
    here = next((c.device for c in collections_of(model).values()), torch.device("cpu"))
    return torch.device("cpu") if here.type == "meta" else here


def _data_parallel(model: nn.Module, link: Link, dense: Dense) -> nn.Module:
    """What to call: the model, or DDP around it."""
    if isinstance(link, OneRank) or not any(p.requires_grad for p in model.parameters()):
        return model
    if dense == "fsdp":
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        kind = next(p.device.type for p in model.parameters())
        group = link.group if kind == "cpu" else link.gpu_group
        assert group is not None
        fully_shard(model, mesh=DeviceMesh.from_group(group, kind))
        return model
    return data_parallel(model, link)


def _refuse_replicas(tables: Sequence[Table]) -> None:
    """Raise `PlanError` for tables that groups of ranks cannot hold copies of."""
    for table in tables:
        if table.dynamic is not None:
            raise PlanError(f"table '{table.name}' is dynamic, of which there can be no replicas in this release")


def _plan_of_one(model: nn.Module, plan: Plan | str | Cut | Mapping[str, str | Cut]) -> Plan:
    """The plan for one rank; a `PlanError` for what would be no plan of this model, or is one for several ranks."""
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


def _say_what_changes_results(
    plan: Plan, forward: Codec, backward: Codec, per_shard_statistics: bool, dense: Dense
) -> None:
    if dense == "fsdp":
        _log.warning("dense='fsdp': gradients of dense parameters are summed in another order than in rank order")
    for name, codec in (("forward_codec", forward), ("backward_codec", backward)):
        if codec != "fp32":
            _log.warning("%s=%r rounds what crosses the wire: results differ from those of one rank", name, codec)
    if per_shard_statistics and any(len({t.cols for t in tiles}) > 1 for tiles in plan.by_table.values()):
        _log.warning("per_shard_statistics=True: row-wise rules see the columns of each tile by themselves")
    pooled = [t for t, form in plan.wire.items() if form == "pooled" and len({x.rows for x in plan.by_table[t]}) > 1]
    if pooled:
        _log.warning("wire='pooled': bags of several ids of %s are summed in parts", ", ".join(pooled))
