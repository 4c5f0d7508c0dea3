# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Compute, in one launch of Triton each, what a step needs beside its rows: counts of steps, seeds of its rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_runtime import STRICT, _mix32, ceil_div

_BLOCK = 256


@triton.jit(do_not_specialize=["total"])
def _count_steps_kernel(counts, trained, gate, total, BLOCK: tl.constexpr):
    """``counts += trained``, unless the gate is closed."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    behind = total
    if tl.load(gate) == 0:
        behind = total * 0
    live = i < behind
    tl.store(counts + i, tl.load(counts + i, mask=live) + tl.load(trained + i, mask=live), mask=live)


def count_steps_(counts: Tensor, trained: Tensor, gate: Tensor) -> None:
    """Count a step of the tables that are trained.

    Parameters
    ----------
    counts
        ``[tables]`` int64, changed in place.
    trained
        ``[tables]`` int64: 1 for those that are trained, else 0.
    gate
        0-d; where it is 0 nothing is counted.
    """
    launches["triton.count_steps_"] += 1
    total = len(counts)
    if total:
        with torch.cuda.device_of(counts):
            _count_steps_kernel[(ceil_div(total, _BLOCK),)](counts, trained, gate, total, BLOCK=_BLOCK, **STRICT)


@triton.jit(do_not_specialize=["total"])
def _step_seeds_kernel(
    out,  # [T]
    table_seeds,  # [T]
    steps,  # [T]
    total,  # T
    BLOCK: tl.constexpr,
):
    """``out = mix(mix(low(step) ^ seed) ^ high(step) ^ golden)``, 32 bits each."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    step = tl.load(steps + i, mask=live, other=0)
    key = _mix32((step & 0xFFFFFFFF).to(tl.uint32) ^ tl.load(table_seeds + i, mask=live, other=0).to(tl.uint32))
    tl.store(out + i, _mix32(key ^ (step >> 32).to(tl.uint32) ^ 0x9E3779B9).to(tl.int64), mask=live)


def step_seeds(table_seeds: Tensor, steps: Tensor) -> Tensor:
    """Compute the seeds of a step's stochastic rounding, see `hotbed.ops.rows.step_seeds`."""
    launches["triton.step_seeds"] += 1
    out = torch.empty_like(table_seeds)
    total = len(out)
    if total:
        with torch.cuda.device_of(out):
            _step_seeds_kernel[(ceil_div(total, _BLOCK),)](
                out, table_seeds, steps.contiguous(), total, BLOCK=_BLOCK, **STRICT
            )
    return out
