"""Convert raw values in the same way as `hotbed prepare` did for the training data: `Preparation`.

A prepared dataset contains a `PreparationEntry`, which describes the conversion: in ``metadata.preparation`` of
``feature_spec.yaml``, or in the metadata of its Parquet files. The values of each table are in ``vocabulary/``. An
exported model contains the entry and the vocabularies, and maps the vocabularies into memory.

A vocabulary assigns a row to each frequent value. Values that appear later, e.g. new users, queries or pages, are
mapped to row 0 until the data are prepared again. Tables with many new values can have a `HashEntry` instead of a
vocabulary. A hash assigns a row to each value, and several values may share a row.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from hotbed.checks import Range, Size, check, check_known
from hotbed.data import arrow_columns as arrow
from hotbed.data.columns import SparseColumn
from hotbed.data.encoding.lookup_table import LookupTable, content_sha256
from hotbed.data.encoding.vocabulary import VOCABULARY, read_vocabulary, vocabulary_file
from hotbed.data.files.criteo import hexadecimal, logarithm
from hotbed.data.hashing import hashes_to_rows, mix
from hotbed.data.row_location import RowLocation
from hotbed.data.schema import Schema
from hotbed.errors import DataError, SpecError
from hotbed.parsing import fault_of

Kind = Literal["hexadecimal", "integers", "text"]
_MOST_ROWS = 1 << 40
_SEEDS = 1 << 64
_LIMITS = {"sha256": "64 hexadecimal digits"}


class _PreparedEntry(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class HashEntry(_PreparedEntry):
    """The hash that maps values of a table without a vocabulary to rows."""

    kind: Kind  # type of the raw values
    rows: int = Field(ge=2, le=_MOST_ROWS)  # number of rows of the table; row 0 is for missing values
    # With seed 0, the hash is h of `hotbed.data.hashing`. With any other seed, it is ``mix(h ^ seed)``.
    seed: int = Field(ge=0, lt=_SEEDS)

    def ids(self, values: pa.Array) -> NDArray[np.int64]:
        """Return the rows ``[n]`` of values ``[n]``, which are text or integers (e.g. parsed from hexadecimal text)."""
        h = arrow.hash_values(values)
        found = hashes_to_rows(mix(h ^ np.uint64(self.seed)) if self.seed else h, self.rows)
        found[values.is_null().to_numpy(zero_copy_only=False)] = 0
        return found


def check_hashed(hash_rows: Mapping[str, object], seed: object, schema: Schema) -> None:
    """Raise `SpecError` unless the tables of ``hash_rows`` exist, and their numbers of rows and the seed are valid."""
    check("hash_seed", seed, Size, SpecError)
    for table, rows in hash_rows.items():
        check_known("table of hash_rows", table, schema.rows, SpecError)
        check(f"hash_rows.{table}", rows, Annotated[int, Range(least=2, most=_MOST_ROWS)], SpecError)


PREPARATION = b"hotbed.preparation"
"""Key of the `PreparationEntry`, as JSON, in the metadata of Parquet files."""
_READING = threading.Lock()
_KINDS_OF_JSON: Mapping[Kind, str] = {"hexadecimal": "text", "integers": "integers", "text": "text"}


class VocabularyEntry(_PreparedEntry):
    """A description of a vocabulary, which identifies its values."""

    kind: Kind  # type of the raw values
    values: NonNegativeInt  # number of values
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @staticmethod
    def of(values: pa.Array, kind: Kind) -> VocabularyEntry:
        """Return the entry of a vocabulary with these values ``[V]``, sorted by id."""
        return VocabularyEntry(kind=kind, values=len(values), sha256=content_sha256(values))


class PreparationEntry(_PreparedEntry):
    """The conversion of raw values to the values of a prepared dataset."""

    vocabularies: dict[str, VocabularyEntry]  # by table
    tables: dict[str, str]  # name of the table by sparse column
    hashed: dict[str, HashEntry] = Field(default_factory=dict)  # by table, for tables without a vocabulary
    # log: x becomes ln(x + 3), where -3 first becomes -2. log_zero: negative x become 0, then x becomes ln(x + 3).
    numericals: Literal["log", "log_zero", "as_is"]
    # Numericals are rounded to this dtype, and missing numericals become 0. None: numericals keep dtype and nulls.
    dtype: Literal["float16"] | None

    @staticmethod
    def parse(values: object, where: str) -> PreparationEntry:
        """Parse an entry from plain values, or from JSON as bytes. ``where`` names the source in errors."""
        try:
            if isinstance(values, bytes):
                return PreparationEntry.model_validate_json(values)
            return PreparationEntry.model_validate(values)
        except ValidationError as error:
            raise DataError(f"{where}: {fault_of(error, _LIMITS)}. Prepare the data again") from None


class Preparation:
    """Converts raw rows to rows as in a prepared dataset.

    The function ``read`` returns the vocabulary of a table. It is called when the vocabulary is first needed.
    """

    def __init__(
        self, entry: PreparationEntry, columns: Sequence[SparseColumn], read: Callable[[str], LookupTable]
    ) -> None:
        self.entry, self.read, self._columns = entry, read, {column.name: column for column in columns}
        for name in self._columns:
            if entry.tables.get(name) not in {**entry.vocabularies, **entry.hashed}:
                raise DataError(f"column '{name}' has neither a vocabulary nor a hash. Prepare the data again")
        self._tables: dict[str, LookupTable] = {}

    @staticmethod
    def of_dataset(path: Path, schema: Schema, values: object) -> Preparation:
        """Return the preparation of the dataset at ``path``. ``values`` is its unparsed `PreparationEntry`."""
        entry = PreparationEntry.parse(values, f"{path}: metadata.preparation")
        return Preparation(entry, schema.stored[0], partial(_read, path / VOCABULARY, entry))

    @staticmethod
    def rebuild(values: object, schema: Schema, read: Callable[[str], LookupTable] | None) -> Preparation | None:
        """Return the preparation of an exported model, or None if it has none. All vocabularies are read now."""
        if values is None or read is None:
            return None
        made = Preparation(PreparationEntry.parse(values, "preparation"), schema.stored[0], read)
        for name in {made.entry.tables[column] for column in made._columns} - made.entry.hashed.keys():
            made._table(name)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickling, without vocabularies, because each reader reads the needed ones."""
        return {**self.__dict__, "_tables": {}}

    def state(self) -> dict[str, Any]:
        """Return plain values that identify the vocabulary or hash of each table, for checkpoints."""
        found: dict[str, Any] = {
            name: {"keys": of.values, "sha256": of.sha256} for name, of in self.entry.vocabularies.items()
        }
        return found | {name: of.model_dump() for name, of in self.entry.hashed.items()}

    def refuse_other(self, state: Mapping[str, Any], *, may_grow: bool = False) -> None:
        """Raise `DataError` if a model was trained with different vocabularies, because ids would change their meaning.

        ``state`` is the value of `state` in training. Tables without a state are not compared. With ``may_grow``,
        values may have been added, but earlier values must have kept their ids.
        """
        for name, now in self.state().items():
            was = state.get(name, now)
            if was == now or (may_grow and "sha256" in was and "sha256" in now and self._begins_with(name, was)):
                continue
            if "sha256" not in was or "sha256" not in now:
                raise DataError(
                    f"table '{name}': got {_format_state(now)}, expected {_format_state(was)} as in training. "
                    "Prepare the data in the same way (hotbed prepare --hash_rows, --hash_seed)"
                )
            raise DataError(
                f"table '{name}': got data prepared with {now['keys']:,} values (SHA-256 {now['sha256'][:12]}…), "
                f"expected {was['keys']:,} values ({was['sha256'][:12]}…) as in training. Use the training data. To "
                "continue training with new data (--init_from), prepare them with hotbed prepare RAW OUT --vocabulary "
                "OLD/vocabulary, which keeps the ids of OLD"
            )

    def _begins_with(self, name: str, was: Mapping[str, Any]) -> bool:
        """Return whether the current vocabulary of a table begins with the vocabulary that has the state ``was``."""
        if self.entry.vocabularies[name].values < was["keys"]:
            return False
        table = self._table(name)
        in_order = np.argsort(table.values.to_numpy(zero_copy_only=False))[: was["keys"]]
        return content_sha256(table.keys.take(pa.array(in_order))) == was["sha256"]

    def unknown(self, state: Mapping[str, Any]) -> list[str]:
        """Return the tables that have no entry in the `state` of a checkpoint."""
        return [name for name in self.state() if name not in state]

    @property
    def kinds(self) -> dict[str, str]:
        """Type that the raw values of each sparse column have in JSON rows, see `InputColumn`."""
        return {name: _KINDS_OF_JSON[self._entry(name).kind] for name in self._columns}

    @property
    def text(self) -> list[str]:
        """Columns that have text in training, even if a file has only digits in them."""
        return [name for name, kind in self.kinds.items() if kind == "text"]

    def check(self, fields: pa.Schema, what: str) -> None:
        """Raise `SpecError` unless columns of the file ``what`` with these types can hold raw values."""
        for name, column in self._columns.items():
            if name not in fields.names:
                continue
            t, wanted = arrow.plain_type(fields.field(name).type), self._entry(name).kind
            value = t if wanted == "hexadecimal" else arrow.value_type_of(t)
            arrow.check_sparse(replace(column, rows=2), value if column.ids == 1 else t, "hash", what)
            fits = arrow.is_text(value) != (wanted == "integers")
            if not (fits or pa.types.is_null(value)):
                raise SpecError(
                    f"{what}: column '{name}': got {t}, expected raw values ({wanted}), as in the input of hotbed "
                    "prepare. For ids, use a dataset written by hotbed prepare, or hotbed serve --encoded true"
                )

    def convert(self, table: pa.Table, dense: Sequence[str], location: RowLocation) -> pa.Table:
        """Convert raw values as `hotbed prepare` does: sparse columns to ids, and ``dense`` columns to numericals."""
        for at, name in enumerate(table.column_names):
            if name in self._columns:
                found = self._bags(table[name], name, location)
            elif name in dense and (self.entry.numericals, self.entry.dtype) != ("as_is", None):
                found = self._numbers(table[name], name, location)
            else:
                continue
            table = table.set_column(at, name, found)
        return table

    def _entry(self, column: str) -> VocabularyEntry | HashEntry:
        table = self.entry.tables[column]
        return self.entry.hashed.get(table) or self.entry.vocabularies[table]

    def _bags(self, column: pa.ChunkedArray, name: str, location: RowLocation) -> pa.Array:
        array = column.combine_chunks()
        if not arrow.is_list(array.type):
            missing = pa.types.is_null(array.type) and self._columns[name].ids != 1  # bags
            return array if missing else self._ids(array, name, location)
        inside = location.of_lists(arrow.list_lengths(array))
        return arrow.regroup(self._ids(array.flatten(), name, inside), array)

    def _ids(self, array: pa.Array, name: str, location: RowLocation) -> pa.Array:
        if pa.types.is_null(array.type):
            return pa.array(np.zeros(len(array), np.int32))
        array = arrow.decode_dictionary(array)
        entry = self._entry(name)
        convert = _parse_hexadecimal if entry.kind == "hexadecimal" else arrow.to_hashable
        values = convert(array, name, location)
        if isinstance(entry, HashEntry):
            return pa.array(entry.ids(values))
        return pc.fill_null(self._table(self.entry.tables[name]).find(values), 0)

    def _numbers(self, column: pa.ChunkedArray, name: str, location: RowLocation) -> pa.Array:
        """Convert numericals with the same roundings as `hotbed prepare`."""
        found = arrow.to_float32(column)
        missing = np.isnan(found)
        if self.entry.numericals != "as_is":
            values, negatives = arrow.to_float64(column), "zero" if self.entry.numericals == "log_zero" else "keep"
            least = -np.inf if negatives == "zero" else -3
            good = missing | (np.isfinite(values) & (values == np.floor(values)) & (values >= least))
            limit = "" if negatives == "zero" else " of at least −3, because of ln(x + 3)"
            fix = f"expected an integer{limit}. Correct the value, or leave it empty"
            location.refuse(name, "numbers of no log", ~good, column, "{:.15g}", fix)
            import polars as pl

            found = pl.Series(values).to_frame("x").select(logarithm(pl.col("x"), negatives)).to_series().to_numpy()
        if self.entry.dtype is None:
            return pa.array(found, mask=missing)
        with np.errstate(over="ignore"):
            rounded = np.where(missing, 0, found).astype(self.entry.dtype)
        limit = np.finfo(self.entry.dtype).max
        fix = f"expected a magnitude of at most {limit:,.0f} ({self.entry.dtype}). Correct the value, or leave it empty"
        location.refuse(name, "numbers not finite", ~np.isfinite(rounded), found, "{}", fix)
        return pa.array(rounded.astype(np.float32))

    def _table(self, name: str) -> LookupTable:
        with _READING:
            if name not in self._tables:
                table, entry = self.read(name), self.entry.vocabularies[name]
                if len(table.keys) != entry.values or (table.type_of_keys == "text") != (entry.kind == "text"):
                    raise DataError(
                        f"vocabulary of table '{name}': got {len(table.keys):,} values ({table.type_of_keys}), "
                        f"expected {entry.values:,} ({entry.kind}). The file belongs to different data. Copy the "
                        "vocabulary from the training data"
                    )
                self._tables[name] = table
            return self._tables[name]


