"""Lookups per row are counted exactly, and curves, orders and hit rates follow from the counts."""

from collections import OrderedDict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_cases import MIXED_SCHEMA, NUMBERED_SCHEMA, ListSource, mixed_batch, numbered_batch
from hypothesis import given
from hypothesis import strategies as st

import hotbed.data.skew.row_popularity
from hotbed.batch import Batch
from hotbed.data import Schema, SparseColumn, measure_popularity, read_hot_order
from hotbed.data.formats.zipf_source import ZipfLaw
from hotbed.data.skew.hot_cold import hot_order_file, write_hot_order
from hotbed.data.skew.row_popularity import SHARES, RowPopularity, count_accesses
from hotbed.data.skew.stack_distance import StackDistances
from hotbed.errors import DataError, SpecError
from hotbed.jagged import Jagged


def ids_by_sample(batch: Batch, features: list[str]) -> list[list[int]]:
    """Of every sample, the ids of some features one after the other."""
    taken = [batch.take(torch.tensor([i])).sparse for i in range(len(batch))]
    return [[int(v) for f in features for v in sample[f].values] for sample in taken]


def popularity(accesses: list[int]) -> RowPopularity:
    counts = np.array(accesses, dtype=np.int64)
    return RowPopularity(table="t", accesses=counts, batches=counts, distances=StackDistances(len(counts)))


