"""Summarize one column over all rows, in one pass and bounded memory: `ColumnSummary`; two of them compared: `drift`.

Unlike `hotbed.data.profile`, which looks at a sample to say what a column may be good for, nothing is left out here:
shares of missing values, extremes and lengths are exact, and what is estimated comes with its error.
"""

from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray

from hotbed.data import arrow
from hotbed.data.column_statistics import ColumnStatistics
from hotbed.data.stability import BINS, bins_of, jensen_shannon, stability_index
from hotbed.data.value_counts import MOST_DISTINCT, ValueCounts

TOP = (1, 10, 100, 1_000, 10_000)
"""Numbers of most frequent values whose share is told."""
COMPARED = 100
"""Most frequent values of each of two data sets that are compared one by one; all others are taken together."""
QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)
_MOST_LENGTH = 1 << 16
_EPOCH = datetime.datetime(1970, 1, 1)


class ColumnSummary:
    """Summary of one column. `missing` counts null, NaN and the rows of files without the column."""

    def __init__(
        self,
        name: str,
        most_distinct: int = MOST_DISTINCT,
        *,
        as_numbers: bool = False,  # whether integers measure something instead of being ids
        earlier: ColumnSummary | None = None,  # the same column of earlier data, for `drift`
    ) -> None:
        self.name = name
        self.rows = self.missing = 0
        self.types: list[str] = []  # distinct types of the files
        # elements of lists count one by one; None for types whose values cannot be compared
        self.values: ValueCounts | None = None
        self.numbers: ColumnStatistics | None = None  # of numbers and times (microseconds since 1970)
        self.bins: NDArray[np.int64] = np.zeros(BINS, np.int64)  # counts by bin of `hotbed.data.stability`
        # lists with 0, 1, … elements; the last entry counts all longer ones
        self.lengths: NDArray[np.int64] = np.empty(0, np.int64)
        self._most_distinct, self._as_numbers, self._of_times = most_distinct, as_numbers, False
        self._has_fractions = False
        self._elements = 0
        self._earlier = None if earlier is None else earlier.values

    def add_absent(self, rows: int) -> None:
        """Count rows of a file that has no such column as missing."""
        self.rows += rows
        self.missing += rows

    def add(self, column: pa.ChunkedArray) -> None:
        """Add the values of consecutive rows ``[n]``."""
        if str(column.type) not in self.types:
            self.types.append(str(column.type))
        array = arrow.decode(column.combine_chunks())
        kind = array.type
        inner = kind.value_type if arrow.is_list(kind) else kind
        if arrow.is_list(kind):
            self._add_lengths(array)
        missing = array.null_count
        if _is_counted(inner):
            found = array.flatten() if arrow.is_list(kind) else array
            values = _without_missing(found)
            if not arrow.is_list(kind):
                missing = len(array) - len(values)
            if not arrow.is_list(kind) and (arrow.is_number(inner) or arrow.is_time(inner)):
                self._add_numbers(pa.chunked_array([array]))
            if self.values is None:
                self.values = ValueCounts(self._most_distinct, self._earlier)
            self.values.add(values)
        self.rows += len(array)
        self.missing += missing

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        found: dict[str, Any] = {
            "column": self.name,
            "type": ", ".join(self.types),
            "missing": self.missing / max(1, self.rows),
        }
        if (values := self.values) is not None:
            distinct = values.distinct
            sizes = [n for n in TOP if n <= values.ranked]
            found |= {
                "values": values.total,
                "distinct": round(distinct.value),
                "distinct_error": distinct.error / max(1.0, distinct.value),
                "hottest": [{"value": v, "share": n / values.total} for v, n in values.hottest],
                "hottest_error": values.hottest_error / max(1, values.total),
                "top_shares": dict(zip(map(str, sizes), values.top_shares(sizes), strict=True)),
                "zipf_exponent": None if self.is_measure else values.zipf_exponent(),
            }
        if self.numbers is not None and self.numbers.count:
            found["numbers"] = self._of_numbers(self.numbers)
        if len(self.lengths):
            found["lengths"] = self._of_lengths()
        return found

    @property
    def is_time(self) -> bool:
        """Whether its values are dates or times."""
        return self._of_times

    @property
    def is_measure(self) -> bool:
        """Whether its values measure something, and are no ids: floats, decimals, times, and what a schema says."""
        return self.numbers is not None and (self._as_numbers or self._of_times or self._has_fractions)

    def _of_numbers(self, numbers: ColumnStatistics) -> dict[str, Any]:
        quantiles = numbers.quantiles(np.array(QUANTILES)).tolist()
        shown = _time if self._of_times else float
        return {
            "low": shown(numbers.low),
            "high": shown(numbers.high),
            **({} if self._of_times else {"mean": numbers.mean, "deviation": numbers.deviation}),
            "infinite": numbers.missing,
            "quantiles": {f"{at:g}": shown(value) for at, value in zip(QUANTILES, quantiles, strict=True)},
        }

    def _of_lengths(self) -> dict[str, Any]:
        lists = max(1, int(self.lengths.sum()))
        ends = np.cumsum(self.lengths) / lists
        lengths = np.flatnonzero(self.lengths)
        return {
            "mean": self._elements / lists,
            "low": int(lengths[0]) if len(lengths) else 0,
            "high": int(lengths[-1]) if len(lengths) else 0,
            "quantiles": {f"{at:g}": int(np.searchsorted(ends, at)) for at in QUANTILES},
        }

    def _add_lengths(self, array: pa.Array) -> None:
        lengths = arrow.lengths(array.drop_null())
        self._elements += int(lengths.sum())
        counts = np.bincount(np.minimum(lengths, _MOST_LENGTH), minlength=max(1, len(self.lengths)))
        counts[: len(self.lengths)] += self.lengths
        self.lengths = counts

    def _add_numbers(self, column: pa.ChunkedArray) -> None:
        self._of_times = arrow.is_time(column.type)
        self._has_fractions |= pa.types.is_floating(column.type) or pa.types.is_decimal(column.type)
        numbers = arrow.wide_numbers(arrow.microseconds(column) if self._of_times else column)
        self.numbers = self.numbers or ColumnStatistics()
        there = numbers[~np.isnan(numbers)]
        self.numbers.add(there, self.numbers.count + self.numbers.missing)
        self.bins += np.bincount(bins_of(torch.from_numpy(numbers.copy())).numpy(), minlength=BINS)


