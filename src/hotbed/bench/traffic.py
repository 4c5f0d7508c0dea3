"""How many bytes each operation must move: what an ideal kernel with an endless cache would, each byte counted once.

==================== ================================================================================================
initial_values       the rectangle written
lookup               ids, weights; each distinct row once; pooled vectors written
occurrences          ids, weights; slots, bags and factors written
group                slots; order, distinct slots, starts of runs and of groups written
update               order, bags, factors; distinct slots, starts of runs and of groups; a gradient per bag; each
                     distinct row and its moments, read and written
weight_gradient      ids; each distinct row once; a gradient per bag; gradients of the weights written
interaction          vectors; result written
interaction_backward vectors, gradient of the result; gradient of the vectors written
==================== ================================================================================================

Ids take 4 or 8 bytes; slots, bags, order and starts 8; weights, factors and moments 4; pooled vectors and their
gradients what their dtype takes. A row takes what it is stored in, scales included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hotbed.ops import BagLayout, Groups, Rows
from hotbed.ops.rows import places


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What a batch touches.

    Attributes
    ----------
    ids, distinct, runs, bags
        Number of ids ``N``, of distinct rows ``U``, of runs, of bags.
    id_bytes
        Bytes of an id.
    row_bytes, moment_bytes, vector_bytes
        Bytes of all distinct rows, of their moments, and of all pooled vectors.
    weighted
        Whether ids have weights.
    """

    ids: int
    distinct: int
    runs: int
    bags: int
    id_bytes: int
    row_bytes: int
    moment_bytes: int
    vector_bytes: int
    weighted: bool

    @classmethod
    def of(
        cls,
        rows: Rows,
        moments: Mapping[str, Tensor],
        bags: BagLayout,
        groups: Groups,
        vectors: torch.dtype = torch.float32,
    ) -> Self:
        """Count; ``vectors`` is the dtype of pooled vectors and of their gradients."""
        distinct, runs = (int(n) for n in groups.counts)
        wide = int(places(rows, groups.rows[:distinct])[0].sum())
        narrow_bytes = rows.dim * rows.narrow.element_size() + rows.exponents.shape[1]
        return cls(
            ids=bags.total,
            distinct=distinct,
            runs=runs,
            bags=bags.batch_size * len(bags.features),
            id_bytes=bags.ids.element_size(),
            row_bytes=wide * 4 * rows.dim + (distinct - wide) * narrow_bytes,
            moment_bytes=sum(distinct * m[0].numel() * m.element_size() for m in moments.values()),
            vector_bytes=bags.batch_size * len(bags.features) * rows.dim * vectors.itemsize,
            weighted=bags.weights is not None,
        )

    @property
    def _weight_bytes(self) -> int:
        return 4 * self.weighted

    @property
    def lookup(self) -> int:
        """Bytes of a lookup."""
        return self.ids * (self.id_bytes + self._weight_bytes) + self.row_bytes + self.vector_bytes

    @property
    def occurrences(self) -> int:
        """Bytes of listing occurrences."""
        return self.ids * (self.id_bytes + 16 + 2 * self._weight_bytes)

    @property
    def group(self) -> int:
        """Bytes of grouping."""
        return 16 * self.ids + 16 * self.distinct + 8 * self.runs

    @property
    def update(self) -> int:
        """Bytes of an update."""
        index = self.ids * (16 + self._weight_bytes) + 16 * self.distinct + 8 * self.runs
        return index + self.vector_bytes + 2 * (self.row_bytes + self.moment_bytes)

    @property
    def weight_gradient(self) -> int:
        """Bytes of the gradient of the weights."""
        return self.ids * (self.id_bytes + 4) + self.row_bytes + self.vector_bytes


def interaction_bytes(batch_size: int, vectors: int, dim: int, width: int) -> tuple[int, int]:
    """Bytes of the dot interaction and of its backward; float32."""
    inputs, outputs = 4 * batch_size * vectors * dim, 4 * batch_size * width
    return inputs + outputs, 2 * inputs + outputs
