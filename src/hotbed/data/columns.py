"""Define what a schema says of one column: `SparseColumn`, `Numerical`, `Scaling`, `Label` and `LabelWeight`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from hotbed.errors import SpecError, did_you_mean
from hotbed.pooling import Pooling
from hotbed.specs import OnTooLong, Padding, is_int

Rule: TypeAlias = Literal["as_is", "standard", "log", "quantile", "asinh"]
Missing: TypeAlias = Literal["error", "center", "indicator"]
Comparison: TypeAlias = Literal[">=", "<=", "==", "!=", ">", "<", "in"]


@dataclass(frozen=True, kw_only=True)
class SparseColumn:
    """One sparse input column.

    Parameters
    ----------
    name
        Name of the column and of the feature made from it.
    rows
        Rows of its table: ids are ``0 … rows − 1``.
    table
        Name of its table; columns that name the same table share it. Default: a table of its own, named as the column.
    ids
        Ids per sample (1 is one-hot), or None where their number varies (ragged).
    pooling
        How the rows of one sample become one vector, see `Feature.pooling`.
    max_len, on_too_long
        Most ids of a sample, and what becomes of samples that have more, see `Feature.max_len`.
    padding
        Where vectors of a column with pooling ``none`` are padded, see `Feature.padding`.
    weights
        Column of the weights of its ids: a number for each, so a list where the ids are one. A weight multiplies the
        row of its id wherever that is looked up; it may be any finite number, as for ``torch.nn.EmbeddingBag``. None:
        all ids count the same.

    Raises
    ------
    SpecError
        If a value is out of range.
    """

    name: str
    rows: int
    table: str | None = None
    ids: int | None = 1
    pooling: Pooling = "sum"
    max_len: int | None = None
    on_too_long: OnTooLong = "error"
    padding: Padding | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        if not self.name or self.table == "":
            raise SpecError("a sparse column and its table need non-empty names")
        if self.weights in ("", self.name):
            raise SpecError(
                f"sparse column '{self.name}': weights is {self.weights!r}, must name the column of the weights of its "
                "ids, or be null"
            )
        if not is_int(self.rows) or self.rows < 1:
            raise SpecError(f"sparse column '{self.name}': rows is {self.rows!r}, must be an integer of at least 1")
        if self.ids is not None and (not is_int(self.ids) or self.ids < 1):
            raise SpecError(f"sparse column '{self.name}': ids is {self.ids!r}, must be at least 1, or None for ragged")
        for key, choices in (("pooling", get_args(Pooling)), ("on_too_long", get_args(OnTooLong))):
            value: object = getattr(self, key)
            if value not in choices:
                raise SpecError(f"sparse column '{self.name}': {key} is {value!r}, must be one of {', '.join(choices)}")
        if self.max_len is not None and (not is_int(self.max_len) or self.max_len < 1):
            raise SpecError(
                f"sparse column '{self.name}': max_len is {self.max_len!r}, must be an integer of at least 1, or null"
            )
        if self.padding is not None and self.padding not in get_args(Padding):
            choices = ", ".join(get_args(Padding))
            raise SpecError(
                f"sparse column '{self.name}': padding is {self.padding!r}, must be one of {choices}, or null"
            )
        if self.padding is not None and (self.pooling != "none" or self.max_len is None):
            raise SpecError(
                f"sparse column '{self.name}': padding is {self.padding!r}, but only columns with pooling none and "
                "max_len are padded; set both, or leave it out"
            )
        if self.max_len is None and self.on_too_long != "error":
            raise SpecError(
                f"sparse column '{self.name}': on_too_long is {self.on_too_long!r}, but nothing is too long without "
                "max_len; set it"
            )

    @property
    def table_name(self) -> str:
        """Name of the table, with the default filled in."""
        return self.name if self.table is None else self.table


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """What a numerical column becomes when it is read: ``asinh((x − center) ÷ scale)``.

    That is linear around the center and logarithmic far from it, on both sides. Values that are missing (null, NaN) or
    infinite become 0, which is what the center becomes.

    Parameters
    ----------
    name
        The column, one of the schema's ``dense``.
    center, scale
        Constants in the column's unit: a usual value, and a usual distance from it.

    Raises
    ------
    SpecError
        If a constant is not finite, or the scale is not positive.
    """

    name: str
    center: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        for key in ("center", "scale"):
            value: object = getattr(self, key)
            if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
                raise SpecError(f"numerical column '{self.name}': {key} is {value!r}, must be a finite number")
        if self.scale <= 0:
            raise SpecError(f"numerical column '{self.name}': scale is {self.scale}, must be above 0")


@dataclass(frozen=True, kw_only=True)
class Numerical:
    """How a model normalizes a numerical column, see `hotbed.nn.normalize`.

    The source hands such numbers as they are stored, as float64, and the model normalizes them by statistics of the
    train split, which are measured once and kept in checkpoints.

    Parameters
    ----------
    name
        The column, one of the schema's ``dense``.
    rule
        What a number x becomes: with ``"as_is"`` x; with ``"standard"`` ``(x − mean) ÷ standard deviation``; with
        ``"log"`` the same of ``sign(x) · log(1 + |x|)``, for counts and prices; with ``"quantile"`` its place among the
        values, by 64 quantiles with lines between them, from −√3 to √3; with ``"asinh"``
        ``asinh((x − median) ÷ usual distance from it)``, which is linear near the median and logarithmic far from it.
    missing
        What a value that is null, NaN or infinite becomes: ``"center"`` 0 after normalization; ``"indicator"`` the
        same, and one more input is 1 there and 0 elsewhere; ``"error"`` stops with the place of the value.
    center, scale
        Constants in the place of measured ones, both or neither, for the rules ``standard``, ``log`` (after the
        logarithm) and ``asinh``.

    Raises
    ------
    SpecError
        If a value is none of these, or constants do not fit the rule.
    """

    name: str
    rule: Rule = "as_is"
    missing: Missing = "center"
    center: float | None = None
    scale: float | None = None

    def __post_init__(self) -> None:
        for key, choices in (("rule", get_args(Rule)), ("missing", get_args(Missing))):
            value: object = getattr(self, key)
            if value not in choices:
                hint = did_you_mean(str(value), choices)
                raise SpecError(
                    f"numerical column '{self.name}': {key} is {value!r}, must be one of {', '.join(choices)}{hint}"
                )
        if (self.center is None) != (self.scale is None):
            raise SpecError(
                f"numerical column '{self.name}': center is {self.center} and scale is {self.scale}; give both, or "
                "neither and they are measured"
            )
        if self.center is not None and self.scale is not None:
            if self.rule in ("as_is", "quantile"):
                raise SpecError(
                    f"numerical column '{self.name}': rule {self.rule} has no center and scale; leave them out, or use "
                    "standard, log or asinh"
                )
            Scaling(name=self.name, center=self.center, scale=self.scale)

    @property
    def is_measured(self) -> bool:
        """Whether it needs statistics of the data."""
        return self.rule != "as_is" and self.center is None


class Positive(NamedTuple):
    """A parsed condition: the comparison, and the values that labels are compared with, as text."""

    comparison: Comparison
    values: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    """A label column whose values are mapped: 1 where a condition is true, 0 elsewhere.

    Parameters
    ----------
    column
        The column, one of the schema's ``labels``.
    positive
        The condition: ``">= 4"``, ``"> 3"``, ``"<= 2"``, ``"< 1"``, ``"== yes"``, ``"!= 0"`` or ``"in [a, b]"``, with
        numbers or text as the column has. Text knows ``==``, ``!=`` and ``in``.

    Raises
    ------
    SpecError
        If the condition is none of these.
    """

    column: str
    positive: str

    def __post_init__(self) -> None:
        self.parsed()

    def parsed(self) -> Positive:
        """Take the condition apart."""
        text: object = self.positive
        found = re.fullmatch(r"\s*(>=|<=|==|!=|>|<|in(?=[\s\[]))\s*(.*?)\s*", text) if isinstance(text, str) else None
        values: tuple[str, ...] = ()
        if found:
            values = _values(found[2]) if found[1] == "in" else (_unquoted(found[2]),)
        if found is None or not values or (found[1] != "in" and not found[2]):
            raise SpecError(
                f"label '{self.column}': positive is {text!r}, must be a comparison such as '>= 4', '== yes' or "
                "'in [a, b]', in quotes"
            )
        return Positive(found[1], values)  # pyright: ignore[reportArgumentType] (the pattern has no other)


@dataclass(frozen=True)
class LabelWeight:
    """The sample weights of one label, where it has its own."""

    label: str
    column: str  # stored numbers of at least 0; may be another label, e.g. to learn purchases from clicked samples only


def _values(text: str) -> tuple[str, ...]:
    """Texts of a list ``[a, b]``."""
    import yaml

    try:
        loaded: object = yaml.load(text, Loader=yaml.BaseLoader)  # all scalars of this loader are text
    except (yaml.YAMLError, RecursionError):
        return ()
    values = cast("list[object]", loaded) if isinstance(loaded, list) else []
    texts = [value for value in values if isinstance(value, str)]
    return tuple(texts) if len(texts) == len(values) else ()


def _unquoted(text: str) -> str:
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if quoted else text
