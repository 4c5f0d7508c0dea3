"""Share dense parameters over ranks, with gradients averaged in rank order; materialize modules that are on ``meta``.

An all-reduce adds in an order that depends on where in its buffer a value lies, and DDP rearranges its buffers after
the first step; a run that is resumed would not have the bits of one that was not interrupted. Here every rank adds one
share of a buffer, rank after rank, and sends the sums to the others: as many bytes as a ring moves, in rank order. Two
ranks with a gradient of four values: rank 0 gets rank 1's first two, rank 1 gets rank 0's last two, each computes
``(own of rank 0 + own of rank 1) / 2`` of its two and sends them back.

Gather what FSDP2 has sharded for a state, and shard a state that is loaded.

Under ``fully_shard`` parameters and the moments of their optimizers are ``DTensor``s, of which each rank has some first
rows. Checkpoints and ``state_dict`` have them whole, so that any number of ranks loads them, with FSDP2 or without: of
a weight ``[5, 8]`` rank 0 of 2 has the rows 0 … 2 and rank 1 the others; the file has all 5, and of 3 ranks that load
it the last has row 4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hotbed.comm import Link, OneRank
from hotbed.comm.hierarchical import messages_per_exchange
from hotbed.config.parallel_memory import DensePart
from hotbed.errors import SpecError

BUCKET_MIB = 25
"""Size of the buckets that gradients are averaged in; while one is, backward goes on."""
BUCKET_MESSAGES = 128
"""Messages of an exchange for which buckets are as large: of more, each bucket would wait for these, not for bytes."""


def data_parallel(model: nn.Module, link: Link, kind: DensePart) -> nn.Module:
    """Share a model's dense parameters over ranks, and return what to call: the model itself, or DDP around it.

    ``"ddp"`` has `mean_over_ranks_` in the place of DDP's all-reduce, and needs a process group that nothing else uses
    on the host. ``"fsdp"`` is FSDP2, in place: modules to which ``fully_shard`` was applied already stay units of their
    own. All models share its process group, because torch takes meshes of equal ranks for one.
    """
    if isinstance(link, OneRank) or not any(p.requires_grad for p in model.parameters()):
        return model
    if kind == "ddp":
        refuse_sharded(model, kind)
        return _in_ddp(model, link)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device = next(p.device.type for p in model.parameters())
    group = (link.group or dist.group.WORLD) if device == "cpu" else link.gpu_group
    assert group is not None
    fully_shard(model, mesh=DeviceMesh.from_group(group, device))
    return model


def _in_ddp(model: nn.Module, link: Link) -> DistributedDataParallel:
    """Wrap a model in DDP, with `mean_over_ranks_` in the place of its all-reduce."""
    on_host = all(p.device.type == "cpu" for p in model.parameters())
    constant = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if getattr(module, "buffers_are_constant", False)
        for name, _ in module.named_buffers()
    ]
    if constant:  # which DDP would send in every step
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constant)
    parallel = DistributedDataParallel(
        model,
        process_group=link.group if on_host else link.gpu_group,
        bucket_cap_mb=BUCKET_MIB * max(-(-messages_per_exchange(link) // BUCKET_MESSAGES), 1),
        gradient_as_bucket_view=True,
    )
    # One thread, so that buckets are exchanged in one order on all ranks; the autograd thread goes on meanwhile. Where
    # exchanges may not overlap, the autograd thread starts them itself: between the gradients of rows that it sends, in
    # the order of the graph, which is that of all ranks. On a GPU they run in a stream of their own, beside backward.
    thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-dense") if link.overlaps else None
    # One for all buckets: the memory that one of them needs, the next one gets.
    beside = None if on_host else torch.cuda.Stream(next(p.device for p in model.parameters()))

    def averaged(buffer: Tensor) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Any] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        stream = None if beside is None else torch.cuda.current_stream(buffer.device)

        def average() -> None:
            try:
                if beside is not None and stream is not None:
                    beside.wait_stream(stream)
                with torch.cuda.stream(beside):
                    mean_over_ranks_(buffer, link)
                    done.set_result(buffer)
            except Exception as error:
                link.failure = error  # DDP would say that this is no tensor
                done.set_exception(error)

        if thread is None:
            average()
        else:
            thread.submit(average)
        return done

    parallel.register_comm_hook(None, lambda _, bucket: averaged(bucket.buffer()))  # pyright: ignore[reportUnknownLambdaType]
    return parallel


def wrapper_of(module: nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` around a module whose forward is under way, if there is one."""
    active: object = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if isinstance(active, DistributedDataParallel) and any(m is module for m in active.module.modules()):
        return active
    return None


def refuse_data_parallel(tables: nn.Module) -> None:
    """Raise `SpecError` if tables that are not distributed are called inside torch's own data parallelism.

    That averages gradients of parameters, which tables are not: each rank would train its own.
    """
    active = wrapper_of(tables)
    if active is not None:
        wrapper, ranks, call = "DistributedDataParallel", dist.get_world_size(active.process_group), "model"
    elif hasattr(tables, "_is_fsdp_managed_module") and dist.is_initialized():  # so fully_shard marks all modules
        wrapper, ranks, call = "FSDP", dist.get_world_size(), "model, parallel=hotbed.ParallelOptions(dense='fsdp')"
    else:
        return
    if ranks > 1:
        raise SpecError(
            f"{wrapper} averages gradients of parameters only, so each of the {ranks} ranks would train tables of its "
            f"own; call `model = hotbed.distribute({call})` in its place, before making optimizers"
        )


