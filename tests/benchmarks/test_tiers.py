"""The benchmark of tiers runs, and its caches hold what they are said to; its times mean nothing at such sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import tiers


def test_every_side_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--rows", "200", "--dim", "8", "--batch_size", "32", "--batches", "7", "--rounds", "1"]
    tiers.main([*sizes, "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["results"]
    assert list(found) == list(tiers.SIDES)
    assert all(side["total_ms"] > 0 < side["ratio"] for side in found.values())
    assert found["whole"]["ratio"] == 1
    assert found["whole"]["hit_rate"] is None
    assert found["disk_cached"]["hit_rate"] > 0.9
    assert found["disk_half"]["hit_rate"] < found["disk_cached"]["hit_rate"]
    assert found["disk"]["read_bytes"] > 0
    assert "disk_half" in capsys.readouterr().out
