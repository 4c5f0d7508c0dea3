"""Ids are checked before a kernel reads memory with them: refused, dropped, hashed, or remembered as checked."""

import pytest
import torch

from hotbed.embed import EmbeddingCollection
from hotbed.embed.ids import find_invalid_on_device, find_invalid_on_host
from hotbed.errors import BatchError
from hotbed.jagged import Jagged
from hotbed.specs import Feature, Table

from .collection_cases import ids, make


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"user": torch.tensor([1, 50])},
            r"got id 50 at sample 1, expected 0 to 49 for rows 50",
        ),
        ({"user": torch.tensor([-3, 1])}, "got id -3 at sample 0, expected at least 0"),
        ({"text": [[1], [2, 20]]}, "got id 20 at sample 1, expected 0 to 19 for rows 20"),
    ],
)
def test_ids_out_of_range_are_refused_by_feature_and_sample(change, message):
    batch = Jagged.from_dict(ids(2).to_dict() | change)
    with pytest.raises(BatchError, match=message):
        make()(batch)


def test_ids_out_of_range_are_found_in_one_hot_batches_too():
    collection = EmbeddingCollection([Table("t", rows=5, dim=4)], [Feature("a", table="t"), Feature("b", table="t")])
    with pytest.raises(BatchError, match="got id 5 at sample 2, expected 0 to 4 for rows 5"):
        collection(Jagged.from_dict({"a": torch.tensor([0, 1, 4]), "b": torch.tensor([0, 4, 5])}))


def test_bad_ids_are_dropped_or_hashed_and_counted():
    collection = EmbeddingCollection(
        [Table("t", rows=5, dim=4)],
        [Feature("d", table="t", on_bad_id="drop", pooling="mean"), Feature("h", table="t", on_bad_id="hash")],
    )
    wild = torch.tensor([[1, 9], [-1, -2], [3, 4]])
    batch = Jagged.from_dict({"d": wild, "h": wild}, {"d": torch.tensor([[1.0, 5], [5, 5], [2, 3]])})
    e = collection(batch)
    t = collection.weight("t")
    assert torch.equal(e["d"][0], t[1])
    assert not e["d"][1].any()
    torch.testing.assert_close(e["d"][2], (2 * t[3] + 3 * t[4]) / 2)
    assert e["h"].isfinite().all() and torch.equal(e["h"][2], t[3] + t[4])
    assert torch.equal(e["h"], collection(batch)["h"])
    assert collection.bad_ids == {"d": 6, "h": 6}


def test_ids_changed_after_a_check_are_checked_again():
    collection, batch = make(), ids()
    collection(batch)
    batch.values[0] = 50
    with pytest.raises(BatchError, match="got id 50 at sample 0, expected 0 to 49 for rows 50"):
        collection(batch)
    batch.values = batch.values.clone().clamp(max=19)
    collection(batch)
    batch.values = batch.values + 100
    with pytest.raises(BatchError, match="feature 'user': got id"):
        collection(batch)


def test_verify_marks_clean_batches_and_repairs_nothing():
    collection = EmbeddingCollection(
        [Table("t", rows=5, dim=4)], [Feature("a", table="t", on_bad_id="drop"), Feature("b", table="t")]
    )
    clean = Jagged.from_dict({"a": torch.tensor([1]), "b": torch.tensor([4])})
    assert collection.verify(clean) and collection.check(clean) is clean
    wild = Jagged.from_dict({"a": torch.tensor([9]), "b": torch.tensor([4])})
    assert not collection.verify(wild)
    assert not wild.verified and not collection.bad_ids
    with pytest.raises(BatchError, match="got id 5 at sample 0, expected 0 to 4 for rows 5"):
        collection.verify(Jagged.from_dict({"a": torch.tensor([1]), "b": torch.tensor([5])}))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_strided_ids_weights_and_offsets_are_read_right(backend):
    collection = EmbeddingCollection([Table("t", rows=9, dim=4)], [Feature("a", table="t")], backend=backend)
    values, weights = torch.arange(8)[::2], torch.rand(8)[::2]
    offsets = torch.tensor([[0, 9], [1, 9], [4, 9]]).T[:1]
    batch = Jagged(["a"], values, batch_size=2, fixed=[None], offsets=offsets, weights=weights)
    rows = collection.weight("t")[values] * weights[:, None]
    torch.testing.assert_close(collection(batch)["a"], torch.stack([rows[0], rows[1:].sum(0)]))


@pytest.mark.parametrize("samples", [0, 3])
def test_missing_features_are_named_where_no_sample_has_ids(samples):
    offsets = torch.zeros(1, samples + 1, dtype=torch.int64)
    empty = torch.empty(0, dtype=torch.int64)
    ids = Jagged(("user",), empty, batch_size=samples, fixed=[None], offsets=offsets)
    collection = make()
    for call in (collection.check, collection.verify, collection):
        with pytest.raises(BatchError, match="got 'text', expected one of user"):
            call(ids)
    assert not ids.verified


def test_ids_on_another_device_are_refused():
    with pytest.raises(BatchError, match=r"got device meta, expected cpu as for the tables"):
        make()(ids().to("meta"))


ON = {"host": find_invalid_on_host, "device": find_invalid_on_device}
"""Both with ids on the host; the second is what ids on a GPU go through."""


@pytest.mark.parametrize("find", ON.values(), ids=ON)
@pytest.mark.parametrize("rows", [5, 2**31, 2**32, 5_000_000_000, 2**63 - 1])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("fixed", [True, False])
def test_negative_ids_are_found_whatever_the_number_of_rows(find, rows, dtype, fixed):
    """As unsigned numbers of 32 bits they are less than some numbers of rows."""
    lists = [[3], [-2], [4]] if fixed else [[3, 1], [], [4, -2]]
    values = torch.tensor([i for bag in lists for i in bag], dtype=dtype)
    offsets = None if fixed else torch.tensor([[0, len(bag)] for bag in lists])
    ids = Jagged(("a", "b", "c"), values, batch_size=1, fixed=[1 if fixed else None] * 3, offsets=offsets)
    assert find(ids, dict.fromkeys(range(3), rows)) == {1 if fixed else 2}
    assert find(ids, {0: rows}) == set()


@pytest.mark.parametrize("find", ON.values(), ids=ON)
def test_ids_out_of_range_are_found_behind_features_without_ids(find):
    offsets = torch.tensor([[0, 0], [0, 2], [0, 0], [0, 1]])
    ids = Jagged(("a", "b", "c", "d"), torch.tensor([1, 9, 2]), batch_size=1, fixed=[None] * 4, offsets=offsets)
    assert find(ids, dict.fromkeys(range(4), 9)) == {1}
    assert find(ids, {0: 1, 1: 10, 2: 1, 3: 2}) == {3}


@pytest.mark.parametrize("find", ON.values(), ids=ON)
@pytest.mark.parametrize("fixed", [True, False])
def test_the_number_of_rows_is_the_first_id_that_is_out_of_range(find, fixed):
    offsets = None if fixed else torch.tensor([[0, 1], [0, 1]])
    ids = Jagged(("a", "b"), torch.tensor([8, 9]), batch_size=1, fixed=[1 if fixed else None] * 2, offsets=offsets)
    assert find(ids, {0: 9, 1: 9}) == {1}
