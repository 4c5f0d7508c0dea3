"""Where rows and moments live: one contract (`RowStore`), one shared test suite, several implementations."""

from hotbed.store.base import Extent, RowStore, Span
from hotbed.store.dense import MOMENT, DenseStore

__all__ = ["MOMENT", "DenseStore", "Extent", "RowStore", "Span"]
