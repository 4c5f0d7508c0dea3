"""Tests of hot and cold batches: the schedule of alternating batches, and divided batches."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import hotbed as hb
from hotbed.cli.main import main
from hotbed.config import HotRecipe, Recipe, TrainRecipe
from hotbed.data import Loader, Schema, SparseColumn, SplitBinarySource, SplitBinaryWriter
from hotbed.data.skew.hot_cold import HotColdLoader, pack
from hotbed.embed import EmbeddingCollection
from hotbed.errors import NonFiniteError
from hotbed.nn import DLRM
from hotbed.train import Callback, Trainer
from hotbed.train.prefetch import Divide, whole
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.hot_batches import HotSchedule, HotSplit
from hotbed.train.runs.loaders import evaluation_loader, training_loader
from tests.cli.cases import Output, refused, train
from tests.matrix import full
from tests.ranks import TIMEOUT_S, Ranks
from tests.train import planted
from tests.train.parallel_cases import assert_equal, state_of

pytestmark = pytest.mark.usefixtures("one_thread")

FP32 = ("--train.precision", "fp32")  # for sums in another order are compared
SPLIT = ("--hot.batches", "split", *FP32)


# -- hot and cold batches in turns -------------------------------------------------------------------------------------


def rates(losses: list[float], **constants: int) -> list[float]:
    recipe = HotRecipe(batches="alternating", **constants)
    records: list[dict[str, float]] = []
    trainer: Any = SimpleNamespace(report_schedule=records.append)
    schedule: Any = HotSchedule(SimpleNamespace(rate=float(recipe.rate)), recipe)  # type: ignore[arg-type]
    for loss in losses:
        schedule.on_eval(trainer, SimpleNamespace(logloss=loss))
    assert [r["logloss"] for r in records] == losses
    assert [r["rate_before"] for r in records[1:]] == [r["rate"] for r in records[:-1]]
    return [r["rate"] for r in records]


def test_a_loss_that_went_up_halves_the_rate_down_to_the_floor() -> None:
    assert rates([5, 6, 7, 8, 9], rate=40, floor=6) == [40, 20, 10, 6, 6]


def test_losses_that_fall_in_a_row_double_it_up_to_the_cap() -> None:
    falling = [9.0 - 0.1 * i for i in range(10)]
    assert rates(falling, rate=10, cap=30) == [10] * 4 + [20] * 4 + [30] * 2
    assert rates(falling, rate=10, cap=30, patience=2) == [10, 10, 20, 20, 30, 30, 30, 30, 30, 30]


def test_what_is_not_in_a_row_does_not_double() -> None:
    assert rates([9, 8, 7, 7, 6, 5, 4], rate=10, patience=3) == [10, 10, 10, 10, 10, 10, 20]
    assert rates([9, 8, 7, 8, 7, 6, 5], rate=10, patience=3) == [10, 10, 10, 5, 5, 5, 10]
    assert rates([9, float("nan"), 8], rate=10, patience=1) == [10, 10, 10]


@pytest.fixture(name="packed")
def packed_fixture(recipe: Path) -> Path:
    """A recipe of data that is packed, with rows that are not hot in files, and few samples per batch."""
    out = recipe.parent / "packed"
    assert main(["pack", str(recipe), str(out), "--budget", "16000", "--sample", "1"]) == 0
    found = json.loads((out / "hot_rows.json").read_text())
    assert 0.05 < found["hot_samples"] / found["samples"] < 0.95
    values = yaml.safe_load(recipe.read_text())
    values["data"] |= {"path": str(out), "valid_split": "valid"}
    values["train"]["batch_size"] = 64
    values["hot"] = {"rows": str(out / "hot_rows.json"), "batches": "alternating", "rate": 20}
    values["memory"] = {"tier": "disk", "cache_rows": 50}
    recipe.write_text(yaml.safe_dump(values, sort_keys=False))
    return recipe


def events(run: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


def test_a_run_evaluates_after_every_round_and_logs_what_it_decides(packed: Path) -> None:
    status, summary, run = train(packed, "--train.epochs", "2")
    assert status == 0
    assert summary["samples"] == 2 * 2400
    decided, evaluated = events(run, "schedule"), events(run, "eval")
    assert [r["step"] for r in decided] == [r["step"] for r in evaluated]
    assert [r["logloss"] for r in decided] == [r["logloss"] for r in evaluated]
    assert len(decided) >= 8
    assert decided[0]["rate_before"] == 20
    source = SplitBinarySource(packed.parent / "packed")
    sizes = [-(-source.samples(f"train_{kind}") // 64) for kind in ("cold", "hot")]
    assert decided[0]["step"] == sum(-(-size * 20 // 100) for size in sizes)
    assert decided[-1]["step"] == summary["steps"] == 2 * sum(sizes)
    assert any(r["step"] == sum(sizes) for r in decided)


def test_where_rows_are_changes_nothing(packed: Path) -> None:
    """Hot rows on the device and others in files, against whole tables: the same batches, the same bits."""
    options = ("--train.epochs", "2")
    _, apart, run = train(packed, *options)
    plain = ("--hot.rows", "null", "--memory.tier", "device", "--memory.cache_rows", "0")
    _, whole, other = train(packed, *options, *plain)
    assert apart["memory"]["disk_bytes"] > 0
    assert "memory" not in whole
    assert apart["test"] == whole["test"]
    assert [(r["step"], r["logloss"], r["rate"]) for r in events(run, "schedule")] == [
        (r["step"], r["logloss"], r["rate"]) for r in events(other, "schedule")
    ]


@pytest.mark.full
def test_the_same_batches_from_a_list_train_the_same_model(packed: Path) -> None:
    from hotbed.cli.pack import recipe_in

    recipe = recipe_in(packed)
    source = open_source(recipe.data)

    def state(batches: Any) -> dict[str, Tensor]:
        trainer = build(recipe, source)
        trainer.fit(batches)
        return state_of(trainer)

    def apart() -> HotColdLoader:
        hot, cold = (Loader(source, f"train_{kind}", 64, shuffle=True, seed=0) for kind in ("hot", "cold"))
        return HotColdLoader(hot, cold, rate=20)

    assert_equal(state(apart()), state(list(apart())))


@pytest.mark.parametrize("stop", [full(1), full(7), full(8), 9, full(13), 30])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(packed: Path, stop: int) -> None:
    options = ("--hot.patience", "2")
    _, whole, run = train(packed, *options)
    _, _, stopped = train(packed, *options, "--train.steps", str(stop))
    _, resumed, rest = train(packed, *options, "--resume", str(stopped))
    assert resumed["test"] == whole["test"]
    kept = [(r["step"], r["rate"]) for r in events(stopped, "schedule") + events(rest, "schedule")]
    assert kept == [(r["step"], r["rate"]) for r in events(run, "schedule")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--data.valid_split", "null"],
            "hot.batches is alternating, but there is no split to evaluate on. Set data",
        ),
        (
            ["--train.eval_every", "5"],
            "train.eval_every is 5, but hot.batches 'alternating' evaluates after its rounds",
        ),
        (["--parallel.reader", "first"], "parallel.reader is first, but"),
        (
            ["--memory.device_bytes", "5"],
            "hot.rows and memory.device_bytes or memory.host_bytes are set",
        ),
        (["--hot.rows", "absent.json"], "absent.json does not exist"),
        (["--hot.rows", ""], "hot.rows is empty. Pass the hot_rows.json"),
        (["--plan", "PLAN"], "(table, row, column, grid, dp)"),
        (
            ["--data.path", "PREPARED"],
            "the data has no split 'train_hot', only train, valid, test",
        ),
        (["--hot.rate", "60"], "hot.cap: got 50, expected at least 60 (hot.rate)"),
        (["--hot.cap", "101"], "hot.cap: got 101, expected at least 1 and at most 100 percent"),
        (["--hot.floor", "0"], "hot.floor: got 0, expected at least 1"),
        (["--hot.patience", "0"], "hot.patience: got 0, expected at least 1"),
        (["--hot.batches", "aprt"], "hot.batches: got 'aprt', expected one of mixed, alternating, split"),
        ([*SPLIT, "--hot.rows", "null"], "hot.batches is 'split', but hot.rows is not set"),
        ([*SPLIT, "--parallel.overlap", "false"], "parallel.overlap: got False, expected True"),
        ([*SPLIT, "--parallel.dense", "fsdp", "--train.checkpoint", "none"], "parallel.dense: got fsdp, expected ddp"),
    ],
)
def test_mistakes_get_one_clear_message(
    options: list[str], message: str, packed: Path, prepared: Path, capsys: Output
) -> None:
    plan = packed.parent / "plan.json"
    plan.write_text('{"world_size": 1, "tiles": []}')
    places = {"PREPARED": str(prepared), "PLAN": str(plan)}
    argv = ["train", str(packed), "--out", str(packed.parent / "runs"), *(places.get(o, o) for o in options)]
    assert message in refused(argv, capsys)


# -- batches that are divided ------------------------------------------------------------------------------------------


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


def trained_with(group: object, packed: Path, batches: str, tier: str, plan: str, reader: str) -> dict[str, Tensor]:
    recipe = recipe_of(
        packed,
        tier,
        data={"valid_split": None},
        dense_optimizer={"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}},
        train={"batch_size": 90, "precision": "fp32", "steps": 12},
        parallel={"plan": plan, "reader": reader, "virtual_ranks": 4},
        hot={"rows": str(packed / "hot_rows.json"), "batches": batches},
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
    mixed = ranks.run(3, trained_with, out, "mixed", "device", "row", "each")[0]
    split = ranks.run(3, trained_with, out, "split", "device", "row", "each")[0]
    for name, value in mixed.items():
        if hot:
            assert torch.allclose(split[name].float(), value.float(), rtol=1e-3, atol=1e-5), name
        else:
            assert torch.equal(split[name], value), name
    for tier, plan, reader in (("host", "table", "each"), ("device", "grid", "first")):
        for found in ranks.run(3, trained_with, out, "split", tier, plan, reader):
            assert_equal(found, split)
    (alone,) = ranks.run(1, trained_with, out, "split", "device", "table", "each")
    assert_equal(alone, split)


# -- several ranks -----------------------------------------------------------------------------------------------------

HOT = {"user": 42, "item": 25, "page": 3}


@pytest.fixture(name="packed_for_ranks")
def packed_for_ranks_fixture(tmp_path: Path) -> Path:
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


def recipe_of(packed: Path, tier: str = "device", **sections: dict[str, Any]) -> Recipe:
    values: dict[str, dict[str, Any]] = {
        "data": {"path": str(packed), "dim": 32, "valid_split": "valid", "test_split": None},
        "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16, 32], "top": [16, 1]}},
        "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
        "sparse_optimizer": {"class_path": "hotbed.optim.RowWiseAdagrad", "init_args": {"lr": 0.05}},
        "train": {"batch_size": 30, "device": "cpu", "epochs": 2},
        "parallel": {"plan": "row", "timeout_s": TIMEOUT_S},
        "memory": {"tier": tier},
    }
    for section, options in sections.items():
        values[section] = values.get(section, {}) | options
    return Recipe.from_dict({"name": "hot", **values})


def trained(group: object, packed_for_ranks: Path, hot: bool, tier: str) -> dict[str, Any]:
    rows = str(packed_for_ranks / "hot_rows.json") if hot else None
    recipe = recipe_of(packed_for_ranks, tier, hot={"rows": rows, "batches": "alternating", "rate": 25})
    source = open_source(recipe.data)
    trainer = build(recipe, source)
    turns = Turns()
    loader: Any = training_loader(recipe, source, trainer.ranks, trainer.model)
    trainer.callbacks += [turns, HotSchedule(loader, recipe.hot)]
    trainer.fit(loader, evaluation_loader(recipe, source, "valid", trainer.ranks))
    return {"state": state_of(trainer), "turns": turns.found, "rates": turns.rates}


@pytest.mark.parametrize("tier", [full("device"), "host"])
def test_copies_are_the_owners_rows_after_every_turn_and_the_model_is_that_of_plain_sharding(
    ranks: Ranks, packed_for_ranks: Path, tier: str
) -> None:
    plain = ranks.run(3, trained, packed_for_ranks, False, "device")[0]
    assert len(plain["rates"]) >= 4
    by_rank = ranks.run(3, trained, packed_for_ranks, True, tier)
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


def is_fused(group: object, packed_for_ranks: Path, dense: str) -> bool | None:
    return build(recipe_of(packed_for_ranks, parallel={"dense": dense})).dense.defaults["fused"]


def test_ranks_update_dense_parameters_in_one_pass_but_those_that_fsdp_cuts(
    ranks: Ranks, packed_for_ranks: Path
) -> None:
    assert ranks.run(3, is_fused, packed_for_ranks, "ddp") == [True] * 3
    assert ranks.run(3, is_fused, packed_for_ranks, "fsdp") == [None] * 3
