"""Train small models with captured steps on the pretended device, and without, and say where they differ."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import hotbed as hb
from hotbed.embed.side_stream import GroupingStream
from hotbed.optim import SparseOptimizer
from hotbed.train import cuda_graph as step_graph
from hotbed.train.cuda_graph import Rates, StepGraph, columns
from hotbed.train.step import TrainingStep
from hotbed.train.trainer import Trainer
from tests.census.graphs import GRAPHS
from tests.census.record import RECORD, asked_for, recorded
from tests.census.steps import BATCH, Case, batch_of, state_of, trainer_of
from tests.census.streams import MODEL, Stream

STEPS = 12
SMALL = (4, 6, 8, 10)
"""Steps with a batch of fewer samples."""
LONGEST = (1, 1, 5)
"""Ids of a bag in the first steps, where a case is ragged; then 3."""
step_graph.WARM_UP = 1


def batches_of(case: Case) -> list[hb.Batch]:
    """Batches of two numbers of samples in turn."""
    longest = [*LONGEST, *[3] * (STEPS - len(LONGEST))]
    return [batch_of(case, i, 0, samples=BATCH // 2 if i in SMALL else BATCH, longest=longest[i]) for i in range(STEPS)]


class _Steps(hb.Callback):
    """Notes the loss of every step, and what it has left."""

    def __init__(self) -> None:
        self.chosen, self.losses, self.states = "", list[float](), list[list[torch.Tensor]]()

    def on_numerics(self, trainer: Trainer, chosen: str) -> None:
        self.chosen = chosen

    def on_step(self, trainer: Trainer, loss: float) -> None:
        self.losses.append(loss)
        self.states.append(state_of(trainer))


class _Addresses:
    """Notes how steps were taken, which memory each was given, and what each asked of the device."""

    def __init__(self, trainer: Trainer) -> None:
        self.replayed: dict[int, list[tuple[int, ...]]] = {}
        self.eager = 0
        self.in_graphs = list[int]()
        """Launches of the graphs of each captured step."""
        self.by_host = list[Counter[str]]()
        """What the host asks for in steps that only replay: launches, copies, waits."""
        taken: Any = trainer._graph
        model: Any = trainer.model
        tables = model.embeddings.handles.values()
        replay, step = taken._replay, trainer.training_step.queue

        def noted(captured: Any, *args: Any) -> Any:
            # Of frozen tables, backward and updates read nothing of the batch.
            graphs = (captured.forward, captured.rest)[: 1 + any(h.requires_grad for h in tables)]
            assert all({t.data_ptr() for t in columns(captured.batch)} & set(g.outside) for g in graphs)
            self.replayed.setdefault(id(captured), []).append(tuple(t.data_ptr() for t in columns(captured.batch)))
            return replay(captured, *args)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.eager += GRAPHS.capturing is None
            return step(*args, **kwargs)

        step_of, capture = taken._step, taken._capture

        def noted_capture(batch: hb.Batch) -> Any:
            RECORD.begin()
            found = capture(batch)
            of_batch = len(columns(batch))  # which is copied before
            self.in_graphs.append(asked_for(RECORD.begin())["launches"] - of_batch)
            return found

        def asked(*args: Any) -> Any:
            captures, eager = len(self.in_graphs), self.eager
            RECORD.begin()
            found = step_of(*args)
            if (captures, eager) == (len(self.in_graphs), self.eager):
                self.by_host.append(asked_for(RECORD.begin()))
            return found

        taken._replay, taken._step, taken._capture = noted, asked, noted_capture
        of_trainer: Any = trainer.training_step
        of_trainer.queue = counted


def trained(case: Case, batches: Iterable[hb.Batch], *, graphs: bool) -> tuple[Trainer, _Steps, _Addresses]:
    trainer, steps = trainer_of(case, cuda_graph=graphs), _Steps()
    trainer.callbacks.append(steps)
    addresses = _Addresses(trainer)
    trainer.fit(list(batches))
    return trainer, steps, addresses


@cache
def eager_steps(case: Case) -> _Steps:
    """Steps without graphs."""
    return trained(case, batches_of(case), graphs=False)[1]


def captured(cases: Sequence[Case]) -> dict[str, Any]:
    """Compare by case, and train on a loss that is not finite."""
    return {case.name: compared(case) for case in cases} | {"stopped": stopped(cases[0])}


def faults(case: Case) -> dict[str, Any]:
    """Make faults that must be found, and train with what keeps steps from being captured."""
    found: dict[str, Any] = {name: fault(case) for name, fault in FAULTS.items()}
    return found | {"left out": left_out(case), "lookups": {name: looked_up(case, w) for name, w in LOOKUPS.items()}}


def same(one: _Steps, other: _Steps) -> int:
    """Count the first steps that left the same bits and had the same loss."""
    for i, (a, b) in enumerate(zip(one.states, other.states, strict=True)):
        if one.losses[i] != other.losses[i] or not all(map(torch.equal, a, b)):
            return i
    return len(one.states)


def compared(case: Case) -> dict[str, Any]:
    MODEL.hazards.clear()
    with recorded(), noted_groups() as beside:
        eager = eager_steps(case)
        _, replayed, addresses = trained(case, batches_of(case), graphs=True)
    return {
        "chosen": replayed.chosen,
        "beside": len(beside),
        "same": same(eager, replayed),
        "losses": replayed.losses,
        "eager": addresses.eager,
        "replays": [len(of) for of in addresses.replayed.values()],
        "in_graphs": addresses.in_graphs,
        "by_host": addresses.by_host,
        "addresses": [len(set(of)) for of in addresses.replayed.values()],
        "hazards": list(MODEL.hazards),
    }


@contextmanager
def replaced(where: Any, name: str, by: Any) -> Iterator[None]:
    before = getattr(where, name)
    setattr(where, name, by)
    try:
        yield
    finally:
        setattr(where, name, before)


@contextmanager
def noted_groups() -> Iterator[list[Any]]:
    """Note the arguments of all that is grouped beside forward passes."""
    calls, own = list[Any](), GroupingStream.group

    def noted(*args: Any) -> Any:
        calls.append(args)
        return own(*args)

    with replaced(GroupingStream, "group", noted):
        yield calls


def _with(where: Any, name: str, change: Callable[[Callable[..., Any]], Any]) -> Callable[[Case], str]:
    """Train with a method that is another; say what came of it."""

    def fault(case: Case) -> str:
        eager = eager_steps(case)
        MODEL.hazards.clear()
        twice = replaced(hb.nn.DLRM, "forward", _looking_up_twice(hb.nn.DLRM.forward))
        with recorded(), twice, replaced(where, name, change(getattr(where, name))):
            try:
                _, replayed, _ = trained(case, batches_of(case), graphs=True)
            except Exception as error:
                return str(error)
        if MODEL.hazards:
            return MODEL.hazards[0]
        return f"step {same(eager, replayed)} is another" if same(eager, replayed) < STEPS else "nothing"

    return fault


def _once(write: Callable[..., Any]) -> Any:
    """Write learning rates in the first steps of a trainer only."""

    def written(rates: Rates) -> None:
        times: Any = vars(rates)
        times["times"] = times.get("times", 0) + 1
        if times["times"] <= 5:
            write(rates)

    return written


def _without_writing(prepare: Callable[..., Any]) -> Any:
    """Say that hyperparameters were written, which were not."""

    def prepared(optimizer: SparseOptimizer) -> Any:
        for group in optimizer.param_groups:
            group["lr"], now = 0.01, group["lr"]
            found = prepare(optimizer)
            group["lr"] = now
        return found

    return prepared


def _without_keeping(capture: Callable[..., Any]) -> Any:
    """Keep nothing of what only the step before had."""

    def captured(taken: StepGraph, batch: hb.Batch) -> Any:
        found = capture(taken, batch)
        found.kept.clear()
        return found

    return captured


def _without_waiting(group: Callable[..., Any]) -> Any:
    """Group beside the step what it may not have written yet."""

    def at_once(beside: GroupingStream, *args: Any) -> Any:
        with replaced(Stream, "wait_stream", lambda self, other: None):
            return group(beside, *args)

    return at_once


def _forgetting(grouped: Callable[..., Any]) -> Any:
    """Keep nothing of what is read beside the step, of a model that drops a lookup."""

    def forgetting(beside: GroupingStream, arena: Any, bags: Any) -> Any:
        found = grouped(beside, arena, bags)
        beside._reads[:] = [replace(bags, ids=bags.ids[:0], offsets=bags.offsets[:0], weights=None)]
        return found

    return forgetting


def _failing(forward: Callable[..., Any]) -> Any:
    """Raise an error in a forward pass that is captured, when rows were looked up."""

    def failing(*args: Any) -> Any:
        logits = forward(*args)
        if GRAPHS.capturing is not None:
            raise ValueError("this model is out of order")
        return logits

    return failing


FAULTS: dict[str, Callable[[Case], str]] = {
    "learning rates of the dense optimizer are not written": _with(Rates, "write", _once),
    "hyperparameters of the sparse optimizer are not written": _with(SparseOptimizer, "prepare", _without_writing),
    "places of bags are not kept": _with(StepGraph, "_capture", _without_keeping),
    "batches are not copied": _with(step_graph, "columns", lambda own: lambda batch: []),
    "the loss is waited for": _with(
        TrainingStep,
        "_gradient_of",
        lambda own: lambda self, total, divisor: own(self, total, divisor + 0 * total.item()),
    ),
    "the stream beside is not waited for": _with(GroupingStream, "join", lambda own: lambda self: None),
    "the stream beside does not wait for the step": _with(GroupingStream, "group", _without_waiting),
    "what the stream beside reads is not kept": _with(GroupingStream, "group", _forgetting),
    "the model fails": _with(hb.nn.DLRM, "forward", _failing),
    "nothing": _with(StepGraph, "_why_never", lambda own: own),
}
"""What must be found, and a change that is none."""


def _looking_up_twice(forward: Callable[..., Any]) -> Any:
    """Look a batch up once more, for nothing."""

    def twice(model: Any, batch: hb.Batch) -> Any:
        model.embeddings(batch.sparse)
        return forward(model, batch)

    return twice


def _looking_up_for_no_gradient(forward: Callable[..., Any]) -> Any:
    def twice(model: Any, batch: hb.Batch) -> Any:
        with torch.no_grad():
            model.embeddings(batch.sparse)
        return forward(model, batch)

    return twice


def _frozen(forward: Callable[..., Any]) -> Any:
    """Train no table."""

    def frozen(model: Any, batch: hb.Batch) -> Any:
        for handle in model.embeddings.handles.values():
            handle.requires_grad_(False)
        return forward(model, batch)

    return frozen


LOOKUPS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "one": lambda own: own,
    "two": _looking_up_twice,
    "one, and one without gradients": _looking_up_for_no_gradient,
    "one, of frozen tables": _frozen,
}
"""Forward passes of DLRM by what they look up."""


def looked_up(case: Case, change: Callable[[Callable[..., Any]], Any]) -> dict[str, Any]:
    """Train a model with another forward pass, captured and not; say how often ids were grouped beside it."""
    MODEL.hazards.clear()
    with recorded(), replaced(hb.nn.DLRM, "forward", change(hb.nn.DLRM.forward)), noted_groups() as beside:
        _, eager, _ = trained(case, batches_of(case), graphs=False)
        _, replayed, addresses = trained(case, batches_of(case), graphs=True)
    captures = len(addresses.replayed)
    return {"same": same(eager, replayed), "beside": len(beside) / captures, "hazards": list(MODEL.hazards)}


def stopped(case: Case) -> dict[str, Any]:
    """Train until a batch that a captured step is replayed with has an infinite input."""
    trainer, steps = trainer_of(case, cuda_graph=True), _Steps()
    trainer.callbacks.append(steps)
    addresses = _Addresses(trainer)
    batches = batches_of(case)[:8]
    dense = batches[-1].dense
    assert dense is not None
    dense[5, 3] = torch.inf
    try:
        trainer.fit(batches)
        error = ""
    except hb.HotbedError as raised:
        error = f"{type(raised).__name__}: {raised}"
    now = state_of(trainer)
    return {
        "error": error,
        "untouched": all(map(torch.equal, now, steps.states[-1])) and len(now) == len(steps.states[-1]),
        "steps": trainer.step,
        "rates": trainer.schedules["dense"].last_epoch,
        "replayed": sum(map(len, addresses.replayed.values())),
        "eager": addresses.eager,
    }


def compared_as_on_a_gpu() -> dict[str, Any]:
    """Run what `benchmarks.gpu_census` compares on a GPU, of its tiny sizes."""
    os.environ["HOTBED_TINY"] = "1"
    from benchmarks.gpu import Sizes
    from benchmarks.gpu_census import CASES, replayed

    usual: dict[str, Any] = {"rule": "rowwise_adagrad", "dtype": "fp32", "ragged": False, "moving": False}
    graphs = {name: (replayed(Sizes.choose(), **usual | case), len(GRAPHS.captured)) for name, case in CASES.items()}
    return {name: found | {"graphs": count} for name, (found, count) in graphs.items()}


def left_out(case: Case) -> dict[str, Any]:
    """Train with what keeps steps from being captured: none of them may be another, or be refused."""
    found: dict[str, Any] = {}

    def with_hook(trainer: Trainer) -> None:
        trainer.model.register_forward_hook(lambda *_: None)

    def with_marks(trainer: Trainer) -> None:
        embeddings: Any = trainer.model.embeddings
        for store in embeddings.stores():
            store.track("token")

    eager = eager_steps(case)
    for name, change in {"a hook": with_hook, "rows are marked": with_marks}.items():
        trainer, steps = trainer_of(case, cuda_graph=True), _Steps()
        change(trainer)
        trainer.callbacks.append(steps)
        addresses = _Addresses(trainer)
        trainer.fit(batches_of(case))
        found[name] = {"same": same(eager, steps), "eager": addresses.eager, "replayed": len(addresses.replayed)}
    return found
