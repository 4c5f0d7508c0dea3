"""The benchmark of tables larger than memory, tiny: every place of rows is measured, limited if that is allowed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import serving_rows


def test_ids_are_in_the_table_and_skewed_as_they_should_be() -> None:
    case = {"rows": 1000, "batch": 20_000}
    counts = {}
    for law, exponent in serving_rows.EXPONENTS.items():
        ids = serving_rows.draw(serving_rows.np.random.default_rng(1), case | {"exponent": exponent})
        assert ids.min() >= 0 and ids.max() < 1000
        counts[law] = sorted(serving_rows.np.bincount(ids, minlength=1000).tolist())
    assert counts["zipf"][-1] > 20 * counts["uniform"][-1]


def test_rows_of_files_and_memory_are_the_same_work(tmp_path: Path) -> None:
    serving_rows.write(tmp_path / "model", 2000)
    for memory_bytes, reads in ((None, False), (30_000, True)):
        case = {
            "model": str(tmp_path / "model"), "rows": 2000, "exponent": 1.05, "batch": 16, "batches": 3,
            "redis": None, "folder": str(tmp_path), "memory_bytes": memory_bytes, "group": None,
        }  # fmt: skip
        found = serving_rows.measured(case)
        assert found["rows_per_s"] > 0
        assert (found["read_bytes"] > 0) == reads


@pytest.mark.full
def test_every_place_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    command = ["serving_rows", "--gib", "0.002", "--memory_gib", "0.5", "--batch", "4", "--batches", "2"]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(tmp_path / "found.json")])
    serving_rows.main()
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    for name, of in found["results"].items():
        assert "failed" not in of, (name, of)
    assert {"memory uniform 4", "disk zipf 4"} <= found["results"].keys()
    assert "rows/s" in capsys.readouterr().out
