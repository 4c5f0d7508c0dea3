"""Keep gradients of tables that are on this rank, and join those that were looked up table by table.

A collection of 26 tables leaves one gradient for a step: its ids are listed, grouped and applied by one launch each. 26
modules that look up in one arena leave 26 of them (`hotbed.swap_embeddings`), which `joined` makes one again: ids lie
one after the other, and what the bags' gradients have in common is found by `_rows`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from hotbed.embed.arena import Arena
from hotbed.embed.ids import BagPlaces
from hotbed.embed.table_group import Contribution, Vectors
from hotbed.ops import BagLayout, Occurrences
from hotbed.ops.layout import OUT, RAGGED_ROW, START
from hotbed.store.memory import to_device


class LocalSource:
    """An arena, its tables that are looked up, and the places of their features' bags; a `RowSource`."""

    def __init__(self, arena: Arena, names: set[str], pooled: BagPlaces | None, sequences: list[BagPlaces]) -> None:
        self.arena, self.names, self.pooled, self.sequences = arena, names, pooled, sequences
        self.steps = 0
        """How often gradients of these tables were used."""

    @property
    def store(self) -> Vectors:
        """The rows."""
        return self.arena.store

    @property
    def updates(self) -> int:
        """How often they were updated."""
        return self.arena.updates + self.steps

    def contribution(self, bags: BagLayout, versions: tuple[int, int, int], grad: Tensor) -> Contribution:
        """Make a gradient ready to wait for the step."""
        return LocalGradient(self, bags, versions, grad)


class LocalGradient(NamedTuple):
    """A gradient of rows of one arena of this rank; a `Contribution`."""

    source: LocalSource
    bags: BagLayout
    versions: tuple[int, int, int]
    grad: Tensor

    @property
    def is_summed(self) -> bool:
        """Rows may have several gradients."""
        return False

    @property
    def tables(self) -> set[str]:
        """Tables that it may be of."""
        return self.source.names

    def changed(self) -> bool:
        """Say whether ids, offsets or weights were changed in place since the lookup."""
        return self.bags.versions() != self.versions

    def finite(self) -> Tensor:
        """Return, as 0-d bool, whether all of it is finite."""
        return torch.isfinite(self.grad).all()

    def drop(self) -> None:
        """Do nothing: no other rank knows of it."""

    def gradients(self) -> Sequence[tuple[Arena, Occurrences, Tensor]]:
        """Return the arena, slots, and the rows of the gradient that they receive."""
        self.source.steps += 1
        arena = self.source.arena
        return [(arena, arena.store.occurrences(self.bags), self.grad)]


def joined(waiting: Sequence[Contribution]) -> list[Contribution]:
    """Join gradients of single features, of one arena and as many bags, whose tables have no other gradient.

    The order of each row's occurrences stays, and so do the bits of their sum.
    """
    if len(waiting) < 2:
        return list(waiting)
    count = Counter(table for gradient in waiting for table in gradient.tables)
    found: list[Contribution] = []
    alike: dict[Hashable, list[LocalGradient]] = {}
    for gradient in waiting:
        is_alone = all(count[table] == 1 for table in gradient.tables)
        if is_alone and isinstance(gradient, LocalGradient) and len(gradient.bags.features) == 1:
            key = gradient.source.arena, gradient.bags.batch_size, gradient.grad.dtype
            alike.setdefault(key, []).append(gradient)
        else:
            found.append(gradient)
    return [*found, *map(_joined, alike.values())]


def _joined(gradients: list[LocalGradient]) -> LocalGradient:
    """Join gradients of one arena: the ids of features that follow each other as their tables do."""
    if len(gradients) == 1:
        return gradients[0]
    place = {name: i for i, name in enumerate(gradients[0].source.arena.tables)}
    gradients = sorted(gradients, key=lambda g: place[next(iter(g.tables))])
    for gradient in gradients[1:]:
        gradient.source.steps += 1
    bags = [gradient.bags for gradient in gradients]
    grad, width, positions = _rows(gradients)
    firsts = [0, *accumulate(len(b.ids) for b in bags)]
    ragged = [0, *accumulate(len(b.offsets) for b in bags)]
    device = grad.device
    shift = torch.zeros(len(bags), bags[0].features.shape[1], dtype=torch.int64, device="cpu")
    shift[:, START] = torch.tensor(firsts[:-1])
    shift[:, RAGGED_ROW] = torch.tensor([row if len(b.offsets) else 0 for row, b in zip(ragged, bags, strict=False)])
    shift[:, OUT] = torch.tensor(positions)
    weights = None
    if any(b.weights is not None for b in bags):
        weights = torch.cat([torch.ones(len(b.ids), device=device) if b.weights is None else b.weights for b in bags])
    spans = [(first + start, count) for first, b in zip(firsts, bags, strict=False) for start, count in b.spans or ()]
    per_bag = {b.ids_per_bag for b in bags}
    layout = BagLayout(
        ids=torch.cat([b.ids for b in bags]),
        features=torch.cat([b.features for b in bags]) + to_device(shift, device),
        offsets=torch.cat([b.offsets for b in bags]),
        weights=weights,
        batch_size=bags[0].batch_size,
        total=sum(b.total for b in bags),
        has_divisors=any(b.has_divisors for b in bags),
        width=width,
        ids_per_bag=per_bag.pop() if len(per_bag) == 1 else None,
        spans=tuple(spans) if all(b.spans is not None for b in bags) else None,
    )
    return LocalGradient(gradients[0].source, layout, layout.versions(), grad)


def _rows(gradients: Sequence[LocalGradient]) -> tuple[Tensor, int, list[int]]:
    """Lay gradients of one feature each out as rows ``[…, D]``: bag b of each is row ``b · width + position``.

    Return rows, width, and the position of each gradient. Nothing is copied where they are slices of one tensor, as the
    gradients of vectors that were stacked or concatenated are.
    """
    first, width = gradients[0].grad, gradients[0].bags.width
    dim, start = first.shape[1], min(int(g.grad.storage_offset()) for g in gradients)
    steps = [divmod(int(g.grad.storage_offset()) - start, dim) for g in gradients]
    whole = all(
        g.grad.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and g.bags.width == width
        for g in gradients
    )
    if whole and len(first) and all(rest == 0 for _, rest in steps):
        count = max(step + len(g.grad) for (step, _), g in zip(steps, gradients, strict=True))
        return first.as_strided((count, dim), (dim, 1), start), width, [step for step, _ in steps]
    bags = gradients[0].bags.batch_size
    own = [g.grad[:: g.bags.width] if g.bags.width else g.grad.expand(bags, dim) for g in gradients]
    return torch.cat(own), 1, [i * bags for i in range(len(own))]
