"""Define attention over histories: pooling by a candidate, causal self-attention, and the layer of HSTU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.errors import SpecError
from hotbed.nn.layers import MLP
from hotbed.nn.linear import Linear, draw_normal


class Dice(nn.Module):
    """Data adaptive activation of DIN (Zhou et al. 2018, arXiv 1706.06978): ``p(s) s + (1 − p(s)) α s`` (equation 9).

    ``p(s)`` is the logistic function of s, normalized by mean and variance. In training, the mean and the variance are
    computed over the batch; each rank uses its own samples, as in batch normalization. In evaluation, running
    statistics are used, which come from the first rank.

    Parameters
    ----------
    width
        Number of columns ``C``. Each column has its own α.
    eps
        Number that is added to the variance.
    momentum
        Weight of a batch in the running mean and variance.
    """

    mean: Tensor
    variance: Tensor

    def __init__(self, width: int, *, eps: float = 1e-8, momentum: float = 0.1) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.alpha = nn.Parameter(torch.empty(width))
        self.register_buffer("mean", torch.empty(width))
        self.register_buffer("variance", torch.empty(width))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set α and the running mean to 0, the running variance to 1."""
        with torch.no_grad():
            self.alpha.zero_()
            self.mean.zero_()
            self.variance.fill_(1)

    def forward(self, s: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map ``s […, C]`` to ``[…, C]`` float32. Statistics cover only positions where the mask ``[…]`` is set."""
        s = s.float()
        mean, variance = self._measure_batch(s, mask) if self.training else (self.mean, self.variance)
        p = torch.sigmoid((s - mean) * (variance + self.eps).rsqrt())
        return (p + (1 - p) * self.alpha) * s

    def _measure_batch(self, s: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return mean and variance of a batch, and update the running statistics."""
        rows = s.flatten(0, -2)
        counted = rows.new_ones(rows.shape[0], 1) if mask is None else mask.reshape(-1, 1).to(rows.dtype)
        count = counted.sum().clamp(min=1)
        mean = (rows * counted).sum(0) / count
        variance = ((rows - mean).square() * counted).sum(0) / count
        with torch.no_grad():
            share = self.momentum * counted.sum().clamp(max=1)  # 0 without rows
            self.mean.lerp_(mean, share)
            self.variance.lerp_(variance, share)
        return mean, variance


class AttentionPooling(nn.Module):
    """Pooling of a history by a candidate: ``Σⱼ a(eⱼ, v) eⱼ``, DIN's local activation unit (equation 3).

    ``a`` is an MLP with `Dice` over ``[v, e, v − e, v ⊙ e]``, as in the authors' code. The weights are not normalized
    by a softmax. Their sum therefore measures how much of the history resembles the candidate.

    Parameters
    ----------
    dim
        Number of columns ``D`` of candidate and history.
    widths
        Hidden widths of the MLP.
    """

    def __init__(self, dim: int, widths: Sequence[int] = (80, 40)) -> None:
        super().__init__()
        self.unit = MLP(4 * dim, [*widths, 1], last_relu=False, activation=Dice)

    def forward(self, candidate: Tensor, history: Tensor, mask: Tensor) -> Tensor:
        """Pool ``history [B, L, D]`` to ``[B, D]`` by ``candidate [B, D]``. The mask ``[B, L]`` is set for ids."""
        v = candidate[:, None].expand_as(history)
        a = torch.cat([v, history, v - history, v * history], dim=2)
        for layer in self.unit:
            a = layer(a, mask) if isinstance(layer, Dice) else layer(a)
        return (a.masked_fill(~mask[:, :, None], 0) * history).sum(dim=1)


class CausalAttention(nn.Module):
    """Block of SASRec (Kang and McAuley 2018, arXiv 1808.09781): causal self-attention, then an MLP per position.

    Both sublayers are ``x + Dropout(g(LayerNorm(x)))``. In the first sublayer, g is ``softmax(Q Kᵀ ÷ √d) V`` (equations
    2 and 3). In the second sublayer, g is ``ReLU(x W₁ + b₁) W₂ + b₂`` (equation 4).

    Parameters
    ----------
    dim
        Number of columns ``D``.
    heads
        Number of attention heads.
    dropout
        Dropout of the output of both sublayers.
    """

    def __init__(self, dim: int, heads: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise SpecError(f"CausalAttention: heads: got {heads}, expected a divisor of the {dim} columns")
        self.heads = heads
        self.attention_norm, self.forward_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.projections = nn.Linear(dim, 3 * dim, bias=False)
        draw_normal(self.projections.weight, dim**-0.5)
        self.inner, self.outer = Linear(dim, dim), Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, L, D]`` to ``[B, L, D]``; a place sees itself and those before it."""
        parts = self.projections(self.attention_norm(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.dropout(seen.transpose(1, 2).flatten(2))
        return x + self.dropout(self.outer(F.relu(self.inner(self.forward_norm(x)))))


class SequentialTransduction(nn.Module):
    """Layer of HSTU (Zhai et al. 2024, arXiv 2402.17152) with a residual connection.

    Pointwise projection: ``U, V, Q, K = Split(SiLU(f₁(X)))`` (equation 1). Spatial aggregation: ``A V`` with ``A =
    SiLU(Q Kᵀ + rab)`` (equation 2), divided by ``L`` as in the authors' code. Pointwise transformation:
    ``f₂(Norm(A V) ⊙ U)`` (equation 3). The relative attention bias ``rab`` depends on the distance in the history. The
    paper's bias by time is not implemented.

    Parameters
    ----------
    dim
        Number of columns ``D``.
    length
        Number of positions ``L``.
    heads
        Number of attention heads.
    dropout
        Dropout of the layer's output.
    """

    def __init__(self, dim: int, length: int, heads: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        if heads < 1 or dim % heads:
            raise SpecError(f"SequentialTransduction: heads: got {heads}, expected a divisor of the {dim} columns")
        self.heads, self.length = heads, length
        self.inputs, self.outputs = Linear(dim, 4 * dim), Linear(dim, dim)
        self.bias = nn.Embedding(length, 1)
        draw_normal(self.bias.weight, 0.02)
        self.norm, self.dropout = nn.LayerNorm(dim), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[B, L, D]`` to ``[B, L, D]``; a place sees itself and those before it."""
        u, v, q, k = F.silu(self.inputs(x)).chunk(4, dim=2)
        v, q, k = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (v, q, k))
        place = torch.arange(self.length, device=x.device)
        distance = place[:, None] - place
        scores = F.silu(q @ k.transpose(2, 3) + self.bias(distance.clamp(min=0))[:, :, 0]) / self.length
        seen = scores.masked_fill(distance < 0, 0) @ v
        return x + self.dropout(self.outputs(self.norm(seen.transpose(1, 2).flatten(2)) * u))
