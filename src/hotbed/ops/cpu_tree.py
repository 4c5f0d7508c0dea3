# pyright: basic, reportCallIssue=false
"""Add values of equal slots along the binary tree over virtual ranks, on the CPU.

Entries are divided among tasks. The task with the first entry of a slot adds the values of the slot. Most slots have
one entry, so they need no addition.
"""

from __future__ import annotations

import numpy as np
from numba import prange
from torch import Tensor

from hotbed.ops.backend import launches
from hotbed.ops.cpu_instructions import peek, poke, prefetch_bytes
from hotbed.ops.cpu_runtime import PREFETCH_ROWS, flat, kernel, launch

ENTRIES_PER_TASK = 1024
_WAITING = 64
"""Room for the nodes of a slot that wait for their right halves: one per level, and keys have 63 bits."""


def add_along_tree(keys: Tensor, places: Tensor, count: Tensor, leaves: int, values: Tensor) -> None:
    """Add the values of each slot along the binary tree over virtual ranks, in place; see the reference."""
    launches["cpu.add_along_tree"] += 1
    total = int(count)
    launch(_add_along_tree, keys.numpy(), places.numpy(), total, leaves, flat(values), values.shape[1])


@kernel(parallel=True)
def _add_along_tree(keys, places, total, leaves, values, dim):
    for task in prange((total + ENTRIES_PER_TASK - 1) // ENTRIES_PER_TASK):
        start = task * ENTRIES_PER_TASK
        _add_slots(start, keys, places, total, leaves, values, dim, np.empty(_WAITING, np.int64))


@kernel(_nrt=False)
def _add_slots(start, keys, places, total, leaves, values, dim, waiting):
    """Add the values of slots with their first entry at ``start … start + ENTRIES_PER_TASK − 1``.

    ``waiting`` has the first entries of the nodes of a slot that are not added yet, see
    `hotbed.virtual_ranks.tree_additions`. For example, after virtual ranks 0, 1 and 2 of a slot, the nodes (0, 1) and
    (2) wait. They are added if virtual rank 3 is absent. Otherwise, (2) and (3) are added first.
    """
    stop = start + ENTRIES_PER_TASK
    depth = 0
    for i in range(start, total + 1):
        # Nodes meet at the highest bit in which their keys differ. Keys of two slots differ above all bits of a tree.
        meet = peek(keys, i - 1) ^ peek(keys, i) if 0 < i < total else leaves
        while depth > 1:
            left, right = peek(waiting, depth - 2), peek(waiting, depth - 1)
            if peek(keys, left) ^ peek(keys, right) > meet:
                break
            to, of = peek(places, left) * dim, peek(places, right) * dim
            for d in range(dim):
                poke(values, to + d, peek(values, to + d) + peek(values, of + d))
            depth -= 1
        starts_slot = meet >= leaves
        if starts_slot:
            depth = 0
        if depth == 0 and i >= stop:
            break
        if starts_slot or depth > 0:  # else the slot belongs to the previous task
            poke(waiting, depth, i)
            depth += 1
        ahead = i + PREFETCH_ROWS
        if ahead < total and peek(keys, ahead - 1) ^ peek(keys, ahead) < leaves:
            prefetch_bytes(values, peek(places, ahead - 1) * dim, dim * 4)
            prefetch_bytes(values, peek(places, ahead) * dim, dim * 4)
