"""Run training steps: `TrainingStep.queue` runs forward pass, loss, backward pass, clipping and updates.

A loss that is not finite must not change any parameter or row. There are two ways to ensure this:

- *The host decides.* It waits for the loss before the backward pass. This works with any optimizer.
- *The device decides* (`LossGate`). This works on CUDA devices if all optimizers can skip a step on the device:
  optimizers of `hotbed.optim`, and optimizers of torch with ``fused=True``. The loss is copied to page-locked memory
  while the backward pass and the updates are queued. The host reads the loss when the whole step is queued, so the
  device never waits for the host.

Both ways raise the same error. Losses, numbers of samples and requests are summed over ranks before the backward pass.
So all ranks make the same decision and divide by the same number.

`LoggedStep` measures logged steps on CPUs: the seconds of each part of a step, and gradient norms. On GPUs the host's
clock would time the queueing of kernels, and reading a norm would make the host wait.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from hotbed.batch import Batch, Embeddings
from hotbed.embed import Distributed, EmbeddingCollection, collections_of
from hotbed.embed.clip import clip_factor, gradient_norm, scale_gradients_
from hotbed.embed.slices import Slicer, VirtualBatch
from hotbed.errors import NonFiniteError
from hotbed.optim import SparseOptimizer
from hotbed.store.memory import staging
from hotbed.torch_private import count_step, is_compiled
from hotbed.train.numerics import Numerics
from hotbed.train.prefetch import RowPrefetcher
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.retrieval import trained_samples

StepName = Callable[[], str]
"""Returns the name of a step for errors, e.g. "step 7 (epoch 0, batch 6)"."""
Requests = Callable[[], tuple[bool, bool]]
"""Returns whether this rank requests a checkpoint, and whether it requests the end of training."""


class Done(NamedTuple):
    """Results of a step over all ranks."""

    loss: float  # mean loss
    samples: int  # number of samples
    save: bool  # whether any rank has requested a checkpoint
    stop: bool  # whether any rank has requested the end of training


class QueuedStep(NamedTuple):
    """A queued step; its losses have not been read yet."""

    parts: Sequence[Batch]
    own: list[Tensor]  # for each part, the summed loss of this rank's samples (0-d)
    # For each part, sums over ranks: loss, labels, samples, save, stop. `LossGate` has the sums that arrive later.
    sums: list[Sequence[float]]
    step_name: StepName


class TrainingStep:
    """Run training steps of a model.

    Gradients are clipped to the norm ``max_norm``. ``rows`` fetches the rows of a part of a divided batch.
    """

    def __init__(
        self,
        model: nn.Module,
        numerics: Numerics,
        ranks: Ranks,
        device: torch.device,
        rows: RowPrefetcher | None,
        max_norm: float | None = None,
    ) -> None:
        self._model, self.numerics, self._ranks, self._rows = model, numerics, ranks, rows
        self._device, self._max_norm, self.logged = device, max_norm, LoggedStep(model)
        self._slicer: Slicer | None = None  # None: each process is one virtual rank
        if isinstance(model, Distributed) and not model.virtual.are_processes:
            self._slicer = Slicer(model)
        self._optimizers: list[Optimizer] = []
        self.gate: LossGate | None = None  # None: the host decides on losses
        self._seed: tuple[float, Tensor] | None = None

    def begin(self, optimizers: Iterable[Optimizer]) -> None:
        """Set the optimizers, and choose whether the host or the device decides if a loss is finite."""
        self._optimizers = list(optimizers)
        on_device = self._device.type == "cuda" and self._ranks.adds_on_devices
        on_device = on_device and all(map(_can_skip, self._optimizers))
        # With a scaler, optimizers read the scaler's flag. With clipping, the host computes the gradient norm.
        on_device = on_device and self.numerics.scaler is None and self._max_norm is None
        self.gate = (
            LossGate(self._device, self._optimizers, several=self._ranks.virtual.total > 1) if on_device else None
        )

    def queue(self, parts: Sequence[Batch], step_name: StepName, requests: Requests) -> QueuedStep:
        """Queue a step on the parts of a batch; `read` waits for its losses.

        ``requests`` is called when the forward pass is queued. If the host decides, a loss that is not finite raises
        `NonFiniteError` before any update. If the device decides, `read` raises the error.
        """
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        pending = self.gradients(parts, step_name, requests)
        self.logged.at_gradients(self._optimizers)
        if self._max_norm is not None:
            self._clip(self._max_norm, step_name)
        self._update()
        self.logged.end()
        return pending

    def gradients(self, parts: Sequence[Batch], step_name: StepName, requests: Requests) -> QueuedStep:
        """Queue the forward and backward passes of a step, part by part."""
        ranks, gate, scaler, logged = self._ranks.virtual.total, self.gate, self.numerics.scaler, self.logged
        pending = QueuedStep(parts, [], [], step_name)
        samples = sum(map(trained_samples, parts))
        for number, (part, following) in enumerate(zip(parts, [*parts[1:], None], strict=True)):
            # Rows of the next part are fetched while this part is computed. Gradients of parts are added before ranks
            # average them.
            last = following is None
            wait = self._rows.start(following) if self._rows is not None and following is not None else None
            with self._virtual_ranks(part, last=last) as virtual_ranks:
                # Forward pass. Losses are kept without autograd's graph, which would live until the next step.
                with self.numerics.autocast():
                    losses, tasks = self.numerics.summed_losses(virtual_ranks)
                of_rank = [loss.detach() for loss in losses]
                pending.own.append(of_rank[0] if len(of_rank) == 1 else torch.stack(of_rank).sum())
                logged.mark("forward")
                # Sums over ranks. Ranks average their gradients. So the gradients of the mean loss are the gradients of
                # this rank's summed loss, divided by labels / virtual ranks.
                labels = float(samples * tasks)
                if gate is None:
                    # The host must wait for the loss here, because backward may already update the tables. The next
                    # batch is copied to the device meanwhile.
                    pending.sums.append(self._ranks.add_losses(of_rank, labels, samples, *requests()))
                    self.read(pending)
                    if ranks > 1:
                        logged.mark("ranks")
                    divisor = max(pending.sums[-1][1], 1) / ranks
                    seeds = [self._gradient_of(loss, divisor) for loss in losses]
                elif ranks == 1:
                    gate.add(number, of_rank[0])
                    pending.sums.append((0.0, labels, samples, *requests()))
                    seeds = [self._gradient_of(losses[0], max(labels, 1))]
                else:
                    sums = self._ranks.sums(of_rank, labels, samples, *requests())
                    gate.add(number, sums)
                    pending.sums.append(())
                    seeds = [(ranks / sums[1].clamp(min=1)).to(loss.dtype) for loss in losses]
                # Backward pass.
                for rank, (loss, seed) in enumerate(zip(losses, seeds, strict=True)):
                    with virtual_ranks.gradients_of(rank):
                        loss.backward(gradient=seed if scaler is None else scaler.scale(seed))
                virtual_ranks.end()
            if wait is not None:
                wait()
            logged.mark("backward")
        return pending

    @contextmanager
    def _virtual_ranks(self, part: Batch, *, last: bool) -> Generator[VirtualBatch]:
        """Divide a part of a batch into the virtual ranks of this process. ``last`` is the last part of a batch."""
        if self._slicer is not None:
            with self._slicer.divide(part, last=last) as divided:
                yield divided
        else:
            with self._model.no_sync() if isinstance(self._model, Distributed) and not last else nullcontext():
                yield VirtualBatch([part])

    def read(self, pending: QueuedStep) -> Done:
        """Wait for the losses of a queued step and return its results; raise `NonFiniteError` for a NaN or infinity."""
        sums, loss = pending.sums, 0.0
        if self.gate is not None:
            sums = [[*late, *known[len(late) :]] for late, known in zip(self.gate.values(), sums, strict=True)]
        for number, (value, labels, *_) in enumerate(sums):
            loss += value / max(labels, 1)
            if not math.isfinite(loss):
                if self.gate is not None:
                    self.gate.forget_first_step()
                parts = len(pending.parts)
                which = "the batch" if parts == 1 else f"part {1 + number} of {parts} of the batch"
                own, part = pending.own[number], pending.parts[number]
                raise self.numerics.non_finite_error(loss, own, part, which, pending.step_name())
        _, _, samples, save, stop = sums[-1]
        return Done(loss, int(samples), bool(save), bool(stop))

    def measure_next(self) -> None:
        """Measure the next step, unless it runs on a GPU or its gradients are scaled."""
        if self._device.type == "cpu" and self.numerics.scaler is None:
            self.logged.begin()

    @property
    def states_of_generators(self) -> list[tuple[Tensor, Tensor]] | None:
        """States of torch's generators by virtual rank of this process; None if it computes one virtual rank."""
        return None if self._slicer is None else self._slicer.states

    @property
    def seeds(self) -> list[Tensor]:
        """Gradients that start the backward passes. A captured graph must keep them alive."""
        return [] if self._seed is None else [self._seed[1]]

    def _gradient_of(self, total: Tensor, divisor: float) -> Tensor:
        """Return ``1 / divisor``, the gradient at ``total`` in the backward pass of ``total / divisor``.

        It has the dtype and device of ``total``. Consecutive calls with the same divisor return the same tensor.
        """
        last = self._seed
        if last is None or last[0] != divisor or last[1].dtype != total.dtype:
            self._seed = last = divisor, torch.ones((), dtype=total.dtype, device=total.device) / divisor
        return last[1]

    def _clip(self, max_norm: float, step_name: StepName) -> None:
        """Clip all gradients to ``max_norm``.

        If their norm is not finite, raise `NonFiniteError`. With a loss scaler, skip the step instead.
        """
        scaler = self.numerics.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        norm = gradient_norm(self._model) / scale
        if math.isfinite(norm):
            scale_gradients_(self._model, clip_factor(norm, max_norm))
        elif scaler is not None:
            # NaN makes all optimizers skip the step, even if only some gradients have overflowed.
            scale_gradients_(self._model, math.nan)
        else:
            raise NonFiniteError(
                f"norm of the gradients: got {norm} in {step_name()}, expected a finite norm. Training stopped before "
                "this batch updated any parameter or table. Lower the learning rates, or raise schedule.warmup_steps"
            )

    def _update(self) -> None:
        """Call ``step`` of all optimizers. They skip it if a loss is not finite or a scaled gradient overflowed."""
        scaler = self.numerics.scaler
        if self.gate is not None:
            self.gate.step()
        elif scaler is None:
            for optimizer in self._optimizers:
                optimizer.step()
                self.logged.mark("tables" if isinstance(optimizer, SparseOptimizer) else "dense")
        else:
            for optimizer in self._optimizers:
                if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                    count_step(optimizer)
                    scaler.step(optimizer)
                else:  # no parameter has a gradient, so none can overflow
                    optimizer.step()
            scaler.update()


