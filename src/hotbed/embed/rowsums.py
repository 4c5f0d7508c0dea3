"""Updates of rows that are cut into columns: sums over the columns of a row go from owner to owner.

Row-wise rules and norms need sums over all columns of a row. Each owner sums its columns in blocks of 16, sends the
blocks to the owners of the row's other columns, and all add all blocks in column order: the bits of an uncut row.

Nobody has to say which rows these are: every tile of a row was asked for the row by the same batch, so its owners
touched the same rows, and both sides put them in the order of (tile that sends, tile that receives, row).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.comm import Link
from hotbed.embed.arena import Arena
from hotbed.embed.placement import Placement
from hotbed.embed.rounding import rounding_bits
from hotbed.ops import Backend, Occurrences, RuleStep
from hotbed.ops.layout import ACTIVE, BLOCK, LR, OWN
from hotbed.ops.reference_rules import blocks_of, rowwise_step_size, rule_steps, sum_of_blocks
from hotbed.optim.rules import Rule
from hotbed.plan.ranges import common_places

_SGD = Rule("sgd")
_ROWS_AT_ONCE = 1 << 12
"""Whose squares stay in a core's cache."""


class Neighbour(NamedTuple):
    """A tile of this rank, and another tile that has other columns of some of its rows.

    Attributes
    ----------
    kind, piece
        The own tile: its arena, and which piece of it.
    rows
        The common rows, as slots of the piece.
    owner
        Rank that owns the other tile.
    tile, other
        The two, as the plan numbers them.
    blocks
        Which blocks of a row the other tile has.
    """

    kind: int
    piece: int
    rows: range
    owner: int
    tile: int
    other: int
    blocks: slice


