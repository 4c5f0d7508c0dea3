"""Random bits of stochastic rounding for rows of an arena."""

from __future__ import annotations

import torch
from torch import Tensor

from hotbed.embed.arena import Arena
from hotbed.ops.random import random_bits


def rounding_bits(arena: Arena, slots: Tensor, seeds: Tensor) -> Tensor | None:
    """Bits ``[n, cols]`` by row and column of the whole table; None where all rows are float32.

    Parameters
    ----------
    arena
        Where the rows are.
    slots
        Which they are ``[n]``.
    seeds
        Of each piece ``[T]``, see `RuleStep.seeds`.
    """
    if not arena.pieces or arena.pieces[0].table.dtype == "fp32":
        return None
    piece, within = arena.locate(slots)
    first, step, col = torch.tensor(
        [(p.rows.start, p.rows.step, p.cols.start) for p in arena.pieces], device=slots.device
    )[piece].unbind(1)
    cols = col[:, None] + torch.arange(arena.store.dim, device=slots.device)
    return random_bits(seeds[piece], first + within * step, cols)
