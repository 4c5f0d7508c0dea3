"""Define derived inputs: columns that are made of stored ones when rows are encoded (`features` of a schema)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from hotbed.checks import is_int
from hotbed.data.columns import SparseColumn, check_keys, check_values
from hotbed.errors import SpecError

MOST_BUCKETS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Cross:
    """The values of several columns together, as one id: ``{name, cross: [user, item], rows: 100000}``.

    Its row is the hash of all values, in this order; it is missing (row 0) if one of them is. Of lists, each value
    meets each of the others': a list of 3 crossed with one of 2 has 6 ids.
    """

    name: str
    columns: tuple[str, ...]  # two or more: stored columns, buckets, or values of tables

    def __post_init__(self) -> None:
        given: object = self.columns
        names = list(cast("Sequence[object]", given)) if isinstance(given, list | tuple) else []
        if len(names) < 2 or len(set(map(str, names))) < len(names) or not all(isinstance(n, str) for n in names):
            raise SpecError(
                f"feature '{self.name}': cross is {given!r}, must be two or more columns, each once: [user, item]"
            )
        object.__setattr__(self, "columns", tuple(names))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that it is made of."""
        return self.columns

    def entry(self) -> dict[str, object]:
        """What its entry of ``features`` says of it."""
        return {"name": self.name, "cross": list(self.columns)}


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """The interval that a number is in, as an id: ``{name, bucket: age, boundaries: [18, 25, 40]}``.

    Row 0 is for null and NaN, row 1 for numbers below the first boundary, and so on; a number that equals a boundary is
    above it.
    """

    name: str
    column: str  # a stored numerical, or a number of a table
    boundaries: tuple[float, ...] | None = None  # rising numbers
    # number of intervals with equally many values; measured once, over the train split, and kept in checkpoints
    quantiles: int | None = None

    def __post_init__(self) -> None:
        if (self.boundaries is None) == (self.quantiles is None):
            raise SpecError(
                f"feature '{self.name}': give boundaries: [18, 25, 40], or quantiles: 16 to have them measured, and "
                "not both"
            )
        if self.boundaries is not None:
            object.__setattr__(self, "boundaries", rising(self.name, self.boundaries))
            return
        good = is_int(self.quantiles) and 2 <= self.quantiles <= MOST_BUCKETS
        wanted = f"an integer from 2 to {MOST_BUCKETS:,}"
        check_values(f"feature '{self.name}'", vars(self), quantiles=(good, wanted))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that it is made of."""
        return (self.column,)

    @property
    def rows(self) -> int:
        """Rows of its table: the intervals, and one for what is missing."""
        return 2 + len(self.boundaries) if self.boundaries is not None else 1 + (self.quantiles or 0)

    def entry(self) -> dict[str, object]:
        """What its entry of ``features`` says of it."""
        cut = {"quantiles": self.quantiles} if self.boundaries is None else {"boundaries": list(self.boundaries)}
        return {"name": self.name, "bucket": self.column, **cut}


@dataclass(frozen=True, kw_only=True)
class Lookup:
    """A value that a table of the user's has for a key: ``{name, lookup: item, file: items.parquet, key: id, …}``.

    With ``rows`` it is an id, without a number. Keys that the table does not have are missing values. The table is
    part of the model: checkpoints know the SHA-256 of its keys and values, and refuse others.
    """

    name: str
    column: str  # holds the keys: a stored column, or a value of another table; each element of a list is looked up
    file: str  # path or URI of Parquet, CSV or TSV
    key: str  # column of the file, with distinct values
    value: str

    def __post_init__(self) -> None:
        given = {"lookup": self.column, "file": self.file, "key": self.key, "value": self.value}
        rules = {name: (_is_name(value), "text; put it in quotes") for name, value in given.items()}
        check_values(f"feature '{self.name}'", given, **rules)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The columns that it is made of."""
        return (self.column,)

    def entry(self) -> dict[str, object]:
        """What its entry of ``features`` says of it."""
        return {"name": self.name, "lookup": self.column, "file": self.file, "key": self.key, "value": self.value}


Derived: TypeAlias = Cross | Bucket | Lookup

_OF_IDS = ("rows", "table", "ids", "pooling")
_OF_NUMBERS = ("rule", "missing", "center", "scale")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "cross": _OF_IDS,
    "bucket": ("boundaries", "quantiles", "table", "pooling"),
    "lookup": ("file", "key", "value", *_OF_IDS, *_OF_NUMBERS),
}


def rising(name: str, boundaries: object) -> tuple[float, ...]:
    """Boundaries of a bucket; a `SpecError` if they are no rising finite numbers."""
    given = list(cast("Sequence[object]", boundaries)) if isinstance(boundaries, list | tuple) else [None]
    numbers = [float(b) for b in given if isinstance(b, int | float) and not isinstance(b, bool)]
    good = len(numbers) == len(given) and all(map(math.isfinite, numbers)) and numbers == sorted(set(numbers))
    if not good or not 0 < len(given) < MOST_BUCKETS:
        raise SpecError(f"feature '{name}': boundaries are {boundaries!r}, must be finite numbers that rise: [18, 25]")
    return tuple(numbers)


