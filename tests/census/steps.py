"""Run training steps of small models on the pretended device, and list what each step asked of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import override

import hotbed as hb
from hotbed.comm import hierarchical
from hotbed.config import Component, ScheduleRecipe, TrainRecipe
from hotbed.config.recipe import CudaGraph
from hotbed.plan.schemes import SCHEMES
from hotbed.train.metrics import check_batch
from hotbed.train.ranks.broadcast import BroadcastLoader
from hotbed.train.runs.build import fuse_optimizer
from hotbed.train.runs.hot_batches import HotSplit
from hotbed.train.step import QueuedStep, TrainingStep
from hotbed.train.trainer import Trainer
from tests.census.device import CUDA
from tests.census.record import RECORD, Event, recorded
from tests.census.streams import MODEL

BATCH, STEPS = 96, 4
LONGEST_HISTORY = 5
"""Places of a padded history."""
AHEAD = 3
"""Batches that are prepared beside a step over several ranks."""
ROWS = (500, 60, 3, 40)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A way to train.

    Attributes
    ----------
    optimizer, dtype
        Of the tables and their rows.
    fp32_rows
        First rows that are float32 whatever the dtype.
    ragged
        Whether a feature has bags of different lengths.
    moving
        Whether learning rates change in every step.
    precision
        Of the dense part.
    where
        Memory of the rows: of the device; of the host, in place (``uva``) or as ``records`` behind a ``cache``.
    ranks, replicas
        Processes that train; copies of the tables among them.
    hops
        In which dense gradients are summed, as if there were more ranks than these.
    node
        Number of ranks of a node, which combines rows.
    cut
        Scheme of the plan over ranks.
    pooled
        Number of first tables whose owners send pooled vectors instead of rows.
    hot_rows
        First rows of each table that are in every rank's device memory, wherever the others are.
    reader
        ``"first"``: one rank reads, and sends the others their samples.
    batches
        ``"split"`` into hot and cold samples; ``"turns"`` of hot and cold batches, the step that is counted a hot one.
    pooling, weighted
        Of the ragged feature, and whether ids have weights.
    history
        Whether the ragged feature is a history, looked up into padded memory and pooled by attention (DIN).
    recompute
        Whether activations are computed again in backward.
    dense_fused
        Whether torch's optimizer may be told on the device to touch nothing, as a recipe's is.
    """

    optimizer: str = "RowWiseAdagrad"
    dtype: Any = "fp32"
    fp32_rows: int = 0
    ragged: bool = False
    moving: bool = False
    precision: Any = "bf16"
    where: str = "device"
    ranks: int = 1
    replicas: int = 1
    hops: tuple[int, ...] = ()
    node: int | None = None
    cut: str = "table"
    pooled: int = 0
    hot_rows: int = 0
    reader: str = ""
    batches: str = ""
    pooling: Any = "sum"
    weighted: bool = False
    history: bool = False
    recompute: bool = False
    dense_fused: bool = True

    @property
    def name(self) -> str:
        """What differs from the usual."""
        parts = [f"{self.optimizer} {self.dtype}" + (f" behind {self.fp32_rows} fp32 rows" if self.fp32_rows else "")]
        parts += ["ragged"] * self.ragged + ["lr moves"] * self.moving
        parts += [self.pooling] * (self.pooling != "sum") + ["weighted"] * self.weighted
        parts += [f"dense {self.precision}"] * (self.precision != "bf16")
        parts += [f"rows: {self.where}"] * (self.where != "device") + [f"{self.ranks} ranks"] * (self.ranks > 1)
        parts += [f"{self.replicas} replicas"] * (self.replicas > 1)
        parts += [f"{len(self.hops)} hops"] * bool(self.hops)
        parts += [f"nodes of {self.node}"] * bool(self.node)
        parts += [f"cut: {self.cut}"] * (self.cut != "table") + [f"hot rows {self.batches}".strip()] * bool(
            self.hot_rows
        )
        parts += [f"{self.pooled} pooled"] * bool(self.pooled)
        parts += ["history"] * self.history + ["recomputed"] * self.recompute
        parts += ["one reader"] * bool(self.reader)
        parts += ["dense optimizer not fused"] * (not self.dense_fused)
        return ", ".join(parts)


