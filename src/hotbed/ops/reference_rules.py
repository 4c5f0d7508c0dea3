"""Define a step of an optimizer: what happens to rows once their gradients are summed, in plain PyTorch.

What is the same for all optimizers is here; the formula of each rule is beside its class in `hotbed.optim`.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Generator

import torch
from torch import Tensor

from hotbed.ops.layout import BLOCK, DECAY, L2, LR, MAX_GRAD_NORM, MAX_NORM, OWN
from hotbed.optim import COMMON, Rule
from hotbed.optim.rule import Steps, sqrt


def apply_rule(
    rule: Rule,
    w: Tensor,  # rows [U, D] float32
    moments: dict[str, Tensor],  # of these rows, by name, [U] or [U, D]
    g: Tensor,  # summed gradients [U, D]
    hyper: Tensor,  # [U, 6 + H + C]: each row's line of `RuleStep.hyper`
    mean_squares: Tensor | None = None,  # [U], see `RuleStep`
) -> Tensor:
    """Return rows ``[U, D]`` float32 after one step; moments are updated in place.

    In this order: ``g ← g · min(1, max_grad_norm / ‖g‖)``; ``g ← g + l2 · w``; ``w ← w − decay · w``; the rule;
    ``w ← w · min(1, max_norm / ‖w‖)``. Each line is left out where its hyperparameter is off (∞, 0).
    """
    # The rule divides its sum by the number of columns, which those of a mean have been divided by.
    steps = rule_steps(rule, w, moments, g, hyper, w.shape[1] if mean_squares is None else 1)
    sums = None
    while True:
        try:
            terms = next(steps) if sums is None else steps.send(sums)
            sums = block_sum(terms) if mean_squares is None else mean_squares
        except StopIteration as end:
            return end.value


def rule_steps(
    rule: Rule,
    w: Tensor,
    moments: dict[str, Tensor],
    g: Tensor,
    hyper: Tensor,
    dim: int,  # columns of whole rows
    uses: Collection[str] = COMMON,  # as in `RuleStep`; norms without a limit are not requested
) -> Steps:
    """Run `apply_rule` in steps, for rows that are cut by column: the caller adds up sums over columns.

    ``w``, ``moments`` and ``g`` have only the columns of this part.
    """
    if "max_grad_norm" in uses:
        g = yield from _limited(g, hyper[:, MAX_GRAD_NORM])
    l2, decay = hyper[:, L2, None], hyper[:, DECAY, None]
    g = torch.where(l2 == 0, g, g + l2 * w)
    w = torch.where(decay == 0, w, w - decay * w)
    own = dict(zip((*rule.hyper, *(f"1 - {name}^t" for name in rule.corrected)), hyper[:, OWN:].T, strict=True))
    named = {name: values[:, None] for name, values in {"lr": hyper[:, LR], **own}.items()}
    new = rule.formula(w, moments, g, named, dim)
    w = (yield from new) if isinstance(new, Generator) else new
    if "max_norm" in uses:
        w = yield from _limited(w, hyper[:, MAX_NORM])
    return w


def sums_rows(rule: Rule, uses: Collection[str]) -> bool:
    """Whether `rule_steps` sums over columns."""
    return inspect.isgeneratorfunction(rule.formula) or not {"max_grad_norm", "max_norm"}.isdisjoint(uses)


def block_sum(x: Tensor) -> Tensor:
    """Sum over the last dim ``D``: halving trees inside blocks of `BLOCK` columns, then the blocks in column order."""
    return sum_of_blocks(blocks_of(x))


def blocks_of(x: Tensor) -> Tensor:
    """Sums of blocks of `BLOCK` columns ``[…, ⌈D / 16⌉]``, by halving trees."""
    if x.shape[-1] % BLOCK:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK))
    x = x.unflatten(-1, (-1, BLOCK))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def sum_of_blocks(blocks: Tensor) -> Tensor:
    """Sum of the blocks of each row, in column order."""
    total = blocks[..., 0]
    for b in range(1, blocks.shape[-1]):
        total = total + blocks[..., b]
    return total


def _limited(x: Tensor, limit: Tensor) -> Steps:
    """Rows ``[U, D]`` scaled down to norms of at most ``limit [U]``; the others as they are."""
    norm = sqrt((yield x * x))
    return torch.where((norm > limit)[:, None], x * (limit / norm)[:, None], x)
