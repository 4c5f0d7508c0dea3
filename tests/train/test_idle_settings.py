"""Protects that a setting which cannot do what it says is said, with the reason, and that others are not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hotbed import large_tensors
from hotbed.config import Recipe
from hotbed.plan import make_plan
from hotbed.plan.tier_choice import place_in_tiers
from hotbed.specs import Table, Tier
from hotbed.train.runs.build import build
from hotbed.train.runs.idle_settings import idle_settings
from tests.cli.cases import Output, train

CPU = torch.device("cpu")
NARROW = [Table("a", rows=100, dim=16), Table("b", rows=1000, dim=16)]
WIDE = [Table("a", rows=100, dim=16), Table("b", rows=1000, dim=32)]


def recipe(**sections: Any) -> Recipe:
    return Recipe.from_dict(
        {
            "name": "x",
            "data": {"path": "d", **sections.pop("data", {})},
            "model": {"class_path": "hotbed.nn.DLRM"},
            "dense_optimizer": {"class_path": "torch.optim.Adam"},
            "sparse_optimizer": {"class_path": "hotbed.optim.SGD"},
            "train": {"batch_size": 8, **sections.pop("train", {})},
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("scheme", "tables", "ranks", "message"),
    [
        ("column", WIDE, 2, "1 of 2 tables are too narrow for column shards (a)"),
        ("table", NARROW, 4, "leaves 2 of 4 ranks without rows (2, 3)"),
        ("row", NARROW, 1, "parallel.plan is row, but the plan has one process"),
    ],
)
def test_plans_that_cut_nothing(scheme: str, tables: list[Table], ranks: int, message: str) -> None:
    (said,) = idle_settings(recipe(parallel={"plan": scheme}), make_plan(tables, ranks, scheme), tables, CPU)
    assert message in said


@pytest.mark.parametrize(
    ("memory", "messages"),
    [
        (
            {"tier": "disk", "device_bytes": 1 << 20},
            ["memory.tier is disk, but all rows fit into"],
        ),
        (
            {"tier": "disk", "device_bytes": 1000, "host_bytes": 1 << 20, "directory": "d"},
            ["memory.tier is disk, but all rows fit into", "memory.directory is d, but no row is on disk"],
        ),
        ({"tier": "host", "device_bytes": 3}, ["memory.device_bytes is 3, but no row is in device memory"]),
        ({"tier": "host", "cache_rows": 5000}, ["memory.cache_rows is 5,000 per process, but only 1,100 rows are in"]),
        ({"tier": "host", "cache_policy": "lfu"}, ["memory.cache_policy is lfu, but there is no cache"]),
        ({"tier": "host", "host": "uva"}, ["memory.host is uva, but no GPU"]),
        ({"tier": "disk", "device_bytes": 10_000, "host_bytes": 10_000, "cache_rows": 50}, []),
    ],
)
def test_memories_that_stay_unused(memory: dict[str, Any], messages: list[str]) -> None:
    made = recipe(memory=memory)
    budgets: dict[Tier, int] = {"device": made.memory.device_bytes}
    if made.memory.tier == "disk":
        budgets["host"] = made.memory.host_bytes
    plan = place_in_tiers(make_plan(NARROW, 1), NARROW, budgets, made.memory.tier, cache_rows=made.memory.cache_rows)
    said = idle_settings(made, plan, NARROW, CPU)
    assert len(said) == len(messages)
    assert all(part in whole for part, whole in zip(messages, said, strict=True))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"reader": "first"}}, "parallel.reader is first, but one process"),
        ({"parallel": {"forward_codec": "bf16"}}, "parallel.forward_codec is bf16, but one process"),
        ({"parallel": {"ranks_per_node": 2}}, "parallel.ranks_per_node is 2"),
        ({"parallel": {"sync_every": 4}}, "parallel.sync_every is 4, but parallel.replicas is 1"),
        ({"data": {"fp32_rows": 5}}, "data.fp32_rows is 5, but data.dtype is fp32"),
        (
            {"train": {"steps": 5, "checkpoint_every": 9}},
            "train.checkpoint_every is 9, but the run ends after",
        ),
        ({"train": {"checkpoint_full_every": 4}}, "train.checkpoint_full_every is 4, but"),
        ({"train": {"steps": 5}, "schedule": {"warmup_steps": 6}}, "schedule.warmup_steps is 6, but the run"),
    ],
)
def test_options_that_do_nothing(sections: dict[str, Any], message: str) -> None:
    (said,) = idle_settings(recipe(**sections), None, NARROW, CPU)
    assert message in said


def test_small_pages_are_said_of_large_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = [Table("a", rows=1 << 22, dim=32)]
    for text, count in (("always madvise [never]\n", 1), ("always [madvise] never\n", 0)):
        (tmp_path / "enabled").write_text(text)
        monkeypatch.setattr(large_tensors, "HUGE_PAGES", tmp_path / "enabled")
        assert len(idle_settings(recipe(), None, large, CPU)) == count
        assert not idle_settings(recipe(), None, NARROW, CPU)
    monkeypatch.setattr(large_tensors, "HUGE_PAGES", tmp_path / "absent")
    assert not idle_settings(recipe(), None, large, CPU)


def test_a_run_and_a_dry_run_say_it(recipe: Path, capsys: Output, caplog: pytest.LogCaptureFixture) -> None:
    message = "parallel.plan is row, but the plan has one process"
    _, plan, _ = train(recipe, "--dry_run", "--plan", "row")
    assert message in plan["idle_settings"][0]
    assert f"warning: {message}" in capsys.readouterr().out
    made = Recipe.from_dict(yaml.safe_load(recipe.read_text()) | {"parallel": {"plan": "row"}})
    with caplog.at_level(logging.WARNING):
        build(made)
    assert message in caplog.text
    assert json.dumps(plan)
