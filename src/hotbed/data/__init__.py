"""Convert stored samples to batches: schemas, sources, preparation and the loader.

`source` is the contract of data sources. `loader` shuffles and resumes. `readers` and `executors` read in threads,
processes, Dask or Ray. `schema`, `columns` and `derived_features` describe columns.

- `hotbed.data.files`: files of rows (Parquet, CSV, Criteo logs) and their splits
- `hotbed.data.encoding`: rows to batches, for training, predictions and serving
- `hotbed.data.formats`: sources for training
- `hotbed.data.preparation`: raw values to row numbers, with vocabularies
- `hotbed.data.drafting`: guessed roles of columns, for ``hotbed init``
- `hotbed.data.skew`: popularity of rows, hot and cold rows

Modules that need pyarrow or pydantic are imported on first use, because these imports take a quarter of a second.
"""

from typing import TYPE_CHECKING

from hotbed.data.columns import Label, Numerical, Scaling, SparseColumn
from hotbed.data.formats.npy import NpySource
from hotbed.data.loader import Loader
from hotbed.data.readers import open_readers
from hotbed.data.schema import Schema
from hotbed.data.source import Source
from hotbed.lazy import lazy

if TYPE_CHECKING:
    from hotbed.data.drafting.draft import draft_schema
    from hotbed.data.encoding.encoder import Encoder
    from hotbed.data.formats.parquet import ParquetSource
    from hotbed.data.formats.split_binary import SplitBinarySource, SplitBinaryWriter
    from hotbed.data.formats.synthetic import PlantedLog, write_synthetic_log
    from hotbed.data.formats.zipf_source import ZipfSource
    from hotbed.data.skew.hot_cold import read_hot_order
    from hotbed.data.skew.row_popularity import measure_popularity

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
        "Encoder": "hotbed.data.encoding.encoder",
        "ParquetSource": "hotbed.data.formats.parquet",
        "PlantedLog": "hotbed.data.formats.synthetic",
        "SplitBinarySource": "hotbed.data.formats.split_binary",
        "SplitBinaryWriter": "hotbed.data.formats.split_binary",
        "ZipfSource": "hotbed.data.formats.zipf_source",
        "draft_schema": "hotbed.data.drafting.draft",
        "measure_popularity": "hotbed.data.skew.row_popularity",
        "read_hot_order": "hotbed.data.skew.hot_cold",
        "write_synthetic_log": "hotbed.data.formats.synthetic",
    },
)
