"""`Trainer`: the training loop.

What happens in a step is `Trainer.fit`; the rest of this file is what it calls. A trainer takes a model, its optimizers
and any iterable of `Batch`; everything that is not training (logs, progress, checkpoints, stopping early) is a
`Callback`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hotbed.batch import Batch
from hotbed.checkpoint import RandomState, Stateful
from hotbed.config import ScheduleRecipe, TrainRecipe
from hotbed.embed import Distributed, collections_of
from hotbed.errors import BatchError, RecipeError
from hotbed.store import Traffic
from hotbed.train.callbacks import Callback, refuse_non_finite
from hotbed.train.checkpointing import Saver
from hotbed.train.metrics import Metrics, checked_logits, evaluate, to_device
from hotbed.train.numerics import Numerics
from hotbed.train.parallel import Ranks
from hotbed.train.pipeline import Ahead, Divide, RowPrefetcher, whole
from hotbed.train.throughput import Balance, Clock

_COUNTERS = ("step", "epoch", "position", "samples")


class _Backward(NamedTuple):
    """Over all ranks: mean loss and number of samples, and whether any has asked to save or to stop."""

    loss: float
    samples: int
    save: bool
    stop: bool


class Trainer:
    """Trains a model.

    Parameters
    ----------
    model
        Maps a `Batch` to logits ``[B, T]``; on the device of the recipe already.
    dense
        Optimizer of the model's parameters.
    sparse
        Optimizer of its embedding tables.
    wide
        Optimizer of the tables of its wide part, where that has its own.
    recipe
        Batch size, number of steps, precision and so on.
    schedule
        Factor of all learning rates by step.
    callbacks
        Called in this order; also an attribute, to which more can be added.
    group
        Column of ``Batch.extra`` to group by in evaluations.
    labels
        Names of the tasks.
    overlap
        Whether a distributed model's ids are exchanged ahead, while the batch before is computed.
    divide
        Makes parts of each batch; the rows of a part are fetched while the part before is computed. Their gradients add
        up to the batch's. On several ranks each batch must have equally many parts.

    Attributes
    ----------
    step
        Steps taken.
    epoch
        Epochs finished.
    position
        Batches taken of the present epoch.
    samples
        Samples trained on, also by the runs that this one goes on from.
    stop
        A callback sets it to end training after the present step.
    ask_save, ask_stop
        Set by any rank, at any time: all save a checkpoint (if `KeepLast` is there), and end training, after the same
        step.
    evaluate_now
        A callback sets it in ``on_step``, on all ranks alike, to evaluate after the present step.
    save_now, told_to_stop
        Whether any rank had asked so before the present step.
    saver
        What saves checkpoints.
    numerics
        Precision and library of products, chosen when training starts.
    other_parts
        More that a run needs to go on, by name.
    """

    def __init__(
        self,
        model: nn.Module,
        dense: Optimizer,
        sparse: Optimizer,
        *,
        wide: Optimizer | None = None,
        recipe: TrainRecipe,
        schedule: ScheduleRecipe | None = None,
        callbacks: Sequence[Callback] = (),
        group: str | None = None,
        labels: Sequence[str] | None = None,
        overlap: bool = True,
        divide: Divide = whole,
    ) -> None:
        self.model, self.dense, self.sparse, self.wide, self.recipe = model, dense, sparse, wide, recipe
        self.optimizers = {"dense": dense, "sparse": sparse} | ({} if wide is None else {"wide": wide})
        self.callbacks, self.group, self.labels = list(callbacks), group, labels
        self.device = resolve_device(recipe.device)
        self.ranks = Ranks(model)
        self.numerics = Numerics(model, recipe, self.device, self.ranks)
        self._balance = Balance(model)
        self.ahead = Ahead(model, lambda batch: to_device(batch, model, self.device), overlap=overlap, divide=divide)
        self._fetcher = RowPrefetcher(model) if isinstance(model, Distributed) and divide is not whole else None
        self._factor = (schedule or ScheduleRecipe()).factor
        # torch counts from 0 the steps that were taken, the schedule from 1 the step to take.
        self.schedules = {
            name: LambdaLR(optimizer, lambda taken: self._factor(taken + 1))
            for name, optimizer in self.optimizers.items()
        }
        self.step = self.epoch = self.position = self.samples = 0
        self.steps_total: int | None = recipe.steps
        self.stop = self.ask_save = self.ask_stop = self.save_now = self.told_to_stop = False
        self.evaluate_now = False
        self.saver = Saver(self)
        self.other_parts: dict[str, Stateful] = {}
        self._batches: Iterable[Batch] = ()
        self._data_position: Mapping[str, Any] | None = None
        self.clock = Clock()
        self._recent: list[float] = []
        self._traffic = Traffic()
        self._of_callbacks: dict[str, Any] = {}
        if recipe.compile:
            model.compile()

    # -- the loop --------------------------------------------------------------------------------------------------

    def fit(self, batches: Iterable[Batch], valid: Iterable[Batch] | None = None) -> None:
        """Train until the recipe's epochs or steps are over, or a callback sets ``stop``.

        Parameters
        ----------
        batches
            Training batches with labels: a `Loader`, or anything that can be iterated once per epoch.
        valid
            Batches to evaluate on during training.

        Raises
        ------
        NonFiniteError
            If a loss is NaN or infinite; no parameter and no row has been touched by that batch. Gradients that
            are not finite although the loss is are not caught here: the loss of the next step shows them.
        BatchError
            If a batch does not fit the model, or an epoch has no batch.
        """
        self._start(batches)
        try:
            with self.ranks.explained():
                self._fit(batches, valid)
                self.ranks.sync()
                self.saver.finish()
                self._obey(False, *map(bool, self.ranks.add(self.ask_stop)))  # asked after the last step
            self._call("on_train_end")
        except BaseException:
            self.saver.abandon()
            raise
        finally:
            self.saver.release()

    def _fit(self, batches: Iterable[Batch], valid: Iterable[Batch] | None) -> None:
        while not self.finished:
            for parts, last in self._epoch_of(batches):
                self.ranks.at_step(self.step + 1)
                for optimizer in self.optimizers.values():
                    optimizer.zero_grad()
                done = self._backward(parts)
                for optimizer in self.optimizers.values():
                    optimizer.step()
                for schedule in self.schedules.values():
                    schedule.step()
                self._obey(done.save, done.stop)
                self._advance(done.samples, done.loss, last)
                if valid is not None and self._evaluation_is_due(last):
                    self.validate(valid)
                self._call("on_step_end")
                if self.finished:
                    break

    def _backward(self, parts: Sequence[Batch]) -> _Backward:
        """Leave the gradients of the mean loss over all samples with the optimizers."""
        samples, losses = sum(map(len, parts)), 0.0
        everyone = all_samples = save = stop = 0.0
        for number, (part, following) in enumerate(zip(parts, [*parts[1:], None], strict=True)):
            last = following is None
            fetching = self._fetcher.start(following) if self._fetcher and following is not None else None
            with self.model.no_sync() if isinstance(self.model, Distributed) and not last else nullcontext():
                total, tasks = self._total(part)
                # This waits for the forward pass, the one wait of a step. It cannot be put off: once backward has
                # run, a bad loss may have reached the tables. The next batch is on its way to the device meanwhile.
                own = total, samples * tasks, samples, self.ask_save, self.ask_stop
                value, everyone, all_samples, save, stop = self.ranks.add(*own)
                losses += value / max(everyone, 1)
                which = "the batch" if len(parts) == 1 else f"part {1 + number} of {len(parts)} of the batch"
                refuse_non_finite(losses, total, part, which, self)
                # Gradients of ranks are averaged: with this divisor to those of the mean over all samples.
                (total / max(everyone / self.ranks.size, 1 / self.ranks.size)).backward()
            if fetching is not None:
                fetching.result()
        return _Backward(losses, int(all_samples), bool(save), bool(stop))

    def loss(self, batch: Batch) -> Tensor:
        """Mean binary cross-entropy: Σ weight · loss ÷ (samples · tasks). The divisor does not know of weights."""
        total, tasks = self._total(batch)
        return total / max(len(batch) * tasks, 1)

    def _total(self, batch: Batch) -> tuple[Tensor, int]:
        """Σ weight · loss, and the number of tasks."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.numerics.precision == "bf16"):
            logits, labels = checked_logits(self.model(batch), batch.labels)
        weight = None if batch.weights is None else batch.weights[:, None]
        return F.binary_cross_entropy_with_logits(logits.float(), labels, weight, reduction="sum"), labels.shape[1]

    def _obey(self, save: bool, stop: bool) -> None:
        """Do what any rank has asked for."""
        self.save_now, self.told_to_stop, self.stop = save, self.told_to_stop or stop, self.stop or stop
        if save:
            self.ask_save = False

    @property
    def finished(self) -> bool:
        """Whether training is over."""
        out_of_steps = self.recipe.steps is not None and self.step >= self.recipe.steps
        return self.stop or out_of_steps or self.epoch >= self.recipe.epochs

    def validate(self, batches: Iterable[Batch]) -> Metrics:
        """Evaluate now, and tell the callbacks."""
        with self.clock.paused():
            metrics = self.evaluate(batches)
            self._call("on_eval", metrics)
        return metrics

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Metrics of the model as it is; see `evaluate`."""
        return evaluate(self.model, batches, device=self.device, group=self.group, labels=self.labels)

    @property
    def samples_per_s(self) -> float:
        """Training samples per second, without evaluations, checkpoints and the first 5 steps (see `Clock`)."""
        return self.clock.samples_per_s

    # -- what the loop calls ---------------------------------------------------------------------------------------

    def _start(self, batches: Iterable[Batch]) -> None:
        self._batches = batches
        self.model.train()
        self._call("on_numerics", self.numerics.settle())
        try:
            ahead = len(cast("Any", batches)) * (self.recipe.epochs - self.epoch) + self.step - self.position
            self.steps_total = min(ahead, self.recipe.steps or ahead)
        except TypeError:
            self.steps_total = self.recipe.steps
        for callback in self.callbacks:
            if (loaded := self._of_callbacks.pop(type(callback).__name__, None)) is not None:
                callback.load_state_dict(loaded)
        self._call("on_train_start")
        self.clock.start()

    def _epoch_of(self, batches: Iterable[Batch]) -> Iterator[tuple[list[Batch], bool]]:
        """The batches of an epoch on the device, as their parts, and whether each is the last.

        One batch is fetched ahead (see `Ahead`), so that it is there when the step is over. A checkpoint must not count
        it, so the loader's position is noted with each.
        """
        last = False
        for parts, position, last in self.ahead((batch, self._loader_state()) for batch in batches):
            self._data_position = position
            yield parts, last
        if not last:
            again = "; a generator can be iterated once only, pass a list or a Loader" if self.epoch else ""
            raise BatchError(f"epoch {self.epoch} has no batch{again}")

    def _loader_state(self) -> Mapping[str, Any] | None:
        return cast("Any", self._batches).state_dict() if hasattr(self._batches, "state_dict") else None

    def _advance(self, samples: int, loss: float, last: bool) -> None:
        self.step += 1
        self.samples += samples
        self.position += 1
        if last:
            self.epoch, self.position = self.epoch + 1, 0
        self.clock.tick(samples)
        self._recent.append(loss)
        self._call("on_step", loss)
        if self.step % self.recipe.log_every == 0 or self.finished:
            record = {
                "step": self.step,
                "epoch": self.epoch,
                "loss": sum(self._recent) / len(self._recent),
                **{f"lr_{name}": s.base_lrs[0] * self._factor(self.step) for name, s in self.schedules.items()},
                "samples_per_s": self.samples_per_s,
                **self._of_tiers(),
                **self._balance.record(),
            }
            self._recent.clear()
            self._call("on_log", record)

    @property
    def traffic(self) -> Traffic:
        """What caches and files of this rank's tables did so far."""
        return sum((c.traffic for c in collections_of(self.model).values()), Traffic())

    def _of_tiers(self) -> dict[str, float]:
        """What caches and files of this rank did since the last record, if there are any."""
        now = self.traffic
        before, self._traffic = self._traffic, now
        return {} if now == Traffic() else {"hit_rate": (now - before).hit_rate, **asdict(now - before)}

    def _evaluation_is_due(self, last: bool) -> bool:
        asked, self.evaluate_now = self.evaluate_now, False
        return asked or (last if self.recipe.eval_every is None else self.step % self.recipe.eval_every == 0)

    def _call(self, event: str, *args: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def report_checkpoint(self, record: dict[str, Any]) -> None:
        """Tell the callbacks what a checkpoint took."""
        self._call("on_checkpoint", record)

    def report_schedule(self, record: dict[str, float]) -> None:
        """Tell the callbacks what a schedule has decided."""
        self._call("on_schedule", record)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Stateful]:
        """Everything that a run needs to go on, by the name it has in a checkpoint."""
        return {
            "model": self.model,
            **self.optimizers,
            **{f"{name}_schedule": schedule for name, schedule in self.schedules.items()},
            "random": RandomState(self.ranks.gather, self.ranks.rank),
            "position": self,
            **self.other_parts,
        }

    def state_dict(self) -> dict[str, Any]:
        """Counters, losses since the last record, callbacks by class, and the loader's position if it has one."""
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "numerics": self.numerics.state_dict(),
            "losses": list(self._recent),
            "callbacks": {type(c).__name__: state for c in self.callbacks if (state := c.state_dict())},
            "data": self._data_position,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; callbacks do when training starts, `resume_data` sets the loader."""
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.numerics.load_state_dict(state.get("numerics", {}))
        self._recent = list(state["losses"])
        self._of_callbacks = dict(state["callbacks"])
        self._data_position = state["data"]

    def resume_data(self, loader: Stateful) -> None:
        """Set a loader to the position that was loaded."""
        if self._data_position is None:
            raise RecipeError("the checkpoint holds no position in the data; it cannot be resumed, only evaluated")
        loader.load_state_dict(self._data_position)


def resolve_device(device: str, option: str = "train.device") -> torch.device:
    """Device that ``option`` of a recipe or command line names; ``auto`` is CUDA where there is one.

    Raises
    ------
    RecipeError
        If CUDA is asked for and absent.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise RecipeError(f"{option} is cuda, but torch finds no CUDA device here; use auto or cpu")
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", torch.cuda.current_device())  # with its number: what is current, each thread has
    return torch.device(device.replace("auto", "cpu"))
