"""Define what a schema says of one column: `SparseColumn`, `Numerical`, `Scaling`, `Label` and `LabelWeight`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, cast, get_args

from hotbed.checks import is_int
from hotbed.errors import SpecError, did_you_mean
from hotbed.pooling import Pooling
from hotbed.specs import OnTooLong, Padding

Rule: TypeAlias = Literal["as_is", "standard", "log", "quantile", "asinh"]
Missing: TypeAlias = Literal["error", "center", "indicator"]
Comparison: TypeAlias = Literal[">=", "<=", "==", "!=", ">", "<", "in"]


def check_values(where: str, values: Mapping[str, object], **rules: tuple[bool, str | tuple[str, ...]]) -> None:
    """Raise `SpecError` at the first of these values that is not right; a rule has the limit, or the choices."""
    for name, (is_right, wanted) in rules.items():
        if not is_right:
            value = values[name]
            if isinstance(wanted, tuple):
                wanted = f"one of {', '.join(wanted)}{did_you_mean(str(value), wanted)}"
            raise SpecError(f"{where}: {name} is {value!r}, must be {wanted}")


def check_keys(where: str, given: Mapping[str, object], known: Sequence[str], required: Sequence[str]) -> None:
    """Raise `SpecError` if an entry has an unknown key, or lacks a required one."""
    for key in given:
        if key not in known:
            raise SpecError(
                f"{where} has no key '{key}'; it may have {', '.join(known)}{did_you_mean(str(key), known)}"
            )
    for key in required:
        if key not in given:
            raise SpecError(f"{where} has no '{key}', which is required")


def is_at_least(value: object, least: int) -> bool:
    """Whether a value is an integer of at least this."""
    return is_int(value) and value >= least


def _choice(value: object, choices: object) -> tuple[bool, tuple[str, ...]]:
    return value in get_args(choices), get_args(choices)


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
        where, limit = f"sparse column '{self.name}'", self.max_len
        is_padded = self.padding in get_args(Padding) and self.pooling == "none" and limit is not None
        paddings = ", ".join(get_args(Padding))
        check_values(
            where,
            vars(self),
            weights=(self.weights not in ("", self.name), "the name of the column of the weights of its ids, or null"),
            rows=(is_at_least(self.rows, 1), "an integer of at least 1"),
            ids=(self.ids is None or is_at_least(self.ids, 1), "at least 1, or None for ragged"),
            pooling=_choice(self.pooling, Pooling),
            on_too_long=_choice(self.on_too_long, OnTooLong),
            max_len=(limit is None or is_at_least(limit, 1), "an integer of at least 1, or null"),
            padding=(
                self.padding is None or is_padded,
                f"null, or one of {paddings} in a column with pooling none and max_len",
            ),
        )
        if self.on_too_long != "error" and limit is None:
            raise SpecError(f"{where}: on_too_long {self.on_too_long!r} needs max_len; set it")

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
        where, wanted = f"numerical column '{self.name}'", "a finite number"
        constants = {"center": (_is_finite(self.center), wanted), "scale": (_is_finite(self.scale), wanted)}
        check_values(where, vars(self), **constants)
        check_values(where, vars(self), scale=(self.scale > 0, "above 0"))


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
        where = f"numerical column '{self.name}'"
        check_values(where, vars(self), rule=_choice(self.rule, Rule), missing=_choice(self.missing, Missing))
        has_both = (self.center is None) == (self.scale is None)
        wanted = f"given together with scale, which is {self.scale}; leave out both to have them measured"
        check_values(where, vars(self), center=(has_both, wanted))
        if self.center is not None and self.rule in ("as_is", "quantile"):
            raise SpecError(
                f"{where}: center is set, but rule {self.rule} has no constants. Leave out center and scale, or use "
                "standard, log or asinh"
            )
        if self.center is not None and self.scale is not None:
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


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


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
