"""Decide the role of each column from its name and a sample of its values: `find_labels`, `role_of`, `rule_of`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from hotbed.auc import auc
from hotbed.data import arrow_columns as arrow
from hotbed.data.columns import Label, Rule
from hotbed.data.drafting.profile import QUANTILES, ColumnProfile, floats_of, is_counted, present_values
from hotbed.data.encoding.labels import check_label, read_labels
from hotbed.data.files.text_dates import DatesFound, digit_layout, find_dates
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError, SpecError, did_you_mean

Role = Literal["id", "category", "list", "number", "time", "left out"]

LEAK = 0.995
"""A column that predicts the label with a higher AUC than this reveals the label."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ID_WORDS = _words(
    "id ids uid uuid guid key code hash sku isbn asin ip zip zipcode postcode user item product category cat type "
    "kind class brand shop store device site country region city state language channel campaign ad query movie song "
    "artist cluster segment bucket index number nr no visitor member account guest viewer player patient person "
    "client buyer seller merchant vendor supplier host listing author publisher advertiser creative banner placement "
    "page url domain app cookie session video track album book article post topic tag genre game hotel restaurant "
    "company employer job course driver courier carrier warehouse zone county area"
)
_NUMBER_WORDS = _words(
    "count counts cnt num qty quantity amount price cost value revenue total sum age duration seconds minutes hours "
    "length size width height weight distance score views clicks impressions visits sales income salary balance rate "
    "ratio pct percent avg mean min max std median temperature lat lon latitude longitude budget points"
)
_MEASURES = _words("age duration")
_CODES = _words("id ids key code index hash type kind class category cat segment cluster bucket number nr no")
_NUMBER_FIRST = _words("num n nb cnt count total avg mean sum max min")
_TIME_WORDS = _words(
    "time timestamp ts date datetime epoch unixtime when created day at dt clock utc posted occurred logged"
)
_OTHER_TIMES = _words(
    "birth birthday birthdate dob born signup registered registration joined release last first seen since "
    "released expires expiry expiration published publication updated modified"
)
_LAYOUT_WORDS = _words("hour month minute week period")
_LAYOUT_NAMES = {"YYYYMMDD": "days", "YYYYMM": "months"}
_SURE_DATES = 24  # this many distinct numbers do not all look like dates by chance
_MINUTES = 60  # at most this many values named hour, month or minute may repeat, e.g. the hours of a day
_FIRST_YEAR = 1900  # larger numbers may begin with a year (202352), and cannot be an hour, month or minute
_INDEX_NAMES = re.compile(
    r"(unnamed: \d+|__index_level_\d+__|level_\d+|index|row_?(id|nr|number|index)?|)", re.IGNORECASE
)
_FEW = 1_000  # values are kept if the sample has at most this many distinct ones
_LARGEST_ID = 2.0**64  # larger whole floats are not ids of 64 bits
_FEWEST_OF_A_CLASS = 50
_FREQUENT = 0.6  # a class with a larger share dominates most groups of rows, so that a group reveals nothing
_RECALL = 0.2  # a group of rows that reveals a class contains at least this share of the class
_OTHERS = 0.02  # and of the opposite class, at most this share of the rows expected by chance
_FEW_VALUES = 50
_COUNTS_FROM = -100  # counts are above this limit; some logs write a small negative number for a missing count
_LARGE, _COUNTS_TO = 2.0**24, 2.0**53  # large values may be hashes; no count is above the second limit
_UNIQUE_ROWS = 100  # in fewer rows, any column may be unique
_LONG_TEXT = 60
_HUGE = 1e100
LABEL_NAMES = (
    *("label", "labels", "click", "clicks", "clicked", "is_click", "is_clicked", "target", "conversion", "y"),
    *("converted", "is_converted", "purchase", "purchased", "is_purchase", "bought", "buy", "is_buy", "outcome"),
)
RATING_NAMES = ("rating", "ratings", "stars")
_LABEL_WORDS = _words(
    "label target click clicks clicked clk conversion converted purchase purchased bought buy attributed outcome "
    "response responded install installed subscribed churn churned fraud liked class"
)
_BEFORE_LABELS = _words("is was has did")
_POSITIVE_TEXTS = ("yes", "true", "1", "y", "t", "positive", "pos", "clicked", "click", "converted", "buy", "+1")
_NEGATIVE_TEXTS = ("no", "false", "0", "n", "f", "negative", "neg", "not clicked", "none", "-1")
_MOST_RATINGS = 101
_MOST_LISTED = 60

