"""Describe the columns of a schema: `SparseColumn`, `Numerical`, `Scaling`, `Label` and `LabelWeight`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple, TypeAlias, cast

from typing_extensions import override

from hotbed.checks import Count, Positive, Range, Section, check_known
from hotbed.errors import SpecError
from hotbed.specs import OnTooLong, Padding, Pooling

Rule: TypeAlias = Literal["as_is", "standard", "log", "quantile", "asinh"]
Missing: TypeAlias = Literal["error", "center", "indicator"]
Comparison: TypeAlias = Literal[">=", "<=", "==", "!=", ">", "<", "in"]
Finite = Annotated[float, Range(name="a finite number")]


def check_keys(where: str, entry: Mapping[str, object], known: Sequence[str], required: Sequence[str]) -> None:
    """Raise `SpecError` if an entry of a schema has an unknown key or lacks a required key."""
    for key in entry:
        check_known(f"{where}: key", key, known, SpecError)
    for key in required:
        if key not in entry:
            raise SpecError(f"{where}: key '{key}' is missing. Add it")


@dataclass(frozen=True, kw_only=True)
class SparseColumn(Section, error=SpecError):
    """A column of ids.

    Parameters
    ----------
    name
        Name of the column and of its feature.
    rows
        Number of rows of the embedding table. Ids are ``0 … rows − 1``.
    table
        Name of the embedding table (default: the name of the column). Several columns may use the same table.
    ids
        Number of ids per sample (1 is one-hot), or None if the number varies (ragged).
    pooling
        Pooling of the looked-up rows of one sample, see `Feature.pooling`.
    max_len, on_too_long
        Limit of the ids per sample, and the handling of samples with more ids, see `Feature.max_len`.
    padding
        Side on which vectors are padded if pooling is ``none``, see `Feature.padding`.
    weights
        Column with one weight per id, or None without weights. The column has lists if the ids are lists. Each
        looked-up row is multiplied by the weight of its id. A weight is any finite number, as in
        ``torch.nn.EmbeddingBag``.

    Raises
    ------
    SpecError
        If a value is out of range.
    """

    name: str
    rows: Count
    table: str | None = None
    ids: Count | None = 1
    pooling: Pooling = "sum"
    max_len: Count | None = None
    on_too_long: OnTooLong = "error"
    padding: Padding | None = None
    weights: str | None = None

    @override
    def where(self) -> str:
        return f"sparse column '{self.name}': "

    @override
    def contradictions(self) -> Iterator[str]:
        if not self.name or self.table == "":
            yield f"{self.where()}got an empty column or table name, expected text"
        if self.weights in ("", self.name):
            yield f"{self.where()}weights: got {self.weights!r}, expected null, or the name of a different column"
        if self.padding is not None and (self.pooling != "none" or self.max_len is None):
            yield f"{self.where()}padding: got {self.padding!r}, expected null unless pooling is none with a max_len"
        if self.on_too_long != "error" and self.max_len is None:
            yield f"{self.where()}on_too_long: got {self.on_too_long!r} without max_len. Set max_len"

    @property
    def table_name(self) -> str:
        """Name of the table, with the default filled in."""
        return self.name if self.table is None else self.table


@dataclass(frozen=True, kw_only=True)
class Scaling(Section, error=SpecError):
    """Scaling that is applied when a numerical column is read: ``asinh((x − center) ÷ scale)``.

    The function is linear around the center, and logarithmic far below and above the center. Missing values (null, NaN)
    and infinite values become 0, as if they were the center.

    Parameters
    ----------
    name
        A column of the schema's ``dense``.
    center, scale
        A typical value, and a typical distance of values from it.

    Raises
    ------
    SpecError
        If a constant is not finite, or the scale is not positive.
    """

    name: str
    center: Finite = 0.0
    scale: Positive = 1.0

    @override
    def where(self) -> str:
        return f"numerical column '{self.name}': "


@dataclass(frozen=True, kw_only=True)
class Numerical(Section, error=SpecError):
    """Normalization of a numerical column in the model, see `hotbed.nn.normalize`.

    Sources return these columns as stored, in float64. Statistics such as the mean are measured once over the train
    split and saved in checkpoints.

    Parameters
    ----------
    name
        A column of the schema's ``dense``.
    rule
        - ``"as_is"``: x.
        - ``"standard"``: ``(x − mean) ÷ standard deviation``.
        - ``"log"``: like ``standard``, applied to ``sign(x) · log(1 + |x|)``. Use this rule for counts and prices.
        - ``"quantile"``: the rank of x among 64 measured quantiles, interpolated, and scaled to −√3 … √3.
        - ``"asinh"``: ``asinh((x − median) ÷ scale)``, linear near the median and logarithmic far from it.
    missing
        Handling of null, NaN and infinite values. ``"center"`` replaces them by 0 after normalization. ``"indicator"``
        also replaces them by 0, and adds an input that is 1 for missing values. ``"error"`` raises an error that names
        the row.
    center, scale
        Constants for ``standard``, ``log`` (after the logarithm) and ``asinh``. By default they are measured. Set both
        or neither.

    Raises
    ------
    SpecError
        If a value is out of range, or constants do not fit the rule.
    """

    name: str
    rule: Rule = "as_is"
    missing: Missing = "center"
    center: Finite | None = None
    scale: Positive | None = None

    @override
    def where(self) -> str:
        return f"numerical column '{self.name}': "

    @override
    def contradictions(self) -> Iterator[str]:
        if (self.center is None) != (self.scale is None):
            yield f"{self.where()}got center {self.center} and scale {self.scale}, expected both or neither"
        if self.center is not None and self.rule in ("as_is", "quantile"):
            yield (
                f"{self.where()}center: got {self.center}, expected null, because rule {self.rule} has no constants. "
                "Remove center and scale, or set rule to standard, log or asinh"
            )

    @property
    def is_measured(self) -> bool:
        """Whether the rule needs statistics of the data."""
        return self.rule != "as_is" and self.center is None


class Condition(NamedTuple):
    """A comparison of a label with one value, or with several values if the comparison is ``in``."""

    comparison: Comparison
    values: tuple[str, ...]  # as text


@dataclass(frozen=True)
class Label:
    """A label column that is mapped to 1 if a condition is true, and to 0 if the condition is false.

    Parameters
    ----------
    column
        A column of the schema's ``labels``.
    positive
        The condition, e.g. ``">= 4"``, ``"< 1"``, ``"== yes"``, ``"!= 0"`` or ``"in [a, b]"``. Text columns support
        ``==``, ``!=`` and ``in``.

    Raises
    ------
    SpecError
        If the condition cannot be parsed.
    """

    column: str
    positive: str

    def __post_init__(self) -> None:
        self.condition()

    def condition(self) -> Condition:
        """Parse the condition."""
        found = re.fullmatch(r"\s*(>=|<=|==|!=|>|<|in(?=[\s\[]))\s*(.*?)\s*", str(self.positive))
        comparison, text = cast("tuple[Comparison, str]", found.groups()) if found else ("==", "")
        values = _parse_list(text) if comparison == "in" else (_unquote(text),) if text else ()
        if not values:
            raise SpecError(
                f"label '{self.column}': positive: got {self.positive!r}, expected a comparison in quotes, e.g. "
                "'>= 4', '== yes' or 'in [a, b]'"
            )
        return Condition(comparison, values)


@dataclass(frozen=True)
class LabelWeight:
    """The column with the sample weights of one label."""

    label: str
    # Numbers of at least 0. May also be a label, e.g. the click, to learn purchases only from clicked samples.
    column: str


def _parse_list(text: str) -> tuple[str, ...]:
    import yaml

    try:
        loaded: object = yaml.load(text, Loader=yaml.BaseLoader)  # BaseLoader reads all scalars as text
    except (yaml.YAMLError, RecursionError):
        return ()
    values = cast("list[object]", loaded) if isinstance(loaded, list) else []
    texts = [value for value in values if isinstance(value, str)]
    return tuple(texts) if len(texts) == len(values) else ()


def _unquote(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return text[1:-1] if is_quoted else text
