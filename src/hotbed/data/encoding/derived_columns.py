"""Compute the derived columns of rows: `Columns` returns stored and derived columns by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from hotbed.data import arrow_columns as arrow
from hotbed.data.columns import SparseColumn
from hotbed.data.derived_features import Bucket, Cross, Derived, Lookup
from hotbed.data.encoding.lookup_table import LookupTable
from hotbed.data.hashing import Hashes, hashes_to_rows, mix
from hotbed.data.row_location import RowLocation
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError

MOST_PAIRS = 4_096
"""Limit of the number of ids that a cross of lists may have in one row of data."""


class Hashed(NamedTuple):
    """The hashed ids of some rows."""

    hashes: Hashes  # [N]
    missing: arrow.Array  # mask of missing ids [N]
    lengths: arrow.Array | None  # number of ids per row [n], or None if each row has one id


def not_measured(feature: str) -> str:
    """Return the error message about a bucket without measured boundaries."""
    return f"the quantiles of feature '{feature}' are not measured. Call source.measure() first, or load a checkpoint"


@dataclass
class Columns:
    """The columns of some rows. Derived columns are computed on first use."""

    stored: pa.Table
    derived: Mapping[str, Derived]  # by name
    tables: Mapping[str, LookupTable]  # by name of a `Lookup` feature
    boundaries: Mapping[str, Sequence[float]]  # measured boundaries by name of a `Bucket`
    lists: Collection[str]  # stored columns that have lists, even if all lists of these rows are null
    location: RowLocation  # of the rows
    _made: dict[str, pa.ChunkedArray] = field(default_factory=dict[str, pa.ChunkedArray], init=False)

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        """Return a stored column, the interval numbers (1, 2, …) of a bucket, or the values of a lookup."""
        derived = self.derived.get(name)
        if derived is None:
            found = self.stored[name]
            is_empty = name in self.lists and pa.types.is_null(found.type)
            return found.cast(pa.list_(pa.int64())) if is_empty else found
        if name not in self._made:
            if isinstance(derived, Cross):
                raise TypeError(f"cross '{name}' has table rows, but no values. Call Columns.bags() to get the rows")
            array = self._bucket(derived) if isinstance(derived, Bucket) else self._lookup(derived)
            self._made[name] = pa.chunked_array([array])
        return self._made[name]

    def bags(self, column: SparseColumn, ids: arrow.Ids) -> tuple[arrow.Array, arrow.Array | None]:
        """Return the table rows ``[N]`` of a column's ids, and the number of ids per sample ``[n]`` if it varies."""
        derived = self.derived.get(column.name)
        if isinstance(derived, Bucket):
            values = self[column.name].fill_null(0).combine_chunks()
            return values.to_numpy(zero_copy_only=False).astype(np.int32), None
        if isinstance(derived, Cross):
            found = self._cross(derived)
            rows = hashes_to_rows(found.hashes, column.rows)
            rows[found.missing] = 0
            rows = arrow.narrow_rows(rows, column)
            if found.lengths is not None:
                arrow.refuse_lengths(found.lengths, column, self.location)
            return rows, found.lengths if column.ids is None else None
        ids = ids if derived is None else "hash"
        values, lengths = arrow.check_ids(self[column.name].combine_chunks(), column, ids, self.location)
        return arrow.ids_to_rows(values, column, ids), lengths if column.ids is None else None

    def numbers(self, name: str) -> arrow.Array:
        """Return a column of numbers ``[n]`` as float64. Null becomes NaN."""
        return arrow.to_float64(self[name])

    def _bucket(self, bucket: Bucket) -> pa.Array:
        boundaries = bucket.boundaries if bucket.boundaries is not None else self.boundaries.get(bucket.name)
        if boundaries is None:
            raise SpecError(not_measured(bucket.name))
        numbers = self.numbers(bucket.column)
        intervals = 1 + np.searchsorted(np.asarray(boundaries, np.float64), numbers, side="right")
        return pa.array(intervals.astype(np.int64), mask=np.isnan(numbers))

    def _lookup(self, lookup: Lookup) -> pa.Array:
        keys = self[lookup.column].combine_chunks()
        values, lengths = self._hashable(lookup.column)
        found = self.tables[lookup.name].find(values)
        return found if lengths is None else arrow.regroup(found, keys)

    def _cross(self, cross: Cross) -> Hashed:
        first = np.full(len(self.stored), len(cross.columns), np.uint64)
        found = Hashed(mix(first), np.zeros(len(first), np.bool_), None)
        for name in cross.columns:
            values, lengths = self._hashable(name)
            missing = values.is_null().to_numpy(zero_copy_only=False)
            found = self._pair(cross, found, Hashed(arrow.hash_values(values), missing, lengths))
        return found

    def _hashable(self, name: str) -> tuple[pa.Array, arrow.Array | None]:
        """Return the values ``[N]`` of a column for `arrow.hash_values`, and the lengths ``[n]`` of its lists."""
        values = self[name].combine_chunks()
        if not arrow.is_list(values.type):
            return arrow.to_hashable(values, name, self.location), None
        lengths = arrow.list_lengths(values)
        return arrow.to_hashable(values.flatten(), name, self.location.of_lists(lengths)), lengths

    def _pair(self, cross: Cross, left: Hashed, right: Hashed) -> Hashed:
        """Combine each id of ``left`` with each id of ``right`` in the same row. The right id varies fastest."""
        lengths, at_left, at_right = None, slice(None), slice(None)
        if left.lengths is not None or right.lengths is not None:
            n = len(self.stored)
            of_left, of_right = (np.ones(n, np.int64) if of.lengths is None else of.lengths for of in (left, right))
            lengths = of_left * of_right
            fix = f"expected at most {MOST_PAIRS:,} pairs per row. Shorten the lists of this row"
            self.location.refuse(cross.name, "pairs", lengths > MOST_PAIRS, lengths, "{:,} pairs of a cross", fix)
            row = np.repeat(np.arange(n), lengths)
            pair = np.arange(len(row)) - (np.cumsum(lengths) - lengths)[row]
            at_left = (np.cumsum(of_left) - of_left)[row] + pair // np.maximum(of_right[row], 1)
            at_right = (np.cumsum(of_right) - of_right)[row] + pair % np.maximum(of_right[row], 1)
        hashes = mix(left.hashes[at_left] ^ right.hashes[at_right])
        return Hashed(hashes, left.missing[at_left] | right.missing[at_right], lengths)


