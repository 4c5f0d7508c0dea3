"""The owner's side of the wire format ``"pooled"``: units it is asked for, their vectors, their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.errors import BatchError
from hotbed.ops import Backend, BagLayout, Occurrences
from hotbed.ops.rows import rows_of
from hotbed.store import RowStore


class Asked(NamedTuple):
    """Units of one arena kind: what a rank asks for, by owner, or what an owner is asked for, by rank.

    Attributes
    ----------
    slots
        Of all ids ``[n]``, in the owners' arenas.
    lengths
        Ids of each unit ``[m]``.
    weights
        Per-id weights ``[n]`` float32, or None.
    divisors
        Ids of each unit's whole bag ``[m]`` float32, 1 where pooling is not mean; None where none is.
    ids, units
        How many of them by owner, or by rank.
    """

    slots: Tensor
    lengths: Tensor
    weights: Tensor | None
    divisors: Tensor | None
    ids: list[int]
    units: list[int]


def ask(asking: Sequence[Asked], link: Link) -> list[Asked]:
    """Exchange what ranks ask for, by arena kind; all ranks must call this.

    Raises
    ------
    BatchError
        If some ranks have per-id weights and others have none.
    """
    device = asking[0].slots.device
    weighted = asking[0].weights is not None
    counts = torch.tensor([c for a in asking for c in (a.ids, a.units)] + [[int(weighted)] * link.size]).T.contiguous()
    ones = [1] * link.size
    came = link.all_to_all("numbers of ids", counts.to(device), ones, ones).wait().T.tolist()
    if any(flag != weighted for flag in came[-1]):
        ranks = [r for r, flag in enumerate(came[-1]) if flag]
        raise BatchError(f"ranks {ranks} have per-id weights and the others none; give all of them, or none")
    handles: list[list[Handle[Tensor] | None]] = []
    for i, a in enumerate(asking):
        ids, units = came[2 * i], came[2 * i + 1]
        # As many ids as units: every unit has one id, and nobody need say so.
        sent = [0 if n == m else m for n, m in zip(a.ids, a.units, strict=True)]
        kept = torch.repeat_interleave(torch.tensor([s > 0 for s in sent]), torch.tensor(a.units)).to(device)
        expected = [0 if n == m else m for n, m in zip(ids, units, strict=True)]
        handles.append(
            [
                link.all_to_all("ids", a.slots, a.ids, ids),
                link.all_to_all("bag lengths", a.lengths[kept], sent, expected),
                None if a.weights is None else link.all_to_all("weights", a.weights, a.ids, ids),
                None if a.divisors is None else link.all_to_all("lengths of whole bags", a.divisors, a.units, units),
            ]
        )
    found: list[Asked] = []
    for i, (slots, lengths, weights, divisors) in enumerate(handles):
        ids, units = came[2 * i], came[2 * i + 1]
        assert slots is not None
        assert lengths is not None
        found.append(
            Asked(
                slots.wait(),
                _with_ones(lengths.wait(), ids, units),
                None if weights is None else weights.wait(),
                None if divisors is None else divisors.wait(),
                ids,
                units,
            )
        )
    return found


def _with_ones(lengths: Tensor, ids: Sequence[int], units: Sequence[int]) -> Tensor:
    """Lengths of all units, from those of the ranks that sent them."""
    parts: list[Tensor] = []
    first = 0
    for n, m in zip(ids, units, strict=True):
        if n == m:
            parts.append(lengths.new_ones(m))
        else:
            parts.append(lengths[first : first + m])
            first += m
    return torch.cat(parts)


def pool(store: RowStore, asked: Asked, ops: Backend) -> Tensor:
    """Vectors of units ``[m, cols]`` float32: the sum of their rows in bag order, over the length of the whole bag."""
    out = store.empty((len(asked.lengths), 1, store.dim), torch.float32)
    rows = store.read(asked.slots)  # one table for the kernel, whatever tables and dtypes the rows are of
    ids = torch.arange(len(asked.slots), device=rows.device)
    ops.lookup(rows_of(rows), _layout(asked, ids), out)
    vectors = out[:, 0]
    return vectors if asked.divisors is None else vectors / asked.divisors[:, None]


def sum_by_rank(store: RowStore, asked: Asked, grad: Tensor, ops: Backend) -> tuple[Tensor, Tensor]:
    """Sum the gradient of each row for each rank, from gradients of units ``[m, cols]``.

    Returns
    -------
    tuple[Tensor, Tensor]
        Slots ``[u]``, rank by rank, and sums ``[u, cols]``.
    """
    device = grad.device
    unit = torch.repeat_interleave(torch.arange(len(asked.lengths), device=device), asked.lengths)
    rank = torch.repeat_interleave(
        torch.arange(len(asked.ids), device=device), torch.tensor(asked.ids, device=device), output_size=len(unit)
    )
    scale = asked.weights
    if asked.divisors is not None:
        scale = (1 if scale is None else scale) / asked.divisors[unit]
    starts = tuple(accumulate(asked.ids, initial=0))
    occurrences = Occurrences(rank * store.slots + asked.slots, unit, scale, starts)
    groups = ops.group(occurrences)
    slots = groups.rows[: int(groups.counts[0])] % store.slots
    sums = torch.empty(len(slots), grad.shape[1], dtype=torch.float32, device=device)
    ops.segment_sum(occurrences, groups, grad, None, sums)
    return slots, sums


def _layout(asked: Asked, ids: Tensor) -> BagLayout:
    features = torch.tensor([[0, -1, 0, 0, 0, 0, 0]], device=ids.device)
    offsets = torch.nn.functional.pad(asked.lengths.cumsum(0), (1, 0))[None]
    return BagLayout(ids, features, offsets, asked.weights, len(asked.lengths), len(ids), False, 1)
