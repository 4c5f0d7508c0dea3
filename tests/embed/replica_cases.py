"""Cases: a collection that several replicas train, in processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import hotbed as hb
from hotbed import optim
from hotbed.embed import EmbeddingCollection
from hotbed.embed import replicas as embed_replicas
from hotbed.jagged import Jagged
from hotbed.plan import Cut
from hotbed.specs import Feature, Table

TABLES = (
    Table("big", rows=90, dim=32),
    Table("items", rows=40, dim=32),
    Table("words", rows=30, dim=20),
)
FEATURES = (
    Feature("big", table="big"),
    Feature("bag", table="items"),
    Feature("mean", table="items", pooling="mean"),
    Feature("sequence", table="big", pooling="none"),
    Feature("words", table="words"),
)
NEVER = range(70, 90)
"""Rows of ``big`` that no batch has."""
SAMPLES = 5
"""Per rank."""


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    ``same`` feeds every group the same samples. ``message`` makes replicas say so which rows they touched.
    """

    scheme: str | Cut = "row"
    replicas: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "RowWiseAdagrad"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.05
    steps: int = 3
    dtype: str = "fp32"
    same: bool = False
    message: replicas.ListFormat | None = None
    pooled: bool = False
    infinite: int | None = None


class Model(nn.Module):
    """Nothing but tables, so that all bits that differ are theirs."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection([replace(t, dtype=dtype) for t in TABLES], FEATURES, seed=3)

    def forward(self, ids: Jagged, target: float) -> Tensor:
        """Mean over the samples of a loss in which every vector matters."""
        e = self.embeddings(ids)
        total = sum((((e[f] - target) * (1 + i)) ** 2).sum() for i, f in enumerate(("big", "bag", "mean", "words")))
        sequence = e["sequence"].values()
        return (total + (sequence * torch.linspace(-1, 1, 32)).sum()) / SAMPLES


def batch(step: int, number: int) -> Jagged:
    """Samples of a rank; few ids are popular, so that they meet across ranks."""
    draw = torch.Generator().manual_seed(1000 * step + number)

    def ids(rows: int, *shape: int) -> Tensor:
        return (torch.rand(*shape, generator=draw) ** 3 * rows).long()

    return Jagged.from_dict(
        {
            "big": ids(NEVER.start, SAMPLES),
            "bag": ids(40, SAMPLES, 2),
            "mean": ids(40, SAMPLES, 3),
            "sequence": ids(NEVER.start, SAMPLES, 2),
            "words": ids(30, SAMPLES),
        }
    )


def state(model: nn.Module, optimizer: optim.SparseOptimizer) -> dict[str, Tensor]:
    """Rows and moments of this rank's group; what cannot be pickled as bytes."""
    collection: EmbeddingCollection = model.embeddings
    found: dict[str, Tensor] = {}
    for table in collection.tables:
        found |= {f"{table}.{n}": t for n, t in collection._group_of(table).raw(table).items()}
        found |= {f"{table}.{n}": m for n, m in optimizer._updaters["embeddings"].state(table).items()}
    return {name: t.view(torch.uint8) if t.dtype == torch.float8_e4m3fn else t.clone() for name, t in found.items()}


def made(group: dist.ProcessGroup | None, job: Job) -> tuple[Any, optim.SparseOptimizer]:
    """The model and its optimizer."""
    logging.getLogger("hotbed").setLevel(logging.ERROR)
    model: Any = Model(job.dtype)
    if group is not None:
        scheme: Any = job.scheme
        if job.pooled:
            size = dist.get_world_size(group) // job.replicas
            scheme = hb.make_plan(list(model.embeddings.tables.values()), size, job.scheme, wire="pooled")
        options = hb.ParallelOptions(replicas=job.replicas, **job.options)
        model = hb.distribute(model, scheme, options, group=group)
    optimizer = getattr(optim, job.optimizer)(model, **{"lr": job.lr, **job.optimizer_options})
    return model, optimizer


def trained(group: dist.ProcessGroup | None, job: Job) -> dict[str, Any]:
    """What this rank's group has, what it sent to other replicas, and where in the mesh the rank is."""
    model, optimizer = made(group, job)
    rank = 0 if group is None else dist.get_rank(group)
    replicas = None if group is None else model.wire.replicas
    place = (0, rank) if replicas is None else (replicas.link.rank, replicas.shards.rank)
    chosen = embed_replicas.choose_list_format
    if job.message is not None:
        embed_replicas.choose_list_format = lambda *_: job.message
    try:
        for step in range(job.steps):
            loss = model(batch(step, place[1] if job.same else rank), 0.1 * step)
            optimizer.zero_grad()
            if job.infinite == rank:
                loss = loss * torch.inf
            loss.backward()
            optimizer.step()
        found = state(model, optimizer)
    finally:
        embed_replicas.choose_list_format = chosen
    return {**found, "place": place, "sent": 0 if replicas is None else replicas.sync_bytes}


def all_trained(group: dist.ProcessGroup | None, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """`trained` of several jobs, one after the other."""
    return [trained(group, job) for job in jobs]


def scaled_step(group: dist.ProcessGroup, infinite: int | None) -> tuple[bool, int]:
    """Whether the tables are untouched after a step under a scaler, and how many steps they count."""
    model, optimizer = made(group, Job(replicas=2))
    before = model.embeddings.weight("items")
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    loss = model(batch(0, group.rank()), 0.0)
    scaler.scale(loss * torch.inf if infinite == group.rank() else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    steps = int(optimizer.state_dict()["state"][0]["step"])
    return torch.equal(model.embeddings.weight("items"), before), steps
