# pyright: reportUnknownParameterType=false
"""Hash the values of tables that get no vocabulary in prepared data: `HashEntry`.

A vocabulary gives frequent values rows of their own, and must know all values. Where values never end (users, queries,
pages), new ones would all be row 0 until the data are prepared again; hashed, each has a row, which it may share.
"""

# pyarrow ships no types.

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from hotbed.data import arrow
from hotbed.data.hashing import mix, rows_of
from hotbed.data.schema import Schema
from hotbed.errors import SpecError, did_you_mean
from hotbed.specs import is_int

Kind = Literal["hexadecimal", "integers", "text"]
MOST_ROWS = 1 << 40
SEEDS = 1 << 64


class Entry(BaseModel):
    """What a dataset says of how it was made; checked, as it may come from anywhere."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class HashEntry(Entry):
    """How the values of a table without a vocabulary are hashed to its rows."""

    kind: Kind  # of the raw values
    rows: int = Field(ge=2, le=MOST_ROWS)  # of the table; row 0 is for missing values
    seed: int = Field(ge=0, lt=SEEDS)  # 0 is the hash h of `hotbed.data.hashing`, any other seed is ``mix(h ^ seed)``

    def ids(self, values: pa.Array) -> NDArray[np.int64]:
        """Rows ``[n]`` of values ``[n]``: integers, of hexadecimal ones as well, or text."""
        h = arrow.hashes(values)
        found = rows_of(mix(h ^ np.uint64(self.seed)) if self.seed else h, self.rows)
        found[values.is_null().to_numpy(zero_copy_only=False)] = 0
        return found


def check_hashed(hash_rows: Mapping[str, object], seed: object, schema: Schema) -> None:
    """Raise `SpecError` unless these tables are there and can have so many rows."""
    if not is_int(seed) or not 0 <= seed < SEEDS:
        raise SpecError(f"hash_seed is {seed!r}, must be an integer of at least 0, below 2^64")
    for table, rows in hash_rows.items():
        if table not in schema.rows:
            raise SpecError(f"hash_rows names table '{table}', which there is not{did_you_mean(table, schema.rows)}")
        if not is_int(rows) or not 2 <= rows <= MOST_ROWS:
            raise SpecError(f"hash_rows: table '{table}' has {rows!r} rows, must be an integer from 2 to 2^40")
