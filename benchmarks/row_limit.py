"""How fast this machine moves random rows: the limit that a lookup and an update of embedding rows cannot beat.

A training step has to read one row per id and write the pooled vectors (*gather*), and has to read one gradient row per
id and read, change and write each distinct row once (*scatter*). The two kernels below do that and nothing else: no
bounds check, no sort, no sum over duplicates, no optimizer state. Rows are prefetched, all of torch's threads work.

Caches decide such figures, so time rows that nothing touched lately, and let the scatter of a batch follow its gather,
as an update follows its lookup. `row_limit_seconds` does both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic
from torch import Tensor

AHEAD = 12
"""How many rows ahead to prefetch."""

LINE = 16
"""Float32 values per cache line."""

ROWS_PER_TASK = 1024


@intrinsic
def _prefetch(typingctx, array, index):
    """Bring the cache line of flat element ``index`` of a C-contiguous array closer."""

    def codegen(context, builder, signature, args):
        byte, int32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, int32, int32, int32])
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), byte)
        builder.call(
            builder.module.declare_intrinsic("llvm.prefetch", [byte], kind), [pointer, int32(0), int32(3), int32(1)]
        )
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@njit(parallel=True, nogil=True, cache=True)
def _gather(weight, slots, out):
    bags, dim = out.shape
    pooling = slots.shape[0] // bags
    per_task = max(ROWS_PER_TASK // pooling, 1)
    for task in prange((bags + per_task - 1) // per_task):
        stop = min((task + 1) * per_task, bags) * pooling
        for i in range(task * per_task * pooling, stop):
            ahead = slots[min(i + AHEAD, stop - 1)] * dim
            for d in range(0, dim, LINE):
                _prefetch(weight, ahead + d)
            row, bag = slots[i], i // pooling
            if i % pooling == 0:
                for d in range(dim):
                    out[bag, d] = weight[row, d]
            else:
                for d in range(dim):
                    out[bag, d] += weight[row, d]


@njit(parallel=True, nogil=True, cache=True)
def _scatter(weight, rows, grad, first_occurrence):
    count, dim = rows.shape[0], weight.shape[1]
    pooling = count // grad.shape[0]
    tasks = (count + ROWS_PER_TASK - 1) // ROWS_PER_TASK
    unused = np.zeros((tasks, dim), np.float32)  # where gradients of repeated rows end, so that they are really read
    for task in prange(tasks):
        stop = min((task + 1) * ROWS_PER_TASK, count)
        for i in range(task * ROWS_PER_TASK, stop):
            next_row = min(i + AHEAD, stop - 1)
            if first_occurrence[next_row]:
                for d in range(0, dim, LINE):
                    _prefetch(weight, rows[next_row] * dim + d)
            row, bag = rows[i], i // pooling
            if first_occurrence[i]:
                for d in range(dim):
                    weight[row, d] += grad[bag, d]
            else:
                for d in range(dim):
                    unused[task, d] += grad[bag, d]
    return unused


def gather_seconds(weight: Tensor, slots: Tensor, out: Tensor) -> float:
    """Seconds to read rows at random and write them pooled, with a minimal kernel.

    Parameters
    ----------
    weight
        ``[R, D]`` float32, contiguous.
    slots
        ``[N]`` int64: the row of each id, in bag order; all bags have the same number of ids.
    out
        ``[N / ids per bag, D]`` float32: receives the sum of each bag's rows.
    """
    arrays = weight.numpy(), slots.numpy(), out.numpy()
    numba.set_num_threads(torch.get_num_threads())
    start = time.perf_counter()
    _gather(*arrays)
    return time.perf_counter() - start


def index_select_seconds(weight: Tensor, slots: Tensor, out: Tensor) -> float:
    """As `gather_seconds` with one id per bag, by ``torch.index_select`` into ``out``."""
    start = time.perf_counter()
    torch.index_select(weight, 0, slots, out=out)
    return time.perf_counter() - start


def scatter_seconds(weight: Tensor, rows: Tensor, grad: Tensor, first_occurrence: Tensor) -> float:
    """Seconds to read one gradient row per id and to add one to each distinct row; ``weight`` changes.

    Parameters
    ----------
    weight
        ``[R, D]`` float32, contiguous.
    rows
        ``[N]`` int64: the row of each id, repeats included.
    grad
        ``[N / ids per bag, D]`` float32, read in order.
    first_occurrence
        ``[N]`` bool: True where a row occurs for the first time in ``rows``; only there it is changed.
    """
    arrays = weight.numpy(), rows.numpy(), grad.numpy(), first_occurrence.numpy()
    numba.set_num_threads(torch.get_num_threads())
    start = time.perf_counter()
    _scatter(*arrays)
    return time.perf_counter() - start


def row_limit_seconds(weight: Tensor, batches: Sequence[Tensor], grad: Tensor) -> tuple[float, float]:
    """Limit of lookup and of update, in seconds; medians over batches, the first of which warms up.

    The gather is the faster one of the kernel and (one id per bag only) ``torch.index_select``, which take turns from
    batch to batch. The scatter visits rows in ascending order, which is how the fastest update visits them.

    Parameters
    ----------
    weight
        ``[R, D]`` float32, contiguous; it changes.
    batches
        Slots of each batch ``[N]`` int64, in bag order; at least four that nothing looked up lately.
    grad
        ``[N / ids per bag, D]`` float32.
    """
    out = torch.empty_like(grad)
    one_hot = len(batches[0]) == len(grad)
    ways = (gather_seconds, index_select_seconds) if one_hot else (gather_seconds,)
    gathers: list[list[float]] = [[] for _ in ways]
    scatters: list[float] = []
    for i, slots in enumerate(batches):
        rows = slots.sort().values
        first = torch.ones_like(rows, dtype=torch.bool)
        first[1:] = rows[1:] != rows[:-1]
        gathers[i % len(ways)].append(ways[i % len(ways)](weight, slots, out))
        scatters.append(scatter_seconds(weight, rows, grad, first))
    return min(statistics.median(times[1:]) for times in gathers), statistics.median(scatters[1:])
