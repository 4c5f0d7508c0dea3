"""Hot and cold batches in turns: the rule of the rate, and that nothing but the order of batches changes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from hotbed.cli.main import main
from hotbed.config import HotRecipe
from hotbed.data import Loader, SplitBinarySource
from hotbed.data.skew.hot_cold import HotColdLoader
from hotbed.train.runs.build import build, open_source
from hotbed.train.runs.hot_batches import HotSchedule
from tests.cli.cases import Output, refused, train
from tests.matrix import full


class Told:
    """What a schedule tells a trainer."""

    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def report_schedule(self, record: dict[str, float]) -> None:
        self.records.append(record)


def rates(losses: list[float], **constants: int) -> list[float]:
    recipe = HotRecipe(batches="alternating", **constants)
    told, loader = Told(), SimpleNamespace(rate=float(recipe.rate))
    schedule: Any = HotSchedule(loader, recipe)  # type: ignore[arg-type]
    for loss in losses:
        schedule.on_eval(told, SimpleNamespace(logloss=loss))
    assert [r["logloss"] for r in told.records] == losses
    assert [r["rate_before"] for r in told.records[1:]] == [r["rate"] for r in told.records[:-1]]
    return [r["rate"] for r in told.records]


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


def test_the_same_batches_from_a_list_train_the_same_model(packed: Path, tmp_path: Path) -> None:
    from hotbed.cli.pack import recipe_in

    recipe = recipe_in(packed)
    source = open_source(recipe.data)

    def state(batches: Any) -> dict[str, torch.Tensor]:
        trainer = build(recipe, source)
        trainer.fit(batches)
        moments = trainer.sparse.state_dict()["state"]
        found = {f"{i}.{k}": torch.as_tensor(v) for i, entry in moments.items() for k, v in entry.items()}
        return {**trainer.model.state_dict(), **found}

    def apart() -> HotColdLoader:
        hot, cold = (Loader(source, f"train_{kind}", 64, shuffle=True, seed=0) for kind in ("hot", "cold"))
        return HotColdLoader(hot, cold, rate=20)

    expected, found = state(list(apart())), state(apart())
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("stop", [full(1), full(7), full(8), 9, full(13), 30])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(packed: Path, stop: int) -> None:
    options = ("--hot.patience", "2")
    _, whole, run = train(packed, *options)
    _, _, stopped = train(packed, *options, "--train.steps", str(stop))
    _, resumed, rest = train(packed, *options, "--resume", str(stopped))
    assert resumed["test"] == whole["test"]
    kept = [(r["step"], r["rate"]) for r in events(stopped, "schedule") + events(rest, "schedule")]
    assert kept == [(r["step"], r["rate"]) for r in events(run, "schedule")]


@pytest.mark.parametrize(("budget", "kind"), [full("0", "train_cold"), ("1000000000", "train_hot")])
def test_no_hot_row_and_hot_rows_only(budget: str, kind: str, packed: Path, capsys: Output) -> None:
    out = packed.parent / "all"
    assert main(["pack", str(packed), str(out), "--budget", budget]) == 0
    assert SplitBinarySource(out).samples(kind) == 2400
    status, summary, _ = train(packed, "--data.path", str(out), "--hot.rows", str(out / "hot_rows.json"))
    assert status == 0
    assert summary["steps"] == -(-2400 // 64)
    assert ("memory" in summary) == (kind == "train_cold")


def test_a_budget_for_all_rows_needs_no_other_memory(recipe: Path) -> None:
    _, expected, _ = train(recipe)
    _, found, _ = train(recipe, "--memory.tier", "disk", "--memory.device_bytes", "1000000000")
    assert found["test"] == expected["test"]
    assert "memory" not in found


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
