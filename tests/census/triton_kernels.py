"""Stand in for Triton: note each launch of a kernel, and let the reference compute what the operation is to give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from triton.runtime.jit import JITFunction

import hotbed.ops.backend as backend
from hotbed.ops import reference, triton, triton_runtime, triton_step, triton_update
from hotbed.ops.rows import step_seeds
from hotbed.store import memory
from tests.census.device import RECORD, OnDevice, host_of, shapes_of, to_host
from tests.census.streams import MODEL


def replace_kernels() -> None:
    """Note the launches of Triton's kernels, and compute what they would."""

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        leaves = pytree.tree_leaves([to_host(a) for a in args])
        shapes = shapes_of([t for t in leaves if isinstance(t, Tensor)])
        RECORD.note("launch", self.fn.__name__, detail=f"{grid} {shapes}")
        used = [t.host for t in pytree.tree_leaves(_flat(args)) if isinstance(t, OnDevice)]
        MODEL.operation(used, [], [])  # which of them it writes is not known here

    JITFunction.run = launch
    for module in (triton_runtime, triton_update):
        module.programs = lambda device: 32 * 132  # of an H100

    class Pretended:
        """The Triton backend, whose kernels are noted, with results of the reference."""

        NAME = "triton"

        def __getattr__(self, name: str) -> Callable[..., Any]:
            noted, computed = getattr(triton, name), getattr(reference, name)

            def call(*args: Any, **kwargs: Any) -> Any:
                result = noted(*args, **kwargs)
                with RECORD.computing():
                    _fill(result, computed(*to_host(args), **to_host(kwargs)))
                return result

            return call

    noted_seeds = triton_step.step_seeds

    def seeds(table_seeds: Tensor, steps: Tensor) -> Tensor:
        result = noted_seeds(table_seeds, steps)
        host_of(result).copy_(step_seeds(host_of(table_seeds), host_of(steps)))
        return result

    triton_step.step_seeds = seeds
    pretended = Pretended()
    load = backend._load
    backend._load = lambda name: pretended if name == "triton" else load(name)
    backend.select.cache_clear()
    memory.host_zeros = lambda shape, dtype, device: torch.zeros(*shape, dtype=dtype, device=device)


def _flat(tree: Any) -> Any:
    """List what named tuples and dataclasses hold."""
    if is_dataclass(tree) and not isinstance(tree, type):
        return [_flat(getattr(tree, f.name)) for f in fields(tree)]
    if isinstance(tree, (list, tuple)):
        return [_flat(value) for value in tree]
    return tree


def _fill(into: Any, values: Any) -> None:
    """Give tensors that kernels were to fill the values that they were to get.

    Where the reference gives none (the order of runs), only kernels read them, and these are not run.
    """
    if values is None:
        return
    if isinstance(into, OnDevice):
        host = into.host
        if host.shape == values.shape:
            host.copy_(values)
        else:
            host[: len(values)] = values
    elif is_dataclass(into):
        for f in fields(into):
            _fill(getattr(into, f.name), getattr(values, f.name))
    elif isinstance(into, (list, tuple)):
        for one, value in zip(into, values, strict=True):
            _fill(one, value)
