"""Batches that are split in a hot and a cold part: their gradients add up to the batch's, wherever rows are."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hotbed as hb
from hotbed.cli.main import main
from hotbed.config import Recipe, TrainRecipe
from hotbed.embed import EmbeddingCollection
from hotbed.errors import NonFiniteError
from hotbed.nn import DLRM
from hotbed.train import Trainer
from hotbed.train.prefetch import Divide, whole
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.hot_batches import HotSplit
from hotbed.train.runs.loaders import training_loader
from tests.cli.cases import Output, refused, train
from tests.matrix import full
from tests.ranks import TIMEOUT_S
from tests.train import planted
from tests.train.parallel_cases import assert_equal, state_of

from .test_hot_schedule import packed_fixture  # noqa: F401

FP32 = ("--train.precision", "fp32")  # for sums in another order are compared
SPLIT = ("--hot.batches", "split", *FP32)


def of_one_step(divide: Divide, *, size: int, seed: int) -> tuple[dict[str, Tensor], int]:
    """Changes that a step of gradient descent makes to everything, and in how many parts."""
    (batch,) = planted.batches(1, size, seed=seed)
    tables = [hb.Table(name, rows, planted.DIM) for name, rows in planted.ROWS.items()]
    features = [hb.Feature(name, name) for name in planted.ROWS]
    torch.manual_seed(0)
    model = DLRM(tables, features, planted.DENSE, bottom=(16, planted.DIM), top=(16, 1))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    recipe = TrainRecipe(batch_size=size, device="cpu", precision="fp32", steps=1)
    dense, sparse = torch.optim.SGD(model.parameters(), lr=1.0), hb.optim.SGD(model, lr=1.0)
    Trainer(model, dense, sparse, recipe=recipe, divide=divide).fit([batch])
    return {name: t - before[name] for name, t in model.state_dict().items()}, len(divide(batch))


@settings(max_examples=25, deadline=None)
@given(
    limits=st.tuples(*(st.integers(0, rows) for rows in planted.ROWS.values())),
    size=st.integers(1, 70),
    seed=st.integers(0, 9),
)
def test_gradients_of_the_parts_add_up_to_the_batch_s(limits: tuple[int, ...], size: int, seed: int) -> None:
    split = HotSplit(dict(zip(planted.ROWS, limits, strict=True)))
    found, parts = of_one_step(split, size=size, seed=seed)
    expected, _ = of_one_step(whole, size=size, seed=seed)
    assert any(t.abs().max() > 0.001 for t in expected.values())
    for name, change in expected.items():
        if parts == 1:
            assert torch.equal(found[name], change), name
        else:
            assert torch.allclose(found[name], change, rtol=1e-4, atol=1e-6), name


def test_parts_are_the_hot_samples_and_then_the_others() -> None:
    (batch,) = planted.batches(1, 60)
    limits = {"user": 30, "item": 20, "page": 2}
    hot = torch.stack([batch.sparse[name].values < limit for name, limit in limits.items()]).all(dim=0)
    assert 5 < int(hot.sum()) < 55
    parts = HotSplit(limits)(batch)
    for part, which in zip(parts, (hot, ~hot), strict=True):
        assert part.dense is not None
        assert batch.dense is not None
        assert torch.equal(part.dense, batch.dense[which])
        assert torch.equal(part.sparse["user"].values, batch.sparse["user"].values[which])
    none, every = dict.fromkeys(limits, 0), dict(planted.ROWS)
    assert [len(HotSplit(limits)(batch)) for limits in (none, every)] == [1, 1]
    assert [list(map(len, HotSplit(limits, ranks=2)(batch))) for limits in (none, every)] == [[0, 60], [60, 0]]


def test_a_loss_that_is_not_finite_is_found_in_either_part_before_anything_is_touched() -> None:
    limits = {"user": 30, "item": 20, "page": 2}
    for which in (0, 1):
        (batch,) = planted.batches(1, 60)
        trainer = planted.trainer(TrainRecipe(batch_size=60, device="cpu", precision="fp32"))
        before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
        divide = HotSplit(limits)
        parts = divide(batch)
        assert parts[which].dense is not None
        parts[which].dense[3, 2] = float("inf")
        spoiled = Trainer(
            trainer.model, trainer.dense, trainer.sparse, recipe=trainer.recipe, divide=lambda _, parts=parts: parts
        )
        message = f"dense of sample 3 of part {1 + which} of 2 of the batch, column 2 is inf"
        with pytest.raises(NonFiniteError, match=message):
            spoiled.fit([batch])
        assert_equal(trainer.model.state_dict(), before)


def test_where_rows_are_changes_nothing_and_split_batches_train_nearly_the_same(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    fetch = EmbeddingCollection.prefetch_rows

    def seen(self: EmbeddingCollection, *args: Any) -> None:
        threads.append(threading.current_thread().name)
        fetch(self, *args)

    monkeypatch.setattr(EmbeddingCollection, "prefetch_rows", seen)
    _, split, run = train(packed, *SPLIT)
    assert split["memory"]["disk_bytes"] > 0
    assert 0.9 * split["steps"] < len(threads) <= split["steps"]  # few batches have one part only
    assert all(name.startswith("hotbed-fetch") for name in threads)
    _, in_memory, _ = train(packed, *SPLIT, "--memory.tier", "device", "--memory.cache_rows", "0")
    assert split["test"] == in_memory["test"]
    _, mixed, _ = train(packed, "--hot.batches", "mixed", *FP32)
    assert split["steps"] == mixed["steps"]
    assert split["test"]["logloss"] == pytest.approx(mixed["test"]["logloss"], rel=1e-4)
    assert split["test"] != mixed["test"]  # sums were taken in another order
    _, stopped, first = train(packed, *SPLIT, "--train.steps", "7")
    assert stopped["steps"] == 7
    _, resumed, _ = train(packed, *SPLIT, "--resume", str(first))
    assert resumed["test"] == split["test"]
    assert run != first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hot.rows", "null"], "hot.batches is 'split', but hot.rows is not set"),
        (["--parallel.reader", "owners"], "parallel.reader: got owners, expected each or first"),
        (["--parallel.overlap", "false"], "parallel.overlap: got False, expected True"),
        (["--parallel.dense", "fsdp", "--train.checkpoint", "none"], "parallel.dense: got fsdp, expected ddp"),
    ],
)
def test_mistakes_get_one_clear_message(options: list[str], message: str, packed: Path, capsys: Output) -> None:
    assert message in refused(["train", str(packed), *SPLIT, *options], capsys)


def trained(group: object, packed: Path, batches: str, tier: str, plan: str, reader: str) -> dict[str, Tensor]:
    recipe = Recipe.from_dict(
        {
            "name": "split",
            "data": {"path": str(packed), "dim": 32, "valid_split": None, "test_split": None},
            "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 32], "top": [16, 1]}},
            "dense_optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
            "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.05}},
            "train": {"batch_size": 90, "device": "cpu", "precision": "fp32", "steps": 12},
            "parallel": {"plan": plan, "timeout_s": TIMEOUT_S, "reader": reader},
            "memory": {"tier": tier},
            "hot": {"rows": str(packed / "hot_rows.json"), "batches": batches},
        }
    )
    source = open_source(recipe.data)
    trainer = build(recipe, source)
    trainer.fit(training_loader(recipe, source, trainer.ranks, trainer.model))
    return state_of(trainer)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("budget", [full("0"), "16000"])
def test_several_ranks(budget: str, packed: Path, ranks: Any) -> None:
    """Equal bits by every plan; without a hot row, where all hot parts are empty, those of whole batches."""
    out = packed.parent / "again"
    assert main(["pack", str(packed), str(out), "--budget", budget, "--sample", "1"]) == 0
    hot = json.loads((out / "hot_rows.json").read_text())["hot_samples"]
    assert (hot == 0) == (budget == "0")
    mixed = ranks.run(3, trained, out, "mixed", "device", "row", "each")[0]
    split = ranks.run(3, trained, out, "split", "device", "row", "each")[0]
    for name, value in mixed.items():
        if hot:
            assert torch.allclose(split[name].float(), value.float(), rtol=1e-3, atol=1e-5), name
        else:
            assert torch.equal(split[name], value), name
    for tier, plan, reader in (("host", "table", "each"), ("device", "grid", "first")):
        for found in ranks.run(3, trained, out, "split", tier, plan, reader):
            assert_equal(found, split)
