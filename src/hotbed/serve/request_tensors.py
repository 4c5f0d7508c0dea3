"""Read and write tensors of the Open Inference Protocol, version 2: JSON, and the binary tensor extension.

A column of raw rows is a tensor of its name, ``[B]`` (or ``[B, 1]``), with B rows: BYTES for text, INT*, UINT* or BOOL
for integers, and any of FP*, INT*, UINT* and BOOL for numbers. Lists are ``[B, k]``, or the values of all rows ``[N]``
with a tensor ``NAME.lengths [B]``. A missing value is null in JSON, NaN in a number, or true in a tensor ``NAME.missing
[B]`` of BOOL; a missing list is one without values. Scores are FP64 ``[B]``, one output per label.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import BaseModel, Field, NonNegativeInt, StrictBool, StrictStr

from hotbed.errors import RequestError, did_you_mean
from hotbed.serve.requests import parse, refuse_many, shown, validate

if TYPE_CHECKING:
    from hotbed.data.encoding.json_rows import InputColumn

HEADER_LENGTH = "Inference-Header-Content-Length"
Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"
]


class _Kind(NamedTuple):
    """How values of a datatype are written: as JSON (Python's types, and their name), in binary data, in Arrow."""

    of_json: tuple[type, ...]
    name: str
    numpy: str
    arrow: pa.DataType


def _number(of_json: tuple[type, ...], name: str, numpy: str) -> _Kind:
    return _Kind(of_json, name, numpy, pa.from_numpy_dtype(np.dtype(numpy)))


_INTEGERS = {
    f"{sign}INT{8 * size}": _number((int,), "an integer", f"<{kind}{size}")
    for sign, kind in (("", "i"), ("U", "u"))
    for size in (1, 2, 4, 8)
}
_FLOATS = {f"FP{8 * size}": _number((int, float), "a number", f"<f{size}") for size in (2, 4, 8)}
_BOOL = {"BOOL": _Kind((bool,), "true or false", "u1", pa.bool_())}
_BYTES = {"BYTES": _Kind((str,), "text", "", pa.large_string())}
_KINDS = _INTEGERS | _FLOATS | _BOOL | _BYTES
_TAKEN = {
    "text": ("BYTES", _BYTES),
    "integers": ("INT64", _INTEGERS | _BOOL),
    "numbers": ("FP64", _INTEGERS | _FLOATS | _BOOL),
    "": ("BYTES or INT64", _INTEGERS | _BOOL | _BYTES),
}
"""By kind of a column: the datatype that is asked for, and all that are taken."""
_MOST_DIMENSIONS, _MOST_TENSORS = 3, 20_000


class _Parameters(BaseModel, strict=True):
    binary_data_size: NonNegativeInt | None = None
    binary_data: StrictBool | None = None
    binary_data_output: StrictBool | None = None


class _Input(BaseModel, strict=True):
    name: StrictStr
    shape: list[NonNegativeInt] = Field(max_length=_MOST_DIMENSIONS)
    datatype: Datatype
    parameters: _Parameters = _Parameters()
    data: list[Any] | None = None


class _Output(BaseModel, strict=True):
    name: StrictStr
    parameters: _Parameters = _Parameters()


class _Request(BaseModel, strict=True):
    id: StrictStr | None = None
    parameters: _Parameters = _Parameters()
    inputs: list[_Input] = Field(min_length=1, max_length=_MOST_TENSORS)
    outputs: list[_Output] = Field(default=[], max_length=_MOST_TENSORS)


@dataclass(frozen=True)
class InferRequest:
    """A request as tensors."""

    id: str | None  # repeated in the answer
    columns: pa.Table  # raw rows, columns in the order of the model
    outputs: Mapping[str, bool]  # requested outputs by name: whether as binary data


@dataclass(frozen=True)
class _Tensor:
    """A tensor's values in row-major order, and its shape."""

    name: str
    shape: tuple[int, ...]
    datatype: str
    values: pa.Array


def output_names(labels: Sequence[str]) -> list[str]:
    """Names of the outputs, as ``hotbed predict`` calls its columns: ``score``, or ``score_LABEL`` of several."""
    return ["score"] if len(labels) == 1 else [f"score_{label}" for label in labels]


def input_metadata(columns: Sequence[InputColumn]) -> list[dict[str, Any]]:
    """What ``GET /v2/models/NAME`` says of inputs."""
    found = list[dict[str, Any]]()
    for column in columns:
        datatype = {"text": "BYTES", "numbers": "FP64"}.get(column.kind, "INT64")
        found.append({"name": column.name, "datatype": datatype, "shape": [-1]})
        if column.is_list:
            found.append({"name": f"{column.name}.lengths", "datatype": "INT64", "shape": [-1]})
    return found


def read_tensors(
    body: bytes,
    header_length: str | None,  # Inference-Header-Content-Length: bytes of the JSON object; None: the whole body
    columns: Sequence[InputColumn],
    outputs: Sequence[str],
    max_rows: int,
    max_json_bytes: int,
) -> InferRequest:
    """Read a body of ``POST …/infer``: the JSON object, then the binary data of its inputs, in their order.

    Raise `RequestError` if the body violates the protocol, or the tensors do not match the columns of the model.
    """
    length = _header_length(header_length, len(body))
    if length > max_json_bytes:
        raise RequestError(
            f"{HEADER_LENGTH} is {length:,}, at most {max_json_bytes:,} bytes of JSON are taken (--max_json_bytes); "
            "send values as binary data",
            413,
            "too_large",
        )
    request = validate(_Request, parse(body[:length], "the JSON of the request"))
    tensors = _tensors(request.inputs, memoryview(body)[length:])
    wanted = {output.name: output for output in request.outputs} or dict.fromkeys(outputs)
    for name in wanted:
        if name not in outputs:
            raise RequestError(
                f"output {shown(name)} is none of the model's: {', '.join(outputs)}{did_you_mean(name, outputs)}"
            )
    default = bool(request.parameters.binary_data_output)
    as_binary = {
        name: default if output is None or output.parameters.binary_data is None else output.parameters.binary_data
        for name, output in wanted.items()
    }
    return InferRequest(request.id, _columns(tensors, columns, max_rows), as_binary)


def write_scores(
    scores: Mapping[str, NDArray[np.float64]], outputs: Mapping[str, bool], answer: Mapping[str, object]
) -> tuple[bytes, int | None]:
    """Write an answer: its body, and the length of its JSON if binary data follow.

    ``scores`` are probabilities ``[B]`` by output, ``outputs`` the requested outputs (whether as binary data), and
    ``answer`` the keys of the answer besides ``outputs``.
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


def _header_length(text: str | None, body: int) -> int:
    if text is None:
        return body
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= body):
        raise RequestError(f"{HEADER_LENGTH} is {shown(text)}, must be the bytes of JSON among the body's {body:,}")
    return int(text)


def _tensors(inputs: Sequence[_Input], binary: memoryview) -> dict[str, _Tensor]:
    found, at = dict[str, _Tensor](), 0
    for given in inputs:
        if given.name in found:
            raise RequestError(f"input {shown(given.name)} is there twice; send each once")
        size = given.parameters.binary_data_size
        if (size is None) == (given.data is None):
            raise RequestError(
                f"input {shown(given.name)} needs either data, or parameters.binary_data_size with {HEADER_LENGTH}"
            )
        count = math.prod(given.shape)
        if size is None:
            values = _of_json(given, count)
        else:
            if size > len(binary) - at:
                raise RequestError(
                    f"input {shown(given.name)} has binary_data_size {size:,}, but {len(binary) - at:,} bytes are left "
                    f"of the body; {HEADER_LENGTH} says where they begin"
                )
            values = _of_bytes(given, binary[at : at + size], count)
            at += size
        found[given.name] = _Tensor(given.name, tuple(given.shape), given.datatype, values)
    if at != len(binary):
        raise RequestError(f"the body goes on for {len(binary) - at:,} bytes after the data of its inputs")
    return found


def _of_json(given: _Input, count: int) -> pa.Array:
    """Values of a list, nested as the shape says, or flat."""
    name, flat = given.name, cast("list[Any]", given.data)
    for depth, size in enumerate(given.shape[1:], 1):
        if not any(isinstance(part, list) for part in flat):
            break
        if not all(isinstance(part, list) and len(cast("list[Any]", part)) == size for part in flat):
            raise RequestError(
                f"input {shown(name)}: lists of dimension {depth} must have {size:,} values, as its shape says"
            )
        flat = [value for part in flat for value in cast("list[Any]", part)]
    if len(flat) != count:
        raise RequestError(f"input {shown(name)} has {len(flat):,} values; its shape {given.shape} needs {count:,}")
    kind = _KINDS[given.datatype]
    if not set(map(type, flat)) <= {*kind.of_json, type(None)}:
        i, value = next((i, v) for i, v in enumerate(flat) if v is not None and type(v) not in kind.of_json)
        raise RequestError(
            f"input {shown(name)}, value {i:,} is {shown(value)}, must be {kind.name}, as it is {given.datatype}"
        )
    try:
        if given.datatype not in _FLOATS:
            return pa.array(flat, kind.arrow)
        with np.errstate(over="ignore"):
            wide = np.array([0 if value is None else value for value in flat], np.float64)
            missing = np.array([value is None for value in flat], np.bool_)
            return pa.array(wide.astype(kind.numpy).astype(np.float64), mask=missing)
    except (pa.ArrowInvalid, OverflowError, UnicodeError) as error:
        reason = (
            "text is not valid Unicode" if isinstance(error, UnicodeError) else f"a value is beyond {given.datatype}"
        )
        raise RequestError(f"input {shown(name)}: {reason}") from None


def _of_bytes(given: _Input, data: memoryview, count: int) -> pa.Array:
    """Values as the binary tensor extension has them: little-endian, without gaps."""
    name, datatype = given.name, given.datatype
    if datatype == "BYTES":
        return _texts(name, data, count)
    kind = np.dtype(_KINDS[datatype].numpy)
    if len(data) != count * kind.itemsize:
        raise RequestError(
            f"input {shown(name)} has binary_data_size {len(data):,}; {datatype} of the shape {given.shape} takes "
            f"{count * kind.itemsize:,} bytes"
        )
    values = np.frombuffer(data, kind)
    if datatype == "BOOL":
        if values.max(initial=0) > 1:
            raise RequestError(f"input {shown(name)}: bytes of BOOL must be 0 or 1, one is {values.max()}")
        return pa.array(values.astype(np.bool_))
    return pa.array(values.astype(np.float64) if datatype in _FLOATS else values)


def _texts(name: str, data: memoryview, count: int) -> pa.Array:
    """Each with its length, 4 bytes, before it."""
    texts, at = list[bytes](), 0
    while at + 4 <= len(data) and len(texts) < count:
        (size,) = struct.unpack_from("<I", data, at)
        texts.append(bytes(data[at + 4 : at + 4 + size]))
        at += 4 + size
    if at != len(data) or len(texts) != count:
        raise RequestError(
            f"input {shown(name)}: its {len(data):,} bytes are not {count:,} texts, each after its length of 4 bytes"
        )
    try:
        return pa.array(texts, pa.large_binary()).cast(pa.large_string())
    except pa.ArrowInvalid:
        raise RequestError(f"input {shown(name)} has text that is not UTF-8; encode it so") from None


def _columns(tensors: dict[str, _Tensor], columns: Sequence[InputColumn], max_rows: int) -> pa.Table:
    """Columns of raw rows of tensors; all tensors must be used."""
    left, made = dict(tensors), dict[str, pa.Array]()
    for column in columns:
        tensor = left.pop(column.name, None)
        if tensor is None:
            raise RequestError(
                f"there is no input '{column.name}', which the model needs ({_TAKEN[column.kind][0]})"
                f"{did_you_mean(column.name, tensors)}"
            )
        wanted, taken = _TAKEN[column.kind]
        if tensor.datatype not in taken:
            raise RequestError(
                f"input '{column.name}' is {tensor.datatype}, but the model was trained on {column.kind or 'ids'} "
                f"there; send {wanted}"
            )
        if column.kind == "numbers":  # requests of the same columns must fit together
            with suppress(pa.ArrowInvalid):  # integers that float64 does not have stay what they are
                tensor = replace(tensor, values=tensor.values.cast(pa.float64()))
        if column.is_list:
            made[column.name] = _lists(tensor, left.pop(f"{column.name}.lengths", None), max_rows)
        else:
            made[column.name] = _scalars(tensor, left.pop(f"{column.name}.missing", None))
    if left:
        name = next(iter(left))
        if name.removesuffix(".missing") in {column.name for column in columns if column.is_list}:
            raise RequestError(
                f"input {shown(name)} is not taken, as lists have none; send a length of 0 in "
                f"'{name.removesuffix('.missing')}.lengths' where a list is missing"
            )
        known = [column.name for column in columns]
        raise RequestError(f"input {shown(name)} is none that the model takes{did_you_mean(name, known)}")
    first = next(iter(made))
    for name, array in made.items():
        if len(array) != len(made[first]):
            raise RequestError(
                f"input '{name}' has {len(array):,} rows and '{first}' {len(made[first]):,}; all need the same"
            )
    refuse_many(len(made[first]), max_rows)
    return pa.table(made)


def _scalars(tensor: _Tensor, missing: _Tensor | None) -> pa.Array:
    values = tensor.values
    if len(tensor.shape) != 1 and tensor.shape[1:] != (1,):
        raise RequestError(
            f"input '{tensor.name}' has the shape {list(tensor.shape)}, must have one value per row: [B]"
        )
    if missing is None:
        return values
    if missing.datatype != "BOOL" or missing.shape != (len(values),) or missing.values.null_count:
        raise RequestError(f"input '{missing.name}' must be BOOL, a value per row: [{len(values)}]")
    return pc.if_else(missing.values, pa.scalar(None, values.type), values)


def _lists(tensor: _Tensor, lengths: _Tensor | None, max_rows: int) -> pa.Array:
    values = tensor.values
    if lengths is None:
        if len(tensor.shape) != 2:
            raise RequestError(
                f"input '{tensor.name}' has lists of ids: send its values [B, k], or those of all rows [N] with "
                f"'{tensor.name}.lengths' [B]"
            )
        rows, k = tensor.shape
        refuse_many(rows, max_rows)  # before memory is taken: rows without values need no bytes
        counts = np.full(rows, k, np.int64)
    else:
        if lengths.datatype not in _INTEGERS or len(lengths.shape) != 1 or lengths.values.null_count:
            raise RequestError(f"input '{lengths.name}' must be INT64, how many values each row has: [B]")
        counts = lengths.values.to_numpy(zero_copy_only=False)
        if len(tensor.shape) != 1 or bool((counts < 0).any()) or sum(counts.tolist()) != len(values):
            raise RequestError(f"input '{lengths.name}' must sum to the {len(values):,} values of '{tensor.name}' [N]")
    ends = np.concatenate([[0], np.cumsum(counts.astype(np.int64))])
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), values)
