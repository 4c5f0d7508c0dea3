"""Map the values of a table to ids with a vocabulary. Values of earlier data keep their ids.

A vocabulary is a Parquet file per table, ``vocabulary/C1.parquet``, with the columns ``value`` (integers, text or
bytes) and ``id`` (1, 2, … in order). Id 0 represents missing and rare values, and is not stored. Vocabularies are
append-only: a later file starts with the rows of the earlier one.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from hotbed.data import arrow_columns as arrow
from hotbed.errors import DataError
from hotbed.files import new_file

VOCABULARY = "vocabulary"
"""Folder of the vocabularies in a prepared dataset."""
BATCH_ROWS = 1 << 20
"""Number of values in a row group of a vocabulary, and in a batch that is read at a time."""


class Vocabulary:
    """Distinct values ``[V]`` of one table. The value at position i has id i + 1. Types are as in `value_type`."""

    def __init__(self, values: pa.Array) -> None:
        self.values = values

    @staticmethod
    def empty(kind: pa.DataType) -> Vocabulary:
        """Return a vocabulary for values of this type that has no values yet."""
        return Vocabulary(pa.array([], kind))

    @property
    def rows(self) -> int:
        """Number of rows of the table: one row per value, and row 0."""
        return len(self.values) + 1

    def lookup(self, values: pa.Array) -> NDArray[np.int64]:
        """Return the ids ``[n]`` of values ``[n]``. Missing and unknown values have id 0."""
        whole = pa.table({"value": self.values, "id": pa.array(np.arange(1, self.rows))})
        return _lookup(iter(whole.to_batches()), values.cast(self.values.type))


def value_type(t: pa.DataType) -> pa.DataType:
    """Return the type in which values of a column of type ``t`` are counted and stored.

    It is int64, uint64, large_string or large_binary.
    """
    t = arrow.value_type_of(t)
    t = t.value_type if pa.types.is_dictionary(t) else t
    if pa.types.is_binary(t) or pa.types.is_large_binary(t):
        return pa.large_binary()
    if arrow.is_text(t):
        return pa.large_string()
    return pa.uint64() if pa.types.is_uint64(t) else pa.int64()


def vocabulary_file(directory: str | Path, table: str) -> Path:
    """Return the path of a table's vocabulary."""
    return Path(directory) / f"{quote(table, safe=' ')}.parquet"


def write_vocabulary(path: Path, vocabulary: Vocabulary) -> None:
    """Write a vocabulary atomically."""
    table = pa.table({"value": vocabulary.values, "id": pa.array(np.arange(1, vocabulary.rows))})
    with new_file(path) as file:
        pq.write_table(
            table,
            file,
            row_group_size=BATCH_ROWS,
            compression="zstd",
            use_dictionary=False,
            column_encoding={"id": "DELTA_BINARY_PACKED"},
        )


def read_vocabulary(path: Path) -> Vocabulary:
    """Read and check a vocabulary."""
    if not path.is_file():
        raise DataError(f"{path} does not exist, expected a vocabulary. Pass the `vocabulary` folder of a dataset")
    try:
        stored = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {error}. Copy the file again") from None
    if stored.column_names != ["value", "id"]:
        raise DataError(f"{path}: got columns {', '.join(stored.column_names)}, expected value and id")
    values = stored["value"].combine_chunks()
    if arrow.is_list(values.type) or not (arrow.is_text(values.type) or arrow.is_whole(values.type)):
        raise DataError(f"{path}: got values of type {values.type}, expected integers, text or bytes")
    problem = ""
    if not stored["id"].combine_chunks().equals(pa.array(np.arange(1, len(stored) + 1))):
        problem = "ids are not 1, 2, … in order, as int64"
    elif values.null_count:
        problem = f"got {values.null_count:,} missing values, expected none"
    elif len(pc.unique(values)) != len(values):
        problem = "got a duplicate value, expected unique values"
    if problem:
        raise DataError(f"{path} is damaged: {problem}. Copy the file again")
    return Vocabulary(values.cast(value_type(values.type)))


def lookup_in_file(path: Path, values: pa.Array) -> NDArray[np.int64]:
    """Return ids like `Vocabulary.lookup`, in memory that does not depend on the size of the vocabulary."""
    with pq.ParquetFile(path) as stored:
        return _lookup(stored.iter_batches(BATCH_ROWS, use_threads=False), values)


def _lookup(batches: Iterator[pa.RecordBatch], values: pa.Array) -> NDArray[np.int64]:
    encoded = values.dictionary_encode()
    ids_of_distinct: NDArray[np.int64] = np.zeros(len(encoded.dictionary) + 1, dtype=np.int64)  # the last: missing
    for batch in batches:
        at = pc.index_in(batch["value"], value_set=encoded.dictionary)
        found = at.is_valid()
        ids_of_distinct[at.filter(found).to_numpy()] = batch["id"].filter(found).to_numpy()
    indices: NDArray[Any] = encoded.indices.fill_null(len(encoded.dictionary)).to_numpy(zero_copy_only=False)
    return ids_of_distinct[indices]
