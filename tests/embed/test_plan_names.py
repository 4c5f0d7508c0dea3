"""All ranks train by one plan: unlike hosts search for it once, and what differs is refused on all of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import hotbed as hb
from hotbed.config import Recipe
from hotbed.embed import plan_for
from hotbed.embed.plan_names import pooled_features
from hotbed.errors import HotbedError
from hotbed.plan import Plan
from hotbed.plan.hardware import Hardware
from hotbed.train.runs.plan_search import distribute_model
from tests.ranks import Ranks

from .distributed_cases import SIZE, Model

TABLES = [hb.Table(f"t{i}", rows, 64) for i, rows in enumerate((400_000, 300_000, 200_000, 500, 90, 50_000, 7_000))]


def unlike(rank: int) -> None:
    """Let this process seem to be on a host with as many ranks as nodes of other ranks have not."""
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + rank)


def searched(group: dist.ProcessGroup, by_recipe: str | None) -> tuple[str, str]:
    """The plan that this rank would find by itself, and the one that it trains by."""
    unlike(dist.get_rank(group))
    try:
        model = hb.EmbeddingCollection(TABLES, [hb.Feature(t.name, t.name) for t in TABLES], device="meta")
        own = plan_for(model, SIZE, "auto").to_json()
        if by_recipe is None:
            found = hb.distribute(model, "auto", device="cpu")
        else:
            found = distribute_model(
                model, Recipe.from_dict(RECIPE | {"parallel": {"plan": by_recipe}}), torch.device("cpu")
            )
        dist.barrier()  # whose process groups end before others have joined them would be taken for gone
        return own, found.plan.to_json()
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


RECIPE = {
    "name": "test",
    "data": {"path": "nowhere", "valid_split": "valid"},
    "model": {"class_path": "hotbed.nn.DLRM"},
    "dense_optimizer": {"class_path": "torch.optim.Adam"},
    "sparse_optimizer": {"class_path": "hotbed.optim.SGD"},
    "train": {"batch_size": 64, "device": "cpu"},
}


@pytest.mark.parametrize("by_recipe", [None, "auto"])
def test_ranks_on_unlike_hosts_train_by_the_plan_of_the_first(ranks: Ranks, by_recipe: str | None):
    found = ranks.run(SIZE, searched, by_recipe)
    trained_by = {plan for _, plan in found}
    assert len(trained_by) == 1
    if by_recipe is None:
        assert trained_by == {found[0][0]}


def refused(group: dist.ProcessGroup, file: str, kind: str) -> str:
    """What is said where ranks have unlike plans."""
    rank = dist.get_rank(group)
    schemes = {"left.t": "row", "u": "row" if rank == 0 or kind != "differs" else "table"}
    plan: object = schemes
    if kind == "file":
        plan = Plan.from_json(Path(f"{file}{rank}").read_text())
    if kind == "one rank's is none" and rank == 1:
        plan = {"nobody": "row"}
    if kind == "nothing to be found":
        os.environ["LOCAL_WORLD_SIZE"] = "1"
        plan = {"nobody": "auto"}
    try:
        hb.distribute(Model(), plan)  # type: ignore[arg-type]
    except HotbedError as error:
        return str(error)
    finally:
        os.environ.pop("LOCAL_WORLD_SIZE", None)
    return ""


def test_plans_that_differ_are_refused_on_all_ranks(ranks: Ranks, tmp_path: Path):
    said = "ranks 1, 2 of 3: got a different plan than rank 0, expected the same plan"
    for error in ranks.run(SIZE, refused, "", "differs"):
        assert error.startswith(said)
    for rank, scheme in enumerate(("table", "table", "row")):
        (tmp_path / f"plan{rank}").write_text(plan_for(Model(), SIZE, scheme).to_json())
    for error in ranks.run(SIZE, refused, str(tmp_path / "plan"), "file"):
        assert error.startswith("rank 2 of 3: got a different plan than rank 0, ")


def test_a_rank_without_a_plan_is_said_on_all(ranks: Ranks):
    found = ranks.run(SIZE, refused, "", "one rank's is none")
    assert "table in schemes: got 'nobody'" in found[1]
    assert all(text.startswith("rank 1 cannot use the plan") for text in (found[0], found[2]))
    found = ranks.run(SIZE, refused, "", "nothing to be found")
    assert "table in schemes: got 'nobody'" in found[0]
    assert all(text.startswith("rank 0 could not find a plan") for text in found[1:])


def test_tables_with_sequences_send_rows_and_pooled_features_are_counted():
    tables = [hb.Table("items", rows=9000, dim=16), hb.Table("users", rows=9000, dim=16)]
    features = [
        hb.Feature("bag", table="items"),
        hb.Feature("other bag", table="items", pooling="mean"),
        hb.Feature("history", table="users", pooling="none"),
    ]
    model = hb.EmbeddingCollection(tables, features)
    assert pooled_features(model) == ({"items": 2.0, "users": 0.0}, {"users": "rows"})
    slow = Hardware.load("a100-40").with_(network=1e4, ranks_per_node=1)
    plan = plan_for(model, 2, "auto", hardware=slow, ids={"items": 200.0, "users": 100.0}, batch_size=20)
    assert plan.wire == {"items": "pooled"}
