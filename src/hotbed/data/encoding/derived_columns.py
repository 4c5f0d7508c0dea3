"""Compute the derived columns of some rows: `Columns` has stored and derived ones by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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
"""Most ids that a cross of lists may have for a row."""


class Hashed(NamedTuple):
    """Hashes of ids ``[N]``, which are missing, and the number of ids per row ``[n]``, or None for one each."""

    hashes: Hashes
    missing: arrow.Array
    lengths: arrow.Array | None


def not_measured(feature: str) -> str:
    """Say that the boundaries of a bucket are not known, and what to do."""
    return (
        f"the quantiles of feature '{feature}' are not measured; call source.measure() before samples are read, or "
        "load a checkpoint"
    )


@dataclass
class Columns:
    """The columns of some rows; derived ones are computed when they are asked for, once."""

    stored: pa.Table
    derived: Mapping[str, Derived]  # by name
    tables: Mapping[str, LookupTable]  # by `Lookup` feature
    boundaries: Mapping[str, Sequence[float]]  # measured ones, by bucket
    lists: Collection[str]  # stored columns that have lists, even if all of these rows are null
    place: RowLocation  # of the rows

    def __post_init__(self) -> None:
        self._made: dict[str, pa.ChunkedArray] = {}

    def __getitem__(self, name: str) -> pa.ChunkedArray:
        """A column that is stored, a bucket's intervals from 1 on, or a table's values."""
        derived = self.derived.get(name)
        if derived is None:
            found = self.stored[name]
            is_empty = name in self.lists and pa.types.is_null(found.type)
            return found.cast(pa.list_(pa.int64())) if is_empty else found
        if name not in self._made:
            if isinstance(derived, Cross):
                raise TypeError(f"the cross '{name}' has hashes and no values")
            array = self._bucket(derived) if isinstance(derived, Bucket) else self._lookup(derived)
            self._made[name] = pa.chunked_array([array])
        return self._made[name]

    def bags(self, column: SparseColumn, ids: arrow.Ids) -> tuple[arrow.Array, arrow.Array | None]:
        """Rows ``[N]`` of the table, and for a ragged column the ids per row ``[n]``, see `arrow.check_ids`."""
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
                arrow.refuse_lengths(found.lengths, column, self.place)
            return rows, found.lengths if column.ids is None else None
        how = ids if derived is None else "hash"
        values, lengths = arrow.check_ids(self[column.name].combine_chunks(), column, how, self.place)
        return arrow.ids_to_rows(values, column, how), lengths if column.ids is None else None

    def numbers(self, name: str) -> arrow.Array:
        """A column of numbers ``[n]`` as float64, with NaN for null."""
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
            found = self._paired(cross, found, self._hashed(name))
        return found

    def _hashed(self, name: str) -> Hashed:
        values, lengths = self._hashable(name)
        return Hashed(arrow.hash_values(values), values.is_null().to_numpy(zero_copy_only=False), lengths)

    def _hashable(self, name: str) -> tuple[pa.Array, arrow.Array | None]:
        """Values ``[N]`` of a column that `arrow.hash_values` takes, and of lists their lengths ``[n]``."""
        values = self[name].combine_chunks()
        if not arrow.is_list(values.type):
            return arrow.to_hashable(values, name, self.place), None
        lengths = arrow.list_lengths(values)
        return arrow.to_hashable(values.flatten(), name, self.place.of_lists(lengths)), lengths

    def _paired(self, cross: Cross, left: Hashed, right: Hashed) -> Hashed:
        """Each id of a row on the left with each on the right, those of the first left one first."""
        lengths, at_left, at_right = None, slice(None), slice(None)
        if left.lengths is not None or right.lengths is not None:
            n = len(self.stored)
            of_left, of_right = (np.ones(n, np.int64) if of.lengths is None else of.lengths for of in (left, right))
            lengths = of_left * of_right
            fix = f"at most {MOST_PAIRS:,} pairs are crossed: shorten the lists of this row"
            self.place.refuse(cross.name, "pairs", lengths > MOST_PAIRS, lengths, "{:,} pairs of a cross", fix)
            row = np.repeat(np.arange(n), lengths)
            pair = np.arange(len(row)) - (np.cumsum(lengths) - lengths)[row]
            at_left = (np.cumsum(of_left) - of_left)[row] + pair // np.maximum(of_right[row], 1)
            at_right = (np.cumsum(of_right) - of_right)[row] + pair % np.maximum(of_right[row], 1)
        hashes = mix(left.hashes[at_left] ^ right.hashes[at_right])
        return Hashed(hashes, left.missing[at_left] | right.missing[at_right], lengths)


def check_derived_types(
    schema: Schema, fields: pa.Schema, tables: Mapping[str, LookupTable], what: str, lists: Collection[str] = ()
) -> None:
    """Raise unless derived columns can be made of stored ones of these types."""
    plain = {field.name: arrow.plain_type(field.type) for field in fields}
    types = {name: pa.list_(t) if pa.types.is_null(t) and name in lists else t for name, t in plain.items()}
    columns = {c.name: c for c in schema.sparse}
    for d in schema.derived:
        if d.name in fields.names:
            raise DataError(
                f"{what} has a column '{d.name}', which is also the name of a feature of the schema; rename the feature"
            )
        inputs = [types[name] for name in d.inputs]
        made, is_list, problems = pa.uint64(), any(map(arrow.is_list, inputs)), list[str]()
        for name, t in zip(d.inputs, inputs, strict=True):
            if isinstance(d, Bucket) and not (arrow.is_number(t) or pa.types.is_null(t)):
                problems.append(f"column '{name}' is {t}, and buckets are of numbers")
            if not isinstance(d, Bucket) and not _is_id(t):
                problems.append(f"column '{name}' is {t}, must be integers, text or lists of them")
        if isinstance(d, Lookup) and not problems:
            table, kind = tables[d.name], arrow.type_of_ids(inputs[0])
            if kind and len(table.keys) and kind != table.kind_of_keys:
                raise DataError(
                    f"feature '{d.name}': column '{d.column}' of {what} is {kind}, and the keys of {d.file} are "
                    f"{table.kind_of_keys}, so none is found; write one of them as the other is"
                )
            made = table.values.type
            if is_list and arrow.is_list(made):
                problems.append("lists of keys with lists of values are not supported; flatten one")
            if d.name in schema.dense and (is_list or not arrow.is_number(made)):
                found = "one for each key of a list" if is_list else str(made)
                problems.append(f"values are {found}, and a number is one; give `rows` for ids")
            if d.name in columns and not _is_id(made):
                problems.append(f"values are {made}, must be integers or text to be ids")
        is_list = is_list or arrow.is_list(made)
        types[d.name] = pa.large_list(made) if is_list and not arrow.is_list(made) else made
        column = columns.get(d.name)
        if column is not None and column.rows < 2:
            problems.append(f"rows is {column.rows}, must be at least 2 (row 0 is for missing values)")
        if column is not None and not is_list and column.ids != 1:
            problems.append(f"{arrow.one_value(column.ids)}. Leave ids out")
        if problems:
            raise SpecError(f"feature '{d.name}': {problems[0]}")


def _is_id(t: pa.DataType) -> bool:
    value = t.value_type if arrow.is_list(t) else t
    is_float = pa.types.is_floating(t)  # whole numbers, which is seen when they are read
    return arrow.is_whole(value) or arrow.is_text(value) or pa.types.is_null(value) or is_float
