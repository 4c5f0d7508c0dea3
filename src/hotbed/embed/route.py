"""Which rows of which ranks a batch needs: its ids as messages to the ranks that own them.

A *unit* is a vector that crosses the wire, all or some columns of one distinct row of the batch. Units of one arena
kind form a *stream*: per stream there is one exchange of slots, one of rows and one of gradients. Rows that this rank
holds a copy of form streams of their own: their rows do not cross the wire, their gradients do.

What arrives is laid out as a small table, one row per distinct row of the batch, and the batch's ids are renamed to
positions in it. So everything that follows, pooling as well as summing gradients, is what a rank does that has all
rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hotbed.comm import Handle, Link
from hotbed.embed.cells import Cells
from hotbed.embed.placement import COPY, KIND, LANE, OWNER, Found, Placement
from hotbed.ops import Backend, BagLayout, Groups
from hotbed.ops.layout import renamed


@dataclass
class Stream:
    """Units of one arena kind.

    Attributes
    ----------
    kind
        Number of the kind.
    copied
        Whether this rank holds copies of these rows.
    slots
        Slot of each unit in the arena of its owner ``[n]``, by owner.
    copies
        Slot of each unit among this rank's copies ``[n]``, where it holds them.
    to
        Units by owner.
    first
        First row of whole units, which lie here in order; −1 where units are parts of rows.
    cells
        Where units are parts of rows: which parts of which rows.
    received
        Slots that were asked for here ``[m]``, by rank.
    came
        How many each rank asked for.
    """

    kind: int
    copied: bool
    slots: Tensor
    copies: Tensor | None
    to: list[int]
    first: int
    cells: Cells | None
    received: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    came: list[int] = field(default_factory=list)

    def own(self, rank: int) -> tuple[int, int]:
        """First and past the last of the units that this rank asks of itself."""
        return sum(self.to[:rank]), sum(self.to[: rank + 1])

    def own_received(self, rank: int) -> tuple[int, int]:
        """The same among what was asked for here."""
        return sum(self.came[:rank]), sum(self.came[: rank + 1])


@dataclass
class Route:
    """A batch's ids of one output, exchanged.

    Attributes
    ----------
    bags
        The bags, with positions of rows here in the place of ids.
    groups
        Ids of equal rows.
    places
        Position here of each group's row ``[U]``.
    rows
        How many rows there are here.
    streams
        What is exchanged.
    trained
        Whether gradients will be exchanged, too.
    """

    bags: BagLayout
    groups: Groups
    places: Tensor
    rows: int
    streams: list[Stream]
    trained: bool


def make_route(bags: BagLayout, placement: Placement, ops: Backend, link: Link, *, trained: bool) -> Route:
    """Find the owners of a batch's ids and tell them; all ranks must call this.

    Parameters
    ----------
    bags
        Of one output; tables start at `Placement.first_keys`.
    placement
        Of their tables.
    ops
        Kernels.
    link
        The ranks.
    trained
        Whether gradients will be sent.
    """
    groups = ops.group(ops.occurrences(bags))
    keys = groups.rows[: int(groups.counts[0])]
    found = placement.find(keys)
    streams, places, rows = _streams(placement, keys, found, link)
    route = Route(renamed(bags, ops.spread(groups, places)), groups, places, rows, streams, trained)
    _tell_owners([s for s in streams if trained or not s.copied], placement.entries.device, link)
    return route


def _streams(placement: Placement, keys: Tensor, found: Found, link: Link) -> tuple[list[Stream], Tensor, int]:
    """Streams, place of each distinct row, and number of places."""
    has_copies = placement.has_readers
    stream = placement.entries[KIND]
    if has_copies:
        stream = 2 * stream + (placement.entries[COPY] >= 0)
    key = (stream * link.size + placement.entries[OWNER])[found.tile]
    count = len(placement.kinds) * (2 if has_copies else 1)
    order = torch.argsort(key.to(torch.int32), stable=True)
    to = torch.bincount(key, minlength=count * link.size).view(count, link.size).tolist()
    found = Found(found.at[order], found.tile[order])
    slots = placement.slots(keys, found)
    places = torch.full((len(keys),), -1, dtype=torch.int64, device=keys.device)
    streams: list[Stream] = []
    parts: list[tuple[Stream, Found]] = []
    rows = start = 0
    for number, sent in enumerate(to):
        stop = start + sum(sent)
        kind, is_copy = (number // 2, number % 2 == 1) if has_copies else (number, False)
        part = Found(found.at[start:stop], found.tile[start:stop])
        copies = placement.slots(keys, part, COPY) if is_copy else None
        whole = placement.kinds[kind].cols == placement.dim
        streams.append(Stream(kind, is_copy, slots[start:stop], copies, sent, rows if whole else -1, None))
        if whole:
            places[part.at] = torch.arange(rows, rows + stop - start, device=keys.device)
            rows += stop - start
        else:
            parts.append((streams[-1], part))
        start = stop
    cut = (places < 0).nonzero()[:, 0]
    places[cut] = torch.arange(rows, rows + len(cut), device=keys.device)
    for s, part in parts:
        s.cells = placement.cells(s.kind, places[part.at], placement.entries[LANE][part.tile])
    return streams, places, rows + len(cut)


def _tell_owners(streams: Sequence[Stream], device: torch.device, link: Link) -> None:
    """Exchange how many rows of each stream are asked for, and then which."""
    if not streams:
        return
    counts = torch.tensor([s.to for s in streams], dtype=torch.int64, device=device).T.contiguous()
    ones = [1] * link.size
    came = link.all_to_all("numbers of ids", counts, ones, ones).wait().T.tolist()
    on_their_way: list[Handle[Tensor]] = []
    for stream, numbers in zip(streams, came, strict=True):
        stream.came = numbers
        on_their_way.append(link.all_to_all("ids", stream.slots, stream.to, numbers))
    for stream, handle in zip(streams, on_their_way, strict=True):
        stream.received = handle.wait()
