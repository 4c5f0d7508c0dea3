"""Say what a training step asks for: samples, lookups of tables, and the part of a model without tables."""

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
    """A table, and what a step asks of it."""

    table: Table
    ids: float = 1.0
    """Mean ids per sample."""
    bags: float = 1.0
    """Features that look it up; for the wire format ``"pooled"``."""
    moments: tuple[Moment, ...] = ()
    """What the optimizer keeps beside its rows."""
    popularity: Popularity | None = None
    """Of its rows; Zipf's law with exponent 1.05 where it is not known."""

    def __post_init__(self) -> None:
        check(f"ids of table '{self.table.name}' per sample", self.ids, NotNegative, PlanError)

    @property
    def row_sums(self) -> int:
        """How often its rule sums over the columns of a row: once for each moment that a row has one of."""
        return sum(moment.per == "row" for moment in self.moments)

    @cached_property
    def per_sample(self) -> Popularity:
        """Popularity of its rows, with as many accesses per sample in all as there are `ids`."""
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
    """A kernel of the part of a model without tables: it computes and moves at once, so it takes the longer of both."""

    part: str
    """What it belongs to, as steps are shown: products, activations, …"""
    op: str
    """The operation of PyTorch, or the kernel's own name."""
    flops: float = 0.0
    """Floating-point operations per sample, of matrix products."""
    sample_bytes: float = 0.0
    """What it reads and writes, per sample."""
    step_bytes: float = 0.0
    """The same, whatever the batch: weights."""

    def nbytes(self, samples: float) -> float:
        """Bytes that it reads and writes for so many samples."""
        return self.sample_bytes * samples + self.step_bytes


@dataclass(frozen=True, kw_only=True)
class DenseWork:
    """The part of a model without tables; figures are of one sample where they say so."""

    parameters: int = 0
    flops: float = 0.0
    """Floating-point operations of a forward pass, per sample; a backward pass has twice as many."""
    dtype: str = "fp32"
    """What its products are computed in: fp32, tf32, bf16, fp16."""
    layers: int = 0
    """Layers with products; what a layer costs beside its operations, where that was measured."""
    activation_bytes: float = 0.0
    """What a step keeps in the device's memory for backward, per sample."""
    moved_bytes: float = 0.0
    """What layers read and write of activations, per sample, in the forward and the backward pass."""
    launches: int = 0
    """Kernels of a step that take less than their launch, one after the other; they add to products and bytes."""
    kernels: tuple[Kernel, ...] = ()
    """Where they are known one by one, in the place of ``flops`` and ``moved_bytes``."""
    input_bytes: float = 0.0
    """What is copied to the device, per sample."""


@dataclass(frozen=True, kw_only=True)
class Workload(Section, error=PlanError):
    """What a training step does, wherever rows are."""

    uses: tuple[TableUse, ...]
    batch_size: Count = 1
    """Samples of a step, over all ranks of all replicas."""
    replicas: Count = 1
    sync_every: Count = 1
    """Steps between averages of replicas."""
    layout: Layout = "groups"
    """What neighbouring ranks, as on a node, are: of one of the ``groups``, or ``replicas`` of the same tiles."""
    ranks_per_node: Count | None = None
    """Ranks of the first of two hops in which rows, ids and gradients are exchanged; None: one hop."""
    forward_codec: Codec = "fp32"
    backward_codec: Codec = "fp32"
    wire: Mapping[str, WireFormat] = field(default_factory=dict[str, WireFormat])
    dense: DenseWork = DenseWork()
    arena_launches: Mapping[Tier, int] = field(default_factory=dict[Tier, int])
    """Launches of a step for each arena whose rows are in this memory; `hotbed.plan.cost.LAUNCHES` where not given."""

    @cached_property
    def by_table(self) -> dict[str, TableUse]:
        """Uses by the table's name."""
        return {use.table.name: use for use in self.uses}

    @classmethod
    def of(
        cls,
        tables: Iterable[Table],
        *,
        ids: Mapping[str, float] | None = None,
        moments: Sequence[Moment] | Mapping[str, Sequence[Moment]] = (),
        popularity: Mapping[str, Popularity] | None = None,
        **options: object,
    ) -> Workload:
        """Make it of tables; what is known of each is given by name."""
        known = {t.name: t for t in tables}
        by_table = moments if isinstance(moments, Mapping) else dict.fromkeys(known, moments)
        for what, named in (("ids", ids), ("moments", by_table), ("popularity", popularity)):
            for name in named or ():
                check_known(f"table in {what}", name, known, PlanError)
        uses = tuple(
            TableUse(
                table=table,
                ids=(ids or {}).get(name, 1.0),
                moments=tuple(by_table.get(name, ())),
                popularity=(popularity or {}).get(name),
            )
            for name, table in known.items()
        )
        return cls(uses=uses, **options)  # pyright: ignore[reportArgumentType]
