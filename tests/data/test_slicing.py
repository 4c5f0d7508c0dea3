import numpy as np
import torch
from data_cases import mixed_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from hotbed.batch import Batch
from hotbed.data.readers import merge_batches
from hotbed.testing.source_contract import assert_same


@settings(deadline=None)
@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4), data=st.data())
def test_join_is_take_then_concatenate(sizes: list[int], data: st.DataObject) -> None:
    """Against the plain operations of `Batch`, over one-hot, two-hot and ragged weighted ids."""
    batches = [mixed_batch(n + 1, seed) for seed, n in enumerate(sizes)]
    parts = []
    for batch in batches:
        start = data.draw(st.integers(0, len(batch)))
        parts.append((batch, start, data.draw(st.integers(start, len(batch)))))
    expected = Batch.concatenate([b.take(torch.arange(start, stop)) for b, start, stop in parts])
    assert_same(merge_batches(parts), expected)
    order = np.random.default_rng(0).permutation(len(expected))
    assert_same(merge_batches(parts, order), expected.take(torch.from_numpy(order)))
    some = order[: data.draw(st.integers(0, len(order)))]
    assert_same(merge_batches(parts, some), expected.take(torch.from_numpy(some)))


def test_joined_starts_are_those_that_validation_computes() -> None:
    batch = merge_batches([(mixed_batch(5), 1, 4), (mixed_batch(7), 0, 7)], np.arange(10)[::-1].copy())
    assert batch.sparse.starts == batch.sparse._validated_starts()
