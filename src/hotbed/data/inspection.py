"""Summarize all rows of a dataset, and compare two: `summarize`, `compare`; what ``hotbed inspect DATA`` shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from hotbed.data import arrow
from hotbed.data.column_summary import ColumnSummary, drift
from hotbed.data.columns import Label
from hotbed.data.draft_labels import LABEL_NAMES, RATING_NAMES, find_labels
from hotbed.data.labels import check_label, read_labels
from hotbed.data.profile import take_sample
from hotbed.data.schema import Schema
from hotbed.data.schema_checks import Fault, SchemaChecks
from hotbed.data.stability import Interval, rate, rate_change
from hotbed.data.stored_rows import FileRows, RowsSlice, SourceRows, StoredRows, ahead
from hotbed.data.value_counts import most_distinct
from hotbed.errors import DataError, SpecError
from hotbed.machine import usable_cores

Progress = Callable[[int, int], None]


@dataclass
class LabelCounts:
    """Samples with a label, and the sum of their labels, by split.

    A label that is missing, or cannot be read as one, is of no sample here.
    """

    mapping: Label | None = None
    samples: dict[str, int] = field(default_factory=dict[str, int])
    positives: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, found: RowsSlice, name: str) -> None:
        """Count the labels of some rows."""
        column = found.table[name]
        there = column.is_valid().to_numpy()
        if arrow.is_number(column.type):
            there &= ~np.isnan(arrow.wide_numbers(column))
        labels = read_labels(column.filter(pa.array(there)), name, self.mapping, found.place)
        self.samples[found.split] = self.samples.get(found.split, 0) + len(labels)
        self.positives[found.split] = self.positives.get(found.split, 0.0) + float(labels.sum(dtype=np.float64))

    @property
    def rate(self) -> Interval:
        """Share of positives over all splits."""
        return rate(sum(self.positives.values()), sum(self.samples.values()))

    def to_dict(self) -> dict[str, Any]:
        """Plain values: rate, its interval, and rates by split."""
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
    """What a dataset holds."""

    data: StoredRows
    columns: dict[str, ColumnSummary]  # by name, in the order of the files
    labels: dict[str, LabelCounts]  # by label column
    no_label: str = ""  # why no label is known
    faults: list[Fault] = field(default_factory=list[Fault])  # where the data contradict the schema

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
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
    schema: Schema | None = None,
    checks: SchemaChecks | None = None,
    label: str | None = None,
    earlier: DataSummary | None = None,
    progress: Progress = lambda done, total: None,
) -> DataSummary:
    """Read all rows once, and summarize every column.

    Memory is bounded, whatever the number of rows: a few slices of rows, and for each column counts of some values, see
    `most_distinct`.

    Parameters
    ----------
    data
        The rows, see `open_rows`.
    schema
        What says which columns are labels; by default they are found by their names.
    checks
        What each slice of rows is checked by.
    label
        The label column, where its name is not a usual one and there is no schema.
    earlier
        Data to compare with, see `compare`.
    progress
        Called with the rows read, and those there are.

    Raises
    ------
    DataError
        If there are no rows, a file is damaged, or there is no such label.
    """
    if not data.rows:
        raise DataError(f"{data.path} has no rows")
    types, (labels, why) = data.types, _labels(data, schema, label)
    most = most_distinct(len(types))
    measures = () if schema is None else schema.stored[1]
    before = {} if earlier is None else earlier.columns
    columns = {n: ColumnSummary(n, most, as_numbers=n in measures, earlier=before.get(n)) for n in types}

    def add(found: RowsSlice, name: str) -> None:
        if name in found.table.column_names:
            columns[name].add(found.table[name])
        else:
            columns[name].add_absent(len(found.table))

    done = 0
    with ThreadPoolExecutor(usable_cores()) as pool:
        for found in ahead(data.read()):
            list(pool.map(add, itertools.repeat(found), columns))
            for name, counts in labels.items():
                if name in found.table.column_names:
                    counts.add(found, name)
            if checks is not None:
                checks.look_at(found)
            progress(done := done + len(found.table), data.rows)
    faults = [] if checks is None else checks.faults
    return DataSummary(data, columns, labels, why, faults)


def compare(before: DataSummary, after: DataSummary) -> dict[str, Any]:
    """Say how a dataset differs from the one that was given as ``earlier``, column by column and label by label.

    Returns
    -------
    dict
        ``labels``: both rates, and the change with its interval (`rate_change`). ``columns``: see `drift`, of the
        columns that both have, the largest index first. ``only_before``, ``only_after``: columns of one of them.
    """
    both = [name for name in after.columns if name in before.columns and name not in after.labels]
    drifts = [drift(before.columns[name], after.columns[name]) for name in both]
    changes: list[dict[str, Any]] = []
    for name in (name for name in after.labels if name in before.labels):
        rates = before.labels[name].rate, after.labels[name].rate
        change = rate_change(*rates)
        changes.append(
            {
                "label": name,
                "rates": [of.value for of in rates],
                "change": change.value,
                "interval": [change.low, change.high],
            }
        )
    return {
        "path": before.data.path,
        "rows": before.data.rows,
        "labels": changes,
        "columns": sorted(drifts, key=lambda of: -of.get("stability_index", -1.0)),
        "only_before": [name for name in before.columns if name not in after.columns],
        "only_after": [name for name in after.columns if name not in before.columns],
    }


def _labels(data: StoredRows, schema: Schema | None, label: str | None) -> tuple[dict[str, LabelCounts], str]:
    """Labels by a schema, a source's own, or by name; or why there are none."""
    if schema is None and isinstance(data, SourceRows):
        schema = data.source.schema
    if schema is not None:
        mapped = {of.column: of for of in schema.positives}
        is_mapped = isinstance(data, SourceRows) and not data.is_stored
        found = {name: None if is_mapped else mapped.get(name) for name in schema.labels}
        return {name: LabelCounts(mapping) for name, mapping in found.items() if _can_be(data, name, mapping)}, ""
    assert isinstance(data, FileRows)
    names = [label] if label else [n for n in data.types if n.lower() in (*LABEL_NAMES, *RATING_NAMES)]
    groups = [group for group in data.row_groups if {*names} & {*group.file.schema.names}]
    with_all = [group for group in groups if not {*names} - {*group.file.schema.names}]
    try:
        if label is not None and not groups:
            raise DataError(f"{data.path} has no column '{label}', which --label names")
        sample = take_sample(with_all, names) if names and with_all else None
        if sample is None:
            return {}, "no column is named like a label; name one with --label NAME, or give --recipe"
        return {
            of.name: LabelCounts(of.mapping) for of in find_labels(data.path, sample, [label] if label else [], None)
        }, ""
    except DataError as error:
        if label is not None:
            raise
        return {}, f"{error} (with hotbed init, whose recipe --recipe takes here)"


def _can_be(data: StoredRows, name: str, mapping: Label | None) -> bool:
    """Whether a column can be read as this label in all files that have it."""
    kinds = [fields.field(name).type for _, fields in data.schemas if name in fields.names]
    try:
        for kind in kinds:
            check_label(name, kind, mapping, name)
    except SpecError:
        return False
    return bool(kinds)
