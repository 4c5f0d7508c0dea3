"""The benchmark of many tables, tiny: every part of every case is measured; not how long it takes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import features


def test_every_part_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    command = ["features", "--quick", "--only", "whole", "--json", str(tmp_path / "found.json")]
    monkeypatch.setattr(sys, "argv", command)
    features.main()
    results = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["results"]
    assert list(results) == ["fixed one whole", "fixed mixed whole", "ragged one whole", "ragged mixed whole"]
    for found in results.values():
        assert list(found) == ["2", "6"]
        for parts in found.values():
            assert list(parts) == [*features.PARTS, "all"] and all(parts.values())
    assert "against the fewest" in capsys.readouterr().out


@pytest.mark.full
def test_two_ranks_are_measured():
    found = features.measured(features.Case("ragged", "mixed", "column"), features.Sizes((2, 3), 60, 90, 1))
    assert list(found) == [2, 3] and all(parts["step"] > 0 for parts in found.values())
