"""A run is the same wherever its rows are; its records say what caches and files did."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from hotbed.cli.main import main
from hotbed.config import Component, MemoryRecipe, Recipe
from hotbed.errors import DataError, RecipeError
from hotbed.train.runs.build import new_model, open_source
from hotbed.train.runs.plan_search import plan_recipe, read_skew, virtual_ranks_of
from hotbed.train.runs.report import RunDirectory
from hotbed.train.runs.run import train


def recipe_of(folder: Path, memory: dict[str, Any], optimizer: str = "RowWiseAdagrad") -> Recipe:
    (folder / "rows.yaml").write_text("rows: [300, 40, 5000]\ndense: 3\n")
    return Recipe.from_dict(
        {
            "name": "zipf",
            "data": {
                "source": {
                    "class_path": "hotbed.data.ZipfSource",
                    "init_args": {"train_samples": 960, "test_samples": 320},
                },
                "path": str(folder / "rows.yaml"),
                "dim": 16,
            },
            "model": {"class_path": "hotbed.nn.DLRM", "init_args": {"bottom": [16], "top": [8, 1]}},
            "dense_optimizer": {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.01}},
            "sparse_optimizer": {"class_path": f"hotbed.optim.{optimizer}", "init_args": {"lr": 0.05}},
            "train": {"batch_size": 64, "log_every": 5, "device": "cpu"},
            "memory": memory,
        }
    )


def trained(
    folder: Path, memory: dict[str, Any], model: Component | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    recipe = recipe_of(folder, memory)
    recipe = recipe if model is None else replace(recipe, model=model)
    summary = train(recipe, RunDirectory(folder / "runs", "zipf"), Console(quiet=True))
    lines = (Path(summary["run"]) / "metrics.jsonl").read_text().splitlines()
    return summary, [json.loads(line) for line in lines]


def test_a_run_is_the_same_wherever_rows_are(tmp_path: Path) -> None:
    expected, records = trained(tmp_path, {})
    assert "memory" not in expected
    losses = [r["loss"] for r in records if r["event"] == "train"]
    for memory in (
        {"tier": "host"},
        {"tier": "disk", "directory": str(tmp_path / "rows")},
        {"tier": "disk", "device_bytes": 20_000, "host_bytes": 10_000, "cache_rows": 64},
        {"tier": "disk", "cache_rows": 2000, "cache_policy": "lfu"},
        {"tier": "host", "host": "uva", "device_bytes": 20_000},
        {"tier": "disk", "device_bytes": 20_000, "host_bytes": 10_000, "host": "uva", "cache_rows": 64},
        {"tier": "disk", "cache_rows": 64, "cache_tier": "host"},
    ):
        found, records = trained(tmp_path, memory)
        of_training = [r for r in records if r["event"] == "train"]
        assert [r["loss"] for r in of_training] == losses, memory
        assert found["test"] == expected["test"], memory
        if memory.get("cache_rows"):
            assert 0 < found["memory"]["hit_rate"] <= 1
            assert all(0 <= r["hit_rate"] <= 1 and r["hits"] + r["misses"] > 0 for r in of_training)
            rates = [table["hit_rate"] for table in found["tables"] if table["hit_rate"] is not None]
            assert len(rates) == 3 - (memory.get("device_bytes", 0) > 0)  # the smallest table fits there, without cache
            assert min(rates) <= found["memory"]["hit_rate"] <= max(rates)
        else:
            assert all(table["hit_rate"] is None for table in found["tables"])
        if memory["tier"] == "disk":
            assert found["memory"]["written_bytes"] > 0 or memory.get("cache_rows", 0) >= 2000
            assert found["memory"]["disk_bytes"] >= 0
    assert not list((tmp_path / "rows").iterdir())


def test_dropout_is_the_same_wherever_rows_are(tmp_path: Path) -> None:
    model = Component(class_path="hotbed.nn.DeepFM", init_args={"top": [8, 1], "dropout": 0.5})
    losses = [
        [r["loss"] for r in trained(tmp_path, memory, model)[1] if r["event"] == "train"]
        for memory in ({}, {"tier": "host"}, {"tier": "host", "device_bytes": 20_000})
    ]
    assert losses[0] == losses[1] == losses[2]
    still = Component(class_path=model.class_path, init_args={"top": [8, 1]})
    assert [r["loss"] for r in trained(tmp_path, {}, still)[1] if r["event"] == "train"] != losses[0]


def test_budgets_are_shared_out_by_what_was_counted(tmp_path: Path) -> None:
    file = recipe_of(tmp_path, {})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(file.to_dict()))
    out = str(tmp_path / "skew")
    assert main(["inspect", "--skew", str(tmp_path / "recipe.yaml"), "--out", out, "--split", "train"]) == 0
    memory = {"tier": "disk", "device_bytes": 20_000}
    by_law, _ = trained(tmp_path, memory)
    counted, _ = trained(tmp_path, {**memory, "skew": f"{out}/skew.json"})
    assert counted["test"] == by_law["test"]
    rows = {"C1": 300, "C2": 40, "C3": 5000}
    curves = read_skew(Path(out) / "skew.json", rows)
    assert all(curves[t].accesses(n) == pytest.approx(1) for t, n in rows.items())  # one id per sample
    model = new_model(file, open_source(file.data))
    plans = [
        plan_recipe(model, recipe_of(tmp_path, {**memory, **more}), 1) for more in ({}, {"skew": f"{out}/skew.json"})
    ]
    assert plans[0] != plans[1]
    assert {t.tier for t in plans[1].tiles} == {"device", "disk"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "skew.json does not exist"),
        ("[]", "hotbed inspect --skew"),
        ('{"samples": 1, "tables": []}', "has no table 'C1' of the model"),
        (
            '{"samples": 1, "tables": [{"table": "C1", "rows": 3, "accesses": 0, "cache_rows": [3], '
            '"accesses_of_top_rows": [null]}]}',
            "table 'C1': got 3 rows, expected 300",
        ),
        *(
            (
                f'{{"samples": 1, "tables": [{{"table": "C1", "rows": 300, "accesses": 9, "cache_rows": {counts}, '
                '"accesses_of_top_rows": [0.5, 1]}]}',
                r"ValueError: cache_rows of table 'C1' must ascend to 300",
            )
            for counts in ([3], [3, 30], [3, 300, 300], [400, 300], [])
        ),
    ],
)
def test_mistakes_about_what_was_counted(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "skew.json").write_text(content)
    with pytest.raises(DataError, match=message):
        read_skew(tmp_path / "skew.json", {"C1": 300})


def test_dry_run_counts_moments_of_the_optimizer_as_it_is_made(tmp_path: Path) -> None:
    from hotbed.cli.dry_run import memory_plan

    plain = recipe_of(tmp_path, {}, "SGD")
    values = plain.to_dict()
    values["sparse_optimizer"]["init_args"]["momentum"] = 0.9
    assert sum(t["moment_bytes"] for t in memory_plan(plain)["tables"]) == 0
    assert sum(t["moment_bytes"] for t in memory_plan(Recipe.from_dict(values))["tables"]) == 5340 * 16 * 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tier": "ram"}, r"memory\.tier: got 'ram', expected one of .*device, host, disk"),
        ({"cache_rows": 5}, r"memory\.cache_rows is set, but memory\.tier is 'device'"),
        ({"tier": "host", "host_bytes": 5}, r"memory\.host_bytes is set, but memory\.tier is 'host'"),
        ({"tier": "host", "device_bytes": -1}, r"memory\.device_bytes: got -1, expected at least 0"),
        ({"tier": "host", "cache_policy": "fifo"}, r"memory\.cache_policy: got 'fifo', expected one of .*lru, lfu"),
        ({"tier": "disk", "cache_tier": "hbm"}, r"memory\.cache_tier: got 'hbm', expected one of .*device, host"),
        ({"tier": "host", "host": "uvm"}, r"memory\.host: got 'uvm', expected one of .*records, uva"),
        (
            {"tier": "host", "host": "uva", "cache_rows": 5},
            r"memory\.cache_rows: got 5, expected 0",
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        MemoryRecipe(**options)


# -- virtual ranks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "given", "before", "expected"),
    [(3, None, None, 4), (2, 8, 4, 8), (2, None, 4, 4), (8, None, 4, 8), (2, None, 3, 2), (3, None, 3, 3)],
)
def test_virtual_ranks_of_a_run(
    tmp_path: Path, size: int, given: int | None, before: int | None, expected: int
) -> None:
    recipe = recipe_of(tmp_path, {})
    recipe = replace(recipe, parallel=replace(recipe.parallel, virtual_ranks=given))
    model = new_model(recipe, open_source(recipe.data))
    assert virtual_ranks_of(model, recipe, size, before) == expected


@pytest.mark.parametrize("parallel", [{"dense": "fsdp"}, {"replicas": 3}])
def test_models_with_one_virtual_rank_per_process(tmp_path: Path, parallel: dict[str, Any]) -> None:
    recipe = recipe_of(tmp_path, {})
    model = new_model(recipe, open_source(recipe.data))
    recipe = replace(recipe, parallel=replace(recipe.parallel, **parallel))
    assert virtual_ranks_of(model, recipe, 3, 4) == 3
    recipe = replace(recipe, parallel=replace(recipe.parallel, virtual_ranks=4))
    with pytest.raises(RecipeError, match="got 4, expected 3"):
        virtual_ranks_of(model, recipe, 3, None)
