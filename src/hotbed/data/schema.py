"""Define `Schema`: which columns of a data source are labels, weights, dense and sparse inputs of which tables.

A schema knows nothing about files. A source carries one, and a model is built from it::

    hb.EmbeddingCollection(tables=schema.tables(dim=16), features=schema.features())
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast, get_args

from hotbed.errors import SpecError, did_you_mean
from hotbed.pooling import Pooling
from hotbed.specs import Feature, OnBadId, Table, is_int


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

    def __post_init__(self) -> None:
        if not self.name or self.table == "":
            raise SpecError("a sparse column and its table need non-empty names")
        if not is_int(self.rows) or self.rows < 1:
            raise SpecError(f"sparse column '{self.name}': rows is {self.rows!r}, must be an integer of at least 1")
        if self.ids is not None and (not is_int(self.ids) or self.ids < 1):
            raise SpecError(f"sparse column '{self.name}': ids is {self.ids!r}, must be at least 1, or None for ragged")
        if self.pooling not in get_args(Pooling):
            choices = ", ".join(get_args(Pooling))
            raise SpecError(f"sparse column '{self.name}': pooling is {self.pooling!r}, must be one of {choices}")

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
class Schema:
    """The columns of a data source by their role.

    Parameters
    ----------
    sparse
        Sparse columns, at least one, in the order of the batch's features.
    dense
        Numerical columns, in the order of the batch's ``dense [B, I]``.
    labels
        Label columns, in the order of the batch's ``labels [B, T]``; empty where only predictions are wanted.
    weight
        Column of sample weights, or None.
    group
        Column whose values group samples (a user id, for grouped AUC), or None. It is in the batch's ``extra``.
    scaling
        Dense columns that are scaled when they are read; the others are taken as they are.

    Raises
    ------
    SpecError
        If there is no sparse column, a name has two roles, columns disagree about the rows of a shared table, or a
        scaling is of no dense column.
    """

    sparse: tuple[SparseColumn, ...]
    dense: tuple[str, ...] = ()
    labels: tuple[str, ...] = ("label",)
    weight: str | None = None
    group: str | None = None
    scaling: tuple[Scaling, ...] = ()

    def __post_init__(self) -> None:
        for field in ("sparse", "dense", "labels", "scaling"):
            value = getattr(self, field)
            if isinstance(value, str):
                raise SpecError(f"{field} is {value!r}, must be a list of columns; write [{value!r}]")
            object.__setattr__(self, field, tuple(value))
        if not self.sparse:
            raise SpecError("a schema needs at least one sparse column")
        # The group column is left out: grouping by a column that is also a feature (the user) is the usual case.
        names = [c.name for c in self.sparse] + [*self.dense, *self.labels, *((self.weight,) if self.weight else ())]
        for name, count in Counter(names).items():
            if not name:
                raise SpecError("a column has an empty name")
            if count > 1:
                raise SpecError(f"column '{name}' is used {count} times in the schema; each column has one role")
        for name, count in Counter(s.name for s in self.scaling).items():
            if name not in self.dense:
                raise SpecError(f"scaling names '{name}', which is no dense column{did_you_mean(name, self.dense)}")
            if count > 1:
                raise SpecError(f"numerical column '{name}' is scaled {count} times; give it one scaling")
        first: dict[str, SparseColumn] = {}
        for column in self.sparse:
            other = first.setdefault(column.table_name, column)
            if other.rows != column.rows:
                raise SpecError(
                    f"columns '{other.name}' and '{column.name}' share table '{column.table_name}' but say it has "
                    f"{other.rows:,} and {column.rows:,} rows; give both the same"
                )

    @property
    def rows(self) -> dict[str, int]:
        """Rows by table name, in order of first use."""
        return {c.table_name: c.rows for c in self.sparse}

    def tables(self, dim: int | Mapping[str, int]) -> list[Table]:
        """Make the embedding tables of the sparse columns.

        Parameters
        ----------
        dim
            Columns of every table, or of each table by name.

        Raises
        ------
        SpecError
            If ``dim`` names an unknown table, leaves one out, or a value is out of range.
        """
        rows = self.rows
        if isinstance(dim, Mapping):
            for name in dim:
                if name not in rows:
                    raise SpecError(f"dim names table '{name}', which does not exist{did_you_mean(name, rows)}")
            for name in rows:
                if name not in dim:
                    raise SpecError(f"dim leaves out table '{name}'; give one number for all, or one for every table")
        return [Table(name, r, dim[name] if isinstance(dim, Mapping) else dim) for name, r in rows.items()]

    def features(self, on_bad_id: OnBadId = "error") -> list[Feature]:
        """One feature per sparse column, all with the same policy for ids out of range."""
        return [Feature(c.name, c.table_name, pooling=c.pooling, on_bad_id=on_bad_id) for c in self.sparse]

    def to_dict(self) -> dict[str, object]:
        """Plain values that JSON and YAML can hold; `from_dict` is the inverse.

        An entry of ``dense`` is the column's name, or ``{name, center, scale}`` where it is scaled.
        """
        scaled = {s.name: asdict(s) for s in self.scaling}
        return {
            "labels": list(self.labels),
            "weight": self.weight,
            "group": self.group,
            "dense": [scaled.get(name, name) for name in self.dense],
            "sparse": [{f.name: getattr(c, f.name) for f in fields(c)} for c in self.sparse],
        }

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> Schema:
        """Rebuild a schema from `to_dict`'s values; keys that are left out take their defaults.

        Raises
        ------
        SpecError
            If a key is unknown or missing, or a value cannot be right.
        """
        _check_keys("the schema", values, Schema, required=("sparse",), but=("scaling",))
        columns: list[SparseColumn] = []
        for i, entry in enumerate(_list("sparse", values["sparse"])):
            if isinstance(entry, SparseColumn):
                columns.append(entry)
                continue
            if not isinstance(entry, Mapping):
                raise SpecError(f"sparse[{i}] is {entry!r}, must be a mapping with at least `name` and `rows`")
            entry = cast("Mapping[str, object]", entry)
            _check_keys(f"sparse[{i}]", entry, SparseColumn, required=("name", "rows"))
            _name(f"sparse[{i}].name", entry["name"])
            if entry.get("table") is not None:
                _name(f"sparse[{i}].table", entry["table"])
            columns.append(SparseColumn(**cast("dict[str, Any]", dict(entry))))  # checked by SparseColumn itself
        rest = {key: value for key, value in values.items() if key != "sparse"}
        if "labels" in rest:
            rest["labels"] = tuple(_name(f"labels[{i}]", v) for i, v in enumerate(_list("labels", rest["labels"])))
        if "dense" in rest:
            dense = [_dense(f"dense[{i}]", entry) for i, entry in enumerate(_list("dense", rest["dense"]))]
            rest["dense"] = tuple(entry if isinstance(entry, str) else entry.name for entry in dense)
            rest["scaling"] = tuple(entry for entry in dense if isinstance(entry, Scaling))
        for key in ("weight", "group"):
            if rest.get(key) is not None:
                _name(key, rest[key])
        return Schema(sparse=tuple(columns), **cast("dict[str, Any]", rest))


def _dense(where: str, entry: object) -> str | Scaling:
    if not isinstance(entry, Mapping):
        return _name(where, entry)
    values = cast("Mapping[str, Any]", entry)
    _check_keys(where, values, Scaling, required=("name",))
    _name(f"{where}.name", values["name"])
    return Scaling(**values)


def _name(where: str, value: object) -> str:
    """A name as text: YAML reads an unquoted ``10``, ``null`` or ``yes`` as something else."""
    if not isinstance(value, str):
        raise SpecError(f"{where} is {value!r}, must be the name of a column; put it in quotes, as '10' or 'null'")
    return value


def _list(key: str, value: object) -> list[object]:
    if not isinstance(value, list | tuple):
        raise SpecError(f"{key} is {value!r}, must be a list")
    return list(cast("list[object]", value))


def _check_keys(
    what: str, given: Mapping[str, object], spec: type, required: tuple[str, ...], but: tuple[str, ...] = ()
) -> None:
    known = [f.name for f in fields(spec) if f.name not in but]
    for key in given:
        if key not in known:
            raise SpecError(f"{what} has no key '{key}'; it may have {', '.join(known)}{did_you_mean(key, known)}")
    for key in required:
        if key not in given:
            raise SpecError(f"{what} has no '{key}', which is required")
