"""Describe derived inputs: features that are computed from stored columns when rows are encoded.

A schema lists these column transforms in ``features``: crosses of columns, buckets of numbers, and values of lookup
tables. To add a transform, add its class to this file. Then add a branch to `hotbed.data.encoding.derived_columns`
(which computes the transform), `hotbed.data.encoding.encoder` (which describes it to servers), `hotbed.data.schema`,
`hotbed.data.inspection` and `hotbed.cli.inspect`. Search for ``Bucket`` to find the lines to extend.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias, cast

from typing_extensions import override

from hotbed.checks import Range, Section, check, check_unique
from hotbed.data.columns import Finite, SparseColumn, check_keys
from hotbed.errors import SpecError

_MOST_BUCKETS = 1 << 20


@dataclass(frozen=True, kw_only=True)
class _Feature(Section, error=SpecError):
    name: str

    @override
    def where(self) -> str:
        return f"feature '{self.name}': "


@dataclass(frozen=True, kw_only=True)
class Cross(_Feature, error=SpecError):
    """The combination of values of several columns as one id: ``{name, cross: [user, item], rows: 100000}``.

    The table row is a hash of all values, in order, or 0 if a value is missing. Lists yield all combinations: a list of
    3 ids and a list of 2 ids yield 6 ids.
    """

    columns: tuple[str, ...]  # at least two stored columns, buckets or lookups

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "columns", tuple(self.columns))

    @override
    def contradictions(self) -> Iterator[str]:
        if len(self.columns) < 2 or len(set(self.columns)) < len(self.columns):
            yield f"{self.where()}cross: got {[*self.columns]}, expected at least two different columns"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns that the feature is computed from."""
        return self.columns

    def entry(self) -> dict[str, object]:
        """Return the keys of the feature's entry in ``features`` that define how the feature is computed."""
        return {"name": self.name, "cross": list(self.columns)}


@dataclass(frozen=True, kw_only=True)
class Bucket(_Feature, error=SpecError):
    """The interval of a number as an id: ``{name, bucket: age, boundaries: [18, 25, 40]}``.

    Null and NaN have table row 0. Numbers below the first boundary have row 1, numbers of the next interval have row 2,
    etc. A boundary belongs to the interval above it.
    """

    column: str  # a stored numerical, or a lookup whose values are numbers
    boundaries: tuple[Finite, ...] | None = None  # ascending
    # The number of intervals with equal counts. Boundaries are then measured once over the train split, and saved in
    # checkpoints.
    quantiles: Annotated[int, Range(least=2, most=_MOST_BUCKETS, name="an integer")] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.boundaries is not None:
            object.__setattr__(self, "boundaries", tuple(map(float, self.boundaries)))

    @override
    def contradictions(self) -> Iterator[str]:
        if (self.boundaries is None) == (self.quantiles is None):
            yield (
                f"{self.where()}got boundaries {self.boundaries} and quantiles {self.quantiles}, expected one of these "
                "keys. Set e.g. boundaries: [18, 25, 40], or quantiles: 16 to measure boundaries"
            )
        if (cuts := self.boundaries) is not None and (
            not 0 < len(cuts) < _MOST_BUCKETS or list(cuts) != sorted(set(cuts))
        ):
            yield (
                f"{self.where()}boundaries: got {[*cuts]}, expected ascending numbers, at most {_MOST_BUCKETS - 1:,}, "
                "e.g. [18, 25]"
            )

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns that the feature is computed from."""
        return (self.column,)

    @property
    def rows(self) -> int:
        """Number of rows of the feature's table: one per interval, and one for missing values."""
        return 2 + len(self.boundaries) if self.boundaries is not None else 1 + (self.quantiles or 0)

    def entry(self) -> dict[str, object]:
        """Return the keys of the feature's entry in ``features`` that define how the feature is computed."""
        cut = {"quantiles": self.quantiles} if self.boundaries is None else {"boundaries": list(self.boundaries)}
        return {"name": self.name, "bucket": self.column, **cut}


@dataclass(frozen=True, kw_only=True)
class Lookup(_Feature, error=SpecError):
    """The value of a key in a table of the user: ``{name, lookup: item, file: items.parquet, key: id, value: price}``.

    If the entry also has ``rows`` (of the embedding table), the value is an id, otherwise a number. Keys that the file
    lacks yield missing values. The file's keys and values are part of the model: a checkpoint holds their SHA-256, and
    is rejected if they have changed.
    """

    column: str  # a stored column or an earlier lookup that has the keys; each element of a list is looked up
    file: str  # path or URI of a Parquet, CSV or TSV file
    key: str  # column of the file, with distinct values
    value: str

    @override
    def contradictions(self) -> Iterator[str]:
        for key, name in self.entry().items():
            if not name:
                yield f"{self.where()}{key}: got '', expected a name"

    @property
    def inputs(self) -> tuple[str, ...]:
        """Columns that the feature is computed from."""
        return (self.column,)

    def entry(self) -> dict[str, object]:
        """Return the keys of the feature's entry in ``features`` that define how the feature is computed."""
        return {"name": self.name, "lookup": self.column, "file": self.file, "key": self.key, "value": self.value}


