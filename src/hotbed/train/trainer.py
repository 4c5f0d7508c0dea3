"""Run the training loop: what it calls, and what callbacks may do.

What happens in a step is `Trainer.fit`; the rest of this file is what it calls. A trainer takes a model, its optimizers
and any iterable of `Batch`; what is not training (logs, progress, checkpoints, stopping early) is a `Callback`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hotbed.batch import Batch
from hotbed.checkpoint import RandomState, Stateful
from hotbed.config import ScheduleRecipe, TrainRecipe
from hotbed.embed import Distributed, collections_of
from hotbed.errors import BatchError, RecipeError
from hotbed.nn.layers import recompute_activations
from hotbed.nn.loss import SummedLoss, summed_cross_entropy
from hotbed.store import Traffic
from hotbed.train.checkpoints import Saver
from hotbed.train.cuda_graph import StepGraph
from hotbed.train.metrics import Metrics, OwnMetrics, evaluate, refuse_unnormalized, to_device
from hotbed.train.numerics import Numerics, is_one_graph, resolve_device
from hotbed.train.prefetch import BatchPrefetcher, Divide, RowPrefetcher, whole
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.retrieval import Retrieval, evaluate_found, trained_samples
from hotbed.train.size_classes import SizeClasses
from hotbed.train.step import TrainingStep
from hotbed.train.throughput import Balance, Clock, TierCounters

_COUNTERS = ("step", "epoch", "position", "samples")


class Callback:
    """Do something at certain moments of training; override what you need."""

    first_rank_only: ClassVar[bool] = False
    """Whether a recipe's callback is made on the first rank alone, as those that write are."""

    def on_numerics(self, trainer: Trainer, chosen: str) -> None:
        """Before `on_train_start`: in which precision, and by which library, the dense part is computed, and why."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Before the first step; ``trainer.steps_total`` is known here, if it can be."""

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """After every step; ``trainer.step`` counts it already."""

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Every ``log_every`` steps: step, epoch, mean loss since the last record, learning rates, samples/s, waits."""

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """After every evaluation during training."""

    def on_schedule(self, trainer: Trainer, record: dict[str, float]) -> None:
        """After an evaluation by which `HotSchedule` has set a rate: logloss, rate_before, rate."""

    def on_step_end(self, trainer: Trainer) -> None:
        """After a step and its evaluation, if it had one: a run goes on from here if this is what it saved."""

    def on_checkpoint(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """When this rank has written its files of a checkpoint: step, path, bytes, seconds, stalled_s (see `Saver`)."""

    def on_train_end(self, trainer: Trainer) -> None:
        """After the last step; not called when training fails."""

    def state_dict(self) -> Mapping[str, Any]:
        """What a resumed run is to know of this callback, as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""