_YEAR_1990, _YEAR_2100 = 631_152_000, 4_102_444_800
_YEAR_2000, _YEAR_2035 = 946_684_800, 2_051_222_400
_UNITS = {1: "seconds", 1_000: "milliseconds", 1_000_000: "microseconds", 1_000_000_000: "nanoseconds"}


# -- columns of a sample -------------------------------------------------------------------------------------------


class SampledColumn(ColumnProfile):
    """Profile of a column in a sample of rows, with further facts that decide the role of the column."""

    def __init__(
        self,
        name: str,
        column: pa.ChunkedArray,
        total: int,  # rows of all data
        distinct: int | None,  # distinct values in all rows (default: in the sample)
    ) -> None:
        super().__init__(name, quantile_sample=len(column))
        self.add(column)
        self.type, self.total = column.type, total
        values = present_values(column.combine_chunks()) if is_counted(column.type) else pa.nulls(0)
        unique = pc.unique(values)
        self.distinct = len(unique) if distinct is None else distinct
        self.distinct_share = len(unique) / max(1, len(values))
        self.few = None if len(unique) > _FEW or self.is_time else tuple(unique.to_pylist())
        of_text = arrow.is_text(self.type)
        self.length = float(pc.mean(pc.binary_length(values)).as_py() or 0) if of_text else self.mean_length
        self.dates, self.date_format, self.layout = find_dates(unique) if of_text else DatesFound()
        # Whether all numbers are whole and fit into 64 bits (floats, too), and whether the numbers never decrease.
        self.is_whole = self.is_sorted = False
        # Quantiles of the numbers above -1, if -1 is the only negative number. Many logs write -1 for a missing value.
        self.quantiles_from_0: tuple[float, ...] = ()
        if self.numbers is not None:
            numbers = floats_of(column)
            self._profile_numbers(numbers[~np.isnan(numbers)])

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers, not booleans."""
        return arrow.is_number(self.type) and not pa.types.is_boolean(self.type)

    @property
    def inexact(self) -> float | None:
        """The value of largest magnitude if the column's float type cannot hold all smaller integers; else None."""
        largest = max(self.low, self.high, key=abs)
        is_float = pa.types.is_floating(self.type)
        return largest if is_float and abs(largest) > arrow.exact_integers(self.type) else None

    @property
    def present(self) -> int:
        """Estimated number of values in all rows."""
        return round(self.total * (1 - self.missing_share))

    def _profile_numbers(self, values: arrow.Array) -> None:
        finite = values[np.isfinite(values)]
        if not len(finite):
            return
        small_enough = not pa.types.is_floating(self.type) or np.abs(finite).max() <= _LARGEST_ID
        self.is_whole = len(finite) == len(values) and bool(small_enough and (finite == np.floor(finite)).all())
        self.is_sorted = bool((finite[1:] >= finite[:-1]).all())
        from_0 = finite[finite >= 0]
        if len(from_0) and (finite[finite < 0] == -1).all():
            self.quantiles_from_0 = tuple(np.quantile(from_0, QUANTILES).tolist())
        if self.is_whole and self.low > 0 and self.high < 1e15:
            self.layout = digit_layout(np.unique(finite))


# -- roles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ColumnRole:
    """Role of a column, and the reason."""

    role: Role
    reason: str = ""


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case, e.g. user and id for ``userId``, ``user_id`` and ``User ID``."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return [word.lower() for word in re.split(r"[\W_\d]+", apart) if word]


def _named_as(name: str) -> Literal["id", "number", ""]:
    """Return whether a name suggests an id, a number, or neither ("").

    The last known word decides, except in names such as ``num_items``.
    """
    words = words_of(name)
    if len(words) > 1 and words[0] in _NUMBER_FIRST:
        return "number"
    if not _MEASURES.isdisjoint(words) and words[-1] not in _CODES:
        return "number"
    known = [word for word in words if word in _ID_WORDS or word in _NUMBER_WORDS]
    return "" if not known else "id" if known[-1] in _ID_WORDS else "number"