def refuse_sharded(model: nn.Module, kind: DensePart) -> None:
    """Raise `SpecError` if a module of a model whose gradients DDP averages was given to FSDP."""
    for path, module in model.named_modules() if kind == "ddp" else ():
        if hasattr(module, "_is_fsdp_managed_module"):
            raise SpecError(
                f"parameters of {path or 'the model'} are sharded by FSDP, of which DDP cannot average gradients; call "
                "`model = hotbed.distribute(model, parallel=hotbed.ParallelOptions(dense='fsdp'))`, after fully_shard "
                "of parts if there are any; it applies fully_shard to the rest"
            )


def mean_over_ranks_(buffer: Tensor, link: Link) -> None:
    """Average a flat tensor over ranks, in place: values are added in rank order, and then divided.

    Over a `hotbed.comm.hierarchical.NodeLink` values take two hops, and are the same.
    """
    share = -(-len(buffer) // link.size)
    sizes = [max(min(share, len(buffer) - r * share), 0) for r in range(link.size)]
    nbytes = [size * buffer.element_size() for size in sizes]
    shares = buffer.split(sizes)
    theirs = buffer.new_empty(link.size, sizes[link.rank])
    what = "gradients of dense parameters"
    link.exchange(what, shares, list(theirs), lambda _, receiver: nbytes[receiver]).wait()
    mean = average_ranks(theirs)
    link.exchange(what, [mean] * link.size, shares, lambda sender, _: nbytes[sender]).wait()


def average_ranks(values: Tensor) -> Tensor:
    """Average rows ``[T, n]``: added from the first to the last, on a GPU by one kernel (not float64), then divided."""
    if values.is_cuda and values.dtype in (torch.float32, torch.bfloat16, torch.float16):
        from hotbed.ops import triton_dense

        return triton_dense.reduce_mean(values)
    total = values[0]
    for row in values[1:]:
        total = total + row
    return total / len(values)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Make the parameters that are on ``meta``, and move the rest."""
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{own_name}".lstrip(".")
            if parameter.is_meta and names.setdefault(id(parameter), name) != name:
                raise SpecError(
                    f"'{name}' and '{names[id(parameter)]}' are one parameter on meta, which would become two; make "
                    "the model on a device"
                )
    for path, module in model.named_modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if not any(t.is_meta for t in own):
            continue
        reset = getattr(module, "reset_parameters", None)
        if reset is None:
            raise SpecError(
                f"{path or 'the model'} ({type(module).__name__}) is on meta and has no reset_parameters(), so its "
                "parameters cannot be made; add one, or make the model on a device"
            )
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():
            for t in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                t.fill_(_unset(t.dtype))
        reset()
        for name, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if bool(_is_unset(t).any()):
                raise SpecError(
                    f"{path or 'the model'} ({type(module).__name__}) is on meta and its reset_parameters() does not "
                    f"fill '{name}'; let it, or make the model on a device"
                )
    model.to(device)


def _unset(dtype: torch.dtype) -> float | int:
    """Return the mark of values that are not set yet."""
    if dtype == torch.bool:
        return 0
    return torch.iinfo(dtype).min if not (dtype.is_floating_point or dtype.is_complex) else math.nan


def _is_unset(t: Tensor) -> Tensor:
    """Find where a tensor still has the mark; booleans have none."""
    if t.dtype == torch.bool:
        return torch.zeros_like(t)
    return t.isnan() if t.is_floating_point() or t.is_complex() else t == _unset(t.dtype)


def is_sharded(value: object) -> bool:
    """Say whether this is a ``DTensor``, without importing what makes them."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def local_values(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this rank has."""
    return cast("Any", tensor).to_local() if is_sharded(tensor) else tensor


def gather_shards(value: object, *, keep: bool = True) -> Any:
    """Replace the sharded tensors of a state by whole ones; all ranks must call this.

    A rank that does not ``keep`` them gets its own shards in their place, so that it has no more than one whole tensor
    at a time. What is not sharded is not copied.
    """
    if is_sharded(value):
        whole = cast("Any", value).full_tensor().detach()
        return whole if keep else local_values(cast("Tensor", value))
    if isinstance(value, Mapping):
        entries = cast("Mapping[Any, object]", value)
        if not _has_sharded(entries):
            return entries
        return {key: gather_shards(entry, keep=keep) for key, entry in entries.items()}
    if isinstance(value, list | tuple) and _has_sharded(cast("list[object]", value)):
        return type(value)(gather_shards(entry, keep=keep) for entry in cast("list[object]", value))
    return value


def _has_sharded(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_sharded, cast("Mapping[Any, object]", value).values()))
    if isinstance(value, list | tuple):
        return any(map(_has_sharded, cast("list[object]", value)))
    return is_sharded(value)


def sharded_as(value: Any, like: object) -> Any:
    """Shard a whole tensor as another of its shape is; whatever else it is, return it as it is."""
    shape: torch.Size | None = getattr(value, "shape", None)
    if not is_sharded(like) or is_sharded(value) or shape != cast("Tensor", like).shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    place: Any = like
    value = value.to(place.device)
    # Every rank has all of it, so that none is sent.
    return distribute_tensor(value, place.device_mesh, place.placements, src_data_rank=None)


def sharded_parameters(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the entries of a model's whole state whose parameters are sharded."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return {name: sharded_as(value, own.get(name)) for name, value in state.items()}


def sharded_moments(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the moments of an optimizer's whole state whose parameters are sharded."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in state["param_groups"] for index in group["params"]]
    like = dict(zip(order, parameters, strict=True))
    moments = {
        index: {name: sharded_as(value, like.get(index)) for name, value in of.items()}
        for index, of in cast("Mapping[int, Mapping[str, Any]]", state["state"]).items()
    }
    return {**state, "state": moments}