def _format_state(state: Mapping[str, Any]) -> str:
    if "sha256" in state:
        return f"a vocabulary of {state['keys']:,} values"
    return f"hashes to {state['rows']:,} rows with seed {state['seed']} ({state['kind']})"


def hint_for_text(rows: Mapping[str, Sequence[object]], columns: Sequence[SparseColumn]) -> str:
    """Return a hint for an error message if rows have text in columns of encoded ids, else ""."""
    if not any(isinstance(value, str) for column in columns for value in rows.get(column.name, ())):
        return ""
    return (
        ". To score raw values, train a model on data written by hotbed prepare, export it with this release, and "
        "serve it without --encoded true"
    )


def _read(folder: Path, entry: PreparationEntry, name: str) -> LookupTable:
    values, expected = read_vocabulary(vocabulary_file(folder, name)).values, entry.vocabularies[name]
    if len(values) != expected.values or content_sha256(values) != expected.sha256:
        raise DataError(
            f"{folder}: table '{name}': got {len(values):,} values, expected the {expected.values:,} values that the "
            "dataset was prepared with. Restore the vocabulary, or prepare the data again"
        )
    ids = np.int32 if len(values) < np.iinfo(np.int32).max else np.int64
    return LookupTable.sort(values, pa.array(np.arange(1, len(values) + 1, dtype=ids)))


def _parse_hexadecimal(array: pa.Array, name: str, location: RowLocation) -> pa.Array:
    """Convert hexadecimal text ``[n]`` to integers. Empty text becomes null."""
    import polars as pl

    try:
        text = pl.Series("x", array.cast(pa.large_string()))
    except pa.ArrowInvalid as error:
        raise DataError(f"{location.name}, column '{name}': got {error}, expected UTF-8 text") from None
    text = text.set(text == "", None)
    parsed = text.to_frame().select(hexadecimal(pl.col("x")))["x"]
    bad = (parsed.is_null() & text.is_not_null()).to_numpy()
    fix = "expected a hexadecimal number of at most 8 digits. Correct the value, or leave it empty"
    location.refuse(name, "ids not hexadecimal", bad, text, "{!r}", fix)
    return parsed.to_arrow()
