"""The benchmark of memory runs; at such sizes what a process takes besides is more than what it is compared with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hotbed.bench.step_jobs import StepJob

from benchmarks import memory
from benchmarks.predicted import CASES


def test_a_case_is_measured_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    memory.main(["--only", "2 ranks, data-parallel", "--json", str(tmp_path / "found.json")])
    cases = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))["cases"]
    assert list(cases) == ["2 ranks, data-parallel"]
    found = cases["2 ranks, data-parallel"]
    assert found["predicted"]["rows and moments"] == 8 * 20_000 * 4 * 64 + 4 * 20_000 * 4  # moments at owners
    assert found["measured"] > 8 * 20_000 * 4 * 64
    assert "data-parallel" in capsys.readouterr().out


def test_of_rows_on_disk_those_in_caches_count() -> None:
    disk, host = (memory.predicted(CASES[name]) for name in ("1 rank, disk with a cache", "1 rank, host"))
    assert (disk["rows and moments"], disk["caches"]) == (0, 4 * 4_000 * (4 * 64 + 4))
    assert (host["rows and moments"], host["caches"]) == (4 * 20_000 * (4 * 64 + 4), 0)


def test_a_small_job_is_of_the_same_kind() -> None:
    job = StepJob(rows=(10, 5_000), plan="column", dim=32)
    assert memory.small(job).rows == (10, 2_000)
    assert memory.small(job).plan == "column"
