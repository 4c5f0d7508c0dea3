"""Turn what ``POST /score`` gets, rows as JSON, into Arrow columns by the model's own encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pyarrow as pa
from pydantic import BaseModel, ValidationError

from hotbed.errors import RequestError, did_you_mean
from hotbed.parsing import TextError, parse_json

M = TypeVar("M", bound=BaseModel)

JSON_TYPES = ("application/json", "application/x-www-form-urlencoded", "text/json", "")
"""Content types of JSON bodies; curl sends the second where nothing is said."""
LINES_TYPES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")


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
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the request"
        raise RequestError(f"{place}: {first['msg']}; it is {shown(cast(object, first['input']))}") from None


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
