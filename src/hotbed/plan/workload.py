"""Describe the work of a training step: samples, lookups of tables, and the dense part of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hotbed.checks import Count, NotNegative, Section, check, check_known
from hotbed.config.parallel_memory import Codec, Layout
from hotbed.errors import PlanError
from hotbed.optim import Moment
from hotbed.plan.hit_rates import ExpectedRows, Popularity, Scaled, Zipf
from hotbed.plan.tiling import Tier, WireFormat
from hotbed.specs import Table


@dataclass(frozen=True, kw_only=True)
class TableUse:
    """A table, and its lookups in a step."""

    table: Table
    ids: float = 1.0
    """Mean number of ids per sample."""
    bags: float = 1.0
    """Number of features that use the table, for the wire format ``"pooled"``."""
    moments: tuple[Moment, ...] = ()
    """Moments of the optimizer."""
    popularity: Popularity | None = None
    """Popularity of its rows (default: Zipf's law with exponent 1.05)."""

    def __post_init__(self) -> None:
        check(f"ids of table '{self.table.name}' per sample", self.ids, NotNegative, PlanError)

    @property
    def row_sums(self) -> int:
        """Number of sums over the columns of a row in an update: one per moment that is a scalar per row."""
        return sum(moment.per == "row" for moment in self.moments)

    @cached_property
    def per_sample(self) -> Popularity:
        """Popularity of its rows, scaled to a sum of `ids` accesses per sample."""
        if self.popularity is None:
            return Zipf(self.table.rows, ids=self.ids)
        total = self.popularity.accesses(self.table.rows)
        return Scaled(self.popularity, self.ids / total if total > 0 else 0.0)

    @cached_property
    def expected(self) -> ExpectedRows:
        """Expected numbers of distinct rows."""
        return ExpectedRows(self.table.rows, self.popularity or Zipf(self.table.rows))


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A kernel of the dense part. Its time is the longer of computing and moving bytes, which overlap."""

    part: str
    """Group in reports of a step, e.g. products or activations."""
    op: str
    """Name of the PyTorch operation or kernel."""
    flops: float = 0.0
    """Floating-point operations of matrix products, per sample."""
    sample_bytes: float = 0.0
    """Bytes read and written, per sample."""
    step_bytes: float = 0.0
    """Bytes read and written per step, independent of the batch, e.g. weights."""

    def nbytes(self, samples: float) -> float:
        """Return the bytes read and written for a number of samples."""
        return self.sample_bytes * samples + self.step_bytes


@dataclass(frozen=True, kw_only=True)
class DenseWork:
    """The part of a model without tables."""

    parameters: int = 0
    flops: float = 0.0
    """Floating-point operations of a forward pass, per sample. A backward pass has twice this number."""
    dtype: str = "fp32"
    """Dtype of its products: fp32, tf32, bf16 or fp16."""
    layers: int = 0
    """Number of layers with products, each with a measured overhead."""
    activation_bytes: float = 0.0
    """Device memory that a step keeps for backward, per sample."""
    moved_bytes: float = 0.0
    """Bytes of activations read and written in forward and backward, per sample."""
    launches: int = 0
    """Number of kernels that are shorter than their launch. Their launches add to products and bytes."""
    kernels: tuple[Kernel, ...] = ()
    """Known kernels, used instead of ``flops`` and ``moved_bytes``."""
    input_bytes: float = 0.0
    """Bytes copied to the device, per sample."""


@dataclass(frozen=True, kw_only=True)
class Workload(Section, error=PlanError):
    """The work of a training step, independent of the plan."""

    uses: tuple[TableUse, ...]
    batch_size: Count = 1
    """Samples per step over all ranks of all replicas."""
    replicas: Count = 1
    sync_every: Count = 1
    """Number of steps between two averages of replicas."""
    layout: Layout = "groups"
    """Relation of neighbouring ranks: one of the ``groups``, or ``replicas`` of the same tiles."""
    ranks_per_node: Count | None = None
    """Ranks of the first hop of two-hop exchanges. None means one hop."""
    forward_codec: Codec = "fp32"
    backward_codec: Codec = "fp32"
    wire: Mapping[str, WireFormat] = field(default_factory=dict[str, WireFormat])
    """Given wire formats by table. The search chooses the wire formats of all other tables."""
    fused_pooling: bool = False
    """Whether ranks pool rows and sum gradients for the wire format ``"pooled"`` in single kernels that the host does
    not wait for. hotbed needs several, but some other libraries do not."""
    dense: DenseWork = DenseWork()
    arena_launches: Mapping[Tier, int] = field(default_factory=dict[Tier, int])
    """Kernel launches per step and arena by memory (default: `hotbed.plan.cost.LAUNCHES`)."""

    @cached_property
    def by_table(self) -> dict[str, TableUse]:
        """Uses by table name."""
        return {use.table.name: use for use in self.uses}

    @classmethod
    def of(
        cls,
        tables: Iterable[Table],
        *,
        ids: Mapping[str, float] | None = None,
        bags: Mapping[str, float] | None = None,
        moments: Sequence[Moment] | Mapping[str, Sequence[Moment]] = (),
        popularity: Mapping[str, Popularity] | None = None,
        wire: Mapping[str, WireFormat] | None = None,
        **options: object,
    ) -> Workload:
        """Build a workload from tables, and known properties by table name."""
        known = {t.name: t for t in tables}
        by_table = moments if isinstance(moments, Mapping) else dict.fromkeys(known, moments)
        given = {"ids": ids, "bags": bags, "moments": by_table, "popularity": popularity, "wire": wire}
        for what, named in given.items():
            for name in named or ():
                check_known(f"table in {what}", name, known, PlanError)
        for name, form in (wire or {}).items():
            check(f"wire of table '{name}'", form, WireFormat, PlanError)
        uses = tuple(
            TableUse(
                table=table,
                ids=(ids or {}).get(name, 1.0),
                bags=(bags or {}).get(name, 1.0),
                moments=tuple(by_table.get(name, ())),
                popularity=(popularity or {}).get(name),
            )
            for name, table in known.items()
        )
        return cls(uses=uses, wire=dict(wire or {}), **options)  # pyright: ignore[reportArgumentType]
