"""From stored samples to batches: schemas, sources, preparation, and the loader."""

from hotbed.data.draft import draft_schema
from hotbed.data.loader import Loader
from hotbed.data.parquet import ParquetSource
from hotbed.data.prepare import PrepareReport, prepare
from hotbed.data.schema import Schema, SparseColumn
from hotbed.data.source import Source
from hotbed.data.split_binary import SplitBinarySource, SplitBinaryWriter
from hotbed.data.synthetic import PlantedLog, write_synthetic_log

__all__ = [
    "Loader",
    "ParquetSource",
    "PlantedLog",
    "PrepareReport",
    "Schema",
    "Source",
    "SparseColumn",
    "SplitBinarySource",
    "SplitBinaryWriter",
    "draft_schema",
    "prepare",
    "write_synthetic_log",
]
