"""Describe a model's embeddings: tables, and the features that look rows up in them.

Vocabulary of the package (used with these meanings everywhere):

- *id*: a key from the data; *row*: a vector of a table; *slot*: a position in a store
- *bag*: the ids of one feature in one sample, pooled into one vector
- *arena*: the tables, or shards of tables, of one process with as many columns and one dtype: one store, one launch
- shape letters: ``B`` samples, ``F`` features, ``N`` ids, ``U`` distinct rows, ``D`` columns, ``R`` rows, ``T`` tasks
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeGuard, cast, get_args

from hotbed.errors import SpecError, did_you_mean
from hotbed.pooling import Pooling

RowDtype = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
OnTooLong = Literal["error", "truncate", "keep_last"]
Padding = Literal["right", "left"]
OnBadId = Literal["error", "drop", "hash"]
Tier = Literal["device", "host", "disk"]
"""Which memory of a rank holds rows: the compute device's, the host's, or files; see `hotbed.store.tiers`."""

DYNAMIC_WAYS = 128
"""Rows of a set of a dynamic table: an id may have any of them, and is evicted for ids of its set only."""

ANY_ID = 2**63 - 1
"""Ids of a dynamic table are below it."""

MAX_DIM = 1024
"""Largest number of columns of a table."""


def is_int(value: object) -> TypeGuard[int]:
    """Say whether a value is an integer; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def row_bytes(dtype: RowDtype, cols: int) -> int:
    """Count the bytes of a row, with the scales of an int8 row (one byte per 128 columns)."""
    return cols * _CELL_BYTES[dtype] + (-(-cols // 128) if dtype == "int8" else 0)


_CELL_BYTES: dict[RowDtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class Dynamic:
    """A table whose ids are any integers; an id gets a row when it is first seen.

    Parameters
    ----------
    capacity_bytes
        What its rows may take, without moments; when there is no room, ids are evicted.
    admit_after
        How often an id must be seen to get a row; in the meantime it is left out of its bags.
    evict
        Which id is evicted among those whose hashes are in one set: the least recently (``"lru"``) or the least often
        (``"lfu"``) seen one. Rows whose gradients wait for the optimizer's step are not evicted.
    ttl_steps
        The row of an id that was not seen in so many training steps is reinitialized when it is; by default never.

    Raises
    ------
    SpecError
        If a value is out of range.
    """

    capacity_bytes: int
    admit_after: int = 1
    evict: Literal["lru", "lfu"] = "lru"
    ttl_steps: int | None = None

    def __post_init__(self) -> None:
        for field in ("capacity_bytes", "admit_after", "ttl_steps"):
            value = getattr(self, field)
            if (value is not None or field != "ttl_steps") and (not is_int(value) or value < 1):
                raise SpecError(f"a dynamic table has {field} {value!r}, must be an integer of at least 1")
        if self.evict not in ("lru", "lfu"):
            raise SpecError(f"a dynamic table has evict {self.evict!r}, must be lru or lfu")


@dataclass(frozen=True)
class Table:
    """One embedding table: a rectangle of ``rows`` × ``dim`` values.

    Parameters
    ----------
    name
        Unique within a collection; part of the key of the table's random initial values.
    rows
        Number of rows; valid ids are ``0 … rows − 1``. Or ``"dynamic"``: any ids from 0 on (others with
        ``Feature.on_bad_id="hash"``), as ``dynamic`` says; the number of rows is then what there is room for.
    dim
        Number of columns, 1 to 1024.
    init_bound
        Initial values are uniform on ``[−init_bound, init_bound)``. Default ``1/√rows`` (NVIDIA DLRM).
    init_version
        Version of the initial-value function. Stored with the table, so that a table that grows keeps its values.
    init_seed
        Seed of the initial values, 32 bits. Default: from the collection's seed and the table's name.
    dtype
        What rows are stored as. Arithmetic and optimizer state are float32 always; a narrower row is rounded
        stochastically after each update, so tiny updates arrive in the mean. ``"int8"`` has a power-of-two scale per
        row and 128 columns; ``"fp8"`` is e4m3. On a planted log bf16 costs 1e-4 of AUC, int8 6e-4, and nothing behind
        ``fp32_rows``, fp8 more (docs/quality.md).
    fp32_rows
        Rows ``0 … fp32_rows − 1`` are float32 whatever ``dtype`` says. Ids in order of falling frequency, as `prepare`
        makes them, put there the rows that are updated most and suffer most from rounding.
    frozen
        A frozen table is looked up but never updated; see also ``EmbeddingCollection.freeze``.
    dynamic
        With ``rows="dynamic"``: how much room there is for rows, and which ids get it. ``init_bound`` has to be given.

    Raises
    ------
    SpecError
        If a value is out of range.
    """

    name: str
    rows: int
    dim: int
    init_bound: float | None = None
    init_version: int = 1
    init_seed: int | None = None
    dtype: RowDtype = "fp32"
    fp32_rows: int = 0
    frozen: bool = False
    dynamic: Dynamic | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            name: str,
            rows: int | Literal["dynamic"],
            dim: int,
            init_bound: float | None = None,
            init_version: int = 1,
            init_seed: int | None = None,
            dtype: RowDtype = "fp32",
            fp32_rows: int = 0,
            frozen: bool = False,
            dynamic: Dynamic | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a table needs a non-empty name")
        if cast(object, self.rows) == "dynamic" or self.dynamic is not None:
            self._make_dynamic()
        for field in ("rows", "dim", "fp32_rows"):
            value = getattr(self, field)
            if not is_int(value):
                raise SpecError(f"table '{self.name}': {field} is {value!r}, must be an integer")
        if self.rows < 1:
            raise SpecError(f"table '{self.name}': rows is {self.rows:,}, must be at least 1")
        if not 1 <= self.dim <= MAX_DIM:
            raise SpecError(f"table '{self.name}': dim is {self.dim:,}, must be between 1 and {MAX_DIM:,}")
        if self.init_bound is not None and not (math.isfinite(self.init_bound) and self.init_bound >= 0):
            raise SpecError(f"table '{self.name}': init_bound is {self.init_bound}, must be finite and not negative")
        if self.init_version != 1:
            raise SpecError(f"table '{self.name}': init_version is {self.init_version}, this release knows only 1")
        if self.init_seed is not None and not (is_int(self.init_seed) and 0 <= self.init_seed < 1 << 32):
            raise SpecError(f"table '{self.name}': init_seed is {self.init_seed!r}, must be an integer of 32 bits")
        if self.dtype not in get_args(RowDtype):
            known = get_args(RowDtype)
            raise SpecError(
                f"table '{self.name}': dtype is {self.dtype!r}, must be one of {', '.join(known)}"
                f"{did_you_mean(str(self.dtype), known)}"
            )
        if not 0 <= self.fp32_rows <= self.rows:
            raise SpecError(
                f"table '{self.name}': fp32_rows is {self.fp32_rows:,}, must be between 0 and rows {self.rows:,}"
            )

    def _make_dynamic(self) -> None:
        if self.dynamic is None:
            raise SpecError(f"table '{self.name}': rows is 'dynamic'; say how much room it has: dynamic=Dynamic(…)")
        if self.init_bound is None:
            raise SpecError(f"table '{self.name}': rows is 'dynamic', so init_bound has no default; set it")
        if self.fp32_rows:
            raise SpecError(f"table '{self.name}': fp32_rows is {self.fp32_rows!r}, but dynamic rows have no order")
        nbytes, capacity = row_bytes(self.dtype, self.dim), self.dynamic.capacity_bytes
        room = capacity // (nbytes * DYNAMIC_WAYS) * DYNAMIC_WAYS
        if not room:
            raise SpecError(
                f"table '{self.name}': capacity_bytes is {capacity:,}, must hold {DYNAMIC_WAYS} rows of {nbytes:,} "
                "bytes"
            )
        if self.rows not in ("dynamic", room):
            raise SpecError(f"table '{self.name}': rows is {self.rows!r}, with `dynamic` it must be 'dynamic'")
        object.__setattr__(self, "rows", room)

    @property
    def bound(self) -> float:
        """Bound of the initial values, with the default filled in."""
        return 1.0 / math.sqrt(self.rows) if self.init_bound is None else self.init_bound

    def seed(self, collection_seed: int) -> int:
        """Derive the 32-bit seed of this table's initial values from its name, not from its position."""
        if self.init_seed is not None:
            return self.init_seed
        digest = hashlib.blake2b(f"{collection_seed}/{self.name}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Feature:
    """One sparse input: bags of ids that are looked up in a table and pooled.

    Parameters
    ----------
    name
        Unique within a collection; batches are matched by this name.
    table
        Name of the table. Several features may share one.
    pooling
        ``"sum"`` or ``"mean"`` (the sum divided by the number of ids; an empty bag gives zeros either way), or
        ``"none"``: the rows themselves, as a jagged tensor ``[B, j, D]``, or padded.
    max_len
        Largest number of ids of a bag; any by default. Also the padded length of a feature that is not pooled.
    on_too_long
        What to do with a bag of more than ``max_len`` ids: ``"error"``, ``"truncate"`` it to its first ``max_len``, or
        ``"keep_last"``, the newest of a history; what was cut off is counted in ``EmbeddingCollection.truncated_ids``.
    padding
        Of a feature that is not pooled and has a ``max_len`` L: rows are looked up straight into ``[B, L, D]``, with
        zeros after (``"right"``) or before (``"left"``) those of a sample. Default: jagged; `Embeddings.padded` then
        pads what was looked up, to the right.
    on_bad_id
        What to do with an id that is negative or ≥ rows: ``"error"``; ``"drop"`` it from its bag; ``"hash"`` it
        into the table. What was dropped or hashed is counted in ``EmbeddingCollection.bad_ids``.
    """

    name: str
    table: str
    pooling: Pooling = "sum"
    max_len: int | None = None
    on_too_long: OnTooLong = "error"
    on_bad_id: OnBadId = "error"
    padding: Padding | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise SpecError("a feature needs a non-empty name")
        literals = {"pooling": Pooling, "on_too_long": OnTooLong, "on_bad_id": OnBadId}
        if self.padding is not None:
            literals["padding"] = Padding
        for field, choices in ((name, get_args(kind)) for name, kind in literals.items()):
            value = getattr(self, field)
            if value not in choices:
                raise SpecError(f"feature '{self.name}': {field} is {value!r}, must be one of {', '.join(choices)}")
        if self.max_len is not None and not (is_int(self.max_len) and self.max_len >= 1):
            raise SpecError(f"feature '{self.name}': max_len is {self.max_len!r}, must be an integer of at least 1")
        if self.padding is not None and (self.is_pooled or self.max_len is None):
            raise SpecError(
                f"feature '{self.name}': padding is {self.padding!r}, pooling {self.pooling!r} and max_len "
                f"{self.max_len}; only features with pooling='none' and a max_len are padded, to its length"
            )

    @property
    def is_pooled(self) -> bool:
        """Whether a sample has one vector, not one per id."""
        return self.pooling != "none"


def check_specs(tables: Sequence[Table], features: Sequence[Feature]) -> None:
    """Raise `SpecError` unless names are unique, every feature has its table and every table a feature."""
    if not features:
        raise SpecError("an embedding collection needs at least one feature")
    for kind, names in (("table", [t.name for t in tables]), ("feature", [f.name for f in features])):
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise SpecError(f"{kind} '{twice[0]}' is defined {names.count(twice[0])} times; names must be unique")
    known = [t.name for t in tables]
    for feature in features:
        if feature.table not in known:
            raise SpecError(
                f"feature '{feature.name}' uses table '{feature.table}', which is not among the tables "
                f"({', '.join(known) or 'none'}){did_you_mean(feature.table, known)}"
            )
    for name in known:
        if not any(f.table == name for f in features):
            raise SpecError(f"table '{name}' has no feature; remove it or add a Feature(…, table='{name}')")
