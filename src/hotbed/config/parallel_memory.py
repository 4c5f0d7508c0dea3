"""Define the options on ranks, memories and hot rows; nearly all of them change where bytes are stored, not results.

Each option is stated once, here: `hotbed.distribute` takes `ParallelOptions` and `MemoryOptions`, which the recipe's
sections ``parallel`` and ``memory`` extend, so that it can be given these whole.
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
Reader = Literal["each", "first", "owners"]
Layout = Literal["groups", "replicas"]
Codec = Literal["fp32", "bf16", "fp16", "int8", "fp8"]
CachePolicy = Literal["lru", "lfu"]
CacheTier = Literal["device", "host"]
HostRows = Literal["records", "uva"]
Batches = Literal["mixed", "alternating", "split"]


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Section, error=SpecError):
    """How the ranks of a process group share a model, for `hotbed.distribute`.

    Raises
    ------
    SpecError
        If a value is not one of an option's choices, or out of its range.
    """

    dense: DensePart = "ddp"
    """``ddp``: every process has all dense parameters; ``fsdp``: they are sharded (FSDP2), summed in another order."""
    forward_codec: Codec = "fp32"
    """How rows cross the wire; all but fp32 round them, which changes results by at most the stated error."""
    backward_codec: Codec = "fp32"
    """How gradients of rows cross the wire; all but fp32 round them."""
    per_shard_statistics: bool = False
    """Let row-wise optimizers see the columns of each tile by themselves, where rows are cut into columns: saves an
    exchange per step and changes results."""
    ranks_per_node: Count | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """Exchange in two hops, inside nodes of so many processes and then between nodes: fewer and larger messages; it
    does not change results. Rows go among the processes of a group, of which so many follow each other on a node;
    gradients of dense parameters among all processes."""
    replicas: Count = 1
    """Groups of processes that hold a copy of all tables each; the plan is for the processes of one. Copies are
    averaged, which changes results, unless ``exact`` is set."""
    sync_every: Count = 1
    """Steps between averages of copies; they are also averaged for evaluations and checkpoints."""
    layout: Layout = "groups"
    """What neighbouring processes, as on a host, are: of one of the ``groups``, or ``replicas`` of the same tiles."""
    exact: bool = False
    """Update every copy by the gradients of all samples instead: results of one group, for more bytes every step."""


@dataclass(frozen=True, kw_only=True)
class _PlanChoice:
    plan: str | dict[str, Any] = field(default="table", metadata=MAY_DIFFER_ON_RESUME)
    """Sharding scheme of the tables, such as row (an unknown name is answered with all), ``auto``: the plan that is
    found to be fastest; or schemes by table name or pattern (``{users: row, "*": auto}``; a scheme may be given by the
    fields of a `hotbed.Cut`); or a JSON or YAML file with a plan, or with schemes by table."""
    hardware: str | None = None
    """For plan ``auto``: the machine, a built-in profile's name or a file of hotbed doctor --measure; by default what
    this one seems to be."""


@dataclass(frozen=True, kw_only=True)
class ParallelRecipe(ParallelOptions, _PlanChoice, where="parallel."):  # keys in the order of bases from the right
    """How the model is distributed where several processes train it (``torchrun -m hotbed train …``)."""

    overlap: bool = field(default=True, metadata=MAY_DIFFER_ON_RESUME)
    """Exchange the ids of the next batch while one is computed; it does not change results."""
    reader: Reader = field(default="each", metadata=MAY_DIFFER_ON_RESUME)
    """``each`` process reads its samples; or the ``first`` one reads all and sends the others theirs; or ``owners``
    read the features whose tables they own, of all samples; no ids are exchanged, and no table may be cut into rows."""
    timeout_s: Annotated[int, Range(least=1, most=365 * 24 * 3600, note=" (a year)")] = field(
        default=600, metadata=MAY_DIFFER_ON_RESUME
    )
    """Seconds after which an exchange between processes fails."""

    @override
    def contradictions(self) -> Iterator[str]:
        if self.replicas > 1 and self.reader == "owners":
            yield (
                f"parallel.reader is 'owners' and parallel.replicas is {self.replicas}, but owners read for one group "
                "only; use reader 'each' or 'first', or replicas 1"
            )
        if not self.plan:
            yield "parallel.plan is empty; give a scheme like table or row, or a plan's file"


@dataclass(frozen=True, kw_only=True)
class MemoryOptions(Section, error=SpecError):
    """How rows are kept that a plan places in the host's memory or on disk, for `hotbed.distribute`.

    Raises
    ------
    SpecError
        If a value is not one of an option's choices, or out of its range.
    """

    cache_policy: CachePolicy = "lru"
    """Which rows the cache gives up: the least recently or the least often used ones (``lfu``)."""
    cache_tier: CacheTier = "device"
    """Where the cache is: in the compute device's memory, or in the ``host``'s."""
    host: HostRows = "records"
    """How rows are in the host's memory: ``records`` are materialized on their first update, and are brought to the
    device batch by batch; with ``uva`` all rows are there at once, in page-locked memory that a GPU reads and writes in
    place, without a cache."""
    directory: str | None = None
    """Where files are made for tier ``disk``, which end with the process; by default that of temporary files."""

    @override
    def contradictions(self) -> Iterator[str]:
        if self.directory is not None and "://" in self.directory:
            yield f"{self._where}directory is {self.directory}, must be a local path: rows are read from a disk"


@dataclass(frozen=True, kw_only=True)
class _TierChoice:
    tier: Tier = "device"
    """Where rows are that no budget holds: in the compute device's memory, all at once; or in the ``host``'s memory or
    on ``disk``, where a row is materialized on its first update."""
    device_bytes: Size = 0
    """With another tier: bytes of the device's memory, per process, for the rows with the most accesses per byte. Rows
    have to be numbered by falling popularity, as hotbed prepare does."""
    host_bytes: Size = 0
    """With tier ``disk``: the same of the host's memory, for the rows that follow."""
    skew: str | None = None
    """``skew.json`` of hotbed inspect --skew: by these counts rows are shared out to the budgets; without it by Zipf's
    law with exponent 1.05, the same for all tables."""
    cache_rows: Size = 0
    """With another tier: rows, per process, of a cache for those that are used."""


