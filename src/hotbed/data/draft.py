# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Guess what the columns of a Parquet dataset are: `draft_schema`."""

# pyarrow ships no types.

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import fs

from hotbed.data import arrow
from hotbed.data.columns import Scaling, SparseColumn
from hotbed.data.parquet import RowGroup, find_parquet
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError, did_you_mean

LABEL_NAMES = ("label", "labels", "click", "clicks", "clicked", "is_click", "is_clicked", "target", "conversion", "y")
WEIGHT_NAMES = ("weight", "weights", "sample_weight")
_SAMPLE_ROWS = 200_000
_SMALLEST_TABLE = 64
_LARGEST = 1e307  # differences of such numbers are finite


def draft_schema(path: str | Path, *, label: str | None = None, filesystem: fs.FileSystem | None = None) -> Schema:
    """Propose a schema from column names, types and up to about 200,000 sampled rows.

    The label is a column of 0 and 1 with a usual name (label, click, target, …); floats are numericals, scaled by their
    median and quartiles (see `Scaling`); integers, booleans, strings and lists of these are sparse. Rows of a table are
    4 × the estimated number of distinct values, rounded up to a power of 2, so that about a fifth of the values share a
    row with another when hashed. Columns of other types (times, structs) are left out. Where there is a train split,
    only that is sampled.

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
        If there is no such path, no label column is found, two columns have one name, or no column can be sparse.
    """
    files = find_parquet(path, filesystem)
    if "" not in files and "train" not in files:
        raise DataError(f"{path} has no train split, only {', '.join(files)}; add one, or give one of these by itself")
    groups = [g for f in files.get("train", files.get("", [])) for g in f.row_groups()]
    if not groups:
        raise DataError(f"{path} has no rows")
    twice = [name for name, count in Counter(groups[0].file.schema.names).items() if count > 1]
    if twice:
        raise DataError(f"{path} has several columns named '{twice[0]}'; rename all but one")
    sample, total = _sample(groups), sum(g.samples for g in groups)
    names: list[str] = sample.column_names
    if label is not None and label not in names:
        raise DataError(f"{path} has no column '{label}'; it has {', '.join(names)}{did_you_mean(label, names)}")
    named = [n for n in names if n.lower() in LABEL_NAMES and arrow.is_number(sample[n].type)]
    # Of a column named so whose values are no labels the check of labels says which value is none.
    labels = [label] if label else [n for n in named if _is_binary(sample[n])] or named[:1]
    if not labels:
        raise DataError(
            f"{path} has no column of numbers named like a label ({', '.join(LABEL_NAMES)}); it has "
            f"{', '.join(names)}. Name one with --label NAME (label=… in Python)"
        )
    weight = next((n for n in names if n.lower() in WEIGHT_NAMES and arrow.is_number(sample[n].type)), None)
    inputs = [n for n in names if n and n not in labels and n != weight]
    dense = tuple(n for n in inputs if arrow.is_number(sample[n].type) and not arrow.is_whole(sample[n].type))
    sparse = [column for n in inputs if (column := _sparse(n, sample[n], total)) is not None]
    if not sparse:
        raise DataError(f"{path} has no column of integers, strings or lists of them, so there is nothing to embed")
    try:
        scaling = tuple(_scaling(n, sample[n]) for n in dense)
        return Schema(labels=tuple(labels), weight=weight, dense=dense, sparse=tuple(sparse), scaling=scaling)
    except SpecError as error:
        raise DataError(f"{path}: {error}") from None


def _sample(groups: list[RowGroup]) -> pa.Table:
    """Rows spread over row groups that are spread over the data."""
    per_group = max(1, sum(g.samples for g in groups) // len(groups))
    count = max(1, min(len(groups), _SAMPLE_ROWS // per_group))
    picked = [groups[int(i)] for i in np.linspace(0, len(groups) - 1, count)]
    names = groups[0].file.schema.names
    parts = [_spread(g.read(names), max(1, _SAMPLE_ROWS // count)) for g in picked]
    return pa.concat_tables(parts, promote_options="permissive")


def _spread(table: pa.Table, rows: int) -> pa.Table:
    return table.take(np.linspace(0, len(table) - 1, rows).round().astype(np.int64)) if len(table) > rows else table


def _scaling(name: str, column: pa.ChunkedArray) -> Scaling:
    """By the median and the quartiles, as many columns have heavy tails: a few values do not change these."""
    values = arrow.wide_numbers(column)
    values = values[np.isfinite(values)].clip(-_LARGEST, _LARGEST)
    if not len(values):
        return Scaling(name=name)
    first, lower, median, upper, last = np.quantile(values, (0.01, 0.25, 0.5, 0.75, 0.99))
    # Of a normal distribution quartiles are 1.35 and these percentiles 4.65 standard deviations apart. Where they are
    # much farther apart, they count, too; where most values are equal, they have to do, or the extremes.
    scale = max((upper - lower) / 1.35, (last - first) / 46.5)
    if upper == lower:
        scale = (last - first or np.ptp(values)) / 4.65
    if not scale:
        return Scaling(name=name, center=float(median))
    digits = 2 - math.floor(math.log10(scale))  # three digits of the scale, and the center as exactly
    return Scaling(name=name, center=round(float(median), digits), scale=round(float(scale), digits))


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
