"""``hotbed plan --simulate``, its sweeps, traces and pages."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from hotbed.cli.main import main
from hotbed.plan.hardware import Hardware
from hotbed.plan.simulation.sweep import Sweep
from tests.cli.test_plan import RECIPE


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "rows.json").write_text(json.dumps({"rows": {"users": 50_000, "<items>": 300}}))
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("rows.json", str(tmp_path / "rows.json")))
    return file


def simulated(recipe: Path, *options: str) -> dict[str, Any]:
    out = recipe.parent / "figures.json"
    assert main(["plan", str(recipe), "--hardware", "a100-40", "--json", str(out), *options]) == 0
    return json.loads(out.read_text())


def test_a_simulation_is_shown_beside_the_plan(recipe: Path, capsys: pytest.CaptureFixture[str]):
    plain = simulated(recipe, "--ranks", "4")
    assert "simulation" not in plain and "simulated:" not in capsys.readouterr().out
    found = simulated(recipe, "--ranks", "4", "--simulate")
    assert found["plan"] == plain["plan"] and found["simulation"]["price_per_billion_samples"] is None
    assert found["simulation"]["step_s"] >= sum(found["simulation"]["critical_s"].values()) * 0.5
    shown = capsys.readouterr().out
    assert f"bound by {found['simulation']['binds']};" in shown and "Resources of a rank, per step" in shown
    assert "Terms of a step" in shown and "assumed: no public figure was found" in shown
    assert "stream: 1555 GB/s × 0.84 (gpu, neo)" in shown
    parts = {term["name"]: term for term in found["terms"]}
    assert parts["activations"]["counted"] == "kernels of the step: tests/census"
    assert parts["activations"]["rates"] == {"stream": "1555 GB/s × 0.84 (gpu, neo)"}
    slow = simulated(recipe, "--ranks", "4", "--stragglers.share", "0.5", "--stragglers.slowdown", "100")
    assert slow["simulation"]["step_s"] > found["simulation"]["step_s"]


def test_a_price_makes_a_cost(recipe: Path, capsys: pytest.CaptureFixture[str]):
    found = simulated(recipe, "--ranks", "16", "--price", "30")["simulation"]
    assert found["price_per_billion_samples"] == pytest.approx(1e9 / found["samples_per_s"] / 3600 * 2 * 30)
    assert "per billion samples, at 30 per node and hour" in capsys.readouterr().out


def test_a_sweep_of_ranks_says_where_nothing_fits(recipe: Path, capsys: pytest.CaptureFixture[str]):
    small = recipe.parent / "small.yaml"
    small.write_text("extends: a100-40\nfigures: {device_bytes: 3 MB}\n")
    limited = ["--hardware", str(small), "--sweep", "ranks=2..16"]
    points = simulated(recipe, "--ranks", "8", *limited)["sweep"]["points"]
    assert [p["ranks"] for p in points] == [2, 4, 8, 16] and [p["fits"] for p in points] == [False, True, True, True]
    assert points[1]["efficiency"] == 1 and "more than 2 ranks" in points[0]["problem"]
    assert points[2]["samples_per_s"] * points[2]["step_s"] == pytest.approx(128)  # as the recipe has it for 8 ranks
    assert points[3]["samples_per_s"] * points[3]["step_s"] == pytest.approx(256)
    shown = capsys.readouterr().out
    assert "does not fit: rows and moments take" in shown and "Sweep of ranks" in shown


def test_a_sweep_of_hardware_says_on_what_the_step_depends(recipe: Path, capsys: pytest.CaptureFixture[str]):
    found = simulated(recipe, "--ranks", "16", "--sweep", "network=1GB/s..64GB/s")
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


def test_a_sweep_of_ranks_goes_on_where_what_was_asked_for_does_not_fit(
    recipe: Path, capsys: pytest.CaptureFixture[str]
):
    small = recipe.parent / "small.yaml"
    small.write_text("extends: a100-40\nfigures: {device_bytes: 3 MB}\n")
    limited = ["--hardware", str(small), "--ranks", "2"]
    found = simulated(recipe, *limited, "--sweep", "ranks=2..8")
    assert [p["fits"] for p in found["sweep"]["points"]] == [False, True, True] and "more than 2 ranks" in found[
        "problem"
    ]
    assert "--ranks 2 does not fit: rows and moments take" in capsys.readouterr().out
    html = recipe.parent / "plan.html"
    for more in (["--sweep", "ranks=1..2"], ["--sweep", "ranks=2..8", "--html", str(html)]):
        assert main(["plan", str(recipe), *limited, *more]) == 2
        assert "error: rows and moments take" in capsys.readouterr().err
    assert not html.exists()


def test_a_figure_that_the_step_does_not_wait_for_is_told(recipe: Path, capsys: pytest.CaptureFixture[str]):
    points = simulated(recipe, "--ranks", "2", "--sweep", "disk_read=1GB/s..2GB/s")["sweep"]["points"]
    assert len({p["step_s"] for p in points}) == 1
    assert "disk_read makes no difference" in capsys.readouterr().out


def test_ranks_are_chosen_by_the_price_that_is_given(recipe: Path, capsys: pytest.CaptureFixture[str]):
    simulated(recipe, "--ranks", "auto", "--train.batch_size", "16", "--price", "30")
    assert "Ranks, by cost" in capsys.readouterr().out


def test_a_trace_is_what_chrome_reads(recipe: Path):
    file = recipe.parent / "trace.json"
    simulated(recipe, "--ranks", "4", "--trace", str(file))
    events = json.loads(file.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} >= {"step", "prefetch", "all-reduce"}
    spans = [e for e in events if e["ph"] == "X"]
    assert {"forward", "lookup", "gradients"} <= {e["name"] for e in spans}
    assert all(e["dur"] > 0 and e["ts"] >= 0 for e in spans)


@pytest.mark.parametrize("ranks", ["4", "128"])
def test_a_page_is_whole_and_needs_nothing_else(recipe: Path, ranks: str):
    pytest.importorskip("matplotlib", reason="needs the plot extra")
    file = recipe.parent / "plan.html"
    slower = ["--memory.tier", "host", "--memory.device_bytes", "100000"]
    sweep = ["--sweep", "ranks=64..128"] if ranks == "128" else []  # else those around what is asked for
    simulated(recipe, "--ranks", ranks, "--html", str(file), *slower, *sweep)
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
def test_what_cannot_be_is_said(
    recipe: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    given = [option.format(folder=tmp_path) for option in options]
    assert main(["plan", str(recipe), "--hardware", "a100-40", "--ranks", "4", *given]) == 2
    said = capsys.readouterr()
    assert message in said.err and "Traceback" not in said.err
    assert "samples/s" not in said.out  # nothing was searched for
