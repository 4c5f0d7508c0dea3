# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Find all that data are not what a schema says: columns, types, and every value that training would refuse.

Training stops at the first bad value. Here all rows are looked at, and each fault is told once per column, with its
first place and the number of such values.
"""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotbed.data import arrow
from hotbed.data.arrow import Ids
from hotbed.data.columns import SparseColumn
from hotbed.data.derived import Bucket, Cross, Lookup, stored_inputs
from hotbed.data.id_weights import as_weights, check_id_weights, per_row
from hotbed.data.labels import check_label
from hotbed.data.schema import Schema
from hotbed.data.source import label_error
from hotbed.data.stored_rows import RowsSlice, StoredRows
from hotbed.errors import DataError, SpecError, did_you_mean


@dataclass
class Fault:
    """Something that is wrong with a column."""

    column: str
    problem: str  # a word or two, equal for all values with the same fault
    message: str  # the first value, its place, the limit and the fix
    values: int = 0  # number of such values; 0 if the whole column is wrong


class SchemaChecks:
    """Checks a dataset by a schema: the columns and types of all files at once, then values, slice by slice."""

    def __init__(self, data: StoredRows, schema: Schema, ids: Ids) -> None:
        self.schema = schema
        self.ids: Ids = ids
        self.faults: list[Fault] = []
        self._files = dict(data.schemas)
        self._wrong: set[str] = set()
        for what, fields in self._files.items():
            self._check_types(what, fields)
        self._check_kinds()

    def look_at(self, found: RowsSlice) -> None:
        """Check the values of some rows."""
        schema, table = self.schema, found.table
        usable = {*table.column_names} - self._wrong
        for column in schema.stored[0]:
            if column.name in usable:
                self._ids(found, column)
        for column in (c for c in schema.stored[0] if {c.name, c.weights} <= usable):
            self._id_weights(found, column)
        ruled = {of.name: of.missing for of in schema.numericals} | {of.name: "center" for of in schema.scaling}
        for name in (n for n in schema.stored[1] if n in usable):
            self._numbers(found, name, ruled.get(name))
        mapped = {of.column for of in schema.positives}
        for name in (n for n in schema.labels if n in usable):
            self._labels(found, name, is_mapped=name in mapped)
        for name in (n for n in schema.weight_columns if n in usable):
            weights = arrow.wide_numbers(column := table[name])
            bad = ~((weights >= 0) & (weights < np.inf))
            limit = "weights must be finite and at least 0: mend the data, or leave `weight` out of the schema"
            self._say(found, name, "bad weights", bad, column, "weight {}", limit)
        if schema.group is not None and schema.group in usable:
            column = table[schema.group]
            limit = "groups must be there: drop these rows, or name another column"
            self._say(found, schema.group, "missing groups", column.is_null().to_numpy(), column, "group {}", limit)

    # -- columns ---------------------------------------------------------------------------------------------------

    def _check_types(self, what: str, fields: pa.Schema) -> None:
        schema, names = self.schema, fields.names
        sparse, dense = schema.stored
        made_of = stored_inputs(schema.derived, (Cross, Lookup, Bucket))
        others = [*schema.weight_columns, *schema.id_weights, *([schema.group] if schema.group is not None else [])]
        every = [*(c.name for c in sparse), *dense, *schema.labels, *others, *made_of]
        for name in dict.fromkeys(every):
            if name not in names:
                hint = did_you_mean(name, names) or f"; it has {', '.join(names[:20])}{', …' * (len(names) > 20)}"
                self._of_column(name, "missing column", f"{what} has no column '{name}'{hint}")
        for column in sparse:
            if column.name in names:
                kind = arrow.plain_type(fields.field(column.name).type)
                self._try(column.name, partial(arrow.check_sparse, column, kind, self.ids, what))
                if column.weights is not None and column.weights in names:
                    self._try(column.weights, partial(check_id_weights, column, fields, what))
        mapped = {label.column: label for label in schema.positives}
        for name in (n for n in schema.labels if n in names):
            kind = fields.field(name).type
            self._try(name, partial(check_label, name, kind, mapped.get(name), what))
        for name in [*dense, *schema.weight_columns]:
            kind = fields.field(name).type if name in names else pa.null()
            if not (arrow.is_number(kind) or pa.types.is_null(kind)):
                message = f"{what}: column '{name}' is {kind}, must be numbers; write it as numbers, or name another"
                self._of_column(name, "wrong type", message)

    def _check_kinds(self) -> None:
        """Find columns whose ids are integers in one file and text in another."""
        for column in self.schema.stored[0] if self.ids == "hash" else ():
            first: dict[str, str] = {}
            for what, fields in self._files.items():
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

    def _try(self, name: str, check: Callable[[], None]) -> None:
        try:
            check()
        except SpecError as error:
            self._of_column(name, "wrong type", str(error))

    def _of_column(self, name: str, problem: str, message: str) -> None:
        self._wrong.add(name)
        if not any((fault.column, fault.problem) == (name, problem) for fault in self.faults):
            self.faults.append(Fault(name, problem, message))

    # -- values ----------------------------------------------------------------------------------------------------

    def _ids(self, found: RowsSlice, column: SparseColumn) -> None:
        array = found.table[column.name].combine_chunks()
        row_of: NDArray[Any] | None = None
        if arrow.is_list(array.type):
            lengths = arrow.lengths(array)
            if column.ids is not None:
                limit = f"the schema says {column.ids:,}: cut or fill the lists, or set ids to null (ragged)"
                self._say(found, column.name, "number of ids", lengths != column.ids, lengths, "{:,} ids", limit)
            row_of = np.repeat(np.arange(len(array)), lengths)
            array = array.flatten()
        if pa.types.is_null(array.type):
            array = array.cast(pa.int64())
        if pa.types.is_floating(array.type):
            most = arrow.exact_integers(array.type)
            numbers = array.cast(pa.float64()).to_numpy(zero_copy_only=False)
            there = ~np.isnan(numbers)
            broken = there & ~((numbers == np.floor(numbers)) & (np.abs(numbers) <= most))
            limit = (
                f"ids of {array.type} must be whole numbers up to {most:,}: write integers or strings, or make it a "
                "numerical"
            )
            self._say(found, column.name, "no whole numbers", broken, numbers, "id {}", limit, row_of)
            array = pa.array(np.where(there & ~broken, numbers, 0).astype(np.int64), mask=~there)
        if self.ids == "raw":
            array = arrow.decode(array)
            null = array.is_null().to_numpy(zero_copy_only=False)
            limit = (
                "ids that are rows must be there: fill them with an id, or hash values (ids: hash), where null is row 0"
            )
            self._say(found, column.name, "missing ids", null, array, "id {}", limit, row_of)
            rows = pc.fill_null(array.cast(pa.int64(), safe=False), 0).to_numpy(zero_copy_only=False)
            outside = (rows < 0) | (rows >= column.rows)
            limit = (
                f"table '{column.table_name}' has the rows 0 to {column.rows - 1:,}: raise its rows, prepare the data "
                "again, or hash values (ids: hash)"
            )
            self._say(found, column.name, "ids out of range", outside, array, "id {:,}", limit, row_of)

    def _id_weights(self, found: RowsSlice, column: SparseColumn) -> None:
        stored = arrow.plain(found.table.select([column.name, column.weights]))
        ids, weights = (of.combine_chunks() for of in stored.columns)
        lengths, there = per_row(ids), per_row(weights)
        name, shown = str(column.weights), f"{{:,}} weights beside another number of ids of '{column.name}'"
        self._say(found, name, "number of weights", lengths != there, there, shown, "give each id one weight")
        weights = weights.flatten() if arrow.is_list(weights.type) else weights
        bad = ~np.isfinite(as_weights(weights))
        limit = "the weight of an id must be a finite number as float32 (negative ones and 0 are taken): mend the data"
        self._say(found, name, "bad weights", bad, weights, "weight {}", limit, np.repeat(np.arange(len(ids)), there))

    def _numbers(self, found: RowsSlice, name: str, missing: str | None) -> None:
        column = found.table[name]
        numbers = arrow.wide_numbers(column)
        if missing == "error":
            limit = "the schema says missing: error; mend the data, or say missing: center or missing: indicator"
            self._say(found, name, "missing numbers", ~np.isfinite(numbers), column, "{}", limit)
        elif missing is None:  # null becomes 0, but NaN and infinity go into the model, as float32
            bad = ~(np.abs(numbers) <= np.finfo(np.float32).max) & column.is_valid().to_numpy()
            limit = (
                "numbers that no rule normalizes must be finite as float32: mend the data, or give the column a rule "
                "and `missing`"
            )
            self._say(found, name, "numbers not finite", bad, numbers, "{}", limit)

    def _labels(self, found: RowsSlice, name: str, *, is_mapped: bool) -> None:
        column = found.table[name]
        null = column.is_null().to_numpy()
        self._say(found, name, "missing labels", null, column, "label {}", "labels must be there: drop these rows")
        if arrow.is_text(column.type):
            return
        labels = arrow.wide_numbers(column)
        bad = ~null & (np.isnan(labels) if is_mapped else ~((labels >= 0) & (labels <= 1)))
        self._say(found, name, "labels out of range", bad, column, "", "")

    def _say(
        self,
        found: RowsSlice,
        name: str,
        problem: str,
        bad: NDArray[np.bool_],
        values: Any,
        shown: str,
        limit: str,
        row_of: NDArray[Any] | None = None,
    ) -> None:
        """Note the values where ``bad`` is true.

        ``shown`` says how the first is shown, ``row_of`` the row of each where there may be several in one.
        """
        if not bad.any():
            return
        fault = next((f for f in self.faults if (f.column, f.problem) == (name, problem)), None)
        if fault is None:
            at = int(bad.argmax())
            value: Any = values[at].as_py() if isinstance(values[at], pa.Scalar) else values[at].item()
            row = found.row_of(at if row_of is None else int(row_of[at]))
            message = f"{found.place}, column '{name}': {shown.format(value)} at {row}; {limit}"
            if not shown:
                message = str(label_error(found.place, name, value, row, can_map=True))
            fault = Fault(name, problem, message.replace("None at", "null at"))
            self.faults.append(fault)
        fault.values += int(bad.sum())


def faults_error(what: str, by: str, faults: Sequence[Fault]) -> DataError:
    """Say that data are not what a recipe says; the first fault in full."""
    wrong = ", ".join(dict.fromkeys(fault.column for fault in faults))
    return DataError(
        f"{what} is not what {by} says: {len(faults):,} fault{'s' * (len(faults) > 1)} ({wrong}); {faults[0].message}"
    )
