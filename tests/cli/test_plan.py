"""``hotbed plan``: a plan for machines that are not here, which hotbed train takes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hotbed.cli.main import main
from hotbed.cli.plan import samples_per_s, search_plan
from hotbed.config import Recipe
from hotbed.plan import Plan
from hotbed.plan.hardware import Hardware
from hotbed.train.runs import plan_search
from hotbed.train.runs.build import new_model, open_source
from hotbed.train.runs.plan_search import dense_part, find_ranks

RECIPE = """
name: planned
data:
  source: {class_path: hotbed.data.ZipfSource, init_args: {train_samples: 512, test_samples: 64}}
  path: rows.json
  dim: 32
  test_split: null
  shuffle: false
model: {class_path: hotbed.nn.DLRM, init_args: {bottom: [16, 32], top: [16, 1]}}
dense_optimizer: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
sparse_optimizer: {class_path: hotbed.optim.RowWiseAdagrad, init_args: {lr: 0.1}}
train: {batch_size: 128, steps: 2, device: cpu}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "rows.json").write_text(json.dumps({"rows": {"users": 5000, "items": 300, "shops": 3}}))
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("rows.json", str(tmp_path / "rows.json")))
    return file


def planned(recipe: Path, *options: str) -> dict[str, Any]:
    out = recipe.parent / "figures.json"
    assert main(["plan", str(recipe), "--hardware", "a100-40", "--json", str(out), *options]) == 0
    return json.loads(out.read_text())


def test_a_plan_is_shown_and_written(recipe: Path, capsys: pytest.CaptureFixture[str]):
    file = recipe.parent / "plan.json"
    found = planned(recipe, "--ranks", "4", "--out", str(file))
    plan = Plan.from_json(file.read_text())
    assert plan.world_size == 4 and plan.to_dict() == found["plan"]
    assert found["gap"] >= -1e-9 and found["load_s"] >= found["bound_s"] > 0
    assert len(found["ranks"]) == 4 and found["others_step_s"]["table"] >= found["step_s"]["step"] * 0.99  # no copies
    shown = capsys.readouterr().out
    assert "users" in shown and "above the lower bound of" in shown and "the recipe's plan table:" in shown


def test_ranks_and_replicas_may_be_searched_for(recipe: Path, capsys: pytest.CaptureFixture[str]):
    recipe.write_text(recipe.read_text().replace("batch_size: 128", "batch_size: 4"))
    found = planned(recipe, "--ranks", "auto", "--replicas", "auto")
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines() if line.endswith(("chosen │", "│        │"))]
    assert "Ranks, by samples" in shown and [line[1] for line in lines if "chosen" in line] == [
        str(len(found["ranks"]))
    ]
    assert {line[1] for line in lines} == {"1", "2", "4"}
    assert len(planned(recipe, "--ranks", "4", "--replicas", "auto")["ranks"]) in (1, 2, 4)


def test_device_memory_is_the_machines_or_less(recipe: Path, capsys: pytest.CaptureFixture[str]):
    planned(recipe, "--ranks", "2")
    whole = capsys.readouterr().out.partition("device memory: ")[2]
    assert "memory.device_bytes" not in whole
    recipe.write_text(recipe.read_text() + "memory: {tier: host, device_bytes: 1048576}\n")
    planned(recipe, "--ranks", "2")
    assert "of 1.0 MiB per rank (the recipe's memory.device_bytes); reserved" in capsys.readouterr().out
    recipe.write_text(recipe.read_text().replace("1048576", str(10**15)))  # no machine gets larger by it
    planned(recipe, "--ranks", "2")
    assert capsys.readouterr().out.partition("device memory: ")[2] == whole


def test_schemes_by_table_are_kept(recipe: Path):
    schemes = recipe.parent / "schemes.yaml"
    schemes.write_text("users: row\n")
    found = planned(recipe, "--ranks", "3", "--plan", str(schemes))
    assert [t["rows"] for t in found["plan"]["tiles"] if t["table"] == "users"] == [[k, 5000, 3] for k in range(3)]
    recipe.write_text(recipe.read_text() + "parallel: {plan: {users: {cols: 2}}}\n")
    found = planned(recipe, "--ranks", "2")
    assert sorted(t["cols"] for t in found["plan"]["tiles"] if t["table"] == "users") == [[0, 16], [16, 32]]


def test_many_ranks_in_replicas_are_summed_up(recipe: Path, capsys: pytest.CaptureFixture[str]):
    found = planned(recipe, "--ranks", "64", "--replicas", "2")
    assert found["plan"]["world_size"] == 32 and "replicas" in found["busiest_rank_s"]
    assert "busiest, median, idlest, fullest" in capsys.readouterr().out


