"""Capture training steps in CUDA graphs, and replay them: a few calls of the host instead of those of every kernel.

A captured step is two graphs, one behind the other: *forward* to the loss, which goes to the host, and *the rest*,
backward and the updates of all optimizers. Between them lies the event by which the host knows that the loss has
arrived, so it prepares the next step while the device computes the rest of this one, as without graphs. Ids are grouped
for the updates in a second stream, beside the forward pass (`hotbed.embed.beside`).

A graph repeats kernels on the same memory with the same numbers. So whatever differs from step to step is in the
device's memory before it runs (`Rates`, `copy_of`): the batch is copied into buffers of its size class
(`hotbed.train.size_classes`), hyperparameters are written where kernels read them, counts of steps are counted there.
Whatever else a step depends on is compared before each replay (`StepGraph._alike`): where it is another, another step
is captured, after a few that are not.

Steps that cannot be captured are taken as ever; `StepGraph.begin` says why.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Callable, Generator, Hashable, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from hotbed.bags import Bags
from hotbed.batch import Batch
from hotbed.config import TrainRecipe
from hotbed.embed import Distributed, EmbeddingCollection
from hotbed.embed.beside import grouping_beside
from hotbed.embed.ids import claims
from hotbed.errors import BatchError, RecipeError
from hotbed.jagged import Jagged
from hotbed.nn import MLP
from hotbed.optim import SparseOptimizer
from hotbed.store import DenseStore
from hotbed.torch_private import hooks_of
from hotbed.train.step import Pending, TrainingStep


class Rates:
    """Learning rates of torch's optimizers, where kernels of a graph read them: in the device's memory."""

    def __init__(self, optimizers: Sequence[Optimizer], device: torch.device) -> None:
        self._optimizers, self._device = [o for o in optimizers if not isinstance(o, SparseOptimizer)], device
        self._written: dict[tuple[int, int], tuple[float, Tensor]] = {}

    def _groups(self) -> Generator[tuple[tuple[int, int], dict[str, Any]]]:
        """Yield what groups have a learning rate that is not on the device already."""
        for i, optimizer in enumerate(self._optimizers):
            for j, group in enumerate(optimizer.param_groups):
                if not isinstance(group["lr"], Tensor) or group["lr"].device != self._device:
                    yield (i, j), group

    def write(self) -> None:
        """Write those that have changed."""
        for place, group in self._groups():
            rate = float(group["lr"])
            last = self._written.get(place)
            if last is None:
                last = rate, torch.full((), rate, dtype=torch.float32, device=self._device)
            elif last[0] != rate:
                last[1].fill_(rate)
            self._written[place] = rate, last[1]

    @contextmanager
    def in_memory(self, *, capturing: bool = False) -> Generator[None]:
        """Let optimizers read them there inside; everybody else has numbers."""
        groups = list(self._groups())
        before = [dict(group) for _, group in groups]
        for place, group in groups:
            group["lr"] = self._written[place][1]
            if capturing and "capturable" in group:
                group["capturable"] = True
        try:
            yield
        finally:
            for (_, group), own in zip(groups, before, strict=True):
                group.update(own)


class _StaticIds(Jagged):
    """Ids that a captured step reads."""

    __slots__ = ()

    @override
    def __getitem__(self, name: str) -> Bags:
        if self.fixed[self.index(name)] is None:
            raise BatchError(f"the model reads the ids of '{name}' itself, of which each batch has another number")
        return super().__getitem__(name)


def columns(batch: Batch) -> list[Tensor]:
    """List the tensors of a batch."""
    ids = batch.sparse
    given = (ids.values, ids.offsets, ids.weights, batch.dense, batch.labels, batch.weights, *batch.extra.values())
    return [t for t in given if t is not None]


def copy_of(batch: Batch) -> Batch:
    """Copy a batch to memory that it is to stay in."""

    def copied(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.clone()

    ids = batch.sparse
    static = _StaticIds(
        ids.names,
        ids.values.clone(),
        batch_size=ids.batch_size,
        fixed=ids.fixed,
        offsets=copied(ids.offsets),
        weights=copied(ids.weights),
        starts=ids.starts,
    )
    static.mark_verified(ids.verified)
    return replace(
        batch,
        sparse=static,
        dense=copied(batch.dense),
        labels=copied(batch.labels),
        weights=copied(batch.weights),
        extra={name: t.clone() for name, t in batch.extra.items()},
    )


WARM_UP = 3
"""Steps alike that are taken without a graph before one is captured: kernels are compiled, and buffers made."""
MOST = 16
"""Captured steps that are kept; the one that was not used for longest goes first."""
MOST_SEEN = 1000
"""Steps of so many kinds are counted; where there are more, each step is of its own kind."""

_log = logging.getLogger("hotbed")


@dataclass(frozen=True)
class _Captured:
    """A captured step."""

    # forward, rest: its graphs, in this order
    forward: torch.cuda.CUDAGraph
    rest: torch.cuda.CUDAGraph
    batch: Batch  # where they read the batch
    kept: list[Tensor]  # what they read, too, and nobody else might keep


class StepGraph:
    """Take training steps, captured where the recipe asks for it."""

    def __init__(
        self, model: nn.Module, recipe: TrainRecipe, device: torch.device, step: TrainingStep, *, divided: bool
    ) -> None:
        self._model, self._recipe, self._device, self._training_step = model, recipe, device, step
        self._divided = divided
        self._optimizers: list[Optimizer] = []
        self._stream: torch.cuda.Stream | None = None
        self._collections = [m for m in model.modules() if isinstance(m, EmbeddingCollection)]
        self._said = set[str]()

    def begin(self, optimizers: Iterable[Optimizer]) -> str:
        """Choose how steps are taken, before the first of a run; return what there is to say of it."""
        self._optimizers, self._stream = list(optimizers), None
        self._training_step.begin(self._optimizers)
        if self._recipe.cuda_graph is False:
            return ""
        why = self._why_never()
        if why is not None:
            if self._recipe.cuda_graph is True:
                raise RecipeError(
                    f"train.cuda_graph is true, but steps cannot be captured: {why}; set it to auto or false"
                )
            return f"; steps are not captured in a CUDA graph: {why}"
        self._stream, self._beside = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured, self._seen = dict[Hashable, _Captured](), Counter[Hashable]()
        self._rates = Rates(self._optimizers, self._device)
        rows = ({t.name: t.rows for t in c.tables.values()} for c in self._collections)
        self._claims = frozenset(chain(*(claims(c.features, r) for c, r in zip(self._collections, rows, strict=True))))
        return "; steps are captured in CUDA graphs"

    def __call__(
        self, parts: Sequence[Batch], place: Callable[[], str], requests: Callable[[], tuple[bool, bool]]
    ) -> Pending:
        """Queue a step; arguments and result are those of `TrainingStep.queue`."""
        if self._stream is None:
            return self._training_step.queue(parts, place, requests)
        # Captured or not, all steps are in one stream: gradients are added up in that in which they were at first.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                return self._step(parts, place, requests)
        finally:
            current.wait_stream(self._stream)

    def _step(
        self, parts: Sequence[Batch], place: Callable[[], str], requests: Callable[[], tuple[bool, bool]]
    ) -> Pending:
        self._rates.write()
        why = self._why_not_now(parts)
        if why is not None:
            if why not in self._said:
                self._said.add(why)
                _log.info("%s is taken without a CUDA graph, as are others like it: %s", place(), why)
            with self._rates.in_memory():
                return self._training_step.queue(parts, place, requests)
        alike = self._alike(parts[0])
        captured = self._captured.pop(alike, None)
        if captured is None:
            if len(self._seen) > MOST_SEEN:
                self._seen.clear()
            self._seen[alike] += 1
            if self._seen[alike] <= WARM_UP:
                with self._rates.in_memory():
                    return self._training_step.queue(parts, place, requests)
            captured = self._capture(parts[0])
        self._captured[alike] = captured  # the newest is the last
        while len(self._captured) > MOST:
            self._captured.pop(next(iter(self._captured)))
        return self._replay(captured, parts[0], place, requests)

    def _replay(
        self,
        captured: _Captured,
        batch: Batch,
        place: Callable[[], str],
        requests: Callable[[], tuple[bool, bool]],
    ) -> Pending:
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
        return Pending([batch], [gate.arrived[0, 0]], [sums], place)

    def _capture(self, batch: Batch) -> _Captured:
        """Capture a step without taking it: nothing runs, and nothing is trained."""
        static, gate = copy_of(batch), self._training_step.gate
        assert gate is not None
        forward, rest = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        # Threads that load batches go on meanwhile, with calls that are forbidden to a thread that captures.
        options: Any = {"pool": self._pool, "stream": self._stream, "capture_error_mode": "thread_local"}
        gc.collect()  # nothing is to be freed by chance in between
        capture = ExitStack()

        def cut() -> None:
            capture.close()
            capture.enter_context(torch.cuda.graph(rest, **options))

        try:
            with self._rates.in_memory(capturing=True), gate.calling(cut), capture:
                capture.enter_context(torch.cuda.graph(forward, **options))
                capture.enter_context(grouping_beside(self._beside))
                self._training_step.queue([static], lambda: "a step that is captured", lambda: (False, False))
        except Exception as error:
            raise RecipeError(
                f"train.cuda_graph is {str(self._recipe.cuda_graph).lower()}, but a step of this model cannot be "
                f"captured ({_first(error)}); set train.cuda_graph to false. The step has changed nothing"
            ) from error
        finally:
            for optimizer in self._optimizers:
                optimizer.zero_grad()  # gradients of a captured step are nobody's
        kept = [entries for collection in self._collections for entries in collection.layouts()]
        return _Captured(forward, rest, static, [*kept, *self._training_step.seeds])

    # -- what can be captured --------------------------------------------------------------------------------------

    def _why_never(self) -> str | None:
        """Say why no step of this run can be captured; None if they can."""
        stores = [store for collection in self._collections for store in collection.stores()]
        dynamic = [t.name for c in self._collections for t in c.tables.values() if t.dynamic is not None]
        jagged = [f.name for c in self._collections for f in c.features if not f.is_pooled and f.padding is None]
        reasons = (
            (self._device.type != "cuda", f"they run on {self._device.type}, graphs are CUDA's"),
            (
                isinstance(self._model, Distributed),
                "several ranks, replicas and rows in slower memories make the host wait for what is exchanged",
            ),
            (
                not all(isinstance(store, DenseStore) and store.tier == "device" for store in stores),
                "not all rows are in the device's memory",
            ),
            (bool(dynamic), f"table '{dynamic[0] if dynamic else ''}' is dynamic, so the host gives ids their rows"),
            (
                bool(jagged),
                f"feature '{jagged[0] if jagged else ''}' is neither pooled nor padded, so sizes differ",
            ),
            (self._recipe.compile, "train.compile may compile again in any step"),
            (
                self._recipe.recompute and any(isinstance(m, MLP) and m.draws for m in self._model.modules()),
                "train.recompute asks for the state of random numbers, for dropout",
            ),
            (self._divided, "batches are divided (hot.batches split)"),
            (self._training_step.numerics.is_retrieval, "the candidates of retrieval differ in number"),
            (
                self._training_step.gate is None,
                "the host waits for the loss: train.precision is fp16, train.clip_grad_norm is set, or a dense "
                "optimizer is none of torch's with fused=True",
            ),
        )
        return next((why for found, why in reasons if found), None)

    def _why_not_now(self, parts: Sequence[Batch]) -> str | None:
        """Say why the step of this batch cannot be captured; None if it can."""
        ids = parts[0].sparse
        if len(parts) > 1:
            return "the batch is divided"
        if not self._claims <= ids.verified:
            return "ids of the batch are repaired on the way (on_bad_id, on_too_long)"
        if ids.weights is not None and ids.weights.requires_grad:
            return "weights of ids have a gradient"
        stores = (store for collection in self._collections for store in collection.stores())
        if any(store.on_change is not None or store.changes is not None for store in stores):
            return "a checkpoint is told which rows change"
        hooked = next(filter(None, map(_hook_of, chain(self._model.modules(), self._optimizers))), None)
        if hooked is None and any(map(hooks_of, self._model.parameters())):
            hooked = "a parameter"
        return None if hooked is None else f"{hooked} has hooks, which a graph would not call"

    def _alike(self, batch: Batch) -> Hashable:
        """Return what a step has in common with those that the same graphs repeat; write hyperparameters on the way."""
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
            options += (_text(group) for group in optimizer.param_groups)
        return (
            (ids.names, ids.fixed, ids.starts, tuple(batch.extra)),
            tuple((t.shape, t.dtype) for t in columns(batch)),
            (batch.dense is None, batch.weights is None, ids.weights is None),
            tuple(options),
            tuple((t.data_ptr(), t.requires_grad) for t in tensors),
            tuple(module.training for module in self._model.modules()),
        )


def _hook_of(of: nn.Module | Optimizer) -> str | None:
    """Name a module or an optimizer that has hooks; hotbed's own do nothing but compute."""
    is_known = all(str(hook.__module__).startswith("hotbed.") for hook in hooks_of(of))
    return None if is_known else type(of).__name__


def _text(group: dict[str, Any]) -> str:
    """Write down the options of a group that a graph has as numbers."""
    fixed = {k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr")}
    return repr({k: v.data_ptr() if isinstance(v, Tensor) else v for k, v in fixed.items()})


def _first(error: BaseException) -> str:
    """Say what went wrong first, where ending a capture that failed fails, too."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error).strip() or type(error).__name__).splitlines()[0]
