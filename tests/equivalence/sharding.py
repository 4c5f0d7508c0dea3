"""Cases: a small model trained under a plan, in processes: what every rank ends with, as bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from hotbed import optim
from hotbed.comm import Link
from hotbed.comm.hierarchical import NodeLink
from hotbed.config.parallel_memory import ParallelOptions
from hotbed.embed import EmbeddingCollection
from hotbed.embed.pooled_exchange import Wire
from hotbed.jagged import Jagged
from hotbed.plan import Plan
from hotbed.specs import Feature, Table
from tests.ranks import TIMEOUT_S

TABLES = (
    Table("big", rows=90, dim=48),
    Table("small", rows=3, dim=48),
    Table("items", rows=40, dim=48, fp32_rows=5, dtype="bf16"),
    Table("words", rows=30, dim=20),
)
FEATURES = (
    Feature("big", table="big"),
    Feature("small", table="small"),
    Feature("bag", table="items"),
    Feature("mean", table="items", pooling="mean"),
    Feature("sequence", table="big", pooling="none"),
    Feature("words", table="words", pooling="mean"),
)


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    ``plan`` None trains without distribution; then the batches of all ``world_size`` ranks follow each other.
    """

    plan: Plan | None
    steps: int = 4
    optimizer: str = "Adagrad"
    options: Mapping[str, object] = field(default_factory=dict)
    kind: str = "fixed"
    world_size: int = 4
    wire: Mapping[str, object] = field(default_factory=dict)
    backend: str = "auto"
    tables: Sequence[Table] = TABLES
    ranks_per_node: int | None = None
    combines_rows: bool = False


SIZES = {"fixed": (5, 5, 5, 5), "ragged": (6, 6, 6, 6), "weighted": (4, 4, 4, 4), "empty": (7, 0, 3, 0)}


def batch(job: Job, step: int, rank: int) -> Jagged:
    """What a rank sees; few ids are popular, so that they meet across ranks, and bags may be empty."""
    size = SIZES[job.kind][rank]
    draw = torch.Generator().manual_seed(1000 * step + rank)

    def ids(rows: int, *shape: int) -> torch.Tensor:
        return (torch.rand(*shape, generator=draw) ** 3 * rows).long()

    def bags(rows: int) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if job.kind == "fixed":
            return ids(rows, size, 2)
        lengths = torch.randint(0, 5, (size,), generator=draw)
        offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        return ids(rows, int(offsets[-1])), offsets

    entries = {
        "words": bags(30),
        "big": ids(90, size),
        "small": ids(3, size),
        "bag": bags(40),
        "mean": bags(40),
        "sequence": bags(90),
    }
    if job.kind != "weighted":
        return Jagged.from_dict(entries)
    weights = {
        name: torch.rand(len(e[0] if isinstance(e, tuple) else e.reshape(-1)), generator=draw) + 0.5
        for name, e in entries.items()
    }
    return Jagged.from_dict(entries, weights)


def loss_of(collection: EmbeddingCollection, ids: Jagged, target: float, count: int) -> torch.Tensor:
    """Mean over the global batch of a loss in which every vector matters."""
    e = collection(ids)
    vectors = [e[f.name] for f in collection.features if f.pooling != "none"]
    total = sum((((v - target) * (1 + i)) ** 2).sum() for i, v in enumerate(vectors))
    sequence = e["sequence"].values()
    return (total + (sequence * torch.linspace(-1, 1, sequence.shape[1])).sum()) / count


def trained(group: dist.ProcessGroup | None, job: Job) -> dict[str, torch.Tensor]:
    """Losses, rows and moments after training."""
    rank = 0 if group is None else dist.get_rank(group)
    ranks = range(job.world_size)
    collection = EmbeddingCollection(job.tables, FEATURES, seed=3, backend=job.backend)
    if job.plan is not None:
        link = Link(group, timedelta(seconds=TIMEOUT_S))
        if job.ranks_per_node is not None:
            link = NodeLink(link, job.ranks_per_node, combines_rows=job.combines_rows)
        collection.distribute(job.plan, Wire(link, ParallelOptions(**job.wire)))
    optimizer = getattr(optim, job.optimizer)(collection, **{"lr": 0.05, **job.options})
    losses: list[torch.Tensor] = []
    for step in range(job.steps):
        count = sum(SIZES[job.kind][r] for r in ranks)
        if job.plan is None:
            # Micro-batches, so that sums go rank by rank.
            parts = [loss_of(collection, batch(job, step, r), 0.1 * step, count) for r in ranks]
            loss = torch.stack(parts).sum()
        else:
            loss = loss_of(collection, batch(job, step, rank), 0.1 * step, count) * job.world_size
        losses.append(loss.detach() / (1 if job.plan is None else job.world_size))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = {"losses": torch.stack(losses)}
    for table in collection.tables:
        found[table] = collection.weight(table)
        found |= {f"{table}.{n}": m for n, m in optimizer._updaters[""].state(table).items()}
    return {name: t.clone() for name, t in found.items()}


def all_trained(group: dist.ProcessGroup | None, jobs: Mapping[str, Job]) -> dict[str, dict[str, torch.Tensor]]:
    """`trained` of several jobs, one after the other."""
    return {name: trained(group, job) for name, job in jobs.items()}
