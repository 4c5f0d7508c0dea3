"""Protects: ``hotbed demo --promise`` trains one model under every plan, and its bits stay those that were recorded.

Matrix products have other bits on other processors and in other versions of torch, so hashes are recorded by both.
Add a processor with ``python -m tests.journeys.test_promise_hash``, from a commit whose hashes are known to be right.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hotbed.cli.main import main
from hotbed.cli.promise import KILLED, PLANS, RESUMED
from hotbed.machine import cpu

HASHES = Path(__file__).parent / "recorded" / "promise.json"


def promised(folder: Path) -> dict[str, Any]:
    """Run the promise with two ranks of one thread each, and return its result."""
    file = folder / "promise.json"
    argv = ["demo", "--promise", "--ranks", "2", "--processes", "1", "3", "--steps", "4"]
    argv += ["--out", str(folder / "runs"), "--json", str(file)]
    assert main(argv) == 0
    return json.loads(file.read_text(encoding="utf-8"))


def machine() -> str:
    """Name what bits of matrix products depend on."""
    return f"{cpu().kind}, torch {torch.__version__.split('+')[0]}"


def test_every_plan_leaves_the_recorded_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    result = promised(tmp_path)
    assert [plan["name"] for plan in result["plans"]] == list(PLANS)
    hashes = {plan["sha256"] for plan in result["plans"]} | {result["resumed"]["sha256"]}
    assert len(hashes) == 1
    assert result["equal"] is True
    resumed = result["resumed"]
    assert (resumed["killed"], resumed["resumed"], resumed["at_step"]) == (KILLED, RESUMED, 2)
    assert all(plan["samples_per_s"] > 0 and len(plan["bytes"]) == 2 for plan in result["plans"])
    by_count = {found["processes"]: found["sha256"] for found in result["processes"]}
    assert list(by_count) == [1, 3] and {*by_count.values(), result["continued"]["sha256"]} == {by_count[1]}
    assert "all equal" in capsys.readouterr().out
    recorded = json.loads(HASHES.read_text(encoding="utf-8"))
    if machine() not in recorded:
        pytest.skip(f"plans agree; no hash is recorded for {machine()}")
    assert hashes == {recorded[machine()]}


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        found = promised(Path(folder))
    assert found["equal"], "plans left different bits"
    known = json.loads(HASHES.read_text(encoding="utf-8")) if HASHES.exists() else {}
    known[machine()] = found["resumed"]["sha256"]
    HASHES.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
