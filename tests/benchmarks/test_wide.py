"""The benchmark of small tables between ranks trains all its sides between real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import wide


def test_all_sides_of_a_shape_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wide, "SHAPES", ((50, 1),))
    wide.main(["--steps", "2", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["step_ms"]
    assert list(found) == ["50 × 1"] and list(found["50 × 1"]) == list(wide.SIDES)
    assert all(ms > 0 for ms in found["50 × 1"].values())
    assert "50 × 1" in capsys.readouterr().out
