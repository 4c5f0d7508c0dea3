"""Update rows that are cut into columns: owners exchange sums over the columns of a row.

Row-wise rules and norms need sums over all columns of a row. Each owner sums its columns in blocks of 16, sends the
blocks to the owners of the row's other columns, and all add all blocks in column order: the bits of an uncut row.

A table of 48 columns, of which rank 0 has 0 … 31 and rank 1 has 32 … 47; a step updates rows 2 and 5::

    rank 0's blocks   [[a₀ a₁] [c₀ c₁]]       of row 2 and row 5      rank 1's  [[b₂] [d₂]]
    rank 0 sends      a₀ a₁ c₀ c₁                                     rank 1 sends  b₂ d₂
    both have         [[a₀ a₁ b₂] [c₀ c₁ d₂]]  and add along each row, block 0 first

Messages carry no row numbers: the batch requested a row of all its tiles, so their owners update the same rows, and
both sides sort them by (kinds of the tile that sends and of the one that receives, the two tiles, row). All tiles of
two kinds are read and written at once: thousands of tables take as many operations as one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.arena import Arena, rounding_bits
from hotbed.embed.locate import KIND, Locator
from hotbed.ops import Backend, Occurrences, RuleStep
from hotbed.ops.layout import ACTIVE, BLOCK, LR, OWN
from hotbed.ops.reference_rules import blocks_of, rule_steps, sum_of_blocks
from hotbed.optim.adagrad import rowwise_step_size
from hotbed.optim.sgd import PLAIN
from hotbed.plan.tiling import common_places

_ROWS_AT_ONCE = 1 << 12
"""Whose squares stay in a core's cache."""


class Neighbour(NamedTuple):
    """A tile of this rank, and another that has other columns of some of its rows.

    Attributes
    ----------
    kind, shard
        Arena of the own tile, and which shard of it the tile is.
    rows
        The common rows, as slots of the shard; None where these are all.
    owner
        Rank that owns the other tile.
    tile, other
        The two, as the plan numbers them.
    other_kind
        Arena of the other tile.
    first_block
        Which block of a row is the other tile's first.
    """

    kind: int
    shard: int
    rows: range | None
    owner: int
    tile: int
    other: int
    other_kind: int
    first_block: int


class TouchedRows:
    """Rows of an arena that a step updates, and their gradients.

    Attributes
    ----------
    slots
        ``[U]``, rising.
    shard, within
        Shard of each ``[U]``, and which slot of the shard it is.
    gradient
        Summed and scaled ``[U, cols]``.
    """

    def __init__(self, arena: Arena, step: RuleStep, found: tuple[Occurrences, Tensor] | None, ops: Backend) -> None:
        self.arena, self.step = arena, step
        device = arena.store.device
        slots = torch.empty(0, dtype=torch.int64, device=device)
        gradient = arena.store.empty((0, arena.store.dim), torch.float32)
        if found is not None and bool(step.gate):
            occurrences, grad = found
            groups = ops.group(replace(occurrences, limit=arena.store.slots))
            slots = groups.rows[: int(groups.counts[0])]
            gradient = arena.store.empty((len(slots), arena.store.dim), torch.float32)
            ops.segment_sum(occurrences, groups, grad, None, gradient)
            gradient *= step.inv_scale
        shard, within = arena.locate(slots)
        active = step.hyper[shard, ACTIVE] != 0
        if not bool(active.all()):
            slots, shard, within, gradient = slots[active], shard[active], within[active], gradient[active]
        self.slots, self.shard, self.within, self.gradient = slots, shard, within, gradient
        first_slots = torch.tensor(arena.first_slots, dtype=torch.int64, device=device)
        self._bounds = torch.searchsorted(slots, first_slots).cpu()

    def of(self, neighbours: Sequence[Neighbour]) -> tuple[Tensor, Tensor]:
        """Find which of these rows each neighbour has, and how many ``[neighbours]``, on the host."""
        shards = torch.tensor([n.shard for n in neighbours])
        starts, counts = self._bounds[shards], self._bounds[shards + 1] - self._bounds[shards]
        if any(n.rows is not None for n in neighbours):
            found = [self._common(n, int(a), int(c)) for n, a, c in zip(neighbours, starts, counts, strict=True)]
            return torch.cat(found), torch.tensor([len(places) for places in found])
        before = counts.cumsum(0) - counts
        places = torch.arange(int(counts.sum())) + torch.repeat_interleave(starts - before, counts)
        return places.to(self.slots.device), counts

    def _common(self, neighbour: Neighbour, start: int, count: int) -> Tensor:
        within, rows = self.within[start : start + count], neighbour.rows
        if rows is None:
            return torch.arange(start, start + count, device=within.device)
        common = (within >= rows.start) & (within < rows.stop) & ((within - rows.start) % rows.step == 0)
        return start + common.nonzero()[:, 0]


