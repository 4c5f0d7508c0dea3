"""Describe a model's embeddings: tables, and the features that look rows up in them.

Vocabulary of the package (used with these meanings everywhere):

- *id*: a key from the data; *row*: a vector of a table; *slot*: a position in a store
- *bag*: the ids of one feature in one sample, pooled into one vector
- *arena*: all tables, or shards of tables, of one process with equal ``dim`` and dtype: one store, one kernel launch
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
"""Memory of a rank that holds rows: the compute device's, the host's, or files. See `hotbed.store.tiers`."""

DYNAMIC_WAYS = 128
"""Associativity of a dynamic table: rows per set. An id may get any row of its set."""

ANY_ID = 2**63 - 1
"""Upper bound (exclusive) of the ids of a dynamic table."""

MAX_DIM = 1024
"""Largest number of columns of a table."""


def row_bytes(dtype: RowDtype, cols: int) -> int:
    """Return the bytes of a row. An int8 row includes its scales (one byte per 128 columns)."""
    return cols * _CELL_BYTES[dtype] + (-(-cols // 128) if dtype == "int8" else 0)


_CELL_BYTES: dict[RowDtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8": 1}


@dataclass(frozen=True)
class Dynamic(Section, where="a dynamic table: ", error=SpecError):
    """Options of a dynamic table, which assigns a row to any integer id when the id is first seen.

    Parameters
    ----------
    capacity_bytes
        Limit of the bytes of rows, without moments. When it is reached, ids are evicted.
    admit_after
        Number of occurrences after which an id gets a row. Earlier occurrences are removed from their bags.
    evict
        Eviction policy within the set of an id: the least recently (``"lru"``) or the least frequently (``"lfu"``) seen
        id is evicted. Rows with a pending gradient are not evicted.
    ttl_steps
        If an id is not seen for more training steps than this, its row is reinitialized. Default: never.

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
        Unique name within a collection. The random initial values depend on it.
    rows
        Number of rows. Valid ids are ``0 … rows − 1``. With ``"dynamic"``, all ids from 0 are valid (negative ids with
        ``Feature.on_bad_id="hash"``), and the number of rows follows from ``dynamic.capacity_bytes``.
    dim
        Number of columns, 1 to 1024.
    init_bound
        Initial values are uniform on ``[−init_bound, init_bound)``. Default ``1/√rows`` (NVIDIA DLRM).
    init_version
        Version of the initial-value function. It is stored with the table, so that a table that grows keeps its values.
    init_seed
        Seed of the initial values, 32 bits. Default: from the collection's seed and the table's name.
    dtype
        Dtype of stored rows. Arithmetic and optimizer states are always float32. Low-precision rows are rounded
        stochastically after each update, so that small updates are not lost on average. ``"int8"`` has a power-of-two
        scale for each 128 columns of a row. ``"fp8"`` is e4m3. On a synthetic log, bf16 costs 1e-4 of AUC and int8
        6e-4, or nothing with ``fp32_rows``. fp8 costs more (docs/performance.md).
    fp32_rows
        Rows ``0 … fp32_rows − 1`` are float32, regardless of ``dtype``. `prepare` numbers ids by descending frequency.
        Then these rows are the most frequently updated ones, which would lose most by rounding.
    frozen
        A frozen table is looked up but never updated. See also ``EmbeddingCollection.freeze``.
    dynamic
        Options for ``rows="dynamic"``. ``init_bound`` is required then.

    Raises
    ------
    SpecError
        If a value is out of range.

    Examples
    --------
    >>> Table("item", rows=1000, dim=64, dtype="bf16").bound
    0.03162277660168379
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
            yield "name of a table: got '', expected text"
        if self.fp32_rows > self.rows:
            yield f"{self.where()}fp32_rows: got {self.fp32_rows:,}, expected at most rows {self.rows:,}"

    def _make_dynamic(self) -> Iterator[str]:
        """Set the number of rows from the capacity. Yield a message for each contradiction."""
        if self.dynamic is None:
            yield "dynamic: got None, expected dynamic=Dynamic(…) for rows 'dynamic'"
            return
        if self.init_bound is None:
            yield "init_bound: got None, expected a number, because rows 'dynamic' has no default"
        if self.fp32_rows:
            yield f"fp32_rows: got {self.fp32_rows!r}, expected 0, because dynamic rows have no order"
        nbytes, capacity = row_bytes(self.dtype, self.dim), self.dynamic.capacity_bytes
        room = capacity // (nbytes * DYNAMIC_WAYS) * DYNAMIC_WAYS
        if not room:
            yield (
                f"capacity_bytes: got {capacity:,}, expected at least {DYNAMIC_WAYS * nbytes:,} for {DYNAMIC_WAYS} "
                f"rows of {nbytes:,} bytes"
            )
        if self.rows not in ("dynamic", room):
            yield f"rows: got {self.rows!r}, expected 'dynamic' because `dynamic` is set"
        object.__setattr__(self, "rows", room)

    @property
    def bound(self) -> float:
        """Bound of the initial values: ``init_bound``, or its default."""
        return 1.0 / math.sqrt(self.rows) if self.init_bound is None else self.init_bound

    def seed(self, collection_seed: int) -> int:
        """Return the 32-bit seed of the initial values. It depends on the table's name, but not on its position."""
        if self.init_seed is not None:
            return self.init_seed
        digest = hashlib.blake2b(f"{collection_seed}/{self.name}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Feature(Section, error=SpecError):
    """One sparse input: bags of ids, which are looked up in a table and pooled.

    Parameters
    ----------
    name
        Unique name within a collection. It is the name of the ids in a batch.
    table
        Name of the table. Several features may share a table.
    pooling
        ``"sum"``, ``"mean"`` (the sum divided by the number of ids), or ``"none"`` (the rows themselves, as a jagged
        tensor ``[B, j, D]``, or padded). The sum and the mean of an empty bag are zeros.
    max_len
        Maximal number of ids per bag. Default: no limit. It is also the padded length of an unpooled feature.
    on_too_long
        Action for a bag with more than ``max_len`` ids: ``"error"``, ``"truncate"`` (keep the first ``max_len`` ids),
        or ``"keep_last"`` (keep the last ids, e.g. the newest of a history). ``EmbeddingCollection.truncated_ids``
        counts the removed ids.
    padding
        For an unpooled feature with ``max_len`` L: look rows up directly into ``[B, L, D]``, with zeros after
        (``"right"``) or before (``"left"``) the rows of a sample. Default: a jagged tensor. `Embeddings.padded` pads it
        later, on the right.
    on_bad_id
        Action for an id that is negative or at least ``rows``: ``"error"``, ``"drop"`` (remove it from its bag), or
        ``"hash"`` (use its hash as the row). ``EmbeddingCollection.bad_ids`` counts dropped and hashed ids.
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
            yield "name of a feature: got '', expected text"
        if self.padding is not None and (self.is_pooled or self.max_len is None):
            yield (
                f"{self.where()}padding: got {self.padding!r} with pooling {self.pooling!r} and max_len "
                f"{self.max_len}, expected pooling 'none' and a max_len"
            )

    @property
    def is_pooled(self) -> bool:
        """Whether a sample has one vector, not one per id."""
        return self.pooling != "none"


def check_specs(tables: Sequence[Table], features: Sequence[Feature]) -> None:
    """Raise `SpecError` unless names are unique, every feature has its table and every table a feature."""
    if not features:
        raise SpecError("features: got none, expected at least one")
    known = [t.name for t in tables]
    check_unique("table", known, SpecError)
    check_unique("feature", [f.name for f in features], SpecError)
    for feature in features:
        check_known(f"feature '{feature.name}': table", feature.table, known, SpecError)
    if unused := [name for name in known if not any(f.table == name for f in features)]:
        raise SpecError(
            f"table '{unused[0]}': got no feature, expected at least one. Remove the table, or add a Feature(…, "
            f"table='{unused[0]}')"
        )
