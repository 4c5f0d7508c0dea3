"""Read a table of keys and values, and look up values by key: `LookupTable`, for `Lookup` features."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from hotbed.checks import check_known
from hotbed.data import arrow_columns as arrow
from hotbed.data.derived_features import Lookup
from hotbed.data.files.parquet_files import find_parquet, with_rows
from hotbed.data.hashing import Hashes
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError, SpecError

_STORED = ("key", "value", "hash")


@dataclass(frozen=True)
class LookupTable:
    """Distinct keys ``[n]`` (integers or text), sorted by hash, and their values.

    Values are integers, numbers, text, or lists of integers or text.
    """

    keys: pa.Array
    values: pa.Array
    stored_hashes: Hashes | None = field(default=None, compare=False)  # hashes of the keys, if the file has them

    @staticmethod
    def read(lookup: Lookup) -> LookupTable:
        """Read the table from the file of a feature."""
        found = find_parquet(lookup.file)
        if len(found) > 1:
            raise DataError(f"feature '{lookup.name}': {lookup.file}: got splits {', '.join(found)}, expected one file")
        parts: list[pa.Table] = []
        names = list(dict.fromkeys((lookup.key, lookup.value)))
        for file in with_rows(next(iter(found.values()))):
            for name in names:
                check_known(f"feature '{lookup.name}': column of {file}", name, file.schema.names, DataError)
            parts += [group.read(names) for group in file.row_groups()]
            parts.append(file.schema.empty_table().select(names))
        try:
            whole = pa.concat_tables([arrow.to_plain_types(part) for part in parts], promote_options="permissive")
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise DataError(f"feature '{lookup.name}': files of {lookup.file} have different types: {error}") from None
        return LookupTable.of(whole[lookup.key], whole[lookup.value], lookup)

    @staticmethod
    def of(keys: pa.ChunkedArray, values: pa.ChunkedArray, lookup: Lookup) -> LookupTable:
        """Check and sort keys and values, and return their table. Rows without a key are dropped."""
        where = f"feature '{lookup.name}': {lookup.file}"
        there = pc.is_valid(keys)
        key = _normalize(keys.filter(there).combine_chunks(), f"{where}, column '{lookup.key}'", may_be_list=False)
        value = _normalize(values.filter(there).combine_chunks(), f"{where}, column '{lookup.value}'", may_be_list=True)
        made = LookupTable.sort(key, value)
        key, hashes = made.keys, made._hashes
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        if len(same):
            first, second = (arrow.format_scalar(key[int(same[0]) + i]) for i in (0, 1))
            problem = (
                f"got key {first} twice, expected unique keys. Remove one of its rows"
                if first == second
                else f"keys {first} and {second} have the same hash. Rename one of them"
            )
            raise DataError(f"{where}, column '{lookup.key}': {problem}")
        return made

    @staticmethod
    def sort(keys: pa.Array, values: pa.Array) -> LookupTable:
        """Sort distinct keys ``[n]`` and their values by hash, and return their table."""
        keys = _normalize(keys, "keys", may_be_list=False)
        hashes = arrow.hash_values(keys)
        order = np.argsort(hashes, kind="stable")
        return LookupTable(keys.take(pa.array(order)), values.take(pa.array(order)), hashes[order])

    @staticmethod
    def map_file(path: Path) -> LookupTable:
        """Return a table that `write_file` has stored. The file is mapped into memory: pages are read on first use."""
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                if reader.num_record_batches != 1:
                    raise KeyError(f"got {reader.num_record_batches:,} batches, expected 1")
                batch = reader.get_batch(0)
            batch.validate()
            key, value, hashes = (batch[name] for name in _STORED)
            if not (pa.types.is_uint64(hashes.type) and pa.types.is_integer(value.type)) or value.null_count:
                raise KeyError(f"got hashes of {hashes.type} and values of {value.type}, expected uint64 and integers")
            return LookupTable(key, value, hashes.to_numpy(zero_copy_only=True))
        except (pa.ArrowException, KeyError, OSError) as error:
            raise DataError(
                f"{path} is not a table of keys and values, or is truncated: {error}. Copy the file again"
            ) from None

    def write_file(self, stream: IO[bytes]) -> None:
        """Write an Arrow IPC file of keys, values and hashes, sorted by hash."""
        batch = pa.record_batch([self.keys, self.values, pa.array(self._hashes)], names=list(_STORED))
        with pa.ipc.new_file(stream, batch.schema) as writer:
            writer.write_batch(batch)

    @staticmethod
    def from_table(table: pa.Table, lookup: Lookup) -> LookupTable:
        """Rebuild a lookup table from the columns of `to_table`."""
        for name in ("key", "value"):
            if name not in table.column_names:
                raise DataError(f"table of feature '{lookup.name}': column '{name}' is missing. Export the model again")
        return LookupTable.of(table["key"], table["value"], lookup)

    def to_table(self) -> pa.Table:
        """Return a table with columns ``key`` and ``value``, for an exported model."""
        return pa.table({"key": self.keys, "value": self.values})

    @property
    def type_of_keys(self) -> str:
        """Type as which keys are hashed: ``"text"``, ``"integers"``, or "" if the keys have type null."""
        return arrow.type_of_ids(self.keys.type)

    def refuse_other(self, lookup: Lookup, trained: Mapping[str, Any]) -> None:
        """Raise `DataError` if keys or values have changed since training. ``trained`` is the state in training."""
        if self.sha256 != trained["sha256"]:
            raise DataError(
                f"feature '{lookup.name}': {lookup.file} has changed since training: got {len(self.keys):,} keys with "
                f"SHA-256 {self.sha256[:12]}…, expected {trained['keys']:,} keys with {trained['sha256'][:12]}…. "
                "Restore the file, or train a new model (init_from copies the rows of the earlier model)"
            )

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of all keys and values. File format, row order and integer width do not change the hash."""
        return content_sha256(self.keys, self.values)

    def find(self, keys: pa.Array) -> pa.Array:
        """Return the values ``[n]`` of keys ``[n]``. The value of a null or unknown key is null."""
        if not len(self.keys) or not len(keys):
            return pa.nulls(len(keys), self.values.type)
        hashes = arrow.hash_values(keys)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self.keys) - 1)
        found = (self._hashes[at] == hashes) & ~keys.is_null().to_numpy(zero_copy_only=False)
        if arrow.is_text(self.keys.type):  # hashes of integers are unique
            same = pc.equal(self.keys.take(pa.array(at)), arrow.to_bytes(keys))
            found &= pc.fill_null(same, False).to_numpy(zero_copy_only=False)
        return self.values.take(pa.array(at, mask=~found))

    @cached_property
    def _hashes(self) -> Hashes:
        return arrow.hash_values(self.keys) if self.stored_hashes is None else self.stored_hashes


