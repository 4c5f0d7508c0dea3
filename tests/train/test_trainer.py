"""Protects: a step is exact, a run repeats itself to the bit, and a resumed one is one that was not stopped."""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.batch import Batch
from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.config import ScheduleRecipe, TrainRecipe
from hotbed.data import Loader
from hotbed.errors import BatchError, NonFiniteError, RecipeError
from hotbed.train import Callback, Trainer
from hotbed.train.numerics import resolve_device
from tests.train import planted
from tests.train.parallel_cases import InMemory, assert_equal
from tests.train.planted import Do, Losses
from tests.train.test_parameter_groups import trainer as trainer_with_group

RECIPE = TrainRecipe(batch_size=64, device="cpu", precision="fp32", log_every=5)


def run(recipe: TrainRecipe = RECIPE, steps: int = 20) -> tuple[Losses, dict[str, Tensor]]:
    losses = Losses()
    trainer = planted.trainer(recipe, callbacks=[losses])
    trainer.fit(planted.batches(steps, last=17))
    return losses, {name: t.clone() for name, t in trainer.model.state_dict().items()}


def test_it_learns() -> None:
    losses = Losses()
    trainer = planted.trainer(RECIPE, callbacks=[losses])
    before = trainer.evaluate(planted.batches(4, seed=9))
    trainer.fit(planted.batches(150))
    after = trainer.evaluate(planted.batches(4, seed=9))
    assert after.auc > before.auc + 0.1
    assert after.logloss < before.logloss


def test_two_runs_with_one_seed_are_bit_identical() -> None:
    (one, weights), (two, again) = run(), run()
    assert one.losses == two.losses
    assert len(one.losses) == 20
    assert_equal(weights, again)
    assert run(replace(RECIPE, seed=1))[0].losses != one.losses


def test_a_list_of_batches_counts_steps_epochs_and_samples() -> None:
    losses = Losses()
    trainer = planted.trainer(replace(RECIPE, epochs=2), callbacks=[losses])
    trainer.fit(planted.batches(6, last=10))
    assert (trainer.step, trainer.epoch, trainer.position, trainer.samples) == (12, 2, 0, 2 * (5 * 64 + 10))
    assert trainer.steps_total == 12
    assert [record["step"] for record in losses.records] == [5, 10, 12]
    assert losses.records[0]["loss"] == pytest.approx(sum(losses.losses[:5]) / 5)
    assert losses.ended == 1
    assert trainer.samples_per_s > 0


def test_steps_end_training_within_an_epoch_or_after_several() -> None:
    trainer = planted.trainer(replace(RECIPE, steps=3))
    trainer.fit(planted.batches(6))
    assert (trainer.step, trainer.epoch) == (3, 0)
    trainer = planted.trainer(replace(RECIPE, steps=8, epochs=5))
    trainer.fit(planted.batches(6))
    assert (trainer.step, trainer.epoch, trainer.steps_total) == (8, 1, 8)


def test_a_generator_works_for_one_epoch_and_says_so_in_the_second() -> None:
    trainer = planted.trainer(RECIPE)
    trainer.fit(iter(planted.batches(3)))
    assert (trainer.step, trainer.steps_total) == (3, None)
    with pytest.raises(BatchError, match=r"epoch 1 has no batch\. Pass"):
        planted.trainer(replace(RECIPE, epochs=2)).fit(iter(planted.batches(3)))
    with pytest.raises(BatchError, match=r"epoch 0 has no batch$"):
        planted.trainer(RECIPE).fit([])


# -- the loss ------------------------------------------------------------------------------------------------------


