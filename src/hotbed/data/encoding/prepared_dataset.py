"""Encode raw values as `hotbed prepare` encoded those to train on: `Preparation`.

A prepared dataset says of itself how its ids and numbers were made (``metadata.preparation`` of its description, or
the metadata of its Parquet files), and has the values of each table's ids in ``vocabulary/``. Exported models have
both, the vocabularies as files that are mapped into memory.

A vocabulary gives frequent values rows of their own, and must know all values. Where values never end (users, queries,
pages), new ones would all be row 0 until the data are prepared again. Tables of such values have a `HashEntry` instead:
each value has a row, which it may share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from hotbed.checks import is_int
from hotbed.data import arrow_columns as arrow
from hotbed.data.columns import SparseColumn
from hotbed.data.encoding.lookup_table import LookupTable, content_sha256
from hotbed.data.encoding.vocabulary import VOCABULARY, read_vocabulary, vocabulary_file
from hotbed.data.files.criteo import hexadecimal, logarithm
from hotbed.data.hashing import hashes_to_rows, mix
from hotbed.data.row_location import RowLocation
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError, did_you_mean
from hotbed.parsing import fault_of

Kind = Literal["hexadecimal", "integers", "text"]
MOST_ROWS = 1 << 40
SEEDS = 1 << 64
_LIMITS = {"sha256": "64 hexadecimal digits"}


class Entry(BaseModel):
    """What a dataset says of how it was made; checked, as it may come from anywhere."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class HashEntry(Entry):
    """How the values of a table without a vocabulary are hashed to its rows."""

    kind: Kind  # of the raw values
    rows: int = Field(ge=2, le=MOST_ROWS)  # of the table; row 0 is for missing values
    seed: int = Field(ge=0, lt=SEEDS)  # 0 is the hash h of `hotbed.data.hashing`, any other seed is ``mix(h ^ seed)``

    def ids(self, values: pa.Array) -> NDArray[np.int64]:
        """Rows ``[n]`` of values ``[n]``: integers, of hexadecimal ones as well, or text."""
        h = arrow.hash_values(values)
        found = hashes_to_rows(mix(h ^ np.uint64(self.seed)) if self.seed else h, self.rows)
        found[values.is_null().to_numpy(zero_copy_only=False)] = 0
        return found


def check_hashed(hash_rows: Mapping[str, object], seed: object, schema: Schema) -> None:
    """Raise `SpecError` unless these tables are there and can have so many rows."""
    if not is_int(seed) or not 0 <= seed < SEEDS:
        raise SpecError(f"hash_seed is {seed!r}, must be an integer of at least 0, below 2^64")
    for table, rows in hash_rows.items():
        if table not in schema.rows:
            raise SpecError(f"hash_rows names table '{table}', which there is not{did_you_mean(table, schema.rows)}")
        if not is_int(rows) or not 2 <= rows <= MOST_ROWS:
            raise SpecError(f"hash_rows: table '{table}' has {rows!r} rows, must be an integer from 2 to 2^40")


PREPARATION = b"hotbed.preparation"
"""What prepared Parquet files say it under, as JSON."""
_READING = threading.Lock()
_KINDS_OF_JSON: Mapping[Kind, str] = {"hexadecimal": "text", "integers": "integers", "text": "text"}


class VocabularyEntry(Entry):
    """What is known of a vocabulary: what its values are in raw rows, how many there are, and their hash."""

    kind: Kind
    values: NonNegativeInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @staticmethod
    def of(values: pa.Array, kind: Kind) -> VocabularyEntry:
        """Describe values ``[V]`` in the order of their ids."""
        return VocabularyEntry(kind=kind, values=len(values), sha256=content_sha256(values))


class PreparationEntry(Entry):
    """How raw values became what a prepared dataset stores."""

    # by table; the value at position i has id i + 1, and missing or unknown values have id 0
    vocabularies: dict[str, VocabularyEntry]
    tables: dict[str, str]  # by sparse column
    hashed: dict[str, HashEntry] = Field(default_factory=dict)  # by table without a vocabulary
    # log: integers x become ln(x + 3), where -3 counts as -2; log_zero: the same after negative ones became 0
    numericals: Literal["log", "log_zero", "as_is"]
    # numericals are rounded to it, missing ones to 0; None leaves both to the schema of the reader
    dtype: Literal["float16"] | None

    @staticmethod
    def parse(values: object, where: str) -> PreparationEntry:
        """Check values, or their JSON, which may come from anywhere; a `DataError` says what is wrong."""
        try:
            if isinstance(values, bytes):
                return PreparationEntry.model_validate_json(values)
            return PreparationEntry.model_validate(values)
        except ValidationError as error:
            raise DataError(f"{where}: {fault_of(error, _LIMITS)}. Prepare the data again") from None


