"""Turn stored samples into batches: schemas, sources, preparation, and the loader.

Modules that need pyarrow or pydantic, which take a quarter of a second to import, are imported on first use.
"""

from typing import TYPE_CHECKING

from hotbed.data.columns import Label, Numerical, Scaling, SparseColumn
from hotbed.data.loader import Loader
from hotbed.data.npy import NpySource
from hotbed.data.readers import open_readers
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.lazy import lazy

if TYPE_CHECKING:
    from hotbed.data.draft import draft_schema
    from hotbed.data.encode import Encoder
    from hotbed.data.pack import read_hot_order
    from hotbed.data.parquet import ParquetSource
    from hotbed.data.popularity import measure_popularity
    from hotbed.data.split_binary import SplitBinarySource, SplitBinaryWriter
    from hotbed.data.synthetic import PlantedLog, write_synthetic_log
    from hotbed.data.zipf_source import ZipfSource

__all__ = [
    "Encoder",
    "Label",
    "Loader",
    "NpySource",
    "Numerical",
    "ParquetSource",
    "PlantedLog",
    "Scaling",
    "Schema",
    "Source",
    "SparseColumn",
    "SplitBinarySource",
    "SplitBinaryWriter",
    "ZipfSource",
    "draft_schema",
    "measure_popularity",
    "open_readers",
    "read_hot_order",
    "write_synthetic_log",
]

__getattr__, __dir__ = lazy(
    __name__,
    {
        "Encoder": "hotbed.data.encode",
        "ParquetSource": "hotbed.data.parquet",
        "PlantedLog": "hotbed.data.synthetic",
        "SplitBinarySource": "hotbed.data.split_binary",
        "SplitBinaryWriter": "hotbed.data.split_binary",
        "ZipfSource": "hotbed.data.zipf_source",
        "draft_schema": "hotbed.data.draft",
        "measure_popularity": "hotbed.data.popularity",
        "read_hot_order": "hotbed.data.pack",
        "write_synthetic_log": "hotbed.data.synthetic",
    },
)
