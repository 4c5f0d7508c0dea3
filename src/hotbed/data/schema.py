"""Define `Schema`: which columns of a data source are labels, weights, dense and sparse inputs of which tables.

A schema knows nothing about files. A source carries one, and a model is built from it::

    hb.EmbeddingCollection(tables=schema.tables(dim=16), features=schema.features())
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from hotbed.data.columns import Label, LabelWeight, Numerical, Scaling, SparseColumn, check_keys
from hotbed.data.derived_features import Bucket, Derived, check_derived, parse_feature
from hotbed.errors import SpecError, did_you_mean
from hotbed.specs import Feature, OnBadId, Table

if TYPE_CHECKING:
    from torch import Tensor

_OF_COLUMNS = ("scaling", "numericals", "positives", "label_weights", "derived")
"""Fields of a schema that its dict form says beside the columns that they are of."""
_LIMITS = ("max_len", "on_too_long", "padding")


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
        Column of sample weights, or None: those of all labels that have none of their own.
    group
        Column whose values group samples (a user id, for grouped AUC), or None. It is in the batch's ``extra``.
    scaling
        Dense columns that are scaled when they are read.
    numericals
        Dense columns that the model normalizes, see `hotbed.nn.normalize`; a source hands them as they are stored.
        Dense columns of neither kind are taken as they are.
    positives
        Labels that are mapped to 0 and 1 when they are read; the others are from 0 to 1 as they are.
    label_weights
        Labels that have sample weights of their own; the batch's ``weights`` are then ``[B, T]``, 1 for a label that
        has none.
    derived
        How columns are made that are not stored, in order (``features`` of the dict form): crosses, buckets and values
        of tables. Those that are inputs are in ``sparse`` or ``dense``, too, after the stored ones.

    Raises
    ------
    SpecError
        If there is no sparse column, a name has two roles, columns disagree about the rows of a shared table, or what
        is said of a numerical or label is of no such column.
    """

    sparse: tuple[SparseColumn, ...]
    dense: tuple[str, ...] = ()
    labels: tuple[str, ...] = ("label",)
    weight: str | None = None
    group: str | None = None
    scaling: tuple[Scaling, ...] = ()
    numericals: tuple[Numerical, ...] = ()
    positives: tuple[Label, ...] = ()
    label_weights: tuple[LabelWeight, ...] = ()
    derived: tuple[Derived, ...] = ()

    def __post_init__(self) -> None:
        for field in ("sparse", "dense", "labels", "scaling", "numericals", "positives", "label_weights", "derived"):
            value = getattr(self, field)
            if isinstance(value, str):
                raise SpecError(f"{field} is {value!r}, must be a list of columns; write [{value!r}]")
            object.__setattr__(self, field, tuple(value))
        if not self.sparse:
            raise SpecError("a schema needs at least one sparse column")
        # The group column is left out: grouping by a column that is also a feature (the user) is the usual case.
        weights = [name for name in self.weight_columns if name == self.weight or name not in self.labels]
        names = [c.name for c in self.sparse] + [*self.dense, *self.labels, *weights, *self.id_weights]
        for name, count in Counter(names).items():
            if not name:
                raise SpecError("a column has an empty name")
            if count > 1:
                raise SpecError(f"column '{name}' is used {count} times in the schema; each column has one role")
        for field, of, known, kind, has in (
            ("scaling", [s.name for s in self.scaling], self.dense, "dense column", "scaling"),
            ("numericals", [n.name for n in self.numericals], self.dense, "dense column", "rule"),
            ("positives", [p.column for p in self.positives], self.labels, "label", "condition"),
            ("label_weights", [w.label for w in self.label_weights], self.labels, "label", "weight column"),
        ):
            for name, count in Counter(of).items():
                if name not in known:
                    raise SpecError(f"{field} names '{name}', which is no {kind}{did_you_mean(name, known)}")
                if count > 1:
                    raise SpecError(f"{kind} '{name}' has {count} {has}s; give it one")
        if self.weight is not None and self.labels and len(self.label_weights) == len(self.labels):
            raise SpecError(
                f"weight is '{self.weight}', but all labels have a weight column of their own; leave `weight` out, or "
                "that of a label"
            )
        for name in {s.name for s in self.scaling} & {n.name for n in self.numericals}:
            raise SpecError(f"numerical column '{name}' has a scaling and a rule; give it one of them")
        check_derived(self.derived, self.sparse, self.dense, {*self.labels, *self.weight_columns})
        for column in (c for c in self.sparse if c.weights is not None and c.name in {d.name for d in self.derived}):
            raise SpecError(
                f"sparse column '{column.name}' is made of other columns, and weights is '{column.weights}'; only ids "
                "that are stored have weights: leave it out"
            )
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

    @property
    def stored(self) -> tuple[tuple[SparseColumn, ...], tuple[str, ...]]:
        """Sparse and dense columns that are not derived."""
        made = {d.name for d in self.derived}
        return tuple(c for c in self.sparse if c.name not in made), tuple(n for n in self.dense if n not in made)

    @property
    def dense_features(self) -> int:
        """Dense inputs of a model: the dense columns, and an indicator for each that has one."""
        return len(self.dense) + len(self.indicators)

    @property
    def indicators(self) -> tuple[str, ...]:
        """Dense columns that have an indicator of missing values, in their order."""
        with_one = {n.name for n in self.numericals if n.missing == "indicator"}
        return tuple(name for name in self.dense if name in with_one)

    @property
    def weights(self) -> tuple[str | None, ...]:
        """The column of sample weights of each label; None where it has none."""
        own = {w.label: w.column for w in self.label_weights}
        return tuple(own.get(label, self.weight) for label in self.labels)

    @property
    def weight_columns(self) -> tuple[str, ...]:
        """All columns of sample weights."""
        every = [self.weight, *(w.column for w in self.label_weights)]
        return tuple(dict.fromkeys(name for name in every if name is not None))

    @property
    def id_weights(self) -> tuple[str, ...]:
        """All columns of weights of ids, which are inputs, too; sparse columns may share one."""
        return tuple(dict.fromkeys(c.weights for c in self.sparse if c.weights is not None))

    def weights_of(self, weights: Tensor, column: str) -> Tensor:
        """One of `weight_columns` ``[B]`` of a batch's weights, ``[B]`` or ``[B, T]``."""
        return weights if weights.dim() == 1 else weights[:, self.weights.index(column)]

    @property
    def inputs(self) -> Schema:
        """The same without labels, weight and group: what a prediction needs."""
        return replace(self, labels=(), positives=(), label_weights=(), weight=None, group=None)

    def only(self, features: Collection[str]) -> Schema:
        """The same with these sparse columns only, and what they and the dense columns are made of."""
        sparse = tuple(column for column in self.sparse if column.name in features)
        needed = {*(column.name for column in sparse), *self.dense}
        for d in reversed(self.derived):
            if d.name in needed:
                needed.update(d.inputs)
        return replace(self, sparse=sparse, derived=tuple(d for d in self.derived if d.name in needed))

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
        return [
            Feature(
                c.name,
                c.table_name,
                c.pooling,
                c.max_len,
                on_too_long=c.on_too_long,
                on_bad_id=on_bad_id,
                padding=c.padding,
            )
            for c in self.sparse
        ]

    def to_dict(self) -> dict[str, object]:
        """Plain values that JSON and YAML can hold; `from_dict` is the inverse.

        An entry of ``dense`` is the column's name, ``{name, center, scale}`` where it is scaled, or ``{name, rule,
        missing}`` where the model normalizes it; one of ``labels`` is its name, or ``{column, positive, weight}``
        with a condition, a column of weights, or both. Derived columns are in ``features``, where there are some, with
        all that is said of them.
        """
        scaled: dict[str, object] = {s.name: asdict(s) for s in self.scaling}
        for numerical in self.numericals:
            scaled[numerical.name] = {k: v for k, v in asdict(numerical).items() if v is not None}
        said: dict[str, dict[str, str]] = {label.column: asdict(label) for label in self.positives}
        for own in self.label_weights:
            said.setdefault(own.label, {"column": own.label})["weight"] = own.column
        sparse = {c.name: _entry(c) for c in self.sparse}
        of_columns, of_dense = self.stored
        values: dict[str, object] = {
            "labels": [said.get(name, name) for name in self.labels],
            "weight": self.weight,
            "group": self.group,
            "dense": [scaled.get(name, name) for name in of_dense],
            "sparse": [sparse[c.name] for c in of_columns],
        }
        if self.derived:
            values["features"] = [
                {**d.entry(), **_said(d, sparse.get(d.name), scaled.get(d.name, {"name": d.name}))}
                for d in self.derived
            ]
        return values

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> Schema:
        """Rebuild a schema from `to_dict`'s values; keys that are left out take their defaults.

        Raises
        ------
        SpecError
            If a key is unknown or missing, or a value cannot be right.
        """
        required, names = ("sparse",), [field.name for field in fields(Schema) if field.name not in _OF_COLUMNS]
        check_keys("the schema", values, [*names, "features"], required)
        made = [parse_feature(where, entry) for where, entry in _entries(values, "features")]
        sparse = [_sparse(where, entry) for where, entry in _entries(values, "sparse")]
        dense = [_dense(where, entry) for where, entry in _entries(values, "dense")]
        for derived, column in made:
            if isinstance(column, SparseColumn):
                sparse.append(column)
            else:  # its name alone where no rule is given
                dense.append(_dense("features", column if len(column) > 1 else derived.name))
        labels = [_label(where, entry) for where, entry in _entries({"labels": ("label",), **values}, "labels")]
        roles = {key: _name(key, values[key]) for key in ("weight", "group") if values.get(key) is not None}
        return Schema(
            sparse=tuple(sparse),
            dense=tuple(entry if isinstance(entry, str) else entry.name for entry in dense),
            labels=tuple(name for name, _, _ in labels),
            scaling=tuple(entry for entry in dense if isinstance(entry, Scaling)),
            numericals=tuple(entry for entry in dense if isinstance(entry, Numerical)),
            positives=tuple(label for _, label, _ in labels if label is not None),
            label_weights=tuple(weight for _, _, weight in labels if weight is not None),
            derived=tuple(derived for derived, _ in made),
            **roles,
        )


