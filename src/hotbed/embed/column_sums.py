"""Update rows that are cut into column shards. Their owners exchange sums over the columns of a row.

Row-wise rules and norms need sums over all columns of a row. Each owner sums its columns in blocks of 16 and sends the
block sums to the owners of the other columns. All owners add all blocks in column order, so the result has the same
bits as for an uncut row. For example, rank 0 has columns 0 … 31 of a table of 48 columns, and rank 1 has columns 32 …
47. A step updates rows 2 and 5::

    rank 0's blocks   [[a₀ a₁] [c₀ c₁]]       of row 2 and row 5      rank 1's  [[b₂] [d₂]]
    rank 0 sends      a₀ a₁ c₀ c₁                                     rank 1 sends  b₂ d₂
    both have         [[a₀ a₁ b₂] [c₀ c₁ d₂]]  and add along each row, block 0 first

Row numbers are not sent. A batch requests all column shards of a row, so all owners update the same rows. Both sides
sort them by (arena type of the sending tile, arena type of the receiving tile, the two tiles, row). All tiles with
equal arena types and rank are processed together, so the number of operations does not depend on the number of tables.
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
from hotbed.embed.shard_routing import Locator
from hotbed.embed.tile_layers import ARENA_TYPE
from hotbed.ops import Backend, Groups, Occurrences, RuleStep
from hotbed.ops.layout import ACTIVE, BLOCK
from hotbed.ops.reference import blocks_of, rule_steps, sum_of_blocks
from hotbed.plan.tiling import common_positions
from hotbed.store import memory


class Neighbour(NamedTuple):
    """A tile of this rank, and another tile with other columns of some of its rows."""

    arena_type: int  # arena of the own tile
    shard: int  # shard of the arena
    rows: range | None  # common rows, as slots of the shard; None: all
    owner: int  # rank that owns the other tile
    tile: int  # own tile, as the plan numbers it
    other: int  # other tile, as the plan numbers it
    other_arena_type: int  # arena of the other tile
    first_block: int  # first block of the other tile in a row


class UpdatedRows:
    """Rows of an arena that a step updates: ascending slots ``[U]``, and the number of rows of each shard."""

    def __init__(self, arena: Arena, step: RuleStep, found: tuple[Occurrences, Tensor] | None, ops: Backend) -> None:
        self.arena, self.step, self._ops = arena, step, ops
        self._found: tuple[Occurrences, Groups, Tensor] | None = None
        self.slots = torch.empty(0, dtype=torch.int64, device=arena.store.device)
        self._bounds = torch.zeros(len(arena.first_slots), dtype=torch.int64)
        if found is not None:
            occurrences = replace(found[0], limit=arena.store.slots)
            groups = ops.group(occurrences)
            # Replace the undefined values after the groups with a slot after the last, so slots stay ascending.
            is_group = torch.arange(len(groups.rows), device=groups.rows.device) < groups.counts[0]
            slots = torch.where(is_group, groups.rows, arena.store.slots)
            is_open = (step.gate != 0).long().view(1)
            *bounds, is_open = memory.to_host(torch.cat([torch.searchsorted(slots, arena.bounds), is_open])).tolist()
            if is_open:
                self._found = replace(occurrences, groups=groups), groups, found[1]
                self._bounds = torch.tensor(bounds)
                self.slots = groups.rows[: bounds[-1]]
        self.of_shards: list[int] = self._bounds.diff().tolist()

    def gradient(self) -> Tensor:
        """Return the summed and scaled gradients ``[U, cols]``."""
        out = self.arena.store.empty((len(self.slots), self.arena.store.dim), torch.float32)
        if self._found is not None:
            occurrences, groups, grad = self._found
            self._ops.segment_sum(occurrences, groups, grad, None, out)
            out *= self.step.inv_scale
        return out

    def square_blocks(self) -> Tensor:
        """Return the sums of squares of the gradients by block of columns ``[U, blocks]``."""
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
        """Return the positions of the rows of each neighbour, as a slice if contiguous, and their counts."""
        shards = torch.tensor([n.shard for n in neighbours])
        starts, counts = self._bounds[shards], self._bounds[shards + 1] - self._bounds[shards]
        if any(n.rows is not None for n in neighbours):
            found = [self._common(n, int(a), int(c)) for n, a, c in zip(neighbours, starts, counts, strict=True)]
            return torch.cat(found), [len(positions) for positions in found]
        if bool((starts[1:] == (starts + counts)[:-1]).all()):
            return slice(int(starts[0]), int(starts[-1] + counts[-1])), counts.tolist()
        before = counts.cumsum(0) - counts
        positions = torch.arange(int(counts.sum())) + torch.repeat_interleave(starts - before, counts)
        return positions.to(self.slots.device), counts.tolist()

    def _common(self, neighbour: Neighbour, start: int, count: int) -> Tensor:
        if neighbour.rows is None:
            return torch.arange(start, start + count, device=self.slots.device)
        rows, within = neighbour.rows, self.slots[start : start + count] - self.arena.first_slots[neighbour.shard]
        common = (within >= rows.start) & (within < rows.stop) & ((within - rows.start) % rows.step == 0)
        return start + common.nonzero()[:, 0]


class ColumnSums:
    """Updates rows of column shards with rules that need sums over whole rows.

    ``arena_types`` are the arena types with fewer columns than a row.
    """

    def __init__(self, locator: Locator) -> None:
        self.arena_types = [i for i, arena_type in enumerate(locator.arena_types) if arena_type.cols < locator.dim]
        self._dim = locator.dim
        self._cols = {i: locator.arena_types[i].cols for i in self.arena_types}
        by_table: dict[str, list[int]] = defaultdict(list)
        for i, tile in enumerate(locator.tiles):
            by_table[tile.table].append(i)
        neighbours: list[Neighbour] = []
        self._first_blocks: dict[int, list[int]] = {}
        """First block of each shard in a row, by arena type."""
        arena_type_of: list[int] = locator.entries[ARENA_TYPE].tolist()
        for arena_type in self.arena_types:
            owned = locator.owned(locator.arena_types[arena_type])
            self._first_blocks[arena_type] = [locator.tiles[i].cols.start // BLOCK for i in owned]
            for shard, i in enumerate(owned):
                tile = locator.tiles[i]
                for j in by_table[tile.table]:
                    other = locator.tiles[j]
                    rows = common_positions(tile.rows, other.rows)
                    if i != j and rows:
                        common = None if rows == range(len(tile.rows)) else rows
                        first_block = other.cols.start // BLOCK
                        neighbours.append(
                            Neighbour(arena_type, shard, common, other.owner, i, j, arena_type_of[j], first_block)
                        )
        neighbours.sort(key=lambda n: (n.owner, n.arena_type, n.other_arena_type, n.tile, n.other))
        self._to = _by_owner(neighbours, lambda n: (n.arena_type, n.other_arena_type))
        neighbours.sort(key=lambda n: (n.owner, n.other_arena_type, n.arena_type, n.other, n.tile))
        self._from = _by_owner(neighbours, lambda n: (n.other_arena_type, n.arena_type))
        """Neighbours that receive from and send to this rank, by rank, then by arena types of sender and receiver."""

    def update(
        self,
        arenas: Mapping[int, Arena],
        steps: Mapping[Arena, RuleStep],
        found: Mapping[Arena, tuple[Occurrences, Tensor]],
        ops: Backend,
        link: Link,
    ) -> None:
        """Update column shards by a rule that sums over columns. All ranks must call this.

        ``arenas`` has the arenas of `arena_types`. ``steps`` and ``found`` are as in `TableGroup.update`.
        """
        updated = {
            arena_type: UpdatedRows(arenas[arena_type], steps[arenas[arena_type]], found.get(arenas[arena_type]), ops)
            for arena_type in self.arena_types
        }
        step = steps[arenas[self.arena_types[0]]]
        if step.rule.name == "rowwise_adagrad" and step.uses <= {"decay"}:
            squares = {arena_type: t.square_blocks() for arena_type, t in updated.items()}
            for arena_type, sums in self._sums(updated, squares, link).items():
                updated[arena_type].update(sums / self._dim)
        else:
            self._any_rule(updated, link)
        for t in updated.values():
            t.arena.updates += len(t.slots) > 0

    def _any_rule(self, updated: Mapping[int, UpdatedRows], link: Link) -> None:
        """Apply a rule in plain PyTorch, with one exchange per sum over rows."""
        steps = {}
        moments = {}
        for arena_type, t in updated.items():
            store, rule = t.arena.store, t.step.rule
            moments[arena_type] = {m.name: store.read(t.slots, m.name, use="update") for m in rule.moments}
            hyper = t.step.hyper[t.arena.locate(t.slots)[0]]
            rows = store.read(t.slots, use="update")
            steps[arena_type] = rule_steps(rule, rows, moments[arena_type], t.gradient(), hyper, self._dim, t.step.uses)
        sums: Mapping[int, Tensor] | None = None
        new: dict[int, Tensor] = {}
        while not new:
            blocks: dict[int, Tensor] = {}
            for arena_type, generator in steps.items():
                try:
                    blocks[arena_type] = blocks_of(
                        next(generator) if sums is None else generator.send(sums[arena_type])
                    )
                except StopIteration as end:  # all end together, because they run the same rule
                    new[arena_type] = end.value
            if blocks:
                sums = self._sums(updated, blocks, link)
        for arena_type, t in updated.items():
            _store(t, new[arena_type], moments[arena_type])

    def _sums(self, updated: Mapping[int, UpdatedRows], blocks: Mapping[int, Tensor], link: Link) -> dict[int, Tensor]:
        """Return sums over whole rows ``[U]`` by arena type, given block sums of this rank ``[U, blocks]``."""
        nothing = next(iter(blocks.values())).new_empty(0)
        outgoing, incoming = [nothing] * link.size, [nothing] * link.size
        for rank, by_arena_types in self._to.items():
            sent = [
                blocks[arena_type][updated[arena_type].of(ns)[0]].flatten()
                for (arena_type, _), ns in by_arena_types.items()
            ]
            outgoing[rank] = sent[0] if len(sent) == 1 else torch.cat(sent)
        whole = {arena_type: b.new_zeros(len(b), -(-self._dim // BLOCK)) for arena_type, b in blocks.items()}
        for arena_type, own in blocks.items():
            _put(whole[arena_type], slice(None), self._first_blocks[arena_type], updated[arena_type].of_shards, own)
        expected: list[tuple[int, int, Sequence[Neighbour], tuple[Tensor | slice, list[int]]]] = []
        widths = {arena_type: -(-cols // BLOCK) for arena_type, cols in self._cols.items()}
        for rank, by_arena_types in self._from.items():
            of_rank = [
                (rank, other, ns, updated[arena_type].of(ns)) for (other, arena_type), ns in by_arena_types.items()
            ]
            incoming[rank] = nothing.new_empty(sum(sum(counts) * widths[other] for _, other, _, (_, counts) in of_rank))
            expected += of_rank
        link.exchange("sums over columns", outgoing, incoming).wait()
        unread = list(incoming)
        for rank, other, neighbours, (positions, counts) in expected:
            values, unread[rank] = unread[rank].tensor_split([sum(counts) * widths[other]])
            firsts = [n.first_block for n in neighbours]
            _put(whole[neighbours[0].arena_type], positions, firsts, counts, values.view(-1, widths[other]))
        return {arena_type: sum_of_blocks(w) for arena_type, w in whole.items()}


def _by_owner(
    neighbours: Sequence[Neighbour], arena_types: Callable[[Neighbour], tuple[int, int]]
) -> dict[int, dict[tuple[int, int], list[Neighbour]]]:
    """Group sorted neighbours by owner, then by arena types of the sending and receiving tile."""
    return {
        owner: {key: list(found) for key, found in groupby(of_owner, arena_types)}
        for owner, of_owner in groupby(neighbours, lambda n: n.owner)
    }


def _put(
    whole: Tensor, positions: Tensor | slice, firsts: Sequence[int], counts: Sequence[int], blocks: Tensor
) -> None:
    """Write block sums ``[n, width]`` to ``whole [U, all blocks]``, ``counts[i]`` of them at block ``firsts[i]``."""
    width = blocks.shape[1]
    if len(set(firsts)) == 1:  # e.g. all tables have the same column shards
        whole[positions, firsts[0] : firsts[0] + width] = blocks
    else:
        rows = torch.arange(len(whole), device=whole.device)[positions]
        each = torch.tensor([firsts, counts], dtype=torch.int64)  # may be empty
        first = each[0].repeat_interleave(each[1]).to(whole.device)
        whole[rows[:, None], first[:, None] + torch.arange(width, device=whole.device)] = blocks


def _store(updated: UpdatedRows, rows: Tensor, moments: Mapping[str, Tensor]) -> None:
    """Round and write the rows of tables that the step updates, and write their moments."""
    arena, slots = updated.arena, updated.slots
    active = updated.step.hyper[arena.locate(slots)[0], ACTIVE] != 0
    if not bool(active.all()):
        slots, rows, moments = slots[active], rows[active], {name: m[active] for name, m in moments.items()}
    arena.store.write(slots, rows, random=rounding_bits(arena, slots, updated.step.seeds))
    for name, moment in moments.items():
        arena.store.write(slots, moment, name)
