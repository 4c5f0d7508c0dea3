import numpy as np
import pytest

from hotbed.data.access_counts import CHUNK_ROWS, CHUNKS, ChunkEstimate
from hotbed.data.zipf_source import Zipf
from hotbed.errors import SpecError

ROWS, SAMPLES, DRAWN = 200_000, 400_000, CHUNKS * CHUNK_ROWS


@pytest.fixture(name="counts", scope="module")
def counts_fixture() -> np.ndarray:
    """Accesses of every row, by Zipf's law with exponent 1.05, one id per sample."""
    ids = Zipf(ROWS, 1.05).draw((1, 2, 3), np.arange(SAMPLES, dtype=np.uint64))
    return np.bincount(ids, minlength=ROWS)


def estimate(counts: np.ndarray, seed: int) -> ChunkEstimate:
    made = ChunkEstimate(len(counts), seed=seed)
    ids = np.repeat(np.arange(len(counts)), counts)
    for part in np.array_split(ids, 3):
        made.count(part, 0)
    made.count(ids[:0], SAMPLES)
    return made


def test_the_bound_holds_and_is_not_wide(counts: np.ndarray) -> None:
    """Of rows of which at least 100 are drawn; the bound is Student's of 99.9 %."""
    thresholds = [t for t in (1, 2, 3, 5, 8, 12) if (counts >= t).sum() * DRAWN / ROWS >= 100]
    assert len(thresholds) >= 4
    exact = np.array([(counts >= t).sum() for t in thresholds])
    drawings = (estimate(counts, seed) for seed in range(60))
    bounds = np.array([[drawing.rows_above(t / SAMPLES) for t in thresholds] for drawing in drawings])
    assert (bounds >= exact).mean() >= 0.99
    drawn = exact * DRAWN / ROWS
    assert (bounds.mean(axis=0) <= exact * (1 + 1.5 * 3.34 / np.sqrt(drawn))).all()


def test_accesses_are_estimated_without_bias(counts: np.ndarray) -> None:
    found = [estimate(counts, seed).accesses(ROWS) for seed in range(60)]
    assert np.mean(found) == pytest.approx(1, abs=3 * np.std(found) / np.sqrt(60))
    assert estimate(counts, 0).accesses(0) == 0


def test_a_lower_threshold_never_means_fewer_rows(counts: np.ndarray) -> None:
    made = estimate(counts, 1)
    found = [made.rows_above(t / SAMPLES) for t in (10**9, 100, 30, 10, 5, 3, 2, 1, 0)]
    assert found == sorted(found)
    assert found[0] == 0
    assert found[-1] == ROWS


def test_neighbouring_rows_would_miss_the_popular_ones(counts: np.ndarray) -> None:
    """Why chunks are rows drawn at random: rows are numbered by falling popularity."""
    threshold = 40
    exact = int((counts >= threshold).sum())
    assert exact < CHUNK_ROWS
    first = np.arange(0, ROWS - CHUNK_ROWS, CHUNK_ROWS)
    random = np.random.default_rng(0)
    missed = sum(
        all((counts[c : c + CHUNK_ROWS] < threshold).all() for c in random.choice(first, CHUNKS, replace=False))
        for _ in range(100)
    )
    assert missed > 50
    assert all(estimate(counts, seed).rows_above(threshold / SAMPLES) > 0 for seed in range(20))


def test_small_tables_are_to_be_counted() -> None:
    with pytest.raises(SpecError, match="a table of 35,840 rows has no more than the 35,840 that are drawn; count"):
        ChunkEstimate(DRAWN)
