"""Receive bodies of requests within limits, and turn the rows of ``POST /score`` into columns for the encoder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pyarrow as pa
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from hotbed.errors import RequestError, did_you_mean
from hotbed.parsing import TextError, fault_of, parse_json
from hotbed.serve.options import ServeOptions

M = TypeVar("M", bound=BaseModel)

JSON_TYPES = ("application/json", "application/x-www-form-urlencoded", "text/json", "")
"""Content types of JSON bodies; curl sends the second where nothing is said."""
LINES_TYPES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")
_LIMITS = {"rows": "a list of objects, one per row", "columns": "an object with a list per column"}
_MORE_THAT_IS_TAKEN = 4
"""A body that is too long is read on up to so many times its limit: clients that send first then read the answer."""


class Bodies:
    """All bodies that are in memory, which have a limit together."""

    def __init__(self, options: ServeOptions) -> None:
        self._options, self._buffered = options, 0

    @asynccontextmanager
    async def read(self, request: Request, *, binary: bool = False) -> AsyncGenerator[bytes]:
        """Receive a body, and count it until the block ends; ``binary``: it is not all JSON, so it may be longer.

        Raises
        ------
        RequestError
            413 where it is too long, 408 too slow, 503 too much beside others, 415 where it is compressed.
        """
        parts, size = list[bytes](), 0
        most = self._options.max_body_bytes if binary else self.most_json
        try:
            self._refuse(request, most)
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
                    elif not more or size > _MORE_THAT_IS_TAKEN * self._options.max_body_bytes:
                        raise self._too_long(f"{'over ' if more else ''}{size:,}", most)
                    if self._buffered > self._options.max_buffered_bytes:
                        raise RequestError(
                            f"bodies of all requests take {self._buffered:,} bytes, at most "
                            f"{self._options.max_buffered_bytes:,} may (--max_buffered_bytes); try again later",
                            503,
                            "busy",
                            {"Retry-After": "1", "Connection": "close"},
                        )
            yield b"".join(parts)
        except TimeoutError:
            seconds = self._options.read_timeout_s
            raise RequestError(
                f"the body took longer than {seconds:g} s (--read_timeout_s), {size:,} bytes came; send it faster, or "
                "in several requests",
                408,
                "slow",
                {"Connection": "close"},
            ) from None
        finally:
            self._buffered -= sum(map(len, parts))

    @property
    def most_json(self) -> int:
        """Bytes of JSON that a body may have."""
        return min(self._options.max_json_bytes, self._options.max_body_bytes)

    def _refuse(self, request: Request, most: int) -> None:
        """Refuse by the head alone."""
        encoding = request.headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise RequestError(
                f"the body is {encoding[:50]!r}; send it without Content-Encoding", 415, headers={"Connection": "close"}
            )
        length = request.headers.get("content-length", "0")
        too_long = length.isdigit() and int(length) > most
        if too_long and request.headers.get("expect", "").lower() == "100-continue":
            raise self._too_long(f"{int(length):,}", most)  # the client has not sent it yet

    def _too_long(self, length: str, most: int) -> RequestError:
        if most == self._options.max_body_bytes:
            limit = f"{most:,} are taken (--max_body_bytes); send several requests"
        else:
            limit = f"{most:,} of JSON are taken (--max_json_bytes); send several requests, or binary tensors"
        return RequestError(
            f"the body has {length} bytes, at most {limit}",
            413,
            "too_large",
            {"Connection": "close"},
        )


class _Rows(BaseModel, strict=True):
    id: str | None = None
    rows: list[Any]


class _Columns(BaseModel, strict=True):
    id: str | None = None
    columns: dict[str, list[Any]]


@dataclass(frozen=True)
class JsonRows:
    """The rows of a request as JSON."""

    id: str | None
    values: Sequence[object] | Mapping[str, Sequence[object]]  # one object per row, or lists of values by column

    def columns(self, names: Sequence[str], max_rows: int) -> tuple[Mapping[str, Sequence[object]], int]:
        """Return values by column, and the number of rows. The encoder ignores columns that are not in ``names``.

        Raise `RequestError` if there are too many rows, a column is missing, or columns have different lengths.
        """
        if isinstance(self.values, Mapping):
            return self.values, self._count(self.values, names, max_rows)
        refuse_many(len(self.values), max_rows)
        rows = cast("Sequence[Mapping[str, object]]", self.values)
        for i, row in enumerate(rows):
            if not isinstance(row, dict):
                raise RequestError(f"row {i:,} is {shown(row)}, must be an object with a value per column")
        try:
            return {name: [row[name] for row in rows] for name in names}, len(rows)
        except KeyError as error:
            name = cast(str, error.args[0])
            i, row = next((i, row) for i, row in enumerate(rows) if name not in row)
            raise RequestError(
                f"row {i:,} has no '{name}'{did_you_mean(name, row)}; write null where a value is missing"
            ) from None

    @staticmethod
    def _count(columns: Mapping[str, Sequence[object]], names: Sequence[str], max_rows: int) -> int:
        """Return the number of rows, which all columns of the request must have, also those of no use to the model."""
        for name in names:
            if name not in columns:
                raise RequestError(
                    f"there is no column '{name}', which the model needs{did_you_mean(name, columns)}; send a list "
                    "with null where a value is missing"
                )
        first, rows = next(((name, len(column)) for name, column in columns.items()), ("", 0))
        for name, column in columns.items():
            if len(column) != rows:
                raise RequestError(
                    f"columns have different lengths: got {len(column):,} values in column {shown(name)}, expected "
                    f"{rows:,} as in column {shown(first)}. Send one value per row in every column"
                )
        refuse_many(rows, max_rows)
        return rows


def parse_rows(body: bytes, content_type: str, max_rows: int) -> JsonRows:
    """Parse a body of ``POST /score``; raise `RequestError` if it has another form or too many lines.

    The forms are a list of objects, one per row; ``{"rows": [...]}``; ``{"columns": {NAME: [...]}}``; or one object per
    line. The second and third may have an ``id``.
    """
    kind = content_type.partition(";")[0].strip().lower()
    if kind in LINES_TYPES:
        lines = [line for line in body.splitlines() if line.strip()]
        refuse_many(len(lines), max_rows)  # before each is parsed
        return JsonRows(None, [parse(line, f"line {i:,}") for i, line in enumerate(lines)])
    if kind not in JSON_TYPES:
        raise RequestError(
            f"the content type is {kind[:100]!r}, must be application/json or application/x-ndjson; binary tensors go "
            "to /v2/models/NAME/infer",
            415,
        )
    values = parse(body, "the body")
    if isinstance(values, list):
        return JsonRows(None, cast("list[object]", values))
    given = cast("dict[str, object]", values) if isinstance(values, dict) else {}
    if ("rows" in given) == ("columns" in given):
        what = f"an object with {', '.join(map(shown, list(given)[:5]))}" if given else shown(values)
        raise RequestError(
            f'the body must be a list of rows, {{"rows": [...]}} or {{"columns": {{NAME: [...]}}}}; it is {what}'
        )
    if "rows" in given:
        of_rows = validate(_Rows, given)
        return JsonRows(of_rows.id, of_rows.rows)
    of_columns = validate(_Columns, given)
    return JsonRows(of_columns.id, of_columns.columns)


def record_batch(table: pa.Table) -> pa.RecordBatch:
    """Return a table's rows in one piece, as a model takes them."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def validate(model: type[M], values: object) -> M:
    """Check a body of JSON by a pydantic model; a `RequestError` names the first value that is wrong."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        where = "" if error.errors()[0]["loc"] else "the request: "
        raise RequestError(f"{where}{fault_of(error, _LIMITS)}") from None


def shown(value: object) -> str:
    """A value of a client as messages show it: short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def parse(text: bytes, what: str) -> object:
    """Parse JSON; a `RequestError` begins with ``what``."""
    try:
        return parse_json(text)
    except TextError as error:
        raise RequestError(f"{what} {error}") from None


def refuse_many(rows: int, most: int) -> None:
    """Raise `RequestError` where a request has more rows than one may have."""
    if rows > most:
        raise RequestError(
            f"the request has {rows:,} rows, at most {most:,} go into one; send several", 413, "too_large"
        )
