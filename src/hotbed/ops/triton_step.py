# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Compute, in one launch of Triton, what a step of an optimizer needs beside its rows: seeds of its rounding."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_runtime import STRICT, _mix32, ceil_div

_BLOCK = 256


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