def _can_skip(optimizer: Optimizer) -> bool:
    """Return whether an optimizer can skip a step on the device, without waiting for the host."""
    return isinstance(optimizer, SparseOptimizer) or all(bool(group.get("fused")) for group in optimizer.param_groups)


class LossGate:
    """Prevent updates if a loss is not finite. The device decides this, while losses are copied to the host."""

    def __init__(self, device: torch.device, optimizers: Sequence[Optimizer], *, several: bool = False) -> None:
        self._device, self._optimizers = device, optimizers
        # In page-locked memory, one row per part [parts, 1 or 5]: the loss, or the five sums over ranks
        self.arrived = staging((1, 5) if several else (1, 1), torch.float64 if several else torch.float32, device)
        self._copied = torch.cuda.Event()
        self._sent = self.sent
        self._flags = torch.zeros(2, dtype=torch.float32, device=device)
        self._found_inf, self._gate = self._flags.unbind()
        self._if_finite = torch.tensor([0.0, 1.0]).to(device)
        self._doubt: Tensor | None = None
        self._parts = 0
        self._began: list[Optimizer] = []

    def add(self, number: int, sums: Tensor) -> None:
        """Start to copy the sums of part ``number`` to the host.

        With one rank, ``sums`` is the loss of the part (0-d). With several ranks, ``sums`` has five sums over ranks
        ``[5]``: the loss, the numbers of labels and samples, and the numbers of requests to save and to stop.
        """
        if number == len(self.arrived):
            self._copied.synchronize()
            self.arrived = torch.cat([self.arrived, self.arrived]).pin_memory()
        own = sums.view(-1)[0]
        self.arrived[number].copy_(sums.view(-1), non_blocking=True)
        doubt = own - own  # NaN if the loss is not finite, else 0
        self._doubt = doubt if number == 0 or self._doubt is None else self._doubt + doubt
        self._parts = number + 1
        self._sent()

    def sent(self) -> None:
        """Record an event after the copies to the host. `values` waits for it."""
        self._copied.record()

    @contextmanager
    def calling(self, sent: Callable[[], None]) -> Generator[None]:
        """Inside the context, `add` calls ``sent`` instead of `LossGate.sent`."""
        self._sent = sent
        try:
            yield
        finally:
            self._sent = self.sent

    def replaying(self) -> None:
        """Prepare for the replay of a captured step. Such a step has one part, and its optimizers have states."""
        self._parts, self._began = 1, []

    def step(self) -> None:
        """Call ``step`` of all optimizers. Their kernels update nothing if a flag on the device forbids updates."""
        assert self._doubt is not None
        self._began = [o for o in self._optimizers if not isinstance(o, SparseOptimizer) and not o.state]
        torch.logical_xor(self._if_finite, self._doubt, out=self._flags)  # NaN counts as true, so it flips both flags
        for optimizer in self._optimizers:
            if isinstance(optimizer, SparseOptimizer):
                optimizer.gate = self._gate
                optimizer.step()
                optimizer.gate = None
            else:
                self._step_fused(optimizer)

    def _step_fused(self, optimizer: Optimizer) -> None:
        """Call ``step`` of a fused optimizer of torch; its kernels update nothing if ``found_inf`` is not 0."""
        # `torch.amp.GradScaler` also sets this attribute, because ``step`` has no such argument. A scaler itself would
        # read all gradients once more, and could not skip a step because of its loss.
        gated: Any = optimizer
        gated.grad_scale, gated.found_inf = None, self._found_inf
        try:
            with _float32_rates(optimizer):
                gated.step()
        finally:
            del gated.grad_scale, gated.found_inf

    def forget_first_step(self) -> None:
        """Remove optimizer states that the last step allocated but did not write, because its loss was not finite."""
        for optimizer in self._began:
            optimizer.state.clear()

    def values(self) -> list[list[float]]:
        """Wait until the sums of the step are on the host. Return a list for each part with its sums (see `add`)."""
        self._copied.synchronize()
        return self.arrived[: self._parts].tolist()


