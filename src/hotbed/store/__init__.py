"""Where rows and moments live: one contract (`RowStore`), one shared test suite, several implementations."""

from hotbed.store.base import RowStore, Span
from hotbed.store.dense import DenseStore

__all__ = ["DenseStore", "RowStore", "Span"]
