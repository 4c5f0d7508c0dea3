"""Read a table of keys and values into memory, and look values up in it: `LookupTable`, for `Lookup` features."""

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

from hotbed.data import arrow_columns as arrow
from hotbed.data.derived_features import Lookup
from hotbed.data.files.parquet_files import find_parquet, with_rows
from hotbed.data.hashing import Hashes
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError, SpecError, did_you_mean

_STORED = ("key", "value", "hash")


@dataclass(frozen=True)
class LookupTable:
    """Distinct keys ``[n]``, integers or text, in the order of their hashes, and their values.

    Values are integers, numbers, text, or lists of integers or text.
    """

    keys: pa.Array
    values: pa.Array
    stored_hashes: Hashes | None = field(default=None, compare=False)
    """Of the keys, where they are stored with them."""

    @staticmethod
    def read(lookup: Lookup) -> LookupTable:
        """Read the file of a feature."""
        found = find_parquet(lookup.file)
        if len(found) > 1:
            raise DataError(f"feature '{lookup.name}': {lookup.file} has the splits {', '.join(found)}; name one file")
        parts: list[pa.Table] = []
        names = list(dict.fromkeys((lookup.key, lookup.value)))
        for file in with_rows(next(iter(found.values()))):
            for name in names:
                if name not in (known := file.schema.names):
                    raise DataError(
                        f"feature '{lookup.name}': {file} has no column '{name}'; it has {', '.join(known)}"
                        f"{did_you_mean(name, known)}"
                    )
            parts += [group.read(names) for group in file.row_groups()]
            parts.append(file.schema.empty_table().select(names))
        try:
            whole = pa.concat_tables([arrow.to_plain_types(part) for part in parts], promote_options="permissive")
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise DataError(f"feature '{lookup.name}': files of {lookup.file} differ in types: {error}") from None
        return LookupTable.of(whole[lookup.key], whole[lookup.value], lookup)

    @staticmethod
    def of(keys: pa.ChunkedArray, values: pa.ChunkedArray, lookup: Lookup) -> LookupTable:
        """Check and order keys and values; rows without a key are left out. See `read` for the errors."""
        where = f"feature '{lookup.name}': {lookup.file}"
        there = pc.is_valid(keys)
        key = _normal(keys.filter(there).combine_chunks(), f"{where}, column '{lookup.key}'", may_be_list=False)
        value = _normal(values.filter(there).combine_chunks(), f"{where}, column '{lookup.value}'", may_be_list=True)
        made = LookupTable.ordered(key, value)
        key, hashes = made.keys, made._hashes
        same = np.flatnonzero(hashes[1:] == hashes[:-1])
        if len(same):
            first, second = (arrow.format_scalar(key[int(same[0]) + i]) for i in (0, 1))
            problem = (
                f"the key {first} is there twice; leave one of its rows, so that there is one value"
                if first == second
                else f"the keys {first} and {second} have one hash, so they cannot be told apart; rename one of them"
            )
            raise DataError(f"{where}, column '{lookup.key}': {problem}")
        return made

    @staticmethod
    def ordered(keys: pa.Array, values: pa.Array) -> LookupTable:
        """Order distinct keys ``[n]`` and their values."""
        keys = _normal(keys, "keys", may_be_list=False)
        hashes = arrow.hash_values(keys)
        order = np.argsort(hashes, kind="stable")
        return LookupTable(keys.take(pa.array(order)), values.take(pa.array(order)), hashes[order])

    @staticmethod
    def mapped(path: Path) -> LookupTable:
        """Map a file that `write_mapped` wrote into memory; nothing is read before it is asked for."""
        try:
            with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
                if reader.num_record_batches != 1:
                    raise KeyError(f"it has {reader.num_record_batches:,} batches, must have one")
                batch = reader.get_batch(0)
            batch.validate()
            key, value, hashes = (batch[name] for name in _STORED)
            if not (pa.types.is_uint64(hashes.type) and pa.types.is_integer(value.type)) or value.null_count:
                raise KeyError(f"its hashes are {hashes.type} and its values {value.type}, must be uint64 and integers")
            return LookupTable(key, value, hashes.to_numpy(zero_copy_only=True))
        except (pa.ArrowException, KeyError, OSError) as error:
            raise DataError(f"{path} holds no keys and values: {error}") from None

    def write_mapped(self, stream: IO[bytes]) -> None:
        """Write an Arrow IPC file of keys, values and the hashes of keys, in the order of these."""
        batch = pa.record_batch([self.keys, self.values, pa.array(self._hashes)], names=list(_STORED))
        with pa.ipc.new_file(stream, batch.schema) as writer:
            writer.write_batch(batch)

    @staticmethod
    def from_table(table: pa.Table, lookup: Lookup) -> LookupTable:
        """Rebuild one from `to_table`'s columns."""
        for name in ("key", "value"):
            if name not in table.column_names:
                raise DataError(f"the table of feature '{lookup.name}' has no column '{name}'; export the model again")
        return LookupTable.of(table["key"], table["value"], lookup)

    def to_table(self) -> pa.Table:
        """Columns ``key`` and ``value``, for an exported model."""
        return pa.table({"key": self.keys, "value": self.values})

    @property
    def kind_of_keys(self) -> str:
        """What keys are to a hash: ``"text"`` or ``"integers"``; "" where there are none."""
        return arrow.type_of_ids(self.keys.type)

    def refuse_other(self, lookup: Lookup, trained: Mapping[str, Any]) -> None:
        """Raise `DataError` if a model was trained with other keys or values: those of so many keys and a SHA-256."""
        if self.sha256 != trained["sha256"]:
            raise DataError(
                f"feature '{lookup.name}': {lookup.file} has changed since the model was trained: it had "
                f"{trained['keys']:,} keys with SHA-256 {trained['sha256'][:12]}…, and has {len(self.keys):,} with "
                f"{self.sha256[:12]}…; put back what it was, or train a model with what it is (init_from takes "
                "over the rows of the earlier one)"
            )

    @cached_property
    def sha256(self) -> str:
        """Of all keys and values, whatever file format, order of rows or width of integers they came in."""
        return content_sha256(self.keys, self.values)

    def find(self, asked: pa.Array) -> pa.Array:
        """Values ``[n]`` of keys ``[n]``; null for those that are null or not in the table."""
        if not len(self.keys) or not len(asked):
            return pa.nulls(len(asked), self.values.type)
        hashes = arrow.hash_values(asked)
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self.keys) - 1)
        found = (self._hashes[at] == hashes) & ~asked.is_null().to_numpy(zero_copy_only=False)
        if arrow.is_text(self.keys.type):  # of integers, equal hashes are equal keys
            same = pc.equal(self.keys.take(pa.array(at)), _bytes(asked))
            found &= pc.fill_null(same, False).to_numpy(zero_copy_only=False)
        return self.values.take(pa.array(at, mask=~found))

    @cached_property
    def _hashes(self) -> Hashes:
        return arrow.hash_values(self.keys) if self.stored_hashes is None else self.stored_hashes


