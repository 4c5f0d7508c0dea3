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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

from hotbed.checks import Count, NotNegative, Range, Section, Size, check_known, check_unique
from hotbed.errors import SpecError

if TYPE_CHECKING:
    from torch import Tensor

# A pooling divides the sum of a bag's rows by a function of the number of its ids. A new pooling has a name, a code and
# a divisor here, and the same divisor in `ops.cpu_lookup.divisor` and `ops.triton_lookup.mean_divisors`. Gradients,
# exchanges and exports use these functions.
Pooling = Literal["sum", "mean", "none"]
NO_DIVISOR, MEAN = 0, 1
POOLING_CODE: dict[Pooling, int] = {"sum": NO_DIVISOR, "mean": MEAN, "none": NO_DIVISOR}
"""Codes of the divisors, for kernels."""
POOLED: tuple[Pooling, ...] = tuple(mode for mode in get_args(Pooling) if mode != "none")
"""Poolings with one vector per sample. All other poolings have one vector per id."""


def divisors(pooling: Tensor | int, lengths: Tensor) -> Tensor:
    """Return the float32 divisors ``[n]`` of the sums of bags with these lengths ``[n]``. Empty bags have divisor 1.

    ``pooling`` is the `POOLING_CODE` of all bags, or of each bag ``[n]``.
    """
    codes = lengths.new_full(lengths.shape, pooling) if isinstance(pooling, int) else pooling
    return lengths.clamp(min=1).where(codes == MEAN, 1).float()


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


def row_bytes(dtype: RowDtype, cols: int) -> int:
    """Count the bytes of a row, with the scales of an int8 row (one byte per 128 columns)."""
    return cols * _CELL_BYTES[dtype] + (-(-cols // 128) if dtype == "int8" else 0)


_CELL_BYTES: dict[RowDtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class Dynamic(Section, where="a dynamic table: ", error=SpecError):
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

    capacity_bytes: Count
    admit_after: Count = 1
    evict: Literal["lru", "lfu"] = "lru"
    ttl_steps: Count | None = None


@dataclass(frozen=True)
class Table(Section, error=SpecError):
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
    rows: Count
    dim: Annotated[int, Range(least=1, most=MAX_DIM)]
    init_bound: NotNegative | None = None
    init_version: Literal[1] = 1
    init_seed: Annotated[int, Range(least=0, below=2**32)] | None = None
    dtype: RowDtype = "fp32"
    fp32_rows: Size = 0
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
        if cast(object, self.rows) == "dynamic" or self.dynamic is not None:
            for found in self._make_dynamic():
                raise SpecError(f"{self.where()}{found}")
        super().__post_init__()

    def where(self) -> str:
        """Return the text in front of a field's name in messages."""
        return f"table '{self.name}': "

    def contradictions(self) -> Iterator[str]:
        """Yield a message for an empty name, and for more rows in float32 than there are."""
        if not self.name:
            yield "a table needs a non-empty name"
        if self.fp32_rows > self.rows:
            yield f"{self.where()}fp32_rows: got {self.fp32_rows:,}, expected at most rows {self.rows:,}"

    def _make_dynamic(self) -> Iterator[str]:
        """Set the number of rows to what there is room for; yield a message for each reason why it cannot be."""
        if self.dynamic is None:
            yield "rows is 'dynamic'; say how much room it has: dynamic=Dynamic(…)"
            return
        if self.init_bound is None:
            yield "rows is 'dynamic', so init_bound has no default; set it"
        if self.fp32_rows:
            yield f"fp32_rows is {self.fp32_rows!r}, but dynamic rows have no order"
        nbytes, capacity = row_bytes(self.dtype, self.dim), self.dynamic.capacity_bytes
        room = capacity // (nbytes * DYNAMIC_WAYS) * DYNAMIC_WAYS
        if not room:
            yield f"capacity_bytes is {capacity:,}, must hold {DYNAMIC_WAYS} rows of {nbytes:,} bytes"
        if self.rows not in ("dynamic", room):
            yield f"rows is {self.rows!r}, with `dynamic` it must be 'dynamic'"
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
class Feature(Section, error=SpecError):
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
    max_len: Count | None = None
    on_too_long: OnTooLong = "error"
    on_bad_id: OnBadId = "error"
    padding: Padding | None = None

    def where(self) -> str:
        """Return the text in front of a field's name in messages."""
        return f"feature '{self.name}': "

    def contradictions(self) -> Iterator[str]:
        """Yield a message for an empty name, and for a padding without a length."""
        if not self.name:
            yield "a feature needs a non-empty name"
        if self.padding is not None and (self.is_pooled or self.max_len is None):
            yield (
                f"{self.where()}padding is {self.padding!r}, pooling {self.pooling!r} and max_len {self.max_len}; only "
                "features with pooling='none' and a max_len are padded, to its length"
            )

    @property
    def is_pooled(self) -> bool:
        """Whether a sample has one vector, not one per id."""
        return self.pooling != "none"


def check_specs(tables: Sequence[Table], features: Sequence[Feature]) -> None:
    """Raise `SpecError` unless names are unique, every feature has its table and every table a feature."""
    if not features:
        raise SpecError("an embedding collection needs at least one feature")
    known = [t.name for t in tables]
    check_unique("table", known, SpecError)
    check_unique("feature", [f.name for f in features], SpecError)
    for feature in features:
        check_known(f"feature '{feature.name}': table", feature.table, known, SpecError)
    if unused := [name for name in known if not any(f.table == name for f in features)]:
        raise SpecError(f"table '{unused[0]}' has no feature; remove it or add a Feature(…, table='{unused[0]}')")