@contextmanager
def _float32_rates(optimizer: Optimizer) -> Generator[None]:
    """Inside the context, round learning rates to float32, because captured kernels read float32 rates."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate if isinstance(rate, Tensor) else ctypes.c_float(rate).value
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class LoggedStep:
    """Measure the seconds of each part of a step, and gradient norms, without changing the results of the step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        # squares: by collection path and table name, the sum of squares of the gradients of looked-up vectors, summed
        # over measured steps. steps: number of these steps. Both restart from 0 when a run is resumed.
        self.squares, self.steps = defaultdict[tuple[str, str], float](float), 0
        self._seconds, self._found = defaultdict[str, float](float), dict[str, float]()
        self._last: float | None = None
        self._hooks: list[RemovableHandle] = []
        self._gradients: list[tuple[str, list[str | None], Tensor]] = []

    def begin(self) -> None:
        """Start measuring a step."""
        self.end()
        self._found.clear()
        self._seconds.clear()
        if not is_compiled(self._model):
            for path, collection in collections_of(self._model).items():
                self._hooks += [
                    collection.register_forward_pre_hook(self._before_lookup),
                    collection.register_forward_hook(partial(self._looked_up, path)),
                ]
        self._last = time.perf_counter()

    def mark(self, part: str) -> None:
        """If the step is measured, add the seconds since the last mark to ``part``, e.g. ``"forward"``."""
        if self._last is not None:
            now = time.perf_counter()
            self._seconds[part] += now - self._last
            self._last = now

    def at_gradients(self, optimizers: Iterable[Optimizer]) -> None:
        """If the step is measured, compute its gradient norms. The time of this call counts for no part of the step."""
        if self._last is None:
            return
        self._found = dense_gradient_norm(optimizers)
        self.steps += bool(self._hooks)
        for path, tables, grad in self._gradients:
            of_features = torch.linalg.vector_norm(grad, dim=(0, 2), dtype=torch.float32).double().square()
            for table, square in zip(tables, of_features.tolist(), strict=True):
                if table is not None:
                    self.squares[path, table] += square
        self._gradients.clear()
        self._last = time.perf_counter()

    def record(self) -> dict[str, float]:
        """Return the measurements of the last measured step for a log record, and clear them."""
        seconds = {f"step_{part}_s": s for part, s in self._seconds.items()}
        found = {**self._found, **seconds}
        self._found.clear()
        self._seconds.clear()
        return found

    def norms(self, add: Callable[..., list[float]], ranks: int) -> dict[tuple[str, str], float | None]:
        """Return the root mean square of each table's gradient norm over the measured steps; all ranks must call this.

        The gradients belong to looked-up vectors. A table without gradients has None. ``add`` returns the sum over
        ranks of each argument.
        """
        tables = [(path, table) for path, c in collections_of(self._model).items() for table in c.tables]
        sums = add(*(self.squares[of] for of in tables)) if tables else []
        return {
            of: math.sqrt(total / self.steps) / ranks if self.steps and total else None
            for of, total in zip(tables, sums, strict=True)
        }

    def end(self) -> None:
        """End the measured step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._gradients.clear()
        self._last = None

    def _before_lookup(self, *_: object) -> None:
        self.mark("forward")

    def _looked_up(self, path: str, collection: EmbeddingCollection, _: object, found: Embeddings) -> None:
        """Add the time of a lookup to part ``"lookup"``, and add hooks that keep the gradients of looked-up vectors."""
        self.mark("lookup")
        if collection.is_sliced:
            return  # these vectors are part of an earlier lookup
        table_of = {f.name: f.table for f in collection.features}
        for names, vectors in found.looked_up():
            if vectors.requires_grad:
                tables = [
                    table_of[name] if collection.handles[table_of[name]].requires_grad else None for name in names
                ]
                vectors.register_hook(partial(self._arrived, path, tables))

    def _arrived(self, path: str, tables: list[str | None], grad: Tensor) -> None:
        """Keep a gradient of vectors: ``[…, D]``, or ``[B, features, D]`` for pooled features.

        ``tables`` has the table of each feature, or None if the table is not trained.
        """
        if self._last is not None:
            self._gradients.append((path, tables, grad.detach().reshape(-1, len(tables), grad.shape[-1])))


def dense_gradient_norm(optimizers: Iterable[Optimizer]) -> dict[str, float]:
    """Return ``grad_norm_dense``, the Euclidean norm of all dense gradients.

    Return an empty dict if there are no gradients, or if each rank has only shards of the gradients. All ranks return
    the same norm.
    """
    dense = [optimizer for optimizer in optimizers if not isinstance(optimizer, SparseOptimizer)]
    grads = [p.grad for o in dense for group in o.param_groups for p in group["params"] if p.grad is not None]
    if not grads or any(isinstance(grad, DTensor) for grad in grads):
        return {}
    return {"grad_norm_dense": nn.utils.get_total_norm(grads).item()}