class Preparation:
    """Converts raw rows to rows as a prepared dataset stores them.

    ``read`` returns the ids of a table's values; it is called when they are first needed.
    """

    def __init__(
        self, entry: PreparationEntry, columns: Sequence[SparseColumn], read: Callable[[str], LookupTable]
    ) -> None:
        self.entry, self.read, self._columns = entry, read, {column.name: column for column in columns}
        for name in self._columns:
            if entry.tables.get(name) not in {**entry.vocabularies, **entry.hashed}:
                raise DataError(f"column '{name}' has no vocabulary; prepare the data again")
        self._tables: dict[str, LookupTable] = {}

    @staticmethod
    def of_dataset(path: Path, schema: Schema, values: object) -> Preparation:
        """That of a dataset whose description has these values."""
        entry = PreparationEntry.parse(values, f"{path}: metadata.preparation")
        return Preparation(entry, schema.stored[0], partial(_read, path / VOCABULARY, entry))

    @staticmethod
    def rebuilt(values: object, schema: Schema, read: Callable[[str], LookupTable] | None) -> Preparation | None:
        """That of an exported model, if it has one; all its tables are read now, not when they are needed."""
        if values is None or read is None:
            return None
        made = Preparation(PreparationEntry.parse(values, "preparation"), schema.stored[0], read)
        for name in {made.entry.tables[column] for column in made._columns} - made.entry.hashed.keys():
            made._table(name)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """What is sent to readers: without the vocabularies that were read, which each reads that needs them."""
        return {**self.__dict__, "_tables": {}}

    def state(self) -> dict[str, Any]:
        """What checkpoints know of vocabularies and hashes, by table."""
        found: dict[str, Any] = {
            name: {"keys": of.values, "sha256": of.sha256} for name, of in self.entry.vocabularies.items()
        }
        return found | {name: of.model_dump() for name, of in self.entry.hashed.items()}

    def refuse_other(self, state: Mapping[str, Any], *, may_grow: bool = False) -> None:
        """Raise `DataError` if a model was trained with other vocabularies: ids would stand for other values.

        ``state`` is what `state` returned then; tables that it lacks are not compared. With ``may_grow``, values may
        have been added since, but the earlier values must have kept their ids.
        """
        for name, now in self.state().items():
            was = state.get(name, now)
            if was == now or (may_grow and "sha256" in was and "sha256" in now and self._begins_with(name, was)):
                continue
            if "sha256" not in was or "sha256" not in now:
                raise DataError(
                    f"table '{name}': its ids are {_shown(now)}, and those that the model was trained on "
                    f"{_shown(was)}; prepare the data as those were (hotbed prepare --hash_rows, --hash_seed)"
                )
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
        table = self._table(name)
        in_order = np.argsort(table.values.to_numpy(zero_copy_only=False))[: was["keys"]]
        return content_sha256(table.keys.take(pa.array(in_order))) == was["sha256"]

    def unknown(self, state: Mapping[str, Any]) -> list[str]:
        """Tables of whose values a checkpoint says nothing."""
        return [name for name in self.state() if name not in state]

    @property
    def kinds(self) -> dict[str, str]:
        """What raw values of sparse columns are in JSON, see `InputColumn`."""
        return {name: _KINDS_OF_JSON[self._entry(name).kind] for name in self._columns}

    @property
    def text(self) -> list[str]:
        """Columns whose values are text, also where all of a file are digits."""
        return [name for name, kind in self.kinds.items() if kind == "text"]

    def check(self, fields: pa.Schema, what: str) -> None:
        """Raise `SpecError` unless ids of these types can be raw values."""
        for name, column in self._columns.items():
            if name not in fields.names:
                continue
            kind, wanted = arrow.plain_type(fields.field(name).type), self._entry(name).kind
            value = kind.value_type if arrow.is_list(kind) and wanted != "hexadecimal" else kind
            arrow.check_sparse(replace(column, rows=2), value if column.ids == 1 else kind, "hash", what)
            fits = arrow.is_text(value) != (wanted == "integers")
            if not (fits or pa.types.is_null(value)):
                raise SpecError(
                    f"{what}: column '{name}' is {kind}, and its raw values are {wanted}, as they were before "
                    "hotbed prepare; write them so (ids that are encoded already are in datasets of hotbed prepare, "
                    "or asked of hotbed serve --encoded true)"
                )

    def stored(self, table: pa.Table, dense: Sequence[str], place: RowLocation) -> pa.Table:
        """Replace raw values of the columns that are there: ids by their numbers, numericals ``dense`` by theirs."""
        for at, name in enumerate(table.column_names):
            if name in self._columns:
                found = self._bags(table[name], name, place)
            elif name in dense and (self.entry.numericals, self.entry.dtype) != ("as_is", None):
                found = self._numbers(table[name], name, place)
            else:
                continue
            table = table.set_column(at, name, found)
        return table

    def _entry(self, column: str) -> VocabularyEntry | HashEntry:
        table = self.entry.tables[column]
        return self.entry.hashed.get(table) or self.entry.vocabularies[table]

    def _bags(self, column: pa.ChunkedArray, name: str, place: RowLocation) -> pa.Array:
        """Ids in the place of values, also of those in lists."""
        array = column.combine_chunks()
        if not arrow.is_list(array.type):
            missing = pa.types.is_null(array.type) and self._columns[name].ids != 1  # bags
            return array if missing else self._ids(array, name, place)
        inside = place.of_lists(arrow.list_lengths(array))
        return arrow.regroup(self._ids(array.flatten(), name, inside), array)

    def _ids(self, array: pa.Array, name: str, place: RowLocation) -> pa.Array:
        if pa.types.is_null(array.type):
            return pa.array(np.zeros(len(array), np.int32))
        array = arrow.decode_dictionary(array)
        entry = self._entry(name)
        values = _parsed(array, name, place) if entry.kind == "hexadecimal" else arrow.to_hashable(array, name, place)
        if isinstance(entry, HashEntry):
            return pa.array(entry.ids(values))
        return pc.fill_null(self._table(self.entry.tables[name]).find(values), 0)

    def _numbers(self, column: pa.ChunkedArray, name: str, place: RowLocation) -> pa.Array:
        """Numericals as they are stored: of the same steps of rounding as `hotbed prepare` takes."""
        found = arrow.to_float32(column)
        missing = np.isnan(found)
        if self.entry.numericals != "as_is":
            values, negatives = arrow.to_float64(column), "zero" if self.entry.numericals == "log_zero" else "keep"
            least = -np.inf if negatives == "zero" else -3
            good = missing | (np.isfinite(values) & (values == np.floor(values)) & (values >= least))
            limit = "" if negatives == "zero" else " of at least −3, because ln(x + 3) is stored"
            fix = f"expected an integer{limit}; mend it, or leave it missing"
            place.refuse(name, "numbers of no log", ~good, column, "{:.15g}", fix)
            import polars as pl

            found = pl.Series(values).to_frame("x").select(logarithm(pl.col("x"), negatives)).to_series().to_numpy()
        if self.entry.dtype is None:
            return pa.array(found, mask=missing)
        with np.errstate(over="ignore"):
            rounded = np.where(missing, 0, found).astype(self.entry.dtype)
        fix = (
            f"it must be finite and at most {np.finfo(self.entry.dtype).max:,.0f} in size, as prepared data are "
            f"{self.entry.dtype}; mend it, or leave it missing"
        )
        place.refuse(name, "numbers not finite", ~np.isfinite(rounded), found, "{}", fix)
        return pa.array(rounded.astype(np.float32))

    def _table(self, name: str) -> LookupTable:
        if name not in self._tables:
            with _READING:
                if name not in self._tables:
                    table, entry = self.read(name), self.entry.vocabularies[name]
                    if len(table.keys) != entry.values or (table.kind_of_keys == "text") != (entry.kind == "text"):
                        raise DataError(
                            f"the vocabulary of table '{name}' has {len(table.keys):,} values ({table.kind_of_keys}), "
                            f"must have {entry.values:,} ({entry.kind}); it is another's, copy it again"
                        )
                    self._tables[name] = table
        return self._tables[name]


