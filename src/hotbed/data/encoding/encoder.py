"""Encode raw rows as a batch: `Encoder`, which training, evaluation, prediction and serving share.

Raw rows are Arrow columns, which `ParquetSource` reads from files, or lists of plain JSON values, which `Encoder.table`
checks and converts to Arrow. Each row is encoded independently of the rest.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.checks import check
from hotbed.data import arrow_columns as arrow
from hotbed.data.arrow_columns import Ids
from hotbed.data.columns import Numerical
from hotbed.data.derived_features import Bucket, Cross, Lookup, stored_inputs
from hotbed.data.encoding.derived_columns import Columns, check_derived_types, not_measured
from hotbed.data.encoding.json_rows import InputColumn, typed_table
from hotbed.data.encoding.labels import check_group, check_label, read_group, read_labels, weights_by_label
from hotbed.data.encoding.lookup_table import LookupTable
from hotbed.data.encoding.prepared_dataset import Preparation, hint_for_text
from hotbed.data.row_location import RowLocation, check_id_type
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged

_ROWS = RowLocation()


def read_numericals(table: Columns, schema: Schema) -> arrow.Array:
    """Return dense columns ``[n, I]``: float32, or float64 if the model normalizes some of the columns.

    Float64 represents every second since 1970 exactly. Float32 layers reject float64 inputs, so raw numbers cannot be
    used by mistake. Columns of `Schema.scaling` are scaled. Null becomes NaN in columns of `Schema.numericals`, and 0
    in all other columns.
    """
    scaling = {scaling.name: scaling for scaling in schema.scaling}
    numericals = {numerical.name: numerical for numerical in schema.numericals}
    columns: list[arrow.Array] = []
    for name in schema.dense:
        column = table[name]
        if name in numericals:
            columns.append(raw_numbers(column, numericals[name], table.location))
        elif name in scaling:
            columns.append(arrow.scale_numbers(column, scaling[name]))
        else:
            columns.append(np.where(arrow.null_mask(column), np.float32(0), arrow.to_float32(column)))
    return np.stack(columns, axis=1, dtype=np.float64 if numericals else np.float32)


def raw_numbers(column: pa.ChunkedArray, numerical: Numerical, location: RowLocation) -> arrow.Array:
    """Return a column ``[n]`` as float64 for a model that normalizes it. Null becomes NaN."""
    values = arrow.to_float64(column)
    if numerical.missing == "error":
        fix = "expected a finite number, because the schema sets missing: error. Set missing: center, or indicator"
        location.refuse(numerical.name, "missing numbers", ~np.isfinite(values), column, "{}", fix)
    return values


LISTS_OF = "lists of "
MOST_KEYS = 1_000_000
"""Limit of the keys of a lookup table in `describe_features`."""


def wrong_types(
    schema: Schema, ids: Ids, fields: pa.Schema, what: str, preparation: Preparation | None = None
) -> Iterator[tuple[str, SpecError]]:
    """Yield each stored column of the file ``what`` that has the wrong type for its role, and the error."""
    sparse, dense = schema.stored
    mapped = {label.column: label for label in schema.positives}
    kinds = {field.name: field.type for field in fields}
    checks: list[tuple[str, Callable[[], None]]] = []
    if preparation is None:
        plain = {c.name: arrow.plain_type(kinds[c.name]) for c in sparse if c.name in kinds}
        checks += [(c.name, partial(arrow.check_sparse, c, plain.get(c.name), ids, what)) for c in sparse]
    else:
        checks.append((next(iter(kinds), ""), partial(preparation.check, fields, what)))
    weighted = [c for c in sparse if c.name in kinds and c.weights in kinds]
    checks += [(str(c.weights), partial(arrow.check_id_weights, c, fields, what)) for c in weighted]
    for name in (name for name in [*dense, *schema.weight_columns] if name in kinds):
        if name not in dense or not pa.types.is_null(kinds[name]):
            checks.append((name, partial(arrow.check_number, name, kinds[name], what)))
    checks += [(n, partial(check_label, n, kinds.get(n), mapped.get(n), what)) for n in schema.labels]
    if schema.group is not None:
        checks.append((schema.group, partial(check_group, schema.group, kinds.get(schema.group), what)))
    for name, run_check in checks:
        if name in kinds:
            try:
                run_check()
            except SpecError as error:
                yield name, error


class Encoder:
    """Encodes raw rows as a `Batch`.

    Parameters
    ----------
    schema
        The roles of columns. Labels, weights and the group are also read. The copy `inputs` does not read them.
    ids
        ``"hash"`` hashes values to table rows. ``"raw"`` uses integers as table rows. See `ParquetSource`.
    id_kinds
        Type of ids in training by column: ``"integers"`` or ``"text"``. Ids of a different type are rejected. For a
        column that only derived columns use, the type may also be ``"lists of integers"`` or ``"lists of text"``. A
        column that is not in the mapping may have any type.
    tables
        Tables with columns ``key`` and ``value`` by name of a `Lookup` feature (default: read from the feature's file).
    preparation
        The conversion of raw values, if the training data were prepared by `hotbed.prepare`.

    Attributes
    ----------
    boundaries
        Measured boundaries by name of a `Bucket`. All copies of an encoder share this mapping.

    Raises
    ------
    SpecError
        If ``ids`` is unknown, or the file of a `Lookup` has unsupported types.
    DataError
        If the file of a `Lookup` is unreadable, or has a duplicate key.
    """

    def __init__(
        self,
        schema: Schema,
        *,
        ids: Ids = "hash",
        id_kinds: Mapping[str, str] | None = None,
        tables: Mapping[str, pa.Table] | None = None,
        preparation: Preparation | None = None,
    ) -> None:
        check("ids", ids, Ids, SpecError)
        self.schema = schema
        self.ids: Ids = ids
        self.id_kinds = dict(id_kinds or {})
        self.preparation = preparation
        given = tables or {}
        self._lookups = {
            d.name: LookupTable.from_table(given[d.name], d) if d.name in given else LookupTable.read(d)
            for d in schema.derived
            if isinstance(d, Lookup)
        }
        self.boundaries: dict[str, Sequence[float]] = {}
        self._inputs = self._input_columns()
        # the last column types that passed `check`, and whether they are all plain (see `arrow.plain_type`)
        self._checked: tuple[pa.Schema, bool] | None = None

    @property
    def hashed(self) -> list[str]:
        """Stored columns with values that are hashed to table rows."""
        sparse, _ = self.schema.stored
        others = stored_inputs(self.schema.derived, (Cross, Lookup))
        names = [c.name for c in sparse]
        return [name for name in others if name not in names] if self.ids == "raw" else [*names, *others]

    def columns(self) -> tuple[InputColumn, ...]:
        """Return the stored columns that model inputs are computed from. Data for predictions need these columns."""
        return self._inputs

    def _input_columns(self) -> tuple[InputColumn, ...]:
        sparse, dense = self.schema.stored
        unknown = "integers" if self.ids == "raw" else ""
        kinds = self.id_kinds if self.preparation is None else self.preparation.kinds
        found = {c.name: InputColumn(c.name, kinds.get(c.name, unknown), c.ids) for c in sparse}
        for name in stored_inputs(self.schema.derived, (Cross, Lookup)):
            kind = self.id_kinds.get(name, "")
            found.setdefault(
                name, InputColumn(name, kind.removeprefix(LISTS_OF), None if kind.startswith(LISTS_OF) else 1)
            )
        found |= {c.weights: InputColumn(c.weights, "numbers", c.ids) for c in sparse if c.weights is not None}
        for name in [*dense, *stored_inputs(self.schema.derived, (Bucket,))]:
            found.setdefault(name, InputColumn(name, "numbers"))
        return tuple(found.values())

    @property
    def names(self) -> list[str]:
        """All stored columns that are read: inputs, then labels, weights and group."""
        s = self.schema
        rest = [*s.labels, *s.weight_columns, *([s.group] if s.group else [])]
        return list(dict.fromkeys([*(column.name for column in self.columns()), *rest]))

    def stored_for(self, names: Sequence[str]) -> list[str]:
        """Return the stored columns that are needed to compute the columns with these names."""
        derived = {d.name: d for d in self.schema.derived}
        found: list[str] = []
        for name in names:
            found += self.stored_for(derived[name].inputs) if name in derived else [name]
        return list(dict.fromkeys(found))

    def of(self, schema: Schema) -> Encoder:
        """Return the encoder if it has this schema, else a copy with this schema."""
        return self if schema is self.schema else self._with(schema=schema)

    def with_kinds(self, id_kinds: Mapping[str, str]) -> Encoder:
        """Return a copy of the encoder with these ``id_kinds``."""
        return self._with(id_kinds=dict(id_kinds))

    @property
    def encoded(self) -> Encoder:
        """A copy of the encoder for rows that already have the ids of a prepared dataset."""
        return self._with(preparation=None)

    def _with(self, **attributes: object) -> Encoder:
        other = copy.copy(self)
        other.__dict__.update(attributes, _checked=None)
        other._inputs = other._input_columns()
        return other

    @property
    def inputs(self) -> Encoder:
        """A copy of the encoder that reads no labels, weights or group."""
        return self.of(self.schema.inputs)

    def check(self, fields: pa.Schema, what: str) -> None:
        """Check that a file ``what`` with these column names and types can be encoded.

        Raises
        ------
        DataError
            If a column is missing, or its ids have a different type than in training.
        SpecError
            If a column has a type that does not fit its role.
        """
        arrow.check_columns_exist(self.names, fields, what)
        for _, error in wrong_types(self.schema, self.ids, fields, what, self.preparation):
            raise error
        for name in self.hashed:
            check_id_type(what, name, self.type_of(name, fields), self.id_kinds.get(name, ""))
        check_derived_types(self.schema, fields, self._lookups, what, self._lists)

    def type_of(self, name: str, fields: pa.Schema) -> str:
        """Return the type of a column's ids in the words of ``id_kinds``, or "" if all values are null."""
        t = arrow.plain_type(fields.field(name).type)
        is_sparse = any(c.name == name for c in self.schema.stored[0])
        found = arrow.type_of_ids(t)
        return f"{LISTS_OF}{found}" if found and arrow.is_list(t) and not is_sparse else found

    def table(self, rows: Mapping[str, Sequence[object]]) -> pa.Table:
        """Convert plain JSON values by column to an Arrow table.

        Values are null, booleans, numbers, text, or lists of these types.

        Raises
        ------
        DataError
            If a column is missing, columns differ in length, or a value has a different type than in training. The
            message names column, row and value.
        """
        try:
            return typed_table(rows, self.columns())
        except DataError as error:
            encoded = self.schema.stored[0] if self.ids == "raw" and self.preparation is None else ()
            raise DataError(f"{error}{hint_for_text(rows, encoded)}") from None

    def batch(self, table: pa.Table | pa.RecordBatch, location: RowLocation = _ROWS) -> Batch:
        """Encode rows as a batch.

        Parameters
        ----------
        table
            Columns by name. Columns that are not in the schema are ignored.
        location
            The file and the rows that the table was read from, for errors.

        Raises
        ------
        DataError
            If a column is missing, or a value does not fit its column.
        SpecError
            If a column has a type that does not fit its role.
        """
        s, columns = self.schema, self._columns(table, location)
        table = columns.stored
        bags = [columns.bags(column, self.ids) for column in s.sparse]
        offsets = [np.concatenate([[0], np.cumsum(lengths)]) for _, lengths in bags if lengths is not None]
        # Concatenated by NumPy, because torch.cat starts threads that compete with the training step.
        sparse = Jagged(
            [c.name for c in s.sparse],
            torch.from_numpy(np.concatenate([rows for rows, _ in bags])),
            batch_size=len(table),
            fixed=[c.ids for c in s.sparse],
            offsets=torch.from_numpy(np.stack(offsets)) if offsets else None,
            weights=torch.from_numpy(_id_weights(columns, s, bags)) if s.id_weights else None,
        )
        mapped = {label.column: label for label in s.positives}
        labels = [read_labels(table[name], name, mapped.get(name), location) for name in s.labels]
        weights = weights_by_label(table, s, location)
        return Batch(
            sparse=sparse,
            dense=torch.from_numpy(read_numericals(columns, s)) if s.dense else None,
            labels=torch.from_numpy(np.stack(labels, axis=1)) if labels else None,
            weights=None if weights is None else torch.from_numpy(weights),
            extra={s.group: torch.from_numpy(read_group(table[s.group], s.group, location))} if s.group else {},
        )

    def numericals(self, table: pa.Table, location: RowLocation = _ROWS) -> Tensor | None:
        """Return only ``dense`` of `batch`, or None without dense columns. ``table`` may lack all other columns."""
        if not self.schema.dense:
            return None
        return torch.from_numpy(read_numericals(self._columns(table, location, check=False), self.schema))

    def numbers(self, table: pa.Table, names: Sequence[str]) -> dict[str, arrow.Array]:
        """Return columns (stored columns, or values of lookups) as float64 ``[n]`` by name. Null becomes NaN."""
        columns = self._columns(table, _ROWS, check=False)
        return {name: columns.numbers(name) for name in names}

    # -- state in checkpoints ----------------------------------------------------------------------------------------

    @property
    def unmeasured(self) -> list[Bucket]:
        """Buckets without measured boundaries."""
        return [
            d
            for d in self.schema.derived
            if isinstance(d, Bucket) and d.boundaries is None and d.name not in self.boundaries
        ]

    def assume_measured(self) -> None:
        """Put all numbers of each unmeasured `Bucket` into one interval, for models that are not trained (dry runs)."""
        self.boundaries.update({bucket.name: [] for bucket in self.unmeasured})

    def state(self) -> dict[str, Any]:
        """Return the state of derived columns for a checkpoint: boundaries of buckets, SHA-256 of lookup tables.

        Raises
        ------
        SpecError
            If a bucket is not measured.
        """
        if left := self.unmeasured:
            raise SpecError(not_measured(left[0].name))
        found: dict[str, Any] = {}
        for d in self.schema.derived:
            if isinstance(d, Bucket) and d.boundaries is None:
                found[d.name] = {**d.entry(), "measured": list(self.boundaries[d.name])}
            elif isinstance(d, Lookup):
                table = self._lookups[d.name]
                found[d.name] = {**d.entry(), "keys": len(table.keys), "sha256": table.sha256}
        return found if self.preparation is None else found | self.preparation.state()

    def load_state(self, state: Mapping[str, Any], *, other_tables: bool = False) -> None:
        """Load the boundaries of buckets from `state`, and check that tables and vocabularies have not changed.

        A bucket loads boundaries only if its definition is the same as in training.

        Parameters
        ----------
        state
            Value of `state` in training.
        other_tables
            Whether lookup tables and vocabularies may have changed since training.

        Raises
        ------
        DataError
            If the content of a lookup table or vocabulary has changed.
        """
        for d in self.schema.derived:
            was = cast("Mapping[str, Any]", state.get(d.name, {}))
            if isinstance(d, Bucket) and d.entry().items() <= was.items() and "measured" in was:
                self.boundaries[d.name] = was["measured"]
            elif isinstance(d, Lookup) and "sha256" in was and not other_tables:
                self._lookups[d.name].refuse_other(d, was)
        if self.preparation is not None and not other_tables:
            self.preparation.refuse_other(state)

    @property
    def tables(self) -> dict[str, pa.Table]:
        """Tables with columns ``key`` and ``value`` by name of a `Lookup` feature."""
        return {name: table.to_table() for name, table in self._lookups.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. `from_dict` rebuilds the encoder from these values and `tables`.

        Raises
        ------
        SpecError
            If a bucket is not measured.
        """
        return {
            "schema": self.schema.to_dict(),
            "ids": self.ids,
            "id_kinds": dict(self.id_kinds),
            "features": self.state(),
            **({} if self.preparation is None else {"preparation": self.preparation.entry.model_dump()}),
        }

    @staticmethod
    def from_dict(
        values: Mapping[str, Any],
        tables: Mapping[str, pa.Table] | None = None,
        vocabulary: Callable[[str], LookupTable] | None = None,
    ) -> Encoder:
        """Rebuild an encoder from the values of `to_dict` and `tables`.

        ``vocabulary`` returns the vocabulary of a table. It is needed if the training data were prepared.

        Raises
        ------
        SpecError
            If a value is out of range.
        DataError
            If the content of a lookup table has changed.
        """
        schema = Schema.from_dict(values["schema"])
        preparation = Preparation.rebuild(values.get("preparation"), schema, vocabulary)
        made = Encoder(schema, ids=values["ids"], id_kinds=values["id_kinds"], tables=tables, preparation=preparation)
        made.load_state(values.get("features", {}))
        return made

    def _columns(self, table: pa.Table | pa.RecordBatch, location: RowLocation, *, check: bool = True) -> Columns:
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        checked = self._checked  # read once, because other threads replace it
        is_known = checked is not None and table.schema.equals(checked[0])
        if not check:
            table = arrow.without_empty_types(table, table.column_names)
        elif not is_known:
            table = self._check_table(table, location.name)
        if checked is None or not (check and is_known and checked[1]):
            table = arrow.to_plain_types(table, location.name)
        if self.preparation is not None:
            table = self.preparation.convert(table, self.schema.dense, location)
        derived = {d.name: d for d in self.schema.derived}
        return Columns(table, derived, self._lookups, self.boundaries, self._lists, location)

    def _check_table(self, table: pa.Table, name: str) -> pa.Table:
        """Check the types of a table, and return it. Columns without values may have any type, and become null."""
        try:
            self.check(table.schema, name)
        except (DataError, SpecError):
            table = arrow.without_empty_types(table, [column.name for column in self.columns()])
            self.check(table.schema, name)
        else:
            is_plain = all(arrow.plain_type(field.type) == field.type for field in table.schema)
            self._checked = table.schema, is_plain
        return table

    @property
    def _lists(self) -> frozenset[str]:
        return frozenset(column.name for column in self._inputs if column.is_list)


def _id_weights(
    columns: Columns, schema: Schema, bags: Sequence[tuple[arrow.Array, arrow.Array | None]]
) -> arrow.Array:
    """Return the weights ``[N]`` float32 of the ids of all sparse columns. Ids without weights have weight 1."""
    found: list[arrow.Array] = []
    for column, (rows, lengths) in zip(schema.sparse, bags, strict=True):
        weights = np.ones(len(rows), np.float32)
        if column.weights is not None:
            each = np.full(len(columns.stored), column.ids or 0) if lengths is None else lengths
            stored = columns.stored[column.weights].combine_chunks()
            weights = arrow.read_id_weights(column, stored, each, columns.location)
        found.append(weights)
    return np.concatenate(found)


# -- descriptions for programs without hotbed ----------------------------------------------------------------------


def describe_features(encoder: Encoder) -> list[dict[str, Any]]:
    """Describe each derived feature, in order. The description has a bucket's boundaries, or a lookup's table."""
    found: list[dict[str, Any]] = []
    for d in encoder.schema.derived:
        if isinstance(d, Cross):
            found.append(d.entry())
        elif isinstance(d, Bucket):
            boundaries = d.boundaries if d.boundaries is not None else encoder.boundaries[d.name]
            found.append({"name": d.name, "bucket": d.column, "boundaries": list(boundaries)})
        else:
            table = encoder.tables[d.name]
            if len(table) > MOST_KEYS:
                raise SpecError(
                    f"feature '{d.name}': got {len(table):,} keys in {d.file}, expected at most {MOST_KEYS:,}, because "
                    "inputs.json contains the whole table. Remove unused keys from the file"
                )
            key, value = (_to_json(table[name], f"feature '{d.name}': {d.file}") for name in ("key", "value"))
            missing = [] if arrow.is_list(table["value"].type) else None
            pairs = [[k, missing if v is None else v] for k, v in zip(key, value, strict=True)]
            found.append({"name": d.name, "lookup": d.column, "table": pairs, "missing": missing})
    return found


def encoding_of(encoder: Encoder, column: str) -> dict[str, str]:
    """Return how values of a sparse column become ids: by a hash, a cross, a bucket, or unchanged (``"rows"``)."""
    derived = next((d for d in encoder.schema.derived if d.name == column), None)
    if isinstance(derived, Cross | Bucket):
        return {"encoding": "cross" if isinstance(derived, Cross) else "bucket"}
    if derived is None and encoder.ids == "raw":
        return {"encoding": "rows"}
    if derived is not None:
        return {"encoding": "hash", "values": arrow.type_of_ids(encoder.tables[column]["value"].type)}
    return {"encoding": "hash", "values": encoder.id_kinds.get(column, "")}


def _to_json(column: pa.ChunkedArray, what: str) -> list[Any]:
    def text(value: Any) -> Any:
        if isinstance(value, list):
            return [text(entry) for entry in value]
        return value.decode() if isinstance(value, bytes) else value

    try:
        return [text(value) for value in column.to_pylist()]
    except UnicodeDecodeError as error:
        raise SpecError(f"{what}: got bytes that are not UTF-8 ({error}), expected text for JSON") from None
