"""Assign roles to the columns of a data source: `Schema` names labels, weights, and dense and sparse inputs.

A schema does not depend on a file format. Each source has a schema, and models are built from the schema::

    hb.EmbeddingCollection(tables=schema.tables(dim=16), features=schema.features())
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, cast

from hotbed.checks import annotations_of, check, check_known, check_unique, naming
from hotbed.data.columns import Label, LabelWeight, Numerical, Scaling, SparseColumn, check_keys
from hotbed.data.derived_features import Bucket, Derived, check_derived, parse_feature
from hotbed.errors import SpecError
from hotbed.specs import Feature, OnBadId, Table

if TYPE_CHECKING:
    from torch import Tensor

_KEYS = ("sparse", "dense", "labels", "weight", "group", "features")
"""Keys of a schema's dict form."""
_LIMITS = ("max_len", "on_too_long", "padding")


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns of a data source by role.

    Parameters
    ----------
    sparse
        Sparse columns, at least one, in the order of the batch's features.
    dense
        Numerical columns, in the order of the batch's ``dense [B, I]``.
    labels
        Label columns, in the order of the batch's ``labels [B, T]``. Empty for predictions.
    weight
        Column of sample weights, or None. It applies to each label that has no weight column in ``label_weights``.
    group
        Column with the group of each sample (e.g. a user id, for grouped AUC), or None. Batches have it in ``extra``.
    scaling
        Dense columns that are scaled when they are read.
    numericals
        Dense columns that the model normalizes, see `hotbed.nn.normalize`. Dense columns that are neither in
        ``numericals`` nor in ``scaling`` are used as stored.
    positives
        Labels that are mapped to 0 and 1 when they are read. All other labels must be from 0 to 1.
    label_weights
        Labels with their own columns of sample weights. Then the batch's ``weights`` are ``[B, T]``, and all weights of
        a label without a weight column are 1.
    derived
        Derived features in order (``features`` of the dict form). A derived feature that is a model input is also in
        ``sparse`` or ``dense``, after the stored columns.

    Raises
    ------
    SpecError
        If there is no sparse column, a column has two roles, columns of a shared table have different numbers of rows,
        or an entry refers to an unknown column.
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
        for name, annotation in annotations_of(Schema).items():
            value = getattr(self, name)
            check(name, value, annotation, SpecError)
            object.__setattr__(self, name, tuple(value) if isinstance(value, list) else value)
        if not self.sparse:
            raise SpecError("sparse: got no column, expected at least one")
        weights = [name for name in self.weight_columns if name == self.weight or name not in self.labels]
        # The group may also be a feature (e.g. the user), so it is not among the names that must be unique.
        names = [c.name for c in self.sparse] + [*self.dense, *self.labels, *weights, *self.id_weights]
        if "" in names:
            raise SpecError("the schema: got a column with an empty name, expected text")
        check_unique("columns of the schema", names, SpecError, "Use each column in one role.")
        for field, columns, known in (
            ("scaling", [s.name for s in self.scaling], self.dense),
            ("numericals", [n.name for n in self.numericals], self.dense),
            ("positives", [p.column for p in self.positives], self.labels),
            ("label_weights", [w.label for w in self.label_weights], self.labels),
        ):
            for name in columns:
                check_known(field, name, known, SpecError)
            check_unique(field, columns, SpecError)
        if self.weight is not None and self.labels and len(self.label_weights) == len(self.labels):
            raise SpecError(
                f"weight: got '{self.weight}', but each label has its own weight column. Remove `weight`, or the "
                "weight of a label"
            )
        for name in {s.name for s in self.scaling} & {n.name for n in self.numericals}:
            raise SpecError(
                f"numerical column '{name}': got a scaling and a rule, expected one. Remove the column from `scaling` "
                "or `numericals`"
            )
        check_derived(self.derived, self.sparse, self.dense, {*self.labels, *self.weight_columns})
        derived = {d.name for d in self.derived}
        first: dict[str, SparseColumn] = {}
        for column in self.sparse:
            if column.weights is not None and column.name in derived:
                raise SpecError(
                    f"feature '{column.name}': weights: got '{column.weights}', expected null, because only stored ids "
                    "can have weights. Remove `weights` from the feature"
                )
            other = first.setdefault(column.table_name, column)
            if other.rows != column.rows:
                raise SpecError(
                    f"columns '{other.name}' and '{column.name}' of table '{column.table_name}': got rows "
                    f"{other.rows:,} and {column.rows:,}, expected equal numbers. Correct `rows` of one column"
                )

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows of each table, by name. Tables are in the order in which sparse columns first use them."""
        return {c.table_name: c.rows for c in self.sparse}

    @property
    def stored(self) -> tuple[tuple[SparseColumn, ...], tuple[str, ...]]:
        """Sparse and dense columns that are not derived."""
        made = {d.name for d in self.derived}
        return tuple(c for c in self.sparse if c.name not in made), tuple(n for n in self.dense if n not in made)

    @property
    def dense_features(self) -> int:
        """Number of dense inputs of a model: dense columns and indicators of missing values."""
        return len(self.dense) + len(self.indicators)

    @property
    def indicators(self) -> tuple[str, ...]:
        """Dense columns with an additional model input that indicates missing values, in order."""
        with_one = {n.name for n in self.numericals if n.missing == "indicator"}
        return tuple(name for name in self.dense if name in with_one)

    @property
    def weights(self) -> tuple[str | None, ...]:
        """The column of sample weights of each label, or None."""
        own = {w.label: w.column for w in self.label_weights}
        return tuple(own.get(label, self.weight) for label in self.labels)

    @property
    def weight_columns(self) -> tuple[str, ...]:
        """All columns of sample weights."""
        every = [self.weight, *(w.column for w in self.label_weights)]
        return tuple(dict.fromkeys(name for name in every if name is not None))

    @property
    def id_weights(self) -> tuple[str, ...]:
        """All columns of id weights, without duplicates. Several sparse columns may have the same weight column."""
        return tuple(dict.fromkeys(c.weights for c in self.sparse if c.weights is not None))

    def weights_of(self, weights: Tensor, column: str) -> Tensor:
        """Return the values ``[B]`` of a weight column. ``weights`` are a batch's weights, ``[B]`` or ``[B, T]``."""
        return weights if weights.dim() == 1 else weights[:, self.weights.index(column)]

    @property
    def inputs(self) -> Schema:
        """The schema without labels, weights and group, for predictions."""
        return replace(self, labels=(), positives=(), label_weights=(), weight=None, group=None)

    def only(self, features: Collection[str]) -> Schema:
        """Return the schema with these sparse columns only. Derived features that remaining columns need are kept."""
        sparse = tuple(column for column in self.sparse if column.name in features)
        needed = {*(column.name for column in sparse), *self.dense}
        for d in reversed(self.derived):
            if d.name in needed:
                needed.update(d.inputs)
        return replace(self, sparse=sparse, derived=tuple(d for d in self.derived if d.name in needed))

    def tables(self, dim: int | Mapping[str, int]) -> list[Table]:
        """Return the embedding tables of the sparse columns.

        Parameters
        ----------
        dim
            Length of the vectors of every table, or a mapping from table names to lengths.

        Raises
        ------
        SpecError
            If ``dim`` has an unknown table or lacks a table, or a value is out of range.
        """
        rows = self.rows
        if isinstance(dim, Mapping):
            for name in dim:
                check_known("dim", name, rows, SpecError)
            for name in rows:
                if name not in dim:
                    raise SpecError(f"dim: table '{name}' is missing. Add the table, or use one number for all tables")
        return [Table(name, r, dim[name] if isinstance(dim, Mapping) else dim) for name, r in rows.items()]

    def features(self, on_bad_id: OnBadId = "error") -> list[Feature]:
        """Return one feature per sparse column. ``on_bad_id`` is the policy of all features for out-of-range ids."""
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
        """Return plain values for JSON and YAML. `from_dict` is the inverse.

        An entry of ``dense`` is a name, ``{name, center, scale}`` for a scaling, or ``{name, rule, missing}`` for a
        normalization. An entry of ``labels`` is a name, or ``{column, positive, weight}`` for a label with a condition,
        a weight column, or both. An entry of ``features`` describes a derived feature, and the sparse or dense column
        that it creates.
        """
        scaled: dict[str, object] = {s.name: asdict(s) for s in self.scaling}
        for numerical in self.numericals:
            scaled[numerical.name] = {k: v for k, v in asdict(numerical).items() if v is not None}
        labels: dict[str, dict[str, str]] = {label.column: asdict(label) for label in self.positives}
        for own in self.label_weights:
            labels.setdefault(own.label, {"column": own.label})["weight"] = own.column
        sparse = {c.name: _sparse_entry(c) for c in self.sparse}
        stored_sparse, stored_dense = self.stored
        values: dict[str, object] = {
            "labels": [labels.get(name, name) for name in self.labels],
            "weight": self.weight,
            "group": self.group,
            "dense": [scaled.get(name, name) for name in stored_dense],
            "sparse": [sparse[c.name] for c in stored_sparse],
        }
        if self.derived:
            values["features"] = [
                {**d.entry(), **_input_entry(d, sparse.get(d.name), scaled.get(d.name, {"name": d.name}))}
                for d in self.derived
            ]
        return values

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> Schema:
        """Rebuild a schema from the values of `to_dict`. Missing keys have their defaults.

        Raises
        ------
        SpecError
            If a key is unknown or missing, or a value is out of range.
        """
        check_keys("the schema", values, _KEYS, ("sparse",))
        made = [parse_feature(where, entry) for where, entry in _entries(values, "features")]
        sparse = [_parse_sparse(where, entry) for where, entry in _entries(values, "sparse")]
        dense = [_parse_dense(where, entry) for where, entry in _entries(values, "dense")]
        for derived, column in made:
            if isinstance(column, SparseColumn):
                sparse.append(column)
            else:
                dense.append(_parse_dense("features", column if len(column) > 1 else derived.name))
        labels = [_parse_label(where, entry) for where, entry in _entries({"labels": ("label",), **values}, "labels")]
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


