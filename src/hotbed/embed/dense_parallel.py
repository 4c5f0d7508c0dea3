"""Train dense parameters data-parallel by DDP or FSDP2, and average DDP's gradients along the tree over ranks.

The order of additions in an all-reduce depends on the position of a value in its buffer, and DDP rearranges its buffers
after the first step. So a resumed run would have other bits than an uninterrupted one. Here each rank adds one share of
a buffer along the tree and sends the result to all ranks, which moves the same number of bytes as a ring. For example,
two ranks have a gradient of four values. Rank 0 receives the first two values from rank 1, and rank 1 receives the last
two values from rank 0. Each computes ``(value of rank 0 + value of rank 1) / 2`` for two values and sends them back.
More than eight ranks do this in several hops, so that few bytes leave a node (`mean_over_ranks_`).

With ``fully_shard``, parameters and their moments are ``DTensor``s, sharded by rows. Checkpoints and ``state_dict``
have whole tensors, which any number of ranks can load, with or without FSDP2 (`gather_shards`, `shard_like`). For
example, rank 0 of 2 has rows 0 … 2 of a weight ``[5, 8]``, and rank 1 has rows 3 and 4. The file has 5 rows. If 3 ranks
load it, the last rank has row 4.

`materialize` creates the parameters of modules on ``meta``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hotbed.comm import Link, OneRank, share_sizes
from hotbed.comm.hierarchical import Hop, hops_of_sums, messages_per_sum
from hotbed.config.parallel_memory import DensePart
from hotbed.errors import SpecError
from hotbed.virtual_ranks import tree_additions

BUCKET_MIB = 25
"""Size of the buckets of gradients. Averaging of a bucket overlaps with backward."""
BUCKET_MESSAGES = 128
"""Number of messages per exchange above which buckets are larger, because latency would dominate their time."""


def make_data_parallel(model: nn.Module, link: Link, dense: DensePart) -> nn.Module:
    """Make a model data-parallel, and return the module to call: the model itself, or DDP around it.

    ``"ddp"`` uses `mean_over_ranks_` instead of DDP's all-reduce. On the host it needs a separate process group.
    ``"fsdp"`` applies FSDP2 in place. Modules with an earlier ``fully_shard`` keep it. All models share the process
    group of FSDP2, because torch treats meshes of equal ranks as equal.
    """
    if isinstance(link, OneRank) or not any(p.requires_grad for p in model.parameters()):
        return model
    if dense == "ddp":
        refuse_sharded(model, dense)
        return _wrap_in_ddp(model, link)
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    device = next(p.device.type for p in model.parameters())
    group = (link.group or dist.group.WORLD) if device == "cpu" else link.gpu_group
    assert group is not None
    fully_shard(model, mesh=DeviceMesh.from_group(group, device))
    return model


def _wrap_in_ddp(model: nn.Module, link: Link) -> DistributedDataParallel:
    """Wrap a model in DDP with `mean_over_ranks_` instead of its all-reduce."""
    on_host = all(p.device.type == "cpu" for p in model.parameters())
    constant = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        if getattr(module, "buffers_are_constant", False)
        for name, _ in module.named_buffers()
    ]
    if constant:  # DDP would broadcast them in every step
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constant)
    parallel = DistributedDataParallel(
        model,
        process_group=link.group if on_host else link.gpu_group,
        bucket_cap_mb=BUCKET_MIB * max(-(-messages_per_sum(link) // BUCKET_MESSAGES), 1),
        gradient_as_bucket_view=True,
    )
    # One thread exchanges buckets in the same order on all ranks, concurrently with the autograd thread. If exchanges
    # must not overlap, the autograd thread runs them. Then they are ordered with the exchanges of row gradients as in
    # the graph, which is equal on all ranks. On a GPU they run in a separate stream.
    thread = ThreadPoolExecutor(1, thread_name_prefix="hotbed-dense") if link.overlaps else None
    # All buckets use one stream, so that the next bucket can reuse the memory of a bucket.
    averaging_stream = None if on_host else torch.cuda.Stream(next(p.device for p in model.parameters()))

    def averaged(buffer: Tensor) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Any] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])
        stream = None if averaging_stream is None else torch.cuda.current_stream(buffer.device)

        def average() -> None:
            try:
                if averaging_stream is not None and stream is not None:
                    averaging_stream.wait_stream(stream)
                with torch.cuda.stream(averaging_stream):
                    mean_over_ranks_(buffer, link)
                    done.set_result(buffer)
            except Exception as error:
                link.failure = error  # DDP would report that the result is not a tensor
                done.set_exception(error)

        if thread is None:
            average()
        else:
            thread.submit(average)
        return done

    parallel.register_comm_hook(None, lambda _, bucket: averaged(bucket.buffer()))  # pyright: ignore[reportUnknownLambdaType]
    return parallel


def find_wrapper(module: nn.Module) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` around a module if its forward is running, else None."""
    active: object = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if isinstance(active, DistributedDataParallel) and any(m is module for m in active.module.modules()):
        return active
    return None


def refuse_data_parallel(tables: nn.Module) -> None:
    """Raise `SpecError` if undistributed tables are called inside torch's data parallelism.

    Torch averages gradients of parameters only, so each rank would train different tables.
    """
    active = find_wrapper(tables)
    if active is not None:
        wrapper, ranks, call = "DistributedDataParallel", dist.get_world_size(active.process_group), "model"
    elif hasattr(tables, "_is_fsdp_managed_module") and dist.is_initialized():  # fully_shard sets it on all modules
        wrapper, ranks, call = "FSDP", dist.get_world_size(), "model, parallel=hotbed.ParallelOptions(dense='fsdp')"
    else:
        return
    if ranks > 1:
        raise SpecError(
            f"{wrapper} averages gradients of parameters only, so each of the {ranks} ranks would train different "
            f"tables. Call `model = hotbed.distribute({call})` instead, before making optimizers"
        )


