"""Receive request bodies within limits, and convert the rows of ``POST /score`` to columns for the encoder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pyarrow as pa
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from hotbed.errors import RequestError, did_you_mean
from hotbed.parsing import TextError, parse_json, validate_model
from hotbed.serve.options import ServeOptions

_Body = TypeVar("_Body", bound=BaseModel)
JSON_TYPES = ("application/json", "application/x-www-form-urlencoded", "text/json", "")
"""Content types of JSON bodies, with curl's default, ``application/x-www-form-urlencoded``."""
RETRY = {"Retry-After": "1"}
"""Header of answers that asks the client to repeat the request after a second."""
LINES_TYPES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")
_LIMITS = {"rows": "a list of objects, one per row", "columns": "an object with a list per column"}
_READ_BEYOND = 4
"""A body that is too long is read up to this multiple of ``max_body_bytes``, because many clients read no answer before
they have sent the body."""


class Bodies:
    """Receive request bodies, and limit the memory of all bodies together."""

    def __init__(self, options: ServeOptions) -> None:
        self._options, self._buffered = options, 0
        self.most_json = min(options.max_json_bytes, options.max_body_bytes)

    @asynccontextmanager
    async def read(self, request: Request, *, binary: bool = False) -> AsyncGenerator[bytes]:
        """Receive a body, and count its bytes until the context ends. A ``binary`` body may exceed the limit of JSON.

        Raise `RequestError` with status 413 if the body is too long, 408 if the client is too slow, 503 if the bodies
        of all requests are too long together, and 415 if the body is compressed.
        """
        parts, size = list[bytes](), 0
        most = self._options.max_body_bytes if binary else self.most_json
        try:
            self._check_head(request, most)
            async with asyncio.timeout(self._options.read_timeout_s):
                more = True
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    part, more = message.get("body", b""), message.get("more_body", False)
                    size += len(part)
                    if size <= most:
                        parts.append(part)
                        self._buffered += len(part)
                    elif not more or size > _READ_BEYOND * self._options.max_body_bytes:
                        raise self._too_long(f"{'over ' if more else ''}{size:,}", most)
                    if self._buffered > self._options.max_buffered_bytes:
                        raise RequestError(
                            f"bodies of all requests: got {self._buffered:,} bytes, expected at most "
                            f"{self._options.max_buffered_bytes:,} (--max_buffered_bytes). Try again later",
                            503,
                            "busy",
                            {**RETRY, "Connection": "close"},
                        )
            yield b"".join(parts)
        except TimeoutError:
            raise RequestError(
                f"the body: got {size:,} bytes in {self._options.read_timeout_s:g} s (--read_timeout_s), expected the "
                "whole body in this time. Send the body faster, or in several requests",
                408,
                "slow",
                {"Connection": "close"},
            ) from None
        finally:
            self._buffered -= sum(map(len, parts))

    def _check_head(self, request: Request, most: int) -> None:
        """Raise `RequestError` if the head of the request shows that the body will be refused."""
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise RequestError(
                f"Content-Encoding: got {encoding[:50]!r}, expected none. Send the body uncompressed",
                415,
                headers={"Connection": "close"},
            )
        length = request.headers.get("content-length", "0")
        too_long = length.isdigit() and int(length) > most
        if too_long and request.headers.get("expect", "").lower() == "100-continue":
            raise self._too_long(f"{int(length):,}", most)  # the client waits before it sends the body

    def _too_long(self, length: str, most: int) -> RequestError:
        if most == self._options.max_body_bytes:
            limit, fix = f"{most:,} (--max_body_bytes)", "Send several requests"
        else:
            limit, fix = f"{most:,} of JSON (--max_json_bytes)", "Send several requests, or binary tensors"
        message = f"the body: got {length} bytes, expected at most {limit}. {fix}"
        return RequestError(message, 413, "too_large", {"Connection": "close"})


class _RowsBody(BaseModel, strict=True):
    id: str | None = None
    rows: list[Any]


class _ColumnsBody(BaseModel, strict=True):
    id: str | None = None
    columns: dict[str, list[Any]]


