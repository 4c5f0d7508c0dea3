# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Find the types of columns that are given as text, over all rows, and convert them: `TypesOfText`."""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

if TYPE_CHECKING:  # imported where it is used: it takes a while
    import polars as pl

MISSING = ("NA", "N/A", "NaN", "nan", "null", "NULL", "None", "\\N", "-nan", "#N/A")
"""Texts that stand for a missing value among numbers, times and truth values; among other text they are text."""

_LONG = 16  # digits that a float64 does not hold
_PLUS = r"^\+[0-9]+$"
_MEASURE = r"^-|^[+0-9][0-9]*[.,eE]"


@dataclass(frozen=True)
class _Kind:
    """A type that text may be of: what it becomes, and null where it cannot."""

    type: pa.DataType
    parse: Callable[[pl.Series], pl.Series]
    note: str = ""


def _integers(text: pl.Series) -> pl.Series:
    import polars as pl

    return _only(text, r"^(?:\+?0|[+-]?[1-9][0-9]*)$").cast(pl.Int64, strict=False)  # 007 is a code


def _floats(text: pl.Series) -> pl.Series:
    import polars as pl

    written = r"^[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?$|^[+-]?[iI]nf(?:inity)?$"
    long = text.str.contains(rf"^[+-]?[0-9]{{{_LONG},}}$")
    kept = _only(text, written).set(long.fill_null(value=False), None)
    return kept.cast(pl.Float64, strict=False)


def _with_comma(text: pl.Series) -> pl.Series:
    import polars as pl

    return (
        _only(text, r"^[+-]?(?:0|[1-9][0-9]{0,14})(?:,[0-9]+)?$")
        .str.replace(",", ".", literal=True)
        .cast(pl.Float64, strict=False)
    )


def _with_thousands(text: pl.Series) -> pl.Series:
    import polars as pl

    kept = _only(text, r"^[+-]?(?:0|[1-9][0-9]{0,2})(?:,[0-9]{3})*(?:\.[0-9]+)?$")
    return kept.str.replace_all(",", "", literal=True).cast(pl.Float64, strict=False)


def _truth(text: pl.Series) -> pl.Series:
    import polars as pl

    return text.str.to_lowercase().replace_strict({"true": True, "false": False}, default=None, return_dtype=pl.Boolean)


def _dates(text: pl.Series) -> pl.Series:
    kept = _only(text, r"^[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}$").str.replace_all("/", "-", literal=True)
    return kept.str.to_date("%Y-%m-%d", strict=False)


def _times(text: pl.Series) -> pl.Series:
    clock = r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]+)?)?"
    kept = _only(text, rf"^[0-9]{{4}}[-/][0-9]{{1,2}}[-/][0-9]{{1,2}}[T ]{clock}$")
    kept = kept.str.replace("T", " ", literal=True).str.replace_all("/", "-", literal=True)
    kept = kept.str.replace("( [0-9]+:[0-9]+)$", "$1:00")
    return kept.str.to_datetime("%Y-%m-%d %H:%M:%S%.f", time_unit="us", strict=False)


def _zoned_times(text: pl.Series) -> pl.Series:
    import polars as pl

    kept = _only(text, r"^[0-9-]{10}[T ][0-9:]{8}(?:\.[0-9]+)?(?:Z|[+-][0-9]{2}:?[0-9]{2})$")
    kept = kept.str.replace("T", " ", literal=True).str.replace("Z$", "+0000")
    kept = kept.str.replace(r"([+-][0-9]{2}):([0-9]{2})$", "$1$2")
    found = kept.str.to_datetime("%Y-%m-%d %H:%M:%S%.f%z", time_unit="us", strict=False)
    return found.cast(pl.Datetime("us", "UTC"))


def _day_first(text: pl.Series) -> pl.Series:
    return _slashed(text, "$3-$2-$1")


def _month_first(text: pl.Series) -> pl.Series:
    return _slashed(text, "$3-$1-$2")


def _slashed(text: pl.Series, order: str) -> pl.Series:
    """Dates such as ``31/12/2024 9:05``, also with points or dashes, whose parts are in this order."""
    pattern = r"^([0-9]{1,2})[/.-]([0-9]{1,2})[/.-]([0-9]{4})(?: [0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?)?$"
    kept = _only(text, pattern)
    clock = kept.str.extract(" (.*)$").fill_null("0:00").str.replace("^([0-9]+:[0-9]+)$", "$1:00")
    days = kept.str.replace(" .*", "").str.replace(pattern, order)
    return (days + " " + clock).str.to_datetime("%Y-%m-%d %H:%M:%S", time_unit="us", strict=False)


def _only(text: pl.Series, pattern: str) -> pl.Series:
    """Text that a pattern matches; null where it does not."""
    return text.set(~text.str.contains(pattern).fill_null(value=True), None)


