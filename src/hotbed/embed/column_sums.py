"""Update rows that are cut into columns: owners exchange sums over the columns of a row.

Row-wise rules and norms need sums over all columns of a row. Each owner sums its columns in blocks of 16, sends the
blocks to the owners of the row's other columns, and all add all blocks in column order: the bits of an uncut row.

A table of 48 columns, of which rank 0 has 0 … 31 and rank 1 has 32 … 47; a step updates rows 2 and 5::

    rank 0's blocks   [[a₀ a₁] [c₀ c₁]]       of row 2 and row 5      rank 1's  [[b₂] [d₂]]
    rank 0 sends      a₀ a₁ c₀ c₁                                     rank 1 sends  b₂ d₂
    both have         [[a₀ a₁ b₂] [c₀ c₁ d₂]]  and add along each row, block 0 first

Messages carry no row numbers: the batch requested a row of all its tiles, so their owners update the same rows, and
both sides sort them by (kinds of the tile that sends and of the one that receives, the two tiles, row). All tiles of
two kinds and a rank are read and written at once: thousands of tables take as many operations as one.
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
from hotbed.embed.shard_routing import KIND, Locator
from hotbed.ops import Backend, Groups, Occurrences, RuleStep
from hotbed.ops.layout import ACTIVE, BLOCK
from hotbed.ops.reference_rules import blocks_of, rule_steps, sum_of_blocks
from hotbed.plan.tiling import common_positions
from hotbed.store import memory


class Neighbour(NamedTuple):
    """A tile of this rank, and another tile that has other columns of some of its rows."""

    kind: int  # arena of the own tile
    shard: int  # shard of the arena
    rows: range | None  # common rows, as slots of the shard; None: all
    owner: int  # rank that owns the other tile
    tile: int  # own tile, as the plan numbers it
    other: int  # other tile, as the plan numbers it
    other_kind: int  # arena of the other tile
    first_block: int  # first block of the other tile in a row


class TouchedRows:
    """Rows of an arena that a step updates: their slots ``[U]``, rising, and how many are of each shard."""

    def __init__(self, arena: Arena, step: RuleStep, found: tuple[Occurrences, Tensor] | None, ops: Backend) -> None:
        self.arena, self.step, self._ops = arena, step, ops
        self._found: tuple[Occurrences, Groups, Tensor] | None = None
        self.slots = torch.empty(0, dtype=torch.int64, device=arena.store.device)
        self._bounds = torch.zeros(len(arena.first_slots), dtype=torch.int64)
        if found is not None:
            occurrences = replace(found[0], limit=arena.store.slots)
            groups = ops.group(occurrences)
            # What is behind the groups is anything; as slots that no shard has, it leaves all rising.
            is_group = torch.arange(len(groups.rows), device=groups.rows.device) < groups.counts[0]
            slots = torch.where(is_group, groups.rows, arena.store.slots)
            is_open = (step.gate != 0).long().view(1)
            *bounds, told = memory.to_host(torch.cat([torch.searchsorted(slots, arena.bounds), is_open])).tolist()
            if told:
                self._found = replace(occurrences, groups=groups), groups, found[1]
                self._bounds = torch.tensor(bounds)
                self.slots = groups.rows[: bounds[-1]]
        self.of_shards: list[int] = self._bounds.diff().tolist()

    def gradient(self) -> Tensor:
        """Sum and scale the gradient of each ``[U, cols]``."""
        out = self.arena.store.empty((len(self.slots), self.arena.store.dim), torch.float32)
        if self._found is not None:
            occurrences, groups, grad = self._found
            self._ops.segment_sum(occurrences, groups, grad, None, out)
            out *= self.step.inv_scale
        return out

    def square_blocks(self) -> Tensor:
        """Sum the squares of each gradient in blocks of columns ``[U, blocks]``."""
        store = self.arena.store
        out = store.empty((len(self.slots), -(-store.dim // BLOCK)), torch.float32)
        if self._found is not None:
            self._ops.square_blocks(*self._found, self.step.inv_scale, out)
        return out

    def update(self, mean_squares: Tensor) -> None:
        """Apply row-wise AdaGrad with the mean squares of whole gradients ``[U]``."""
        if self._found is not None:
            occurrences, _, grad = self._found
            self.arena.store.update(replace(self.step, mean_squares=mean_squares), occurrences, grad)

    def of(self, neighbours: Sequence[Neighbour]) -> tuple[Tensor | slice, list[int]]:
        """Find which of these rows each neighbour has; a slice where they follow each other. And how many they are."""
        shards = torch.tensor([n.shard for n in neighbours])
        starts, counts = self._bounds[shards], self._bounds[shards + 1] - self._bounds[shards]
        if any(n.rows is not None for n in neighbours):
            found = [self._common(n, int(a), int(c)) for n, a, c in zip(neighbours, starts, counts, strict=True)]
            return torch.cat(found), [len(places) for places in found]
        if bool((starts[1:] == (starts + counts)[:-1]).all()):
            return slice(int(starts[0]), int(starts[-1] + counts[-1])), counts.tolist()
        before = counts.cumsum(0) - counts
        places = torch.arange(int(counts.sum())) + torch.repeat_interleave(starts - before, counts)
        return places.to(self.slots.device), counts.tolist()

    def _common(self, neighbour: Neighbour, start: int, count: int) -> Tensor:
        if neighbour.rows is None:
            return torch.arange(start, start + count, device=self.slots.device)
        rows, within = neighbour.rows, self.slots[start : start + count] - self.arena.first_slots[neighbour.shard]
        common = (within >= rows.start) & (within < rows.stop) & ((within - rows.start) % rows.step == 0)
        return start + common.nonzero()[:, 0]


class ColumnSums:
    """The neighbours of this rank's tiles, and the updates of rows that need sums over columns of both.

    ``kinds`` are those whose tiles have not all columns of their rows.
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
                    rows = common_positions(tile.rows, other.rows)
                    if i != j and rows:
                        common = None if rows == range(len(tile.rows)) else rows
                        first_block = other.cols.start // BLOCK
                        neighbours.append(Neighbour(kind, shard, common, other.owner, i, j, kind_of[j], first_block))
        neighbours.sort(key=lambda n: (n.owner, n.kind, n.other_kind, n.tile, n.other))
        self._to = _by_owner(neighbours, lambda n: (n.kind, n.other_kind))
        neighbours.sort(key=lambda n: (n.owner, n.other_kind, n.kind, n.other, n.tile))
        self._from = _by_owner(neighbours, lambda n: (n.other_kind, n.kind))
        """What is sent to each rank, and what each sends: kinds of the tile that sends and of the one that receives."""

    def update(
        self,
        arenas: Mapping[int, Arena],
        steps: Mapping[Arena, RuleStep],
        found: Mapping[Arena, tuple[Occurrences, Tensor]],
        ops: Backend,
        link: Link,
    ) -> None:
        """Update cut rows by a rule that sums over columns; all ranks must call this.

        ``arenas`` are those of `kinds`; ``steps`` and ``found`` are as in `TableGroup.update`.
        """
        touched = {
            kind: TouchedRows(arenas[kind], steps[arenas[kind]], found.get(arenas[kind]), ops) for kind in self.kinds
        }
        step = steps[arenas[self.kinds[0]]]
        if step.rule.name == "rowwise_adagrad" and step.uses <= {"decay"}:
            squares = {kind: t.square_blocks() for kind, t in touched.items()}
            for kind, sums in self._sums(touched, squares, link).items():
                touched[kind].update(sums / self._dim)
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
            hyper = t.step.hyper[t.arena.locate(t.slots)[0]]
            rows = store.read(t.slots, use="update")
            steps[kind] = rule_steps(rule, rows, moments[kind], t.gradient(), hyper, self._dim, t.step.uses)
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
        nothing = next(iter(blocks.values())).new_empty(0)
        outgoing, incoming = [nothing] * link.size, [nothing] * link.size
        for rank, by_kinds in self._to.items():
            sent = [blocks[kind][touched[kind].of(ns)[0]].flatten() for (kind, _), ns in by_kinds.items()]
            outgoing[rank] = sent[0] if len(sent) == 1 else torch.cat(sent)
        whole = {kind: b.new_zeros(len(b), -(-self._dim // BLOCK)) for kind, b in blocks.items()}
        for kind, own in blocks.items():
            _put(whole[kind], slice(None), self._first_blocks[kind], touched[kind].of_shards, own)
        expected: list[tuple[int, int, Sequence[Neighbour], tuple[Tensor | slice, list[int]]]] = []
        widths = {kind: -(-cols // BLOCK) for kind, cols in self._cols.items()}
        for rank, by_kinds in self._from.items():
            of_rank = [(rank, other, ns, touched[kind].of(ns)) for (other, kind), ns in by_kinds.items()]
            incoming[rank] = nothing.new_empty(sum(sum(counts) * widths[other] for _, other, _, (_, counts) in of_rank))
            expected += of_rank
        link.exchange("sums over columns", outgoing, incoming).wait()
        unread = list(incoming)
        for rank, other, neighbours, (places, counts) in expected:
            values, unread[rank] = unread[rank].tensor_split([sum(counts) * widths[other]])
            firsts = [n.first_block for n in neighbours]
            _put(whole[neighbours[0].kind], places, firsts, counts, values.view(-1, widths[other]))
        return {kind: sum_of_blocks(w) for kind, w in whole.items()}


def _by_owner(
    neighbours: Sequence[Neighbour], kinds: Callable[[Neighbour], tuple[int, int]]
) -> dict[int, dict[tuple[int, int], list[Neighbour]]]:
    """Group neighbours by owner, then by kinds of the tile that sends and that receives; they are sorted by these."""
    return {
        owner: {key: list(found) for key, found in groupby(of_owner, kinds)}
        for owner, of_owner in groupby(neighbours, lambda n: n.owner)
    }


def _put(whole: Tensor, places: Tensor | slice, firsts: Sequence[int], counts: Sequence[int], blocks: Tensor) -> None:
    """Write blocks ``[n, width]`` into ``whole [U, all blocks]``, ``counts[i]`` of them at block ``firsts[i]``."""
    width = blocks.shape[1]
    if len(set(firsts)) == 1:  # as where all tables are cut alike
        whole[places, firsts[0] : firsts[0] + width] = blocks
    else:
        rows = torch.arange(len(whole), device=whole.device)[places]
        each = torch.tensor([firsts, counts], dtype=torch.int64)  # a rank may have none
        first = each[0].repeat_interleave(each[1]).to(whole.device)
        whole[rows[:, None], first[:, None] + torch.arange(width, device=whole.device)] = blocks


def _store(touched: TouchedRows, rows: Tensor, moments: Mapping[str, Tensor]) -> None:
    """Round and write rows of the tables that the step updates; write their moments."""
    arena, slots = touched.arena, touched.slots
    active = touched.step.hyper[arena.locate(slots)[0], ACTIVE] != 0
    if not bool(active.all()):
        slots, rows, moments = slots[active], rows[active], {name: m[active] for name, m in moments.items()}
    arena.store.write(slots, rows, random=rounding_bits(arena, slots, touched.step.seeds))
    for name, moment in moments.items():
        arena.store.write(slots, moment, name)
