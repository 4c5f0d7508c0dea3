"""A wide part with an optimizer of its own: in the trainer, in checkpoints, and built from a recipe."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.checkpoint import load_checkpoint, save_checkpoint
from hotbed.config import Component, DataRecipe, Recipe, ScheduleRecipe, TrainRecipe
from hotbed.data import Loader, Schema, SparseColumn
from hotbed.data.source import Source
from hotbed.errors import CheckpointError, RecipeError
from hotbed.jagged import Jagged
from hotbed.nn import WideDeep
from hotbed.optim import FTRL, RowWiseAdagrad
from hotbed.specs import Feature, Table
from hotbed.train import Callback, Trainer
from hotbed.train.build import build_model, build_trainer
from hotbed.train.resume import refuse_another_recipe
from hotbed.train.run import bad_ids
from tests.train import planted
from tests.train.planted import Losses

TRAIN = TrainRecipe(batch_size=64, device="cpu", precision="fp32", log_every=1)


def trainer(
    recipe: TrainRecipe = TRAIN,
    *,
    schedule: ScheduleRecipe | None = None,
    callbacks: Sequence[Callback] = (),
    with_wide: bool = True,
    deep_lr: float = 0.05,
) -> Trainer:
    torch.manual_seed(recipe.seed)
    tables, features = [Table(n, rows, 8) for n, rows in planted.ROWS.items()], [Feature(n, n) for n in planted.ROWS]
    model = WideDeep(tables, features, planted.DENSE, top=(16, 1), seed=recipe.seed)
    return Trainer(
        model,
        torch.optim.Adam(model.parameters(), lr=deep_lr / 10),
        RowWiseAdagrad(model.embeddings, lr=deep_lr),
        wide=FTRL(model.wide, lr=0.1, beta=0.0) if with_wide else None,
        recipe=recipe,
        schedule=schedule,
        callbacks=callbacks,
    )


def state_of(trainer: Trainer, part: str) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in trainer.model.state_dict().items() if name.startswith(part)}


def test_the_wide_part_is_trained_only_if_it_has_an_optimizer() -> None:
    for with_wide in (True, False):
        made = trainer(with_wide=with_wide)
        deep = state_of(made, "embeddings")
        made.fit(planted.batches(3))
        assert all(t.any() == with_wide for t in state_of(made, "wide").values())
        assert not any(torch.equal(t, deep[name]) for name, t in state_of(made, "embeddings").items())


def test_the_wide_part_learns_by_itself() -> None:
    made = trainer(deep_lr=0.0)
    deep = {name: t.clone() for name, t in made.model.state_dict().items() if not name.startswith("wide")}
    before = made.evaluate(planted.batches(4, seed=9))
    made.fit(planted.batches(100))
    after = made.evaluate(planted.batches(4, seed=9))
    assert after.auc > before.auc + 0.1
    assert after.logloss < before.logloss
    for name, tensor in deep.items():
        assert torch.equal(tensor, made.model.state_dict()[name]), name


def test_gradients_that_waited_before_training_are_forgotten() -> None:
    trained: list[dict[str, Tensor]] = []
    for stale in (False, True):
        made = trainer()
        if stale:
            made.loss(planted.batches(1, seed=5)[0]).backward()
        made.fit(planted.batches(1))
        trained.append(state_of(made, "wide"))
    for name, tensor in trained[0].items():
        assert torch.equal(tensor, trained[1][name]), name


def test_the_schedule_moves_the_wide_learning_rate_too() -> None:
    used: list[float] = []

    class Spy(Callback):
        def on_step(self, trainer: Trainer, loss: float) -> None:
            assert trainer.wide is not None
            used.append(trainer.wide.param_groups[0]["lr"])

    losses = Losses()
    schedule = ScheduleRecipe(warmup_steps=4, decay_start=5, decay_end=7, decay_power=1)
    made = trainer(schedule=schedule, callbacks=[Spy(), losses])
    made.fit(planted.batches(8))
    factors = [1 / 4, 2 / 4, 3 / 4, 1, 1, 1 / 2, 0, 0]
    assert used == pytest.approx([0.1 * f for f in factors[1:]] + [0])  # after a step, that of the next
    assert [record["lr_wide"] for record in losses.records] == pytest.approx([0.1 * f for f in factors])


# -- checkpoints ---------------------------------------------------------------------------------------------------


def test_only_a_trainer_with_a_wide_optimizer_has_its_parts() -> None:
    without = ["model", "dense", "sparse", "dense_schedule", "sparse_schedule", "random", "position"]
    assert list(trainer(with_wide=False).parts()) == without
    assert set(trainer().parts()) == {*without, "wide", "wide_schedule"}


class InMemory(Source):
    """Chunks of 100 samples."""

    def __init__(self) -> None:
        columns = tuple(SparseColumn(name=n, rows=r) for n, r in planted.ROWS.items())
        self.schema = Schema(sparse=columns, dense=tuple(f"I{i}" for i in range(planted.DENSE)), labels=("click",))
        self.splits = ("train",)
        self._data = planted.batches(7, size=100, last=40)

    def _chunks(self, split: str) -> list[int]:
        return [len(batch) for batch in self._data]

    def _read(self, split: str, i: int) -> Batch:
        return self._data[i]


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


# -- recipes -------------------------------------------------------------------------------------------------------


RECIPE = Recipe(
    name="x",
    data=DataRecipe(path="memory", dim=8),
    model=Component(class_path="hotbed.nn.WideDeep", init_args={"top": [16, 1]}),
    dense_optimizer=Component(class_path="torch.optim.Adam", init_args={"lr": 0.005}),
    sparse_optimizer=Component(class_path="hotbed.optim.RowWiseAdagrad", init_args={"lr": 0.05}),
    wide_optimizer=Component(class_path="hotbed.optim.FTRL", init_args={"lr": 0.1, "beta": 0.0}),
    train=TRAIN,
)


def test_a_recipe_gives_the_wide_part_its_optimizer_and_the_rest_the_other() -> None:
    made = build_trainer(RECIPE, InMemory())
    assert made.wide is not None
    assert made.wide.param_groups[0]["tables"] == ["user", "item", "page"]
    assert made.sparse.param_groups[0]["tables"] == ["embeddings.user", "embeddings.item", "embeddings.page"]
    by_hand = trainer()
    for one in (made, by_hand):
        one.fit(planted.batches(4))
    for name, tensor in by_hand.model.state_dict().items():
        assert torch.equal(tensor, made.model.state_dict()[name]), name


def test_by_default_the_sparse_optimizer_trains_the_wide_part_too() -> None:
    made = build_trainer(replace(RECIPE, wide_optimizer=None), InMemory())
    assert made.wide is None
    tables = made.sparse.param_groups[0]["tables"]
    assert tables == [f"{part}.{name}" for part in ("embeddings", "wide") for name in planted.ROWS]
    made.fit(planted.batches(2))
    assert all(t.any() for t in state_of(made, "wide").values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": Component(class_path="hotbed.nn.DLRM", init_args={"bottom": [8], "top": [1]})},
            "wide_optimizer is set, but hotbed.nn.DLRM has no attribute `wide` that is an EmbeddingCollection; leave",
        ),
        (
            {"wide_optimizer": Component(class_path="hotbed.optim.FTRL")},
            "wide_optimizer: hotbed.optim.FTRL needs 'lr'; set it in init_args",
        ),
        (
            {"wide_optimizer": Component(class_path="torch.nn.Sequential")},
            "wide_optimizer is torch.nn.Sequential, which is not a torch.optim.Optimizer",
        ),
    ],
)
def test_recipes_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build_trainer(replace(RECIPE, **changes), InMemory())
    assert message in str(caught.value)


def test_a_resumed_run_may_not_change_or_drop_the_wide_optimizer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "with", {}, recipe=RECIPE.to_dict())
    older = {key: value for key, value in RECIPE.to_dict().items() if key != "wide_optimizer"}
    save_checkpoint(tmp_path / "without", {}, recipe=older)
    slower = Component(class_path="hotbed.optim.FTRL", init_args={"lr": 0.01, "beta": 0.0})
    none = replace(RECIPE, wide_optimizer=None)
    for checkpoint, recipe, message in (
        ("with", replace(RECIPE, wide_optimizer=slower), r"wide_optimizer\.init_args\.lr was 0\.1 and is now 0\.01"),
        ("with", none, r"wide_optimizer\.class_path was 'hotbed\.optim\.FTRL' and is now None"),
        ("without", RECIPE, r"wide_optimizer\.class_path was None and is now 'hotbed\.optim\.FTRL'"),
    ):
        with pytest.raises(RecipeError, match=message):
            refuse_another_recipe(tmp_path / checkpoint, recipe)
    refuse_another_recipe(tmp_path / "with", RECIPE)
    refuse_another_recipe(tmp_path / "without", none)


def test_ids_that_both_parts_met_are_counted_once() -> None:
    recipe = replace(RECIPE, data=replace(RECIPE.data, on_bad_id="drop"))
    model = build_model(recipe, InMemory(), torch.device("cpu"))
    ids = {"user": torch.tensor([1, 999, -4]), "item": torch.tensor([1, 2, 3]), "page": torch.tensor([0, 0, 7])}
    model(Batch(sparse=Jagged.from_dict(ids), dense=torch.zeros(3, planted.DENSE)))
    assert bad_ids(model) == {"user": 2, "page": 1}
    assert model.embeddings.bad_ids == {"user": 2, "page": 1}
