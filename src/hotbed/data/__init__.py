"""From stored samples to batches: schemas, sources, preparation, and the loader.

What needs pyarrow, which takes a quarter of a second to import, is imported when it is first used.
"""

from typing import TYPE_CHECKING

from hotbed.data.loader import Loader
from hotbed.data.schema import Schema, SparseColumn
from hotbed.data.source import Source
from hotbed.data.split_binary import SplitBinarySource, SplitBinaryWriter
from hotbed.lazy import lazy

if TYPE_CHECKING:
    from hotbed.data.draft import draft_schema
    from hotbed.data.parquet import ParquetSource
    from hotbed.data.synthetic import PlantedLog, write_synthetic_log

__all__ = [
    "Loader",
    "ParquetSource",
    "PlantedLog",
    "Schema",
    "Source",
    "SparseColumn",
    "SplitBinarySource",
    "SplitBinaryWriter",
    "draft_schema",
    "write_synthetic_log",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "ParquetSource": "hotbed.data.parquet",
        "PlantedLog": "hotbed.data.synthetic",
        "draft_schema": "hotbed.data.draft",
        "write_synthetic_log": "hotbed.data.synthetic",
    },
)
