"""Where are a table's rows and moments kept? `RowStore` is the contract, and `Storage` chooses a store by its tier.

`device_store` keeps all rows in the device's or the host's memory. `lazy_store` keeps rows as records of bytes
(`records`, `format`), which layers keep: `row_cache` in memory, `read_ahead`, and `file_records` on disk. `hash_index`
finds a record by its slot. `slot_lists` lists updated slots for checkpoints.
"""

from hotbed.specs import Tier
from hotbed.store.base import Extent, RowStore, Span, Values
from hotbed.store.device_store import MOMENT, DenseStore
from hotbed.store.lazy_store import LazyStore
from hotbed.store.records import Traffic
from hotbed.store.selected_rows import SelectedArray, SelectedRows
from hotbed.store.slot_lists import SlotRange, SortedSlots
from hotbed.store.tiers import Storage

__all__ = [
    "MOMENT",
    "DenseStore",
    "Extent",
    "LazyStore",
    "RowStore",
    "SelectedArray",
    "SelectedRows",
    "SlotRange",
    "SortedSlots",
    "Span",
    "Storage",
    "Tier",
    "Traffic",
    "Values",
]
