# pyright: basic, reportCallIssue=false
"""Measure how fast this machine moves rows and streams, as limits for kernels.

A lookup must read each row of a batch and write pooled vectors (*gather*). An update must read a gradient per bag, and
read, change and write each distinct row and its moments (*scatter*). The kernels below do only that: no sort, no sum
over duplicates, no rule, no scales of int8 rows. They use the memory of the arena and leave its bits as they are: data
is moved as integers, and the scatter adds zero. On a GPU, kernels of torch move the same rows. Their bytes differ, so
their seconds are scaled (see `Way`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numba import prange
from torch import Tensor

from benchmarks.kernels.meter import Limit, Way
from benchmarks.kernels.options import OpsOptions
from hotbed import large_tensors
from hotbed.errors import RecipeError
from hotbed.measure import machine_profile
from hotbed.measure.machine_profile import streaming_copy
from hotbed.ops import Rows
from hotbed.ops.cpu_instructions import prefetch_bytes, stream_row, streams_end
from hotbed.ops.cpu_lookup import should_stream
from hotbed.ops.cpu_runtime import PREFETCH_ROWS, kernel, launch
from hotbed.ops.rows import locate_rows
from hotbed.optim import Rule
from hotbed.plan.cost import table_bytes
from hotbed.store.memory import available_bytes
from hotbed.train.runs.report import size

ROWS_PER_TASK = 1024
NO_MOMENT = np.empty((1, 0), np.int32)


class MatrixRows(NamedTuple):
    """Rows of one matrix, which a kernel moves."""

    matrix: Tensor  # ``[R, words]`` int32: the memory of all rows
    at: Tensor  # ``[n]`` int64: indices of the moved rows
    slots: Tensor  # ``[n]`` int64: slots of the moved rows, which are the indices of their moments
    bags: int  # number of pooled vectors or gradients
    vector_bytes: int  # bytes of a pooled vector or gradient

    def vectors(self) -> Tensor:
        """Return uninitialized ``[bags, pieces, words]`` int32. Vectors wider than a row have several pieces."""
        words = max(min(self.matrix.shape[1], self.vector_bytes // 4), 1)
        shape = (self.bags, max(self.vector_bytes // 4 // words, 1), words)
        if self.matrix.is_cpu:
            return large_tensors.empty(shape, torch.int32)
        return torch.empty(*shape, dtype=torch.int32, device=self.matrix.device)


def rows_by_matrix(rows: Rows, slots: Tensor, pooling: int, vectors: torch.dtype = torch.float32) -> list[MatrixRows]:
    """Return the rows of ids ``slots [N]``, float32 ones before narrow ones, with ``pooling`` rows per vector."""
    wide, at = locate_rows(rows, slots)
    nbytes = rows.dim * vectors.itemsize
    parts = [
        MatrixRows(matrix.view(torch.int32), at[own], slots[own], -(-int(own.sum()) // pooling), nbytes)
        for matrix, own in ((rows.wide, wide), (rows.narrow, ~wide))
    ]
    return [part for part in parts if len(part.at)]


def gather_limit(parts: Sequence[MatrixRows], pooling: int, nbytes: int) -> Limit:
    """Return the limit of reading rows at random and writing pooled vectors."""
    if not parts[0].matrix.is_cpu:
        return Limit("gather", [torch_gather(parts, nbytes)])
    outs = [part.vectors() for part in parts]

    def move(streamed: bool) -> None:
        for part, out in zip(parts, outs, strict=True):
            launch(_gather, part.matrix.numpy(), part.at.numpy(), pooling, out.numpy(), streamed)

    ways = [Way(lambda: move(streamed=False))]
    whole = all(out.shape[2] == part.matrix.shape[1] for part, out in zip(parts, outs, strict=True))
    if pooling == 1 and whole and all(should_stream(out) for out in outs):
        ways.append(Way(lambda: move(streamed=True)))
    if len(parts) == pooling == outs[0].shape[1] == 1 and whole:
        ways.append(Way(lambda: torch.index_select(parts[0].matrix, 0, parts[0].at, out=outs[0][:, 0])))
    return Limit("gather", ways)


def scatter_limit(parts: Sequence[MatrixRows], moments: Mapping[str, Tensor], nbytes: int) -> Limit:
    """Return the limit of reading a gradient per bag, and changing distinct rows and their moments."""
    distinct = [part._replace(at=part.at.unique(), slots=part.slots.unique()) for part in parts]
    moment_words = [moment.view(len(moment), -1).view(torch.int32) for moment in moments.values()]
    if not parts[0].matrix.is_cpu:
        return Limit("scatter", torch_scatters(distinct, moment_words, nbytes))
    grads = [part.vectors().zero_() for part in distinct]
    m0, m1 = [m.numpy() for m in moment_words] + [NO_MOMENT] * (2 - len(moment_words))

    def move() -> None:
        for part, grad in zip(distinct, grads, strict=True):
            launch(_scatter, part.matrix.numpy(), part.at.numpy(), m0, m1, part.slots.numpy(), grad.numpy())

    return Limit("scatter", [Way(move)])


def copy_way(device: torch.device) -> Way:
    """Return a streaming copy, scaled to seconds per byte that is read or written."""
    return Way(streaming_copy(device), 1 / (2 * machine_profile.COPY_BYTES))


def copy_limit(copy: Way, nbytes: int) -> Limit:
    return Limit("copy", [copy._replace(scale=copy.scale * nbytes)])


def check_memory(options: OpsOptions, rule: Rule, device: torch.device, batch_bytes: int) -> None:
    """Raise an error if the tables and the buffers of the measurement do not fit into memory."""
    tables = sum(table_bytes(table, rule.moments) for table in options.specs()[0])
    needed = tables + batch_bytes + machine_profile.EVICT_BYTES + 2 * machine_profile.COPY_BYTES
    free = available_bytes(device)
    if free is not None and needed > free:
        raise RecipeError(f"too little {device.type} memory: got {size(free)}, expected {size(needed)}. Lower --rows.")


def torch_gather(parts: Sequence[MatrixRows], nbytes: int) -> Way:
    outs = [torch.empty_like(part.matrix[part.at]) for part in parts]
    moved = sum(_row_bytes(p.matrix) * (len(p.at.unique()) + len(p.at)) + 8 * len(p.at) for p in parts)

    def move() -> None:
        for part, out in zip(parts, outs, strict=True):
            torch.index_select(part.matrix, 0, part.at, out=out)

    return Way(move, nbytes / moved)


def torch_scatters(parts: Sequence[MatrixRows], moments: Sequence[Tensor], nbytes: int) -> list[Way]:
    """Scatter by ``index_add_`` of zeros, and by ``index_copy_`` of the present values."""
    targets = [(matrix, at) for p in parts for matrix, at in ((p.matrix, p.at), *((m, p.slots) for m in moments))]
    values = [matrix[at] for matrix, at in targets]
    zeros = [torch.zeros_like(v) for v in values]
    row_bytes = sum(_row_bytes(matrix) * len(at) for matrix, at in targets)
    index_bytes = sum(8 * len(at) for _, at in targets)

    def add() -> None:
        for (matrix, at), zero in zip(targets, zeros, strict=True):
            matrix.index_add_(0, at, zero)

    def copy() -> None:
        for (matrix, at), value in zip(targets, values, strict=True):
            matrix.index_copy_(0, at, value)

    return [Way(add, nbytes / (3 * row_bytes + index_bytes)), Way(copy, nbytes / (2 * row_bytes + index_bytes))]


def _row_bytes(matrix: Tensor) -> int:
    return matrix.shape[1] * matrix.element_size()


# Rows are indexed by two indices and not in flat arrays, because Numba checks whether a sum of indices is negative.
# With this check, no loop becomes vector code.


@kernel(parallel=True)
def _gather(matrix, at, pooling, out, streamed):
    """Write the first row of bag i to ``out[i]``, and add the other rows of ``at[i · pooling : (i + 1) · pooling]``.

    ``out`` is ``[bags, pieces, width]``. Each row goes to all pieces of a vector. If rows are wider than a piece, the
    sum of their parts goes there. ``streamed`` writes past the caches. It needs rows as wide as a piece, and one row
    per bag.
    """
    count, words = at.shape[0], matrix.shape[1]
    pieces, width = out.shape[1], out.shape[2]
    per_task = max(ROWS_PER_TASK // pooling, 1) * pooling
    for task in prange((count + per_task - 1) // per_task):
        stop = min((task + 1) * per_task, count)
        for i in range(task * per_task, stop):
            prefetch_bytes(matrix, at[min(i + PREFETCH_ROWS, stop - 1)] * words, words * 4)
            row = at[i]
            if streamed:
                for piece in range(i * pieces, (i + 1) * pieces):
                    stream_row(out, piece * words, matrix, row * words, words)
                continue
            bag = i // pooling
            for piece in range(pieces):
                for first in range(0, words - width + 1, width):
                    part = matrix[row, first : first + width]
                    if i % pooling == 0 and first == 0:
                        for d in range(width):
                            out[bag, piece, d] = part[d]
                    else:
                        for d in range(width):
                            out[bag, piece, d] += part[d]
        if streamed:
            streams_end()


@kernel(parallel=True)
def _scatter(matrix, at, m0, m1, slots, grad):
    """Add gradient ``i % bags`` to row ``at[i]``. If there are more gradients than rows, only read the last ones.

    ``grad`` is ``[bags, pieces, width]``. Its pieces are added one after the other, to each part of a wider row.
    Moments are read and written, but keep their values, because gradients are 0.
    """
    rows, grads, words = at.shape[0], grad.shape[0], matrix.shape[1]
    width = grad.shape[2]
    tasks = (max(rows, grads) + ROWS_PER_TASK - 1) // ROWS_PER_TASK
    unused = np.zeros((tasks, width), np.int32)
    for task in prange(tasks):
        first, stop = task * ROWS_PER_TASK, (task + 1) * ROWS_PER_TASK
        for i in range(first, min(stop, rows)):
            ahead = min(i + PREFETCH_ROWS, rows - 1)
            prefetch_bytes(matrix, at[ahead] * words, words * 4)
            prefetch_bytes(m0, slots[ahead] * m0.shape[1], m0.shape[1] * 4)
            prefetch_bytes(m1, slots[ahead] * m1.shape[1], m1.shape[1] * 4)
            row, slot, g = at[i], slots[i], i % grads
            for piece in range(grad.shape[1]):
                for begin in range(0, words - width + 1, width):
                    part = matrix[row, begin : begin + width]
                    for d in range(width):
                        part[d] += grad[g, piece, d]
            nothing = grad[g, 0, 0]
            for d in range(m0.shape[1]):
                m0[slot, d] += nothing
            for d in range(m1.shape[1]):
                m1[slot, d] += nothing
        for i in range(max(first, rows), min(stop, grads)):
            for piece in range(grad.shape[1]):
                for d in range(width):
                    unused[task, d] += grad[i, piece, d]
    return unused
