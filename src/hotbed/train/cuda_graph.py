"""Capture training steps in CUDA graphs and replay them, so that the host makes a few calls instead of one per kernel.

A captured step consists of two graphs. The graph *forward* ends with the copy of the loss to the host. The graph *rest*
contains the backward pass and all updates. An event between the two graphs tells the host that the loss has arrived. So
the host prepares the next step while the device computes the rest of the current step. Ids are grouped for updates on a
second stream (`hotbed.embed.side_stream`).

A graph repeats its kernels on the same memory with the same arguments. So values that differ from step to step are
written to device memory before each replay: a batch is copied to the buffers of the captured step, and learning rates
are copied to tensors (`Rates`). Batches of different sizes are padded to few size classes (`SizeClasses`), so that few
graphs are needed. All other inputs of a step are compared before each replay (`StepGraph._key_of`). If no captured step
had equal inputs, the step runs without a graph. After a few such steps with equal inputs, a further graph is captured.

If the steps of a run cannot be captured, `StepGraph.begin` reports the reason, and all steps run without graphs.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Generator, Hashable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hotbed.batch import Batch
from hotbed.config import TrainRecipe
from hotbed.embed import Distributed, EmbeddingCollection
from hotbed.embed.ids import list_claims
from hotbed.embed.side_stream import use_side_stream
from hotbed.errors import BatchError, RecipeError
from hotbed.jagged import Bags, Jagged
from hotbed.nn import MLP
from hotbed.optim import SparseOptimizer
from hotbed.store import DenseStore
from hotbed.torch_private import hooks_of
from hotbed.train.step import QueuedStep, Requests, StepName, TrainingStep

WARM_UP = 3
"""A graph is captured after this many steps with equal inputs, which compile kernels and allocate buffers."""
MOST = 16
"""Largest number of captured steps that are kept; the least recently used step is dropped first."""
MOST_SEEN = 1000
"""The counter of steps with equal inputs is cleared when it has this many entries."""
STEPS = 8
"""Number of size classes between two powers of two, so that padding adds at most an eighth."""

_log = logging.getLogger("hotbed")


def size_class(count: int) -> int:
    """Return the smallest size class that is not below ``count``."""
    step = 1 << max((count - 1).bit_length() - STEPS.bit_length(), 0) if count > STEPS else 1
    return max(-(-count // step) * step, STEPS)


class SizeClasses:
    """Pad the ids of ragged features to size classes, so that batches seldom differ in shape.

    The ids of each feature are padded to the size class of the feature's largest batch so far. Padding belongs to no
    bag, so no lookup and no update reads it. Results have the same bits with and without padding.
    """

    def __init__(self, model: nn.Module) -> None:
        collections = [m for m in model.modules() if isinstance(m, EmbeddingCollection)]
        self._pads = bool(collections) and all(t.dynamic is None for c in collections for t in c.tables.values())
        self._jagged = {f.name for c in collections for f in c.features if not f.is_pooled and f.padding is None}
        self._capacity: dict[str, int] = {}

    def __call__(self, ids: Jagged) -> Jagged:
        """Return the ids with padding; ``ids`` must be on the host."""
        if not self._pads or ids.offsets is None:
            return ids
        sizes = tuple(stop - start for start, stop in zip(ids.starts, ids.starts[1:], strict=False))
        room = list(sizes)
        for i, (name, size) in enumerate(zip(ids.names, sizes, strict=True)):
            if ids.fixed[i] is None and name not in self._jagged:
                room[i] = self._capacity[name] = max(self._capacity.get(name, 0), size_class(size))
        if tuple(room) == sizes:
            return ids
        starts = tuple(accumulate(room, initial=0))

        def pad(values: Tensor) -> Tensor:
            out = torch.zeros(starts[-1], dtype=values.dtype, pin_memory=values.is_pinned())
            for start, stop, first in zip(ids.starts, ids.starts[1:], starts, strict=False):
                out[first : first + stop - start] = values[start:stop]
            return out

        padded = Jagged(
            ids.names,
            pad(ids.values),
            batch_size=ids.batch_size,
            fixed=ids.fixed,
            offsets=ids.offsets,
            weights=None if ids.weights is None else pad(ids.weights),
            starts=starts,
            sizes=sizes,
        )
        padded.mark_verified(ids.verified)  # the padding, id 0, is a row of every table
        return padded


class Rates:
    """Learning rates of torch's optimizers in device memory, where captured kernels read them."""

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._optimizers, self._device = [o for o in optimizers if not isinstance(o, SparseOptimizer)], device
        self._written: dict[tuple[int, int], tuple[float, Tensor]] = {}

    def _groups(self) -> Generator[tuple[tuple[int, int], dict[str, Any]]]:
        """Yield the indices (optimizer, group) and the group of each learning rate in host memory."""
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                if not isinstance(group["lr"], Tensor) or group["lr"].device != self._device:
                    yield (i, j), group

    def write(self) -> None:
        """Copy each learning rate that has changed since the last call to its tensor on the device."""
        for key, group in self._groups():
            rate = float(group["lr"])
            last = self._written.get(key)
            if last is None:
                last = rate, torch.full((), rate, dtype=torch.float32, device=self._device)
            elif last[0] != rate:
                last[1].fill_(rate)
            self._written[key] = rate, last[1]

    @contextmanager
    def in_memory(self, *, capturing: bool = False) -> Generator[None]:
        """Inside the context, optimizers read learning rates from the tensors that `write` fills on the device."""
        groups = list(self._groups())
        before = [dict(group) for _, group in groups]
        for key, group in groups:
            group["lr"] = self._written[key][1]
            if capturing and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for (_, group), own in zip(groups, before, strict=True):
                group.update(own)


