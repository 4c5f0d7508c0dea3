"""Run the training loop and define the events of its callbacks.

`Trainer.fit` is the loop over steps. A trainer needs a model, its optimizers and an iterable of `Batch`. Logs,
progress, checkpoints and early stopping are callbacks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, ClassVar, cast

from torch import Tensor, nn, no_grad
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
from hotbed.train.cuda_graph import SizeClasses, StepGraph
from hotbed.train.metrics import (
    Metrics,
    OwnMetrics,
    divide_batch,
    evaluate,
    move_batch,
    refuse_unnormalized,
    slicer_of,
)
from hotbed.train.numerics import Numerics, is_one_graph, resolve_device
from hotbed.train.prefetch import BatchPrefetcher, Divide, RowPrefetcher, whole
from hotbed.train.ranks.parallel import Ranks
from hotbed.train.retrieval import Retrieval, evaluate_retrieval, trained_samples
from hotbed.train.step import TrainingStep
from hotbed.train.throughput import Balance, Clock, TierCounters

_log = logging.getLogger("hotbed")
_COUNTERS = ("step", "epoch", "position", "samples")


class Callback:
    """Base class of callbacks: override the events that you need."""

    first_rank_only: ClassVar[bool] = False
    """Whether only the first rank creates this callback of a recipe, e.g. because the callback writes files."""

    def on_numerics(self, trainer: Trainer, chosen: str) -> None:
        """Run before `on_train_start`; ``chosen`` is a text that names the chosen precision and matrix library."""

    def on_train_start(self, trainer: Trainer) -> None:
        """Run before the first step; ``trainer.steps_total`` is the number of steps, or None if it is unknown."""

    def on_step(self, trainer: Trainer, loss: float) -> None:
        """Run after every step; ``trainer.step`` is the number of this step, from 1."""

    def on_log(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Run every ``log_every`` steps; ``record`` has step, epoch, mean loss, learning rates, samples/s and waits."""

    def on_eval(self, trainer: Trainer, metrics: Metrics) -> None:
        """Run after every evaluation during training."""

    def on_schedule(self, trainer: Trainer, record: dict[str, float]) -> None:
        """Run after `HotSchedule` has set a rate; ``record`` has logloss, rate_before and rate."""

    def on_step_end(self, trainer: Trainer) -> None:
        """Run after a step and its evaluation; checkpoints are saved at this point."""

    def on_checkpoint(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """Run when this rank has written its part of a checkpoint.

        ``record`` has step, path, bytes, seconds and stalled_s (see `Saver.records`).
        """

    def on_train_end(self, trainer: Trainer) -> None:
        """Run after the last step, but not when training fails."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the callback's state for checkpoints, as plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""


class Trainer:
    """Train a model.

    Parameters
    ----------
    model
        Maps a `Batch` to logits ``[B, T]``. It must be on the recipe's device.
    dense, sparse
        Optimizer of the model's parameters (``dense``), and optimizer of its embedding tables (``sparse``).
    group_optimizers
        Further optimizers by name, for parameters and tables that ``dense`` and ``sparse`` do not train.
    recipe
        Batch size, number of steps, precision and so on.
    schedule
        Factor that multiplies all learning rates at each step.
    callbacks
        Callbacks, which are called in this order.
    group
        Column of ``Batch.extra`` for grouped AUC in evaluations.
    labels
        Names of the tasks.
    metrics
        Factories of additional metrics by name, see `hotbed.train.metrics.recipe_metrics`.
    loss
        Maps logits and labels ``[…, B, T]`` and sample weights (``[B, 1]``, ``[B, T]`` or None) to the sum of all
        losses. The default is binary cross-entropy. A `Retrieval` trains two towers.
    overlap
        Whether the ids of a batch are exchanged while the previous batch is computed, if the model is distributed.
    divide
        Divides each batch into parts. Rows of a part are fetched while the previous part is computed, and gradients of
        the parts are added. All ranks must divide a batch into equally many parts.

    Attributes
    ----------
    step, epoch, position
        Numbers of finished steps, of finished epochs, and of finished batches in the current epoch.
    samples
        Number of trained samples, including samples from before the run was resumed.
    stop, evaluate_now
        Callbacks set ``stop`` to end training after this step, and ``evaluate_now`` (in ``on_step``, on all ranks) to
        evaluate after this step.
    ask_save, ask_stop
        Any rank may set these at any time. All ranks then save a checkpoint (with `KeepLast`) or stop after the same
        step.
    save_now, stop_requested
        Whether any rank had requested a checkpoint, or the end of training, before this step.
    saver
        Saves checkpoints.
    other_parts
        Further parts to save in checkpoints, by name.
    numerics
        Precision and matrix library, which are chosen when training starts.
    training_step
        Runs the steps.
    id_kinds
        `Source.id_kinds` of the data, which checkpoints store.

    Examples
    --------
    >>> import torch, hotbed as hb
    >>> tables, features = [hb.Table("users", rows=100, dim=8)], [hb.Feature("user", "users")]
    >>> model = hb.nn.DLRM(tables, features, dense_features=0, bottom=[8], top=[16, 1])
    >>> dense, sparse = torch.optim.Adam(model.parameters()), hb.optim.RowWiseAdagrad(model, lr=0.1)
    >>> trainer = Trainer(model, dense, sparse, recipe=TrainRecipe(batch_size=2, device="cpu"))
    >>> ids, labels = hb.Jagged.from_dict({"user": [7, 8]}), torch.tensor([[1.0], [0.0]])
    >>> trainer.fit([hb.Batch(sparse=ids, labels=labels)] * 3)
    >>> trainer.step
    3
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
        move = partial(move_batch, model=model, device=self.device, pad=sizes)
        self.prefetcher = BatchPrefetcher(model, move, self.device, overlap=overlap, divide=divide)
        rows = RowPrefetcher(model, self.device) if isinstance(model, Distributed) and divide is not whole else None
        self.training_step = TrainingStep(model, self.numerics, self.ranks, self.device, rows, recipe.clip_grad_norm)
        self._graph = StepGraph(model, recipe, self.device, self.training_step, divided=divide is not whole)
        self._schedule, self._epoch_steps = schedule or ScheduleRecipe(), cast("int | None", None)
        self._factor: Callable[[int], float] = lambda step: self._schedule.factor(step, self._epoch_steps)
        # LambdaLR counts finished steps, schedules count from 1.
        self.schedules = {
            name: LambdaLR(optimizer, lambda taken: self._factor(taken + 1))
            for name, optimizer in self.optimizers.items()
        }
        self.step = self.epoch = self.position = self.samples = 0
        self.steps_total: int | None = recipe.steps
        self.stop = self.ask_save = self.ask_stop = self.save_now = self.stop_requested = self.evaluate_now = False
        self.other_parts, self.id_kinds = dict[str, Stateful](), dict[str, str]()
        self._data_position: Mapping[str, Any] | None = None
        self.clock = Clock()
        report = partial(self._call, "on_checkpoint")
        self.saver = Saver(self.ranks, self.clock, self.parts, report, recipe.checkpoint_full_every)
        self._recent, self._tiers, self._callback_states = list[float](), TierCounters(model), dict[str, Any]()
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
            Training batches with labels: a `Loader`, or any iterable that can be iterated once per epoch.
        valid
            Batches to evaluate on during training.

        Raises
        ------
        NonFiniteError
            If a loss is NaN or infinite. The batch has then updated no parameter and no row. If a loss is finite but
            its gradients are not, only the loss of the next step shows the error.
        BatchError
            If the columns of a batch do not fit the model, or an epoch has no batch.
        """
        self._start(batches)
        try:
            with self.ranks.explained():
                self._fit(batches, valid)
                self.ranks.sync()
                self.saver.finish()
                self._apply_requests(
                    False, *map(bool, self.ranks.add(self.ask_stop))
                )  # requests made after the last step
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
                # The losses are read after the whole step is queued, so the device does not wait for the host.
                done = self.training_step.read(self._graph(parts, self._step_name, self._requests))
                for schedule in self.schedules.values():
                    schedule.step()
                self._apply_requests(done.save, done.stop)
                self._advance(done.samples, done.loss, last)
                if valid is not None and self._evaluation_is_due(last):
                    self.validate(valid)
                self._call("on_step_end")
                if self.finished:
                    break

    def _step_name(self) -> str:
        return f"step {self.step + 1:,} (epoch {self.epoch}, batch {self.position:,})"

    def _requests(self) -> tuple[bool, bool]:
        return self.ask_save, self.ask_stop

    def loss(self, batch: Batch) -> Tensor:
        """Return the mean loss of a batch: Σ weight · loss ÷ (samples · tasks). The divisor ignores weights."""
        (batch,) = self.numerics.prepare([batch], self.step + 1)
        slicer = slicer_of(self.model) if self.numerics.is_retrieval else None
        # With several virtual ranks, only `TrainingStep` computes gradients.
        with nullcontext() if slicer is None else no_grad(), divide_batch(batch, slicer) as parts:
            losses, tasks = self.numerics.summed_losses(parts, counts=False)
        return sum(losses[1:], losses[0]) / max(trained_samples(batch) * tasks, 1)

    def _apply_requests(self, save: bool, stop: bool) -> None:
        """Store whether any rank has requested a checkpoint or a stop, for callbacks and the loop."""
        self.save_now, self.stop_requested, self.stop = save, self.stop_requested or stop, self.stop or stop
        if save:
            self.ask_save = False

    @property
    def finished(self) -> bool:
        """Whether training has ended."""
        out_of_steps = self.recipe.steps is not None and self.step >= self.recipe.steps
        return self.stop or out_of_steps or self.epoch >= self.recipe.epochs

    def validate(self, batches: Iterable[Batch]) -> Metrics:
        """Evaluate the model and call `Callback.on_eval`."""
        with self.clock.paused():
            metrics = self.evaluate(batches)
            self._call("on_eval", metrics)
        return metrics

    def evaluate(self, batches: Iterable[Batch]) -> Metrics:
        """Evaluate the model; see `hotbed.train.evaluate`."""
        options: dict[str, Any] = {"device": self.device, "finished": self.clock.count}
        if isinstance(self._loss, Retrieval):
            return evaluate_retrieval(self.model, batches, self._loss.items, self._loss.options, **options)
        return evaluate(self.model, batches, group=self.group, labels=self.labels, metrics=self._metrics, **options)

    @property
    def samples_per_s(self) -> float:
        """Training samples per second, excluding evaluations, checkpoints and the first 5 steps (see `Clock`)."""
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
                raise RecipeError(
                    "schedule.decay_share is set, but the number of batches is unknown. Pass a Loader or a list to fit"
                ) from None
        for callback in self.callbacks:
            if (loaded := self._callback_states.pop(type(callback).__name__, None)) is not None:
                callback.load_state_dict(loaded)
        self._call("on_train_start")
        self.clock.start()

    def _epoch_of(self, batches: Iterable[Batch]) -> Iterator[tuple[list[Batch], bool]]:
        """For each batch of an epoch, yield its parts on the device, and whether the batch is the last one."""
        last, state = False, getattr(batches, "state_dict", lambda: None)
        # The loader's position is kept with each batch, because a checkpoint must not count the prefetched batch.
        ready = self.numerics.prepare(self.clock.waited_for(batches), self.step + 1)
        for parts, position, last in self.prefetcher((batch, state()) for batch in ready):
            self._data_position = position
            yield parts, last
        if not last:
            fix = ". Pass a list or a Loader, because a generator can be iterated only once" if self.epoch else ""
            raise BatchError(f"epoch {self.epoch} has no batch{fix}")

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
        """Reads and writes of this rank's caches and files of table rows since training started."""
        return self._tiers.total

    def _evaluation_is_due(self, last: bool) -> bool:
        requested, self.evaluate_now = self.evaluate_now, False
        return requested or (last if self.recipe.eval_every is None else self.step % self.recipe.eval_every == 0)

    def _call(self, event: str, *args: object) -> None:
        for callback in self.callbacks:
            getattr(callback, event)(self, *args)

    def report_schedule(self, record: dict[str, float]) -> None:
        """Call `Callback.on_schedule`."""
        self._call("on_schedule", record)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def parts(self) -> dict[str, Stateful]:
        """Return the parts of a checkpoint by name."""
        return {
            "model": self.model,
            **self.optimizers,
            **{f"{name}_schedule": schedule for name, schedule in self.schedules.items()},
            "random": RandomState(
                self.ranks.gather, self.ranks.virtual.own.start, self.training_step.states_of_generators
            ),
            "position": self,
            **self.other_parts,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return counters, numerics, losses since the last record, callbacks' states and the loader's position."""
        return {
            **{name: getattr(self, name) for name in _COUNTERS},
            "virtual_ranks": self.ranks.virtual.total,
            "numerics": self.numerics.state_dict(),
            "losses": list(self._recent),
            "callbacks": {type(c).__name__: state for c in self.callbacks if (state := c.state_dict())},
            "data": self._data_position,
            "id_kinds": self.id_kinds,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load counters and numerics. Callbacks load their states in `fit`, and the loader in `resume_data`."""
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self._warn_of_virtual_ranks(state.get("virtual_ranks", self.ranks.virtual.total))
        self.numerics.load_state_dict(state["numerics"])
        self._recent = list(state["losses"])
        self._callback_states = dict(state["callbacks"])
        self._data_position = state["data"]

    def _warn_of_virtual_ranks(self, before: int) -> None:
        virtual = self.ranks.virtual
        if before != virtual.total and self.ranks.is_first:
            _log.warning(
                "the run had %d virtual ranks and now has %d, so bits will differ from an uninterrupted run. Start at "
                "most %d processes to keep them, or set parallel.virtual_ranks when a run starts",
                before,
                virtual.total,
                before,
            )

    def resume_data(self, loader: Stateful, *, other_data: bool = False) -> None:
        """Set a loader to the checkpoint's position; ``other_data`` is true if the loader may have different data."""
        state = self._data_position
        if state is None:
            raise RecipeError("the checkpoint has no position in the data, so it can only be evaluated (hotbed eval)")
        if other_data and not state["consumed"]:  # between two epochs, only the number of the epoch matters
            state = {**loader.state_dict(), "epoch": state["epoch"], "consumed": 0}
        loader.load_state_dict(state)
