"""Read and write tensors of the Open Inference Protocol, version 2: JSON, and the binary tensor extension.

For B rows, an input column is a tensor ``[B]`` or ``[B, 1]`` with the column's name and a datatype of `_ACCEPTED`. A
column of lists is ``[B, k]``, or the values of all rows ``[N]`` with a second tensor ``NAME.lengths [B]``. A missing
value is null in JSON, NaN in numbers, or true in a BOOL tensor ``NAME.missing [B]``. A missing list has length 0. Each
label has an output ``[B]`` of scores, with datatype FP64.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, Field, NonNegativeInt, StrictBool, StrictStr

from hotbed.errors import RequestError, did_you_mean
from hotbed.serve.requests import parse_body, refuse_many, shorten_repr, validate_request

if TYPE_CHECKING:
    from hotbed.data.encoding.json_rows import InputColumn

HEADER_LENGTH = "Inference-Header-Content-Length"
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"
]


_INTEGERS = {f"{kind}{8 * size}": f"<{kind[0].lower()}{size}" for kind in ("INT", "UINT") for size in (1, 2, 4, 8)}
_FLOATS = {"FP16": "<f2", "FP32": "<f4", "FP64": "<f8"}
_NUMPY = {"BOOL": "u1", **_INTEGERS, **_FLOATS}
"""NumPy dtypes of binary data, by datatype."""
_ARROW = {
    "BYTES": pa.large_string(),
    "BOOL": pa.bool_(),
    **{name: pa.from_numpy_dtype(np.dtype(dtype)) for name, dtype in _INTEGERS.items()},
}
"""Arrow types of columns, by datatype. Columns of floats are float64."""
_JSON: dict[str, tuple[tuple[type, ...], str]] = {
    "BYTES": ((str,), "text"),
    "BOOL": ((bool,), "true or false"),
    **dict.fromkeys(_INTEGERS, ((int,), "an integer")),
    **dict.fromkeys(_FLOATS, ((int, float), "a number")),
}
"""Python types of values in JSON, and the name of these types in messages, by datatype."""
_ACCEPTED = {
    "text": ("BYTES", {"BYTES"}),
    "integers": ("INT64", {*_INTEGERS, "BOOL"}),
    "numbers": ("FP64", {*_NUMPY}),
    "": ("BYTES or INT64", {*_INTEGERS, "BOOL", "BYTES"}),
}
"""The recommended datatype and all accepted datatypes, by `InputColumn.kind`."""
_MOST_DIMENSIONS, _MOST_TENSORS = 3, 20_000


class _Parameters(BaseModel, strict=True):
    binary_data_size: NonNegativeInt | None = None
    binary_data: StrictBool | None = None
    binary_data_output: StrictBool | None = None


class _InputTensor(BaseModel, strict=True):
    name: StrictStr
    shape: list[NonNegativeInt] = Field(max_length=_MOST_DIMENSIONS)
    datatype: Datatype
    parameters: _Parameters = _Parameters()
    data: list[Any] | None = None


class _RequestedOutput(BaseModel, strict=True):
    name: StrictStr
    parameters: _Parameters = _Parameters()


class _InferBody(BaseModel, strict=True):
    id: StrictStr | None = None
    parameters: _Parameters = _Parameters()
    inputs: list[_InputTensor] = Field(min_length=1, max_length=_MOST_TENSORS)
    outputs: list[_RequestedOutput] = Field(default=[], max_length=_MOST_TENSORS)


@dataclass(frozen=True)
class InferRequest:
    """Content of a body of ``POST …/infer``."""

    id: str | None  # the answer repeats this id
    columns: pa.Table  # raw rows, with columns in the order of the model
    outputs: Mapping[str, bool]  # names of the requested outputs, and whether to send each output as binary data


@dataclass(frozen=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    datatype: str
    values: pa.Array  # in row-major order


def output_names(labels: Sequence[str]) -> list[str]:
    """Return the names of outputs, as in ``hotbed predict``: ``score`` for one label, otherwise ``score_LABEL``."""
    return ["score"] if len(labels) == 1 else [f"score_{label}" for label in labels]


def input_metadata(columns: Sequence[InputColumn]) -> list[dict[str, Any]]:
    """Describe the inputs of a model for ``GET /v2/models/NAME``."""
    found = list[dict[str, Any]]()
    for column in columns:
        datatype = {"text": "BYTES", "numbers": "FP64"}.get(column.kind, "INT64")
        found.append({"name": column.name, "datatype": datatype, "shape": [-1]})
        if column.is_list:
            found.append({"name": f"{column.name}.lengths", "datatype": "INT64", "shape": [-1]})
    return found


def read_tensors(
    body: bytes,
    header_length: str | None,  # value of Inference-Header-Content-Length; None: the whole body is JSON
    columns: Sequence[InputColumn],
    outputs: Sequence[str],
    max_rows: int,
    max_json_bytes: int,
) -> InferRequest:
    """Read a body of ``POST …/infer``. It is a JSON object, followed by the binary data in the order of the inputs.

    Raise `RequestError` if the body violates the protocol, or if the tensors do not match the columns of the model.
    """
    length = len(body)
    if header_length is not None:
        is_number = header_length.isascii() and header_length.isdigit() and len(header_length) < 20
        if not (is_number and int(header_length) <= length):
            raise RequestError(
                f"{HEADER_LENGTH}: got {shorten_repr(header_length)}, expected the number of bytes of JSON, at most "
                f"the {length:,} bytes of the body"
            )
        length = int(header_length)
    if length > max_json_bytes:
        raise RequestError(
            f"{HEADER_LENGTH}: got {length:,}, expected at most {max_json_bytes:,} bytes of JSON (--max_json_bytes). "
            "Send values as binary data",
            413,
            "too_large",
        )
    request = validate_request(_InferBody, parse_body(body[:length], "the JSON of the request"))
    tensors = _read_inputs(request.inputs, memoryview(body)[length:])
    wanted = {output.name: output for output in request.outputs} or dict.fromkeys(outputs)
    for name in wanted:
        if name not in outputs:
            hint = did_you_mean(name, outputs)
            raise RequestError(f"output: got {shorten_repr(name)}, expected one of {', '.join(outputs)}{hint}")
    default = bool(request.parameters.binary_data_output)
    as_binary = {
        name: default if output is None or output.parameters.binary_data is None else output.parameters.binary_data
        for name, output in wanted.items()
    }
    return InferRequest(request.id, _to_table(tensors, columns, max_rows), as_binary)


def write_scores(
    scores: Mapping[str, NDArray[np.float64]], outputs: Mapping[str, bool], answer: Mapping[str, object]
) -> tuple[bytes, int | None]:
    """Return the body of an answer, and the length of its JSON if binary data follow (otherwise None).

    ``scores`` has probabilities ``[B]`` by output. ``outputs`` is as in `InferRequest`. ``answer`` has all keys of the
    answer except ``outputs``.
    """
    described, blobs = list[dict[str, Any]](), list[bytes]()
    for name, binary in outputs.items():
        values = scores[name]
        of: dict[str, Any] = {"name": name, "datatype": "FP64", "shape": [len(values)]}
        if binary:
            blobs.append(values.astype("<f8").tobytes())
            of["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            of["data"] = values.tolist()
        described.append(of)
    text = json.dumps({**answer, "outputs": described}).encode()
    return b"".join([text, *blobs]), len(text) if blobs else None


def _read_inputs(inputs: Sequence[_InputTensor], binary: memoryview) -> dict[str, _Tensor]:
    found, at = dict[str, _Tensor](), 0
    for declared in inputs:
        name = shorten_repr(declared.name)
        if declared.name in found:
            raise RequestError(f"input {name}: got two inputs with this name. Send each input once")
        size = declared.parameters.binary_data_size
        if (size is None) == (declared.data is None):
            raise RequestError(
                f"input {name}: got {'neither' if size is None else 'both'} data and parameters.binary_data_size, "
                f"expected one of them. For binary data, send the header {HEADER_LENGTH}, too"
            )
        count = math.prod(declared.shape)
        if size is None:
            values = _read_json(declared, count)
        else:
            if size > len(binary) - at:
                raise RequestError(
                    f"input {name}: got binary_data_size {size:,}, expected at most the {len(binary) - at:,} bytes "
                    "that are left in the body"
                )
            values = _read_binary(declared, binary[at : at + size], count)
            at += size
        found[declared.name] = _Tensor(declared.name, tuple(declared.shape), declared.datatype, values)
    if at != len(binary):
        raise RequestError(
            f"the body: got {len(binary) - at:,} bytes after the data of the inputs, expected none. Remove these bytes"
        )
    return found


def _read_json(declared: _InputTensor, count: int) -> pa.Array:
    """Return the values of an input that is sent as JSON: a flat list, or lists that are nested as in the shape."""
    name, flat = shorten_repr(declared.name), cast("list[Any]", declared.data)
    for depth, size in enumerate(declared.shape[1:], 1):
        if not any(isinstance(part, list) for part in flat):
            break
        if not all(isinstance(part, list) and len(cast("list[Any]", part)) == size for part in flat):
            raise RequestError(f"input {name}: expected lists of {size:,} values in dimension {depth}, as in its shape")
        flat = [value for part in flat for value in cast("list[Any]", part)]
    if len(flat) != count:
        raise RequestError(f"input {name}: got {len(flat):,} values, expected {count:,} for its shape {declared.shape}")
    types, types_name = _JSON[declared.datatype]
    if not set(map(type, flat)) <= {*types, type(None)}:
        i, value = next((i, v) for i, v in enumerate(flat) if v is not None and type(v) not in types)
        raise RequestError(
            f"input {name}, value {i:,}: got {shorten_repr(value)}, expected {types_name} for {declared.datatype}"
        )
    try:
        if declared.datatype not in _FLOATS:
            return pa.array(flat, _ARROW[declared.datatype])
        with np.errstate(over="ignore"):
            wide = np.array([0 if value is None else value for value in flat], np.float64)
            missing = np.array([value is None for value in flat], np.bool_)
            return pa.array(wide.astype(_FLOATS[declared.datatype]).astype(np.float64), mask=missing)
    except (pa.ArrowInvalid, OverflowError, UnicodeError) as error:
        is_text = isinstance(error, UnicodeError)
        reason = "got text that is not valid Unicode" if is_text else f"got a value outside {declared.datatype}"
        raise RequestError(f"input {name}: {reason}") from None


def _read_binary(declared: _InputTensor, data: memoryview, count: int) -> pa.Array:
    """Return the values of an input that is sent as binary data: little-endian numbers without gaps, or texts."""
    name, datatype = shorten_repr(declared.name), declared.datatype
    if datatype == "BYTES":
        return _read_texts(name, data, count)
    dtype = np.dtype(_NUMPY[datatype])
    if len(data) != count * dtype.itemsize:
        raise RequestError(
            f"input {name}: got binary_data_size {len(data):,}, expected {count * dtype.itemsize:,} for {datatype} of "
            f"shape {declared.shape}"
        )
    values = np.frombuffer(data, dtype)
    if datatype == "BOOL":
        if values.max(initial=0) > 1:
            raise RequestError(f"input {name}: got byte {values.max()}, expected 0 or 1 for BOOL")
        return pa.array(values.astype(np.bool_))
    return pa.array(values.astype(np.float64) if datatype in _FLOATS else values)


def _read_texts(name: str, data: memoryview, count: int) -> pa.Array:
    """Return the texts of an input that is sent as binary data. Before each text are 4 bytes with its length."""
    texts, at = list[bytes](), 0
    while at + 4 <= len(data) and len(texts) < count:
        (size,) = struct.unpack_from("<I", data, at)
        texts.append(bytes(data[at + 4 : at + 4 + size]))
        at += 4 + size
    if at != len(data) or len(texts) != count:
        raise RequestError(
            f"input {name}: got {len(data):,} bytes, expected {count:,} texts, and the length of each text in 4 bytes "
            "before the text"
        )
    try:
        return pa.array(texts, pa.large_binary()).cast(pa.large_string())
    except pa.ArrowInvalid:
        raise RequestError(f"input {name}: got text that is not UTF-8. Encode all texts as UTF-8") from None


def _to_table(tensors: dict[str, _Tensor], columns: Sequence[InputColumn], max_rows: int) -> pa.Table:
    """Convert tensors to columns of raw rows. Raise `RequestError` for tensors that belong to no column."""
    left, made = dict(tensors), dict[str, pa.Array]()
    for column in columns:
        wanted, accepted = _ACCEPTED[column.kind]
        tensor = left.pop(column.name, None)
        if tensor is None:
            raise RequestError(
                f"input '{column.name}' is missing: the model needs this input as {wanted}"
                f"{did_you_mean(column.name, tensors)}"
            )
        if tensor.datatype not in accepted:
            raise RequestError(
                f"input '{column.name}': got {tensor.datatype}, expected {wanted}, because the model was trained on "
                f"{column.kind or 'ids'}"
            )
        if column.kind == "numbers":  # columns need equal types, so that requests can be merged into batches
            with suppress(pa.ArrowInvalid):  # columns with integers that float64 cannot represent keep their type
                tensor = replace(tensor, values=tensor.values.cast(pa.float64()))
        if column.is_list:
            made[column.name] = _to_lists(tensor, left.pop(f"{column.name}.lengths", None), max_rows)
        else:
            made[column.name] = _to_scalars(tensor, left.pop(f"{column.name}.missing", None))
    if left:
        name = next(iter(left))
        if (of_list := name.removesuffix(".missing")) in {column.name for column in columns if column.is_list}:
            raise RequestError(
                f"input {shorten_repr(name)} is not supported, because '{of_list}' has lists. Send length 0 in "
                f"'{of_list}.lengths' for a missing list"
            )
        hint = did_you_mean(name, [column.name for column in columns])
        raise RequestError(f"input {shorten_repr(name)} is not an input of the model{hint}")
    first = next(iter(made))
    for name, array in made.items():
        if len(array) != len(made[first]):
            raise RequestError(
                f"input '{name}': got {len(array):,} rows, expected {len(made[first]):,} as in '{first}'"
            )
    refuse_many(len(made[first]), max_rows)
    return pa.table(made)


def _to_scalars(tensor: _Tensor, missing: _Tensor | None) -> pa.Array:
    values = tensor.values
    if len(tensor.shape) != 1 and tensor.shape[1:] != (1,):
        raise RequestError(f"input '{tensor.name}': got shape {list(tensor.shape)}, expected [B], one value per row")
    if missing is None:
        return values
    if missing.datatype != "BOOL" or missing.shape != (len(values),) or missing.values.null_count:
        raise RequestError(
            f"input '{missing.name}': got {missing.datatype} of shape {list(missing.shape)}, expected BOOL "
            f"[{len(values)}] without null: one value per row"
        )
    return pc.if_else(missing.values, pa.scalar(None, values.type), values)


def _to_lists(tensor: _Tensor, lengths: _Tensor | None, max_rows: int) -> pa.Array:
    values = tensor.values
    if lengths is None:
        if len(tensor.shape) != 2:
            raise RequestError(
                f"input '{tensor.name}': got shape {list(tensor.shape)} for lists of ids, expected [B, k], or [N] with "
                f"'{tensor.name}.lengths' [B]"
            )
        rows, k = tensor.shape
        refuse_many(rows, max_rows)  # before `counts` is allocated, because k = 0 needs no bytes for any number of rows
        counts = np.full(rows, k, np.int64)
    else:
        if lengths.datatype not in _INTEGERS or len(lengths.shape) != 1 or lengths.values.null_count:
            raise RequestError(
                f"input '{lengths.name}': got {lengths.datatype} of shape {list(lengths.shape)}, expected INT64 [B] "
                "without null: the number of values of each row"
            )
        counts = lengths.values.to_numpy(zero_copy_only=False)
        if len(tensor.shape) != 1 or bool((counts < 0).any()) or sum(counts.tolist()) != len(values):
            raise RequestError(
                f"input '{lengths.name}': got the sum {sum(counts.tolist()):,}, expected lengths of at least 0 with "
                f"the sum {len(values):,}, the number of values of '{tensor.name}' [N]"
            )
    ends = np.concatenate([[0], np.cumsum(counts.astype(np.int64))])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), values)