def content_sha256(*arrays: pa.Array) -> str:
    """Return the SHA-256 of values. The width of integers and the Arrow type of text do not change the hash."""
    found = hashlib.sha256()
    for array in arrays:
        _update(found, _normalize(array, "values", may_be_list=True))
    return found.hexdigest()


def _normalize(array: pa.Array, where: str, *, may_be_list: bool) -> pa.Array:
    """Convert integers to int64 (or uint64), numbers to float64, and text to bytes, also within lists."""
    array = arrow.decode_dictionary(array)
    t = array.type
    if may_be_list and arrow.is_list(t):
        values = array.flatten()
        if arrow.is_whole(values.type) or arrow.is_text(values.type) or pa.types.is_null(values.type):
            return arrow.regroup(_normalize(values, where, may_be_list=False), array)
    if arrow.is_text(t):
        return arrow.to_bytes(array)
    if pa.types.is_null(t):
        return array.cast(pa.int64())
    if not may_be_list and pa.types.is_floating(t):
        return arrow.to_hashable(array, "", RowLocation(where, lambda at: f"key {at:,}"))
    if pa.types.is_uint64(t) and (highest := pc.max(array).as_py()) is not None and highest >= 1 << 63:
        return array
    if arrow.is_whole(t):
        return array.cast(pa.int8()).cast(pa.int64()) if pa.types.is_boolean(t) else array.cast(pa.int64())
    if may_be_list and arrow.is_number(t):
        return array.cast(pa.float64(), safe=False)
    allowed = "integers, numbers, text, or lists of integers or text" if may_be_list else "integers or text"
    raise SpecError(f"{where}: got {t}, expected {allowed}")


def _update(found: hashlib._Hash, array: pa.Array) -> None:
    """Add an array that `_normalize` returned (its type, nulls and values) to the hash ``found``."""
    found.update(f"{array.type} {len(array)} ".encode())
    found.update(np.packbits(array.is_null().to_numpy(zero_copy_only=False)).tobytes())
    if arrow.is_list(array.type):
        found.update(arrow.list_lengths(array).astype("<i8").tobytes())
        _update(found, array.flatten())
    elif arrow.is_text(array.type):
        filled = pc.fill_null(array, b"")
        found.update(pc.binary_length(filled).to_numpy(zero_copy_only=False).astype("<i8").tobytes())
        for chunk in range(0, len(filled), 1 << 16):
            found.update(b"".join(filled.slice(chunk, 1 << 16).to_pylist()))
    else:
        values = pc.fill_null(array, pa.scalar(0, array.type)).to_numpy(zero_copy_only=False)
        found.update(values.astype(values.dtype.newbyteorder("<")).tobytes())