@dataclass(frozen=True)
class JsonRows:
    """Rows of a request in JSON."""

    id: str | None
    values: Sequence[object] | Mapping[str, Sequence[object]]  # a list with an object per row, or a list per column

    def columns(self, names: Sequence[str], max_rows: int) -> tuple[Mapping[str, Sequence[object]], int]:
        """Return the values of each column, and the number of rows. ``names`` are the columns that the model needs.

        Raise `RequestError` if there are too many rows, if a column is missing, or if columns differ in length.
        """
        if isinstance(self.values, Mapping):
            return self.values, self._count_rows(self.values, names, max_rows)
        refuse_many(len(self.values), max_rows)
        rows = cast("Sequence[Mapping[str, object]]", self.values)
        for i, row in enumerate(rows):
            if not isinstance(row, dict):
                raise RequestError(f"row {i:,}: got {shorten_repr(row)}, expected an object with a value per column")
        try:
            return {name: [row[name] for row in rows] for name in names}, len(rows)
        except KeyError as error:
            name = cast(str, error.args[0])
            i, row = next((i, row) for i, row in enumerate(rows) if name not in row)
            raise RequestError(
                f"row {i:,}: got no '{name}'{did_you_mean(name, row)}. Send null for a missing value"
            ) from None

    @staticmethod
    def _count_rows(columns: Mapping[str, Sequence[object]], names: Sequence[str], max_rows: int) -> int:
        """Return the number of rows. Raise `RequestError` if a column is missing, lengths differ, or rows are too many.

        Columns that the model ignores are checked, too.
        """
        for name in names:
            if name not in columns:
                raise RequestError(
                    f"columns: got no '{name}', which the model needs{did_you_mean(name, columns)}. Send a list for "
                    "this column, with null for missing values"
                )
        first, rows = next(((name, len(column)) for name, column in columns.items()), ("", 0))
        for name, column in columns.items():
            if len(column) != rows:
                raise RequestError(
                    f"columns have different lengths: got {len(column):,} values in column {shorten_repr(name)}, "
                    f"expected {rows:,} as in column {shorten_repr(first)}. Send one value per row in every column"
                )
        refuse_many(rows, max_rows)
        return rows


def parse_rows(body: bytes, content_type: str, max_rows: int) -> JsonRows:
    """Parse a body of ``POST /score``.

    The body has one of three forms: a list with an object per row; an object ``{"rows": [...]}`` or
    ``{"columns": {NAME: [...]}}`` with an optional key ``id``; or lines with an object each. Raise `RequestError` if
    the body has none of these forms, or too many lines.
    """
    media_type = content_type.partition(";")[0].strip().lower()
    if media_type in LINES_TYPES:
        lines = [line for line in body.splitlines() if line.strip()]
        refuse_many(len(lines), max_rows)  # before any line is parsed
        return JsonRows(None, [parse_body(line, f"line {i:,}") for i, line in enumerate(lines)])
    if media_type not in JSON_TYPES:
        raise RequestError(
            f"content type: got {media_type[:100]!r}, expected application/json or application/x-ndjson. Send binary "
            "tensors to /v2/models/NAME/infer",
            415,
        )
    values = parse_body(body, "the body")
    if isinstance(values, list):
        return JsonRows(None, cast("list[object]", values))
    given = cast("dict[str, object]", values) if isinstance(values, dict) else {}
    if ("rows" in given) == ("columns" in given):
        got = f"an object with {', '.join(map(shorten_repr, list(given)[:5]))}" if given else shorten_repr(values)
        raise RequestError(
            f'the body: got {got}, expected a list of rows, {{"rows": [...]}} or {{"columns": {{NAME: [...]}}}}'
        )
    if "rows" in given:
        of_rows = validate_request(_RowsBody, given)
        return JsonRows(of_rows.id, of_rows.rows)
    of_columns = validate_request(_ColumnsBody, given)
    return JsonRows(of_columns.id, of_columns.columns)


def record_batch(table: pa.Table) -> pa.RecordBatch:
    """Return the rows of an Arrow table as one record batch."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def validate_request(model: type[_Body], values: object) -> _Body:
    """Validate the JSON of a request by a pydantic model. Raise `RequestError` for the first faulty value."""
    return validate_model(model, values, RequestError, "the request", limits=_LIMITS, prefix_keys=False)


def shorten_repr(value: object) -> str:
    """Return the ``repr`` of a client's value, shortened to 80 characters, for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse_body(text: bytes, what: str) -> object:
    """Parse JSON. Raise `RequestError` with a message that begins with ``what``."""
    try:
        return parse_json(text)
    except TextError as error:
        raise RequestError(f"{what} {error}") from None


def refuse_many(rows: int, most: int) -> None:
    """Raise `RequestError` if a request has too many rows."""
    if rows > most:
        raise RequestError(
            f"rows of the request: got {rows:,}, expected at most {most:,}. Send several requests", 413, "too_large"
        )
