"""Predicted steps, tiny: predictions come first, what was measured stands beside them; not how long anything takes."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hotbed.bench.step_jobs import StepJob

from benchmarks import predicted
from benchmarks.predicted import AUTO_CASES, CASES, HAND_MADE, PAYLOAD, Case
from hotbed.plan.hardware import Hardware

TINY = StepJob(rows=(50,), dim=16, batch=4, warmup=1)
TWO = {"alone": Case(1, TINY), "two": Case(2, StepJob(rows=(50,), dim=16, batch=4, warmup=1, plan="table"))}
SLOW = {"slow link": Case(2, TINY, 100)}


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    file = tmp_path / "hw.yaml"
    figures = {"overheads": {"step": {1: "2 ms", 2: "4 ms"}}, "cores_per_node": 2}
    file.write_text(yaml.safe_dump({"extends": "epyc-7742x2", "figures": figures}), encoding="utf-8")
    return file


def run(monkeypatch: pytest.MonkeyPatch, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["predicted", *map(str, argv)])
    return predicted.main()


def read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def in_a_millisecond(case: Case, jobs: Sequence[StepJob], repeats: int, steps: int) -> list[list[float]]:
    return [[1e-3] * repeats for _ in jobs]


def test_steps_are_predicted_and_then_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path
):
    monkeypatch.setattr(predicted, "CASES", TWO)
    file = tmp_path / "found.json"
    assert run(monkeypatch, "--predict", "--hardware", profile, "--json", file) == 0
    before = read(file)
    assert before.keys() == {"hardware", "description", "predicted", "cases", "definitions"}
    assert {name: row.keys() & {"measured_ms", "error"} for name, row in before["cases"].items()} == {
        "alone": set(),
        "two": set(),
    }
    assert before["cases"]["two"]["predicted_ms"] > 4
    assert run(monkeypatch, "--measure", "--json", file, "--rounds", "1", "--steps", "2") == 0
    after = read(file)
    for name, row in after["cases"].items():
        assert row["predicted_ms"] == before["cases"][name]["predicted_ms"]
        assert len(row["rounds_ms"]) == 1 and row["measured_ms"] > 0
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["measured_ms"] - 1)
    assert after["summary"]["cases"] == 2
    assert after["summary"]["worst_error"] == max(abs(row["error"]) for row in after["cases"].values())
    assert "error of 2 cases: median" in capsys.readouterr().out
    assert run(monkeypatch, "--predict", "--hardware", profile, "--json", file) == 1
    assert "has measurements, and predictions come before these; give another --json" in capsys.readouterr().err
    assert read(file) == after


def test_measurements_need_predictions_of_the_same_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path
):
    monkeypatch.setattr(predicted, "CASES", TWO)
    file = tmp_path / "found.json"
    assert run(monkeypatch, "--measure", "--json", file) == 1
    assert "has no prediction of 'alone' as it is now; run --predict first" in capsys.readouterr().err
    assert not file.exists()
    assert run(monkeypatch, "--predict", "--hardware", profile, "--json", file) == 0
    monkeypatch.setattr(predicted, "CASES", TWO | {"alone": Case(1, StepJob(rows=(51,)))})
    assert run(monkeypatch, "--measure", "--json", file) == 1
    assert "has no prediction of 'alone' as it is now" in capsys.readouterr().err


def test_predictions_of_some_cases_keep_those_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path
):
    monkeypatch.setattr(predicted, "CASES", TWO)
    file, other = tmp_path / "found.json", tmp_path / "other.yaml"
    assert run(monkeypatch, "--predict", "--hardware", profile, "--json", file) == 0
    before = read(file)["cases"]
    assert run(monkeypatch, "--predict", "--hardware", profile, "--json", file, "--only", "two") == 0
    assert read(file)["cases"] == before
    other.write_bytes(profile.read_bytes())
    assert run(monkeypatch, "--predict", "--hardware", other, "--json", file, "--only", "two") == 1
    assert f"has predictions of other cases for {profile}, not {other}; give another" in capsys.readouterr().err
    assert read(file)["cases"] == before


def test_what_was_measured_before_an_interruption_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: Path
):
    def interrupted(case: Case, jobs: Sequence[StepJob], repeats: int, steps: int) -> list[list[float]]:
        calls.append(case)
        if len(calls) > len(TWO) + 1:
            raise KeyboardInterrupt
        return in_a_millisecond(case, jobs, repeats, steps)

    calls: list[Case] = []
    monkeypatch.setattr(predicted, "CASES", TWO)
    monkeypatch.setattr(predicted, "run", interrupted)
    file = tmp_path / "found.json"
    assert run(monkeypatch, "--predict", "--hardware", profile, "--json", file) == 0
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "--measure", "--json", file, "--rounds", "3")
    found = read(file)
    assert found["measured"]["rounds"] == 1 and found["summary"]["cases"] == 2
    assert [row["rounds_ms"] for row in found["cases"].values()] == [[1.0], [1.0]]


def test_where_nothing_can_be_measured_that_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path
):
    monkeypatch.setattr(predicted, "CASES", SLOW)
    monkeypatch.setattr(predicted, "available", lambda: "network namespaces need root")
    file = tmp_path / "found.json"
    assert run(monkeypatch, "--predict", "--hardware", profile, "--json", file) == 0
    assert run(monkeypatch, "--measure", "--json", file) == 0
    assert read(file)["summary"] is None and not file.with_suffix(".svg").exists()
    assert "network namespaces need root" in capsys.readouterr().out


def test_predictions_need_a_measured_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "found.json"
    for argv, message in (
        ((), "predictions need --hardware FILE; make it with `hotbed doctor --measure FILE`"),
        (("--hardware", "a100-40"), "a100-40 has no overheads of training steps, without which a CPU's steps are far"),
        (("--hardware", "nowhere.yaml"), "there is no hardware profile 'nowhere.yaml'"),
        (("--only", "1 ranks"), "there is no case '1 ranks'; there are 1 rank, 1 rank, wide MLPs"),
    ):
        for what in ("--predict", "--auto")[: 1 if "--only" in argv else 2]:
            assert run(monkeypatch, what, *argv, "--json", file) == 1
            assert f"error: {message}" in capsys.readouterr().err
    assert not file.exists()


def test_what_cannot_be_measured_stays_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path
):
    monkeypatch.setattr(predicted, "CASES", TWO | SLOW)
    monkeypatch.setattr(predicted, "AUTO_CASES", SLOW)
    monkeypatch.setattr(predicted, "available", lambda: "network namespaces need root")
    monkeypatch.setattr(predicted, "run", in_a_millisecond)
    file = tmp_path / "found.json"
    assert run(monkeypatch, "--predict", "--hardware", profile, "--json", file) == 0
    assert run(monkeypatch, "--measure", "--json", file) == 0
    assert read(file)["cases"]["slow link"]["not_measured"] == "network namespaces need root"
    assert read(file)["summary"]["cases"] == 2
    assert run(monkeypatch, "--auto", "--hardware", profile, "--json", file) == 0
    assert read(file)["auto"] == {
        "cases": {"slow link": {"not_measured": "network namespaces need root"}},
        "worst": None,
    }
    assert capsys.readouterr().out.count("network namespaces need root") == 2


def test_plan_auto_is_held_against_hand_made_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], profile: Path
):
    def seconds(case: Case, jobs: Sequence[StepJob], repeats: int, steps: int) -> list[list[float]]:
        return [[1.0 + i] * repeats for i in (2, *range(len(jobs) - 1))]  # auto takes as long as the third by hand

    monkeypatch.setattr(predicted, "run", seconds)
    monkeypatch.setattr(predicted, "AUTO_CASES", {"two": AUTO_CASES["2 ranks"]})
    file = tmp_path / "found.json"
    assert run(monkeypatch, "--auto", "--hardware", profile, "--json", file) == 0
    found = read(file)["auto"]
    row = found["cases"]["two"]
    assert row["measured_ms"].keys() == row["predicted_ms"].keys() == {"auto", *HAND_MADE}
    assert (row["best"], row["against_best"], found["worst"]) == ("table", 2.0, 2.0)
    assert "plan auto is at worst +200.0% from the best (goal 5%)" in capsys.readouterr().out


def test_the_list_has_what_it_promises():
    assert len(CASES) >= 16
    assert {case.ranks for case in CASES.values()} == {1, 2, 3, 4}
    assert {case.mbit_per_s for case in CASES.values()} >= {None, 100, 1000}
    plans = [case.job.plan for case in CASES.values()]
    assert {plan for plan in plans if isinstance(plan, str)} >= {"table", "row", "column", "grid", "dp"}
    assert {case.job.forward_codec for case in CASES.values()} >= {"fp32", "bf16", "int8"}
    assert any(case.job.replicas > 1 for case in CASES.values())
    text = str(plans)
    assert all(word in text for word in ("'host'", "'disk'", "cache_rows", "hot_rows"))
    assert len(AUTO_CASES) == 6
    hardware = Hardware.load("epyc-7742x2")
    for case in CASES.values():
        assert predicted.predicted(hardware, case)["predicted_ms"] > 0
    for case in AUTO_CASES.values():  # patterns of hand-made plans name tables that there are
        assert all(predicted.replace(case.job, plan=plan).placed(case.ranks) for plan in HAND_MADE.values())


def test_links_limit_what_ranks_send():
    hardware = Hardware.load("epyc-7742x2")
    assert predicted.machine(hardware, Case(2, TINY)) is hardware
    assert predicted.machine(hardware, Case(2, TINY, 100)).node_link == pytest.approx(12.5e6 * PAYLOAD)
    assert predicted.machine(hardware, Case(2, TINY, 1e9)).node_link == hardware.node_link
