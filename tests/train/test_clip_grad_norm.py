"""Protects: ``train.clip_grad_norm`` limits the norm of each step's gradients, whatever else a recipe asks for."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import hotbed as hb
from hotbed.config import TrainRecipe
from hotbed.errors import NonFiniteError, RecipeError
from hotbed.train import Trainer
from hotbed.train.prefetch import Divide, whole
from hotbed.train.runs.hot_batches import HotSplit
from tests.cli.cases import train
from tests.ranks import Ranks
from tests.train import planted
from tests.train.parallel_cases import TRAIN, make_trainer, shares

from .test_hot_schedule import packed_fixture  # noqa: F401

LIMITS = {"user": 30, "item": 20, "page": 2}


def change_of(divide: Divide = whole, **options: Any) -> dict[str, Tensor]:
    """What a step of gradient descent with rate 1 takes off parameters and rows: the gradient."""
    recipe = replace(TrainRecipe(batch_size=60, device="cpu", precision="fp32", steps=1), **options)
    model = planted.trainer(recipe).model
    before = {name: t.clone() for name, t in model.state_dict().items()}
    dense, sparse = torch.optim.SGD(model.parameters(), lr=1.0), hb.optim.SGD(model, lr=1.0)
    Trainer(model, dense, sparse, recipe=recipe, divide=divide).fit(planted.batches(1, 60))
    return {name: before[name] - t for name, t in model.state_dict().items()}


def norm_of(gradient: dict[str, Tensor]) -> float:
    return float(torch.cat([t.flatten() for t in gradient.values()]).double().norm())


@pytest.mark.parametrize(("divide", "precision"), [(whole, "fp32"), (HotSplit(LIMITS), "fp32"), (whole, "fp16")])
def test_a_step_has_the_direction_of_its_gradient_and_the_largest_norm(divide: Divide, precision: Any) -> None:
    gradient = change_of(divide, precision=precision)
    norm = norm_of(gradient)
    clipped = change_of(divide, precision=precision, clip_grad_norm=norm / 4)
    assert norm_of(clipped) == pytest.approx(norm / 4, rel=1e-4)
    for name, change in clipped.items():
        torch.testing.assert_close(change, gradient[name] / 4, rtol=1e-3, atol=1e-6)
    if precision == "fp32":
        within = change_of(divide, precision=precision, clip_grad_norm=norm * 1.01)
        assert all(torch.equal(change, gradient[name]) for name, change in within.items())


def test_a_gradient_that_overflows_float16_touches_nothing_and_lowers_the_scale() -> None:
    recipe = TrainRecipe(batch_size=64, device="cpu", precision="fp16", steps=1, clip_grad_norm=0.1)
    trainer = planted.trainer(recipe)
    trainer.numerics.settle()
    trainer.numerics.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    trainer.fit(planted.batches(1))
    assert all(torch.equal(t, before[name]) for name, t in trainer.model.state_dict().items())
    assert trainer.numerics.scaler.get_scale() == 2.0**39


def test_a_norm_that_is_not_finite_ends_training_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = TrainRecipe(batch_size=64, device="cpu", precision="fp32", steps=1, clip_grad_norm=0.1)
    trainer = planted.trainer(recipe)
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    next(trainer.model.parameters()).register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NonFiniteError, match=r"norm of the gradients is not finite: got (inf|nan) in step 1 "):
        trainer.fit(planted.batches(1))
    assert all(torch.equal(t, before[name]) for name, t in trainer.model.state_dict().items())


@pytest.mark.parametrize("norm", [0.0, -1.0, math.nan])
def test_limits_that_cannot_be(norm: float) -> None:
    with pytest.raises(RecipeError, match=f"train.clip_grad_norm: got {norm}, expected a finite number above 0"):
        TrainRecipe(batch_size=8, clip_grad_norm=norm)


def trained(group: ProcessGroup | None, scheme: str) -> dict[str, Tensor]:
    trainer = make_trainer(group, scheme, replace(TRAIN, steps=4, clip_grad_norm=0.05))
    trainer.fit(shares(planted.batches(4), group))
    return {name: t.clone() for name, t in trainer.model.state_dict().items()}


def test_ranks_train_the_same_bits_in_all_plans(ranks: Ranks) -> None:
    alone = trained(None, "table")
    first = ranks.run(3, trained, "table")[0]
    for scheme in ("row", "column"):
        for state in ranks.run(3, trained, scheme):
            assert all(torch.equal(t, first[name]) for name, t in state.items())
    torch.testing.assert_close(first, alone, rtol=1e-3, atol=1e-4)


CLIPPED = ("--hot.batches", "split", "--train.precision", "fp32", "--train.clip_grad_norm", "0.05")


@pytest.mark.usefixtures("packed")
def test_rows_on_disk_and_resumed_runs_train_the_same_bits(packed: Path) -> None:
    _, on_disk, _ = train(packed, *CLIPPED)
    assert on_disk["memory"]["disk_bytes"] > 0
    _, in_memory, _ = train(packed, *CLIPPED, "--memory.tier", "device", "--memory.cache_rows", "0")
    assert on_disk["test"] == in_memory["test"]
    _, free, _ = train(packed, *CLIPPED[:-2])
    assert free["test"] != on_disk["test"]
    _, _, first = train(packed, *CLIPPED, "--train.steps", "7")
    _, resumed, _ = train(packed, *CLIPPED, "--resume", str(first))
    assert resumed["test"] == on_disk["test"]
