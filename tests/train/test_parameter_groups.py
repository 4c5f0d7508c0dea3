"""Tests of optimizer groups of parameters and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotbed.batch import Batch
from hotbed.checkpoint import load_checkpoint, read_manifest, save_checkpoint
from hotbed.config import (
    Component,
    DataRecipe,
    DenseOptimizerGroup,
    MemoryRecipe,
    Recipe,
    ScheduleRecipe,
    SparseOptimizerGroup,
    TrainRecipe,
)
from hotbed.data import Loader
from hotbed.embed import Distributed
from hotbed.errors import RecipeError, SpecError
from hotbed.jagged import Jagged
from hotbed.nn import WideDeep
from hotbed.optim import FTRL, RowWiseAdagrad, TableSelection
from hotbed.specs import Feature, Table
from hotbed.train import Callback, Trainer
from hotbed.train.parameter_groups import moments_by_table
from hotbed.train.runs.build import build, build_model
from hotbed.train.runs.resume import refuse_another_recipe
from hotbed.train.runs.stored_model import bad_ids
from tests.train import planted
from tests.train.parallel_cases import InMemory, assert_equal
from tests.train.planted import Do, Losses

# -- Protects: every parameter and every table has exactly one optimizer, which a recipe's groups choose by name.

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
        torch.optim.Adam(model.parameters(), lr=deep_lr / 10, fused=True),  # as recipes have it on CPUs
        RowWiseAdagrad(model.embeddings, lr=deep_lr),
        group_optimizers={"wide": FTRL(model.wide, lr=0.1, beta=0.0)} if with_wide else {},
        recipe=recipe,
        schedule=schedule,
        callbacks=callbacks,
    )


def state_of(trainer: Trainer, part: str) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in trainer.model.state_dict().items() if name.startswith(part)}


def test_the_wide_part_learns_by_itself() -> None:
    made = trainer(deep_lr=0.0)
    deep = {name: t.clone() for name, t in made.model.state_dict().items() if not name.startswith("wide")}
    before = made.evaluate(planted.batches(4, seed=9))
    made.fit(planted.batches(100))
    after = made.evaluate(planted.batches(4, seed=9))
    assert after.auc > before.auc + 0.1
    assert after.logloss < before.logloss
    assert_equal({name: made.model.state_dict()[name] for name in deep}, deep)


def test_a_wide_part_without_an_optimizer_is_not_trained() -> None:
    made = trainer(with_wide=False)
    deep = state_of(made, "embeddings")
    made.fit(planted.batches(3))
    assert not any(t.any() for t in state_of(made, "wide").values())
    assert not any(torch.equal(t, deep[name]) for name, t in state_of(made, "embeddings").items())


def test_gradients_that_waited_before_training_are_forgotten() -> None:
    trained: list[dict[str, Tensor]] = []
    for stale in (False, True):
        made = trainer()
        if stale:
            made.loss(planted.batches(1, seed=5)[0]).backward()
        made.fit(planted.batches(1))
        trained.append(made.model.state_dict())
    assert_equal(trained[0], trained[1])


# -- recipes -------------------------------------------------------------------------------------------------------


def groups(**given: tuple[str | list[str], str, dict[str, Any]]) -> dict[str, SparseOptimizerGroup]:
    return {
        name: SparseOptimizerGroup(
            tables=tables,
            optimizer=Component(class_path=path, init_args=args),  # pyright: ignore[reportArgumentType]
        )
        for name, (tables, path, args) in given.items()
    }


def dense_groups(**given: tuple[str | list[str], str, dict[str, Any]]) -> dict[str, DenseOptimizerGroup]:
    return {
        name: DenseOptimizerGroup(
            parameters=names,
            optimizer=Component(class_path=path, init_args=args),  # pyright: ignore[reportArgumentType]
        )
        for name, (names, path, args) in given.items()
    }


SGD = ("hotbed.optim.SGD", {"lr": 0.5})
DENSE_SGD = ("torch.optim.SGD", {"lr": 0.5})
RECIPE = Recipe(
    name="x",
    data=DataRecipe(path="memory", dim=8),
    model=Component(class_path="hotbed.nn.WideDeep", init_args={"top": [16, 1]}),
    dense_optimizer=Component(class_path="torch.optim.Adam", init_args={"lr": 0.005}),
    sparse_optimizer=Component(class_path="hotbed.optim.RowWiseAdagrad", init_args={"lr": 0.05}),
    sparse_optimizer_groups=groups(wide=("wide.*", "hotbed.optim.FTRL", {"lr": 0.1, "beta": 0.0})),
    train=TRAIN,
)


def test_a_recipe_gives_the_wide_part_its_optimizer_and_the_rest_the_other() -> None:
    made = build(RECIPE, InMemory(7, 100, 40))
    assert made.optimizers["wide"].param_groups[0]["tables"] == ["wide.user", "wide.item", "wide.page"]
    assert made.sparse.param_groups[0]["tables"] == ["embeddings.user", "embeddings.item", "embeddings.page"]
    by_hand = trainer()
    for one in (made, by_hand):
        one.fit(planted.batches(4))
    assert_equal(made.model.state_dict(), by_hand.model.state_dict())


def test_by_default_the_sparse_optimizer_trains_the_wide_part_too() -> None:
    made = build(replace(RECIPE, sparse_optimizer_groups={}), InMemory(7, 100, 40))
    assert list(made.optimizers) == ["dense", "sparse"]
    tables = made.sparse.param_groups[0]["tables"]
    assert tables == [f"{part}.{name}" for part in ("embeddings", "wide") for name in planted.ROWS]
    made.fit(planted.batches(2))
    assert all(t.any() for t in state_of(made, "wide").values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": Component(class_path="hotbed.nn.DLRM", init_args={"bottom": [8], "top": [1]})},
            "sparse_optimizer_groups.wide: 'wide.*' matches no table. The tables are embeddings.user, embeddings.item,",
        ),
        (
            {"sparse_optimizer_groups": groups(wide=("wide.usr", *SGD))},
            "sparse_optimizer_groups.wide: 'wide.usr' matches no table. The tables are embeddings.user, "
            "embeddings.item, embeddings.page, wide.user, wide.item, wide.page; did you mean 'wide.user'?",
        ),
        (
            {"sparse_optimizer_groups": groups(a=("wide", *SGD), b=(["page", "embeddings.user"], *SGD))},
            "sparse_optimizer_groups.a and sparse_optimizer_groups.b both match table 'wide.page'",
        ),
        (
            {"sparse_optimizer_groups": groups(a=("wide", *SGD), b=("embeddings", *SGD))},
            "sparse_optimizer_groups match all tables, so sparse_optimizer has no table to train",
        ),
        (
            {"sparse_optimizer_groups": groups(wide=("wide", "hotbed.optim.FTRL", {}))},
            "sparse_optimizer_groups.wide.optimizer: hotbed.optim.FTRL requires 'lr'. Set it in init_args",
        ),
        (
            {"sparse_optimizer_groups": groups(wide=("wide", "torch.nn.Sequential", {}))},
            "sparse_optimizer_groups.wide.optimizer is torch.nn.Sequential, expected a hotbed.optim.Sparse",
        ),
        (
            {"dense_optimizer_groups": dense_groups(a=("botom", *DENSE_SGD))},
            "dense_optimizer_groups.a: 'botom' matches no parameter. The parameters are ",
        ),
        (
            {"dense_optimizer_groups": dense_groups(a=("*.bias", *DENSE_SGD), b=("top", *DENSE_SGD))},
            "dense_optimizer_groups.a and dense_optimizer_groups.b both match parameter '",
        ),
        (
            {"dense_optimizer_groups": dense_groups(a=("*", *DENSE_SGD))},
            "dense_optimizer_groups match all parameters, so dense_optimizer has no parameter to train",
        ),
        (
            {"dense_optimizer_groups": dense_groups(a=("*.bias", "torch.optim.LBFGS", {}))},
            "dense_optimizer_groups.a.optimizer: torch.optim.LBFGS needs a closure",
        ),
    ],
)
def test_recipes_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build(replace(RECIPE, **changes), InMemory(7, 100, 40))
    assert message in str(caught.value)


def test_each_table_is_trained_by_the_optimizer_of_its_group_to_the_bit() -> None:
    """In the first step gradients are alike, so each table is as where all tables have the optimizer of its group."""
    mixed = replace(RECIPE, sparse_optimizer_groups=groups(some=(["embeddings.user", "wide.page"], *SGD)))
    plain = replace(RECIPE, sparse_optimizer_groups={})
    all_sgd = replace(plain, sparse_optimizer=Component(class_path=SGD[0], init_args=SGD[1]))
    states: list[dict[str, Tensor]] = []
    for recipe in (mixed, plain, all_sgd):
        made = build(recipe, InMemory(7, 100, 40))
        made.fit(planted.batches(1))
        states.append(made.model.state_dict())
    for name, tensor in states[0].items():
        of_sgd = name in ("embeddings.user.weight", "wide.page.weight")
        assert torch.equal(tensor, states[1 + of_sgd][name]), name
        if name.startswith(("embeddings", "wide")):
            assert not torch.equal(tensor, states[2 - of_sgd][name]), name


def test_each_parameter_is_trained_by_the_optimizer_of_its_group_to_the_bit() -> None:
    """In the first step gradients are alike, so each parameter is as where all have the optimizer of its group."""
    states: list[dict[str, Tensor]] = []
    sgd = Component(class_path=DENSE_SGD[0], init_args=DENSE_SGD[1])
    for recipe in (
        replace(RECIPE, dense_optimizer_groups=dense_groups(biases=("*.bias", *DENSE_SGD))),
        RECIPE,
        replace(RECIPE, dense_optimizer=sgd),
    ):
        made = build(recipe, InMemory(7, 100, 40))
        owned = [p for name in made.optimizers if name in ("dense", "biases")
                 for group in made.optimizers[name].param_groups for p in group["params"]]  # fmt: skip
        assert sorted(map(id, owned)) == sorted(map(id, made.model.parameters()))
        made.fit(planted.batches(1))
        states.append({name: p.detach().clone() for name, p in made.model.named_parameters()})
    for name, tensor in states[0].items():
        of_sgd = name.endswith(".bias")
        assert torch.equal(tensor, states[1 + of_sgd][name]), name
        assert not torch.equal(tensor, states[2 - of_sgd][name]), name


def test_groups_train_the_same_bits_wherever_rows_are() -> None:
    some = groups(wide=("wide", "hotbed.optim.FTRL", {"lr": 0.1}), some=("embeddings.user", *SGD))
    biases = dense_groups(biases=("*.bias", *DENSE_SGD))
    recipe = replace(RECIPE, sparse_optimizer_groups=some, dense_optimizer_groups=biases)
    states: list[dict[str, Tensor]] = []
    for memory in (MemoryRecipe(), MemoryRecipe(tier="host")):
        made = build(replace(recipe, memory=memory), InMemory(7, 100, 40))
        assert isinstance(made.model, Distributed) == (memory.tier == "host")
        assert list(made.optimizers) == ["dense", "sparse", "biases", "wide", "some"]
        made.fit(planted.batches(3))
        states.append(made.model.state_dict())
    assert_equal(states[0], states[1])


def test_moments_and_memory_are_those_of_each_tables_optimizer() -> None:
    recipe = replace(
        RECIPE, sparse_optimizer_groups=groups(a=("wide", "hotbed.optim.FTRL", {"lr": 0.1}), b=("em*.user", *SGD))
    )
    found = moments_by_table(build_model(recipe, InMemory(7, 100, 40), torch.device("cpu")), recipe)
    assert {name: [m.per for m in moments] for name, moments in found.items()} == {
        "embeddings.item": ["row"],
        "embeddings.page": ["row"],
        "embeddings.user": [],
        **{f"wide.{name}": ["element", "element"] for name in planted.ROWS},
    }


def test_a_table_that_is_not_there_cannot_be_selected() -> None:
    model = trainer().model
    with pytest.raises(SpecError, match=r"table: got 'wide\.usr', expected one of embeddings\.user, .*wide\.user"):
        TableSelection(model, ["wide.usr"])
    with pytest.raises(SpecError, match=r"got none, expected at least one of embeddings\.user"):
        TableSelection(model, [])


def test_checkpoints_of_an_optimizer_of_the_wide_part_load_into_a_group_and_back(tmp_path: Path) -> None:
    """The state of an optimizer of ``model.wide`` names tables without ``wide.``."""
    former, group = trainer(), build(RECIPE, InMemory(7, 100, 40))
    assert former.optimizers["wide"].param_groups[0]["tables"] == ["user", "item", "page"]
    for one in (former, group):
        one.fit(planted.batches(3))
    save_checkpoint(tmp_path / "former", former.parts())
    save_checkpoint(tmp_path / "group", group.parts())
    assert read_manifest(tmp_path / "former").parts.keys() == read_manifest(tmp_path / "group").parts.keys()
    resumed: list[dict[str, Tensor]] = []
    for checkpoint, made in (("former", build(RECIPE, InMemory(7, 100, 40))), ("group", trainer())):
        load_checkpoint(tmp_path / checkpoint, made.parts())
        made.recipe, before = replace(made.recipe, steps=6, epochs=9), made.step
        made.fit(planted.batches(6))
        assert (before, made.step) == (3, 6)
        resumed.append(made.model.state_dict())
    assert_equal(resumed[0], resumed[1])


def test_a_resumed_run_may_not_change_or_drop_a_group(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "with", {}, recipe=RECIPE.to_dict())
    older = {key: value for key, value in RECIPE.to_dict().items() if not key.endswith("optimizer_groups")}
    save_checkpoint(tmp_path / "without", {}, recipe=older)
    slower = groups(wide=("wide.*", "hotbed.optim.FTRL", {"lr": 0.01, "beta": 0.0}))
    none = replace(RECIPE, sparse_optimizer_groups={})
    key = r"sparse_optimizer_groups\.wide\.optimizer"
    for checkpoint, recipe, message in (
        ("with", replace(RECIPE, sparse_optimizer_groups=slower), rf"{key}\.init_args\.lr was 0\.1 and is now 0\.01"),
        ("with", none, rf"{key}\.class_path was 'hotbed\.optim\.FTRL' and is now None"),
        ("without", RECIPE, rf"{key}\.class_path was None and is now 'hotbed\.optim\.FTRL'"),
    ):
        with pytest.raises(RecipeError, match=message):
            refuse_another_recipe(tmp_path / checkpoint, recipe)
    refuse_another_recipe(tmp_path / "with", RECIPE)
    refuse_another_recipe(tmp_path / "without", none)


def test_ids_that_both_parts_met_are_counted_once() -> None:
    recipe = replace(RECIPE, data=replace(RECIPE.data, on_bad_id="drop"))
    model = build_model(recipe, InMemory(7, 100, 40), torch.device("cpu"))
    ids = {"user": torch.tensor([1, 999, -4]), "item": torch.tensor([1, 2, 3]), "page": torch.tensor([0, 0, 7])}
    model(Batch(sparse=Jagged.from_dict(ids), dense=torch.zeros(3, planted.DENSE)))
    assert bad_ids(model) == {"user": 2, "page": 1}
    assert model.embeddings.bad_ids == {"user": 2, "page": 1}


# -- Protects: a run whose tables have several optimizers is saved, and goes on to the same bits.


def test_only_a_trainer_with_a_wide_optimizer_has_its_parts() -> None:
    without = ["model", "dense", "sparse", "dense_schedule", "sparse_schedule", "random", "position"]
    assert list(trainer(with_wide=False).parts()) == without
    assert set(trainer().parts()) == {*without, "wide", "wide_schedule"}


def test_a_resumed_run_is_bit_identical_to_one_that_was_not_stopped(tmp_path: Path) -> None:
    schedule = ScheduleRecipe(warmup_steps=8)
    whole, rest = Losses(), Losses()
    save = Do({4: lambda trainer: save_checkpoint(tmp_path / "c", trainer.parts(), step=trainer.step)})
    first = trainer(schedule=schedule, callbacks=[whole, save])
    first.fit(Loader(InMemory(7, 100, 40), "train", 64, shuffle=True, seed=4, window=2))
    second = trainer(replace(TRAIN, seed=5), schedule=schedule, callbacks=[rest])
    load_checkpoint(tmp_path / "c", second.parts())
    data = Loader(InMemory(7, 100, 40), "train", 64, shuffle=True, seed=4, window=2)
    second.resume_data(data)
    second.fit(data)
    assert len(rest.losses) == 6
    assert whole.losses[4:] == rest.losses
    assert_equal(second.model.state_dict(), first.model.state_dict())