def test_a_plan_over_several_nodes_names_faster_settings(recipe: Path, capsys: pytest.CaptureFixture[str]):
    found = planned(recipe, "--ranks", "16")
    assert {"--ranks 8", "--parallel.ranks_per_node 8"} >= found["faster"].keys() >= {"--ranks 8"}
    assert found["faster"]["--ranks 8"] == planned(recipe, "--ranks", "8")["samples_per_s"] > found["samples_per_s"]
    assert "faster: --ranks 8 trains" in capsys.readouterr().out
    assert planned(recipe, "--ranks", "8")["faster"] == {}


def test_the_rates_of_numbers_of_ranks_are_those_of_their_plans(recipe: Path):
    values = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    values = replace(values, parallel=replace(values.parallel, hardware="a100-40"))
    source = open_source(values.data)
    with torch.device("meta"):
        model = new_model(values, source)
    chosen = find_ranks(model, values, "auto", 1, source, schemes="auto", others="auto")
    for tried in chosen.tried:
        if tried.ranks in (1, 2, 8, 16):
            own = samples_per_s(search_plan(values, tried.ranks))
            assert tried.samples_per_s == pytest.approx(own, rel=0.01), tried.ranks  # 0.7 of it with one rank's kernels


def test_assumed_figures_have_an_error_bar(recipe: Path, capsys: pytest.CaptureFixture[str]):
    found = planned(recipe, "--ranks", "4")
    assumed = found["assumed"]
    assert "message_s" in assumed["figures"] and "network" not in assumed["figures"]
    assert assumed["best_step_s"] < found["step_s"]["step"] < assumed["worst_step_s"] < 1.5 * found["step_s"]["step"]
    assert "if all assumed figures were 1.5 times better or worse" in capsys.readouterr().out


@pytest.mark.parametrize("own", ["auto", {"*": "auto"}])
def test_training_searches_as_hotbed_plan_does(recipe: Path, own: str | dict[str, str]):
    """Also of a model with schemes of its own, whose wide part is copied."""
    text = recipe.read_text().replace(
        "hotbed.nn.DLRM, init_args: {bottom: [16, 32], top", "hotbed.nn.WideDeep, init_args: {top"
    )
    assert "WideDeep" in text
    recipe.write_text(text + f"parallel: {{plan: {json.dumps(own)}, hardware: a100-40}}\n")
    shown = planned(recipe, "--ranks", "4")["plan"]
    read = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    source = open_source(read.data)
    with torch.device("meta"):
        model = new_model(read, source)
    assert plan_search.plan_recipe(model, read, 4, source).to_dict() == shown
    if own == "auto":
        copied = [t for t in shown["tiles"] if t["table"].startswith("wide.")]
        assert copied and all(len(t["readers"]) == 3 for t in copied)


def test_a_recipe_trains_with_plan_auto(recipe: Path):
    assert main(["train", str(recipe), "--plan", "auto", "--out", str(recipe.parent / "runs")]) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "5", "--replicas", "2"], "--ranks: got 5, expected a positive multiple of parallel.replicas 2"),
        (["--ranks", "0"], "--ranks: got 0, expected a positive multiple"),
        (["--ranks", "2", "--hardware", "a100"], "hardware profile: got 'a100', expected one of"),
        (["--ranks", "2", "--plan", "{file}"], "a complete plan"),
        (["--ranks", "2", "--plan", "{list}"], "list.yaml holds list"),
        (["--ranks", "2", "--memory.device_bytes", "1000", "--memory.tier", "host"], None),
    ],
)
def test_what_cannot_be_is_said(
    recipe: Path, options: list[str], message: str | None, capsys: pytest.CaptureFixture[str]
):
    whole, listed = recipe.parent / "whole.json", recipe.parent / "list.yaml"
    whole.write_text(json.dumps({"world_size": 1, "tiles": []}))
    listed.write_text("- users\n")
    given = [option.format(file=whole, list=listed) for option in options]
    status = main(["plan", str(recipe), "--hardware", "a100-40", *given])
    if message is None:
        assert status == 0
        return
    assert status == 2
    assert message in capsys.readouterr().err


def test_layers_on_gpus_are_counted_kernel_by_kernel(recipe: Path):
    made = Recipe.from_dict(yaml.safe_load(recipe.read_text()))
    source = open_source(made.data)
    model = new_model(made, source)
    gpu, cpu = (
        dense_part(model, replace(made, parallel=replace(made.parallel, hardware=name)), source)
        for name in ("a100-40", "epyc-7742x2")
    )
    assert gpu.launches == len(gpu.kernels) > 4 * 6
    products = sum(kernel.flops for kernel in gpu.kernels)
    assert products == pytest.approx(3 * gpu.flops, rel=0.2)  # but for gradients of what the batch brings
    assert (cpu.launches, cpu.kernels, cpu.moved_bytes) == (0, (), 0.0)
    assert planned(recipe, "--ranks", "2")["step_s"]["dense"] >= gpu.launches * Hardware.load("a100-40").launch_s
