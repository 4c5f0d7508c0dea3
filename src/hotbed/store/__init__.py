"""Keep rows and moments: one contract (`RowStore`), several stores, one place where tiers are chosen (`Storage`)."""

from hotbed.specs import Tier
from hotbed.store.base import Extent, RowStore, Span, Values
from hotbed.store.dense import MOMENT, DenseStore
from hotbed.store.lazy_store import LazyStore
from hotbed.store.picked import PickedArray, PickedRows
from hotbed.store.records import Traffic
from hotbed.store.rising import RisingSlots, SlotRange
from hotbed.store.tiers import Storage

__all__ = [
    "MOMENT",
    "DenseStore",
    "Extent",
    "LazyStore",
    "PickedArray",
    "PickedRows",
    "RisingSlots",
    "RowStore",
    "SlotRange",
    "Span",
    "Storage",
    "Tier",
    "Traffic",
    "Values",
]
