"""Detect the format of dates in text or digits, and parse text: `find_dates`, `parse_dates`."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.data import arrow_columns as arrow
from hotbed.errors import SpecError

if TYPE_CHECKING:  # imported on first use, because the import is slow
    import polars as pl

_YEAR_FIRST = r"(19|20)\d\d[-/](\d[-/]|\d\d[-/]\d([T ,]|$)|\d\d[-/]\d\d[T ,]+\d:)"
UNSORTED = rf"^({_YEAR_FIRST}|\d\d?[-/. ](\d\d?|[A-Za-z]{{3,}})[-/. ])"
"""Pattern of dates that do not sort by time as text, e.g. ``2024-1-31``, ``2024-01-31 9:05`` and ``31/1/2024``."""

_DAYS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%Y.%m.%d", "%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%m.%d.%Y", "%d-%m-%Y", "%m-%d-%Y"),
    *("%d %m %Y", "%m %d %Y", "%d/%m/%y", "%m/%d/%y", "%d %b %Y", "%d-%b-%Y", "%d/%b/%Y", "%d.%b.%Y"),
)
_CLOCKS = ("", " %H:%M", " %H:%M:%S%.f", "T%H:%M", "T%H:%M:%S%.f", " %I:%M %p", " %I:%M:%S %p", ", %H:%M")
_ZONES = ("T%H:%M%z", "T%H:%M:%S%.f%z", " %H:%M%z", " %H:%M:%S%.f%z")
_ZONED = r"^.*\d:\d\d(?:[.,]\d+)? ?(Z|UTC|[+-]\d\d:?\d\d)$"
_FIRST = 20  # number of first values that are parsed to rule out most formats
_YEARS = (1900, 2100)

_CLOCK = r"([T ,]+\d{1,2}:\d\d.{0,20})?$"
_PADDED_CLOCK = r"([T ,]+\d\d:\d\d(:\d\d([.,]\d+)?)?( ?(Z|UTC|[+-]\d\d:?\d\d))?)?$"
_SORTABLE_DATE = r"^(19|20)\d\d[-/.](0\d|1[0-2])([-/.][0-3]\d" + _PADDED_CLOCK + "|$)"
_YEAR_FIRST_DATE = r"^(19|20)\d\d([-/]\d\d?[-/]|[.]\d\d[.])[0-3]?\d" + _CLOCK
_DAY_AND_MONTH = r"[0-3]?\d[-/. ]([01]?\d|[A-Z][a-z]{2})|[01]?\d[-/.][0-3]?\d"
_OTHER_DATE = rf"^(({_DAY_AND_MONTH})[-/. ](19|20)\d\d|\d\d?/\d\d?/\d\d){_CLOCK}"

_PARTS = {"S": (0, 59), "M": (0, 59), "H": (0, 23), "D": (1, 31), "N": (1, 12)}
_LAYOUTS = {
    "YYYYMMDDHHMMSS": ("SMHDN", 1990, 2100),
    "YYYYMMDDHHMM": ("MHDN", 1990, 2100),
    "YYYYMMDDHH": ("HDN", 1990, 2100),
    "YYYYMMDD": ("DN", 1990, 2100),
    "YYYYMM": ("N", 1990, 2100),
    "YYMMDDHH": ("HDN", 1, 99),
}


class DatesFound(NamedTuple):
    """The format of dates in a column of text."""

    # sortable: dates like 2024-12-31, which sort by time as text; format: dates like 31/12/2024 with a `format`;
    # other: dates that several formats fit, or with several formats; "": no dates with separators
    dates: Literal["", "sortable", "format", "other"] = ""
    format: str | None = None  # ``strptime`` format, see `date_format`
    layout: str = ""  # layout of dates in digits only, see `digit_layout`


def find_dates(values: pa.Array) -> DatesFound:
    """Return the format that all of these distinct texts ``[u]`` have, if they are dates."""

    def are(pattern: str) -> bool:  # whether all texts match
        return bool(len(values)) and pc.all(pc.match_substring_regex(values, pattern)).as_py()

    if are(r"^\d{6,14}$") and len(pc.unique(pc.binary_length(values))) == 1:
        digits = pc.cast(pc.cast(values, pa.large_string()), pa.int64()).to_numpy()
        return DatesFound(layout=digit_layout(digits))
    if are(_SORTABLE_DATE) and not pc.any(other_zones(pc.cast(values, pa.large_string()))).as_py():
        return DatesFound("sortable")
    if are(_YEAR_FIRST_DATE) or are(_OTHER_DATE):
        found = date_format(values)
        return DatesFound("other" if found is None else "format", found)
    return DatesFound()


def digit_layout(values: arrow.Array) -> str:
    """Return the layout that all of these integers ``[u]`` have if they are dates, e.g. ``YYMMDDHH``, or ""."""
    for layout, (parts, first, last) in _LAYOUTS.items():
        rest, fits = values.astype(np.int64), np.ones(len(values), np.bool_)
        for low, high in (_PARTS[part] for part in parts):
            fits &= (rest % 100 >= low) & (rest % 100 <= high)
            rest = rest // 100
        if (fits & (rest >= first) & (rest <= last)).all():
            return layout
    return ""


def date_format(texts: pa.Array) -> str | None:
    """Return the ``strptime`` format that fits all of these texts ``[u]``, or None unless exactly one format fits."""
    series = _series(texts)
    formats = [day + clock for day, clock in product(_DAYS, (*_CLOCKS, *_ZONES))]
    for some in (series.head(_FIRST), series):
        fitting = [of for of in formats if _fits(_parse(some, of))]
        # In polars, "%#z" also accepts Z for UTC.
        with_z = [of.replace("%z", "%#z") for of in formats if "%z" in of]
        formats = fitting or [of for of in with_z if _fits(_parse(some, of))]
    return formats[0] if len(formats) == 1 else None


def other_zones(texts: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return a mask ``[n]`` of texts that cannot be sorted by time together with the first text.

    In such a text, the time zone or the number of digits differs from the first text.
    """
    zoned = pc.match_substring_regex(texts, _ZONED)
    zones = pc.replace_substring_regex(texts, _ZONED, r"\1")
    none = pa.scalar("", texts.type)
    layouts = pc.binary_join_element_wise(pc.replace_substring_regex(texts, r"\d", "0"), zones, none)
    found = pc.if_else(zoned, layouts, none)
    first = next((text for text in pc.unique(found).to_pylist() if text is not None), "")
    return pc.not_equal(found, pa.scalar(first, texts.type))


def parse_dates(texts: pa.ChunkedArray, format: str) -> pa.ChunkedArray:
    """Parse text ``[n]`` to microseconds since 1970, int64. Text in a different format becomes null."""
    import polars as pl

    try:
        times = _parse(_series(texts), format)
    except pl.exceptions.PolarsError as error:
        reason = str(error).partition("\n")[0]
        raise SpecError(f"format of times: got {format!r}, expected e.g. '%Y-%m-%d %H:%M'. {reason}") from None
    return pa.chunked_array([times.to_physical().to_arrow()], pa.int64())


def _series(texts: pa.Array | pa.ChunkedArray) -> pl.Series:
    import polars as pl

    return pl.Series("", pl.from_arrow(pc.cast(texts, pa.large_string())), dtype=pl.String).str.strip_chars()


def _parse(texts: pl.Series, of: str) -> pl.Series:
    return texts.str.to_datetime(of, time_unit="us", strict=False)


def _fits(times: pl.Series) -> bool:
    years = times.dt.year()
    return times.null_count() == 0 and bool(years.is_between(*_YEARS).all())
