"""Summarize the rows of a dataset, check them by a schema, and compare two datasets, for ``hotbed inspect DATA``.

Training stops at the first bad value. `SchemaChecks` runs the checks of training over all rows. For each fault of a
column, it reports the first bad value and the number of bad values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.data import arrow_columns as arrow
from hotbed.data.arrow_columns import Ids
from hotbed.data.columns import Label, Numerical, SparseColumn
from hotbed.data.derived_features import Bucket, Cross, Lookup, stored_inputs
from hotbed.data.drafting.profile import ColumnProfile, most_distinct, take_sample
from hotbed.data.drafting.roles import LABEL_NAMES, RATING_NAMES, find_labels
from hotbed.data.encoding.encoder import raw_numbers, wrong_types
from hotbed.data.encoding.labels import check_label, read_labels, read_weights, refuse_null
from hotbed.data.preparation.stored_rows import ParquetRows, RowsSlice, SourceRows, StoredRows
from hotbed.data.row_location import RowLocation
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.machine import usable_cores

COMPARED = 100
"""Number of most frequent values of each dataset that have their own bins. All remaining values share one bin."""
_LEAST = 0.5
"""Number of samples that an empty bin counts as, so that stability indices are finite."""
_Z = 1.959963984540054  # quantile 0.975 of the normal distribution, for two-sided intervals of 95 %


# -- faults --------------------------------------------------------------------------------------------------------


@dataclass
class Fault:
    """A fault of a column: one kind of bad value, a wrong type, or that the column is missing."""

    column: str
    problem: str  # a few words that identify the fault
    message: str  # the message about the first bad value
    values: int = 0  # number of bad values, or 0 if the whole column is wrong


class SchemaChecks:
    """Checks a dataset by a schema: first the columns and types of all files, then the values, slice by slice."""

    def __init__(self, data: StoredRows, schema: Schema, ids: Ids) -> None:
        self.schema = schema
        self.ids: Ids = ids
        self.faults: list[Fault] = []
        for what, fields in data.schemas:
            self._check_columns(what, fields)
        for name in [column.name for column in schema.stored[0]] if ids == "hash" else ():
            first: dict[str, str] = {}
            for what, fields in data.schemas:
                if name in fields.names and (kind := arrow.type_of_ids(fields.field(name).type)):
                    first.setdefault(kind, what)
            if len(first) > 1:
                of_files = " and ".join(f"{kind} in {what}" for kind, what in first.items())
                self._add(
                    name,
                    "types differ",
                    f"column '{name}': got {of_files}, expected one type, because 5 and '5' are hashed to "
                    "different rows. Write the column with one type in all files.",
                )
        self._wrong = {fault.column for fault in self.faults}

    def check(self, found: RowsSlice) -> None:
        """Check the values of some rows."""
        schema, place = self.schema, replace(found.place, report=self._add)
        usable = [name for name in found.table.column_names if name not in self._wrong]
        table = arrow.to_plain_types(found.table.select(usable), place.name)
        for column in (c for c in schema.stored[0] if c.name in usable):
            lengths = self._check_ids(table, column, place)
            if column.weights in usable:
                arrow.read_id_weights(column, table[column.weights].combine_chunks(), lengths, place)
        ruled = {of.name: of for of in schema.numericals} | {of.name: Numerical(name=of.name) for of in schema.scaling}
        for name in (n for n in schema.stored[1] if n in usable):
            if name in ruled:
                raw_numbers(table[name], ruled[name], place)
                continue
            # Training replaces null by 0, but the model gets NaN and infinity as float32.
            numbers = arrow.to_float64(table[name])
            bad = ~(np.abs(numbers) <= np.finfo(np.float32).max) & ~arrow.null_mask(table[name])
            fix = (
                "expected a finite float32, because the column has no normalization rule. Correct the data, or set "
                "`rule` and `missing` of the column"
            )
            place.refuse(name, "numbers not finite", bad, numbers, "{}", fix)
        mapped = {of.column: of for of in schema.positives}
        for name in (n for n in schema.labels if n in usable):
            read_labels(table[name], name, mapped.get(name), place, check=True)
        for name in (n for n in schema.weight_columns if n in usable):
            read_weights(table[name], name, place)
        if schema.group is not None and schema.group in usable:
            refuse_null(table[schema.group], schema.group, place, "groups")

    def _check_ids(self, table: pa.Table, column: SparseColumn, place: RowLocation) -> NDArray[Any]:
        """Check the ids of a column, and return the number of ids per row ``[n]``."""
        values, lengths = arrow.check_ids(table[column.name].combine_chunks(), column, self.ids, place)
        each = np.ones(len(table), np.int64) if lengths is None else lengths
        if self.ids == "raw":
            rows = arrow.ids_to_rows(values, column, "raw")
            fix = (
                f"expected a row of table '{column.table_name}', from 0 to {column.rows - 1:,}. Increase `rows`, "
                "prepare the data again, or set ids: hash"
            )
            bad = (rows < 0) | (rows >= column.rows)
            place.of_lists(each).refuse(column.name, "ids out of range", bad, values, "id {:,}", fix)
        return each

    def _check_columns(self, what: str, fields: pa.Schema) -> None:
        schema, names = self.schema, fields.names
        sparse, dense = schema.stored
        made_of = stored_inputs(schema.derived, (Cross, Lookup, Bucket))
        group = [] if schema.group is None else [schema.group]
        others = [*schema.labels, *schema.weight_columns, *schema.id_weights, *group, *made_of]
        for name in dict.fromkeys([*(c.name for c in sparse), *dense, *others]):
            if name not in names:
                known = f", expected one of {', '.join(names[:20])}{', …' * (len(names) > 20)}"
                hint = did_you_mean(name, names) or known
                self._add(name, "missing column", f"{what} has no column '{name}'{hint}")
        for name, error in wrong_types(schema, self.ids, fields, what):
            self._add(name, "wrong type", str(error))

    def _add(self, name: str, problem: str, message: str, values: int = 0) -> None:
        fault = next((fault for fault in self.faults if (fault.column, fault.problem) == (name, problem)), None)
        if fault is None:
            self.faults.append(fault := Fault(name, problem, message))
        fault.values += values


def faults_error(what: str, by: str, faults: Sequence[Fault]) -> DataError:
    """Return the error that the data ``what`` do not fit the recipe ``by``. It ends with the first fault's message."""
    wrong = ", ".join(dict.fromkeys(fault.column for fault in faults))
    return DataError(
        f"{what} does not fit {by}: got {len(faults):,} fault{'s' * (len(faults) > 1)} ({wrong}), expected none. "
        f"{faults[0].message}"
    )