@dataclass
class Found:
    """What steps of a case asked for.

    Attributes
    ----------
    case
        Its name.
    launches, allocations
        Of the step after the first ones.
    allocated
        Bytes by place.
    forbidden
        By place, what a CUDA graph of forward, backward and updates could not hold: the host waits, memory of the host
        is copied, or page-locked.
    waits, copies, events
        By place: how often the host waits for all that the device was given, copies that it does not wait for, and how
        often it waits for an event.
    by_place
        Launches by operation and place.
    repeats
        Whether two later steps launched the same kernels, on the same shapes in the same memory, and allocated as much.
    hazards
        What the model of streams objects to.
    losses
        Of all steps.
    exchanges
        Started by this rank in the step, in order.
    kernels
        Launches in order: operation, place, how many kernels, bytes, floating-point operations of products.
    """

    case: str
    launches: int
    allocations: int
    allocated: dict[str, int]
    forbidden: dict[str, int]
    waits: dict[str, int]
    copies: dict[str, int]
    events: dict[str, int]
    by_place: dict[str, int]
    repeats: bool
    hazards: list[str]
    losses: list[float]
    exchanges: list[str] = field(default_factory=list)
    kernels: list[tuple[str, str, int, int, int]] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def model_of(case: Case) -> nn.Module:
    """A small DLRM on the device."""
    dim = 32 if case.cut == "column" else 16  # a table is cut into multiples of 16 columns
    tables = [
        hb.Table(f"t{i}", rows=rows, dim=dim, dtype=case.dtype, fp32_rows=min(case.fp32_rows, rows))
        for i, rows in enumerate(ROWS)
    ]
    poolings = [case.pooling, "sum", "sum", "sum"]
    features = [hb.Feature(f"f{i}", table=t.name, pooling=poolings[i]) for i, t in enumerate(tables)]
    torch.manual_seed(0)
    if case.history:
        features.append(hb.Feature("candidate", table="t0"))
        with CUDA:
            return hb.nn.DIN(
                tables,
                features,
                13,
                histories={"f0": "candidate"},
                max_len=LONGEST_HISTORY,
                attention=(16,),
                top=(32, 1),
                backend="triton",
            )
    with CUDA:
        model = hb.nn.DLRM(tables, features, bottom=(32, dim), top=(32, 32, 1), backend="triton")
    if case.where == "device" and case.ranks == 1:
        return model
    memory = {"device": {}, "uva": {"tier": "host"}, "records": {"tier": "host"}}
    outside = memory.get(case.where, {"tier": "host", "cache_rows": 64})
    cut = replace(SCHEMES[case.cut], hot_rows=case.hot_rows, **outside)
    wire: Any = {table.name: "pooled" for table in tables[: case.pooled]}
    plan = hb.make_plan(tables, case.ranks // case.replicas, cut, wire=wire)
    options = hb.MemoryOptions(host="uva" if case.where == "uva" else "records")
    if case.hops:
        hierarchical.hop_sizes = lambda *_: case.hops
    parallel = hb.ParallelOptions(replicas=case.replicas, ranks_per_node=case.node)
    return hb.distribute(model, plan, parallel, options, device=CUDA)


def batch_of(
    case: Case, step: int, rank: int, *, pinned: bool = True, samples: int = BATCH, longest: int = 3
) -> hb.Batch:
    """A batch in page-locked memory, as a loader gives it; where a case is ragged, of bags of at most ``longest``."""
    draw = torch.Generator().manual_seed(10 * step + rank)
    limits = [min(rows, case.hot_rows) if case.batches == "turns" and step % 2 == 0 else rows for rows in ROWS]
    ids: dict[str, Any] = {
        f"f{i}": torch.randint(0, rows, (samples,), generator=draw, dtype=torch.int32) for i, rows in enumerate(limits)
    }
    if case.ragged:
        lengths = torch.randint(0, longest + 1, (samples,), generator=draw)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids["f0"] = torch.randint(0, limits[0], (int(offsets[-1]),), generator=draw, dtype=torch.int32), offsets
    if case.history:
        ids["candidate"] = torch.randint(0, limits[0], (samples,), generator=draw, dtype=torch.int32)
    weights = {"f0": torch.rand(len(ids["f0"][0]), generator=draw)} if case.weighted else None
    batch = hb.Batch(
        sparse=hb.Jagged.from_dict(ids, weights),
        dense=torch.rand(samples, 13, generator=draw),
        labels=torch.randint(0, 2, (samples, 1), generator=draw).float(),
    )
    return batch.pin_memory() if pinned else batch


def census(case: Case, rank: int = 0, order: list[str] | None = None) -> Found:
    """Train for some steps; say what the last but one asked of the device."""
    order = [] if order is None else order
    MODEL.hazards.clear()
    trainer = trainer_of(case)
    steps: list[list[Event]] = []
    started: list[list[str]] = []
    losses: list[float] = []

    class Steps(hb.Callback):
        def on_step(self, trainer: Trainer, loss: float) -> None:
            losses.append(loss)
            steps.append(RECORD.begin())
            started.append(order.copy())
            order.clear()

    trainer.callbacks.append(Steps())
    RECORD.begin()
    trainer.training_step.__class__ = _Noted
    with recorded():
        trainer.fit(_batches(case, rank, trainer))
    one, other = steps[3], steps[2]  # each of a batch that was copied in the step before it
    launches = [e for e in other if e.kind == "launch"]
    crossings = [e for e in other if e.kind == "crossing"]
    allocations = [e for e in other if e.kind == "allocation"]
    allocated: Counter[str] = Counter()
    for event in allocations:
        allocated[f"{event.what} at {event.where}"] += event.count
    forbidden = [e for e in other if e.inside and (e.kind == "host" or (e.kind == "crossing" and _outlives(e)))]
    by_place: Counter[str] = Counter()
    for event in launches:
        by_place[f"{event.what} at {event.where}"] += event.count
    return Found(
        case=case.name,
        launches=sum(e.count for e in launches),
        allocations=len(allocations),
        allocated=dict(allocated),
        forbidden=dict(Counter(f"{e.what} at {e.where}" for e in forbidden)),
        waits=dict(Counter(f"{e.what} at {e.where}" for e in crossings if e.waits)),
        copies=dict(Counter(f"{e.what} at {e.where}" for e in crossings if not e.waits)),
        events=dict(Counter(e.where for e in other if e.what == "wait for an event")),
        by_place=dict(by_place.most_common()),
        repeats=_work(one) == _work(other),
        hazards=list(MODEL.hazards),
        losses=losses,
        exchanges=started[2],
        kernels=[(e.what, e.where, e.count, e.nbytes, e.flops) for e in launches],
    )


class _Whole(list[hb.Batch]):
    """Batches of all ranks together, in the place of the reading rank's `Loader`."""

    def state_dict(self) -> dict[str, Any]:
        return {}


def _batches(case: Case, rank: int, trainer: Trainer) -> Iterable[hb.Batch]:
    """Batches of a rank, as a recipe's loader gives them."""
    steps = range(STEPS + (AHEAD if case.ranks > 1 else 0))
    if not case.reader:
        return [batch_of(case, i, rank) for i in steps]
    link = trainer.ranks.link
    assert link is not None
    ranks = range(case.ranks)
    whole: Any = _Whole(hb.Batch.concatenate([batch_of(case, i, r, pinned=False) for r in ranks]) for i in steps)
    check_own = partial(check_batch, model=trainer.model)
    return BroadcastLoader(whole if rank == 0 else None, link, device=CUDA, check=check_own)


def trainer_of(case: Case, *, cuda_graph: CudaGraph = False) -> Trainer:
    """A trainer of a small model."""
    model = model_of(case)
    sgd = Component(class_path="torch.optim.SGD", init_args={"lr": 0.01, "momentum": 0.9})
    trained = list(model.parameters())
    dense = (fuse_optimizer(sgd, trained) if case.dense_fused and case.precision != "fp16" else sgd).build(trained)
    sparse = getattr(hb.optim, case.optimizer)(model, lr=0.01)
    options: Any = {
        "batch_size": BATCH,
        "precision": case.precision,
        "device": "cuda",
        "log_every": 1000,
        "recompute": case.recompute,
    }
    schedule = ScheduleRecipe(warmup_steps=100) if case.moving else None
    divide = HotSplit({f"f{i}": case.hot_rows for i in range(len(ROWS))}, case.ranks)
    split = {"divide": divide} if case.batches == "split" else {}
    return Trainer(
        model,
        dense,
        sparse,
        recipe=TrainRecipe(**options, cuda_graph=cuda_graph),
        schedule=schedule,
        **split,
    )


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    """Copy all that a step trains: rows, moments, parameters, momenta, counts of steps."""
    collection: Any = trainer.model.embeddings
    arenas = [arena for group in collection._groups for arena in group.arenas]
    tables = [t for arena in arenas for t in arena.store.arrays().values()]
    momenta = [t for of in trainer.dense.state_dict()["state"].values() for t in of.values() if t is not None]
    counts = [u.state_of_steps.counts for u in collection._updaters]
    return [t.detach().cpu().clone() for t in (*tables, *trainer.model.parameters(), *momenta, *counts)]


def stopped(case: Case, good_steps: int, rank: int = 0) -> dict[str, Any]:
    """Train until a batch has an infinite input; say what the error was, and whether the batch changed anything.

    Of several ranks the last has that input.
    """
    trainer: Any = trainer_of(case)
    batches = [batch_of(case, i, rank) for i in range(good_steps + 1)]
    dense = batches[-1].dense
    assert dense is not None
    if rank == case.ranks - 1:
        dense[5, 3] = torch.inf

    after: list[list[torch.Tensor]] = [state_of(trainer)]

    class Keep(hb.Callback):
        def on_step(self, trainer: Trainer, loss: float) -> None:
            after.append(state_of(trainer))

    trainer.callbacks.append(Keep())
    try:
        trainer.fit(batches)
        error = ""
    except hb.HotbedError as raised:
        error = f"{type(raised).__name__}: {raised}"
    now = state_of(trainer)
    same = len(now) == len(after[-1]) and all(map(torch.equal, now, after[-1]))
    return {"error": error, "untouched": same, "steps": trainer.step, "rates": trainer.schedules["dense"].last_epoch}


class _Noted(TrainingStep):
    """What a CUDA graph of the step would be captured of."""

    @override
    def queue(self, *args: Any, **kwargs: Any) -> QueuedStep:
        with _inside():
            return super().queue(*args, **kwargs)


@contextlib.contextmanager
def _inside() -> Generator[None]:
    RECORD.is_inside = True
    try:
        yield
    finally:
        RECORD.is_inside = False


def _outlives(crossing: Event) -> bool:
    """Whether a copy would need the host, or memory of it as it is now, when the graph runs again: not a loss's."""
    return crossing.waits or not crossing.what.startswith("device to host")


def _work(events: list[Event]) -> list[tuple[str, str, str]]:
    """What a CUDA graph would have recorded, and the memory that it would have kept."""
    return [
        (e.what, e.where, e.detail or str(e.count)) for e in events if e.inside and e.kind in ("launch", "allocation")
    ]