def _entry(column: SparseColumn) -> dict[str, object]:
    """One entry of ``sparse``; of limits and weights only those that are set, for readers that know of none."""
    values = {f.name: getattr(column, f.name) for f in fields(column)}
    left = _LIMITS if column.max_len is None else ("padding",) if column.padding is None else ()
    return {key: value for key, value in values.items() if key not in left and (key != "weights" or value is not None)}


def _said(derived: Derived, sparse: Mapping[str, object] | None, dense: object) -> Mapping[str, Any]:
    """What an entry of ``features`` says of the input that it makes."""
    if sparse is None:
        return cast("Mapping[str, Any]", dense)
    left = ("name", "rows", "ids") if isinstance(derived, Bucket) else ("name",)
    return {key: value for key, value in sparse.items() if key not in left}


def _entries(values: Mapping[str, object], key: str) -> list[tuple[str, object]]:
    """The entries of a list, each with what messages call it."""
    given = values.get(key, ())
    if not isinstance(given, list | tuple):
        raise SpecError(f"{key} is {given!r}, must be a list")
    return [(f"{key}[{i}]", entry) for i, entry in enumerate(cast("Sequence[object]", given))]


def _sparse(where: str, entry: object) -> SparseColumn:
    if isinstance(entry, SparseColumn):
        return entry
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where} is {entry!r}, must be a mapping with at least `name` and `rows`")
    values = cast("Mapping[str, Any]", entry)
    check_keys(where, values, [field.name for field in fields(SparseColumn)], ("name", "rows"))
    for key in ("name", "table", "weights"):
        if key == "name" or values.get(key) is not None:
            _name(f"{where}.{key}", values[key])
    return SparseColumn(**values)


