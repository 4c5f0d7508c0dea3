"""The benchmark of scaling: its table, and where nothing fits."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import scaling


def test_one_group_and_replicas_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "scaling.json"
    sizes = ["--tables", "3", "--bytes", "2e11", "--ranks", "2", "8", "16", "--groups", "8", "--hardware", "a100-40"]
    monkeypatch.setattr(sys, "argv", ["scaling", *sizes, "--json", str(file)])
    scaling.main()
    found = json.loads(file.read_text())
    assert len(found["rows"]) == 4 + len(scaling.EVERY) * len(scaling.LAYOUTS)
    assert [row["ranks_per_node"] for row in found["rows"][:4]] == [None, None, None, 8]
    assert "too few" in found["rows"][0]["problem"] and found["rows"][1]["step_s"] > 0
    assert {row["replicas"] for row in found["rows"][4:]} == {2}
    near, far = ({r["layout"]: r for r in found["rows"][4:]}[layout] for layout in ("groups", "replicas"))
    assert near["critical_s"]["rows"] < far["critical_s"]["rows"]  # a group on a node
    shown = capsys.readouterr().out
    assert "| 2 | out of memory | – | – | – | – | – |" in shown and "M = 2, every 100, " in shown
