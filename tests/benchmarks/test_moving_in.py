"""Models compute before and after they move in what they did; the figures mean nothing at these sizes."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from benchmarks import moving_in

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers" / ".venv" / "bin" / "python"
TINY = ["--samples", "16", "--tables", "2", "--rows", "20", "--dim", "16", "--rounds", "1"]


def test_losses_are_equal_before_and_after(tmp_path: Path) -> None:
    out, page = tmp_path / "found.json", tmp_path / "page.md"
    page.write_text(f"Before\n{moving_in.BEGIN}\nold\n{moving_in.END}\nafter\n", encoding="utf-8")
    kept = {"measured on": "here", "before": [2.0], "after": [1.0], "difference": 0.0}
    out.write_text(json.dumps({"results": {"torchrec": kept}}), encoding="utf-8")
    moving_in.main([*TINY, "--json", str(out), "--page", str(page)])
    results = json.loads(out.read_text(encoding="utf-8"))["results"]
    assert {"plain, sparse", "plain, dense", "torchrec"} <= set(results)
    assert all(result["difference"] < 1e-6 for result in results.values())
    text = page.read_text(encoding="utf-8")
    assert text.startswith("Before\n") and text.endswith("\nafter\n") and "old" not in text
    assert "| torchrec | 2.0 ms | 1.0 ms | 2.00 | 0.0e+00 |" in text


@pytest.mark.skipif(not PEERS.exists(), reason="`make bench-peers` installs TorchRec")
def test_torchrecs_model_has_torchrecs_losses(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    subprocess.run([PEERS, "-m", "benchmarks.moving_in", *TINY, "--json", out], cwd=ROOT, check=True)
    assert json.loads(out.read_text(encoding="utf-8"))["results"]["torchrec"]["difference"] < 1e-6