def refuse_sharded(model: nn.Module, dense: DensePart) -> None:
    """Raise `SpecError` if a model for DDP has modules that are sharded by FSDP."""
    for path, module in model.named_modules() if dense == "ddp" else ():
        if hasattr(module, "_is_fsdp_managed_module"):
            raise SpecError(
                f"parameters of {path or 'the model'} are sharded by FSDP, so DDP cannot average their gradients. Call "
                "`model = hotbed.distribute(model, parallel=hotbed.ParallelOptions(dense='fsdp'))`, which applies "
                "fully_shard to all modules that are not sharded yet"
            )


def mean_over_ranks_(buffer: Tensor, link: Link, divisor: int | None = None) -> None:
    """Average a flat tensor over ranks in place. Values are added along the tree over ranks, then divided.

    The default of ``divisor`` is the number of ranks.

    In each of several hops (`hotbed.comm.hierarchical.hops_of_sums`), a rank receives its share of the values that are
    left from all peers, and adds them. The same hops in reverse order return the mean. For example, the nodes are ranks
    0, 1 and ranks 2, 3, and a gradient has four values. Rank 0 adds the first two values of ranks 0 and 1. Then it adds
    the first of these sums and the same one of rank 2, and divides by 4. So the network carries half of the gradient.
    """
    what = "gradients of dense parameters"
    hops, done = hops_of_sums(link), list[tuple[Hop, Tensor, Sequence[Tensor]]]()
    values = buffer
    for hop in hops:
        count = len(hop.peers)
        shares = values.split(share_sizes(len(values), count))
        theirs = values.new_empty(count, len(shares[hop.position]))
        hop.exchange(what, shares, list(theirs))
        done.append((hop, values, shares))
        values = average_ranks(theirs, hop.peers, (divisor or link.size) if hop is hops[-1] else 1)
    for hop, whole, shares in reversed(done):
        hop.exchange(what, [values] * len(shares), shares)
        values = whole


def average_ranks(values: Tensor, leaves: Sequence[int], divisor: int) -> Tensor:
    """Add rows ``[T, n]`` of ascending leaves along the tree over virtual ranks, and divide the sum.

    On a GPU, one kernel does this, except for float64. Otherwise, ``values`` are overwritten, and the result is its
    first row.
    """
    if values.is_cuda and values.dtype in (torch.float32, torch.bfloat16, torch.float16):
        from hotbed.ops import triton_dense

        return triton_dense.reduce_mean(values, leaves, divisor)
    for i, j in tree_additions(leaves):
        values[i] += values[j]
    return values[0].div_(divisor)


def materialize(model: nn.Module, device: torch.device) -> None:
    """Create the parameters and buffers that are on ``meta``, and move the others to ``device``."""
    names: dict[int, str] = {}
    for path, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            name = f"{path}.{own_name}".lstrip(".")
            if parameter.is_meta and names.setdefault(id(parameter), name) != name:
                raise SpecError(
                    f"'{name}' and '{names[id(parameter)]}' are one parameter on meta, which would become two. Create "
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
                "parameters cannot be initialized. Add the method, or create the model on a device"
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
                    f"initialize '{name}'. Change the method, or create the model on a device"
                )
    model.to(device)


def _unset(dtype: torch.dtype) -> float | int:
    """Return the marker for uninitialized values."""
    if dtype == torch.bool:
        return 0
    return torch.iinfo(dtype).min if not (dtype.is_floating_point or dtype.is_complex) else math.nan


def _is_unset(t: Tensor) -> Tensor:
    """Return a mask of uninitialized values. Booleans have no marker."""
    if t.dtype == torch.bool:
        return torch.zeros_like(t)
    return t.isnan() if t.is_floating_point() or t.is_complex() else t == _unset(t.dtype)


def is_sharded(value: object) -> bool:
    """Return whether a value is a ``DTensor``, without importing that class."""
    return isinstance(value, Tensor) and hasattr(value, "full_tensor")


def local_values(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return cast("Any", tensor).to_local() if is_sharded(tensor) else tensor


def gather_shards(value: object, *, keep: bool = True) -> Any:
    """Replace sharded tensors of a state with whole tensors. All ranks must call this.

    With ``keep=False`` a rank keeps only its shards, so it has at most one whole tensor in memory at a time. Other
    values are not copied.
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


def shard_like(value: Any, like: object) -> Any:
    """Shard a whole tensor like another tensor of its shape. Return other values unchanged."""
    shape: torch.Size | None = getattr(value, "shape", None)
    if not is_sharded(like) or is_sharded(value) or shape != cast("Tensor", like).shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    place: Any = like
    value = value.to(place.device)
    # No data is sent, because every rank has the whole tensor.
    return distribute_tensor(value, place.device_mesh, place.placements, src_data_rank=None)


def shard_parameters(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the entries of a model's whole state like the parameters of the model."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return {name: shard_like(value, own.get(name)) for name, value in state.items()}


def shard_moments(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Shard the moments of an optimizer's whole state like its parameters."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in state["param_groups"] for index in group["params"]]
    like = dict(zip(order, parameters, strict=True))
    moments = {
        index: {name: shard_like(value, like.get(index)) for name, value in of.items()}
        for index, of in cast("Mapping[int, Mapping[str, Any]]", state["state"]).items()
    }
    return {**state, "state": moments}
