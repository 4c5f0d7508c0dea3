"""Decide what each column of a sample is for, by its name and its values: `find_labels`, `role_of`, `rule_of`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from hotbed.auc import auc
from hotbed.data import arrow_columns as arrow
from hotbed.data.columns import Label, Rule
from hotbed.data.drafting.profile import QUANTILES, ColumnProfile, is_counted, present_values, wide_numbers
from hotbed.data.encoding.labels import check_label, read_labels
from hotbed.data.files.text_dates import DatesFound, digit_layout, find_dates
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError, SpecError, did_you_mean

Role = Literal["id", "category", "list", "number", "time", "left out"]

LEAK = 0.995
"""AUC of a single column from which on it is taken to give the label away."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_ID_WORDS = _words(
    "id ids uid uuid guid key code hash sku isbn asin ip zip zipcode postcode user item product category cat type "
    "kind class brand shop store device site country region city state language channel campaign ad query movie "
    "song artist cluster segment bucket index number nr no visitor member account guest viewer player patient person "
    "client buyer seller merchant vendor supplier host listing author publisher advertiser creative banner placement "
    "page url domain site app cookie ip session video track album book article post topic tag genre game hotel "
    "restaurant company employer job course driver courier carrier warehouse zip zipcode postcode zone county area"
)
_NUMBER_WORDS = _words(
    "count counts cnt num qty quantity amount price cost value revenue total sum age duration seconds minutes "
    "hours length size width height weight distance score views clicks impressions visits sales income salary "
    "balance rate ratio pct percent avg mean min max std median temperature lat lon latitude longitude budget "
    "points"
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
_SURE_DATES = 24  # distinct numbers, all of which are dates by chance in no log
_MINUTES = 60  # an hour, month or minute of fewer values recurs
_FIRST_YEAR = 1900  # numbers from here on may begin with a year (202352), and no hour, month or minute is so large
_INDEX_NAMES = re.compile(
    r"(unnamed: \d+|__index_level_\d+__|level_\d+|index|row_?(id|nr|number|index)?|)", re.IGNORECASE
)
_FEW = 1_000
_LARGEST_ID = 2.0**64  # whole floats beyond it cannot come from ids of 64 bits
_FEWEST_OF_A_CLASS = 50
_FREQUENT = 0.6  # share from which on a class is found in most rows of any kind
_RECALL = 0.2  # share of a class that rows must have to give it away: a few rows may be of one class by another cause
_OTHERS = 0.02  # of the rows of the other class that chance would give, in rows that are of one class
_FEW_VALUES = 50
_COUNTS_FROM = -100  # some logs say by a small negative number that there is none
_LARGE, _COUNTS_TO = 2.0**24, 2.0**53  # no count is beyond the second
_UNIQUE_ROWS = 100  # of fewer rows nothing is said: any column may be unique in them
_LONG_TEXT = 60
_HUGE = 1e100
LABEL_NAMES = (
    *("label", "labels", "click", "clicks", "clicked", "is_click", "is_clicked", "target", "conversion", "y"),
    *("converted", "is_converted", "purchase", "purchased", "is_purchase", "bought", "buy", "is_buy", "outcome"),
)
RATING_NAMES = ("rating", "ratings", "stars")
_LABEL_WORDS = frozenset(
    (
        *("label", "target", "click", "clicks", "clicked", "clk", "conversion", "converted", "purchase", "purchased"),
        *("bought", "buy", "attributed", "outcome", "response", "responded", "install", "installed", "subscribed"),
        *("churn", "churned", "fraud", "liked", "class"),
    )
)
_BEFORE_LABELS = frozenset(("is", "was", "has", "did"))
_POSITIVE_TEXTS = ("yes", "true", "1", "y", "t", "positive", "pos", "clicked", "click", "converted", "buy", "+1")
_NEGATIVE_TEXTS = ("no", "false", "0", "n", "f", "negative", "neg", "not clicked", "none", "-1")
_MOST_RATINGS = 101

_YEAR_1990, _YEAR_2100 = 631_152_000, 4_102_444_800
_YEAR_2000, _YEAR_2035 = 946_684_800, 2_051_222_400
_UNITS = {1: "seconds", 1_000: "milliseconds", 1_000_000: "microseconds", 1_000_000_000: "nanoseconds"}


# -- columns of a sample -------------------------------------------------------------------------------------------


class SampledColumn(ColumnProfile):
    """Profile of a column in a sample of the rows, in their order, and further facts that decide its role."""

    def __init__(
        self,
        name: str,
        column: pa.ChunkedArray,
        total: int,  # rows of all data
        distinct: int | None,  # distinct values in all rows; None: those of the sample
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
        # Whether all numbers are integers of at most 64 bits, whatever their type, and whether they never fall.
        self.is_whole = self.is_sorted = False
        # Of values of at least 0, if the only negative value is -1, which many logs write for none.
        self.quantiles_from_0: tuple[float, ...] = ()
        if self.numbers is not None:
            numbers = wide_numbers(column)
            self._look_at_numbers(numbers[~np.isnan(numbers)])

    @property
    def is_number(self) -> bool:
        """Whether the values are numbers and no truth values."""
        return arrow.is_number(self.type) and not pa.types.is_boolean(self.type)

    @property
    def inexact(self) -> float | None:
        """The largest value, if floats of this type do not hold all integers of its size, so that ids lost digits."""
        largest = max(self.low, self.high, key=abs)
        is_float = pa.types.is_floating(self.type)
        return largest if is_float and abs(largest) > arrow.exact_integers(self.type) else None

    @property
    def present(self) -> int:
        """Estimated number of values in all rows."""
        return round(self.total * (1 - self.missing_share))

    def _look_at_numbers(self, values: arrow.Array) -> None:
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
    """What a column is good for, and why."""

    role: Role
    reason: str


def words_of(name: str) -> list[str]:
    """Words of a name in lower case: ``userId``, ``user_id`` and ``User ID`` have two."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name)
    return [word.lower() for word in re.split(r"[\W_\d]+", apart) if word]


def _named_as(name: str) -> Literal["id", "number", ""]:
    """Return what a name says of its integers by its last known word (``item_price``), but for ``num_items``."""
    words = words_of(name)
    if len(words) > 1 and words[0] in _NUMBER_FIRST:
        return "number"
    if not _MEASURES.isdisjoint(words) and words[-1] not in _CODES:
        return "number"
    said = [word for word in words if word in _ID_WORDS or word in _NUMBER_WORDS]
    return "" if not said else "id" if said[-1] in _ID_WORDS else "number"


def role_of(column: SampledColumn, leak: str | None) -> ColumnRole:
    """Return the role of a column that is neither label nor weight; ``leak`` is its `leak_reason`."""
    kind = column.type
    if not column.name:
        return ColumnRole("left out", "it has no name")
    if (reason := _no_input(kind)) is not None:
        return ColumnRole("left out", reason)
    if column.missing_share == 1 or not column.distinct:
        return ColumnRole("left out", "it is empty")
    if column.distinct == 1 and not column.missing_share:
        value = "" if not column.few else f" ({str(column.few[0])[:40]!r})"
        return ColumnRole("left out", f"all rows have the same value{value}")
    if leak is not None:
        return ColumnRole("left out", leak)
    if arrow.is_list(kind):
        return ColumnRole("list", f"{column.length:.3g} ids per row in the mean, {column.distinct:,} different ones")
    if column.dates == "other":
        return ColumnRole(
            "left out",
            "dates as text of several formats, or with an ambiguous day and month: later rows have values that "
            "training has not seen; written as 2024-12-31, splits can be by them",
        )
    if (reason := time_reason(column)) is not None:
        if column.is_number and not is_time_of_row(column):
            return ColumnRole("number", f"{reason}; a time, but by its name not that of the row")
        return ColumnRole("time", reason)
    if (reason := _row_number(column)) is not None:
        return ColumnRole("left out", reason)
    if pa.types.is_boolean(kind):
        return ColumnRole("category", "true or false")
    if arrow.is_text(kind):
        return _text(column)
    if column.is_whole:
        return _whole_number(column)
    return ColumnRole("number", "")


def _no_input(kind: pa.DataType) -> str | None:
    """Why a column of this type can be no input; None if it can."""
    inner = kind.value_type if arrow.is_list(kind) else kind
    if arrow.is_list(kind) and (pa.types.is_floating(inner) or pa.types.is_decimal(inner)):
        return "lists of floats, as embeddings are, are no inputs yet"
    known = arrow.is_number(inner) or arrow.is_text(inner) or arrow.is_time(kind)
    if not known or pa.types.is_null(kind):
        return (
            "it is empty"
            if pa.types.is_null(kind)
            else f"columns of type {kind} are no inputs yet{arrow.hint_for_struct(kind)}"
        )
    return None


class OneSided(NamedTuple):
    """Rows that are nearly all of one class."""

    rows: str  # how they differ from other rows
    label: int
    precision: float
    recall: float


def leak_reason(column: pa.ChunkedArray, labels: arrow.Array | None, name: str) -> str | None:
    """Return how a column of the sample gives the labels ``[n]`` of this name away; None if it does not."""
    if labels is None or arrow.is_list(column.type) or not is_counted(column.type):
        return None
    is_number = arrow.is_number(column.type) or arrow.is_time(column.type)
    numbers = wide_numbers(column) if is_number else None
    is_missing = column.is_null().to_numpy() if numbers is None else np.isnan(numbers)
    advice = "if it is known before the event, add it again"
    if (found := _either_way(_auc(is_missing.astype(np.float64), labels))) >= LEAK:
        return f"whether it is missing gives '{name}' away (AUC {found:.3f}); {advice}"
    if (found := _value_auc(column, numbers, labels)) >= LEAK:
        return f"it alone gives '{name}' away (AUC {found:.3f}); {advice}"
    if (rows := _one_sided(column, is_missing, labels)) is not None:
        shares = f"precision {rows.precision:.3f}, recall {rows.recall:.3f}"
        return f"it gives '{name}' away: in {rows.rows} the label is {rows.label} ({shares}); {advice}"
    return None


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


def time_reason(column: SampledColumn) -> str | None:
    """What kind of time a column holds; None if it holds none."""
    if column.is_time:
        return str(column.type)
    words = words_of(column.name)
    named = not (_TIME_WORDS | _OTHER_TIMES).isdisjoint(words)
    if column.dates == "sortable" and (named or column.length >= len("2024-12-31")):
        return "text that sorts by time"
    if column.dates == "format":
        return f"text of dates as {column.date_format}"
    named_layout = named or not _LAYOUT_WORDS.isdisjoint(words)
    sure = len(column.layout) > len("YYYYMM") and column.distinct >= _SURE_DATES and _named_as(column.name) != "id"
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
        if _named_as(column.name) == "id":
            continue
        in_order = column.is_sorted and column.distinct_share > 0.01
        # Ids of which each is met once or twice would say nothing, so nothing is lost where these are some.
        if (in_order or column.distinct_share >= 0.5) and _YEAR_2000 <= low <= high < _YEAR_2035:
            return f"{unit_name} since 1970, by its range" + (" and its order" if in_order else "")
    return None


def is_time_of_row(column: SampledColumn) -> bool:
    """Whether a column of times may say when the row happened: by its name, or because the rows are in its order."""
    words = {*words_of(column.name)}
    known = _TIME_WORDS | _LAYOUT_WORDS if column.layout else _TIME_WORDS
    return column.is_sorted or bool(words & known and not words & _OTHER_TIMES)


def is_named_like_time(column: SampledColumn) -> bool:
    """Return whether a name says that a column is the time of its row."""
    words = {*words_of(column.name)}
    recurs = column.distinct <= _MINUTES and not (column.low >= _FIRST_YEAR or column.dates)
    known = _TIME_WORDS if recurs else _TIME_WORDS | _LAYOUT_WORDS
    return bool(words & known and not words & _OTHER_TIMES)


def time_rank(name: str) -> int:
    """How well a time says when the row happened, by its name; the higher the better, 0 is another time."""
    words = {*words_of(name)}
    if words & _OTHER_TIMES:
        return 0
    return 2 if words & {"time", "timestamp", "ts", "datetime", "epoch", "when"} else 1


def _row_number(column: SampledColumn) -> str | None:
    whole = column.is_whole or arrow.is_text(column.type)
    unique = column.distinct_share > 0.999 and column.distinct > 0.9 * column.present
    if not whole or not unique:
        return None
    if _INDEX_NAMES.fullmatch(column.name) and column.is_whole:
        return "it numbers the rows"
    measures = column.is_number and _named_as(column.name) == "number"  # such as a duration in milliseconds
    if column.total >= _UNIQUE_ROWS and not measures:
        return "nearly every row has a value of its own, of which nothing can be learned for others"
    return None


def _text(column: SampledColumn) -> ColumnRole:
    if column.length > _LONG_TEXT and column.distinct_share > 0.5:
        return ColumnRole("left out", f"free text ({column.length:.0f} characters in the mean) is no input yet")
    return _ids(column)


def _ids(column: SampledColumn, why: str = "") -> ColumnRole:
    role: Role = "category" if column.distinct <= _FEW_VALUES else "id"
    many = f"{column.distinct:,} values"
    floats = "" if not pa.types.is_floating(column.type) else ", whole numbers stored as floats"
    return ColumnRole(role, f"{many}{floats}{why}")


def _whole_number(column: SampledColumn) -> ColumnRole:
    """Ids, categories or counts: by name, by the number of values, or by their distribution."""
    named = _named_as(column.name)
    if named == "id" and pa.types.is_decimal(column.type):
        return ColumnRole(
            "left out", f"its name is one of ids, but ids cannot be read from {column.type}; write it as integers"
        )
    if named == "id":
        return _ids(column)
    if named == "number" and column.distinct > 2:
        return ColumnRole("number", "")
    if pa.types.is_decimal(column.type):
        return ColumnRole("number", "")
    if column.distinct <= _FEW_VALUES or max(abs(column.low), abs(column.high)) > _COUNTS_TO:
        return _ids(column)
    if _is_signed_hash(column):
        return _ids(column, ", taken for signed hashes")
    quantiles = column.quantiles_from_0 or column.quantiles
    median, upper = quantiles[2], quantiles[4]
    # A few values beyond 2²⁴ among small ones may be ids of other systems: they alone make no count.
    tail = (50 * max(1.0, median) < column.high <= _LARGE) or upper > 8 * max(1.0, median)
    if tail and column.low > _COUNTS_FROM and column.high > 2 * column.distinct:
        return ColumnRole("number", "a count by its distribution")
    if column.low < 0 and not column.quantiles_from_0:
        return ColumnRole("number", "it has negative values")
    return _ids(column, ", taken for ids")


def _is_signed_hash(column: SampledColumn) -> bool:
    """Return whether integers are large on both sides of 0, and few are small: measures have many small values."""
    large = sum(abs(quantile) > _LARGE for quantile in column.quantiles)
    return column.low < -_LARGE and column.high > _LARGE and large >= len(column.quantiles) - 1


def rule_of(column: SampledColumn) -> tuple[Rule, str]:
    """How a number is to be normalized, with the reason; see `Numerical`."""
    first, lower, median, upper, last = column.quantiles or (0.0,) * 5
    spread = upper - lower
    if column.is_whole and column.low > _COUNTS_FROM and last > 4 * max(1.0, median):
        return "log", "a long tail, as counts have"
    if max(abs(column.low), abs(column.high)) > _HUGE:
        return "log", "numbers so large that their squares are beyond float64"
    if not spread:
        return ("log", "most values are alike, others far") if column.low >= 0 else ("asinh", "most values are alike")
    if column.low >= 0 and (last - median > 6 * spread or (median > 0 and last > 20 * median)):
        return _of_heavy_tail(median, lower)
    if last - upper > 3 * spread or lower - first > 3 * spread or column.high - median > 100 * spread:
        return "asinh", "heavy tails"
    if first > -6 and last < 6 and 0.4 < spread < 4 and abs(median) < 1 and column.low < 0:
        return "as_is", "it is about standardised already"
    skew = (last - median) / max(median - first, 1e-300)
    if column.low >= 0 and skew > 4:
        return _of_heavy_tail(median, lower)
    return "standard", f"from {first:.4g} to {last:.4g} without long tails"


def _of_heavy_tail(median: float, lower: float) -> tuple[Rule, str]:
    if median < 1:
        return "asinh", "a long tail of small numbers"
    return "log", "a long tail, as counts and prices have" if lower < 1e6 else "a long tail"


# -- labels --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoundLabel:
    """A label column, its condition if its values are not 0 and 1, and a remark for the recipe's reader."""

    name: str
    mapping: Label | None
    remark: str


def find_labels(
    path: str, sample: pa.Table, asked: Sequence[str], positive: str | None, *, needed: bool = True
) -> list[FoundLabel]:
    """Find labels by names and values, or check those that are ``asked`` for.

    ``positive`` is the condition of the only label (default: found). Unless ``needed``, there may be no label.
    """
    names: list[str] = sample.column_names
    for label in asked:
        if label not in names:
            raise DataError(f"{path} has no column '{label}'; it has {_listed(names)}{did_you_mean(label, names)}")
    candidates = list(asked) or _named(sample)
    if not candidates and not needed and positive is None:
        return []
    if not candidates:
        named = next((name for name in names if name.strip().lower() in (*LABEL_NAMES, *RATING_NAMES)), None)
        unfit = "" if named is None else f", but '{named}', which is {sample[named].type} and can be none"
        binary: list[str] = [name for name in names if _is_binary(sample[name])]
        binary.sort(key=lambda name: _LABEL_WORDS.isdisjoint(words_of(name)))
        hint = f", such as one of 0 and 1: {_listed(binary)}" if binary else ""
        raise DataError(
            f"{path} has no column named like a label ({', '.join(LABEL_NAMES[:10])}, …, {', '.join(RATING_NAMES)})"
            f"{unfit}; it has {_listed(names)}. Name one with --label NAME (label=… in Python){hint}"
        )
    if positive is not None and len(asked) > 1:
        raise SpecError(
            f"--positive says which values of one label are positive, and --label names {len(asked)}: "
            f"{', '.join(asked)}; leave it out, and write `positive` beside each in the recipe (docs/tasks.md)"
        )
    if positive is not None:
        mapping = Label(candidates[0], positive)
        check_label(mapping.column, sample.schema.field(mapping.column).type, mapping, path)
        return [FoundLabel(mapping.column, mapping, _share(sample, mapping))]
    return [_found(path, sample, name) for name in candidates]


def sample_labels(sample: pa.Table, found: FoundLabel) -> arrow.Array | None:
    """Labels of the sample ``[n]`` from 0 to 1; None where one is missing or another number."""
    column = sample[found.name]
    if column.null_count:
        return None
    labels = read_labels(column, found.name, found.mapping, RowLocation("the sample"))
    return labels if ((labels >= 0) & (labels <= 1)).all() else None


def _listed(names: Sequence[str]) -> str:
    most = 60
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _named(sample: pa.Table) -> list[str]:
    """Find columns named like labels: all of 0 and 1, or the first of others."""
    by_name = {name.strip().lower(): name for name in reversed(sample.column_names)}
    types = {lower: sample[name].type for lower, name in by_name.items()}
    named = [
        by_name[n]
        for n in LABEL_NAMES
        if (kind := types.get(n)) is not None and (arrow.is_number(kind) or arrow.is_text(kind))
    ]
    binary = [name for name in sample.column_names if name in named and _is_binary(sample[name])]
    ratings = [by_name[n] for n in RATING_NAMES if n in by_name and arrow.is_number(sample[by_name[n]].type)]
    return binary or named[:1] or _like_labels(sample) or ratings[:1]


def _like_labels(sample: pa.Table) -> list[str]:
    """Find columns of 0 and 1 with a name such as ``isClick`` or ``was_converted``; ``Class`` if there is no other."""
    words = {name: [w for w in words_of(name) if w not in _BEFORE_LABELS] for name in sample.column_names}
    like = [n for n, of in words.items() if len(of) == 1 and of[0] in _LABEL_WORDS and _is_binary(sample[n])]
    return [name for name in like if words[name] != ["class"]] or like


def _is_binary(column: pa.ChunkedArray) -> bool:
    if pa.types.is_boolean(column.type):
        return True
    if not arrow.is_number(column.type) or column.null_count:
        return False
    values = arrow.to_float64(column)
    return bool(np.isin(values, (0, 1)).all())


def _found(path: str, sample: pa.Table, name: str) -> FoundLabel:
    kind = sample.schema.field(name).type
    if _is_binary(sample[name]):
        share = arrow.to_float32(
            pc.fill_null(sample[name], False) if pa.types.is_boolean(kind) else sample[name]
        ).mean()
        return FoundLabel(name, None, f"{share:.1%} are positive")
    if arrow.is_text(kind):
        mapping = _of_text(sample[name], name)
    elif arrow.is_number(kind):
        mapping = _of_numbers(sample[name], name)
    else:
        mapping = f"is {kind}, must be numbers, booleans or text; name another (--label)"
    if isinstance(mapping, str):
        raise DataError(f"{path}: label column '{name}' {mapping}")
    return FoundLabel(name, mapping, "" if mapping is None else _share(sample, mapping))


def _of_text(column: pa.ChunkedArray, name: str) -> Label | str:
    """Return the condition for texts such as yes and no, or the problem of the column."""
    texts = pc.cast(column, column.type.value_type) if pa.types.is_dictionary(column.type) else column
    values = [
        v.decode(errors="replace") if isinstance(v, bytes) else v for v in pc.unique(texts).drop_null().to_pylist()
    ]
    positives = [v for v in values if v.strip().lower() in _POSITIVE_TEXTS]
    rest = [v for v in values if v not in positives]
    if len(positives) == 1 and len(rest) <= 1 and all(v.strip().lower() in _NEGATIVE_TEXTS for v in rest):
        return Label(name, f"== {_quoted(positives[0])}")
    shown = ", ".join(repr(v) for v in sorted(values)[:8])
    example = _quoted(sorted(values)[0]) if values else "yes"
    return (
        f"is text with {len(values):,} values ({shown}{', …' * (len(values) > 8)}); say "
        f'which are positive: --positive "== {example}" (or "in [a, b]"), or name another column with --label NAME'
    )


def _quoted(text: str) -> str:
    return text if text.strip() == text and text.isalnum() else f"'{text}'"


def _of_numbers(column: pa.ChunkedArray, name: str) -> Label | str | None:
    """Return the condition for ±1 and for ratings, None for numbers from 0 to 1, or the problem of the column."""
    values = arrow.to_float64(column)
    known = values[~np.isnan(values)]
    if not len(known):
        return "is empty; name another with --label NAME"
    if known.min() >= 0 and known.max() <= 1:
        return None
    different = np.unique(known)
    if np.isin(different, (-1, 0, 1)).all():
        return Label(name, "> 0")
    if len(different) == 2:
        return Label(name, f">= {different[1]:g}")
    if len(different) > _MOST_RATINGS:
        return (
            f"has {len(different):,} different numbers from {known.min():g} to "
            f"{known.max():g}, and labels are 0 and 1; say which are positive: --positive "
            f'">= {np.median(known):g}", or name another column with --label NAME'
        )
    shares = np.array([(known >= value).mean() for value in different[1:]])
    return Label(name, f">= {different[1:][np.abs(shares - 0.5).argmin()]:g}")


def _share(sample: pa.Table, mapping: Label) -> str:
    column = pc.drop_null(sample[mapping.column])
    values = arrow.to_float64(column) if arrow.is_number(column.type) else None
    if values is not None:
        column = column.filter(pa.array(~np.isnan(values)))
        values = values[~np.isnan(values)]
    labels = read_labels(column, mapping.column, mapping, RowLocation("the sample"))
    counts = Counter((values if values is not None else np.array([])).tolist())
    spread = ", ".join(f"{value:g}: {count / len(labels):.0%}" for value, count in sorted(counts.items()))
    spread = f" ({spread})" if 0 < len(counts) <= 11 else ""
    return f"{labels.mean():.1%} are positive by this{spread}"
