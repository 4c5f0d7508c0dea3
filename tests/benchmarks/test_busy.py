"""The benchmark of busy machines runs; its figures mean nothing in so short a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import busy
from benchmarks.busy import Case, below_one_thread, cases, make_recipe, measure
from tests.matrix import full


@pytest.mark.parametrize("case", [Case("torch_first", 1, False), full(Case("runtime", 2, True))])
def test_a_rate_is_measured_beside_busy_processes(tmp_path: Path, case: Case) -> None:
    assert measure(case, make_recipe(tmp_path, 2000), 0.01, 1) > 0


def test_every_case_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(busy, "measure", lambda case, *_: 1000 * case.threads + case.busy)
    busy.main(["--samples", "2000", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    expected = cases([found["measured"]["cores"]])
    assert [Case(*(result[name] for name in Case._fields)) for result in found["results"]] == expected
    assert [result["samples_per_s"] for result in found["results"][:2]] == [1000, 1001]
    printed = capsys.readouterr().out
    assert "busy cores" in printed and "1,001" in printed


def test_what_is_compared() -> None:
    assert [case for case in cases([4, 1]) if case.busy] == [
        Case("hotbed", 1, True),
        Case("runtime", 4, True),
        Case("hotbed", 4, True),
        Case("torch_first", 4, True),
    ]
    assert len(cases([1, 2, 4])) == 2 + 6 + 6
    assert cases([1]) == [Case("hotbed", 1, False), Case("hotbed", 1, True)]


def test_several_threads_that_are_slower_than_one_are_named() -> None:
    rates = dict.fromkeys(cases([1, 2, 4]), 100.0) | {Case("hotbed", 2, True): 99.0, Case("hotbed", 4, True): 1.0}
    assert below_one_thread(rates, cores=2) == [Case("hotbed", 2, True)]  # 4 threads are for more cores