class ColumnSums:
    """The neighbours of this rank's tiles, and the updates of rows that need sums over columns of both.

    Parameters
    ----------
    locator
        Where tiles are.

    Attributes
    ----------
    kinds
        Kinds whose tiles have not all columns of their rows.
    """

    def __init__(self, locator: Locator) -> None:
        self.kinds = [i for i, kind in enumerate(locator.kinds) if kind.cols < locator.dim]
        self._dim = locator.dim
        self._cols = {i: locator.kinds[i].cols for i in self.kinds}
        by_table: dict[str, list[int]] = defaultdict(list)
        for i, tile in enumerate(locator.tiles):
            by_table[tile.table].append(i)
        neighbours: list[Neighbour] = []
        self._first_blocks: dict[int, list[int]] = {}
        """Which block of a row is each shard's first, by kind."""
        kind_of: list[int] = locator.entries[KIND].tolist()
        for kind in self.kinds:
            owned = locator.owned(locator.kinds[kind])
            self._first_blocks[kind] = [locator.tiles[i].cols.start // BLOCK for i in owned]
            for shard, i in enumerate(owned):
                tile = locator.tiles[i]
                for j in by_table[tile.table]:
                    other = locator.tiles[j]
                    rows = common_places(tile.rows, other.rows)
                    if i != j and rows:
                        common = None if rows == range(len(tile.rows)) else rows
                        first_block = other.cols.start // BLOCK
                        neighbours.append(Neighbour(kind, shard, common, other.owner, i, j, kind_of[j], first_block))
        neighbours.sort(key=lambda n: (n.kind, n.other_kind, n.owner, n.tile, n.other))
        self._to = _by_kinds(neighbours, lambda n: (n.kind, n.other_kind))
        neighbours.sort(key=lambda n: (n.other_kind, n.kind, n.owner, n.other, n.tile))
        self._from = _by_kinds(neighbours, lambda n: (n.other_kind, n.kind))

    def update(
        self,
        arenas: Mapping[int, Arena],
        steps: Mapping[Arena, RuleStep],
        found: Mapping[Arena, tuple[Occurrences, Tensor]],
        ops: Backend,
        link: Link,
    ) -> None:
        """Update cut rows by a rule that sums over columns; all ranks must call this.

        Parameters
        ----------
        arenas
            By kind, those of `kinds`.
        steps, found
            As in `TableGroup.update`.
        ops
            Kernels that sum gradients.
        link
            The ranks.
        """
        touched = {
            kind: TouchedRows(arenas[kind], steps[arenas[kind]], found.get(arenas[kind]), ops) for kind in self.kinds
        }
        step = steps[arenas[self.kinds[0]]]
        if step.rule.name == "rowwise_adagrad" and step.uses <= {"decay"}:
            squares = {
                kind: torch.cat([blocks_of(rows * rows) for rows in t.gradient.split(_ROWS_AT_ONCE)])
                for kind, t in touched.items()
            }
            for kind, sums in self._sums(touched, squares, link).items():
                _rowwise_adagrad(touched[kind], sums, self._dim)
        else:
            self._any_rule(touched, link)
        for t in touched.values():
            t.arena.updates += len(t.slots) > 0

    def _any_rule(self, touched: Mapping[int, TouchedRows], link: Link) -> None:
        """Apply a rule in plain PyTorch, with one exchange per sum that it needs."""
        steps = {}
        moments = {}
        for kind, t in touched.items():
            store, rule = t.arena.store, t.step.rule
            moments[kind] = {m.name: store.read(t.slots, m.name, use="update") for m in rule.moments}
            hyper = t.step.hyper[t.shard]
            rows = store.read(t.slots, use="update")
            steps[kind] = rule_steps(rule, rows, moments[kind], t.gradient, hyper, self._dim, t.step.uses)
        sums: Mapping[int, Tensor] | None = None
        new: dict[int, Tensor] = {}
        while not new:
            blocks: dict[int, Tensor] = {}
            for kind, generator in steps.items():
                try:
                    blocks[kind] = blocks_of(next(generator) if sums is None else generator.send(sums[kind]))
                except StopIteration as end:  # all end together, for the rule is one
                    new[kind] = end.value
            if blocks:
                sums = self._sums(touched, blocks, link)
        for kind, t in touched.items():
            _store(t, new[kind], moments[kind])

    def _sums(self, touched: Mapping[int, TouchedRows], blocks: Mapping[int, Tensor], link: Link) -> dict[int, Tensor]:
        """Sum over all columns of each row ``[U]``, by kind, from the blocks of this rank ``[U, blocks]``."""
        whole = {kind: b.new_zeros(len(b), -(-self._dim // BLOCK)) for kind, b in blocks.items()}
        nothing = next(iter(blocks.values())).new_empty(0)
        for kind, own in blocks.items():
            firsts = torch.tensor(self._first_blocks[kind], dtype=torch.int64, device=own.device)
            whole[kind].scatter_(1, _columns(firsts[touched[kind].shard], own.shape[1]), own)
        outgoing: list[list[Tensor]] = [[nothing] for _ in range(link.size)]
        for (kind, _), neighbours in self._to.items():
            places, counts = touched[kind].of(neighbours)
            for to, values in zip(
                outgoing, blocks[kind][places].split(_by_rank(neighbours, counts, link)), strict=True
            ):
                to.append(values.flatten())
        expected = {kinds: touched[kinds[1]].of(neighbours) for kinds, neighbours in self._from.items()}
        widths = {kind: -(-cols // BLOCK) for kind, cols in self._cols.items()}
        sizes = {
            kinds: [rows * widths[kinds[0]] for rows in _by_rank(self._from[kinds], counts, link)]
            for kinds, (_, counts) in expected.items()
        }
        recv_counts = [sum(of_kinds[r] for of_kinds in sizes.values()) for r in range(link.size)]
        sent = [torch.cat(values) for values in outgoing]
        exchange = link.all_to_all("sums over columns", torch.cat(sent), list(map(len, sent)), recv_counts)
        received = exchange.wait().split(recv_counts)
        slices = [iter(values.split([of_kinds[r] for of_kinds in sizes.values()])) for r, values in enumerate(received)]
        for (other_kind, kind), (places, counts) in expected.items():
            values = torch.cat([next(of_rank) for of_rank in slices]).view(len(places), widths[other_kind])
            firsts = torch.tensor([n.first_block for n in self._from[other_kind, kind]]).repeat_interleave(counts)
            columns = _columns(firsts.to(values.device), widths[other_kind])
            whole[kind][places[:, None], columns] = values
        return {kind: sum_of_blocks(w) for kind, w in whole.items()}


def _by_kinds(
    neighbours: Sequence[Neighbour], kinds: Callable[[Neighbour], tuple[int, int]]
) -> dict[tuple[int, int], list[Neighbour]]:
    """Group neighbours by the kinds of tile that sends and tile that receives; they are sorted by these."""
    return {key: list(found) for key, found in groupby(neighbours, kinds)}


def _by_rank(neighbours: Sequence[Neighbour], counts: Tensor, link: Link) -> list[int]:
    """Count the rows of each rank, from those of each neighbour."""
    owners = torch.tensor([n.owner for n in neighbours])
    return torch.zeros(link.size, dtype=torch.int64).scatter_add_(0, owners, counts).tolist()


def _columns(firsts: Tensor, width: int) -> Tensor:
    """List ``width`` columns from each of ``firsts`` on: ``[U, width]``."""
    return firsts[:, None] + torch.arange(width, device=firsts.device)


def _rowwise_adagrad(touched: TouchedRows, squares: Tensor, dim: int) -> None:
    """Set ``v ← v + squares / dim``, then descend with a step size per row, for which there is a kernel."""
    store, step, slots = touched.arena.store, touched.step, touched.slots
    (moment,) = step.rule.moments
    before = store.read(slots, moment.name, use="update")
    v = before + squares / dim
    store.write(slots, v, moment.name)
    hyper = step.hyper[touched.shard]
    step_size = rowwise_step_size(before, v, hyper[:, LR], hyper[:, OWN:].unbind(1))
    descent = step.hyper[:, :OWN].clone()
    descent[:, LR] = 1
    one = torch.ones_like(step.inv_scale)
    occurrences = Occurrences(slots, torch.arange(len(slots), device=slots.device), step_size)
    store.update(replace(step, rule=PLAIN, hyper=descent, inv_scale=one), occurrences, touched.gradient)


def _store(touched: TouchedRows, rows: Tensor, moments: Mapping[str, Tensor]) -> None:
    """Round and write rows; write their moments."""
    arena, slots = touched.arena, touched.slots
    arena.store.write(slots, rows, random=rounding_bits(arena, slots, touched.step.seeds))
    for name, moment in moments.items():
        arena.store.write(slots, moment, name)