_KINDS = {
    "integer": _Kind(pa.int64(), _integers),
    "float": _Kind(pa.float64(), _floats),
    "truth": _Kind(pa.bool_(), _truth),
    "date": _Kind(pa.date32(), _dates),
    "time": _Kind(pa.timestamp("us"), _times),
    "zoned": _Kind(pa.timestamp("us", "UTC"), _zoned_times),
    "day first": _Kind(pa.timestamp("us"), _day_first, "dates are day/month/year, for some days are above 12"),
    "month first": _Kind(pa.timestamp("us"), _month_first, "dates are month/day/year, for some days are above 12"),
    "thousands": _Kind(pa.float64(), _with_thousands, "commas are taken to group digits by thousands (1,234.5)"),
    "comma": _Kind(pa.float64(), _with_comma, "commas are taken for decimal commas (1,5)"),
}


class TypesOfText:
    """Types of columns, narrowed down batch by batch; what no type fits is text, and so are the columns ``text``."""

    def __init__(self, names: Sequence[str], text: Collection[str] = ()) -> None:
        self._names = tuple(names)
        self._kinds = {name: [] if name in text else list(_KINDS) for name in names}
        self._empty = set(names)
        self._with_plus: set[str] = set()
        self._measures: set[str] = set()
        self._spaced = set(names)

    def look_at(self, batch: pa.Table) -> None:
        """Drop the types that do not fit all of these rows ``[n]`` of text."""
        for name in self._names:
            if name in self._spaced and pc.all(pc.starts_with(batch[name], " ")).as_py() is False:
                self._spaced.discard(name)
            if self._kinds[name]:
                text = _series(batch, name)
                if text.null_count() < len(text):
                    self._empty.discard(name)
                    few = text.head(1000)  # says most, quickly
                    fit = [k for k in self._kinds[name] if _fits(_KINDS[k], few) and _fits(_KINDS[k], text)]
                    self._kinds[name] = fit
                    self._look_at_signs(name, text)

    def _look_at_signs(self, name: str, text: pl.Series) -> None:
        """Note whether integers begin with "+", and whether other values show that it is the sign of a number."""
        if name not in self._with_plus and text.str.contains("+", literal=True).any():
            self._with_plus |= {name} if text.str.contains(_PLUS).any() else set()
        if name not in self._measures and text.str.contains(_MEASURE).any():
            self._measures.add(name)

    def schema(self) -> pa.Schema:
        """Names and types as far as they are known now; that of a column without values is null."""
        return pa.schema([(name, self._type(name)) for name in self._names])

    def notes(self) -> list[str]:
        """Say which columns were read in a way that is not plain."""
        return [f"column '{name}': {kind.note}" for name in self._names if (kind := self._kind(name)) and kind.note]

    def convert(self, batch: pa.Table) -> pa.Table:
        """Convert rows of text ``[n]`` to the types."""
        columns: list[pa.ChunkedArray] = []
        for name, field in zip(self._names, self.schema(), strict=True):
            kind = self._kind(name)
            if self._is_empty(name):
                columns.append(pa.chunked_array([pa.nulls(len(batch))]))
            elif kind is None:
                columns.append(_without_space(batch[name]) if name in self._spaced else batch[name])
            else:
                columns.append(pa.chunked_array([kind.parse(_series(batch, name)).to_arrow()]).cast(field.type))
        return pa.Table.from_arrays(columns, schema=self.schema())

    def _kind(self, name: str) -> _Kind | None:
        found = self._kinds[name]
        if not found or name in self._empty or {"day first", "month first"} <= {*found}:  # 1/2/2024 may be either
            return None
        if name in self._with_plus - self._measures:  # +49 and 12 alone may be telephone numbers
            return None
        return _KINDS[found[0]]

    def _type(self, name: str) -> pa.DataType:
        if self._is_empty(name):
            return pa.null()
        return pa.string() if (kind := self._kind(name)) is None else kind.type

    def _is_empty(self, name: str) -> bool:
        return bool(self._kinds[name]) and name in self._empty


def _without_space(text: pa.ChunkedArray) -> pa.ChunkedArray:
    """Remove spaces at the beginning of text ``[n]``; empty text becomes null."""
    text = pc.utf8_ltrim(text, " ")
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, text.type), text)


def _series(batch: pa.Table, name: str) -> pl.Series:
    """Return text ``[n]`` without spaces around it, and with null for what stands for a missing value."""
    import polars as pl

    text = pl.Series("", pl.from_arrow(batch[name]), dtype=pl.String)  # some names cannot go back to Arrow
    text = text.str.strip_chars()
    return text.set(text.is_in(("", *MISSING)), None)


def _fits(kind: _Kind, text: pl.Series) -> bool:
    return kind.parse(text).null_count() == text.null_count()
