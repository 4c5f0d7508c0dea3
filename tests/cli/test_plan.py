"""``hotbed plan``: a plan for machines that are not here, which hotbed train takes, and its simulation."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hotbed.cli.main import main
from hotbed.cli.pages.plan_page import plan_grids
from hotbed.cli.plan import samples_per_s, search_plan
from hotbed.config import Recipe
from hotbed.plan import Plan, make_plan
from hotbed.plan.cost import CostModel
from hotbed.plan.hardware import Hardware
from hotbed.plan.simulation.sweep import Sweep
from hotbed.plan.workload import Workload
from hotbed.specs import Table
from hotbed.train.runs import plan_search
from hotbed.train.runs.build import new_model, open_source
from hotbed.train.runs.plan_search import find_ranks
from tests.cli.cases import Output

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


def write_recipe(folder: Path, rows: dict[str, int]) -> Path:
    (folder / "rows.json").write_text(json.dumps({"rows": rows}))
    (folder / "recipe.yaml").write_text(RECIPE.replace("rows.json", str(folder / "rows.json")))
    return folder / "recipe.yaml"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, {"users": 5000, "items": 300, "shops": 3})


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return write_recipe(tmp_path, {"users": 50_000, "<items>": 300})


def planned(recipe: Path, *options: str) -> dict[str, Any]:
    out = recipe.parent / "figures.json"
    assert main(["plan", str(recipe), "--hardware", "a100-40", "--json", str(out), *options]) == 0
    return json.loads(out.read_text())


def test_a_plan_is_shown_and_written(recipe: Path, capsys: Output):
    file = recipe.parent / "plan.json"
    found = planned(recipe, "--ranks", "4", "--out", str(file))
    plan = Plan.from_json(file.read_text())
    assert plan.world_size == 4 and plan.to_dict() == found["plan"]
    assert found["gap"] >= -1e-9 and found["load_s"] >= found["bound_s"] > 0
    assert len(found["ranks"]) == 4 and found["others_step_s"]["table"] >= found["step_s"]["step"] * 0.99  # no copies
    shown = capsys.readouterr().out
    assert "users" in shown and "above the lower bound of" in shown and "the recipe's plan table:" in shown


def test_ranks_and_replicas_may_be_searched_for(recipe: Path, capsys: Output):
    recipe.write_text(recipe.read_text().replace("batch_size: 128", "batch_size: 4"))
    found = planned(recipe, "--ranks", "auto", "--replicas", "auto")
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines() if line.endswith(("chosen │", "│        │"))]
    assert "Ranks, by samples" in shown and [line[1] for line in lines if "chosen" in line] == [
        str(len(found["ranks"]))
    ]
    assert {line[1] for line in lines} == {"1", "2", "4"}
    assert len(planned(recipe, "--ranks", "4", "--replicas", "auto")["ranks"]) in (1, 2, 4)


def test_device_memory_is_the_machines_or_less(recipe: Path, capsys: Output):
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


def test_a_plan_over_several_nodes_names_faster_settings(recipe: Path, capsys: Output):
    found = planned(recipe, "--ranks", "16")
    assert {"--ranks 8", "--parallel.ranks_per_node 8"} >= found["faster"].keys() >= {"--ranks 8"}
    assert found["faster"]["--ranks 8"] == planned(recipe, "--ranks", "8")["samples_per_s"] > found["samples_per_s"]
    assert "faster: --ranks 8 trains" in capsys.readouterr().out
    assert planned(recipe, "--ranks", "8")["faster"] == {}
    in_two_hops = planned(recipe, "--ranks", "16", "--parallel.ranks_per_node", "8")  # few ranks are faster in one hop
    assert in_two_hops["faster"]["--parallel.ranks_per_node 1"] == pytest.approx(found["samples_per_s"])


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


def test_assumed_figures_have_an_error_bar(recipe: Path):
    found = planned(recipe, "--ranks", "4")
    assumed = found["assumed"]
    assert "message_s" in assumed["figures"] and "network" not in assumed["figures"]
    assert assumed["best_step_s"] < found["step_s"]["step"] < assumed["worst_step_s"] < 1.5 * found["step_s"]["step"]


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
    ],
)
def test_what_cannot_be_is_said(recipe: Path, options: list[str], message: str, capsys: Output):
    whole, listed = recipe.parent / "whole.json", recipe.parent / "list.yaml"
    whole.write_text(json.dumps({"world_size": 1, "tiles": []}))
    listed.write_text("- users\n")
    given = [option.format(file=whole, list=listed) for option in options]
    assert main(["plan", str(recipe), "--hardware", "a100-40", *given]) == 2
    assert message in capsys.readouterr().err


# -- --simulate: sweeps, traces and pages ----------------------------------------------------------------------------


def test_a_simulation_is_shown_beside_the_plan(large: Path, capsys: Output):
    plain = planned(large, "--ranks", "4")
    assert "simulation" not in plain and "simulated:" not in capsys.readouterr().out
    found = planned(large, "--ranks", "4", "--simulate")
    assert found["plan"] == plain["plan"] and found["simulation"]["price_per_billion_samples"] is None
    assert found["simulation"]["step_s"] >= sum(found["simulation"]["critical_s"].values()) * 0.5
    shown = capsys.readouterr().out
    assert f"bound by {found['simulation']['binds']};" in shown and "Resources of a rank, per step" in shown
    assert "Terms of a step" in shown and "assumed: no public figure was found" in shown
    assert "stream: 1555 GB/s × 0.84 (gpu, neo)" in shown
    parts = {term["name"]: term for term in found["terms"]}
    assert parts["activations"]["counted"] == "kernels of the step: tests/census"
    assert parts["activations"]["rates"] == {"stream": "1555 GB/s × 0.84 (gpu, neo)"}
    slow = planned(large, "--ranks", "4", "--stragglers.share", "0.5", "--stragglers.slowdown", "100")
    assert slow["simulation"]["step_s"] > found["simulation"]["step_s"]


def test_a_sweep_of_ranks_says_where_nothing_fits(large: Path, capsys: Output):
    small = large.parent / "small.yaml"
    small.write_text("extends: a100-40\nfigures: {device_bytes: 3 MB}\n")
    limited = ["--hardware", str(small), "--sweep", "ranks=2..16"]
    points = planned(large, "--ranks", "8", *limited)["sweep"]["points"]
    assert [p["ranks"] for p in points] == [2, 4, 8, 16] and [p["fits"] for p in points] == [False, True, True, True]
    assert points[1]["efficiency"] == 1 and "more than 2 ranks" in points[0]["problem"]
    assert points[2]["samples_per_s"] * points[2]["step_s"] == pytest.approx(128)  # as the recipe has it for 8 ranks
    assert points[3]["samples_per_s"] * points[3]["step_s"] == pytest.approx(256)
    shown = capsys.readouterr().out
    assert "does not fit: rows and moments take" in shown and "Sweep of ranks" in shown


def test_a_sweep_of_hardware_says_on_what_the_step_depends(large: Path, capsys: Output):
    found = planned(large, "--ranks", "16", "--sweep", "network=1GB/s..64GB/s")
    steps = [p["step_s"] for p in found["sweep"]["points"]]
    assert len(steps) == 7 and all(b <= a * 1.01 for a, b in pairwise(steps))
    assert found["elasticity"]["message_s"] > 0.1 and "disk_read" not in found["elasticity"]
    assert 0 < sum(found["elasticity"].values()) < 1.1
    shown = capsys.readouterr().out
    assert "if a figure is 1 % better: " in shown and "64 GB/s" in shown


def test_curves_are_varied_by_factors_and_counts_stay_whole():
    here = Hardware.load("a100-40")
    sweep = Sweep.parse("gather=0.5..2")
    assert (len(sweep.values), sweep.values[0], sweep.values[-1]) == (7, 0.5, pytest.approx(2))
    assert (
        sweep.hardware(here, 0.5).gather_rate(512) == here.gather_rate(512) / 2 and sweep.format_value(0.5) == "× 0.5"
    )
    sweep = Sweep.parse("ranks_per_node=2..4")
    assert sweep.values == (2, 3, 4) and sweep.hardware(here, 2.0).ranks_per_node == 2
    assert Sweep.parse("ranks=6..50").values == (6, 12, 24, 48)
    assert Sweep.parse("message_s=5us..5us").format_value(5e-6) == "5 us"


def test_a_sweep_of_ranks_goes_on_where_what_was_asked_for_does_not_fit(large: Path, capsys: Output):
    small = large.parent / "small.yaml"
    small.write_text("extends: a100-40\nfigures: {device_bytes: 3 MB}\n")
    limited = ["--hardware", str(small), "--ranks", "2"]
    found = planned(large, *limited, "--sweep", "ranks=2..8")
    assert [p["fits"] for p in found["sweep"]["points"]] == [False, True, True] and "more than 2 ranks" in found[
        "problem"
    ]
    assert "--ranks 2 does not fit: rows and moments take" in capsys.readouterr().out
    html = large.parent / "plan.html"
    for more in (["--sweep", "ranks=1..2"], ["--sweep", "ranks=2..8", "--html", str(html)]):
        assert main(["plan", str(large), *limited, *more]) == 2
        assert "error: rows and moments take" in capsys.readouterr().err
    assert not html.exists()


def test_a_figure_that_the_step_does_not_wait_for_is_told(large: Path, capsys: Output):
    points = planned(large, "--ranks", "2", "--sweep", "disk_read=1GB/s..2GB/s")["sweep"]["points"]
    assert len({p["step_s"] for p in points}) == 1
    assert "disk_read makes no difference" in capsys.readouterr().out


def test_ranks_are_chosen_by_the_price(large: Path, capsys: Output):
    found = planned(large, "--ranks", "auto", "--train.batch_size", "16", "--price", "30")["simulation"]
    assert "Ranks, by cost" in capsys.readouterr().out
    assert found["price_per_billion_samples"] == pytest.approx(1e9 / found["samples_per_s"] / 3600 * 30)  # of a node


def test_a_trace_is_what_chrome_reads(large: Path):
    file = large.parent / "trace.json"
    planned(large, "--ranks", "4", "--trace", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"step", "prefetch", "all-reduce"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {"forward", "lookup", "gradients"} <= {e["name"] for e in spans}
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in spans)


@pytest.mark.parametrize("ranks", ["4", "128"])
def test_a_page_is_whole_and_needs_nothing_else(large: Path, ranks: str):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    file = large.parent / "plan.html"
    slower = ["--memory.tier", "host", "--memory.device_bytes", "100000"]
    sweep = ["--sweep", "ranks=64..128"] if ranks == "128" else []  # else those around what is asked for
    planned(large, "--ranks", ranks, "--html", str(file), *slower, *sweep)
    written = file.read_text()
    root = ET.fromstring(written.replace("<!DOCTYPE html>", ""))  # well-formed as XML, too
    drawings = [drawing.get("aria-label") for drawing in root.iter("{http://www.w3.org/2000/svg}svg")]
    assert drawings == ["memory of ranks", "load of ranks", "timeline", "scaling"]
    outside = re.sub(r' xmlns(:xlink)?="[^"]*"', "", written)
    assert not re.search(r"https?:|<script|@import|url\([^#]|src=", outside)
    assert all(address.startswith(("#", "data:,")) for address in re.findall(r'href="([^"]*)"', written))
    assert "<td>&lt;items&gt;</td>" in written and "<td>50,000 × 32</td>" in written and "nan" not in written
    assert ("A sample of 64 of 128 ranks" in written or "A sample of 63 of 128 ranks" in written) == (ranks == "128")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sweep", "ranks"], "--sweep: got 'ranks', expected e.g. ranks=8..4096 or network=100Gbit/s..800Gbit/s"),
        (["--sweep", "netwrk=1..2"], "--sweep: got 'netwrk', expected one of ranks, "),
        (["--sweep", "network=fast..2"], "--sweep: network: got 'fast', expected a number of bytes/s"),
        (["--sweep", "ranks=8..4"], "expected a first value above 0"),
        (["--sweep", "ranks=1..65536"], "at most 16,384 last"),
        (
            ["--sweep", "ranks=3..8", "--replicas", "2"],
            "ranks: got 3 first, expected a multiple of parallel.replicas 2",
        ),
        (["--price", "0"], "--price: got 0"),
        (["--stragglers.share", "2"], "stragglers.share: got 2.0, expected a finite number at least 0 and at most 1"),
        (["--html", "{folder}"], "which is a directory"),
        (["--price", "0", "--ranks", "auto"], "--price: got 0"),
        (["--sweep", "ranks", "--ranks", "auto"], "--sweep: got 'ranks'"),
        (["--sweep", "overheads=1us..1ms"], "--sweep: overheads: got '1us'"),
        (
            ["--sweep", "network_efficiency=0.5..2"],
            "network_efficiency: got 1.2599210498948732, expected a finite number above 0 and at most 1",
        ),
        (["--sweep", "oversubscription=0.5..2"], "oversubscription: got 0.5, expected a finite number at least 1"),
        (["--sweep", "mlp=0.5..2"], "mlp of a100-40 has no effect with 4 ranks"),
        (["--sweep", "network=1GB/s..2GB/s"], "with 4 ranks: all ranks are on one node"),
    ],
)
def test_simulations_that_cannot_be(large: Path, options: list[str], message: str, capsys: Output, tmp_path: Path):
    given = [option.format(folder=tmp_path) for option in options]
    assert main(["plan", str(large), "--hardware", "a100-40", "--ranks", "4", *given]) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err
    assert "samples/s" not in said.out  # nothing was searched for


def test_tables_that_send_pooled_vectors_are_marked():
    tables = [Table("long", 9, 16), Table("short", 9, 16)]
    plan = make_plan(tables, 2, wire={"long": "pooled"})
    listed, _ = plan_grids(plan, CostModel(Workload.of(tables), 2).ranks(plan).costs)
    assert [row[2] for row in listed.rows] == ["whole; pooled vectors", "whole"]
