"""Protects that each label is trained by its own loss and weights, and that one label is trained as ever."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hotbed.batch import Batch
from hotbed.config import TaskRecipe, TrainRecipe
from hotbed.config.component import Component
from hotbed.errors import BatchError, RecipeError
from hotbed.jagged import Jagged
from hotbed.nn.loss import summed_cross_entropy
from hotbed.train import Trainer
from hotbed.train.metrics import Predictions
from hotbed.train.runs.build import TaskLosses, losses_of

CPU = torch.device("cpu")
HERE = __name__
LABELS = ("click", "buy")


class Focal(nn.Module):
    """Focal loss (Lin et al. 2017, equation 4), a loss as a user would write one."""

    def __init__(self, gamma: float = 2.0, *, reduction: str) -> None:
        super().__init__()
        assert reduction == "none"
        self.gamma = gamma

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        missed = torch.where(labels > 0.5, (-logits).sigmoid(), logits.sigmoid())
        return missed**self.gamma * F.binary_cross_entropy_with_logits(logits, labels, reduction="none")


class Learnt(Focal):
    """Has a parameter."""

    def __init__(self, *, reduction: str) -> None:
        super().__init__(reduction=reduction)
        self.scale = nn.Parameter(torch.ones(()))


class Mean(Focal):
    """Gives one value for all samples."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return super().forward(logits, labels).mean()


class NoReduction(nn.Module):
    """Cannot be told to give a value per sample."""

    def __init__(self) -> None:
        super().__init__()


class NoModule:
    """Is no module."""


def task(loss: str, weight: float = 1.0, **init_args: Any) -> TaskRecipe:
    return TaskRecipe(loss=Component(class_path=loss, init_args=init_args), weight=weight)