def role_of(column: SampledColumn, leak: str | None) -> ColumnRole:
    """Return the role of a column that is neither label nor weight. ``leak`` is the result of `leak_reason`."""
    if (reason := _unusable(column) or leak) is not None:
        return ColumnRole("left out", reason)
    kind = column.type
    if arrow.is_list(kind):
        return ColumnRole("list", f"{column.length:.3g} ids per row on average, {column.distinct:,} distinct ones")
    if column.dates == "other":
        return ColumnRole(
            "left out",
            "dates as text in several formats, or with an ambiguous day and month: later rows have values that "
            "training has not seen. Write them as 2024-12-31 to split by them",
        )
    if (reason := time_reason(column)) is not None:
        if column.is_number and not is_time_of_row(column):
            return ColumnRole("number", f"{reason}; a time, but by its name not that of the row")
        return ColumnRole("time", reason)
    whole = column.is_whole or arrow.is_text(kind)
    if whole and column.distinct_share > 0.999 and column.distinct > 0.9 * column.present:
        if _INDEX_NAMES.fullmatch(column.name) and column.is_whole:
            return ColumnRole("left out", "it numbers the rows")
        # Measures such as a duration in milliseconds may be unique.
        if column.total >= _UNIQUE_ROWS and not (column.is_number and _named_as(column.name) == "number"):
            return ColumnRole("left out", "nearly every row has its own value, so no row helps to predict another")
    if pa.types.is_boolean(kind):
        return ColumnRole("category", "true or false")
    if arrow.is_text(kind):
        if column.length > _LONG_TEXT and column.distinct_share > 0.5:
            return ColumnRole(
                "left out", f"free text ({column.length:.0f} characters on average) cannot be an input yet"
            )
        return _ids(column)
    return _whole_number(column) if column.is_whole else ColumnRole("number")


def _unusable(column: SampledColumn) -> str | None:
    """Return why a column cannot be an input, or None if it can be an input."""
    kind, inner = column.type, arrow.value_type_of(column.type)
    if not column.name:
        return "it has no name"
    if arrow.is_list(kind) and (pa.types.is_floating(inner) or pa.types.is_decimal(inner)):
        return "lists of floats, e.g. embeddings, cannot be inputs yet"
    if pa.types.is_null(kind):
        return "it is empty"
    if not (arrow.is_number(inner) or arrow.is_text(inner) or arrow.is_time(kind)):
        return f"columns of type {kind} cannot be inputs yet{arrow.hint_for_struct(kind)}"
    if column.missing_share == 1 or not column.distinct:
        return "it is empty"
    if column.distinct == 1 and not column.missing_share:
        return "all rows have the same value" + (f" ({str(column.few[0])[:40]!r})" if column.few else "")
    return None


def _ids(column: SampledColumn, why: str = "") -> ColumnRole:
    floats = ", whole numbers stored as floats" if pa.types.is_floating(column.type) else ""
    role: Role = "category" if column.distinct <= _FEW_VALUES else "id"
    return ColumnRole(role, f"{column.distinct:,} values{floats}{why}")


def _whole_number(column: SampledColumn) -> ColumnRole:
    """Distinguish ids, categories and counts by the name, the number of values, or the distribution of the values."""
    named, is_decimal = _named_as(column.name), pa.types.is_decimal(column.type)
    if named == "id" and is_decimal:
        reason = f"its name stands for ids, but ids cannot be read from {column.type}. Write integers"
        return ColumnRole("left out", reason)
    if is_decimal or (named == "number" and column.distinct > 2):
        return ColumnRole("number")
    largest = max(abs(column.low), abs(column.high))
    if named == "id" or column.distinct <= _FEW_VALUES or largest > _COUNTS_TO:
        return _ids(column)
    large = sum(abs(quantile) > _LARGE for quantile in column.quantiles)
    if column.low < -_LARGE and column.high > _LARGE and large >= len(column.quantiles) - 1:
        return _ids(column, ", likely signed hashes")  # measures have many small values
    quantiles = column.quantiles_from_0 or column.quantiles
    median, upper = quantiles[2], quantiles[4]
    # A few values above 2²⁴ among small values may be ids of a different system, so such a tail makes no count.
    tail = (50 * max(1.0, median) < column.high <= _LARGE) or upper > 8 * max(1.0, median)
    if tail and column.low > _COUNTS_FROM and column.high > 2 * column.distinct:
        return ColumnRole("number", "a count by its distribution")
    if column.low < 0 and not column.quantiles_from_0:
        return ColumnRole("number", "it has negative values")
    return _ids(column, ", likely ids")