# -- summaries -----------------------------------------------------------------------------------------------------


@dataclass
class LabelCounts:
    """Numbers of samples and of positives of one label, by split. Samples with a missing label are not counted."""

    mapping: Label | None = None
    samples: dict[str, int] = field(default_factory=dict[str, int])
    positives: dict[str, float] = field(default_factory=dict[str, float])  # sum of the labels

    def add(self, found: RowsSlice, name: str) -> None:
        """Count the labels of some rows."""
        column = found.table[name]
        there = column.is_valid().to_numpy()
        if arrow.is_number(column.type):
            there &= ~np.isnan(arrow.to_float64(column))
        labels = read_labels(column.filter(pa.array(there)), name, self.mapping, found.place)
        self.samples[found.split] = self.samples.get(found.split, 0) + len(labels)
        self.positives[found.split] = self.positives.get(found.split, 0.0) + float(labels.sum(dtype=np.float64))

    @property
    def rate(self) -> RateInterval:
        """Share of positives over all splits."""
        return estimate_rate(sum(self.positives.values()), sum(self.samples.values()))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the rate, its confidence interval, and the rates by split."""
        every = self.rate
        return {
            "rate": every.value,
            "interval": [every.low, every.high],
            "samples": sum(self.samples.values()),
            **({} if self.mapping is None else {"positive": self.mapping.positive}),
            "rate_by_split": {s: self.positives[s] / max(1, n) for s, n in self.samples.items() if s},
        }


@dataclass
class DataSummary:
    """Summary of a dataset."""

    data: StoredRows
    columns: dict[str, ColumnProfile]  # by name, in the order of the files
    labels: dict[str, LabelCounts]  # by label column
    no_label: str = ""  # the reason if no label is known
    faults: list[Fault] = field(default_factory=list[Fault])  # of `SchemaChecks`

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "kind": self.data.kind,
            "path": self.data.path,
            "rows": self.data.rows,
            "samples": {split or "all": n for split, n in self.data.samples.items()},
            **self.data.about,
            "labels": [{"label": name, **counts.to_dict()} for name, counts in self.labels.items()],
            **({"no_label": self.no_label} if self.no_label else {}),
            "columns": [column.to_dict() for column in self.columns.values()],
        }


def summarize(
    data: StoredRows,
    *,
    schema: Schema | None = None,  # determines the labels
    checks: SchemaChecks | None = None,  # checks that are run on each slice of rows
    label: str | None = None,  # name of the label column, if there is no schema (default: found by usual names)
    earlier: DataSummary | None = None,  # summary of earlier data, for `compare`
    progress: Callable[[int, int], None] = lambda done, total: None,  # called with the rows read and the total rows
) -> DataSummary:
    """Read all rows once, and summarize every column. The used memory does not grow with the number of rows.

    Raise `DataError` if there are no rows, a file is damaged, or the label is missing.
    """
    if not data.rows:
        raise DataError(f"{data.path} has no rows")
    names, (labels, why) = data.names, _find_labels(data, schema, label)
    most = most_distinct(len(names))
    measures = () if schema is None else schema.stored[1]
    before = {} if earlier is None else earlier.columns
    columns = {n: ColumnProfile(n, most, as_numbers=n in measures, earlier=before.get(n)) for n in names}

    def add(found: RowsSlice, name: str) -> None:
        if name in found.table.column_names:
            columns[name].add(found.table[name])
        else:
            columns[name].add_absent(len(found.table))

    done, slices = 0, data.read()
    with ThreadPoolExecutor(usable_cores()) as pool, ThreadPoolExecutor(1) as reader:
        waiting = reader.submit(next, slices, None)
        while (found := waiting.result()) is not None:
            waiting = reader.submit(next, slices, None)  # while this slice is counted
            list(pool.map(add, itertools.repeat(found), columns))
            for name, counts in labels.items():
                if name in found.table.column_names:
                    counts.add(found, name)
            if checks is not None:
                checks.check(found)
            progress(done := done + len(found.table), data.rows)
    return DataSummary(data, columns, labels, why, [] if checks is None else checks.faults)


def compare(before: DataSummary, after: DataSummary) -> dict[str, Any]:
    """Compare the summaries of two datasets, column by column and label by label. Return plain values for JSON.

    ``after`` must be the result of `summarize` with ``earlier=before``. For each label, the result has the rates in
    both datasets, and the difference of these rates with its 95 % confidence interval (`rate_change`). For each column,
    the result has the `drift`. Columns with the largest stability index come first.
    """
    both = [name for name in after.columns if name in before.columns and name not in after.labels]
    drifts = [drift(before.columns[name], after.columns[name]) for name in both]
    changes: list[dict[str, Any]] = []
    for name in (name for name in after.labels if name in before.labels):
        rates = before.labels[name].rate, after.labels[name].rate
        change, low, high = rate_change(*rates)
        changes.append({"label": name, "rates": [of.value for of in rates], "change": change, "interval": [low, high]})
    return {
        "path": before.data.path,
        "rows": before.data.rows,
        "labels": changes,
        "columns": sorted(drifts, key=lambda of: -of.get("stability_index", -1.0)),
        "only_before": [name for name in before.columns if name not in after.columns],
        "only_after": [name for name in after.columns if name not in before.columns],
    }


def _find_labels(data: StoredRows, schema: Schema | None, label: str | None) -> tuple[dict[str, LabelCounts], str]:
    """Find labels by the schema, the source or usual names. Return empty counts, and the reason if there are none."""
    if schema is None and isinstance(data, SourceRows):
        schema = data.source.schema
    if schema is not None:
        mapped = {of.column: of for of in schema.positives}
        is_mapped = isinstance(data, SourceRows) and not data.is_stored
        found = {name: None if is_mapped else mapped.get(name) for name in schema.labels}
        return {name: LabelCounts(mapping) for name, mapping in found.items() if _can_be(data, name, mapping)}, ""
    assert isinstance(data, ParquetRows)
    names = [label] if label else [n for n in data.names if n.lower() in (*LABEL_NAMES, *RATING_NAMES)]
    groups = [group for group in data.row_groups if {*names} & {*group.file.schema.names}]
    with_all = [group for group in groups if not {*names} - {*group.file.schema.names}]
    try:
        if label is not None and not groups:
            raise DataError(f"--label: {data.path} has no column '{label}'{did_you_mean(label, data.names)}")
        if not names or not with_all:
            return {}, "no column has a usual name of a label. Set --label NAME or --recipe"
        labels = find_labels(data.path, take_sample(with_all, names), [label] if label else [], None)
        return {of.name: LabelCounts(of.mapping) for of in labels}, ""
    except DataError as error:
        if label is not None:
            raise
        return {}, f"{error} (as hotbed init reports). Draft a recipe with hotbed init, and set --recipe"


def _can_be(data: StoredRows, name: str, mapping: Label | None) -> bool:
    """Return whether a column can be read as this label in all files that have the column."""
    kinds = [fields.field(name).type for _, fields in data.schemas if name in fields.names]
    try:
        for kind in kinds:
            check_label(name, kind, mapping, name)
    except SpecError:
        return False
    return bool(kinds)


# -- drift ---------------------------------------------------------------------------------------------------------


def drift(before: ColumnProfile, after: ColumnProfile) -> dict[str, Any]:
    """Compare the values of a column in two datasets. Return plain values for JSON.

    ``after`` must be a `ColumnProfile` that was created with ``earlier=before``. For columns that are not measures, the
    result has the share and the number of values that the earlier data lack (``unseen_share``, ``unseen_values``). The
    stability index and the Jensen-Shannon divergence compare counts of bins. A measure has intervals as bins. Any other
    column has bins for the most frequent values of both datasets, for all remaining values, and for missing values.
    Times are not compared.
    """
    found: dict[str, Any] = {"column": after.name, "missing": [before.missing_share, after.missing_share]}
    # Times are not compared, because later data have later times.
    if before.values is None or after.values is None or before.is_time or after.is_time:
        return found
    if before.is_measure or after.is_measure:
        first, second = before.bins, after.bins
        there = (first > 0) | (second > 0)
        first, second = first[there], second[there]
    else:
        share, number = after.values.unseen_share, after.values.unseen_values
        found |= {
            "unseen_share": share.value,
            "unseen_share_error": share.error,
            "unseen_values": round(number.value),
            "unseen_values_error": number.error,
        }
        first, second = before.values.shares_beside(after.values, COMPARED)
        first, second = np.append(first, before.missing), np.append(second, after.missing)
    return found | {"stability_index": stability_index(first, second), "jensen_shannon": jensen_shannon(first, second)}


class RateInterval(NamedTuple):
    """A rate, or a change of rates, with its confidence interval of 95 %."""

    value: float
    low: float
    high: float


def stability_index(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return the population stability index of counts ``[bins]``: Σ (p − q) ln(p / q), with shares p and q.

    As a rule of thumb, distributions are similar if the index is below 0.1, and different if it is above 0.25 (Siddiqi,
    "Credit Risk Scorecards", 2006). An empty bin counts as half a sample, so that the index is finite.
    """
    p, q = (of / of.sum() for of in (np.maximum(first, _LEAST), np.maximum(second, _LEAST)))
    return float(((p - q) * np.log(p / q)).sum())


