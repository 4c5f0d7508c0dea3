"""Published figures are split as they must be, and predicted by arithmetic that is right."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import __main__ as published_main
from benchmarks.published.report import (
    LARGEST,
    Predictor,
    draw,
    fitted,
    markdown,
    predictions,
    published,
    results,
    summary,
)
from benchmarks.published.setups import (
    ACTIVATION_PASSES,
    LAUNCHES_PER_LAYER,
    Setup,
    cold_of,
    hot_share,
    on_framework,
    read,
    sizes,
)
from hotbed.plan.hardware import Hardware
from hotbed.plan.popularity import Zipf
from hotbed.plan.workload import Workload
from hotbed.specs import Table

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "published.json"
GIVEN = published()
FITTED = {about["fitted on"] for about in GIVEN["constants"].values()}


def test_few_constants_are_fitted_on_few_rows() -> None:
    predicted = [row for row in GIVEN["rows"] if row["split"] != "excluded"]
    assert len(GIVEN["constants"]) <= 4
    assert GIVEN["constants"].keys() == LARGEST.keys()
    assert {row["id"] for row in predicted if row["split"] == "fitted"} == FITTED
    for source in GIVEN["sources"]:
        of_source = [row for row in predicted if row["source"] == source and row["kind"] == "rate"]
        assert 3 * sum(row["id"] in FITTED for row in of_source) <= len(of_source)


def test_every_row_says_what_it_is_of_or_what_is_missing() -> None:
    ids = [row["id"] for row in GIVEN["rows"]]
    assert len(set(ids)) == len(ids)
    for row in GIVEN["rows"]:
        assert row["source"] in GIVEN["sources"]
        if row["split"] == "excluded":
            assert row["missing"] and "of" not in row
        else:
            assert row["published"] > 0
            assert {row["of"]} <= GIVEN["setups"].keys() if isinstance(row["of"], str) else len(row["of"]) == 2
    for values in GIVEN["setups"].values():
        Setup(**values)


def test_constants_are_those_with_which_their_rows_are_met() -> None:
    predictor = Predictor(GIVEN)
    quick = ("activation_passes", "launches_per_layer")
    given = GIVEN | {"constants": {k: v for k, v in GIVEN["constants"].items() if k in quick}}
    constants = fitted(given, predictor)
    only = ["t15_amp", "t3_amp", "t15_tf32", "t15_bytes"]
    rows = {row["id"]: row for row in predictions(GIVEN, predictor, constants, only) if "ratio" in row}
    assert rows["t15_amp"]["ratio"] == pytest.approx(1, abs=1e-6)
    assert rows["t3_amp"]["ratio"] == pytest.approx(1, abs=0.01)  # kernels are whole numbers
    assert rows["t15_tf32"]["predicted"] < rows["t15_amp"]["predicted"]
    assert rows["t15_bytes"]["ratio"] == pytest.approx(1, abs=0.01)
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    assert stored["constants"]["activation_passes"] == pytest.approx(constants["activation_passes"], rel=0.2)
    assert stored["constants"]["activation_passes"] == pytest.approx(ACTIVATION_PASSES, rel=0.01)
    assert stored["constants"]["launches_per_layer"] == pytest.approx(LAUNCHES_PER_LAYER, rel=0.01)


@pytest.mark.parametrize(("name", "billions", "ids"), [("neo_a", 793, 15), ("neo_f", 12_000, 20), ("neo_i", 332, 70)])
def test_recipes_have_the_published_numbers_of_parameters_and_operations(name: str, billions: float, ids: int) -> None:
    setup = replace(Setup(**GIVEN["setups"][name]), mflop=None)
    work = read(setup)[1]
    assert sizes(work)["billions"] == pytest.approx(billions, rel=0.01)
    assert {use.ids for use in work.uses} == {ids}
    assert work.dense.flops / 1e6 == pytest.approx(GIVEN["setups"][name]["mflop"], rel=0.02)


def test_a_share_of_what_a_framework_does_on_cpus_is_done_by_one_core() -> None:
    cpu, gpu = (Hardware.load(name) for name in ("epyc-7742x2", "a100-80"))
    slow = on_framework(cpu, 0.1)
    assert slow.flops["fp32"] == pytest.approx(cpu.flops["fp32"] / (1 + 0.1 * 127))
    assert slow.gather[512] == pytest.approx(cpu.gather[512] / (1 + 0.1 * 127))
    host = on_framework(gpu, 0.1)
    assert host.host_stream == pytest.approx(gpu.host_stream / (1 + 0.1 * 127))
    assert host.with_(host_stream=gpu.host_stream) == gpu == on_framework(gpu, 0.0)


def test_a_framework_moves_a_row_for_every_id() -> None:
    setup = Setup(**GIVEN["setups"]["t0_host"])
    for framework, least, most in ((True, 65_000, 65_536), (False, 10_000, 60_000)):
        work = read(replace(setup, framework_cpu=framework))[1]
        largest = max(work.uses, key=lambda use: use.table.rows)
        assert least <= largest.expected.distinct(range(largest.table.rows), 65_536) <= most
    cold = cold_of(Setup(**GIVEN["setups"]["fae"]))
    assert cold is not None and cold.framework_cpu and cold.tier == "host"


def test_the_share_of_hot_samples_is_the_product_of_the_tables() -> None:
    work = Workload.of([Table("a", 1000, 16), Table("b", 1000, 16)])
    assert hot_share(work, 2 * 1000 * 64) == pytest.approx(1)
    half = Zipf(1000).accesses(500)
    assert hot_share(work, 1000 * 64) == pytest.approx(half**2, rel=0.02)


def test_sources_are_judged_by_the_rates_that_were_held_out(tmp_path: Path) -> None:
    def row(name: str, ratio: float, split: str = "held out", kind: str = "rate") -> dict[str, object]:
        about = {"id": name, "source": "s", "quantity": name, "unit": "", "published": 1.0, "split": split}
        return about | {"kind": kind, "predicted": ratio, "ratio": ratio}

    rows = [row("a", 0.9), row("b", 1.15), row("c", 1.1), row("d", 9.0, "fitted"), row("e", 1.0, kind="size")]
    found = summary(rows)["s"]
    assert (found["held_out"], found["rates"], found["reached"]) == (4, 3, True)
    assert found["median_error_of_rates"] == pytest.approx(0.1)
    found = summary([*rows, row("far", 0.4)])["s"]
    assert found["off_by_more_than_2"] == ["far"] and not found["reached"]
    missing = {"id": "m", "source": "s", "quantity": "m", "unit": "×", "published": 2.0, "split": "excluded"}
    text = markdown([*rows, row("far", 0.4), missing | {"missing": "the batch"}])
    assert "| far |  | 1 | 0.4 | 0.40 | held out, **off by more than 2 ×** |" in text
    assert "| m | 2 × | the batch |" in text
    pytest.importorskip("matplotlib")
    draw(rows, tmp_path / "ratios.svg")
    assert (tmp_path / "ratios.svg").read_text(encoding="utf-8").count("<svg") == 1


def test_the_results_are_of_these_rows() -> None:
    stored = json.loads(RESULTS.read_text(encoding="utf-8"))
    of_these = [row for row in GIVEN["rows"] if row["id"] not in stored["left"]]
    assert [(r["id"], r["published"], r["split"]) for r in stored["rows"]] == [
        (r["id"], r["published"], r["split"]) for r in of_these
    ]
    assert stored == json.loads(json.dumps(results(GIVEN, stored["constants"], stored["rows"])))


def test_an_interrupted_run_goes_on_with_the_rows_that_are_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two rows that are left, only these are predicted."""
    rows: list[dict[str, Any]] = []
    for row in GIVEN["rows"]:
        about = {key: row[key] for key in ("id", "source", "quantity", "unit", "published", "split")}
        if row["split"] == "excluded":
            rows.append(about | {"missing": row["missing"]})
        elif row["id"] not in ("t15_tf32", "t15_bytes"):
            rows.append(about | {"kind": row["kind"], "predicted": 3.0, "ratio": 3.0 / row["published"]})
    constants = dict.fromkeys(LARGEST, 7.0)
    file = tmp_path / "published.json"
    file.write_text(json.dumps(results(GIVEN, constants, rows)), encoding="utf-8")
    assert json.loads(file.read_text(encoding="utf-8"))["left"] == ["t15_tf32", "t15_bytes"]
    monkeypatch.setattr(sys, "argv", ["published", "--json", str(file), "--resume"])
    published_main.main()
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["left"] == [] and found["constants"] == constants
    predicted = {row["id"]: row["predicted"] for row in found["rows"] if "predicted" in row}
    assert predicted.pop("t15_tf32") > 1000 and predicted.pop("t15_bytes") == pytest.approx(15.6, rel=0.01)
    assert set(predicted.values()) == {3.0}
    assert "| nvidia | tables of T15 | GiB |" in capsys.readouterr().out