class Touched:
    """Rows of an arena that a step changes, and their gradients.

    Attributes
    ----------
    slots
        ``[U]``, rising.
    piece, within
        Piece of each ``[U]``, and which slot of the piece it is.
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
            groups = ops.group(occurrences)
            slots = groups.rows[: int(groups.counts[0])]
            gradient = arena.store.empty((len(slots), arena.store.dim), torch.float32)
            ops.segment_sum(occurrences, groups, grad, None, gradient)
            gradient *= step.inv_scale
        piece, within = arena.locate(slots)
        active = step.hyper[piece, ACTIVE] != 0
        if not bool(active.all()):
            slots, piece, within, gradient = slots[active], piece[active], within[active], gradient[active]
        self.slots, self.piece, self.within, self.gradient = slots, piece, within, gradient
        first_slots = torch.tensor(arena.first_slots, dtype=torch.int64, device=device)
        self._bounds: list[int] = torch.searchsorted(slots, first_slots).tolist()

    def of(self, piece: int, rows: range | None = None) -> slice | Tensor:
        """Which of them are of this piece, or have these places in it."""
        start, stop = self._bounds[piece], self._bounds[piece + 1]
        if rows is None or rows == range(len(self.arena.pieces[piece].rows)):
            return slice(start, stop)
        within = self.within[start:stop]
        common = (within >= rows.start) & (within < rows.stop) & ((within - rows.start) % rows.step == 0)
        return start + common.nonzero()[:, 0]


class RowSums:
    """Sums over the columns of rows that are cut.

    Parameters
    ----------
    placement
        Where tiles are.

    Attributes
    ----------
    kinds
        Arenas that hold parts of rows.
    """

    def __init__(self, placement: Placement) -> None:
        self.kinds = [i for i, kind in enumerate(placement.kinds) if kind.cols < placement.dim]
        self._dim = placement.dim
        by_table: dict[str, list[int]] = defaultdict(list)
        for i, tile in enumerate(placement.tiles):
            by_table[tile.table].append(i)
        neighbours: list[Neighbour] = []
        self._blocks: dict[int, list[slice]] = {}
        """Which blocks of a row each piece has, by kind."""
        for kind in self.kinds:
            owned = placement.owned(placement.kinds[kind])
            self._blocks[kind] = [_blocks(placement.tiles[i].cols) for i in owned]
            for piece, i in enumerate(owned):
                tile = placement.tiles[i]
                for j in by_table[tile.table]:
                    other = placement.tiles[j]
                    rows = common_places(tile.rows, other.rows)
                    if i != j and rows:
                        neighbours.append(Neighbour(kind, piece, rows, other.owner, i, j, _blocks(other.cols)))
        self._to = sorted(neighbours, key=lambda n: (n.owner, n.tile, n.other))
        self._from = sorted(neighbours, key=lambda n: (n.owner, n.other, n.tile))

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
            As in `Part.update`.
        ops
            Kernels that sum gradients.
        link
            The ranks.
        """
        touched = {
            kind: Touched(arenas[kind], steps[arenas[kind]], found.get(arenas[kind]), ops) for kind in self.kinds
        }
        step = steps[arenas[self.kinds[0]]]
        if step.rule.name == "rowwise_adagrad" and step.uses <= {"decay"}:
            squares = {
                kind: torch.cat([blocks_of(part * part) for part in t.gradient.split(_ROWS_AT_ONCE)])
                for kind, t in touched.items()
            }
            for kind, sums in self._sums(touched, squares, link).items():
                _rowwise_adagrad(touched[kind], sums, self._dim)
        else:
            self._any_rule(touched, link)
        for t in touched.values():
            t.arena.updates += len(t.slots) > 0

    def _any_rule(self, touched: Mapping[int, Touched], link: Link) -> None:
        """In plain PyTorch, with one exchange per sum that the rule asks for."""
        steps = {}
        moments = {}
        for kind, t in touched.items():
            store, rule = t.arena.store, t.step.rule
            moments[kind] = {m.name: store.read(t.slots, m.name, use="update") for m in rule.moments}
            hyper = t.step.hyper[t.piece]
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

    def _sums(self, touched: Mapping[int, Touched], blocks: Mapping[int, Tensor], link: Link) -> dict[int, Tensor]:
        """Sums over all columns of each row ``[U]``, by kind, from the blocks that are here ``[U, blocks]``."""
        whole = {kind: b.new_zeros(len(b), -(-self._dim // BLOCK)) for kind, b in blocks.items()}
        for kind, own in self._blocks.items():
            for piece, columns in enumerate(own):
                rows = touched[kind].of(piece)
                whole[kind][rows, columns] = blocks[kind][rows]
        outgoing: list[list[Tensor]] = [[] for _ in range(link.size)]
        common = {(n.tile, n.other): touched[n.kind].of(n.piece, n.rows) for n in self._to}
        for n in self._to:
            outgoing[n.owner].append(blocks[n.kind][common[n.tile, n.other]].flatten())
        places = [common[n.tile, n.other] for n in self._from]
        shapes = [
            (len(touched[n.kind].slots[rows]), n.blocks.stop - n.blocks.start)
            for n, rows in zip(self._from, places, strict=True)
        ]
        sizes = [rows * columns for rows, columns in shapes]
        to = [sum(len(values) for values in of_rank) for of_rank in outgoing]
        came = [sum(s for n, s in zip(self._from, sizes, strict=True) if n.owner == r) for r in range(link.size)]
        nothing = next(iter(blocks.values())).new_empty(0)
        sent = torch.cat([nothing, *(values for of_rank in outgoing for values in of_rank)])
        received = link.all_to_all("sums over columns", sent, to, came).wait().split(sizes)
        for n, rows, shape, values in zip(self._from, places, shapes, received, strict=True):
            whole[n.kind][rows, n.blocks] = values.view(shape)
        return {kind: sum_of_blocks(w) for kind, w in whole.items()}


def _blocks(cols: range) -> slice:
    return slice(cols.start // BLOCK, -(-cols.stop // BLOCK))


def _rowwise_adagrad(touched: Touched, squares: Tensor, dim: int) -> None:
    """``v ← v + squares / dim``; what follows is gradient descent with a step size per row, and has a kernel."""
    store, step, slots = touched.arena.store, touched.step, touched.slots
    (moment,) = step.rule.moments
    before = store.read(slots, moment.name, use="update")
    v = before + squares / dim
    store.write(slots, v, moment.name)
    hyper = step.hyper[touched.piece]
    step_size = rowwise_step_size(before, v, hyper[:, LR], hyper[:, OWN:])
    descent = step.hyper[:, :OWN].clone()
    descent[:, LR] = 1
    one = torch.ones_like(step.inv_scale)
    occurrences = Occurrences(slots, torch.arange(len(slots), device=slots.device), step_size)
    store.update(replace(step, rule=_SGD, hyper=descent, inv_scale=one), occurrences, touched.gradient)


def _store(touched: Touched, rows: Tensor, moments: Mapping[str, Tensor]) -> None:
    """Round and store rows; store their moments."""
    arena, slots = touched.arena, touched.slots
    arena.store.write(slots, rows, random=rounding_bits(arena, slots, touched.step.seeds))
    for name, moment in moments.items():
        arena.store.write(slots, moment, name)