class Trainer:
    """Train a model.

    Parameters
    ----------
    model
        Maps a `Batch` to logits ``[B, T]``; on the device of the recipe already.
    dense
        Optimizer of the model's parameters.
    sparse
        Optimizer of its embedding tables.
    group_optimizers
        Optimizers of parameters and tables that those two do not train, by name, also in logs and checkpoints.
    recipe
        Batch size, number of steps, precision and so on.
    schedule
        Factor of all learning rates by step.
    callbacks
        Called in this order; an attribute, too.
    group
        Column of ``Batch.extra`` to group by in evaluations.
    labels
        Names of the tasks.
    metrics
        By name, what makes a metric that evaluations compute, too; see `hotbed.train.metrics.own_metrics`.
    loss
        Maps logits and labels ``[…, B, T]`` and sample weights ``[B, 1]`` or ``[B, T]`` (or None) to the sum of all
        losses; by default binary cross-entropy. Or a `Retrieval`.
    overlap
        Whether a distributed model's ids are exchanged while the batch before is computed.
    divide
        Divides each batch; rows of a part are fetched while the part before is computed, and gradients add up to the
        batch's. On several ranks each batch must have equally many parts.

    Attributes
    ----------
    step, epoch, position
        Steps taken, epochs finished, and batches taken of the present epoch.
    samples
        Samples trained on, also by the runs that this one goes on from.
    stop, evaluate_now
        A callback sets them to end training, or (in ``on_step``, on all ranks) to evaluate, after the present step.
    ask_save, ask_stop
        Set by any rank, at any time: all save a checkpoint (with `KeepLast`), or end training, after the same step.
    save_now, told_to_stop
        Whether any rank had requested so before the present step.
    saver, other_parts
        What saves checkpoints, and more that they are to hold, by name.
    numerics, training_step
        Precision and library of products, chosen when training starts; takes a step, see `TrainingStep.queue`.
    id_kinds
        `Source.id_kinds` of the data, kept by checkpoints.
    """

    def __init__(
        self,
        model: nn.Module,
        dense: Optimizer,
        sparse: Optimizer,
        *,
        group_optimizers: Mapping[str, Optimizer] | None = None,
        recipe: TrainRecipe,
        schedule: ScheduleRecipe | None = None,
        callbacks: Sequence[Callback] = (),
        group: str | None = None,
        labels: Sequence[str] | None = None,
        metrics: OwnMetrics | None = None,
        loss: SummedLoss | Retrieval = summed_cross_entropy,
        overlap: bool = True,
        divide: Divide = whole,
    ) -> None:
        self.model, self.dense, self.sparse, self.recipe = model, dense, sparse, recipe
        self.optimizers = {"dense": dense, "sparse": sparse, **(group_optimizers or {})}
        for collection in collections_of(model).values():
            collection.allow_idle()
        self.callbacks, self.group, self.labels = list(callbacks), group, labels
        self._metrics, self._loss = metrics or {}, loss
        self.device, self.ranks = resolve_device(recipe.device), Ranks(model)
        self.numerics = Numerics(model, recipe, self.device, self.ranks, loss)
        self._balance = Balance(model)
        sizes = SizeClasses(model) if self.device.type == "cuda" and not isinstance(model, Distributed) else None
        move = partial(to_device, model=model, device=self.device, sizes=sizes)
        self.prefetcher = BatchPrefetcher(model, move, self.device, overlap=overlap, divide=divide)
        rows = RowPrefetcher(model, self.device) if isinstance(model, Distributed) and divide is not whole else None
        self.training_step = TrainingStep(model, self.numerics, self.ranks, self.device, rows, recipe.clip_grad_norm)
        self._graph = StepGraph(model, recipe, self.device, self.training_step, divided=divide is not whole)
        self._schedule, self._epoch_steps = schedule or ScheduleRecipe(), cast("int | None", None)
        self._factor: Callable[[int], float] = lambda step: self._schedule.factor(step, self._epoch_steps)
        # torch counts from 0 the steps that were taken, the schedule from 1 the step to take.
        self.schedules = {
            name: LambdaLR(optimizer, lambda taken: self._factor(taken + 1))
            for name, optimizer in self.optimizers.items()
        }
        self.step = self.epoch = self.position = self.samples = 0
        self.steps_total: int | None = recipe.steps
        self.stop = self.ask_save = self.ask_stop = self.save_now = self.told_to_stop = self.evaluate_now = False
        self.other_parts, self.id_kinds = dict[str, Stateful](), dict[str, str]()
        self._data_position: Mapping[str, Any] | None = None
        self.clock = Clock()
        report = partial(self._call, "on_checkpoint")
        self.saver = Saver(self.ranks, self.clock, self.parts, report, recipe.checkpoint_full_every)
        self._recent, self._tiers, self._of_callbacks = list[float](), TierCounters(model), dict[str, Any]()
        if recipe.recompute:
            recompute_activations(model)
        if recipe.compile:
            model.compile(fullgraph=is_one_graph(model))

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
                self._apply_requests(False, *map(bool, self.ranks.add(self.ask_stop)))  # requested after the last step
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
                if (self.step + 1) % self.recipe.log_every == 0 or self.step + 1 == self.steps_total:
                    self.training_step.measure_next()
                # The whole step is queued when its losses are read, so the device does not wait for the host.
                done = self.training_step.read(self._graph(parts, self._place, self._requests))
                for schedule in self.schedules.values():
                    schedule.step()
                self._apply_requests(done.save, done.stop)
                self._advance(done.samples, done.loss, last)
                if valid is not None and self._evaluation_is_due(last):
                    self.validate(valid)
                self._call("on_step_end")
                if self.finished:
                    break

    def _place(self) -> str:
        return f"step {self.step + 1:,} (epoch {self.epoch}, batch {self.position:,} of it)"

    def _requests(self) -> tuple[bool, bool]:
        return self.ask_save, self.ask_stop

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss: Σ weight · loss ÷ (samples · tasks). The divisor does not know of weights."""
        (batch,) = self.numerics.prepared([batch], self.step + 1)
        total, tasks = self.numerics.summed_loss(batch, counts=False)
        return total / max(trained_samples(batch) * tasks, 1)

    def _apply_requests(self, save: bool, stop: bool) -> None:
        """Set what callbacks and the loop read, by what any rank has requested."""
        self.save_now, self.told_to_stop, self.stop = save, self.told_to_stop or stop, self.stop or stop
        if save:
            self.ask_save = False

    @property
    def finished(self) -> bool:
        """Whether training is over."""
        out_of_steps = self.recipe.steps is not None and self.step >= self.recipe.steps
        return self.stop or out_of_steps or self.epoch >= self.recipe.epochs

    def validate(self, batches: Iterable[Batch]) -> Metrics:
        """Evaluate now, and call the callbacks."""
        with self.clock.paused():
            metrics = self.evaluate(batches)
            self._call("on_eval", metrics)
        return metrics

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Compute metrics of the present model; see `evaluate`."""
        told: dict[str, Any] = {"device": self.device, "finished": self.clock.count}
        if isinstance(self._loss, Retrieval):
            return evaluate_found(self.model, batches, self._loss.items, self._loss.options, **told)
        return evaluate(self.model, batches, group=self.group, labels=self.labels, metrics=self._metrics, **told)

    @property
    def samples_per_s(self) -> float:
        """Training samples per second, without evaluations, checkpoints and the first 5 steps (see `Clock`)."""
        return self.clock.samples_per_s

    # -- what the loop calls ---------------------------------------------------------------------------------------

    def _start(self, batches: Iterable[Batch]) -> None:
        refuse_unnormalized(self.model, batches)
        self.model.train()
        chosen = self.numerics.settle()
        self._call("on_numerics", chosen + self._graph.begin(self.optimizers.values()))
        try:
            self._epoch_steps = len(cast("Any", batches))
            steps = self._epoch_steps * (self.recipe.epochs - self.epoch) + self.step - self.position
            self.steps_total = min(steps, self.recipe.steps or steps)
        except TypeError:
            self.steps_total = self.recipe.steps
            if self._schedule.decay_share is not None:
                raise RecipeError("schedule.decay_share needs batches with a len(); give a Loader or a list") from None
        for callback in self.callbacks:
            if (loaded := self._of_callbacks.pop(type(callback).__name__, None)) is not None:
                callback.load_state_dict(loaded)
        self._call("on_train_start")
        self.clock.start()

    def _epoch_of(self, batches: Iterable[Batch]) -> Iterator[tuple[list[Batch], bool]]:
        """Yield the batches of an epoch on the device, divided, and whether each is the last.

        One batch is prefetched, which a checkpoint must not count: the loader's position is noted with each.
        """
        last, state = False, getattr(batches, "state_dict", lambda: None)
        ready = self.numerics.prepared(self.clock.waited_for(batches), self.step + 1)
        for parts, position, last in self.prefetcher((batch, state()) for batch in ready):
            self._data_position = position
            yield parts, last
        if not last:
            again = "; a generator can be iterated once only, pass a list or a Loader" if self.epoch else ""
            raise BatchError(f"epoch {self.epoch} has no batch{again}")

    def _advance(self, samples: int, loss: float, last: bool) -> None:
        self.step, self.position, self.samples = self.step + 1, self.position + 1, self.samples + samples
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
                **self.clock.record(self.ranks.largest),
                **self.training_step.logged.record(),
                **self._tiers.record(),
                **self._balance.record(),
            }
            self._recent.clear()
            self._call("on_log", record)

    @property
    def traffic(self) -> Traffic:
        """What caches and files of this rank's tables did so far."""
        return self._tiers.total

    def _evaluation_is_due(self, last: bool) -> bool:
        requested, self.evaluate_now = self.evaluate_now, False
        return requested or (last if self.recipe.eval_every is None else self.step % self.recipe.eval_every == 0)

    def _call(self, event: str, *args: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def report_schedule(self, record: dict[str, float]) -> None:
        """Call the callbacks with what a schedule has decided."""
        self._call("on_schedule", record)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Stateful]:
        """Return everything that a run needs to go on, by the name it has in a checkpoint."""
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
            "id_kinds": self.id_kinds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; callbacks do when training starts, `resume_data` sets the loader."""
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.numerics.load_state_dict(state["numerics"])
        self._recent = list(state["losses"])
        self._of_callbacks = dict(state["callbacks"])
        self._data_position = state["data"]

    def resume_data(self, loader: Stateful) -> None:
        """Set a loader to the position that was loaded."""
        if self._data_position is None:
            raise RecipeError("the checkpoint holds no position in the data; it cannot be resumed, only evaluated")
        loader.load_state_dict(self._data_position)
