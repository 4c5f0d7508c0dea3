"""Where rows and moments live: one contract (`RowStore`), one shared test suite, several implementations."""

from hotbed.store.base import Extent, RowStore, Span, Tier
from hotbed.store.dense import MOMENT, DenseStore
from hotbed.store.existing import ExistingRows
from hotbed.store.lazy import LazyStore
from hotbed.store.records import Traffic
from hotbed.store.storage import Storage

__all__ = [
    "MOMENT",
    "DenseStore",
    "ExistingRows",
    "Extent",
    "LazyStore",
    "RowStore",
    "Span",
    "Storage",
    "Tier",
    "Traffic",
]
