"""The benchmark of what options cost runs between real processes; exact plans agree to the bit in it, too."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hotbed as hb
from benchmarks import price
from benchmarks.net.hosts import available


def test_every_option_is_trained_beside_the_exact_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if why_not := available():
        pytest.skip(why_not)
    sizes = ["--samples", "65536", "--test_samples", "16384", "--seeds", "1", "--ranks", "2"]
    price.main([*sizes, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["ranks"]["2"]["0"]
    assert list(found) == list(price.CASES[2])
    assert all(of["step_ms"] > 0 and len(of["block_auc"]) == 32 for of in found.values())
    exact = {name: {k: v for k, v in of.items() if k != "step_ms"} for name, of in found.items()}
    assert exact["column"] == exact["row"]  # a plan does not change the model
    assert exact["small tables on both ranks"] == exact["row"] != exact["small tables in the dense part"]
    assert exact["rows and gradients as int8"] != exact["row"]
    assert exact["rows as fp16, gradients as bf16"] != exact["rows and gradients as fp16"]
    assert exact["pooled vectors in place of rows"]["auc"] == pytest.approx(exact["row"]["auc"], abs=1e-3)
    assert exact["column, moments per part"] != exact["row"]
    assert exact["2 copies"] != exact["2 copies, c = 1"] != exact["row"]
    assert "moments per part" in capsys.readouterr().out


def test_exact_cases_are_there() -> None:
    for cases in price.CASES.values():
        assert all(hb.ParallelOptions(**case.options) for case in cases.values())
        assert all(case.exact is None or case.exact in cases for case in cases.values())


def test_a_case_takes_a_whole_period_of_averages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        price.main(["--samples", "65535"])
    assert "--samples is 65,535, must be at least 65,536" in capsys.readouterr().err
