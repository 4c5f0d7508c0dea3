# pyright: basic, reportCallIssue=false, reportArgumentType=false
"""Sum the binary cross-entropy of logits in Triton, and compute its gradient in the same pass: two launches.

torch takes five for the sum and three for the gradient. Each program adds up a block of logits, one more adds up these
sums; both in an order that follows from their number alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.triton_runtime import STRICT, ceil_div

_BLOCK = 1024


@triton.jit
def _log_of_one_plus(e):
    """``log(1 + e)`` for e in [0, 1]: what is lost when 1 is added is made up for by a factor (Kahan's ``log1p``)."""
    one = 1.0 + e
    is_lost = one == 1.0
    return tl.where(is_lost, e, tl.log(one) * tl.div_rn(e, tl.where(is_lost, 1.0, one - 1.0)))


@triton.jit(do_not_specialize=["total", "logits_per_weight"])
def _cross_entropy_kernel(
    sums,  # [programs]
    gradient,  # [B, T]
    logits,  # [B, T]
    labels,  # [B, T]
    weights,  # [B, 1] or [B, T]; read where WEIGHTED
    total,  # B · T
    logits_per_weight,  # T, or 1
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    """``Σ w · ((1 − y) · x − log σ(x))`` of a block, and ``w · (σ(x) − y)`` by logit."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = i < total
    x = tl.load(logits + i, mask=live, other=0.0)
    y = tl.load(labels + i, mask=live, other=0.0)
    e = tl.exp(-tl.abs(x))
    loss = (1.0 - y) * x - (tl.minimum(x, 0.0) - _log_of_one_plus(e))
    grad = tl.div_rn(tl.where(x >= 0, 1.0, e), 1.0 + e) - y
    if WEIGHTED:
        w = tl.load(weights + i // logits_per_weight, mask=live, other=0.0)
        loss = loss * w
        grad = grad * w
    tl.store(gradient + i, grad, mask=live)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(live, loss, 0.0), axis=0))


@triton.jit(do_not_specialize=["count"])
def _total_kernel(out, sums, count, BLOCK: tl.constexpr):
    """``out[0] = Σ sums``."""
    found = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        found += tl.load(sums + i, mask=i < count, other=0.0)
    tl.store(out, tl.sum(found, axis=0))


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sum the weighted binary cross-entropy of logits, as torch's ``binary_cross_entropy_with_logits`` defines it.

    Parameters
    ----------
    logits, labels
        ``[B, T]`` float32, on the device.
    weights
        Of samples ``[B, 1]``, or by label ``[B, T]``, float32; None: all 1.

    Returns
    -------
    tuple[Tensor, Tensor]
        The sum, 0-d float32, and its gradient by logit ``[B, T]``.
    """
    launches["triton.cross_entropy"] += 1
    logits, labels = logits.contiguous(), labels.contiguous()
    gradient, total = torch.empty_like(logits), torch.empty((), dtype=torch.float32, device=logits.device)
    count = logits.numel()
    if not count:
        return total.zero_(), gradient
    programs = ceil_div(count, _BLOCK)
    sums = torch.empty(programs, dtype=torch.float32, device=logits.device)
    with torch.cuda.device_of(logits):
        _cross_entropy_kernel[(programs,)](
            sums,
            gradient,
            logits,
            labels,
            labels if weights is None else weights.contiguous(),
            count,
            1 if weights is None else count // weights.numel(),
            BLOCK=_BLOCK,
            WEIGHTED=weights is not None,
            **STRICT,
        )
        _total_kernel[(1,)](total, sums, programs, BLOCK=_BLOCK, **STRICT)
    return total, gradient
