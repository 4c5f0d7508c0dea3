# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Encode raw values as `hotbed prepare` encoded those to train on: `Preparation`.

A prepared dataset says of itself how its ids and numbers were made (``metadata.preparation`` of its description), and
has the values of each table's ids in ``vocabulary/``. Exported models have both, the vocabularies as files that are
mapped into memory.
"""

# pyarrow ships no types.

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from hotbed.data import arrow
from hotbed.data.columns import SparseColumn
from hotbed.data.criteo import complaint, hexadecimal, logarithm
from hotbed.data.lookup_table import LookupTable, content_sha256
from hotbed.data.schema import Schema
from hotbed.data.vocabulary import VOCABULARY, read_vocabulary, vocabulary_file
from hotbed.errors import DataError, SpecError

Kind = Literal["hexadecimal", "integers", "text"]
_KINDS_OF_JSON: Mapping[Kind, str] = {"hexadecimal": "text", "integers": "integers", "text": "text"}


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class VocabularyEntry(_Entry):
    """What is known of a vocabulary: what its values are in raw rows, how many there are, and their hash."""

    kind: Kind
    values: NonNegativeInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @staticmethod
    def of(values: pa.Array, kind: Kind) -> VocabularyEntry:
        """Describe values ``[V]`` in the order of their ids."""
        return VocabularyEntry(kind=kind, values=len(values), sha256=content_sha256(values))


class PreparationEntry(_Entry):
    """How raw values became what a prepared dataset stores.

    Attributes
    ----------
    vocabularies
        By table. The value at position i has id i + 1; missing values and those that are not there are id 0.
    numericals
        ``"log"``: integers x become ln(x + 3), missing ones 0; ``"as_is"``: missing ones become 0.
    dtype
        What they are then rounded to.
    """

    vocabularies: dict[str, VocabularyEntry]
    numericals: Literal["log", "as_is"]
    dtype: Literal["float16", "float32"]

    @staticmethod
    def parse(values: object, where: str) -> PreparationEntry:
        """Check what may come from anywhere; a `DataError` says what is wrong."""
        try:
            return PreparationEntry.model_validate(values)
        except ValidationError as error:
            fault = error.errors()[0]
            path = ".".join(map(str, fault["loc"]))
            raise DataError(f"{where}: {path or 'it'}: {fault['msg']}; prepare the data again") from None


class Preparation:
    """Raw rows to rows as a prepared dataset stores them.

    Parameters
    ----------
    entry
        How.
    columns
        By sparse column, its table.
    read
        Gives the ids of a table's values; called when they are first needed.

    Raises
    ------
    DataError
        If a table has no vocabulary.
    """

    def __init__(self, entry: PreparationEntry, columns: Mapping[str, str], read: Callable[[str], LookupTable]) -> None:
        self.entry, self.read, self._columns = entry, read, dict(columns)
        for name, table in columns.items():
            if table not in entry.vocabularies:
                raise DataError(f"column '{name}': its table '{table}' has no vocabulary; prepare the data again")
        self._tables: dict[str, LookupTable] = {}
        self._reading = threading.Lock()

    @staticmethod
    def of_dataset(path: Path, schema: Schema, values: object) -> Preparation:
        """That of a dataset whose description has these values.

        Raises
        ------
        DataError
            If they cannot be right; when raw rows are encoded, if a vocabulary is absent or another.
        """
        entry = PreparationEntry.parse(values, f"{path}: metadata.preparation")
        return Preparation(entry, _tables_of(schema), partial(_read, path / VOCABULARY, entry))

    @staticmethod
    def rebuilt(values: object, schema: Schema, read: Callable[[str], LookupTable] | None) -> Preparation | None:
        """That of an exported model, if it has one; all its tables are read now, not when they are needed."""
        if values is None or read is None:
            return None
        made = Preparation(PreparationEntry.parse(values, "preparation"), _tables_of(schema), read)
        for name in set(made._columns.values()):
            made._table(name)
        return made

    def state(self) -> dict[str, Any]:
        """What checkpoints know of vocabularies, by table."""
        return {name: {"keys": of.values, "sha256": of.sha256} for name, of in self.entry.vocabularies.items()}

    def refuse_other(self, state: Mapping[str, Any], *, may_grow: bool = False) -> None:
        """Raise `DataError` if a model was trained with other vocabularies: ids would stand for other values.

        Parameters
        ----------
        state
            What `state` gave then, by table; tables that are not in it are not compared.
        may_grow
            Whether values may have been added since: those of then must have the ids that they had.
        """
        for name, now in self.state().items():
            was = state.get(name, now)
            if was["sha256"] == now["sha256"] or (may_grow and self._begins_with(name, was)):
                continue
            raise DataError(
                f"table '{name}': the data were prepared with other values than those the model was trained on "
                f"({now['keys']:,} with SHA-256 {now['sha256'][:12]}…, not {was['keys']:,} with "
                f"{was['sha256'][:12]}…), so its ids are others; give the data that it was trained on. To train the "
                "model on with new data (--init_from), prepare these with hotbed prepare RAW OUT --vocabulary "
                "OLD/vocabulary, which keeps the ids of the values of OLD and adds new ones"
            )

    def _begins_with(self, name: str, was: Mapping[str, Any]) -> bool:
        """Whether the first values of a table, in the order of their ids, are those that were all of them."""
        if self.entry.vocabularies[name].values < was["keys"]:
            return False
        table = self.read(name)
        in_order = np.argsort(table.values.to_numpy(zero_copy_only=False))[: was["keys"]]
        return content_sha256(table.keys.take(pa.array(in_order))) == was["sha256"]

    def unknown(self, state: Mapping[str, Any]) -> list[str]:
        """Tables of whose values a checkpoint says nothing."""
        return [name for name in self.state() if name not in state]

    @property
    def kinds(self) -> dict[str, str]:
        """What raw values of sparse columns are in JSON, see `InputColumn`."""
        return {name: _KINDS_OF_JSON[self.entry.vocabularies[of].kind] for name, of in self._columns.items()}

    def check(self, fields: pa.Schema, what: str) -> None:
        """Raise `SpecError` unless ids of these types can be raw values."""
        for name, table in self._columns.items():
            if name not in fields.names:
                continue
            entry = self.entry.vocabularies[table]
            kind = arrow.plain_type(fields.field(name).type)
            fits = not arrow.is_text(kind) if entry.kind == "integers" else arrow.is_text(kind)
            if arrow.is_list(kind) or not (fits or pa.types.is_null(kind)):
                raise SpecError(
                    f"{what}: column '{name}' is {kind}, and its raw values are {entry.kind}, as they were before "
                    "hotbed prepare; write them so (ids that are encoded already are in datasets of hotbed prepare, "
                    "or asked of hotbed serve --encoded true)"
                )

    def stored(self, table: pa.Table, dense: Sequence[str], place: str, row_of: Callable[[int], str]) -> pa.Table:
        """Replace raw values of the columns that are there: ids by their numbers, numericals ``dense`` by theirs.

        Raises
        ------
        DataError
            If a value is none that can be prepared; names it and its row.
        """
        for at, name in enumerate(table.column_names):
            if name in self._columns:
                found = self._ids(table[name], name, place, row_of)
            elif name in dense:
                found = pa.array(self._numbers(table[name], name, place, row_of))
            else:
                continue
            table = table.set_column(at, name, found)
        return table

    def _ids(self, column: pa.ChunkedArray, name: str, place: str, row_of: Callable[[int], str]) -> pa.Array:
        where = f"{place}, column '{name}'"
        if pa.types.is_null(column.type):
            return pa.array(np.zeros(len(column), np.int32))
        table = self._columns[name]
        if self.entry.vocabularies[table].kind == "hexadecimal":
            values = _parsed(column, where, row_of)
        else:
            values = arrow.hashable(_plain(column).combine_chunks(), where)
        return pc.fill_null(self._table(table).find(values), 0)

    def _numbers(self, column: pa.ChunkedArray, name: str, place: str, row_of: Callable[[int], str]) -> arrow.Array:
        values = arrow.wide_numbers(column)
        missing = np.isnan(values)
        if self.entry.numericals == "log":
            good = missing | (np.isfinite(values) & (values == np.floor(values)) & (values > -3))
            if not good.all():
                at = int((~good).argmax())
                value = float(values[at])
                shown = str(int(value)) if value.is_integer() else str(value)
                raise DataError(
                    f"{place}, column '{name}', {row_of(at)}: {complaint('numerical', shown)}; mend it, or leave it "
                    "missing"
                )
            values = pl.Series(values).to_frame("x").select(logarithm(pl.col("x")))["x"].to_numpy()
        return np.where(missing, 0, values).astype(self.entry.dtype).astype(np.float32)

    def _table(self, name: str) -> LookupTable:
        with self._reading:
            if name not in self._tables:
                table, entry = self.read(name), self.entry.vocabularies[name]
                if len(table.keys) != entry.values or (table.kind_of_keys == "text") != (entry.kind == "text"):
                    raise DataError(
                        f"the vocabulary of table '{name}' has {len(table.keys):,} values ({table.kind_of_keys}), must "
                        f"have {entry.values:,} ({entry.kind}); it is another's, copy it again"
                    )
                self._tables[name] = table
            return self._tables[name]


def hint_for_text(rows: Mapping[str, Sequence[object]], columns: Sequence[SparseColumn]) -> str:
    """Say who takes raw values, where there is text in columns of ids that are rows of tables; else nothing."""
    if not any(isinstance(value, str) for column in columns for value in rows.get(column.name, ())):
        return ""
    return (
        "; raw values are taken by models that were trained on data of hotbed prepare, exported by this release and "
        "served without --encoded true"
    )


def _tables_of(schema: Schema) -> dict[str, str]:
    return {column.name: column.table_name for column in schema.stored[0]}


def _read(folder: Path, entry: PreparationEntry, name: str) -> LookupTable:
    """The ids of the values of a dataset's column."""
    values, expected = pa.array(read_vocabulary(vocabulary_file(folder, name)).values), entry.vocabularies[name]
    if len(values) != expected.values or content_sha256(values) != expected.sha256:
        raise DataError(
            f"{folder} has other values of table '{name}' than its dataset was prepared with ({len(values):,}, not "
            f"{expected.values:,}, or others); put back what was there, or prepare the data again"
        )
    ids = np.int32 if len(values) < np.iinfo(np.int32).max else np.int64
    return LookupTable.ordered(values, pa.array(np.arange(1, len(values) + 1, dtype=ids)))


def _plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    return column.cast(column.type.value_type) if pa.types.is_dictionary(column.type) else column


def _parsed(column: pa.ChunkedArray, where: str, row_of: Callable[[int], str]) -> pa.Array:
    """Hexadecimal text ``[n]`` as integers; null where it is missing or empty, as in a log."""
    try:
        text = pl.Series("x", _plain(column).cast(pa.large_string()).combine_chunks())
    except pa.ArrowInvalid as error:
        raise DataError(f"{where}: its values are no text ({error}); write UTF-8") from None
    text = text.set(text == "", None)
    parsed = text.to_frame().select(hexadecimal(pl.col("x")))["x"]
    if parsed.null_count() != text.null_count():
        at = int((parsed.is_null() & text.is_not_null()).arg_max() or 0)
        raise DataError(f"{where}, {row_of(at)}: {complaint('categorical', text[at])}; mend it, or leave it missing")
    return parsed.to_arrow()
