"""Keep rows and moments: one contract (`RowStore`), several stores, one place where tiers are chosen (`Storage`)."""

from hotbed.specs import Tier
from hotbed.store.base import Extent, RowStore, Span, Traffic, Values
from hotbed.store.dense import MOMENT, DenseStore
from hotbed.store.lazy import ExistingArray, ExistingRows, LazyStore
from hotbed.store.tiers import Storage

__all__ = [
    "MOMENT",
    "DenseStore",
    "ExistingArray",
    "ExistingRows",
    "Extent",
    "LazyStore",
    "RowStore",
    "Span",
    "Storage",
    "Tier",
    "Traffic",
    "Values",
]
