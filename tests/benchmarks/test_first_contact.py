"""Protects the benchmark of first contact: planted logs are what they say, baselines learn without the test split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from benchmarks.first_contact import __main__ as program
from benchmarks.first_contact import dlrm
from benchmarks.first_contact.dlrm import searched_dlrm
from benchmarks.first_contact.encoding import Ragged, hashed, read, with_vocabulary
from benchmarks.first_contact.logistic import logistic_regression
from benchmarks.first_contact.logs import LOGS, planted
from benchmarks.first_contact.planted import auc, logloss
from hotbed.auc import auc as auc_of_hotbed


@pytest.mark.parametrize("name", LOGS)
def test_a_log_is_written_with_its_splits_and_can_be_learnt_from(name: str, tmp_path: Path) -> None:
    log = planted(name, scale=0.005)
    dataset = log.write(tmp_path)
    assert dataset.attainable is not None
    assert 0.6 < dataset.attainable.auc < 0.95
    frames = read(dataset).frames
    assert {split: len(frame) for split, frame in frames.items()} == log.sizes
    label = frames["train"][dataset.roles.label].cast(pl.Float64)
    assert abs(label.mean() - log.rate) < 0.1  # type: ignore[operator]
    again = planted(name, scale=0.005)
    other = again.write(tmp_path / "again")
    assert pl.read_parquet(other.splits["test"][0]).equals(pl.read_parquet(dataset.splits["test"][0]))
    assert again.write(tmp_path / "again") == other  # not drawn anew


def test_scores_are_those_of_their_definitions() -> None:
    rng = np.random.default_rng(0)
    scores, labels = np.round(rng.random(500), 2), rng.random(500) < 0.3
    expected = auc_of_hotbed(torch.from_numpy(scores), torch.from_numpy(labels.astype(np.float32)))
    assert auc(scores, labels) == pytest.approx(expected, abs=1e-12)
    assert logloss(np.array([0.25, 0.75]), np.array([0, 1])) == pytest.approx(-np.log(0.75))


def test_the_true_probabilities_are_the_best_scores(tmp_path: Path) -> None:
    log = planted("tiny")
    ((_, probability, clicked),) = log.chunks("test")
    noisy = probability + np.random.default_rng(0).normal(0, 0.1, len(probability))
    assert auc(noisy, clicked) < auc(probability, clicked)
    assert abs(float((probability - clicked).mean())) < 0.01  # they are the rates of the labels


def test_values_of_training_alone_have_rows(tmp_path: Path) -> None:
    dataset = planted("rare ids", scale=0.005).write(tmp_path)
    frames = read(dataset)
    splits, rows = with_vocabulary(frames, 2, quantiles=True)
    counts = frames.frames["train"]["movieId"].value_counts()
    assert rows[1] == 1 + len(counts.filter(pl.col("count") >= 2))
    unknown = ~frames.frames["test"]["movieId"].is_in(frames.frames["train"]["movieId"].implode())
    assert unknown.any()
    assert (splits["test"].ids[:, 1][unknown.to_numpy()] == 0).all()
    assert all((split.ids < np.array(rows)).all() for split in splits.values())
    assert hashed(frames, 8)["train"].ids.max() < 256


def test_lists_are_taken_by_sample() -> None:
    lists = Ragged(np.array([1, 2, 3, 4, 5]), np.array([0, 2, 2, 5]))
    taken = lists.take(np.array([2, 1, 0]))
    assert taken.values.tolist() == [3, 4, 5, 1, 2]
    assert taken.offsets.tolist() == [0, 3, 3, 5]


@pytest.mark.parametrize("name", ["tiny", "histories"])
def test_baselines_learn(name: str, tmp_path: Path) -> None:
    dataset = planted(name, scale=0.02).write(tmp_path)
    frames = read(dataset)
    assert dataset.attainable is not None
    linear, deep = logistic_regression(frames, epochs=1), searched_dlrm(frames, trials=2)
    for scores in (linear, deep):
        assert 0.53 < scores.auc < dataset.attainable.auc
    assert logistic_regression(frames, epochs=1) == linear


def test_trials_on_a_large_log_see_its_last_rows_and_the_best_are_repeated_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = read(planted("tiny").write(tmp_path))
    rows, seen = len(frames.frames["train"]), list[tuple[int, bool]]()
    trial = dlrm._trial

    def counted(splits: Any, *args: Any) -> Any:
        train = splits["train"]
        seen.append((len(train), bool((train.labels == labels[-len(train) :]).all())))
        return trial(splits, *args)

    labels = with_vocabulary(frames, 1, quantiles=False)[0]["train"].labels
    monkeypatch.setattr(dlrm, "_trial", counted)
    monkeypatch.setattr(dlrm, "MOST_SEARCHED", 300)
    searched_dlrm(frames, trials=4)
    assert seen == [(300, True)] * 4 + [(rows, True)] * 3


def test_the_program_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.json"
    options = ["--datasets", "tiny", "real tsv", "--trials", "1", "--work", str(tmp_path), "--json", str(file)]
    program.main([*options, "--models", "logistic"])
    said = capsys.readouterr().out
    assert "tiny, logistic, seed 0: AUC" in said
    assert "real tsv skipped: its licence forbids shipping it" in said
    first = json.loads(file.read_text())
    program.main([*options, "--models", "logistic"])
    assert "tiny, logistic" not in capsys.readouterr().out
    assert json.loads(file.read_text()) == first
    with pytest.raises(SystemExit, match="was measured with"):
        program.main([*options, "--scale", "0.5"])


@pytest.mark.full
def test_hotbed_is_run_unedited(tmp_path: Path) -> None:
    results = program.main(["--datasets", "tiny", "--models", "hotbed", "--seeds", "1", "--work", str(tmp_path)])
    assert results["tiny"]["hotbed"]["0"]["auc"] > 0.7


@pytest.mark.parametrize(
    ("own", "linear", "deep", "expected"),
    [
        ([0.7, 0.72], [0.7], [0.711], "reached"),
        ([0.7], [0.71], [0.7], "-0.0100 to logistic"),
        ([0.7], [0.71], [0.703], "-0.0100 to logistic, -0.0030 to DLRM"),
        ([], [0.7], [0.7], "–"),
    ],
)
def test_the_verdict(own: list[float], linear: list[float], deep: list[float], expected: str) -> None:
    assert program.verdict(own, linear, deep) == expected