Derived: TypeAlias = Cross | Bucket | Lookup

_OF_IDS = ("rows", "table", "ids", "pooling")
_OF_NUMBERS = ("rule", "missing", "center", "scale")
_KEYS: Mapping[str, tuple[str, ...]] = {
    "cross": _OF_IDS,
    "bucket": ("boundaries", "quantiles", "table", "pooling"),
    "lookup": ("file", "key", "value", *_OF_IDS, *_OF_NUMBERS),
}
_REQUIRED = {"cross": ("rows",), "bucket": (), "lookup": ("file", "key", "value")}


def parse_feature(where: str, entry: object) -> tuple[Derived, SparseColumn | dict[str, Any]]:
    """Parse an entry of ``features``. Return the derived feature, and its sparse column or its entry of ``dense``."""
    values = dict(cast("Mapping[str, Any]", entry)) if isinstance(entry, Mapping) else {}
    ways = [way for way in _KEYS if way in values]
    if len(ways) != 1:
        raise SpecError(
            f"{where}: got {entry!r}, expected a mapping with `name` and one of `cross`, `bucket` and `lookup`, e.g. "
            "{name: user_x_item, cross: [user, item], rows: 100000}"
        )
    (way,), name = ways, values.get("name")
    check(f"{where}: name", name, str, SpecError, "Put the name in quotes.")
    name = str(name)
    check_keys(f"{where} ('{name}', a {way})", values, ("name", way, *_KEYS[way]), _REQUIRED[way])
    of_ids = {key: values[key] for key in _OF_IDS if key in values}
    of_numbers = {key: values[key] for key in _OF_NUMBERS if key in values}
    if way == "cross":
        return Cross(name=name, columns=values[way]), SparseColumn(name=name, **of_ids)
    check(f"{where}: {way}", values[way], str, SpecError, "Put the column in quotes.")
    if way == "bucket":
        bucket = Bucket(
            name=name, column=values[way], boundaries=values.get("boundaries"), quantiles=values.get("quantiles")
        )
        return bucket, SparseColumn(name=name, rows=bucket.rows, **of_ids)
    lookup = Lookup(name=name, column=values[way], file=values["file"], key=values["key"], value=values["value"])
    if "rows" in values and not of_numbers:
        return lookup, SparseColumn(name=name, **of_ids)
    if of_ids:
        raise SpecError(
            f"{where} ('{name}'): got {', '.join([*of_ids, *of_numbers])}, expected keys of either an id or a number. "
            f"For an id, set `rows` and any of {', '.join(_OF_IDS[1:])}. For a number, set any of "
            f"{', '.join(_OF_NUMBERS)}"
        )
    return lookup, {"name": name, **of_numbers}


def check_derived(
    derived: Sequence[Derived], sparse: Sequence[SparseColumn], dense: Sequence[str], withheld: Collection[str]
) -> None:
    """Raise `SpecError` unless features can be computed in this order, and fit the columns of the same names.

    Features must not use the ``withheld`` columns (labels and sample weights), because data for predictions lack these
    columns.
    """
    names = [d.name for d in derived]
    check_unique("features of the schema", names, SpecError)
    known: dict[str, Derived] = {}
    columns = {c.name: c for c in sparse}
    for d in derived:
        for name in d.inputs:
            of, problem = known.get(name), ""
            if name in withheld:
                problem = f"the label or weight '{name}', which data for predictions lack. Use a different column"
            elif name in names and of is None:
                problem = f"'{name}', which is a later feature. Move '{name}' before '{d.name}' in `features`"
            elif isinstance(of, Cross):
                problem = f"the cross '{name}'. Use the columns of '{name}' instead: {', '.join(of.columns)}"
            elif isinstance(of, Bucket) and not isinstance(d, Cross):
                problem = f"the bucket '{name}'. Use '{of.column}' instead"
            if problem:
                raise SpecError(f"feature '{d.name}' is computed from {problem}")
        known[d.name] = d
        column = columns.get(d.name)
        if isinstance(d, Bucket) and column is not None and (column.rows, column.ids) != (d.rows, 1):
            raise SpecError(
                f"feature '{d.name}': got a sparse column of {column.rows:,} rows and {column.ids} ids, expected "
                f"{d.rows:,} rows (one per interval, and one for missing values) and 1 id"
            )
        if not isinstance(d, Lookup) and d.name in dense:
            raise SpecError(f"feature '{d.name}' is an id, but is listed in `dense`. Remove it from `dense`")
    for inputs in ([c.name for c in sparse], list(dense)):
        made = [name for name in inputs if name in known]
        if made and (inputs[-len(made) :] != made or made != [n for n in names if n in inputs]):
            raise SpecError(
                f"got the derived features {', '.join(made)} in this order, expected them after all stored columns, in "
                "the order of `features`. Reorder `sparse` and `dense`"
            )


def stored_inputs(derived: Sequence[Derived], kinds: tuple[type, ...]) -> list[str]:
    """Return the stored columns that features of these classes are computed from, without duplicates."""
    made = {d.name for d in derived}
    return list(dict.fromkeys(n for d in derived if isinstance(d, kinds) for n in d.inputs if n not in made))