def _shown(state: Mapping[str, Any]) -> str:
    """How a table's ids are made, of what checkpoints know of it."""
    if "sha256" in state:
        return f"those of {state['keys']:,} values"
    return f"hashed to {state['rows']:,} rows with seed {state['seed']} ({state['kind']})"


def hint_for_text(rows: Mapping[str, Sequence[object]], columns: Sequence[SparseColumn]) -> str:
    """Say who takes raw values, where there is text in columns of ids that are rows of tables; else nothing."""
    if not any(isinstance(value, str) for column in columns for value in rows.get(column.name, ())):
        return ""
    return (
        "; raw values are taken by models that were trained on data of hotbed prepare, exported by this release and "
        "served without --encoded true"
    )


def _read(folder: Path, entry: PreparationEntry, name: str) -> LookupTable:
    """The ids of the values of a dataset's column."""
    values, expected = read_vocabulary(vocabulary_file(folder, name)).values, entry.vocabularies[name]
    if len(values) != expected.values or content_sha256(values) != expected.sha256:
        raise DataError(
            f"{folder} has other values of table '{name}' than its dataset was prepared with ({len(values):,}, not "
            f"{expected.values:,}, or others); put back what was there, or prepare the data again"
        )
    ids = np.int32 if len(values) < np.iinfo(np.int32).max else np.int64
    return LookupTable.ordered(values, pa.array(np.arange(1, len(values) + 1, dtype=ids)))


def _parsed(array: pa.Array, name: str, place: RowLocation) -> pa.Array:
    """Hexadecimal text ``[n]`` as integers; null where it is missing or empty, as in a log."""
    import polars as pl

    try:
        text = pl.Series("x", array.cast(pa.large_string()))
    except pa.ArrowInvalid as error:
        raise DataError(f"{place.name}, column '{name}': its values are no text ({error}); write UTF-8") from None
    text = text.set(text == "", None)
    parsed = text.to_frame().select(hexadecimal(pl.col("x")))["x"]
    bad = (parsed.is_null() & text.is_not_null()).to_numpy()
    fix = "expected a hexadecimal number of at most 8 digits; mend it, or leave it missing"
    place.refuse(name, "ids not hexadecimal", bad, text, "{!r}", fix)
    return parsed.to_arrow()
