"""Ids to measure with: drawn by Zipf's law, frequent ones scattered over their table, as in hashed vocabularies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from hotbed.bench.options import OpsOptions
from hotbed.jagged import Jagged
from hotbed.ops import BagLayout


def zipf_ranks(rows: int, exponent: float, count: int, generator: torch.Generator) -> Tensor:
    """Ranks ``[count]`` int64, 0 the most frequent.

    Parameters
    ----------
    rows
        Ranks are below this.
    exponent
        Rank k is drawn in proportion to ``(k + 1)^−exponent``; 0 is uniform.
    count
        How many to draw.
    generator
        On the CPU.
    """
    u = torch.rand(count, generator=generator, dtype=torch.float64)
    if exponent == 0:
        return (u * rows).long().clamp_(max=rows - 1)
    mass = torch.arange(1, rows + 1, dtype=torch.float64).pow_(-exponent).cumsum_(0)
    return torch.searchsorted(mass, u.mul_(mass[-1])).clamp_(max=rows - 1)


def scatter_ranks(ranks: Tensor, rows: int) -> Tensor:
    """Ids of ranks: a permutation of ``0 … rows − 1`` that scatters neighbouring ranks over the table.

    It multiplies modulo ``rows`` by a number near ``rows`` ÷ golden ratio that has no factor in common with it.
    """
    factor = round(rows * 0.618) or 1
    while math.gcd(factor, rows) != 1:
        factor += 1
    return ranks * factor % rows


class Workload:
    """Draws batches for the tables of some options.

    Parameters
    ----------
    options
        Tables, ids per bag, seed.
    """

    def __init__(self, options: OpsOptions) -> None:
        self.options = options
        self._generator = torch.Generator().manual_seed(options.seed)

    @property
    def _count(self) -> int:
        """Ids of a batch per table."""
        return self.options.batch_size * self.options.pooling

    @cached_property
    def first_slots(self) -> list[int]:
        """Slot of row 0 of each table, in an arena that holds them one after the other."""
        return [0, *accumulate(self.options.rows_per_table)][:-1]

    def draw(self, exponent: float, batches: int = 1) -> list[Jagged]:
        """Ids of several batches, in host memory; see `zipf_ranks`."""
        o = self.options
        per_table = [zipf_ranks(r, exponent, batches * self._count, self._generator) for r in o.rows_per_table]
        if not o.fp32_rows:
            per_table = [scatter_ranks(ranks, r) for ranks, r in zip(per_table, o.rows_per_table, strict=True)]
        values = torch.stack(per_table).to(torch.int32 if o.ids == "int32" else torch.int64)
        return [self._jagged(part.reshape(-1)) for part in values.chunk(batches, dim=1)]

    def _jagged(self, values: Tensor) -> Jagged:
        o = self.options
        return Jagged(
            [f"t{i}" for i in range(o.tables)],
            values,
            batch_size=o.batch_size,
            fixed=[o.pooling] * o.tables,
            weights=torch.rand(len(values), generator=self._generator) if o.weighted else None,
        )

    def slots(self, ids: Jagged) -> Tensor:
        """Slot of each id ``[N]`` int64."""
        first = torch.tensor(self.first_slots, device=ids.values.device)
        return (ids.values.view(len(first), -1).long() + first[:, None]).view(-1)

    def layout(self, ids: Jagged) -> BagLayout:
        """Its bags, as kernels take them."""
        o = self.options
        features: Sequence[list[int]] = [
            # As in BagLayout.features: start, ids per sample, row of offsets, slot of row 0, mean, position, table.
            [f * self._count, o.pooling, 0, slot, 0, f, f]
            for f, slot in enumerate(self.first_slots)
        ]
        return BagLayout(
            ids=ids.values,
            features=torch.tensor(features, device=ids.values.device),
            offsets=torch.empty(0, o.batch_size + 1, dtype=torch.int64, device=ids.values.device),
            weights=ids.weights,
            batch_size=o.batch_size,
            total=len(ids.values),
            has_divisors=False,
            width=o.tables,
        )
