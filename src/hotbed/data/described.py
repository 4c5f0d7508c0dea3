# pyright: reportUnknownParameterType=false, reportAttributeAccessIssue=false
"""Describe derived inputs to programs without hotbed, as ``inputs.json`` has them: `described_features`."""

# pyarrow ships no types.

from __future__ import annotations

from typing import Any

import pyarrow as pa

from hotbed.data import arrow
from hotbed.data.derived import Bucket, Cross
from hotbed.data.encode import Encoder
from hotbed.errors import SpecError

MOST_KEYS = 1_000_000
"""Most keys of a table that a description holds."""


def described_features(encoder: Encoder) -> list[dict[str, Any]]:
    """How columns are made, in this order: crosses, buckets with their boundaries, lookups with their tables."""
    found: list[dict[str, Any]] = []
    for d in encoder.schema.derived:
        if isinstance(d, Cross):
            found.append(d.entry())
        elif isinstance(d, Bucket):
            boundaries = d.boundaries if d.boundaries is not None else encoder.boundaries[d.name]
            found.append({"name": d.name, "bucket": d.column, "boundaries": list(boundaries)})
        else:
            table = encoder.tables[d.name]
            if len(table) > MOST_KEYS:
                raise SpecError(
                    f"feature '{d.name}' looks values up in {len(table):,} keys of {d.file}, and inputs.json holds "
                    f"at most {MOST_KEYS:,}; leave out keys that no row has"
                )
            key, value = (_plain(table[name], f"feature '{d.name}': {d.file}") for name in ("key", "value"))
            missing = [] if arrow.is_list(table["value"].type) else None
            pairs = [[k, missing if v is None else v] for k, v in zip(key, value, strict=True)]
            found.append({"name": d.name, "lookup": d.column, "table": pairs, "missing": missing})
    return found


def encoding_of(encoder: Encoder, column: str) -> dict[str, str]:
    """How the ids of a sparse column are made of its values: by a hash, as a cross, as a bucket, or as they are."""
    derived = next((d for d in encoder.schema.derived if d.name == column), None)
    if isinstance(derived, Cross | Bucket):
        return {"encoding": "cross" if isinstance(derived, Cross) else "bucket"}
    if derived is None and encoder.ids == "raw":
        return {"encoding": "rows"}
    if derived is not None:
        return {"encoding": "hash", "values": arrow.kind_of_ids(encoder.tables[column]["value"].type)}
    return {"encoding": "hash", "values": encoder.id_kinds.get(column, "")}


def _plain(column: pa.ChunkedArray, what: str) -> list[Any]:
    """Values as JSON has them."""

    def text(value: Any) -> Any:
        if isinstance(value, list):
            return [text(entry) for entry in value]
        return value.decode() if isinstance(value, bytes) else value

    try:
        return [text(value) for value in column.to_pylist()]
    except UnicodeDecodeError as error:
        raise SpecError(f"{what} has bytes that are no UTF-8 ({error}), and JSON holds text only") from None
