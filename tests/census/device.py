"""Pretend that there is a CUDA device: tensors that say they are on it, whose values are computed on the host.

`OnDevice` is a tensor of the pretended device around one of the host. `Recorder` is on while a step runs: every
operation of PyTorch passes through it, is noted (`RECORD`) if the device would have to do something for it, and is then
computed on the host, so that the values, and with them the sizes and branches that follow, are those of a real step. A
Triton kernel is noted where it is launched and not run; the operation that launched it gets its results from
`hotbed.ops.reference`.

Only for a process of its own: PyTorch cannot be told again that there is no device.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tests.census import graphs
from tests.census.kernels import ALLOCATES, COMPUTES_NOTHING, WAITS, flops_of, kernels_of
from tests.census.record import RECORD, where
from tests.census.streams import MODEL, replace_streams

CUDA = torch.device("cuda", 0)


_PINNED: dict[int, torch.UntypedStorage] = {}
"""Page-locked memory, by address."""


class OnDevice(Tensor):
    """A tensor that says it is on the device; ``host`` has its values."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=CUDA,
        )
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"OnDevice({list(self.shape)}, {self.dtype})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy; use Tensor.cpu() first")

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def record_stream(self, stream: Any) -> None:
        pass


def host_of(value: Any) -> Any:
    return value.host if isinstance(value, OnDevice) else value


def to_host(tree: Any) -> Any:
    """Replace tensors of the device by those that have their values, in dataclasses and tuples, too."""
    if isinstance(tree, OnDevice):
        return tree.host
    if is_dataclass(tree) and not isinstance(tree, type):
        return replace(tree, **{f.name: to_host(getattr(tree, f.name)) for f in fields(tree) if f.init})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*map(to_host, tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(to_host, tree))
    if isinstance(tree, dict):
        return {k: to_host(v) for k, v in tree.items()}
    return tree


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Note an operation and compute it on the host."""
    name = func._schema.name.split("::")[1]
    given = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    on_device = [t for t in given if isinstance(t, OnDevice)]
    to = kwargs.get("device")
    to_device = to is not None and torch.device(to).type == "cuda"
    if name == "is_pinned":
        return not on_device and _is_pinned(args[0])
    if name == "_pin_memory":
        return _pinned(args[0].clone())
    if name == "_local_scalar_dense" and on_device:
        RECORD.note("crossing", f"device to host, {given[0].element_size()} bytes, item()", waits=True)
        return args[0].host.item()
    if not on_device and not to_device:
        if kwargs.get("pin_memory"):
            return _pinned(func(*args, **{**kwargs, "pin_memory": False}))
        return func(*args, **kwargs)
    if name in ("_to_copy", "copy_"):
        return _copy(func, name, args, kwargs)
    # Values of the host that kernels take are 0-d: parameters of the launch.
    for tensor in given:
        if not isinstance(tensor, OnDevice) and tensor.dim() and not to_device:
            RECORD.note("crossing", f"host to device, {tensor.nbytes} bytes, argument of {name}", waits=True)
    on_host = {k: host_of(v) for k, v in kwargs.items()}
    if to_device:
        on_host["device"] = torch.device("cpu")
    on_host.pop("pin_memory", None)
    hosts = pytree.tree_map(host_of, args)
    on_host = pytree.tree_map(host_of, on_host)
    if name in WAITS or (name in ("index", "index_put_", "_index_put_impl_", "index_put") and _has_masks(args)):
        RECORD.note("crossing", f"device to host, a size, {name}", waits=True)
    result = graphs.computed(func, hosts, on_host, is_view=name in COMPUTES_NOTHING, allocates=name in ALLOCATES)
    _order(func, name, args, kwargs, result)
    if name not in COMPUTES_NOTHING and name not in ALLOCATES:
        used = given + [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        RECORD.note(
            "launch",
            name,
            kernels_of(func, name, args),
            detail=shapes_of(given),
            nbytes=nbytes_of(used),
            flops=flops_of(name, hosts),
        )
    return _wrapped(name, (args, kwargs), result)


def _pinned(made: Tensor) -> Tensor:
    RECORD.note("host", "allocation of page-locked memory")
    storage = made.untyped_storage()
    _PINNED[storage.data_ptr()] = storage  # kept, so that no other memory gets the address
    return made


def _is_pinned(tensor: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() in _PINNED


def _has_masks(args: Any) -> bool:
    return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def shapes_of(tensors: Sequence[Tensor]) -> str:
    return " ".join(
        f"{t.dtype}{list(t.shape)}".removeprefix("torch.")
        + (f" in {RECORD.memory_of(t.host)}" if isinstance(t, OnDevice) else "")
        for t in tensors
    )


def _order(func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
    """Tell the model of streams what an operation reads, writes and allocates."""
    if name in COMPUTES_NOTHING:
        return
    writes: list[Tensor] = []
    reads: list[Tensor] = []
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        found = [t.host for t in pytree.tree_leaves(value) if isinstance(t, OnDevice)]
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        (writes if is_written else reads).extend(found)
    given = {id(t) for t in (*reads, *writes)}
    new = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor) and id(t) not in given and not t._is_view()]
    if name in ALLOCATES:
        graphs.tell([], [], new)
    else:
        graphs.tell(reads, [*writes, *new], new)


def _wrapped(name: str, given: Any, result: Any) -> Any:
    """Put what the host computed on the device; what was changed in place is the argument itself."""
    before = {id(t.host): t for t in pytree.tree_leaves(given) if isinstance(t, OnDevice)}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in before:
            return before[id(value)]
        if name not in COMPUTES_NOTHING and not value._is_view():
            RECORD.allocated(name, value)
        return OnDevice(value)

    return pytree.tree_map(wrap, result)


def _copy(func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy within the device, or between it and the host."""
    into, source = (args[0], args[1]) if name == "copy_" else (None, args[0])
    asked = kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
    target = torch.device(kwargs.get("device") or source.device) if into is None else into.device
    source_on, target_on = isinstance(source, OnDevice), target.type == "cuda"
    if source_on and target_on:
        narrow = source.element_size() if into is None else into.element_size()
        if into is None and kwargs.get("dtype") is not None:
            narrow = kwargs["dtype"].itemsize
        RECORD.note("launch", name, detail=shapes_of([source]), nbytes=source.nbytes + source.numel() * narrow)
    elif source_on or target_on:
        host_side = into if source_on else source
        pinned = host_side is not None and _is_pinned(host_side)
        way = "device to host" if source_on else "host to device"
        RECORD.note(
            "crossing", f"{way}, {source.nbytes} bytes" + ("" if pinned else ", pageable"), waits=not (asked and pinned)
        )
    else:
        return func(*args, **kwargs)
    source_read = [source.host] if source_on else []
    if into is not None:
        graphs.tell(source_read, [into.host] if target_on else [], [])
        graphs.run(_copied, (host_of(into), host_of(source)))
        return into
    options = {**kwargs, "device": torch.device("cpu"), "non_blocking": False}
    made = graphs.computed(func, (host_of(source),), options, is_view=False, allocates=False)
    graphs.tell(source_read, [made] if target_on else [], [made] if target_on else [])
    if not target_on:
        return made
    RECORD.allocated(name, made)
    return OnDevice(made)


