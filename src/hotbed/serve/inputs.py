# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Turn what ``POST /score`` gets, rows as JSON, into Arrow columns by the model's own encoder."""

# pyarrow ships no types.

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from hotbed.errors import RequestError, did_you_mean
from hotbed.parsing import TextError, parse_json

if TYPE_CHECKING:
    from hotbed.data.plain_rows import InputColumn

JSON_TYPES = ("application/json", "application/x-www-form-urlencoded", "text/json", "")
"""Content types of JSON bodies; curl sends the second where nothing is said."""
LINES_TYPES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")


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
        for i, row in enumerate(self.values):
            if not isinstance(row, dict):
                raise RequestError(f"row {i:,} is {shown(row)}, must be an object with a value per column")
        objects = cast("Sequence[Mapping[str, object]]", self.values)
        columns = dict[str, Sequence[object]]()
        for name in names:
            try:
                columns[name] = [row[name] for row in objects]
            except KeyError:
                i, row = next((i, row) for i, row in enumerate(objects) if name not in row)
                raise RequestError(
                    f"row {i:,} has no '{name}'{did_you_mean(name, row)}; write null where a value is missing"
                ) from None
        return columns, len(objects)

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
        return JsonRows(None, [_parsed(line, f"line {i:,}") for i, line in enumerate(lines)])
    if kind not in JSON_TYPES:
        raise RequestError(
            f"the content type is {kind[:100]!r}, must be application/json or application/x-ndjson; binary tensors go "
            "to /v2/models/NAME/infer",
            415,
        )
    values = _parsed(body, "the body")
    if isinstance(values, list):
        return JsonRows(None, cast("list[object]", values))
    given = cast("dict[str, object]", values) if isinstance(values, dict) else {}
    if ("rows" in given) == ("columns" in given):
        what = f"an object with {', '.join(map(shown, list(given)[:5]))}" if given else shown(values)
        raise RequestError(
            f'the body must be a list of rows, {{"rows": [...]}} or {{"columns": {{NAME: [...]}}}}; it is {what}'
        )
    id_ = given.get("id")
    if id_ is not None and not isinstance(id_, str):
        raise RequestError(f"id is {shown(id_)}, must be text")
    if "rows" in given:
        rows = given["rows"]
        if not isinstance(rows, list):
            raise RequestError(f"rows is {shown(rows)}, must be a list of objects, one per row")
        return JsonRows(id_, cast("list[object]", rows))
    columns = given["columns"]
    if not isinstance(columns, dict):
        raise RequestError(f"columns is {shown(columns)}, must be an object with a list per column")
    for name, column in cast("dict[str, object]", columns).items():
        if not isinstance(column, list):
            raise RequestError(f"column {shown(name)} is {shown(column)}, must be a list with a value per row")
    return JsonRows(id_, cast("dict[str, Sequence[object]]", columns))


def record_batch(table: pa.Table, columns: Sequence[InputColumn]) -> pa.RecordBatch:
    """A table's rows in one piece, as a model takes them.

    Numbers are float64, also where all of a request's are whole, so that requests of the same columns fit together;
    integers that float64 does not have stay what they are.
    """
    for column in columns:
        at = table.schema.get_field_index(column.name)
        wide = pa.large_list(pa.float64()) if column.is_list else pa.float64()
        if column.kind == "numbers" and at >= 0 and table.schema.field(at).type != wide:
            with contextlib.suppress(pa.ArrowInvalid):
                table = table.set_column(at, column.name, table.column(at).cast(wide))
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], schema=table.schema)


def shown(value: object) -> str:
    """A value of a client as messages show it: short."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _parsed(text: bytes, what: str) -> object:
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