def rule_of(column: SampledColumn) -> tuple[Rule, str]:
    """Return the normalization rule of a column of numbers (see `Numerical`), and the reason."""
    first, lower, median, upper, last = column.quantiles or (0.0,) * 5
    spread = upper - lower
    heavy: tuple[Rule, str] = ("log", "a long tail, as counts and prices have" if lower < 1e6 else "a long tail")
    if median < 1:
        heavy = "asinh", "a long tail of small numbers"
    if column.is_whole and column.low > _COUNTS_FROM and last > 4 * max(1.0, median):
        return "log", "a long tail, as counts have"
    if max(abs(column.low), abs(column.high)) > _HUGE:
        return "log", "numbers with squares too large for float64"
    if not spread:
        return (
            ("log", "most values are equal, the others are far away")
            if column.low >= 0
            else ("asinh", "most values are equal")
        )
    if column.low >= 0 and (last - median > 6 * spread or (median > 0 and last > 20 * median)):
        return heavy
    if last - upper > 3 * spread or lower - first > 3 * spread or column.high - median > 100 * spread:
        return "asinh", "heavy tails"
    if first > -6 and last < 6 and 0.4 < spread < 4 and abs(median) < 1 and column.low < 0:
        return "as_is", "the values are already about standardized"
    if column.low >= 0 and (last - median) / max(median - first, 1e-300) > 4:
        return heavy
    return "standard", f"from {first:.4g} to {last:.4g} without long tails"


# -- times ---------------------------------------------------------------------------------------------------------


def time_reason(column: SampledColumn) -> str | None:
    """Return how a column stores times, e.g. ``seconds since 1970``; None if the values are no times."""
    if column.is_time:
        return str(column.type)
    words = words_of(column.name)
    named = not (_TIME_WORDS | _OTHER_TIMES).isdisjoint(words)
    if column.dates == "sortable" and (named or column.length >= len("2024-12-31")):
        return "text that sorts by time"
    if column.dates == "format":
        return f"text of dates as {column.date_format}"
    named_layout = named or not _LAYOUT_WORDS.isdisjoint(words)
    is_id = _named_as(column.name) == "id"
    sure = len(column.layout) > len("YYYYMM") and column.distinct >= _SURE_DATES and not is_id
    if column.layout and (named_layout or (sure and column.is_number)):
        return f"{_LAYOUT_NAMES.get(column.layout, 'times')} as {column.layout}"
    if not column.is_number or not column.quantiles:
        return None
    if named and column.is_whole and column.low >= 19_000_101 and column.high <= 21_001_231:
        return "days as YYYYMMDD"
    for unit, unit_name in _UNITS.items():
        low, high = column.low / unit, column.high / unit
        if named and _YEAR_1990 <= low <= high < _YEAR_2100:
            return f"{unit_name} since 1970"
        in_order = column.is_sorted and column.distinct_share > 0.01
        # If these were ids, each would occur once or twice and be useless, so a wrong guess costs nothing.
        in_range = (in_order or column.distinct_share >= 0.5) and _YEAR_2000 <= low <= high < _YEAR_2035
        if in_range and not is_id:
            return f"{unit_name} since 1970, by the range" + (" and order" if in_order else "") + " of the values"
    return None


def is_time_of_row(column: SampledColumn) -> bool:
    """Return whether a column may hold the time of the row: by its name, or because the rows are sorted by it."""
    return column.is_sorted or _has_time_word(column, with_layouts=bool(column.layout))


