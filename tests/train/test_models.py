"""Every model of `hotbed.nn` under every plan, in any memory, saved, gone on with, exported and served."""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hotbed import nn
from hotbed.config import Component
from hotbed.data import Schema, SparseColumn
from hotbed.testing.model_contract import (
    RANKS,
    ModelContract,
    World,
    contract_recipe,
    run_of,
    train_all,
    train_first_half,
    train_second_half,
    with_plans,
)
from hotbed.train.runs.stored_model import evaluate_checkpoint
from tests.ranks import Ranks

USER = SparseColumn(name="user", rows=60)
ITEM = SparseColumn(name="item", rows=40)
HISTORY = SparseColumn(name="history", rows=40, table="item", ids=None, pooling="none")
BOUGHT = SparseColumn(name="bought", rows=40, table="item", ids=None, pooling="mean", weights="times")
SHOP = SparseColumn(name="shop", rows=20, ids=2)
POOLED = Schema(sparse=(USER, ITEM, BOUGHT, SHOP), dense=("age", "price"), labels=("click",))
SEQUENCE = Schema(sparse=(HISTORY, ITEM), labels=("click",))


class Contract(ModelContract):
    schema = POOLED

    @pytest.fixture
    def world(self, ranks: Ranks) -> World:
        return ranks.run

    @pytest.mark.full
    @pytest.mark.parametrize(("size", "other"), [(1, 3), (2, 1), (3, 8), (4, 2), (8, 4)])
    def test_processes_plans_and_tiers_train_to_the_same_bits(
        self, recipe: dict[str, Any], world: World, tmp_path: Path, size: int, other: int
    ) -> None:
        """Each run stops after half of its steps, and another number of processes resumes it under another plan."""
        recipe["parallel"] = {"virtual_ranks": 8}
        straight = world(1, train_all, {"": recipe})[0][""]
        cuts = list(itertools.product(("table", "row", "column"), ("device", "host", "disk")))
        for i, here in enumerate(cuts):
            (plan, tier), (next_plan, next_tier) = here, cuts[i - 4]
            first, second = (
                recipe | {"parallel": {"virtual_ranks": 8, "plan": scheme}, "memory": {"tier": memory}}
                for scheme, memory in (
                    (plan if size > 1 else "table", tier),
                    (next_plan if other > 1 else "table", next_tier),
                )
            )
            checkpoint = str(tmp_path / f"checkpoint-{i}")
            losses = world(size, train_first_half, first, checkpoint)[0]
            assert world(other, train_second_half, second, checkpoint, losses)[0] == straight, here


@pytest.mark.full
class TestDLRM(Contract):
    model = Component(class_path="hotbed.nn.DLRM", init_args={"bottom": [8, 32], "top": [16, 1]})


@pytest.mark.full
class TestDLRMEnsemble(Contract):
    model = Component(class_path="hotbed.nn.DLRMEnsemble", init_args={"members": 2, "bottom": [8, 16], "top": [16, 1]})


@pytest.mark.full
class TestWideDeep(Contract):
    model = Component(class_path="hotbed.nn.WideDeep", init_args={"top": [16, 1]})


@pytest.mark.full
class TestDCNv2(Contract):
    model = Component(
        class_path="hotbed.nn.DCNv2", init_args={"layers": 2, "low_rank": 4, "bottom": [8, 16], "top": [16, 1]}
    )


@pytest.mark.full
class TestDeepFM(Contract):
    model = Component(class_path="hotbed.nn.DeepFM", init_args={"top": [16, 1]})


@pytest.mark.full
class TestMMoE(Contract):
    model = Component(
        class_path="hotbed.nn.MMoE", init_args={"tasks": 2, "experts": 3, "expert": [16, 8], "tower": [8]}
    )
    schema = replace(POOLED, labels=("click", "buy"))


class TestDIN(Contract):
    model = Component(
        class_path="hotbed.nn.DIN",
        init_args={"histories": {"history": "item"}, "max_len": 4, "attention": [8], "top": [16, 1]},
    )
    schema = Schema(sparse=(USER, replace(HISTORY, weights="liked"), ITEM, SHOP), dense=("age",), labels=("click",))