def jensen_shannon(first: NDArray[Any], second: NDArray[Any]) -> float:
    """Return the Jensen-Shannon divergence of counts ``[bins]`` in bits, from 0 (equal) to 1 (no common bin).

    The formula is ½ Σ p log₂(p / m) + ½ Σ q log₂(q / m) with shares p and q, and m = (p + q) / 2 (Lin, "Divergence
    measures based on the Shannon entropy", IEEE Transactions on Information Theory 37(1), 1991). Return NaN if one
    dataset has no counts.
    """
    if not first.sum() or not second.sum():
        return math.nan
    p, q = first / first.sum(), second / second.sum()
    parts = [float((s[s > 0] * np.log2(s[s > 0] / ((p + q) / 2)[s > 0])).sum()) for s in (p, q)]
    return max(0.0, sum(parts) / 2)


def estimate_rate(positives: float, samples: int) -> RateInterval:
    """Return the share of positives with the interval of Wilson's score.

    With the share p, n samples and the normal quantile z = 1.96, the interval is (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) /
    (1 + z²/n) (Wilson, Journal of the American Statistical Association 22, 1927). If some labels are between 0 and 1,
    the interval is wider than necessary, because the variance of the labels is below p(1−p).
    """
    if not samples:
        return RateInterval(math.nan, math.nan, math.nan)
    p, z = positives / samples, _Z
    middle, divisor = p + z * z / (2 * samples), 1 + z * z / samples
    reach = z * math.sqrt(max(0.0, p * (1 - p)) / samples + z * z / (4 * samples * samples))
    return RateInterval(p, max(0.0, (middle - reach) / divisor), min(1.0, (middle + reach) / divisor))


def rate_change(before: RateInterval, after: RateInterval) -> RateInterval:
    """Return the difference of two independent rates, after − before, with its interval.

    Rate p₁ (before) has the interval l₁ to u₁, and rate p₂ (after) has the interval l₂ to u₂. The interval of the
    difference Δ is Δ − √((p₂ − l₂)² + (u₁ − p₁)²) to Δ + √((u₂ − p₂)² + (p₁ − l₁)²) (Newcombe, "Interval estimation for
    the difference between independent proportions", Statistics in Medicine 17, 1998, method 10).
    """
    change = after.value - before.value
    down = math.hypot(after.value - after.low, before.high - before.value)
    up = math.hypot(after.high - after.value, before.value - before.low)
    return RateInterval(change, change - down, change + up)