def is_named_like_time(column: SampledColumn) -> bool:
    """Return whether the name of a column says that it holds the time of the row, e.g. ``created_at``."""
    recurs = column.distinct <= _MINUTES and not (column.low >= _FIRST_YEAR or column.dates)
    return _has_time_word(column, with_layouts=not recurs)


def _has_time_word(column: SampledColumn, with_layouts: bool) -> bool:
    words = {*words_of(column.name)}
    return bool(words & (_TIME_WORDS | _LAYOUT_WORDS if with_layouts else _TIME_WORDS) and not words & _OTHER_TIMES)


def time_rank(name: str) -> int:
    """Return how well a name fits the time of the row: 2 (well), 1, or 0 for a time such as a birthday."""
    words = {*words_of(name)}
    if words & _OTHER_TIMES:
        return 0
    return 2 if words & {"time", "timestamp", "ts", "datetime", "epoch", "when"} else 1


# -- leaks ---------------------------------------------------------------------------------------------------------


def leak_reason(column: pa.ChunkedArray, labels: arrow.Array | None, name: str) -> str | None:
    """Return how a sampled column reveals the labels ``[n]`` of the label column ``name``; None if it does not."""
    if labels is None or arrow.is_list(column.type) or not is_counted(column.type):
        return None
    numbers = None if arrow.is_text(column.type) else floats_of(column)
    is_missing = column.is_null().to_numpy() if numbers is None else np.isnan(numbers)
    values = without_dictionary(column)
    indices = pc.dictionary_encode(values).combine_chunks().indices
    codes = pc.fill_null(indices, -1).to_numpy(zero_copy_only=False).astype(np.int64) + 1  # 0 for null
    advice = "if it is known before the event, add it to the schema"
    if (found := _auc(is_missing.astype(np.float64), labels, either_way=True)) >= LEAK:
        return f"its missing values reveal '{name}' (AUC {found:.3f}); {advice}"
    if (found := _value_auc(codes, numbers, labels)) >= LEAK:
        return f"it alone reveals '{name}' (AUC {found:.3f}); {advice}"
    # Does a group of rows contain nearly one class only, although this class is not frequent?
    groups = {
        "rows that have a value": ~is_missing,
        "rows where it is missing": is_missing,
        "rows without the most common value": codes != np.bincount(codes).argmax(),
    }
    for label, of_class in ((1, labels), (0, 1 - labels)):
        share = float(of_class.mean())
        for rows, there in groups.items() if share <= _FREQUENT else ():
            count, right = int(there.sum()), float(of_class[there].sum())
            by_chance, recall = count * (1 - share), right / max(1.0, float(of_class.sum()))
            is_sure = by_chance >= _FEWEST_OF_A_CLASS and count - right <= _OTHERS * by_chance
            if is_sure and recall >= _RECALL:
                shares = f"precision {right / count:.3f}, recall {recall:.3f}"
                return f"it reveals '{name}': in {rows} the label is {label} ({shares}); {advice}"
    return None


def _value_auc(codes: arrow.Array, numbers: arrow.Array | None, labels: arrow.Array) -> float:
    """Return the AUC of scores that are made from the values of a column. A high AUC shows a leak.

    A value's score is its mean label in the other half of the rows. If numbers rarely repeat, they are the scores.
    """
    count = int(codes.max(initial=0)) + 1
    if numbers is not None and count > len(labels) // 20:
        lowest = np.append(numbers[np.isfinite(numbers)], 0.0).min()
        return _auc(np.where(np.isfinite(numbers), numbers, lowest), labels, either_way=True)
    half = np.random.default_rng(0).random(len(labels)) < 0.5
    scores = np.empty(len(labels))
    for fitted in (half, ~half):
        sums = np.bincount(codes[fitted], labels[fitted], count)
        means = (sums + labels.mean()) / (np.bincount(codes[fitted], minlength=count) + 1)
        scores[~fitted] = means[codes[~fitted]]
    return _auc(scores, labels)