@dataclass(frozen=True, kw_only=True)
class MemoryRecipe(MemoryOptions, _TierChoice, where="memory."):
    """In which memory the rows of tables are; it does not change results."""

    @override
    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        for name in ("device_bytes", "host_bytes", "cache_rows"):
            if getattr(self, name) and self.tier == "device":
                yield f"memory.{name} is set, but memory.tier is 'device'; set it to 'host' or 'disk'"
        if self.skew is not None and not (self.device_bytes or self.host_bytes):
            yield "memory.skew is set, but no budget is; set memory.device_bytes or memory.host_bytes"
        if self.host_bytes and self.tier != "disk":
            yield f"memory.host_bytes is set, but memory.tier is '{self.tier}'; set it to 'disk'"
        if self.host == "uva" and self.tier == "host" and self.cache_rows:
            yield (
                f"memory.cache_rows is {self.cache_rows:,}, but memory.host is 'uva', whose rows a GPU reads in place; "
                "set it to 'records', or cache_rows to 0"
            )

    @property
    def cached_tiers(self) -> tuple[Tier, ...]:
        """Memories whose rows may have a cache before them."""
        in_place = {"device", "host"} if self.host == "uva" else {"device"}
        return tuple(tier for tier in get_args(Tier) if tier not in in_place)


@dataclass(frozen=True, kw_only=True)
class HotRecipe(Section, where="hot."):
    """Rows that most inputs need, and in which order inputs come that need no others (``hotbed pack``)."""

    rows: str | None = field(default=None, metadata=MAY_DIFFER_ON_RESUME)
    """``hot_rows.json`` of hotbed pack: these rows are in the memory of every process's device, the others where
    parallel.plan and memory.tier say; it does not change results."""
    batches: Batches = "mixed"
    """``alternating``: pure hot and pure cold batches take turns, of the splits that hotbed pack has made of the train
    split; this is another order of the same samples. ``split``: the samples of each batch that need hot rows only are
    computed while the rows of its others are fetched; gradients add up to the batch's, in another order of summands."""
    rate: Count = 50
    """With ``alternating``: percent of the cold batches, and then of the hot ones, before the first evaluation."""
    floor: Count = 1
    """The least rate. It is halved when the loss of an evaluation is above the one before."""
    cap: Annotated[int, Range(least=1, most=100, note=" percent")] = 50
    """The largest rate."""
    patience: Count = 4
    """The rate is doubled when the loss has fallen so many times in a row."""

    @override
    def contradictions(self) -> Iterator[str]:
        if self.rate < self.floor:
            yield f"hot.rate: got {self.rate}, expected at least {self.floor} (hot.floor)"
        if self.cap < self.rate:
            yield f"hot.cap: got {self.cap}, expected at least {self.rate} (hot.rate)"
        if self.rows == "":
            yield "hot.rows is empty; give the hot_rows.json that hotbed pack has written"
        if self.batches == "split" and self.rows is None:
            yield (
                "hot.batches is 'split', but nothing says which rows are hot; set hot.rows to the hot_rows.json of "
                "hotbed pack"
            )