def parse_feature(where: str, entry: object) -> tuple[Derived, SparseColumn | dict[str, Any]]:
    """Return how an entry of ``features`` is made, and the sparse column or the entry of ``dense`` that it becomes."""
    values = dict(cast("Mapping[str, Any]", entry)) if isinstance(entry, Mapping) else {}
    ways = [way for way in _KEYS if way in values]
    if len(ways) != 1:
        raise SpecError(
            f"{where} is {entry!r}, must be a mapping with `name` and one of `cross`, `bucket` and `lookup`, such as "
            "{name: user_x_item, cross: [user, item], rows: 100000}"
        )
    (way,), name = ways, values.get("name")
    check_values(where, {"name": name}, name=(_is_name(name), "the name of the input; put it in quotes"))
    name, needed = str(name), {"cross": ["rows"], "lookup": ["file", "key", "value"]}.get(way, [])
    check_keys(f"{where} ('{name}', a {way})", values, ("name", way, *_KEYS[way]), needed)
    of_ids = {key: values[key] for key in _OF_IDS if key in values}
    of_numbers = {key: values[key] for key in _OF_NUMBERS if key in values}
    if way == "cross":
        return Cross(name=name, columns=values["cross"]), SparseColumn(name=name, **of_ids)
    if way == "bucket":
        column = values["bucket"]
        check_values(where, values, bucket=(_is_name(column), "the name of a column; put it in quotes"))
        cut = {key: values[key] for key in ("boundaries", "quantiles") if key in values}
        bucket = Bucket(name=name, column=column, **cut)
        return bucket, SparseColumn(name=name, rows=bucket.rows, **of_ids)
    lookup = Lookup(name=name, column=values[way], file=values["file"], key=values["key"], value=values["value"])
    if "rows" in values and not of_numbers:
        return lookup, SparseColumn(name=name, **of_ids)
    if of_ids:
        raise SpecError(
            f"{where} ('{name}') has {', '.join([*of_ids, *of_numbers])}; an id needs `rows`, and may have "
            f"{', '.join(_OF_IDS[1:])}; a number may have {', '.join(_OF_NUMBERS)}"
        )
    return lookup, {"name": name, **of_numbers}


def check_derived(
    derived: Sequence[Derived], sparse: Sequence[SparseColumn], dense: Sequence[str], withheld: Collection[str]
) -> None:
    """Raise `SpecError` unless columns can be made in this order, and are inputs that they can be.

    ``withheld`` are columns that predictions do not have: labels and weight.
    """
    known: dict[str, Derived] = {}
    names = [d.name for d in derived]
    for name, count in Counter(names).items():
        if count > 1:
            raise SpecError(f"feature '{name}' is there {count} times in the schema's features; name each once")
    columns = {c.name: c for c in sparse}
    for d in derived:
        for name in d.inputs:
            of, problem = known.get(name), ""
            if name in withheld:
                problem = f"'{name}', a label or weight, which predictions lack"
            elif name in names and of is None:
                problem = f"'{name}', which comes after it; put '{name}' first"
            elif isinstance(of, Cross):
                problem = f"the cross '{name}'; name its columns instead: {', '.join(of.columns)}"
            elif isinstance(of, Bucket) and not isinstance(d, Cross):
                problem = f"the bucket '{name}'; make it of '{of.column}'"
            if problem:
                raise SpecError(f"feature '{d.name}' is made of {problem}")
        known[d.name] = d
        column, problem = columns.get(d.name), ""
        if isinstance(d, Bucket) and column is not None and (column.rows, column.ids) != (d.rows, 1):
            problem = (
                f"has {d.rows:,} rows (intervals, and one for what is missing) and 1 id, and its sparse column says "
                f"{column.rows:,} rows and {column.ids} ids"
            )
        elif not isinstance(d, Lookup) and d.name in dense:
            problem = "is an id, and cannot be a dense column"
        if problem:
            raise SpecError(f"feature '{d.name}' {problem}")
    for inputs in ([c.name for c in sparse], list(dense)):
        made = [name for name in inputs if name in known]
        if made and (inputs[-len(made) :] != made or made != [n for n in names if n in inputs]):
            raise SpecError(f"features {', '.join(made)} must come after stored columns, in the order of `features`")


def stored_inputs(derived: Sequence[Derived], kinds: tuple[type, ...]) -> list[str]:
    """Stored columns that derived ones of these kinds are made of, each once."""
    made = {d.name for d in derived}
    return list(dict.fromkeys(n for d in derived if isinstance(d, kinds) for n in d.inputs if n not in made))


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""
