"""The ablation runs; its figures mean nothing at these sizes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.ablation import CASES, Fused, Sizes, Unfused, batch, specs

ROOT = Path(__file__).resolve().parents[2]
SIZES = Sizes(tables=3, rows=50, batch=16, steps=2, samples=100)


def test_both_sides_of_fused_tables_look_up_the_same(tmp_path: Path):
    ids = batch(SIZES, 0).sparse
    assert torch.equal(Fused(*specs(SIZES))(ids), Unfused(*specs(SIZES))(ids))


def test_gains_are_written_beside_the_published_ones(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.ablation", "--quick", "--json", str(tmp_path / "found.json")]
    names = ["--only", "fused_tables", "host_tables"]
    done = subprocess.run([*command, *names], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["results"]
    assert results["fused_tables"]["gain"] > 0
    assert results["host_tables"] == {"published": 15.5, "gains": []}
    assert "needs tables in host memory under a GPU" in done.stdout
    assert CASES["compile"].published == "3.36"
