"""The benchmark of libraries of products runs; its figures mean nothing in so short a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import linear
from hotbed.nn.linear import has_onednn_linear


@pytest.mark.skipif(not has_onednn_linear(), reason="this build of torch has no oneDNN")
def test_every_shape_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    linear.main(["--batches", "8", "--repeats", "1", "--json", str(tmp_path / "found.json")])
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [(r["inputs"], r["outputs"]) for r in found["results"]] == linear.SHAPES
    assert all(r[f"{product}_ratio"] > 0 for r in found["results"] for product in ("forward", "input", "weight"))
    assert "512 → 256" in capsys.readouterr().out
