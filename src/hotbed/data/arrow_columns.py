"""Convert Arrow columns to NumPy arrays (ids, table rows, id weights and numericals), and check column types."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotbed.data.columns import Scaling, SparseColumn
from hotbed.data.hashing import Hashes, hash_integers, hash_strings, hashes_to_rows
from hotbed.data.row_location import RowLocation
from hotbed.errors import DataError, SpecError, did_you_mean

Ids = Literal["hash", "raw"]
_DIGITS = 18  # number of decimal digits that fit int64
Array = NDArray[Any]
_INT32 = np.iinfo(np.int32).max


class WideDecimalError(DataError):
    """Error for decimals without a fraction that do not fit 64 bits."""

    column: str = ""  # name of the column
    reason: str = ""  # the problem, without the name of the file


class NoColumnError(DataError):
    """Error for input data with missing columns."""

    columns: Sequence[str] = ()  # names of all missing columns


# -- types -----------------------------------------------------------------------------------------------------------


def is_list(t: pa.DataType) -> bool:
    """Return whether values of this type are lists."""
    return pa.types.is_list(t) or pa.types.is_large_list(t) or pa.types.is_fixed_size_list(t)


def is_text(t: pa.DataType) -> bool:
    """Return whether values of this type are strings or bytes, plain or dictionary-encoded."""
    t = t.value_type if pa.types.is_dictionary(t) else t
    return pa.types.is_string(t) or pa.types.is_large_string(t) or pa.types.is_binary(t) or pa.types.is_large_binary(t)


def is_whole(t: pa.DataType) -> bool:
    """Return whether values of this type are integers or booleans, plain or dictionary-encoded."""
    t = t.value_type if pa.types.is_dictionary(t) else t
    return pa.types.is_integer(t) or pa.types.is_boolean(t)


def is_time(t: pa.DataType) -> bool:
    """Return whether values of this type are dates or timestamps."""
    return pa.types.is_timestamp(t) or pa.types.is_date(t)


def is_number(t: pa.DataType) -> bool:
    """Return whether values of this type convert to float32."""
    return is_whole(t) or pa.types.is_floating(t) or pa.types.is_decimal(t)


def exact_integers(t: pa.DataType) -> int:
    """Return the largest number up to which floats of this type represent every integer: 2¹¹, 2²⁴ or 2⁵³."""
    return 1 << {16: 11, 32: 24, 64: 53}[t.bit_width]


def type_of_ids(t: pa.DataType) -> str:
    """Return whether values of this type are hashed as ``"text"`` or ``"integers"``. Return "" for type null."""
    value = value_type_of(t)
    return "" if pa.types.is_null(value) else "text" if is_text(value) else "integers"


def value_type_of(t: pa.DataType) -> pa.DataType:
    """Return the element type of a list type. Return a type that is not a list type unchanged."""
    return t.value_type if is_list(t) else t


def type_family(t: pa.DataType) -> str:
    """Return the family of a type: ``"lists"``, ``"text"``, ``"numbers"``, ``"times"``, the type itself, or "" (null).

    Columns of the same family can be concatenated.
    """
    if is_list(t):
        return "lists"
    if pa.types.is_null(t):
        return ""
    families = {"text": is_text, "numbers": is_number, "times": is_time}
    return next((name for name, is_member in families.items() if is_member(t)), str(t))


def are_compatible(first: pa.DataType, second: pa.DataType) -> bool:
    """Return whether columns of these types can be concatenated."""
    if is_list(first) and is_list(second):
        return are_compatible(first.value_type, second.value_type)
    return len({type_family(first), type_family(second)} - {""}) < 2


def common_type(types: Sequence[pa.DataType]) -> pa.DataType:
    """Return one type that can hold the values of all these types. The types must be compatible."""
    different = list(dict.fromkeys(t for t in types if not pa.types.is_null(t)))
    if len(different) < 2:
        return different[0] if different else pa.null()
    values = [t.value_type if pa.types.is_dictionary(t) else t for t in different]
    if is_list(values[0]):
        return pa.large_list(common_type([t.value_type for t in values]))
    if is_text(values[0]):
        as_bytes = any(pa.types.is_binary(t) or pa.types.is_large_binary(t) for t in values)
        return pa.large_binary() if as_bytes else pa.large_string()
    if scales := [t.scale for t in values if pa.types.is_decimal(t)]:
        return pa.float64() if any(map(pa.types.is_floating, values)) else pa.decimal256(76, max(scales))
    if is_time(values[0]):
        return pa.timestamp("us", "UTC" if any(getattr(t, "tz", None) for t in values) else None)
    return pa.int64() if all(map(is_whole, values)) else pa.float64()


def plain_type(t: pa.DataType) -> pa.DataType:
    """Return the type to which values of type ``t`` are cast. Arrow's functions support the returned type.

    Decimals without a fraction become integers.
    """
    if isinstance(t, pa.BaseExtensionType):  # UUIDs, JSON
        return plain_type(t.storage_type)
    if pa.types.is_string_view(t):
        return pa.string()
    if pa.types.is_binary_view(t) or pa.types.is_fixed_size_binary(t):
        return pa.binary()
    if pa.types.is_list_view(t) or pa.types.is_large_list_view(t):
        return pa.large_list(plain_type(t.value_type))
    if pa.types.is_decimal(t) and t.scale <= 0:  # e.g. keys of a database; 19 and 20 digits may need all 64 bits
        return pa.int64() if t.precision - t.scale <= _DIGITS else pa.uint64()
    if is_list(t) and (value := plain_type(t.value_type)) != t.value_type:
        return pa.list_(value, t.list_size) if pa.types.is_fixed_size_list(t) else pa.large_list(value)
    return t


def to_plain_types(table: pa.Table, where: str = "the rows") -> pa.Table:
    """Cast columns to their `plain_type`. Decimals of over 18 digits become uint64, or int64 if one is negative."""
    types = [plain_type(field.type) for field in table.schema]
    if types == table.schema.types:
        return table
    columns = [
        _cast_plain(column, t, where, name)
        for name, column, t in zip(table.column_names, table.columns, types, strict=True)
    ]
    return pa.table(columns, names=table.column_names)


def _cast_plain(column: pa.ChunkedArray, target: pa.DataType, where: str, name: str) -> pa.ChunkedArray:
    if pa.types.is_list_view(column.type) or pa.types.is_large_list_view(column.type):
        # Arrow's own cast loses values of a view (seen in 26.0).
        column = pa.chunked_array(
            [regroup(chunk.flatten(), chunk) for chunk in column.chunks], pa.large_list(column.type.value_type)
        )
    if not pa.types.is_decimal(value_type_of(column.type)):
        return column.cast(target)
    signed = pa.large_list(pa.int64()) if is_list(target) else pa.int64()
    for integers in (target, signed):
        with suppress(pa.ArrowInvalid):
            return column.cast(integers)
    values = pc.list_flatten(column) if is_list(column.type) else column
    span = pc.min_max(values).as_py()
    reason = (
        f"is {column.type}, which is read as integers: got values from {span['min']} to {span['max']}, "
        "expected at most 64 bits. Write the column as strings if it has ids, or as double if it has numbers"
    )
    error = WideDecimalError(f"{where}, column '{name}' {reason}")
    error.column, error.reason = name, reason
    raise error


# -- checks of columns -----------------------------------------------------------------------------------------------


def check_columns_exist(names: Sequence[str], fields: pa.Schema, what: str) -> None:
    """Raise `NoColumnError` unless the file ``what`` has all of these columns."""
    known: list[str] = fields.names
    absent = [name for name in names if name not in known]
    if absent:
        name = absent[0]
        outer, _, inner = name.partition(".")
        hint = did_you_mean(name, known)
        if inner and outer in known and pa.types.is_struct(fields.field(outer).type):
            hint = f". Fields of structs are not read. Write the field '{inner}' of '{outer}' as a separate column"
        error = NoColumnError(f"{what}: column '{name}' is missing, expected one of {', '.join(known)}{hint}")
        error.columns = absent
        raise error


def check_sparse(column: SparseColumn, t: pa.DataType, ids: Ids, what: str) -> None:
    """Raise `SpecError` unless values of this type can be the ids of a sparse column. ``what`` names the file."""
    if pa.types.is_null(t):  # all values are missing, so the type has no meaning
        return
    value, where = value_type_of(t), f"{what}: sparse column '{column.name}'"
    # pandas stores integers with missing values as floats, so floats are checked when they are read.
    is_float = pa.types.is_floating(t) or pa.types.is_null(value)
    if not (is_whole(value) or is_text(value) or is_float):
        hint = hint_for_struct(t) or ". List decimals with a fraction in `dense`" * pa.types.is_decimal(value)
        raise SpecError(f"{where}: got {t}, expected integers, strings or lists of them{hint}")
    if ids == "raw" and not (is_whole(value) or is_float):
        raise SpecError(f"{where}: got {t} with ids='raw', expected integers. Use ids='hash'")
    if ids == "hash" and column.rows < 2:
        raise SpecError(
            f"{where}: rows: got {column.rows}, expected at least 2 for hashed ids, because row 0 is for null"
        )
    if not is_list(t) and column.ids != 1:
        raise SpecError(f"{where}: {one_value(column.ids)}. Set ids to 1 in the schema, or write lists")


def one_value(ids: int | None) -> str:
    """Return the error message about a column that has one value per sample, but must have lists by the schema."""
    wanted = "a list of any length, because ids is null" if ids is None else f"a list of {ids:,}, because ids is {ids}"
    return f"got one value per sample, expected {wanted}"


def check_number(name: str, t: pa.DataType, what: str) -> None:
    """Raise `SpecError` unless values of this type can be numericals or weights. ``what`` names the file."""
    if not is_number(t):
        fix = hint_for_struct(t) or ". Write the column as numbers, or select a different column in the schema"
        raise SpecError(f"{what}: column '{name}': got {t}, expected numbers{fix}")


def check_id_weights(column: SparseColumn, fields: pa.Schema, what: str) -> None:
    """Raise `SpecError` unless a column's id weights are numbers, and are lists if and only if the ids are lists."""
    ids, weights = (plain_type(fields.field(name).type) for name in (column.name, column.weights))
    where = f"{what}: column '{column.weights}': got {weights}"
    if not (is_number(value_type_of(weights)) or pa.types.is_null(value_type_of(weights))):
        raise SpecError(f"{where}, expected numbers (weights of '{column.name}'){hint_for_struct(weights)}")
    if not (pa.types.is_null(ids) or pa.types.is_null(weights)) and is_list(ids) != is_list(weights):
        raise SpecError(f"{where}, expected one weight per id of '{column.name}' ({ids})")


