"""Collect the distinct items of a source, with their features and counts.

One column has the id of each sample's item. Other columns are features of the item. If several samples have the same
item, the newest sample determines the item's features, because features may change::

    movie  genre                     ids     3   7
    7      comedy        ─────▶      genre   war drama      counts  1   2
    3      war
    7      drama
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hotbed.data.source import Source
from hotbed.errors import BatchError, DataError
from hotbed.jagged import Bags, Entry, Jagged

_FEWEST = 1 << 20
"""Number of samples that are collected before duplicate items are merged."""
_DRAWS = 3
"""First number of the seeds of this module's generators. Seeds of the loader's generators begin with 1 and 2."""


@dataclass(frozen=True)
class ItemSet:
    """Distinct items, sorted by id."""

    ids: Tensor  # ``[N]`` int64, ascending
    features: Jagged  # one sample per item
    counts: Tensor  # ``[N]`` int64, number of occurrences in the counted split

    def __len__(self) -> int:
        return len(self.ids)

    def positions(self, ids: Tensor) -> Tensor:
        """Return the positions ``[n]`` int64 of items in the set, with −1 for items that are not in the set."""
        if not len(self.ids):
            return torch.full_like(ids, -1)
        at = torch.searchsorted(self.ids, ids.contiguous()).clamp(max=len(self.ids) - 1)
        return torch.where(self.ids[at] == ids, at, -1)

    def rows(self, positions: Tensor, like: Jagged) -> Jagged:
        """Return the items at these positions as samples with the feature names of ``like``.

        Features that items lack are empty.
        """
        chosen = self.features.take(positions)
        nothing = Bags(
            like.values.new_empty(0), len(positions), None, torch.zeros(len(positions) + 1, dtype=torch.int64), None
        )
        of_items = {name: chosen[name] for name in chosen.names}
        return _to_jagged({name: of_items.get(name, nothing) for name in like.names})


def _to_jagged(bags: Mapping[str, Bags]) -> Jagged:
    entries: dict[str, Entry] = {
        name: b.values.view(b.batch_size, b.fixed or 0) if b.offsets is None else (b.values, b.offsets)
        for name, b in bags.items()
    }
    return Jagged.from_dict(entries, {name: b.weights for name, b in bags.items() if b.weights is not None})


def item_ids(ids: Jagged, item: str) -> Tensor:
    """Return the item of each sample ``[B]`` int64. Raise `BatchError` unless each sample has exactly one item."""
    bags = ids[item]
    if bags.fixed != 1 and bool((lengths := bags.lengths()).ne(1).any()):
        at = int(lengths.ne(1).nonzero()[0])
        raise BatchError(
            f"item '{item}' of sample {at:,}: got {int(lengths[at]):,} ids, expected 1. Drop samples without exactly "
            "one id, or list a column with one id per sample first in the model's `item`"
        )
    return bags.values.long()


def items_in(ids: Jagged, features: Sequence[str]) -> ItemSet:
    """Return the items of a batch with the ids ``ids``. The first feature is the item."""
    found = item_ids(ids, features[0])
    return merge_items([ItemSet(found, _to_jagged({name: ids[name] for name in features}), torch.ones_like(found))])


def items_of(source: Source, features: Sequence[str], splits: Sequence[str], counted: str | None = None) -> ItemSet:
    """Collect the items of splits (oldest first) in one pass. The first feature is the item.

    Only occurrences in the split ``counted`` are counted. If it is None, all counts are 0.
    """
    only = copy.copy(source)
    only.schema = replace(source.schema.inputs, dense=(), scaling=(), numericals=()).only(features)
    only = only.streamed()
    parts: list[ItemSet] = []
    waiting = 0
    for split in dict.fromkeys(splits):
        for i in range(len(only.chunks(split))):
            found = items_in(only.read(split, i).sparse, features)
            parts.append(replace(found, counts=found.counts * (split == counted)))
            waiting += len(parts[-1])
            if waiting > max(_FEWEST, 2 * len(parts[0])):
                parts, waiting = [merge_items(parts)], 0
    if not parts:
        raise DataError(
            f"splits {', '.join(splits)}: got no samples, so no items, expected at least one. Check the files of these "
            "splits"
        )
    return merge_items(parts)


def merge_items(parts: Sequence[ItemSet]) -> ItemSet:
    """Merge sets of items, oldest first. The last set with an item determines its features. Counts are summed."""
    whole = Jagged.concatenate([part.features for part in parts])
    ids, counts = (torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "counts"))
    distinct, last, of_row = np.unique(ids.flip(0).numpy(), return_index=True, return_inverse=True)
    totals = np.zeros(len(distinct), np.int64)
    np.add.at(totals, of_row, counts.flip(0).numpy())
    rows = torch.from_numpy(len(ids) - 1 - last)
    return ItemSet(torch.from_numpy(distinct), whole.take(rows), torch.from_numpy(totals))


class ItemDraws:
    """Draws items of a set for each step. The result depends only on the seed and the step.

    With ``by_popularity``, an item is drawn with a probability in proportion to its count. Otherwise, all items with a
    count above 0 are equally likely. If all counts are 0, all items are equally likely.
    """

    def __init__(self, items: ItemSet, seed: int, *, by_popularity: bool) -> None:
        counts = items.counts if bool(items.counts.any()) else torch.ones_like(items.counts)
        shares = counts if by_popularity else (counts > 0).long()
        self._ends = shares.cumsum(0).numpy()
        self._seed, self._shares, self._total = seed, shares, int(self._ends[-1])

    def __call__(self, step: int, count: int) -> Tensor:
        """Draw ``count`` items for a step, with replacement. Return their positions ``[count]`` int64."""
        draws = np.random.default_rng((_DRAWS, self._seed, step)).integers(0, self._total, count)
        return torch.from_numpy(np.searchsorted(self._ends, draws, side="right"))

    def log_p(self, positions: Tensor) -> Tensor:
        """Return the natural log of the probability to draw the item at each position ``[n]`` float64 (never: −∞)."""
        shares = torch.where(positions >= 0, self._shares[positions.clamp(min=0)], 0)
        return shares.double().div(self._total).log()