def _copied(given: tuple[Tensor, Tensor]) -> None:
    into, source = given
    into.copy_(source)


class Recorder(TorchDispatchMode):
    """Let operations that have no argument on the device pass through `dispatch`, too: those that make tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return dispatch(func, args, kwargs or {})


# -- PyTorch is told --------------------------------------------------------------------------------------


def pretend() -> None:
    """Tell PyTorch that there is a CUDA device; not to be undone."""
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 1
    cuda.set_device = lambda *_: None
    cuda.current_device = lambda: 0
    cuda.is_bf16_supported = lambda *_, **__: True
    cuda.get_device_name = lambda *_: "pretended"
    cuda.device_of = cuda.device = lambda *_: contextlib.nullcontext()
    cuda.mem_get_info = lambda *_: (1 << 40, 1 << 40)
    importlib.import_module("torch.optim.optimizer")._foreach_supported_types.append(
        OnDevice
    )  # as for any tensor of a CUDA device
    replace_streams()
    graphs.replace_graphs()
    MODEL.where = where
    MODEL.on_wait = lambda: RECORD.note("host", "wait for an event")
    torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes its result on the host, and copies it
    run_thread = threading.Thread.run

    def run(self: threading.Thread) -> None:
        torch._C._set_only_lift_cpu_tensors(True)  # it is a thread's own, as modes are
        with Recorder():
            run_thread(self)

    threading.Thread.run = run
    Recorder().__enter__()
