"""Number the values of a table's columns; values seen in earlier data keep their ids.

A vocabulary is a Parquet file per table, ``vocabulary/C1.parquet``, with the columns ``value`` (integers, text or
bytes) and ``id``: 1, 2, … in order. Id 0 is not in it: it stands for values that are missing or too rare. Files are
append-only: a later one starts with the rows of the earlier.
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
"""Folder of a prepared dataset that has them."""
BATCH_ROWS = 1 << 20
"""Values of a vocabulary that are read at once."""


class Vocabulary:
    """Distinct values ``[V]`` of one table, of a `value_type`; the one at position i has id i + 1."""

    def __init__(self, values: pa.Array) -> None:
        self.values = values

    @staticmethod
    def empty(kind: pa.DataType) -> Vocabulary:
        """Make a vocabulary without values."""
        return Vocabulary(pa.array([], kind))

    @property
    def rows(self) -> int:
        """Rows a table needs: all values and id 0."""
        return len(self.values) + 1

    def lookup(self, values: pa.Array) -> NDArray[np.int64]:
        """Ids ``[n]`` of values ``[n]``; 0 for those that are missing or not in the vocabulary."""
        whole = pa.table({"value": self.values, "id": pa.array(np.arange(1, self.rows))})
        return _lookup(iter(whole.to_batches()), values.cast(self.values.type))


def value_type(kind: pa.DataType) -> pa.DataType:
    """Type in which values of a column are counted and stored: int64, uint64, large_string or large_binary."""
    kind = kind.value_type if arrow.is_list(kind) else kind
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pa.large_binary()
    if arrow.is_text(kind):
        return pa.large_string()
    return pa.uint64() if pa.types.is_uint64(kind) else pa.int64()


def vocabulary_file(directory: str | Path, table: str) -> Path:
    """Where the vocabulary of a table is."""
    return Path(directory) / f"{quote(table, safe=' ')}.parquet"


def write_vocabulary(path: Path, vocabulary: Vocabulary) -> None:
    """Write a vocabulary; the file appears whole or not at all."""
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
    """Read a vocabulary, and check it."""
    _check_exists(path)
    try:
        stored = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: it cannot be read as Parquet ({error}); copy the file again") from None
    if stored.column_names != ["value", "id"]:
        raise DataError(f"{path} has columns {', '.join(stored.column_names)}, a vocabulary has value and id")
    values = stored["value"].combine_chunks()
    kind = value_type(values.type)
    if arrow.is_list(values.type) or not (arrow.is_text(values.type) or arrow.is_whole(values.type)):
        raise DataError(f"{path} has values of type {values.type}; a vocabulary has integers, text or bytes")
    if not stored["id"].combine_chunks().equals(pa.array(np.arange(1, len(stored) + 1))):
        raise DataError(f"{path} is damaged: ids must be 1, 2, … in order, as int64; copy the file again")
    if values.null_count:
        raise DataError(f"{path} is damaged: {values.null_count:,} values are missing; copy the file again")
    if len(pc.unique(values)) != len(values):
        raise DataError(f"{path} is damaged: a value occurs twice, so it would have two ids; copy the file again")
    return Vocabulary(values.cast(kind))


def lookup_in_file(path: Path, values: pa.Array) -> NDArray[np.int64]:
    """Ids ``[n]`` of values ``[n]`` as `Vocabulary.lookup` finds them; memory does not grow with the vocabulary."""
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


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path} does not exist; give the `vocabulary` directory of a prepared dataset")
