"""Estimate the memory of a run by tier and part, before any table is allocated.

Three sizes are measured: the memory of a process that has trained the model with few rows (Python, torch, kernels), the
tensors of a step with few samples (`peak_of`), and the bytes of a sample. All other sizes are computed from the plan.

Rows that are materialized on their first update take space only if training updates them. Their expected number depends
on the popularity of rows, which was counted (``memory.skew``) or is assumed to follow Zipf's law.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from hotbed.batch import Batch
from hotbed.config import Recipe
from hotbed.data import Source
from hotbed.data.items import items_in
from hotbed.embed import collections_of
from hotbed.large_tensors import observing, page_bytes
from hotbed.machine import KEPT_BYTES, heap_is_kept, resident_bytes
from hotbed.nn.normalization import normalization_of
from hotbed.optim import Moment
from hotbed.plan import Plan
from hotbed.plan.cost import tile_bytes
from hotbed.plan.hit_rates import ExpectedRows, Popularity, Zipf
from hotbed.plan.limits import SNAPSHOT_BYTES
from hotbed.plan.tiling import Tile
from hotbed.specs import Table
from hotbed.torch_private import TorchDispatchMode, storage_id, tree_leaves
from hotbed.train.numerics import bf16_instructions, resolve_device
from hotbed.train.retrieval import Retrieval
from hotbed.train.runs.build import build_trainer, new_model, tables_of
from hotbed.train.runs.plan_search import read_skew

TRACED_SAMPLES = 1024
"""Largest number of samples of a step that is run to measure its tensors."""
TRACED_ROWS = 4096
"""Largest number of rows of a table in such a step."""
SEGMENT_BYTES = 24
"""Bytes of memory per row in a file: the maps from rows to slots of the file, and from slots to rows."""
BYTES_PER_PREDICTION = 128
"""Bytes per sample and label of an evaluation: logit, label, weight and buffers of the sort for AUC."""
HEAP_KEEPS = 1.15
"""Additional bytes per byte of a step's tensors, in a heap that keeps freed memory (`hotbed.machine.keep_heap`).

