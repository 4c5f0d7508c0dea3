"""Benchmarks of hot rows and caches, tiny: what they report is there and fits together; not how fast anything is."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks import cache_hit_rate, hot_batches, hot_quality
from hotbed.data import write_synthetic_log


@pytest.fixture(name="log")
def log_fixture(tmp_path: Path) -> Path:
    write_synthetic_log(tmp_path / "log.tsv", 3000, seed=0)
    return tmp_path / "log.tsv"


def test_ways_to_train_hot_and_cold_samples(tmp_path: Path) -> None:
    sizes = {"rows": 300, "tables": 2, "dim": 8, "samples": 1500, "batch": 100}
    args = Namespace(**sizes, exponent=1.05, budget_share=0.2, rounds=1, ranks=1, limit=None, json=None)
    found = hot_batches.measure(args, tmp_path)
    assert 0 < found["hot_share"] < 1
    assert set(found["ways"]) == {
        "files",
        "files, cached",
        *(f"hot rows, {b}" for b in ("mixed", "split", "alternating")),
    }
    assert all(way["epoch_s"] > 0 for way in found["ways"].values())


@pytest.mark.full
def test_what_ways_cost_in_quality(log: Path, tmp_path: Path) -> None:
    args = Namespace(log=log, budget=30_000, batch=128, seeds=[1], json=None)
    found = hot_quality.measure(args, tmp_path / "work")
    assert 0 < found["hot_share"] < 1
    assert [(r["batches"], r["learning rate"]) for r in found["results"]] == [
        (way, rate) for rate in ("constant", "falls") for way in ("mixed", "split", "alternating")
    ]
    for result in found["results"]:
        assert result["batches"] != "mixed" or result["auc against mixed"] == 0.0
        if result["batches"] == "split":
            assert abs(result["logloss against mixed"]) < 0.01


def test_hit_rates_against_the_exact_curve(log: Path, tmp_path: Path) -> None:
    args = Namespace(log=log, share=0.1, dim=16, batch=[128], json=None)
    (result,) = cache_hit_rate.measure(args, tmp_path / "work")["results"]
    assert result["exact lru"] < result["most used"] < 1
    assert abs(result["lru"] - result["exact lru"]) < 0.1
