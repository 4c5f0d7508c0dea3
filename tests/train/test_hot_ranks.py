"""Hot rows on several ranks: copies are the owner's rows after every turn, and nothing changes but the place."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hotbed.config import Recipe
from hotbed.data import Schema, SparseColumn, SplitBinaryWriter
from hotbed.data.skew.hot_cold import pack
from hotbed.embed import EmbeddingCollection
from hotbed.train import Callback
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.hot_batches import HotSchedule
from hotbed.train.runs.loaders import evaluation_loader, training_loader
from tests.matrix import full
from tests.ranks import TIMEOUT_S, Ranks
from tests.train import planted

from .parallel_cases import assert_equal, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

HOT = {"user": 42, "item": 25, "page": 3}


@pytest.fixture(name="packed")
def packed_fixture(tmp_path: Path) -> Path:
    dense = tuple(f"x{i}" for i in range(planted.DENSE))
    schema = Schema(sparse=tuple(SparseColumn(name=n, rows=r) for n, r in planted.ROWS.items()), dense=dense)
    (tmp_path / "data").mkdir()
    with SplitBinaryWriter(tmp_path / "data", schema, ["train", "valid"]) as writer:
        for batch in planted.batches(8, 30):
            writer.append("train", batch)
        writer.append("valid", planted.batches(1, 90, seed=5)[0])
    assert 80 < pack(tmp_path / "data", tmp_path / "packed", HOT).hot < 200
    return tmp_path / "packed"


class Turns(Callback):
    """After every turn, the rows of the first tile of each table, if this rank has them, and whether it owns them."""

    def __init__(self) -> None:
        self.found: list[dict[str, tuple[bool, Tensor]]] = []
        self.rates: list[float] = []

    def on_eval(self, trainer: Any, metrics: Any) -> None:
        collections = [m for m in trainer.model.modules() if isinstance(m, EmbeddingCollection)]
        tiles = [(t, held) for c in collections for t in HOT for held in c.local_tiles(t)]
        first = {t: held for t, held in tiles if held.shard.rows == range(HOT[t])}
        self.found.append({t: (held.owned, held.arena.rows(held.number).clone()) for t, held in first.items()})

    def on_schedule(self, trainer: Any, record: dict[str, float]) -> None:
        self.rates.append(record["rate"])


def recipe_of(packed: Path, *, hot: bool, tier: str = "device", dense: str = "ddp") -> Recipe:
    return Recipe.from_dict(
        {
            "name": "hot",
            "data": {"path": str(packed), "dim": 32, "valid_split": "valid", "test_split": None},
            "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 32], "top": [16, 1]}},
            "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
            "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.05}},
            "train": {"batch_size": 30, "device": "cpu", "epochs": 2},
            "parallel": {"plan": "row", "timeout_s": TIMEOUT_S, "dense": dense},
            "memory": {"tier": tier},
            "hot": {"rows": str(packed / "hot_rows.json") if hot else None, "batches": "alternating", "rate": 25},
        }
    )


def trained(group: object, packed: Path, hot: bool, tier: str) -> dict[str, Any]:
    recipe = recipe_of(packed, hot=hot, tier=tier)
    source = open_source(recipe.data)
    trainer = build(recipe, source)
    turns = Turns()
    loader: Any = training_loader(recipe, source, trainer.ranks, trainer.model)
    trainer.callbacks += [turns, HotSchedule(loader, recipe.hot)]
    trainer.fit(loader, evaluation_loader(recipe, source, "valid", trainer.ranks))
    return {"state": state_of(trainer), "turns": turns.found, "rates": turns.rates}


@pytest.mark.parametrize("tier", [full("device"), "host"])
def test_copies_are_the_owners_rows_after_every_turn_and_the_model_is_that_of_plain_sharding(
    ranks: Ranks, packed: Path, tier: str
) -> None:
    plain = ranks.run(3, trained, packed, False, "device")[0]
    assert len(plain["rates"]) >= 4
    by_rank = ranks.run(3, trained, packed, True, tier)
    for found in by_rank:
        assert_equal(found["state"], plain["state"])  # rows, moments and dense parameters
        assert found["rates"] == plain["rates"]
    for turn in zip(*(found["turns"] for found in by_rank), strict=True):
        for table in HOT:
            copies = [of_rank[table] for of_rank in turn]
            assert sorted(owned for owned, _ in copies) == [False, False, True]
            (owners,) = (rows for owned, rows in copies if owned)
            assert owners.shape == (HOT[table], 32)
            assert all(torch.equal(rows, owners) for _, rows in copies)
    changed = [turn["user"][1] for turn in by_rank[0]["turns"]]
    assert not any(torch.equal(a, b) for a, b in pairwise(changed))


def is_fused(group: object, packed: Path, dense: str) -> bool | None:
    recipe = recipe_of(packed, hot=False, dense=dense)
    return build(recipe).dense.defaults["fused"]


def test_ranks_update_dense_parameters_in_one_pass_but_those_that_fsdp_cuts(ranks: Ranks, packed: Path) -> None:
    assert ranks.run(2, is_fused, packed, "ddp") == [True, True]
    assert ranks.run(2, is_fused, packed, "fsdp") == [None, None]
