"""Protects: a run whose tables have several optimizers is saved, and goes on to the same bits."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.config import ScheduleRecipe
from hotbed.data import Loader
from hotbed.errors import CheckpointError
from hotbed.train import Callback, Trainer
from tests.train.planted import Losses
from tests.train.test_parameter_groups import TRAIN, InMemory, trainer


def test_only_a_trainer_with_a_wide_optimizer_has_its_parts() -> None:
    without = ["model", "dense", "sparse", "dense_schedule", "sparse_schedule", "random", "position"]
    assert list(trainer(with_wide=False).parts()) == without
    assert set(trainer().parts()) == {*without, "wide", "wide_schedule"}


class SaveAt(Callback):
    def __init__(self, step: int, path: Path, recipe: dict[str, Any] | None = None) -> None:
        self.step, self.path, self.recipe = step, path, recipe

    def on_step(self, trainer: Trainer, loss: float) -> None:
        if trainer.step == self.step:
            save_checkpoint(self.path, trainer.parts(), step=trainer.step, recipe=self.recipe)


def loader() -> Loader:
    return Loader(InMemory(), "train", 64, shuffle=True, seed=4, window=2)


def test_a_resumed_run_is_bit_identical_to_one_that_was_not_stopped(tmp_path: Path) -> None:
    schedule = ScheduleRecipe(warmup_steps=8)
    whole, rest = Losses(), Losses()
    first = trainer(schedule=schedule, callbacks=[whole, SaveAt(4, tmp_path / "c")])
    first.fit(loader())
    second = trainer(replace(TRAIN, seed=5), schedule=schedule, callbacks=[rest])
    load_checkpoint(tmp_path / "c", second.parts())
    data = loader()
    second.resume_data(data)
    second.fit(data)
    assert len(rest.losses) == 6
    assert whole.losses[4:] == rest.losses
    for name, tensor in first.model.state_dict().items():
        assert torch.equal(tensor, second.model.state_dict()[name]), name


def test_a_checkpoint_without_the_wide_optimizer_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", trainer(with_wide=False).parts())
    with pytest.raises(CheckpointError, match="has no part 'wide'"):
        load_checkpoint(tmp_path / "c", trainer().parts())
