"""Training between hosts runs, and ranks send what the plan says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.net.hosts import available

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.full
@pytest.mark.skipif(available() is not None, reason=f"no network namespaces: {available()}")
def test_ranks_send_what_the_plan_says(tmp_path: Path):
    file = tmp_path / "found.json"
    command = [sys.executable, "-m", "benchmarks.net", "--quick", "--groups", "1", "2/2", "--zipf", "1.05"]
    command += ["--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(file.read_text(encoding="utf-8"))["results"]
    assert [result["groups"] for result in results] == ["1", "2/2"]
    for result in results:
        assert (result["ranks"], result["plan"], result["codec"]) == (2, "row", "bf16")
        assert result["payload_ratio"] == pytest.approx(1, abs=0.05)
        assert (result["sync_kb"] > 0) == (result["groups"] != "1")
