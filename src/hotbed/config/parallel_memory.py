"""Define the options for ranks, memory tiers and hot rows. Most of them change where bytes are stored, not results.

`hotbed.distribute` accepts `ParallelOptions` and `MemoryOptions`. The recipe's sections ``parallel`` and ``memory``
extend these classes, so that they can be passed to it without a conversion.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from typing_extensions import override

from hotbed.checks import MAY_DIFFER_ON_RESUME, Count, Range, Section, Size
from hotbed.errors import SpecError
from hotbed.specs import Tier

DensePart = Literal["ddp", "fsdp"]
Reader = Literal["each", "first"]
Layout = Literal["groups", "replicas"]
Codec = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
CachePolicy = Literal["lru", "lfu"]
CacheTier = Literal["device", "host"]
HostRows = Literal["records", "uva"]
Batches = Literal["mixed", "alternating", "split"]


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Section, error=SpecError):
    """Options of `hotbed.distribute` for sharing a model between the ranks of a process group.

    Raises
    ------
    SpecError
        If a value is not one of an option's choices, or out of its range.
    """

    dense: DensePart = "ddp"
    """``ddp``: every process has all dense parameters. ``fsdp``: they are sharded (FSDP2), which sums gradients in
    another order."""
    forward_codec: Codec = "fp32"
    """Encoding of rows between ranks. All but fp32 round rows, which changes results by at most the stated error."""
    backward_codec: Codec = "fp32"
    """Encoding of gradients of rows between ranks. All but fp32 round gradients."""
    per_shard_statistics: bool = False
    """In row-wise optimizers, compute statistics per column shard instead of per row. This saves an exchange per step
    and changes results."""
    ranks_per_node: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Number of consecutive processes on a node. If set, exchanges of rows have two hops, within nodes and then between
    nodes, so that there are fewer and larger transfers. Without codecs, if the number and the number of processes are
    powers of two, a row and the sum of its gradients cross the network once per node. Gradients of dense parameters are
    summed within nodes first, with this number or without it if it is 4 or 8. Results do not change."""
    virtual_ranks: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Number of slices of each batch, a power of two, e.g. 32 for up to 32 processes. Each process computes a block of
    slices. Their gradients are summed along a binary tree, so results do not depend on the number of processes. The
    default in a recipe is the number of processes, rounded up to a power of two; a resumed run keeps the number of its
    checkpoint. In your own training loop, each process is one slice."""
    replicas: Count = 1
    """Number of groups of processes. Each group holds a copy of all tables, and the plan is for the processes of one
    group. Copies are averaged, which changes results, unless ``exact`` is set."""
    sync_every: Count = 1
    """Steps between averages of copies. Copies are also averaged for evaluations and checkpoints."""
    layout: Layout = "groups"
    """Assignment of consecutive processes, e.g. of one host: to the same group (``groups``), or to different groups as
    copies of the same tiles (``replicas``)."""
    exact: bool = False
    """Update every copy with the gradients of all samples, instead of averaging copies. Results are the same as with
    one group, but every step transfers more bytes."""


@dataclass(frozen=True, kw_only=True)
class _PlanChoice:
    plan: str | dict[str, Any] = field(default="table", metadata=MAY_DIFFER_ON_RESUME)
    """Sharding scheme of the tables, e.g. ``row``, or ``auto`` for the fastest plan that is found. Alternatively,
    schemes by table name or pattern, e.g. ``{users: row, "*": auto}``, where a scheme may also be the fields of a
    `hotbed.Cut`; or a JSON or YAML file with a plan or with schemes by table. The error about an unknown scheme lists
    all schemes."""
    hardware: str | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Machine for plan ``auto``: the name of a built-in profile, or a file of hotbed doctor --measure. The default is
    a guess of this machine's profile."""


@dataclass(frozen=True, kw_only=True)
class ParallelRecipe(ParallelOptions, _PlanChoice, where="parallel."):  # keys in the order of bases from the right
    """Distribution of the model when several processes train it (``torchrun -m hotbed train …``)."""

    overlap: bool = field(default=True, metadata=MAY_DIFFER_ON_RESUME)
    """Exchange the ids of the next batch while the current one is computed. Results do not change."""
    reader: Reader = field(default="each", metadata=MAY_DIFFER_ON_RESUME)
    """``each``: every process reads its own samples. ``first``: the first process reads all samples and sends each
    other process its share."""
    timeout_s: Annotated[int, Range(least=1, most=365 * 24 * 3600, note=" (a year)")] = field(
        default=600, metadata=MAY_DIFFER_ON_RESUME
    )
    """Seconds after which an exchange between processes fails."""

    @override
    def contradictions(self) -> Iterator[str]:
        if not self.plan:
            yield "parallel.plan is empty. Pass a scheme like table or row, or the file of a plan"


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Section, error=SpecError):
    """Options of `hotbed.distribute` for rows that a plan puts into the host's memory or on disk.

    Raises
    ------
    SpecError
        If a value is not one of an option's choices, or out of its range.
    """

    cache_policy: CachePolicy = "lru"
    """Rows that the cache evicts first: the least recently used (``lru``) or the least frequently used (``lfu``)."""
    cache_tier: CacheTier = "device"
    """Memory of the cache: the compute device's (``device``) or the host's (``host``)."""
    host: HostRows = "records"
    """Storage of rows in the host's memory. ``records`` are materialized on their first update and copied to the device
    for each batch. With ``uva``, all rows are allocated at once in page-locked memory, which a GPU reads and writes in
    place without a cache."""
    directory: str | None = None
    """Directory of the files of tier ``disk``, which are removed when the process ends. The default is the directory
    of temporary files."""

    @override
    def contradictions(self) -> Iterator[str]:
        if self.directory is not None and "://" in self.directory:
            yield f"{self._where}directory: got {self.directory}, expected a local path, because rows are read often"


