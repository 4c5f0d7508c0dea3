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
    ends = to_device(torch.tensor(leaf_bags.ends, dtype=torch.int64, device="cpu"), occurrences.bags.device)
    bag = torch.div(occurrences.bags, bags.width, rounding_mode="floor") if bags.width > 1 else occurrences.bags
    leaf = torch.searchsorted(ends, bag, right=True) + leaf_bags.first
    return replace(occurrences, leaf=leaf, leaves=leaf_bags.leaves, groups=None)


def sum_gradient(arena: Arena, gradient: RowGradient) -> RowGradient:
    """Sum a gradient to one row per slot. On a GPU, pad it to one row per id to avoid a synchronization."""
    store, limit, kernels = arena.store, arena.store.slots, select(arena.store.device, arena.backend)
    if gradient.occurrences.leaf is not None:
        return sum_by_leaf(kernels, gradient.occurrences, gradient.grad, limit)
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


def sum_by_leaf(kernels: Backend, occurrences: Occurrences, grad: Tensor, limit: int) -> RowGradient:
    """Sum the gradients of each slot by virtual rank, and then along the tree. ``limit`` is above all slots."""
    assert occurrences.leaf is not None
    leaves, on_host = occurrences.leaves, grad.device.type == "cpu"
    keys = (occurrences.slots.long() * leaves + occurrences.leaf).clamp_(max=limit * leaves)  # of padding, too
    by_leaf = replace(occurrences, slots=keys, limit=limit * leaves, groups=None, leaf=None)
    groups = kernels.group(by_leaf)
    count = int(groups.counts[0]) if on_host else len(groups.rows)
    sums = grad.new_empty((count, grad.shape[-1]), dtype=torch.float32)
    places = torch.arange(count, device=grad.device)
    kernels.segment_sum(by_leaf, groups, grad, places, sums)
    return _add_leaves(kernels, groups, places, sums, leaves, limit)


def add_sums(kernels: Backend, occurrences: Occurrences, sums: Tensor, limit: int) -> RowGradient:
    """Add sums of slots by virtual rank along the tree, in place. Each slot has at most one for a virtual rank."""
    assert occurrences.leaf is not None
    leaves = occurrences.leaves
    keys = occurrences.slots.long() * leaves + occurrences.leaf
    groups = kernels.group(Occurrences(keys, occurrences.bags, None, limit=limit * leaves))
    return _add_leaves(kernels, groups, occurrences.bags[groups.order], sums, leaves, limit)


def _add_leaves(kernels: Backend, groups: Groups, places: Tensor, sums: Tensor, leaves: int, limit: int) -> RowGradient:
    """Add the sums of slots along the tree. Groups have keys ``slot · leaves + virtual rank``."""
    kernels.add_along_tree(groups.rows, places, groups.counts[:1], leaves, sums)
    slots = torch.div(groups.rows[: len(places)], leaves, rounding_mode="floor")
    is_first = torch.ones_like(slots, dtype=torch.bool)
    is_first[1:] = slots[1:] != slots[:-1]
    if sums.device.type == "cpu":
        slots, places = slots[is_first], places[is_first]
        return RowGradient(Occurrences(slots, places, None, groups=_one_each(slots)), sums, True)
    is_first &= torch.arange(len(slots), device=slots.device) < groups.counts[0]
    return RowGradient(Occurrences(torch.where(is_first, slots, limit), places, None, limit=limit), sums, True)


def _one_each(slots: Tensor) -> Groups:
    """Group ascending slots that occur once."""
    numbers = torch.arange(len(slots) + 1, dtype=torch.int64, device=slots.device)
    return Groups(numbers[:-1], slots, numbers, numbers, numbers[-1:].expand(2).contiguous())