def check_derived_types(
    schema: Schema, fields: pa.Schema, tables: Mapping[str, LookupTable], what: str, lists: Collection[str] = ()
) -> None:
    """Raise an error unless derived columns can be computed from columns of these types. ``what`` names the file."""
    plain = {field.name: arrow.plain_type(field.type) for field in fields}
    types = {name: pa.list_(t) if pa.types.is_null(t) and name in lists else t for name, t in plain.items()}
    columns = {c.name: c for c in schema.sparse}
    for d in schema.derived:
        if d.name in fields.names:
            raise DataError(f"{what}: column '{d.name}' has the name of a feature of the schema. Rename the feature")
        inputs = [types[name] for name in d.inputs]
        made, is_list, problems = pa.uint64(), any(map(arrow.is_list, inputs)), list[str]()
        for name, t in zip(d.inputs, inputs, strict=True):
            if isinstance(d, Bucket) and not (arrow.is_number(t) or pa.types.is_null(t)):
                problems.append(f"column '{name}': got {t}, expected numbers")
            if not isinstance(d, Bucket) and not _is_id(t):
                problems.append(f"column '{name}': got {t}, expected integers, text or lists of them")
        if isinstance(d, Lookup) and not problems:
            table, keys = tables[d.name], arrow.type_of_ids(inputs[0])
            if keys and len(table.keys) and keys != table.type_of_keys:
                raise DataError(
                    f"feature '{d.name}': column '{d.column}' of {what}: got {keys}, expected {table.type_of_keys}, as "
                    f"the keys of {d.file} are. Write the column and the keys with the same type"
                )
            made = table.values.type
            if is_list and arrow.is_list(made):
                problems.append("got lists as keys and lists as values, expected lists in one of these columns only")
            if d.name in schema.dense and (is_list or not arrow.is_number(made)):
                problems.append(f"values: got {'lists' if is_list else made}, expected numbers. Set `rows` for ids")
            if d.name in columns and not _is_id(made):
                problems.append(f"values: got {made}, expected integers or text")
        is_list = is_list or arrow.is_list(made)
        types[d.name] = pa.large_list(made) if is_list and not arrow.is_list(made) else made
        column = columns.get(d.name)
        if column is not None and column.rows < 2:
            problems.append(f"rows: got {column.rows}, expected at least 2 (row 0 is for missing values)")
        if column is not None and not is_list and column.ids != 1:
            problems.append(f"{arrow.one_value(column.ids)}. Remove `ids`")
        if problems:
            raise SpecError(f"feature '{d.name}': {problems[0]}")


def _is_id(t: pa.DataType) -> bool:
    value = arrow.value_type_of(t)
    is_float = pa.types.is_floating(t)  # whole numbers; checked when they are read
    return arrow.is_whole(value) or arrow.is_text(value) or pa.types.is_null(value) or is_float