def _auc(scores: arrow.Array, labels: arrow.Array, *, either_way: bool = False) -> float:
    positives = labels.sum()
    if min(positives, len(labels) - positives) < _FEWEST_OF_A_CLASS:
        return 0.5  # unknown
    found = auc(torch.from_numpy(np.ascontiguousarray(scores, dtype=np.float64)), torch.from_numpy(labels))
    return max(found, 1 - found) if either_way else found


# -- labels --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundLabel:
    """A column that the draft uses as a label, with the condition of a positive label."""

    name: str
    mapping: Label | None  # condition of a positive label; None if the values are 0 and 1
    remark: str  # comment for the recipe


def find_labels(
    path: str, sample: pa.Table, required: Sequence[str], positive: str | None, *, needed: bool = True
) -> list[FoundLabel]:
    """Find labels by names and values, or check the ``required`` labels.

    ``positive`` is the condition of the only label (default: found by values). Unless a label is ``needed``, the result
    may be empty.
    """
    names: list[str] = sample.column_names
    if lacking := [label for label in required if label not in names]:
        hint = did_you_mean(lacking[0], names)
        raise DataError(f"label: {path} has no column '{lacking[0]}'{hint} It has {_listed(names)}.")
    candidates = list(required) or _label_names(sample)
    if not candidates and not needed and positive is None:
        return []
    if not candidates:
        named = next((name for name in names if name.strip().lower() in (*LABEL_NAMES, *RATING_NAMES)), None)
        unfit = "" if named is None else f". Column '{named}' of type {sample[named].type} cannot be a label"
        binary = sorted((n for n in names if _is_binary(sample[n])), key=lambda n: _LABEL_WORDS.isdisjoint(words_of(n)))
        hint = f", e.g. a column of 0 and 1: {_listed(binary)}" if binary else ""
        raise DataError(
            f"{path} has no label column, expected a usual name ({', '.join(LABEL_NAMES[:10])}, …, "
            f"{', '.join(RATING_NAMES)}){unfit}. The columns are {_listed(names)}. Set --label NAME "
            f"(label=… in Python){hint}"
        )
    if positive is None:
        return [_find_mapping(path, sample, name) for name in candidates]
    if len(required) > 1:
        raise SpecError(
            f"--positive: got {len(required)} labels ({', '.join(required)}), expected one. Remove --positive, and set "
            "`positive` of each label in the recipe (docs/your_model.md)."
        )
    mapping = Label(candidates[0], positive)
    check_label(mapping.column, sample.schema.field(mapping.column).type, mapping, path)
    return [FoundLabel(mapping.column, mapping, _describe_share(sample, mapping))]


def sample_labels(sample: pa.Table, found: FoundLabel) -> arrow.Array | None:
    """Return the sampled labels ``[n]``; None if a label is missing, or is not between 0 and 1."""
    column = sample[found.name]
    if column.null_count:
        return None
    labels = read_labels(column, found.name, found.mapping, RowLocation("the sample"))
    return labels if ((labels >= 0) & (labels <= 1)).all() else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_LISTED} more" if len(names) > _MOST_LISTED else ""
    return ", ".join(names[:_MOST_LISTED]) + more


def _label_names(sample: pa.Table) -> list[str]:
    """Return the columns with names of labels that have only 0 and 1, or else the first column with such a name."""
    by_name = {name.strip().lower(): name for name in reversed(sample.column_names)}
    named = [by_name[n] for n in LABEL_NAMES if n in by_name]
    named = [n for n in named if arrow.is_number(sample[n].type) or arrow.is_text(sample[n].type)]
    if found := [name for name in sample.column_names if name in named and _is_binary(sample[name])] or named[:1]:
        return found
    # Columns of 0 and 1 with a name such as isClick or was_converted. A column Class counts only if it is the only one.
    words = {name: [w for w in words_of(name) if w not in _BEFORE_LABELS] for name in sample.column_names}
    similar = [n for n, of in words.items() if len(of) == 1 and of[0] in _LABEL_WORDS and _is_binary(sample[n])]
    ratings = [by_name[n] for n in RATING_NAMES if n in by_name and arrow.is_number(sample[by_name[n]].type)]
    return [name for name in similar if words[name] != ["class"]] or similar or ratings[:1]


