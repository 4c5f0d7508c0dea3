"""The quality benchmark: what it plants, how it makes intervals, and that it runs, goes on and renders."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.quality_results import (
    BASELINE,
    BEGIN,
    CONFIGS,
    END,
    Config,
    Difference,
    Results,
    Scores,
    compare,
    half_width,
    paired_difference,
    t_quantile,
    verdict,
)
from benchmarks.quality_training import PIECE, ROWS, PlantedLog, PlantedSettings
from hotbed.auc import auc
from hotbed.batch import Batch
from hotbed.data import write_synthetic_log

ROOT = Path(__file__).parents[2]
SMALL = (3, 40, 500)


def joined(log: PlantedLog, split: Any, samples: int, size: int, seed: int = 0) -> Batch:
    return Batch.concatenate(list(log.batches(split, samples, size, seed=seed)))


def same(a: Batch, b: Batch) -> bool:
    pairs = [(a.sparse.values, b.sparse.values), (a.dense, b.dense), (a.labels, b.labels)]
    return all(x is not None and y is not None and torch.equal(x, y) for x, y in pairs)


# -- the planted log -----------------------------------------------------------------------------------------------


def test_the_stream_is_a_function_of_its_seeds() -> None:
    whole = joined(PlantedLog(SMALL), "train", PIECE + 300, 4096)
    assert same(whole, joined(PlantedLog(SMALL), "train", PIECE + 300, 1000))
    assert same(whole.take(torch.arange(500)), joined(PlantedLog(SMALL), "train", 500, 77))
    for other in (
        joined(PlantedLog(SMALL), "test", 500, 500),
        joined(PlantedLog(SMALL), "train", 500, 500, seed=1),
        joined(PlantedLog(SMALL, seed=1), "train", 500, 500),
    ):
        assert not same(whole.take(torch.arange(500)), other)


def test_the_log_odds_are_effects_and_products_of_factors() -> None:
    log = PlantedLog(SMALL)
    batch = joined(log, "test", 50, 50)
    first = [0, 3, 43]
    assert batch.dense is not None
    for i in range(50):
        slots = [int(batch.sparse.values[f * 50 + i]) + first[f] for f in range(3)]
        x = batch.dense[i].double()
        odds = -3.0 + float(log.effects[slots].sum())
        odds += sum(float(log.factors[slots[f]] @ log.factors[slots[g]]) for f, g in ((0, 1), (0, 2), (1, 2)))
        odds += float(0.4 * x[0] - 0.3 * x[1] + 0.2 * x[2] + 0.2 * x[2] * x[3])
        assert float(batch.extra["truth"][i]) == pytest.approx(odds, abs=1e-5)


def test_the_attainable_auc_is_that_of_the_true_log_odds() -> None:
    log = PlantedLog(SMALL)
    batch = joined(log, "test", 2000, 2000)
    assert batch.labels is not None
    clicked = batch.labels[:, 0] > 0
    above = batch.extra["truth"][clicked][:, None] - batch.extra["truth"][~clicked]
    direct = float(((above > 0).double() + (above == 0).double() / 2).mean())
    assert log.attainable(2000).auc == pytest.approx(direct, abs=1e-12)
    assert log.attainable(PIECE * 4).calibration == pytest.approx(1, abs=0.02)


def test_ids_fall_in_frequency() -> None:
    values = joined(PlantedLog(SMALL), "train", PIECE, PIECE).sparse.values.view(3, -1)
    for ids, rows in zip(values, SMALL, strict=True):
        counts = torch.bincount(ids.long(), minlength=rows)
        assert len(counts) == rows and counts.min() > 0
        expected = torch.log1p(1 / torch.arange(1, rows + 1).double()) / math.log(rows + 1) * PIECE
        assert ((counts - expected).abs() < 6 * expected.sqrt()).all()


# -- intervals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("df", "exact"), [(1, 12.70620), (4, 2.77645), (9, 2.26216), (10, 2.22814), (30, 2.04227), (63, 1.99834)]
)
def test_quantiles_of_t(df: int, exact: float) -> None:
    assert t_quantile(df) == pytest.approx(exact, abs=5e-4)


def test_an_interval_by_hand() -> None:
    # Differences of the seeds: 0.01, 0.03. Of the blocks, averaged over the seeds: 0.01, 0.02, 0.03.
    difference = paired_difference(
        [(0.71, 0.70), (0.73, 0.70)],
        [([0.50, 0.61, 0.72], [0.50, 0.60, 0.70]), ([0.52, 0.63, 0.74], [0.50, 0.60, 0.70])],
    )
    assert difference.mean == pytest.approx(0.02)
    assert difference.seeds == pytest.approx(12.7062 * 0.01)  # s / √2 = 0.01
    assert difference.test == pytest.approx(4.3027 * 0.01 / math.sqrt(3))
    assert difference.half_width == pytest.approx(math.hypot(0.127062, 0.0248416), abs=1e-6)


def test_one_seed_says_nothing_about_others() -> None:
    assert paired_difference([(0.7, 0.6)], [([0.7, 0.7], [0.6, 0.6])]).half_width == math.inf
    assert half_width([1.0]) == math.inf


def test_the_interval_holds_for_new_seeds_and_new_samples() -> None:
    rng = np.random.default_rng(0)
    seeds, blocks, hits = 3, 30, 0
    for _ in range(300):
        of_seed, of_block = rng.normal(0, 1, seeds), rng.normal(0, math.sqrt(blocks), blocks)
        cells = of_seed[:, None] + of_block + rng.normal(0, 1, (seeds, blocks))
        zeros = [0.0] * blocks
        found = paired_difference([(float(row.mean()), 0.0) for row in cells], [(row.tolist(), zeros) for row in cells])
        hits += abs(found.mean) <= found.half_width
    assert hits / 300 >= 0.93


@pytest.mark.parametrize(
    ("mean", "half", "said"),
    [
        (-1e-4, 1e-4, "below 3e-4 if any"),
        (-2e-4, 0.5e-4, "yes, below 3e-4"),
        (-5e-4, 1e-4, "yes"),
        (-2e-4, 4e-4, "not resolved"),
        (0.0, math.inf, "not resolved"),
    ],
)
def test_verdicts(mean: float, half: float, said: str) -> None:
    assert verdict(Difference(mean, half, 0.0)) == said


def test_scores_of_the_whole_and_of_blocks() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(400, generator=generator)
    labels = (torch.rand(400, generator=generator) < logits.sigmoid()).float()
    scores = Scores.of(logits, labels, 4)
    assert scores.auc == auc(logits, labels)
    assert scores.block_auc == pytest.approx([auc(*p) for p in zip(logits.split(100), labels.split(100), strict=True)])
    assert np.mean(scores.block_logloss) == pytest.approx(scores.logloss)


# -- results -------------------------------------------------------------------------------------------------------


def test_results_are_kept_and_what_is_there_is_not_missing(tmp_path: Path) -> None:
    path = tmp_path / "new" / "r.json"
    results = Results(path)
    results.begin("planted", {"rows": (1, 2)}, {})
    results.add("planted", 0, BASELINE, Scores(0.7, 0.5, [0.7], [0.5]), row_bytes=68, measured_on="here")
    again = Results(path)
    again.begin("planted", {"rows": (1, 2)}, {})
    int8 = CONFIGS["int8/fp32"]
    assert again.missing("planted", 0, [BASELINE, int8]) == [int8]
    assert again.missing("planted", 1, [BASELINE]) == [BASELINE]
    with pytest.raises(SystemExit, match="with settings"):
        again.begin("planted", {"rows": (1, 3)}, {})


def test_only_seeds_that_both_have_are_compared() -> None:
    def run(config: Config, seed: int, auc: float) -> dict[str, Any]:
        scores = {"auc": auc, "logloss": 0.5, "block_auc": [auc, auc], "block_logloss": [0.5, 0.5]}
        return {"config": config.name, "seed": seed, "row_bytes": 1.0, **scores}

    narrow = CONFIGS["int8+hot/bf16"]
    lines = compare([run(BASELINE, 0, 0.7), run(BASELINE, 1, 0.8), run(narrow, 1, 0.79), run(narrow, 2, 0.1)])
    assert [(line.config, line.seeds) for line in lines] == [(BASELINE, 2), (narrow, 1)]
    assert lines[1].auc_difference.mean == pytest.approx(-0.01)


def test_settings() -> None:
    settings = PlantedSettings(samples=PIECE + 5000, batch_size=4096)
    batches = list(PlantedLog(SMALL).batches("train", settings.samples, settings.batch_size))
    assert settings.steps == len(batches)
    assert settings.schedule.factor(settings.steps) > 0
    assert settings.rows == ROWS and settings.samples == PIECE + 5000


# -- end to end ----------------------------------------------------------------------------------------------------


def run_benchmark(*args: str | Path, ok: bool = True) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.quality", *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == ok, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout + done.stderr


def parsed(path: Path) -> dict[str, Any]:
    """Strict JSON: no NaN, no infinity."""
    return json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_tiny_run_of_all_configurations(tmp_path: Path) -> None:
    file, page = tmp_path / "r.json", tmp_path / "page.md"
    tiny = ["--only", "planted", "--samples", "6000", "--test_samples", "6400", "--rows", *map(str, (*SMALL, 60, 70))]
    command = [*tiny, "--json", file, "--configs", *CONFIGS]
    assert f"seed 0: {len(CONFIGS)} models" in run_benchmark(*command, "--seeds", "1")
    first = parsed(file)["planted"]["runs"]
    assert {run["config"] for run in first} == set(CONFIGS)
    said = run_benchmark(*command, "--seeds", "2")
    assert "seed 0" not in said and f"seed 1: {len(CONFIGS)} models" in said
    data = parsed(file)["planted"]
    assert data["runs"][: len(first)] == first and len(data["runs"]) == 2 * len(first)
    assert data["settings"]["rows"] == [*SMALL, 60, 70]
    widths = {run["config"]: run["row_bytes"] for run in first}
    assert (widths["fp32/bf16"], widths["bf16/fp32"], widths["fp8/fp32"], widths["int8/fp32"]) == (68, 36, 20, 21)
    assert "models of" not in run_benchmark(*command, "--seeds", "2")
    assert "give another --json" in run_benchmark(*command, "--samples", "7000", ok=False)

    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    run_benchmark("--json", file, "--render", "--page", page)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    table = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert len(table) == 2 + len(CONFIGS) and len({len(cells) for cells in table}) == 1


def test_the_page_has_a_place_for_results() -> None:
    text = (ROOT / "docs" / "quality.md").read_text(encoding="utf-8")
    assert text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)


def test_a_tiny_run_on_a_raw_log(tmp_path: Path) -> None:
    log, file = tmp_path / "log.tsv", tmp_path / "r.json"
    write_synthetic_log(log, 6_000, seed=1)
    configs = ["--configs", "int8+hot/bf16"]
    run_benchmark("--only", "real", "--real_log", log, "--seeds", "1", "--json", file, *configs)
    runs = parsed(file)["real"]["runs"]
    assert [(run["seed"], run["config"]) for run in runs] == [(0, "fp32/fp32"), (0, "int8+hot/bf16")]
    assert all(len(run["block_auc"]) == 20 and run["auc"] > 0.5 for run in runs)
    assert all("commit" in run["measured_on"] and "torch" in run["measured_on"] for run in runs)
    assert runs[1]["auc"] != runs[0]["auc"] and runs[1]["row_bytes"] < runs[0]["row_bytes"]


def test_without_the_real_log_it_is_skipped_with_a_reason(tmp_path: Path) -> None:
    assert "real log skipped: its licence forbids shipping it" in run_benchmark("--only", "real")


def test_a_real_log_that_does_not_exist_is_said(tmp_path: Path) -> None:
    said = run_benchmark("--only", "real", "--real_log", tmp_path / "none.tsv", ok=False)
    assert f"--real_log {tmp_path / 'none.tsv'} does not exist" in said
