"""Say what a column is good for, by its name and its profile: `role_of`, and the rule for a numerical: `rule_of`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from hotbed.data import arrow
from hotbed.data.columns import Rule
from hotbed.data.profile import ColumnProfile

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
_FEW_VALUES = 50
_COUNTS_FROM = -100  # some logs say by a small negative number that there is none
_LARGE, _COUNTS_TO = 2.0**24, 2.0**53  # no count is beyond the second
_UNIQUE_ROWS = 100  # of fewer rows nothing is said: any column may be unique in them
_LONG_TEXT = 60
_HUGE = 1e100

_YEAR_1990, _YEAR_2100 = 631_152_000, 4_102_444_800
_YEAR_2000, _YEAR_2035 = 946_684_800, 2_051_222_400
_UNITS = {1: "seconds", 1_000: "milliseconds", 1_000_000: "microseconds", 1_000_000_000: "nanoseconds"}


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


def role_of(column: ColumnProfile, label: str) -> ColumnRole:
    """Role of a column that is neither label nor weight; the reason says what a recipe's reader may want to know."""
    kind = column.type
    if not column.name:
        return ColumnRole("left out", "it has no name")
    if (reason := _no_input(kind)) is not None:
        return ColumnRole("left out", reason)
    if column.missing == 1 or not column.distinct:
        return ColumnRole("left out", "it is empty")
    if column.distinct == 1 and not column.missing:
        value = "" if not column.few else f" ({str(column.few[0])[:40]!r})"
        return ColumnRole("left out", f"all rows have the same value{value}")
    if (reason := leak_reason(column, label)) is not None:
        return ColumnRole("left out", reason)
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


def leak_reason(column: ColumnProfile, label: str) -> str | None:
    """Return how a column gives a label away; None if it does not."""
    advice = "if it is known before the event, add it again"
    if column.missing_auc >= LEAK:
        return f"whether it is missing gives '{label}' away (AUC {column.missing_auc:.3f}); {advice}"
    if column.auc >= LEAK:
        return f"it alone gives '{label}' away (AUC {column.auc:.3f}); {advice}"
    if (found := column.one_sided) is not None:
        shares = f"precision {found.precision:.3f}, recall {found.recall:.3f}"
        return f"it gives '{label}' away: in {found.rows} the label is {found.label} ({shares}); {advice}"
    return None


def time_reason(column: ColumnProfile) -> str | None:
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


def is_time_of_row(column: ColumnProfile) -> bool:
    """Whether a column of times may say when the row happened: by its name, or because the rows are in its order."""
    words = {*words_of(column.name)}
    known = _TIME_WORDS | _LAYOUT_WORDS if column.layout else _TIME_WORDS
    return column.is_sorted or bool(words & known and not words & _OTHER_TIMES)


def is_named_like_time(column: ColumnProfile) -> bool:
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


def _row_number(column: ColumnProfile) -> str | None:
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


def _text(column: ColumnProfile) -> ColumnRole:
    if column.length > _LONG_TEXT and column.distinct_share > 0.5:
        return ColumnRole("left out", f"free text ({column.length:.0f} characters in the mean) is no input yet")
    return _ids(column)


def _ids(column: ColumnProfile, why: str = "") -> ColumnRole:
    role: Role = "category" if column.distinct <= _FEW_VALUES else "id"
    many = f"{column.distinct:,} values"
    floats = "" if not pa.types.is_floating(column.type) else ", whole numbers stored as floats"
    return ColumnRole(role, f"{many}{floats}{why}")


def _whole_number(column: ColumnProfile) -> ColumnRole:
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


def _is_signed_hash(column: ColumnProfile) -> bool:
    """Return whether integers are large on both sides of 0, and few are small: measures have many small values."""
    large = sum(abs(quantile) > _LARGE for quantile in column.quantiles)
    return column.low < -_LARGE and column.high > _LARGE and large >= len(column.quantiles) - 1


def rule_of(column: ColumnProfile) -> tuple[Rule, str]:
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