def drift(before: ColumnSummary, after: ColumnSummary) -> dict[str, Any]:
    """Compare the values of a column in two data sets; ``after`` must have had ``before`` as `earlier`.

    ``unseen_share`` and ``unseen_values`` concern values that the earlier data lack; measures have neither. The
    stability index and the Jensen-Shannon divergence compare the bins of measures. For other columns they compare the
    most frequent values of both data sets, all others together, and missing ones. Times are not compared.
    """
    found: dict[str, Any] = {
        "column": after.name,
        "missing": [of.missing / max(1, of.rows) for of in (before, after)],
    }
    if before.values is None or after.values is None:
        return found
    if before.is_time or after.is_time:  # whose values are later in later data
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


def _is_counted(kind: pa.DataType) -> bool:
    return arrow.is_number(kind) or arrow.is_text(kind) or arrow.is_time(kind)


def _without_missing(values: pa.Array) -> pa.Array:
    """Values that are neither null nor NaN, plain."""
    values = arrow.decode(values)
    if pa.types.is_float16(values.type):
        values = values.cast(pa.float32())
    values = values.drop_null()
    return values.filter(pc.invert(pc.is_nan(values))) if pa.types.is_floating(values.type) else values


def _time(microseconds: float) -> str:
    if not math.isfinite(microseconds):
        return str(microseconds)
    return str(_EPOCH + datetime.timedelta(microseconds=round(microseconds)))