def content_sha256(*arrays: pa.Array) -> str:
    """Hash values, whatever width of integers or kind of text they have."""
    found = hashlib.sha256()
    for array in arrays:
        _update(found, _normal(array, "values", may_be_list=True))
    return found.hexdigest()


def _normal(array: pa.Array, where: str, *, may_be_list: bool) -> pa.Array:
    """Integers as int64 (uint64 where they need it), numbers as float64, text as bytes, and lists of these."""
    array = arrow.decode_dictionary(array)
    kind = array.type
    if may_be_list and arrow.is_list(kind):
        values = array.flatten()
        if arrow.is_whole(values.type) or arrow.is_text(values.type) or pa.types.is_null(values.type):
            return arrow.regroup(_normal(values, where, may_be_list=False), array)
    if arrow.is_text(kind):
        return _bytes(array)
    if pa.types.is_null(kind):
        return array.cast(pa.int64())
    if not may_be_list and pa.types.is_floating(kind):
        return arrow.to_hashable(array, "", RowLocation(where, lambda at: f"key {at:,}"))
    if pa.types.is_uint64(kind) and (highest := pc.max(array).as_py()) is not None and highest >= 1 << 63:
        return array
    if arrow.is_whole(kind):
        return array.cast(pa.int8()).cast(pa.int64()) if pa.types.is_boolean(kind) else array.cast(pa.int64())
    if may_be_list and arrow.is_number(kind):
        return array.cast(pa.float64(), safe=False)
    allowed = "integers, numbers, text, or lists of integers or text" if may_be_list else "integers or text"
    raise SpecError(f"{where} is {kind}, must be {allowed}")


def _bytes(array: pa.Array) -> pa.Array:
    array = arrow.decode_dictionary(array)
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        array = array.cast(pa.large_string())
    return array.cast(pa.large_binary())


def _update(found: hashlib._Hash, array: pa.Array) -> None:
    """Hash an array of `_normal`: its kind, which values are null, and all of them."""
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
