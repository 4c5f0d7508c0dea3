"""A model whose tables take any ids and evict what is used least, for recipes that name it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hotbed.nn import DLRM
from hotbed.specs import Dynamic, Feature, Table


class DynamicDLRM(DLRM):
    """`hotbed.nn.DLRM` with room for few rows of every table."""

    def __init__(
        self, tables: Sequence[Table], features: Sequence[Feature], dense_features: int, **options: Any
    ) -> None:
        few = Dynamic(capacity_bytes=128 * 4 * tables[0].dim)
        dynamic = [Table(t.name, rows="dynamic", dim=t.dim, dynamic=few, init_bound=0.1) for t in tables]
        super().__init__(dynamic, features, dense_features, **options)
