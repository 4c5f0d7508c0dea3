"""`draft_schema`: a first guess at what the columns of a Parquet dataset are."""

# pyarrow ships no types.
# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from hotbed.data import arrow
from hotbed.data.parquet_files import RowGroup, find_parquet
from hotbed.data.schema import Schema, SparseColumn
from hotbed.errors import DataError, SpecError, did_you_mean

LABEL_NAMES = ("label", "labels", "click", "clicks", "clicked", "is_click", "is_clicked", "target", "conversion", "y")
WEIGHT_NAMES = ("weight", "weights", "sample_weight")
_SAMPLE_ROWS = 200_000
_SMALLEST_TABLE = 64


def draft_schema(path: str | Path, *, label: str | None = None, filesystem: fs.FileSystem | None = None) -> Schema:
    """Propose a schema from column names, types and up to about 200,000 sampled rows.

    The label is a column of 0 and 1 with a usual name (label, click, target, …); floats are numericals; integers,
    booleans, strings and lists of these are sparse. Rows of a table are 4 × the estimated number of distinct values,
    rounded up to a power of 2, so that about a fifth of the values share a row with another when hashed. Columns of
    other types (times, structs) are left out.

    Parameters
    ----------
    path
        File, folder or URI, as for `ParquetSource`.
    label
        The label column, where its name is not a usual one.
    filesystem
        See `ParquetSource`.

    Raises
    ------
    DataError
        If there is no such path, no label column is found, or no column can be sparse.
    """
    files = [f for of_split in find_parquet(path, filesystem).values() for f in of_split]
    groups = [g for f in files for g in f.row_groups()]
    if not groups:
        raise DataError(f"{path} has no rows")
    sample, total = _sample(groups), sum(g.samples for g in groups)
    names: list[str] = sample.column_names
    if label is not None and label not in names:
        raise DataError(f"{path} has no column '{label}'; it has {', '.join(names)}{did_you_mean(label, names)}")
    labels = [label] if label else [n for n in names if n.lower() in LABEL_NAMES and _is_binary(sample[n])]
    if not labels:
        raise DataError(
            f"{path} has no column of 0 and 1 named like a label ({', '.join(LABEL_NAMES)}); it has "
            f"{', '.join(names)}. Name one with `label`"
        )
    weight = next((n for n in names if n.lower() in WEIGHT_NAMES and arrow.is_number(sample[n].type)), None)
    inputs = [n for n in names if n not in labels and n != weight]
    dense = tuple(n for n in inputs if arrow.is_number(sample[n].type) and not arrow.is_whole(sample[n].type))
    sparse = [column for n in inputs if (column := _sparse(n, sample[n], total)) is not None]
    if not sparse:
        raise DataError(f"{path} has no column of integers, strings or lists of them, so there is nothing to embed")
    try:
        return Schema(labels=tuple(labels), weight=weight, dense=dense, sparse=tuple(sparse))
    except SpecError as error:
        raise DataError(f"{path}: {error}") from None


def _sample(groups: list[RowGroup]) -> pa.Table:
    """Rows of row groups spread over the data."""
    per_group = max(1, sum(g.samples for g in groups) // len(groups))
    count = max(1, min(len(groups), _SAMPLE_ROWS // per_group))
    picked = [groups[int(i)] for i in np.linspace(0, len(groups) - 1, count)]
    names = groups[0].file.schema.names
    parts = [g.read(names).slice(0, max(1, _SAMPLE_ROWS // count)) for g in picked]
    return pa.concat_tables(parts, promote_options="permissive")


def _is_binary(column: pa.ChunkedArray) -> bool:
    if pa.types.is_boolean(column.type):
        return True
    if not arrow.is_number(column.type) or column.null_count:
        return False
    values = arrow.numbers(column)
    return bool(np.isin(values, (0, 1)).all())


def _sparse(name: str, column: pa.ChunkedArray, total: int) -> SparseColumn | None:
    kind = column.type
    value = kind.value_type if arrow.is_list(kind) else kind
    if not (arrow.is_whole(value) or arrow.is_text(value)):
        return None
    ids = None if arrow.is_list(kind) else 1
    if pa.types.is_fixed_size_list(kind) and not column.null_count:
        ids = int(kind.list_size)
    values = pc.list_flatten(column) if arrow.is_list(kind) else column
    if pa.types.is_dictionary(values.type):
        values = pc.cast(values, values.type.value_type)
    distinct = int(pc.count_distinct(values).as_py())
    # From a sample: where every value is new the number grows with the data, where most are repeats it does not.
    growth = (total / max(1, len(column))) ** (distinct / max(1, len(values)))
    rows = max(_SMALLEST_TABLE, 4 * round(distinct * growth))
    return SparseColumn(name=name, rows=1 << (rows - 1).bit_length(), ids=ids)