class _StaticIds(Jagged):
    """Ids in the buffers of a captured step."""

    __slots__ = ()

    @override
    def __getitem__(self, name: str) -> Bags:
        if self.fixed[self.index(name)] is None:
            raise BatchError(
                f"the model reads the ids of '{name}' outside of embedding collections, but a captured step pads these "
                "ids, because their number differs between batches. Set train.cuda_graph to false"
            )
        return super().__getitem__(name)


def columns(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch."""
    ids = batch.sparse
    tensors = (ids.values, ids.offsets, ids.weights, batch.dense, batch.labels, batch.weights, *batch.extra.values())
    return [t for t in tensors if t is not None]


def copy_of(batch: Batch) -> Batch:
    """Return a copy of a batch; its tensors are the buffers of a captured step."""
    ids = batch.sparse
    static = _StaticIds(
        ids.names,
        ids.values.clone(),
        batch_size=ids.batch_size,
        fixed=ids.fixed,
        offsets=None if ids.offsets is None else ids.offsets.clone(),
        weights=None if ids.weights is None else ids.weights.clone(),
        starts=ids.starts,
    )
    static.mark_verified(ids.verified)
    return batch.map_columns(static, torch.clone)


@dataclass(frozen=True)
class _Captured:
    """A captured step: its two graphs, the buffers of its batch, and tensors that must stay alive for replays."""

    forward: torch.cuda.CUDAGraph
    rest: torch.cuda.CUDAGraph
    batch: Batch
    kept: list[Tensor]


class StepGraph:
    """Run training steps, and replay captured steps if the recipe and the model allow captures."""

    def __init__(
        self, model: nn.Module, recipe: TrainRecipe, device: torch.device, step: TrainingStep, *, divided: bool
    ) -> None:
        self._model, self._recipe, self._device, self._training_step = model, recipe, device, step
        self._divided = divided
        self._optimizers: list[Optimizer] = []
        self._stream: torch.cuda.Stream | None = None
        self._collections = [m for m in model.modules() if isinstance(m, EmbeddingCollection)]
        self._logged = set[str]()

    def begin(self, optimizers: Iterable[Optimizer]) -> str:
        """Decide before the first step whether steps are captured; return a text for the log."""
        self._optimizers, self._stream = list(optimizers), None
        self._training_step.begin(self._optimizers)
        if self._recipe.cuda_graph is False:
            return ""
        why = self._why_never()
        if why is not None:
            if self._recipe.cuda_graph is True:
                raise RecipeError(
                    f"train.cuda_graph is true, but steps cannot be captured: {why}. Set it to auto or false"
                )
            return f"; steps are not captured in a CUDA graph: {why}"
        self._stream, self._beside = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured, self._seen = dict[Hashable, _Captured](), Counter[Hashable]()
        self._rates = Rates(self._optimizers, self._device)
        rows = ({t.name: t.rows for t in c.tables.values()} for c in self._collections)
        self._claims = frozenset(
            chain(*(list_claims(c.features, r) for c, r in zip(self._collections, rows, strict=True)))
        )
        return "; steps are captured in CUDA graphs"

    def __call__(self, parts: Sequence[Batch], step_name: StepName, requests: Requests) -> QueuedStep:
        """Queue a step; see `TrainingStep.queue` for the arguments and the result."""
        if self._stream is None:
            return self._training_step.queue(parts, step_name, requests)
        # All steps share one stream, because autograd adds gradients in the stream of the first step.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return self._step(parts, step_name, requests)
        finally:
            current.wait_stream(self._stream)

    def _step(self, parts: Sequence[Batch], step_name: StepName, requests: Requests) -> QueuedStep:
        self._rates.write()
        why, key, captured = self._why_not_now(parts), None, None
        if why is None:
            key = self._key_of(parts[0])
            captured = self._captured.pop(key, None)
            if captured is None:
                if len(self._seen) > MOST_SEEN:
                    self._seen.clear()
                self._seen[key] += 1
                if self._seen[key] > WARM_UP:
                    captured = self._capture(parts[0])
        elif why not in self._logged:
            self._logged.add(why)
            _log.info("%s and similar steps run without a CUDA graph: %s", step_name(), why)
        if captured is None:
            with self._rates.in_memory():
                return self._training_step.queue(parts, step_name, requests)
        self._captured[key] = captured  # moved to the end of the LRU order
        while len(self._captured) > MOST:
            self._captured.pop(next(iter(self._captured)))
        return self._replay(captured, parts[0], step_name, requests)

    def _replay(self, captured: _Captured, batch: Batch, step_name: StepName, requests: Requests) -> QueuedStep:
        gate = self._training_step.gate
        assert gate is not None
        assert batch.labels is not None
        for into, values in zip(columns(captured.batch), columns(batch), strict=True):
            into.copy_(values, non_blocking=True)
        gate.replaying()
        captured.forward.replay()
        gate.sent()
        sums = (0.0, batch.labels.numel(), len(batch), *requests())
        captured.rest.replay()
        return QueuedStep([batch], [gate.arrived[0, 0]], [sums], step_name)

    def _capture(self, batch: Batch) -> _Captured:
        """Capture a step. Kernels are recorded but do not run, so nothing is trained."""
        static, gate = copy_of(batch), self._training_step.gate
        assert gate is not None
        forward, rest = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # "thread_local" forbids some CUDA calls only in the capturing thread, because other threads load batches.
        options: Any = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        gc.collect()  # because garbage collection must not free CUDA memory during the capture
        capture = ExitStack()

        def start_rest() -> None:
            capture.close()
            capture.enter_context(torch.cuda.graph(rest, **options))

        try:
            with self._rates.in_memory(capturing=True), gate.calling(start_rest), capture:
                capture.enter_context(torch.cuda.graph(forward, **options))
                capture.enter_context(use_side_stream(self._beside))
                self._training_step.queue([static], lambda: "a captured step", lambda: (False, False))
        except Exception as error:
            first: BaseException = error
            while first.__context__ is not None:  # the end of a failed capture raises further errors
                first = first.__context__
            cause = (str(first).strip() or type(first).__name__).splitlines()[0]
            raise RecipeError(
                f"train.cuda_graph is {str(self._recipe.cuda_graph).lower()}, but the capture of a step failed "
                f"({cause}). The step updated nothing. Set train.cuda_graph to false"
            ) from error
        finally:
            for optimizer in self._optimizers:
                optimizer.zero_grad()  # drop the gradients of the capture
        kept = [entries for collection in self._collections for entries in collection.layouts()]
        return _Captured(forward, rest, static, [*kept, *self._training_step.seeds])

    # -- conditions of a capture -----------------------------------------------------------------------------------

    def _why_never(self) -> str | None:
        """Return why no step of this run can be captured, or None if steps can be captured."""
        stores = [store for collection in self._collections for store in collection.stores()]
        dynamic = next((t.name for c in self._collections for t in c.tables.values() if t.dynamic is not None), None)
        features = chain(*(c.features for c in self._collections))
        jagged = next((f.name for f in features if not f.is_pooled and f.padding is None), None)
        on_device = all(isinstance(store, DenseStore) and store.tier == "device" for store in stores)
        draws = any(isinstance(m, MLP) and m.draws for m in self._model.modules())
        reasons = {
            f"the device is {self._device.type}, expected cuda": self._device.type != "cuda",
            "with several ranks, replicas or rows in slower tiers the host waits for exchanges": isinstance(
                self._model, Distributed
            ),
            "not all rows are in device memory": not on_device,
            f"table '{dynamic}' is dynamic, so the host assigns rows to its ids": dynamic is not None,
            f"feature '{jagged}' is neither pooled nor padded, so its shape varies": jagged is not None,
            "train.compile may compile again in any step": self._recipe.compile,
            "train.recompute saves the random state for dropout": self._recipe.recompute and draws,
            "batches are divided (hot.batches split)": self._divided,
            "the number of candidates of retrieval varies": self._training_step.numerics.is_retrieval,
            "the host waits for the loss: train.precision is fp16, train.clip_grad_norm is set, or a dense optimizer "
            "is not a fused one of torch": self._training_step.gate is None,
        }
        return next((why for why, applies in reasons.items() if applies), None)

    def _why_not_now(self, parts: Sequence[Batch]) -> str | None:
        """Return why the step of this batch cannot be captured, or None if it can be captured."""
        ids = parts[0].sparse
        if len(parts) > 1:
            return "the batch is divided"
        if not self._claims <= ids.verified:
            return "ids of the batch are repaired in the forward pass (on_bad_id, on_too_long)"
        if ids.weights is not None and ids.weights.requires_grad:
            return "weights of ids require gradients"
        stores = (store for collection in self._collections for store in collection.stores())
        if any(store.on_change is not None or store.changes is not None for store in stores):
            return "a checkpoint records changed rows"
        hooked = next(filter(None, map(_hook_of, chain(self._model.modules(), self._optimizers))), None)
        if hooked is None and any(map(hooks_of, self._model.parameters())):
            hooked = "a parameter"
        return None if hooked is None else f"{hooked} has hooks, which a graph does not call"

    def _key_of(self, batch: Batch) -> Hashable:
        """Prepare the optimizers. Return a key of all inputs. A captured step can be replayed if its key is equal."""
        ids, tensors = batch.sparse, list[Tensor]()
        tensors += chain(
            *(s.arrays().values() for c in self._collections for s in c.stores() if isinstance(s, DenseStore))
        )
        tensors += chain(self._model.parameters(), self._model.buffers())
        options: list[Hashable] = []
        for optimizer in self._optimizers:
            if isinstance(optimizer, SparseOptimizer):
                options.append(optimizer.prepare())
                continue
            tensors += (t for of in optimizer.state.values() for t in of.values() if isinstance(t, Tensor))
            for group in optimizer.param_groups:
                fixed = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
                options.append(repr({k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in fixed.items()}))
        return (
            (ids.names, ids.fixed, ids.starts, tuple(batch.extra)),
            tuple((t.shape, t.dtype) for t in columns(batch)),
            (batch.dense is None, batch.weights is None, ids.weights is None),
            tuple(options),
            tuple((t.data_ptr(), t.requires_grad) for t in tensors),
            tuple(module.training for module in self._model.modules()),
        )


def _hook_of(of: nn.Module | Optimizer) -> str | None:
    """Return the class name of a module or optimizer if it has hooks that hotbed has not set, else None."""
    is_known = all(str(hook.__module__).startswith("hotbed.") for hook in hooks_of(of))
    return None if is_known else type(of).__name__