Freed blocks often do not fit later tensors. Measured values are 0.7 to 1.6."""
TAG_BYTES = 25
"""Bytes that a cache stores for a row besides its record: key, times and flag."""


@dataclass
class RankMemory:
    """Estimated bytes of one rank."""

    # Bytes of rows and moments by tier. Rows that are materialized on their first update count only if training updates
    # them.
    tiers: dict[str, int] = field(default_factory=lambda: {"device": 0, "host": 0, "disk": 0})
    parts: dict[str, int] = field(default_factory=dict)  # bytes of each part when memory is at its peak
    tier_of: dict[str, str] = field(default_factory=dict)  # tier of each part: ``device`` or ``host``

    def add(self, part: str, nbytes: float, tier: str = "host") -> None:
        """Add bytes to a part of the memory, e.g. ``"tables"``; ``tier`` is the memory that holds the part."""
        self.parts[part] = self.parts.get(part, 0) + int(nbytes)
        self.tier_of[part] = tier

    def peak(self, tier: str) -> int:
        """Return the bytes of all parts in a tier (``device`` or ``host``)."""
        return sum(nbytes for part, nbytes in self.parts.items() if self.tier_of[part] == tier)


class Forecast:
    """Memory estimate of a recipe's run, for all ranks."""

    def __init__(
        self,
        recipe: Recipe,
        source: Source,
        plan: Plan,
        tables: Sequence[Table],
        moments: Mapping[str, Sequence[Moment]],
    ) -> None:
        self._recipe, self._source, self._plan = recipe, source, plan
        self._tables = {table.name: table for table in tables}
        self._moments = moments
        device = resolve_device(recipe.train.device)
        self._compute = "device" if device.type == "cuda" else "host"
        self._ranks = plan.world_size * recipe.parallel.replicas
        chunk = source.read(recipe.data.train_split, 0)
        # Copied, so that the chunk can be freed
        self._sample = sample = chunk.take(torch.arange(min(len(chunk), TRACED_SAMPLES)))
        ids = sample.sparse
        columns = [ids.values, ids.offsets, ids.weights, sample.dense, sample.labels, sample.weights, sample.extra]
        self._sample_bytes = nbytes_of(columns) / max(len(sample), 1)
        precision = recipe.train.precision
        if precision == "auto":
            precision = "bf16" if bf16_instructions(device) else "fp32"
        self._trace = _Trace(replace(recipe, train=replace(recipe.train, precision=precision)), source, self._sample)
        rows = {name: table.rows for name, table in self._tables.items()}
        counted = {} if recipe.memory.skew is None else read_skew(recipe.memory.skew, rows)
        self._popularity: dict[str, Popularity] = {name: counted.get(name) or Zipf(n) for name, n in rows.items()}
        self._expected: dict[str, ExpectedRows] = {}

    def of_rank(self, rank: int) -> RankMemory:
        """Return the bytes of one rank at the time when it needs most memory, in training or evaluation."""
        found, samples = RankMemory(), -(-self._recipe.train.batch_size // self._ranks)
        self._add_tables(found, rank, samples)
        found.add("process", self._trace.process_bytes)
        found.add("dense parameters", self._trace.dense_bytes, self._compute)
        found.add("dense optimizer", self._trace.optimizer_bytes, self._compute)
        if self._ranks > 1:
            found.add("gradients in exchange", self._trace.dense_bytes, self._compute)
        for part, nbytes in self._largest_moment(found, samples).items():
            found.add(part, nbytes, "host" if part in ("batches", "checkpoint") else self._compute)
        return found

    def _largest_moment(self, found: RankMemory, samples: int) -> dict[str, float]:
        """Return the bytes by temporary part, for the phase of the run that needs most memory.

        The phases are a training step, the last checkpoint and an evaluation.
        """
        train, step = self._recipe.train, self._trace.training(samples)
        saved = sum(found.tiers.values()) + self._trace.dense_bytes + self._trace.optimizer_bytes
        checkpoint = 0 if train.checkpoint == "none" else min(saved, SNAPSHOT_BYTES)
        often = train.checkpoint == "best" or train.checkpoint_every or train.checkpoint_minutes
        batches = self._loader(train.batch_size, samples, training=True)
        moments: list[dict[str, float]] = [
            {"step": step.nbytes, "batches": batches, "checkpoint": checkpoint if often else 0},
            {"step": step.recycled, "checkpoint": checkpoint},
            self._evaluation(step),
        ]
        if self._compute == "host" and heap_is_kept():
            for parts, freed in zip(moments, (0, batches, batches), strict=True):
                parts["kept heap"] = HEAP_KEEPS * step.plain + min(freed, KEPT_BYTES)
        return max(moments, key=lambda parts: sum(parts.values()))

    # -- tables ----------------------------------------------------------------------------------------------------

    def _add_tables(self, found: RankMemory, rank: int, samples: int) -> None:
        steps = self._steps()
        for tile in self._plan.tiles:
            table = self._tables[tile.table]
            if rank in tile.ranks:
                moments = self._moments[tile.table] if rank == tile.owner else ()
                nbytes = tile_bytes(table, tile, moments)
                in_place = tile.tier == "device" or (tile.tier == "host" and self._recipe.memory.host == "uva")
                if in_place:
                    tier = self._compute if tile.tier == "device" else "host"
                    found.tiers[tier] += nbytes
                    found.add("tables", nbytes, tier)
                else:
                    self._add_materialized(found, tile, nbytes, samples, steps)
            if self._plan.world_size > 1:  # rows that other ranks own, and the gradients of these rows
                distinct = self._touched(tile, samples)
                share = (self._plan.world_size - 1) / self._plan.world_size
                found.add("rows in exchange", 4 * share * distinct * len(tile.cols) * 4, self._compute)

    def _add_materialized(self, found: RankMemory, tile: Tile, nbytes: int, samples: int, steps: int) -> None:
        """Add the bytes of a tile with rows that are materialized on their first update."""
        record = nbytes / max(len(tile.rows), 1)
        in_batch = self._touched(tile, samples * self._ranks)
        touched = self._touched(tile, samples * self._ranks * steps)
        found.tiers[tile.tier] += int(touched * record)
        if tile.tier == "host":
            found.add("tables", touched * record)
        entries = 1 << max(math.ceil(math.log2(max(2 * touched, 1))), 0)
        found.add("index of rows", 16 * entries + (8 + SEGMENT_BYTES * (tile.tier == "disk")) * touched)
        cached = min(tile.cache_rows, touched)
        tier = self._compute if self._recipe.memory.cache_tier == "device" else "host"
        room = tile.cache_rows * record
        found.add("cache", tile.cache_rows * TAG_BYTES, tier)
        found.add("cache", room if tier == "device" else _in_pages(room, cached, record), tier)
        # Four copies of a batch's records: read, looked up, updated, and written to the lower tier
        found.add("rows of a batch", 4 * in_batch * record, self._compute)
        if tile.tier == "disk":
            found.add("read-ahead and unwritten rows", 2 * in_batch * record)

    def _touched(self, tile: Tile, samples: int) -> float:
        """Return the expected number of distinct rows of a tile that ``samples`` samples look up."""
        if tile.table not in self._expected:
            rows = self._tables[tile.table].rows
            self._expected[tile.table] = ExpectedRows(rows, self._popularity[tile.table])
        return self._expected[tile.table].distinct(tile.rows, self._ids_per_sample(tile.table) * samples)

    def _ids_per_sample(self, table: str) -> float:
        """Return how many ids of a table a sample has on average; ``table`` may begin with a collection's path."""
        features = [f for f in self._source.schema.features("error") if f.table == table.rpartition(".")[2]]
        bags = [self._sample.sparse[f.name] for f in features if f.name in self._sample.sparse]
        return sum(len(b.values) for b in bags) / max(len(self._sample), 1) or 1.0

    # -- batches and evaluations -----------------------------------------------------------------------------------

    def _steps(self) -> int:
        train = self._recipe.train
        per_epoch = -(-self._source.samples(self._recipe.data.train_split) // train.batch_size)
        return min(train.steps or 1 << 62, per_epoch * train.epochs)

    def _loader(self, batch_size: int, share: int, *, training: bool, split: str | None = None) -> float:
        """Return the bytes of a loader's windows and batches.

        ``share`` is the number of samples that a rank has of each batch.
        """
        data = self._recipe.data
        sizes = self._source.chunks(split or data.train_split)
        shuffled = training and data.shuffle
        ahead = data.prefetch if training else 4
        window = sum(sorted(sizes)[-data.window :]) if shuffled else max(sizes, default=0)
        held = window * (2 + -(-ahead * batch_size // max(window, 1))) + window * shuffled
        most = sum(sizes) * (2 if shuffled else 1)  # shuffled parts are copied when they are merged
        return (min(held, most) + (ahead + 2) * share) * self._sample_bytes

    def _evaluation(self, step: Peak) -> dict[str, float]:
        """Return the bytes by part of an evaluation after training, or an empty dict if nothing is evaluated."""
        data, size = self._recipe.data, self._recipe.train.eval_batch_size
        splits = [split for split in (data.valid_split, data.test_split) if split is not None]
        if not splits:
            return {}
        split = max(splits, key=self._source.samples)
        count = self._source.samples(split)
        share = min(-(-size // self._ranks), count)
        peak = self._trace.evaluation(share)
        predictions = count * len(self._source.schema.labels) * BYTES_PER_PREDICTION
        has_other_sizes = (
            self._trace.precision in ("bf16", "fp16") or share > self._recipe.train.batch_size // self._ranks
        )
        kept = step.recycled + peak.recycled if has_other_sizes else max(step.recycled, peak.recycled)
        batches = self._loader(size, share, training=False, split=split)
        return {"evaluation": peak.plain + kept + predictions, "batches": batches}


def _in_pages(nbytes: float, pieces: float, piece: float) -> float:
    """Return the expected bytes of memory pages that are used if ``pieces`` random pieces of a tensor are written.

    The tensor has ``nbytes`` bytes, and a piece has ``piece`` bytes.
    """
    pages = max(math.ceil(nbytes / page_bytes(int(nbytes))), 1)
    return max(nbytes * (1 - (1 - 1 / pages) ** pieces), min(pieces * piece, nbytes))


class _Trace:
    """A recipe's model with few rows. Its steps are run on the CPU to measure their tensors."""

    def __init__(self, recipe: Recipe, source: Source, sample: Batch) -> None:
        self._sample = sample
        self.precision = recipe.train.precision
        train = replace(recipe.train, device="cpu", compile=False)
        made = replace(recipe, train=train)
        if made.retrieval is not None:  # negatives are then looked up like the user's ids, which costs the same
            made = replace(made, retrieval=replace(made.retrieval, negatives=None))
        state = torch.random.get_rng_state()
        tables = [
            table
            if table.dynamic is not None
            else replace(
                table, rows=min(table.rows, TRACED_ROWS), fp32_rows=min(table.fp32_rows, table.rows, TRACED_ROWS)
            )
            for table in tables_of(source, recipe.data)
        ]
        self._rows = {table.name: table.rows for table in tables if table.dynamic is None}
        features = source.schema.features("error")
        self._table_of = {feature.name: feature.table for feature in features}
        model = new_model(made, source, tables)
        if (normalization := normalization_of(model)) is not None:
            normalization.assume_standard()
        self._trainer = build_trainer(made, source, model)
        self._trainer.numerics.settle()
        for phase in self._step(min(64, len(sample))):  # allocates the states of the optimizers
            phase()
        torch.random.set_rng_state(state)
        parameters = list(self._trainer.model.parameters())
        self.dense_bytes = sum(p.nbytes for p in parameters)
        dense = (o for o in self._trainer.optimizers.values() if type(o).__module__.startswith("torch."))
        self.optimizer_bytes = sum(nbytes_of(o.state) for o in dense)
        gc.collect()
        own = sum(c.nbytes for c in collections_of(self._trainer.model).values())
        own += 2 * self.dense_bytes + self.optimizer_bytes  # parameters, their gradients, and optimizer states
        self.process_bytes = max(resident_bytes() - own, 0)

    def training(self, samples: int) -> Peak:
        """Return the peak memory of a training step: forward, backward and updates."""
        return peak_of(self._step, samples, min(TRACED_SAMPLES, len(self._sample)))

    def evaluation(self, samples: int) -> Peak:
        """Return the peak memory of an evaluation step: a forward pass in float32."""
        self._trainer.model.eval()
        return peak_of(self._forward, samples, min(TRACED_SAMPLES, len(self._sample)))

    def _step(self, samples: int) -> Sequence[Phase]:
        batch, optimizers = self._batch(samples), self._trainer.optimizers.values()
        self._trainer.model.train()
        for optimizer in optimizers:
            optimizer.zero_grad()
        retrieval = self._trainer.other_parts.get("retrieval")
        if isinstance(retrieval, Retrieval):  # the items of the sample replace all items, which are not read here
            batch = retrieval.among(items_in(batch.sparse, retrieval.options.item)).prepare(batch, 1)

        def compute_gradients() -> None:
            self._trainer.training_step.gradients([batch], lambda: "a step", lambda: (False, False))

        return [compute_gradients, *(optimizer.step for optimizer in optimizers)]

    def _forward(self, samples: int) -> Sequence[Phase]:
        batch = self._batch(samples)

        def forward() -> None:
            with torch.no_grad():
                self._trainer.model(batch)

        return [forward]

    def _batch(self, samples: int) -> Batch:
        """Return the first ``samples`` samples; their ids are changed to rows of the small tables."""
        batch = self._sample.take(torch.arange(samples))
        changed = {}
        for name in batch.sparse.names:
            bags = batch.sparse[name]
            rows = self._rows.get(self._table_of[name])
            changed[name] = bags if rows is None else bags._replace(values=bags.values % rows)
        return replace(batch, sparse=batch.sparse.with_features(changed))


# -- tensors of a step -------------------------------------------------------------------------------------------------

Phase = Callable[[], object]
"""Part of a step: forward and backward, or the step of one optimizer."""
_Bytes = np.ndarray[Any, np.dtype[Any]]


class Peak(NamedTuple):
    """Largest number of bytes that a step needs at the same time."""

    plain: int  # tensors in memory of torch's allocator
    recycled: int  # tensors in memory that `hotbed.large_tensors` reuses

    @property
    def nbytes(self) -> int:
        """Sum of ``plain`` and ``recycled``."""
        return self.plain + self.recycled


def peak_of(step: Callable[[int], Sequence[Phase]], samples: int, most: int) -> Peak:
    """Return the peak of a step with ``samples`` samples, without temporary memory inside of operations.

    ``step`` returns the phases of a step for a number of samples. Steps with up to ``most`` samples are measured.
    Larger steps are extrapolated from two measured ones, operation by operation, because the peak of a larger step may
    be at a different operation.
    """
    if samples <= most:
        found = [there.max(1, initial=0) for there in _timelines(step(samples))]
    else:
        found = list[_Bytes]()
        for small, large in zip(_timelines(step(most // 2)), _timelines(step(most)), strict=True):
            if small.shape != large.shape:
                small, large = (there.max(1, initial=0)[:, None] for there in (small, large))
            more = (large - small).clip(min=0) * ((samples - most) / (most - most // 2))
            found.append((large + more).max(1, initial=0))
    return Peak(*np.max(found, axis=0).astype(int).tolist())


def nbytes_of(values: object) -> int:
    """Return the bytes of all tensors in plain containers, e.g. an optimizer's state."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(values) if isinstance(t, Tensor))


def _timelines(phases: Sequence[Phase]) -> list[_Bytes]:
    """Run the phases of a step; return an array ``[2, operations]`` for each phase.

    A column has the bytes after one operation: plain tensors in row 0, and recycled tensors (`Peak`) in row 1.
    """
    watch, cuts = _Watch(), [0]
    with watch, observing(watch.note_recycled):
        for phase in phases:
            phase()
            cuts.append(watch.operation + 1)
    change = np.zeros((2, watch.operation + 2), dtype=np.int64)
    for row, nbytes, made, freed in watch.storages:
        change[row, made] += nbytes
        change[row, freed] -= nbytes
    there = change.cumsum(1)
    return [there[:, first:last] for first, last in pairwise(cuts)]


class _Watch(TorchDispatchMode):
    """Record four numbers for each new storage.

    The first number is 0 for plain and 1 for recycled storages, as the rows in the result of `_timelines`. The others
    are the storage's bytes, the number of the operation that made the storage, and the number of the operation that
    freed the storage (−1 until then).
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[list[int]] = []
        self.operation = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        before = {storage_id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = func(*args, **dict(kwargs or {}))
        self.operation += 1
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if storage_id(storage) not in before:  # the tensor is no view of an argument
                    self._note(storage, 0)
        return made

    def note_recycled(self, tensor: Tensor) -> None:
        """Record a tensor of `hotbed.large_tensors`."""
        self._note(tensor.untyped_storage(), 1)

    def _note(self, storage: torch.UntypedStorage, row: int) -> None:
        known = self._known.get(id(storage))
        if known is not None and known() is storage:
            return
        entry = [row, storage.nbytes(), self.operation, -1]
        self.storages.append(entry)

        def freed(_: object) -> None:
            entry[3] = self.operation + 1  # the current operation may still use the storage

        self._known[id(storage)] = weakref.ref(storage, freed)
