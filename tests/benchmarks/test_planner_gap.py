"""The benchmark of gaps: written after each instance, so that an interrupted run goes on."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import planner_gap
from benchmarks.planner_gap import Instance, instance
from hotbed.plan.workload import Workload


def run(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["planner_gap", "--heuristics", *options])
    planner_gap.main()


def test_an_interrupted_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked: list[int] = []

    def small(seed: int) -> Instance:
        one = instance(seed)
        asked.append(seed)
        if len(asked) == 3:
            raise KeyboardInterrupt
        work = Workload.of([use.table for use in one.work.uses[:2]], batch_size=one.ranks)
        return Instance(seed, work, one.ranks, {}, 1 if seed == 1 else None, ("device",))

    monkeypatch.setattr(planner_gap, "instance", small)
    file = tmp_path / "gaps.json"
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, "--instances", "4", "--json", str(file))
    kept = json.loads(file.read_text())
    assert [row["seed"] for row in kept["rows"]] == [0] and [one["seed"] for one in kept["refused"]] == [1]
    run(monkeypatch, "--instances", "4", "--json", str(file), "--resume")
    assert asked == [0, 1, 2, 2, 3]
    found = json.loads(file.read_text())
    assert [row["seed"] for row in found["rows"]] == [0, 2, 3] and found["rows"][0] == kept["rows"][0]
    assert found["instances"] == 4 and found["refused"] == kept["refused"]
    assert found["gap"]["all"]["instances"] == found["gap"]["plain"]["instances"] == 3
    assert "| all | 3 | " in (shown := capsys.readouterr().out) and "1 refused: no plan fits" in shown
    with pytest.raises(SystemExit, match="has hardware 'a100-40', this run 'h100'; remove the file, or name another"):
        run(monkeypatch, "--hardware", "h100", "--json", str(file), "--resume")


def test_instances_are_the_same_every_time_and_of_all_kinds():
    assert instance(7) == instance(7) != instance(15)
    assert {instance(seed).kind for seed in range(12)} == {
        "plain",
        "own cuts",
        "slower memory",
        "own cuts and slower memory",
    }
