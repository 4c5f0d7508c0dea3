from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.data.skew.stack_distance import StackDistances, slot_of
from hotbed.errors import SpecError

SIZES = [0, 1, 2, 3, 5, 8, 13, 50]


def follow(distances: StackDistances, batches: list[list[int]]) -> StackDistances:
    rows = np.array([row for batch in batches for row in batch], dtype=np.int64)
    distances.follow(rows, np.cumsum([len(batch) for batch in batches], dtype=np.int64))
    return distances


def simulated(batches: list[list[int]], size: int) -> float:
    """Share of lookups that an LRU cache serves which is asked for all rows of a batch and then takes them up."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = lookups = 0
    for batch in batches:
        lookups += len(batch)
        hits += sum(row in cache for row in batch)
        for row in batch:
            cache[row] = None
            cache.move_to_end(row)
            if len(cache) > size:
                cache.popitem(last=False)
    return hits / lookups


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    follow(StackDistances(4), [[0], [0]])


@given(
    rows=st.integers(1, 20),
    batches=st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=12, unique=True), min_size=1, max_size=40),
)
def test_hit_rates_are_those_of_simulated_caches(rows: int, batches: list[list[int]]) -> None:
    batches = [list(dict.fromkeys(row % rows for row in batch)) for batch in batches]
    found = follow(StackDistances(rows), batches).hit_rates(SIZES)
    np.testing.assert_allclose(found, [simulated(batches, size) for size in SIZES], rtol=1e-12)


def test_the_time_line_is_moved_when_it_is_full() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.permutation(30)[: rng.integers(1, 9)].tolist() for _ in range(400)]
    distances = StackDistances(30)
    assert sum(map(len, batches)) > 10 * len(distances._tree)
    for batch in batches:  # in many calls, as data comes in pieces
        follow(distances, [batch])
    assert distances._clock[0] < len(distances._tree)
    np.testing.assert_allclose(distances.hit_rates(SIZES), [simulated(batches, size) for size in SIZES], rtol=1e-12)


def test_a_batch_finds_nothing_of_itself_and_larger_batches_find_less() -> None:
    assert follow(StackDistances(8), [[1, 2, 3], [4, 5]]).hit_rates([8]) == [0]
    # Row by row, 2 pushes 1 out of a cache of one row; in one batch both are looked up before they come.
    assert follow(StackDistances(8), [[1], [1, 2], [2]]).hit_rates([1]) == [0.5]


@pytest.mark.parametrize("bits", [0, 1, 2, 5, 12])
def test_the_hash_numbers_rows_without_a_gap(bits: int) -> None:
    n = 1 << bits
    distances = StackDistances(n, seed=3)
    assert sorted(slot_of(row, distances._hash) for row in range(n)) == list(range(n))


def zipf_stream(rows: int = 20_000, n: int = 300_000) -> tuple[np.ndarray, np.ndarray]:
    rows_of = ZipfLaw(rows, 1.05).draw((1, 7), np.arange(n, dtype=np.uint64))
    return rows_of, np.arange(1, n + 1)


def test_samples_estimate_the_whole_without_bias() -> None:
    sizes = [200, 1000, 4000, 10_000, 20_000]
    rows, ends = zipf_stream()
    exact = StackDistances(20_000)
    exact.follow(rows, ends)
    errors = []
    for seed in range(40):
        sample = StackDistances(20_000, rate=0.1, seed=seed)
        sample.follow(rows, ends)
        assert sample.rate == pytest.approx(0.1, abs=1e-4)
        assert sample.lookups == exact.lookups
        errors.append(sample.hit_rates(sizes) - exact.hit_rates(sizes))
    spread = np.std(errors, axis=0)
    assert (np.abs(np.mean(errors, axis=0)) < 4 * spread / 40**0.5).all()
    assert (spread > 0).all()  # other seeds sample other rows
    assert (np.abs(errors).max(axis=0) < [0.2, 0.08, 0.03, 0.015, 0.004]).all()


def test_without_lookups_there_is_no_hit_rate() -> None:
    assert np.isnan(StackDistances(5).hit_rates([1, 5])).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rows": 0}, "rows: got 0"),
        ({"rows": 5, "rate": 0.0}, "rate: got 0.0"),
        ({"rows": 5, "rate": 1.5}, "rate: got 1.5"),
        ({"rows": 5, "seed": -1}, "seed: got -1"),
    ],
)
def test_parameters_out_of_range(given: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        StackDistances(**given)  # pyright: ignore[reportArgumentType]