def _dense(where: str, entry: object) -> str | Scaling | Numerical:
    """One entry of ``dense``; without a rule, constants alone are those of `Scaling`, as ever."""
    if isinstance(entry, Scaling | Numerical):
        return entry
    if not isinstance(entry, Mapping):
        return _name(where, entry)
    values = cast("Mapping[str, Any]", entry)
    check_keys(where, values, [field.name for field in fields(Numerical)], ("name",))
    _name(f"{where}.name", values["name"])
    if not values.keys() & {"rule", "missing"}:
        return Scaling(**values)
    if "rule" not in values and values.get("center") is not None:
        values = {**values, "rule": "asinh"}
    return Numerical(**values)


def _label(where: str, entry: object) -> tuple[str, Label | None, LabelWeight | None]:
    """One entry of ``labels``: its column, and its condition and its column of weights, where it has them."""
    if isinstance(entry, Label):
        return entry.column, entry, None
    if not isinstance(entry, Mapping):
        return _name(where, entry), None, None
    values = cast("Mapping[str, Any]", entry)
    check_keys(where, values, ("column", "positive", "weight"), ("column",))
    column, positive, weight = _name(f"{where}.column", values["column"]), values.get("positive"), values.get("weight")
    return (
        column,
        None if positive is None else Label(column, positive),
        None if weight is None else LabelWeight(column, _name(f"{where}.weight", weight)),
    )


def _name(where: str, value: object) -> str:
    """A name as text: YAML reads an unquoted ``10``, ``null`` or ``yes`` as something else."""
    if not isinstance(value, str):
        raise SpecError(f"{where} is {value!r}, must be the name of a column; put it in quotes, as '10' or 'null'")
    return value