@pytest.mark.parametrize("batch_size", [1, 7, 100])
@pytest.mark.parametrize(("sizes", "piece"), [((60,), 65_536), ((13, 27, 20), 65_536), ((13, 27, 20), 15)])
def test_counts_of_shared_ragged_and_multi_hot_features(
    batch_size: int, sizes: tuple[int, ...], piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`items` is looked up by a feature with two ids per sample and by one with any number."""
    monkeypatch.setattr(hotbed.data.skew.row_popularity, "_PIECE", piece)
    batch = mixed_batch(60)
    tables = measure_popularity(ListSource(batch, sizes, MIXED_SCHEMA), "train", batch_size=batch_size)
    assert [t.table for t in tables] == ["user", "items"]
    for table, features in zip(tables, (["user"], ["pair", "history"]), strict=True):
        samples = ids_by_sample(batch, features)
        groups = [[*chain(*samples[i : i + batch_size])] for i in range(0, 60, batch_size)]
        assert np.array_equal(table.accesses, np.bincount([*chain(*groups)], minlength=table.rows))
        together = np.concatenate([np.unique(group).astype(np.int64) for group in groups])
        assert np.array_equal(table.batches, np.bincount(together, minlength=table.rows))
        assert table.distances.lookups == len(together)
        # Whether rows of one batch come in this or another order does not matter to a cache that holds a batch.
        by_hand = StackDistances(table.rows)
        by_hand.follow(together, np.cumsum([len(set(group)) for group in groups]))
        assert table.distances.hit_rates([table.rows]) == by_hand.hit_rates([table.rows])


def test_a_batch_looks_rows_up_in_the_order_of_their_first_occurrence() -> None:
    ids = torch.tensor([3, 1, 3, 2, 2, 1, 0, 3])
    schema = Schema(sparse=(SparseColumn(name="a", rows=4),), labels=())
    source = ListSource(Batch(sparse=Jagged.from_dict({"a": ids})), [8], schema)
    (table,) = measure_popularity(source, "train", batch_size=4)
    by_hand = StackDistances(4)
    by_hand.follow(np.array([3, 1, 2, 2, 1, 0, 3]), np.array([3, 7]))
    assert table.distances.histogram.tolist() == by_hand.histogram.tolist() == [4, 1, 1, 1, 0]


def test_large_tables_are_sampled_and_small_ones_exact() -> None:
    tables = measure_popularity(ListSource(mixed_batch(60), [60], MIXED_SCHEMA), "train", sampled_rows=100)
    assert [t.distances.rate for t in tables] == [pytest.approx(0.1, abs=1e-3), 1]


def test_hot_order_breaks_ties_by_row() -> None:
    assert popularity([2, 5, 0, 5, 2, 0]).hot_order.tolist() == [1, 3, 0, 4, 2, 5]


def test_curves() -> None:
    table = popularity([1, 6, 0, 3])
    assert table.touched == 3
    assert table.top_share([0, 1, 2, 3, 4, 9]).tolist() == [0, 0.6, 0.9, 1, 1, 1]
    values = table.to_dict()
    assert values["accesses"] == 10
    assert values["cache_rows"] == [max(1, round(4 * share)) for share in SHARES]
    assert values["accesses_of_top_rows"][-2:] == [0.9, 1.0]  # 2 and 4 of 4 rows
    assert values["accesses_of_top_touched"][-2:] == [0.9, 1.0]  # 2 and 3 of 3


def test_static_hit_rates_count_a_row_once_per_batch() -> None:
    counts, batches = np.array([8, 2]), np.array([1, 2])
    table = RowPopularity(table="t", accesses=counts, batches=batches, distances=StackDistances(2))
    assert table.top_share([1]) == [0.8]
    assert table.static_hit_rates([1]) == [pytest.approx(1 / 3)]


def test_a_table_that_is_never_looked_up() -> None:
    values = popularity([0, 0, 0]).to_dict()
    assert values["zipf_exponent"] is None
    assert values["touched"] == values["accesses"] == 0
    for curve in ("accesses_of_top_rows", "accesses_of_top_touched", "lru", "static"):
        assert np.isnan(values[curve]).all()


@pytest.mark.parametrize("exponent", [0.6, 1.0, 1.05, 1.5])
def test_the_exponent_of_zipfs_law_is_found(exponent: float) -> None:
    rows = ZipfLaw(100_000, exponent).draw((1, 3), np.arange(500_000, dtype=np.uint64))
    found = popularity(np.bincount(rows, minlength=100_000).tolist()).zipf_exponent
    assert found == pytest.approx(exponent, abs=0.06)


def test_the_exponent_of_exact_counts() -> None:
    assert popularity([600, 300, 200, 150, 120, 100]).zipf_exponent == pytest.approx(1)
    assert popularity([50, 50, 50, 9]).zipf_exponent == pytest.approx(0, abs=1e-9)
    assert popularity([50, 9, 9]).zipf_exponent is None


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bad", "position"), [(1000, 41), (-1, 3)])
def test_an_id_that_is_no_row(bad: int, position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hotbed.data.skew.row_popularity, "_PIECE", 16)
    batch = mixed_batch(60)
    batch.sparse["user"].values[position] = bad
    message = f"split 'train', feature 'user', sample {position}: got id {bad:,}, expected 0 to 999"
    with pytest.raises(DataError, match=message):
        measure_popularity(ListSource(batch, [20, 40], MIXED_SCHEMA), "train", batch_size=8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size: got 0"),
        ({"sampled_rows": 0}, "sampled_rows: got 0"),
    ],
)
def test_options_out_of_range(options: dict[str, int], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        measure_popularity(ListSource(mixed_batch(6), [6], MIXED_SCHEMA), "train", **options)


def test_empty_data_and_unknown_splits() -> None:
    with pytest.raises(SpecError, match="split 'train': got no samples"):
        measure_popularity(ListSource(mixed_batch(0), [], MIXED_SCHEMA), "train")
    with pytest.raises(SpecError, match=r"split: got 'trian'"):
        measure_popularity(ListSource(mixed_batch(6), [6], MIXED_SCHEMA), "trian")


# -- files of the hot order ----------------------------------------------------------------------------------------


def test_hot_order_files(tmp_path: Path) -> None:
    order = np.array([2, 0, 1])
    write_hot_order(tmp_path, {"a/b c%": order, "..": order})
    assert sorted(f.name for f in tmp_path.iterdir()) == ["...npy", "a%2Fb c%25.npy"]
    assert np.load(tmp_path / "a%2Fb c%25.npy").dtype == np.dtype("<i4")
    assert read_hot_order(tmp_path, "a/b c%", 3).tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"t.npy does not exist"),
        (b"", "is not in NumPy's format, or is truncated"),
        (b"id,row\n", "is not in NumPy's format, or is truncated"),
        (np.array([1, 0], dtype=np.int32), r"t.npy: got int32 \[2\], expected int32 \[3\]"),
        (np.array([2, 1, 0]), r"t.npy: got int64 \[3\], expected int32 \[3\]"),
        (np.array([2, 1, 1], dtype=np.int32), "t.npy lacks row 0 of table 't'"),
        (np.array([0, 1, -1], dtype=np.int32), "t.npy lacks row 2 of table 't'"),
        (np.array([0, 3, 2], dtype=np.int32), "t.npy lacks row 1 of table 't'"),
    ],
)
def test_files_that_are_no_hot_order(tmp_path: Path, content: bytes | np.ndarray | None, message: str) -> None:
    file = hot_order_file(tmp_path, "t")
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        np.save(file, content)
    with pytest.raises(DataError, match=message):
        read_hot_order(tmp_path, "t", 3)


# -- counts of accesses ----------------------------------------------------------------------------------------------


def test_all_ids_of_all_features_of_a_table_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = mixed_batch(500)
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(hotbed.data.skew.row_popularity, "_PIECE", 200)
    source = ListSource(batch, [200, 1, 299], MIXED_SCHEMA)
    found = count_accesses(source, "train", progress=lambda done, total: seen.append((done, total)))
    assert seen == [(200, 500), (400, 500), (500, 500)]
    assert found.samples == 500
    expected: dict[str, list[int]] = {"user": batch.sparse["user"].values.tolist()}
    expected["items"] = batch.sparse["pair"].values.tolist() + batch.sparse["history"].values.tolist()
    assert found.counted.keys() == expected.keys()
    for table, ids in expected.items():
        counts = found.counted[table]
        assert counts.tolist() == np.bincount(ids, minlength=len(counts)).tolist()
        assert found.accesses[table] == len(ids)


def test_a_sample_is_of_all_parts_and_repeatable() -> None:
    source = ListSource(numbered_batch(9000), [3000, 3000, 3000])
    found = count_accesses(source, "train", sample=0.1, seed=3)
    assert found.samples == found.counted["a"].sum() == pytest.approx(900, abs=120)
    drawn = np.flatnonzero(found.counted["a"])
    assert np.histogram(drawn, bins=3, range=(0, 9000))[0].min() > 200
    assert np.array_equal(np.flatnonzero(found.counted["b"]), drawn + 1)  # whole samples
    again = count_accesses(source, "train", sample=0.1, seed=3)
    assert np.array_equal(again.counted["a"], found.counted["a"])
    other = count_accesses(source, "train", sample=0.1, seed=4)
    assert not np.array_equal(other.counted["a"], found.counted["a"])


def test_only_the_first_rows_of_large_tables_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    source = ListSource(numbered_batch(9000), [9000])
    whole = count_accesses(source, "train")
    monkeypatch.setattr(hotbed.data.skew.row_popularity, "COUNTED_ROWS", 50)
    found = count_accesses(source, "train")
    assert found.accesses == whole.accesses
    for table, counts in found.counted.items():
        assert counts.tolist() == whole.counted[table][:50].tolist()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample": 0.0}, "sample: got 0.0, expected .* above 0 and at most 1"),
        ({"sample": 5.0}, "sample: got 5.0"),
        ({"sample": 1e-9}, "sample: got 1e-09, .* 100 samples"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        count_accesses(ListSource(numbered_batch(100), [100]), "train", **options)


@pytest.mark.parametrize("sample", [1.0, 0.9])
@pytest.mark.parametrize("bad", [-1, 10_000])
def test_an_id_that_is_no_row_of_access_counts(bad: int, sample: float) -> None:
    batch = numbered_batch(100)
    batch.sparse["a"].values[7] = torch.tensor(bad)
    message = rf"split 'train', feature 'a', sample 7: got id {bad:,}, expected 0 to 9,999"
    with pytest.raises(DataError, match=message):
        count_accesses(ListSource(batch, [100], NUMBERED_SCHEMA), "train", sample=sample)


# -- distances in a stack: hit rates of LRU caches -------------------------------------------------------------------


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
