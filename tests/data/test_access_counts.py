from typing import Any

import numpy as np
import pytest
import torch
from data_cases import MIXED_SCHEMA, NUMBERED_SCHEMA, ListSource, mixed_batch, numbered_batch

import hotbed.data.skew.row_popularity
from hotbed.data.skew.row_popularity import count_accesses
from hotbed.errors import DataError, SpecError


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
        ({"sample": 1e-9}, "sample: got 1e-09, .* 100 samples of split 'train'"),
        ({"seed": -1}, "seed: got -1"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        count_accesses(ListSource(numbered_batch(100), [100]), "train", **options)


@pytest.mark.parametrize("sample", [1.0, 0.9])
@pytest.mark.parametrize("bad", [-1, 10_000])
def test_an_id_that_is_no_row(bad: int, sample: float) -> None:
    batch = numbered_batch(100)
    batch.sparse["a"].values[7] = torch.tensor(bad)
    message = rf"split 'train', feature 'a', sample 7: got id {bad:,}, expected 0 to 9,999"
    with pytest.raises(DataError, match=message):
        count_accesses(ListSource(batch, [100], NUMBERED_SCHEMA), "train", sample=sample)
