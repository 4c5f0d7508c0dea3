"""Find all that data are not what a schema says: columns, types, and every value that training would refuse.

Training stops at the first bad value. Here the same checks run over all rows, and each fault is reported once per
column, with its first place and the number of such values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data import arrow
from hotbed.data.arrow import Ids
from hotbed.data.columns import Numerical, SparseColumn
from hotbed.data.derived import Bucket, Cross, Lookup, stored_inputs
from hotbed.data.encode import raw_numbers, wrong_types
from hotbed.data.labels import read_labels, read_weights, refuse_null
from hotbed.data.place import Place
from hotbed.data.schema import Schema
from hotbed.data.stored_rows import RowsSlice, StoredRows
from hotbed.errors import DataError, did_you_mean


@dataclass
class Fault:
    """Something that is wrong with a column."""

    column: str
    problem: str  # a word or two, equal for all values with the same fault
    message: str  # the first value, its place, the limit and the fix
    values: int = 0  # number of such values; 0 if the whole column is wrong


@dataclass(frozen=True)
class _CountingPlace(Place):
    """A place whose bad values are counted, instead of raising an error at the first."""

    faults: list[Fault] = field(default_factory=list[Fault])

    def refuse(
        self,
        column: str,
        problem: str,
        bad: NDArray[np.bool_],
        values: Any,
        shown: str,
        fix: str | Callable[[object], str],
    ) -> None:
        if bad.any():
            fault = next((f for f in self.faults if (f.column, f.problem) == (column, problem)), None)
            if fault is None:
                message = self.message(column, int(bad.argmax()), values, shown, fix)
                self.faults.append(fault := Fault(column, problem, message))
            fault.values += int(bad.sum())


class SchemaChecks:
    """Checks a dataset by a schema: the columns and types of all files at once, then values, slice by slice."""

    def __init__(self, data: StoredRows, schema: Schema, ids: Ids) -> None:
        self.schema = schema
        self.ids: Ids = ids
        self.faults: list[Fault] = []
        files = dict(data.schemas)
        for what, fields in files.items():
            self._check_columns(what, fields)
        for column in schema.stored[0] if ids == "hash" else ():
            first: dict[str, str] = {}
            for what, fields in files.items():
                if column.name in fields.names and (kind := arrow.kind_of_ids(fields.field(column.name).type)):
                    first.setdefault(kind, what)
            if len(first) > 1:
                of_files = " and ".join(f"{kind} in {what}" for kind, what in first.items())
                self._of_column(
                    column.name,
                    "types differ",
                    f"column '{column.name}' is {of_files}, which are other ids (5 and '5' are hashed to different "
                    "rows); write it as one of them in all files",
                )
        self._wrong = {fault.column for fault in self.faults}

    def look_at(self, found: RowsSlice) -> None:
        """Check the values of some rows."""
        schema, place = self.schema, _CountingPlace(found.place.name, found.place.row_of, self.faults)
        usable = {*found.table.column_names} - self._wrong
        table = arrow.plain(found.table.select([name for name in found.table.column_names if name in usable]))
        for column in (c for c in schema.stored[0] if c.name in usable):
            lengths = self._ids(table, column, place)
            if column.weights in usable:
                arrow.id_weights(column, table[column.weights].combine_chunks(), lengths, place)
        ruled = {of.name: of for of in schema.numericals} | {of.name: Numerical(name=of.name) for of in schema.scaling}
        for name in (n for n in schema.stored[1] if n in usable):
            if name in ruled:
                raw_numbers(table[name], ruled[name], place)
                continue
            numbers = arrow.wide_numbers(table[name])  # null becomes 0, but the model gets NaN and infinity as float32
            bad = ~(np.abs(numbers) <= np.finfo(np.float32).max) & ~arrow.nulls(table[name])
            fix = (
                "numbers that no rule normalizes must be finite as float32: mend the data, or give the column a rule "
                "and `missing`"
            )
            place.refuse(name, "numbers not finite", bad, numbers, "{}", fix)
        mapped = {of.column: of for of in schema.positives}
        for name in (n for n in schema.labels if n in usable):
            read_labels(table[name], name, mapped.get(name), place, check=True)
        for name in (n for n in schema.weight_columns if n in usable):
            read_weights(table[name], name, place)
        if schema.group is not None and schema.group in usable:
            refuse_null(table[schema.group], schema.group, place, "groups")

    def _ids(self, table: pa.Table, column: SparseColumn, place: Place) -> NDArray[Any]:
        """Check the ids of a column, and return how many each row has."""
        stored = table[column.name].combine_chunks()
        values, lengths = arrow.checked_ids(stored, column, self.ids, place)
        each = np.ones(len(table), np.int64) if lengths is None else lengths
        if self.ids == "raw":
            rows = arrow.rows(values, column, "raw")
            fix = (
                f"table '{column.table_name}' has the rows 0 to {column.rows - 1:,}: raise its rows, prepare the data "
                "again, or hash values (ids: hash)"
            )
            bad = (rows < 0) | (rows >= column.rows)
            place.of_lists(each).refuse(column.name, "ids out of range", bad, values, "id {:,}", fix)
        return each

    def _check_columns(self, what: str, fields: pa.Schema) -> None:
        """Find columns that are absent, or have a type that does not fit their role."""
        schema, names = self.schema, fields.names
        sparse, dense = schema.stored
        made_of = stored_inputs(schema.derived, (Cross, Lookup, Bucket))
        others = [*schema.weight_columns, *schema.id_weights, *([schema.group] if schema.group is not None else [])]
        for name in dict.fromkeys([*(c.name for c in sparse), *dense, *schema.labels, *others, *made_of]):
            if name not in names:
                hint = did_you_mean(name, names) or f"; it has {', '.join(names[:20])}{', …' * (len(names) > 20)}"
                self._of_column(name, "missing column", f"{what} has no column '{name}'{hint}")
        for name, error in wrong_types(schema, self.ids, fields, what):
            self._of_column(name, "wrong type", str(error))

    def _of_column(self, name: str, problem: str, message: str) -> None:
        if not any((fault.column, fault.problem) == (name, problem) for fault in self.faults):
            self.faults.append(Fault(name, problem, message))


def faults_error(what: str, by: str, faults: Sequence[Fault]) -> DataError:
    """Return an error about data that are not what a recipe says; the message has the first fault in full."""
    wrong = ", ".join(dict.fromkeys(fault.column for fault in faults))
    return DataError(
        f"{what} is not what {by} says: {len(faults):,} fault{'s' * (len(faults) > 1)} ({wrong}); {faults[0].message}"
    )