def _is_binary(column: pa.ChunkedArray) -> bool:
    if pa.types.is_boolean(column.type):
        return True
    if not arrow.is_number(column.type) or column.null_count:
        return False
    return bool(np.isin(arrow.to_float64(column), (0, 1)).all())


def _find_mapping(path: str, sample: pa.Table, name: str) -> FoundLabel:
    column, where = sample[name], f"{path}, label column '{name}'"
    if _is_binary(column):
        share = arrow.to_float32(pc.fill_null(column, False) if pa.types.is_boolean(column.type) else column).mean()
        return FoundLabel(name, None, f"{share:.1%} are positive")
    if not arrow.is_text(column.type) and not arrow.is_number(column.type):
        raise DataError(f"{where}: got {column.type}, expected numbers, booleans or text. Set --label NAME.")
    condition = (_condition_of_text if arrow.is_text(column.type) else _condition_of_numbers)(where, column)
    if condition is None:
        return FoundLabel(name, None, "")
    mapping = Label(name, condition)
    return FoundLabel(name, mapping, _describe_share(sample, mapping))


def without_dictionary(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column with plain values instead of dictionary-encoded ones."""
    return pc.cast(column, column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _condition_of_text(where: str, column: pa.ChunkedArray) -> str:
    """Return the condition for positive labels, e.g. ``== yes``. Raise `DataError` unless texts are like yes and no."""
    unique = pc.unique(without_dictionary(column)).drop_null().to_pylist()
    values = sorted(v.decode(errors="replace") if isinstance(v, bytes) else v for v in unique)
    positives = [v for v in values if v.strip().lower() in _POSITIVE_TEXTS]
    rest = [v for v in values if v not in positives]
    if len(positives) == 1 and len(rest) <= 1 and all(v.strip().lower() in _NEGATIVE_TEXTS for v in rest):
        return f"== {_quoted(positives[0])}"
    listed = ", ".join(repr(v) for v in values[:8])
    raise DataError(
        f"{where}: got text with {len(values):,} values ({listed}{', …' * (len(values) > 8)}), expected yes and no. "
        f'Set the positive values: --positive "== {_quoted(values[0]) if values else "yes"}" (or "in [a, b]"), or '
        "choose another column with --label."
    )


def _quoted(text: str) -> str:
    return text if text.strip() == text and text.isalnum() else f"'{text}'"


def _condition_of_numbers(where: str, column: pa.ChunkedArray) -> str | None:
    """Return the condition for positive labels: ``> 0`` for ±1, e.g. ``>= 4`` for ratings, None for values in 0 … 1."""
    values = arrow.to_float64(column)
    known = values[~np.isnan(values)]
    if not len(known):
        raise DataError(f"{where}: got no values, expected some. Set --label NAME.")
    different = np.unique(known)
    if different[0] >= 0 and different[-1] <= 1:
        return None
    if np.isin(different, (-1, 0, 1)).all():
        return "> 0"
    if len(different) > _MOST_RATINGS:
        raise DataError(
            f"{where}: got {len(different):,} distinct numbers from {known.min():g} to {known.max():g}, expected 0 "
            f'and 1. Set the positive values: --positive ">= {np.median(known):g}", or choose another column: --label.'
        )
    shares = np.array([(known >= value).mean() for value in different[1:]])
    return f">= {different[1:][np.abs(shares - 0.5).argmin()]:g}"


def _describe_share(sample: pa.Table, mapping: Label) -> str:
    column = pc.drop_null(sample[mapping.column])
    spread = ""
    if arrow.is_number(column.type):
        values = arrow.to_float64(column)
        column = column.filter(pa.array(~np.isnan(values)))
        different, counts = np.unique(values[~np.isnan(values)], return_counts=True)
        shares = zip(different, counts / max(1, len(column)), strict=True)
        if 0 < len(different) <= 11:
            spread = f" ({', '.join(f'{value:g}: {share:.0%}' for value, share in shares)})"
    labels = read_labels(column, mapping.column, mapping, RowLocation("the sample"))
    return f"{labels.mean():.1%} are positive by this condition{spread}"
