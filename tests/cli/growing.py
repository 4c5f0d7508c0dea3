"""A model with a table that grows, for days of training."""

from collections.abc import Sequence

from hotbed.nn import DLRM
from hotbed.specs import DYNAMIC_WAYS, Dynamic, Feature, Table

ROOM = DYNAMIC_WAYS
"""Rows of users that there is room for."""


class Growing(DLRM):
    """Gives rows to users when they are seen, and takes them back for others."""

    def __init__(
        self,
        tables: Sequence[Table],
        features: Sequence[Feature],
        dense_features: int = 1,
        *,
        bottom: Sequence[int] = (8, 4),
        top: Sequence[int] = (8, 1),
        seed: int = 0,
    ) -> None:
        user = Table("user", "dynamic", 4, init_bound=0.1, dynamic=Dynamic(capacity_bytes=ROOM * 16))
        tables = [user if table.name == "user" else table for table in tables]
        super().__init__(tables, features, dense_features, bottom=bottom, top=top, seed=seed)