@pytest.mark.full
class TestSASRec(Contract):
    model = Component(
        class_path="hotbed.nn.SASRec", init_args={"history": "history", "item": "item", "max_len": 4, "heads": 2}
    )
    schema = SEQUENCE


@pytest.mark.full
class TestHSTU(Contract):
    model = Component(
        class_path="hotbed.nn.HSTU", init_args={"history": "history", "item": "item", "max_len": 4, "heads": 2}
    )
    schema = SEQUENCE


@pytest.mark.full
class TestTwoTower(Contract):
    model = Component(class_path="hotbed.nn.TwoTower", init_args={"item": ["item", "shop"], "widths": [16, 8]})


@pytest.mark.full
class TestTwoTowerThatRetrieves(Contract):
    """All kinds of candidates at once: of the batch, drawn, and of single samples."""

    model = TestTwoTower.model
    retrieval: ClassVar[Mapping[str, Any] | None] = {
        "sampled": 16,
        "sampled_by": "popularity",
        "negatives": "bought",
        "k": [3, 5],
    }

    def test_evaluation_uses_the_predictions(self, recipe: dict[str, Any], tmp_path: Path) -> None:
        """It is found among all items: the same with the checkpoint's model as in the run, whose test it was."""
        recipe["data"] |= {"test_split": "train"}
        run = run_of(recipe, tmp_path / "runs")
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        assert evaluate_checkpoint(run, "train")[2].to_dict() == summary["test"]


OF_MODELS = [
    TestDLRM,
    TestDLRMEnsemble,
    TestWideDeep,
    TestDCNv2,
    TestDeepFM,
    TestMMoE,
    TestDIN,
    TestSASRec,
    TestHSTU,
    TestTwoTower,
    TestTwoTowerThatRetrieves,
]


def test_every_model_of_the_package_is_here() -> None:
    named = {of.model.class_path.rpartition(".")[2] for of in OF_MODELS}
    made = {name for name in nn.__all__ if "tables" in inspect.signature(getattr(nn, name)).parameters}
    assert named == made - {"NextItem"}  # which is abstract


def test_what_retrieval_has_learned_goes_on_in_a_resumed_run(tmp_path: Path) -> None:
    """The one of its contract that needs no other process."""
    of = TestTwoTowerThatRetrieves()
    of.test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(contract_recipe(of, tmp_path), tmp_path)


OPTIMIZERS: dict[str, Any] = {
    name: {"class_path": f"hotbed.optim.{name}", "init_args": {"lr": lr}}
    for name, lr in {
        **dict.fromkeys(("SGD", "Adagrad", "RowWiseAdagrad", "FTRL"), 0.1),
        **dict.fromkeys(("Adam", "AdamW", "PartialRowWiseAdam", "LAMB"), 0.01),
    }.items()
}


@pytest.mark.full
@pytest.mark.parametrize("of", OF_MODELS)
def test_every_optimizer_trains_the_same_model_under_any_plan(of: type[Contract], ranks: Ranks, tmp_path: Path) -> None:
    """Whether it has moments of rows or of their elements, or norms of both."""
    recipe, plans = contract_recipe(of, tmp_path), ("whole tables", "grid of rows and columns", "on disk, cached")
    found = [
        ranks.run(RANKS, train_all, with_plans(recipe | {"sparse_optimizer": optimizer}, plans))[0]
        for optimizer in OPTIMIZERS.values()
    ]
    assert found == [dict.fromkeys(plans, by["whole tables"]) for by in found]
    assert len({by["whole tables"] for by in found}) == len(OPTIMIZERS)


@pytest.mark.parametrize(("of", "optimizer"), list(zip(OF_MODELS, itertools.cycle(OPTIMIZERS), strict=False)))
def test_each_model_with_one_optimizer(of: type[Contract], optimizer: str, ranks: Ranks, tmp_path: Path) -> None:
    """`make test-all` trains each model by all optimizers."""
    recipe, plans = contract_recipe(of, tmp_path), ("whole tables", "on disk, cached")
    found = ranks.run(RANKS, train_all, with_plans(recipe | {"sparse_optimizer": OPTIMIZERS[optimizer]}, plans))[0]
    assert found == dict.fromkeys(plans, found["whole tables"])