def logits_and_labels(*shape: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(3)
    logits = torch.randn(*shape, 2, generator=draw).mul_(3).requires_grad_()
    labels = torch.rand(shape[-1], 2, generator=draw).round().expand(*shape, 2)
    return logits, labels


@pytest.mark.parametrize("shape", [(9,), (3, 9)], ids=["one model", "an ensemble"])
@pytest.mark.parametrize("columns", [0, 1, 2], ids=["no weights", "weights of samples", "weights of labels"])
def test_losses_and_weights_of_tasks(shape: tuple[int, ...], columns: int) -> None:
    logits, labels = logits_and_labels(*shape)
    weights = torch.rand(9, columns, generator=torch.Generator().manual_seed(4)) if columns else None
    tasks = {"click": task("torch.nn.BCEWithLogitsLoss", 0.5, pos_weight=3.0), "buy": task(f"{HERE}.Focal", gamma=1.5)}
    total = losses_of(tasks, LABELS, CPU)(logits, labels, weights)
    click = F.binary_cross_entropy_with_logits(
        logits[..., 0], labels[..., 0], pos_weight=torch.tensor(3.0), reduction="none"
    )
    buy = Focal(1.5, reduction="none")(logits[..., 1], labels[..., 1])
    of_click, of_buy = (1, 1) if weights is None else (weights[:, 0], weights[:, -1])
    expected = 0.5 * (click * of_click).sum() + (buy * of_buy).sum()
    torch.testing.assert_close(total, expected)
    found, wanted = (torch.autograd.grad(of, logits, retain_graph=True)[0] for of in (total, expected))
    torch.testing.assert_close(found, wanted)


def test_without_tasks_it_is_the_loss_of_ever() -> None:
    """To the bit: also where a task says what is the default."""
    assert losses_of({}, LABELS, CPU) is summed_cross_entropy
    assert losses_of({"buy": TaskRecipe()}, LABELS, CPU) is summed_cross_entropy
    logits, labels = logits_and_labels(500)
    weights = torch.rand(500, 1)
    assert torch.equal(
        summed_cross_entropy(logits, labels, weights),
        F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum"),
    )
    same = TaskLosses([nn.BCEWithLogitsLoss(reduction="none")] * 2, [1.0, 1.0])(logits, labels, weights)
    torch.testing.assert_close(same, summed_cross_entropy(logits, labels, weights))


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (
            {"bui": task("torch.nn.MSELoss")},
            r"label in tasks: got 'bui', expected one of click, buy.*; did you mean 'buy'\?",
        ),
        ({name: TaskRecipe(weight=0.0) for name in LABELS}, r"the weights of all tasks are 0"),
        ({"buy": task("torch.nn.NoLoss")}, r"tasks.buy.loss: module 'torch.nn' has no class 'NoLoss'"),
        (
            {"buy": task("torch.nn.MSELoss", redaction=1)},
            r"tasks.buy.loss: torch.nn.MSELoss: init_args: got 'redaction'",
        ),
        ({"buy": task("torch.nn.MSELoss", reduction="sum")}, r"tasks.buy.loss: .*hotbed passes 'reduction'"),
        ({"buy": task("torch.nn.BCELoss")}, r"failed on logits \[3\] and labels \[3\]: all elements .* \(not probabil"),
        (
            {"buy": task("torch.nn.CrossEntropyLoss")},
            r"torch.nn.CrossEntropyLoss returned \[\] for logits \[3\] and labels",
        ),
        (
            {"buy": task(f"{HERE}.Mean")},
            r"returned \[\] for logits \[3\] and labels \[3\], expected losses",
        ),
        ({"buy": task(f"{HERE}.Learnt")}, r"Learnt has parameters, which no optimizer trains"),
        (
            {"buy": task(f"{HERE}.NoReduction")},
            r"tasks.buy.loss: .*NoReduction does not accept the arguments that hotbed",
        ),
        ({"buy": task(f"{HERE}.NoModule")}, r"tasks.buy.loss: .*NoModule is not a torch.nn.Module"),
    ],
)
def test_tasks_that_cannot_be(tasks: dict[str, TaskRecipe], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        losses_of(tasks, LABELS, CPU)


@pytest.mark.parametrize("weight", [-1, float("inf"), float("nan"), "1", True, None])
def test_weights_of_tasks_that_are_none(weight: Any) -> None:
    with pytest.raises(RecipeError, match=f"weight: got {weight!r}, expected a "):
        TaskRecipe(weight=weight)


# -- weights of labels ---------------------------------------------------------------------------------------------


def batch_of(labels: Tensor, weights: Tensor | None = None) -> Batch:
    return Batch(
        sparse=Jagged.from_dict({"user": torch.zeros(len(labels), dtype=torch.int64)}), labels=labels, weights=weights
    )


class Fixed(nn.Module):
    """Returns given logits."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.detach().clone())

    def forward(self, batch: Batch) -> Tensor:
        return self.logits


def test_each_label_has_its_sample_weights_in_the_mean_loss() -> None:
    logits, labels = logits_and_labels(6)
    weights = torch.tensor([[1.0, 0.0], [2.0, 0.5], [0.0, 0.0], [1.0, 1.0], [1.0, 3.0], [0.5, 1.0]])
    model = Fixed(logits)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(2)]
    trainer = Trainer(model, *optimizers, recipe=TrainRecipe(batch_size=6, device="cpu", precision="fp32"))
    expected = (F.binary_cross_entropy_with_logits(logits, labels, reduction="none") * weights).sum() / 12
    torch.testing.assert_close(trainer.loss(batch_of(labels, weights)), expected)


def test_metrics_of_a_task_are_those_of_its_own_weights() -> None:
    logits, labels = logits_and_labels(200)
    logits = logits.detach()
    weights = torch.rand(200, 2, generator=torch.Generator().manual_seed(1))
    weights[:, 1] = labels[:, 0]  # of the clicked ones
    both = Predictions(LABELS)
    for part in range(0, 200, 50):
        at = slice(part, part + 50)
        both.add(logits[at], labels[at], weights=weights[at], groups=torch.arange(200)[at] % 7)
    found = both.metrics()
    for t, name in enumerate(LABELS):
        alone = Predictions()
        alone.add(logits[:, [t]], labels[:, [t]], weights=weights[:, t], groups=torch.arange(200) % 7)
        for key, value in alone.metrics().to_dict().items():
            assert found.tasks[name].to_dict()[key] == pytest.approx(value, abs=1e-12), key
    clicked = Predictions()
    chosen = labels[:, 0] == 1
    clicked.add(logits[chosen][:, [1]], labels[chosen][:, [1]])
    assert found.tasks["buy"].auc == pytest.approx(clicked.metrics().auc)
    assert found.tasks["buy"].logloss == pytest.approx(clicked.metrics().logloss)


def test_weights_of_a_batch_fit_its_labels() -> None:
    labels = torch.ones(4, 2)
    assert batch_of(labels).weights_by_label is None
    found = batch_of(labels, torch.arange(4.0)).weights_by_label
    assert found is not None
    assert found.tolist() == [[0], [1], [2], [3]]
    own = batch_of(labels, torch.arange(8.0).view(4, 2))
    assert own.take(torch.tensor([3, 0])).weights_by_label.tolist() == [[6, 7], [0, 1]]  # type: ignore[union-attr]
    assert replace(own, labels=None).weights is own.weights
    with pytest.raises(BatchError, match=r"weights: got \[4, 3\], expected \[4\] .*\[4, 2\]"):
        batch_of(labels, torch.ones(4, 3))
    with pytest.raises(BatchError, match=r"weights must be floating point \[4\], got"):
        batch_of(labels, torch.ones(4, 2, 1))
