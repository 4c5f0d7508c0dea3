"""Updates of rows that are cut into columns: sums over the columns of a row go from owner to owner.

Row-wise rules and norms need sums over all columns of a row. Each owner sums its columns in blocks of 16, sends the
blocks to the owners of the row's other columns, and all add all blocks in column order: the bits of an uncut row.

Nobody has to say which rows these are: every tile of a row was asked for the row by the same batch, so its owners
touched the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.arena import Arena
from hotbed.embed.placement import FIRST, LANE, OWNER, STEP, TABLE, Placement
from hotbed.ops import Backend, Occurrences, RuleStep
from hotbed.ops.layout import ACTIVE, BLOCK
from hotbed.ops.random import random_bits
from hotbed.ops.reference_rules import Steps, blocks_of, rule_steps, sum_of_blocks


def update_together(
    placement: Placement,
    arenas: Mapping[int, Arena],
    steps: Mapping[Arena, RuleStep],
    found: Mapping[Arena, tuple[Occurrences, Tensor]],
    ops: Backend,
    link: Link,
) -> None:
    """Update cut rows by a rule that sums over columns; all ranks must call this.

    Parameters
    ----------
    placement
        Where tiles are.
    arenas
        By kind, those that hold parts of rows.
    steps, found
        As in `Part.update`.
    ops
        Kernels that sum gradients; the rule itself is plain PyTorch.
    link
        The ranks.
    """
    targets = [_Target(placement, kind, arena, steps[arena], found.get(arena), ops) for kind, arena in arenas.items()]
    exchange = _Exchange(placement, targets, link)
    sums: list[Tensor | None] = [None] * len(targets)
    while True:
        asked = [target.advance(s) for target, s in zip(targets, sums, strict=True)]
        columns = [a for a in asked if a is not None]
        if len(columns) < len(targets):
            break  # all end together, for the rule is one
        sums = [*exchange.sums(columns)]
    for target in targets:
        target.write()


class _Target:
    """The touched rows of an arena on their way through the rule."""

    def __init__(
        self,
        placement: Placement,
        kind: int,
        arena: Arena,
        step: RuleStep,
        found: tuple[Occurrences, Tensor] | None,
        ops: Backend,
    ) -> None:
        self.arena, self._step = arena, step
        device = arena.store.device
        self.slots = torch.empty(0, dtype=torch.int64, device=device)
        total = torch.empty(0, arena.store.dim, dtype=torch.float32, device=device)
        if found is not None and bool(step.gate):
            occurrences, grad = found
            groups = ops.group(occurrences)
            self.slots = groups.rows[: int(groups.counts[0])]
            total = torch.empty(len(self.slots), arena.store.dim, dtype=torch.float32, device=device)
            ops.segment_sum(occurrences, groups, grad, None, total)
        self._piece, within = arena.locate(self.slots)
        active = step.hyper[self._piece, ACTIVE] != 0
        self.slots, self._piece, within = self.slots[active], self._piece[active], within[active]
        tiles = torch.tensor(placement.owned(placement.kinds[kind]), dtype=torch.int64, device=device)
        self.tile = tiles[self._piece]
        entry = placement.entries[self.tile]
        self.row = entry[:, FIRST] + within * entry[:, STEP]
        self.key = placement.first_keys[entry[:, TABLE]] + self.row
        self._moments = {m.name: arena.store.read(self.slots, m.name) for m in step.rule.moments}
        self._steps: Steps = rule_steps(
            step.rule,
            arena.store.read(self.slots),
            self._moments,
            total[active] * step.inv_scale,
            step.hyper[self._piece],
            placement.dim,
            step.uses,
        )
        self._new: Tensor | None = None

    def advance(self, sums: Tensor | None) -> Tensor | None:
        """Go on with the sums over columns that were asked for; what is asked for next ``[U, cols]``, or None."""
        try:
            return next(self._steps) if sums is None else self._steps.send(sums)
        except StopIteration as end:
            self._new = end.value
            return None

    def write(self) -> None:
        """Store rows and moments."""
        assert self._new is not None
        if not len(self.slots):
            return
        self.arena.updates += 1
        first_cols = torch.tensor([p.cols.start for p in self.arena.pieces], device=self.slots.device)[self._piece]
        cols = first_cols[:, None] + torch.arange(self.arena.store.dim, device=self.slots.device)
        random = random_bits(self._step.seeds[self._piece], self.row, cols)
        self.arena.store.write(self.slots, self._new, random=random)
        for name, moment in self._moments.items():
            self.arena.store.write(self.slots, moment, name)


class _Exchange:
    """Who sends which blocks to whom; the same for all sums of a step."""

    def __init__(self, placement: Placement, targets: Sequence[_Target], link: Link) -> None:
        self._link = link
        device = placement.entries.device
        key = torch.cat([t.key for t in targets])
        tile = torch.cat([t.tile for t in targets])
        self._starts = [0]
        for t in targets:
            self._starts.append(self._starts[-1] + len(t.key))
        distinct, row = key.unique(return_inverse=True)
        others = placement.find(distinct)
        # Every pair (own tile, another tile of the same row).
        per_row = torch.bincount(others.at, minlength=len(distinct))
        order = torch.argsort(others.at, stable=True)
        firsts = per_row.cumsum(0) - per_row
        counts = per_row[row]
        mine = torch.repeat_interleave(torch.arange(len(key), device=device), counts)
        within = torch.arange(len(mine), device=device) - torch.repeat_interleave(counts.cumsum(0) - counts, counts)
        theirs = others.tile[order][firsts[row[mine]] + within]
        apart = theirs != tile[mine]
        mine, theirs = mine[apart], theirs[apart]
        rank = placement.entries[theirs, OWNER]
        # Both sides sort by (tile of the sender, tile of the receiver, row), for each pair of ranks.
        self._send = _sorted(mine, (rank, tile[mine], theirs, key[mine]))
        self._receive = _sorted(mine, (rank, theirs, tile[mine], key[mine]))
        self._from = _sorted(theirs, (rank, theirs, tile[mine], key[mine]))
        self._counts = torch.bincount(rank, minlength=link.size).tolist()
        starts = torch.tensor([a // BLOCK for a, _ in placement.lanes], dtype=torch.int64, device=device)
        stops = torch.tensor([-(-b // BLOCK) for _, b in placement.lanes], dtype=torch.int64, device=device)
        lane = placement.entries[:, LANE]
        self._first_block, self._blocks = starts[lane], (stops - starts)[lane]
        self._tile, self._device = tile, device
        self._row_blocks = -(-placement.dim // BLOCK)
        self._widest = int((stops - starts).max())

    def sums(self, columns: Sequence[Tensor]) -> list[Tensor]:
        """Sums over all columns of each row ``[U]``, by target, from the columns that are here ``[U, cols]``."""
        padded = torch.zeros(len(self._tile), self._widest, dtype=torch.float32, device=self._device)
        for start, values in zip(self._starts, columns, strict=False):
            blocks = blocks_of(values)
            padded[start : start + len(blocks), : blocks.shape[1]] = blocks
        came = self._link.all_to_all("sums over columns", padded[self._send], self._counts, self._counts).wait()
        whole = torch.zeros(len(self._tile), self._row_blocks, dtype=torch.float32, device=self._device)
        everyone = torch.arange(len(self._tile), device=self._device)
        for at, tile, blocks in ((everyone, self._tile, padded), (self._receive, self._from, came)):
            for i in range(self._widest):
                live = self._blocks[tile] > i
                whole[at[live], self._first_block[tile[live]] + i] = blocks[live, i]
        total = sum_of_blocks(whole)
        return [total[a:b] for a, b in zip(self._starts, self._starts[1:], strict=False)]


def _sorted(values: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Values by several keys, the first of which decides most."""
    order = torch.arange(len(values), device=values.device)
    for key in reversed(keys):
        order = order[torch.argsort(key[order], stable=True)]
    return values[order]
