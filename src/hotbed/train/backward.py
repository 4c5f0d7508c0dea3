"""Compute the gradients of a batch, and let nothing be updated by a loss that is not finite.

There are two ways to know that it is not. *Before backward*: the host waits for the loss; this works with any
optimizer. *On the device*: on CUDA devices with optimizers that can be told there to touch nothing (those of
`hotbed.optim`; torch's with ``fused=True``), the device decides it, and the loss is on its way to page-locked memory
while backward and the updates are queued behind it. The host reads it when it has queued the whole step, so the device
never waits for the host; the error is the same. Several ranks add up losses, samples and requests before backward,
either way: all decide alike, and divide by the same number.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hotbed.batch import Batch
from hotbed.embed import Distributed
from hotbed.embed.clip import clip_factor, gradient_norm, scale_gradients_
from hotbed.errors import NonFiniteError
from hotbed.optim import SparseOptimizer
from hotbed.store.memory import staging
from hotbed.train.logged_step import LoggedStep
from hotbed.train.numerics import Numerics
from hotbed.train.parallel import Ranks
from hotbed.train.pipeline import RowPrefetcher
from hotbed.train.retrieval import trained_samples


class Done(NamedTuple):
    """What is known of a step when it has been taken."""

    loss: float  # the mean loss
    samples: int  # of all ranks
    # save, stop: whether any rank has requested so
    save: bool
    stop: bool


Reading = Callable[[], Done]
"""Returns what is known of a step, once its loss has arrived; raises `NonFiniteError` if that is not finite."""


def _nothing() -> tuple[bool, bool]:
    return False, False


class Backward:
    """Compute gradients of the mean loss of batches."""

    def __init__(
        self,
        model: nn.Module,
        numerics: Numerics,
        ranks: Ranks,
        device: torch.device,
        rows: RowPrefetcher | None,
        max_norm: float | None = None,
    ) -> None:
        self._max_norm = max_norm
        self._model, self.numerics, self._ranks, self._rows = model, numerics, ranks, rows
        self._device, self.logged = device, LoggedStep(model)
        self.late: LateLosses | None = None  # lets the device decide on losses; None: the host waits for them
        self._seed: tuple[float, Tensor] | None = None

    def choose(self, optimizers: Iterable[Optimizer]) -> None:
        """Choose how a loss that is not finite is found, by what the optimizers can do."""
        optimizers = list(optimizers)
        late = self._device.type == "cuda" and self._ranks.adds_on_devices and all(map(_can_skip, optimizers))
        late = late and self.numerics.scaler is None  # whose own flag the optimizers read
        late = late and self._max_norm is None  # the host computes the norm of the gradients
        self.late = LateLosses(self._device, optimizers, several=self._ranks.size > 1) if late else None

    def step(
        self,
        parts: Sequence[Batch],
        optimizers: Iterable[Optimizer],
        place: Callable[[], str],
        requests: Callable[[], tuple[bool, bool]] = _nothing,
    ) -> Reading:
        """Take a step: compute gradients of a batch's parts, see `__call__`, and step all optimizers."""
        for optimizer in optimizers:
            optimizer.zero_grad()
        done = self(parts, place, requests)
        self.logged.at_gradients(optimizers)
        if self._max_norm is not None:
            self._clip(self._max_norm, place)
        self.update(optimizers)
        self.logged.end()
        return done

    def _clip(self, max_norm: float, place: Callable[[], str]) -> None:
        """Scale all gradients down to a norm; raise `NonFiniteError` if they are not finite and not scaled."""
        scaler = self.numerics.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        norm = gradient_norm(self._model) / scale
        if math.isfinite(norm):
            scale_gradients_(self._model, clip_factor(norm, max_norm))
        elif scaler is not None:
            # All optimizers then skip the step, not only those whose gradients overflow.
            scale_gradients_(self._model, math.nan)
        else:
            raise NonFiniteError(
                f"the norm of the gradients is not finite: got {norm} in {place()}, expected a finite norm; training "
                "stopped before the batch touched any parameter or table. Lower the learning rates, or lengthen "
                "schedule.warmup_steps"
            )

    def __call__(
        self, parts: Sequence[Batch], place: Callable[[], str], requests: Callable[[], tuple[bool, bool]] = _nothing
    ) -> Reading:
        """Compute gradients of the mean loss of a batch's parts; call ``requests`` when the forward pass is queued."""
        samples = sum(map(trained_samples, parts))
        everyone = 0.0
        known = Done(0.0, samples, save=False, stop=False)
        checks: list[_Check] = []
        for number, (part, following) in enumerate(zip(parts, [*parts[1:], None], strict=True)):
            last = following is None
            rows = self._rows.start(following) if self._rows is not None and following is not None else None
            with self._model.no_sync() if isinstance(self._model, Distributed) and not last else nullcontext():
                total, tasks = self.numerics.summed_loss(part)
                self.logged.mark("forward")
                which = "the batch" if len(parts) == 1 else f"part {1 + number} of {len(parts)} of the batch"
                # Without the graph of autograd, which would live until the next step.
                check = _Check(self.numerics, total.detach(), part, which, place)
                everyone = float(samples * tasks)
                # Gradients of ranks are averaged: with this divisor to those of the mean over all samples.
                if self.late is None:
                    # This waits for the forward pass. It cannot be put off: once backward has run, a bad loss may have
                    # reached the tables. The next batch is on its way to the device meanwhile.
                    value, everyone, *others = self._ranks.add(total, everyone, samples, *requests())
                    known = _done(known.loss + value / max(everyone, 1), *others)
                    check(known.loss)
                    if self._ranks.size > 1:
                        self.logged.mark("ranks")
                    seed = self._gradient_of(total, self._divisor(everyone))
                elif self._ranks.size == 1:
                    self.late.add(number, total.detach())
                    known = Done(0.0, samples, *requests())
                    seed = self._gradient_of(total, self._divisor(everyone))
                else:
                    sums = self._ranks.sums(total, everyone, samples, *requests())
                    self.late.add(number, sums)
                    seed = (self._ranks.size / sums[1].clamp(min=1)).to(total.dtype)
                checks.append(check)
                total.backward(gradient=seed if self.numerics.scaler is None else self.numerics.scaler.scale(seed))
            if rows is not None:
                rows.result()
            self.logged.mark("backward")

        return (lambda: known) if self.late is None else partial(self._judged, self.late, checks, everyone, known)

    def _divisor(self, everyone: float) -> float:
        return max(everyone / self._ranks.size, 1 / self._ranks.size)

    def replayed(self, batch: Batch, place: Callable[[], str], asked: tuple[bool, bool]) -> Reading:
        """Return what `step` does, of a batch whose captured step was replayed; its loss is on its way."""
        assert self.late is not None
        assert batch.labels is not None
        check = _Check(self.numerics, self.late.arrived[0, 0], batch, "the batch", place)
        return partial(self._judged, self.late, [check], float(batch.labels.numel()), Done(0.0, len(batch), *asked))

    def _judged(self, late: LateLosses, checks: Sequence[_Check], everyone: float, known: Done) -> Done:
        """Return what is known once the loss has arrived; raise if it is not finite."""
        found = 0.0
        for (value, *sums), check in zip(late.values(), checks, strict=True):
            if sums:
                everyone, *others = sums
                known = _done(0.0, *others)
            found += value / max(everyone, 1)
            if not math.isfinite(found):
                late.forget_first_step()
            check(found)
        return known._replace(loss=found)

    def measure_next(self) -> None:
        """Measure the next step, if it is a CPU's and gradients are not scaled."""
        if self._device.type == "cpu" and self.numerics.scaler is None:
            self.logged.begin()

    def update(self, optimizers: Iterable[Optimizer]) -> None:
        """Step all optimizers; none touches anything if a loss was not finite, or a scaled gradient overflowed."""
        scaler = self.numerics.scaler
        if self.late is not None:
            self.late.step()
        elif scaler is None:
            for optimizer in optimizers:
                optimizer.step()
                self.logged.mark("tables" if isinstance(optimizer, SparseOptimizer) else "dense")
        else:
            for optimizer in optimizers:
                if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
                    vars(optimizer)["_opt_called"] = True  # schedules count steps that overflow, too
                    scaler.step(optimizer)
                else:  # it has nothing that could overflow
                    optimizer.step()
            scaler.update()

    @property
    def seeds(self) -> list[Tensor]:
        """What the last backward pass began with; who replays its kernels must keep it."""
        return [] if self._seed is None else [self._seed[1]]

    def _gradient_of(self, total: Tensor, divisor: float) -> Tensor:
        """Return ``1 / divisor`` on the device: the last one, where batches are of one size."""
        last = self._seed
        if last is None or last[0] != divisor or last[1].dtype != total.dtype:
            self._seed = last = divisor, torch.ones((), dtype=total.dtype, device=total.device) / divisor
        return last[1]


