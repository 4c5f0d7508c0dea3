"""What tests of derived inputs share: schemas, a table of items, and crosses value by value."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from hotbed.batch import Batch
from hotbed.data import Encoder, Schema
from hotbed.data.hashing import hash_integers, hash_strings, hashes_to_rows, mix

USERS = {"name": "user", "rows": 1000}


def schema(*features: Mapping[str, Any], **rest: Any) -> Schema:
    return Schema.from_dict({"labels": [], "sparse": [USERS], "features": list(features), **rest})


def encoder(*features: Mapping[str, Any], kinds: Mapping[str, str] | None = None, **rest: Any) -> Encoder:
    return Encoder(schema(*features, **rest), id_kinds=kinds)


def hash_of(value: int | str) -> np.uint64:
    if isinstance(value, int):
        return hash_integers(np.array([value]))[0]
    data = value.encode()
    return hash_strings(np.array([0, len(data)]), np.frombuffer(data, np.uint8))[0]


def crossed(values: tuple[int | str | None, ...], rows: int) -> int:
    """What the documentation says of a cross, value by value."""
    if None in values:
        return 0
    h = mix(np.array([len(values)], np.uint64))
    for value in values:
        assert value is not None
        h = mix(h ^ hash_of(value))
    return int(hashes_to_rows(h, rows)[0])


def ids(batch: Batch, name: str) -> list[int]:
    return batch.sparse[name].values.tolist()


def items(path: Path, **columns: Any) -> str:
    whole = {"id": ["a", "b", None, "ccccccccc"], "kind": ["x", None, "y", "z"], "price": [1.5, 2.0, 3.0, None]}
    pq.write_table(pa.table(whole | columns), path)
    return str(path)


def of_items(file: str, **more: Any) -> dict[str, Any]:
    return {"name": "kind", "lookup": "item", "file": file, "key": "id", "value": "kind", "rows": 100} | more


def row_of(value: str, rows: int = 100) -> int:
    return int(hashes_to_rows(np.array([hash_of(value)]), rows)[0])


ITEMS = pa.table({"user": [1, 2, 3, 4, 5], "item": ["a", "b", "new", None, "ccccccccc"]})
