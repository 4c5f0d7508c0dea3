"""Join gradients of rows of one arena, and sum the gradients of each row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed import ops
from hotbed.embed.arena import Arena
from hotbed.embed.local_gradients import joined
from hotbed.embed.table_group import CHANGED, Contribution
from hotbed.errors import OptimizerError
from hotbed.ops import Occurrences
from hotbed.ops.exact_sum import sums_of
from hotbed.ops.reference import blocks_of


class RowGradient(NamedTuple):
    """A gradient of rows of one arena, and whether each row's gradients from one rank are one sum already."""

    occurrences: Occurrences
    grad: Tensor
    is_summed: bool


def by_arena(waiting: Sequence[Contribution]) -> dict[Arena, tuple[Occurrences, Tensor]]:
    """Join the gradients that wait for a step, by arena."""
    if any(contribution.changed() for contribution in waiting):
        raise OptimizerError(CHANGED)
    found: dict[Arena, list[RowGradient]] = defaultdict(list)
    for contribution in joined(waiting):
        for arena, occurrences, grad in contribution.gradients():
            found[arena].append(RowGradient(occurrences, grad, contribution.is_summed))
    return {arena: concatenated(arena, of_arena) for arena, of_arena in found.items()}


def concatenated(arena: Arena, found: Sequence[RowGradient]) -> tuple[Occurrences, Tensor]:
    """Join gradients of one arena: their occurrences, and the gradients one after the other."""
    if len(found) == 1:
        return found[0].occurrences, found[0].grad
    # Each is summed first, as those are that ranks send each other, so that no plan changes the order of additions.
    found = [gradient if gradient.is_summed else summed(arena, gradient) for gradient in found]
    grads = [gradient.grad for gradient in found]
    return Occurrences.concatenate([p.occurrences for p in found], list(map(len, grads))), torch.cat(grads)


def summed(arena: Arena, gradient: RowGradient) -> RowGradient:
    """Sum a gradient to one row per slot; on a GPU into one row per id, because the host does not know the number."""
    store, limit, kernels = arena.store, arena.store.slots, ops.select(arena.store.device, arena.backend)
    groups = gradient.occurrences.groups or kernels.group(replace(gradient.occurrences, limit=limit))
    on_host = store.device.type == "cpu"
    count = int(groups.counts[0]) if on_host else len(groups.rows)
    sums = store.empty((count, store.dim), torch.float32)
    here, slots = torch.arange(count, device=sums.device), groups.rows[:count]
    kernels.segment_sum(gradient.occurrences, groups, gradient.grad, here, sums)
    if on_host:
        return RowGradient(Occurrences(slots, here, None), sums, True)
    slots = torch.where(here < groups.counts[0], slots, limit)  # beyond them there is nothing: padding
    return RowGradient(Occurrences(slots, here, None, limit=limit), sums, True)


def squares(arena: Arena, occurrences: Occurrences, sums: Tensor, trained: Collection[str], scale: Tensor) -> Tensor:
    """Sum the squares of gradients ``[U, D]`` times a factor, of rows of some tables; see `sums_of`."""
    is_trained = torch.tensor([table in trained for table in arena.tables], device=scale.device)
    counted = is_trained[arena.locate(occurrences.slots)[0]] & (occurrences.slots < arena.store.slots)  # else padding
    return sums_of(torch.where(counted[:, None], blocks_of((sums * scale).square()), 0.0))
