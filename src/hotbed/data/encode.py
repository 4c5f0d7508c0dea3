# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Turn raw rows into a batch: `Encoder`, the one way that training, evaluation, prediction and serving take.

Raw rows are Arrow columns as they are stored (`ParquetSource` reads them of files), or lists of plain values as JSON
has them, which `Encoder.table` checks and types first. What a row becomes does not depend on the rows beside it.
"""

# pyarrow ships no types.

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast, get_args

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.data import arrow
from hotbed.data.arrow import Ids
from hotbed.data.labels import check_label, read_labels, read_weights, refuse_null
from hotbed.data.numericals import read_numericals
from hotbed.data.plain_rows import InputColumn, typed_table
from hotbed.data.schema import Schema
from hotbed.data.source import refuse_other_kind
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.jagged import Jagged

ROWS = "the rows"
"""What messages call rows that are of no file."""


def place_of_row(at: int) -> str:
    """Where a row is that is of no file."""
    return f"row {at:,}"


class Encoder:
    """Turn raw rows into a `Batch`.

    Parameters
    ----------
    schema
        Which columns are what. Labels, weight and group are read where it names them; `inputs` reads none.
    ids
        ``"hash"`` hashes values to rows; ``"raw"`` takes integers as rows. See `ParquetSource`.
    id_kinds
        By column whether its ids are ``"integers"`` or ``"text"``, as in training; others are refused. A column that is
        not named may be either.

    Raises
    ------
    SpecError
        If ``ids`` is none of these.
    """

    def __init__(self, schema: Schema, *, ids: Ids = "hash", id_kinds: Mapping[str, str] | None = None) -> None:
        if ids not in get_args(Ids):
            raise SpecError(f"ids is {ids!r}, must be one of {', '.join(get_args(Ids))}")
        self.schema = schema
        self.ids: Ids = ids
        self.id_kinds = dict(id_kinds or {})
        self._checked: pa.Schema | None = None

    def columns(self) -> tuple[InputColumn, ...]:
        """The columns that inputs are made of: what predictions need."""
        unknown = "integers" if self.ids == "raw" else ""
        found = [InputColumn(c.name, self.id_kinds.get(c.name, unknown), c.ids != 1) for c in self.schema.sparse]
        return (*found, *(InputColumn(name, "numbers", is_list=False) for name in self.schema.dense))

    @property
    def names(self) -> list[str]:
        """All columns that are read: those of inputs, then labels, weight and group."""
        s = self.schema
        rest = [*s.labels, *(name for name in (s.weight, s.group) if name)]
        return list(dict.fromkeys([*(column.name for column in self.columns()), *rest]))

    @property
    def names_of_dense(self) -> list[str]:
        """The columns that `numericals` reads."""
        return list(self.schema.dense)

    def of(self, schema: Schema) -> Encoder:
        """The same for another choice of columns."""
        other = copy.copy(self)
        other.schema, other._checked = schema, None
        return other

    @property
    def inputs(self) -> Encoder:
        """The same without labels, weight and group."""
        return self.of(self.schema.inputs)

    def check(self, fields: pa.Schema, what: str) -> None:
        """Raise unless columns of these names and types can be encoded.

        Raises
        ------
        DataError
            If a column is missing, or its ids are of another kind than in training.
        SpecError
            If a column has a type that does not fit its role.
        """
        s, known = self.schema, fields.names
        for name in self.names:
            if name not in known:
                raise DataError(f"{what} has no column '{name}'; it has {', '.join(known)}{did_you_mean(name, known)}")
        for column in s.sparse:
            kind = arrow.plain_type(fields.field(column.name).type)
            arrow.check_sparse(column, kind, self.ids)
            refuse_other_kind(what, column.name, arrow.kind_of_ids(kind), self.id_kinds.get(column.name, ""))
        for name in [*s.dense, *([s.weight] if s.weight else [])]:
            kind = fields.field(name).type
            if not arrow.is_number(kind) and not (pa.types.is_null(kind) and name in s.dense):
                raise SpecError(f"{what}: column '{name}' is {kind}, must be numbers to be a numerical or weight")
        mapped = {label.column: label for label in s.positives}
        for name in s.labels:
            check_label(name, fields.field(name).type, mapped.get(name))
        if s.group and not (arrow.is_whole(kind := fields.field(s.group).type) or arrow.is_text(kind)):
            raise SpecError(f"group column '{s.group}' is {kind}, must be integers or strings")

    def table(self, rows: Mapping[str, Sequence[object]]) -> pa.Table:
        """Type plain values by column, as JSON has them: null, booleans, numbers, text, and lists of these.

        Raises
        ------
        DataError
            If a column is missing or of another length, or a value is of another kind than in training; names column,
            row and value.
        """
        return typed_table(rows, self.columns())

    def batch(
        self, table: pa.Table | pa.RecordBatch, *, place: str = ROWS, row_of: Callable[[int], str] = place_of_row
    ) -> Batch:
        """Encode rows.

        Parameters
        ----------
        table
            Columns by name; those that the schema does not name are left alone.
        place, row_of
            Where the rows are, and the row of a position, for errors.

        Raises
        ------
        DataError
            If a column is missing, or a value cannot be what its column says.
        SpecError
            If a column has a type that does not fit its role.
        """
        table, s = self._plain(table, place), self.schema
        values: list[arrow.Array] = []
        offsets: list[arrow.Array] = []
        for column in s.sparse:
            rows, lengths = arrow.bags(table[column.name].combine_chunks(), column, self.ids, place, row_of)
            values.append(rows)
            if lengths is not None:
                offsets.append(np.concatenate([[0], np.cumsum(lengths)]))
        # Joined by NumPy: torch.cat starts threads, which fight with those of the training step.
        sparse = Jagged(
            [c.name for c in s.sparse],
            torch.from_numpy(np.concatenate(values)),
            batch_size=len(table),
            fixed=[c.ids for c in s.sparse],
            offsets=torch.from_numpy(np.stack(offsets)) if offsets else None,
        )
        mapped = {label.column: label for label in s.positives}
        labels = [read_labels(table[name], name, mapped.get(name), place, row_of) for name in s.labels]
        weights = read_weights(table[s.weight], s.weight, place, row_of) if s.weight else None
        return Batch(
            sparse=sparse,
            dense=torch.from_numpy(read_numericals(table, s, place, row_of)) if s.dense else None,
            labels=torch.from_numpy(np.stack(labels, axis=1)) if labels else None,
            weights=None if weights is None else torch.from_numpy(weights),
            extra={s.group: _group(table[s.group], s.group, place, row_of)} if s.group else {},
        )

    def numericals(
        self, table: pa.Table, *, place: str = ROWS, row_of: Callable[[int], str] = place_of_row
    ) -> Tensor | None:
        """The batch's ``dense`` alone, of `names_of_dense`; None where the schema has none."""
        if not self.schema.dense:
            return None
        return torch.from_numpy(read_numericals(arrow.plain(table), self.schema, place, row_of))

    def to_dict(self) -> dict[str, object]:
        """Plain values that JSON can hold; `from_dict` is the inverse."""
        return {"schema": self.schema.to_dict(), "ids": self.ids, "id_kinds": dict(self.id_kinds)}

    @staticmethod
    def from_dict(values: Mapping[str, object]) -> Encoder:
        """Rebuild an encoder from `to_dict`'s values.

        Raises
        ------
        SpecError
            If a value cannot be right.
        """
        given = cast("Mapping[str, Any]", values)
        return Encoder(Schema.from_dict(given["schema"]), ids=given["ids"], id_kinds=given["id_kinds"])

    def _plain(self, table: pa.Table | pa.RecordBatch, place: str) -> pa.Table:
        if isinstance(table, pa.RecordBatch):
            table = pa.Table.from_batches([table])
        if self._checked is None or not table.schema.equals(self._checked):
            self.check(table.schema, place)
            self._checked = table.schema
        return arrow.plain(table)


def _group(column: pa.ChunkedArray, name: str, place: str, row_of: Callable[[int], str]) -> Tensor:
    """Group keys ``[n]`` int64: integers as they are, strings hashed."""
    refuse_null(column, name, place, row_of)
    values = column.combine_chunks()
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if arrow.is_text(values.type):
        return torch.from_numpy(arrow.hashes(values).view(np.int64))
    return torch.from_numpy(values.to_numpy(zero_copy_only=False).astype(np.int64))
