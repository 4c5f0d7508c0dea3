"""Describe columns by a sample, and by counts over all rows: `ColumnProfile`, `take_sample`, `profile`.

The sample is spread evenly over all rows of all files. Distinct values are counted over all rows where that is cheap,
else over row groups that are spread over the data: a sample of rows says little about them, least in data that is
sorted by the very column. What all rows hold says `hotbed.data.column_summary`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from hotbed.auc import auc
from hotbed.data import arrow
from hotbed.data.row_groups import RowGroup
from hotbed.data.text_dates import date_format, digit_layout, other_zones
from hotbed.data.value_counts import ValueCounts, most_distinct
from hotbed.errors import DataError

SAMPLED_ROWS = 200_000
_SAMPLED_CELLS = 30_000_000  # bounds the sample's memory where there are hundreds of columns
_FEWEST_ROWS = 5_000
_BATCH_ROWS = 32_768
_COUNTED_CELLS = 60_000_000  # some ten seconds
_READERS = 2
_FEW = 1_000
_LARGEST_ID = 2.0**64  # whole floats beyond it cannot come from ids of 64 bits
_FEWEST_OF_A_CLASS = 50
_FREQUENT = 0.6  # share from which on a class is found in most rows of any kind
_RECALL = 0.2  # share of a class that rows must have to give it away: a few rows may be of one class by another cause
_OTHERS = 0.02  # of the rows of the other class that chance would give, in rows that are of one class
_CLOCK = r"([T ,]+\d{1,2}:\d\d.{0,20})?$"
_PADDED_CLOCK = r"([T ,]+\d\d:\d\d(:\d\d([.,]\d+)?)?( ?(Z|UTC|[+-]\d\d:?\d\d))?)?$"
_SORTABLE_DATE = r"^(19|20)\d\d[-/.](0\d|1[0-2])([-/.][0-3]\d" + _PADDED_CLOCK + "|$)"
_YEAR_FIRST = r"^(19|20)\d\d([-/]\d\d?[-/]|[.]\d\d[.])[0-3]?\d" + _CLOCK
_DAY_AND_MONTH = r"[0-3]?\d[-/. ]([01]?\d|[A-Z][a-z]{2})|[01]?\d[-/.][0-3]?\d"
_OTHER_DATE = rf"^(({_DAY_AND_MONTH})[-/. ](19|20)\d\d|\d\d?/\d\d?/\d\d){_CLOCK}"
_QUANTILES = (0.01, 0.25, 0.5, 0.75, 0.99)


class OneSided(NamedTuple):
    """Rows that are nearly all of one class: how they are told apart, the class, and precision and recall."""

    rows: str
    label: int
    precision: float
    recall: float


@dataclass(frozen=True, kw_only=True)
class ColumnProfile:
    """What is known of a column."""

    name: str
    type: pa.DataType
    total: int  # rows of all data
    missing: float  # share of the sample that is null or NaN
    distinct: int  # estimated number of distinct values (for lists: elements) in all rows
    distinct_share: float  # share of distinct values among the present ones of the sample
    length: float = 0.0  # mean number of elements of lists, or of characters of text
    low: float = math.nan  # smallest finite number or time of the sample
    high: float = math.nan  # largest one
    quantiles: tuple[float, ...] = ()  # 1, 25, 50, 75 and 99 % of these
    # of values of at least 0, if the only negative value is -1, which many logs write for none
    quantiles_from_0: tuple[float, ...] = ()
    is_whole: bool = False  # whether all numbers are integers of at most 64 bits, whatever their type
    is_sorted: bool = False  # whether the sample, in the order of the rows, never falls
    # sortable: 2024-12-31; format: 31/12/2024, see `date_format`; other: ambiguous, or of several formats
    dates: Literal["", "sortable", "format", "other"] = ""
    date_format: str | None = None
    layout: str = ""  # layout of dates as digits, e.g. ``YYMMDDHH``, of integers or text of one length
    few: tuple[object, ...] | None = None  # all values of the sample, if there are at most 1,000 and they are no times
    auc: float = 0.5  # AUC of the value alone, on rows that its score was not fitted to: 0.5 is chance, 1 perfect
    missing_auc: float = 0.5  # AUC of whether the value is missing
    # rows that are nearly all of one infrequent class: those with a value, without one, or unlike most rows
    one_sided: OneSided | None = None

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers and no truth values."""
        return arrow.is_number(self.type) and not pa.types.is_boolean(self.type)

    @property
    def is_time(self) -> bool:
        """Whether the values are of a type for dates or times of day and date."""
        return arrow.is_time(self.type)

    @property
    def inexact(self) -> float | None:
        """The largest value, if floats of this type do not hold all integers of its size; ids of them lost digits."""
        largest = max(self.low, self.high, key=abs)
        is_float = pa.types.is_floating(self.type)
        return largest if is_float and abs(largest) > arrow.exact_integers(self.type) else None

    @property
    def present(self) -> int:
        """Number of values in all rows, estimated."""
        return round(self.total * (1 - self.missing))