@dataclass(frozen=True, kw_only=True)
class _TierChoice:
    tier: Tier = "device"
    """Memory of the rows that fit in no budget. ``device`` is the compute device's memory, which holds all rows at
    once. In the ``host``'s memory and on ``disk``, a row is materialized on its first update."""
    device_bytes: Size = 0
    """With tier ``host`` or ``disk``: bytes of the device's memory, per process, for the rows with the most accesses
    per byte. Rows must be numbered by descending popularity, as hotbed prepare does."""
    host_bytes: Size = 0
    """With tier ``disk``: bytes of the host's memory, per process, for the next most accessed rows."""
    skew: str | None = None
    """``skew.json`` of hotbed inspect --skew: access counts for the assignment of rows to the budgets. The default is
    Zipf's law with exponent 1.05 for all tables."""
    cache_rows: Size = 0
    """With tier ``host`` or ``disk``: rows, per process, of a cache."""


@dataclass(frozen=True, kw_only=True)
class MemoryRecipe(MemoryOptions, _TierChoice, where="memory."):
    """Memory of the rows of tables. Results do not change."""

    @override
    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for name in ("device_bytes", "host_bytes", "cache_rows"):
            if getattr(self, name) and self.tier == "device":
                yield f"memory.{name} is set, but memory.tier is 'device'. Set memory.tier to 'host' or 'disk'"
        if self.skew is not None and not (self.device_bytes or self.host_bytes):
            yield "memory.skew is set without a budget. Set memory.device_bytes or memory.host_bytes"
        if self.host_bytes and self.tier != "disk":
            yield f"memory.host_bytes is set, but memory.tier is '{self.tier}'. Set memory.tier to 'disk'"
        if self.host == "uva" and self.tier == "host" and self.cache_rows:
            yield (
                f"memory.cache_rows: got {self.cache_rows:,}, expected 0, because a GPU reads the rows of memory.host "
                "'uva' in place. Set memory.host to 'records', or memory.cache_rows to 0"
            )

    @property
    def cached_tiers(self) -> tuple[Tier, ...]:
        """Tiers that may have a cache."""
        in_place = {"device", "host"} if self.host == "uva" else {"device"}
        return tuple(tier for tier in get_args(Tier) if tier not in in_place)


@dataclass(frozen=True, kw_only=True)
class HotRecipe(Section, where="hot."):
    """Hot rows, which most samples use, and the order of samples that use only hot rows (``hotbed pack``)."""

    rows: str | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """``hot_rows.json`` of hotbed pack. Every process's device holds these rows; parallel.plan and memory.tier apply to
    all other rows. Results do not change."""
    batches: Batches = "mixed"
    """``alternating``: batches of only hot and only cold samples alternate, from the splits that hotbed pack has
    written. The samples are the same in another order. ``split``: the samples of a batch that use only hot rows are
    computed while the rows of its other samples are fetched. The gradients are the same, summed in another order."""
    rate: Count = 50
    """With ``alternating``: percentage of the cold batches, and then of the hot batches, before the first
    evaluation."""
    floor: Count = 1
    """Least rate. The rate is halved when the loss of an evaluation is higher than the previous loss."""
    cap: Annotated[int, Range(least=1, most=100, note=" percent")] = 50
    """Largest rate."""
    patience: Count = 4
    """Number of consecutive evaluations with a lower loss after which the rate is doubled."""

    @override
    def contradictions(self) -> Iterator[str]:
        if self.rate < self.floor:
            yield f"hot.rate: got {self.rate}, expected at least {self.floor} (hot.floor)"
        if self.cap < self.rate:
            yield f"hot.cap: got {self.cap}, expected at least {self.rate} (hot.rate)"
        if self.rows == "":
            yield "hot.rows is empty. Pass the hot_rows.json that hotbed pack has written"
        if self.batches == "split" and self.rows is None:
            yield "hot.batches is 'split', but hot.rows is not set. Set it to the hot_rows.json of hotbed pack"
