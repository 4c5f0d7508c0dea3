"""Draw batches of ids, and count the bytes that each kernel must move for them.

Ids follow Zipf's law. Frequent ids are scattered over their table, as in hashed vocabularies. The bytes are counted for
an ideal kernel with an unlimited cache:

==================== ================================================================================================
initial_values       write the rectangle
lookup               read ids, weights and each distinct row once; write pooled vectors
occurrences          read ids and weights; write slots, bags and factors
group                read slots; write order, distinct slots, and starts of runs and of groups
update               read order, bags, factors, distinct slots, starts of runs and of groups, and a gradient per bag;
                     read and write each distinct row and its moments
weight_gradient      read ids, each distinct row once and a gradient per bag; write gradients of the weights
interaction          read vectors; write the result
interaction_backward read vectors and the gradient of the result; write the gradient of the vectors
==================== ================================================================================================

An id has 4 or 8 bytes. A slot, a bag, an entry of the order and a start have 8 bytes. A weight, a factor and a value
of a moment have 4 bytes. Pooled vectors and their gradients have the size of their dtype. A row has its stored size,
including its scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.options import OpsOptions
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.jagged import Jagged
from hotbed.measure.machine_profile import bag_layout
from hotbed.ops import BagLayout, Groups, Rows
from hotbed.ops.rows import locate_rows


def scatter_ranks(ranks: Tensor, rows: int) -> Tensor:
    """Return the ids of popularity ranks, so that neighbouring ranks are scattered over the table.

    A rank is multiplied by a number near ``rows`` ÷ golden ratio, modulo ``rows``. The two have no common factor, so
    the ids are a permutation of ``0 … rows − 1``.
    """
    factor = round(rows * 0.618) or 1
    while math.gcd(factor, rows) != 1:
        factor += 1
    return ranks * factor % rows


class Workload:
    """Draws batches for the tables of some options."""

    def __init__(self, options: OpsOptions) -> None:
        self.options = options
        self._drawn = 0
        self._generator = torch.Generator().manual_seed(options.seed)

    @cached_property
    def first_slots(self) -> list[int]:
        """Slot of row 0 of each table in an arena of all tables."""
        return [0, *accumulate(self.options.rows_per_table)][:-1]

    def draw(self, exponent: float, batches: int = 1) -> list[Jagged]:
        """Return ids of the next batches in host memory. Exponent 0 is uniform."""
        o = self.options
        count = batches * o.batch_size * o.pooling
        counters = np.arange(self._drawn, self._drawn + count, dtype=np.uint64)
        self._drawn += len(counters)
        per_table = [
            torch.from_numpy(ZipfLaw(rows, exponent).draw((o.seed, table), counters))
            for table, rows in enumerate(o.rows_per_table)
        ]
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
        first = torch.tensor(self.first_slots, device=ids.values.device)
        return (ids.values.view(len(first), -1).long() + first[:, None]).view(-1)

    def layout(self, ids: Jagged) -> BagLayout:
        o = self.options
        return bag_layout(ids.values, o.rows_per_table, o.batch_size, o.pooling, ids.weights)


class KernelBytes(NamedTuple):
    """Bytes that the kernels must move for a batch."""

    distinct: int  # distinct rows of the batch
    lookup: int
    occurrences: int
    group: int
    update: int
    weight_gradient: int

    @classmethod
    def of(
        cls,
        rows: Rows,
        moments: Mapping[str, Tensor],
        bags: BagLayout,
        groups: Groups,
        vectors: torch.dtype = torch.float32,
    ) -> Self:
        """Count them. ``vectors`` is the dtype of pooled vectors and of their gradients."""
        distinct, runs = (int(n) for n in groups.counts)
        wide = int(locate_rows(rows, groups.rows[:distinct])[0].sum())
        narrow_bytes = rows.dim * rows.narrow.element_size() + rows.exponents.shape[1]
        row_bytes = wide * 4 * rows.dim + (distinct - wide) * narrow_bytes
        moment_bytes = sum(distinct * m[0].numel() * m.element_size() for m in moments.values())
        vector_bytes = bags.batch_size * len(bags.features) * rows.dim * vectors.itemsize
        ids, id_bytes, weight_bytes = bags.total, bags.ids.element_size(), 4 * (bags.weights is not None)
        moved = row_bytes + vector_bytes
        return cls(
            distinct=distinct,
            lookup=ids * (id_bytes + weight_bytes) + moved,
            occurrences=ids * (id_bytes + 16 + 2 * weight_bytes),
            group=16 * ids + 16 * distinct + 8 * runs,
            update=ids * (16 + weight_bytes) + 16 * distinct + 8 * runs + moved + row_bytes + 2 * moment_bytes,
            weight_gradient=ids * (id_bytes + 4) + moved,
        )


def interaction_bytes(
    batch_size: int, vectors: int, dim: int, width: int, dtype: torch.dtype = torch.float32
) -> tuple[int, int]:
    inputs, outputs = (dtype.itemsize * batch_size * n for n in (vectors * dim, width))
    return inputs + outputs, 2 * inputs + outputs