def take_sample(groups: Sequence[RowGroup], names: Sequence[str]) -> pa.Table:
    """Rows spread evenly over row groups, in their order; they are read in batches, so that memory is bounded."""
    total = sum(group.samples for group in groups)
    wanted = min(SAMPLED_ROWS, max(_FEWEST_ROWS, _SAMPLED_CELLS // max(1, len(names))))
    per_group = max(1, total // len(groups))
    count = max(1, min(len(groups), 4 * wanted // per_group))
    picked = [groups[int(i)] for i in np.linspace(0, len(groups) - 1, count).round()]
    share = min(1.0, wanted / sum(group.samples for group in picked))
    parts: list[pa.Table] = []
    for group in picked:
        rows = np.unique(
            np.linspace(0, group.samples - 1, max(1, round(share * group.samples))).round().astype(np.int64)
        )
        start = 0
        for batch in _batches(group, names):
            mine = rows[(rows >= start) & (rows < start + len(batch))] - start
            parts.append(batch.take(pa.array(mine)))
            _check_values(parts[-1], str(group))
            start += len(batch)
    kinds = {name: arrow.common_type([part.schema.field(name).type for part in parts]) for name in names}
    alike = [pa.table({name: part[name].cast(kind, safe=False) for name, kind in kinds.items()}) for part in parts]
    return pa.concat_tables(alike)


def _check_values(part: pa.Table, where: str) -> None:
    """Raise `DataError` if a column has values that its type cannot have, such as text that is no UTF-8."""
    for name in part.column_names:
        try:
            part[name].validate(full=True)
        except pa.ArrowInvalid as error:
            raise DataError(
                f"{where}, column '{name}': it is not what its type says ({error}); write it again"
            ) from None


def _batches(group: RowGroup, names: Sequence[str]) -> Iterator[pa.Table]:
    """A row group's rows in order; a small one is read at once."""
    if group.samples <= 4 * _BATCH_ROWS:
        yield group.read(names)
    else:
        yield from group.batches(names, _BATCH_ROWS)


def count_distinct(groups: Sequence[RowGroup], kinds: Mapping[str, pa.DataType]) -> dict[str, int]:
    """Distinct values of columns in all rows, see `ValueCounts`.

    Where there are more cells than can be counted quickly, row groups that are spread over the data are, and the number
    is extrapolated by how it grew from the first half of these to all: d · (all ÷ counted)^log₂(d ÷ d of the half).
    ``kinds`` are the types that values are counted as; those of files may differ, see `arrow.common_type`.
    """
    names = list(kinds)
    total = sum(group.samples for group in groups)
    budget = max(_BATCH_ROWS, _COUNTED_CELLS // max(1, len(names)))
    count = len(groups) if total <= budget else max(2, len(groups) * budget // total)
    picked = [groups[int(i)] for i in np.unique(np.linspace(0, len(groups) - 1, min(count, len(groups))).round())]
    halves = [picked[::2], picked[1::2]]
    most = most_distinct(len(names))
    counts = {name: ValueCounts(most) for name in names}
    at_half: dict[str, float] = {}
    rows = 0

    def add(name: str, batch: pa.Table) -> None:
        values = _elements(batch[name].cast(kinds[name], safe=False))
        counts[name].add(pc.drop_null(values.combine_chunks()))

    with ThreadPoolExecutor(_READERS) as pool:
        for half in halves:
            for group in half:
                rows += group.samples
                for batch in _batches(group, names):
                    list(pool.map(add, names, repeat(batch)))
            at_half = at_half or {name: counted.distinct.value for name, counted in counts.items()}
    found: dict[str, int] = {}
    for name in names:
        counted = counts[name].distinct.value
        growth = min(1.0, max(0.0, math.log2(max(1.0, counted) / max(1.0, at_half[name])))) if rows < total else 0
        found[name] = round(counted * (total / max(1, rows)) ** growth)
    return found


def _elements(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Values, those of lists one by one, as numbers or text; of floats NaN is null."""
    values = pc.list_flatten(column) if arrow.is_list(column.type) else column
    if pa.types.is_dictionary(values.type):
        values = pc.cast(values, values.type.value_type)
    if pa.types.is_floating(values.type):
        numbers = arrow.wide_numbers(values)
        return pa.chunked_array([pa.array(numbers, mask=np.isnan(numbers))])
    return values


def profile(
    sample: pa.Table, total: int, distinct: Mapping[str, int], labels: arrow.Array | None
) -> list[ColumnProfile]:
    """Describe the columns of a sample, whose rows are in order.

    ``distinct`` has counts over all rows; columns without one are counted in the sample. ``labels`` of these rows, from
    0 to 1, reveal columns that give the label away.
    """
    return [_profile(name, sample[name], total, distinct.get(name), labels) for name in sample.column_names]


def _profile(
    name: str, column: pa.ChunkedArray, total: int, distinct: int | None, labels: arrow.Array | None
) -> ColumnProfile:
    kind = column.type
    null = column.is_null().to_numpy()
    known: dict[str, Any] = {"name": name, "type": kind, "total": total}
    if not (arrow.is_number(kind) or arrow.is_text(kind) or arrow.is_list(kind) or arrow.is_time(kind)):
        return ColumnProfile(**known, missing=float(null.mean()), distinct=0, distinct_share=0.0)
    if arrow.is_list(kind):
        inner = kind.value_type
        if not (arrow.is_whole(inner) or arrow.is_text(inner)):
            return ColumnProfile(**known, missing=float(null.mean()), distinct=0, distinct_share=0.0)
        known["length"] = float(pc.mean(pc.list_value_length(column)).as_py() or 0)
    elif arrow.is_text(kind):
        texts = pc.cast(column, kind.value_type) if pa.types.is_dictionary(kind) else column
        known["length"] = float(pc.mean(pc.binary_length(texts)).as_py() or 0)
    numbers = _numbers(column)
    if numbers is not None:
        null = np.isnan(numbers)
        known |= _of_numbers(numbers[~null], of_floats=pa.types.is_floating(kind))
    elements = pc.drop_null(_elements(column))
    unique = pc.unique(elements)
    if arrow.is_text(kind):
        known |= _dates(unique)
    if len(unique) <= _FEW and not arrow.is_time(kind):
        known["few"] = tuple(unique.to_pylist())
    if labels is not None and not arrow.is_list(kind):
        known["auc"] = _value_auc(column, numbers, labels)
        known["missing_auc"] = _either_way(_auc(null.astype(np.float64), labels))
        known["one_sided"] = _one_sided(column, null, labels)
    return ColumnProfile(
        **known,
        missing=float(null.mean()),
        distinct=len(unique) if distinct is None else distinct,
        distinct_share=len(unique) / max(1, len(elements)),
    )


def _dates(values: pa.Array) -> dict[str, Any]:
    """Find out how all of these different texts ``[u]`` have dates."""

    def are(pattern: str) -> bool:
        return bool(len(values)) and pc.all(pc.match_substring_regex(values, pattern)).as_py()

    if are(r"^\d{6,14}$") and len(pc.unique(pc.binary_length(values))) == 1:
        return {"layout": digit_layout(pc.cast(pc.cast(values, pa.large_string()), pa.int64()).to_numpy())}
    if are(_SORTABLE_DATE) and not pc.any(other_zones(pc.cast(values, pa.large_string()))).as_py():
        return {"dates": "sortable"}
    if are(_YEAR_FIRST) or are(_OTHER_DATE):
        found = date_format(values)
        return {"dates": "other" if found is None else "format", "date_format": found}
    return {}


def _numbers(column: pa.ChunkedArray) -> arrow.Array | None:
    """Numbers and times (as microseconds) ``[n]`` float64 with NaN for null; None for other columns."""
    kind = column.type
    if arrow.is_time(kind):
        column = arrow.microseconds(column)
    elif not arrow.is_number(kind):
        return None
    return arrow.wide_numbers(column)


def _of_numbers(values: arrow.Array, *, of_floats: bool) -> dict[str, Any]:
    finite = values[np.isfinite(values)]
    if not len(finite):
        return {}
    from_0, only_code = finite[finite >= 0], bool((finite[finite < 0] == -1).all())
    as_integers = len(finite) == len(values) and (not of_floats or np.abs(finite).max() <= _LARGEST_ID)
    is_whole = bool(as_integers and (finite == np.floor(finite)).all())
    return {
        "layout": digit_layout(np.unique(finite)) if is_whole and finite.min() > 0 and finite.max() < 1e15 else "",
        "low": float(finite.min()),
        "high": float(finite.max()),
        "quantiles": tuple(np.quantile(finite, _QUANTILES).tolist()),
        "quantiles_from_0": tuple(np.quantile(from_0, _QUANTILES).tolist()) if len(from_0) and only_code else (),
        "is_whole": is_whole,
        "is_sorted": bool((finite[1:] >= finite[:-1]).all()),
    }


def _value_auc(column: pa.ChunkedArray, numbers: arrow.Array | None, labels: arrow.Array) -> float:
    """AUC of a score per row: of values that are met often the mean label in other rows, else the number itself."""
    indices = _codes(column)
    count = int(indices.max(initial=0)) + 1
    if numbers is not None and count > len(labels) // 20:
        lowest = np.append(numbers[np.isfinite(numbers)], 0.0).min()
        return _either_way(_auc(np.where(np.isfinite(numbers), numbers, lowest), labels))
    half = np.random.default_rng(0).random(len(labels)) < 0.5
    scores = np.empty(len(labels))
    for fitted in (half, ~half):
        sums = np.bincount(indices[fitted], labels[fitted], count)
        counts = np.bincount(indices[fitted], minlength=count)
        means = (sums + labels.mean()) / (counts + 1)
        scores[~fitted] = means[indices[~fitted]]
    return _auc(scores, labels)


def _codes(column: pa.ChunkedArray) -> arrow.Array:
    """Return a number for each distinct value ``[n]``, 0 for null."""
    values = pc.cast(column, column.type.value_type) if pa.types.is_dictionary(column.type) else column
    codes = pc.dictionary_encode(values).combine_chunks()
    return pc.fill_null(codes.indices, -1).to_numpy(zero_copy_only=False).astype(np.int64) + 1


def _one_sided(column: pa.ChunkedArray, null: arrow.Array, labels: arrow.Array) -> OneSided | None:
    """Find rows that are nearly all of a class which is not frequent, see `ColumnProfile`."""
    codes = _codes(column)
    groups = {
        "rows that have a value": ~null,
        "rows where it is missing": null,
        "rows with another value than most": codes != np.bincount(codes).argmax(),
    }
    for label, of_class in ((1, labels), (0, 1 - labels)):
        for rows, there in groups.items():
            count, right = int(there.sum()), float(of_class[there].sum())
            by_chance = count * float(1 - of_class.mean())
            is_sure = by_chance >= _FEWEST_OF_A_CLASS and count - right <= _OTHERS * by_chance
            recall = right / max(1.0, float(of_class.sum()))
            if is_sure and of_class.mean() <= _FREQUENT and recall >= _RECALL:
                return OneSided(rows, label, right / count, recall)
    return None


def _auc(scores: arrow.Array, labels: arrow.Array) -> float:
    positives = labels.sum()
    if min(positives, len(labels) - positives) < _FEWEST_OF_A_CLASS:
        return 0.5  # too few to tell
    return auc(torch.from_numpy(np.ascontiguousarray(scores, dtype=np.float64)), torch.from_numpy(labels))


def _either_way(found: float) -> float:
    return max(found, 1 - found)
