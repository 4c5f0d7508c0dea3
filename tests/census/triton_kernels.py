"""Stand in for Triton: note each launch of a kernel, and let the reference compute what the operation is to give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from triton.runtime.jit import JITFunction

import hotbed.ops.backend as backend
from hotbed.embed import dense_parallel as dense
from hotbed.ops import (
    reference,
    triton,
    triton_dense,
    triton_runtime,
    triton_update,
)
from hotbed.ops.rows import step_seeds
from hotbed.store import memory
from tests.census import graphs
from tests.census.device import OnDevice, host_of, nbytes_of, shapes_of, to_host
from tests.census.kernel_writes import written
from tests.census.record import RECORD


def replace_kernels() -> None:
    """Note the launches of Triton's kernels, and compute what they would."""

    def launch(self: Any, *args: Any, grid: Any, warmup: bool = False, **options: Any) -> None:
        given = [t for t in pytree.tree_leaves(_flat(args)) if isinstance(t, OnDevice)]
        numbers = [n for n in pytree.tree_leaves(_flat(args)) if isinstance(n, (int, float))]
        RECORD.note("launch", self.fn.__name__, detail=f"{grid} {shapes_of(given)} {numbers}", nbytes=nbytes_of(given))
        graphs.tell([t.host for t in given], [host_of(t) for t in written(self, args, options)], [])

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
                graphs.run(work, (to_host(args), to_host(kwargs), to_host(result)))
                return result

            def work(given: Any) -> None:
                args, kwargs, result = given
                with RECORD.computing():
                    values = computed(*args, **kwargs)
                    _fill(result, values)
                    if name == "occurrences":
                        _pad(result, len(values.slots), args[0].limit)

            return call

    noted_seeds = triton_dense.step_seeds

    def seeds(table_seeds: Tensor, steps: Tensor) -> Tensor:
        result = noted_seeds(table_seeds, steps)
        graphs.run(lambda t: t[0].copy_(step_seeds(t[1], t[2])), to_host((result, table_seeds, steps)))
        return result

    triton_dense.step_seeds = seeds
    noted_count = triton_dense.count_steps_

    def count_steps_(counts: Tensor, trained: Tensor, gate: Tensor) -> None:
        noted_count(counts, trained, gate)
        graphs.run(lambda t: t[0].add_(t[1] * (t[2] != 0)), to_host((counts, trained, gate)))

    triton_dense.count_steps_ = count_steps_
    noted_loss = triton_dense.cross_entropy

    def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        results = noted_loss(logits, labels, weights)
        graphs.run(loss_and_gradient, to_host((results, logits, labels, weights)))
        return results

    def loss_and_gradient(given: Any) -> None:
        results, logits, labels, weights = given
        with RECORD.computing(), torch.enable_grad():
            x = logits.detach().requires_grad_()
            total = F.binary_cross_entropy_with_logits(x, labels, weights, reduction="sum")
            _fill(results, (total.detach(), torch.autograd.grad(total, x)[0]))

    triton_dense.cross_entropy = cross_entropy
    noted_relu = triton_dense.relu_backward

    def relu_backward(of_out: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
        results = noted_relu(of_out, out)
        graphs.run(passed_and_summed, to_host((results, of_out, out)))
        return results

    def passed_and_summed(given: Any) -> None:
        results, of_out, out = given
        with RECORD.computing():
            passed = torch.where(out <= 0, 0, of_out)
            _fill(results, (passed, passed.float().sum(0).to(passed.dtype)))

    triton_dense.relu_backward = relu_backward
    noted_mean = triton_dense.reduce_mean

    def mean_of_rows(values: Tensor) -> Tensor:
        result = noted_mean(values)
        graphs.run(added, to_host((result, values)))
        return result

    def added(given: Any) -> None:
        result, values = given
        with RECORD.computing():
            result.copy_(dense.average_ranks(values, range(len(values)), len(values)))

    triton_dense.reduce_mean = mean_of_rows
    pretended = Pretended()
    load = backend._load
    backend._load = lambda name: pretended if name == "triton" else load(name)
    backend.select.cache_clear()
    memory.host_zeros = lambda shape, dtype, device: torch.zeros(*shape, dtype=dtype, device=device)


def _pad(found: Any, count: int, limit: int | None) -> None:
    """List as padding what there is room for behind so many occurrences, as the kernel does."""
    for tensor, value in ((found.slots, limit), (found.bags, 0), (found.scale, 0)):
        if tensor is not None and count < len(tensor):
            tensor[count:] = value


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
    if isinstance(into, torch.Tensor):
        if into.shape == values.shape:
            into.copy_(values)
        else:
            into[: len(values)] = values
    elif is_dataclass(into):
        for f in fields(into):
            _fill(getattr(into, f.name), getattr(values, f.name))
    elif isinstance(into, (list, tuple)):
        for one, value in zip(into, values, strict=True):
            _fill(one, value)
