"""Protects that a search varies what the recipe names, around its values, and that what it makes are recipes."""

from typing import Any

import pytest

from hotbed.config import Recipe
from hotbed.train.search_space import changed, search_space


def recipe(**changes: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "name": "x",
            "data": {"path": "somewhere", "dim": 16},
            "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [64, 16], "top": [8, 1]}},
            "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.002}},
            "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.08}},
            "train": {"batch_size": 8},
            **changes,
        }
    )


def test_rates_dims_and_dropout_are_searched_around_the_values_of_the_recipe() -> None:
    spaces = {space.key: space for space in search_space(recipe())}
    assert list(spaces) == [
        "sparse_optimizer.init_args.lr",
        "dense_optimizer.init_args.lr",
        "data.dim",
        "model.init_args.dropout",
    ]
    rate = spaces["sparse_optimizer.init_args.lr"]
    assert (rate.value, rate.low, rate.high, rate.log) == (0.08, 0.01, 0.64, True)
    assert spaces["data.dim"].choices == (4, 8, 16, 32, 64)
    assert (spaces["model.init_args.dropout"].low, spaces["model.init_args.dropout"].high) == (0.0, 0.5)


def test_optimizers_of_groups_and_first_moments_are_searched_too() -> None:
    optimizer = {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 1, "initial_accumulator": 1e-6}}
    given = recipe(
        sparse_optimizer_groups={"big": {"tables": ["a"], "optimizer": optimizer}}, sparse_optimizer=optimizer
    )
    spaces = {space.key: space for space in search_space(given)}
    for owner in ("sparse_optimizer", "sparse_optimizer_groups.big.optimizer"):
        assert f"{owner}.init_args.lr" in spaces
        assert f"{owner}.init_args.initial_accumulator" in spaces
    rate = spaces["sparse_optimizer_groups.big.optimizer.init_args.lr"]
    drawn = rate.apply(given, 2.0)
    assert drawn.sparse_optimizer_groups["big"].optimizer.init_args["lr"] == 2.0
    assert list(changed(given, drawn)) == [rate.key]


def test_what_a_recipe_does_not_have_is_not_searched() -> None:
    model = {"class_path": "torch.nn.Identity"}
    given = recipe(model=model, data={"path": "somewhere", "dim": {"users": 8}})
    assert [space.key for space in search_space(given)] == [
        "sparse_optimizer.init_args.lr",
        "dense_optimizer.init_args.lr",
    ]


@pytest.mark.parametrize("init_args", [{"bottom": [64, 16], "top": [8, 1]}, {"top": [8, 1]}])
def test_the_bottom_mlp_ends_with_the_dim_that_was_drawn(init_args: dict[str, Any]) -> None:
    dim = 16 if "bottom" in init_args else 128
    given = recipe(
        model={"class_path": "hotbed.nn.DLRM", "init_args": init_args}, data={"path": "somewhere", "dim": dim}
    )
    space = next(space for space in search_space(given) if space.key == "data.dim")
    drawn = space.apply(given, dim // 2)
    assert drawn.data.dim == dim // 2
    assert drawn.model.init_args["bottom"][-1] == dim // 2
    assert space.apply(given, dim) is given


def test_members_of_an_ensemble_share_the_dim_that_was_drawn() -> None:
    given = recipe(
        model={"class_path": "hotbed.nn.DLRMEnsemble", "init_args": {"members": 6, "bottom": [64, 8]}},
        data={"path": "somewhere", "dim": 48},
    )
    space = next(space for space in search_space(given) if space.key == "data.dim")
    assert space.choices == (12, 24, 48, 96, 192)
    assert space.apply(given, 12).model.init_args["bottom"] == [64, 2]
    odd = recipe(model={"class_path": "hotbed.nn.DLRMEnsemble"}, data={"path": "somewhere", "dim": 4})
    assert [space.choices for space in search_space(odd) if space.key == "data.dim"] == [(4, 8, 16)]