def hint_for_struct(t: pa.DataType) -> str:
    """Return how to fix a column of structs or of lists of structs, for messages, or "" for any other column."""
    inner = value_type_of(t)
    if not pa.types.is_struct(inner):
        return ""
    return f". Write its fields {', '.join(field.name for field in inner)} as separate columns"


def has_no_values(column: pa.ChunkedArray) -> bool:
    """Return whether all rows are null, NaN or empty lists, so that the type of the column has no meaning."""
    if is_list(column.type):
        return int(pc.sum(pc.list_value_length(column)).as_py() or 0) == 0
    return pc.all(pc.is_null(column, nan_is_null=True)).as_py() is not False


def without_empty_types(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """Convert the named columns to type null if they have no values."""
    for at, name in enumerate(table.column_names):
        if name in names and has_no_values(table.column(at)):
            table = table.set_column(at, name, pa.chunked_array([pa.nulls(len(table))]))
    return table


# -- conversions -----------------------------------------------------------------------------------------------------


def regroup(values: pa.Array, lists: pa.Array) -> pa.Array:
    """Group values ``[N]`` into lists that have the lengths and nulls of ``lists``."""
    ends = pa.array(np.concatenate([[0], np.cumsum(list_lengths(lists))]))
    return pa.LargeListArray.from_arrays(ends, values, mask=lists.is_null())


def decode_dictionary(values: pa.Array) -> pa.Array:
    """Return dictionary-encoded values as plain values. Plain values are returned unchanged."""
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def to_bytes(texts: pa.Array) -> pa.Array:
    """Convert strings or bytes ``[n]``, plain or dictionary-encoded, to large_binary."""
    texts = decode_dictionary(texts)
    if pa.types.is_string(texts.type):  # Arrow does not cast strings to large_binary directly
        texts = texts.cast(pa.large_string())
    return texts.cast(pa.large_binary())


def to_microseconds(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Convert dates and times ``[n]`` to microseconds since 1970, int64. Times with a zone are converted to UTC."""
    zone = getattr(column.type, "tz", None)
    return pc.cast(pc.cast(column, pa.timestamp("us", zone), safe=False), pa.int64())


def to_float32(column: pa.ChunkedArray) -> Array:
    """Convert numbers ``[n]`` to the nearest float32 (integers up to 2²⁴ are exact). A null becomes NaN."""
    values = pc.cast(column, pa.float32(), safe=False).combine_chunks()
    return values.to_numpy(zero_copy_only=False).astype(np.float32)  # a copy, because Arrow's memory is read-only


def to_float64(column: pa.ChunkedArray) -> Array:
    """Convert numbers ``[n]`` to float64. A null becomes NaN."""
    if not pa.types.is_float64(column.type):
        column = pc.cast(column, pa.float64(), safe=False)
    return column.combine_chunks().to_numpy(zero_copy_only=False)


def scale_numbers(column: pa.ChunkedArray, scaling: Scaling) -> Array:
    """Return numbers ``[n]`` float32, scaled by the formula of `Scaling`. Null, NaN and infinities become 0."""
    with np.errstate(over="ignore", invalid="ignore"):
        # Differences are computed in float64, because the center may be large.
        distances = (to_float64(column) - scaling.center) / scaling.scale
    return np.where(np.isfinite(distances), np.arcsinh(distances), 0).astype(np.float32)


def hash_values(values: pa.Array) -> Hashes:
    """Hash integers or strings ``[n]`` to 64 bits. Hashes of nulls are undefined."""
    if pa.types.is_dictionary(values.type):
        if not len(values.dictionary):
            return np.zeros(len(values), dtype=np.uint64)
        return hash_values(values.dictionary)[_integers_to_numpy(values.indices)]
    if is_text(values.type):
        values = to_bytes(values)
        _, ends, data = values.buffers()
        offsets = np.frombuffer(ends, dtype=np.int64)[values.offset : values.offset + len(values) + 1]
        return hash_strings(offsets, np.frombuffer(data or b"", dtype=np.uint8))
    return hash_integers(_integers_to_numpy(values))


def to_hashable(values: pa.Array, column: str, location: RowLocation) -> pa.Array:
    """Convert ids ``[n]`` to a type that `hash_values` supports: whole floats become integers, and NaN becomes null."""
    if not pa.types.is_floating(values.type):
        return values.cast(pa.int64()) if pa.types.is_null(values.type) else values
    limit = exact_integers(values.type)
    numbers = values.cast(pa.float64()).to_numpy(zero_copy_only=False)
    missing = np.isnan(numbers)
    bad = ~missing & ~((numbers == np.floor(numbers)) & (np.abs(numbers) <= limit))
    fix = (
        f"expected whole numbers up to {limit:,} (the integers that {values.type} represents exactly). Write the "
        "column as integers or strings, or list it in `dense`"
    )
    location.refuse(column, "no whole numbers", bad, numbers, "id {}", fix)
    return pa.array(np.where(missing | bad, 0, numbers).astype(np.int64), mask=missing)


def check_ids(array: pa.Array, column: SparseColumn, ids: Ids, location: RowLocation) -> tuple[pa.Array, Array | None]:
    """Check the ids of a column. Return ids (rows if ``ids`` is raw) ``[N]``, and the number of ids per sample ``[n]``.

    The number is None for a column without lists. A null list is an empty bag, or a missing id if each sample must have
    one id.
    """
    if pa.types.is_null(array.type) and column.ids != 1:
        array = array.cast(pa.list_(pa.int64()))
    each = None
    if is_list(array.type):
        if column.ids == 1 and array.null_count:
            array = pc.fill_null(array, pa.scalar([None], array.type))
        each = list_lengths(array)
        refuse_lengths(each, column, location)
        array, location = array.flatten(), location.of_lists(each)
    values = to_hashable(array, column.name, location)
    if ids == "raw" and values.null_count:
        fix = "expected a table row. Replace missing ids, or set ids: hash, which maps null to row 0"
        null = values.is_null().to_numpy(zero_copy_only=False)
        location.refuse(column.name, "missing ids", null, values, "id {}", fix)
    return values, each


def refuse_lengths(lengths: Array, column: SparseColumn, location: RowLocation) -> None:
    """Raise `DataError` if a sample has a different number of ids than the schema declares."""
    if column.ids is not None:
        fix = (
            f"expected {column.ids:,} ids as in the schema. Truncate or pad the lists, or set `ids` of the column to "
            "null, which allows any number of ids"
        )
        location.refuse(column.name, "number of ids", lengths != column.ids, lengths, "{:,} ids", fix)


def ids_to_rows(values: pa.Array, column: SparseColumn, ids: Ids) -> Array:
    """Return the table rows of checked ids ``[n]``. Null becomes row 0."""
    if ids == "raw":
        return _integers_to_numpy(decode_dictionary(values)).astype(np.int64)
    out = hashes_to_rows(hash_values(values), column.rows)
    if values.null_count:
        out[values.is_null().to_numpy(zero_copy_only=False)] = 0
    return narrow_rows(out, column)


def narrow_rows(rows: Array, column: SparseColumn) -> Array:
    """Convert table rows to int32 if the table has fewer than 2³¹ rows."""
    return rows if column.rows > _INT32 else rows.astype(np.int32)


def null_mask(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    """Return a mask ``[n]`` that is true for null values."""
    return column.is_null().to_numpy()


def read_id_weights(column: SparseColumn, array: pa.Array, ids: Array, location: RowLocation) -> Array:
    """Check and return the weights ``[N]`` float32 of a column's ids. ``ids`` is the number of ids per sample ``[n]``.

    Each id has one finite weight. Weights may be negative or 0, as in ``torch.nn.EmbeddingBag``.
    """
    name, found = str(column.weights), values_per_row(array)
    if is_list(array.type):
        array = array.flatten()
    elif pa.types.is_null(array.type) and column.ids != 1:
        found, array = np.zeros_like(found), array.slice(0, 0)  # all lists are missing
    if len(wrong := np.flatnonzero(found != ids)):
        fix = f"expected one weight for each of the {ids[wrong[0]]:,} ids of column '{column.name}'"
        location.refuse(name, "number of weights", found != ids, found, "{:,} weights", fix)
    with np.errstate(over="ignore"):  # via float64, as JSON parsers do, so that roundings are equal
        weights = to_float64(pa.chunked_array([array])).astype(np.float32)
    fix = f"expected a finite float32. Correct the data, or remove `weights` of '{column.name}'"
    location.of_lists(found).refuse(name, "bad weights", ~np.isfinite(weights), array, "weight {}", fix)
    return weights


def values_per_row(array: pa.Array) -> Array:
    """Return the number of values per row ``[n]`` int64: the lengths of lists, or 1 in a column without lists."""
    return list_lengths(array) if is_list(array.type) else np.ones(len(array), np.int64)


def list_lengths(array: pa.Array) -> Array:
    """Return the length of each list ``[n]`` int64. A null list has length 0."""
    return _integers_to_numpy(pc.list_value_length(array)).astype(np.int64)


def format_scalar(value: pa.Scalar) -> str:
    """Format a value for messages. Bytes are shown as text."""
    found = value.as_py()
    if isinstance(found, bytes):
        found = found.decode("utf-8", "backslashreplace")
    return repr(found) if isinstance(found, str) else str(found)


def _integers_to_numpy(values: pa.Array) -> Array:
    """Convert integers or booleans. Null becomes 0, because NumPy would convert integers with nulls to floats."""
    if values.null_count:
        values = pc.fill_null(values, pa.scalar(0).cast(values.type))
    return values.to_numpy(zero_copy_only=False)
