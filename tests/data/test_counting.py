"""Protects that counts and vocabularies do not depend on the memory limit, and that the limit holds."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from prepare_cases import SMALL, dataset, digests

from hotbed.data.preparation.prepare_dataset import prepare
from hotbed.errors import DataError


def test_the_same_bytes_with_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts that do not fit are spilled as runs, which are merged in several rounds."""
    raw = dataset(tmp_path / "raw")
    prepare(raw, tmp_path / "much/out", **SMALL, workers=1)
    counting = importlib.import_module("hotbed.data.preparation.counting")
    runs: list[int] = []
    original = counting._merge_all

    def merged(of_table: Any, job: Any) -> Any:
        runs.append(len(of_table))
        return original(of_table, job)

    monkeypatch.setattr(counting, "_merge_all", merged)
    monkeypatch.setattr(counting, "_MOST_RUNS", 2)
    monkeypatch.setattr(counting, "_FEWEST_BATCH_ROWS", 3)
    monkeypatch.setattr(counting, "_ROW_BYTES", 1 << 30)  # few rows at once
    monkeypatch.setattr(
        "hotbed.data.preparation.raw_inputs._GROUP_BYTES", 1
    )  # a task for each of 24 row groups, 20 rows at once
    monkeypatch.setattr("hotbed.data.preparation.raw_inputs._FEWEST_ROWS", 20)
    monkeypatch.setattr("hotbed.data.preparation.prepare_dataset.CountJob", lambda *a: counting.CountJob(*a[:-1], 500))
    prepare(raw, tmp_path / "little/out", **SMALL, workers=1)
    assert min(runs) > 48  # more than two of a task
    little, much = (tmp_path / name / "out/vocabulary" for name in ("little", "much"))
    assert digests(little) == digests(much)


def test_vocabularies_that_do_not_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = dataset(tmp_path)
    counting = importlib.import_module("hotbed.data.preparation.counting")
    monkeypatch.setattr("hotbed.data.preparation.prepare_dataset.MergeJob", lambda *a: counting.MergeJob(*a[:-1], 1000))
    message = "table 'user', .* at least 2 times: got .* expected at most 1,000"
    with pytest.raises(DataError, match=message):
        prepare(raw, tmp_path / "out", **SMALL)
    assert prepare(raw, tmp_path / "out", **SMALL, top_k=5).rows["user"] == 6
