"""Sum the gradients of rows: inside a virtual rank in the canonical order, and over virtual ranks along the tree.

For example, row 7 has occurrences a and b in virtual rank 0, c in virtual rank 1 and d in virtual rank 3. Its sum is
``((a + b) + c) + d``, because virtual rank 2 has none (`hotbed.virtual_ranks`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.embed.arena import Arena
from hotbed.ops import Backend, BagLayout, Groups, Occurrences, select
from hotbed.store.memory import to_device


class RowGradient(NamedTuple):
    """A gradient of rows of one arena. ``is_summed`` means that each row has at most one gradient."""

    occurrences: Occurrences
    grad: Tensor
    is_summed: bool


def with_leaves(occurrences: Occurrences, bags: BagLayout) -> Occurrences:
    """Add the virtual rank of each occurrence, if the bags belong to several virtual ranks."""
    leaf_bags = bags.leaf_bags
    if leaf_bags is None:
        return occurrences
    ends = torch.tensor((0, *leaf_bags.ends), dtype=torch.int64, device="cpu")
    numbers = torch.arange(len(leaf_bags.ends), device="cpu") + leaf_bags.first
    numbers, counts = to_device(torch.stack([numbers, ends.diff() * bags.width]), occurrences.bags.device)
    of_rows = torch.repeat_interleave(numbers, counts, output_size=leaf_bags.ends[-1] * bags.width)
    leaf = of_rows[occurrences.bags] if len(of_rows) else torch.zeros_like(occurrences.bags)
    return replace(occurrences, leaf=leaf, leaves=leaf_bags.leaves, groups=None)


def kernels_of(arena: Arena) -> Backend:
    """Return the kernels of an arena's backend."""
    return select(arena.store.device, arena.backend)


def sum_gradient(arena: Arena, gradient: RowGradient) -> RowGradient:
    """Sum a gradient to one row per slot. On a GPU, pad it to one row per id to avoid a synchronization."""
    store, limit, kernels = arena.store, arena.store.slots, kernels_of(arena)
    if gradient.occurrences.leaf is not None and not kernels.SUMS_LEAVES:
        return _sum_by_leaf(kernels, gradient.occurrences, gradient.grad, limit)
    groups = gradient.occurrences.groups or kernels.group(replace(gradient.occurrences, limit=limit))
    on_host = store.device.type == "cpu"
    count = int(groups.counts[0]) if on_host else len(groups.rows)
    sums = store.empty((count, store.dim), torch.float32)
    here, slots = torch.arange(count, device=sums.device), groups.rows[:count]
    kernels.segment_sum(gradient.occurrences, groups, gradient.grad, here, sums)
    if on_host:
        return RowGradient(Occurrences(slots, here, None), sums, True)
    slots = torch.where(here < groups.counts[0], slots, limit)  # the limit marks padding
    return RowGradient(Occurrences(slots, here, None, limit=limit), sums, True)


def sum_into_rows(kernels: Backend, occurrences: Occurrences, grad: Tensor, out: Tensor) -> None:
    """Sum the gradients of several virtual ranks, and write the sum of slot s to row s of ``out [n, D]``.

    ``out`` must have memory for one more row.
    """
    if kernels.SUMS_LEAVES:
        groups = kernels.group(replace(occurrences, limit=len(out)))
        kernels.segment_sum(occurrences, groups, grad, groups.rows, out)
        return
    found = _sum_by_leaf(kernels, occurrences, grad, limit=len(out))
    # Padding is written behind the last row.
    whole = out.as_strided((len(out) + 1, out.shape[1]), out.stride())
    whole.index_copy_(0, found.occurrences.slots, found.grad[found.occurrences.bags])


def _sum_by_leaf(kernels: Backend, occurrences: Occurrences, grad: Tensor, limit: int) -> RowGradient:
    """Sum the gradients of each slot by virtual rank, and then along the tree. ``limit`` is above all slots."""
    assert occurrences.leaf is not None
    leaves = occurrences.leaves
    keys = (occurrences.slots.long() * leaves + occurrences.leaf).clamp_(max=limit * leaves)  # of padding, too
    by_leaf = replace(occurrences, slots=keys, limit=limit * leaves, groups=None, leaf=None)
    groups = kernels.group(by_leaf)
    sums = grad.new_empty((len(groups.rows), grad.shape[-1]), dtype=torch.float32)
    places = torch.arange(len(sums), device=grad.device)
    kernels.segment_sum(by_leaf, groups, grad, places, sums)
    return _add_leaves(kernels, groups, places, sums, leaves, limit)


def add_sums(kernels: Backend, occurrences: Occurrences, sums: Tensor, limit: int) -> RowGradient:
    """Add sums of slots by virtual rank along the tree, in place. Each slot has at most one for a virtual rank.

    If kernels sum by virtual rank themselves, nothing is added here.
    """
    if kernels.SUMS_LEAVES:
        return RowGradient(occurrences, sums, False)
    assert occurrences.leaf is not None
    leaves = occurrences.leaves
    keys = occurrences.slots.long() * leaves + occurrences.leaf
    groups = kernels.group(Occurrences(keys, occurrences.bags, None, limit=limit * leaves))
    return _add_leaves(kernels, groups, occurrences.bags[groups.order], sums, leaves, limit)


def _add_leaves(kernels: Backend, groups: Groups, places: Tensor, sums: Tensor, leaves: int, limit: int) -> RowGradient:
    """Add the sums of slots along the tree. Groups have keys ``slot · leaves + virtual rank``."""
    kernels.add_along_tree(groups.rows, places, groups.counts[:1], leaves, sums)
    slots = torch.div(groups.rows, leaves, rounding_mode="floor")
    is_first = torch.arange(len(slots), device=slots.device) < groups.counts[0]
    is_first[1:] &= slots[1:] != slots[:-1]
    return RowGradient(Occurrences(torch.where(is_first, slots, limit), places, None, limit=limit), sums, True)
