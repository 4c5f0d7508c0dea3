"""After an update the owners of rows send them to the ranks that read copies of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.arena import Arena
from hotbed.embed.placement import Placement


def push_rows(
    placement: Placement, arenas: Sequence[Arena], copies: Sequence[Arena], touched: Mapping[Arena, Tensor], link: Link
) -> None:
    """Bring the copies of rows up to date; all ranks must call this.

    Parameters
    ----------
    placement
        Where tiles are.
    arenas, copies
        Of this rank, by kind.
    touched
        By arena, slots that were updated; a slot may occur more than once.
    link
        The ranks.
    """
    device = placement.copies.device
    to = torch.zeros(link.size, len(arenas), dtype=torch.int64, device=device)
    messages: list[tuple[Tensor, Tensor]] = []
    for kind, arena in enumerate(arenas):
        here, there, readers = _messages(placement, kind, arena, touched.get(arena))
        to[:, kind] = torch.bincount(readers, minlength=link.size)
        messages.append((here, there))
    ones = [1] * link.size
    came = link.all_to_all("numbers of updated rows", to, ones, ones).wait().T.tolist()
    for kind, (here, there) in enumerate(messages):
        counts = to[:, kind].tolist()
        slots = link.all_to_all("updated rows' places", there, counts, came[kind])
        rows = link.all_to_all("updated rows", arenas[kind].store.read(here, use="update"), counts, came[kind])
        copies[kind].store.write(slots.wait(), rows.wait())


def _messages(placement: Placement, kind: int, arena: Arena, touched: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What is sent of an arena, by reader: slot here, slot there, reader."""
    tiles = torch.tensor(placement.owned(placement.kinds[kind]), dtype=torch.int64, device=placement.copies.device)
    if touched is None or not len(tiles):
        nothing = torch.empty(0, dtype=torch.int64, device=placement.copies.device)
        return nothing, nothing, nothing
    slots = touched.unique()
    piece, within = arena.locate(slots)
    first_there = placement.copies[:, tiles][:, piece]  # [W, n]
    readers, which = (first_there >= 0).nonzero(as_tuple=True)
    return slots[which], first_there[readers, which] + within[which], readers