class Fixed(nn.Module):
    """Returns given logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, batch: Batch) -> Tensor:
        return self.logits


def fixed(logits: Tensor) -> Trainer:
    model = Fixed(logits)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    return Trainer(model, *optimizers, recipe=RECIPE)


def test_the_loss_is_torchs_mean_and_weights_do_not_change_the_divisor() -> None:
    batch = planted.batches(1, size=6)[0]
    logits, labels = torch.randn(6, 2), torch.rand(6, 2).round()
    batch = replace(batch, labels=labels)
    trainer = fixed(logits)
    torch.testing.assert_close(trainer.loss(batch), F.binary_cross_entropy_with_logits(logits, labels))
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    of_samples = torch.tensor([0.0, 1.0, 2.0, 0.5, 1.0, 3.0])
    of_labels = torch.stack([of_samples, of_samples.flip(0)], 1)
    torch.testing.assert_close(
        trainer.loss(replace(batch, weights=of_samples)), (losses * of_samples[:, None]).sum() / 12
    )
    torch.testing.assert_close(trainer.loss(replace(batch, weights=of_labels)), (losses * of_labels).sum() / 12)


def test_logits_of_another_shape_and_missing_labels_are_refused() -> None:
    batch = planted.batches(1, size=6)[0]
    with pytest.raises(BatchError, match=r"\[6\], expected one per label \[6, 1\]"):
        fixed(torch.zeros(6)).loss(batch)
    with pytest.raises(BatchError, match="no labels"):
        fixed(torch.zeros(6, 1)).loss(replace(batch, labels=None))


def test_several_tasks_train() -> None:
    made = [
        replace(b, labels=torch.cat([b.labels, 1 - b.labels], 1)) for b in planted.batches(4) if b.labels is not None
    ]
    trainer = planted.trainer(RECIPE, tasks=2)
    trainer.labels = ["click", "skip"]
    trainer.fit(made)
    assert set(trainer.evaluate(made).tasks) == {"click", "skip"}


# -- schedule and precision ----------------------------------------------------------------------------------------


def test_with_a_fall_per_epoch_the_first_epoch_of_two_is_the_run_of_one() -> None:
    def losses(epochs: int) -> tuple[list[float], list[float]]:
        kept = Losses()
        schedule = ScheduleRecipe(warmup_steps=3, decay_share=0.5, decay_power=1)
        recipe = replace(RECIPE, epochs=epochs, log_every=1)
        planted.trainer(recipe, schedule=schedule, callbacks=[kept], lr=1.0).fit(planted.batches(8))
        return kept.losses, [record["lr_sparse"] for record in kept.records]

    one, two = losses(1), losses(2)
    assert two[0][:8] == one[0]
    assert one[1] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 0.75, 0.5, 0.25])
    assert two[1][8:] == pytest.approx([1, 1, 1, 1, 1, 0.75, 0.5, 0.25])


def test_a_fall_per_epoch_needs_to_know_the_steps_of_an_epoch() -> None:
    trainer = planted.trainer(RECIPE, schedule=ScheduleRecipe(decay_share=0.5))
    with pytest.raises(RecipeError, match="decay_share"):
        trainer.fit(iter(planted.batches(2)))


def test_the_schedule_moves_both_learning_rates() -> None:
    """And the rate of a group of tables."""
    used: dict[str, list[float]] = {"dense": [], "sparse": [], "wide": []}

    class Spy(Losses):
        def on_train_start(self, trainer: Trainer) -> None:
            for name, rates in used.items():
                rates.append(trainer.optimizers[name].param_groups[0]["lr"])

        def on_step(self, trainer: Trainer, loss: float) -> None:
            self.on_train_start(trainer)

    spy = Spy()
    schedule = ScheduleRecipe(warmup_steps=4, decay_start=6, decay_end=10)
    trainer_with_group(schedule=schedule, callbacks=[spy], deep_lr=1.0).fit(planted.batches(10))
    factors = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1, 9 / 16, 4 / 16, 1 / 16, 0]
    for name, rates in used.items():
        rate = 1.0 if name == "sparse" else 0.1
        assert rates[:10] == pytest.approx([rate * f for f in factors])
        assert [record[f"lr_{name}"] for record in spy.records] == pytest.approx([rate * f for f in factors])


def test_bf16_trains_with_float32_weights_and_evaluates_in_float32() -> None:
    losses = Losses()
    trainer = planted.trainer(replace(RECIPE, precision="bf16"), callbacks=[losses])
    seen: list[torch.dtype] = []
    trainer.model.top[0].register_forward_hook(lambda *args: seen.append(args[2].dtype))  # type: ignore[union-attr,operator,index]
    trainer.fit(planted.batches(5))
    trainer.evaluate(planted.batches(1))
    assert seen == [torch.bfloat16] * 5 + [torch.float32]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert losses.losses == pytest.approx(run(steps=5)[0].losses[:4] + losses.losses[4:], rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_activations_that_are_computed_again_change_no_loss(precision: Literal["fp32", "bf16"]) -> None:
    recipe = replace(RECIPE, precision=precision)
    kept, again = (run(replace(recipe, recompute=how), steps=5)[0].losses for how in (False, True))
    assert kept == again


# What Dynamo warns of while it traces; outside of tests, where warnings are no errors, it hides or logs them.
@pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings(r"ignore:[\s\S]*Dynamo detected a call to a `functools\.lru_cache`:UserWarning")
@pytest.mark.filterwarnings(r"ignore:.* should not be instantiated:DeprecationWarning")
def test_a_compiled_model_trains_to_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[torch.fx.GraphModule] = []

    def as_traced(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    # Dynamo traces the model; only inductor, which would need a C++ compiler and a minute, is left out.
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=as_traced))
    torch._dynamo.reset()
    losses, _ = run(replace(RECIPE, compile=True), steps=5)
    assert graphs
    assert any("linear" in str(node.target) for graph in graphs for node in graph.graph.nodes)
    assert losses.losses == pytest.approx(run(steps=5)[0].losses, rel=1e-6)


def test_cuda_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RecipeError, match=r"train\.device is cuda, but torch finds no CUDA device"):
        resolve_device("cuda")
    assert resolve_device("auto").type == "cpu"


# -- non-finite losses ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "message"),
    [("dense", "dense of sample 5 of the batch, column 0 is nan"), ("weights", "weights of sample 5 of the batch is")],
)
def test_a_bad_value_is_named_and_nothing_of_its_batch_is_in_the_model(what: str, message: str) -> None:
    (batch,) = planted.batches(1)
    values = torch.ones(64, planted.DENSE) if what == "dense" else torch.ones(64)
    values[5] = math.nan
    before: dict[str, Tensor] = {}
    keep = Do({2: lambda trainer: before.update({n: t.clone() for n, t in trainer.model.state_dict().items()})})
    trainer = planted.trainer(RECIPE, callbacks=[keep])
    with pytest.raises(NonFiniteError, match=message) as caught:
        trainer.fit([*planted.batches(2), replace(batch, **{what: values})])
    assert "in step 3 (epoch 0, batch 2)" in str(caught.value)
    assert_equal(trainer.model.state_dict(), before)


@pytest.mark.parametrize("value", [-1.0, 1.5, math.nan, math.inf])
def test_a_label_that_is_not_from_0_to_1_is_named_and_touches_nothing(value: float) -> None:
    batch = planted.batches(1)[0]
    assert batch.labels is not None
    batch.labels[3] = value
    losses = planted.Losses()
    trainer = planted.trainer(RECIPE, callbacks=[losses])
    message = f"label: got {value} at sample 3 of 64, column 0, expected 0 to 1"
    with pytest.raises(BatchError, match=re.escape(message)):
        trainer.fit([*planted.batches(2), batch])
    assert len(losses.losses) <= 2
    with pytest.raises(BatchError, match=re.escape(message)):
        trainer.evaluate([batch])


def test_overflow_with_good_inputs_says_what_to_try() -> None:
    trainer = planted.trainer(RECIPE, lr=0.0)
    with torch.no_grad():
        trainer.model.top[-1].bias.fill_(1e38)  # type: ignore[union-attr,operator,index]
    with pytest.raises(NonFiniteError, match="values inside the model overflow"):
        trainer.fit(planted.batches(1))


def test_a_parameter_that_diverged_is_named() -> None:
    def diverge(trainer: Trainer) -> None:
        next(trainer.model.parameters()).data.fill_(math.nan)

    trainer = planted.trainer(RECIPE, callbacks=[Do({2: diverge})])
    with pytest.raises(NonFiniteError, match=r"parameter 'bottom\.0\.weight'"):
        trainer.fit(planted.batches(4))


# -- resuming ------------------------------------------------------------------------------------------------------


def save_at(step: int, path: Path) -> Callback:
    return Do({step: lambda trainer: save_checkpoint(path, trainer.parts(), step=trainer.step)})


@pytest.mark.parametrize("at", [3, 10, 13])  # within an epoch of 10 batches, at its end, within the next
def test_a_resumed_run_is_bit_identical_to_one_that_was_not_stopped(tmp_path: Path, at: int) -> None:
    recipe = replace(RECIPE, epochs=2)
    schedule = ScheduleRecipe(warmup_steps=5, decay_start=8, decay_end=30)
    whole = Losses()
    first = planted.trainer(recipe, schedule=schedule, callbacks=[whole, save_at(at, tmp_path / "c")])
    first.fit(Loader(InMemory(7, 100, 40), "train", 64, shuffle=True, seed=4, window=2))
    rest = Losses()
    second = planted.trainer(replace(recipe, seed=5), schedule=schedule, callbacks=[rest])
    load_checkpoint(tmp_path / "c", second.parts())
    loader = Loader(InMemory(7, 100, 40), "train", 64, shuffle=True, seed=4, window=2)
    second.resume_data(loader)
    second.fit(loader)
    assert whole.losses[at:] == rest.losses
    assert (second.step, second.steps_total) == (20, 20)
    assert_equal(second.model.state_dict(), first.model.state_dict())


def test_a_run_without_a_loader_cannot_be_resumed(tmp_path: Path) -> None:
    trainer = planted.trainer(RECIPE, callbacks=[save_at(2, tmp_path / "c")])
    trainer.fit(planted.batches(3))
    other = planted.trainer(RECIPE)
    load_checkpoint(tmp_path / "c", other.parts())
    with pytest.raises(RecipeError, match="position"):
        other.resume_data(Loader(InMemory(), "train", 64))


def test_batches_are_fetched_one_ahead_of_the_step() -> None:
    taken: list[int] = []
    steps: list[int] = []

    class Spy(Callback):
        def on_step(self, trainer: Trainer, loss: float) -> None:
            steps.append(len(taken))

    def lazily() -> Iterator[Batch]:
        for i, batch in enumerate(planted.batches(4)):
            taken.append(i)
            yield batch

    planted.trainer(RECIPE, callbacks=[Spy()]).fit(lazily())
    assert steps == [2, 3, 4, 4]