def _done(loss: float, samples: float, save: float, stop: float) -> Done:
    return Done(loss, int(samples), bool(save), bool(stop))


class _Check(NamedTuple):
    """What the error for a loss that is not finite is made from."""

    numerics: Numerics
    total: Tensor
    part: Batch
    which: str
    place: Callable[[], str]

    def __call__(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise self._error(loss)

    def _error(self, loss: float) -> NonFiniteError:
        return self.numerics.non_finite_error(loss, self.total, self.part, self.which, self.place())


def _can_skip(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step can be told on the device to touch nothing."""
    return isinstance(optimizer, SparseOptimizer) or all(bool(group.get("fused")) for group in optimizer.param_groups)


class LateLosses:
    """Losses of a batch's parts: the device decides on them while they are copied to the host."""

    def __init__(self, device: torch.device, optimizers: Sequence[Optimizer], *, several: bool = False) -> None:
        self._device, self._optimizers = device, optimizers
        # by part [parts, 1 or 5], in page-locked memory
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
        """Send the loss of a part, 0-d, or the sums of all ranks ``[5]``, of which it is the first, on its way."""
        if number == len(self.arrived):
            self._copied.synchronize()
            self.arrived = torch.cat([self.arrived, self.arrived]).pin_memory()
        own = sums.view(-1)[0]
        self.arrived[number].copy_(sums.view(-1), non_blocking=True)
        doubt = own - own  # NaN where it is not finite, else 0
        self._doubt = doubt if number == 0 or self._doubt is None else self._doubt + doubt
        self._parts = number + 1
        self._sent()

    def sent(self) -> None:
        """Note that the loss of a part is on its way, and nothing else that the host would wait for."""
        self._copied.record()

    @contextmanager
    def calling(self, sent: Callable[[], None]) -> Generator[None]:
        """Call this instead of `sent` inside."""
        self._sent = sent
        try:
            yield
        finally:
            self._sent = self.sent

    def replaying(self) -> None:
        """Note that a captured step is replayed: of one part, by optimizers that have taken steps."""
        self._parts, self._began = 1, []

    def step(self) -> None:
        """Step all optimizers, whose kernels read whether they may."""
        assert self._doubt is not None
        self._began = [o for o in self._optimizers if not isinstance(o, SparseOptimizer) and not o.state]
        torch.logical_xor(self._if_finite, self._doubt, out=self._flags)  # NaN is true, so it turns both around
        for optimizer in self._optimizers:
            if isinstance(optimizer, SparseOptimizer):
                optimizer.gate = self._gate
                optimizer.step()
                optimizer.gate = None
            else:
                self._step_fused(optimizer)

    def _step_fused(self, optimizer: Optimizer) -> None:
        """Step a fused optimizer of torch, whose kernels update nothing where ``found_inf`` is not 0.

        Torch has no argument for it: the attribute is the interface between `torch.amp.GradScaler` and optimizers.
        A scaler itself would search all gradients once more and could not skip a step because of its loss.
        """
        gated: Any = optimizer
        gated.grad_scale, gated.found_inf = None, self._found_inf
        try:
            with _float32_rates(optimizer):
                gated.step()
        finally:
            del gated.grad_scale, gated.found_inf

    def forget_first_step(self) -> None:
        """Drop the state of optimizers that began with the last step: moments were allocated, and not written."""
        for optimizer in self._began:
            optimizer.state.clear()

    def values(self) -> list[list[float]]:
        """Return the losses, or sums, by part, once they have arrived."""
        self._copied.synchronize()
        return self.arrived[: self._parts].tolist()


@contextmanager
def _float32_rates(optimizer: Optimizer) -> Generator[None]:
    """Round learning rates to float32 inside, which they are where kernels read them in the device's memory."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate if isinstance(rate, Tensor) else ctypes.c_float(rate).value
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