def _sparse_entry(column: SparseColumn) -> dict[str, object]:
    """Return an entry of ``sparse``. Unset limits and weights are omitted, because older releases reject these keys."""
    values = {f.name: getattr(column, f.name) for f in fields(column)}
    unset = _LIMITS if column.max_len is None else ("padding",) if column.padding is None else ()
    return {key: value for key, value in values.items() if key not in unset and (key != "weights" or value is not None)}


def _input_entry(derived: Derived, sparse: Mapping[str, object] | None, dense: object) -> Mapping[str, Any]:
    """Return the keys of an entry of ``features`` that describe the feature's sparse or dense column."""
    if sparse is None:
        return cast("Mapping[str, Any]", dense)
    unset = ("name", "rows", "ids") if isinstance(derived, Bucket) else ("name",)
    return {key: value for key, value in sparse.items() if key not in unset}


def _entries(values: Mapping[str, object], key: str) -> list[tuple[str, object]]:
    """Return the entries of the list ``values[key]``, each with its name for messages, e.g. ``sparse[0]``."""
    check(key, values.get(key, ()), list, SpecError)
    return [(f"{key}[{i}]", entry) for i, entry in enumerate(cast("Sequence[object]", values.get(key, ())))]


def _parse_sparse(where: str, entry: object) -> SparseColumn:
    if isinstance(entry, SparseColumn):
        return entry
    if not isinstance(entry, Mapping):
        raise SpecError(f"{where}: got {entry!r}, expected a mapping with at least `name` and `rows`")
    values = cast("Mapping[str, Any]", entry)
    check_keys(where, values, [field.name for field in fields(SparseColumn)], ("name", "rows"))
    with naming(where, SpecError):
        return SparseColumn(**values)


def _parse_dense(where: str, entry: object) -> str | Scaling | Numerical:
    """Parse an entry of ``dense``. An entry with constants and neither ``rule`` nor ``missing`` is a `Scaling`."""
    if isinstance(entry, Scaling | Numerical):
        return entry
    if not isinstance(entry, Mapping):
        return _name(where, entry)
    values = cast("Mapping[str, Any]", entry)
    check_keys(where, values, [field.name for field in fields(Numerical)], ("name",))
    with naming(where, SpecError):
        if not values.keys() & {"rule", "missing"}:
            return Scaling(**values)
        if "rule" not in values and values.get("center") is not None:
            values = {**values, "rule": "asinh"}
        return Numerical(**values)


def _parse_label(where: str, entry: object) -> tuple[str, Label | None, LabelWeight | None]:
    """Parse an entry of ``labels``. Return the column, its condition and its weight column."""
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
    check(where, value, str, SpecError, "Put the name in quotes, e.g. '10' or 'null'.")
    return str(value)
